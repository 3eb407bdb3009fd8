"""`Step` in the hands of a trainer: moved, mapped over, changed and pickled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import overlord as ol
from overlord.batches.tensors import register_step
from tests.service.served import served
from tests.small_sources import Numbered, job_of

JOB = job_of({"a": Numbered(rows=40, first=1)}, ol.Batch(tokens=64, sequence_length=32), mesh=ol.Mesh(tp=2))


@pytest.fixture
def steps():
    with ol.start(JOB) as loader:
        yield [loader.client(0, torch=True), loader.client(1, torch=True)]


def test_a_step_is_moved_with_all_of_its_tensors(steps):
    step = next(steps[0])
    moved = step.to("meta", non_blocking=True)
    assert isinstance(moved, ol.Step)
    assert (moved.number, moved.loss_tokens, len(moved)) == (step.number, step.loss_tokens, len(step))
    for micro, old in zip(moved, step, strict=True):
        for name, value in old.items():
            if isinstance(value, torch.Tensor):
                assert micro[name].device.type == "meta"
                assert value.device.type == "cpu"
            else:
                assert micro[name] == value
    assert moved.state_after() == step.state_after()
    listed = ol.Step(0, 1, ({"images": [torch.zeros(2), torch.zeros(3)]},))  # pyright: ignore[reportArgumentType]
    assert [image.device.type for image in listed.to(torch.device("meta"))["images"]] == ["meta", "meta"]
    cut = ol.Step(0, 1, ({"tokens": torch.zeros(2), "hdp_ranks": torch.tensor([0, 1])},))  # pyright: ignore[reportArgumentType]
    assert [cut.to("meta")[name].device.type for name in ("tokens", "hdp_ranks")] == ["meta", "cpu"]


def test_a_step_of_numpy_arrays_cannot_be_moved_and_says_what_to_do():
    with ol.start(JOB) as loader:
        step = next(loader.client(0))
        with pytest.raises(ol.errors.SpecError, match=r"has numpy arrays \('tokens' is one\), and to\('cpu'\) is for torch"):
            step.to("cpu")
        with pytest.raises(ol.errors.SpecError, match=r"pin_memory\(\) is for torch tensors: make the client with torch="):
            step.pin_memory()


def test_functions_over_pytrees_see_the_tensors_of_a_step(steps):
    client = steps[0]
    step, other = next(client), next(client)
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, step)
    assert isinstance(doubled, ol.Step)
    for micro, old in zip(doubled, step, strict=True):
        assert torch.equal(micro["tokens"], old["tokens"] * 2)
        assert micro["max_seqlen"] == old["max_seqlen"]
    assert doubled.state_after() == step.state_after()
    leaves, spec = pytree.tree_flatten(step)
    again = pytree.tree_unflatten(leaves, spec)
    assert [micro.keys() for micro in again] == [micro.keys() for micro in step]
    assert [leaf for leaf in leaves if leaf is step.number]
    assert len(pytree.tree_leaves(step)) == sum(len(micro) for micro in step) + 2
    if len(step) == len(other) and [set(m) for m in step] == [set(m) for m in other]:
        assert pytree.tree_structure(step) == pytree.tree_structure(other)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(step)[0]]
    assert ".microbatches[0]['tokens']" in paths
    register_step()  # again, as a second client does


def test_microbatches_are_plain_dicts_of_their_own(steps):
    ours, theirs = next(steps[0]), next(steps[1])
    for micro in ours:
        assert type(micro) is dict
        micro["tokens"] = micro.pop("labels")
        micro["extra"] = 1
    assert all("extra" not in micro and "labels" in micro for micro in theirs)
    steps[0].rewind()
    steps[1].rewind()
    assert all("extra" not in micro and "labels" in micro for micro in next(steps[0]))


def test_steps_that_came_over_the_wire_are_plain_dicts_too():
    with served(JOB) as (_, address), ol.connect(address, rank=0, timeout_s=30, torch=True) as client:
        for micro in next(client):
            assert type(micro) is dict
            micro["extra"] = 1


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_of_a_step_has_its_arrays_and_leaves_the_client_behind(steps, through: Any):
    step = next(steps[0])
    copied = through(step)
    assert (copied.number, copied.loss_tokens, len(copied)) == (step.number, step.loss_tokens, len(step))
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(copied, step, strict=True))
    assert copied.origin is None
