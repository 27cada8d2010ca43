from __future__ import annotations

import math

import pytest
import torch

import inputs
import oracle
from compare import assert_codes, assert_same_bits
from lowbit import Grid, PerTensor, SteKind
from lowbit.functional import (
    dequantize,
    dequantize_backward,
    fake_quantize,
    fake_quantize_backward,
    quantize,
    quantize_backward,
)
from lowbit.granularity import Granularity

CODES = {
    torch.int8: (Grid(8), Grid(4), Grid(2, narrow=True)),
    torch.uint8: (Grid(8, signed=False), Grid(1, signed=False)),
    torch.int16: (Grid(16), Grid(8), Grid(8, signed=False)),
    torch.int32: (Grid(16), Grid(16, signed=False)),
}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
@pytest.mark.parametrize("code_dtype", CODES, ids=str)
def test_integer_codes(
    code_dtype: torch.dtype, dtype: torch.dtype, per: Granularity, affine: bool, device: torch.device
) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        for grid in CODES[code_dtype]:
            scale, zero_point = inputs.params(x, per, grid, affine=affine)
            q = quantize(x, scale, zero_point, grid=grid, per=per, dtype=code_dtype)
            assert q.dtype == code_dtype, name
            expected = oracle.quantize(x, scale, zero_point, grid, per)
            z = oracle.each(zero_point, tuple(x.shape), per)
            nan_is_zero_point = expected._replace(codes=torch.where(expected.codes.isnan(), z, expected.codes))
            assert_codes(q, nan_is_zero_point, inputs.eps(dtype))
            # dequantize of the codes is fake_quantize to the bit, except where x is NaN
            y = dequantize(q, scale, zero_point, per=per, dtype=dtype)
            fake = fake_quantize(x, scale, zero_point, grid=grid, per=per)
            finite = ~x.isnan()
            assert_same_bits(y[finite], fake[finite])
            assert not y.isnan().any()


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_composition_law(dtype: torch.dtype, per: Granularity, affine: bool, device: torch.device) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        grid = Grid(3)
        scale, zero_point = inputs.params(x, per, grid, affine=affine)
        g = inputs.random(tuple(x.shape), seed=3).to(dtype).to(device)
        leaf = x.detach().requires_grad_()
        y = dequantize(quantize(leaf, scale, zero_point, grid=grid, per=per), scale, zero_point, per=per, dtype=dtype)
        y.backward(g)
        assert_same_bits(y, fake_quantize(x, scale, zero_point, grid=grid, per=per))
        wanted = fake_quantize_backward(g, x, scale, zero_point, grid=grid, per=per, ste=SteKind.IN_RANGE)
        assert torch.equal(leaf.grad == 0, wanted == 0), name
        two_roundings = 2 * torch.finfo(dtype).eps
        assert ((leaf.grad - wanted).abs() <= two_roundings * wanted.abs()).all(), name


@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_backwards_are_their_formulas(dtype: torch.dtype, per: Granularity, device: torch.device) -> None:
    for x in inputs.tensors(dtype, device).values():
        grid = Grid(3)
        scale, zero_point = inputs.params(x, per, grid, affine=True)
        g = inputs.random(tuple(x.shape), seed=3).to(dtype).to(device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        s = oracle.each(scale, tuple(x.shape), per).to(wide)
        inside = quantize_backward(torch.ones_like(x), x, scale, zero_point, grid=grid, per=per) != 0
        dx = quantize_backward(g, x, scale, zero_point, grid=grid, per=per)
        assert_same_bits(dx, torch.where(inside.cpu(), (g.cpu().to(wide) / s).to(dtype), 0))
        expected = oracle.quantize(x, scale, zero_point, grid, per)
        in_grid = (expected.unclamped >= grid.quant_min) & (expected.unclamped <= grid.quant_max)
        sure = ~(expected.margin <= inputs.eps(dtype) * (expected.unclamped.abs() + 1))
        assert torch.equal(inside.cpu()[sure], in_grid[sure])
        assert_same_bits(dequantize_backward(g, scale, per=per), (g.cpu().to(wide) * s).to(dtype))


def test_autograd_uses_the_public_backwards(device: torch.device) -> None:
    x = inputs.tensors(torch.float32, device)["hard"].requires_grad_()
    scale, g = torch.tensor(0.5, device=device), torch.full((6, 8), math.inf, device=device)
    q = quantize(x, scale, grid=Grid(3))
    q.backward(g)
    assert_same_bits(x.grad, quantize_backward(g, x.detach(), scale, grid=Grid(3)))
    assert not x.grad.isnan().any()
    codes = q.detach().requires_grad_()
    dequantize(codes, scale).backward(torch.ones_like(codes))
    assert_same_bits(codes.grad, torch.full_like(codes, 0.5))


def test_float_codes_of_half_inputs_are_float32(device: torch.device) -> None:
    grid = Grid(16)
    x = torch.tensor([300.0], dtype=torch.bfloat16, device=device, requires_grad=True)
    q = quantize(x, torch.tensor(1.0, device=device), torch.tensor(1, device=device), grid=grid)
    assert q.dtype == torch.float32
    assert q.item() == 301.0  # bfloat16 holds integers only to 256
    q.backward(torch.ones_like(q))
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_integer_codes_carry_no_gradient(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    assert not quantize(x, torch.tensor(0.5, device=device), dtype=torch.int8).requires_grad


@pytest.mark.parametrize("q_dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32])
def test_dequantize_of_every_code_dtype(q_dtype: torch.dtype, device: torch.device) -> None:
    q = torch.tensor([0, 1, 100], dtype=q_dtype, device=device)
    scale, zero_point = torch.tensor(0.1, device=device), torch.tensor(3, device=device)
    expected = (torch.tensor([-3.0, -2.0, 97.0]) * torch.tensor(0.1)).to(device)
    assert_same_bits(dequantize(q, scale, zero_point), expected)
    for dtype in inputs.FLOATS:
        y = dequantize(q, scale, zero_point, dtype=dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        exact = (torch.tensor([-3.0, -2.0, 97.0], dtype=wide) * scale.cpu().to(wide)).to(dtype)
        assert_same_bits(y, exact.to(device))


def test_nan_becomes_the_zero_point(device: torch.device) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf], device=device)
    q = quantize(x, 0.5, 5, grid=Grid(8, signed=False), per=PerTensor(), dtype=torch.uint8)
    assert q.tolist() == [5, 255, 0]
    assert quantize(x, 0.5, 5)[0].isnan()
