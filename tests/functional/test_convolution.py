"""Convolutions on integer products: the sums written out in float64, which holds them, and the gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import inputs
from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerTensor, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward
from lowbit.functional.convolution import integer_convolution
from lowbit.functional.linear import Coded, code, code_per_batch
from lowbit.kernels import convolution, plan
from lowbit.kernels.convolution import Steps
from lowbit.kernels.native_products import put_channels_first, put_channels_last

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = Grid(8, narrow=True)
LAST = torch.channels_last


def fixed(grid: Grid, per: object, *, affine: bool, ste: SteKind = SteKind.CLIPPED_IDENTITY) -> Callable[..., Coded]:
    """A quantizer that clips some of what it takes."""

    def quantize(x: Tensor) -> Coded:
        scale, zero_point = inputs.params(x, per, grid, affine=affine)
        return code(x, scale * 0.7, zero_point, grid=grid, per=per, ste=ste)

    return quantize


QUANTIZERS: dict[str, Callable[[Tensor], Coded]] = {
    "tensor": lambda x: code_per_batch(x, grid=Grid(4), per=PerTensor(), symmetric=True),
    "tensor, affine": lambda x: code_per_batch(x, grid=Grid(7, signed=False), per=PerTensor(), symmetric=False),
    "images": lambda x: code_per_batch(x, grid=Grid(8), per=PerChannel(0), symmetric=True),
    "images, unsigned": fixed(Grid(8, signed=False), PerChannel(0), affine=False),
    "clipped": fixed(Grid(8), PerTensor(), affine=False),
    "in range": fixed(Grid(3), PerTensor(), affine=False, ste=SteKind.IN_RANGE),
    "unsigned": fixed(Grid(8, signed=False), PerTensor(), affine=False),
    "affine": fixed(Grid(8, signed=False), PerTensor(), affine=True),
}
WEIGHTS: dict[str, Callable[[Tensor], Coded]] = {
    "channels": lambda w: code_per_batch(w, grid=NARROW, per=PerChannel(0), symmetric=True),
    "tensor": lambda w: code_per_batch(w, grid=Grid(8), per=PerTensor(), symmetric=True),
    "ternary": fixed(Grid(2, narrow=True), PerTensor(), affine=False, ste=SteKind.IDENTITY),
}
# x, w, and how the window moves
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Steps]] = {
    "3x3": ((2, 8, 7, 6), (5, 8, 3, 3), Steps((1, 1), (1, 1), (1, 1))),
    "1x1": ((3, 17, 4, 5), (16, 17, 1, 1), Steps((1, 1), (0, 0), (1, 1))),
    "stride": ((2, 16, 9, 8), (32, 16, 3, 2), Steps((2, 3), (1, 1), (1, 1))),
    "dilation": ((1, 4, 9, 9), (3, 4, 3, 3), Steps((1, 1), (2, 2), (2, 2))),
    "wide padding": ((2, 3, 2, 2), (4, 3, 3, 3), Steps((1, 1), (3, 4), (1, 1))),
    "many channels": ((1, 64, 8, 8), (96, 64, 3, 3), Steps((1, 1), (1, 1), (1, 1))),
    "one of each": ((1, 1, 1, 1), (1, 1, 1, 1), Steps((1, 1), (0, 0), (1, 1))),
    "one axis": ((2, 8, 11), (6, 8, 3), Steps((2,), (1,), (1,))),
    "three axes": ((2, 4, 5, 6, 4), (6, 4, 3, 2, 3), Steps((1, 2, 1), (1, 0, 1), (1, 1, 1))),
}


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return inputs.random(shape, seed=seed).to(dtype).requires_grad_()


def convolve(x: Tensor, w: Tensor, steps: Steps) -> Tensor:
    return torch.convolution(x, w, None, *steps, False, [0] * len(steps.stride), 1)


def write_out(x: Coded, w: Coded, bias: Tensor | None, steps: Steps) -> Tensor:
    """y = float(sum (q_x - z_x) * q_w) * (s_x * s_w) + b"""
    dtype = x.carrier.dtype
    zero_point = 0 if x.zero_point is None else int(x.zero_point)
    sums = convolve(x.q.double().contiguous() - zero_point, w.q.double().contiguous(), steps)
    wide, ones = torch.float64 if dtype == torch.float64 else torch.float32, [1] * len(steps.stride)
    scale = x.scale.detach().to(wide).view(-1, 1, *ones) * w.scale.detach().to(wide).view(1, -1, *ones)
    y = sums.to(wide) * scale
    return (y if bias is None else y + bias.detach().to(wide).view(-1, *ones)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_are_the_sums_scaled_in_one_order(dtype: torch.dtype, shape: str) -> None:
    x_shape, w_shape, steps = SHAPES[shape]
    x, w = data(x_shape, dtype), data(w_shape, dtype, seed=1)
    for quantize in QUANTIZERS.values():
        for weigh in WEIGHTS.values():
            for bias in (None, data(w_shape[:1], dtype, seed=2)):
                coded = quantize(x), weigh(w)
                y = integer_convolution(*coded, bias, steps=steps)
                assert y.is_contiguous()
                assert_same_bits(y, write_out(*coded, bias, steps))


def test_the_largest_sums() -> None:
    """The longest row, all codes at their ends: nothing overflows, and float32 rounds the sum once."""
    steps, scale = Steps((1, 1), (1, 1), (1, 1)), torch.tensor(0.003)
    x = code(torch.ones(1, 2**14, 2, 2), scale, None, grid=Grid(8, signed=False), per=PerTensor(), ste=SteKind.IDENTITY)
    w = code(-torch.ones(32, 2**14, 2, 2), scale, None, grid=Grid(8), per=PerTensor(), ste=SteKind.IDENTITY)
    y = integer_convolution(x, w, steps=steps)
    assert_same_bits(y, write_out(x, w, None, steps))
    assert float(y.min() / scale.square()) < -0.99 * 2**31
    with pytest.raises(ValueError, match="sums of 65540 products of codes may not fit 32 bits"):
        integer_convolution(x, w._replace(q=torch.zeros(1, 16385, 2, 2)), steps=steps)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_channels_that_lie_last(name: str) -> None:
    """The same codes, values and gradients, and memory as torch's own convolution has it."""
    x_shape, w_shape, steps = SHAPES["stride"]
    found = []
    for x_format, w_format in ((None, None), (LAST, None), (None, LAST), (LAST, LAST)):
        x, w = data(x_shape).detach(), data(w_shape, seed=1).detach()
        x = x.contiguous(memory_format=x_format or torch.contiguous_format).requires_grad_()
        w = w.contiguous(memory_format=w_format or torch.contiguous_format).requires_grad_()
        coded = QUANTIZERS[name](x), WEIGHTS["channels"](w)
        assert coded[0].q.stride() == x.stride()
        y = integer_convolution(*coded, steps=steps)
        assert y.stride() == convolve(x, w, steps).stride()
        found.append((y.detach(), *torch.autograd.grad(y, [x, w], inputs.random(tuple(y.shape), seed=3))))
    for other in found[1:]:
        assert_same_bits(other[0].contiguous(), found[0][0])
        for got, wanted in zip(other[1:], found[0][1:], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
            assert torch.equal(got == 0, wanted == 0)  # what is clipped


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["images", "clipped", "in range", "affine"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype: torch.dtype, name: str, shape: str) -> None:
    """Those of the convolution of the quantized values, in float64, and dx by the rule."""
    x_shape, w_shape, steps = SHAPES[shape]
    leaves = [data(x_shape, dtype), data(w_shape, dtype, seed=1), data(w_shape[:1], dtype, seed=2)]
    coded = QUANTIZERS[name](leaves[0]), WEIGHTS["channels"](leaves[1])
    y = integer_convolution(*coded, leaves[2], steps=steps)
    g = inputs.random(tuple(y.shape), seed=3).to(dtype)
    found = torch.autograd.grad(y, leaves, g)
    values = [part.values().detach().double().requires_grad_() for part in coded]
    wanted = list(torch.autograd.grad(convolve(*values, steps), values, g.double()))
    if name in ("clipped", "in range", "affine"):
        grid = {"clipped": Grid(8), "in range": Grid(3), "affine": Grid(8, signed=False)}[name]
        ste = SteKind.IN_RANGE if name == "in range" else SteKind.CLIPPED_IDENTITY
        x = leaves[0].detach()
        scale, zero_point = inputs.params(x, PerTensor(), grid, affine=name == "affine")
        passed = fake_quantize_backward(torch.ones_like(x), x, scale * 0.7, zero_point, grid=grid, ste=ste)
        assert x.numel() < 100 or 0 < int((passed == 0).sum()) < x.numel()
        assert not found[0][passed == 0].any()
        wanted[0] = wanted[0] * passed
    wanted.append(g.double().transpose(0, 1).flatten(1).sum(1))
    eps = torch.finfo(dtype).eps
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=4 * eps * max(float(want.abs().max()), 1))


