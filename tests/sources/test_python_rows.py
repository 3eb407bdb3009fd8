"""Datasets that are Python objects: map-style ones by a function that opens them, and iterables with an index."""

import functools
import json
import pickle
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import overlord as ol
from overlord.errors import BadRowError, DataError, SchemaError, SourceError, SpecError
from overlord.formats import Iterated, MapDataset
from overlord.sources.files import open_reader


class Documents(torch.utils.data.Dataset):
    """Holds an open file, as many do: it cannot be pickled."""

    def __init__(self, path: str, bad: tuple[int, ...] = ()) -> None:
        self.file = open(path)  # noqa: SIM115
        self.lines = self.file.read().splitlines()
        self.bad = bad

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row in self.bad:
            raise OSError(f"row {row} is on a lost disk")
        tokens = torch.arange(1 + row % 5) + row
        return {"tokens": tokens, "text": self.lines[row], "grid": np.full((2, 2), row, np.float32)}

    def __del__(self) -> None:
        self.file.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"line {i}\n" for i in range(50)))
    return str(file)


def test_a_torch_dataset_is_opened_by_each_reader_and_never_pickled(path: str) -> None:
    source = MapDataset(functools.partial(Documents, path), unit_rows=20)
    ol.testing.assert_source_keeps_its_promises(source)
    units = source.units()
    assert [(str(unit), unit.num_rows) for unit in units] == [
        (f"{__name__}.Documents", 20), (f"{__name__}.Documents#1", 20), (f"{__name__}.Documents#2", 10),
    ]  # fmt: skip
    table = pa.concat_tables([source.read(unit) for unit in units])
    assert [str(field.type) for field in table.schema] == ["list<item: int64>", "string", "list<item: list<item: float>>"]
    assert table["text"].to_pylist() == [f"line {i}" for i in range(50)]
    assert table["tokens"].to_pylist()[7] == [7, 8, 9]
    assert table["grid"].to_pylist()[3] == [[3, 3], [3, 3]]
    reader = open_reader(source, release_gil=False)
    assert reader.read_rows(units[2]).table.num_rows == 10
    reader.close()
    pickle.loads(pickle.dumps(source))


def test_a_run_of_a_torch_dataset_resumes_exactly_and_its_state_knows_the_function(path: str) -> None:
    def job(**options: Any) -> ol.Job:
        source = MapDataset(functools.partial(Documents, path, **options), ["tokens"], unit_rows=7)
        return ol.Job(sources={"a": source}, batch=ol.Batch(tokens=64, sequence_length=32))

    ol.testing.assert_resumes_exactly(job(), 12, 5)
    with ol.start(job()) as loader:
        state = loader.state_dict()
    with pytest.raises(ol.errors.StateError, match="'a'"), ol.start(job(bad=(3,)), resume=state):
        pass


def test_a_row_that_raises_is_a_bad_row_and_so_is_one_that_does_not_fit(path: str) -> None:
    source = MapDataset(functools.partial(Documents, path, bad=(3, 11)), ["text"], unit_rows=10)
    units = source.units()
    result = source.read_rows(units[0])
    assert result.table.num_rows == 9
    assert [str(bad) for bad in result.bad] == [f"{__name__}.Documents, row 3: OSError: row 3 is on a lost disk"]
    with pytest.raises(BadRowError, match=r"Documents, row 11: OSError"):
        source.read(units[1])
    numbers = MapDataset(functools.partial(list, [1, 2, "three", 4]), {"n": pa.int64()})
    result = numbers.read_rows(numbers.units()[0])
    assert result.table["n"].to_pylist() == [1, 2, 4]
    assert "'n' does not fit its type int64" in result.bad[0].error


Pair = namedtuple("Pair", ["tokens", "label"])


