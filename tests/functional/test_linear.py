"""Linear layers on integer products: the sums written out in int64, the gradients in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inputs
from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward, linear
from lowbit.functional.linear import (
    Coded,
    code,
    code_parameters,
    code_per_batch,
    integer_linear,
    linear_by_kept_scale,
    linear_per_batch,
)
from lowbit.kernels import plan
from lowbit.kernels.products import code_rows, column_sums, selected_product
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


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return inputs.random(shape, seed=seed).to(dtype).requires_grad_()


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


def per_batch(
    x: Tensor, w: nn.Parameter, bias: Tensor | None, dtype: torch.dtype, *, coded: bool = False
) -> tuple[Tensor, Tensor]:
    """linear_per_batch, and what it is short for."""
    long = integer_linear(QUANTIZERS["token"](x), WEIGHTS["channels"](w), bias, dtype=dtype)
    given = WEIGHTS["channels"](w) if coded else w
    return linear_per_batch(x, given, bias, x_grid=Grid(8), w_grid=NARROW, dtype=dtype), long


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "outputs"), [((70, 32), 300), ((2, 3, 48), 7), ((1, 16), 1), ((6, 5), 4)])
@pytest.mark.parametrize("coded", [False, True])
def test_rows_with_their_own_ranges(
    coded: bool, shape: tuple[int, ...], outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, w = data(shape, dtype).to(device), nn.Parameter(data((outputs, shape[-1]), dtype, seed=1).detach().to(device))
    for bias in (None, data((outputs,), dtype, seed=2).to(device)):
        y, wanted = per_batch(x, w, bias, dtype, coded=coded)
        assert_same_bits(y.cpu(), wanted.cpu())
        g = inputs.random(tuple(y.shape), seed=3).to(dtype).to(device)
        leaves = [x, w] if bias is None else [x, w, bias]
        alone = [torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for leaf in leaves]
        gradients, eps = torch.autograd.grad(wanted, leaves, g), torch.finfo(dtype).eps
        for found in (alone, torch.autograd.grad(y, leaves, g)):
            for got, gradient in zip(found, gradients, strict=True):
                torch.testing.assert_close(got, gradient, rtol=8 * eps, atol=64 * eps)


def test_rows_with_their_own_ranges_in_another_dtype(device: torch.device) -> None:
    """As under autocast, where only the product is narrow."""
    x, w = data((40, 32)).to(device), nn.Parameter(data((8, 32), seed=1).detach().to(device))
    y, wanted = per_batch(x, w, bias := data((8,), seed=2).to(device), torch.bfloat16)
    assert_same_bits(y.cpu(), wanted.cpu())
    g = torch.ones((), dtype=torch.bfloat16, device=device).expand_as(y)
    pairs = zip(*(torch.autograd.grad(found, [x, w, bias], g) for found in (y, wanted)), strict=True)
    for found, gradient in pairs:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, gradient, rtol=2**-6, atol=2**-6)


def test_rows_with_their_own_ranges_know_nan(device: torch.device) -> None:
    x, w = data((6, 32)).detach().to(device), nn.Parameter(data((8, 32), seed=1).detach().to(device))
    x[1, 2], x[3, 4] = float("nan"), float("inf")
    y, wanted = per_batch(x, w, None, torch.float32)
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4, 5]].isfinite().all()
    assert_same_bits(y.cpu(), wanted.cpu())


def test_rows_with_their_own_ranges_have_second_derivatives(device: torch.device) -> None:
    x, w = data((6, 16)).to(device), nn.Parameter(data((4, 16), seed=1).detach().to(device))
    found = []
    for y in (*per_batch(x, w, None, torch.float32), per_batch(x, w, None, torch.float32, coded=True)[0]):
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), [x, w]))
    for got, wanted, coded in zip(*found, strict=True):
        assert wanted.any()
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(coded, wanted, rtol=1e-4, atol=1e-3)


def test_rows_with_their_own_ranges_keep_codes_alone(device: torch.device) -> None:
    """And the same whether w was coded before: activation checkpointing may have it both ways."""
    x, w = data((64, 96)).to(device), nn.Parameter(data((32, 96), seed=1).detach().to(device))
    found = []
    for weight in (w, WEIGHTS["channels"](w)):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor), lambda _: None):
            linear_per_batch(x, weight, x_grid=Grid(8), w_grid=NARROW, dtype=torch.float32)
        assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()) == 96 * 100
        found.append([(tensor.numel(), tensor.dtype) for tensor in kept])
    assert found[0] == found[1]


def test_codes_may_come_back_in_other_memory(device: torch.device) -> None:
    x, w = data((40, 32)).to(device), nn.Parameter(data((8, 32), seed=1).detach().to(device))
    turned = torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t())
    g, found = inputs.random((40, 8), seed=3).to(device), []
    for hooks in (turned, nullcontext()):
        with hooks:
            y = linear_per_batch(x, w, x_grid=Grid(8), w_grid=NARROW, dtype=torch.float32)
        found.append(torch.autograd.grad(y, [x, w], g))
    for got, wanted in zip(*found, strict=True):
        assert_same_bits(got.cpu(), wanted.cpu())


def test_sums_of_columns_are_rounded_once(device: torch.device) -> None:
    g = inputs.random((700, 5), seed=3).to(torch.bfloat16).to(device)
    found = column_sums(g, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), g.double().sum(0), rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        assert_same_bits(column_sums(g, torch.bfloat16).cpu(), found.to(torch.bfloat16).cpu())


def test_a_zero_point_of_uint8(device: torch.device) -> None:
    x, scale = data((4, 16)).detach().to(device), torch.tensor(0.05, device=device)
    found = []
    for dtype in (torch.uint8, torch.int32):
        zero_point = torch.tensor(5, dtype=dtype, device=device)
        coded = code(x, scale, zero_point, grid=Grid(8, signed=False), per=PerTensor(), ste=SteKind.CLIPPED_IDENTITY)
        found.append(coded.values())
    assert_same_bits(found[0].cpu(), found[1].cpu())


KEPT = {
    "8 bits": (Grid(8), SteKind.CLIPPED_IDENTITY, False),
    "8 bits, unsigned, affine": (Grid(8, signed=False), SteKind.CLIPPED_IDENTITY, True),
    "8 bits, unsigned": (Grid(8, signed=False), SteKind.IN_RANGE, False),
    "3 bits, affine": (Grid(3, signed=False), SteKind.IN_RANGE, True),
    "4 bits, identity": (Grid(4), SteKind.IDENTITY, False),
}


@pytest.mark.parametrize(
    ("shape", "outputs", "dtype"),
    [((40, 48), 40, torch.bfloat16), ((2, 3, 32), 7, torch.float32), ((1, 16), 8, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize(("coded", "kind"), [(False, kind) for kind in KEPT] + [(True, "8 bits, unsigned, affine")])
def test_one_scale_that_is_kept(
    kind: str, coded: bool, shape: tuple[int, ...], outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The backward is that of the scale that the forward had, whatever the state has become."""
    grid, ste, affine = KEPT[kind]
    x, w = data(shape, dtype).to(device), nn.Parameter(data((outputs, shape[-1]), dtype, seed=1).detach().to(device))
    bias = data((outputs,), dtype, seed=2).to(device)
    scale, zero_point = inputs.params(x, PerTensor(), grid, affine=affine)
    scale = scale.float() * 0.6
    kept = scale.clone(), None if zero_point is None else zero_point.clone()
    given, records = WEIGHTS["channels"](w), {"x_grid": grid, "w_grid": NARROW, "ste": ste, "dtype": dtype}
    wanted = integer_linear(code(x, scale, zero_point, grid=grid, per=PerTensor(), ste=ste), given, bias)
    y = linear_by_kept_scale(x, kept, given if coded else w, bias, **records)
    for state in kept:
        if state is not None:
            state += 1
    assert_same_bits(y.cpu(), wanted.cpu())
    g = inputs.random(tuple(y.shape), seed=3).to(dtype).to(device)
    gradients, eps = torch.autograd.grad(wanted, [x, w, bias], g), torch.finfo(dtype).eps
    for got, gradient in zip(torch.autograd.grad(y, [x, w, bias], g), gradients, strict=True):
        torch.testing.assert_close(got, gradient, rtol=8 * eps, atol=64 * eps)
    if ste is not SteKind.IDENTITY and x.numel() > 16:
        assert 0 < int((gradients[0] == 0).sum()) < x.numel()


