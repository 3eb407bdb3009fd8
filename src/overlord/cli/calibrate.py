"""`overlord calibrate`: measure what documents cost a torch model on this machine's own device, and write it down.

It prints with nothing but the standard library, so that it runs on training machines that have torch and little else.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.errors import SpecError
from overlord.steering.cost_file import save_cost
from overlord.trainer.calibrate import Calibration, Step, calibrated, usual_device
from overlord.trainer.llama_blocks import LLAMA_8B, LLAMA_70B, TINY, attention_name, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PRESETS = {"llama-8b-like": LLAMA_8B, "llama-70b-like": LLAMA_70B, "tiny": TINY}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to measure, and how."""

    model: Path | None
    preset: str | None
    device: str | None
    tokens: int
    longest: int | None
    layers: int
    repeats: int
    out: Path | None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.preset is None):
            raise SpecError(f"give a Python file with build(device), or one of --preset {', '.join(_PRESETS)}")
        if self.preset is not None and self.preset not in _PRESETS:
            raise SpecError(f"there is no preset {self.preset!r}; there are {', '.join(_PRESETS)}")


def calibrate(options: CalibrateOptions, as_json: bool) -> int:
    device = usual_device() if options.device is None else options.device
    step, model = _model(options, device)
    found = calibrated(step, tokens=options.tokens, longest=options.longest, repeats=options.repeats, device=device)
    about = {"model": model, **found.about()}
    if options.out is not None:
        save_cost(options.out, found.cost, about)
    if as_json:
        names = ("per_token", "per_length_squared", "constant")
        coefficients = dict(zip(names, found.cost.coefficients, strict=True))
        sys.stdout.write(json.dumps({**coefficients, **about}, indent=1) + "\n")
    else:
        sys.stdout.write(_told(found, model, options.out))
    return 0


def _model(options: CalibrateOptions, device: str) -> tuple[Step, str]:
    if options.preset is not None:
        told = f"{options.preset}, {options.layers} blocks, attention {attention_name(device)}"
        return steps_of(_PRESETS[options.preset], options.layers, device), told
    assert options.model is not None  # one of the two is given
    return _built(options.model)(device), options.model.name


def _built(path: Path) -> Callable[[str], Step]:
    if not path.is_file():
        raise SpecError(f"there is no file {path}; it must have build(device) -> step(lengths)")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise SpecError(f"a model is a Python file, and {path} does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, "build", None)):
        raise SpecError(f"{path} has no function build(device) that gives step(lengths)")
    return module.build


def _told(found: Calibration, model: str, out: Path | None) -> str:
    a, b, c = found.cost.coefficients
    lines = [
        f"{model} on {found.device}",
        "",
        f"{'documents':<28}{'measured':>12}{'predicted':>12}{'off by':>9}",
        *(_line(shape.lengths, shape.seconds, shape.predicted, shape.error) for shape in found.fitted),
        "not fitted:",
        *(_line(shape.lengths, shape.seconds, shape.predicted, shape.error) for shape in found.held_out),
        "",
        f"per token            {a:.4g} s",
        f"per length squared   {b:.4g} s",
        f"per document         {c:.4g} s",
        f"per microbatch       {found.per_microbatch:.4g} s",
        f"A document of {round(a / b):,} tokens spends half its time in attention." if b > 0 else "",
        f"Off by up to {found.fit_error:.1%} where fitted, {found.held_out_error:.1%} where not.",
    ]
    if out is not None:
        lines.append(f"Written to {out}: cost = overlord.load_cost({str(out)!r})")
    return "\n".join(lines) + "\n"


def _line(lengths: tuple[int, ...], seconds: float, predicted: float, error: float) -> str:
    alike = len(set(lengths)) == 1
    what = f"{len(lengths):,} x {lengths[0]:,}" if alike else f"{len(lengths):,}, {sum(lengths):,} tokens"
    return f"{what:<28}{seconds * 1e3:>9.2f} ms{predicted * 1e3:>9.2f} ms{error:>9.1%}"
