"""Triton's kernels against the reference, bit for bit: with TRITON_INTERPRET=1 anywhere, else where there is a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import inputs
from compare import assert_same_bits
from lowbit import Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, Plan, SteKind
from lowbit.granularity import Granularity
from lowbit.kernels.ops import OPS

triton = pytest.importorskip("triton")

INTERPRETED = triton.knobs.runtime.interpret
pytestmark = [
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="Triton needs a GPU, or TRITON_INTERPRET=1"
    ),
    # what numpy says, under the interpreter, of values that overflow or are not numbers
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

GRIDS = ((Grid(8), False), (Grid(4, signed=False), True), (Grid(2, narrow=True), False), (Grid(16), True))
LARGE = {
    "wide": (3, 5000),
    "odd": (70, 130),
    "many rows": (600, 8),
    "few channels": (512, 3),
}


def both(op: str, like: Tensor, *args: Tensor | None, options: dict[str, Any] | None = None, **records: Any) -> Any:
    """What Triton gives, and what the reference gives."""
    results = (
        Plan.select(op, like, prefer=backend, **records).run(*args, **(options or {}))
        for backend in ("triton", "reference")
    )
    return tuple(result if isinstance(result, tuple) else (result,) for result in results)


def check(op: str, like: Tensor, *args: Tensor | None, options: dict[str, Any] | None = None, **records: Any) -> None:
    for actual, expected in zip(*both(op, like, *args, options=options, **records), strict=True):
        if expected is None:
            assert actual is None
        else:
            assert_same_bits(actual, expected)


def check_all(x: Tensor, per: Granularity, grid: Grid, affine: bool, g: Tensor | None = None) -> None:
    """Every op, on one tensor."""
    scale, zero_point = inputs.params(x, per, grid, affine=affine)
    records = {"grid": grid, "per": per}
    codes = {8: torch.uint8, 4: torch.int16}.get(grid.bits, torch.int32) if affine else torch.int8
    g = inputs.random(tuple(x.shape), seed=2).to(x.dtype).to(x.device) if g is None else g
    check("fake_quantize", x, x, scale, zero_point, **records)
    check("quantize", x, x, scale, zero_point, **records)
    check("quantize", x, x, scale, zero_point, options={"dtype": codes}, **records)
    check("quantize_backward", x, g, x, scale, zero_point, **records)
    check("dequantize_backward", g, g, scale, per=per)
    check("abs_max", x, x, per=per)
    check("min_max", x, x, per=per)
    check("fake_quantize_per_batch", x, x, options={"symmetric": not affine}, **records)
    for ste in (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE, SteKind.HARD_TANH):
        check("fake_quantize_backward", x, g, x, scale, zero_point, ste=ste, **records)
    (tanh,), (expected,) = both("fake_quantize_backward", x, g, x, scale, zero_point, ste=SteKind.TANH, **records)
    info = torch.finfo(x.dtype)
    least = 4 * info.smallest_normal * g.double().abs().clamp_min(1)  # there, exp rounds to few bits
    slack = 4 * info.eps * torch.maximum(expected.double().abs(), least)
    assert ((tanh.double() - expected.double()).abs() <= slack).all()
    for method in ("lsq", "pact"):
        check_learned(x, g, scale, zero_point, method, records)


def check_learned(
    x: Tensor, g: Tensor, scale: Tensor, zero_point: Tensor | None, method: str, records: dict[str, Any]
) -> None:
    """dx to the bit, the sums within n eps of the sum of their terms' sizes."""
    finite = torch.where(x.abs() < 1e6, x, 1.0)  # 0 * inf, and cancelling terms of any size, are no matter of order
    args = (g, finite, scale, zero_point)
    options, rest = {"method": method}, {"ste": SteKind.IN_RANGE, **records}
    (dx, *sums), (expected, *wanted) = both("learned_fake_quantize_backward", finite, *args, options=options, **rest)
    assert_same_bits(dx, expected)
    grid, largest = records["grid"], float(scale.max()) if scale.numel() else 0.0
    size = float(g.double().abs().sum()) * max(2 * (grid.quant_max - grid.quant_min), largest)
    for actual, reference in zip(sums, wanted, strict=True):
        assert actual.dtype == reference.dtype
        assert actual.shape == reference.shape
        assert ((actual - reference).abs().double() <= max(x.numel(), 1) * inputs.eps(x.dtype) * size).all()


