"""Every fast backend against the reference: the same bits, on every hard input, layout and dtype (law 12)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import inputs
from backends import FAST, INTERPRETED, assert_all_same_bits, call, device_of, other_memory
from compare import assert_same_bits
from lowbit import Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional.statistics import follow
from lowbit.granularity import Granularity
from lowbit.kernels import plan
from lowbit.kernels.signature import Memory

GRIDS = (Grid(8), Grid(2), Grid(4, narrow=True), Grid(1, signed=False), Grid(16, signed=False), Grid(16))

# Shapes that cross the kernels' block and chunk sizes, with granularities that fit them; Triton's interpreter, which is
# slow, takes smaller ones and fewer of the rest.
LARGE = {
    "long run": ((3, 70001), (3, 3000), (PerTensor(), PerChannel(0), PerToken())),
    "wide rows": ((130, 2500), (10, 1000), (PerChannel(1), PerGroup(20), PerGroup(500), PerBlock(13, 50))),
    "narrow rows": ((5000, 3), (600, 3), (PerChannel(1), PerToken(), PerTensor())),
    "short runs": ((40, 17, 3, 3), (4, 17, 3, 3), (PerChannel(0), PerChannel(1), PerToken(), PerGroup(1))),
}


def every_case(backend: str, dtype: torch.dtype, every: int = 1) -> list[tuple[Tensor, object]]:
    """Tensors and granularities; no empty tensors, which a backend may leave to the reference."""
    device, slow = device_of(backend), INTERPRETED and backend == "triton"
    found = [(x, per) for x in inputs.tensors(dtype, device).values() for per in inputs.PERS]
    found = found[:: 5 * every if slow else every]
    for large, small, pers in LARGE.values():
        x = inputs.random(small if slow else large, seed=3).to(dtype).to(device)
        found += [(x, per) for per in pers[:: 2 if slow else 1]]
    images = inputs.tensors(dtype, device)["channels_last"]
    found.append((images, PerChannel(1)))
    return [(x, per) for x, per in found if x.numel() and fits(x, per)]


def fits(x: Tensor, per: object) -> bool:
    try:
        per.scale_shape(x.shape)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
@pytest.mark.parametrize("backend", FAST)
class TestSameBits:
    def test_forward(self, backend: str, dtype: torch.dtype) -> None:
        for index, (x, per) in enumerate(every_case(backend, dtype)):
            grid = GRIDS[index % len(GRIDS)]
            for affine in (False, True):
                scale, zero_point = inputs.params(x, per, grid, affine=affine)
                for op in ("fake_quantize", "learned_fake_quantize", "quantize"):
                    assert_all_same_bits(op, backend, x, x, scale, zero_point, grid=grid, per=per)

    def test_codes(self, backend: str, dtype: torch.dtype) -> None:
        for x, per in every_case(backend, dtype, 2):
            for grid, code in (
                (Grid(8), torch.int8),
                (Grid(8, signed=False), torch.uint8),
                (Grid(16), torch.int16),
                (Grid(16, signed=False), torch.int32),
            ):
                scale, zero_point = inputs.params(x, per, grid, affine=True)
                assert_all_same_bits("quantize", backend, x, x, scale, zero_point, grid=grid, per=per, dtype=code)

    def test_backward(self, backend: str, dtype: torch.dtype) -> None:
        for index, (x, per) in enumerate(every_case(backend, dtype)):
            grid = GRIDS[index % len(GRIDS)]
            g = torch.randn_like(x)
            scale, zero_point = inputs.params(x, per, grid, affine=bool(index % 2))
            for ste in (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE, SteKind.HARD_TANH):
                assert_all_same_bits(
                    "fake_quantize_backward", backend, x, g, x, scale, zero_point, grid=grid, per=per, ste=ste
                )
            for wide in (g, g.to(scale.dtype)):
                assert_all_same_bits("quantize_backward", backend, x, wide, x, scale, zero_point, grid=grid, per=per)

    def test_tanh(self, backend: str, dtype: torch.dtype) -> None:
        """Within 4 ulp of the result's dtype; the arithmetic's own ulp bounds what a half result may differ by too."""
        for x, per in every_case(backend, dtype, 3):
            g = torch.ones_like(x)
            g[..., 0] = torch.finfo(dtype).max  # no product on the way may overflow
            scale, _ = inputs.params(x, per, Grid(4), affine=False)
            records = {"grid": Grid(4), "per": per, "ste": SteKind.TANH}
            got = call("fake_quantize_backward", backend, x, g, x, scale, **records)
            wanted = call("fake_quantize_backward", "reference", x, g, x, scale, **records)
            assert torch.equal(got.isfinite(), wanted.isfinite())
            info = torch.finfo(dtype)
            ulp = wanted.abs().double().clamp_min(info.smallest_normal) * info.eps
            assert ((got.double() - wanted.double()).abs() <= 4 * ulp).all()

    def test_statistics(self, backend: str, dtype: torch.dtype) -> None:
        for x, per in every_case(backend, dtype):
            assert_all_same_bits("abs_max", backend, x, x, per=per)
            assert_all_same_bits("min_max", backend, x, x, per=per)

    def test_per_batch(self, backend: str, dtype: torch.dtype) -> None:
        for index, (x, per) in enumerate(every_case(backend, dtype)):
            grid = GRIDS[index % len(GRIDS)]
            for symmetric in (True, False):
                assert_all_same_bits("fake_quantize_per_batch", backend, x, x, grid=grid, per=per, symmetric=symmetric)
            if grid.fits_int8:
                records = {"grid": grid, "per": per, "symmetric": bool(index % 2)}
                assert_all_same_bits("quantize_per_batch", backend, x, x, **records)

    def test_sums(self, backend: str, dtype: torch.dtype) -> None:
        """dx to the bit; ds and dz within n eps of the terms' sizes, and the same from run to run."""
        for index, (x, per) in enumerate(every_case(backend, dtype)):
            grid, method = GRIDS[index % len(GRIDS)], ("lsq", "pact")[index % 2]
            g = torch.randn_like(x)
            scale, zero_point = inputs.params(x, per, grid, affine=bool(index // 2 % 2))
            records = {"grid": grid, "per": per, "ste": SteKind.CLIPPED_IDENTITY, "method": method}
            args = ("learned_fake_quantize_backward", backend, x, g, x, scale, zero_point)
            got, again = call(*args, **records), call(*args, **records)
            wanted = call("learned_fake_quantize_backward", "reference", *args[2:], **records)
            for a, b in zip(got, again, strict=True):
                assert_same_bits(a, b)
            assert_same_bits(got[0], wanted[0])
            n = max(per.group_size(x.shape), 1)
            steps = grid.quant_max - grid.quant_min
            size = n * g.abs().max().double().item() * steps if x.numel() else 1.0
            assert len(got) == len(wanted) == (2 if zero_point is None else 3)
            for a, b, term in zip(got[1:], wanted[1:], (1.0, scale.max().item() if n else 1.0), strict=False):
                assert a.dtype == b.dtype
                assert a.shape == b.shape
                assert ((a - b).abs() <= inputs.eps(dtype) * size * max(term, 1)).all()

    def test_memory_of_the_gradient(self, backend: str, dtype: torch.dtype, fast_device: torch.device) -> None:
        """A gradient that lies otherwise in memory, or is expanded, or not aligned, counts element by element."""
        x = inputs.random((2, 4, 3, 8)).to(dtype).to(fast_device).contiguous(memory_format=torch.channels_last)
        scale, _ = inputs.params(x, PerChannel(1), Grid(4), affine=False)
        records = {"grid": Grid(4), "per": PerChannel(1), "ste": SteKind.HARD_TANH}
        for g in other_memory(torch.randn(2, 4, 3, 8, dtype=dtype, device=fast_device)):
            assert_all_same_bits("fake_quantize_backward", backend, x, g, x, scale, **records)

    def test_views_that_are_not_aligned(self, backend: str, dtype: torch.dtype, fast_device: torch.device) -> None:
        memory = inputs.random((4100,)).to(dtype).to(fast_device)
        for start in range(1, 5):
            x = memory[start : start + 4096].view(64, 64)
            for per in (PerTensor(), PerChannel(0), PerChannel(1), PerGroup(32)):
                scale, _ = inputs.params(x, per, Grid(8), affine=False)
                assert_all_same_bits("fake_quantize", backend, x, x, scale, per=per)
                assert_all_same_bits("abs_max", backend, x, x, per=per)

    def test_scales_of_other_dtypes_and_strides(
        self, backend: str, dtype: torch.dtype, fast_device: torch.device
    ) -> None:
        x = inputs.random((6, 8)).to(dtype).to(fast_device)
        scale = torch.tensor(0.37, dtype=torch.float64, device=fast_device)
        for one in (scale, scale.half(), scale.bfloat16(), scale.float()):
            zero_point = torch.tensor(3, dtype=torch.int64, device=fast_device)
            for z in (None, zero_point.expand(6), zero_point.expand(6).to(torch.uint8)):
                assert_all_same_bits("fake_quantize", backend, x, x, one.expand(6), z, per=PerChannel(0))


def forbidden(*args: object) -> None:
    raise AssertionError("a copy")


@pytest.mark.parametrize("bad", [[], [float("inf")], [float("nan"), float("-inf")]], ids=str)
@pytest.mark.parametrize("backend", FAST)
def test_rows_that_lie_apart(backend: str, bad: list[float], fast_device: torch.device, monkeypatch: Any) -> None:
    """Such as the heads of queries, which lie between keys and values."""
    heads = inputs.random((2, 5, 3, 4, 16)).to(torch.bfloat16).to(fast_device).permute(2, 0, 3, 1, 4)
    for view in (heads[1], heads[1, 0], heads[1, :, 2, 3], heads[1].transpose(-1, -2), heads[:, :, :, :, ::2]):
        for index, value in enumerate(bad):
            view[(0,) * (view.dim() - 1) + (index,)] = value
        for op in ("fake_quantize_per_batch", "quantize_per_batch"):
            for symmetric in (True, False):
                records = {"grid": Grid(7), "per": PerToken(), "symmetric": symmetric}
                with monkeypatch.context() as patch:
                    if backend == "triton" and view.stride(-1) == 1 and view.dim() <= 4:
                        patch.setattr(Memory, "arrange", forbidden)  # nothing is copied
                    call(op, backend, view, view, **records)
                assert_all_same_bits(op, backend, view, view, **records)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("grid", [Grid(8), Grid(2), Grid(4, signed=False)], ids=str)
def test_ema(backend: str, grid: Grid, fast_device: torch.device) -> None:
    """Groups with and without data, before and after their first; also ends whose difference overflows."""
    low = torch.tensor([0.0, -1.5, -0.3, 0.0, -3e38, -2.0, -1e-20, 0.2], device=fast_device)
    high = torch.tensor([0.0, 0.0, 0.7, 2.5, 3e38, 5.0, 1e-20, 0.9], device=fast_device)
    for started in (torch.zeros(8, dtype=torch.bool), torch.arange(8) % 2 == 0, torch.ones(8, dtype=torch.bool)):
        initialized = started.to(fast_device)
        scale, state_low, state_high = (
            (inputs.random((8,), seed=seed).float().abs() * sign).to(fast_device)
            for seed, sign in ((1, 1), (2, -1), (3, 1))
        )
        zero_point = torch.arange(8, dtype=torch.int32, device=fast_device) % 2
        for decay in (0.0, 0.9, 0.99):
            args = (high, scale, initialized, decay)
            assert_all_same_bits("ema_scale", backend, high, *args, grid=grid)
            args = (low, high, state_low, state_high, scale, zero_point, initialized, decay)
            assert_all_same_bits("ema_range", backend, low, *args, grid=grid)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("per", "size"),
    [
        (PerTensor(), (6, 4)),
        (PerTensor(), (40, 700)),
        (PerChannel(0), (6, 4)),
        (PerChannel(1), (6, 4)),
        (PerChannel(1), (300, 5)),
        (PerGroup(2), (6, 4)),
    ],
    ids=str,
)
def test_following_is_a_statistic_and_an_ema(
    per: Granularity, size: tuple[int, int], symmetric: bool, device: torch.device
) -> None:
    """In one call where a backend has one: also groups without data, NaN, and memory in another order."""
    x = inputs.random(size).float().to(device)
    x[0], x[1, 1], x[2, 2] = 0.0, float("nan"), float("inf")
    shape, grid = per.scale_shape(x.shape), Grid(8, signed=symmetric)
    floats = [torch.ones(shape, device=device) for _ in range(1 if symmetric else 3)]
    zero_points = [] if symmetric else [torch.ones(shape, dtype=torch.int32, device=device)]
    state = [*floats, *zero_points, torch.zeros(shape, dtype=torch.bool, device=device)]
    for batch in (x, x.t().contiguous().t() * 2, x.to(torch.bfloat16), x.double(), torch.zeros_like(x)):
        wanted = [tensor.clone() for tensor in state]
        with plan.prefer("reference"):
            assert not plan.follow(wanted, batch, per, 0.9, grid)
            follow(wanted, batch, per, 0.9, grid)
        copies = [tensor.clone() for tensor in state]
        served = plan.runs("triton", batch) and batch.dtype != torch.float64
        assert plan.follow(copies, batch, per, 0.9, grid) == served
        versions = [tensor._version for tensor in state]
        follow(state, batch, per, 0.9, grid)
        assert all(tensor._version > version for tensor, version in zip(state, versions, strict=True))
        for found, want in zip(state, wanted, strict=True):
            assert_same_bits(found.cpu(), want.cpu())


@pytest.mark.parametrize("result", inputs.FLOATS, ids=str)
@pytest.mark.parametrize("backend", FAST)
def test_dequantize(backend: str, result: torch.dtype, fast_device: torch.device) -> None:
    integers = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    for dtype in (*integers, *inputs.FLOATS):
        for shape, per in (((6, 8), PerGroup(4)), ((70, 130), PerChannel(1)), ((70, 130), PerTensor())):
            q = torch.randint(0, 100, shape, device=fast_device).to(dtype)
            if dtype in (torch.int32, torch.int64):
                q = q * 21474836  # not exact in float32
            scale, zero_point = inputs.params(q, per, Grid(8), affine=True)
            for z in (None, zero_point):
                assert_all_same_bits("dequantize", backend, q, q, scale, z, per=per, dtype=result)
            if dtype.is_floating_point:
                g = torch.randn(shape, device=fast_device).to(result)
                assert_all_same_bits("dequantize_backward", backend, g, g, scale, per=per, dtype=dtype)


@pytest.mark.parametrize("backend", FAST)
def test_every_bit_pattern_of_a_half(backend: str, fast_device: torch.device) -> None:
    patterns = torch.arange(-(2**15), 2**15, device=fast_device).to(torch.int16)
    slow = INTERPRETED and backend == "triton"
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        pairs = itertools.product((0.01, 1.0, 3.7e-5, 1e-12, 1e30), (Grid(2), Grid(16)))
        for scale, grid in ((0.01, Grid(2)), (3.7e-5, Grid(16))) if slow else pairs:
            s = torch.tensor(scale, device=fast_device)
            assert_all_same_bits("fake_quantize", backend, x, x, s, grid=grid)
            assert_all_same_bits("quantize", backend, x, x, s, grid=grid, dtype=torch.int16)
            for ste in (SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE, SteKind.HARD_TANH):
                g = x.flip(0)
                assert_all_same_bits("fake_quantize_backward", backend, x, g, x, s, grid=grid, ste=ste)


@pytest.mark.parametrize("backend", FAST)
def test_quotients_near_a_tie(backend: str, fast_device: torch.device) -> None:
    """Products with the reciprocal, and divisions that are not rounded once, go wrong here."""
    generator = torch.Generator().manual_seed(5)
    scale = (torch.rand(512, generator=generator) * 3 + 1e-3).to(fast_device)
    code = torch.randint(-128, 128, (512, 64), generator=generator).to(fast_device)
    x = (code + 0.5) * scale[:, None]
    for neighbour in (x, x.nextafter(x + 1), x.nextafter(x - 1)):
        assert_all_same_bits(
            "quantize", backend, neighbour, neighbour, scale, per=PerChannel(0), dtype=torch.int16, grid=Grid(16)
        )


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e20, 3e38])
def test_scales_at_the_ends_of_the_range(backend: str, scale: float, fast_device: torch.device) -> None:
    s = torch.tensor(scale, device=fast_device)
    values = [k * scale for k in (0.0, 0.4, 0.5, 0.6, 1.5, 2.5, 100.5, 200.0)]
    x = torch.tensor([sign * v for v in values for sign in (1, -1) if math.isfinite(v)], device=fast_device)
    for ste in (SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE, SteKind.HARD_TANH):
        assert_all_same_bits("fake_quantize_backward", backend, x, torch.ones_like(x), x, s, ste=ste)
    assert_all_same_bits("fake_quantize", backend, x, x, s)
