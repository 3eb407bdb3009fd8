"""The contract of the stream, on whole runs: conservation, purity, topology invariance, exact resume, bounded buffers."""

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from tests.small_sources import Numbered, documents_of, job_of, read_all, same, tokens_of

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
C = Numbered(rows=9, unit_rows=2, first=300, longest=3)

COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)
MESHES = st.builds(ol.Mesh, dp=st.integers(1, 4), cp=st.integers(1, 3), tp=st.integers(1, 2), pp=st.just(1))


def pooled(graph: ol.DGraph) -> ol.Plan:
    """Ranks as one pool in which the longest documents just find room."""
    if graph.batch.layout == "padded":
        return ol.strategies.plain()(graph)
    capacity = -(-graph.batch.sequence_length // graph.place.num_groups("cp"))
    return ol.strategies.hdp(COST, capacity=capacity)(graph)


STRATEGIES = st.sampled_from(
    [None, ol.strategies.long_short(COST), ol.strategies.long_short(COST, equal_counts=False), pooled]
)
BATCHES = st.sampled_from(
    [
        ol.Batch(tokens=64, sequence_length=16),
        ol.Batch(tokens=64, sequence_length=16, cut_documents=True),
        ol.Batch(tokens=96, sequence_length=16, micro_tokens=32),
        ol.Batch(samples=9, sequence_length=16),
        ol.Batch(samples=6, sequence_length=16, layout="padded"),
        ol.Batch(tokens=48, sequence_length=8, long_documents="split"),
    ]
)
FEW = settings(max_examples=25)


@FEW
@given(BATCHES, MESHES, STRATEGIES, st.integers(0, 3))
def test_the_samples_of_a_step_do_not_depend_on_mesh_strategy_or_seed_of_the_machine(batch, mesh, strategy, seed):
    sources = {"a": A, "b": B, "c": C}
    mixture = ol.Mixture({"a": 5, "b": 3, "c": 1})
    alone, _ = read_all(job_of(sources, batch, mixture=mixture, seed=seed), 8)
    shared, _ = read_all(job_of(sources, batch, mixture=mixture, seed=seed, mesh=mesh, strategy=strategy), 8)
    assert same(alone, shared)


@FEW
@given(BATCHES, MESHES, MESHES, STRATEGIES, st.integers(0, 9))
def test_a_run_resumed_at_any_step_on_any_other_mesh_goes_on_as_if_uncut(batch, first, second, strategy, cut):
    sources = {"a": A, "b": B, "c": C}
    mixture = ol.Mixture({0: {"a": 5, "b": 3}, 4: {"a": 1, "b": 1, "c": 1}}, unit="tokens", ramp="linear")
    uncut, end = read_all(job_of(sources, batch, mixture=mixture), 10)
    before, state = read_all(job_of(sources, batch, mixture=mixture, mesh=first, strategy=strategy), cut)
    after, resumed_end = read_all(job_of(sources, batch, mixture=mixture, mesh=second), 10 - cut, resume=state)
    assert same(before + after, uncut)
    assert resumed_end == end


@FEW
@given(BATCHES, MESHES, st.sampled_from(["first_exhausted", "drop_exhausted", "all_exhausted"]))
def test_a_finite_run_ends_on_all_ranks_together(batch, mesh, stop):
    sources = {"a": Numbered(rows=17, first=1, repeat=False), "b": Numbered(rows=6, first=100, repeat=False)}
    steps, _ = read_all(job_of(sources, batch, mixture=ol.Mixture({"a": 1, "b": 1}, stop=stop), mesh=mesh), 1000)
    assert 0 < len(steps) < 1000


@FEW
@given(BATCHES, MESHES, STRATEGIES)
def test_one_epoch_gives_every_token_of_every_document_once(batch, mesh, strategy):
    sources = {"a": Numbered(rows=17, first=1, repeat=False), "b": Numbered(rows=6, first=100, repeat=False)}
    steps, _ = read_all(job_of(sources, batch, mesh=mesh, strategy=strategy), 1000)
    seen = Counter(np.concatenate(steps).tolist())
    expected = Counter(
        document * 1000 + place
        for source in sources.values()
        for document, length in documents_of(source).items()
        for place in range(length)
    )
    assert seen == expected


@FEW
@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
def test_the_stream_is_the_same_for_any_number_of_loaders_workers_and_steps_ahead(loaders, workers, prefetch):
    def job(loaders: int, **fields: Any) -> ol.Job:
        sources = {
            "a": Numbered(rows=40, first=1, loaders=loaders),
            "b": Numbered(rows=23, unit_rows=4, first=100, loaders=max(1, loaders - 1)),
        }
        return job_of(sources, **fields)

    plain, _ = read_all(job(1), 12)
    spread, _ = read_all(job(loaders, num_workers=workers, prefetch=prefetch), 12)
    assert same(plain, spread)


def test_two_runs_of_one_job_are_equal_byte_for_byte_on_every_rank():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2, cp=2))

    def run() -> list[bytes]:
        with ol.start(job) as loader:
            clients = [loader.client(rank) for rank in range(4)]
            return [
                np.ascontiguousarray(micro[name]).tobytes()
                for _ in range(6)
                for client in clients
                for micro in next(client)
                for name in ("tokens", "labels", "position_ids", "loss_mask", "cu_seqlens")
            ]

    assert run() == run()


