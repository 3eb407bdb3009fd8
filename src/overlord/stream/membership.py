"""Decides which samples make which step: by the mixture and the batch alone, before any strategy sees the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from overlord.records import record
from overlord.stream.drawing import DrawQueue, Extent, FactsMissing, FactSource, with_weights
from overlord.stream.facts import (
    LOSS_EXTRA,
    ChunkFacts,
    Floats,
    Ints,
    LossCount,
    Losses,
    Samples,
    TokenSpans,
)
from overlord.stream.outliers import (
    all_now,
    not_placed,
    released,
    set_aside,
)
from overlord.stream.packing import (
    Pieces,
    SamplesInRows,
    best_fit,
    concat_and_split,
    cut_samples,
    in_drawn_order,
    padded_lengths,
)
from overlord.stream.skips import SkipSchedule, SkipSet, without_skipped
from overlord.stream.weights import WeightSchedule

if TYPE_CHECKING:
    from overlord.declare.batch import Batch
    from overlord.declare.mixture import Mixture
    from overlord.stream.progress import Progress

_STEPS_TOGETHER = 8  # drawn at once where they can be: a call costs the same for some dozens of samples and for hundreds


@record
class DrawnStep:
    """The samples of one step, the row that packing put each into (None for steps counted in samples and for those that cut
    documents), and the progress after the step, computed on demand."""

    number: int
    samples: Samples
    rows: Ints | None
    weights: Floats
    after: Callable[[], Progress]
    in_rows: SamplesInRows | None = None
    """The samples cut at the ends of rows, where that was computed for several steps at once."""

    def __reduce__(self) -> tuple[object, ...]:
        # `after` refers to the queue of the drawer: pickle its result instead.
        after = partial(_same, self.after())
        return DrawnStep, (self.number, self.samples, self.rows, self.weights, after, self.in_rows)


def _same(progress: Progress) -> Progress:
    return progress


class StepDrawer:
    """Draws step after step from a progress on."""

    def __init__(
        self,
        progress: Progress,
        batch: Batch,
        mixture: Mixture,
        extents: Sequence[Extent],
        facts: FactSource,
        *,
        schedule: WeightSchedule | None = None,
        skips: SkipSchedule | None = None,
        has_loss_masks: bool = False,
    ) -> None:
        """`schedule`: the weights in force, where they may change while the run goes on, and `skips` what is left out.
        `has_loss_masks`: the loss of a cut document depends on where it is cut."""
        self._declared = batch
        self._batch = batch.at(progress.step)  # of the next step
        self._num_rows = self._batch.num_rows or 1
        self._mixture = mixture
        self._schedule = schedule or WeightSchedule(mixture, progress.names)
        self._extents = extents
        self._ends = np.array([-1 if e.end is None else e.end for e in extents], np.int64)
        self._facts = facts
        self._count_losses = facts.count_losses if has_loss_masks else None
        self._number = progress.step
        self._skips = skips or SkipSchedule(progress.names)
        self._left_out: SkipSet | None = None  # as far as it is followed: `next_step` compares
        self._carried = progress.carried
        self._num_first = 0  # candidates of a step that are placed before all others
        self._weights = progress.weights
        self._queue = self._new_queue(progress)
        self._drawn: deque[DrawnStep] = deque()  # together with the step before
        self._here: Callable[[], Progress] = partial(_same, progress)  # before the next step

    @property
    def number(self) -> int:
        """The step that `next_step` will return."""
        return self._number

    @property
    def is_ready(self) -> bool:
        """True when the next step can be drawn from known facts, without waiting for a loader."""
        if self._schedule.constant is not self._weights and self._schedule.at(self._number) is not self._weights:
            return False
        if self._skips.at(self._number) is not self._left_out:
            return False
        if self._drawn:
            return True
        if self._batch.samples is not None:
            return self._queue.samples_at_hand >= self._batch.samples
        return self._queue.tokens_at_hand >= (self._batch.tokens or 0)

    def next_step(self) -> DrawnStep | None:
        """Draw the next step. None when the run has ended; once ended it stays so. Raises `FactsMissing` where the facts of
        a chunk, or the losses of a part of one, are not known yet; the next call draws the same step."""
        constant = self._schedule.constant
        weights = self._schedule.at(self._number) if constant is None else constant
        left_out = self._skips.at(self._number)
        if weights is not self._weights or left_out is not self._left_out:
            progress = self._here()
            carried = without_skipped(progress.carried, left_out, self._find_facts)  # raises before anything changes
            self._drawn.clear()  # these steps were drawn by the old weights
            self._left_out, self._carried = left_out, carried
            ended = (self._ends >= 0) & (progress.chunk >= self._ends) & (self._mixture.stop == "drop_exhausted")
            self._queue = self._new_queue(with_weights(progress, weights, ended))
            self._weights = weights
        if not self._drawn:
            self._drawn.extend(self._draw_from_here())
        if not self._drawn:
            return None
        step = self._drawn.popleft()
        self._number, self._here = step.number + 1, step.after
        if self._declared.warm_up is not None:
            self._batch = self._declared.at(self._number)
            self._num_rows = self._batch.num_rows or 1
        return step

    def _find_facts(self, source: int, chunk: int) -> ChunkFacts:
        facts = self._facts.find(source, chunk)
        if facts is None:
            raise FactsMissing([(source, chunk)])
        return facts

    def _draw_from_here(self) -> list[DrawnStep]:
        """Draw the next steps. Where facts are missing, nothing is drawn."""
        self._queue.mark()
        carried = self._carried
        try:
            return self._draw()
        except FactsMissing:
            self._queue.back()
            self._carried = carried
            raise

    def _draw(self) -> list[DrawnStep]:
        """Draw the next step, with some after it where that costs little; nothing when the run has ended."""
        batch, number = self._batch, self._number
        if batch.samples is not None:
            drawn = self._by_samples(batch.samples)
        elif batch.cut_documents and self._can_cut_together:
            return self._cut_together(batch.tokens or 0)
        elif batch.cut_documents:
            drawn = self._cut(batch.tokens or 0)
        else:
            drawn = self._whole_documents(batch.tokens or 0)
        if drawn is None:
            return []
        at, carried = self._queue.bookmark(), self._carried
        after = partial(_progress, number + 1, at, lambda: carried)
        return [DrawnStep(number, *drawn, self._weights, after)]

    @property
    def _can_cut_together(self) -> bool:
        return self._count_losses is None and self._batch.document_limits is None and len(self._carried) <= 1

    def _new_queue(self, progress: Progress) -> DrawQueue:
        unit, stop = self._mixture.unit, self._mixture.stop
        return DrawQueue(progress, unit, stop, self._extents, self._facts, skips=self._left_out)

    def _by_samples(self, count: int) -> tuple[Samples, None] | None:
        if self._batch.outliers is None:
            samples = self._with_carried(self._queue.next_samples(count - len(self._carried)))
            waiting = self._carried
        else:
            samples, waiting = self._candidates(lambda have: self._queue.next_samples(count - len(have)))
        if len(samples) == 0 or (len(samples) < count and self._batch.drop_last):
            return None
        if len(samples) > count:  # more came due at once than a step has
            samples, left = samples.take(slice(0, count)), not_placed(samples.take(slice(count, None)))
            waiting = Samples.concatenate([left, waiting])
        self._carried = waiting
        return samples, None

    def _cut_together(self, tokens: int) -> list[DrawnStep]:
        """Draw steps of exactly `tokens` tokens, as many as are at hand: the same as `_cut` returns one by one. Every sample
        has tokens: a job whose steps are counted in tokens takes no source without text."""
        carried, number = self._carried, self._number
        parts = [carried, self._queue.next_tokens(tokens - int(carried.tokens.sum()))]
        surplus = int(parts[0].tokens.sum()) + int(parts[1].tokens.sum()) - tokens
        if surplus < 0 and (self._batch.drop_last or surplus == -tokens):
            return []
        at_most = self._num_alike(_STEPS_TOGETHER) - 1
        more = max(0, min(at_most, (surplus + self._queue.tokens_at_hand) // tokens))
        parts.append(self._queue.next_tokens(more * tokens - surplus) if more else Samples.none(carried.source_names))
        samples = Samples.concatenate([part for part in parts if len(part)])
        ends = np.cumsum(samples.tokens)
        steps, row_tokens, count = _cut_every(samples, ends, tokens, more + 1), self._batch.sequence_length, more + 1
        # A step ends where a row ends, so all rows of all steps are cut in one pass.
        per_step = tokens // row_tokens
        rows = _cut_every(samples, ends, row_tokens, count * per_step)
        bounds = range(tokens, count * tokens + 1, tokens)
        num_used = np.minimum(ends.searchsorted(bounds) + 1, len(samples)).tolist()
        first_of_step = steps.bin.searchsorted(range(count + 1)).tolist()
        first_of_rows = rows.bin.searchsorted(range(0, count * per_step + 1, per_step)).tolist()
        drawn: list[DrawnStep] = []
        for i, (used, bound) in enumerate(zip(num_used, bounds, strict=True)):
            of_step = steps.samples.take(slice(first_of_step[i], first_of_step[i + 1]))
            in_rows = slice(first_of_rows[i], first_of_rows[i + 1])
            cut = SamplesInRows(rows.samples.take(in_rows), rows.bin[in_rows] - i * per_step)
            at = self._queue.bookmark(draws_ago=len(samples) - max(used, len(carried)))
            after = partial(_progress, number + i + 1, at, partial(_rest, samples, ends, used - 1, bound))
            drawn.append(DrawnStep(number + i, of_step, None, self._weights, after, cut))
        self._carried = _rest(samples, ends, num_used[-1] - 1, bounds[-1])
        return drawn

    def _num_alike(self, most: int) -> int:
        """How many steps, from the next one on, are of one size and drawn by the same weights; at most `most`."""
        count = 1
        if self._declared.warm_up is not None and (phases := self._declared.phases) is not None:
            most = min(most, next((first - self._number for first in phases.first if first > self._number), most))
        while count < most and self._schedule.at(self._number + count) is self._weights:
            if self._skips.at(self._number + count) is not self._left_out:
                break
            count += 1
        return count

    def _cut(self, tokens: int) -> tuple[Samples, None] | None:
        """Exactly `tokens` tokens: the last document is cut and its rest carried to the next step."""
        wanted = tokens - int(self._carried.tokens.sum())
        samples = self._limited(self._with_carried(self._queue.next_tokens(wanted)))
        ends = np.cumsum(samples.tokens)
        total = int(ends[-1]) if len(ends) else 0
        if total == 0 or (total < tokens and self._batch.drop_last):
            return None
        if total > tokens:
            last = int(ends.searchsorted(tokens))
            beyond, samples = samples.take(slice(last + 1, None)), samples.take(slice(0, last + 1))
            surplus = ends.item(last) - tokens
            if surplus:
                samples, rest = self._cut_last(samples, surplus)
                beyond = Samples.concatenate([rest, beyond])
            self._carried = beyond
        return samples, None

    def _cut_last(self, samples: Samples, surplus: int) -> tuple[Samples, Samples]:
        """The samples with `surplus` tokens cut off the last, and what was cut off as a sample of its own."""
        last = len(samples) - 1
        start, cut = samples.start.item(last), samples.stop.item(last) - surplus
        loss = LossCount(cut - start)  # the document continues, so every token of the first part has a label
        whole = samples.take(slice(last, None))
        if self._count_losses is not None:
            counted = self._count_losses(whole.with_columns(stop=cut).spans(np.zeros(1, np.int64)))
            loss = LossCount(counted.tokens.item(0), counted.extra.item(0))
        extra = whole.sizes.get(LOSS_EXTRA, 0)
        rest = whole.with_columns(start=cut, tokens=surplus).with_loss(whole.loss_tokens - loss.tokens, extra - loss.extra)
        first = whole.with_columns(stop=cut, tokens=cut - start).with_loss(loss.tokens, loss.extra)
        table = samples.table.copy()
        table[:, last:] = first.table
        sizes = {name: np.append(column[:last], first.sizes[name]) for name, column in samples.sizes.items()}
        return replace(samples, table=table, sizes=sizes), rest

    def _whole_documents(self, tokens: int) -> tuple[Samples, Ints] | None:
        """Pack as many whole documents as fit into the step's rows. The rest is carried to the next step, where it is placed
        first."""
        batch, multiple = self._batch, self._batch.document_multiple

        def missing(have: Samples) -> int:
            return tokens - int(padded_lengths(have.tokens, multiple).sum())

        self._carried = self._limited(self._carried)
        if batch.outliers is None:
            self._num_first = len(self._carried)
            drawn = self._queue.next_tokens(missing(self._carried), multiple)
            candidates, waiting = self._with_carried(self._limited(drawn)), self._carried
        else:
            candidates, waiting = self._candidates(
                lambda have: self._limited(self._queue.next_tokens(missing(have), multiple))
            )
        num_carried = self._num_first
        lengths = padded_lengths(candidates.tokens, batch.document_multiple)
        if len(candidates) == 0 or (int(lengths.sum()) < tokens and batch.drop_last):
            return None
        rows = in_drawn_order(best_fit(lengths, self._num_rows, batch.sequence_length, num_first=num_carried))
        placed = rows >= 0
        if placed.all():
            self._carried = waiting
            return candidates, rows
        left = candidates.take(np.flatnonzero(~placed))
        self._carried = left if self._batch.outliers is None else Samples.concatenate([not_placed(left), waiting])
        return candidates.take(np.flatnonzero(placed)), rows[placed]

    def _candidates(self, more: Callable[[Samples], Samples]) -> tuple[Samples, Samples]:
        """The samples that may be part of the next step, carried ones first, and those that stay set aside. `more` draws
        what is missing beside the samples that it gets."""
        policy, step = self._batch.outliers, self._number
        assert policy is not None  # else nothing is ever set aside
        divided = released(self._carried, policy, step)
        found, waiting, drawn = divided.coming, divided.waiting, Samples.none(self._carried.source_names)
        self._num_first = len(found)
        # A sample that is set aside leaves room for another, which may have to be set aside too.
        while len(drawn := more(found)) > 0:
            divided = set_aside(drawn, policy, step, waiting, self._batch)
            found, waiting = Samples.concatenate([found, divided.coming]), divided.waiting
        if self._queue.has_ended:
            self._num_first += len(waiting)
            found, waiting = Samples.concatenate([all_now(waiting, step), found]), Samples.none(found.source_names)
        return found, waiting

    def _limited(self, samples: Samples) -> Samples:
        """Documents cut into parts no longer than the length curriculum allows at this step."""
        if self._declared.document_limits is None:
            return samples
        limit = self._declared.document_limit(self._number)
        return samples if limit is None else in_parts(samples, limit, self._count_losses)

    def _with_carried(self, samples: Samples) -> Samples:
        if len(self._carried) == 0:
            return samples
        samples = Samples.concatenate([self._carried, samples])
        self._carried = Samples.none(samples.source_names)
        return samples


@record
class _Cut:
    """Samples cut into bins, and the bin of each."""

    samples: Samples
    bin: Ints


def _cut_every(samples: Samples, ends: Ints, tokens: int, num_bins: int) -> _Cut:
    pieces = concat_and_split(samples.tokens, num_bins, tokens, ends)
    return _Cut(cut_samples(samples, pieces), pieces.row)


def _rest(samples: Samples, ends: Ints, last: int, bound: int) -> Samples:
    """The rest of the sample at place `last` beyond the first `bound` tokens of all samples."""
    surplus = ends.item(last) - bound
    if surplus <= 0:
        return Samples.none(samples.source_names)
    whole = samples.take(slice(last, last + 1))
    given = whole.tokens - surplus
    loss = whole.loss_tokens - np.minimum(given, whole.loss_tokens)
    return whole.with_columns(start=whole.start + given, tokens=surplus, loss_tokens=loss)


def _progress(step: int, at: Callable[[], Progress], carried: Callable[[], Samples]) -> Progress:
    return replace(at(), step=step, carried=carried())


CountLosses = Callable[[TokenSpans], Losses]


def in_parts(samples: Samples, limit: int, count_losses: CountLosses | None = None) -> Samples:
    """The same tokens in samples of at most `limit` tokens, the parts of a document one after the other.

    The label of a part's last token is the first token of the next part, so no loss token is lost. Documents with images
    stay whole: their images belong to all of their text.
    """
    is_long = samples.tokens > limit
    if "num_images" in samples.sizes:
        is_long &= samples.sizes["num_images"] == 0
    if not is_long.any():
        return samples
    num_parts = np.where(is_long, -(-samples.tokens // limit), 1)
    sample = np.repeat(np.arange(len(samples)), num_parts)
    part = np.arange(len(sample)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    tokens = samples.tokens[sample]
    stop = np.where(is_long[sample], np.minimum((part + 1) * limit, tokens), tokens)
    found = cut_samples(samples, Pieces(sample, part * limit, stop, np.zeros(len(sample), np.int64)))
    if count_losses is None:
        return found
    loss = found.loss_tokens.copy()
    extra = found.sizes[LOSS_EXTRA].copy() if LOSS_EXTRA in found.sizes else np.zeros_like(loss)
    cut = np.flatnonzero(is_long[sample])
    loss[cut], extra[cut] = count_losses(found.spans(cut))
    return found.with_loss(loss, extra)
