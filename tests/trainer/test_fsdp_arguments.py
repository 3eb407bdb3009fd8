"""FSDP2 that casts the arguments of a module gives it the ring and the layer runner of the caller, not copies of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import rms_norm

from overlord.trainer import OffloadedLayers, Ring, ring_attention
from tests.trainer.ranks import join_world, run_ranks
from tests.trainer.rings import micro_of

WIDTH, TOKENS, LAYERS = 16, 40, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[Ring] = []

    def forward(self, x: Tensor, ring: Ring) -> Tensor:
        self.seen.append(ring)
        q, k, v = self.qkv(rms_norm(x, (WIDTH,))).view(len(x), 3, 2, 8).unbind(1)
        return x + self.out(ring_attention(q, k, v, ring).reshape(x.shape))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def rings(self) -> list[Ring]:
        """What the layers got."""
        return [ring for layer in self.layers if isinstance(layer, Layer) for ring in layer.seen]

    def forward(self, x: Tensor, layers: OffloadedLayers, ring: Ring) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layers.run(index, layer, x, ring)
        return x


def _gradients(ratio: float, found: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    for module in (*model.layers, model):
        sharded = fully_shard(module, mp_policy=policy)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    ring, layers = Ring.of(micro_of([TOKENS], 1, 0)), OffloadedLayers(ratio, LAYERS, least_bytes=0)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x, layers, ring).float().square().sum().backward()
    found["same ring"] = all(seen is ring for seen in model.rings())
    found["calls"] = len(ring.cache)
    found["moved"], found["seen"] = layers.moved_bytes, layers.seen_bytes
    return [each.grad.full_tensor() for each in model.parameters() if isinstance(each.grad, DTensor)]


def _one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    join_world(rank, 1, folder)
    found: dict[str, Any] = {}
    stayed = _gradients(0.0, {})
    moved = _gradients(1.0, found)
    found["same gradients"] = len(stayed) == 4 * LAYERS and all(map(torch.equal, stayed, moved))
    torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def test_a_sharded_model_that_casts_its_arguments_offloads_and_keeps_one_ring(tmp_path):
    run_ranks(_one_rank, 1, tmp_path)
    found = torch.load(tmp_path / "found.pt")
    assert found["same ring"]
    assert found["calls"] == 1, "the calls of a ring should be made once for all layers"
    assert found["same gradients"]
    assert found["moved"] == found["seen"]
    # Of each layer: its input, the same normed, queries, keys, values and what attention returned; small ones beside them.
    activations, weights = TOKENS * WIDTH * 2 * 6, 4 * WIDTH * WIDTH * 2
    assert activations <= found["seen"] / (LAYERS - 2) < activations + weights / 2
