"""Hugging Face datasets: saved ones without the library, and its objects where it is installed (`make test-formats`)."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import SourceError, SpecError
from overlord.formats import HuggingFace, HuggingFaceFiles
from tests.sources.recording import RECORDED, huggingface_rows

FOLDER = RECORDED / "huggingface"


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def test_a_saved_dataset_is_read_without_the_library() -> None:
    source = HuggingFaceFiles(FOLDER / "one")
    ol.testing.assert_source_keeps_its_promises(source)
    assert read_all(source).to_pydict() == huggingface_rows("train")
    assert read_all(HuggingFaceFiles(FOLDER / "one", ["tokens"])).column_names == ["tokens"]


def test_a_split_of_a_saved_dict_comes_in_the_order_of_its_files() -> None:
    source = HuggingFaceFiles(f"{FOLDER}/splits/", split="train")
    assert read_all(source).to_pydict() == huggingface_rows("train")
    assert [Path(unit.path).name for unit in source.units()] == [f"data-{i:05}-of-00003.arrow" for i in range(3)]
    files = HuggingFaceFiles(f"{FOLDER}/splits/train/*.arrow")
    assert read_all(files).to_pydict() == huggingface_rows("train")
    with pytest.raises(SpecError, match=r"splits has the splits train, test: name one, split='train', not None"):
        HuggingFaceFiles(FOLDER / "splits").units()
    with pytest.raises(SpecError, match=r"one is a dataset without splits, and split='train' was given"):
        HuggingFaceFiles(FOLDER / "one", split="train").units()


def test_a_folder_that_datasets_did_not_write_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"state\.json does not exist"):
        HuggingFaceFiles(tmp_path).units()
    shutil.copytree(FOLDER / "one", tmp_path / "one")
    state = tmp_path / "one" / "state.json"
    whole = json.loads(state.read_text())
    state.write_text(state.read_text()[:-20])
    with pytest.raises(SourceError, match=r"state\.json is not what datasets writes: .*save the dataset again"):
        HuggingFaceFiles(tmp_path / "one").units()
    state.write_text("{}")
    with pytest.raises(SourceError, match=r"state\.json names no files of the dataset"):
        HuggingFaceFiles(tmp_path / "one").units()
    state.write_text(json.dumps({**whole, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(SourceError, match="was saved by an old release of datasets with its rows in another order"):
        HuggingFaceFiles(tmp_path / "one").units()
    state.write_text(json.dumps(whole))
    data = tmp_path / "one" / "data-00000-of-00001.arrow"
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"data-00000-of-00001\.arrow"):
        read_all(HuggingFaceFiles(tmp_path / "one"))


def test_without_the_library_an_object_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"not str; formats\.HuggingFaceFiles reads saved folders"):
        HuggingFace("squad")

    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("overlord.sources.files.import_module", missing)
    with pytest.raises(SpecError, match=r"HuggingFace needs the library datasets.*'overlord-dataloader\[huggingface\]'"):
        HuggingFace(functools.partial(dict)).units()


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="make test-formats runs these")


def test_a_dataset_comes_in_its_own_order_however_it_was_made(datasets: Any, tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"id": range(3000), "text": [f"text {i}" for i in range(3000)]})
    made.save_to_disk(str(tmp_path / "saved"))
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    shuffled = loaded.shuffle(seed=3).select(range(0, 2500, 2))
    for dataset in (
        loaded,
        made,
        shuffled,
        datasets.concatenate_datasets([shuffled, loaded]),
        loaded.select(range(2999, 0, -3)),
    ):
        source = HuggingFace(dataset, ["text", "id"], unit_rows=400)
        ol.testing.assert_source_keeps_its_promises(source)
        assert read_all(source)["id"].to_pylist() == dataset["id"][:]
        assert read_all(source).column_names == ["text", "id"]
    assert HuggingFace(shuffled).identity() != HuggingFace(loaded).identity()
    opened = HuggingFace(functools.partial(datasets.load_from_disk, str(tmp_path / "saved")))
    assert opened.identity() == HuggingFace(loaded).identity()
    assert read_all(opened)["id"].to_pylist() == list(range(3000))


def test_a_stream_is_read_by_its_shards_and_refused_where_they_do_not_make_it_up(datasets: Any) -> None:
    stream = datasets.Dataset.from_dict({"id": range(100)}).to_iterable_dataset(num_shards=4)
    source = HuggingFace(stream.map(functools.partial(dict), batched=False))
    ol.testing.assert_source_keeps_its_promises(source)
    assert len(source.units()) == 4
    assert sorted(read_all(source)["id"].to_numpy().tolist()) == list(range(100))
    for mixed in (stream.shuffle(seed=1), datasets.interleave_datasets([stream, stream]), stream.take(10)):
        with pytest.raises(SpecError, match=r"was shuffled, interleaved or cut .* so its shards do not make it up"):
            HuggingFace(mixed).units()


def test_mistakes_with_datasets_are_named(datasets: Any) -> None:
    one = datasets.Dataset.from_dict({"id": [1]})
    with pytest.raises(SpecError, match="dataset has no column 'text'; it has id"):
        HuggingFace(one, ["text"]).units()
    with pytest.raises(SpecError, match="has the splits train, test: give one of them"):
        HuggingFace(functools.partial(datasets.DatasetDict, {"train": one, "test": one})).units()
    with pytest.raises(SourceError, match="dataset has no rows"):
        HuggingFace(one.select([])).units()


def test_a_run_of_a_dataset_resumes_exactly_and_another_order_is_another_dataset(datasets: Any) -> None:
    def job(seed: int) -> ol.Job:
        rows = datasets.Dataset.from_dict({"tokens": [list(range(1, 2 + i % 9)) for i in range(300)]})
        source = HuggingFace(rows.shuffle(seed=seed), unit_rows=20)
        return ol.Job(sources={"a": source}, batch=ol.Batch(tokens=64, sequence_length=32))

    ol.testing.assert_resumes_exactly(job(1), 8, 3)
    with ol.start(job(1)) as loader:
        state = loader.state_dict()
    with pytest.raises(ol.errors.StateError, match="'a'"), ol.start(job(2), resume=state):
        pass
