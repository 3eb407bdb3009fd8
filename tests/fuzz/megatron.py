"""Pairs of .bin and .idx, against a reading of the index value by value."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from overlord.formats import MegatronBin
from tests.fuzz.folders import FolderTarget, folder_seed
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import MEGATRON_TYPES, RECORDED

_TYPES = dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), 1))


def make_seeds() -> Sequence[Seed]:
    """As megatron-core wrote them."""
    folder = RECORDED / "megatron"
    names = [*MEGATRON_TYPES, "int32_modes"]
    pairs = {name: {f"a.{end}": (folder / f"{name}.{end}").read_bytes() for end in ("idx", "bin")} for name in names}
    return [folder_seed(name, files, aim=("a.idx",)) for name, files in pairs.items()]


def source(folder: Path, files: Mapping[str, bytes]) -> MegatronBin:
    return MegatronBin(folder / "a", columns=("tokens", "sequence_lengths"), unit_bytes=40)


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    try:
        index, tokens = files["a.idx"], files["a.bin"]
        magic, version, code, num_sequences, num_boundaries = struct.unpack_from("<9sQBQQ", index)
        if magic != b"MMIDIDX\0\0" or version != 1 or num_sequences > 1000 or num_boundaries > 1000:
            raise OracleFailed("the header is wrong")
        dtype = np.dtype(_TYPES[code])
        lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
        places = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
        boundaries = struct.unpack_from(f"<{num_boundaries}q", index, 34 + 12 * num_sequences)
        sequences = []
        for place, length in zip(places, lengths, strict=True):
            if min(place, length) < 0 or place + length * dtype.itemsize > len(tokens):
                raise OracleFailed("a sequence lies outside")
            sequences.append(np.frombuffer(tokens, dtype, length, place) if length else np.zeros(0, dtype))
    except (KeyError, struct.error, ValueError, IndexError) as error:
        raise OracleFailed(str(error)) from error
    if not boundaries or boundaries[0] != 0 or boundaries[-1] != num_sequences or sorted(boundaries) != list(boundaries):
        raise OracleFailed("the documents are in disorder")
    documents = [sequences[a:b] for a, b in pairwise(boundaries)]
    rows = [np.concatenate([np.zeros(0, dtype), *document]) for document in documents]
    table = pa.table(
        {
            "tokens": pa.array(rows, pa.list_(pa.from_numpy_dtype(dtype))),
            "sequence_lengths": pa.array([list(map(len, document)) for document in documents], pa.list_(pa.int32())),
        }
    )
    return [answer_of(table)]


TARGET = FolderTarget("megatron", make_seeds, source, oracle)
