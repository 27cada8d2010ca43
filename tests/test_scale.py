from __future__ import annotations

import json

import pytest
import torch

import inputs
import oracle
from compare import assert_same_bits
from lowbit import EMA, Fixed, Grid, Learned, PerBatch, PerChannel, PerTensor, ScaleMode
from lowbit.functional.statistics import abs_max, mean_abs, mean_std, min_max, params_from_data
from lowbit.granularity import Granularity
from lowbit.scale import affine_params, symmetric_scale

MODES = (
    PerBatch(),
    PerBatch("mean_abs"),
    EMA(),
    EMA(0.0),
    EMA(decay=0.5),
    Fixed(),
    Learned(),
    Learned("lsq+", grad_scale=False),
    Learned("pact", batch_axis=0),
)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_json_round_trip(mode: ScaleMode) -> None:
    assert ScaleMode.from_dict(json.loads(json.dumps(mode.to_dict()))) == mode


@pytest.mark.parametrize("grid", [Grid(2), Grid(4, narrow=True), Grid(8), Grid(8, signed=False)], ids=str)
@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_scale_from_data(dtype: torch.dtype, per: Granularity, grid: Grid, device: torch.device) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, x in inputs.tensors(dtype, device).items():
        for statistic in ("abs_max", "mean_abs"):
            scale, zero_point = params_from_data(x, grid=grid, per=per, symmetric=True, statistic=statistic)
            assert zero_point is None
            assert scale.dtype == wide, name
            expected = oracle.symmetric_scale(x, grid, per, statistic)
            tolerance = torch.finfo(wide).eps * (1 if statistic == "abs_max" else max(x.numel(), 1))
            assert ((scale.cpu().double() - expected).abs() <= tolerance * expected).all(), name
        scale, zero_point = params_from_data(x, grid=grid, per=per, symmetric=False)
        expected, expected_zero, margin = oracle.affine_params(x, grid, per)
        assert zero_point.dtype == torch.int32
        assert ((scale.cpu().double() - expected).abs() <= 2 * torch.finfo(wide).eps * expected).all(), name
        off = (zero_point.cpu() - expected_zero).abs()
        assert (off <= 1).all(), name
        assert (off == 0)[margin > 4 * torch.finfo(wide).eps * (grid.quant_max + 1)].all(), name


def test_the_divisor_is_divided_by(device: torch.device) -> None:
    magnitude = torch.rand(100_000, generator=torch.Generator().manual_seed(0)).to(device)
    exact = torch.from_numpy(magnitude.cpu().numpy() / torch.tensor(127.0).numpy())
    assert_same_bits(symmetric_scale(magnitude, Grid(8)), exact)


def test_zero_is_always_represented_exactly(device: torch.device) -> None:
    lo = torch.tensor([0.5, -3.0, -3.0, 0.0, 1e-30], device=device)
    hi = torch.tensor([3.0, -0.5, 1.7, 0.0, 1e-30], device=device)
    for grid in (Grid(8), Grid(4, signed=False)):
        scale, zero_point = affine_params(lo, hi, grid)
        assert (zero_point >= grid.quant_min).all()
        assert (zero_point <= grid.quant_max).all()
        assert (scale >= torch.tensor(1e-12)).all()
        reach = (grid.quant_max - zero_point) * scale
        assert reach[0].item() == pytest.approx(3.0, rel=1e-6)  # widened to hold 0


def test_a_range_wider_than_float32_has_a_finite_scale(device: torch.device) -> None:
    scale, _ = affine_params(torch.tensor(-3e38, device=device), torch.tensor(3e38, device=device), Grid(8))
    assert scale.isfinite()
    assert scale.item() == pytest.approx(6e38 / 255, rel=1e-6)


def test_statistics_skip_non_finite_values(device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -3.0, inf], [nan, inf, -inf], [0.0, 0.0, 0.0], [5.0, nan, 4.0]], device=device)
    per = PerChannel(0)
    assert abs_max(x, per).tolist() == [3, 0, 0, 5]
    assert [end.tolist() for end in min_max(x, per)] == [[-3, 0, 0, 4], [1, 0, 0, 5]]
    assert mean_abs(x, per).tolist() == [2, 0, 0, 4.5]
    mean, std = mean_std(x, per)
    assert mean.tolist() == [-1, 0, 0, 4.5]
    assert std.tolist() == [2, 0, 0, 0.5]


def test_one_element_per_scale(device: torch.device) -> None:
    """A channel axis that is the only axis: nothing is left to reduce."""
    x = torch.tensor([1.0, -2.0, 3.0], device=device)
    assert abs_max(x, PerChannel(0)).tolist() == [1, 2, 3]
    assert min_max(x, PerChannel(0))[0].tolist() == [1, -2, 3]
    assert mean_abs(x, PerChannel(0)).tolist() == [1, 2, 3]
    assert abs_max(torch.tensor(-2.0, device=device), PerTensor()).item() == 2
