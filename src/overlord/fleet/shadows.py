"""Shadow Loaders: loader hosts kept warm on what others hold, to take over the name of one that is lost.

A shadow makes the chunks that its host has in its buffer or makes, so it costs the host's work once more, and memory
within a budget. When the host does not answer, whoever asks turns to the shadow at once (see `Routes`); here the name is
moved for good, and another shadow is made.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.errors import OverlordError
from overlord.loaders.model import Budget, chunks_per_step
from overlord.loaders.shadowing import shadows
from overlord.roles.loader_host import LoaderHost, Standing
from overlord.runtime import liveness
from overlord.runtime.engine import Engine, Handle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture
    from overlord.fleet.hosts import Fleet
    from overlord.loaders.autoscaling import Observed

_log = logging.getLogger("overlord.scaling")

_UNWANTED_LOOKS = 60  # what a loss would cost is measured, and wavers


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

    def look(
        self, step: int, hosts: Mapping[str, Standing], observed: Observed | None, mixture: Mixture
    ) -> tuple[ShadowChange, ...]:
        """`hosts` are those that answered just now. Gives what was changed."""
        changes = self._taken_over(step, hosts)
        if not changes:
            self._mirror(hosts)  # else what was seen is out of date
        if observed is not None:
            changes += self._chosen(observed, mixture)
        for change in changes:
            _log.info("%s", change)
        return tuple(changes)

    def _taken_over(self, step: int, hosts: Mapping[str, Standing]) -> list[ShadowChange]:
        """Let shadows take over from hosts that are lost: silent, or made anew and so empty."""
        changes = []
        for host in list(self._fleet.table.shadows):
            standing = hosts.get(host)
            if standing is None:
                self._silent[host] = self._silent.get(host, 0) + 1
                is_new, is_lost = False, self._silent[host] >= liveness.HOST_LOST.misses
            else:
                self._silent[host] = 0
                is_lost = is_new = self._instances.setdefault(host, standing.instance) != standing.instance
            if is_lost and (self._fleet.exchange(host) if is_new else self._fleet.promote(host)):
                reason = "it died; made anew, it is the shadow now" if is_new else "it did not answer and was ended"
                self._instances.pop(host, None)
                self._silent.pop(host, None)
                changes.append(ShadowChange(step, host, "its shadow took over", reason))
        return changes

    def _mirror(self, hosts: Mapping[str, Standing]) -> None:
        for host, shadow in self._fleet.table.shadows.items():
            if host in hosts and self._instances.setdefault(host, hosts[host].instance) == hosts[host].instance:
                # Not waited for: making chunks takes its time, and the next look says it again.
                Handle[LoaderHost](self._engine, shadow).ask(LoaderHost.mirror, hosts[host].holding)

    def _chosen(self, observed: Observed, mixture: Mixture) -> list[ShadowChange]:
        """Add and remove shadows, as is decided by what a loss would cost."""
        fleet = self._fleet
        chosen = shadows(
            fleet.partition,
            observed.profiles,
            chunks_per_step(observed.profiles, mixture.at(observed.step), self._batch, mixture.unit),
            step_s=observed.step_s,
            prefetch=self._prefetch,
            spare=self._budget,
            start_s=fleet.start_s,
        )
        names, changes = fleet.names, []
        wanted = {names[index]: chosen.hosts[index].reason for index in chosen.shadowed if names[index]}
        reasons = {names[shadow.host]: shadow.reason for shadow in chosen.hosts if names[shadow.host]}
        self._unwanted = {host: self._unwanted.get(host, 0) + 1 for host in fleet.table.shadows if host not in wanted}
        for host in [host for host, looks in self._unwanted.items() if looks >= _UNWANTED_LOOKS]:
            fleet.remove_shadow(host)
            changes.append(ShadowChange(observed.step, host, "shadow removed", reasons.get(host, "it holds no source now")))
        missing = [host for host in wanted if host not in fleet.table.shadows]
        if missing and observed.at_s >= self._full_until_s:
            # One a look: starting one takes its time, in which nobody looks after the others.
            changes.append(self._added(missing[0], wanted[missing[0]], observed))
        return changes

    def _added(self, host: str, reason: str, observed: Observed) -> ShadowChange:
        try:
            self._fleet.add_shadow(host)
        except OverlordError as error:
            self._full_until_s = observed.at_s + liveness.NEXT_START_S
            return ShadowChange(observed.step, host, "no shadow could be started", str(error))
        return ShadowChange(observed.step, host, "shadow added", reason)
