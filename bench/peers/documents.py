"""Reading tokenised Parquet with pyarrow and mixing the sources, shared by every peer that reads by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Document = NDArray[np.int32]
Read = Callable[[pq.ParquetFile, int, np.random.Generator], Iterator[Document]]
"""Documents of one row group, in a random order."""


class ParquetSource:
    """One source's documents, endlessly. Opened when first read; holds one file and one decoded row group at a time.

    Share `share` of `shares` owns every `shares`-th row group of its files, which have equally many. Row groups are permuted
    each epoch and rows inside a row group, as every training loader does one way or another.
    """

    def __init__(
        self, paths: str | Sequence[str], share: int = 0, shares: int = 1, seed: int = 0, read: Read | None = None
    ) -> None:
        self.paths = [paths] if isinstance(paths, str) else paths
        self.share = share
        self.shares = shares
        self.seed = seed
        self.read = read or documents

    def __iter__(self) -> Iterator[Document]:
        opened, file = 0, pq.ParquetFile(self.paths[0])
        each = file.num_row_groups
        if self.share >= each * len(self.paths):
            raise ValueError(f"{self.paths[0]} has {each} row groups, too few for {self.shares} readers")
        rng = np.random.default_rng([self.seed, self.share])
        groups = np.arange(self.share, each * len(self.paths), self.shares)
        while True:
            for group in rng.permutation(groups).tolist():
                if group // each != opened:
                    opened, file = group // each, pq.ParquetFile(self.paths[group // each])  # pyright: ignore[reportArgumentType]
                yield from self.read(file, group % each, rng)


def documents(file: pq.ParquetFile, row_group: int, rng: np.random.Generator) -> Iterator[Document]:
    """The documents of one row group in a random order: views into its one decoded buffer."""
    # One column of one row group is one task: a thread pool would only add hand-overs.
    table = file.read_row_group(row_group, columns=["tokens"], use_threads=False)
    column = cast(pa.ListArray, table.column(0).chunk(0))
    values = column.values.to_numpy()
    offsets = column.offsets.to_numpy()
    order = rng.permutation(len(column))
    begins, ends = offsets[order].tolist(), offsets[order + 1].tolist()
    for begin, end in zip(begins, ends, strict=True):
        yield values[begin:end]


class Encoding:
    """Documents of raw text, encoded by the BPE library some at a time, so that the first come soon. Loaded where used."""

    def __init__(self, tokenizer: str) -> None:
        self.tokenizer = tokenizer
        self._loaded: Any = None

    def __call__(self, file: pq.ParquetFile, row_group: int, rng: np.random.Generator) -> Iterator[Document]:
        if self._loaded is None:
            # Workers are as many as cores already: threads of the library would only get into each other's way.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            import tokenizers

            self._loaded = tokenizers.Tokenizer.from_file(self.tokenizer)
        texts = file.read_row_group(row_group, columns=["text"], use_threads=False).column(0).to_pylist()
        for numbers in _some_at_a_time(rng.permutation(len(texts)).tolist()):
            # The fast call computes no offsets, which nobody needs here.
            encoded = self._loaded.encode_batch_fast([texts[i] for i in numbers], add_special_tokens=False)
            for each in encoded:
                yield np.array(each.ids, np.int32)


def _some_at_a_time(numbers: list[int], most: int = 16) -> Iterator[list[int]]:
    for begin in range(0, len(numbers), most):
        yield numbers[begin : begin + most]


def choices(weights: Sequence[float], rng: np.random.Generator) -> Iterator[int]:
    """The source of each next document, drawn in blocks because one draw costs as much as a thousand."""
    share = np.asarray(weights) / np.sum(weights)
    while True:
        yield from rng.choice(len(share), size=4096, p=share).tolist()


def mixed(sources: Sequence[Iterator[Document]], weights: Sequence[float], seed: int = 0) -> Iterator[Document]:
    for choice in choices(weights, np.random.default_rng([seed, 1])):
        yield next(sources[choice])


def mixed_parquet(
    paths: Sequence[str | Sequence[str]],
    weights: Sequence[float],
    share: int = 0,
    shares: int = 1,
    *,
    read: Read | None = None,
) -> Iterator[Document]:
    """Mixed documents of all sources, as one worker of `shares` reads them."""
    sources = [iter(ParquetSource(path, share, shares, seed, read)) for seed, path in enumerate(paths)]
    return mixed(sources, weights, share)


def mixing_weights(sources: int) -> list[float]:
    """1, 2, 3, 4, 1, 2, ...: uneven, as mixtures are."""
    return [1.0 + index % 4 for index in range(sources)]