def test_gradients_that_nobody_asks_for() -> None:
    x_shape, w_shape, steps = SHAPES["3x3"]
    x, w, b = data(x_shape), data(w_shape, seed=1), data(w_shape[:1], seed=2)
    for leaf in (x, w, b):
        own = [tensor if tensor is leaf else tensor.detach() for tensor in (x, w, b)]
        y = integer_convolution(QUANTIZERS["clipped"](own[0]), WEIGHTS["channels"](own[1]), own[2], steps=steps)
        (grad,) = torch.autograd.grad(y.square().sum(), [leaf])
        assert grad.shape == leaf.shape
        assert grad.any()


def test_a_second_derivative_is_that_of_the_values() -> None:
    x_shape, w_shape, steps = SHAPES["3x3"]
    leaves = [data(x_shape), data(w_shape, seed=1)]

    def penalty(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(part.square().sum() for part in first), leaves))

    coded = QUANTIZERS["clipped"](leaves[0]), WEIGHTS["channels"](leaves[1])
    scale, _ = inputs.params(leaves[0], PerTensor(), Grid(8), affine=False)
    x_hat = fake_quantize(leaves[0], (scale * 0.7).detach(), grid=Grid(8))
    w_hat = fake_quantize(leaves[1], coded[1].scale, grid=NARROW, per=PerChannel(0), ste=SteKind.IDENTITY)
    found = penalty(integer_convolution(*coded, steps=steps))
    for got, wanted in zip(found, penalty(convolve(x_hat, w_hat, steps)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize(("name", "bits", "scales"), [("images", 0, 4), ("clipped", 1, 1)])
@pytest.mark.parametrize("memory", [torch.contiguous_format, LAST], ids=str)
def test_codes_scales_and_clip_bits_are_all_that_is_kept(
    name: str, bits: int, scales: int, memory: torch.memory_format
) -> None:
    x = data((4, 16, 6, 8)).detach().contiguous(memory_format=memory).requires_grad_()
    w = data((8, 16, 3, 3), seed=1)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        integer_convolution(QUANTIZERS[name](x), WEIGHTS["channels"](w), steps=Steps((1, 1), (1, 1), (1, 1)))
    assert sum(kept.values()) == x.numel() + w.numel() + 4 * (scales + 8) + bits * x.numel() // 8


@pytest.mark.parametrize("memory", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("name", ["clipped", "affine", "tensor", "images"])
def test_nan_reaches_what_it_touches(name: str, memory: torch.memory_format) -> None:
    x_shape, w_shape, steps = SHAPES["3x3"]
    x = data(x_shape).detach().contiguous(memory_format=memory)
    x[1, 2, 3, 4] = float("inf")
    weight = WEIGHTS["channels"](data(w_shape, seed=1))
    assert integer_convolution(QUANTIZERS[name](x), weight, steps=steps).isfinite().all()
    x[1, 2, 3, 4] = float("nan")
    y = integer_convolution(QUANTIZERS[name](x), weight, steps=steps)
    assert y[1, :, 2:5, 3:6].isnan().all()
    assert name == "tensor" or y[0].isfinite().all()
    x = data(x_shape)
    for quantize in (WEIGHTS["channels"], fixed(NARROW, PerChannel(0), affine=False), WEIGHTS["ternary"]):
        w = data(w_shape, seed=1).detach()
        w[3, 0, 1, 1] = float("nan")
        y = integer_convolution(QUANTIZERS[name](x), quantize(w), steps=steps)
        assert y[:, 3].isnan().all()
        assert y[:, :3].isfinite().all()


def test_values_divided_by_a_factor() -> None:
    """w_hat = q * (s / f) and the carrier's gradient g / f: what (q * s) / f has"""
    w, factor = data((5, 8, 3, 3)), torch.tensor([0.5, -2.0, 3.0, -0.1, 7.0])
    g = inputs.random((5, 8, 3, 3), seed=3)
    for name in WEIGHTS:
        coded = WEIGHTS[name](w)
        divided = coded.divide(factor)
        values, wanted = divided.values(), coded.values() / factor.view(-1, 1, 1, 1)
        torch.testing.assert_close(values, wanted, rtol=3e-7, atol=0)
        assert_same_bits(*(torch.autograd.grad(part, w, g, retain_graph=True)[0] for part in (values, wanted)))


def test_an_empty_batch() -> None:
    x, w = data((0, 8, 7, 6)), data((5, 8, 3, 3), seed=1)
    y = integer_convolution(QUANTIZERS["images"](x), WEIGHTS["channels"](w), steps=Steps((1, 1), (1, 1), (1, 1)))
    assert y.shape == (0, 5, 7, 6)
    y.sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


@pytest.mark.parametrize("size", [1, 2 * 4 * 16 * 5 * 5])
def test_some_images_at_a_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, steps = data((5, 8, 5, 5)), data((16, 8, 3, 3), seed=1), Steps((1, 1), (1, 1), (1, 1))
    coded = QUANTIZERS["affine"](x), WEIGHTS["channels"](w)
    monkeypatch.setattr(convolution, "_PART", size)
    assert_same_bits(integer_convolution(*coded, steps=steps), write_out(*coded, None, steps))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_native_kernels(shape: str) -> None:
    x_shape, w_shape, steps = SHAPES[shape]
    coded = QUANTIZERS["affine"](data(x_shape)), WEIGHTS["channels"](data(w_shape, seed=1))
    wanted = integer_convolution(*coded, steps=steps)
    with plan.prefer("reference"):
        assert_same_bits(integer_convolution(*coded, steps=steps), wanted)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 16, 4, 4), (2, 17, 5, 7), (1, 33, 40, 31), (2, 3, 50), (5, 64, 1)])
def test_channels_put_last_and_first(shape: tuple[int, ...]) -> None:
    q = torch.randint(-128, 128, shape).to(torch.int8)
    assert torch.equal(put_channels_last(q).int() - 128, q.movedim(1, -1).int())
    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.randn(shape).to(dtype), torch.empty(shape, dtype=dtype)
        put_channels_first(x.movedim(1, -1).contiguous(), y)
        assert_same_bits(y, x)