@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_every_op_on_every_tensor(dtype: torch.dtype, per: Granularity) -> None:
    for index, x in enumerate(inputs.tensors(dtype, DEVICE).values()):
        try:
            per.scale_shape(x.shape)
        except ValueError:
            continue
        check_all(x, per, *GRIDS[(index + inputs.PERS.index(per)) % len(GRIDS)])


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerChannel(-1), PerToken()], ids=str)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_several_tiles(shape: tuple[int, ...], per: Granularity) -> None:
    x = inputs.random(shape).float().to(DEVICE)
    x.view(-1)[:48] = inputs.hard_values().float()
    check_all(x, per, *GRIDS[1])


@pytest.mark.parametrize("per", [PerGroup(32), PerGroup(3), PerBlock(3, 32), PerBlock(2, 48), PerBlock(6, 2)], ids=str)
def test_groups_and_blocks(per: Granularity) -> None:
    for shape in ((24, 96), (2, 6, 192)):
        check_all(inputs.random(shape).to(torch.float16).to(DEVICE), per, *GRIDS[1])


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerChannel(1), PerToken(), PerGroup(9)], ids=str)
def test_images(per: Granularity) -> None:
    x = inputs.random((4, 8, 9, 9)).bfloat16().to(DEVICE)
    check_all(x, per, *GRIDS[0])
    check_all(x.contiguous(memory_format=torch.channels_last), per, *GRIDS[1])
    check_all(x[:, :5].contiguous(memory_format=torch.channels_last), per, *GRIDS[1])


def test_a_program_that_takes_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.kernels import plan, triton_launch

    monkeypatch.setattr(triton_launch, "PROGRAMS", 2)
    plan._select.cache_clear()
    for shape in ((70, 130), (16, 3, 40, 2)):
        for per in (PerTensor(), PerChannel(1)):
            check_all(inputs.random(shape).float().to(DEVICE), per, *GRIDS[1])
    plan._select.cache_clear()


def test_a_group_too_long_for_one_read() -> None:
    x = inputs.random((2, 20000)).float().to(DEVICE)
    for symmetric in (True, False):
        check("fake_quantize_per_batch", x, x, options={"symmetric": symmetric}, per=PerToken())


def test_ranges_wider_than_the_dtype() -> None:
    x = torch.tensor([[-3e38, 3e38], [1e-30, -1e-30], [math.nan, math.inf], [-0.0, 0.0]], device=DEVICE)
    for per in (PerTensor(), PerToken(), PerChannel(1)):
        check("fake_quantize_per_batch", x, x, options={"symmetric": False}, per=per)
        check("fake_quantize_per_batch", x, x, options={"symmetric": True}, per=per)
        check("min_max", x, x, per=per)


def test_scales_of_any_size() -> None:
    scale = torch.tensor([1e-45, 1e-38, 1e-25, 1e-12, 3.0, 1e12, 1e25, 1e36], device=DEVICE)
    steps = inputs.random((64, 8), spread=40).float().to(DEVICE)
    x = torch.where(torch.arange(64, device=DEVICE)[:, None] % 2 == 0, steps.round() + 0.5, steps) * scale
    for grid in (Grid(8), Grid(4)):
        check("fake_quantize", x, x, scale, None, grid=grid, per=PerChannel(1))
        check("quantize", x, x, scale, None, grid=grid, per=PerChannel(1))
        check("fake_quantize_backward", x, x, x, scale, None, grid=grid, per=PerChannel(1), ste=SteKind.IN_RANGE)


def test_ties_are_those_of_the_rounded_quotient() -> None:
    scale = (torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.5).to(DEVICE) * 0.01
    codes = torch.arange(-127, 127, device=DEVICE)[:, None] + 0.5
    near = codes * scale
    for x in (near, torch.nextafter(near, near.new_full((), math.inf)), torch.nextafter(near, near.new_zeros(()))):
        check("quantize", x, x, scale, None, per=PerChannel(1))


