"""Schedule: what is switched on at which step, and after a restart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import EMA, Fixed, Learned, QuantSpec, Recipe
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.oscillation import Oscillation
from lowbit.preparation import quantizers
from lowbit.schedule import Schedule
from schedules import (
    AVERAGED,
    LEARNED,
    Net,
    every_role,
    flags,
    flip,
    images,
    linear,
    prepared_net,
    through_a_file,
    train,
)


@pytest.mark.parametrize(
    ("weight_start", "activation_start"), [(0, 0), (2, 0), (0, 3), (1, 3), (3, 1), (2, 2), (None, 1), (1, None)]
)
def test_quantizers_start_at_their_step(weight_start: int | None, activation_start: int | None) -> None:
    model = every_role()
    schedule = Schedule(model, weight_start=weight_start, activation_start=activation_start)
    for step in range(5):
        assert schedule.count == step
        weights = weight_start is not None and step >= weight_start
        activations = activation_start is not None and step >= activation_start
        assert flags(model) == {
            "weight": {weights},
            "activation": {activations},
            "share": {activations},
            "output": {activations},
        }
        schedule.step()


def test_construction_applies_step_0_over_what_was_set() -> None:
    model = every_role()
    for _, _, quantizer in quantizers(model):
        quantizer.enabled = False
    Schedule(model)
    assert all(on == {True} for on in flags(model).values())


def test_flags_set_by_hand_stay_until_the_next_boundary() -> None:
    model = prepared_net()
    schedule = Schedule(model, weight_start=1, activation_start=4, freeze_scales=4, freeze_batch_norm=4)
    schedule.step()
    model.first.weight_quantizer.enabled = False
    model.first.input_quantizer.enabled = True
    model.second.input_quantizer.observing = False
    model.folded.frozen = True
    for _ in range(2):
        schedule.step()
        assert not model.first.weight_quantizer.enabled
        assert model.first.input_quantizer.enabled
        assert not model.second.input_quantizer.observing
        assert model.folded.frozen
        assert not model.apart.frozen
    schedule.step()
    assert not model.first.weight_quantizer.enabled
    assert model.second.input_quantizer.enabled
    assert not model.first.input_quantizer.observing
    assert model.apart.frozen
    model.first.input_quantizer.enabled, model.first.input_quantizer.observing = False, True
    model.apart.frozen = False
    schedule.step()
    assert not model.first.input_quantizer.enabled
    assert model.first.input_quantizer.observing
    assert not model.apart.frozen


def test_warm_up_is_float_training_with_scales_that_follow() -> None:
    model, plain = prepared_net(), Net()
    plain.load_state_dict(lowbit.restore(copy.deepcopy(model)).state_dict())
    schedule = Schedule(model, weight_start=2, activation_start=2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
    schedule.follow(optimizers[0])
    scales = []
    for number in range(2):
        assert torch.equal(model(images(number)), plain(images(number)))
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            train(net, optimizer, number, number + 1)
        scales.append(model.first.input_quantizer.scale.item())
    assert scales[0] != scales[1]
    assert torch.equal(model.first.weight, plain.first.weight)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    assert not torch.equal(model(images(3)), plain(images(3)))


def test_learned_activation_scales_start_in_warm_up() -> None:
    model = prepared_net(LEARNED)
    Schedule(model, activation_start=5)
    assert not model.first.input_quantizer.is_ready
    model(images())
    assert model.first.input_quantizer.is_ready


@pytest.mark.parametrize("mode", [Learned(), EMA(0.9)], ids=repr)
def test_scales_of_weights_start_with_their_quantizers(mode: Any) -> None:
    model = prepared_net(Recipe(weight=QuantSpec(bits=4, scale_mode=mode)))
    schedule = Schedule(model, weight_start=1)
    model.second.weight_quantizer.enabled = True  # by hand: its scale is in use already
    before = model.second.weight_quantizer.scale.clone()
    with torch.no_grad():
        model.first.weight.mul_(3)
        model.second.weight.mul_(3)
        model.folded.running_var.fill_(0.25)
    schedule.step()
    fresh = copy.deepcopy(model)
    fresh.first.start_weight("weight_quantizer")
    folded = model.first.weight * (model.folded.weight / (0.25 + model.folded.eps) ** 0.5).view(-1, 1, 1, 1)
    fresh.second.weight_quantizer.start(folded)
    assert torch.equal(model.first.weight_quantizer.scale, fresh.first.weight_quantizer.scale)
    torch.testing.assert_close(model.first.weight_quantizer.scale, fresh.second.weight_quantizer.scale)
    assert torch.equal(model.second.weight_quantizer.scale, before)


def test_fixed_scales_of_weights_stay() -> None:
    model = linear(QuantSpec(bits=4, scale_mode=Fixed()))
    model.weight_quantizer.update_params(0.125)
    schedule = Schedule(model, weight_start=1)
    schedule.step()
    assert model.weight_quantizer.enabled
    assert model.weight_quantizer.scale.item() == 0.125


class Product(nn.Module):
    """A weight that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def test_weights_of_ops_start_too_and_have_no_codes_to_follow() -> None:
    model = lowbit.prepare(Product(), LEARNED, torch.randn(2, 4))
    schedule = Schedule(model, weight_start=1)
    assert flags(model)["weight"] == {False}
    schedule.step()
    assert flags(model)["weight"] == {True}
    with pytest.raises(ValueError, match="no weight of the model has codes"):
        Schedule(model, oscillation=Oscillation(0.1))


