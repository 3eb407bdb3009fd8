"""`overlord calibrate`: measure what documents cost a torch model on this machine's device, and save the coefficients.

Output uses only the standard library, because training machines may have torch and little else.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.options import add_options, at_least, option, to_dataclass
from overlord.errors import SpecError
from overlord.steering.cost_file import save_cost

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from overlord.trainer.calibrate import Calibration, TrainingStep

_PRESETS = ("llama-8b-like", "llama-70b-like", "tiny")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        help="a Python file with build(device), which returns step(lengths): one forward and backward pass",
    )
    add_options(parser, CalibrateOptions)


def execute(options: argparse.Namespace) -> int:
    return calibrate(to_dataclass(options, CalibrateOptions), options.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """Which model to measure, on which device, over which documents."""

    model: Path | None
    preset: str | None = option("--preset", "measure blocks of a known shape instead, such as llama-8b-like", metavar="NAME")
    device: str | None = option("--device", "measure on cuda or cpu (default: cuda if there is one)")
    tokens: int = option(
        "--tokens", "run at most N tokens at once (default: %(default)s)", default=65_536, type=at_least(1), metavar="N"
    )
    longest: int | None = option(
        "--longest", "measure documents of up to N tokens (default: as --tokens)", type=at_least(1), metavar="N"
    )
    layers: int = option("--layers", "measure N blocks of a preset (default: %(default)s)", default=2)
    repeats: int = option(
        "--repeats", "run each shape N times (default: %(default)s)", default=5, type=at_least(1), metavar="N"
    )
    out: Path | None = option("--out", "write the coefficients to FILE, for overlord.load_cost", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        if (self.model is None) == (self.preset is None):
            raise SpecError(f"give a Python file with build(device), or one of --preset {', '.join(_PRESETS)}")
        if self.preset is not None and self.preset not in _PRESETS:
            raise SpecError(f"there is no preset {self.preset!r}; there are {', '.join(_PRESETS)}")


def calibrate(options: CalibrateOptions, as_json: bool) -> int:
    from overlord.trainer.calibrate import calibrate_model, usual_device  # torch: an extra, and slow to import

    device = usual_device() if options.device is None else options.device
    step, model = _build_step(options, device)
    found = calibrate_model(step, tokens=options.tokens, longest=options.longest, repeats=options.repeats, device=device)
    about = {"model": model, **found.about()}
    if options.out is not None:
        save_cost(options.out, found.cost, about)
    if as_json:
        names = ("per_token", "per_length_squared", "constant")
        coefficients = dict(zip(names, found.cost.coefficients, strict=True))
        sys.stdout.write(json.dumps({**coefficients, **about}, indent=1) + "\n")
    else:
        sys.stdout.write(_report(found, model, options.out))
    return 0


def _build_step(options: CalibrateOptions, device: str) -> tuple[TrainingStep, str]:
    """The function to measure, and a description of its model."""
    if options.preset is not None:
        from overlord.trainer.llama_blocks import LLAMA_8B, LLAMA_70B, TINY, attention_name, steps_of

        shape = (LLAMA_8B, LLAMA_70B, TINY)[_PRESETS.index(options.preset)]
        description = f"{options.preset}, {options.layers} blocks, attention {attention_name(device)}"
        return steps_of(shape, options.layers, device), description
    assert options.model is not None  # CalibrateOptions checks that one of the two is given
    return _load_build(options.model)(device), options.model.name


def _load_build(path: Path) -> Callable[[str], TrainingStep]:
    if not path.is_file():
        raise SpecError(f"there is no file {path}; it must have build(device) -> step(lengths)")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise SpecError(f"a model is a Python file, and {path} does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, "build", None)):
        raise SpecError(f"{path} has no function build(device) that returns step(lengths)")
    return module.build


def _report(found: Calibration, model: str, out: Path | None) -> str:
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
    documents = f"{len(lengths):,} x {lengths[0]:,}" if alike else f"{len(lengths):,}, {sum(lengths):,} tokens"
    return f"{documents:<28}{seconds * 1e3:>9.2f} ms{predicted * 1e3:>9.2f} ms{error:>9.1%}"
