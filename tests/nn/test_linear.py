"""Linear layers that multiply codes in training: when they do, and that all around them stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit
from compare import assert_same_bits
from lowbit import EMA, Learned, PerBatch, PerChannel, PerGroup, PerToken, QuantSpec, Recipe, SteKind
from lowbit.nn import linear
from models.small import Projections, all_state, assert_same_states, mlp

PRESETS = ("w8a8", "w8a8_dynamic", "ternary")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Layers of any size multiply codes; the shapes of what came out."""
    seen: list[tuple[int, ...]] = []
    inner = linear.integer_linear

    def watched(*args: Any) -> Tensor:
        y = inner(*args)
        seen.append(tuple(y.shape))
        return y

    monkeypatch.setattr(linear, "_LEAST", 0)
    monkeypatch.setattr(linear, "integer_linear", watched)
    return seen


def trained(model: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of some steps, and the state after them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs, all_state(model)


def batches(count: int = 3, width: int = 8) -> list[Tensor]:
    return [torch.randn(16, width) for _ in range(count)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("make", [lambda: mlp(8, 12, 8), Projections], ids=["mlp", "projections"])
def test_training_is_that_of_the_float_product(
    preset: str, make: Any, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make(), batches()
    by_codes, by_values = (lowbit.prepare(model, lowbit.recipes.presets()[preset](), data[0]).train() for _ in "ab")
    outputs, state = trained(by_codes, data)
    assert len(products) == 3 * sum(isinstance(module, nn.Linear) for module in model.modules())
    monkeypatch.setattr(linear, "_LEAST", 2**60)
    products.clear()
    wanted, wanted_state = trained(by_values, data)
    assert not products
    assert_same_bits(outputs[0] * 0, wanted[0] * 0)
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
    for key, value in wanted_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_trained_is_what_an_integer_model_computes(preset: str, products: list[Any]) -> None:
    model = lowbit.prepare(mlp(8, 12, 8), lowbit.recipes.presets()[preset](), batches(1)[0]).train()
    trained(model, batches())
    lowbit.freeze(model)
    (batch,) = batches(1)
    converted = lowbit.convert(model)
    model.train()
    products.clear()
    with torch.no_grad():
        output = model(batch)
        assert products == [(16, 12), (16, 8)]
        assert_same_bits(output, converted(batch))


def test_small_layers_and_eval_mode_multiply_values() -> None:
    layer = nn.Linear(8, 4)
    model = lowbit.prepare(layer, lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).train()
    x = torch.randn(16, 8)
    wanted = nn.functional.linear(model.input_quantizer(x), model.weight_quantizer(model.weight), model.bias)
    assert_same_bits(model(x), wanted)


def test_eval_mode_multiplies_values(products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).eval()
    model(torch.randn(16, 8))
    assert not products


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(bad: float, products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).train()
    x = torch.randn(16, 8)
    x[2, 3] = bad
    y = model(x)
    assert not products
    assert y[2].isnan().all() == (bad != bad)
    with torch.no_grad():
        model.weight[1, 1] = float("nan")
    assert model(torch.randn(16, 8))[:, 1].isnan().all()


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
def test_an_input_of_several_layers_is_coded_once(preset: str, products: list[Any]) -> None:
    model = lowbit.prepare(Projections(), lowbit.recipes.presets()[preset](), torch.randn(3, 8)).train()
    calls = []
    quantizer = model.q.input_quantizer
    inner = quantizer.code
    quantizer.code = lambda x: calls.append(quantizer.observing) or inner(x)
    model(torch.randn(16, 8)).sum().backward()
    assert calls == [True]
    assert len(products) == 3


class Both(nn.Module):
    """A layer and a sum of one tensor: the first takes codes, the second values."""

    def __init__(self, *, sum_first: bool) -> None:
        super().__init__()
        self.layer, self.sum_first = nn.Linear(8, 8), sum_first

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        if self.sum_first:
            return (x + 1) * self.layer(x)
        y = self.layer(x)
        return y + x


@pytest.mark.parametrize("sum_first", [True, False])
def test_codes_and_values_of_one_tensor(sum_first: bool, products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Both(sum_first=sum_first), batches()
    by_codes, by_values = (lowbit.prepare(model, lowbit.recipes.w8a8(), data[0]).train() for _ in "ab")
    outputs, state = trained(by_codes, data)
    assert len(products) == 3
    monkeypatch.setattr(linear, "_LEAST", 2**60)
    wanted, wanted_state = trained(by_values, data)
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
    for key, value in wanted_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
def test_activation_checkpointing(preset: str, reentrant: bool, products: list[Any]) -> None:
    model, data = mlp(8, 12, 8), batches(1)[0]
    plain, again = (lowbit.prepare(model, lowbit.recipes.presets()[preset](), data).train() for _ in "ab")
    x = data.clone().requires_grad_()
    plain(x).square().sum().backward()
    y = data.clone().requires_grad_()
    checkpoint(again, y, use_reentrant=reentrant).square().sum().backward()
    assert len(products) > 4  # twice, but for what torch stops after its last saved tensor
    assert_same_bits(y.grad, x.grad)
    assert_same_states(all_state(again), all_state(plain))
    for one, other in zip(again.parameters(), plain.parameters(), strict=True):
        assert_same_bits(one.grad, other.grad)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


W8, TOKEN = QuantSpec(bits=8, per=PerChannel(0)), QuantSpec(bits=8, per=PerToken())
REFUSALS: dict[str, tuple[nn.Module, Recipe, str]] = {
    "a forward of its own": (Own(8, 4), Recipe(W8, TOKEN), "a forward of its own"),
    "a float input": (nn.Linear(8, 4), Recipe(W8), "the input has no quantizer"),
    "a learned scale": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, scale_mode=Learned()), TOKEN),
        "the weight's quantizer: its scale is learned",
    ),
    "9 bits": (nn.Linear(8, 4), Recipe(QuantSpec(bits=9), TOKEN), "the weight's quantizer: it has 9 bits"),
    "tanh": (
        nn.Linear(8, 4),
        Recipe(W8, QuantSpec(bits=8, scale_mode=EMA(), ste=SteKind.TANH)),
        "the input's quantizer: its gradient TANH",
    ),
    "groups": (nn.Linear(8, 4), Recipe(QuantSpec(bits=4, per=PerGroup(4)), TOKEN), r"scales PerGroup\(size=4\)"),
    "affine weights": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, symmetric=False, scale_mode=PerBatch()), TOKEN),
        "the weight has zero points",
    ),
    "integer bias": (
        nn.Linear(8, 4),
        Recipe(W8, QuantSpec(bits=8, scale_mode=EMA()), bias=True),
        "its bias is one of integers",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, products: list[Any]) -> None:
    layer, recipe, reason = REFUSALS[name]
    model: Any = lowbit.prepare(layer, recipe, torch.randn(3, 8)).train()
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(model.product_refusal())
    model(torch.randn(16, 8)).sum().backward()
    assert not products


def test_autocast_and_compile_multiply_values(products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).train()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(16, 8)).dtype == torch.bfloat16
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(16, 8))
    assert not products


def test_summary_says_which() -> None:
    model = lowbit.prepare(nn.Sequential(nn.Linear(8, 4)), lowbit.recipes.w8a8(), torch.randn(3, 8))
    assert "product in training: integer" in str(lowbit.summary(model))
    model = lowbit.prepare(nn.Sequential(nn.Linear(64, 4)), lowbit.recipes.w4(), torch.randn(3, 64))
    assert "product in training" not in str(lowbit.summary(model))
