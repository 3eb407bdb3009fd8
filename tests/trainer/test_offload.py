"""Activations that are moved away and back give the gradients of those that stayed, in the planned amount."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from overlord.errors import SpecError
from overlord.trainer import OffloadedLayers, RecomputedLayers, Ring, planned_ratio, ring_attention
from overlord.trainer.offload import LayerRunner
from tests.trainer.rings import micro_of

TOKENS, WIDTH = 48, 16


class Block(nn.Module):
    """Linear layers, views of one storage, tensors that are saved twice, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, ring: Ring, shared: Tensor) -> Tensor:
        q, k, v = self.qkv(rms_norm(x, (WIDTH,)) * shared).view(len(x), 3, 4, 4).unbind(1)
        x = x + ring_attention(q, k, v, ring).reshape(x.shape)
        gate, up = self.gate_up(rms_norm(x, (WIDTH,))).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up).tanh()


def _gradients(blocks: nn.ModuleList, shared: Tensor, layers: LayerRunner) -> list[Tensor]:
    ring = Ring.of(micro_of([30, 18], 1, 0))
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    out = x
    for index, block in enumerate(blocks):
        out = layers.run(index, block, out, ring, shared)
    out.square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in blocks.parameters())]
    blocks.zero_grad()
    return [gradient.clone() for gradient in found if gradient is not None]


def _blocks(num: int) -> tuple[nn.ModuleList, Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(num)).double(), torch.rand(WIDTH, dtype=torch.float64)


@settings(max_examples=25)
@given(num=st.integers(1, 7), ratio=st.floats(0, 1))
def test_gradients_are_the_same_and_the_planned_share_is_moved(num, ratio):
    blocks, shared = _blocks(num)
    expected = _gradients(blocks, shared, OffloadedLayers(0.0, num))
    for layers in (OffloadedLayers(ratio, num, [shared], least_bytes=0), RecomputedLayers(ratio)):
        for mine, theirs in zip(_gradients(blocks, shared, layers), expected, strict=True):
            assert torch.equal(mine, theirs)
        if isinstance(layers, OffloadedLayers) and ratio > 0:
            assert (layers.seen_bytes > 0) == (num > 2), "the last two layers stay"
            largest = TOKENS * 4 * WIDTH * 8
            assert abs(layers.moved_bytes - ratio * layers.seen_bytes) <= largest


