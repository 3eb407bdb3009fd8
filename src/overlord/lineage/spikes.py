"""Steps where the loss jumped, and the documents that may have caused it, most suspicious first."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from overlord.lineage.documents import TracedDocument
    from overlord.stream.facts import Floats

_QUIET_STEPS = 200  # that suspects are looked for in: what was there without harm is less suspicious
_MAD = 1.4826  # makes the median of deviations comparable with a standard deviation
_BEFORE = 0.5  # how much a document of the step before a jump counts: some losses are those after the update


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose loss is far above those before it."""

    step: int
    loss: float
    usual: float
    """The loss that the trend of the steps before it leads to."""
    score: float
    """The distance from it, in robust standard deviations."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A document that was in steps where the loss jumped."""

    document: TracedDocument
    """As it was in the highest of these jumps."""
    steps: tuple[int, ...]
    """The jumps that had it."""
    quiet: int
    """How many of the steps without a jump that were looked at had it too."""
    score: float


def read_losses(path: Path) -> dict[int, float]:
    """Losses by step, from a CSV file: two columns, or columns named step and loss."""
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row and not row[0].lstrip().startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"the losses cannot be read from {path}: {error}") from error
    if not rows:
        raise SpecError(f"{path} has no losses: it is empty; it needs the columns step and loss")
    names = [name.strip().lower() for name in rows[0]]
    columns = 0, 1
    if not _is_number(rows[0][0]):
        if "step" not in names or "loss" not in names:
            raise SpecError(f"{path} needs the columns step and loss, it has {', '.join(rows[0])}")
        columns, rows = (names.index("step"), names.index("loss")), rows[1:]
    if not rows:
        raise SpecError(f"{path} has no losses: it has the names of columns, and no row")
    found: dict[int, float] = {}
    for number, row in enumerate(rows, 1):
        try:
            step, loss = int(float(row[columns[0]])), float(row[columns[1]])
        except (ValueError, IndexError, OverflowError):
            raise SpecError(f"{path}, row {number}: a step and a loss are needed, it has {','.join(row)!r}") from None
        if step < 0:
            raise SpecError(f"{path}, row {number}: steps count from 0 on, it has step {step}")
        found[step] = loss
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def find_spikes(losses: dict[int, float], *, threshold: float = 6.0, window: int = 64) -> list[Spike]:
    """The steps whose loss is more than `threshold` robust standard deviations above the trend of up to `window` steps
    before it, the highest first. A loss that is not a number counts as the highest."""
    steps = sorted(losses)
    values = np.array([losses[step] for step in steps])
    spikes: list[Spike] = []
    for i, (step, loss) in enumerate(zip(steps, values.tolist(), strict=True)):
        before = values[max(i - window, 0) : i]
        before = before[np.isfinite(before)]
        if len(before) < min(window // 4, 8):
            continue
        line = _trend(before)
        usual = float(line[-1])
        spread = max(_MAD * float(np.median(np.abs(before - line[:-1]))), 1e-3 * abs(usual), 1e-12)
        score = (loss - usual) / spread if math.isfinite(loss) else math.inf
        if score > threshold:
            spikes.append(Spike(step, loss, usual, score))
    return sorted(spikes, key=lambda spike: (-spike.score, spike.step))


def _trend(values: Floats) -> Floats:
    """A line through the values that single outliers do not move, with the value that comes next."""
    half = len(values) // 2
    first, second = np.median(values[:half]), np.median(values[-half:])
    slope = (second - first) / (len(values) - half)
    ahead = np.arange(len(values) + 1) - (len(values) - 1) / 2
    return np.median(values - slope * ahead[:-1]) + slope * ahead


def rank_suspects(
    spikes: Sequence[Spike], steps: Sequence[int], documents: Callable[[int], Sequence[TracedDocument]]
) -> list[Suspect]:
    """The documents of these spikes, most suspicious first: those in many and high spikes, and in few other steps.

    `steps` are all steps that have a loss; `documents` returns those of a step.
    """
    highest = min((s.score for s in spikes if math.isinf(s.score)), default=None)
    finite = max((s.score for s in spikes if math.isfinite(s.score)), default=1.0)
    weight = {s.step: 2 * finite if highest is not None and math.isinf(s.score) else s.score for s in spikes}
    quiet = [step for step in steps if not {step, step + 1} & weight.keys()]
    sampled = quiet[:: max(1, len(quiet) // _QUIET_STEPS)][:_QUIET_STEPS]
    known = set(steps)
    score: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    first: dict[tuple[str, str, int], TracedDocument] = {}
    seen: defaultdict[tuple[str, str, int], dict[int, None]] = defaultdict(dict)
    for spike in spikes:
        for step, share in ((spike.step, 1.0), (spike.step - 1, _BEFORE)):
            if step not in known:
                continue
            for document in {_key(d): d for d in documents(step)}.values():
                key = _key(document)
                score[key] += share * weight[spike.step]
                first.setdefault(key, document)
                if share == 1.0:
                    seen[key][spike.step] = None
    among = Counter(key for step in sampled for key in {_key(d) for d in documents(step)} if key in score)
    found = [
        Suspect(first[key], tuple(sorted(seen[key])), among[key], total / (1 + among[key])) for key, total in score.items()
    ]
    return sorted(found, key=lambda s: (-s.score, -len(s.steps), _key(s.document)))


def _key(document: TracedDocument) -> tuple[str, str, int]:
    return document.source, document.location, document.row
