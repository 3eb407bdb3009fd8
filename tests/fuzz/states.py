"""Saved states that were edited or damaged: refused with a StateError, or the very stream of the state that was saved.

An edit under a checksum that was put right, and one of a state without any (the first release wrote none), may hold values
that a state can have. Such a state may go on elsewhere, but it must not end in any other error than StateError.
"""

from __future__ import annotations

import hashlib
import json
import random
from functools import cached_property
from pathlib import Path
from typing import Any

import overlord as ol
from overlord.checkpoint.form import with_checksum
from overlord.errors import DataError, OverlordError, StateError
from overlord.messages import WeightChange
from tests.fuzz.mutations import damaged, edited
from tests.fuzz.targets import Answer, Case, Seed, Wrong
from tests.small_sources import Numbered, job_of, tokens_of

_A = Numbered(rows=40, first=1)
_B = Numbered(rows=23, unit_rows=4, first=100, longest=16)
_MIXTURE = ol.Mixture({0: {"a": 5, "b": 3}, 4: {"a": 1, "b": 1}}, unit="tokens", ramp="linear")
JOBS = {
    "samples": job_of({"a": _A, "b": _B}, ol.Batch(samples=9, sequence_length=16), mixture=ol.Mixture({"a": 2, "b": 1})),
    "tokens": job_of({"a": _A, "b": _B}, mixture=_MIXTURE, mesh=ol.Mesh(dp=2)),
    "cut": job_of({"a": _A, "b": _B}, ol.Batch(tokens=64, sequence_length=16, cut_documents=True), mixture=_MIXTURE),
    "finite": job_of(
        {"a": Numbered(rows=17, first=1, repeat=False), "b": Numbered(rows=60, first=100, repeat=False)},
        ol.Batch(samples=6, sequence_length=16),
        mixture=ol.Mixture({"a": 1, "b": 1}, stop="all_exhausted"),
    ),
    "steered": job_of({"a": _A, "b": _B}, ol.Batch(samples=9, sequence_length=16), mixture=ol.Mixture({"a": 1, "b": 1})),
}
_BEFORE, _AFTER = 3, 6
_TIMEOUT_S = 15.0


def steps_of(loader: ol.Loader, num_steps: int, load: Any = None) -> list[tuple[int, list[int]]]:
    """(number, the tokens of all ranks) of the next steps, after loading a state where one is given."""
    clients = [loader.client(rank, timeout_s=_TIMEOUT_S) for rank in range(loader.tree.mesh.world_size)]
    if load is not None:
        for client in clients:
            client.load_state_dict(load)
    found = []
    for _ in range(num_steps):
        parts = [step for step in (next(client, None) for client in clients) if step is not None]
        if not parts:
            break
        tokens = sorted(int(token) for part in parts for token in tokens_of(part))
        found.append((parts[0].number, tokens))
    return found


def steer(name: str, loader: ol.Loader) -> None:
    """Decide something about the run of the job that is named for it. Ids are given, since drawn ones would differ."""
    if name == "steered":
        loader.change_weights(WeightChange({"a": 3, "b": 1}, 2, "first change"))
        loader.change_weights(WeightChange({"a": 1, "b": 4}, 5, "second change"))


def _is_sealed(state: Any, contents: str) -> bool:
    """Whether a checksum covers the state as it was saved."""
    return isinstance(state, dict) and ("state" in state or state == json.loads(contents))


class States:
    name = "states"
    names_its_file = False

    @cached_property
    def seeds(self) -> list[Seed]:
        whole = [Seed(name, json.dumps(state).encode()) for name, (state, _) in self._saved.items()]
        return whole + [Seed(name, state["state"].encode()) for name, (state, _) in self._saved.items()]

    @cached_property
    def _saved(self) -> dict[str, tuple[dict[str, Any], list[tuple[int, list[int]]]]]:
        """For each job the state after some steps, and the steps that follow."""
        saved = {}
        for name, job in JOBS.items():
            with ol.start(job) as loader:
                steer(name, loader)
                steps_of(loader, _BEFORE)
                state = loader.state_dict()
            with ol.start(job, resume=state) as loader:
                saved[name] = state, steps_of(loader, _AFTER)
        return saved

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        if rng.random() < 0.02:
            return base.data
        if rng.random() < 0.2:  # as text, where it still is JSON afterwards
            for _ in range(20):
                changed = damaged(rng, base.data)
                try:
                    json.loads(changed)
                except (ValueError, RecursionError):
                    continue
                return changed
        changed = edited(rng, json.loads(base.data))
        if rng.random() < 0.5 and isinstance(changed, dict) and "fingerprint" in changed:
            changed = with_checksum(changed)
        return json.dumps(changed).encode()

    def read(self, case: Case, folder: Path) -> Answer:
        job, state = JOBS[case.base.name], json.loads(case.data)
        if state is None:
            raise StateError("None is no state, but the absence of one")
        loads_later = hashlib.blake2b(case.data).digest()[0] % 2 == 0
        try:
            with ol.start(job, resume=None if loads_later else state) as loader:
                found = steps_of(loader, _AFTER, state if loads_later else None)
            return Answer(found) if _is_sealed(state, self._contents(case)) else self.expected(case)[0]
        except StateError:
            raise
        except DataError:
            if not _is_sealed(state, self._contents(case)):
                return self.expected(case)[0]  # a carried row that is not there is found when it is read
            raise
        except OverlordError as error:
            raise Wrong(f"{type(error).__name__} in place of StateError: {str(error)[:60]}") from error

    def _contents(self, case: Case) -> str:
        return self._saved[case.base.name][0]["state"]

    def expected(self, case: Case) -> list[Answer]:
        return [Answer(self._saved[case.base.name][1])]


TARGET = States()
