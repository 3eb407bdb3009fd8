"""`overlord simulate`: steps planned from facts alone, and what they would take on any number of ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from overlord.cli.output import console, size, table, write_json
from overlord.cli.simulate_setting import Setting, setting_of
from overlord.simulate.footprint import Footprint, Role, footprint
from overlord.simulate.page import check_page, write_page
from overlord.simulate.simulation import Summary

if TYPE_CHECKING:
    from pathlib import Path

    from overlord.cli.simulate_options import SimulateOptions
    from overlord.simulate.plan_time import PlanTime


def simulate(options: SimulateOptions, as_json: bool) -> int:
    if options.html is not None:
        check_page(options.html)
    with setting_of(options) as setting:
        summary = _simulated(setting, options.steps)
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
    found = _found(setting, options, summary, held)
    if options.html is not None:
        write_page(options.html, found, summary)
    if as_json:
        write_json(found)
    else:
        _print(found, options.html)
    return 0


def _simulated(setting: Setting, num_steps: int) -> Summary:
    progress = console(stderr=True)
    began = time.monotonic()
    steps = []
    for number, step in enumerate(setting.scenario.steps(setting.drawn, num_steps, time.perf_counter), 1):
        steps.append(step)
        took = f"{time.monotonic() - began:.1f} s"
        progress.print(f"step {number} of {num_steps}: {step.num_samples:,} samples, {step.ratio:.2f}x, {took} so far")
    return Summary(tuple(steps))


def _asked(setting: Setting, options: SimulateOptions) -> dict[str, Any]:
    """What was asked for, with what was left open filled in."""
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


def _found(setting: Setting, options: SimulateOptions, summary: Summary, held: Footprint) -> dict[str, Any]:
    return {
        "scenario": _asked(setting, options),
        "ratio": summary.ratio,
        "before": _side([step.before for step in summary.steps]),
        "after": _side([step.after for step in summary.steps]),
        "plan_s": {"mean": summary.mean(lambda step: step.plan_s), "max": max(step.plan_s for step in summary.steps)},
        "roles": [_role(role) for role in held.roles],
        "baseline": _role(held.baseline),
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


def _side(times: list[PlanTime]) -> dict[str, Any]:
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


def _role(role: Role) -> dict[str, Any]:
    return {
        "name": role.name,
        "count": role.count,
        "bytes_each": round(role.bytes_each),
        "bytes": round(role.total_bytes),
        "connections_each": round(role.connections_each),
        "connections": round(role.total_connections),
    }


def _print(found: dict[str, Any], html: Path | None) -> None:
    out = console()
    asked, before, after = found["scenario"], found["before"], found["after"]
    mesh = " ".join(f"{axis}={length}" for axis, length in asked["mesh"].items())
    tokens = f"{asked['batch_tokens']:,} tokens" if asked["batch_tokens"] else f"{asked['batch_samples']:,} samples"
    out.print(
        f"{asked['documents']}: {asked['ranks']:,} ranks ({mesh}), context {asked['context']:,}, {tokens} a step, "
        f"{asked['sources']:,} sources",
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
    out.print(table("", "static mesh, dealt blindly", asked["strategy"], rows=rows))
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
    plan_s = found["plan_s"]
    out.print(f"planning took {plan_s['mean'] * 1e3:.0f} ms a step, at most {plan_s['max'] * 1e3:.0f} ms")
    out.print(f"{found['memory_ratio']:.1f} times less memory than with every source open in every worker of every rank")
    out.print(f"predicted: {found['ratio']:.2f} times as fast as the static mesh dealt blindly")
    if html is not None:
        out.print(f"wrote {html}", markup=False)
