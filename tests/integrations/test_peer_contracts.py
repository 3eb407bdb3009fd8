"""The contracts that peers test their own loaders by: torchdata's stateful loaders and nodes, Grain's checkpoint helper, and
torch.distributed.checkpoint on 1, 2 and 4 ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import overlord as ol
from overlord.integrations.torch import Stateful
from overlord.trainer import attach
from tests.small_sources import Numbered, job_of, tokens_of
from tests.trainer.ranks import join_world, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 calls it

SOURCES = {"a": Numbered(rows=40, first=1), "b": Numbered(rows=23, unit_rows=4, first=100, longest=16)}
FINITE = {name: replace(source, repeat=False) for name, source in SOURCES.items()}
BATCH = ol.Batch(tokens=64, sequence_length=32)
HEAVY, LIGHT = {"a": 1, "b": 9}, {"a": 9, "b": 1}


def numbers_of(step: ol.Step) -> list[int]:
    return tokens_of(step).tolist()


# torchdata


class Steps(torch.utils.data.IterableDataset):
    """A client as a dataset with a state, as torchdata's loader takes it."""

    def __init__(self, job: ol.Job, wrap: Any) -> None:
        self.loader = ol.start(job)
        self.client = self.loader.client(0, timeout_s=30)
        self.stateful = wrap(self.client)

    def __iter__(self) -> Iterator[list[int]]:
        return map(numbers_of, iter(self.client))

    def state_dict(self) -> dict[str, Any]:
        return self.stateful.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stateful.load_state_dict(state)


@pytest.fixture(params=[lambda client: client, Stateful], ids=["client", "Stateful"])
def stateful_loader(request):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    made: list[Steps] = []

    def make(sources: dict[str, Any] = FINITE) -> Any:
        made.append(Steps(job_of(sources, BATCH), request.param))
        return torchdata.StatefulDataLoader(made[-1], batch_size=None, num_workers=0)

    yield make
    for steps in made:
        steps.loader.close()


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_torchdata_a_loader_that_was_interrupted_goes_on_with_the_next_batch(stateful_loader, cut):
    expected = list(stateful_loader())
    first = stateful_loader()
    taken = list(islice(iter(first), cut))
    fresh = stateful_loader()
    fresh.load_state_dict(first.state_dict())
    assert taken + list(fresh) == expected
    assert len(expected) == 8


def test_torchdata_a_state_that_is_loaded_again_gives_the_same_batches_again(stateful_loader):
    loader = stateful_loader()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state, rest = loader.state_dict(), list(iterator)
    for _ in range(2):
        loader.load_state_dict(state)
        assert list(loader) == rest


def test_torchdata_a_state_can_be_saved_before_the_first_batch_and_right_after_loading(stateful_loader):
    loader, fresh = stateful_loader(), stateful_loader()
    before = loader.state_dict()
    expected = list(loader)
    fresh.load_state_dict(before)
    assert list(fresh) == expected
    loader, fresh, third = stateful_loader(), stateful_loader(), stateful_loader()
    list(islice(iter(loader), 4))
    fresh.load_state_dict(loader.state_dict())
    iterator = iter(fresh)
    third.load_state_dict(fresh.state_dict())
    assert list(third) == list(iterator) == expected[4:]


def test_torchdata_an_epoch_after_the_first_is_the_whole_of_it(stateful_loader):
    loader = stateful_loader()
    assert list(loader) == list(loader)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("cut", [1, 7, 8])
def test_torchdata_an_epoch_after_one_that_was_resumed_is_the_whole_of_it(stateful_loader, cut):
    expected, loader, fresh = list(stateful_loader()), stateful_loader(), stateful_loader()
    list(islice(iter(loader), cut))
    fresh.load_state_dict(loader.state_dict())
    assert list(fresh) == expected[cut:]
    assert list(fresh) == expected
    assert list(fresh) == expected


def test_torchdata_states_are_json_and_survive_pickle(stateful_loader):
    loader = stateful_loader()
    list(islice(iter(loader), 4))
    state = json.loads(json.dumps(loader.dataset.state_dict()))
    assert state == loader.dataset.state_dict()


def test_torchdata_a_client_is_a_node_with_a_state():
    nodes = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")

    class StepNode(nodes.BaseNode):
        def __init__(self, client: ol.Client) -> None:
            super().__init__()
            self.client = client

        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            super().reset(initial_state)
            if initial_state is not None:
                self.client.load_state_dict(initial_state)

        def next(self) -> list[int]:
            return numbers_of(next(self.client))

        def get_state(self) -> dict[str, Any]:
            return self.client.state_dict()

    job = job_of(FINITE, BATCH)
    with ol.start(job) as one, ol.start(job) as two, ol.start(job) as three:
        expected = [numbers_of(step) for step in three.client(0)]
        loader = nodes.Loader(nodes.Prefetcher(StepNode(one.client(0)), prefetch_factor=2))  # it looks ahead, with states
        iterator = iter(loader)
        first = [next(iterator) for _ in range(4)]
        fresh = nodes.Loader(nodes.Prefetcher(StepNode(two.client(0)), prefetch_factor=2))
        fresh.load_state_dict(loader.state_dict())
        assert first + list(fresh) == expected