def test_what_is_moved_is_counted_once_and_has_no_weights():
    blocks, shared = _blocks(3)
    layers = OffloadedLayers(1.0, 3, [shared], least_bytes=0)
    _gradients(blocks, shared, layers)
    # A storage that is saved by two operations, or of which two views are saved, is one; weights and `shared` stay.
    floats = TOKENS * WIDTH * (1 + 1 + 3 + 1 + 1 + 1 + 1 + 4 + 2 + 2 + 1) + TOKENS * (4 + 2)
    assert layers.moved_bytes == layers.seen_bytes
    assert layers.moved_bytes <= floats * 8 * 1.3
    assert layers.moved_bytes >= TOKENS * WIDTH * 8 * 10


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter; the first one of a model gets inputs without gradients."""

    scale: Tensor

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)
        self.register_buffer("scale", torch.rand(TOKENS, WIDTH))  # as large as an activation

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x))) * self.scale


def _adapted(layers: OffloadedLayers, autocast: bool, frozen: bool) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Adapted() for _ in range(layers.num_layers))
    if not frozen:
        blocks.requires_grad_()
    x = torch.randn(TOKENS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for index, block in enumerate(blocks):
            x = layers.run(index, block.forward if index % 2 else block, x)
    x.square().sum().backward()
    return [each.grad for each in blocks.parameters() if each.grad is not None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_stay_also_if_they_are_frozen_or_copied_by_autocast(autocast, frozen):
    num = 6
    layers = OffloadedLayers(1.0, num, least_bytes=0)
    found = _adapted(layers, autocast, frozen)
    assert len(found) == num * (2 if frozen else 4)
    for mine, theirs in zip(found, _adapted(OffloadedLayers(0.0, num), autocast, frozen), strict=True):
        assert torch.equal(mine, theirs)
    # Activations of a layer: its input, the small one between the adapter's weights, what tanh returned.
    size = 2 if autocast else 4
    copies = 2 if autocast and not frozen else 1  # autocast makes one for each of the two products
    inputs, small, outputs = copies * TOKENS * WIDTH * size, TOKENS * 2 * size, TOKENS * WIDTH * size
    assert layers.moved_bytes == layers.seen_bytes
    assert layers.seen_bytes == (num - 2) * (inputs + small + outputs)


@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_wherever_it_lies(ratio):
    def layer(x: Tensor) -> Tensor:
        out = x.exp()  # it saves what it returns
        changed.append(out)
        return out * 2

    changed: list[Tensor] = []
    layers = OffloadedLayers(ratio, 3, least_bytes=0)
    out = torch.ones(TOKENS, WIDTH, requires_grad=True)
    for index in range(3):
        out = layers.run(index, layer, out)
    with torch.no_grad():
        changed[-1].add_(1)  # of a layer that stays
    with pytest.raises(SpecError, match=r"layer 2 saved a tensor \[48, 16\] of torch\.float32 .* in place has changed it"):
        out.sum().backward()
    layers = OffloadedLayers(ratio, 3, least_bytes=0)
    out = layers.run(0, layer, torch.ones(TOKENS, WIDTH, requires_grad=True))
    with torch.no_grad():
        changed[-1].add_(1)
    with pytest.raises(SpecError, match="layer 0 saved a tensor"):  # noqa: PT012 - moved: before it is freed; else in backward
        for index in (1, 2):
            out = layers.run(index, layer, out)
        out.sum().backward()


def test_small_storages_stay_and_nothing_is_moved_without_gradients():
    blocks, shared = _blocks(4)
    layers = OffloadedLayers(1.0, 4)
    _gradients(blocks, shared, layers)
    assert layers.moved_bytes == 0
    assert layers.seen_bytes > 0
    layers = OffloadedLayers(1.0, 4, least_bytes=0)
    ring = Ring.of(micro_of([TOKENS], 1, 0))
    with torch.no_grad():
        layers.run(0, blocks[0], torch.ones(TOKENS, WIDTH, dtype=torch.float64), ring, shared)
    assert layers.seen_bytes == 0


def test_the_ratio_is_that_of_the_plan_and_a_microbatch_that_cannot_fit_is_refused():
    micro = {"document_lengths": np.array([300, 100]), "offload_ratios": np.array([0.8, 0.0], np.float32)}
    assert planned_ratio(micro, 10) == pytest.approx(0.6)
    assert planned_ratio(micro, 10, capacity=220) == pytest.approx(0.6)  # 1 - (2200 / 400 - 2) / 8 = 0.5625
    with pytest.raises(SpecError, match=r"holds 100 tokens; a microbatch of 400 fits on 10 layers if 94% .* moves 60%"):
        planned_ratio(micro, 10, capacity=100)
    with pytest.raises(SpecError, match=r"strategies\.hdp"):
        planned_ratio({}, 4)
    with pytest.raises(SpecError, match=r"between 0 and 1, got 1\.5"):
        OffloadedLayers(1.5, 4)


@settings(max_examples=20)
@given(wholes=st.lists(st.integers(6, 60), min_size=1, max_size=4), num_ranks=st.integers(1, 3), part=st.integers(0, 2))
def test_rings_and_ratios_read_nothing_from_a_device(wholes, num_ranks, part):
    micro = micro_of(wholes, num_ranks, part % num_ranks)
    ratios = torch.linspace(0, 1, len(micro["whole_lengths"]))
    here = {name: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for name, value in micro.items()}
    here["offload_ratios"] = ratios
    # To read a tensor on this device is an error, as on a GPU it would be a wait.
    there = here | {"document_lengths": here["document_lengths"].to("meta"), "tokens": torch.empty(9, device="meta")}
    assert Ring.of(there).pieces == Ring.of(here).pieces
    assert planned_ratio(there, 4) == pytest.approx(planned_ratio(here, 4))
    with pytest.raises(SpecError, match="do not change its fields"):
        Ring.of(there | {"piece_offsets": here["piece_offsets"] + 1})
