"""Plan logs that were damaged: refused with an error that names them, or the very stream of the run that wrote them."""

from __future__ import annotations

import json
import random
import struct
import tempfile
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import overlord as ol
from tests.fuzz.mutations import damaged, edited
from tests.fuzz.states import JOBS, steer, steps_of
from tests.fuzz.targets import Answer, Case, Seed

_TAKEN, _IN_ALL = 7, 11
_HEAD = struct.Struct("<4sII")


def frame(body: bytes) -> bytes:
    """Written from the description of the format, not with the code under test."""
    length = len(body).to_bytes(4, "little")
    return _HEAD.pack(b"\xf5OLr", len(body), zlib.crc32(length + body)) + body


def frames(data: bytes) -> list[bytes]:
    """The records up to the first that is damaged."""
    bodies, at = [], 0
    while at + _HEAD.size <= len(data):
        mark, length, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + length]
        if mark != b"\xf5OLr" or len(body) != length or zlib.crc32(length.to_bytes(4, "little") + body) != checksum:
            break
        bodies.append(body)
        at += _HEAD.size + length
    return bodies


@dataclass(frozen=True, slots=True)
class _Log:
    """The files of a log after some steps, and the stream of the run."""

    job: ol.Job
    every: int
    name: str
    """Of the newest file."""
    newest: bytes
    older: dict[str, bytes]
    stream: list[tuple[int, list[int]]]


def _logged(name: str, every: int) -> _Log:
    job = replace(JOBS[name], prefetch=0)  # what is logged would depend on threads
    with ol.start(job) as loader:
        steer(name, loader)
        stream = steps_of(loader, _IN_ALL)
    with tempfile.TemporaryDirectory() as folder:
        with ol.start(job, log=ol.Log(f"{folder}/log", snapshot_every=every, sync_s=1000.0)) as loader:
            steer(name, loader)
            steps_of(loader, _TAKEN)
        files = {path.name: _settled(path.read_bytes()) for path in Path(folder, "log").glob("segment-*")}
    newest = max(files)
    return _Log(job, every, newest, files.pop(newest), files, stream)


def _settled(data: bytes) -> bytes:
    """The log as if each step had been taken right after it was drawn, under a known id: cases must not depend on which
    thread came first, nor on what was drawn at random, nor on the process."""
    settled: list[dict[str, Any]] = []
    for record in map(json.loads, frames(data)):
        match record["kind"]:
            case "header":
                settled.append({**record, "job": "0" * 32, "writer": "process 1 on host"})
            case "snapshot":
                settled.append({**record, "needed": record["progress"]["step"], "readers": [0]})
                settled.append({"kind": "readers", "groups": [0]})
            case "step":
                step = record["step"]
                settled += [{**record, "needed": step}, {"kind": "needed", "step": min(step + 1, _TAKEN)}]
            case "needed" | "readers":
                pass
            case _:
                settled.append(record)
    return b"".join(frame(json.dumps(record).encode()) for record in settled)


def _edited(rng: random.Random, body: bytes) -> bytes:
    try:
        return json.dumps(edited(rng, json.loads(body))).encode()
    except ValueError:  # damaged before
        return body


class PlanLogs:
    name = "plan_logs"
    names_its_file = True

    @cached_property
    def seeds(self) -> list[Seed]:
        return [Seed(name, log.newest) for name, log in self._written.items()]

    @cached_property
    def _written(self) -> dict[str, _Log]:
        return {f"{name}-{every}": _logged(name, every) for name in JOBS for every in (4, 1000)}

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        if rng.random() < 0.02:
            return base.data
        if rng.random() < 0.4:
            return damaged(rng, base.data, others=[seed.data for seed in self.seeds])
        bodies = frames(base.data)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(bodies))
            match rng.randrange(6):
                case 0 | 1 | 2:
                    bodies[at] = _edited(rng, bodies[at])
                case 3:
                    bodies = bodies[:at] + bodies[at + 1 :] or [b"{}"]
                case 4:
                    bodies.insert(at, rng.choice(bodies))
                case 5:
                    bodies[at] = damaged(rng, bodies[at])
        return b"".join(map(frame, bodies))

    def read(self, case: Case, folder: Path) -> Answer:
        known = self._written[case.base.name]
        (folder / "log").mkdir()
        for name, content in {**known.older, known.name: case.data}.items():
            (folder / "log" / name).write_bytes(content)
        log = ol.Log(str(folder / "log"), snapshot_every=known.every, sync_s=1000.0)
        with ol.start(known.job, resume="log", log=log) as loader:
            first = loader.start_step
            return Answer([_Rest(first, steps_of(loader, max(1, _IN_ALL - first)))])

    def expected(self, case: Case) -> list[Answer]:
        known = self._written[case.base.name]
        # A record that was written anew with the right checksum is not damage: nobody can tell that it is not what was
        # decided. It must be understood or refused, and the run goes by it.
        own, left = frames(known.newest), frames(case.data)
        are_own = set(left) <= set(own)
        # Nor can a decision be drawn again that was cut off with the end.
        has_decisions = all(body in left for body in own if b'"decision"' in body)
        return [Answer([_Stream(known.stream, _TAKEN, are_own and has_decisions)])]


class _Rest:
    """What a run that was resumed read."""

    def __init__(self, first: int, steps: list[tuple[int, list[int]]]) -> None:
        self.first = first
        self.steps = steps

    def __repr__(self) -> str:
        return f"from step {self.first}: {self.steps}"


class _Stream:
    """The undisturbed stream, and how many steps of it trainers took before the damage."""

    def __init__(self, steps: list[tuple[int, list[int]]], taken: int, is_exact: bool) -> None:
        self._steps = steps
        self._taken = taken
        self._is_exact = is_exact

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rest):
            return False
        return not self._is_exact or (other.first <= self._taken and other.steps == self._steps[other.first :])

    def __repr__(self) -> str:
        return f"{self._taken} taken of {self._steps}"


TARGET = PlanLogs()
