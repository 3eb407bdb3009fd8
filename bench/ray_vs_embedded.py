"""The same one-machine job on the Ray engine and embedded: tokens a second, their ratio, and where the time goes on Ray.

    python -m bench.ray_vs_embedded [--json] [--rounds N] [--seconds S]

Both run in this process at once and are read in turn, a stretch of each a round; whichever is not read stands still, with
its prefetched steps ready. Pre-tokenised Parquet is the worst case for a cluster on one machine: nearly all work is moving
bytes, and asks cost a millisecond each instead of microseconds. It is read in small and in large steps. With a BPE tokeniser
on the way, as most jobs have some such work, processes pay for themselves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from bench import corpus
from bench.measure import Spread
from bench.telling import parser_of, tell
from overlord.messages import Delivery
from overlord.roles.loader_host import LoaderHost
from overlord.roles.planner import Planner
from overlord.service.run_api import StepSource

ROW_TOKENS = 8192
SMALL_STEP = 65_536
LARGE_STEP = 8 * SMALL_STEP
STORE_BYTES = 300 << 20


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds that single asks take on an otherwise idle run."""

    empty_ask: float
    plan: float
    payload: float
    ready_step: float
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Compared:
    job: str
    embedded: Spread
    """M tokens a second."""
    ray: Spread
    ratio: Spread
    embedded_costs: Costs
    ray_costs: Costs


def ready_job(step_tokens: int) -> ol.Job:
    text = corpus.TEXT_8.make()
    sources = {f"source_{i}": ol.Parquet(path, columns=["tokens"]) for i, path in enumerate(text.paths)}
    return _job(sources, step_tokens)


def tokenised_job(step_tokens: int) -> ol.Job:
    """The standard library's own text, through a BPE of 4,000 tokens that is learnt from it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = Path(json.__file__).parent.parent
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.train_from_iterator(texts[:60], trainers.BpeTrainer(vocab_size=4000, show_progress=False))
    corpus.DATA.mkdir(parents=True, exist_ok=True)
    sources = {}
    for number in range(4):
        path = corpus.DATA / f"library-{number}.parquet"
        pq.write_table(pa.table({"text": texts[number::4]}), path, row_group_size=4)
        sources[f"source_{number}"] = ol.Parquet(str(path), transform=ol.Tokenize("text", encoding=learnt))
    return _job(sources, step_tokens)


def _job(sources: dict[str, ol.Parquet], step_tokens: int) -> ol.Job:
    batch = ol.Batch(tokens=step_tokens, sequence_length=ROW_TOKENS, micro_tokens=SMALL_STEP)
    return ol.Job(sources=sources, batch=batch)


def compare(name: str, job: ol.Job, rounds: int, seconds: float) -> Compared:
    engine = ol.Ray(object_store_bytes=STORE_BYTES)
    with ol.start(job) as embedded, ol.start(job, engine=engine) as on_ray:
        runs = {"embedded": embedded.client(0), "ray": on_ray.client(0)}
        for client in runs.values():
            _rate(client, seconds / 2)
        rates: dict[str, list[float]] = {engine: [] for engine in runs}
        for _ in range(rounds):
            for engine_name, client in runs.items():
                rates[engine_name].append(_rate(client, seconds))
        ratios = [b / a for a, b in zip(rates["embedded"], rates["ray"], strict=True)]
        return Compared(
            name,
            Spread.of(rates["embedded"]),
            Spread.of(rates["ray"]),
            Spread.of(ratios),
            costs_of(embedded),
            costs_of(on_ray),
        )


def _rate(client: ol.Client, seconds: float) -> float:
    """Million tokens a second over a stretch; the steps that were ready before it are not counted."""
    for _ in range(4):
        next(client)
    tokens, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        tokens += sum(len(micro["tokens"]) for micro in next(client))
    return tokens / (time.perf_counter() - begun) / 1e6


def costs_of(loader: ol.Loader) -> Costs:
    client = loader.client(0)
    step = next(client)
    planned = loader.plan(step.number)
    assert planned is not None  # the job never ends
    samples = [micro.samples for micro in planned.plan.for_group(step.number, 0).microbatches]
    constructor, planner, host = loader._roles.constructors[0], loader._roles.planner, loader._roles.fleet.hosts[0]

    def fetch() -> None:
        delivered = constructor.call(StepSource.fetch, step.number, 0, 10.0).result()
        assert isinstance(delivered, Delivery)

    fields = [field for micro in step for field in micro.values()]
    return Costs(
        empty_ask=_median_ms(lambda: host.call(LoaderHost.status_lines).result()),
        plan=_median_ms(lambda: planner.call(Planner.plan, step.number, 0).result()),
        payload=_median_ms(lambda: list(loader._roles.routes.fetch_each(samples))),
        ready_step=_median_ms(fetch),
        step_bytes=sum(field.nbytes for field in fields if isinstance(field, np.ndarray)),
    )


def _median_ms(call: Callable[[], object], repeats: int = 30) -> float:
    call()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return sorted(times)[repeats // 2] * 1e3


def show(result: Compared) -> None:
    print(f"\n{result.job}, {result.ray_costs.step_bytes / 1e6:.1f} MB a step as delivered")
    print(f"  embedded         {result.embedded} M tokens / s")
    print(f"  ray              {result.ray} M tokens / s")
    print(f"  ray / embedded   {result.ratio}")
    print(f"  {'milliseconds':<34}{'embedded':>10}{'ray':>10}")
    for label, field in (
        ("an empty ask", "empty_ask"),
        ("the plan of a step", "plan"),
        ("the payload of a step", "payload"),
        ("a step that is ready", "ready_step"),
    ):
        print(f"  {label:<34}{getattr(result.embedded_costs, field):>10.2f}{getattr(result.ray_costs, field):>10.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args(argv)
    results = [
        compare("pre-tokenised, steps of 65,536 tokens", ready_job(SMALL_STEP), given.rounds, given.seconds),
        compare("pre-tokenised, steps of 524,288 tokens", ready_job(LARGE_STEP), given.rounds, given.seconds),
        compare("tokenised on the way, steps of 65,536 tokens", tokenised_job(SMALL_STEP), given.rounds, given.seconds),
    ]
    tell(results, show, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