class Many:
    """Torch's way to fetch several rows in one call."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Pair:
        return Pair([row], str(row))

    def __getitems__(self, rows: list[int]) -> list[Pair]:
        return [Pair([row, row], str(row)) for row in rows]


def test_rows_may_be_dicts_tuples_or_single_values() -> None:
    def read(source: MapDataset) -> list[dict[str, Any]]:
        return source.read(source.units()[0]).to_pylist()

    assert read(MapDataset(functools.partial(list, [([1], 2), ([3], 4)]), ["tokens", "n"])) == [
        {"tokens": [1], "n": 2}, {"tokens": [3], "n": 4},
    ]  # fmt: skip
    assert read(MapDataset(functools.partial(list, [[1, 2], [3]]), ["tokens"])) == [{"tokens": [1, 2]}, {"tokens": [3]}]
    assert read(MapDataset(Many))[5] == {"tokens": [5, 5], "label": "5"}
    with pytest.raises(SpecError, match=r"list has rows that are tuples, not dicts: name their entries in order"):
        MapDataset(functools.partial(list, [(1, 2)])).units()
    with pytest.raises(SchemaError, match="rows of 2 entries, and columns names 3"):
        MapDataset(functools.partial(list, [(1, 2)]), ["a", "b", "c"]).units()
    with pytest.raises(SchemaError, match=r"the first row of builtins.list has no 'b'; it has 'a'"):
        MapDataset(functools.partial(list, [{"a": 1}]), ["b"]).units()
    with pytest.raises(SchemaError, match="'a' is None in the first rows"):
        MapDataset(functools.partial(list, [{"a": None}])).units()


def test_what_is_no_function_or_cannot_be_pickled_is_refused(path: str) -> None:
    with pytest.raises(SpecError, match=r"takes a function that opens the dataset, not a Documents: each process opens its"):
        MapDataset(Documents(path))  # pyright: ignore[reportArgumentType]
    opened = Documents(path)
    with pytest.raises(SpecError, match=r"takes a function that can be pickled, and .*<lambda> cannot"):
        MapDataset(lambda: opened)
    with pytest.raises(SpecError, match="which has no length; a map dataset has __len__"):
        MapDataset(functools.partial(iter, [1])).units()
    with pytest.raises(SourceError, match="has no rows"):
        MapDataset(list).units()


class Counting:
    """An iterable that can be started in the middle, as those of Hugging Face and torchdata can."""

    def __init__(self, num_rows: int, first: int = 0) -> None:
        self.num_rows, self.at, self.first = num_rows, 0, first

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < self.num_rows:
            self.at += 1
            yield {"tokens": list(range(self.at % 4)), "n": self.first + self.at - 1}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class GrainLike:
    """The iterator has the state, and gives it as bytes, as Grain's do."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.at = num_rows, 0

    def __iter__(self) -> "GrainLike":
        return self

    def __next__(self) -> dict[str, int]:
        if self.at == self.num_rows:
            raise StopIteration
        self.at += 1
        return {"n": self.at - 1}

    def get_state(self) -> bytes:
        return json.dumps(self.at).encode()

    def set_state(self, state: bytes) -> None:
        self.at = json.loads(state)


def generate(num_rows: int) -> Iterator[dict[str, int]]:
    for i in range(num_rows):
        yield {"n": i}


@pytest.mark.parametrize(
    ("factory", "keep"), [(Counting, "states"), (GrainLike, "states"), (generate, "rows"), (Counting, "rows")]
)
def test_an_iterable_with_an_index_is_read_from_anywhere(tmp_path: Path, factory: Any, keep: Any) -> None:
    source = Iterated(functools.partial(factory, 1000), unit_rows=7, keep=keep, folder=tmp_path / "index")
    ol.testing.assert_source_keeps_its_promises(source, most_units=200)
    units = source.units()
    assert len(units) == 143
    assert [row for unit in reversed(units) for row in reversed(source.read(unit)["n"].to_pylist())] == list(
        range(999, -1, -1)
    )
    before = (tmp_path / "index" / "index.json").stat().st_mtime_ns
    again = Iterated(functools.partial(factory, 1000), unit_rows=7, keep=keep, folder=str(tmp_path / "index"))
    assert again.units() == units
    assert (tmp_path / "index" / "index.json").stat().st_mtime_ns == before


def test_a_run_of_an_iterable_resumes_exactly_also_with_its_index_elsewhere(tmp_path: Path) -> None:
    def job(folder: str) -> ol.Job:
        source = Iterated(functools.partial(Counting, 300), ["tokens"], unit_rows=16, folder=tmp_path / folder)
        return ol.Job(sources={"a": source}, batch=ol.Batch(tokens=64, sequence_length=32))

    ol.testing.assert_resumes_exactly(job("one"), 8, 3)
    with ol.start(job("one")) as loader:
        state = loader.state_before(2)
    with ol.start(job("two"), resume=state) as loader:
        assert loader.start_step == 2


