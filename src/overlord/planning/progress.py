"""The whole progress of a run: a step number, one cursor per source, the mixture's balance, and carried samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overlord.planning.facts import COLUMNS as SAMPLE_COLUMNS
from overlord.planning.facts import Floats, Ints, Samples
from overlord.planning.images.image_sizes import ImageSizes
from overlord.records import record

COLUMNS = ("chunk", "row", "samples", "tokens", "since", "lead", "weights", "read_once")


@record
class Progress:
    """Where a run stands before `step`. Arrays have one entry per source, in the order of `names`.

    The next sample of source i is row `row[i]` of chunk `chunk[i]`; a row past the chunk's end means the next chunk.
    `since` counts what was drawn (in the mixture's unit) since the weights last changed, and `lead` how far ahead of its
    share the source was at that moment: together they are its position in virtual time, exactly, wherever a run is cut.
    `read_once` marks finite sources that have been read to their end.
    """

    step: int
    names: tuple[str, ...]
    chunk: Ints
    row: Ints
    samples: Ints
    tokens: Ints
    since: Ints
    lead: Floats
    weights: Floats
    read_once: NDArray[np.bool_]
    carried: Samples

    @staticmethod
    def start(names: tuple[str, ...]) -> Progress:
        def zeros() -> Ints:
            return np.zeros(len(names), np.int64)

        return Progress(
            step=0,
            names=names,
            chunk=zeros(),
            row=zeros(),
            samples=zeros(),
            tokens=zeros(),
            since=zeros(),
            lead=np.zeros(len(names)),
            weights=np.zeros(len(names)),
            read_once=np.zeros(len(names), bool),
            carried=Samples.none(names),
        )

    def for_sources(self, names: tuple[str, ...]) -> Progress:
        """The same progress for another set of sources: new ones start at their beginning, others are forgotten."""
        if names == self.names:
            return self
        old = {name: i for i, name in enumerate(self.names)}
        kept = [(new, old[name]) for new, name in enumerate(names) if name in old]
        new_index, old_index = (np.array(side, np.int64) for side in zip(*kept, strict=True)) if kept else ([], [])
        fresh = Progress.start(names)
        columns = {}
        for column in COLUMNS:
            values = getattr(fresh, column)
            values[new_index] = getattr(self, column)[old_index]
            columns[column] = values
        return replace(fresh, step=self.step, carried=self.carried.for_sources(names), **columns)

    def to_plain(self) -> dict[str, Any]:
        """The same as numbers and strings, for JSON; every float comes back as it was."""
        columns = zip(self.names, *(getattr(self, column).tolist() for column in COLUMNS), strict=True)
        return {
            "step": self.step,
            "sources": {name: values for name, *values in columns},
            "carried": plain_samples(self.carried),
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Progress:
        """Raises KeyError, TypeError, ValueError or IndexError for what `to_plain` did not make."""
        names = tuple(plain["sources"])
        kinds = (*[np.int64] * 5, np.float64, np.float64, np.bool_)
        columns = list(zip(*plain["sources"].values(), strict=True)) or [()] * len(COLUMNS)
        arrays: dict[str, Any] = {
            column: np.array(values, kind) for column, values, kind in zip(COLUMNS, columns, kinds, strict=True)
        }
        carried = samples_from_plain(plain["carried"], names)
        return Progress(step=int(plain["step"]), names=names, carried=carried, **arrays)


def plain_samples(samples: Samples) -> dict[str, Any] | None:
    """Samples as numbers and strings; None where there are none. Sizes that are all 0 are left out: whether samples have
    such a column depends on which others they were once in a table with."""
    if len(samples) == 0:
        return None
    sizes = {name: column.tolist() for name, column in sorted(samples.sizes.items()) if column.any()}
    plain = {
        "names": list(samples.source_names),
        "sizes": list(sizes),
        "rows": [list(row) for row in zip(*samples.table.tolist(), *sizes.values(), strict=True)],
    }
    images = samples.images
    return plain if images is None or not images.count.any() else {**plain, "images": images.to_lists()}


def samples_from_plain(plain: Mapping[str, Any] | None, names: tuple[str, ...]) -> Samples:
    if plain is None:
        return Samples.none(names)
    columns = np.array(plain["rows"], np.int64).T
    n = len(SAMPLE_COLUMNS)
    sizes = dict(zip(plain["sizes"], columns[n:], strict=True))
    images = plain.get("images")
    images = None if images is None else ImageSizes.of(images)
    return Samples.of_columns(tuple(plain["names"]), *columns[:n], sizes=sizes, images=images).for_sources(names)
