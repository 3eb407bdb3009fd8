"""What steers a run beside its declaration: decisions about weights and costs, and the reports that the next will follow
from. It is part of a state, and of the log.

    weights   {"weights": {name: share} or null, "of": digest of the mixture, "by": "user" or "feedback", ...}
    costs     {"modules": {name: [coefficients]}, "of": digest of the initial cost, "slow": {group: factor}, ...}

Weights hold from their step on until the next such decision, whatever the declared schedule says; null means the schedule.
A decision was made about a declaration: where that has changed since, the declaration holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.planning.learned_cost import digest_of
from overlord.planning.plain import DamagedError, keyed, listed, mapping, text, whole
from overlord.planning.recovery import COSTS, WEIGHTS, Decision, in_force
from overlord.spec import Mixture


@dataclass(frozen=True, slots=True)
class Steered:
    """How a run stands beside its progress."""

    decisions: tuple[Decision, ...] = ()
    heard: tuple[Any, ...] = ()
    """Reported losses that no decision has followed from yet, as `Heard.to_plain` gives them."""

    def to_plain(self) -> dict[str, Any]:
        return {"decisions": [decision.to_plain() for decision in self.decisions], "heard": list(self.heard)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any], at: str = "steered") -> Steered:
        """Raises DamagedError for what `to_plain` did not make."""
        plain = keyed(plain, at, needed=("decisions", "heard"))
        decided = enumerate(listed(plain["decisions"], f"{at}.decisions"))
        decisions = tuple(Decision.from_plain(each, f"{at}.decisions[{i}]") for i, each in decided)
        for i, decision in enumerate(decisions):
            text(decision.name, f"{at}.decisions[{i}][1] (name)", among=(WEIGHTS, COSTS))
        heard = tuple(listed(plain["heard"], f"{at}.heard"))
        for i, each in enumerate(heard):
            _check_heard(each, f"{at}.heard[{i}]")
        return Steered(decisions, heard)

    def about(self, mixture: Mixture) -> Steered:
        """Without what was decided about another mixture than this one."""
        digest = mixture_digest(mixture)
        kept = tuple(d for d in self.decisions if d.name != WEIGHTS or d.value["of"] == digest)
        return self if len(kept) == len(self.decisions) else Steered(kept, self.heard)


def _check_heard(plain: Any, at: str) -> None:
    step, ranks, sums = listed(plain, at, length=3)
    whole(step, f"{at}[0] (step)")
    for rank in listed(ranks, f"{at}[1] (ranks)"):
        whole(rank, f"{at}[1] (ranks)")
    for name, pair in mapping(sums, f"{at}[2]").items():
        value, tokens = (text(each, f"{at}[2].{name}") for each in listed(pair, f"{at}[2].{name}", length=2))
        if not value.removeprefix("-").isdecimal() or not tokens.isdecimal() or int(tokens) < 1:
            raise DamagedError(f"{at}[2].{name} must be a sum and a number of tokens, it is {value!r} and {tokens!r}")


def joined(own: Iterable[Decision], known: Iterable[Decision], step: int) -> tuple[Decision, ...]:
    """The decisions of a state at `step`, with those from that step on that the run had come to before it went back.

    What was learned of costs is about the machines as they were: only what the state says of it counts.
    """
    own = in_force(own, step)
    later = (d for d in known if d.step >= step and d.name != COSTS and d not in own)
    return tuple(sorted((*own, *later), key=lambda d: d.step))


def mixture_digest(mixture: Mixture) -> str:
    schedule = [
        (step, sorted((name, float(weight)) for name, weight in weights.items())) for step, weights in mixture.schedule
    ]
    return digest_of(schedule, mixture.unit, mixture.ramp)
