"""How the files of any source may be named."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from tests.sources.damage import replace

FORMATS = [ol.Parquet, ol.ArrowIpc, ol.Jsonl, ol.WebDataset]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with two files of each format."""
    table = pa.table({"txt": ["a"]})
    for number in range(2):
        pq.write_table(table, tmp_path / f"{number}.Parquet")
        with pa.ipc.new_file(str(tmp_path / f"{number}.ArrowIpc"), table.schema) as writer:
            writer.write_table(table)
        (tmp_path / f"{number}.Jsonl").write_text('{"txt": "a"}\n')
        with tarfile.open(tmp_path / f"{number}.WebDataset", "w") as archive:
            member = tarfile.TarInfo("x.txt")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"a"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.strangers
@pytest.mark.parametrize("source", FORMATS)
def test_paths_may_be_text_or_path_objects_or_both_and_begin_with_a_tilde(home: Path, source: type) -> None:
    first, second = f"{home}/0.{source.__name__}", f"{home}/1.{source.__name__}"
    tilde = f"~/0.{source.__name__}"
    for given in (first, Path(first), tilde, Path(tilde), [Path(first)]):
        assert [unit.path for unit in source(given).units()] == [first]
    for given in (Path(f"{home}/*.{source.__name__}"), [Path(first), second], (first, Path(second)), [tilde, Path(second)]):
        made = source(given)
        assert [unit.path for unit in made.units()] == [first, second]
        assert sum(made.read(unit).num_rows for unit in made.units()) == 2
    assert source(Path(first)).identity() == source(first).identity()


@pytest.mark.strangers
def test_what_is_no_path_is_refused() -> None:
    wrong: tuple[Any, ...] = (b"a.jsonl", [], "", ["a", None], [b"a"])
    for given in wrong:
        with pytest.raises(ol.errors.SpecError, match=r"paths must be one or more paths, as text or pathlib\.Path, got"):
            ol.Jsonl(given)


@pytest.mark.strangers
def test_a_log_may_lie_at_a_path_that_begins_with_a_tilde(home: Path) -> None:
    for given in ("~/log", Path("~/log"), home / "log"):
        assert ol.Log(given).location == f"{home}/log"
    assert ol.Log("s3://bucket/~x").location == "s3://bucket/~x"


@pytest.mark.strangers
@pytest.mark.parametrize("source", FORMATS)
def test_a_file_that_is_replaced_after_it_was_listed_is_not_read_on(home: Path, source: type) -> None:
    path = home / f"0.{source.__name__}"
    made = source(path)
    made, units = pickle.loads(pickle.dumps((made, made.units())))  # as loaders in other processes get them
    assert made.read(units[0]).num_rows == 1
    replace(path)
    with pytest.raises(ol.errors.SourceError, match=rf"0\.{source.__name__} has changed since it was listed"):
        made.read(units[0])
