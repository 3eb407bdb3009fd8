"""Labels, loss mask, loss weights and loss tokens agree on whole runs: under any mesh, strategy and batch."""

import json
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.arrange.explain import explain
from overlord.trainer import token_loss
from tests.contract.test_stream import MESHES, STRATEGIES
from tests.service.served import served, streams, undisturbed
from tests.small_sources import Numbered, job_of, length_of

pytestmark = pytest.mark.strangers
IMAGE = -200

BATCHES = st.sampled_from(
    [
        ol.Batch(tokens=64, sequence_length=16),
        ol.Batch(tokens=64, sequence_length=16, cut_documents=True),
        ol.Batch(tokens=64, sequence_length=16, document_limits={0: 4, 2: 8}),
        ol.Batch(samples=7, sequence_length=8),
        ol.Batch(samples=7, sequence_length=8, long_documents="truncate"),
        ol.Batch(samples=6, sequence_length=16, layout="padded"),
    ]
)


def weight_of(tokens: np.ndarray) -> np.ndarray:
    """0, 1/8, ... up to 2: sums of these are exact, so that they can be compared."""
    return (tokens % 17 / 8).astype(np.float32)


@dataclass(frozen=True)
class Weighted(Numbered):
    """Documents as those of `Numbered`, each token with its weight. Every fifth token is an image's where that is asked."""

    with_images: bool = False

    def read(self, unit: ol.Unit) -> pa.Table:
        table = super().read(unit)
        documents = [np.array(tokens, np.int64) for tokens in table["tokens"].to_pylist()]
        weights = [weight_of(tokens) for tokens in documents]
        if self.with_images:
            documents = [np.where(tokens % 5 == 3, IMAGE, tokens) for tokens in documents]
        columns = {
            "tokens": pa.array(documents, pa.list_(pa.int64())),
            "weights": pa.array(weights, pa.list_(pa.float64())),
        }
        return pa.table({**columns, **{name: table[name] for name in table.column_names if name != "tokens"}})


WEIGHTED = Weighted(rows=40, first=1, loss_weights="weights")
PLAIN = Numbered(rows=23, unit_rows=4, first=100, longest=16)


def microbatches_of(job: ol.Job, steps: int, resume=None):
    """For each step: its loss tokens, and the microbatches of one rank of each slice."""
    with ol.start(job, resume=resume) as loader:
        mesh = job.mesh
        ranks = [loader.tree.rank_of(dp=dp, cp=cp) for dp in range(mesh.dp) for cp in range(mesh.cp)]
        clients = [loader.client(rank, timeout_s=30) for rank in ranks]
        for taken in islice(zip(*clients, strict=True), steps):
            assert len({step.loss_tokens for step in taken}) == 1
            yield taken[0].loss_tokens, [micro for step in taken for micro in step]


def check_agreement(micro: dict) -> None:
    labels = micro["labels"]
    assert np.array_equal(micro["loss_mask"], labels != -100)
    assert (labels[micro["loss_mask"]] >= 0).all()


@settings(max_examples=40)
@given(MESHES, STRATEGIES, BATCHES)
def test_the_loss_tokens_of_a_weighted_step_are_the_sum_of_the_weights_that_its_ranks_hold(mesh, strategy, batch):
    job = job_of({"weighted": WEIGHTED, "plain": PLAIN}, batch, mesh=mesh, strategy=strategy)
    for loss_tokens, micros in microbatches_of(job, 5):
        for micro in micros:
            check_agreement(micro)
            labels, weights = micro["labels"], micro["loss_weights"]
            assert weights.dtype == np.float32
            expected = np.where(labels >= 100_000, 1, weight_of(labels))
            assert np.array_equal(weights, np.where(micro["loss_mask"], expected, 0))
            assert (weights > 0).tolist() == micro["loss_mask"].tolist()
        assert loss_tokens == sum(float(micro["loss_weights"].sum()) for micro in micros)


@settings(max_examples=40)
@given(MESHES, STRATEGIES, BATCHES, st.booleans())
def test_a_special_id_is_an_input_and_never_a_label(mesh, strategy, batch, weighted):
    source = replace(WEIGHTED, with_images=True, loss_weights="weights" if weighted else None)
    job = job_of({"images": source, "plain": PLAIN}, replace(batch, special_ids=(IMAGE,)), mesh=mesh, strategy=strategy)
    found = 0
    for loss_tokens, micros in microbatches_of(job, 5):
        for micro in micros:
            check_agreement(micro)
            found += int(np.count_nonzero(micro["tokens"] == IMAGE))
        counts = [micro["loss_weights"].sum() if weighted else micro["loss_mask"].sum() for micro in micros]
        assert loss_tokens == sum(float(count) for count in counts)
    assert found


@pytest.mark.parametrize(
    "batch", [ol.Batch(tokens=64, sequence_length=16, cut_documents=True), ol.Batch(tokens=64, sequence_length=16)]
)
def test_every_weight_is_counted_once_in_an_epoch_also_when_it_is_saved_and_resumed(batch):
    job = job_of({"weighted": replace(WEIGHTED, repeat=False)}, batch)
    documents = [np.arange(length_of(d, 12)) + d * 1000 for d in range(1, 41)]
    expected = sum(float(weight_of(tokens)[1:].sum()) for tokens in documents)
    uncut = [loss_tokens for loss_tokens, _ in microbatches_of(job, 100)]
    assert sum(uncut) == expected
    with ol.start(job) as loader:
        client = loader.client(0)
        begun = [next(client).loss_tokens for _ in range(2)]
        state = json.loads(json.dumps(client.state_dict()))
    rest = replace(job, mesh=ol.Mesh(dp=2))
    assert begun + [loss_tokens for loss_tokens, _ in microbatches_of(rest, 100, resume=state)] == uncut


