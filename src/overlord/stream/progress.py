"""`Progress`: the position of a run (step, a cursor per source, the mixture's balance, carried samples), and its JSON
form."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.records import record
from overlord.stream.facts import COLUMNS as SAMPLE_COLUMNS
from overlord.stream.facts import (
    LOSS_EXTRA,
    Floats,
    ImageSizes,
    Ints,
    Samples,
)
from overlord.stream.plain import (
    MOST,
    DamagedError,
    as_list,
    as_mapping,
    number,
    short_repr,
    text,
    whole,
    with_keys,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

COLUMNS = ("chunk", "row", "samples", "tokens", "since", "lead", "weights", "read_once")


@record
class Progress:
    """The position of a run before `step`. Arrays have one entry per source, in the order of `names`.

    The next sample of source i is row `row[i]` of chunk `chunk[i]`; a row past the end of the chunk means the next chunk.
    `since` is what was drawn from the source since the weights last changed, in the mixture's unit, and `lead` how far ahead
    of its share it was at that moment. Together they are its exact position in virtual time, wherever a run is cut.
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
        """A copy for another set of sources: new ones start at their beginning, those that are missing are dropped."""
        if names == self.names:
            return self
        old = {name: i for i, name in enumerate(self.names)}
        kept = [(new, old[name]) for new, name in enumerate(names) if name in old]
        new_index, old_index = np.array(kept, np.int64).reshape(-1, 2).T
        fresh = Progress.start(names)
        columns: dict[str, Any] = {}
        for column in COLUMNS:
            values = getattr(fresh, column)
            values[new_index] = getattr(self, column)[old_index]
            columns[column] = values
        return replace(fresh, step=self.step, carried=self.carried.for_sources(names), **columns)

    def to_plain(self) -> dict[str, Any]:
        """The progress as numbers and strings, for JSON. Floats survive the round trip exactly."""
        columns = zip(self.names, *(getattr(self, column).tolist() for column in COLUMNS), strict=True)
        return {
            "step": self.step,
            "sources": {name: values for name, *values in columns},
            "carried": plain_samples(self.carried),
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Progress:
        """The inverse of `to_plain`. Raises DamagedError for anything else."""
        sources = as_mapping(plain["sources"], "sources")
        kinds = (*[np.int64] * 5, np.float64, np.float64, np.bool_)
        rows = [_source_row(values, f"sources.{name}") for name, values in sources.items()]
        columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
        arrays: dict[str, Any] = {
            column: np.array(values, kind) for column, values, kind in zip(COLUMNS, columns, kinds, strict=True)
        }
        progress = Progress(
            step=whole(plain["step"], "step"), names=tuple(sources), carried=Samples.none(tuple(sources)), **arrays
        )
        return replace(progress, carried=progress.carried_from_plain(plain["carried"]))

    def carried_from_plain(self, plain: Mapping[str, Any] | None) -> Samples:
        """Carried samples from their plain form. Raises DamagedError for samples that this progress has not drawn yet."""
        carried = samples_from_plain(plain, self.names)
        chunk, row = self.chunk[carried.source], self.row[carried.source]
        ahead = np.flatnonzero((carried.chunk > chunk) | ((carried.chunk == chunk) & (carried.row >= row)))
        if len(ahead):
            i = int(ahead[0])
            raise DamagedError(
                f"carried.rows holds row {carried.row[i]} of chunk {carried.chunk[i]} of source "
                f"{self.names[carried.source[i]]!r}, which is drawn only up to row {row[i]} of chunk {chunk[i]}"
            )
        return carried


def _source_row(values: Any, at: str) -> list[Any]:
    """Validate the values of one source, in the order of COLUMNS."""
    values = as_list(values, at, length=len(COLUMNS))
    counts = [whole(value, f"{at}[{i}] ({COLUMNS[i]})") for i, value in enumerate(values[:5])]
    lead, weight, read_once = values[5:]
    if type(read_once) is not bool:
        raise DamagedError(f"{at}[7] (read_once) must be true or false, it is {short_repr(read_once)}")
    return [*counts, number(lead, f"{at}[5] (lead)"), number(weight, f"{at}[6] (weights)", least=0), read_once]


def plain_samples(samples: Samples) -> dict[str, Any] | None:
    """Samples as numbers and strings; None if there are none. Columns of sizes that are all 0 are left out, because whether
    they exist depends on the tables that the samples have been in."""
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
    """The inverse of `plain_samples`. Raises DamagedError for anything else."""
    if plain is None:
        return Samples.none(names)
    plain = with_keys(plain, "carried", needed=("names", "sizes", "rows"), allowed=("images",))
    own = tuple(
        text(name, f"carried.names[{i}]", among=names) for i, name in enumerate(as_list(plain["names"], "carried.names"))
    )
    kinds = tuple(text(name, f"carried.sizes[{i}]") for i, name in enumerate(as_list(plain["sizes"], "carried.sizes")))
    if len(set(own)) < len(own) or len(set(kinds)) < len(kinds):
        raise DamagedError("carried names a source or a size twice")
    rows = as_list(plain["rows"], "carried.rows")
    if not rows:
        raise DamagedError("carried.rows is empty: where nothing is carried, carried is null")
    n = len(SAMPLE_COLUMNS)
    if not _are_samples(rows, n + len(kinds), len(own)):
        for i, row in enumerate(rows):  # finds the bad row, and names it
            _check_carried(as_list(row, f"carried.rows[{i}]", length=n + len(kinds)), f"carried.rows[{i}]", len(own), kinds)
    columns = np.array(rows, np.int64).T
    images = None if plain.get("images") is None else _images_from_plain(plain["images"], len(rows))
    sizes = dict(zip(kinds, columns[n:], strict=True))
    return Samples.of_columns(own, *columns[:n], sizes=sizes, images=images).for_sources(names)


def _are_samples(rows: Sequence[Any], width: int, num_sources: int) -> bool:
    """True if all rows would pass `_check_carried`. Vectorized, because a log has hundreds of rows per step."""
    if any(type(row) is not list or len(row) != width for row in rows) or {type(v) for row in rows for v in row} != {int}:
        return False
    try:
        columns = np.array(rows, np.int64).T
    except OverflowError:
        return False
    start, stop, tokens, loss_tokens = columns[3:7]
    are_whole = ((tokens == 0) | (tokens == stop - start)) & (stop >= start) & (loss_tokens <= tokens)
    return bool(are_whole.all() and columns.min() >= 0 and columns.max() <= MOST and columns[0].max() < num_sources)


def _check_carried(row: Sequence[Any], at: str, num_sources: int, kinds: Sequence[str]) -> None:
    for name, value in zip(SAMPLE_COLUMNS, row, strict=False):
        whole(value, f"{at} ({name})", most=num_sources - 1 if name == "source" else MOST)
    for kind, value in zip(kinds, row[len(SAMPLE_COLUMNS) :], strict=True):
        whole(value, f"{at} ({kind})", least=-MOST if kind == LOSS_EXTRA else 0)
    start, stop, tokens, loss_tokens = row[3:7]
    if stop < start or tokens not in (0, stop - start) or loss_tokens > tokens:
        raise DamagedError(
            f"{at} is no sample: it has {tokens} tokens, {loss_tokens} of them with loss, from {start} to {stop}"
        )


def _images_from_plain(plain: Any, num_samples: int) -> ImageSizes:
    images = as_list(plain, "carried.images", length=num_samples)
    for i, each in enumerate(images):
        for size in as_list(each, f"carried.images[{i}]"):
            for side in as_list(size, f"carried.images[{i}]", length=2):
                whole(side, f"carried.images[{i}]")
    return ImageSizes.of(images)
