"""Images that are encoded on other ranks: every row reaches its document, on any mesh, engine and transport."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import overlord as ol
from overlord.arrange.vision.encoding import Encoding
from tests.pictures import GRID, IMAGE_TOKEN, encoded, picture_documents, picture_job

MESHES = [
    (ol.Mesh(dp=3), "cp"),
    (ol.Mesh(dp=2, cp=2), "cp"),
    (ol.Mesh(dp=2, tp=2), "cp"),
    (ol.Mesh(dp=2, cp=2, pp=2), "world"),
    (ol.Mesh(dp=2, tp=2, pp=2, order=("dp", "pp", "cp", "tp")), "world"),
]


def exchanged(parts: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """The rows that each place has after an exchange; `parts` are the microbatches of all places, in their order."""
    sent = []
    for micro in parts:
        rows = np.concatenate([np.zeros((0, 2), np.int64), *(encoded(image) for image in micro["encode_images"])])
        assert len(rows) == micro["encode_tokens"].sum()
        sent.append(np.split(rows[micro["send_rows"]], np.cumsum(micro["send_counts"])[:-1]))
    came = [np.concatenate([pieces[place] for pieces in sent]) for place in range(len(parts))]
    for place, micro in enumerate(parts):
        assert micro["receive_counts"].tolist() == [len(pieces[place]) for pieces in sent]
    return [rows[micro["receive_rows"]] for rows, micro in zip(came, parts, strict=True)]


def check_rows(micro: dict[str, Any], rows: np.ndarray, slices: Sequence[dict[str, Any]]) -> Counter:
    """The rows are those of the microbatch's own pictures, whole and in their order; gives the pictures."""
    places = np.concatenate([part["image_row"][part["image_row"] >= 0] for part in slices])
    assert sorted(places.tolist()) == list(range(len(rows)))
    for part in slices:
        assert np.array_equal(part["image_row"] >= 0, part["tokens"] == IMAGE_TOKEN)
        if len(slices) == 1 and "loss_mask" in part:  # the last stage of a pipeline has it
            assert not part["loss_mask"][:-1][part["tokens"][1:] == IMAGE_TOKEN].any()
    ends = np.cumsum(micro["image_tokens"])
    pictures = Counter()
    for end, tokens, document in zip(ends, micro["image_tokens"], micro["image_document"], strict=True):
        mine = rows[end - tokens : end]
        assert mine[:, 1].tolist() == list(range(tokens))
        assert len(set(mine[:, 0].tolist())) == 1
        pictures[int(mine[0, 0])] += 1
        if len(slices) == 1:
            assert mine[0, 0] // 4 == micro["tokens"][micro["document_starts"][document]]
    return pictures


@pytest.mark.parametrize(("mesh", "axis"), MESHES, ids=str)
def test_every_row_of_every_picture_reaches_the_ranks_that_train_on_it(mesh, axis, tmp_path):
    job = picture_job(picture_documents(tmp_path / "a.parquet", 60), mesh, axis)
    tree = ol.ClientPlaceTree(mesh)
    all_pictures: Counter = Counter()
    moved = 0
    with ol.start(job) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(mesh.world_size)]
        while (steps := [next(client, None) for client in clients])[0] is not None:
            for parts in zip(*steps, strict=True):
                pictures: dict[int, Counter] = {}
                for peers in _peers(tree, axis):
                    rows = exchanged([parts[rank] for rank in peers])
                    for rank, own in zip(peers, rows, strict=True):
                        place = tree.coordinates(rank)
                        if place.pp > 0:
                            assert len(own) == 0
                            continue
                        slices = [parts[tree.rank_of(dp=place.dp, cp=cp, tp=place.tp)] for cp in range(mesh.cp)]
                        pictures[place.dp] = check_rows(parts[rank], own, slices)
                    here = [parts[rank]["send_counts"][place] for place, rank in enumerate(peers)]
                    moved += sum(int(parts[rank]["send_counts"].sum()) for rank in peers) - sum(here)
                all_pictures.update(sum(pictures.values(), Counter()))
    whole = _all_pictures(job)
    assert all_pictures == whole
    assert moved > 0