def test_an_iterable_that_only_starts_at_its_beginning_is_refused_before_it_is_read(tmp_path: Path) -> None:
    source = Iterated(functools.partial(generate, 10), folder=tmp_path)
    with pytest.raises(SpecError, match=r"generate is an iterable that can only be started at its beginning.*keep='rows'"):
        source.units()
    with pytest.raises(SpecError, match=r"an iterable starts at its beginning; .* Iterated\(factory, folder="):
        Iterated(functools.partial(generate, 10))


def test_an_iterable_that_changes_is_noticed(tmp_path: Path) -> None:
    units = Iterated(functools.partial(Counting, 50), unit_rows=10, folder=tmp_path).units()
    other = Iterated(functools.partial(Counting, 50, first=1), unit_rows=10, folder=tmp_path)
    with pytest.raises(DataError, match=r"Counting, rows from 20 on, gives other rows than when the index in"):
        other.read(units[2])


@pytest.mark.parametrize("damage", ["cut", "edit", "text"])
def test_a_damaged_index_is_an_error_that_says_how_to_make_it_again(tmp_path: Path, damage: str) -> None:
    source = Iterated(functools.partial(Counting, 50), unit_rows=10, folder=tmp_path)
    source.units()
    path = tmp_path / "index.json"
    data = path.read_bytes()
    edits = {"cut": data[:-30], "edit": data.replace(b'"num_rows":10', b'"num_rows":11', 1), "text": b"[]"}
    path.write_bytes(edits[damage])
    with pytest.raises(
        SourceError, match=r"index\.json is (not the index|damaged).*delete .* and the index is written again"
    ):
        source.units()


def test_an_index_of_another_iterable_and_lost_rows_are_errors(tmp_path: Path) -> None:
    Iterated(functools.partial(Counting, 50), unit_rows=10, folder=tmp_path).units()
    with pytest.raises(SourceError, match=r"is the index of .*Counting with unit_rows=10, keep='states', and the source is"):
        Iterated(functools.partial(Counting, 50), unit_rows=11, folder=tmp_path).units()
    source = Iterated(functools.partial(generate, 50), unit_rows=10, keep="rows", folder=tmp_path / "rows")
    units = source.units()
    (tmp_path / "rows" / "rows-00000.arrow").unlink()
    with pytest.raises(SourceError, match=r"rows-00000\.arrow cannot be read"):
        source.read(units[0])
    endless = Iterated(functools.partial(Counting, 10**9), unit_rows=10, most_rows=25, folder=tmp_path / "endless")
    assert [unit.num_rows for unit in endless.units()] == [10, 10, 5]


def _squares(number: int) -> dict[str, Any]:
    return {"n": int(number), "tokens": np.arange(1 + number % 5, dtype=np.int32) + number}


def grain_map_dataset(num_rows: int) -> Any:
    grain = pytest.importorskip("grain", reason="grain is not installed")
    return grain.MapDataset.range(num_rows).shuffle(seed=3).map(_squares)


def grain_iter_dataset(num_rows: int) -> Any:
    return grain_map_dataset(num_rows).to_iter_dataset()


def test_a_map_dataset_of_grain_is_read_and_resumes_exactly() -> None:
    rows = [grain_map_dataset(200)[i] for i in range(200)]
    source = MapDataset(functools.partial(grain_map_dataset, 200), unit_rows=30)
    ol.testing.assert_source_keeps_its_promises(source)
    table = pa.concat_tables([source.read(unit) for unit in source.units()])
    assert table["n"].to_pylist() == [row["n"] for row in rows]
    assert table["tokens"].to_pylist() == [row["tokens"].tolist() for row in rows]
    batch = ol.Batch(tokens=64, sequence_length=32)
    ol.testing.assert_resumes_exactly(ol.Job(sources={"a": source}, batch=batch), 8, 3)


def test_an_iterator_of_grain_is_read_from_the_states_that_it_says(tmp_path: Path) -> None:
    rows = [row["n"] for row in grain_iter_dataset(200)]
    assert sorted(rows) == list(range(200))
    source = Iterated(functools.partial(grain_iter_dataset, 200), unit_rows=30, folder=tmp_path / "index")
    units = source.units()
    assert len(units) == 7
    found = {unit.index: source.read(unit)["n"].to_pylist() for unit in reversed(units)}
    assert [n for index in range(7) for n in found[index]] == rows
