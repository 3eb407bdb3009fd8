"""`overlord simulate`: plan steps from facts alone, and predict their time and memory on any number of ranks.

Options become a `Setting`: where documents come from, the mesh, the strategy and the model of time.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.arrange.cost import TransformerCost
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.arrange.strategies import Strategy, long_short, multimodal, plain
from overlord.cli.options import JOB_HELP, add_job_argument, add_options, at_least, option, positive, to_dataclass
from overlord.cli.output import console, size, table, write_json
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.jobfile.loading import JobFile, load_job
from overlord.service.run import start
from overlord.simulate.footprint import Footprint, Role, footprint
from overlord.simulate.page import check_page, write_page
from overlord.simulate.presets import BYTED, GITHUB, LlavaLike
from overlord.simulate.role_load import RoleLoad, role_loads
from overlord.simulate.simulation import FactsGenerator, Scenario, Summary, drawer_of, hdp_strategy, static_mesh
from overlord.simulate.step_time import H200_FLOPS, EncoderModel, Links, ModelShape, TimeModel
from overlord.steering.cost_file import load_cost

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from overlord.arrange.vision.images import Images
    from overlord.declare.job import Job
    from overlord.simulate.plan_time import PlanTime
    from overlord.stream.facts import Floats
    from overlord.stream.membership import DrawnStep

_TOKENS_A_RANK = 32 << 10  # of a step: 32 M on 1,024 ranks
_RANKS = 1024
_STRATEGIES = ("plain", "long_short", "hdp", "multimodal", "multimodal_exchange")


@dataclass(frozen=True, slots=True)
class Preset:
    """The documents of a published corpus, with a default context and strategy."""

    documents: FactsGenerator
    context: int
    strategy: str


_PRESETS = {
    "byted": Preset(BYTED, 128 << 10, "hdp"),
    "github": Preset(GITHUB, 128 << 10, "hdp"),
    "llava-like": Preset(LlavaLike(), 8 << 10, "multimodal"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draws and arranges steps as a run would, for a job or for synthetic documents, and predicts how long they take, "
        "compared with a static mesh that deals documents blindly. Sizes may end in k, M or G (powers of 1,024)."
    )
    add_job_argument(parser, nargs="?", help=f"{JOB_HELP}; its sources are read")
    add_options(parser, SimulateOptions)


def execute(options: argparse.Namespace) -> int:
    if (options.job is None) == (options.preset is None):
        options.parser.error("give a job file or --preset, and not both")
    return simulate(to_dataclass(options, SimulateOptions), options.json)


def _number(flag: str, help: str, default: int | None = None) -> Any:
    return option(flag, help, default=default, type=at_least(1), metavar="N")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of the verb. None stands for the job's own setting, or for a value derived from the others."""

    job: JobFile | None
    preset: str | None = option(
        "--preset", "use the published document lengths of a corpus instead of a job", choices=_PRESETS
    )
    ranks: int | None = _number("--ranks", "simulate N ranks in all")
    dp: int | None = option("--dp", "set the data-parallel size of the static mesh")
    cp: int | None = option("--cp", "set the context-parallel size of the static mesh")
    pp: int | None = option("--pp", "set the pipeline-parallel size of the static mesh")
    tp: int | None = option("--tp", "set the tensor-parallel size of the static mesh")
    context: int | None = _number("--context", "limit documents to N tokens (default for text presets: 128k)")
    batch_tokens: int | None = _number("--batch-tokens", "put N tokens in a step (default for presets: 32k for each rank)")
    sources: int = _number("--sources", "give a preset N sources (default: %(default)s)", default=64)
    strategy: str | None = option(
        "--strategy",
        "arrange steps by this strategy (default: the job's; hdp or multimodal for presets)",
        choices=_STRATEGIES,
    )
    steps: int = option("--steps", "plan N steps (default: %(default)s)", default=4, type=at_least(1))
    capacity: int = _number("--capacity", "let a rank hold N tokens (default: %(default)s)", default=8192)
    offload: float | None = option(
        "--offload",
        "let hdp offload activations to the host at this speed (default: off)",
        type=positive,
        metavar="GB/S",
    )
    costs: str = option(
        "--costs",
        "take costs from the model's shape, from measurements on an H200, or from a FILE of `overlord calibrate` (default: "
        "%(default)s)",
        default="shape",
        metavar="shape|h200|FILE",
    )
    measured_layers: int | None = _number(
        "--measured-layers", "say that FILE was measured with N blocks (default: with all layers)"
    )
    hidden: int = _number("--hidden", "set the model's hidden size (default: %(default)s)", default=4096)
    layers: int = option("--layers", "set the model's number of layers (default: %(default)s)", default=32)
    heads: int = _number("--heads", "set the model's number of attention heads (default: %(default)s)", default=32)
    kv_heads: int = _number("--kv-heads", "set the model's number of key-value heads (default: %(default)s)", default=8)
    ffn: int = _number("--ffn", "set the model's feed-forward size (default: %(default)s)", default=14336)
    seed: int = option(
        "--seed",
        "draw a preset's documents by seed N (default: %(default)s)",
        default=0,
        type=at_least(0),
        metavar="N",
    )
    html: Path | None = option(
        "--html", "write a page with the ranks' times before and after to FILE", type=Path, metavar="FILE"
    )


