"""What steers a run beside its declaration: decisions about weights and costs, and the reports that the next will follow
from. It is part of a state, and of the log.

    weights   {"weights": {name: share} or null, "of": digest of the mixture, "by": "user", "feedback" or "function", ...}
    skip      {"source": name, "rows": [[unit, [row, ...] or null], ...] or null, "file": "...", ...}
    source    {"source": name, "share": 0.1, "of": digest of the mixture, ...}
    costs     {"modules": {name: [coefficients]}, "of": digest of the initial cost, "slow": {rank: factor}, ...}

Weights hold from their step on until the next such decision, whatever the declared schedule says; null means the schedule.
A decision was made about a declaration: where that has changed since, the declaration holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.arrange.learned_cost import digest_of
from overlord.messages import Decision
from overlord.stream.plain import (
    DamagedError,
    as_list,
    as_mapping,
    number,
    short_repr,
    text,
    whole,
    with_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from overlord.declare.mesh import Mesh
    from overlord.declare.mixture import Mixture


@dataclass(frozen=True, slots=True)
class Steered:
    """How a run stands beside its progress."""

    decisions: tuple[Decision, ...] = ()
    heard: tuple[Any, ...] = ()
    """Reported losses that no decision has followed from yet, as `ReportedLosses.to_plain` gives them."""

    def to_plain(self) -> dict[str, Any]:
        return {"decisions": [decision.to_plain() for decision in self.decisions], "heard": list(self.heard)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any], at: str = "steered") -> Steered:
        """Raises DamagedError for what `to_plain` did not make."""
        plain = with_keys(plain, at, needed=("decisions", "heard"))
        decided = enumerate(as_list(plain["decisions"], f"{at}.decisions"))
        decisions = tuple(decision_from_plain(each, f"{at}.decisions[{i}]") for i, each in decided)
        for i, decision in enumerate(decisions):
            text(decision.name, f"{at}.decisions[{i}][1] (name)", among=(WEIGHTS, COSTS, SKIP, SOURCE))
        heard = tuple(as_list(plain["heard"], f"{at}.heard"))
        for i, each in enumerate(heard):
            _check_heard(each, f"{at}.heard[{i}]")
        return Steered(decisions, heard)

    def about(self, mixture: Mixture) -> Steered:
        """Without what was decided about another mixture than this one."""
        digest = mixture_digest(mixture)
        kept = tuple(d for d in self.decisions if d.name not in (WEIGHTS, SOURCE) or d.value["of"] == digest)
        return self if len(kept) == len(self.decisions) else Steered(kept, self.heard)


def _check_heard(plain: Any, at: str) -> None:
    step, ranks, sums = as_list(plain, at, length=3)
    whole(step, f"{at}[0] (step)")
    for rank in as_list(ranks, f"{at}[1] (ranks)"):
        whole(rank, f"{at}[1] (ranks)")
    for name, pair in as_mapping(sums, f"{at}[2]").items():
        value, tokens = (text(each, f"{at}[2].{name}") for each in as_list(pair, f"{at}[2].{name}", length=2))
        if not value.removeprefix("-").isdecimal() or not tokens.isdecimal() or int(tokens) < 1:
            raise DamagedError(f"{at}[2].{name} must be a sum and a number of tokens, it is {value!r} and {tokens!r}")


def join_decisions(own: Iterable[Decision], known: Iterable[Decision], step: int) -> tuple[Decision, ...]:
    """The decisions of a state at `step`, with those from that step on that the run had come to before it went back.

    What was learned of costs is about the machines as they were: only what the state says of it counts.
    """
    own = in_force(own, step)
    later = (d for d in known if d.step >= step and d.name != COSTS and d not in own)
    return tuple(sorted((*own, *later), key=lambda d: d.step))


def mixture_digest(mixture: Mixture) -> str:
    if mixture.function is not None:  # its own code may change: it is called again at the next step that is due
        return digest_of("function", mixture.unit)
    schedule = [
        (step, sorted((name, float(weight)) for name, weight in weights.items())) for step, weights in mixture.schedule
    ]
    return digest_of(schedule, mixture.unit, mixture.ramp)


MESH = "mesh"
"""The decision that says which mesh steps are arranged for. It is about trainers, so it does not outlive a run."""
WEIGHTS = "weights"
"""The decision that says by which weights steps are drawn. All of them are kept: a run may go back to an older state."""
SKIP = "skip"
"""A decision that says what is left out from a step on: some rows, or a source. All of them hold together."""
SOURCE = "source"
"""A decision that says which share a source has that was added while the run ran. All of them hold together."""
COSTS = "costs"
"""The decision that says which learned costs steps are arranged by."""

_AXES = ("pp", "dp", "cp", "tp")


def decision_from_plain(plain: Any, at: str) -> Decision:
    """Raises DamagedError for what no run decides."""
    step, name, value = as_list(plain, at, length=3)
    whole(step, f"{at}[0] (step)")
    checks = {WEIGHTS: _check_weights, COSTS: _check_costs, MESH: _check_mesh, SKIP: _check_skip, SOURCE: _check_source}
    check = checks.get(text(name, f"{at}[1] (name)"))
    if check is not None:
        check(as_mapping(value, f"{at}[2]"), f"{at}[2]")
    return Decision(step, name, value)


def _check_weights(value: Mapping[str, Any], at: str) -> None:
    with_keys(value, at, needed=("weights", "of"), allowed=value)
    weights = value["weights"]
    if weights is not None:
        shares = [number(w, f"{at}.weights.{n}", least=0) for n, w in as_mapping(weights, f"{at}.weights").items()]
        if abs(math.fsum(shares) - 1) > 1e-6:
            raise DamagedError(f"{at}.weights must sum to 1, they sum to {math.fsum(shares):g}")
    for key in ("until", "reports"):
        whole(value.get(key, 0), f"{at}.{key}")
    for source, loss in as_mapping(value.get("losses", {}), f"{at}.losses").items():
        number(loss, f"{at}.losses.{source}")
    for key in ("of", "by", "id", "note"):
        text(value.get(key, ""), f"{at}.{key}")


def _check_skip(value: Mapping[str, Any], at: str) -> None:
    with_keys(value, at, needed=("source", "rows"), allowed=("file", "by", "id"))
    for key in ("source", "file", "by", "id"):
        text(value.get(key, ""), f"{at}.{key}")
    for i, entry in enumerate(as_list(value["rows"], f"{at}.rows") if value["rows"] is not None else ()):
        unit, rows = as_list(entry, f"{at}.rows[{i}]", length=2)
        whole(unit, f"{at}.rows[{i}][0]")
        for row in as_list(rows, f"{at}.rows[{i}][1]") if rows is not None else ():
            whole(row, f"{at}.rows[{i}][1]")


def _check_source(value: Mapping[str, Any], at: str) -> None:
    with_keys(value, at, needed=("source", "share", "of"), allowed=("by", "id"))
    for key in ("source", "of", "by", "id"):
        text(value.get(key, ""), f"{at}.{key}")
    if not 0 < number(value["share"], f"{at}.share", least=0) < 1:
        raise DamagedError(f"{at}.share must be between 0 and 1, it is {value['share']:g}")


def added_sources(decisions: Iterable[Decision], step: int) -> list[str]:
    """The sources that were added while the run ran and that a run at `step` still draws from, or will."""
    decided = tuple(decisions)
    removed = {d.value["source"] for d in decided if d.name == SKIP and d.value["rows"] is None and d.step <= step}
    return [d.value["source"] for d in decided if d.name == SOURCE and d.value["source"] not in removed]


def _check_costs(value: Mapping[str, Any], at: str) -> None:
    with_keys(value, at, needed=("of", "modules", "slow", "mesh"), allowed=value)
    for module, coefficients in as_mapping(value["modules"], f"{at}.modules").items():
        for coefficient in as_list(coefficients, f"{at}.modules.{module}"):
            number(coefficient, f"{at}.modules.{module}")
    for group, factor in as_mapping(value["slow"], f"{at}.slow").items():
        if not group.isdecimal() or number(factor, f"{at}.slow.{group}", least=0) == 0:
            raise DamagedError(f"{at}.slow is a factor for each rank, it has {group!r}: {short_repr(factor)}")
    text(value.get("slow_of", "groups"), f"{at}.slow_of", among=("groups", "ranks"))
    as_list(value["mesh"], f"{at}.mesh", length=8)
    text(value["of"], f"{at}.of")


def _check_mesh(value: Mapping[str, Any], at: str) -> None:
    with_keys(value, at, needed=(*_AXES, "order"))
    for axis in _AXES:
        whole(value[axis], f"{at}.{axis}", least=1)
    if sorted(text(axis, f"{at}.order") for axis in as_list(value["order"], f"{at}.order")) != sorted(_AXES):
        raise DamagedError(f"{at}.order must name {', '.join(_AXES)} once each")


def mesh_decision(step: int, mesh: Mesh) -> Decision:
    sizes = {axis: getattr(mesh, axis) for axis in _AXES}
    return Decision(step, MESH, {**sizes, "order": list(mesh.order)})


def in_force(decisions: Iterable[Decision], step: int) -> tuple[Decision, ...]:
    """Those that hold at a step or will later: of each name the latest up to the step, and all after it. Of what is skipped
    or added, all."""
    latest: dict[str, Decision] = {}
    later = []
    for decision in sorted(decisions, key=lambda d: d.step):  # stable: of two for one step, the one made later holds
        if decision.step <= step and decision.name not in (SKIP, SOURCE):
            latest[decision.name] = decision
        else:
            later.append(decision)
    return (*latest.values(), *later)


def decisions_to_keep(decisions: Iterable[Decision], step: int) -> tuple[Decision, ...]:
    """What a snapshot keeps: those in force at a step or later, and all about weights."""
    decisions = tuple(decisions)
    kept = in_force(decisions, step)
    older = [d for d in decisions if d.name == WEIGHTS and d not in kept]
    return (*sorted(older, key=lambda d: d.step), *kept)
