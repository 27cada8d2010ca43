from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import inputs
import oracle
from compare import assert_codes, assert_gradient, assert_same_bits
from lowbit import Grid, PerChannel, PerTensor, PerToken, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward, quantize
from lowbit.granularity import Granularity

NAMES = tuple(inputs.tensors(torch.float32, torch.device("cpu")))


def backward(x: torch.Tensor, g: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    fake_quantize(leaf, *args, **options).backward(g)
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_values_are_the_oracles(dtype: torch.dtype, per: Granularity, affine: bool, device: torch.device) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        for grid in inputs.GRIDS:
            scale, zero_point = inputs.params(x, per, grid, affine=affine)
            y = fake_quantize(x, scale, zero_point, grid=grid, per=per)
            assert y.dtype == x.dtype, name
            assert y.shape == x.shape, name
            expected = oracle.quantize(x, scale, zero_point, grid, per)
            codes = quantize(x, scale, zero_point, grid=grid, per=per)
            assert_codes(codes, expected, inputs.eps(dtype))
            # From the codes on, the law is one exact difference and one product in the dtype of the arithmetic.
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            s, z = (oracle.each(param, tuple(x.shape), per).to(wide) for param in (scale, zero_point))
            assert_same_bits(y, ((codes.cpu() - z) * s).to(dtype))


@pytest.mark.parametrize("ste", SteKind)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_gradient_is_the_rules(
    dtype: torch.dtype, per: Granularity, affine: bool, ste: SteKind, device: torch.device
) -> None:
    for (name, x), grid in itertools.product(inputs.tensors(dtype, device).items(), (Grid(2), Grid(8, signed=False))):
        scale, zero_point = inputs.params(x, per, grid, affine=affine)
        g = inputs.random(tuple(x.shape), seed=2).to(dtype).to(device)
        dx = backward(x, g, scale, zero_point, grid=grid, per=per, ste=ste)
        assert dx.dtype == dtype, name
        assert_same_bits(dx, fake_quantize_backward(g, x, scale, zero_point, grid=grid, per=per, ste=ste))
        expected, margin = oracle.gradient(g, x, scale, zero_point, grid, per, ste)
        v = x.cpu().double() / oracle.each(scale, tuple(x.shape), per)
        masks = ste in (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE)
        # tanh within 4 ulp of 1, squared; then one rounding to the result's dtype.
        slack = g.cpu().double().abs() * (0.0 if masks else 16 * inputs.eps(dtype) + torch.finfo(dtype).eps)
        assert_gradient(dx, expected, margin, v, inputs.eps(dtype), slack)


@pytest.mark.parametrize("ste", SteKind)
def test_bounds_are_inclusive_and_masks_select(ste: SteKind, device: torch.device) -> None:
    # s = 0.5, 4 bits, z = 0: lo = -4, hi = 3.5; half a step beyond, a tie rounds to the even code.
    x = torch.tensor([-4.0, 3.5, -4.25, 3.75, -4.01, 3.51, math.nan, math.inf, -math.inf], device=device)
    g = torch.full_like(x, math.inf)
    dx = fake_quantize_backward(g, x, torch.tensor(0.5, device=device), grid=Grid(4), ste=ste)
    passes = {
        SteKind.IDENTITY: [1, 1, 1, 1, 1, 1, 1, 1, 1],
        SteKind.CLIPPED_IDENTITY: [1, 1, 0, 0, 0, 0, 0, 0, 0],
        # -4.25 / 0.5 = -8.5 rounds to -8, inside; 3.75 / 0.5 = 7.5 rounds to 8, outside
        SteKind.IN_RANGE: [1, 1, 1, 0, 1, 1, 0, 0, 0],
        SteKind.HARD_TANH: [0, 0, 0, 0, 0, 0, 0, 0, 0],
    }
    if ste is SteKind.TANH:
        assert dx[6:].tolist() == [0, 0, 0]
    else:
        assert [value == math.inf for value in dx.tolist()] == [bool(p) for p in passes[ste]]
        assert not dx.isnan().any()


def test_hard_tanh_uses_the_bound_of_its_side(device: torch.device) -> None:
    # z = 2 on [0, 15], s = 1: lo = -2, hi = 13
    x = torch.tensor([-1.0, 6.5, -2.0, 13.0, 0.0], device=device)
    scale, zero_point = torch.tensor(1.0, device=device), torch.tensor(2, device=device)
    dx = fake_quantize_backward(
        torch.ones_like(x), x, scale, zero_point, grid=Grid(4, signed=False), ste=SteKind.HARD_TANH
    )
    assert dx.tolist() == [0.5, 0.5, 0.0, 0.0, 1.0]


def test_ties_round_to_even_and_the_zero_point_comes_after(device: torch.device) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5], device=device)
    scale, one = torch.tensor(1.0, device=device), torch.tensor(1, device=device)
    assert fake_quantize(x, scale).tolist() == [0, 2, 2, 0, -2]
    assert quantize(x, scale, one, dtype=torch.int8).tolist() == [1, 3, 3, 1, -1]