def simulate(options: SimulateOptions, as_json: bool) -> int:
    if options.html is not None:
        check_page(options.html)
    with open_setting(options) as setting:
        summary = _simulate_steps(setting, options.steps)
    mesh = setting.scenario.mesh
    held = footprint(
        num_sources=setting.num_sources,
        num_ranks=mesh.world_size,
        num_constructors=mesh.dp,
        step_tokens=summary.mean(lambda step: step.num_tokens),
        step_samples=summary.mean(lambda step: step.num_samples),
        step_s=summary.mean(lambda step: step.after.step_s),
        image_bytes=summary.mean(lambda step: step.image_bytes),
    )
    loads = role_loads(
        num_groups=mesh.dp,
        step_samples=summary.mean(lambda step: step.num_samples),
        step_tokens=summary.mean(lambda step: step.num_tokens),
        plan_s=summary.mean(lambda step: step.plan_s),
        image_bytes=summary.mean(lambda step: step.image_bytes),
    )
    found = _describe_results(setting, options, summary, held) | {"load": [_load_summary(load) for load in loads]}
    if options.html is not None:
        write_page(options.html, found, summary)
    if as_json:
        write_json(found)
    else:
        _print(found, options.html)
    return 0


def _simulate_steps(setting: Setting, num_steps: int) -> Summary:
    progress = console(stderr=True)
    began = time.monotonic()
    steps = []
    for number, step in enumerate(setting.scenario.steps(setting.drawn, num_steps, time.perf_counter), 1):
        steps.append(step)
        took = f"{time.monotonic() - began:.1f} s"
        progress.print(f"step {number} of {num_steps}: {step.num_samples:,} samples, {step.ratio:.2f}x, {took} so far")
    return Summary(tuple(steps))


def _describe_scenario(setting: Setting, options: SimulateOptions) -> dict[str, Any]:
    """The scenario as JSON: the options, with defaults filled in."""
    mesh, batch, model = setting.scenario.mesh, setting.scenario.batch, setting.scenario.model
    return {
        "documents": setting.documents,
        "strategy": setting.strategy,
        "ranks": mesh.world_size,
        "mesh": {"dp": mesh.dp, "cp": mesh.cp, "pp": mesh.pp, "tp": mesh.tp},
        "context": batch.sequence_length,
        "batch_tokens": batch.tokens,
        "batch_samples": batch.samples,
        "sources": setting.num_sources,
        "capacity": options.capacity,
        "offload_gb_per_s": options.offload,
        "seed": options.seed,
        "costs": {
            "from": options.costs,
            "per_token_s": model.cost.per_token,
            "per_length_squared_s": model.cost.per_length_squared,
            "constant_s": model.cost.constant,
            "kv_bytes_per_token": model.shape.kv_bytes * model.shape.layers,
            "network_bytes_per_s": model.links.network_bytes_per_s,
            "node_bytes_per_s": model.links.node_bytes_per_s,
        },
    }


def _describe_results(setting: Setting, options: SimulateOptions, summary: Summary, held: Footprint) -> dict[str, Any]:
    return {
        "scenario": _describe_scenario(setting, options),
        "ratio": summary.ratio,
        "before": _side_summary([step.before for step in summary.steps]),
        "after": _side_summary([step.after for step in summary.steps]),
        "plan_s": {"mean": summary.mean(lambda step: step.plan_s), "max": max(step.plan_s for step in summary.steps)},
        "roles": [_role_summary(role) for role in held.roles],
        "baseline": _role_summary(held.baseline),
        "memory_ratio": held.saved,
        "steps": [
            {
                "step": step.number,
                "samples": step.num_samples,
                "tokens": step.num_tokens,
                "longest": step.longest,
                "before_s": step.before.step_s,
                "after_s": step.after.step_s,
                "ratio": step.ratio,
                "plan_s": step.plan_s,
            }
            for step in summary.steps
        ],
    }


