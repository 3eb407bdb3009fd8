"""The arguments of `overlord simulate`. Apart from the verb, so that `overlord --help` imports nothing that plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlord.cli.numbers import count_at_least, positive

if TYPE_CHECKING:
    import argparse

PRESETS = ("byted", "github", "llava-like")
STRATEGIES = ("plain", "long_short", "hdp", "multimodal", "multimodal_exchange")


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
        verb.add_argument(f"--{axis}", type=count_at_least(1), metavar="N", help=text)
    verb.add_argument(
        "--context", type=count_at_least(1), metavar="L", help="tokens of the longest document (presets: 128k)"
    )
    verb.add_argument("--batch-tokens", type=count_at_least(1), metavar="T", help="tokens of a step (presets: 32k a rank)")
    verb.add_argument(
        "--sources", type=count_at_least(1), default=64, metavar="S", help="of a preset (default: %(default)s)"
    )
    verb.add_argument("--strategy", choices=STRATEGIES, help="default: the job's; hdp or multimodal for presets")
    verb.add_argument("--steps", type=count_at_least(1), default=4, metavar="K", help="steps to plan (default: %(default)s)")
    verb.add_argument(
        "--capacity",
        type=count_at_least(1),
        default=8192,
        metavar="C",
        help="tokens that a rank holds (default: %(default)s)",
    )
    verb.add_argument(
        "--offload", type=positive, metavar="GB/S", help="hdp moves activations to the host at this speed (default: not)"
    )
    verb.add_argument(
        "--costs",
        default="shape",
        metavar="shape|h200|FILE",
        help="from the model's shape, as measured on an H200, or from a file of `overlord calibrate` (default: %(default)s)",
    )
    verb.add_argument(
        "--measured-layers",
        type=count_at_least(1),
        metavar="N",
        help="blocks that FILE was measured with (default: all layers)",
    )
    for name, default in (("hidden", 4096), ("layers", 32), ("heads", 32), ("kv-heads", 8), ("ffn", 14336)):
        verb.add_argument(
            f"--{name}", type=count_at_least(1), default=default, metavar="N", help="of the model (default: %(default)s)"
        )
    verb.add_argument("--seed", type=count_at_least(0), default=0, metavar="N", help="of a preset (default: %(default)s)")
    verb.add_argument("--html", type=Path, metavar="FILE", help="write one page with the ranks' times before and after")

    def call(options: argparse.Namespace) -> int:
        from overlord.cli.simulate import simulate

        if (options.job is None) == (options.preset is None):
            verb.error("give a job file or --preset, and not both")
        given = {name: getattr(options, name) for name in SimulateOptions.__dataclass_fields__}
        return simulate(SimulateOptions(**given), options.json)

    verb.set_defaults(verb=call)
