"""What `overlord simulate` was asked for, made ready: where documents come from, mesh, strategy and model of time."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from overlord.arrange.cost import TransformerCost
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.arrange.strategies import (
    Strategy,
    long_short,
    multimodal,
    plain,
)
from overlord.cli.files import load_job
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.service.run import start
from overlord.simulate.presets import BYTED, GITHUB, LlavaLike
from overlord.simulate.simulation import (
    Facts,
    Scenario,
    drawer_of,
    pooled,
    static_mesh,
)
from overlord.simulate.step_time import (
    H200_FLOPS,
    Encoder,
    Links,
    ModelShape,
    TimeModel,
)
from overlord.steering.cost_file import load_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlord.arrange.vision.images import Images
    from overlord.cli.simulate_options import SimulateOptions
    from overlord.declare.job import Job
    from overlord.stream.facts import Floats
    from overlord.stream.membership import DrawnStep

_TOKENS_A_RANK = 32 << 10  # of a step: 32 M on 1,024 ranks
_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """Documents of a published corpus, and what to simulate of them unless told otherwise."""

    documents: Facts
    context: int
    strategy: str


_PRESETS = {
    "byted": Preset(BYTED, 128 << 10, "hdp"),
    "github": Preset(GITHUB, 128 << 10, "hdp"),
    "llava-like": Preset(LlavaLike(), 8 << 10, "multimodal"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A scenario, and where its steps come from."""

    scenario: Scenario
    drawn: Iterator[DrawnStep]
    num_sources: int
    documents: str
    strategy: str


@contextmanager
def setting_of(options: SimulateOptions) -> Iterator[Setting]:
    """What was asked for, while a job's loader is open to be asked."""
    if options.job is None:
        yield _of_preset(options, _PRESETS[options.preset or ""])
        return
    job = load_job(options.job)
    batch = _batch_of_job(job, options)
    sizes = (options.ranks, options.dp, options.cp, options.tp, options.pp)
    mesh = job.mesh if not any(sizes) else _mesh(options, batch.sequence_length)
    scenario = _scenario(options, batch, mesh, options.strategy, job.strategy)
    # Which samples a step has depends on neither mesh nor strategy: the simplest of both is enough to draw them.
    with start(replace(job, batch=batch, mesh=Mesh(), strategy=None)) as loader:
        planned = (loader.plan(number) for number in range(options.steps))
        drawn = (each.step for each in planned if each is not None)
        yield Setting(scenario, drawn, len(job.sources), str(options.job), options.strategy or "the job's strategy")


def _of_preset(options: SimulateOptions, preset: Preset) -> Setting:
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


def _batch_of_job(job: Job, options: SimulateOptions) -> Batch:
    changes: dict[str, Any] = {}
    if options.context is not None:
        changes["sequence_length"] = options.context
    if options.batch_tokens is not None:
        if job.batch.tokens is None:
            raise SpecError("the job's steps are counted in samples, so --batch-tokens does not go with it; leave it out")
        changes["tokens"] = options.batch_tokens
    return replace(job.batch, **changes)


def _mesh(options: SimulateOptions, context: int) -> Mesh:
    """The static mesh: sizes as given; cp, unless given, as wide as the longest document needs; dp takes the rest."""
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
    encoder = Encoder.at(H200_FLOPS)
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
        return pooled(mesh, model, options.capacity, offload)
    encoder = model.encoder or Encoder.at(H200_FLOPS)

    def image_s(images: Images) -> Floats:
        return encoder.cost(images) / mesh.cp

    if name == "multimodal":
        return multimodal(backbone, image_s, grid=encoder.grid, max_tokens=most, equal_counts=False, pipeline=pipeline)
    # Equal numbers of microbatches, which exchanging images needs, even out little without more room than a row has.
    return multimodal(backbone, encoder.cost, grid=encoder.grid, exchange="cp", max_tokens=most * 3 // 2, pipeline=pipeline)
