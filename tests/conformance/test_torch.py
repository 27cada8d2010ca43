"""torch's own fake quantization: our law with a product in place of the division, and what else differs.

torch rounds x * (1 / s). That is two roundings, one eps of x / s, away from the truth, so codes may differ where x / s
lies that near to a rounding boundary: those elements, and no others, are left out, counted, and at most one step off.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import oracle
from compare import assert_same_bits
from conformance import draw
from lowbit import Grid, PerChannel, PerTensor, SteKind
from lowbit.functional import dequantize, fake_quantize, learned_fake_quantize, quantize

EPS = torch.finfo(torch.float32).eps
GRIDS = (Grid(4), Grid(8), Grid(8, signed=False), Grid(8, narrow=True), Grid(16))
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)
every_draw = pytest.mark.parametrize("inputs", [draw.uniform_inputs, draw.hard_inputs])


def near_a_boundary(x: Tensor, s: Tensor, z: Tensor, grid: Grid, *, shifts_first: bool = False) -> Tensor:
    """Where the peer may take the neighbouring code: never if 1 / s is exact, nor beyond the ends, where both saturate.

    A peer that adds the zero point before it rounds is off by another half eps of the sum, and has other ties.
    """
    v = x.double() / s.double()
    slack = EPS * v.abs() * (s.frexp().mantissa != 0.5)
    if shifts_first:
        slack = slack + EPS / 2 * (v + z).abs() + (z != 0) * 1e-12
    near = (v - v.floor() - 0.5).abs() < slack * 1.001
    return near & (v + z > grid.quant_min - 1) & (v + z < grid.quant_max + 1)


def assert_few(near: Tensor, grid: Grid) -> None:
    """Not many more than chance puts there: a share of 2^bits / 2 eps, more or less."""
    assert near.sum() <= 3 + 2 * 2**grid.bits * EPS * near.numel()


def assert_same_but_near(actual: Tensor, expected: Tensor, near: Tensor, step: Tensor) -> None:
    """The same bits away from the boundaries, and at most one step apart near them."""
    assert_same_bits(actual[~near], expected[~near])
    apart = (actual - expected).abs().double()
    assert (apart <= step * (1 + 2**-7)).all(), f"{apart.max()} apart"


@pytest.mark.parametrize(("wrong", "near"), [([0.0, 2.0], [False, True]), ([1.0, 0.0], [False, True])])
def test_same_but_near_fails(wrong: list[float], near: list[bool]) -> None:
    with pytest.raises(AssertionError):
        assert_same_but_near(torch.tensor(wrong), torch.zeros(2), torch.tensor(near), torch.ones(2))


def test_few_fails() -> None:
    with pytest.raises(AssertionError):
        assert_few(torch.arange(1000) < 4, Grid(8))


def upstream(x: Tensor) -> Tensor:
    """A gradient of either sign and never 0."""
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return torch.where(g == 0, 1, g)


def value_and_gradients(function: object, *inputs: Tensor, g: Tensor | None = None) -> list[Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream(y) if g is None else g)]


def assert_fake_quantizes_alike(peer: object, x: Tensor, s: Tensor, z: Tensor, grid: Grid, per: object) -> Tensor:
    """Values and gradients; gives where the two may differ."""
    y, dx = value_and_gradients(lambda x: fake_quantize(x, s, z, grid=grid, per=per, ste=SteKind.IN_RANGE), x)
    peer_y, peer_dx = value_and_gradients(peer, x)
    step, shift = draw.spread(s, x.shape, per), draw.spread(z, x.shape, per)
    near = near_a_boundary(x, step, shift, grid)
    assert_same_but_near(y, peer_y, near, step)
    # torch multiplies by its mask, which leaves -0.0 where ours selects 0.0.
    assert_same_bits(dx[~near], peer_dx[~near] + 0.0)
    return near


@every_grid
@every_draw
@pytest.mark.parametrize("takes", ["numbers", "tensors"])
def test_per_tensor(grid: Grid, inputs: draw.Draw, takes: str) -> None:
    nears = []
    for seed in range(10):
        x, s, z = draw.case(grid, (20_000,), PerTensor(), inputs, seed)
        params = (s.item(), z.item()) if takes == "numbers" else (s, z)

        def peer(x: Tensor, params: tuple = params) -> Tensor:
            return torch.fake_quantize_per_tensor_affine(x, *params, grid.quant_min, grid.quant_max)

        nears.append(assert_fake_quantizes_alike(peer, x, s, z, grid, PerTensor()))
    if inputs is draw.uniform_inputs:
        assert_few(torch.stack(nears), grid)


# torch takes per-channel codes through an int64 that wraps, so that huge values end at quant_min.
REACH = 2.0**60


@every_grid
@every_draw
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_per_channel(grid: Grid, inputs: draw.Draw, axis: int) -> None:
    per = PerChannel(axis)
    x, s, z = draw.case(grid, (40, 50, 60), per, draw.within(REACH, inputs))

    def peer(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_channel_affine(x, s, z, axis, grid.quant_min, grid.quant_max)

    near = assert_fake_quantizes_alike(peer, x, s, z, grid, per)
    if inputs is draw.uniform_inputs:
        assert_few(near, grid)


@every_grid
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(grid: Grid, dtype: torch.dtype) -> None:
    for scale in (0.013, 0.25):
        s, z = torch.tensor(scale), torch.tensor(grid.quant_max // 3, dtype=torch.int32)
        x = draw.mixed_inputs(grid, s.expand(20_000), z, torch.Generator().manual_seed(0)).to(dtype)

        def peer(x: Tensor, s: Tensor = s, z: Tensor = z) -> Tensor:
            return torch.fake_quantize_per_tensor_affine(x, s, z, grid.quant_min, grid.quant_max)

        assert_fake_quantizes_alike(peer, x, s, z, grid, PerTensor())


def test_torch_multiplies_by_the_reciprocal() -> None:
    s, z = torch.tensor(0.3), torch.tensor(0, dtype=torch.int32)
    x = (torch.arange(-120, 120) + 0.5) * s
    differs = fake_quantize(x, s) != torch.fake_quantize_per_tensor_affine(x, s, z, -128, 127)
    product = (x * (1 / s)).round().clamp(-128, 127) * s
    assert differs.any()
    assert_same_bits(torch.fake_quantize_per_tensor_affine(x, s, z, -128, 127), product + 0.0)


def test_torch_makes_nan_the_lowest_value_and_multiplies_by_its_mask() -> None:
    x, g = torch.tensor([math.nan, 1e9], requires_grad=True), torch.tensor([1.0, math.inf])
    y = torch.fake_quantize_per_tensor_affine(x, 1.0, 0, -128, 127)
    assert_same_bits(y.detach(), torch.tensor([-128.0, 127.0]))
    assert torch.autograd.grad(y, x, g)[0][1].isnan()
    ours = fake_quantize(x, torch.tensor(1.0), ste=SteKind.IN_RANGE)
    assert_same_bits(ours.detach(), torch.tensor([math.nan, 127.0]))
    assert_same_bits(torch.autograd.grad(ours, x, g)[0], torch.tensor([0.0, 0.0]))


def learned(grid: Grid, per: object) -> object:
    return lambda x, s, z: learned_fake_quantize(x, s, z, grid=grid, per=per, ste=SteKind.IN_RANGE, grad_scale=False)


def torch_learned(grid: Grid, per: object) -> object:
    ends = (grid.quant_min, grid.quant_max, 1.0)
    if isinstance(per, PerChannel):
        return lambda x, s, z: torch._fake_quantize_learnable_per_channel_affine(x, s, z, per.axis, *ends)
    return lambda x, s, z: torch._fake_quantize_learnable_per_tensor_affine(x, s.reshape(1), z.reshape(1), *ends)


def learned_case(grid: Grid, inputs: draw.Draw) -> tuple[Tensor, Tensor, Tensor]:
    """One element to a channel, so that nothing is summed."""
    x, s, z = draw.case(grid, (60_000,), PerChannel(0), draw.within(REACH, inputs))
    return x[:, None], s, z


@every_grid
@every_draw
def test_learned_values_and_dx(grid: Grid, inputs: draw.Draw) -> None:
    x, s, z = learned_case(grid, inputs)
    fraction = (torch.rand(z.shape, generator=torch.Generator().manual_seed(2)) - 0.5) * 0.9
    y, dx, _, _ = value_and_gradients(learned(grid, PerChannel(0)), x, s, z + fraction)
    peer_y, peer_dx, _, _ = value_and_gradients(torch_learned(grid, PerChannel(0)), x, s, z + fraction)
    step, shift = s[:, None], z[:, None]
    assert_same_but_near(y, peer_y, near_a_boundary(x, step, shift, grid), step)
    near = near_a_boundary(x, step, shift, grid, shifts_first=True)
    assert_same_bits(dx[~near], peer_dx[~near] + 0.0)
    if inputs is draw.uniform_inputs:
        assert_few(near, grid)


@every_grid
@every_draw
def test_learned_ds_and_dz(grid: Grid, inputs: draw.Draw) -> None:
    """Three regions, with v = x / s and r = round(v):

    - inside the range both have ds = g * (r - v), torch as g * (r * s - x) * (1 / s): each within g * eps * (v + 2)
    - where the code is clipped, both have ds = g * end and dz = -g * s
    - in the half step between, x clips but its code does not: torch takes it for inside, we for clipped
    """
    x, s, z = learned_case(grid, inputs)
    _, _, ds, dz = value_and_gradients(learned(grid, PerChannel(0)), x, s, z.float())
    _, _, peer_ds, peer_dz = value_and_gradients(torch_learned(grid, PerChannel(0)), x, s, z.float())
    g, x = upstream(x)[:, 0], x[:, 0]
    low, high, v = grid.quant_min - z, grid.quant_max - z, x.double() / s.double()
    near = near_a_boundary(x, s, z, grid, shifts_first=True)
    inside = (x >= low * s) & (x <= high * s) & ~near
    clipped = ((v.round() < low) | (v.round() > high)) & ~near
    between = ~inside & ~clipped & ~near
    if inputs is draw.hard_inputs:
        assert all(region.sum() > 30 for region in (inside, clipped, between))

    exact, slack = g * (v.round() - v), g.abs() * EPS * (v.abs() + 2)
    assert ((ds - exact).abs() <= slack)[inside].all()
    assert ((peer_ds - exact).abs() <= slack)[inside | between].all()
    assert_same_bits(ds[clipped] + 0.0, peer_ds[clipped] + 0.0)
    assert_same_bits(dz[inside | clipped], peer_dz[inside | clipped])
    assert_same_bits(ds[between] + 0.0, (g * torch.where(x > high * s, high, low))[between] + 0.0)
    assert_same_bits(dz[between], (-g * s)[between])
    assert not peer_dz[between].any()


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerChannel(1)], ids=str)
@pytest.mark.parametrize("zero_point", [0.0, 2.0, 6.0])
def test_learned_sums(per: object, zero_point: float) -> None:
    """Eighths of a step and whole gradients: every sum is exact, in any order, so all bits agree."""
    grid, shape, generator = Grid(4), (32, 64), torch.Generator().manual_seed(0)
    params = oracle.scale_shape(shape, per)
    s, z = torch.full(params, 0.25), torch.full(params, zero_point)
    steps = torch.randint(-96, 97, shape, generator=generator) / 8
    low, high = grid.quant_min - zero_point, grid.quant_max - zero_point
    between = ((steps > high) & (steps <= high + 0.5)) | ((steps < low) & (steps >= low - 0.5))
    x = torch.where(between, 0, steps) * 0.25
    g = torch.tensor([-2.0, -1.0, 1.0, 2.0])[torch.randint(4, shape, generator=generator)]
    ours, theirs = (value_and_gradients(make(grid, per), x, s, z, g=g) for make in (learned, torch_learned))
    for actual, expected in zip(ours, theirs, strict=True):
        assert_same_bits(actual, expected + 0.0)


LEARNED_DIFFERENCES = {
    # name: zero point, x in steps, torch's and our (dx, ds, dz) for g = 1, s = 1
    "torch rounds after it adds z": (3.0, 124.5, (0.0, 124.0, -1.0), (1.0, 124.0, -1.0)),
    "torch's backward takes -3 for -2": (-3.0, 300.0, (0.0, 129.0, -1.0), (0.0, 130.0, -1.0)),
    "torch clips where the code clips": (0.0, 127.25, (1.0, -0.25, 0.0), (1.0, 127.0, -1.0)),
}


@pytest.mark.parametrize(("z", "x", "theirs", "ours"), LEARNED_DIFFERENCES.values(), ids=LEARNED_DIFFERENCES)
def test_learned_differences(z: float, x: float, theirs: tuple, ours: tuple) -> None:
    leaves = [torch.tensor(value, requires_grad=True) for value in (x, 1.0, z)]
    for make, expected in ((torch_learned, theirs), (learned, ours)):
        gradients = torch.autograd.grad(make(Grid(8), PerTensor())(*leaves), leaves)
        assert tuple(gradient.item() for gradient in gradients) == expected


# Said once per process, by whichever call comes first.
deprecated = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel and other quantized tensor creation:UserWarning"
)
QINTS = {"qint8": (torch.qint8, torch.int8, Grid(8)), "quint8": (torch.quint8, torch.uint8, Grid(8, signed=False))}


@deprecated
@every_draw
@pytest.mark.parametrize(("qint", "dtype", "grid"), QINTS.values(), ids=QINTS)
@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerChannel(1)], ids=str)
def test_quantized_tensors(per: object, qint: torch.dtype, dtype: torch.dtype, grid: Grid, inputs: draw.Draw) -> None:
    x, s, z = draw.case(grid, (300, 200), per, inputs)
    peer = (
        torch.quantize_per_tensor(x, s.item(), z.item(), qint)
        if per == PerTensor()
        else torch.quantize_per_channel(x, s, z, per.axis, qint)
    )
    step, shift = draw.spread(s, x.shape, per), draw.spread(z, x.shape, per)
    near = near_a_boundary(x, step, shift, grid, shifts_first=True)
    codes = quantize(x, s, z, grid=grid, per=per, dtype=dtype)
    assert_same_but_near(codes.int(), peer.int_repr().int(), near, torch.ones_like(step))
    assert_same_bits(dequantize(peer.int_repr(), s, z, per=per), peer.dequantize())
    if inputs is draw.uniform_inputs:
        assert_few(near, grid)
