from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import inputs
import lowbit.functional as F
from compare import assert_same_bits
from lowbit.functional import straight_through

Op = Callable[[torch.Tensor], torch.Tensor]

PASS_THROUGH: dict[str, tuple[Op, Op]] = {
    "round": (F.round, torch.round),
    "ceil": (F.ceil, torch.ceil),
    "floor": (F.floor, torch.floor),
    "step_quantize": (
        lambda x: F.step_quantize(x, 0.3),
        lambda x: torch.round(x / x.new_tensor(0.3)) * x.new_tensor(0.3),
    ),
    "k_bit_quantize": (lambda x: F.k_bit_quantize(x, 3), lambda x: torch.round(x * 7) / x.new_tensor(7.0)),
}


@pytest.mark.parametrize("name", PASS_THROUGH)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_values_and_gradient(name: str, dtype: torch.dtype, device: torch.device) -> None:
    ours, formula = PASS_THROUGH[name]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for x in inputs.tensors(dtype, device).values():
        leaf = x.detach().requires_grad_()
        y = ours(leaf)
        assert_same_bits(y, formula(x.cpu().to(wide)).to(dtype).to(device))
        g = inputs.random(tuple(x.shape), seed=5).to(dtype).to(device)
        y.backward(g)
        assert_same_bits(leaf.grad, g)


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_clamp(dtype: torch.dtype, device: torch.device) -> None:
    low, high = -0.7, 1.1
    for x in inputs.tensors(dtype, device).values():
        leaf = x.detach().requires_grad_()
        y = F.clamp(leaf, low, high)
        wide = x.double() if dtype == torch.float64 else x.float()
        assert_same_bits(y, wide.clamp(low, high).to(dtype))
        g = torch.full_like(x, math.inf)
        y.backward(g)
        inside = (wide >= low) & (wide <= high)
        assert_same_bits(leaf.grad, torch.where(inside, g, 0))
        assert_same_bits(F.clamp_backward(g, x, low, high), leaf.grad)


def test_clamp_bounds_are_inclusive(device: torch.device) -> None:
    x = torch.tensor([-1.0, 1.0, -1.0001, 1.0001, math.nan], device=device)
    assert F.clamp_backward(torch.ones_like(x), x, -1.0, 1.0).tolist() == [1, 1, 0, 0, 0]


def test_forward_helpers_are_the_values_alone(device: torch.device) -> None:
    x = inputs.random((9,)).float().to(device).requires_grad_()
    for alone, op in (
        (F.step_quantize_forward(x, 0.3), F.step_quantize(x, 0.3)),
        (F.k_bit_quantize_forward(x, 3), F.k_bit_quantize(x, 3)),
    ):
        assert_same_bits(alone, op)
        assert op.requires_grad
        assert not alone.requires_grad


def test_the_functions_are_public(device: torch.device) -> None:
    x = inputs.random((9,)).float().to(device).requires_grad_()
    calls = {
        "round": (),
        "ceil": (),
        "floor": (),
        "clamp": (-1.0, 1.0),
        "step_quantize": (0.3,),
        "k_bit_quantize": (3,),
    }
    for name, args in calls.items():
        function = getattr(F, f"{name}_atgf")
        assert issubclass(function, torch.autograd.Function)
        assert_same_bits(function.apply(x, *args), getattr(straight_through, name)(x, *args))


def test_k_bit_does_not_clamp(device: torch.device) -> None:
    x = torch.tensor([-0.5, 1.7], device=device)
    assert F.k_bit_quantize(x, 1).tolist() == [0.0, 2.0]


def test_affine_k_bit_gives_ordinary_gradients(device: torch.device) -> None:
    x, w, b = (inputs.random((5,), seed=i).float().to(device).requires_grad_() for i in range(3))
    y = F.affine_k_bit_quantize(x, 2, w, b)
    y.sum().backward()
    q = F.k_bit_quantize_forward(x, 2)
    assert_same_bits(y, w * q + b)
    assert_same_bits(x.grad, w.detach())
    assert_same_bits(w.grad, q)
    assert_same_bits(b.grad, torch.ones_like(b))


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_clamp_by_linear(dtype: torch.dtype, device: torch.device) -> None:
    x = inputs.random((4, 5)).to(dtype).to(device).requires_grad_()
    y = F.clamp_by_linear(x)
    wide = x.detach().double() if dtype == torch.float64 else x.detach().float()
    assert_same_bits(y, ((wide - wide.min()) / (wide.max() - wide.min() + 1e-5)).to(dtype))
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert F.clamp_by_linear(torch.full((3,), 1e8, dtype=torch.float32, device=device)).tolist() == [0, 0, 0]
    assert F.clamp_by_linear(torch.empty(0, device=device)).shape == (0,)


def test_clamp_by_linear_gradient(device: torch.device) -> None:
    x = inputs.random((6,)).to(device).requires_grad_()
    assert torch.autograd.gradcheck(F.clamp_by_linear, (x,))
