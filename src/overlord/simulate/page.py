"""The page of `overlord simulate --html`: one self-contained file whose script draws the figures."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from overlord.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from overlord.simulate.plan_time import PlanTime
    from overlord.simulate.simulation import SimulatedStep, Summary

_MOST_BARS = 256  # the most that a screen can show; beyond that, ranks share a bar, which shows the slowest of them
_MOST_STEPS = 32
_MARK = "/*FIGURES*/"


def check_page(path: Path) -> None:
    """Raise SpecError if the page cannot be written. Called before the simulation, which may take long."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise SpecError(f"the page cannot be written to {path}; name a file in a folder that you may write to")


def write_page(path: Path, found: dict[str, Any], summary: Summary) -> None:
    """Write the page: `found`, the output of `--json`, and the times of all ranks in the first steps."""
    figures = found | {"bars": [_bars(step) for step in summary.steps[:_MOST_STEPS]]}
    # `<` is written as an escape, so that no text in the figures can end the script.
    text = orjson.dumps(figures, option=orjson.OPT_SERIALIZE_NUMPY).decode().replace("<", "\\u003c")
    page = files("overlord.simulate").joinpath("page.html").read_text("utf-8").replace(_MARK, text)
    path.write_text(page, "utf-8")


def _bars(step: SimulatedStep) -> dict[str, Any]:
    return {"step": step.number, "before": _side(step.before), "after": _side(step.after)}


def _side(times: PlanTime) -> dict[str, Any]:
    """A bar for each of at most 256 runs of neighbouring ranks: the busiest rank of the run, and the run's mean."""
    num_ranks = len(times.busy_s)
    per_bar = -(-num_ranks // _MOST_BARS)
    first = np.arange(0, num_ranks, per_bar)
    busiest = [begin + int(times.busy_s[begin : begin + per_bar].argmax()) for begin in first.tolist()]
    return {
        "ranks_per_bar": per_bar,
        "num_ranks": num_ranks,
        "busy": times.busy_s[busiest].round(6),
        "sending": times.sending_s[busiest].round(6),
        "mean": (np.add.reduceat(times.busy_s, first) / np.diff([*first.tolist(), num_ranks])).round(6),
        "tokens": times.tokens[busiest],
        "microbatches": times.num_microbatches[busiest],
        "mean_of_all": float(times.busy_s.mean()),
        "step_s": times.step_s,
        "straggler": times.straggler,
    }