def test_epochs_are_shuffled_differently_and_each_holds_every_document_once():
    source = Numbered(rows=12, unit_rows=3, first=1, longest=1)
    with ol.start(job_of({"a": source}, ol.Batch(samples=12, sequence_length=4))) as loader:
        orders = [tokens_of(step).tolist() for step in islice(loader.client(0), 3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2]) == [d * 1000 for d in range(1, 13)]
    assert orders[0] != orders[1] != orders[2]


def test_without_shuffle_the_order_of_files_is_the_order_of_data():
    source = Numbered(rows=12, unit_rows=3, first=1, longest=1, shuffle=False)
    with ol.start(job_of({"a": source}, ol.Batch(samples=12, sequence_length=4))) as loader:
        assert tokens_of(next(loader.client(0))).tolist() == [d * 1000 for d in range(1, 13)]


def _read_on(clients: list[ol.Client], steps: int) -> None:
    for _ in range(steps):
        for client in clients:
            next(client)


@pytest.mark.parametrize("loaders", [1, 2])
def test_buffers_never_exceed_their_bytes_even_when_one_rank_stops_reading(loaders):
    source = Numbered(rows=400, unit_rows=10, first=1, longest=16, buffer_bytes=8_000 * loaders, loaders=loaders)
    job = job_of({"a": source}, mesh=ol.Mesh(dp=3), prefetch=2)
    with ol.start(job) as loader:
        clients = [loader.client(rank, timeout_s=5.0) for rank in range(3)]
        for _ in range(4):
            for client in clients:
                next(client)
        stopped, *reading = clients
        message = r"waited .* for step \d+: the ranks of data-parallel group 0 are"
        with pytest.raises(ol.errors.WaitTimeoutError, match=message):
            _read_on(reading, 50)
        use = loader.report().buffers["a"]
        assert 0 < use.peak_bytes <= source.buffer_bytes
        for client in (stopped, *reading):  # and it goes on when the rank reads again
            while client.step < 12:
                next(client) if client.step <= stopped.step + 1 else next(stopped)
        assert loader.report().buffers["a"].peak_bytes <= source.buffer_bytes


def test_a_buffer_smaller_than_the_chunks_in_use_changes_the_work_but_not_the_stream():
    def job(buffer_bytes: int) -> ol.Job:
        return job_of({"a": Numbered(rows=40, first=1, buffer_bytes=buffer_bytes), "b": B})

    assert same(read_all(job(1 << 20), 12)[0], read_all(job(1300), 12)[0])


def test_a_chunk_that_is_larger_than_its_buffer_is_an_error_that_says_so():
    job = job_of({"a": Numbered(rows=40, first=1, buffer_bytes=100)})
    with (
        ol.start(job) as loader,
        pytest.raises(ol.errors.BufferTooSmallError, match=r"source 'a': chunk 0 takes .* raise buffer_bytes"),
    ):
        next(loader.client(0))


@FEW
@given(
    MESHES,
    STRATEGIES,
    st.booleans(),
    st.sampled_from(
        [
            ol.Batch(tokens=64, sequence_length=16),
            ol.Batch(tokens=64, sequence_length=16, cut_documents=True),
            ol.Batch(samples=7, sequence_length=8),
        ]
    ),
)
def test_the_loss_tokens_of_a_step_are_those_that_its_ranks_hold_together(mesh, strategy, masked, batch):
    mask = {"with_mask": True, "loss_mask": "mask"} if masked else {}
    sources = {
        "a": Numbered(rows=40, first=1, **mask),
        "b": Numbered(rows=23, unit_rows=4, first=100, longest=16, **mask),
    }
    with ol.start(job_of(sources, batch, mesh=mesh, strategy=strategy)) as loader:
        ranks = [loader.tree.rank_of(dp=dp, cp=cp) for dp in range(mesh.dp) for cp in range(mesh.cp)]
        clients = [loader.client(rank) for rank in ranks]
        for _ in range(5):
            steps = [next(client) for client in clients]
            held = sum(int(np.count_nonzero(micro["labels"] != -100)) for step in steps for micro in step)
            assert {step.loss_tokens for step in steps} == {held}
