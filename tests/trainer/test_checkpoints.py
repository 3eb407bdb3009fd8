"""Clients and loaders inside the checkpoints of training libraries: saved and loaded by the calls that each makes."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.stateful import Stateful

import overlord as ol
from overlord.checkpoint.form import contents_of
from overlord.trainer import attach
from tests.small_sources import Numbered, job_of, read_all, same, tokens_of
from tests.trainer.ranks import join_world, run_ranks

pytestmark = [
    pytest.mark.strangers,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

SOURCES = {"a": Numbered(rows=40, first=1), "b": Numbered(rows=23, unit_rows=4, first=100, longest=16)}
TOKENS = job_of(SOURCES, ol.Batch(tokens=64, sequence_length=32))
SAMPLES = job_of(SOURCES, ol.Batch(samples=7, sequence_length=16))
STEPS, CUT = 9, 5


@contextmanager
def started(job: ol.Job, **options: Any) -> Iterator[tuple[ol.Loader, ol.Client]]:
    with ol.start(job, **options) as loader:
        yield loader, loader.client(0, timeout_s=30)


def read(client: ol.Client, steps: int) -> list[list[int]]:
    return [sorted(tokens_of(next(client)).tolist()) for _ in range(steps)]


def steered(loader: ol.Loader) -> None:
    loader.set_weights({"a": 1, "b": 9}, from_step=3)
    loader.set_weights({"a": 9, "b": 1}, from_step=CUT + 2)


def uncut(job: ol.Job) -> list[list[int]]:
    with started(job) as (loader, client):
        steered(loader)
        return read(client, STEPS)


def through_dcp(saved: Any, loaded: Any, folder: Path) -> None:
    dcp.save({"data": saved}, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]
    dcp.load({"data": loaded}, checkpoint_id=folder)  # pyright: ignore[reportPrivateImportUsage]


def through_torch(saved: Any, loaded: Any, folder: Path) -> None:
    torch.save({"data": saved.state_dict()}, folder / "all.pt")
    loaded.load_state_dict(torch.load(folder / "all.pt", weights_only=True)["data"])


def as_lightning(saved: Any, loaded: Any, folder: Path) -> None:
    """Lightning's fit loop: a list of the states of its loaders, in a checkpoint that torch loads by its own rules."""
    checkpoint = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [saved.state_dict()]}}}}
    torch.save(checkpoint, folder / "last.ckpt")
    found = torch.load(folder / "last.ckpt", map_location="cpu", weights_only=True)
    for loader, state in zip([loaded], found["loops"]["fit_loop"]["state_dict"]["combined_loader"], strict=True):
        loader.load_state_dict(state)


def as_accelerate(saved: Any, loaded: Any, folder: Path) -> None:
    """Accelerate's `register_for_checkpointing`, whose files may also be loaded with weights only."""
    assert hasattr(saved, "state_dict")
    assert hasattr(saved, "load_state_dict")
    torch.save(saved.state_dict(), folder / "custom_checkpoint_0.pkl")
    loaded.load_state_dict(torch.load(folder / "custom_checkpoint_0.pkl", map_location="cpu", weights_only=False))


def by(dumps: Callable[[Any], Any], loads: Callable[[Any], Any]) -> Callable[[Any, Any, Path], None]:
    return lambda saved, loaded, _: loaded.load_state_dict(loads(dumps(saved.state_dict())))


WAYS = {
    "dcp": through_dcp,
    "torch.save": through_torch,
    "lightning": as_lightning,
    "accelerate": as_accelerate,
    "json": by(json.dumps, json.loads),
    "sorted json": by(lambda state: json.dumps(state, sort_keys=True, indent=2), json.loads),
    "json text": by(json.dumps, str),
    "pickle": by(pickle.dumps, pickle.loads),
    "msgpack": by(msgpack.packb, msgpack.unpackb),
    "yaml": by(yaml.safe_dump, yaml.safe_load),
}


