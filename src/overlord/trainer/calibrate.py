"""`calibrate_model`: measure what documents cost a model, on the device that it trains on. Needs torch and numpy alone.

A model is a function step(lengths) that runs forward and backward over packed documents of these lengths. It is timed on a
set of shapes designed to tell apart what grows with tokens, with squared lengths and with the number of documents: several
numbers of tokens, each as short documents, as long ones and in between. Shapes are run in turn, several times over, so that
a drift of the clock affects all of them. Other shapes, mixed as in training, are measured but not fitted; the error of the
prediction on them is reported.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from overlord.arrange.cost import TransformerCost
from overlord.errors import SpecError
from overlord.steering.cost_fit import fit_times
from overlord.stream.facts import Samples

TrainingStep = Callable[[Sequence[int]], None]
"""Runs forward and backward over packed documents of these lengths. It may return before the device is done."""
Stopwatch = Callable[[Callable[[], None]], float]
"""Runs a function and returns the seconds that it took."""

_SHORTEST = 128  # tokens: the cost of shorter documents is that of their number
_WARM_UP = 2
_HELD_OUT = 6


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """Documents that were run together, with the measured and the predicted time."""

    lengths: tuple[int, ...]
    seconds: float
    predicted: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measured time."""
        return abs(self.predicted - self.seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted cost in seconds, and the measurements behind it."""

    cost: TransformerCost
    per_microbatch: float
    """The fixed time of every forward and backward pass."""
    fitted: tuple[MeasuredShape, ...]
    held_out: tuple[MeasuredShape, ...]
    device: str

    @property
    def fit_error(self) -> float:
        """The largest error over the shapes that were fitted."""
        return max(shape.error for shape in self.fitted)

    @property
    def held_out_error(self) -> float:
        """The largest error over the shapes that were not fitted."""
        return max(shape.error for shape in self.held_out)

    def about(self) -> dict[str, Any]:
        """Everything but the cost itself, for the cost file."""
        return {
            "unit": "seconds",
            "per_microbatch": self.per_microbatch,
            "device": self.device,
            "torch": torch.__version__,
            "fit_error": self.fit_error,
            "held_out_error": self.held_out_error,
            "fitted": [_to_plain(shape) for shape in self.fitted],
            "held_out": [_to_plain(shape) for shape in self.held_out],
        }


def calibrate_model(
    step: TrainingStep,
    *,
    tokens: int,
    longest: int | None = None,
    repeats: int = 5,
    device: str | None = None,
    stopwatch: Stopwatch | None = None,
) -> Calibration:
    """Measure a model with up to `tokens` tokens at a time, in documents of up to `longest` tokens (default: `tokens`).

    Every shape is run `repeats` times, and its median time counts. Raises SpecError if the options leave no shapes to tell
    the coefficients apart.
    """
    longest = tokens if longest is None else longest
    if tokens < 4 * _SHORTEST or not _SHORTEST <= longest <= tokens:
        raise SpecError(
            f"measuring needs at least {4 * _SHORTEST} tokens at a time and documents from {_SHORTEST} tokens to that many, "
            f"got tokens={tokens}, longest={longest}"
        )
    if repeats < 1:
        raise SpecError(f"each shape is run at least once, got repeats={repeats}")
    device = usual_device() if device is None else device
    fitted, held_out = fitted_shapes(tokens, longest), held_out_shapes(tokens, longest)
    seconds = _measure(step, [*fitted, *held_out], repeats, stopwatch or stopwatch_for(device))
    features = np.array([_features(lengths) for lengths in fitted])
    coefficients, per_microbatch = fit_times(features, seconds[: len(fitted)])
    cost = TransformerCost(*coefficients.tolist())

    def shapes(all_lengths: Sequence[Sequence[int]], times: Sequence[float]) -> tuple[MeasuredShape, ...]:
        predicted = [float(_features(lengths) @ coefficients) + per_microbatch for lengths in all_lengths]
        return tuple(MeasuredShape(tuple(n), float(t), p) for n, t, p in zip(all_lengths, times, predicted, strict=True))

    times = seconds.tolist()
    return Calibration(
        cost, per_microbatch, shapes(fitted, times[: len(fitted)]), shapes(held_out, times[len(fitted) :]), name_of(device)
    )


def fitted_shapes(tokens: int, longest: int) -> list[list[int]]:
    """Shapes to fit: a quarter, half and all of the tokens, in documents of one length, from short to longest by powers of
    two."""
    shapes: list[list[int]] = []
    for total in (tokens // 4, tokens // 2, tokens):
        length = _SHORTEST
        while length <= min(longest, total):
            shapes.append([length] * (total // length))
            length *= 2
    return shapes


def held_out_shapes(tokens: int, longest: int) -> list[list[int]]:
    """Shapes to check the fit on: half or all of the tokens, in documents of long-tailed lengths as corpora have them."""
    rng = np.random.Generator(np.random.Philox(0))
    shapes = []
    for number in range(_HELD_OUT):
        total = tokens // 2 if number % 2 else tokens
        drawn = np.exp(rng.normal(np.log(_SHORTEST * 4), 1.3, 4 * total // _SHORTEST)).astype(np.int64)
        ends = np.cumsum(np.clip(drawn, 16, longest))
        ends = np.append(ends[ends < total], total)  # the last one is cut
        shapes.append(np.diff(ends, prepend=0).tolist())
    return shapes


def usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})"


def stopwatch_for(device: str) -> Stopwatch:
    """A stopwatch that uses CUDA events on a GPU, and the wall clock elsewhere."""
    if not device.startswith("cuda"):
        return _by_wall_clock
    if not torch.cuda.is_available():
        raise SpecError("there is no CUDA device here; use --device cpu, or run where the trainer runs")

    def by_events(work: Callable[[], None]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        return begin.elapsed_time(end) / 1e3

    return by_events


def _by_wall_clock(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _measure(step: TrainingStep, shapes: Sequence[Sequence[int]], repeats: int, stopwatch: Stopwatch) -> np.ndarray:
    """Run every shape, and return the median time of each."""
    for lengths in (shapes[0], max(shapes, key=max)):
        for _ in range(_WARM_UP):
            stopwatch(lambda lengths=lengths: step(lengths))
    times = np.array([[stopwatch(lambda lengths=lengths: step(lengths)) for lengths in shapes] for _ in range(repeats)])
    return np.median(times, axis=0)


def _features(lengths: Sequence[int]) -> np.ndarray:
    return TransformerCost(1, 1, 1).features(Samples.of_lengths(np.array(lengths))).sum(axis=0)


def _to_plain(shape: MeasuredShape) -> dict[str, Any]:
    """The shape for a file, with lengths as pairs (length, count)."""
    length, count = np.unique(shape.lengths, return_counts=True)
    return {**asdict(shape), "lengths": np.column_stack([length, count]).tolist(), "error": shape.error}
