"""Tells roles that hang from roles that are busy, and has those made anew that hang.

Every role is asked for its pulse, beside all other asks, by a thread of the process that runs the engine. One that is only
busy answers. One that does not for `hung_after_s` (its process is stopped, holds the interpreter, or has its own locks in a
knot) is killed where it runs; Ray starts it again, and whoever waits for it asks again. Time in which this thread itself
did not run counts for nobody: a machine that slept is no reason to kill what slept with it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import exceptions as ray_errors
from ray._private.state import actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from overlord.runtime import liveness
from overlord.runtime.ray.stage import PULSE, Pulse, born

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KILL_S = liveness.RAY_KILL.after_s
_log = logging.getLogger("overlord.runtime.engine")


@dataclass(slots=True)
class _Patient:
    """What is known of one actor."""

    actor: Any
    ref: Any = None
    silent_s: float = 0.0
    last: Pulse | None = None
    """None until it has answered since it was last started."""


class HangWatch:
    """`roles` gives, for each name, the name and the handle of its actor."""

    def __init__(self, roles: Callable[[], Mapping[str, tuple[str, Any]]], hung_after_s: float, patience_s: float) -> None:
        self._roles = roles
        self._hung_after_s = hung_after_s
        # One that was never heard may still wait for a node with room, or import what its user's code needs.
        self._unheard_after_s = max(hung_after_s, patience_s)
        self._period_s = hung_after_s / liveness.RAY_HUNG.checks
        self._patients: dict[str, _Patient] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overlord-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(self._period_s + _KILL_S)

    def _watch(self) -> None:
        asked_at = time.monotonic()
        while True:
            roles = self._roles()
            self._patients = {actor: self._patients.get(actor) or _Patient(handle) for actor, handle in roles.values()}
            for patient in self._patients.values():
                if patient.ref is None:
                    patient.ref = patient.actor.pulse.options(concurrency_group=PULSE).remote()
            if self._closed.wait(self._period_s) or not ray.is_initialized():
                return
            now = time.monotonic()
            awake_s, asked_at = min(now - asked_at, 2 * self._period_s), now
            for name, (actor, _) in roles.items():
                self._look_at(name, self._patients[actor], awake_s)

    def _look_at(self, name: str, patient: _Patient, awake_s: float) -> None:
        try:
            pulse: Any = ray.get(patient.ref, timeout=0)
        except ray_errors.GetTimeoutError:
            patient.silent_s += awake_s
            if patient.silent_s >= self._hung_after_s:
                self._deal_with(name, patient)
        except ray_errors.RayError:  # it died, which Ray has noticed and will put right
            patient.ref, patient.last, patient.silent_s = None, None, 0.0
        else:
            patient.ref, patient.last, patient.silent_s = None, pulse, 0.0

    def _deal_with(self, name: str, patient: _Patient) -> None:
        """Have a silent role made anew, unless it is still to be started."""
        last, silent_s = patient.last, patient.silent_s
        if last is None:
            patient.last = _seen_by_ray(patient.actor)
            if patient.last is not None:
                patient.silent_s = 0.0  # it could not answer before
            elif silent_s >= self._unheard_after_s:
                _log.warning("role %r was to be started and has not answered for %.1f s: once more", name, silent_s)
                patient.silent_s = 0.0
                ray.kill(patient.actor, no_restart=False)
            return
        patient.last, patient.silent_s = None, 0.0
        _log.warning(
            "role %r has not answered for %.1f s, though its process %d on node %s lives: the process is killed and the "
            "role is made anew (Ray(hung_after_s=%g))%s",
            name,
            silent_s,
            last.process,
            last.node,
            self._hung_after_s,
            "".join(f"\n  when last heard: {line}" for line in last.status_lines),
        )
        if not _killed(last):
            ray.kill(patient.actor, no_restart=False)  # which can take Ray a few seconds


def _seen_by_ray(actor: Any) -> Pulse | None:
    """Where an actor runs that Ray has started, and that may have stopped before its first pulse; None before that."""
    known: Any = actors(actor._actor_id.hex())
    if not known or known["State"] != "ALIVE":
        return None
    return Pulse(known["Pid"], "", known["Address"]["NodeID"], ())


def _killed(pulse: Pulse) -> bool:
    """Whether the process is gone: by a signal, which a stopped process cannot put off."""
    if pulse.node == ray.get_runtime_context().get_node_id():
        kill_process(pulse.process, pulse.born)
        return True
    there = NodeAffinitySchedulingStrategy(pulse.node, soft=False)
    killing = ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=there)
    try:
        ray.get(killing.remote(pulse.process, pulse.born), timeout=_KILL_S)
    except ray_errors.RayError:
        return False  # the node does not answer either
    return True


def kill_process(process: int, birth: str) -> None:
    """Kill a process of this machine, unless its number belongs to another by now."""
    with suppress(ProcessLookupError):
        if birth in ("", born(process)):
            os.kill(process, signal.SIGKILL)