def test_scales_freeze_at_their_step() -> None:
    model = prepared_net()
    schedule = Schedule(model, freeze_scales=2)
    seen = []
    for number in range(4):
        model(images(number))
        seen.append([quantizer.scale.clone() for _, _, quantizer in quantizers(model)])
        schedule.step()
    assert all(not torch.equal(a, b) for a, b in zip(seen[0][::2], seen[1][::2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen[1], seen[3], strict=True))


def test_scales_and_batch_norms_freeze_apart() -> None:
    scales, norms = prepared_net(), prepared_net()
    Schedule(scales, freeze_scales=1).step()
    Schedule(norms, freeze_batch_norm=1).step()
    assert not scales.first.input_quantizer.observing
    assert not scales.folded.frozen
    assert norms.first.input_quantizer.observing
    assert norms.folded.frozen


def test_none_leaves_frozen_what_is_frozen() -> None:
    model = lowbit.freeze(prepared_net())
    schedule = Schedule(model)
    schedule.step()
    assert model.folded.frozen
    assert not any(quantizer.observing for _, _, quantizer in quantizers(model))
    assert not isinstance(model.apart, FoldedBatchNorm)


def test_batch_norms_freeze_at_their_step_and_train_does_not_undo_it() -> None:
    model = prepared_net()
    schedule = Schedule(model, freeze_batch_norm=1, freeze_scales=1)
    model(images(0))
    changed = [model.folded.running_mean.clone(), model.apart.running_mean.clone()]
    assert all(mean.abs().sum() > 0 for mean in changed)
    schedule.step()
    model.train()
    output = model(images(1))
    assert torch.equal(changed[0], model.folded.running_mean)
    assert torch.equal(changed[1], model.apart.running_mean)
    assert model.apart.training
    assert torch.equal(output, model.eval()(images(1)))


def test_freezable_batch_norms_are_copied_and_restored() -> None:
    model = prepared_net()
    keys = list(model.state_dict())
    schedule = Schedule(model, freeze_batch_norm=0)
    assert list(model.state_dict()) == keys
    assert copy.deepcopy(model).apart.frozen
    schedule.step()
    float_model = lowbit.restore(model)
    assert type(float_model.apart) is nn.BatchNorm2d
    float_model(images())
    assert float_model.apart.num_batches_tracked > 0


def test_batch_norms_without_statistics_are_left_alone() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False)
    model = lowbit.prepare(nn.Sequential(nn.Linear(4, 3), norm), AVERAGED)
    Schedule(model, freeze_batch_norm=0)
    assert type(model[1]) is nn.BatchNorm1d