def test_views_that_are_not_aligned() -> None:
    base = inputs.random((4097,)).bfloat16().to(DEVICE)
    scale = torch.tensor([9.0, 0.05], device=DEVICE)[1]
    for x in (base[:-1], base[1:], base[:-1]):
        check("fake_quantize", x, x, scale)
        check("fake_quantize_backward", x, x.flip(0), x, scale)
        check("abs_max", x, x)


def test_gradients_of_other_strides_and_dtypes() -> None:
    x = inputs.random((6, 8)).half().to(DEVICE)
    flat = torch.ones(1, device=DEVICE)
    for g in (flat.expand(6, 8), flat.half().expand(6, 8), inputs.random((8, 6)).float().to(DEVICE).t()):
        for per in (PerTensor(), PerChannel(1)):
            check_all(x, per, *GRIDS[0], g=g)
            check_all(x.t(), per, *GRIDS[1], g=g.t())
    double = inputs.random((6, 8)).to(DEVICE)
    check("quantize_backward", x, double, x, flat[0])
    check("fake_quantize_backward", x, double, x, flat[0], ste=SteKind.HARD_TANH)


def test_params_of_any_dtype_and_strides() -> None:
    x = inputs.random((6, 8)).float().to(DEVICE)
    scale, zero_point = inputs.params(x, PerChannel(1), Grid(8), affine=True)
    for s in (scale, scale.double(), scale.half(), scale[:1].expand(8), scale.repeat_interleave(2)[::2]):
        for z in (None, zero_point, zero_point.long(), zero_point.to(torch.int8), zero_point[:1].expand(8)):
            check("fake_quantize", x, x, s, z, per=PerChannel(1))
            check("learned_fake_quantize", x, x, s, z, per=PerChannel(1))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *inputs.FLOATS], ids=str
)
def test_dequantize(dtype: torch.dtype) -> None:
    q = torch.randint(0, 100, (6, 8), generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    for per in inputs.PERS:
        scale, zero_point = inputs.params(q, per, Grid(8), affine=True)
        for wanted in (None, *inputs.FLOATS):
            check("dequantize", q, q, scale, zero_point, options={"dtype": wanted}, per=per)
            check("dequantize", q.t(), q.t(), torch.tensor(0.3, device=DEVICE), options={"dtype": wanted})
        if dtype.is_floating_point:
            check("dequantize_backward", q, q, scale, options={"dtype": torch.bfloat16}, per=per)


def test_sums_are_the_same_on_every_run() -> None:
    x, g = (inputs.random((70, 530), seed=seed).float().to(DEVICE) for seed in (0, 1))
    for per in (PerTensor(), PerChannel(0), PerChannel(1)):
        scale, zero_point = inputs.params(x, per, Grid(8), affine=True)
        plan = Plan.select("learned_fake_quantize_backward", x, per=per, prefer="triton")
        first, second = (plan.run(g, x, scale, zero_point) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            assert_same_bits(one, other)


def test_what_is_left_to_the_reference_says_why() -> None:
    x = torch.zeros(4, device=DEVICE)
    from lowbit.kernels.triton_launch import MAKERS

    left = OPS.keys() - MAKERS.keys()
    for op in MAKERS:
        assert Plan.select(op, x, prefer="triton").backend == "triton"
    for op in left:
        with pytest.raises(ValueError, match=r"one pass|no fused kernel"):
            Plan.select(op, x, prefer="triton")
    assert not left & {"fake_quantize", "learned_fake_quantize_backward", "min_max"}
    with pytest.raises(ValueError, match="float8"):
        Plan.select("fake_quantize", x.to(torch.float8_e4m3fn), prefer="triton")


def test_workspace_counts_partial_results_and_copies() -> None:
    x = torch.zeros(70, 530, device=DEVICE)
    whole = Plan.select("learned_fake_quantize_backward", x, prefer="triton").workspace_size
    assert 0 < whole < x.numel()
    assert Plan.select("learned_fake_quantize_backward", x, per=PerToken(), prefer="triton").workspace_size == 0
    assert Plan.select("fake_quantize", x[:, ::2], prefer="triton").workspace_size == x[:, ::2].numel() * 4
