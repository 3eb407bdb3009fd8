"""An engine whose roles can be lost at any ask, the way a process is killed: without a chance to close anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

import overlord as ol
from overlord.arrange.plan import GroupPlan, Plan
from overlord.roles.plan_window import Planned
from overlord.roles.planner import Planner
from overlord.runtime.embedded import Embedded, Immediate
from overlord.runtime.engine import Handle, Workplace


class Mortal(Embedded):
    """Loses the planner before each of the asks to it whose number is in `losses`, and makes it anew as an engine must."""

    def __init__(self, losses: Collection[int] = ()) -> None:
        super().__init__()
        self.losses = set(losses)
        self.num_asks = 0
        self.num_lost = 0
        self.plans: list[GroupPlan] = []
        self._makes: dict[str, Callable[[Workplace], Any]] = {}
        self._changing = threading.RLock()

    def spawn(self, name: str, make: Callable[[Workplace], Any], *, apart_from: str = "") -> Handle[Any]:
        self._makes[name] = make
        return super().spawn(name, make, apart_from=apart_from)

    def rebind(self, name: str, to: str) -> None:
        with self._changing:
            self._makes[name] = self._makes.pop(to)
            super().rebind(name, to)

    def lose(self, name: str) -> None:
        assert self._workplace is not None
        with self._changing:
            self.num_lost += 1  # before another is made: what the old one does from here on has not happened
            _silence(self._roles[name])
            self._roles[name] = self._makes[name](self._workplace)

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate:
        if name == "planner":
            self.num_asks += 1
            if self.num_asks in self.losses:
                self.lose("planner")
        answer, lost = None, -1
        while answer is None or (name == "planner" and lost != self.num_lost):
            # What a role would have answered that was lost meanwhile nobody hears: an engine asks the new one.
            with self._changing if name == "planner" else nullcontext():
                lost = self.num_lost
            answer = super().call(name, method, *args, **kwargs)
        if isinstance(answer.result(), GroupPlan):
            self.plans.append(answer.result())
        return answer


def _silence(role: Any) -> None:
    """A process that is killed writes no more, even if one of its threads was about to."""
    log = role._log if isinstance(role, Planner) else None
    if log is not None:
        with log._log._write_lock:
            log._log._replaced = True


def free_log(loader: ol.Loader) -> None:
    """Unlock the log of a run that is left as a kill leaves it: the system does so when its process ends."""
    assert loader._lock is not None
    loader._lock.release()


def planner_of(loader: ol.Loader) -> Planner:
    """The planner of an embedded run."""
    engine = loader._roles.engine
    assert isinstance(engine, Embedded)
    return engine._roles["planner"]


def bytes_of(step: ol.Step) -> list[tuple[str, bytes]]:
    """All that a rank got of a step."""
    return [
        (name, np.ascontiguousarray(v).tobytes()) for micro in step for name, v in micro.items() if hasattr(v, "tobytes")
    ]


def stream_of(loader: ol.Loader, num_steps: int) -> list[list[tuple[int, float, list[tuple[str, bytes]]] | None]]:
    """Step by step, what each rank got."""
    clients = [loader.client(rank, timeout_s=60) for rank in range(loader.tree.world_size)]
    taken = [[next(client, None) for client in clients] for _ in range(num_steps)]
    return [[None if s is None else (s.number, s.loss_tokens, bytes_of(s)) for s in steps] for steps in taken]


def key_of(plan: GroupPlan | Planned | Plan | None) -> str:
    """A plan as text, to compare: which samples lie where."""
    assert plan is not None, "the run ends before that step"
    if isinstance(plan, Planned):
        plan = plan.plan
    if isinstance(plan, Plan):
        parts: Sequence[Any] = [plan.samples, plan.counts, plan.offsets, plan.order, plan.row]
    else:
        parts = [plan.step, plan.group, plan.loss_tokens, plan.microbatches]
    with np.printoptions(threshold=10**9):
        return repr(parts)
