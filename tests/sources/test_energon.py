"""Energon's split.yaml and metadatasets. The files are written as `energon prepare` 7.4.1 writes them."""

import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import SourceError, SpecError
from overlord.formats import energon


def write_dataset(folder: Path, num_shards: int, exclude: str = "[]") -> None:
    (folder / ".nv-meta").mkdir(parents=True)
    for shard in range(num_shards):
        with tarfile.open(folder / f"shard_{shard}.tar", "w") as archive:
            for row in range(3):
                info = tarfile.TarInfo(f"{folder.name}-{shard}-{row}.txt")
                info.size = len(info.name)
                archive.addfile(info, io.BytesIO(info.name.encode()))
    train = f"shard_{{0..{num_shards - 2}}}.tar"
    (folder / ".nv-meta" / "split.yaml").write_text(
        f"exclude: {exclude}\nsplit_parts:\n  train:\n  - {train}\n  val:\n  - shard_{num_shards - 1}.tar\n  test: []\n"
    )


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def test_a_split_of_a_prepared_dataset_has_its_shards(tmp_path: Path) -> None:
    write_dataset(tmp_path / "coco", 4, "[shard_1.tar]")
    found = energon(tmp_path / "coco", columns={"txt": pa.string()}, tokens=None)
    assert found.weights == {"coco": 1.0}
    ol.testing.assert_source_keeps_its_promises(found.sources["coco"])
    assert read_all(found.sources["coco"])["txt"].to_pylist() == [f"coco-{s}-{r}.txt" for s in (0, 2) for r in range(3)]
    assert read_all(energon(f"{tmp_path}/coco/", "val").sources["coco"]).num_rows == 3
    with pytest.raises(SpecError, match=r"split\.yaml has shards for train, val, not for 'test'"):
        energon(tmp_path / "coco", "test")


def test_blends_of_metadatasets_become_sources_and_weights(tmp_path: Path) -> None:
    for name in ("coco", "laion", "more/coco"):
        write_dataset(tmp_path / name, 3)
    (tmp_path / "inner.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - {weight: 1, path: more/coco}\n      - {weight: 3, path: ./laion, split_part: val}\n"
    )
    (tmp_path / "outer.yaml").write_text(
        "__module__: megatron.energon\n__class__: Metadataset\nsplits:\n  train:\n    datasets:\n"
        "      - {weight: 6, path: coco}\n      - {weight: 4, path: inner.yaml}\n"
    )
    found = energon(tmp_path / "outer.yaml", tokens=None)
    assert found.weights == pytest.approx({"coco": 0.6, "coco-2": 0.1, "laion": 0.3})
    assert read_all(found.sources["laion"])["txt"].to_pylist() == [f"laion-2-{row}.txt".encode() for row in range(3)]
    batch = ol.Batch(samples=4, sequence_length=8, columns=("txt",))
    job = ol.Job(sources=found.sources, mixture=ol.Mixture(found.weights), batch=batch)
    ol.testing.assert_resumes_exactly(job, 4, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("splits: {val: {path: coco}}", r"a\.yaml has the splits val, not 'train'"),
        ("a: 1", r"a\.yaml is no metadataset of Energon: it has no splits"),
        ("splits: {train: {join: [{path: coco}]}}", "has join: only blends of weights are read"),
        ("splits: {train: {blend: [{path: coco, weight: 0}]}}", "the weight of coco must be a number above 0, not 0"),
        ("splits: {train: {blend: [{path: coco, subset: {range: [0, 1]}}]}}", "the subset of coco is not read"),
        ("splits: {train: {blend: [3]}}", "has a part that is no dataset with a path: 3"),
        ("splits: {train: {path: a.yaml}}", "nested more than 20 deep; do two contain each other"),
        ("splits: [", r"a\.yaml is not YAML"),
        ("splits: {train: {path: none}}", r"none/\.nv-meta/split\.yaml does not exist"),
    ],
)
def test_metadatasets_that_cannot_be_read_are_errors(tmp_path: Path, content: str, message: str) -> None:
    write_dataset(tmp_path / "coco", 2)
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises((SourceError, SpecError), match=message):
        energon(tmp_path / "a.yaml")


def test_excluded_samples_and_files_without_parts_are_errors(tmp_path: Path) -> None:
    write_dataset(tmp_path / "coco", 2, "[shard_0.tar/coco-0-1]")
    with pytest.raises(SpecError, match=r"excludes the sample 'shard_0\.tar/coco-0-1': only whole shards are left out"):
        energon(tmp_path / "coco")
    (tmp_path / "coco" / ".nv-meta" / "split.yaml").write_text("exclude: []")
    with pytest.raises(SourceError, match=r"split\.yaml has no split_parts"):
        energon(tmp_path / "coco")
