"""`Stateful`: one value under one key, that every checkpointer holds, and that is right under look-ahead."""

from __future__ import annotations

import gc
import json
import pickle
from dataclasses import replace
from typing import Any

import orjson
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful as TorchStateful

import overlord as ol
from overlord.integrations.torch import Stateful
from tests.service.served import served
from tests.small_sources import Numbered, job_of
from tests.trainer.test_checkpoints import CUT, SAMPLES, STEPS, TOKENS, read, started, steered, through_dcp, uncut

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("job", [TOKENS, SAMPLES], ids=["tokens", "samples"])
def test_a_stateful_goes_on_from_dcp_with_the_weights_that_were_set(job, tmp_path):
    with started(job) as (loader, client), started(job) as (other, fresh):
        steered(loader)
        first = read(client, CUT)
        assert isinstance(Stateful(client), TorchStateful)
        through_dcp(Stateful(client), Stateful(fresh), tmp_path)
        assert [d.value["weights"] for d in other.decisions()] == [d.value["weights"] for d in loader.decisions()]
        assert first + read(fresh, STEPS - CUT) == uncut(job)


def test_the_saved_form_is_one_text_and_every_form_is_accepted_by_all():
    with started(TOKENS) as (loader, client):
        fresh = Stateful(client).state_dict()
        steered(loader)
        first = read(client, CUT)
        saved, raw = Stateful(client).state_dict(), client.state_dict()
    assert list(saved) == list(fresh) == ["overlord"]
    assert isinstance(saved["overlord"], str)
    assert json.loads(saved["overlord"]) == raw
    expected = uncut(TOKENS)
    forms: list[Any] = [
        saved,
        saved["overlord"],
        saved["overlord"].encode(),
        orjson.dumps(saved),
        raw,
        json.loads(raw["state"]),
    ]
    for form in forms:
        with started(TOKENS) as (other, again):
            Stateful(again).load_state_dict(form)
            assert first + read(again, STEPS - CUT) == expected
            other.load_state_dict(saved)
            assert again.step == CUT
        with started(TOKENS, resume=form) as (_, resumed):
            assert resumed.step == CUT
            resumed.load_state_dict(form)
            assert first + read(resumed, STEPS - CUT) == expected


def test_a_model_that_is_a_step_behind_its_loader_is_saved_where_it_is():
    with started(TOKENS) as (loader, client):
        steered(loader)
        stateful, first, step = Stateful(client), [], next(client)
        while step.number < CUT:  # as a library does that fetches one batch ahead
            ahead = next(client)
            first.append(step)
            stateful.trained(step)
            step = ahead
        saved = stateful.state_dict()
        assert json.loads(saved["overlord"]) == client.state_dict(before=step) == first[-1].state_after()
        assert client.state_dict()["step"] == CUT + 1
    with started(TOKENS) as (_, fresh):
        Stateful(fresh).load_state_dict(saved)
        assert read(fresh, STEPS - CUT) == uncut(TOKENS)[CUT:]


def test_the_state_after_a_step_is_the_same_over_the_wire_and_after_the_client_went_back():
    with served(TOKENS) as (_, address), ol.connect(address, rank=0, timeout_s=30) as client:
        steps = [next(client) for _ in range(4)]
        expected = [client.state_dict(before=step.number + 1) for step in steps]
        client.rewind()
        assert [step.state_after() for step in steps] == expected
        assert client.state_dict()["step"] == 0


def test_a_step_that_cannot_know_its_state_says_so():
    with started(TOKENS) as (loader, client):
        step = next(client)
        copied = pickle.loads(pickle.dumps(replace(step, microbatches=())))
        with pytest.raises(ol.errors.SpecError, match=r"step 0 did not come from a client.*state_dict\(before=1\)"):
            copied.state_after()
        loader.load_state_dict(step.state_after())
        with pytest.raises(ol.errors.ClosedError, match="moved to another state or mesh since it returned step 0"):
            step.state_after()
        step = next(client)
        with pytest.raises(ol.errors.SpecError, match="before is a step from 0 to 2, the one that comes next, got 3"):
            client.state_dict(before=3)
        with pytest.raises(ol.errors.SpecError, match="before must be a whole number"):
            client.state_dict(before="2")  # pyright: ignore[reportArgumentType]
    with ol.start(TOKENS) as loader, loader.client(0) as client:
        step = next(client)
        loader._readers.clients.clear()  # a client of `connect` is held by its user alone
        del client
    gc.collect()
    with pytest.raises(ol.errors.ClosedError, match=r"the client that returned step 0 is gone.*keep the client"):
        step.state_after()


def test_what_is_no_client_and_no_step_and_no_state_is_refused():
    with pytest.raises(ol.errors.SpecError, match=r"Stateful takes a client or a loader of Overlord, got \{\}"):
        Stateful({})  # pyright: ignore[reportArgumentType]
    with started(TOKENS) as (_, client):
        with pytest.raises(ol.errors.SpecError, match="trained takes the step that the client returned, got int"):
            Stateful(client).trained(3)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ol.errors.StateError, match="the text under the key 'overlord' is not JSON"):
            Stateful(client).load_state_dict({"overlord": "{"})
        with pytest.raises(ol.errors.StateError, match="not an Overlord state"):
            Stateful(client).load_state_dict({"model": 1})


def test_a_tree_of_states_is_loaded_in_place_by_dcp_beside_a_model(tmp_path):
    model = torch.nn.Linear(2, 2)
    wider = job_of({**TOKENS.sources, "c": Numbered(rows=9, first=500)}, TOKENS.batch)
    with started(TOKENS) as (loader, client), started(wider) as (_, fresh):
        steered(loader)
        read(client, 3)
        dcp.save({"model": model.state_dict(), "data": Stateful(client)}, checkpoint_id=tmp_path)  # pyright: ignore[reportPrivateImportUsage]
        target = {"model": torch.nn.Linear(2, 2).state_dict(), "data": Stateful(fresh)}
        dcp.load(target, checkpoint_id=tmp_path)  # pyright: ignore[reportPrivateImportUsage]
        assert torch.equal(target["model"]["weight"], model.weight)
        assert fresh.step == 3
