"""Ring attention on a GPU compared with the oracle in double precision: `python -m tests.trainer.gpu_rings`.

Ranks are threads that share the GPU. The passes are called as functions, because autograd runs all backward passes of a GPU
in one thread, where ranks would wait for each other forever.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from overlord.trainer.ring import Ring, ring_attention
from overlord.trainer.ring.attention import RingOptions, attend_around, differentiate_around
from overlord.trainer.ring.kernels import OutputGradient, choose_kernel
from overlord.trainer.ring.schedule import NO_WINDOW
from tests.trainer.reference_ring import reference_ring_attention
from tests.trainer.rings import ThreadMessages, masked_attention, micro_of, places_of

NAMES = ("out", "dq", "dk", "dv")
WAYS = {"ring": (2, 2), "ring, keys one turn ahead": (2, 1), "ring, kernels in order": (1, 2), "ring, all in order": (0, 1)}
"""The streams of kernels, and how many turns ahead keys are sent."""


def run_around(options: RingOptions, wholes: list[int], num_ranks: int, tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    """Output and gradients of all tokens, computed by a ring."""
    messages = ThreadMessages.between(num_ranks)

    def run(part: int) -> list[Tensor]:
        ring = Ring.of(micro_of(wholes, num_ranks, part)).with_messages(messages)
        q, k, v, grad = (each[places_of(wholes, num_ranks, part)] for each in (*tensors, dout))
        out, lse = attend_around(q, [k, v], ring, options)
        return [out, *differentiate_around(OutputGradient(q, grad, out, lse), [k, v], ring, options)]

    with ThreadPoolExecutor(num_ranks) as threads:
        found = list(threads.map(run, range(num_ranks)))
    whole = [torch.empty_like(each) for each in (dout, *tensors)]
    for part, parts in enumerate(found):
        for target, each in zip(whole, parts, strict=True):
            target[places_of(wholes, num_ranks, part)] = each.to(target.dtype)
    return whole


def oracle(wholes: list[int], tensors: list[Tensor], dout: Tensor, window: int) -> list[Tensor]:
    """The same in double precision, by one rank."""
    q, k, v = (tensor.double().requires_grad_() for tensor in tensors)
    if window == NO_WINDOW:
        out = reference_ring_attention(q, k, v, Ring.of(micro_of(wholes, 1, 0)))
    else:
        out = masked_attention(q, k, v, wholes, window)
    out.backward(dout.double())
    return [out.detach(), *(each.grad for each in (q, k, v) if each.grad is not None)]


def errors_on(device: str, cases: int, longest: int = 3000, seed: int = 0) -> dict[str, Any]:
    """The largest relative error of rings, and of a single rank, over random cases; and whether gradients repeat."""
    draw = random.Random(seed)
    worst = {name: dict.fromkeys(NAMES, 0.0) for name in (*WAYS, "one rank")}
    repeats = True
    for case in range(cases):
        num_ranks = draw.randint(2, 8)
        wholes = [draw.randint(num_ranks, longest) for _ in range(draw.choice((1, 1, 2, 3)))]
        heads, kv_heads, dim = draw.choice(((4, 4, 64), (8, 2, 128), (4, 1, 96), (2, 2, 256)))
        window = draw.choice((NO_WINDOW, NO_WINDOW, 100, 1500))
        dtype = draw.choice((torch.bfloat16, torch.float16))
        make = torch.Generator(device).manual_seed(1000 * seed + case)
        shapes = [(sum(wholes), h, dim) for h in (heads, kv_heads, kv_heads, heads)]
        *tensors, dout = (torch.randn(shape, generator=make, device=device, dtype=dtype) for shape in shapes)
        kernel = choose_kernel(torch.device(device), dtype, dim)
        exact = oracle(wholes, tensors, dout, window)
        for name, (streams, ahead) in {**WAYS, "one rank": (0, 1)}.items():
            options = RingOptions(kernel, dim**-0.5, window, False, streams, ahead)
            found = run_around(options, wholes, 1 if name == "one rank" else num_ranks, tensors, dout)
            for what, mine, theirs in zip(NAMES, found, exact, strict=True):
                error = float((mine.double() - theirs).norm() / theirs.norm())
                worst[name][what] = max(worst[name][what], error if error == error else float("inf"))
        if case < 3:
            # Sums are made in one order, whatever streams the kernels are on.
            ways = [RingOptions(kernel, dim**-0.5, window, True, streams, ahead) for streams, ahead in WAYS.values()]
            same = [run_around(options, wholes, num_ranks, tensors, dout) for options in (ways[0], *ways)]
            repeats = repeats and all(torch.equal(a, b) for other in same[1:] for a, b in zip(same[0], other, strict=True))
    return {"cases": cases, "relative_error": worst, "deterministic_repeats": repeats, "through_autograd": _autograd(device)}


def _autograd(device: str) -> float:
    """The error of `ring_attention` itself, for whole documents."""
    wholes, dtype = [700, 40, 1300], torch.bfloat16
    make = torch.Generator(device).manual_seed(7)
    shapes = [(sum(wholes), h, 128) for h in (8, 2, 2, 8)]
    *tensors, dout = (torch.randn(shape, generator=make, device=device, dtype=dtype) for shape in shapes)
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
    out = ring_attention(q, k, v, Ring.of(micro_of(wholes, 1, 0)))
    out.backward(dout)
    found = [out.detach(), *(each.grad for each in (q, k, v) if each.grad is not None)]
    exact = oracle(wholes, tensors, dout, NO_WINDOW)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(errors_on("cuda" if torch.cuda.is_available() else "cpu", 24), indent=1) + "\n")
