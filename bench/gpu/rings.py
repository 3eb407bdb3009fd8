"""Ring attention, offloading and 2M tokens on one GPU, one virtual rank at a time.

    python -m bench.gpu.rings [--parts speed,turns,offload,long,ablation] [--rings 8] [--device cpu] [--out FILE]

- turns: the kernels of a ring's backward pass alone, turn by turn, and those of several turns in one call.
- speed: one rank of a ring over a document of 128k tokens, against an N-th of flash attention over the whole document.
- offload: time and peak memory of a stack of blocks at several offload ratios, beside what the plan's model says.
- long: ranks of a ring of 32 over 2M tokens, a few blocks forward and backward with offloading, beside the plan's time.
- ablation: the same documents with static rings, then dynamic ones, offloading and balance; the network is modelled.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.gpu.ablation import HEAD_BYTES, NETWORK, SETTING, step_ms, ways
from bench.gpu.blocks import LLAMA_8B, TINY, Shape
from bench.gpu.settings import Setting
from bench.gpu.virtual_rings import CopyMessages, RingBlock, clocked, positions_of, ring_of
from bench.gpu.work import Fit, of_plan
from bench.length_tables import BYTED
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.plan import Plan
from overlord.trainer import OffloadedLayers, RecomputedLayers, Ring
from overlord.trainer.offload import LayerRunner
from overlord.trainer.ring.attention import RingOptions, attend_around, differentiate_around
from overlord.trainer.ring.kernels import Bounds, OutputGradient, choose_kernel
from overlord.trainer.ring.schedule import NO_WINDOW, KernelCall, TokenSpan

K = 1024


@dataclass(frozen=True)
class Sizes:
    shape: Shape
    dtype: torch.dtype
    speed_tokens: int
    rings: tuple[int, ...]
    offload_tokens: int
    offload_layers: int
    long_tokens: int
    long_ranks: int
    long_layers: int
    lengths: tuple[int, ...]


GPU = Sizes(
    LLAMA_8B,
    torch.bfloat16,
    128 * K,
    (2, 4, 8, 16, 32),
    64 * K,
    8,
    2048 * K,
    32,
    3,
    (512, 2048, 8192, 32768, 131072),
)
WAYS = ((2, 2), (2, 1), (1, 2), (0, 1))
"""Streams of kernels and how many turns ahead keys are sent. The first is the default, the third has `overlap_turns=False`,
the last has everything on one stream."""
SMALL = Sizes(TINY, torch.float32, 256, (2, 4), 64, 4, 512, 8, 3, (64, 128, 256))


def speed(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Milliseconds of attention alone: flash attention over a whole document, and one rank of a ring times the ranks."""
    shape = sizes.shape
    kernel = choose_kernel(device, sizes.dtype, shape.head_dim)

    def passes(num_ranks: int, part: int, messages: CopyMessages, way: tuple[int, int] = (2, 2)) -> tuple[float, float]:
        options = RingOptions(kernel, shape.head_dim**-0.5, NO_WINDOW, False, *way)
        ring = ring_of([sizes.speed_tokens], num_ranks, part, messages)
        tokens = ring.num_tokens(part)
        shapes = [(tokens, heads, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)]
        q, k, v, dout = (torch.randn(each, device=device, dtype=sizes.dtype) for each in shapes)
        out, lse = attend_around(q, [k, v], ring, options)
        grad = OutputGradient(q, dout, out, lse)
        differentiate_around(grad, [k, v], ring, options)
        repeats = 3 if num_ranks < 8 else 5
        forward = clocked(lambda: attend_around(q, [k, v], ring, options), device, repeats)
        return forward, clocked(lambda: differentiate_around(grad, [k, v], ring, options), device, repeats)

    whole = passes(1, 0, CopyMessages(device))
    rows = []
    networks = (("copies", None), ("copies and a network of 50 GB/s, modelled", NETWORK))
    for num_ranks in sizes.rings:
        parts = {0, num_ranks // 2, num_ranks - 1}
        for (name, bandwidth), way in product(networks, WAYS):
            found = [passes(num_ranks, part, CopyMessages(device, bandwidth), way) for part in parts]
            forward, backward = (max(each[i] for each in found) for i in (0, 1))
            rows.append(
                {
                    "ranks": num_ranks,
                    "messages": name,
                    "kernel_streams": way[0],
                    "keys_ahead": way[1],
                    "forward_ms": forward,
                    "backward_ms": backward,
                    "forward_over_share": forward * num_ranks / whole[0],
                    "backward_over_share": backward * num_ranks / whole[1],
                    "both_over_share": (forward + backward) * num_ranks / sum(whole),
                }
            )
            say(rows[-1])
    return {"whole_forward_ms": whole[0], "whole_backward_ms": whole[1], "rows": rows}


def turns(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Where the time of a ring's backward pass goes: the kernels of each turn alone, the sums, and keys of several turns in
    one call."""
    shape, num_ranks = sizes.shape, 8
    kernel = choose_kernel(device, sizes.dtype, shape.head_dim)
    options = RingOptions(kernel, shape.head_dim**-0.5, NO_WINDOW, False)
    tokens = sizes.speed_tokens // num_ranks

    def numbers(num: int, heads: int) -> Tensor:
        return torch.randn((num, heads, shape.head_dim), device=device, dtype=sizes.dtype)

    def backward_ms(num_queries: int, num_keys: int, causal: bool) -> float:
        call = KernelCall((TokenSpan(0, num_queries),), (TokenSpan(0, num_keys),), causal)
        bounds = Bounds.of(call, device)
        q, k, v = numbers(num_queries, shape.heads), numbers(num_keys, shape.kv_heads), numbers(num_keys, shape.kv_heads)
        out, lse = kernel.forward(q, k, v, bounds, options.mask(call))
        grad = OutputGradient(q, numbers(num_queries, shape.heads), out, lse)
        run = lambda: kernel.backward(grad, k, v, bounds, options.mask(call))  # noqa: E731
        run()
        return clocked(run, device, 5)

    whole = backward_ms(sizes.speed_tokens, sizes.speed_tokens, True)
    sums, part = numbers(tokens, shape.heads).float(), numbers(tokens, shape.heads)
    sums.add_(part)
    found = {
        "whole_ms": whole,
        "share_ms": whole / num_ranks,
        "own_turn_ms": backward_ms(tokens, tokens, True),
        "all_queries_half_keys_ms": backward_ms(tokens, tokens // 2, False),
        "half_queries_all_keys_ms": backward_ms(tokens // 2, tokens, False),
        "two_turns_in_one_ms": backward_ms(tokens, tokens, False),
        "three_turns_in_one_ms": backward_ms(tokens, tokens // 2 * 3, False),
        "sum_of_query_gradients_ms": clocked(lambda: sums.add_(part), device, 9),
    }
    say(found)
    return {"rows": [found]}


def stack(sizes: Sizes, layers: int, device: torch.device, kv_heads: int | None = None) -> nn.ModuleList:
    shape = sizes.shape if kv_heads is None else replace(sizes.shape, kv_heads=kv_heads)
    torch.manual_seed(0)
    with torch.device(device):
        blocks = nn.ModuleList(RingBlock(shape) for _ in range(layers)).to(sizes.dtype)
    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)  # part of what is there before a step
    return blocks


def step(blocks: nn.ModuleList, ring: Ring, layers: Callable[[tuple[Tensor, Tensor]], LayerRunner]) -> None:
    """Forward and backward of one microbatch."""
    first: Any = blocks[0]
    device, dtype = first.out.weight.device, first.out.weight.dtype
    x = torch.randn(ring.num_tokens(ring.index), first.shape.hidden, device=device, dtype=dtype, requires_grad=True)
    angles = first.rotary.angles(positions_of(ring, device), dtype)
    runner = layers(angles)
    out = x
    for index, block in enumerate(blocks):
        out = runner.run(index, block, out, angles, ring)
    out.backward(torch.full_like(out, 1e-3))


def offload(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    num, tokens = sizes.offload_layers, sizes.offload_tokens
    blocks = stack(sizes, num, device)
    ring = ring_of([tokens], 1, 0, CopyMessages(device))
    least = 1 << 20 if device.type == "cuda" else 0
    seen: list[OffloadedLayers] = []

    def offloaded(ratio: float) -> Callable[[tuple[Tensor, Tensor]], LayerRunner]:
        def make(angles: tuple[Tensor, Tensor]) -> LayerRunner:
            seen[:] = [OffloadedLayers(ratio, num, angles, least)]
            return seen[0]

        return make

    ways: list[tuple[str, float, Callable[[tuple[Tensor, Tensor]], LayerRunner]]] = [
        ("offload", ratio, offloaded(ratio)) for ratio in (1e-9, 0.5, 0.75)
    ]
    ways += [("recompute", ratio, lambda _, ratio=ratio: RecomputedLayers(ratio)) for ratio in (0.5, 1.0)]
    rows: list[dict[str, Any]] = []
    activations = 0.0
    for name, ratio, make in ways:
        step(blocks, ring, make)  # pinned memory is taken the first time
        reset_memory(device)
        ms = clocked(lambda make=make: step(blocks, ring, make), device, 2)
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
        row = {"way": name, "ratio": round(ratio, 3), "ms": ms, "peak_gb": peak}
        if name == "offload":
            if not rows:
                activations = seen[0].seen_bytes / (num - 2) / 1e9
            row["moved_share"] = seen[0].moved_bytes / seen[0].seen_bytes
            row["peak_gb_by_model"] = (rows[0] if rows else row)["peak_gb"] - ratio * (num - 2) * activations
        base = rows[0] if rows else row
        row |= {"time_over_none": ms / base["ms"], "memory_over_none": peak / base["peak_gb"] if peak else 1.0}
        rows.append(row)
        say(row)
    weights = sum(p.nbytes * 2 for p in blocks.parameters()) / 1e9
    return {
        "tokens": tokens,
        "layers": num,
        "activation_gb_per_layer": activations,
        "bytes_per_token_and_layer": activations * 1e9 / tokens,
        "weights_and_gradients_gb": weights,
        "rows": rows,
    }


def fit_of(sizes: Sizes, device: torch.device, kv_heads: int | None = None) -> Fit:
    """Times of one block by document length, as `bench.gpu` calibrates."""
    blocks = stack(sizes, 1, device, kv_heads)
    times = []
    for length in sizes.lengths:
        count = max(1, sizes.lengths[-1] // 2 // length)
        ring = ring_of([length] * count, 1, 0, CopyMessages(device))
        run = lambda ring=ring: step(blocks, ring, lambda _: RecomputedLayers(0.0))  # noqa: E731
        run()
        times.append(clocked(run, device, 3) / count)
    return Fit.of(sizes.lengths, times)


def long(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Some ranks of a ring over one document; all ranks have the same work."""
    fit = fit_of(sizes, device)
    num, ranks, tokens = sizes.long_layers, sizes.long_ranks, sizes.long_tokens
    blocks = stack(sizes, num, device)
    predicted = num * (fit.per_token * tokens / ranks + fit.per_area * tokens / ranks * tokens)
    least = 1 << 20 if device.type == "cuda" else 0
    rows = []
    for part, ratio in ((0, 0.0), (ranks * 2 // 3, 1.0)):
        ring = ring_of([tokens], ranks, part, CopyMessages(device))
        reset_memory(device)
        ms = clocked(
            lambda ring=ring, ratio=ratio: step(blocks, ring, lambda angles: OffloadedLayers(ratio, num, angles, least)),
            device,
            1,
        )
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
        rows.append({"rank": part, "ratio": ratio, "ms": ms, "predicted_ms": predicted, "peak_gb": peak})
        say(rows[-1])
    return {"tokens": tokens, "ranks": ranks, "layers": num, "fit_per_token": fit.per_token, "rows": rows}


Micros = list[list[tuple[list[int], int, int]]]
"""For each rank its microbatches: the whole documents, the ranks of the ring, and the index among them."""


def static_rings(plan: Plan, cp: int) -> Micros:
    """Every document over the cp ranks of its group; the first rank of each group."""
    return [[(work.keys[work.queries > 0].tolist(), cp, 0) for work in works] for works in of_plan(plan, 1)]


def dynamic_rings(plan: Plan) -> Micros:
    rings = plan.part(Rings)
    assert rings is not None
    found: Micros = []
    micro = 0
    for count in plan.counts.tolist():
        found.append([])
        for number in range(micro, micro + count):
            at = plan.order[plan.offsets[number] : plan.offsets[number + 1]]
            _, part = rings.microbatch(plan, len(found) - 1, number, at, plan.samples)
            wholes = part.whole[:1].tolist() if len(part.places) > 1 else part.whole.tolist()
            found[-1].append((wholes, len(part.places), part.index))
        micro += count
    return found


def ablation(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """The slowest rank of each arrangement by prediction, with messages at the modelled speed of a network."""
    setting = SETTING if device.type == "cuda" else Setting(BYTED, 4 * K, dp=2, cp=4, rows=2)
    graph: DGraph = setting.graph(seed=0)
    rows: list[dict[str, Any]] = []
    for kv_heads in (sizes.shape.heads, sizes.shape.kv_heads):
        blocks = stack(sizes, 1, device, kv_heads)
        fit = fit_of(sizes, device, kv_heads)
        static_ms = 0.0
        for name, plan in ways(graph, fit, kv_heads).items():
            ranks = static_rings(plan, setting.cp) if plan.part(Rings) is None else dynamic_rings(plan)
            slowest = max(ranks, key=lambda micros: _predicted_ms(micros, fit, kv_heads))
            ms = sum(_timed(blocks, micro, device) for micro in slowest)
            static_ms = static_ms or ms
            predicted = step_ms(plan, setting.cp, fit, kv_heads)
            row = {"kv_heads": kv_heads, "arrangement": name, "slowest_ms": ms, "predicted_ms": predicted}
            rows.append(row | {"over_static": static_ms / ms})
            say(rows[-1])
    return {"setting": str(setting), "network_bytes_per_s": NETWORK, "rows": rows}


def _predicted_ms(micros: list[tuple[list[int], int, int]], fit: Fit, kv_heads: int) -> float:
    """What a rank is predicted to take: compute, or messages where they take longer."""
    total = 0.0
    for wholes, ranks, _ in micros:
        lengths = np.array(wholes, np.float64)
        compute = float((fit.per_token * lengths + fit.per_area * lengths**2).sum()) / ranks
        sent = 4 * HEAD_BYTES * kv_heads / NETWORK * 1e3 * float(lengths.sum()) * (ranks - 1) / ranks
        total += max(compute, sent)
    return total


def _timed(blocks: nn.ModuleList, micro: tuple[list[int], int, int], device: torch.device) -> float:
    wholes, ranks, part = micro
    ring = ring_of(wholes, ranks, part, CopyMessages(device, NETWORK if ranks > 1 else None))
    run = lambda: step(blocks, ring, lambda _: RecomputedLayers(0.0))  # noqa: E731
    return clocked(run, device, 1)


def reset_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def say(row: dict[str, Any]) -> None:
    print(
        json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}), flush=True
    )


PARTS: dict[str, Callable[[Sizes, torch.device], dict[str, Any]]] = {
    "speed": speed,
    "turns": turns,
    "offload": offload,
    "long": long,
    "ablation": ablation,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rings", help="the sizes of the rings of speed, such as 8,16")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu"}
    sizes = GPU if given.device == "cuda" else SMALL
    if given.rings:
        sizes = replace(sizes, rings=tuple(int(each) for each in given.rings.split(",")))
    for name in given.parts.split(","):
        begun = time.monotonic()
        report[name] = PARTS[name](sizes, device)
        report[name]["took_s"] = time.monotonic() - begun
        say({"part": name, "took_s": report[name]["took_s"]})
        reset_memory(device)
        if given.out:
            given.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
