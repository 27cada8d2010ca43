from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import EMA, Fixed, Learned, PerBatch, PerChannel, PerGroup, PerTensor, QuantSpec, Recipe
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.oscillation import Oscillation
from lowbit.preparation import quantizers
from lowbit.schedule import Schedule

LEARNED = Recipe(
    weight=QuantSpec(bits=3, per=PerChannel(0), scale_mode=Learned()),
    activation=QuantSpec(bits=4, scale_mode=Learned(batch_axis=0)),
)
AVERAGED = Recipe(
    weight=QuantSpec(bits=4, scale_mode=EMA(0.5)), activation=QuantSpec(bits=8, symmetric=False, scale_mode=EMA(0.9))
)


class Net(nn.Module):
    """One batch norm that folds, and one that can't, for it comes before its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.folded = nn.BatchNorm2d(4)
        self.apart = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.folded(self.first(x)).relu()
        return self.second(self.apart(x)).mean((2, 3))


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 2, 7, 7, generator=torch.Generator().manual_seed(seed)) + 0.5


def prepared_net(recipe: Recipe = AVERAGED) -> Any:
    torch.manual_seed(0)
    model = lowbit.prepare(Net(), recipe, images())
    assert isinstance(model.folded, FoldedBatchNorm)
    assert not isinstance(model.apart, FoldedBatchNorm)
    return model


def linear(weight: QuantSpec, layer: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return lowbit.prepare(nn.Linear(4, 3, bias=False) if layer is None else layer, Recipe(weight=weight))


def flags(model: nn.Module) -> dict[str, set[bool]]:
    """What is on, by role."""
    found: dict[str, set[bool]] = {}
    for _, role, quantizer in quantizers(model):
        found.setdefault(role, set()).add(quantizer.enabled)
    return found


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        optimizer.zero_grad()
        model(images(number)).square().sum().backward()
        optimizer.step()


def every_role() -> nn.Module:
    spec = QuantSpec(bits=8, scale_mode=EMA())
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return lowbit.prepare(attention, Recipe(weight=spec, activation=spec, output=spec))


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


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


def flip(weight: Tensor, schedule: Schedule, times: int) -> None:
    """Move every weight to and fro."""
    for number in range(times):
        with torch.no_grad():
            weight.copy_(torch.full_like(weight, 0.1 + number % 2) * 0.9)
        schedule.step()


CASES = {
    "tensor": (QuantSpec(bits=3, scale_mode=Fixed()), nn.Linear(6, 4, bias=False), 0),
    "channel": (QuantSpec(bits=2, per=PerChannel(0), scale_mode=Learned()), nn.Linear(6, 4, bias=False), 0),
    "affine": (QuantSpec(bits=3, symmetric=False, scale_mode=Learned("lsq+")), nn.Linear(6, 4, bias=False), 0),
    "group": (QuantSpec(bits=3, per=PerGroup(4), scale_mode=Fixed()), nn.Conv2d(2, 3, 2, bias=False), 0),
    "transposed": (QuantSpec(bits=3, per=PerGroup(4), scale_mode=Learned()), nn.ConvTranspose1d(2, 3, 4), 1),
    "wide": (QuantSpec(bits=16, signed=False, scale_mode=Fixed()), nn.Linear(6, 4, bias=False), 0),
}


def spread(params: Tensor, per: Any, weight: Tensor, axis: int) -> Tensor:
    """A scale or zero point for each weight."""
    if isinstance(per, PerTensor):
        return params.expand(weight.shape)
    moved = weight.movedim(axis, 0).shape
    return params.flatten().repeat_interleave(weight.numel() // params.numel()).view(moved).movedim(0, axis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_oscillation_equals_its_formula_weight_by_weight(case: str, dtype: torch.dtype) -> None:
    spec, layer, axis = CASES[case]
    model = linear(spec, copy.deepcopy(layer).to(dtype))
    quantizer, weight, m = model.weight_quantizer, model.weight, 0.3
    low, high = quantizer.quant_range()
    first, last, start, steps = 0.75, 0.65, 2, 6
    schedule = Schedule(model, oscillation=Oscillation((first, last), m, start, steps))
    real = np.float64 if dtype == torch.float64 else np.float32
    count = weight.numel()
    state: list[dict[str, Any]] = [{} for _ in range(count)]
    generator = torch.Generator().manual_seed(3)
    codes_seen = set()
    for step in range(1, 16):
        with torch.no_grad():
            if isinstance(spec.scale_mode, Learned):
                quantizer.scale.mul_(1.01)
            scale, zero = quantizer.params(model.slot_weight("weight_quantizer")[0].movedim(axis, 0).flatten(1))
            scales = spread(scale, quantizer.per, weight, axis)
            zeros = spread(torch.zeros_like(scale) if zero is None else zero, quantizer.per, weight, axis)
            jump = torch.rand(weight.shape, generator=generator).to(dtype) * 2.5 - 0.9
            weight.copy_((jump + (40000 if case == "wide" else 0)) * scales)
        before = weight.detach().clone()
        schedule.step()
        passed = min(max(step - start, 0) / steps, 1)
        threshold = last + (first - last) * (1 + math.cos(math.pi * passed)) / 2
        for i in range(count if step >= start else 0):
            s, z = (real(each.flatten()[i].item()) for each in (scales.contiguous(), zeros.contiguous()))
            w, each = real(before.flatten()[i].item()), state[i]
            if each.get("frozen"):
                w = (each["held"] - z) * s
            q = real(min(max(np.rint(w / s) + z, low), high))
            codes_seen.add(int(q))
            if not each:
                each.update(q=q, direction=0.0, f=np.float32(0), e=q, frozen=False, held=real(0))
            delta = q - each["q"]
            o = np.float32(delta * each["direction"] < 0)
            each["f"] = np.float32(m) * o + np.float32(1 - m) * each["f"]
            each["e"] = real(m) * q + real(1 - m) * each["e"]
            if delta:
                each["direction"] = np.sign(delta)
            if each["f"] > threshold and not each["frozen"]:
                each["frozen"], each["held"] = True, np.rint(each["e"])
            each["q"] = q
            expected = (each["held"] - z) * s if each["frozen"] else w
            assert weight.flatten()[i].item() == expected
        if step >= start:
            got = schedule.state_dict()["oscillation"]["weight"]
            assert got["code"].dtype == (torch.int32 if case == "wide" else torch.int8)
            keys = {"code": "q", "direction": "direction", "frequency": "f", "average": "e", "frozen": "frozen"}
            for key, short in keys.items():
                assert got[key].flatten().tolist() == [each[short] for each in state], key
        share = sum(bool(each.get("frozen")) for each in state) / count
        assert schedule.frozen_share() == {"weight": share}
    assert 0.05 < share < 0.95
    assert len(codes_seen) > 1


@pytest.mark.parametrize("mode", [Learned(), Fixed(), EMA(0.9), PerBatch()], ids=repr)
def test_a_weight_that_oscillates_freezes_while_others_move(mode: Any) -> None:
    model = linear(QuantSpec(bits=3, scale_mode=mode))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -0.4, 0.1, 0.2]] * 3))
    quantizer = model.weight_quantizer
    quantizer.start(model.weight)
    if isinstance(mode, Learned | Fixed):
        quantizer.update_params(1 / 3)
    optimizer = torch.optim.SGD([model.weight], lr=1.0, momentum=0.5)
    schedule = Schedule(model, freeze_scales=1, oscillation=Oscillation(0.25, 0.1))
    schedule.follow(optimizer)
    held, others = [], []
    for step in range(40):
        gradient = torch.full((3, 4), 1e-3)
        gradient[1, 2] = 0.3 if step % 2 else -0.3
        gradient[:, 0] = 0
        model.weight.grad = gradient
        optimizer.step()
        state = schedule.state_dict()["oscillation"]["weight"]
        if state["frozen"].any():
            assert state["frozen"].nonzero().tolist() == [[1, 2]]
            held.append((model.weight[1, 2].item(), quantizer(model.weight)[1, 2].item(), state["code"][1, 2].item()))
            others.append(model.weight[0, 2].item())
    assert 10 < len(held) < 40
    assert len(set(held[1:])) == 1  # the code at which it froze is seen from the next step on
    assert len(set(others)) == len(others)
    assert schedule.frozen_share() == {"weight": 1 / 12}


@pytest.mark.parametrize("norm_frozen", [False, True])
def test_a_frozen_weight_keeps_its_code_while_scale_and_folded_factor_move(norm_frozen: bool) -> None:
    model = prepared_net(LEARNED)
    schedule = Schedule(model, freeze_batch_norm=0 if norm_frozen else None, oscillation=Oscillation(0.0, 1.0))
    generator = torch.Generator().manual_seed(0)
    weight, quantizer = model.first.weight, model.first.weight_quantizer

    def codes() -> Tensor:
        folded = model.first.slot_weight("weight_quantizer")[0]
        return lowbit.functional.quantize(
            folded, *quantizer.params(folded), grid=quantizer.grid, per=quantizer.per, dtype=torch.int8
        )

    frozen: list[tuple[Tensor, Tensor]] = []
    for _ in range(12):
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=generator) * quantizer.scale.view(-1, 1, 1, 1))
            quantizer.scale.mul_(1.1)
            model.folded.running_var.mul_(1.3)
            model.folded.weight.sub_(0.3)  # through 0 to negative ones
        schedule.step()
        for mask, code in frozen:
            assert torch.equal(codes()[mask], code)
        mask = schedule.state_dict()["oscillation"]["first.weight"]["frozen"]
        frozen.append((mask, codes()[mask]))
    assert 0.5 < schedule.frozen_share()["first.weight"] <= 1
    assert len(codes().unique()) > 2


def test_a_folded_factor_of_0_leaves_the_weight_finite() -> None:
    model = prepared_net(LEARNED)
    schedule = Schedule(model, freeze_batch_norm=0, oscillation=Oscillation(0.0, 1.0))
    with torch.no_grad():
        for number in range(5):
            model.first.weight.copy_(torch.full_like(model.first.weight, (-1.0) ** number))
            schedule.step()
        assert schedule.frozen_share()["first.weight"] == 1
        model.folded.weight.zero_()
        model.first.weight.fill_(0.5)
    schedule.step()
    assert torch.equal(model.first.weight, torch.full_like(model.first.weight, 0.5))


@pytest.mark.parametrize(
    ("mode", "scale"), [(PerBatch("mean_abs"), 1.15), (PerBatch(), 2.0), (EMA(0.5), 2.0)], ids=repr
)
def test_scales_that_follow_the_weights_do_not_sink_with_them(mode: Any, scale: float) -> None:
    values = torch.tensor([[2.0, 0.4, 0.2, -2.0]] * 3)
    model = linear(QuantSpec(bits=2, narrow=True, scale_mode=mode))
    model.weight_quantizer.start(values)
    schedule = Schedule(model, oscillation=Oscillation(0.0, 0.9))
    for number in range(3):
        with torch.no_grad():
            model.weight.copy_(values * (-1) ** number)
        model(torch.ones(1, 4))
        schedule.step()
    kept = model.weight.detach().clone()
    torch.testing.assert_close(kept, torch.tensor([[scale, 0.4, 0.2, -scale]] * 3))
    assert schedule.frozen_share() == {"weight": 0.5}
    for _ in range(50):
        with torch.no_grad():
            model.weight.add_(0.1)  # which widens the range from the 16th on
        model(torch.ones(1, 4))
        schedule.step()
        assert torch.equal(model.weight[:, ::3], kept[:, ::3])


def test_a_code_that_crosses_the_whole_grid_changed_in_that_direction() -> None:
    model = linear(QuantSpec(bits=8, scale_mode=Fixed()))
    schedule = Schedule(model, oscillation=Oscillation(0.5))
    for value in (-1e9, 1e9, -1e9):
        with torch.no_grad():
            model.weight.fill_(value)
        schedule.step()
        state = schedule.state_dict()["oscillation"]["weight"]
        if value > 0:
            assert state["direction"].eq(1).all()
    assert state["direction"].eq(-1).all()
    assert state["frequency"].eq(0.01).all()


def test_codes_are_followed_from_start_on_and_only_while_quantized() -> None:
    model = linear(QuantSpec(bits=3, scale_mode=Fixed()))
    model.weight_quantizer.update_params(0.5)
    schedule = Schedule(model, weight_start=4, oscillation=Oscillation(0.0, 1.0, start=2))
    flip(model.weight, schedule, times=3)
    assert schedule.state_dict()["oscillation"] == {"weight": {}}
    assert schedule.frozen_share() == {"weight": 0.0}
    flip(model.weight, schedule, times=2)
    assert schedule.frozen_share() == {"weight": 0.0}
    flip(model.weight, schedule, times=1)
    before = schedule.state_dict()["oscillation"]["weight"]["code"]
    model.weight_quantizer.enabled = False
    flip(model.weight, schedule, times=3)
    assert schedule.state_dict()["oscillation"]["weight"]["code"] is before
    late = Schedule(model, oscillation=Oscillation(0.0, 1.0, start=2))
    late.step()
    assert late.state_dict()["oscillation"] == {"weight": {}}
    late.step()
    assert late.state_dict()["oscillation"]["weight"]


def test_frozen_weights_survive_a_checkpoint() -> None:
    spec = QuantSpec(bits=3, scale_mode=Learned())
    model, other = linear(spec), linear(spec)
    schedule, second = (Schedule(each, oscillation=Oscillation(0.0, 1.0)) for each in (model, other))
    flip(model.weight, schedule, times=4)
    assert schedule.frozen_share() == {"weight": 1.0}
    other.load_state_dict(through_a_file(model.state_dict()))
    second.load_state_dict(through_a_file(schedule.state_dict()))
    assert second.frozen_share() == {"weight": 1.0}
    flip(other.weight, second, times=3)
    assert torch.equal(other.weight, model.weight)


def test_weights_of_each_kind_are_followed_once() -> None:
    torch.manual_seed(0)
    spec = QuantSpec(bits=4, scale_mode=Learned())
    tied = nn.Linear(4, 4, bias=False)
    twin = nn.Linear(4, 4, bias=False)
    twin.weight = tied.weight
    scaled = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
    parts = {"tied": tied, "twin": twin, "lstm": nn.LSTM(4, 4), "scaled": scaled}
    model = lowbit.prepare(nn.ModuleDict(parts), Recipe(weight=spec))
    schedule = Schedule(model, oscillation=Oscillation(0.1))
    schedule.step()
    assert list(schedule.frozen_share()) == ["tied.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"]


def test_weights_that_have_no_scale_yet_wait() -> None:
    layer = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(layer.weight)
    model = linear(QuantSpec(bits=4, scale_mode=Learned()), layer)
    schedule = Schedule(model, oscillation=Oscillation(0.1))
    schedule.step()
    assert schedule.state_dict()["oscillation"] == {"weight": {}}


def test_thresholds_fall_along_a_cosine() -> None:
    moving = Oscillation((0.5, 0.1), start=10, steps=4)
    assert [round(moving.threshold_at(step), 6) for step in (0, 10, 12, 14, 99)] == [0.5, 0.5, 0.3, 0.1, 0.1]
    assert moving.threshold_at(11) == pytest.approx(0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2)
    assert {Oscillation(0.02).threshold_at(step) for step in (0, 7)} == {0.02}
    assert Oscillation.from_dict({**moving.to_dict(), "threshold": [0.5, 0.1]}) == moving


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"threshold": -0.1}, ValueError, "^threshold is -0.1, but it must be at least 0"),
        ({"threshold": 1}, ValueError, "^threshold is 1, but"),
        ({"threshold": "a"}, TypeError, "^threshold is 'a'"),
        ({"threshold": (0.1, 1.5), "steps": 3}, ValueError, r"^threshold is \(0.1, 1.5\), but"),
        ({"threshold": (0.1,), "steps": 3}, ValueError, "must be one number, or two"),
        ({"threshold": (0.2, 0.1)}, ValueError, "needs the steps"),
        ({"threshold": 0.2, "steps": 3}, ValueError, "one number takes none"),
        ({"threshold": (0.2, 0.1), "steps": 0}, ValueError, "^steps is 0"),
        ({"threshold": 0.1, "momentum": 0}, ValueError, "^momentum is 0, but"),
        ({"threshold": 0.1, "momentum": 1.1}, ValueError, "^momentum is 1.1, but"),
        ({"threshold": 0.1, "start": -1}, ValueError, "^start is -1"),
        ({"threshold": 0.1, "start": 1.0}, TypeError, "^start is 1.0"),
    ],
)
def test_oscillation_refuses_by_name(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Oscillation(**fields)