def kept_by(run: Callable[[], object]) -> int:
    """Bytes that autograd keeps."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        run()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def test_one_scale_that_is_kept_knows_nan_and_second_derivatives(device: torch.device) -> None:
    x, w = data((6, 32)).to(device), nn.Parameter(data((8, 32), seed=1).detach().to(device))
    scale = torch.tensor(0.01, device=device)
    records = {"x_grid": Grid(8), "w_grid": NARROW, "ste": SteKind.CLIPPED_IDENTITY, "dtype": torch.float32}
    found = []
    coded = code(x, scale, None, grid=Grid(8), per=PerTensor(), ste=SteKind.CLIPPED_IDENTITY)
    wanted = integer_linear(coded, WEIGHTS["channels"](w))
    for y in (linear_by_kept_scale(x, (scale, None), w, **records), wanted):
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), [x, w]))
    for got, gradient in zip(*found, strict=True):
        assert gradient.any()
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        x[1, 2], x[3, 4] = float("nan"), float("inf")
    y = linear_by_kept_scale(x, (scale, None), w, **records)
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4, 5]].isfinite().all()


def test_one_scale_that_is_kept_keeps_codes_and_bits(device: torch.device) -> None:
    x, w = data((64, 96)).to(device), nn.Parameter(data((32, 96), seed=1).detach().to(device))
    kept, records = (torch.tensor(0.01, device=device), None), {"x_grid": Grid(8), "w_grid": NARROW}
    ste = SteKind.CLIPPED_IDENTITY
    codes, scales = 96 * 96, 4 * (64 + 32)
    for given, bits in ((x, 64 * 96 // 8), (x.detach(), 0)):  # the first layer of a network needs none
        size = kept_by(lambda: linear_by_kept_scale(given, kept, w, ste=ste, dtype=torch.float32, **records))  # noqa: B023
        assert codes + bits + 4 * 33 <= size <= codes + bits + scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.parametrize(
    ("shape", "outputs", "group"), [((20, 64), 40, 32), ((2, 3, 48), 7, 16), ((1, 16), 3, 8), ((3, 512), 9, 256)]
)
@pytest.mark.parametrize("coded", [False, True])
def test_groups_are_kept_as_codes(
    coded: bool, shape: tuple[int, ...], outputs: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, w = data(shape, dtype).to(device), nn.Parameter(data((outputs, shape[-1]), dtype, seed=1).detach().to(device))
    bias, grid = data((outputs,), dtype, seed=2).to(device), Grid(4, narrow=True)
    x_values = code_per_batch(x, grid=Grid(8), per=PerToken(), symmetric=True)
    w_codes = code_per_batch(w, grid=grid, per=PerGroup(group), symmetric=True)
    wanted = F.linear(x_values.values(), w_codes.values(), bias)
    given = w_codes if coded else w

    def run() -> Tensor:
        return linear_per_batch(x, given, bias, x_grid=Grid(8), w_grid=grid, dtype=dtype, group=group)

    found, eps = run(), torch.finfo(dtype).eps
    exact = [tensor.detach().double() for tensor in (x_values.values(), w_codes.values(), bias)]
    most = F.linear(*(tensor.abs() for tensor in exact))
    assert bool(((found.double() - F.linear(*exact)).abs() <= 2 * eps * most).all())
    g = inputs.random(tuple(wanted.shape), seed=3).to(dtype).to(device)
    gradients = torch.autograd.grad(wanted, [x, w, bias], g)
    for got, gradient in zip(torch.autograd.grad(found, [x, w, bias], g), gradients, strict=True):
        torch.testing.assert_close(got, gradient, rtol=8 * eps, atol=64 * eps)
    if plan.runs("triton", x):
        rows = x.numel() // x.shape[-1]
        scales = 4 * (rows + w.numel() // group)
        assert kept_by(run) == x.numel() + w.numel() + scales
    second = []
    for y in (run(), F.linear(x_values.values(), w_codes.values(), bias)):
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        second.append(torch.autograd.grad(sum(part.square().sum() for part in first), [x, w]))
    for got, gradient in zip(*second, strict=True):
        assert gradient.any()
        assert float((got - gradient).double().norm() / gradient.double().norm()) < 16 * eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(20, 40, 48), (1, 8, 8), (33, 7, 16)])
def test_a_product_where_bits_are_set(
    rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Also of a g that starts anywhere in memory, and bits that do not lie together."""
    g, w = (data(shape, dtype).detach().to(device) for shape in ((rows, inner), (inner, columns)))
    bits = torch.randint(256, (rows * columns // 8,), dtype=torch.uint8).to(device)
    passed = (bits.cpu()[:, None] >> torch.arange(8) & 1).view(rows, columns).bool()
    wanted = torch.where(passed, g.cpu().double() @ w.cpu().double(), 0.0)
    apart, moved = torch.stack([bits, bits]).t()[:, 0], torch.cat([g.new_zeros(1), g.flatten()])[1:].view_as(g)
    for given, held in ((g, bits), (moved, apart)):
        with torch.no_grad():
            found = selected_product(given, w, held).cpu().double()
        assert not found[~passed].any()
        torch.testing.assert_close(found, wanted, rtol=2e-3 if dtype == torch.float32 else 0.02, atol=0.05)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])
