"""Decides how many loaders each source should have at this point of a run: one pure function, which the control loop calls.

Demand is the mixture's weights, now and in the schedule ahead, times the measured cost of a chunk, divided by the time of a
step. Where a host can send only so many bytes a second, those of its chunks count beside the time that they take to make.
Loaders are added immediately, before they are needed. They are removed only after the source has needed fewer for a while,
down to the most it needed in that time: this hysteresis keeps swinging demand from moving loaders back and forth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from overlord.errors import SpecError
from overlord.loaders.model import (
    CHUNKS_AT_HAND,
    Budget,
    Partition,
    Profile,
    chunks_per_step,
    duration,
    held_bytes,
    loaders_for,
    transfers_needed,
    weights_ahead,
    workers_needed,
)
from overlord.loaders.rearranging import moves, rearrange, without_least_busy_host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture

_BOOST = 1.5  # the cost of a source that steps wait for is multiplied by this
_MOST_BOOST = 4.0  # if waits persist beyond this, their cause is not a lack of loaders
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Measurements of a run at one moment."""

    step: int
    """The first step that no trainer has taken."""
    at_s: float
    """The time, on any monotonic clock."""
    step_s: float
    """Seconds that trainers compute for a step. Waiting for data is excluded: otherwise a starved trainer would look like
    low demand."""
    profiles: Mapping[str, Profile]
    """The profile of every source, as measured so far. A source without measurements keeps the loaders it has."""
    waited: Mapping[str, float] = field(default_factory=dict[str, float])
    """For each source, the fraction of the time since the last round that steps waited for it."""

    def __post_init__(self) -> None:
        if not 0 < self.step_s < math.inf:
            raise SpecError(f"step_s is a positive number of seconds, got {self.step_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPolicy:
    """How soon loaders are added and removed."""

    ahead_s: float = 30.0
    """How far to look ahead in the schedule: longer than a host takes to start and fill its buffers."""
    calm_s: float = 60.0
    """How long a source must need fewer loaders before they are removed."""
    settle_s: float = 10.0
    """The same, when another source needs the memory."""
    margin: float = 0.15
    """Loaders are removed only if the remaining ones could serve the demand plus this fraction of it."""
    tolerance: float = 0.02
    """When steps wait for a source for more than this fraction of the time, it gets more loaders than computed."""

    def __post_init__(self) -> None:
        for name in ("ahead_s", "calm_s", "settle_s", "margin", "tolerance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SpecError(f"{name} of a scaling policy must be a number >= 0, got {getattr(self, name)}")
        if self.settle_s > self.calm_s:
            raise SpecError(f"settle_s must not be longer than calm_s, got {self.settle_s} and {self.calm_s}")


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """A line of the log. `before` and `after` are numbers of loaders of the source; they are equal when a share only moves
    to another host, or when the budget does not allow more loaders."""

    step: int
    source: str
    before: int
    after: int
    reason: str

    def __str__(self) -> str:
        change = f"{self.before} -> {self.after} loaders" if self.before != self.after else f"{self.after} loaders stay"
        return f"step {self.step:,}: source {self.source!r}: {change}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SourceHistory:
    """One source in earlier rounds of the control loop."""

    lower_since_s: float | None = None
    """When it began to need fewer loaders than it has; None when it needs them all."""
    most_needed: int = 0
    """The most loaders it has needed since then."""
    boost: float = 1.0
    """Factor on its measured cost, raised while steps wait for it."""
    boosted_s: float | None = None
    """When `boost` last changed."""
    grown_s: float | None = None
    """When it last got a loader."""
    is_refused: bool = False
    """True once the log says that it gets fewer loaders than it needs."""


@dataclass(frozen=True, slots=True)
class ScalingState:
    """The state that one round of the control loop passes to the next. The first round gets `ScalingState()`."""

    sources: Mapping[str, SourceHistory] = field(default_factory=dict[str, SourceHistory])
    spare_since_s: float | None = None
    """When one host fewer began to suffice; None when all are needed."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The partition to move to, and the decisions that lead to it."""

    partition: Partition
    """Host i is host i of the current partition. A host without shares is to be stopped, and may get shares again later; new
    hosts are at the end."""
    decisions: tuple[ScalingDecision, ...]
    state: ScalingState
    workers: Mapping[str, float]
    """Workers for each source, within the budget."""
    num_workers: int
    """Workers for all sources together: the size of the pool when hosts share one pool of threads."""


def decide(
    now: Observed,
    mixture: Mixture,
    batch: Batch,
    current: Partition,
    *,
    budget: Budget,
    state: ScalingState,
    policy: ScalingPolicy | None = None,
) -> Scaling:
    """Return the partition that the run should have now, and the decisions that lead to it from `current`."""
    current.check_sources(now.profiles)
    view = _View.at(now, mixture, batch, current, budget=budget, state=state, policy=policy or ScalingPolicy())
    wishes = {name: view.wish(name) for name in now.profiles}
    granted, out_of_memory = view.within_memory(wishes)
    refused = {name: why for name, wish in wishes.items() if (why := view.refusal(wish, name in out_of_memory))}
    target = view.arrangement(granted)
    target, spare_since_s = view.without_spare_host(target, state.spare_since_s)
    return Scaling(
        partition=target,
        decisions=(*view.change_decisions(wishes, granted, refused), *view.move_decisions(target)),
        state=ScalingState(
            {name: view.next_history(wish, granted[name], name in refused) for name, wish in wishes.items()}, spare_since_s
        ),
        workers=view.demand.workers,
        num_workers=max(1, math.ceil(view.demand.together - _ROUNDING)),
    )


@dataclass(frozen=True, slots=True)
class _Wish:
    """The loaders that one source wants, regardless of the other sources."""

    source: str
    has: int
    wants: int
    could_do_with: int
    """The number that suffices if another source needs the memory."""
    lower_since_s: float | None = None
    most_needed: int = 0


@dataclass(frozen=True, slots=True)
class _View:
    """A run at one moment, with the demand ahead: the input of every step of `decide`."""

    now: Observed
    current: Partition
    budget: Budget
    policy: ScalingPolicy
    histories: Mapping[str, SourceHistory]
    demand: Demand

    @staticmethod
    def at(
        now: Observed,
        mixture: Mixture,
        batch: Batch,
        current: Partition,
        *,
        budget: Budget,
        state: ScalingState,
        policy: ScalingPolicy,
    ) -> _View:
        histories = {
            name: _with_boost_from_waits(state.sources.get(name, SourceHistory()), name, now, policy)
            for name in now.profiles
        }
        costs = {
            name: _with_cost_times(p, histories[name].boost if p.num_chunks else 0.0) for name, p in now.profiles.items()
        }
        last = now.step + math.ceil(policy.ahead_s / now.step_s)
        demand = demand_ahead(costs, mixture, batch, budget, first=now.step, last=last, step_s=now.step_s)
        return _View(now, current, budget, policy, histories, demand)

    def wish(self, name: str) -> _Wish:
        history, need, has = self.histories[name], self.demand.loads[name], len(self.current.hosts_of(name))
        room, most = self.budget.workers_per_host, self.now.profiles[name].most_loaders
        wants = int(min(loaders_for(need, room), most))
        if self.now.profiles[name].num_chunks == 0:
            return _Wish(name, has, has, has)
        if wants > has:
            return _Wish(name, has, wants, has)
        keeps = int(min(loaders_for(need * (1 + self.policy.margin), room), most))
        if keeps >= has:
            return _Wish(name, has, has, has)
        since_s = self.now.at_s if history.lower_since_s is None else history.lower_since_s
        most_needed = max(history.most_needed, keeps)
        lower_s = self.now.at_s - since_s
        return _Wish(
            name,
            has,
            wants=most_needed if lower_s >= self.policy.calm_s else has,
            could_do_with=most_needed if lower_s >= self.policy.settle_s else has,
            lower_since_s=since_s,
            most_needed=most_needed,
        )

    def within_memory(self, wishes: Mapping[str, _Wish]) -> tuple[dict[str, int], frozenset[str]]:
        """Returns the number of loaders that each source gets, and the sources that get fewer than they want because memory
        is short. Idle loaders are given up first; then the sources nearest to their need get fewer new ones."""
        granted = {name: wish.wants for name, wish in wishes.items()}
        growing = {name for name, wish in wishes.items() if wish.wants > wish.has}
        if not growing or self._fits(granted):
            return granted, frozenset()
        for wish in sorted(wishes.values(), key=lambda wish: (wish.could_do_with - wish.has, wish.source)):
            if wish.could_do_with < granted[wish.source] and wish.source not in growing:
                granted[wish.source] = wish.could_do_with
                if self._fits(granted):
                    return granted, frozenset()
        refused: set[str] = set()
        while growing and not self._fits(granted):
            name = max(growing, key=lambda name: (granted[name] / self.demand.loads[name], name))
            granted[name] -= 1
            refused.add(name)
            if granted[name] == wishes[name].has:
                growing.remove(name)
        return granted, frozenset(refused)

    def arrangement(self, loaders: Mapping[str, int]) -> Partition:
        """Assigns the loaders to hosts. When memory allows no more hosts, some hosts have more work than workers."""
        budget = self.budget
        if budget.host_bytes:
            allowed = (budget.memory_bytes - self._held_bytes(loaders)) // budget.host_bytes
            most = max(allowed, _num_used(self.current))
            budget = replace(budget, num_hosts=most if budget.num_hosts is None else min(most, budget.num_hosts))
        return rearrange(self.current, loaders, self.demand.loads, budget)

    def _fits(self, loaders: Mapping[str, int]) -> bool:
        hosts = _num_used(rearrange(self.current, loaders, self.demand.loads, self.budget))
        return hosts * self.budget.host_bytes + self._held_bytes(loaders) <= self.budget.memory_bytes

    def _held_bytes(self, loaders: Mapping[str, int]) -> int:
        return sum(held_bytes(self.now.profiles[name], n, self.demand.workers[name]) for name, n in loaders.items())

    def without_spare_host(self, target: Partition, since_s: float | None) -> tuple[Partition, float | None]:
        """Returns the target with one host fewer once that has sufficed for `calm_s`, and when it began to suffice."""
        fewer = without_least_busy_host(target, self.demand.loads, self.budget, self.policy.margin)
        if fewer is None or target != self.current:
            return target, None
        since_s = self.now.at_s if since_s is None else since_s
        return (fewer, None) if self.now.at_s - since_s >= self.policy.calm_s else (target, since_s)

    def refusal(self, wish: _Wish, is_out_of_memory: bool) -> str:
        """Why a source gets fewer loaders than it needs; empty when it gets enough."""
        profile, wanted = self.now.profiles[wish.source], self.demand.wanted[wish.source]
        num_wanted = loaders_for(wanted, self.budget.workers_per_host)
        sending = self.demand.sending[wish.source]
        is_sent = sending * self.budget.workers_per_host >= wanted
        needs = f"it needs {num_wanted} {'to send its chunks' if is_sent and sending else f'for {wanted:.3g} workers'}, but "
        if is_out_of_memory:
            return f"{needs}the memory budget of {self.budget.memory_bytes:,} bytes has no room for more"
        if num_wanted > profile.most_loaders:
            return (
                f"{needs}buffer_bytes of {profile.buffer_bytes:,} would not hold {CHUNKS_AT_HAND} chunks of "
                f"{profile.chunk_bytes:,} bytes in each: raise it"
            )
        return f"{needs}{self.demand.shortage}" if self.demand.shortage and num_wanted > wish.wants else ""

    def change_decisions(
        self, wishes: Mapping[str, _Wish], granted: Mapping[str, int], refused: Mapping[str, str]
    ) -> list[ScalingDecision]:
        found: list[ScalingDecision] = []
        for name, wish in wishes.items():
            after, why_no_more = granted[name], refused.get(name, "")
            if after > wish.has:
                reason = "; ".join(filter(None, [self._why_more(wish), why_no_more]))
            elif after < wish.has:
                reason = self._why_less(wish, after)
            elif why_no_more and not self.histories[name].is_refused:
                reason = why_no_more
            else:
                continue
            found.append(ScalingDecision(self.now.step, name, wish.has, after, reason))
        return found

    def _why_more(self, wish: _Wish) -> str:
        name, room = wish.source, self.budget.workers_per_host
        step, boost = self.demand.step[name], self.histories[name].boost
        when = (
            "now"
            if step <= self.now.step
            else f"from step {step:,} on, in {duration((step - self.now.step) * self.now.step_s)},"
        )
        waited = f", taken {boost:.3g} times since steps waited for it" if boost > 1 else ""
        sending = self.demand.sending[name]
        if sending * room > self.demand.workers_wanted[name]:
            return (
                f"{when} {self.demand.rate[name]:.3g} chunks/s of {self.now.profiles[name].sent_bytes:,.0f} bytes{waited} "
                f"are as much as {sending:.3g} hosts can send with headroom, at {self.budget.host_bytes_per_s:,.0f} bytes/s "
                f"each, and {wish.has} are there"
            )
        return (
            f"{when} {self.demand.rate[name]:.3g} chunks/s of {duration(self.now.profiles[name].chunk_s)}{waited} need "
            f"{self.demand.wanted[name]:.3g} workers with headroom, and {wish.has} x {room} are there"
        )

    def _why_less(self, wish: _Wish, after: int) -> str:
        lower_s = self.now.at_s - (wish.lower_since_s or 0.0)
        early = "" if after == wish.wants else ", and others need the memory"
        return f"for {duration(lower_s)} it has needed no more (now {self.demand.loads[wish.source]:.3g} workers){early}"

    def move_decisions(self, target: Partition) -> list[ScalingDecision]:
        """One decision for each share that only changes its host."""
        num_shares, room = target.num_shares(), self.budget.workers_per_host
        found: list[ScalingDecision] = []
        for share, before, after in moves(self.current, target):
            if target.hosts[before]:
                busy = sum(self.demand.loads[other.source] / other.of for other in self.current.hosts[before])
                why = f"host {before} had work for {busy:.3g} workers and has {room}"
            else:
                why = f"host {before} had so little work that other hosts have room for it"
            n = num_shares[share.source]
            found.append(ScalingDecision(self.now.step, share.source, n, n, f"loader {share.index} to host {after}: {why}"))
        return found

    def next_history(self, wish: _Wish, after: int, is_refused: bool) -> SourceHistory:
        changed = after != wish.has
        return replace(
            self.histories[wish.source],
            lower_since_s=None if changed else wish.lower_since_s,
            most_needed=0 if changed else wish.most_needed,
            grown_s=self.now.at_s if after > wish.has else self.histories[wish.source].grown_s,
            is_refused=is_refused,
        )


def _with_boost_from_waits(history: SourceHistory, name: str, now: Observed, policy: ScalingPolicy) -> SourceHistory:
    """Raise the boost if steps waited for the source, lower it if not. A recent change gets time to show its effect."""
    recently = max((at_s for at_s in (history.boosted_s, history.grown_s) if at_s is not None), default=-math.inf)
    is_waited_for = now.waited.get(name, 0.0) > policy.tolerance
    if is_waited_for and now.at_s - recently >= policy.settle_s:
        return replace(history, boost=min(history.boost * _BOOST, _MOST_BOOST), boosted_s=now.at_s)
    if not is_waited_for and history.boost > 1 and now.at_s - recently >= policy.calm_s:
        return replace(history, boost=max(history.boost / _BOOST, 1.0), boosted_s=now.at_s)
    return history


def _with_cost_times(profile: Profile, factor: float) -> Profile:
    return replace(
        profile, cpu_s=profile.cpu_s * factor, wait_s=profile.wait_s * factor, sent_bytes=profile.sent_bytes * factor
    )


def _num_used(partition: Partition) -> int:
    return sum(1 for host in partition.hosts if host)


@dataclass(frozen=True, slots=True)
class Demand:
    """The peak need of each source over a stretch of the schedule."""

    wanted: Mapping[str, float]
    """What it takes of hosts, in workers, with headroom: the workers that make its chunks; or, where more hosts are needed
    to send them, all workers of these."""
    workers_wanted: Mapping[str, float]
    """Of these, the workers that make its chunks."""
    sending: Mapping[str, float]
    """The hosts that it keeps busy with sending, with headroom; 0 where a host may send any number of bytes."""
    loads: Mapping[str, float]
    """As `wanted`, scaled down at each step to the processors and hosts of the budget, by one factor for all sources."""
    workers: Mapping[str, float]
    """As `workers_wanted`, likewise."""
    step: Mapping[str, int]
    """The first step of the peak."""
    rate: Mapping[str, float]
    """Chunks a second at that step."""
    together: float
    """The most workers that are busy at the same time, over all sources."""
    shortage: str
    """Which part of the budget is too small; empty if it suffices."""


def demand_ahead(
    profiles: Mapping[str, Profile],
    mixture: Mixture,
    batch: Batch,
    budget: Budget,
    *,
    first: int,
    last: int,
    step_s: float,
) -> Demand:
    """The demand from step `first` to step `last`, each taking `step_s` seconds."""
    wanted, workers_wanted, sending, loads, workers, rate = (dict.fromkeys(profiles, 0.0) for _ in range(6))
    since = dict.fromkeys(profiles, first)
    together, most, shortage = 0.0, 0.0, ""
    batch = batch.at(last)  # while steps grow, the last one is the largest
    for step, weights in weights_ahead(mixture, first, last):
        per_step = chunks_per_step(profiles, weights, batch, mixture.unit)
        rates = {name: chunks / step_s for name, chunks in per_step.items()}
        needs = workers_needed(profiles, rates, budget.headroom)
        sends = transfers_needed(profiles, rates, budget)
        allowed, lacking = _affordable_fraction(profiles, needs, sends, budget)
        if lacking and sum(needs.values()) > most:
            most, shortage = sum(needs.values()), f"from step {step:,} on {lacking}"
        together = max(together, allowed * sum(needs.values()))
        for name, need in needs.items():
            load = max(need, sends[name] * budget.workers_per_host)
            if load > wanted[name]:
                wanted[name], since[name], rate[name] = load, step, rates[name]
                workers_wanted[name], sending[name] = need, sends[name]
            loads[name] = max(loads[name], allowed * load)
            workers[name] = max(workers[name], allowed * need)
    return Demand(wanted, workers_wanted, sending, loads, workers, since, rate, together, shortage)


def _affordable_fraction(
    profiles: Mapping[str, Profile], needs: Mapping[str, float], sends: Mapping[str, float], budget: Budget
) -> tuple[float, str]:
    """The fraction of the needs that the budget's processors, workers and hosts cover, and a description of the shortage."""
    cpus = sum(need * profiles[name].cpu_share for name, need in needs.items())
    workers = sum(needs.values())
    room = math.inf if budget.num_hosts is None else budget.num_hosts * budget.workers_per_host
    sent, hosts = sum(sends.values()), budget.num_hosts or math.inf
    allowed = min(
        1.0, budget.cpus / cpus if cpus else 1.0, room / workers if workers else 1.0, hosts / sent if sent else 1.0
    )
    if allowed == 1:
        return 1.0, ""
    if sent and hosts / sent == allowed:
        per_s = budget.host_bytes_per_s or 0.0
        return allowed, f"the sources send as much as {sent:.3g} hosts can at {per_s:,.0f} bytes/s, and there are {hosts}"
    if budget.cpus * workers <= room * cpus:
        return allowed, f"the sources need {cpus:.3g} CPUs with headroom, and the budget has {budget.cpus:.3g}"
    return allowed, f"the sources need {workers:.3g} workers, and {budget.num_hosts} hosts have {room}"
