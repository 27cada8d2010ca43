"""Linear layers that multiply values in training: by oneDNN where that is faster, and else as torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

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
    layer = nn.Linear(16, 8) if layer is None else layer
    return lowbit.prepare(layer, recipe, torch.randn(3, layer.in_features)).train()


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
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * 2


def off(model: nn.Module) -> None:
    for name in ("input_quantizer", "weight_quantizer"):
        getattr(model, name).enabled = False


class Other(Tensor):
    """A tensor that is no plain one."""


def own_a_subclass(model: nn.Module) -> None:
    model.weight_quantizer.enabled = False
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Other))


EXCEPTIONS: dict[str, Callable[[nn.Module], object]] = {
    "eval mode": lambda model: model.eval(),
    "float64": lambda model: model.double(),
    "no integer products": lambda model: setattr(model._context, "integer_products", False),
    "all quantizers off": off,
    "a weight that is no plain tensor": own_a_subclass,
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


@pytest.mark.parametrize("name", ["a forward of its own", "watched", "autocast", "small", "exported"])
def test_what_else_leaves_the_product_to_torch(
    name: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = prepared(Own(16, 8) if name == "a forward of its own" else None), torch.randn(6, 16)
    with torch.no_grad():
        model(x)
    assert bool(calls) == (name != "a forward of its own")
    calls.clear()
    if name == "small":
        monkeypatch.setattr(linear, "_LEAST", {"cpu": 6 * 16 * 8 + 1})
    if name == "exported":
        torch.export.export(model, (x,))
    elif name == "watched":
        with FlopCounterMode(display=False) as counter:
            model(x)
        assert counter.get_total_flops() == 2 * 6 * 16 * 8
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            model(x)
    assert not calls
    prepared()(x)
    assert bool(calls) == (name != "small")


@pytest.mark.parametrize("layer", [nn.Linear(16, 8), Own(16, 8)], ids=["torch", "own"])
def test_an_input_by_name(layer: nn.Module, calls: list[tuple[int, ...]]) -> None:
    model, x = prepared(layer), torch.randn(6, 16)
    model(x)
    name = "hidden" if isinstance(layer, Own) else "input"
    for mode in (True, False):
        model.train(mode)
        assert_same_bits(model(**{name: x}), model(x))
    assert bool(calls) == (name == "input")


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_computes_the_same_bits(reentrant: bool, calls: list[tuple[int, ...]]) -> None:
    model, x = prepared(), torch.randn(6, 16)
    model(x)
    calls.clear()
    found = []
    for run in (model, lambda leaf: checkpoint(model, leaf, use_reentrant=reentrant)):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        found.append((y.detach(), leaf.grad))
    for got, wanted in zip(*found, strict=True):
        assert_same_bits(got, wanted)
    assert len(calls) == 2 + reentrant  # the other kind stops after its last saved tensor


def test_rows_of_the_input_may_overlap(calls: list[tuple[int, ...]]) -> None:
    model = prepared(recipe=Recipe(weight=QuantSpec(bits=4)))
    frames = torch.randn(16 + 6 * 59).unfold(0, 16, 6)
    (dw,) = torch.autograd.grad(model(frames).square().sum(), model.weight)
    (wanted,) = torch.autograd.grad(model(frames.contiguous()).square().sum(), model.weight)
    torch.testing.assert_close(dw, wanted)
    assert len(calls) == 2


@pytest.mark.parametrize("recipe", [LEARNED, lowbit.recipes.w4a8()], ids=["learned", "w4a8"])
def test_a_bias_that_lies_otherwise(recipe: Recipe, calls: list[tuple[int, ...]]) -> None:
    model, x = prepared(nn.Linear(64, 8), recipe), torch.randn(6, 64)
    model.bias = nn.Parameter(torch.randn(16)[::2])
    model(x)
    torch.testing.assert_close(model(x), model.eval()(x), rtol=1e-5, atol=1e-5)


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
