"""What ranks find in their microbatches when documents are cut over them: as clients get it, and over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import overlord as ol
from overlord.arrange.hdp.rings import RingPart, chunks_of
from overlord.batches.buffers import Arenas
from overlord.batches.collate import collate
from overlord.messages import Delivery
from overlord.service.dry_run import read_steps
from overlord.service.flight_steps import pack_step, regions_of
from overlord.service.steps import unpack_step
from tests.batches.microbatches import microbatch
from tests.small_sources import Numbered, documents_of, job_of

SOURCE = Numbered(rows=60, longest=120, first=1)
COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.02)


def job(mesh: ol.Mesh, **fields: Any) -> ol.Job:
    strategy = ol.strategies.hdp(COST, capacity=40)
    return job_of({"a": SOURCE}, ol.Batch(tokens=512, sequence_length=128, **fields), mesh=mesh, strategy=strategy)


def first_step(job: ol.Job) -> dict[int, ol.Step]:
    with ol.start(job) as loader:
        (taken,) = read_steps(loader, num_steps=1)
        return dict(taken.parts)


def test_tokens_positions_and_labels_are_those_of_the_whole_document_across_every_cut():
    lengths = documents_of(SOURCE)
    cut = set()
    for step in first_step(job(ol.Mesh(dp=2, cp=2))).values():
        for micro in step:
            bounds = micro["cu_seqlens"].tolist()
            pieces = zip(bounds, bounds[1:], micro["piece_offsets"].tolist(), micro["whole_lengths"].tolist(), strict=False)
            for begin, end, offset, whole in pieces:
                document = int(micro["tokens"][begin]) // 1000
                assert lengths[document] == whole
                places = np.arange(offset, offset + end - begin)
                assert micro["tokens"][begin:end].tolist() == (document * 1000 + places).tolist()
                assert micro["position_ids"][begin:end].tolist() == places.tolist()
                following = np.where(places + 1 < whole, document * 1000 + places + 1, -100)
                assert micro["labels"][begin:end].tolist() == following.tolist()
                if end - begin < whole:
                    cut.add(document)
    assert cut


def test_the_ranks_of_a_ring_agree_on_it_and_hold_its_parts_in_order():
    parts = first_step(job(ol.Mesh(dp=2, cp=3)))
    rings: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, step in parts.items():
        numbers = [micro["hdp_number"] for micro in step if micro["hdp_number"] >= 0]
        assert numbers == sorted(numbers)
        for micro in step:
            assert micro["hdp_ranks"][micro["hdp_index"]] == rank
            if micro["hdp_number"] >= 0:
                rings.setdefault(micro["hdp_number"], {})[rank] = micro
            else:
                assert micro["hdp_ranks"].tolist() == [rank]
    assert len(rings) > 2
    for ranks in rings.values():
        members = next(iter(ranks.values()))["hdp_ranks"].tolist()
        assert sorted(ranks) == members
        for part, rank in enumerate(members):
            micro = ranks[rank]
            assert micro["hdp_ranks"].tolist() == members
            expected = chunks_of(int(micro["whole_lengths"][0]), len(members), part)
            assert micro["piece_offsets"].tolist() == [chunk.begin for chunk in expected]
            assert micro["document_lengths"].tolist() == [chunk.end - chunk.begin for chunk in expected]


def test_stages_and_tensor_parallel_ranks_have_rings_of_their_own_kind():
    mesh = ol.Mesh(pp=2, dp=2, cp=2, tp=2)
    tree = ol.ClientPlaceTree(mesh)
    parts = first_step(job(mesh))
    for rank, step in parts.items():
        place = tree.coordinates(rank)
        first = parts[tree.rank_of(dp=place.dp, cp=place.cp)]
        assert len(step) == len(first)
        for micro, other in zip(step, first, strict=True):
            assert ("tokens" in micro) == (place.pp == 0)
            assert ("labels" in micro) == (place.pp == 1)
            assert micro["cu_seqlens"].tolist() == other["cu_seqlens"].tolist()
            assert micro["hdp_number"] == other["hdp_number"]
            at = [tree.coordinates(int(peer)) for peer in micro["hdp_ranks"]]
            assert {(peer.pp, peer.tp) for peer in at} == {(place.pp, place.tp)}
            expected = [tree.coordinates(int(peer)) for peer in other["hdp_ranks"]]
            assert [(peer.dp, peer.cp) for peer in at] == [(peer.dp, peer.cp) for peer in expected]


def test_broadcast_along_tp_leaves_what_a_ring_needs():
    mesh = ol.Mesh(dp=2, cp=2, tp=2)
    strategy = ol.strategies.hdp(COST, capacity=40, broadcast=("tp",))
    parts = first_step(replace(job(mesh), strategy=strategy))
    for micro in parts[1]:
        assert "tokens" not in micro
        assert micro["broadcast"]["tokens"] == ((micro["num_tokens"],), "int32")
        assert {"hdp_ranks", "hdp_index", "piece_offsets", "whole_lengths"} <= micro.keys()


def test_a_dry_run_counts_every_token_once():
    with ol.start(job(ol.Mesh(dp=2, cp=2))) as loader:
        for taken, number in zip(read_steps(loader, num_steps=3), range(3), strict=True):
            planned = loader.plan(number)
            assert planned is not None
            assert taken.tokens == taken.places == int(planned.step.samples.tokens.sum())


def test_everything_a_ring_needs_goes_over_the_wire():
    for rank, step in first_step(job(ol.Mesh(dp=2, cp=2), columns=("document",))).items():
        delivery = Delivery(step.number, step.loss_tokens, tuple(dict(micro) for micro in step))
        contents, batches = pack_step(delivery)
        again = unpack_step(contents, regions_of(list(batches)), Arenas(2))
        for sent, got in zip(step.microbatches, again.microbatches, strict=True):
            assert sent.keys() == got.keys()
            for name in ("hdp_ranks", "piece_offsets", "whole_lengths", "offload_ratios", "position_ids"):
                assert got[name].dtype == sent[name].dtype
                assert got[name].tolist() == sent[name].tolist(), (rank, name)
            assert (got["hdp_index"], got["hdp_number"]) == (sent["hdp_index"], sent["hdp_number"])
            assert got["document"].to_pylist() == (sent["tokens"][sent["document_starts"]] // 1000).tolist()


@pytest.mark.parametrize("same_size", [True, False])
def test_images_come_once_with_the_first_piece_of_a_document(same_size):
    made = microbatch([3, 4])
    shapes = [(4, 4, 3), (4, 4, 3) if same_size else (2, 6, 3)]
    images = [[np.full(shape, i, np.uint8) for i, shape in enumerate(shapes)]] * 2
    collated = collate(made.micro, replace(made.payload, images=images), made.batch)
    ring = RingPart(7, np.array([0, 3]), 1, np.array([3, 10]), np.array([14, 14]), np.zeros(2))
    fields, _ = ring.build(collated)
    assert fields["image_document"].tolist() == [0, 0]
    assert [image.max() for image in fields["images"]] == [0, 1]
    assert fields["position_ids"].tolist() == [3, 4, 5, 10, 11, 12, 13]
