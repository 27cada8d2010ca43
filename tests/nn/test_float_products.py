"""Linear layers that multiply values in training: by oneDNN where that is faster, and else as torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit import Learned, QuantSpec, Recipe
from lowbit.kernels import float_products
from lowbit.nn import linear

LEARNED = Recipe(QuantSpec(bits=4, scale_mode=Learned()), QuantSpec(bits=4, scale_mode=Learned(), symmetric=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Products of any size are oneDNN's, whatever the processor; the shapes of what came out of forwards."""
    seen: list[tuple[int, ...]] = []
    inner = linear.float_linear

    def watched(*args: Tensor) -> Tensor:
        y = inner(*args)
        seen.append(tuple(y.shape))
        return y

    monkeypatch.setattr(float_products, "_has_faster", lambda: True)
    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0})
    monkeypatch.setattr(linear, "float_linear", watched)
    return seen


def prepared(layer: nn.Module | None = None, recipe: Recipe = LEARNED) -> nn.Module:
    torch.manual_seed(0)
    return lowbit.prepare(nn.Linear(16, 8) if layer is None else layer, recipe, torch.randn(3, 16)).train()


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = model(leaf)
    parameters = list(model.parameters())
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *parameters])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)])
def test_training_is_torchs_within_rounding(
    shape: tuple[int, ...], bias: bool, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = prepared(nn.Linear(16, 8, bias=bias)), torch.randn(shape)
    model(x)  # scales start here
    twin = copy.deepcopy(model)
    calls.clear()
    found = results(model, x)
    assert calls == [(*shape[:-1], 8)]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    wanted = results(twin, x)
    assert len(calls) == 1
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def off(model: nn.Module) -> None:
    for name in ("input_quantizer", "weight_quantizer"):
        getattr(model, name).enabled = False


EXCEPTIONS: dict[str, Callable[[nn.Module], object]] = {
    "eval mode": lambda model: model.eval(),
    "float64": lambda model: model.double(),
    "no integer products": lambda model: setattr(model._context, "integer_products", False),
    "all quantizers off": off,
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_else_it_is_the_parents_forward(name: str, calls: list[tuple[int, ...]]) -> None:
    model, x = prepared(), torch.randn(6, 16)
    model(x)
    EXCEPTIONS[name](model)
    calls.clear()
    x = x.double() if name == "float64" else x
    values = model.input_quantizer(x), model.weight_quantizer(model.weight), model.bias
    assert_same_bits(model(x), nn.functional.linear(*values))
    assert not calls


@pytest.mark.parametrize("name", ["a forward of its own", "no gradient", "autocast", "small", "exported"])
def test_what_else_leaves_the_product_to_torch(
    name: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = prepared(Own(16, 8) if name == "a forward of its own" else None), torch.randn(6, 16)
    with torch.no_grad():
        model(x)
    assert not calls
    if name == "no gradient":
        return
    if name == "small":
        monkeypatch.setattr(linear, "_LEAST", {"cpu": 6 * 16 * 8 + 1})
    if name == "exported":
        torch.export.export(model, (x,))
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            model(x)
    assert not calls
    prepared()(x)
    assert bool(calls) == (name != "small")


def test_a_wrong_width_is_torchs_own_error(calls: list[tuple[int, ...]]) -> None:
    model = prepared(recipe=Recipe(weight=QuantSpec(bits=4)))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(6, 15))
    model(torch.randn(6, 16))
    assert calls == [(6, 8)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str, calls: list[tuple[int, ...]]) -> None:
    model, x = prepared(), torch.randn(6, 16)
    model(x)
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    model.compile(backend=backend, fullgraph=True)
    for got, wanted in zip(results(model, x), results(twin, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
