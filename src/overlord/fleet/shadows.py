"""Shadow Loaders: hot standbys of loader hosts, which take over the name of a host that is lost.

A shadow holds the same chunks as its host, and takes memory for them, within a budget. It copies finished chunks from its
host where that costs less than making them a second time. When the host does not answer, callers send a hedged request to
the shadow immediately (see `Routes`); the `ShadowKeeper` then rebinds the name permanently and starts another shadow.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.errors import OverlordError
from overlord.loaders.model import Budget, chunks_per_step
from overlord.loaders.shadowing import shadows
from overlord.roles.loader_host import HostStatus, LoaderHost
from overlord.runtime import liveness
from overlord.runtime.engine import Engine, Handle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture
    from overlord.fleet.hosts import Fleet
    from overlord.loaders.autoscaling import Observed

_log = logging.getLogger("overlord.scaling")

_UNWANTED_ROUNDS = 60  # rounds before a shadow is removed, because the measured cost of a loss is noisy


@dataclass(frozen=True, slots=True)
class ShadowChange:
    """A line of the log: a shadow was added, removed, or took over."""

    step: int
    host: str
    change: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step:,}: {self.host}: {self.change}: {self.reason}"


class ShadowKeeper:
    """Starts, stops and promotes the shadows of a fleet. One thread at a time may call it."""

    def __init__(self, engine: Engine, fleet: Fleet, budget: Budget, batch: Batch, prefetch: int) -> None:
        self._engine = engine
        self._fleet = fleet
        self._budget = budget
        self._batch = batch
        self._prefetch = prefetch
        self._instances: dict[str, str] = {}
        self._silent: dict[str, int] = {}
        self._unwanted: dict[str, int] = {}
        self._full_until_s = -math.inf

    def reconcile(
        self, step: int, hosts: Mapping[str, HostStatus], observed: Observed | None, mixture: Mixture
    ) -> tuple[ShadowChange, ...]:
        """Run one round, with the statuses of the hosts that have just answered. Returns the changes."""
        changes = self._take_over(step, hosts)
        if not changes:
            self._mirror(hosts)  # not after a change, which makes these statuses stale
        if observed is not None:
            changes += self._adjust(observed, mixture)
        for change in changes:
            _log.info("%s", change)
        return tuple(changes)

    def _take_over(self, step: int, hosts: Mapping[str, HostStatus]) -> list[ShadowChange]:
        """Promote the shadows of hosts that are lost: silent, or restarted and so empty."""
        changes = []
        for host in list(self._fleet.table.shadows):
            status = hosts.get(host)
            if status is None:
                self._silent[host] = self._silent.get(host, 0) + 1
                is_new, is_lost = False, self._silent[host] >= liveness.HOST_LOST.misses
            else:
                self._silent[host] = 0
                is_lost = is_new = self._instances.setdefault(host, status.instance) != status.instance
            if is_lost and (self._fleet.exchange(host) if is_new else self._fleet.promote(host)):
                reason = "it died; restarted, it is the shadow now" if is_new else "it did not answer and was killed"
                self._instances.pop(host, None)
                self._silent.pop(host, None)
                changes.append(ShadowChange(step, host, "its shadow took over", reason))
        return changes

    def _mirror(self, hosts: Mapping[str, HostStatus]) -> None:
        for host, shadow in self._fleet.table.shadows.items():
            if host in hosts and self._instances.setdefault(host, hosts[host].instance) == hosts[host].instance:
                # Not waited for: making chunks takes time, and the next round repeats the call.
                Handle[LoaderHost](self._engine, shadow).tell(LoaderHost.mirror, host, hosts[host])

    def _adjust(self, observed: Observed, mixture: Mixture) -> list[ShadowChange]:
        """Add and remove shadows, by the cost of losing each host."""
        fleet = self._fleet
        chosen = shadows(
            fleet.partition,
            observed.profiles,
            chunks_per_step(observed.profiles, mixture.at(observed.step), self._batch.at(observed.step), mixture.unit),
            step_s=observed.step_s,
            prefetch=self._prefetch,
            spare=self._budget,
            start_s=fleet.start_s,
        )
        names, changes = fleet.names, []
        wanted = {names[index]: chosen.hosts[index].reason for index in chosen.shadowed if names[index]}
        reasons = {names[shadow.host]: shadow.reason for shadow in chosen.hosts if names[shadow.host]}
        self._unwanted = {host: self._unwanted.get(host, 0) + 1 for host in fleet.table.shadows if host not in wanted}
        for host in [host for host, looks in self._unwanted.items() if looks >= _UNWANTED_ROUNDS]:
            fleet.remove_shadow(host)
            changes.append(ShadowChange(observed.step, host, "shadow removed", reasons.get(host, "it holds no source now")))
        missing = [host for host in wanted if host not in fleet.table.shadows]
        if missing and observed.at_s >= self._full_until_s:
            # One in each round, because the other hosts are not watched during a start.
            changes.append(self._add(missing[0], wanted[missing[0]], observed))
        return changes

    def _add(self, host: str, reason: str, observed: Observed) -> ShadowChange:
        try:
            self._fleet.add_shadow(host)
        except OverlordError as error:
            self._full_until_s = observed.at_s + liveness.NEXT_START_S
            return ShadowChange(observed.step, host, "no shadow could be started", str(error))
        return ShadowChange(observed.step, host, "shadow added", reason)
