"""Reads single documents of a job, as they are stored: before transforms, and without a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.errors import SourceError, SpecError
from overlord.planlog.lineage_run import RowPlace, SourceUnits, columns_of, locate_row
from overlord.sources.files import open_reader, units_of
from overlord.sources.webdataset import KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit
    from overlord.sources.reading import ReadResult


@dataclass(frozen=True, slots=True)
class DocumentNames:
    """What a document and its images are called in the data."""

    key: str | None
    """The key of a sample of a WebDataset."""
    images: tuple[str, ...]


class DocumentReader:
    """Reads rows of the units that a job's sources list now."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._listed: dict[str, Sequence[Unit]] = {}
        self._last: tuple[str, int, ReadResult] | None = None

    def source(self, name: str) -> Source:
        if name not in self._job.sources:
            known = ", ".join(map(repr, self._job.sources))
            raise SpecError(f"there is no source {name!r}; the job's sources are {known}")
        return self._job.sources[name]

    def number(self, name: str) -> int:
        """The number of a source among those of the job."""
        self.source(name)
        return list(self._job.sources).index(name)

    def units(self, name: str) -> Sequence[Unit]:
        if name not in self._listed:
            source = self.source(name)
            try:
                self._listed[name] = units_of(source)
            except Exception as error:
                error.add_note(f"while listing source {name!r}")
                raise
        return self._listed[name]

    def locate(self, name: str, file: str, row: int) -> RowPlace:
        """The unit and row of a row of a file; see `locate_row`."""
        return locate_row(SourceUnits(**columns_of(self.units(name))), name, file, row)

    def row(self, name: str, place: RowPlace) -> dict[str, Any]:
        """The columns of a row."""
        table, at = self._find(name, place)
        return {column: table.column(column)[at].as_py() for column in table.column_names}

    def names(self, name: str, place: RowPlace) -> DocumentNames:
        """The key and the image names of a row. Pixels are not read where the format allows it."""
        table, at = self._find(name, place)
        key = table.column(KEY)[at].as_py() if KEY in table.column_names else None
        column = getattr(self.source(name).decode, "column", None)
        if column not in table.column_names:
            return DocumentNames(key, ())
        value = table.column(column)[at]
        images = value.values if pa.types.is_nested(value.type) and hasattr(value, "values") else [value]
        found = [_image_name(image, key, column) for image in images or () if image.is_valid]
        return DocumentNames(key, tuple(found))

    def _find(self, name: str, place: RowPlace) -> tuple[pa.Table, int]:
        """A table, and the row of it that is the row of a unit."""
        result = self._read(name, place.unit)
        found = np.flatnonzero(result.unit_rows == place.row)
        if not len(found):
            unit = self.units(name)[place.unit]
            raise SourceError(f"source {name!r}: {unit} has no row {place.row}; it has {result.table.num_rows} rows")
        return result.table, int(found[0])

    def search(self, name: str, column: str, value: str) -> Iterator[RowPlace]:
        """The rows whose column is this value, as text. Reads all of the source."""
        import pyarrow.compute as pc

        for number, unit in enumerate(self.units(name)):
            result = self._read(name, number)
            if column not in result.table.column_names:
                listed = ", ".join(result.table.column_names)
                raise SpecError(f"source {name!r} has no column {column!r} in {unit}; it has {listed}")
            texts = _as_text(result.table.column(column))
            matches = pc.equal(texts, pa.scalar(value)).fill_null(False).to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(matches).tolist():
                yield RowPlace(number, int(result.unit_rows[at]))

    def _read(self, name: str, number: int) -> ReadResult:
        if self._last is not None and self._last[:2] == (name, number):
            return self._last[2]
        unit = self.units(name)[number]
        reader = open_reader(self.source(name), release_gil=False)
        try:
            result = reader.read_rows(unit)
        except Exception as error:
            error.add_note(f"while reading {unit} of source {name!r}")
            raise
        finally:
            reader.close()
        self._last = name, number, result
        return result


def _image_name(image: pa.Scalar, key: str | None, column: str) -> str:
    """The path that was stored with an image; else its member in the shard; else its column."""
    if isinstance(image, pa.StructScalar):
        path = image["path"].as_py() if "path" in image else None
        return path or column
    return column if key is None else f"{key}.{column}"


def _as_text(column: pa.ChunkedArray) -> Any:
    import pyarrow.compute as pc

    if pa.types.is_nested(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        raise SpecError(f"--where compares text and numbers, and the column is {column.type}")
    return pc.cast(column, pa.string())


def text_of(row: Mapping[str, Any], tokens: str | None) -> str:
    """A row for people: its text if it has some, else its columns."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    if "text" in texts:
        return texts["text"]
    if tokens is not None and tokens in row:
        texts |= {tokens: " ".join(map(str, row[tokens] or ()))}
    if texts:
        return "\n".join(f"{name}: {value}" for name, value in texts.items())
    return "\n".join(f"{name}: {_short(value)}" for name, value in row.items())


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
