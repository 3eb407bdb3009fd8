"""Preference pairs are never cut or separated: under any mesh, layout, strategy, packing and resume."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.batches.slices import join_cp
from overlord.errors import DataError, SchemaError, SpecError
from tests.small_sources import Numbered

NUM_PAIRS = 23


@dataclass(frozen=True)
class Preferences(ol.Source):
    """Pair p has the tokens 10,000 (p + 1) + side * 5,000 + place. Its answers begin at place p % 3 + 1."""

    num_pairs: int = NUM_PAIRS

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("pairs", i, None, 4000) for i in range(-(-self.num_pairs // 4))]

    def read(self, unit: ol.Unit) -> pa.Table:
        pairs = range(4 * unit.index, min(4 * unit.index + 4, self.num_pairs))
        sides = [[side_of(p, side) for side in (0, 1)] for p in pairs]
        masks = [
            np.concatenate([np.arange(len(side)) > p % 3 for side in both]) for p, both in zip(pairs, sides, strict=True)
        ]
        return pa.table(
            {
                "tokens": pa.array([np.concatenate(both) for both in sides], pa.list_(pa.int32())),
                "loss_mask": pa.array([mask.astype(np.int8) for mask in masks], pa.list_(pa.int8())),
                "chosen_tokens": [len(both[0]) for both in sides],
                "pair": list(pairs),
            }
        )

    def identity(self) -> str:
        return f"Preferences({self.num_pairs})"


def side_of(pair: int, side: int) -> np.ndarray:
    length = pair % 3 + 2 + (pair * 7 + side * 5) % 6
    return 10_000 * (pair + 1) + 5_000 * side + np.arange(length)


def pairs_source(**options: Any) -> Preferences:
    return Preferences(pairs="chosen_tokens", loss_mask="loss_mask", **options)


def wholes(job: ol.Job, steps: list[ol.Step]) -> list[list[dict[str, Any]]]:
    """The whole microbatches of each data-parallel group, joined from the slices of its context-parallel ranks."""
    tree, found = ol.ClientPlaceTree(job.mesh), []
    for dp in range(job.mesh.dp):
        ranks = [tree.rank_of(dp=dp, cp=cp) for cp in range(job.mesh.cp)]
        found.append(
            [join_cp([dict(each) for each in micro]) for micro in zip(*(steps[rank] for rank in ranks), strict=True)]
        )
    return found


def check_pairs(micro: dict[str, Any]) -> list[int]:
    """The pairs of a microbatch, each with both its sides and the labels of their answers alone."""
    tokens, labels, positions = (np.asarray(micro[name]).ravel() for name in ("tokens", "labels", "position_ids"))
    starts, lengths, owners = (micro[name].tolist() for name in ("document_starts", "document_lengths", "document_pairs"))
    found, sides = [], dict[int, list[int]]()
    for d, (start, length, owner) in enumerate(zip(starts, lengths, owners, strict=True)):
        own = tokens[start : start + length]
        assert positions[start : start + length].tolist() == list(range(length))
        if "cu_seqlens" in micro:
            bounds = micro.get("cu_seqlens_padded", micro["cu_seqlens"])
            assert start in bounds, "attention begins with each side"
        if owner < 0:
            assert not micro["document_chosen"][d]
            continue
        pair, side = own[0] // 10_000 - 1, int(own[0] // 5_000 % 2)
        assert own.tolist() == side_of(pair, side).tolist()
        assert bool(micro["document_chosen"][d]) == (side == 0)
        sides.setdefault(owner, []).append(side)
        expected = [int(own[i + 1]) if i + 1 < length and i + 1 > pair % 3 else -100 for i in range(length)]
        assert labels[start : start + length].tolist() == expected
        if side == 0:
            found.append(int(pair))
        else:
            assert found[-1] == pair, "the sides of a pair lie side by side"
            if "pair" in micro:
                assert micro["pair"].to_pylist()[d - 1 : d + 1] == [pair, pair]
    assert all(each == [0, 1] for each in sides.values())
    return found


def read(job: ol.Job, steps: int, resume: Any = None) -> tuple[list[list[int]], Any]:
    with ol.start(job, resume=resume) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(job.mesh.world_size)]
        found = []
        for _ in range(steps):
            taken = [next(client, None) for client in clients]
            if taken[0] is None:
                assert not any(taken)
                break
            whole = [micro for group in wholes(job, [step for step in taken if step]) for micro in group]
            assert taken[0].loss_tokens == sum(int((micro["labels"] != -100).sum()) for micro in whole)
            found.append(sorted(pair for micro in whole for pair in check_pairs(micro)))
        return found, loader.state_dict()


STRATEGIES = {
    "plain": ol.strategies.plain(),
    "balanced": ol.strategies.long_short(ol.TransformerCost(per_token=1.0, per_length_squared=0.1)),
    "uneven": ol.strategies.long_short(ol.TransformerCost(per_token=1.0, per_length_squared=0.1), equal_counts=False),
}
meshes = st.sampled_from([ol.Mesh(), ol.Mesh(dp=2), ol.Mesh(dp=3), ol.Mesh(cp=2), ol.Mesh(dp=2, cp=2)])


@settings(deadline=None, max_examples=25)
@given(
    mesh=meshes,
    other=meshes,
    layout=st.sampled_from(["packed", "padded"]),
    pad_to=st.sampled_from(["longest", "sequence_length"]),
    by_tokens=st.booleans(),
    multiple=st.sampled_from([1, 4]),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    is_mixed=st.booleans(),
    cut=st.integers(1, 4),
)
def test_pairs_stay_together_under_any_mesh_layout_strategy_and_cut(
    mesh, other, layout, pad_to, by_tokens, multiple, strategy, is_mixed, cut
):
    size: dict[str, Any] = {"tokens": 192} if by_tokens and layout == "packed" else {"samples": 7}
    batch = ol.Batch(sequence_length=32, layout=layout, pad_to=pad_to, document_multiple=multiple, columns=("pair",), **size)
    sources: dict[str, ol.Source] = {"pairs": pairs_source()}
    if is_mixed:
        sources["text"] = Numbered(first=1, null_columns=("pair",))

    def job(mesh: ol.Mesh) -> ol.Job:
        return ol.Job(sources=sources, batch=batch, mesh=mesh, strategy=STRATEGIES[strategy], num_workers=0)

    expected, _ = read(job(mesh), 6)
    begun, state = read(job(mesh), cut)
    rest, _ = read(job(other), 6 - cut, resume=state)
    assert [*begun, *rest] == expected
    assert sum(map(len, expected)) > 6


def test_every_pair_comes_once_an_epoch():
    batch = ol.Batch(tokens=128, sequence_length=64)
    job = ol.Job(sources={"pairs": pairs_source(repeat=False)}, batch=batch, mesh=ol.Mesh(dp=2), num_workers=0)
    found, _ = read(job, 100)
    assert sorted(pair for step in found for pair in step) == list(range(NUM_PAIRS))


def test_pairs_are_the_same_from_worker_processes():
    job = ol.Job(sources={"pairs": pairs_source()}, batch=ol.Batch(tokens=128, sequence_length=32), mesh=ol.Mesh(dp=2))
    expected, _ = read(job, 3)
    with ol.start(job, engine=ol.Processes()) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        for pairs in expected:
            taken = [next(client) for client in clients]
            assert sorted(p for group in wholes(job, taken) for micro in group for p in check_pairs(micro)) == pairs


def test_a_pair_costs_as_its_two_sides_do():
    samples = ol.Samples.of_lengths(np.array([10, 7]), sizes={"chosen_tokens": np.array([4, 0])})
    from overlord.arrange.cost import costs_of

    assert costs_of(lambda s: (s.tokens**2).astype(float), samples).tolist() == [4**2 + 6**2, 7**2]


def first_step(source: ol.Source, **options: Any) -> Any:
    batch = options.pop("batch", ol.Batch(tokens=64, sequence_length=32))
    with ol.start(ol.Job(sources={"pairs": source}, batch=batch, num_workers=0, **options)) as loader:
        next(loader.client(0, timeout_s=10))
        return loader.report(), loader.metrics()


def test_pairs_that_are_too_long_are_dropped_counted_and_told(caplog):
    report, metrics = first_step(pairs_source(), batch=ol.Batch(tokens=16, sequence_length=8))
    assert report.documents["pairs"]["dropped"] == metrics.sources["pairs"].dropped > 0
    assert "documents of its chunk 0 are longer than sequence_length and are left out" in caplog.text


def test_pairs_that_are_too_long_may_be_an_error():
    with pytest.raises(DataError, match=r"source 'pairs': pairs.*a document of .* set long_documents to 'drop'\n"):
        first_step(pairs_source(long_documents="fail"), batch=ol.Batch(tokens=16, sequence_length=8))


@pytest.mark.parametrize(
    ("source", "batch", "message"),
    [
        ({"long_documents": "split"}, {}, "long_documents='split' would cut conversations"),
        ({"long_documents": "truncate"}, {}, "would cut the rejected side off a preference pair"),
        ({"long_documents": "some"}, {}, "long_documents must be split, truncate, drop or fail, not 'some'"),
        ({"tokens": None}, {"samples": 4}, "the source has tokens=None"),
        ({}, {"tokens": 64, "cut_documents": True}, "cut_documents=True would cut.*'pairs' hold such rows"),
        ({}, {"tokens": 64, "document_limits": {0: 8}}, "document_limits would cut conversations and preference pairs"),
        ({"decode": ol.vision.DecodeImage("image")}, {"samples": 4}, "preference pairs are text, but 'pairs' decode images"),
    ],
)
def test_what_would_cut_a_pair_is_refused(source, batch, message):
    options: Any = batch or {"tokens": 64}
    with pytest.raises(SpecError, match=message):
        ol.Job(sources={"pairs": pairs_source(**source)}, batch=ol.Batch(sequence_length=32, **options))


def test_hybrid_data_parallelism_refuses_pairs():
    strategy = ol.strategies.hdp(ol.TransformerCost(per_token=1.0, per_length_squared=0.1), capacity=64)
    with pytest.raises(SpecError, match=r"a preference pair is never cut: use strategies\.long_short"):
        first_step(pairs_source(), strategy=strategy, mesh=ol.Mesh(cp=2))


@dataclass(frozen=True)
class Broken(ol.Source):
    chosen: Any = 0

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("broken")]

    def read(self, unit: ol.Unit) -> pa.Table:
        return pa.table({"tokens": pa.array([[1, 2, 3]], pa.list_(pa.int32())), "chosen_tokens": pa.array([self.chosen])})


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (0, DataError, "broken, row 0: the pair has no chosen side: 'chosen_tokens' is 0 of 3 tokens"),
        (3, DataError, "broken, row 0: the pair has no rejected side: 'chosen_tokens' is 3 of 3 tokens"),
        (1.5, SchemaError, "pairs='chosen_tokens' is a column of numbers of tokens, it is double"),
    ],
)
def test_a_pair_without_one_of_its_sides_is_a_bad_row(chosen, error, message):
    with pytest.raises(error, match=message):
        first_step(Broken(chosen, pairs="chosen_tokens"))
    with pytest.raises(SchemaError, match=r"has no column 'sides'.*its option pairs"):
        first_step(Broken(chosen, pairs="sides"))
