"""TempBalance beside optimizers, schedules, scalers and checkpoints: they must see what they would see without it."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedules

import overlord as ol
from overlord.trainer import Linear, TempBalance
from tests.trainer.models import Tiny, block_weights, loss_of, same_weights, tiny, weights_of

OPTIMIZERS = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda ps: optim.AdamW(ps, lr=0.01),
    "AdamW one by one": lambda ps: optim.AdamW(ps, lr=0.01, foreach=False),
    "AdamW fused": lambda ps: optim.AdamW(ps, lr=0.01, fused=True),
    "AdamW with a tensor rate": lambda ps: optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.01),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.01),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.001),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.01),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.01),
    "Adadelta": lambda ps: optim.Adadelta(ps, lr=0.5),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.001),
}

SCHEDULES = {
    "none": lambda o: None,
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 8),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o: schedules.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5], 0.5),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.2, total_iters=5),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.05, total_steps=12),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.05, step_size_up=3),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 6)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, total_iters=3), schedules.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


def all_ones(alphas: np.ndarray) -> np.ndarray:
    return np.ones_like(alphas)


def balanced(optimizer, model, **settings) -> TempBalance:
    return TempBalance(optimizer, model, min_eigenvalues=8, **{"interval": 3, **settings})


def train(model, optimizer, schedule, steps) -> list[list[float]]:
    """The rates each step shows."""
    rates = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return rates


@pytest.mark.parametrize("order", ["before the schedule", "after the schedule"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_shows_the_same_rates_as_without(name, order):
    runs = []
    for balance in (False, True):
        model = tiny()
        optimizer = optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        if balance and order == "before the schedule":
            balanced(optimizer, model)
        schedule = SCHEDULES[name](optimizer)
        if balance and order == "after the schedule":
            balanced(optimizer, model)
        runs.append((train(model, optimizer, schedule, range(8)), weights_of(model)))
    assert runs[0][0] == runs[1][0]
    assert not same_weights(runs[0][1], runs[1][1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_factor_one_everywhere_training_is_the_same_to_the_last_bit(name):
    runs = []
    for balance in (False, True):
        model = tiny()
        optimizer = optim.AdamW(model.parameters(), lr=0.02)
        schedule = SCHEDULES[name](optimizer)
        if balance:
            balanced(optimizer, model, mapping=all_ones)
        train(model, optimizer, schedule, range(8))
        runs.append(weights_of(model))
    assert same_weights(*runs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_as_with_groups_split_by_hand(name):
    """The same factors, once by TempBalance and once as plain param groups with multiplied rates."""
    model, by_hand = tiny(), tiny()
    optimizer = OPTIMIZERS[name](model.parameters())
    balance = balanced(optimizer, model, interval=1000)
    balance.update()
    blocks = [f"layers.{i}" for i in range(3)]
    assert len(set(balance.factors.values())) == 3
    split = [{"params": list(by_hand.get_submodule(b).parameters()), "factor": balance.factors[b]} for b in blocks]
    rest = [p for n, p in by_hand.named_parameters() if not n.startswith("layers.")]
    reference = OPTIMIZERS[name]([*split, {"params": rest, "factor": 1.0}])
    for group in reference.param_groups:
        group["lr"] = group["lr"] * group.pop("factor")
    train(model, optimizer, None, range(4))
    train(by_hand, reference, None, range(4))
    assert same_weights(weights_of(model), weights_of(by_hand))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_own_state_has_the_same_form_as_without(name):
    model = tiny()
    optimizer = OPTIMIZERS[name](model.parameters())
    balanced(optimizer, model)
    train(model, optimizer, None, range(2))
    plain = OPTIMIZERS[name](tiny().parameters())
    state = optimizer.state_dict()
    plain.load_state_dict(state)
    assert state["param_groups"] == plain.state_dict()["param_groups"]
    assert len(state["state"]) == len(list(model.parameters()))


def test_options_of_groups_are_kept_when_they_are_split():
    model = tiny()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = optim.SGD([{"params": decayed, "weight_decay": 10.0}, {"params": plain, "lr": 0.0}], lr=0.01)
    balanced(optimizer, model)
    before = [p.clone() for p in plain]
    norms = [p.norm().item() for p in decayed]
    train(model, optimizer, None, range(3))
    assert all(torch.equal(a, b) for a, b in zip(before, plain, strict=True))
    assert all(p.norm().item() < norm for p, norm in zip(decayed, norms, strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.0]


def test_accumulated_gradients_count_as_one_step():
    model = tiny()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    at = []
    balance = balanced(optimizer, model, interval=2, on_update=lambda step, metrics: at.append(step))
    for micro in range(12):
        loss_of(model, micro).backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert balance.num_steps == 4
    assert at == [0, 2]


def test_a_step_that_a_grad_scaler_skips_is_not_counted_and_the_others_are_unscaled():
    runs = []
    for scaled in (False, True):
        model = tiny()
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        balance = balanced(optimizer, model, interval=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
        for step in range(3):
            scaler.scale(loss_of(model, step)).backward()
            if step == 1:
                model.head.weight.grad.fill_(torch.inf if scaled else 0)  # type: ignore[union-attr]
            if step != 1 or scaled:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        assert balance.num_steps == 2
        runs.append(weights_of(model))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*runs, strict=True))


def test_a_step_that_fails_leaves_the_optimizer_as_it_was():
    model = tiny()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    balance = balanced(optimizer, model)
    groups, before = optimizer.param_groups, copy.deepcopy(optimizer.state_dict())

    def closure() -> float:
        optimizer.zero_grad()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    assert optimizer.param_groups is groups
    assert optimizer.state_dict() == before
    assert balance.num_steps == 0


def test_a_closure_works_and_sees_the_schedules_rate():
    model = tiny()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    balanced(optimizer, model)
    seen = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        seen.append([group["lr"] for group in optimizer.param_groups])
        return loss.item()

    assert optimizer.step(closure) is not None
    assert seen == [[0.01]]


class CountingSGD(optim.SGD):
    """Writes into its groups and itself while it steps, and steps through its parent, as some optimizers do."""

    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


class KeepsRates(optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr_max"] = max(group["lr"], group.get("lr_max", 0))
        return super().step(closure)


def test_what_a_step_writes_into_groups_and_optimizer_is_kept():
    model = tiny()
    optimizer = CountingSGD(model.parameters(), lr=0.01)
    balance = balanced(optimizer, model)
    train(model, optimizer, None, range(3))
    assert optimizer.param_groups[0]["step"] == 3
    assert optimizer.calls == 3
    assert balance.num_steps == 3


def test_an_optimizer_that_keeps_rates_in_its_groups_is_refused():
    model = tiny()
    optimizer = KeepsRates(model.parameters(), lr=0.01)
    balanced(optimizer, model)
    loss_of(model, 0).backward()
    with pytest.raises(ol.errors.SpecError, match="'lr_max'"):
        optimizer.step()


def test_lbfgs_is_refused():
    model = tiny()
    with pytest.raises(ol.errors.SpecError, match="LBFGS takes one step for all parameters"):
        TempBalance(optim.LBFGS(model.parameters()), model)


def test_parameters_that_join_later_are_balanced_from_the_next_update():
    model = tiny()
    late = model.layers[2]
    optimizer = optim.SGD([p for n, p in model.named_parameters() if "layers.2" not in n], lr=0.01)
    balance = balanced(optimizer, model, interval=1)
    train(model, optimizer, None, range(1))
    assert math.isnan(balance.alphas["layers.2"])
    optimizer.add_param_group({"params": list(late.parameters())})
    train(model, optimizer, None, range(1))
    assert math.isfinite(balance.alphas["layers.2"])


def test_a_second_one_on_the_same_optimizer_is_refused_until_the_first_is_closed():
    model = tiny()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    first = balanced(optimizer, model)
    balanced(optimizer, model)
    with pytest.raises(ol.errors.SpecError, match="takes one TempBalance"):
        train(model, optimizer, None, range(1))
    first.close()
    train(model, optimizer, None, range(1))


def test_closing_gives_the_optimizer_back():
    runs = []
    for balance in (False, True):
        model = tiny()
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        if balance:
            balanced(optimizer, model).close()
        train(model, optimizer, None, range(2))
        runs.append(weights_of(model))
    assert same_weights(*runs)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_resumed_run_is_the_same_to_the_last_bit_wherever_it_was_cut(cut):
    def parts() -> tuple[Tiny, optim.Optimizer, schedules.LRScheduler, TempBalance]:
        model = tiny()
        optimizer = optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, schedules.CosineAnnealingLR(optimizer, 8), balanced(optimizer, model)

    whole = parts()
    train(*whole[:3], range(8))
    first = parts()
    train(*first[:3], range(cut))
    saved = copy.deepcopy([part.state_dict() for part in first])
    second = parts()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert second[3].factors == first[3].factors
    assert second[3].explain() == first[3].explain()
    train(*second[:3], range(cut, 8))
    assert same_weights(weights_of(whole[0]), weights_of(second[0]))
    assert second[3].state_dict() == whole[3].state_dict()


def test_a_state_of_another_model_or_version_is_refused_with_what_differs():
    model = tiny()
    balance = balanced(optim.SGD(model.parameters(), lr=0.01), model)
    other = tiny(num_blocks=4)
    state = balanced(optim.SGD(other.parameters(), lr=0.01), other).state_dict()
    with pytest.raises(ol.errors.StateError, match=r"only in the state: \['layers.3'\]"):
        balance.load_state_dict(state)
    with pytest.raises(ol.errors.StateError, match="version 1 is needed, got 7"):
        balance.load_state_dict({**state, "version": 7})


@pytest.mark.parametrize("bad", [0.0, torch.nan])
def test_layers_without_an_alpha_train_at_the_base_rate_with_one_warning(bad):
    model = tiny()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    balance = balanced(optimizer, model, interval=1)
    with torch.no_grad():
        for weight in block_weights(model.layers[1]):
            weight.fill_(bad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            balance.update()
    assert [str(w.message) for w in caught] == [
        "at step 0 these layers have no alpha (weights that are zero, not finite, or without any tail) and train at the "
        "base rate: layers.1"
    ]
    assert balance.factors["layers.1"] == 1.0
    assert balance.factors["layers.0"] == 0.5
    assert balance.factors["layers.2"] == 1.5
    assert "no alpha: base rate" in balance.explain()
    assert "tempbalance/alpha/layers.1" not in balance.metrics()
    assert balance.state_dict()["alphas"]["layers.1.up.weight"] is None


def test_updates_come_at_the_interval_and_report_metrics_for_a_logger():
    model = tiny()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    seen: dict[int, dict[str, float]] = {}
    balance = balanced(optimizer, model, interval=3, on_update=seen.__setitem__, mapping=Linear(0.8, 1.2))
    train(model, optimizer, None, range(7))
    assert list(seen) == [0, 3, 6]
    last = seen[6]
    assert last == balance.metrics()
    names = [f"layers.{i}" for i in range(3)]
    assert {k for k in last if k.startswith("tempbalance/alpha/")} == {f"tempbalance/alpha/{n}" for n in names}
    factors = [last[f"tempbalance/factor/{name}"] for name in names]
    assert (min(factors), max(factors)) == (0.8, 1.2)
    alphas = [last[f"tempbalance/alpha/{name}"] for name in names]
    assert last["tempbalance/alpha_std"] == pytest.approx(np.std(alphas))
    assert all(a < b for a, b in itertools.pairwise(alphas))  # heavier tails first, as the models were made
