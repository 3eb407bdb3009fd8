"""Reading tokenised Parquet with pyarrow and mixing the sources, shared by every peer that reads by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

Document = NDArray[np.int32]


class ParquetSource:
    """One source's documents, endlessly. Opened when first read; holds one decoded row group at a time.

    Share `share` of `shares` owns every `shares`-th row group. Row groups are permuted each epoch and rows inside a
    row group, as every training loader does one way or another.
    """

    def __init__(self, path: str, share: int = 0, shares: int = 1, seed: int = 0) -> None:
        self.path = path
        self.share = share
        self.shares = shares
        self.seed = seed

    def __iter__(self) -> Iterator[Document]:
        file = pq.ParquetFile(self.path)
        rng = np.random.default_rng([self.seed, self.share])
        groups = np.arange(self.share, file.num_row_groups, self.shares)
        while True:
            for group in rng.permutation(groups).tolist():
                yield from documents(file, group, rng)


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


def choices(weights: Sequence[float], rng: np.random.Generator) -> Iterator[int]:
    """The source of each next document, drawn in blocks because one draw costs as much as a thousand."""
    share = np.asarray(weights) / np.sum(weights)
    while True:
        yield from rng.choice(len(share), size=4096, p=share).tolist()


def mixed(sources: Sequence[Iterator[Document]], weights: Sequence[float], seed: int = 0) -> Iterator[Document]:
    for choice in choices(weights, np.random.default_rng([seed, 1])):
        yield next(sources[choice])


def mixed_parquet(
    paths: Sequence[str], weights: Sequence[float], share: int = 0, shares: int = 1, seed: int = 0
) -> Iterator[Document]:
    """Mixed documents of all sources, as one worker of `shares` reads them."""
    sources = [iter(ParquetSource(path, share, shares, seed + index)) for index, path in enumerate(paths)]
    return mixed(sources, weights, seed + share)


def mixing_weights(sources: int) -> list[float]:
    """1, 2, 3, 4, 1, 2, ...: uneven, as mixtures are."""
    return [1.0 + index % 4 for index in range(sources)]