def test_follow_counts_optimizer_steps_until_removed() -> None:
    model = prepared_net()
    schedule = Schedule(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = schedule.follow(optimizer)
    train(model, optimizer, 0, 3)
    assert schedule.count == 3
    handle.remove()
    train(model, optimizer, 3, 4)
    assert schedule.count == 3


def test_a_step_that_the_scaler_skips_does_not_count() -> None:
    model = linear(QuantSpec(bits=4, scale_mode=Learned()))
    schedule = Schedule(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for factor, count in ((1.0, 1), (math.inf, 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert schedule.count == count


@pytest.mark.parametrize("name", ["weight_start", "activation_start", "freeze_scales", "freeze_batch_norm"])
@pytest.mark.parametrize(("value", "error"), [(1.0, TypeError), (True, TypeError), ("1", TypeError), (-1, ValueError)])
def test_steps_are_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name} is "):
        Schedule(prepared_net(), **{name: value})


def test_what_can_not_be_scheduled_is_refused() -> None:
    with pytest.raises(ValueError, match="not prepared"):
        Schedule(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model is int"):
        Schedule(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="oscillation is "):
        Schedule(prepared_net(), oscillation=0.1)  # type: ignore[arg-type]
    binary = lowbit.prepare(nn.Linear(2, 2), lowbit.recipes.binary())
    with pytest.raises(ValueError, match="no weight of the model has codes"):
        Schedule(binary, oscillation=Oscillation(0.1))


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrap", [Wrapper, lambda m: torch.compile(m, backend="eager"), lambda m: Wrapper(Wrapper(m))])
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = prepared_net()
    schedule = Schedule(wrap(model), weight_start=1, oscillation=Oscillation(0.1))
    assert flags(model)["weight"] == {False}
    schedule.step()
    assert flags(model)["weight"] == {True}
    assert list(schedule.frozen_share()) == ["first.weight", "second.weight"]


def test_several_prepared_models_under_one_roof() -> None:
    parts = nn.ModuleList([linear(QuantSpec(bits=4, scale_mode=Learned())) for _ in range(2)])
    schedule = Schedule(parts, weight_start=1, oscillation=Oscillation(0.1))
    assert flags(parts)["weight"] == {False}
    assert list(schedule.frozen_share()) == ["0.weight", "1.weight"]


def test_compiled_models_follow_the_flags() -> None:
    model = prepared_net()
    compiled = torch.compile(model, backend="eager")
    schedule = Schedule(compiled, weight_start=1, activation_start=2, freeze_scales=3, freeze_batch_norm=4)
    for number in range(6):
        twin = copy.deepcopy(model)
        assert torch.equal(compiled(images(number)), twin(images(number)))
        assert torch.equal(model.apart.running_mean, twin.apart.running_mean)
        assert torch.equal(model.first.input_quantizer.scale, twin.first.input_quantizer.scale)
        schedule.step()


@pytest.mark.parametrize("recipe", [LEARNED, AVERAGED, lowbit.recipes.w8a8()], ids=["learned", "averaged", "w8a8"])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_equals_an_uninterrupted_one(recipe: Recipe, model_first: bool, stop: int) -> None:
    def build() -> tuple[Any, torch.optim.Optimizer, Schedule]:
        model = prepared_net(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        steps = {"weight_start": 1, "activation_start": 2, "freeze_scales": 4, "freeze_batch_norm": 5}
        # So low a threshold freezes weights at their first oscillation.
        schedule = Schedule(model, **steps, oscillation=Oscillation((0.001, 0.0), 0.5, start=2, steps=3))
        schedule.follow(optimizer)
        return model, optimizer, schedule

    straight, optimizer, schedule = build()
    train(straight, optimizer, 0, 8)
    assert 0 < schedule.frozen_share()["first.weight"] < 1

    stopped, *rest = build()
    train(stopped, rest[0], 0, stop)
    saved = through_a_file({"model": stopped.state_dict(), "rest": [each.state_dict() for each in rest]})
    torch.manual_seed(1)
    resumed, optimizer, second = build()
    if model_first:
        resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["rest"][0])
    second.load_state_dict(saved["rest"][1])
    if not model_first:
        resumed.load_state_dict(saved["model"])
    train(resumed, optimizer, stop, 8)
    for (name, one), (_, other) in zip(straight.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    assert schedule.frozen_share() == second.frozen_share()
    assert torch.equal(straight(images(9)), resumed(images(9)))


def test_loading_sets_the_flags_of_that_step_back_and_forth() -> None:
    model = prepared_net()
    schedule = Schedule(model, weight_start=1, activation_start=2, freeze_scales=2, freeze_batch_norm=2)
    start = schedule.state_dict()
    schedule.step()
    schedule.step()
    late = schedule.state_dict()
    for state, on in ((start, False), (late, True)):
        schedule.load_state_dict(state)
        assert flags(model) == {"weight": {on}, "activation": {on}}
        assert {quantizer.observing for _, _, quantizer in quantizers(model)} == {not on}
        assert model.folded.frozen is model.apart.frozen is on
    assert schedule.count == 2


def test_a_state_of_another_schedule_is_refused_whole() -> None:
    model = prepared_net(LEARNED)
    schedule = Schedule(model, oscillation=Oscillation(0.1))
    schedule.step()
    state = schedule.state_dict()
    with pytest.raises(ValueError, match=r"codes of first\.weight, second\.weight"):
        Schedule(model).load_state_dict(state)
    with pytest.raises(TypeError, match="count is"):
        schedule.load_state_dict({**state, "count": 1.0})
    first, second = state["oscillation"].values()
    fresh = Schedule(model, oscillation=Oscillation(0.1))
    for broken, message in (
        ({key: second[key] for key in ("code", "frozen")}, "has the keys code, frozen, but needs"),
        ({**second, "held": second["held"][0]}, r"second\.weight has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh.load_state_dict({"count": 1, "oscillation": {"first.weight": first, "second.weight": broken}})
        assert fresh.count == 0
        assert fresh.state_dict()["oscillation"] == {"first.weight": {}, "second.weight": {}}


def test_a_state_is_not_changed_by_later_steps() -> None:
    model = linear(QuantSpec(bits=3, scale_mode=Fixed()))
    schedule = Schedule(model, oscillation=Oscillation(0.0, 0.5))
    schedule.step()
    state = schedule.state_dict()
    kept = copy.deepcopy(state)
    flip(model.weight, schedule, times=4)
    assert schedule.frozen_share()["weight"] == 1
    schedule.load_state_dict(state)
    flip(model.weight, schedule, times=4)
    assert all(torch.equal(state["oscillation"]["weight"][k], v) for k, v in kept["oscillation"]["weight"].items())
