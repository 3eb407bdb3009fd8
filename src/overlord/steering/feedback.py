"""Feedback mixing: losses that trainers report per source move the weights of later steps.

The steps [k * every, (k + 1) * every) are a window. From the reports of a window one decision is made; it holds from step
(k + 1) * every + lag on, and it is made, and written down, just before that step is drawn for the first time, from the
reports that have come by then. Nobody waits for a report: one that comes later is not counted.

Reported losses are summed as whole numbers of a millionth, so the sums are the same in whatever order reports come and
wherever a run is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.declare.mixture import Feedback, Rule, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Sums = dict[str, tuple[int, int]]
"""Source to (the sum of losses, in whole millionths, and the tokens they are the sum over)."""

_SCALE = 1_000_000
LARGEST_LOSS = 1e6
MOST_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The weights that a rule returned for a window."""

    weights: dict[str, float]
    note: str = ""
    """Why the rule was not followed; empty where it was."""


def weight_update(rule: Rule, weights: Mapping[str, float], losses: Mapping[str, float]) -> WeightUpdate:
    """The weights that a rule returns, or the old ones where it returns none that can be used."""
    if not losses:
        return WeightUpdate(dict(weights), "no losses were reported")
    return checked_weights(lambda: rule(weights, losses), weights)


def checked_weights(rule: Callable[[], Mapping[str, float]], weights: Mapping[str, float]) -> WeightUpdate:
    """The weights that a call returns, or the old ones where it returns none that can be used."""
    try:
        new = {str(name): float(weight) for name, weight in rule().items()}
    except Exception as error:  # noqa: BLE001 - whatever a user's rule raises, the run goes on with the weights it has
        return WeightUpdate(dict(weights), f"the rule raised {type(error).__name__}: {error}")
    unknown = [name for name in new if name not in weights]
    if unknown:
        return WeightUpdate(
            dict(weights), f"the rule gave a weight to {', '.join(map(repr, unknown))}: there is no such source"
        )
    if not all(math.isfinite(weight) and weight >= 0 for weight in new.values()) or not any(new.values()):
        return WeightUpdate(dict(weights), f"the rule must give numbers >= 0, not all 0; it gave {new}")
    return WeightUpdate(shares(new))


def loss_sums(losses: Mapping[str, float], tokens: Mapping[str, float]) -> tuple[Sums, list[str]]:
    """Reported mean losses as sums, and a line for each that cannot be used."""
    sums: Sums = {}
    refused = []
    for name, loss in losses.items():
        count = tokens.get(name, 1)
        if not (math.isfinite(loss) and abs(loss) <= LARGEST_LOSS):
            refused.append(f"the loss of {name!r} is {loss!r}")
        elif not (math.isfinite(count) and 0 <= count <= MOST_TOKENS):
            refused.append(f"the loss of {name!r} is over {count!r} tokens")
        elif count >= 1:
            sums[name] = (round(loss * _SCALE) * int(count), int(count))
    return sums, refused


class ReportedLosses:
    """Losses that ranks reported for steps whose window has no decision yet."""

    def __init__(self) -> None:
        self._ranks: dict[int, set[int]] = {}
        self._sums: dict[int, Sums] = {}

    def add(self, step: int, rank: int, sums: Mapping[str, tuple[int, int]]) -> bool:
        """Count a rank's report of a step, once: False when it was counted before."""
        ranks = self._ranks.setdefault(step, set())
        if rank in ranks:
            return False
        ranks.add(rank)
        _add(self._sums.setdefault(step, {}), sums)
        return True

    def losses(self, first: int, end: int) -> dict[str, float]:
        """The mean loss of each source over the reports of steps first to end - 1, by name."""
        total = self._total(first, end)
        return {name: value / _SCALE / tokens for name, (value, tokens) in sorted(total.items())}

    def num_reports(self, first: int, end: int) -> int:
        return sum(len(ranks) for step, ranks in self._ranks.items() if first <= step < end)

    def forget_before(self, step: int) -> None:
        for number in [n for n in self._sums if n < step]:
            del self._sums[number], self._ranks[number]

    def before(self, step: int, feedback: Feedback) -> list[Any]:
        """The losses reported for steps before a step, as plain values: one entry for each window."""
        windows = dict.fromkeys(feedback.window_of(number) for number in sorted(self._sums) if number < step)
        entries = []
        for first, end in windows:
            end = min(end, step)
            entries.append([end - 1, [], plain_sums(self._total(first, end))])
        return entries

    def to_plain(self) -> list[Any]:
        """Everything, for a snapshot."""
        return [[step, sorted(self._ranks[step]), plain_sums(sums)] for step, sums in sorted(self._sums.items())]

    @staticmethod
    def from_plain(entries: Iterable[Any]) -> ReportedLosses:
        heard = ReportedLosses()
        for step, ranks, sums in entries:
            heard._ranks[int(step)] = {int(rank) for rank in ranks}
            heard._sums[int(step)] = sums_from_plain(sums)
        return heard

    def _total(self, first: int, end: int) -> Sums:
        total: Sums = {}
        for step, sums in self._sums.items():
            if first <= step < end:
                _add(total, sums)
        return total


def plain_sums(sums: Mapping[str, tuple[int, int]]) -> dict[str, list[str]]:
    """As text: the numbers may be larger than JSON readers hold exactly."""
    return {name: [str(value), str(tokens)] for name, (value, tokens) in sums.items()}


def sums_from_plain(plain: Mapping[str, Iterable[Any]]) -> Sums:
    found: Sums = {}
    for name, (value, tokens) in plain.items():
        found[name] = (int(value), int(tokens))
    return found


def _add(into: Sums, sums: Mapping[str, tuple[int, int]]) -> None:
    for name, (value, tokens) in sums.items():
        before, counted = into.get(name, (0, 0))
        into[name] = (before + value, counted + tokens)
