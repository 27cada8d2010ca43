"""Linear layers whose weight has scales for groups of a row: training is that of the values, and codes are kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import inputs
import lowbit
from lowbit import EMA, Fixed, PerBatch, PerGroup, PerToken, QuantSpec, Recipe
from lowbit.bench.runner import count_saved
from lowbit.nn import linear

INPUTS = {
    "tokens": QuantSpec(bits=8, per=PerToken(), scale_mode=PerBatch()),
    "affine tokens": QuantSpec(bits=8, symmetric=False, signed=True, per=PerToken(), scale_mode=PerBatch()),
    "a batch": QuantSpec(bits=8, scale_mode=PerBatch()),
    "an EMA": QuantSpec(bits=8, symmetric=False, scale_mode=EMA(0.9)),
    "a fixed scale": QuantSpec(bits=4, scale_mode=Fixed()),
}
GROUPS = [16, 256]


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size take codes."""
    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0, "cuda": 0})
    torch.use_deterministic_algorithms(False)


def layer_of(name: str, group: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    recipe = Recipe(weight=QuantSpec(bits=4, per=PerGroup(group), narrow=True), activation=INPUTS[name])
    model = nn.Sequential(nn.Linear(2 * max(group, 32), 8)).to(device)
    return lowbit.prepare(model, recipe, torch.randn(2, model[0].in_features, device=device)).train()


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = []
    for batch in (x, 1.5 * x, 0.5 * x):
        leaf = batch.detach().requires_grad_()
        y = model(leaf)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]
    return found + [state for state in model.buffers() if state.is_floating_point()]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", INPUTS)
def test_training_is_that_of_the_values(
    name: str, group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layer_of(name, group, device)
    twin, x = copy.deepcopy(model), inputs.random((2, 5, model[0].in_features)).float().to(device)
    assert model[0].way(x.device) == ("groups" if name == "tokens" else "codes")
    found = steps(model, x)
    monkeypatch.setattr(linear, "_LEAST", {})
    for got, want in zip(found, steps(twin, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["tokens", "an EMA"])
def test_compiled_it_is_the_same_and_keeps_no_more(name: str, group: int, backend: str) -> None:
    model = layer_of(name, group, torch.device("cpu"))
    x = inputs.random((32, model[0].in_features)).float()
    compiled = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled.compile(backend=backend, fullgraph=True)
    for got, want in zip(steps(compiled, x), steps(model, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    leaf, scales = x.requires_grad_(), 4 * len(x)  # of one scale for all, compiled code keeps one for each row
    assert count_saved(lambda: compiled(leaf))[1] <= count_saved(lambda: model(leaf))[1] + scales
    torch._dynamo.reset()


@pytest.mark.parametrize("name", INPUTS)
def test_codes_are_what_is_kept(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layer_of(name, 16, device)
    x = inputs.random((64, model[0].in_features)).float().to(device).requires_grad_()
    kept = count_saved(lambda: model(x))[1]
    monkeypatch.setattr(linear, "_LEAST", {})
    assert kept < 0.4 * count_saved(lambda: model(x))[1]


@pytest.mark.parametrize("group", GROUPS)
def test_weights_once(group: int, device: torch.device) -> None:
    model = layer_of("an EMA", group, device)
    twin, x = copy.deepcopy(model), inputs.random((6, model[0].in_features)).float().to(device)
    with lowbit.weights_once(model):
        found = steps(model, x)
    for got, want in zip(found, steps(twin, x), strict=True):
        assert torch.equal(got, want)


def test_what_a_layer_says_of_its_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    on_cpu = device.type == "cpu"
    cases = (("an EMA", 16, False), ("an EMA", 64, True), ("a batch", 256, True), ("a batch", 320, on_cpu))
    for name, group, by_codes in (*cases, ("an EMA", 256, on_cpu), ("an EMA", 512, True)):
        layer = layer_of(name, 256 if group > 64 else 32, device)[0]
        layer.in_features, layer.weight_quantizer.per = (64 if group < 256 else 2 * group), PerGroup(group)
        reason = f"the sums of PerGroup(size={group}) take longer to scale than values take to multiply"
        assert layer.product_refusal() == ("" if by_codes else reason + "; codes are what is kept")
        assert layer.way(device)
        layer.weight_quantizer.per = PerGroup(48)  # which no row is made of
        assert "the weight has scales PerGroup(size=48)" in layer.product_refusal()
