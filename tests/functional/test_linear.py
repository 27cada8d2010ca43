"""Linear layers on integer products: the sums written out in int64, the gradients in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inputs
from compare import assert_same_bits
from inputs import leaf as data
from lowbit import Grid, PerChannel, PerTensor, PerToken, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward
from lowbit.functional.linear import Coded, code, code_parameters, code_per_batch, integer_linear
from lowbit.kernels import plan
from lowbit.kernels.products import code_rows
from oracle import group_index

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = Grid(8, narrow=True)


def fixed(grid: Grid, per: object, *, affine: bool, ste: SteKind = SteKind.CLIPPED_IDENTITY) -> Callable[..., Coded]:
    """A quantizer that clips some of what it takes."""

    def quantize(x: Tensor) -> Coded:
        scale, zero_point = inputs.params(x, per, grid, affine=affine)
        return code(x, scale * 0.7, zero_point, grid=grid, per=per, ste=ste)

    return quantize


QUANTIZERS: dict[str, Callable[[Tensor], Coded]] = {
    "token": lambda x: code_per_batch(x, grid=Grid(8), per=PerToken(), symmetric=True),
    "token, affine": lambda x: code_per_batch(x, grid=Grid(7, signed=False), per=PerToken(), symmetric=False),
    "tensor": lambda x: code_per_batch(x, grid=Grid(4), per=PerTensor(), symmetric=True),
    "clipped": fixed(Grid(8), PerTensor(), affine=False),
    "in range": fixed(Grid(3), PerTensor(), affine=False, ste=SteKind.IN_RANGE),
    "unsigned": fixed(Grid(8, signed=False), PerTensor(), affine=False),
    "affine": fixed(Grid(8, signed=False), PerTensor(), affine=True),
    "2 bits": fixed(Grid(2, signed=False), PerTensor(), affine=False),
    "rows, affine": fixed(Grid(8, signed=False), PerToken(), affine=True),
}
WEIGHTS: dict[str, Callable[[Tensor], Coded]] = {
    "channels": lambda w: code_per_batch(w, grid=NARROW, per=PerChannel(0), symmetric=True),
    "tensor": lambda w: code_per_batch(w, grid=NARROW, per=PerTensor(), symmetric=True),
    "ternary": fixed(Grid(2, narrow=True), PerTensor(), affine=False, ste=SteKind.IDENTITY),
}
SHAPES = [((6, 16), 8), ((2, 3, 5), 7), ((1, 8), 4), ((40, 24), 1), ((9,), 3), ((0, 8), 4), ((3, 1), 2)]


def spread(values: Tensor | None, coded: Coded) -> Tensor:
    if values is None:
        return torch.zeros(())
    return values.expand(coded.scale.shape).reshape(-1)[group_index(tuple(coded.q.shape), coded.per)]


def write_out(x: Coded, w: Coded, bias: Tensor | None) -> Tensor:
    """y = float(sum (q_x - z_x) * q_w) * (s_x * s_w) + b"""
    dtype = x.carrier.dtype
    x, w = (Coded(*(part.cpu() if isinstance(part, Tensor) else part for part in coded)) for coded in (x, w))
    sums = (x.q.long() - spread(x.zero_point, x).long()) @ w.q.long().t()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = (spread(part.scale, part)[..., :1].to(wide) for part in (x, w))
    x_scale, w_scale = (scale.detach() for scale in scales)
    y = sums.to(wide) * (x_scale * w_scale.t().view(-1))
    return (y if bias is None else y + bias.detach().cpu().to(wide)).to(dtype)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_are_the_sums_scaled_in_one_order(
    dtype: torch.dtype, name: str, weight: str, device: torch.device
) -> None:
    for (*rows, width), outputs in SHAPES[:-2]:
        x, w = data((*rows, width), dtype).to(device), data((outputs, width), dtype, seed=1).to(device)
        for bias in (None, data((outputs,), dtype, seed=2).to(device)):
            coded = QUANTIZERS[name](x), WEIGHTS[weight](w)
            y = integer_linear(*coded, bias)
            assert y.device == x.device
            assert_same_bits(y.cpu(), write_out(*coded, bias))


@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_shapes(shape: tuple[int, ...], outputs: int, device: torch.device) -> None:
    x, w = data(shape).to(device), data((outputs, shape[-1]), seed=1).to(device)
    y = integer_linear(QUANTIZERS["affine"](x), WEIGHTS["channels"](w))
    assert y.shape == (*shape[:-1], outputs)
    y.sum().backward()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_values_of_codes_are_those_of_fake_quantize(name: str, device: torch.device) -> None:
    grids = {"clipped": Grid(8), "unsigned": Grid(8, signed=False), "affine": Grid(8, signed=False)}
    x = data((5, 24)).to(device)
    coded = QUANTIZERS[name](x)
    assert coded.carrier.untyped_storage().nbytes() == x.element_size()
    assert coded.q.dtype == torch.int8
    if name in grids:
        scale, zero_point = inputs.params(x, PerTensor(), grids[name], affine=name == "affine")
        assert_same_bits(coded.values(), fake_quantize(x, scale * 0.7, zero_point, grid=grids[name]).detach())
    wanted = (coded.q.double() - spread(coded.zero_point, coded)) * spread(coded.scale, coded).double()
    torch.testing.assert_close(coded.values().double(), wanted, rtol=1e-7, atol=0)


@pytest.mark.parametrize("name", ["token", "clipped", "in range", "affine"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients(dtype: torch.dtype, name: str, device: torch.device) -> None:
    """dx = rule(g @ w), dw = g^T @ x, db = sum g, at the quantized values, in float64"""
    x, w, b = data((2, 7, 24), dtype).to(device), data((5, 24), dtype, seed=1).to(device), data((5,), dtype, seed=2)
    b = b.to(device)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, w, b)]
    coded = QUANTIZERS[name](leaves[0]), WEIGHTS["channels"](leaves[1])
    y = integer_linear(*coded, leaves[2])
    g = inputs.random(tuple(y.shape), seed=3).to(dtype).to(device)
    dx, dw, db = torch.autograd.grad(y, leaves, g)
    x_hat, w_hat = (part.values().detach().double() for part in coded)
    wide = g.double()
    wanted = wide @ w_hat
    if name in ("clipped", "in range", "affine"):
        grid = {"clipped": Grid(8), "in range": Grid(3), "affine": Grid(8, signed=False)}[name]
        ste = SteKind.IN_RANGE if name == "in range" else SteKind.CLIPPED_IDENTITY
        scale, zero_point = inputs.params(x.detach(), PerTensor(), grid, affine=name == "affine")
        passed = fake_quantize_backward(torch.ones_like(x), x.detach(), scale * 0.7, zero_point, grid=grid, ste=ste)
        assert 0 < int((passed == 0).sum()) < x.numel()
        wanted = wanted * passed
        assert not dx[passed == 0].any()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dx.double(), wanted, rtol=8 * eps, atol=32 * eps)
    torch.testing.assert_close(dw.double(), wide.flatten(0, 1).t() @ x_hat.flatten(0, 1), rtol=8 * eps, atol=64 * eps)
    torch.testing.assert_close(db.double(), wide.sum((0, 1)), rtol=8 * eps, atol=16 * eps)


def test_a_second_derivative_is_that_of_the_values(device: torch.device) -> None:
    leaves = [data(shape, seed=i).detach().to(device).requires_grad_() for i, shape in enumerate([(6, 8), (4, 8)])]

    def penalty(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(part.square().sum() for part in first), leaves))

    coded = QUANTIZERS["clipped"](leaves[0]), WEIGHTS["channels"](leaves[1])
    scale, _ = inputs.params(leaves[0], PerTensor(), Grid(8), affine=False)
    x_hat = fake_quantize(leaves[0], (scale * 0.7).detach(), grid=Grid(8))
    w_hat = fake_quantize(leaves[1], coded[1].scale, grid=NARROW, per=PerChannel(0), ste=SteKind.IDENTITY)
    for got, wanted in zip(penalty(integer_linear(*coded)), penalty(F.linear(x_hat, w_hat)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "bits"), [("token", 0), ("clipped", 1)])
def test_codes_scales_and_clip_bits_are_all_that_is_kept(name: str, bits: int) -> None:
    x, w = data((64, 96)), data((32, 96), seed=1)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        integer_linear(QUANTIZERS[name](x), WEIGHTS["channels"](w))
    scales = 4 * (64 if name == "token" else 1) + 4 * 32
    assert sum(kept.values()) == 64 * 96 + 32 * 96 + scales + bits * 64 * 96 // 8


@pytest.mark.parametrize("ste", [SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE])
@pytest.mark.parametrize("elements", [1, 7, 8, 1023, 1025, 40_001])
def test_bits_of_native_kernels(elements: int, ste: SteKind) -> None:
    x, scale = torch.randn(elements), torch.tensor(0.01)
    found = {}
    for backend in ("native", "reference"):
        with plan.prefer(backend):
            found[backend] = plan.run("gradient_bits", x, x, scale, None, grid=Grid(8), ste=ste)
    assert torch.equal(found["native"], found["reference"])
    assert int(found["native"].count_nonzero()) > 0 or elements == 1


@pytest.mark.parametrize("bias", [torch.randn(8)[::2], torch.ones(1).expand(4)], ids=["strided", "expanded"])
def test_a_bias_that_lies_otherwise_in_memory(bias: Tensor, device: torch.device) -> None:
    bias = bias.to(device)
    coded = QUANTIZERS["token"](data((3, 16)).to(device)), WEIGHTS["channels"](data((4, 16), seed=1).to(device))
    assert_same_bits(integer_linear(*coded, bias).cpu(), write_out(*coded, bias))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rows_that_lie_apart(name: str, device: torch.device) -> None:
    """Memory that is taken as it is for images is no other for a linear layer."""
    x, w = data((2, 3, 5, 16)).detach().to(device), WEIGHTS["channels"](data((4, 16), seed=1).to(device))
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        leaf = x.contiguous(memory_format=memory).requires_grad_()
        y = integer_linear(QUANTIZERS[name](leaf), w)
        found.append((y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0].contiguous()))
    for got, wanted in zip(*found, strict=True):
        assert_same_bits(got.cpu(), wanted.cpu())


def test_refusals() -> None:
    x = torch.randn(4, 8)
    records = {"grid": Grid(8), "per": PerTensor(), "ste": SteKind.IDENTITY}
    with pytest.raises(ValueError, match=r"scale holds -1\.0"):
        code(x, torch.tensor(-1.0), None, **records)
    with pytest.raises(ValueError, match="zero_point holds 300"):
        code(x, torch.tensor(1.0), torch.tensor(300), **records)
    long = code_per_batch(torch.randn(1, 2**16 + 1), grid=Grid(8), per=PerTensor(), symmetric=True)
    with pytest.raises(ValueError, match="rows of 65537 codes may have sums beyond 32 bits"):
        integer_linear(long, long)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_many_weights_are_coded_as_each_by_itself(dtype: torch.dtype, device: torch.device) -> None:
    weights = [data(shape, dtype, seed).detach().to(device) for seed, shape in enumerate([(5, 16), (3, 40), (7, 33)])]
    weights[0][3] = 0
    weights[1][2, 3], weights[2][1, 1] = torch.nan, torch.inf
    parameters = [nn.Parameter(weight) for weight in weights]
    for found, parameter in zip(code_parameters(parameters, grid=NARROW), parameters, strict=True):
        wanted = code_per_batch(parameter, grid=NARROW, per=PerChannel(0), symmetric=True)
        assert_same_bits(found.q, wanted.q)
        assert_same_bits(found.scale, wanted.scale)
        assert found.carrier is wanted.carrier is parameter


def test_scales_of_columns_are_not_those_of_rows(device: torch.device) -> None:
    x, scale = data((8, 8)).detach().to(device), torch.linspace(0.1, 2.0, 8, device=device)
    q, _, _ = code_rows(x, scale, None, grid=Grid(8), per=PerChannel(1), ste=None)
    wanted = torch.round(x.cpu() / scale.cpu()).clamp(-128, 127).to(torch.int8)
    assert torch.equal(q.cpu(), wanted)


def test_a_zero_point_of_uint8(device: torch.device) -> None:
    x, scale = data((4, 16)).detach().to(device), torch.tensor(0.05, device=device)
    found = []
    for dtype in (torch.uint8, torch.int32):
        zero_point = torch.tensor(5, dtype=dtype, device=device)
        coded = code(x, scale, zero_point, grid=Grid(8, signed=False), per=PerTensor(), ste=SteKind.CLIPPED_IDENTITY)
        found.append(coded.values())
    assert_same_bits(found[0].cpu(), found[1].cpu())
