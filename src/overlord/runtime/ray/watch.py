"""Detects roles that hang, as opposed to roles that are busy, and restarts them.

A thread in the engine's process sends every role health checks. Roles answer them in a separate concurrency group, so a busy
role answers too. A role that does not answer for `hung_after_s` (its process is stopped, holds the GIL, or is deadlocked) is
killed; Ray restarts it, and its callers retry their calls. Time in which this thread itself did not run does not count:
after a machine was suspended, the roles that were suspended with it must not be killed.
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

from overlord.errors import OverlordError
from overlord.runtime import liveness
from overlord.runtime.ray.role_actor import HEALTH_CHECKS, HealthReport, process_start_time
from overlord.runtime.recorder import current_recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_KILL_S = liveness.RAY_KILL.after_s
_log = logging.getLogger("overlord.runtime.engine")


@dataclass(slots=True)
class _Probe:
    """The health checks of one actor."""

    actor: Any
    ref: Any = None
    silent_s: float = 0.0
    last: HealthReport | None = None
    """The last report since the actor was last started; None before the first."""
    rounds_lost: int = 0
    """Since its process was lost; 0 while it has one."""
    process: int | None = None
    """The process that answered last; None before the first answer, and after this watch has killed it."""


class HangWatch:
    """Sends health checks and kills hung roles, from a thread. `roles` returns the name and handle of each role's actor."""

    def __init__(
        self,
        roles: Callable[[], Mapping[str, tuple[str, Any]]],
        hung_after_s: float,
        patience_s: float,
        *,
        settle: Callable[[Collection[str]], None] | None = None,
    ) -> None:
        """`settle` is called after each round with roles whose process was lost and not replaced in two."""
        self._roles = roles
        self._settle = settle
        self._hung_after_s = hung_after_s
        # A role that has never answered may still be waiting for a node with room, or importing the user's modules.
        self._unstarted_after_s = max(hung_after_s, patience_s)
        self._period_s = hung_after_s / liveness.RAY_HUNG.checks
        self._probes: dict[str, _Probe] = {}
        self._closed = threading.Event()
        self._events = current_recorder().events
        self._thread = threading.Thread(target=self._watch, name="overlord-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(self._period_s + _KILL_S)

    def _watch(self) -> None:
        checked_at = time.monotonic()
        while True:
            roles = self._roles()
            self._probes = {actor: self._probes.get(actor) or _Probe(handle) for actor, handle in roles.values()}
            for probe in self._probes.values():
                if probe.ref is None:
                    probe.ref = probe.actor.check_health.options(concurrency_group=HEALTH_CHECKS).remote()
            if self._closed.wait(self._period_s) or not ray.is_initialized():
                return
            now = time.monotonic()
            awake_s, checked_at = min(now - checked_at, 2 * self._period_s), now
            by_actor = _by_actor(roles)
            for name, actor in by_actor.items():
                self._evaluate(name, self._probes[actor], awake_s)
            if self._settle is not None:
                lost = [
                    name
                    for name, actor in by_actor.items()
                    if self._probes[actor].rounds_lost >= liveness.RAY_HOMELESS.misses
                ]
                try:
                    self._settle(lost)
                except OverlordError as error:  # in the next round again
                    _log.warning("roles without a process stay so for now: %s", error)

    def _evaluate(self, name: str, probe: _Probe, awake_s: float) -> None:
        try:
            report: Any = ray.get(probe.ref, timeout=0)
        except ray_errors.GetTimeoutError:
            probe.silent_s += awake_s
            if probe.silent_s >= self._hung_after_s:
                self._restart(name, probe)
        except ray_errors.RayError:  # the actor died, and Ray restarts it
            probe.ref, probe.last, probe.silent_s = None, None, 0.0
            probe.rounds_lost += 1
        else:
            probe.ref, probe.last, probe.silent_s, probe.rounds_lost = None, report, 0.0, 0
            if probe.process not in (None, report.process):
                self._events.note("restart", f"role {name!r} lost its process {probe.process}: Ray has started it again")
            probe.process = report.process

    def _restart(self, name: str, probe: _Probe) -> None:
        """Restart a role that does not answer, unless it has not started yet."""
        last, silent_s = probe.last, probe.silent_s
        if last is None:
            probe.last = _report_by_ray(probe.actor)
            if probe.last is not None:
                probe.silent_s = 0.0  # the actor has started; its time to answer begins now
            elif silent_s >= self._unstarted_after_s:
                _log.warning("role %r has not started within %.1f s: it is restarted", name, silent_s)
                self._events.note("restart", f"role {name!r} has not started within {silent_s:.1f} s")
                probe.silent_s = 0.0
                ray.kill(probe.actor, no_restart=False)
            return
        probe.last, probe.process, probe.silent_s = None, None, 0.0
        self._events.note("restart", f"role {name!r} on node {last.node} has not answered for {silent_s:.1f} s")
        _log.warning(
            "role %r has not answered for %.1f s, though its process %d on node %s is alive: the process is killed and the "
            "role is restarted (Ray(hung_after_s=%g))%s",
            name,
            silent_s,
            last.process,
            last.node,
            self._hung_after_s,
            "".join(f"\n  at its last health check: {line}" for line in last.status_lines),
        )
        if not _kill(last):
            ray.kill(probe.actor, no_restart=False)  # slower: this can take a few seconds


def _by_actor(roles: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """One of the roles of each actor, with the actor's name."""
    names = {actor: name for name, (actor, _) in reversed(list(roles.items()))}
    return {name: actor for actor, name in names.items()}


def _report_by_ray(actor: Any) -> HealthReport | None:
    """Ray's own record of an actor that has not answered yet; None before Ray has started it."""
    known: Any = actors(actor._actor_id.hex())  # noqa: SLF001 - Ray has no public accessor
    if not known or known["State"] != "ALIVE":
        return None
    return HealthReport(known["Pid"], "", known["Address"]["NodeID"], ())


def _kill(report: HealthReport) -> bool:
    """Send SIGKILL, which also ends a stopped process; False when its node does not answer."""
    if report.node == ray.get_runtime_context().get_node_id():
        kill_process(report.process, report.started_at)
        return True
    there = NodeAffinitySchedulingStrategy(report.node, soft=False)
    killing = ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=there)
    try:
        ray.get(killing.remote(report.process, report.started_at), timeout=_KILL_S)
    except ray_errors.RayError:
        return False
    return True


def kill_process(process: int, started_at: str) -> None:
    """Kill a process of this machine, unless its id has been reused."""
    with suppress(ProcessLookupError):
        if started_at in ("", process_start_time(process)):
            os.kill(process, signal.SIGKILL)
