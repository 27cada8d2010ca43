from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

import inputs
from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerGroup, PerTensor
from lowbit.functional import fake_quantize
from lowbit.granularity import Granularity
from lowbit.observers import Histogram, MinMax, MovingAverage, Observer, _divergence

PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerGroup(4), *inputs.PERS[-1:])
MAKERS = {
    "MinMax": MinMax,
    "MovingAverage": MovingAverage,
    "percentile": lambda per=PerTensor(): Histogram(per, method="percentile"),
    "mse": lambda per=PerTensor(): Histogram(per, method="mse", bins=512, candidates=20),
    "entropy": lambda per=PerTensor(): Histogram(per, method="entropy", bins=512, candidates=20),
}


def batches(device: torch.device, count: int = 4) -> list[torch.Tensor]:
    return [(inputs.random((6, 8), seed=i) * (i + 1)).float().to(device) for i in range(count)]


@pytest.mark.parametrize("per", PERS, ids=str)
def test_min_max(per: Granularity, device: torch.device) -> None:
    observer = MinMax(per).to(device)
    for x in batches(device):
        observer.observe(x)
    every = torch.stack(batches(device))
    split = torch.stack([per.split(x) for x in every])
    assert_same_bits(observer.low, torch.stack([per.reduce(torch.amin, s) for s in split]).amin(0))
    assert_same_bits(observer.high, torch.stack([per.reduce(torch.amax, s) for s in split]).amax(0))
    assert observer.count.sum() == every.numel()


def test_moving_average_by_hand(device: torch.device) -> None:
    observer = MovingAverage(PerChannel(0), decay=0.75).to(device)
    nan = float("nan")
    observer.observe(torch.tensor([[-4.0, 8.0], [nan, nan]], device=device))
    assert observer.low.tolist() == [-4, 0]
    observer.observe(torch.tensor([[-8.0, 4.0], [2.0, 3.0]], device=device))  # row 1 has its first data here
    assert observer.low.tolist() == [-5, 2]
    assert observer.high.tolist() == [7, 3]
    observer.observe(torch.tensor([[nan, nan], [6.0, 7.0]], device=device))
    assert observer.low.tolist() == [-5, 3]
    assert observer.high.tolist() == [7, 4]
    assert observer.nonfinite == 4


@pytest.mark.parametrize("per", PERS, ids=str)
def test_a_histogram_loses_no_counts_and_is_that_of_all_data(per: Granularity, device: torch.device) -> None:
    """Re-binning by powers of two is exact: the same as binning all the data at the last limit at once."""
    observer = Histogram(per, bins=64).to(device)
    scales = (1e-3, 1.0, 0.1, 37.0, 1e6)
    data = [inputs.random((6, 8), seed=i).float().to(device) * s for i, s in enumerate(scales)]
    for x in data:
        observer.observe(x)
    assert observer.counts.sum() == sum(x.numel() for x in data)
    assert torch.equal(observer.counts.sum(-1), observer.count)
    half = observer.bins // 2
    at_once = torch.zeros_like(observer.counts)
    for x in data:
        split = per.split(x).double()
        bin_ = (split / per.spread(observer.limit, split) * half).floor().clamp(-half, half - 1).long() + half
        for b in range(observer.bins):
            at_once[..., b] += per.reduce(torch.sum, (bin_ == b).long())
    assert torch.equal(observer.counts, at_once)


def test_a_histogram_grows_by_any_factor(device: torch.device) -> None:
    observer = Histogram(bins=16).to(device)
    for value in (0.0, 1e-30, -1e-30, 1e30, -3e38, 0.0):
        observer.observe(torch.tensor([value, value], device=device))
    assert observer.counts.sum() == 12
    assert observer.counts[:8].sum() == 4  # the two negative values, twice each
    assert observer.limit >= 3e38


