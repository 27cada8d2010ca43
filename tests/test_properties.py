"""Laws that hold for every input."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional import dequantize, fake_quantize, fake_quantize_backward, quantize
from lowbit.functional.statistics import params_from_data

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
anything = st.floats(width=32)
scales = st.floats(width=32, min_value=2**-20, max_value=2**20)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    signed = draw(st.booleans())
    return Grid(draw(st.integers(2 if signed else 1, 16)), signed, signed and draw(st.booleans()))


@st.composite
def calls(draw: st.DrawFn, values: st.SearchStrategy[float] = anything) -> tuple[torch.Tensor, torch.Tensor, int, Grid]:
    grid = draw(grids())
    x = draw(hnp.arrays("float32", hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6), elements=values))
    zero_point = draw(st.integers(grid.quant_min, grid.quant_max))
    return torch.from_numpy(x), torch.tensor(draw(scales)), zero_point, grid


@given(calls())
def test_idempotent(call: tuple[torch.Tensor, torch.Tensor, int, Grid]) -> None:
    x, scale, zero_point, grid = call
    y = fake_quantize(x, scale, zero_point, grid=grid)
    assert_same_bits(fake_quantize(y, scale, zero_point, grid=grid), y)


@given(calls())
def test_results_lie_on_the_grid(call: tuple[torch.Tensor, torch.Tensor, int, Grid]) -> None:
    x, scale, zero_point, grid = call
    codes = quantize(x, scale, zero_point, grid=grid)
    kept = codes[~x.isnan()]
    assert torch.equal(kept, kept.round())
    assert ((kept >= grid.quant_min) & (kept <= grid.quant_max)).all()
    assert_same_bits(dequantize(codes, scale, zero_point), fake_quantize(x, scale, zero_point, grid=grid))


@given(calls(finite))
def test_monotone(call: tuple[torch.Tensor, torch.Tensor, int, Grid]) -> None:
    x, scale, zero_point, grid = call
    y = fake_quantize(x.flatten().sort().values, scale, zero_point, grid=grid)
    assert (y.diff() >= 0).all()


@given(calls(finite))
def test_within_half_a_step_inside_the_range(call: tuple[torch.Tensor, torch.Tensor, int, Grid]) -> None:
    x, scale, zero_point, grid = call
    y = fake_quantize(x, scale, zero_point, grid=grid).double()
    lo, hi = (end * scale.double() for end in (grid.quant_min - zero_point, grid.quant_max - zero_point))
    inside = (x.double() >= lo) & (x.double() <= hi)
    slack = 2.0**-22 * (y.abs() + scale.double())
    assert ((y - x.double()).abs() <= scale.double() / 2 + slack)[inside].all()


@given(calls(finite))
def test_the_gradient_rules_agree_well_inside_and_well_outside(
    call: tuple[torch.Tensor, torch.Tensor, int, Grid],
) -> None:
    x, scale, zero_point, grid = call
    g = torch.ones_like(x)
    masks = [
        fake_quantize_backward(g, x, scale, zero_point, grid=grid, ste=ste)
        for ste in (SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE)
    ]
    v = x.double() / scale.double() + zero_point
    inside = (v > grid.quant_min + 0.01) & (v < grid.quant_max - 0.01)
    outside = (v < grid.quant_min - 0.51) | (v > grid.quant_max + 0.51)
    for mask in masks:
        assert (mask[inside] == 1).all()
        assert (mask[outside] == 0).all()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), grids(), st.integers(0, 2**31))
def test_every_granularity_is_a_loop_of_per_tensor(rows: int, groups: int, size: int, grid: Grid, seed: int) -> None:
    x = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(seed))
    symmetric = seed % 2 == 0
    for per in (PerChannel(0), PerToken(), PerGroup(size)):
        scale, zero_point = params_from_data(x, grid=grid, per=per, symmetric=symmetric)
        y = fake_quantize(x, scale, zero_point, grid=grid, per=per)
        parts = x.reshape(scale.numel(), -1)
        for i, part in enumerate(parts):
            s, z = params_from_data(part, grid=grid, per=PerTensor(), symmetric=symmetric)
            assert_same_bits(scale.reshape(-1)[i], s)
            assert_same_bits(y.reshape(parts.shape)[i], fake_quantize(part, s, z, grid=grid))


@given(hnp.arrays("float32", st.integers(0, 20), elements=anything), st.booleans(), grids())
def test_a_scale_from_data_is_positive_finite_and_keeps_zero(values: object, symmetric: bool, grid: Grid) -> None:
    x = torch.from_numpy(values)
    scale, zero_point = params_from_data(x, grid=grid, per=PerTensor(), symmetric=symmetric)
    assert 0 < scale.item() < math.inf
    zero = fake_quantize(torch.zeros(()), scale, zero_point, grid=grid)
    assert_same_bits(zero, torch.zeros(()))
