"""What becomes a layer, what is left at the base rate and why, and how weights are read as matrices."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn, optim

import overlord as ol
from overlord.trainer import FixedAspectRatio, PerBlock, PerLayer, TempBalance, usual_interval
from overlord.trainer.tempbalance.groups import Layers, find_layers
from overlord.trainer.tempbalance.spectra import WholeMatrix
from overlord.trainer.tempbalance.weights import matrices_of
from tests.trainer.models import Tiny, tiny


def split(model: nn.Module, unit=None, *, exclude=(), min_eigenvalues=8, lora_alone=False, spectrum=None) -> Layers:
    matrices = matrices_of(model, lora_alone)
    return find_layers(
        model, matrices, unit or PerBlock(), spectrum or WholeMatrix(), exclude=exclude, min_eigenvalues=min_eigenvalues
    )


def names_in(layers: Layers, model: nn.Module) -> dict[str, set[str]]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {layer.name: {by_id[id(p)] for p in layer.parameters} for layer in layers.balanced}


def stacks(model: nn.Module, lora_alone: bool = False) -> dict[str, torch.Tensor]:
    return {m.name: m.stack(lambda parameter: parameter) for m in matrices_of(model, lora_alone)}


def test_a_block_takes_its_norms_and_biases_and_the_rest_stays_at_the_base_rate():
    model = tiny()
    layers = split(model)
    expected = {f"layers.{i}": {f"layers.{i}.{n}" for n, _ in model.layers[i].named_parameters()} for i in range(3)}
    assert names_in(layers, model) == expected
    assert {left.name: left.reason for left in layers.left} == {
        "embedding": "embedding",
        "head": "outside the numbered blocks",
    }


def test_every_parameter_is_in_one_layer_or_left_once():
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    for unit in (PerBlock(), PerLayer()):
        layers = split(model, unit)
        inside = [id(p) for layer in layers.balanced for p in layer.parameters]
        assert len(inside) == len(set(inside))
        left = sum(each.num_parameters for each in layers.left)
        in_layers = sum(p.numel() for layer in layers.balanced for p in layer.parameters)
        assert left + in_layers == sum(p.numel() for p in model.parameters())


def test_a_tied_head_stays_at_the_base_rate_with_its_embedding():
    layers = split(tiny(tied=True), PerLayer(skip_first=False, skip_last=False))
    assert "head" not in {layer.name for layer in layers.balanced}
    assert {left.name: left.reason for left in layers.left}["embedding"] == "embedding"


def test_a_weight_shared_by_two_blocks_belongs_to_the_first_and_is_measured_once():
    model = tiny()
    model.layers[2].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    layers = split(model)
    assert [len(layer.matrices) for layer in layers.balanced] == [3, 3, 2]


def test_a_numbered_head_is_no_block():
    model = nn.ModuleDict({"layers": tiny().layers, "head": nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))})
    assert [layer.name for layer in split(model).balanced] == ["layers.0", "layers.1", "layers.2"]


def test_names_of_wrappers_are_left_out():
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": tiny()})})
    assert [layer.name for layer in split(model).balanced] == ["layers.0", "layers.1", "layers.2"]


def test_per_layer_leaves_the_first_and_the_last_and_norms_follow_the_layer_before_them():
    model = nn.Sequential()
    for name, width in (("conv1", 8), ("conv2", 16), ("conv3", 16)):
        model.add_module(name, nn.Conv2d(8 if name != "conv3" else 16, width, 3))
        model.add_module(f"bn_{name}", nn.BatchNorm2d(width))
    model.add_module("fc", nn.Linear(16, 10))
    layers = split(model, PerLayer())
    assert names_in(layers, model) == {
        "conv2": {"conv2.weight", "conv2.bias", "bn_conv2.weight", "bn_conv2.bias"},
        "conv3": {"conv3.weight", "conv3.bias", "bn_conv3.weight", "bn_conv3.bias"},
    }
    alone = split(model, PerLayer(skip_first=False, skip_last=False, norms_follow=False))
    assert [len(layer.parameters) for layer in alone.balanced] == [2, 2, 2, 2]


def test_patterns_exclude_modules_and_parameters():
    layers = split(tiny(), exclude=["layers.1", "*.norm.weight"])
    assert [layer.name for layer in layers.balanced] == ["layers.0", "layers.2"]
    assert [len(layer.parameters) for layer in layers.balanced] == [7, 7]
    assert {left.reason for left in layers.left if left.name.startswith("layers")} == {"excluded"}


def test_matrices_with_few_eigenvalues_do_not_count():
    layers = split(tiny(), min_eigenvalues=13)
    assert layers.balanced == ()
    assert "no matrix of layers.0 has 13 eigenvalues" in {left.reason for left in layers.left}
    assert len(split(tiny(), min_eigenvalues=24, spectrum=FixedAspectRatio()).balanced) == 3


def test_too_few_layers_are_refused_with_the_reasons():
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    with pytest.raises(ol.errors.SpecError, match=r"at least 2 layers, and PerBlock\(\) finds 0.*use unit=PerLayer\(\)"):
        TempBalance(optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ol.errors.SpecError, match=r"layers.0.up: no matrix of layers.0 has 50 eigenvalues"):
        TempBalance(optim.SGD(tiny().parameters(), lr=0.1), tiny())


def test_an_optimizer_of_other_parameters_is_refused():
    with pytest.raises(ol.errors.SpecError, match="trains no parameter of the model's layers"):
        TempBalance(optim.SGD(tiny().parameters(), lr=0.1), tiny(), min_eigenvalues=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": 0}, "at least 1, got 0"),
        ({"tail": 0.0}, "above 0 and at most 1, got 0.0"),
        ({"min_eigenvalues": 1}, "at least 2, got 1"),
        pytest.param({"exclude": "*.norm"}, r"write exclude=\('\*\.norm',\)", marks=pytest.mark.strangers),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    model = tiny()
    with pytest.raises(ol.errors.SpecError, match=message):
        TempBalance(optim.SGD(model.parameters(), lr=0.1), model, **{"min_eigenvalues": 8, **settings})


def test_a_convolution_is_a_stack_over_kernel_positions():
    conv = nn.Conv2d(6, 10, (3, 2))
    (stack,) = stacks(nn.ModuleDict({"conv": conv})).values()
    assert stack.shape == (6, 10, 6)
    assert torch.equal(stack[3], conv.weight[:, :, 1, 1])
    (square,) = stacks(nn.ModuleDict({"conv": nn.Conv1d(4, 4, 4)})).values()
    assert square.shape == (4, 4, 4)


def test_a_one_dimensional_convolution_is_read_the_same_way_whatever_its_sizes():
    conv = nn.Conv1d(4, 4, 4)
    (stack,) = stacks(nn.ModuleDict({"conv": conv})).values()
    assert torch.equal(stack[2], conv.weight[:, :, 2])


def test_packed_attention_is_a_stack_of_query_key_and_value():
    attention = nn.MultiheadAttention(8, 2)
    found = stacks(nn.ModuleDict({"attention": attention}))
    assert torch.equal(found["attention.in_proj_weight"][1], attention.in_proj_weight[8:16])
    assert found["attention.out_proj.weight"].shape == (1, 8, 8)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 16))


def test_experts_are_a_stack_and_bare_parameters_of_containers_are_no_matrices():
    model = tiny()
    model.layers[0].experts = Experts()
    model.positions = nn.Parameter(torch.randn(30, 30))
    found = stacks(model)
    assert found["layers.0.experts.up"].shape == (4, 8, 16)
    assert "positions" not in found


class BareLora(nn.Linear):
    """loralib's form: A and B are parameters of the layer."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(torch.randn(outputs, rank))
        self.scaling = 0.5