def test_percentile(device: torch.device) -> None:
    observer = Histogram(method="percentile", percentile=99.0).to(device)
    x = torch.linspace(-1, 1, 10_001, device=device)
    observer.observe(x)
    observer.observe(torch.tensor([1000.0], device=device))  # one outlier among ten thousand
    scale, zero_point = observer.quant_params(Grid(8), symmetric=True)
    assert scale.item() * 127 == pytest.approx(0.99, abs=2 * 2000 / 4096)
    assert zero_point == 0
    exact = Histogram(method="percentile", percentile=100.0).to(device)
    exact.observe(x)
    assert exact.quant_params(Grid(8), symmetric=True)[0].item() == pytest.approx(1 / 127, rel=1e-6)


def test_percentile_of_one_sided_data(device: torch.device) -> None:
    observer = Histogram(method="percentile", percentile=100.0).to(device)
    observer.observe(torch.linspace(0.5, 2, 100, device=device))
    scale, zero_point = observer.quant_params(Grid(8, signed=False), symmetric=False)
    assert zero_point == 0
    assert scale.item() == pytest.approx(2 / 255, rel=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_finds_the_least_error(symmetric: bool, device: torch.device) -> None:
    x = inputs.random((20_000,), seed=3).float().to(device)
    grid = Grid(3)
    observer = Histogram(method="mse").to(device)
    observer.observe(x)
    scale, zero_point = observer.quant_params(grid, symmetric)
    plain = MinMax().to(device)
    plain.observe(x)

    def error(scale: torch.Tensor, zero_point: torch.Tensor) -> float:
        return (fake_quantize(x, scale, zero_point, grid=grid) - x).square().mean().item()

    assert error(scale, zero_point) < 0.5 * error(*plain.quant_params(grid, symmetric))
    assert error(scale, zero_point) <= min(error(scale * f, zero_point) for f in (0.8, 0.9, 1.1, 1.25))


def test_entropy_clips_a_long_tail_and_keeps_a_uniform_range(device: torch.device) -> None:
    uniform = Histogram(method="entropy").to(device)
    uniform.observe(torch.linspace(-1, 1, 40_960, device=device))
    scale, _ = uniform.quant_params(Grid(4), symmetric=True)
    assert scale.item() * 7 > 0.9
    tailed = Histogram(method="entropy").to(device)
    tailed.observe(inputs.random((40_960,), spread=1.0).float().to(device))
    tailed.observe(torch.tensor([60.0], device=device))
    scale, _ = tailed.quant_params(Grid(8), symmetric=True)
    assert scale.item() * 127 < 30


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("per", PERS, ids=str)
def test_every_observer_gives_parameters_of_the_right_shape(name: str, per: Granularity, device: torch.device) -> None:
    observer = MAKERS[name](per).to(device)
    for x in batches(device):
        observer.observe(x)
    for grid in (Grid(4), Grid(8, signed=False), Grid(16)):
        for symmetric in (True, False):
            scale, zero_point = observer.quant_params(grid, symmetric)
            assert scale.shape == zero_point.shape == per.scale_shape((6, 8))
            assert scale.dtype == torch.float32
            assert zero_point.dtype == torch.int32
            assert (scale > 0).all()
            fake_quantize(x, scale, zero_point, grid=grid, per=per)


@pytest.mark.parametrize("name", MAKERS)
def test_per_channel_is_a_loop_of_per_tensor(name: str, device: torch.device) -> None:
    together, alone = MAKERS[name](PerChannel(0)).to(device), [MAKERS[name]().to(device) for _ in range(6)]
    for x in batches(device):
        together.observe(x)
        for observer, row in zip(alone, x, strict=True):
            observer.observe(row)
    for symmetric in (True, False):
        scale, zero_point = together.quant_params(Grid(4), symmetric)
        rows = [observer.quant_params(Grid(4), symmetric) for observer in alone]
        assert_same_bits(scale, torch.stack([s for s, _ in rows]))
        assert_same_bits(zero_point, torch.stack([z for _, z in rows]))


@pytest.mark.parametrize("name", MAKERS)
def test_non_finite_values_are_skipped_and_counted(name: str, device: torch.device) -> None:
    clean, dirty = MAKERS[name]().to(device), MAKERS[name]().to(device)
    x = inputs.random((100,)).float().to(device)
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")], device=device)
    clean.observe(x)
    dirty.observe(torch.cat([x, odd]))
    assert dirty.nonfinite == 3
    assert clean.nonfinite == 0
    for a, b in zip(clean.quant_params(Grid(8), False), dirty.quant_params(Grid(8), False), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_before_any_data_and_after_reset(name: str, device: torch.device) -> None:
    observer: Observer = MAKERS[name]().to(device)
    for _ in range(2):
        assert not observer.is_calibrated
        with pytest.raises(ValueError, match="has seen no data; call observe"):
            observer.quant_params(Grid(8), True)
        observer.observe(torch.empty(0, device=device))
        observer.observe(torch.tensor([float("nan")], device=device))
        assert not observer.is_calibrated
        observer.observe(torch.ones(3, device=device))
        assert observer.is_calibrated
        observer.reset()
        assert observer.nonfinite == 0


@pytest.mark.parametrize("name", MAKERS)
def test_state_survives(name: str, device: torch.device) -> None:
    observer = MAKERS[name](PerChannel(0)).to(device)
    for x in batches(device, 2):
        observer.observe(x)
    loaded = MAKERS[name](PerChannel(0)).to(device)
    loaded.load_state_dict(observer.state_dict())
    pickled = pickle.loads(pickle.dumps(observer))
    copies = (loaded, pickled, copy.deepcopy(observer), copy.deepcopy(observer).half())
    for other in (observer, *copies):
        other.observe(x)
    expected = observer.quant_params(Grid(4), True)[0]
    assert expected.dtype == torch.float32
    for other in copies:
        assert_same_bits(other.quant_params(Grid(4), True)[0], expected)


@pytest.mark.parametrize("name", MAKERS)
def test_data_of_another_shape_is_an_error(name: str, device: torch.device) -> None:
    observer = MAKERS[name](PerChannel(0)).to(device)
    observer.observe(torch.ones(6, 8, device=device))
    with pytest.raises(ValueError, match=r"earlier data had \(6,\)"):
        observer.observe(torch.ones(5, 8, device=device))


def test_percentile_of_an_affine_range_cuts_half_at_each_end(device: torch.device) -> None:
    observer = Histogram(method="percentile", percentile=90.0).to(device)
    observer.observe(torch.linspace(-1, 1, 100_001, device=device))
    low, high = observer._range(Grid(8), False)
    assert low.item() == pytest.approx(-0.9, abs=1e-3)
    assert high.item() == pytest.approx(0.9, abs=1e-3)
    low, high = observer._range(Grid(8), True)
    assert high.item() == pytest.approx(0.9, abs=1e-3)  # 90 % of abs(x), uniform on [0, 1]


def test_divergence_by_hand() -> None:
    """Codes 0 0 1 1, the last bin clipped: P moves its 2 counts to bin 2, Q spreads each code over its used bins."""
    counts = torch.tensor([[1.0, 3.0, 4.0, 2.0]]).double()
    codes, inside = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([[True, True, True, False]])
    p, q = [0.1, 0.3, 0.6], [2 / 8, 2 / 8, 4 / 8]
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert _divergence(counts, codes, inside).item() == pytest.approx(expected, rel=1e-9)


def test_loading_other_bins_or_another_granularity_is_an_error() -> None:
    saved = Histogram(PerChannel(0), bins=64)
    saved.observe(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="counts"):
        Histogram(PerChannel(0), bins=128).load_state_dict(saved.state_dict())
    with pytest.raises(RuntimeError, match=r"the checkpoint holds shape \(3,\), which PerTensor\(\) cannot have"):
        Histogram(bins=64).load_state_dict(saved.state_dict())
