"""Data in the formats of other loaders: million tokens per CPU-second by Overlord and by the format's own loader.

    python -m bench formats [--quick] [--json] [--rounds N] [--seconds S] [--formats NAME ...]

"packed": Overlord runs a whole job, without threads: shuffled, packed into steps of 8 x 8,192 with labels, positions,
`cu_seqlens` and loss masks. The samples of the other loader are packed to the same fields by `bench/peers/packing.py`.
"read": samples alone. Overlord reads units in a shuffled order. Both sum every token.

- megatron: `IndexedDataset` of megatron-core, document by document in a shuffled order. And "by GPTDataset": the samples
  that Megatron itself trains on, packed by its `GPTDataset` without regard to documents, eight a batch by torch's
  `DataLoader`.
- mds: `StreamingDataset` of mosaicml-streaming, local and shuffled.
- huggingface: `datasets` with `with_format("numpy")`, in batches of 1,000 rows, in the order of its files.
- lance: `LanceDataset` of `lance.torch`, in batches of 1,024 rows, in the order of its files, left as Arrow: its default,
  which makes tensors, refuses lists of different lengths.
- lance_blocks: the same tokens in rows of 1,024, and `LanceDataset` with its defaults, which makes a tensor of each batch.

bench/requirements-formats.txt has the libraries. One that is not installed is told, and its format left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Competitor, Setting, Table, compare, options

DATA = Path(__file__).parent / ".data" / "formats"
NUM_DOCUMENTS = 40_000
BLOCK = 1024
COMPETITORS = (Competitor("overlord", "overlord"), Competitor("its own loader", "own"))
TABLE = Table("tokens_per_cpu_s", 1e6, "M tokens / CPU s", baselines=("overlord",))
LIBRARIES = {
    "megatron": "megatron.core",
    "mds": "streaming",
    "huggingface": "datasets",
    "lance": "lance",
    "lance_blocks": "lance",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--formats", nargs="+", choices=tuple(LIBRARIES), default=tuple(LIBRARIES))
    mine, rest = parser.parse_known_args(argv)
    given = options(__doc__, rest, seconds=3.0)
    found = [name for name in mine.formats if _is_installed(name)]
    for name in found:
        if not (DATA / name / "done").exists():
            (DATA / name).mkdir(parents=True, exist_ok=True)
            WRITERS[name](DATA / name)
            (DATA / name / "done").touch()
    settings = [
        Setting(f"{name}, {what}", name, ("--seconds", str(given.seconds), "--what", what), "bench.run_format")
        for name in found
        for what in (("read",) if name == "lance_blocks" else ("packed", "read"))
    ]
    if "megatron" in found:
        arguments = ("--seconds", str(given.seconds), "--what", "gpt_dataset")
        settings.append(Setting("megatron, packed by GPTDataset", "megatron", arguments, "bench.run_format"))
    return compare(settings, given.chosen(COMPETITORS), TABLE, given)


def _is_installed(name: str) -> bool:
    library = LIBRARIES[name]
    try:
        if importlib.util.find_spec(library) is not None:
            return True
    except ImportError:
        pass
    print(f"{name}: {library} is not installed, see bench/requirements-formats.txt", file=sys.stderr)
    return False


def documents() -> list[np.ndarray]:
    """Documents of 1,000 tokens on average."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.gamma(0.9, 1100, NUM_DOCUMENTS).astype(int), 1)
    return [rng.integers(0, 50_000, length).astype(np.uint16) for length in lengths]


def write_megatron(folder: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    for tokens in documents():
        builder.add_item(torch.from_numpy(tokens))
        builder.end_document()
    builder.finalize(str(folder / "text.idx"))


def write_mds(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder / "text"), columns={"tokens": "ndarray:uint16"}, hashes=["sha1"]) as writer:
        for tokens in documents():
            writer.write({"tokens": tokens})


def write_huggingface(folder: Path) -> None:
    import datasets

    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})
    datasets.Dataset.from_dict({"tokens": documents()}, features=features).save_to_disk(str(folder / "text"))


def write_lance(folder: Path) -> None:
    import lance
    import pyarrow as pa

    table = pa.table({"tokens": pa.array(documents(), pa.list_(pa.uint16()))})
    lance.write_dataset(table, str(folder / "text.lance"), max_rows_per_file=10_000)


def write_lance_blocks(folder: Path) -> None:
    import lance
    import pyarrow as pa

    tokens = np.concatenate(documents())
    blocks = pa.FixedSizeListArray.from_arrays(pa.array(tokens[: len(tokens) // BLOCK * BLOCK]), BLOCK)
    lance.write_dataset(pa.table({"tokens": blocks}), str(folder / "text.lance"), max_rows_per_file=10_000)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "megatron": write_megatron,
    "mds": write_mds,
    "huggingface": write_huggingface,
    "lance": write_lance,
    "lance_blocks": write_lance_blocks,
}

if __name__ == "__main__":
    sys.exit(main())