def test_weights_of_one_change_nothing_but_the_field():
    with_ones = Numbered(rows=40, first=1, with_mask=True)
    batch = ol.Batch(tokens=64, sequence_length=16)
    plain = list(microbatches_of(job_of({"a": with_ones, "b": PLAIN}, batch), 4))
    weighted = replace(with_ones, loss_weights="ones", transform=add_ones)
    for (count, micros), (total, others) in zip(
        plain, microbatches_of(job_of({"a": weighted, "b": PLAIN}, batch), 4), strict=True
    ):
        assert isinstance(count, int)
        assert total == count
        for micro, other in zip(micros, others, strict=True):
            assert set(other) - set(micro) == {"loss_weights"}
            assert other["loss_weights"].tolist() == micro["loss_mask"].astype(float).tolist()
            assert other["labels"].tolist() == micro["labels"].tolist()


def add_ones(table: pa.Table) -> pa.Table:
    ones = [[1.0] * len(tokens or ()) for tokens in table["tokens"].to_pylist()]
    return table.append_column("ones", pa.array(ones, pa.list_(pa.float32())))


def test_the_last_stage_of_a_pipeline_gets_the_weights_and_no_other():
    with ol.start(job_of({"weighted": WEIGHTED}, mesh=ol.Mesh(pp=3))) as loader:
        has_weights = [["loss_weights" in micro for micro in next(loader.client(rank))] for rank in range(3)]
    assert [set(found) for found in has_weights] == [{False}, {False}, {True}]


def test_a_weighted_run_is_the_same_over_the_wire():
    sources = {"weighted": replace(WEIGHTED, with_images=True), "plain": PLAIN}
    batch = ol.Batch(tokens=64, sequence_length=16, special_ids=(IMAGE,))
    job = job_of(sources, batch, mesh=ol.Mesh(dp=2, cp=2))
    with served(job) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=20) for rank in range(4)]
        assert streams(clients, 4) == undisturbed(job, 4)


def test_the_weighted_loss_of_a_step_is_the_weighted_mean_whatever_its_arrangement():
    def loss(mesh: ol.Mesh) -> float:
        batch = ol.Batch(samples=4, sequence_length=16)
        with ol.start(job_of({"weighted": WEIGHTED}, batch, mesh=mesh)) as loader:
            total = 0.0
            for rank in range(mesh.world_size):
                step = next(loader.client(rank, torch=True))
                for micro in step:
                    labels = micro["labels"].clone()
                    labels[labels >= 0] %= 64
                    logits = torch.sin(micro["tokens"].double()[:, None] * torch.arange(1, 65))
                    total += token_loss(logits, labels, step.loss_tokens, micro["loss_weights"]).item()
            return total

    assert loss(ol.Mesh()) == pytest.approx(loss(ol.Mesh(dp=2, cp=2)), rel=1e-9)
    each = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = token_loss(each, torch.tensor([1, 0]), 0.5, torch.tensor([0.25, 0.25]))
    assert found.item() == pytest.approx(torch.nn.functional.cross_entropy(each, torch.tensor([1, 0])).item())


def test_explain_tells_how_many_tokens_have_loss_and_what_their_weights_add_up_to():
    with ol.start(job_of({"weighted": WEIGHTED})) as loader:
        planned = loader.plan(0)
        assert planned is not None
        total = planned.plan.loss_tokens
        count = int(planned.plan.samples.loss_tokens.sum())
        assert f"of which {count:,} with loss; their weights add up to {total:,.3f}" in explain(planned.plan)


def test_padded_rows_are_as_wide_as_the_longest_document_of_their_microbatch():
    def widths(mesh: ol.Mesh, **options) -> list[tuple[int, int]]:
        """For every microbatch: its width over all context-parallel ranks, and its longest document."""
        batch = ol.Batch(samples=8, sequence_length=64, micro_tokens=128, layout="padded", **options)
        found = []
        with ol.start(job_of({"plain": PLAIN}, batch, mesh=mesh)) as loader:
            for dp in range(mesh.dp):
                clients = [loader.client(loader.tree.rank_of(dp=dp, cp=cp), torch=True) for cp in range(mesh.cp)]
                for parts in zip(*(next(client) for client in clients), strict=True):
                    shapes = [part["tokens"].shape for part in parts]
                    assert all(
                        part[name].shape == part["tokens"].shape for part in parts for name in ("labels", "attention_mask")
                    )
                    assert {rows for rows, _ in shapes} == {2}
                    found.append((sum(width for _, width in shapes), int(parts[0]["document_lengths"].max())))
        return found

    for mesh in (ol.Mesh(), ol.Mesh(dp=2), ol.Mesh(cp=2), ol.Mesh(dp=2, cp=2)):
        wide = widths(mesh)
        assert all(width == longest for width, longest in wide)
        assert len({width for width, _ in wide}) > 1
        assert all(width == -(-longest // 4) * 4 for width, longest in widths(mesh, document_multiple=4))
        assert {width for width, _ in widths(mesh, pad_to="sequence_length")} == {64}