def test_it_divides(device: torch.device) -> None:
    # Ties of 0.3: a product with the reciprocal lands on the other side for some of them.
    scale = torch.tensor(0.3, device=device)
    k = torch.arange(-100_000, 100_000, dtype=torch.float32, device=device)
    x = (k + 0.5) * scale
    grid = Grid(16)
    codes = quantize(x, scale, grid=grid)
    by_division = torch.from_numpy(x.cpu().numpy() / scale.cpu().numpy()).round().clamp(grid.quant_min, grid.quant_max)
    by_reciprocal = (x.cpu() * (1 / scale.cpu())).round().clamp(grid.quant_min, grid.quant_max)
    assert not torch.equal(by_division, by_reciprocal)
    assert_same_bits(codes, by_division + 0.0)


def test_nan_stays_and_infinities_saturate(device: torch.device) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf], device=device)
    y = fake_quantize(x, torch.tensor(0.5, device=device), grid=Grid(4))
    assert y[0].isnan()
    assert y[1:].tolist() == [3.5, -4.0]


def test_a_small_negative_gives_plus_zero(device: torch.device) -> None:
    y = fake_quantize(torch.tensor([-0.1, -0.0], device=device), torch.tensor(1.0, device=device))
    assert torch.signbit(y).tolist() == [False, False]


def test_zero_dimensional_and_numbers(device: torch.device) -> None:
    x = torch.tensor(0.26, device=device, requires_grad=True)
    y = fake_quantize(x, 0.5, 0)
    assert y.shape == ()
    assert y.item() == 0.5
    for dtype in inputs.FLOATS:
        assert fake_quantize(x.detach().to(dtype), torch.tensor(0.5, device=device)).dtype == dtype
    y.backward()
    assert x.grad == 1


@pytest.mark.parametrize("per", [PerChannel(0), PerChannel(1), PerChannel(2), PerChannel(3)], ids=str)
def test_per_channel_is_a_loop_of_per_tensor(per: PerChannel, device: torch.device) -> None:
    for x in (inputs.tensors(torch.float32, device)["channels_last"], inputs.random((2, 4, 3, 8)).float().to(device)):
        scale, zero_point = inputs.params(x, per, Grid(4), affine=True)
        for ste in SteKind:
            y = fake_quantize(x, scale, zero_point, grid=Grid(4), per=per)
            dx = fake_quantize_backward(torch.ones_like(x), x, scale, zero_point, grid=Grid(4), per=per, ste=ste)
            for c in range(x.shape[per.axis]):
                part = x.select(per.axis, c)
                args = (scale[c], zero_point[c])
                assert_same_bits(y.select(per.axis, c), fake_quantize(part, *args, grid=Grid(4)))
                alone = fake_quantize_backward(torch.ones_like(part), part, *args, grid=Grid(4), ste=ste)
                if ste is not SteKind.TANH:
                    assert_same_bits(dx.select(per.axis, c), alone)


def test_memory_format_is_kept(device: torch.device) -> None:
    x = inputs.tensors(torch.float32, device)["channels_last"]
    for per in (PerTensor(), PerChannel(1), PerToken()):
        scale, _ = inputs.params(x, per, Grid(8), affine=False)
        assert fake_quantize(x, scale, per=per).is_contiguous(memory_format=torch.channels_last)


def test_what_is_saved_for_the_backward(device: torch.device) -> None:
    saved: list[torch.Tensor] = []
    x = inputs.random((64, 64)).float().to(device).requires_grad_()
    scale = torch.tensor(0.1, device=device)
    for ste in SteKind:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            fake_quantize(x, scale, ste=ste)
        large = [t for t in saved if t.numel() > 1]
        if ste is SteKind.IDENTITY:
            assert not large
        else:
            assert [t.data_ptr() for t in large] == [x.data_ptr()]


def test_tanh_is_within_4_ulp(device: torch.device) -> None:
    """Of the formula at the float32 quotient, in float64, where 1 - tanh^2 is still a normal number."""
    x = torch.linspace(-40, 40, 20_001, device=device)
    for scale in (1.0, 0.3):
        dx = fake_quantize_backward(torch.ones_like(x), x, torch.tensor(scale, device=device), ste=SteKind.TANH).cpu()
        v = torch.from_numpy(x.cpu().numpy() / torch.tensor(scale).numpy()).double()
        exact = 1 / torch.cosh(v).square()
        ulp = torch.from_numpy(np.spacing(exact.float().numpy())).double()
        normal = exact > 1e-30
        assert ((dx.double() - exact).abs() <= 4 * ulp)[normal].all()


def test_zero_points_of_any_integer_dtype(device: torch.device) -> None:
    x = inputs.random((8,)).float().to(device)
    scale = torch.tensor(0.3, device=device)
    expected = fake_quantize(x, scale, 3)
    wide_unsigned = () if device.type == "cuda" else (torch.uint16, torch.uint32, torch.uint64)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *wide_unsigned):
        assert_same_bits(fake_quantize(x, scale, torch.tensor(3, dtype=dtype, device=device)), expected)


def test_half_scales_are_read_in_float32(device: torch.device) -> None:
    x = inputs.random((8,)).to(torch.bfloat16).to(device)
    scale = torch.tensor(0.3, dtype=torch.bfloat16, device=device)
    assert_same_bits(fake_quantize(x, scale), fake_quantize(x, scale.float()))
