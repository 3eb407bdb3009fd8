"""Hugging Face `datasets`: their Arrow files without the library, and the library's objects, by rows or by shards."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.declare.source import Source, Unit
from overlord.errors import BufferTooSmallError, SourceError, SpecError
from overlord.sources.arrow_ipc import ArrowIpc
from overlord.sources.files import check_columns, literal_pattern, needed_library
from overlord.sources.reading import ReadResult, UnitReader, validate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.sources.storage import StoredFile

_BATCH_ROWS = 1000
_MIXING = ("Shuffl", "Cycling", "TakeExamples", "SkipExamples")


@dataclass(frozen=True)
class HuggingFaceFiles(ArrowIpc):
    """What `Dataset.save_to_disk` wrote, or the library's cache keeps, without the library. `paths` names the folders of
    saved datasets, or `.arrow` files. A `DatasetDict` needs `split`.
    """

    split: str | None = field(default=None, kw_only=True)

    def list_files(self) -> tuple[StoredFile, ...]:
        named: list[str] = []
        for path in self.patterns:
            named += [path] if path.endswith(".arrow") else map(literal_pattern, self._saved_files(path.rstrip("/")))
        return self.storage.list_files(named)

    def identity(self) -> str:
        columns = self.columns and list(self.columns)
        where = f"{list(self.patterns)!r}, split={self.split!r}"
        return f"HuggingFaceFiles({where}, columns={columns!r}, unit_bytes={self.unit_bytes})"

    def _saved_files(self, folder: str) -> list[str]:
        splits = self._splits(folder)
        if splits is not None:
            if self.split not in splits:
                known = ", ".join(splits)
                raise SpecError(f"{folder} has the splits {known}: name one, split={splits[0]!r}, not {self.split!r}")
            folder = f"{folder}/{self.split}"
        elif self.split is not None:
            raise SpecError(f"{folder} is a dataset without splits, and split={self.split!r} was given: leave it out")
        path = f"{folder}/state.json"
        (file,) = self.list_beside([path])
        state = self._read_json(file)
        if state.get("_indices_data_files"):
            raise SourceError(
                f"{folder} was saved by an old release of datasets with its rows in another order than its files have them; "
                "load it and save it again"
            )
        entries = state.get("_data_files")
        names = [each.get("filename") if isinstance(each, dict) else None for each in _list_of(entries, object)]
        if not names or names != _list_of(names, str):
            raise SourceError(f"{path} names no files of the dataset; save the dataset again")
        return [f"{folder}/{name}" for name in names]

    def _splits(self, folder: str) -> list[str] | None:
        """None where the folder holds a single dataset."""
        path = f"{folder}/dataset_dict.json"
        try:
            (file,) = self.list_beside([path])
        except SourceError:
            return None
        splits = _list_of(self._read_json(file).get("splits"), str)
        if not splits:
            raise SourceError(f"{path} names no splits; save the dataset again")
        return splits

    def _read_json(self, file: StoredFile) -> dict[str, Any]:
        try:
            found = json.loads(self.storage.read(file, 0, file.num_bytes).to_pybytes())
            if not isinstance(found, dict):
                raise ValueError(f"it holds {type(found).__name__}")
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{file.path} is not what datasets writes: {error}; save the dataset again") from error
        return found


def _list_of(value: Any, kind: type) -> list[Any]:
    """Empty where it is no list, or holds something else."""
    return value if isinstance(value, list) and all(isinstance(each, kind) for each in value) else []


@dataclass(frozen=True)
class HuggingFace(Source):
    """A `datasets.Dataset` (also shuffled, selected, concatenated), an `IterableDataset` (streaming), or a picklable
    function that returns one.

    A unit of a Dataset is `unit_rows` rows in the dataset's own order, read as slices of Arrow. A unit of a stream is one of
    its shards: a stream that was shuffled by a buffer, or interleaved, is refused, because its shards do not make it up.
    """

    dataset: Any
    columns: Sequence[str] | None = None
    unit_rows: int = _BATCH_ROWS

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))
        if self.unit_rows < 1:
            raise SpecError(f"unit_rows must be positive, got {self.unit_rows}")
        if not (callable(self.dataset) or hasattr(self.dataset, "features")):
            raise SpecError(
                f"dataset is a datasets.Dataset, an IterableDataset or a function that returns one, not "
                f"{type(self.dataset).__name__}; formats.HuggingFaceFiles reads saved folders"
            )

    def units(self) -> list[Unit]:
        dataset = self.open()
        label = _label(dataset)
        if _is_stream(dataset):
            _check_divisible(dataset, label)
            return [Unit(label, shard, detail=shard) for shard in range(dataset.num_shards)]
        num_rows = len(dataset)
        if not num_rows:
            raise SourceError(f"{label} has no rows")
        row_bytes = dataset.data.nbytes // max(len(dataset.data), 1)
        version = str(int(_fingerprint(dataset), 16))
        ranges = [(start, min(start + self.unit_rows, num_rows)) for start in range(0, num_rows, self.unit_rows)]
        return [
            Unit(label, number, stop - start, row_bytes * (stop - start), (start, stop), version)
            for number, (start, stop) in enumerate(ranges)
        ]

    def read(self, unit: Unit) -> pa.Table:
        return self.read_rows(unit).strict()

    def read_rows(self, unit: Unit) -> ReadResult:
        return HuggingFaceReader(self).read_rows(unit)

    def open_reader(self, *, release_gil: bool) -> UnitReader:
        del release_gil
        return HuggingFaceReader(self)

    def identity(self) -> str:
        """A Dataset is named by its fingerprint, which the library computes from its data and all that was done to it."""
        dataset = self.open()
        columns = self.columns and list(self.columns)
        what = f"{dataset.num_shards} shards" if _is_stream(dataset) else f"{_fingerprint(dataset)}, {len(dataset)} rows"
        return f"HuggingFace({_label(dataset)}, {what}, columns={columns!r}, unit_rows={self.unit_rows})"

    def open(self) -> Any:
        """The dataset, with the chosen columns."""
        needed_library("datasets", "huggingface", "HuggingFace")
        dataset = self.dataset if hasattr(self.dataset, "features") else self.dataset()
        if isinstance(dataset, dict):
            raise SpecError(f"the dataset has the splits {', '.join(dataset)}: give one of them, as in dataset['train']")
        if self.columns is None:
            return dataset
        if names := dataset.column_names:
            for name in self.columns:
                if name not in names:
                    raise SpecError(f"{_label(dataset)} has no column {name!r}; it has {', '.join(names)}")
        return dataset.select_columns(list(self.columns))


class HuggingFaceReader:
    """Opens the dataset when it first reads, and keeps it."""

    def __init__(self, source: HuggingFace) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._dataset: Any = None

    def read_rows(self, unit: Unit) -> ReadResult:
        with self._lock:
            if self._dataset is None:
                self._dataset = self._source.open()
            dataset = self._dataset
        if _is_stream(dataset):
            return validate(self._read_shard(dataset, unit), str(unit))
        start, stop = unit.detail
        return validate(_plain_table(dataset.with_format("arrow")[start:stop]), f"rows {start:,} to {stop:,} of {unit.path}")

    def close(self) -> None:
        with self._lock:
            self._dataset = None

    def _read_shard(self, dataset: Any, unit: Unit) -> pa.Table:
        shard = dataset.shard(num_shards=dataset.num_shards, index=unit.detail)
        tables, num_bytes = [], 0
        for batch in shard.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            tables.append(_plain_table(batch))
            num_bytes += tables[-1].nbytes
            if num_bytes > self._source.most_unit_bytes:
                raise BufferTooSmallError(
                    f"{unit} has more than {num_bytes:,} bytes, and a unit may take {self._source.most_unit_bytes:,}; raise "
                    f"buffer_bytes, which is {self._source.buffer_bytes:,}, or divide the data into more shards"
                )
        if not tables:
            raise SourceError(f"{unit} is a shard without a row: leave it out of the stream")
        return pa.concat_tables(tables).combine_chunks()


def _is_stream(dataset: Any) -> bool:
    return hasattr(dataset, "_ex_iterable")


def _fingerprint(dataset: Any) -> str:
    return dataset._fingerprint  # noqa: SLF001 - the library names it in its documentation


def _label(dataset: Any) -> str:
    info = dataset.info
    named = [info.builder_name, info.config_name, dataset.split]
    return "/".join(str(each) for each in named if each) or "dataset"


def _check_divisible(dataset: Any, label: str) -> None:
    """The examples of a stream are nested iterables; some mix shards with each other."""
    todo = [dataset._ex_iterable]  # noqa: SLF001 - the library has no other way to tell
    while todo:
        each = todo.pop()
        kind = type(each).__name__
        if any(name in kind for name in _MIXING):
            raise SpecError(
                f"{label} was shuffled, interleaved or cut (it has a {kind}), so its shards do not make it up; give it as "
                "it was loaded: Overlord shuffles and mixes by itself, and a Mixture has weights"
            )
        todo += [found for name in ("ex_iterable", "base_ex_iterable") if (found := getattr(each, name, None)) is not None]
        todo += list(getattr(each, "ex_iterables", ()))


def _plain_table(table: pa.Table) -> pa.Table:
    """In one chunk, without the library's metadata and extension types."""
    table = table.combine_chunks().replace_schema_metadata(None)
    for i, each in enumerate(table.schema):
        if isinstance(each.type, pa.BaseExtensionType):
            column: Any = table.column(i)
            kind: Any = each.type.storage_type
            storage = pa.chunked_array([chunk.storage for chunk in column.chunks], kind)
            table = table.set_column(i, each.name, storage)
    return table