# Grain


class GrainSteps:
    """A dataset of Grain: every iterator is a fresh run, and its state is that of the client, as it is or as one text."""

    def __init__(self, wrap: Any, job: ol.Job) -> None:
        self._wrap = wrap
        self._job = job
        self.loaders: list[ol.Loader] = []

    def __iter__(self) -> Any:
        self.loaders.append(ol.start(self._job))
        return GrainIterator(self._wrap(client := self.loaders[-1].client(0, timeout_s=30)), client)


class GrainIterator:
    def __init__(self, stateful: Any, client: ol.Client) -> None:
        self._stateful, self._client = stateful, client

    def __iter__(self) -> GrainIterator:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        return [{name: micro[name] for name in ("tokens", "labels", "position_ids")} for micro in next(self._client)]

    def get_state(self) -> dict[str, Any]:
        return self._stateful.state_dict()

    def set_state(self, state: dict[str, Any]) -> None:
        self._stateful.load_state_dict(state)


@pytest.mark.parametrize("wrap", [lambda client: client, Stateful], ids=["raw", "Stateful"])
@pytest.mark.parametrize("batch", [BATCH, ol.Batch(samples=7, sequence_length=16)], ids=["tokens", "samples"])
def test_grain_the_output_after_every_checkpoint_is_equal(wrap, batch):
    experimental = pytest.importorskip("grain.experimental", reason="grain is not installed")
    dataset = GrainSteps(wrap, job_of(FINITE, batch))
    try:
        experimental.assert_equal_output_after_checkpoint(dataset)
    finally:
        for loader in dataset.loaders:
            loader.close()
    assert len(dataset.loaders) > 7


# DCP


def _rank(rank: int, size: int, folder: Path, load: Path | None, save: Path, kind: str) -> None:
    """One rank of a world that loads a checkpoint of another world, steers, reads on, and saves one."""
    torch.set_num_threads(1)
    join_world(rank, size, folder)
    with attach(job_of(SOURCES, BATCH), timeout_s=60) as client:
        state = {"data": client if kind == "client" else Stateful(client), "model": torch.arange(4.0)}
        if load is not None:
            dcp.load(state, checkpoint_id=load)  # pyright: ignore[reportPrivateImportUsage]
        first = client.step
        if first == 0 and rank == 0:
            client.run.set_weights(HEAVY, from_step=2)
            client.run.set_weights(LIGHT, from_step=5)
        dist.barrier()
        found = [numbers_of(next(client)) for _ in range(3)]
        dcp.save(state, checkpoint_id=save)  # pyright: ignore[reportPrivateImportUsage]
        weights = [decision.value["weights"] for decision in client.run.decisions()]
        (folder / f"{rank}.json").write_text(json.dumps([first, found, weights]))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.second_try(reason="torch processes must meet within 60 s")
@pytest.mark.parametrize(("kind", "sizes"), [("client", (2, 4, 1)), ("Stateful", (1, 2, 4))])
def test_dcp_a_run_with_weights_set_live_goes_on_from_a_checkpoint_of_any_number_of_ranks(tmp_path, kind, sizes):
    with ol.start(job_of(SOURCES, BATCH)) as loader:
        loader.set_weights(HEAVY, from_step=2)
        loader.set_weights(LIGHT, from_step=5)
        client = loader.client(0, timeout_s=30)
        expected = [sorted(numbers_of(next(client))) for _ in range(9)]
    load = None
    for index, size in enumerate(sizes):
        folder, save = tmp_path / f"world-{size}", tmp_path / f"saved-{size}"
        folder.mkdir()
        run_ranks(_rank, size, size, folder, load, save, kind)
        parts = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
        start = 3 * index
        assert [first for first, _, _ in parts] == [start] * size
        steps = [sorted(token for _, found, _ in parts for token in found[i]) for i in range(3)]
        assert steps == expected[start : start + 3]
        shares = [dict(sorted(weights.items())) for weights in parts[-1][2]]
        assert shares[-1] == pytest.approx({"a": 0.9, "b": 0.1})
        load = save


def test_the_states_of_a_run_are_equal_as_numpy_compares_them():
    with ol.start(job_of(FINITE, BATCH)) as loader:
        client = loader.client(0)
        states = [client.state_dict()]
        for step in client:
            np.testing.assert_equal(step.state_after(), client.state_dict())
            states.append(step.state_after())
    assert [state["step"] for state in states] == list(range(9))
