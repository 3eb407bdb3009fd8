"""Runs that are served, and ways to compare what came over the wire with what came without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pyarrow.flight as flight

import overlord as ol
from overlord.service import wire
from overlord.service.auth import token_header
from overlord.service.run_api import ACTIONS
from tests.small_sources import Numbered, job_of

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)


def two_sources(**fields: Any) -> ol.Job:
    return job_of({"a": A, "b": B}, **fields)


@contextmanager
def served(job: ol.Job, resume: dict | None = None, **serve: Any) -> Iterator[tuple[ol.Loader, str]]:
    with ol.start(job, resume=resume) as loader:
        yield loader, loader.serve(**serve)


def content(step: ol.Step) -> tuple:
    """Everything in a step, so that two can be compared byte for byte."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    return step.number, step.loss_tokens, [{name: plain(value) for name, value in micro.items()} for micro in step]


def streams(clients: Sequence[ol.Client], num_steps: int) -> list[list[tuple]]:
    """What each client gets, read in turn."""
    found: list[list[tuple]] = [[] for _ in clients]
    for _ in range(num_steps):
        for client, steps in zip(clients, found, strict=True):
            steps.append(content(next(client)))
    return found


def undisturbed(job: ol.Job, num_steps: int) -> list[list[tuple]]:
    """What each rank gets in one process."""
    with ol.start(job) as loader:
        return streams([loader.client(rank) for rank in range(job.mesh.world_size)], num_steps)


class Raw:
    """A Flight client that says whatever it is told to."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._client = flight.connect(address)
        self._options = flight.FlightCallOptions(timeout=10, headers=token_header(token))

    def get(self, ticket: bytes) -> wire.Answer:
        chunks = list(self._client.do_get(flight.Ticket(ticket), self._options))
        return wire.unpack_answer(memoryview(chunks[0].app_metadata or b""))

    def act(self, action: str, body: bytes) -> Any:
        (result,) = self._client.do_action(flight.Action(action, body), self._options)
        return ACTIONS[action].unpack_reply(memoryview(result.body))

    def hello(self, rank: int = 0, needs_flight: bool = False) -> dict:
        return msgspec.structs.asdict(self.act("hello", wire.pack(wire.Hello(wire.VERSION, rank, needs_flight))))
