"""Oscillation: weights whose codes flip too often are frozen."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import EMA, Fixed, Learned, PerBatch, PerChannel, PerGroup, PerTensor, QuantSpec, Recipe
from lowbit.oscillation import Oscillation
from lowbit.schedule import Schedule
from schedules import LEARNED, flip, linear, prepared_net, through_a_file

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