@pytest.mark.parametrize("job", [TOKENS, SAMPLES], ids=["tokens", "samples"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_client_goes_on_from_a_checkpoint_of_each_library(way, job, tmp_path):
    with started(job) as (loader, client):
        steered(loader)
        first = read(client, CUT)
        with started(job) as (_, fresh):
            way(client, fresh, tmp_path)
            assert fresh.step == CUT
            assert first + read(fresh, STEPS - CUT) == uncut(job)


def test_a_state_before_an_earlier_step_is_right_where_a_library_fetches_ahead(tmp_path):
    with started(TOKENS) as (loader, client):
        steered(loader)
        first = read(client, CUT)
        read(client, 2)  # fetched, and not trained on
        torch.save(client.state_dict(before=CUT), tmp_path / "last.ckpt")
        with started(TOKENS, resume=torch.load(tmp_path / "last.ckpt", weights_only=True)) as (_, fresh):
            assert first + read(fresh, STEPS - CUT) == uncut(TOKENS)
        with pytest.raises(
            ol.errors.SpecError, match=f"before is a step from 0 to {CUT + 2}, the one that comes next, got 8"
        ):
            client.state_dict(before=CUT + 3)


def test_a_loader_goes_on_from_a_checkpoint_with_all_of_its_clients(tmp_path):
    job = replace(TOKENS, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader, ol.start(job) as other:
        clients = [loader.client(rank, timeout_s=30) for rank in range(2)]
        others = [other.client(rank, timeout_s=30) for rank in range(2)]
        for client in (*clients, *clients, *others):
            next(client)
        through_dcp(loader, other, tmp_path)
        assert [client.step for client in others] == [2, 2]
        assert [read(client, 3) for client in others] == [read(client, 3) for client in clients]


def test_clients_and_loaders_are_stateful():
    with started(TOKENS) as (loader, client):
        assert isinstance(client, Stateful)
        assert isinstance(loader, Stateful)


def test_a_state_has_the_same_keys_and_types_however_a_run_stands():
    with started(TOKENS) as (loader, client):
        fresh = client.state_dict()
        steered(loader)
        read(client, CUT)
        later = loader.state_dict()
    assert {key: type(value) for key, value in fresh.items()} == {key: type(value) for key, value in later.items()}
    assert json.loads(later["state"])["carried"]
    assert json.loads(later["state"])["steered"]
    assert json.loads(fresh["state"])["carried"] is None


def test_a_source_may_be_added_between_two_checkpoints_of_dcp(tmp_path):
    with started(TOKENS) as (_, client):
        read(client, 3)
        wider = job_of({**SOURCES, "c": Numbered(rows=9, first=500)}, TOKENS.batch)
        with started(wider) as (_, fresh):
            through_dcp(client, fresh, tmp_path)
            assert fresh.step == 3


def test_the_contents_of_a_state_by_themselves_are_a_state_too():
    expected, _ = read_all(TOKENS, STEPS)
    contents = contents_of(read_all(TOKENS, CUT)[1])
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    buffer.seek(0)
    forms = [contents, torch.load(buffer, weights_only=True), pickle.loads(pickle.dumps(contents)), json.dumps(contents)]
    forms += [yaml.safe_load(yaml.safe_dump(contents)), msgpack.unpackb(msgpack.packb(contents), use_list=False)]
    for form in forms:
        assert same(read_all(TOKENS, STEPS - CUT, resume=form)[0], expected[CUT:])


def _rank(rank: int, size: int, folder: Path, load: Path | None, save: Path, steps: int) -> None:
    """One rank of a world that loads a checkpoint of another world, reads on, and saves one."""
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    join_world(rank, size, folder)
    with attach(replace(TOKENS, mesh=ol.Mesh(dp=size)), timeout_s=60) as client:
        if load is not None:
            dcp.load({"data": client}, checkpoint_id=load)  # pyright: ignore[reportPrivateImportUsage]
        first = client.step
        found = [tokens_of(next(client)).tolist() for _ in range(steps)]
        dcp.save({"data": client}, checkpoint_id=save)  # pyright: ignore[reportPrivateImportUsage]
        (folder / f"{rank}.json").write_text(json.dumps([first, found]))
    dist.destroy_process_group()


def test_a_checkpoint_of_dcp_is_loaded_by_another_number_of_ranks(tmp_path):
    expected, _ = read_all(TOKENS, 9)
    load = None
    for size, start in ((2, 0), (4, 3), (1, 6)):
        world, save = tmp_path / f"world-{size}", tmp_path / f"saved-{size}"
        world.mkdir()
        run_ranks(_rank, size, size, world, load, save, 3)
        parts = [json.loads((world / f"{rank}.json").read_text()) for rank in range(size)]
        assert [first for first, _ in parts] == [start] * size
        steps = [sorted(token for _, found in parts for token in found[i]) for i in range(3)]
        assert steps == [step.tolist() for step in expected[start : start + 3]]
        load = save
