"""The arguments of `overlord simulate`. Apart from the verb, so that `overlord --help` imports nothing that plans."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PRESETS = ("byted", "github", "llava-like")
STRATEGIES = ("plain", "long_short", "hdp", "multimodal", "multimodal_exchange")

_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What was asked for. None: as the job says, or what suits the rest."""

    job: Path | None
    preset: str | None
    ranks: int | None
    dp: int | None
    cp: int | None
    pp: int | None
    tp: int | None
    context: int | None
    batch_tokens: int | None
    sources: int
    strategy: str | None
    steps: int
    capacity: int
    offload: float | None
    costs: str
    measured_layers: int | None
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    seed: int
    html: Path | None


def add_simulate(verbs: argparse._SubParsersAction) -> None:
    verb = verbs.add_parser(
        "simulate",
        help="plan steps from facts alone and predict their time on any number of ranks",
        description="Draws and arranges steps as a run would, for a job or for made-up documents, and predicts how long "
        "they take beside a static mesh that is dealt blindly. Sizes may end in k, M or G (1,024 to the power of 1, 2, 3).",
    )
    verb.add_argument("job", nargs="?", type=Path, help="a Python file with `job = overlord.Job(...)`; its sources are read")
    verb.add_argument("--preset", choices=PRESETS, help="documents as published for a corpus, instead of a job")
    for axis, what in (("ranks", "ranks in all"), ("dp", "data"), ("cp", "context"), ("pp", "pipeline"), ("tp", "tensor")):
        text = what if axis == "ranks" else f"{what}-parallel size of the static mesh"
        verb.add_argument(f"--{axis}", type=_number(1), metavar="N", help=text)
    verb.add_argument("--context", type=_number(1), metavar="L", help="tokens of the longest document (presets: 128k)")
    verb.add_argument("--batch-tokens", type=_number(1), metavar="T", help="tokens of a step (presets: 32k a rank)")
    verb.add_argument("--sources", type=_number(1), default=64, metavar="S", help="of a preset (default: %(default)s)")
    verb.add_argument("--strategy", choices=STRATEGIES, help="default: the job's; hdp or multimodal for presets")
    verb.add_argument("--steps", type=_number(1), default=4, metavar="K", help="steps to plan (default: %(default)s)")
    verb.add_argument(
        "--capacity", type=_number(1), default=8192, metavar="C", help="tokens that a rank holds (default: %(default)s)"
    )
    verb.add_argument(
        "--offload", type=_positive, metavar="GB/S", help="hdp moves activations to the host at this speed (default: not)"
    )
    verb.add_argument(
        "--costs",
        default="shape",
        metavar="shape|h200|FILE",
        help="from the model's shape, as measured on an H200, or from a file of `overlord calibrate` (default: %(default)s)",
    )
    verb.add_argument(
        "--measured-layers", type=_number(1), metavar="N", help="blocks that FILE was measured with (default: all layers)"
    )
    for name, default in (("hidden", 4096), ("layers", 32), ("heads", 32), ("kv-heads", 8), ("ffn", 14336)):
        verb.add_argument(
            f"--{name}", type=_number(1), default=default, metavar="N", help="of the model (default: %(default)s)"
        )
    verb.add_argument("--seed", type=_number(0), default=0, metavar="N", help="of a preset (default: %(default)s)")
    verb.add_argument("--html", type=Path, metavar="FILE", help="write one page with the ranks' times before and after")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.simulate import simulate

        if (options.job is None) == (options.preset is None):
            verb.error("give a job file or --preset, and not both")
        given = {name: getattr(options, name) for name in SimulateOptions.__dataclass_fields__}
        return simulate(SimulateOptions(**given), options.json)

    verb.set_defaults(verb=call)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        digits, factor = text, 1
        if text[-1:].lower() in _SUFFIXES:
            digits, factor = text[:-1], _SUFFIXES[text[-1].lower()]
        try:
            value = round(float(digits) * factor) if factor > 1 else int(digits)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number such as 4096, 128k or 2M, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number
