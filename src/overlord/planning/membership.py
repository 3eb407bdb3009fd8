"""Which samples make which step. Decided by the mixture and the batch alone, before any strategy sees the step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from overlord.planning.drawing import Describe, DrawQueue, Expect, Extent, reweighted
from overlord.planning.facts import Floats, Ints, Samples
from overlord.planning.packing import best_fit, in_drawn_order
from overlord.planning.progress import Progress
from overlord.spec import Batch, Mixture

CountLoss = Callable[[int, int, int, int, int], int]
"""(source index, chunk, row, start, stop) to the number of loss tokens in that part of the row."""


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The samples of one step, the row that membership packing gave each (None for steps counted in samples), and the
    progress after the step, computed when asked for."""

    number: int
    samples: Samples
    rows: Ints | None
    weights: Floats
    after: Callable[[], Progress]

    def __reduce__(self) -> tuple[object, ...]:
        # `after` looks into what the planner has drawn: only what it gives may travel.
        return DrawnStep, (self.number, self.samples, self.rows, self.weights, partial(_same, self.after()))


def _same(progress: Progress) -> Progress:
    return progress


class WeightSchedule:
    """The weights of each step, one entry per source; the same array for as long as they stay the same."""

    def __init__(self, mixture: Mixture, names: Sequence[str]) -> None:
        self._mixture = mixture
        self._names = names
        self._starts = [step for step, _ in mixture.schedule]
        self._held: dict[int, Floats] = {}

    def at(self, step: int) -> Floats:
        segment = bisect_right(self._starts, step) - 1
        ramping = self._mixture.ramp == "linear" and segment + 1 < len(self._starts)
        if ramping:
            return self._array(step)
        if segment not in self._held:
            self._held[segment] = self._array(step)
        return self._held[segment]

    def _array(self, step: int) -> Floats:
        weights = self._mixture.at(step)
        return np.array([weights.get(name, 0.0) for name in self._names])


class StepDrawer:
    """Draws step after step from a progress on."""

    def __init__(
        self,
        progress: Progress,
        batch: Batch,
        mixture: Mixture,
        extents: Sequence[Extent],
        describe: Describe,
        count_loss: CountLoss | None = None,
        expect: Expect | None = None,
    ) -> None:
        self._batch = batch
        self._mixture = mixture
        self._schedule = WeightSchedule(mixture, progress.names)
        self._extents = extents
        self._ends = np.array([-1 if e.end is None else e.end for e in extents], np.int64)
        self._describe = describe
        self._count_loss = count_loss
        self._expect = expect
        self._number = progress.step
        self._carried = progress.carried
        self._weights = progress.weights
        self._queue = self._new_queue(progress)

    @property
    def number(self) -> int:
        """The step that `next_step` will give."""
        return self._number

    @property
    def is_ready(self) -> bool:
        """Whether the next step can be drawn from what is known: no loader has to be asked."""
        if self._schedule.at(self._number) is not self._weights:
            return False
        if self._batch.samples is not None:
            return self._queue.samples_at_hand >= self._batch.samples
        return self._queue.tokens_at_hand >= (self._batch.tokens or 0)

    def next_step(self) -> DrawnStep | None:
        """The next step, or None when the run has ended; once ended it stays so."""
        weights = self._schedule.at(self._number)
        if weights is not self._weights:
            progress = self._queue.bookmark()()
            ended = (self._ends >= 0) & (progress.chunk >= self._ends) & (self._mixture.stop == "drop_exhausted")
            self._queue = self._new_queue(reweighted(progress, weights, ended))
            self._weights = weights
        if self._batch.samples is not None:
            drawn = self._by_samples(self._batch.samples)
        elif self._batch.cut_documents:
            drawn = self._cut(self._batch.tokens or 0)
        else:
            drawn = self._whole_documents(self._batch.tokens or 0)
        if drawn is None:
            return None
        samples, rows = drawn
        self._number += 1
        return DrawnStep(self._number - 1, samples, rows, weights, self._bookmark())

    def _bookmark(self) -> Callable[[], Progress]:
        at, number, carried = self._queue.bookmark(), self._number, self._carried
        return lambda: replace(at(), step=number, carried=carried)

    def _new_queue(self, progress: Progress) -> DrawQueue:
        mixture = self._mixture
        return DrawQueue(progress, mixture.unit, mixture.stop, self._extents, self._describe, self._expect)

    def _by_samples(self, count: int) -> tuple[Samples, None] | None:
        samples = self._with_carried(self._queue.next_samples(count - len(self._carried)))
        if len(samples) == 0 or (len(samples) < count and self._batch.drop_last):
            return None
        return samples, None

    def _cut(self, tokens: int) -> tuple[Samples, None] | None:
        """Exactly `tokens` tokens: the last document is cut and its rest carried to the next step."""
        samples = self._with_carried(self._queue.next_tokens(tokens - int(self._carried.tokens.sum())))
        total = int(samples.tokens.sum())
        if total == 0 or (total < tokens and self._batch.drop_last):
            return None
        if total > tokens:
            samples, self._carried = self._cut_last(samples, total - tokens)
        return samples, None

    def _cut_last(self, samples: Samples, surplus: int) -> tuple[Samples, Samples]:
        """The samples with `surplus` tokens cut off the last, and what was cut off as a sample of its own."""
        last = len(samples) - 1
        start, cut = samples.start.item(last), samples.stop.item(last) - surplus
        loss = cut - start  # the document goes on, so every token of the first part has a successor to predict
        if self._count_loss is not None:
            source, chunk, row = (column.item(last) for column in (samples.source, samples.chunk, samples.row))
            loss = self._count_loss(source, chunk, row, start, cut)
        stop, tokens, loss_tokens = samples.stop.copy(), samples.tokens.copy(), samples.loss_tokens.copy()
        rest = Samples(
            samples.source_names,
            samples.source[last:],
            samples.chunk[last:],
            samples.row[last:],
            np.array([cut]),
            samples.stop[last:],
            np.array([surplus]),
            loss_tokens[last:] - loss,
            {name: column[last:] for name, column in samples.sizes.items()},
        )
        stop[last], tokens[last], loss_tokens[last] = cut, cut - start, loss
        kept = (samples.source, samples.chunk, samples.row, samples.start, stop, tokens, loss_tokens, samples.sizes)
        return Samples(samples.source_names, *kept), rest

    def _whole_documents(self, tokens: int) -> tuple[Samples, Ints] | None:
        """As many whole documents as can be packed into the step's rows; those that do not fit are carried to the next
        step, where they are placed first."""
        batch = self._batch
        num_carried = len(self._carried)
        wanted = tokens - int(_padded(self._carried.tokens, batch.document_multiple).sum())
        candidates = self._with_carried(self._queue.next_tokens(wanted, batch.document_multiple))
        lengths = _padded(candidates.tokens, batch.document_multiple)
        if len(candidates) == 0 or (int(lengths.sum()) < tokens and batch.drop_last):
            return None
        rows = in_drawn_order(best_fit(lengths, batch.num_rows or 1, batch.sequence_length, num_first=num_carried))
        placed = rows >= 0
        if placed.all():
            return candidates, rows
        self._carried = candidates.take(np.flatnonzero(~placed))
        return candidates.take(np.flatnonzero(placed)), rows[placed]

    def _with_carried(self, samples: Samples) -> Samples:
        if len(self._carried) == 0:
            return samples
        samples = Samples.concatenated([self._carried, samples])
        self._carried = Samples.none(samples.source_names)
        return samples


def _padded(tokens: Ints, multiple: int) -> Ints:
    return tokens if multiple == 1 else -(-tokens // multiple) * multiple