def test_compiled_rows_with_their_own_ranges_are_two_ops(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiled code calls on a GPU, in the interpreter too; codes are what it keeps."""
    if not plan.runs("triton", torch.ones(1, device=device)):
        pytest.skip("the ops are Triton's")
    monkeypatch.setattr(linear, "has_linear_step", lambda *_: True)
    monkeypatch.delattr(linear, "integer_linear")
    leaves = [data(shape, seed=seed).detach().to(device) for seed, shape in enumerate([(2, 5, 32), (8, 32), (8,)])]
    x, w, bias = (nn.Parameter(leaf) for leaf in leaves)

    def run(x: Tensor) -> Tensor:
        return linear_per_batch(x, w, bias, x_grid=Grid(8), w_grid=NARROW, dtype=torch.float32)

    torch.compiler.reset()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = torch.compile(run, backend=backend, fullgraph=True)(x)
    assert sum(tensor.nbytes for tensor in kept) == (10 + 8) * (32 + 4)
    wanted, g = run(x), inputs.random((2, 5, 8), seed=3).to(device)
    assert_same_bits(y.cpu(), wanted.cpu())
    for asked in ([x, w, bias], [w]):
        pairs = zip(*(torch.autograd.grad(found, asked, g, retain_graph=True) for found in (y, wanted)), strict=True)
        for got, gradient in pairs:
            torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-5)