def _peers(tree: ol.ClientPlaceTree, axis: str) -> list[list[int]]:
    """The ranks that exchange with one another, by their places."""
    mesh = tree.mesh
    if axis == "world":
        return [list(range(mesh.world_size))]
    return [[tree.rank_of(dp=dp, cp=cp, tp=tp) for dp in range(mesh.dp) for cp in range(mesh.cp)] for tp in range(mesh.tp)]


def _all_pictures(job: ol.Job) -> Counter:
    """Those of the same job on one rank that encodes its own."""
    path = job.sources["pictures"].paths  # type: ignore[attr-defined]
    found: Counter = Counter()
    with ol.start(picture_job(path, ol.Mesh(), None)) as loader:
        for step in loader.client(0, timeout_s=60):
            for micro in step:
                assert "send_rows" not in micro
                found.update(int(encoded(image)[0, 0]) for image in micro.get("images", ()))
    return found


def test_encoder_and_backbone_are_even_at_once_and_the_plan_says_who_encodes_what(tmp_path):
    job = picture_job(picture_documents(tmp_path / "a.parquet", 60), ol.Mesh(dp=4), "cp", samples=60)
    with ol.start(job) as loader:
        planned = loader.plan(0)
        assert planned is not None
        encoding = planned.plan.part(Encoding)
        assert encoding is not None
        patches = np.bincount(encoding.place, encoding.images.patches, 4)
        assert patches.max() / patches.mean() < 1.2
        images = planned.step.samples.images
        assert images is not None
        assert len(encoding.place) == images.count.sum()
        assert "encode" in [stage.name for stage in planned.plan.stages]


def test_chunks_are_made_once_whether_images_are_exchanged_or_not(tmp_path):
    path = picture_documents(tmp_path / "a.parquet", 64)
    made = []
    for exchange in (None, "cp"):
        with ol.start(picture_job(path, ol.Mesh(dp=2), exchange, num_workers=0)) as loader:
            clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
            while None not in [next(client, None) for client in clients]:
                pass
            made.append(loader.report().buffers["pictures"].chunks_made)
    assert made[0] == made[1] > 1


def test_the_fields_of_an_exchange_come_through_a_service_as_they_were(tmp_path):
    mesh = ol.Mesh(dp=2)
    path = picture_documents(tmp_path / "a.parquet", 40)
    with ol.start(picture_job(path, mesh, "cp")) as here, ol.start(picture_job(path, mesh, "cp")) as there:
        address = there.serve()
        near = [here.client(rank, timeout_s=60) for rank in range(2)]
        far = [ol.connect(address, rank=rank, timeout_s=60) for rank in range(2)]
        while (steps := [next(client, None) for client in near])[0] is not None:
            others = [next(client) for client in far]
            for mine, other in zip(steps, others, strict=True):
                assert mine is not None
                for left, right in zip(mine, other, strict=True):
                    assert left.keys() == right.keys()
                    for name in ("send_rows", "send_counts", "receive_rows", "receive_counts", "image_row"):
                        assert np.array_equal(left[name], right[name])
                    assert all(map(np.array_equal, left["encode_images"], right["encode_images"]))
        for client in far:
            client.close()


def test_texts_with_other_image_places_than_the_strategy_counts_are_refused(tmp_path):
    job = picture_job(picture_documents(tmp_path / "a.parquet", 20), ol.Mesh(), "cp")
    coarse = ol.strategies.multimodal(
        ol.TransformerCost(1.0, 0.01),
        ol.vision.VisionTransformerCost(2.0, 0.05),
        grid=ol.vision.PatchGrid(GRID.patch, merge=4),
        exchange="cp",
    )
    wrong = ol.Job(sources=job.sources, batch=job.batch, strategy=coarse)
    with ol.start(wrong) as loader, pytest.raises(ol.errors.DataError, match="image places"):
        next(loader.client(0, timeout_s=60))
