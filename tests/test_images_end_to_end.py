"""Image-text from tar to batch: decoded only when planned, beside their text, bad ones set aside."""

import io
import tarfile
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, features

import overlord as ol

simplejpeg = pytest.importorskip("simplejpeg")


def picture(number: int, height: int = 40, width: int = 60) -> np.ndarray:
    """A smooth picture whose mean colour tells its number."""
    ramp = np.linspace(0, 20, height)[:, None, None] + np.linspace(0, 20, width)[None, :, None]
    return np.clip(ramp + 20 * number + np.zeros((1, 1, 3)), 0, 255).astype(np.uint8)


def shard(path, members: list[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def sample(number: int, jpeg: bytes | None = None) -> list[tuple[str, bytes]]:
    content = simplejpeg.encode_jpeg(picture(number), quality=95) if jpeg is None else jpeg
    return [(f"{number:04}.jpg", content), (f"{number:04}.txt", f"picture {number}".encode())]


def job_of(path: str, **fields) -> ol.Job:
    source = ol.WebDataset(
        path,
        transform=ol.Tokenize("txt", encoding=ol.ByteTokenizer(), keep=("jpg", "__key__")),
        decode=ol.vision.DecodeImage("jpg", size=(16, 16)),
        repeat=False,
        shuffle=False,
        **fields,
    )
    return ol.Job(
        sources={"pictures": source},
        batch=ol.Batch(samples=4, sequence_length=32, layout="padded", columns=("__key__",)),
    )


def test_every_image_lies_beside_its_own_text(tmp_path):
    path = shard(tmp_path / "a.tar", [member for number in range(1, 11) for member in sample(number)])
    with ol.start(job_of(path)) as loader:
        seen = []
        for step in loader.client(0):
            for micro in step:
                texts = [bytes(row[row > 0].astype(np.uint8)).decode() for row in micro["tokens"]]
                keys = micro["__key__"].to_pylist()
                for image, document in zip(micro["images"], micro["image_document"], strict=True):
                    number = int(keys[document])
                    assert texts[document].startswith(f"picture {number}")
                    assert abs(image.mean() - picture(number).mean()) < 3
                    seen.append(number)
        assert sorted(seen) == list(range(1, 11))


def test_planning_knows_image_sizes_before_any_is_decoded(tmp_path):
    path = shard(tmp_path / "a.tar", [member for number in range(1, 5) for member in sample(number)])
    with ol.start(job_of(path)) as loader:
        planned = loader.plan(0)
        assert planned is not None
        assert planned.plan.samples.sizes["image_pixels"].tolist() == [256] * 4
        assert planned.plan.samples.sizes["num_images"].tolist() == [1] * 4


def test_a_truncated_image_is_found_by_its_header_and_left_out_of_every_plan(tmp_path):
    cut = simplejpeg.encode_jpeg(picture(3))[:-40]
    members = [m for number in (1, 2, 4) for m in sample(number)] + sample(3, cut)
    path = shard(tmp_path / "a.tar", members)
    with ol.start(job_of(path, on_bad_row="skip")) as loader:
        step = next(loader.client(0))
        assert sorted(step["__key__"].to_pylist()) == ["0001", "0002", "0004"]
        assert loader.report().bad_rows == {"pictures": 1}
    with ol.start(job_of(path)) as loader, pytest.raises(ol.errors.BadRowError, match=r"a\.tar, row 3"):
        next(loader.client(0))


def test_an_image_that_breaks_only_when_decoded_is_blank_and_takes_no_loss(tmp_path):
    good = bytearray(simplejpeg.encode_jpeg(picture(3)))
    scan = good.index(b"\xff\xda")
    good[scan + 14 : -2] = b"\xff\xd0" * ((len(good) - 2 - scan - 14) // 2) + b"\x00" * ((len(good) - 2 - scan - 14) % 2)
    members = [m for number in (1, 2) for m in sample(number)] + sample(3, bytes(good)) + sample(4)
    path = shard(tmp_path / "a.tar", members)
    with ol.start(job_of(path, on_bad_row="skip")) as loader:
        step = next(loader.client(0))
        bad = step["__key__"].to_pylist().index("0003")
        assert not step["images"][bad].any()
        assert (step["labels"][bad] == -100).all()
        assert (np.delete(step["labels"], bad, axis=0) != -100).any()
        assert loader.report().bad_rows == {"pictures": 1}


def test_images_come_through_worker_processes_too(tmp_path):
    path = shard(tmp_path / "a.tar", [member for number in range(1, 9) for member in sample(number)])
    job = job_of(path)
    source = job.sources["pictures"]
    in_processes = ol.WebDataset(
        path,
        transform=ol.InProcesses(source.transforms[0]),
        decode=source.decode,
        repeat=False,
        shuffle=False,
    )
    both = [ol.Job(sources={"pictures": s}, batch=job.batch, num_processes=1) for s in (source, in_processes)]
    found = []
    for each in both:
        with ol.start(each) as loader:
            found.append([(s["tokens"].tolist(), s["images"].tolist()) for s in islice(loader.client(0), 2)])
    assert found[0] == found[1]


@pytest.mark.strangers
def test_images_of_hugging_face_datasets_are_read_as_they_are(tmp_path):
    files = [
        {"bytes": simplejpeg.encode_jpeg(picture(number), quality=95), "path": f"{number}.jpg"} for number in range(1, 6)
    ]
    texts = [f"picture {number}" for number in range(1, 6)]
    pq.write_table(pa.table({"image": files, "text": texts}), tmp_path / "one.parquet")
    pq.write_table(pa.table({"image": [[file, file] for file in files], "text": texts}), tmp_path / "many.parquet")
    for name, num_images in (("one", 1), ("many", 2)):
        source = ol.Parquet(
            str(tmp_path / f"{name}.parquet"),
            transform=ol.Tokenize("text", encoding=ol.ByteTokenizer(), keep=("image",)),
            decode=ol.vision.DecodeImage("image", size=(16, 16)),
            shuffle=False,
        )
        job = ol.Job(sources={"pictures": source}, batch=ol.Batch(samples=4, sequence_length=32, layout="padded"))
        with ol.start(job) as loader:
            (micro,) = next(loader.client(0))
            assert len(micro["images"]) == 4 * num_images
            for i, image in enumerate(micro["images"]):
                assert abs(image.mean() - picture(i // num_images + 1).mean()) < 3


@pytest.mark.strangers
@pytest.mark.skipif("avif" not in features.get_supported(), reason="this Pillow reads no AVIF")
def test_an_image_that_a_decoder_stumbles_over_does_not_end_a_run_that_skips(tmp_path):
    good, cut = io.BytesIO(), io.BytesIO()
    Image.fromarray(picture(3)).save(good, "AVIF")
    Image.fromarray(picture(4)).save(cut, "GIF")
    without_places = good.getvalue().replace(b"iloc", b"free")
    members = [m for number in (1, 2) for m in sample(number)] + sample(3, without_places)
    path = shard(tmp_path / "a.tar", members + sample(4, cut.getvalue()[:-500]))
    with ol.start(job_of(path, on_bad_row="skip")) as loader:
        step = next(loader.client(0))
        assert sorted(step["__key__"].to_pylist()) == ["0001", "0002", "0004"]
        assert not step["images"][2].any()
        assert loader.report().bad_rows == {"pictures": 2}