def _side_summary(times: list[PlanTime]) -> dict[str, Any]:
    count = len(times)
    return {
        "step_s": sum(each.step_s for each in times) / count,
        "straggler": sum(each.straggler for each in times) / count,
        "bubbles": sum(each.bubbles for each in times) / count,
        "sending": sum(each.sending for each in times) / count,
        "padding": sum(each.padding for each in times) / count,
        "most_tokens": max(int(each.tokens.max()) for each in times),
        "microbatches": [
            min(int(each.num_microbatches.min()) for each in times),
            max(int(each.num_microbatches.max()) for each in times),
        ],
    }


def _role_summary(role: Role) -> dict[str, Any]:
    return {
        "name": role.name,
        "count": role.count,
        "bytes_each": round(role.bytes_each),
        "bytes": round(role.total_bytes),
        "connections_each": round(role.connections_each),
        "connections": round(role.total_connections),
    }


def _load_summary(load: RoleLoad) -> dict[str, Any]:
    return {
        "name": load.name,
        "count": load.count,
        "cpu_ms_each": load.cpu_ms,
        "messages_each": load.messages,
        "bytes_each": round(load.num_bytes),
    }


def _print(found: dict[str, Any], html: Path | None) -> None:
    out = console()
    scenario, before, after = found["scenario"], found["before"], found["after"]
    mesh = " ".join(f"{axis}={length}" for axis, length in scenario["mesh"].items())
    tokens = f"{scenario['batch_tokens']:,} tokens" if scenario["batch_tokens"] else f"{scenario['batch_samples']:,} samples"
    out.print(
        f"{scenario['documents']}: {scenario['ranks']:,} ranks ({mesh}), context {scenario['context']:,}, {tokens} a step, "
        f"{scenario['sources']:,} sources",
        soft_wrap=True,
        markup=False,
    )
    rows = [
        ("step", f"{before['step_s']:.3f} s", f"{after['step_s']:.3f} s"),
        ("slowest rank over mean", f"{before['straggler']:.3f}", f"{after['straggler']:.3f}"),
        ("bubbles", f"{before['bubbles']:.1%}", f"{after['bubbles']:.1%}"),
        ("sending that nothing hides", f"{before['sending']:.1%}", f"{after['sending']:.1%}"),
        ("padding", f"{before['padding']:.2%}", f"{after['padding']:.2%}"),
        ("tokens a rank holds, at most", f"{before['most_tokens']:,}", f"{after['most_tokens']:,}"),
        ("microbatches of a rank", *("{:,} to {:,}".format(*side["microbatches"]) for side in (before, after))),
    ]
    out.print(table("", "static mesh, dealt blindly", scenario["strategy"], rows=rows))
    roles = [
        (
            role["name"],
            f"{role['count']:,}",
            size(role["bytes_each"]),
            size(role["bytes"]),
            f"{role['connections_each']:,}",
            f"{role['connections']:,}",
        )
        for role in (*found["roles"], found["baseline"])
    ]
    out.print(table("role", "how many", "memory of each", "of all", "connections of each", "of all", rows=roles))
    loads = [
        (
            load["name"],
            f"{load['count']:,}",
            f"{load['cpu_ms_each']:,.1f} ms",
            f"{load['messages_each']:,.2f}".rstrip("0").rstrip("."),
            size(load["bytes_each"]),
        )
        for load in found["load"]
    ]
    out.print(table("predicted load", "how many", "CPU a step, each", "messages a step", "plans a step", rows=loads))
    plan_s = found["plan_s"]
    out.print(f"planning took {plan_s['mean'] * 1e3:.0f} ms a step, at most {plan_s['max'] * 1e3:.0f} ms")
    out.print(f"{found['memory_ratio']:.1f} times less memory than with every source open in every worker of every rank")
    out.print(f"predicted: {found['ratio']:.2f} times as fast as the static mesh dealt blindly")
    if html is not None:
        out.print(f"wrote {html}", markup=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """A scenario, and the iterator of its drawn steps."""

    scenario: Scenario
    drawn: Iterator[DrawnStep]
    num_sources: int
    documents: str
    strategy: str


@contextmanager
def open_setting(options: SimulateOptions) -> Iterator[Setting]:
    """Build the setting that the options describe. A job's loader stays open inside the `with` block."""
    if options.job is None:
        yield _preset_setting(options, _PRESETS[options.preset or ""])
        return
    job = load_job(options.job)
    batch = _batch(job, options)
    sizes = (options.ranks, options.dp, options.cp, options.tp, options.pp)
    mesh = job.mesh if not any(sizes) else _mesh(options, batch.sequence_length)
    scenario = _scenario(options, batch, mesh, options.strategy, job.strategy)
    # Neither mesh nor strategy decides which samples a step has, so the simplest of both draws them.
    with start(replace(job, batch=batch, mesh=Mesh(), strategy=None)) as loader:
        planned = (loader.plan(number) for number in range(options.steps))
        drawn = (each.step for each in planned if each is not None)
        yield Setting(scenario, drawn, len(job.sources), str(options.job), options.strategy or "the job's strategy")


def _preset_setting(options: SimulateOptions, preset: Preset) -> Setting:
    context = options.context or preset.context
    mesh = _mesh(options, context)
    tokens = options.batch_tokens
    if tokens is None:
        row_of_all = context * mesh.dp
        tokens = max(1, round(_TOKENS_A_RANK * mesh.world_size / row_of_all)) * row_of_all
    batch = Batch(tokens=tokens, sequence_length=context)
    name = options.strategy or preset.strategy
    drawer = drawer_of(preset.documents, batch, options.sources, options.seed)
    drawn = (step for _ in range(options.steps) if (step := drawer.next_step()) is not None)
    return Setting(_scenario(options, batch, mesh, name), drawn, options.sources, f"preset {options.preset}", name)


def _scenario(
    options: SimulateOptions, batch: Batch, mesh: Mesh, name: str | None, of_job: Strategy | None = None
) -> Scenario:
    model = _model(options, mesh)
    strategy = of_job or plain()
    if name is not None:
        strategy = _strategy(name, mesh, batch, model, options)
    return Scenario(batch=batch, mesh=mesh, strategy=strategy, model=model)


def _batch(job: Job, options: SimulateOptions) -> Batch:
    changes: dict[str, Any] = {}
    if options.context is not None:
        changes["sequence_length"] = options.context
    if options.batch_tokens is not None:
        if job.batch.tokens is None:
            raise SpecError("the job's steps are counted in samples, so --batch-tokens does not go with it; leave it out")
        changes["tokens"] = options.batch_tokens
    if changes:  # the sizes of a warm-up are those of the declared batch
        changes["warm_up"] = None
    return replace(job.batch, **changes)


def _mesh(options: SimulateOptions, context: int) -> Mesh:
    """The static mesh. By default cp is as large as the longest document needs, and dp uses the remaining ranks."""
    tp, pp = options.tp or 1, options.pp or 1
    if options.dp is not None and options.ranks is None:
        return Mesh(dp=options.dp, cp=options.cp or -(-context // options.capacity), tp=tp, pp=pp)
    ranks = options.ranks or _RANKS
    mesh = static_mesh(ranks, context=context, capacity=options.capacity, tp=tp, pp=pp, cp=options.cp)
    if options.dp not in (None, mesh.dp):
        raise SpecError(
            f"dp {options.dp} x cp {mesh.cp} x pp {pp} x tp {tp} are {options.dp * mesh.cp * pp * tp:,} ranks, not "
            f"{ranks:,}; leave one of --ranks, --dp and --cp out"
        )
    return mesh


def _model(options: SimulateOptions, mesh: Mesh) -> TimeModel:
    shape = ModelShape(**{name: getattr(options, name) for name in ("hidden", "layers", "heads", "kv_heads", "ffn")})
    if options.costs == "shape":
        cost = shape.at(H200_FLOPS)
    elif options.costs == "h200":
        cost = shape.on_h200()
    else:
        measured, blocks = load_cost(options.costs), options.measured_layers or shape.layers
        cost = TransformerCost(*(each * shape.layers / blocks for each in measured.coefficients))
    encoder = EncoderModel.at(H200_FLOPS)
    return TimeModel(cost=cost, shape=shape, links=Links(), tp=mesh.tp, pp=mesh.pp, encoder=encoder)


def _strategy(name: str, mesh: Mesh, batch: Batch, model: TimeModel, options: SimulateOptions) -> Strategy:
    pipeline = Pipeline(mesh.pp) if mesh.pp > 1 else None
    most = max(options.capacity * mesh.cp, batch.micro_tokens or batch.sequence_length)
    backbone = model.cut_over(mesh.cp)
    if name == "plain":
        return plain()
    if name == "long_short":
        return long_short(backbone, max_tokens=most, equal_counts=False, pipeline=pipeline)
    if name == "hdp":
        offload = None if options.offload is None else model.offload(options.offload * 1e9)
        return hdp_strategy(mesh, model, options.capacity, offload)
    encoder = model.encoder or EncoderModel.at(H200_FLOPS)

    def image_s(images: Images) -> Floats:
        return encoder.cost(images) / mesh.cp

    if name == "multimodal":
        return multimodal(backbone, image_s, grid=encoder.grid, max_tokens=most, equal_counts=False, pipeline=pipeline)
    # Exchanging images needs equal numbers of microbatches, which balance poorly without more room than a row has.
    return multimodal(backbone, encoder.cost, grid=encoder.grid, exchange="cp", max_tokens=most * 3 // 2, pipeline=pipeline)
