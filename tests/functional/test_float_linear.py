"""Linear layers whose backward is two products of floats, by torch's library or by oneDNN: gradients in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inputs
from functional.test_linear import QUANTIZERS, WEIGHTS
from inputs import leaf as data
from lowbit import Grid, PerGroup
from lowbit.bench.runner import count_saved
from lowbit.functional.float_linear import float_linear
from lowbit.functional.linear import code_per_batch, integer_linear
from lowbit.kernels import float_products

SHAPES = [((6, 16), 8), ((2, 3, 5), 7), ((1, 8), 4), ((40, 24), 1), ((9,), 3), ((0, 8), 4), ((3, 1), 2)]


@pytest.fixture(params=[False, True], ids=["torch", "oneDNN"], autouse=True)
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(float_products, "_has_faster", lambda: request.param)
    return request.param


def operands(shape: tuple[int, ...], outputs: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = data(shape, dtype), data((outputs, shape[-1]), dtype, seed=1), data((outputs,), dtype, seed=2)
    return [tensor.detach().requires_grad_() for tensor in made]


def assert_gradients(y: Tensor, leaves: list[Tensor], x: Tensor, w: Tensor) -> None:
    """dx = g @ w, dw = g^T @ x, db = sum g, at these values"""
    g = inputs.random(tuple(y.shape), seed=3).to(y.dtype)
    found = torch.autograd.grad(y, leaves, g)
    rows, wide = g.double().reshape(-1, y.shape[-1]), x.double().reshape(-1, x.shape[-1])
    sums = [g.double() @ w.double(), rows.t() @ wide, rows.sum(0)]
    sizes = [g.double().abs() @ w.double().abs(), rows.abs().t() @ wide.abs(), rows.abs().sum(0)]
    eps = torch.finfo(y.dtype).eps
    for got, wanted, size, terms in zip(found, sums, sizes, (w.shape[0], len(rows), len(rows)), strict=False):
        assert bool(((got.double() - wanted).abs() <= (terms + 2) * eps * size).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], outputs: int, dtype: torch.dtype) -> None:
    leaves = operands(shape, outputs, dtype)
    y = float_linear(*leaves)
    x, w, bias = (leaf.detach() for leaf in leaves)
    wanted, most = (F.linear(*(f(part.double()) for part in (x, w, bias))) for f in (lambda part: part, torch.abs))
    assert bool(((y.double() - wanted).abs() <= (shape[-1] + 1) * torch.finfo(dtype).eps * most).all())
    assert_gradients(y, leaves, x, w)


@pytest.mark.parametrize("shape", [(30, 24), (5, 6, 24)], ids=str)
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if name not in ("clipped", "in range", "2 bits")])
def test_gradients_of_a_product_of_codes(
    name: str, shape: tuple[int, ...], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scale, or scales and zero points of rows, which are those of columns for dw."""
    leaves = operands(shape, 8)
    leaves[0].data.abs_()
    x, w = QUANTIZERS[name](leaves[0]), WEIGHTS["channels"](leaves[1])
    calls = []
    inner = float_products._onednn
    monkeypatch.setattr(float_products, "_onednn", lambda *args: calls.append(args[0].shape) or inner(*args))
    y = integer_linear(x, w, leaves[2])
    with torch.no_grad():
        values = x.values(), w.values()
    dx, dw = torch.autograd.grad(y.square().sum(), leaves[:2], retain_graph=True)
    assert calls == ([(30, 8), (24, 30)] if faster else [])  # dx = g @ w; dw^T = x^T @ g
    assert dw.is_contiguous()
    assert dx.shape == shape
    assert_gradients(y, [x.carrier, *leaves[1:]], *values)


def test_values_of_groups_are_multiplied_so(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = operands((6, 64), 8)
    w = code_per_batch(leaves[1], grid=Grid(4, narrow=True), per=PerGroup(16), symmetric=True)
    calls = []
    inner = float_products._onednn
    monkeypatch.setattr(float_products, "_onednn", lambda *args: calls.append(args[0].shape) or inner(*args))
    with torch.autocast("cpu", torch.bfloat16):
        y = integer_linear(QUANTIZERS["token"](leaves[0]), w, leaves[2], dtype=torch.float32)
    assert y.dtype == torch.float32
    assert calls == ([(6, 64)] if faster else [])


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [1, 2], [0, 1]], ids=str)
def test_what_no_gradient_needs_is_not_kept(wanted: list[int]) -> None:
    leaves = [leaf.requires_grad_(i in wanted) for i, leaf in enumerate(operands((6, 16), 8))]
    asked = [leaves[i] for i in wanted]
    kept, gradients = [], []
    for function in (float_linear, F.linear):
        kept.append(count_saved(lambda function=function: function(*leaves))[1])
        gradients.append(torch.autograd.grad(function(*leaves).sum(), asked))
    assert kept[0] == kept[1]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_a_bias_is_not_needed_nor_every_gradient() -> None:
    x, w, _ = operands((6, 16), 8)
    for wanted in ([x], [w], [x, w]):
        y = float_linear(x, w)
        pairs = zip(
            torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(F.linear(x, w).sum(), wanted), strict=True
        )
        for got, want in pairs:
            torch.testing.assert_close(got, want)
    assert not float_linear(x.detach(), w.detach()).requires_grad


def test_a_second_derivative() -> None:
    leaves = operands((6, 8), 4)

    def penalty(function: object) -> list[Tensor]:
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(part.square().sum() for part in first), leaves))

    for got, wanted in zip(penalty(float_linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


def test_it_keeps_what_torch_keeps_and_can_be_changed_in_place() -> None:
    leaves = operands((6, 16), 8)
    assert count_saved(lambda: float_linear(*leaves))[1] == count_saved(lambda: F.linear(*leaves))[1]
    y = float_linear(*leaves)
    assert torch.equal(torch.relu_(y), torch.relu(float_linear(*leaves)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_gives_the_same_bits(backend: str) -> None:
    leaves = operands((6, 16), 8)
    torch._dynamo.reset()
    compiled = torch.compile(float_linear, backend=backend, fullgraph=True)
    results = []
    for function in (compiled, float_linear):
        y = function(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)
    torch._dynamo.reset()