class NamedLora(nn.Module):
    """PEFT's form: A and B are layers by adapter name beside the base layer."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})
        self.scaling = {"default": 2.0}


def test_a_lora_layer_is_measured_as_it_computes_or_by_its_adapter_alone():
    torch.manual_seed(0)
    bare, named = BareLora(12, 10, 3), NamedLora(12, 10, 3)
    model = nn.ModuleDict({"bare": bare, "named": named})
    update = 2.0 * named.lora_B["default"].weight @ named.lora_A["default"].weight  # type: ignore[operator]
    assert list(stacks(model)) == ["bare.weight+lora", "named.weight+lora"]
    assert torch.allclose(stacks(model)["named.weight+lora"][0].float(), named.base_layer.weight + update, atol=1e-6)
    assert torch.allclose(stacks(model, lora_alone=True)["named.lora"][0].float(), update, atol=1e-6)
    merged = bare.weight + 0.5 * bare.lora_B @ bare.lora_A
    assert torch.allclose(stacks(model)["bare.weight+lora"][0].float(), merged, atol=1e-6)
    assert [m.num_eigenvalues for m in matrices_of(model, True)] == [3, 3]
    assert [m.num_eigenvalues for m in matrices_of(model, False)] == [10, 10]


@pytest.mark.parametrize("form", [BareLora, NamedLora])
@pytest.mark.parametrize("alone", [False, True])
def test_only_adapters_of_a_lora_model_are_trained_and_they_get_the_factor_of_their_block(form, alone):
    model = tiny()
    for layer in model.layers:
        layer.up = form(12, 24, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optim.SGD(adapters, lr=0.1)
    balance = TempBalance(optimizer, model, min_eigenvalues=4, lora_alone=alone, interval=1000)
    for parameter in adapters:
        parameter.grad = torch.ones_like(parameter)
    before = [p.detach().clone() for p in adapters]
    optimizer.step()
    moved = [(old - new).mean().item() for old, new in zip(before, adapters, strict=True)]
    factors = [balance.factors[f"layers.{i}"] for i in range(3) for _ in range(2)]
    assert len(set(factors)) == 3
    assert moved == pytest.approx([0.1 * factor for factor in factors], rel=1e-3)


def test_the_alpha_of_a_block_is_the_mean_over_its_matrices():
    model = tiny()
    balance = TempBalance(optim.SGD(model.parameters(), lr=0.1), model, min_eigenvalues=8)
    balance.update()
    state = balance.state_dict()["alphas"]
    own = [state[f"layers.1.{name}.weight"] for name in ("attention", "up", "down")]
    assert balance.alphas["layers.1"] == pytest.approx(np.mean(own))


def test_explain_lists_layers_and_what_was_left_with_the_reason():
    model = tiny(num_blocks=2)
    balance = TempBalance(optim.SGD(model.parameters(), lr=0.1), model, min_eigenvalues=8)
    assert all(row.split()[3:5] == ["-", "1.000"] for row in balance.explain().splitlines()[1:])
    balance.update()
    rows = [line.split() for line in balance.explain().splitlines()]
    assert rows[0] == ["layer", "matrices", "parameters", "alpha", "factor", "note"]
    assert [row[:3] for row in rows[1:3]] == [["layers.0", "3", "792"], ["layers.1", "3", "792"]]
    assert [row[4] for row in rows[1:3]] == ["0.500", "1.500"]
    assert rows[3] == ["embedding", "-", "240", "-", "1.000", "embedding"]
    assert rows[4] == ["head", "-", "260", "-", "1.000", "outside", "the", "numbered", "blocks"]


def test_the_usual_interval_is_a_tenth_of_an_epoch_and_at_most_100_steps():
    assert [usual_interval(steps) for steps in (3, 47, 999, 5000)] == [1, 4, 99, 100]


def test_importing_overlord_does_not_import_the_trainer():
    code = "import sys, overlord; print([m for m in sys.modules if m == 'torch' or m.startswith('overlord.trainer')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_without_torch_the_trainer_names_the_extra():
    code = "import sys; sys.modules['torch'] = None\nimport overlord.trainer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install 'overlord-dataloader[torch]'" in done.stderr


def test_a_wide_model_on_the_default_settings_is_balanced():
    model = Tiny(width=56, num_blocks=2)
    balance = TempBalance(optim.SGD(model.parameters(), lr=0.1), model)
    balance.update()
    assert set(balance.factors) == {"layers.0", "layers.1"}
