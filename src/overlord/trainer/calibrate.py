"""Measuring what documents cost a model, on the device that it trains on. Needs torch and numpy alone.

A model is a function step(lengths) that runs forward and backward over packed documents of these lengths. It is timed on a
designed set of shapes: several numbers of tokens, each as short documents, as long ones and in between, so that what grows
with tokens, with squared lengths and with documents can be told apart. Shapes are run in turn, several times over, so that a
clock that drifts drifts for all. Other shapes, mixed as in training, are measured but not fitted: how far the prediction is
off there is the error that is reported.
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

Step = Callable[[Sequence[int]], None]
"""Runs forward and backward over packed documents of these lengths, and may return before the device is done."""
Stopwatch = Callable[[Callable[[], None]], float]
"""Runs something and gives the seconds that it took."""

_SHORTEST = 128  # tokens: shorter documents cost what their number does
_WARM_UP = 2
_HELD_OUT = 6


@dataclass(frozen=True, slots=True)
class Shape:
    """Documents that were run together, and how long they took."""

    lengths: tuple[int, ...]
    seconds: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the time."""
        return abs(self.predicted - self.seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted coefficients, in seconds, and how good they are."""

    cost: TransformerCost
    per_microbatch: float
    """What every forward and backward pass takes, whatever is in it."""
    fitted: tuple[Shape, ...]
    held_out: tuple[Shape, ...]
    device: str

    @property
    def fit_error(self) -> float:
        """The largest over the shapes that were fitted."""
        return max(shape.error for shape in self.fitted)

    @property
    def held_out_error(self) -> float:
        """The largest over the shapes that were not."""
        return max(shape.error for shape in self.held_out)

    def about(self) -> dict[str, Any]:
        """All but the coefficients of documents, for a file."""
        return {
            "unit": "seconds",
            "per_microbatch": self.per_microbatch,
            "device": self.device,
            "torch": torch.__version__,
            "fit_error": self.fit_error,
            "held_out_error": self.held_out_error,
            "fitted": [_listed(shape) for shape in self.fitted],
            "held_out": [_listed(shape) for shape in self.held_out],
        }


def calibrated(
    step: Step,
    *,
    tokens: int,
    longest: int | None = None,
    repeats: int = 5,
    device: str | None = None,
    stopwatch: Stopwatch | None = None,
) -> Calibration:
    """Measure a model with up to `tokens` tokens at a time, in documents of up to `longest`."""
    longest = tokens if longest is None else longest
    if tokens < 4 * _SHORTEST or not _SHORTEST <= longest <= tokens:
        raise SpecError(
            f"measuring needs at least {4 * _SHORTEST} tokens at a time and documents from {_SHORTEST} tokens to that many, "
            f"got tokens={tokens}, longest={longest}"
        )
    if repeats < 1:
        raise SpecError(f"each shape is run at least once, got repeats={repeats}")
    device = usual_device() if device is None else device
    fitted, held_out = designed(tokens, longest), mixed(tokens, longest)
    seconds = _measured(step, [*fitted, *held_out], repeats, stopwatch or stopwatch_for(device))
    features = np.array([_features(lengths) for lengths in fitted])
    coefficients, per_microbatch = fit_times(features, seconds[: len(fitted)])
    cost = TransformerCost(*coefficients.tolist())

    def shapes(all_lengths: Sequence[Sequence[int]], times: Sequence[float]) -> tuple[Shape, ...]:
        predicted = [float(_features(lengths) @ coefficients) + per_microbatch for lengths in all_lengths]
        return tuple(Shape(tuple(n), float(t), p) for n, t, p in zip(all_lengths, times, predicted, strict=True))

    times = seconds.tolist()
    return Calibration(
        cost, per_microbatch, shapes(fitted, times[: len(fitted)]), shapes(held_out, times[len(fitted) :]), name_of(device)
    )


def designed(tokens: int, longest: int) -> list[list[int]]:
    """A quarter, half and all of the tokens, each in documents of one length, from short to the longest by powers of two."""
    shapes = []
    for total in (tokens // 4, tokens // 2, tokens):
        length = _SHORTEST
        while length <= min(longest, total):
            shapes.append([length] * (total // length))
            length *= 2
    return shapes


def mixed(tokens: int, longest: int) -> list[list[int]]:
    """Long-tailed lengths, as corpora have them: half or all of the tokens."""
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
    """By the device's own clock on a GPU, by the wall clock elsewhere."""
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


def _measured(step: Step, shapes: Sequence[Sequence[int]], repeats: int, stopwatch: Stopwatch) -> np.ndarray:
    """The middle time of each shape."""
    for lengths in (shapes[0], max(shapes, key=max)):
        for _ in range(_WARM_UP):
            stopwatch(lambda lengths=lengths: step(lengths))
    times = np.array([[stopwatch(lambda lengths=lengths: step(lengths)) for lengths in shapes] for _ in range(repeats)])
    return np.median(times, axis=0)


def _features(lengths: Sequence[int]) -> np.ndarray:
    return TransformerCost(1, 1, 1).features(Samples.of_lengths(np.array(lengths))).sum(axis=0)


def _listed(shape: Shape) -> dict[str, Any]:
    """Lengths as (length, how many), which is short where documents are alike."""
    length, count = np.unique(shape.lengths, return_counts=True)
    return {**asdict(shape), "lengths": np.column_stack([length, count]).tolist(), "error": shape.error}
