"""Linear layers in one step: its values, gradients and bytes are those of the long way, which runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inputs
from compare import assert_same_bits
from inputs import leaf as data
from lowbit import Grid, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional import linear
from lowbit.functional.linear import (
    Coded,
    code,
    code_per_batch,
    integer_linear,
    linear_by_kept_scale,
    linear_per_batch,
)
from lowbit.kernels import plan
from lowbit.kernels.products import column_sums, selected_product

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = Grid(8, narrow=True)


def tokens(x: Tensor) -> Coded:
    return code_per_batch(x, grid=Grid(8), per=PerToken(), symmetric=True)


def channels(w: Tensor) -> Coded:
    return code_per_batch(w, grid=NARROW, per=PerChannel(0), symmetric=True)


def kept_by(run: Callable[[], object]) -> list[Tensor]:
    """What autograd keeps."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        run()
    return kept


def size_of(kept: list[Tensor]) -> int:
    """In bytes, memory that several share counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())


def per_batch(
    x: Tensor, w: nn.Parameter, bias: Tensor | None, dtype: torch.dtype, *, coded: bool = False
) -> tuple[Tensor, Tensor]:
    """linear_per_batch, and what it is short for."""
    long = integer_linear(tokens(x), channels(w), bias, dtype=dtype)
    given = channels(w) if coded else w
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
    for weight in (w, channels(w)):
        kept = kept_by(partial(linear_per_batch, x, weight, x_grid=Grid(8), w_grid=NARROW, dtype=torch.float32))
        assert size_of(kept) == 96 * 100
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
    given, records = channels(w), {"x_grid": grid, "w_grid": NARROW, "ste": ste, "dtype": dtype}
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


def test_one_scale_that_is_kept_knows_nan_and_second_derivatives(device: torch.device) -> None:
    x, w = data((6, 32)).to(device), nn.Parameter(data((8, 32), seed=1).detach().to(device))
    scale = torch.tensor(0.01, device=device)
    records = {"x_grid": Grid(8), "w_grid": NARROW, "ste": SteKind.CLIPPED_IDENTITY, "dtype": torch.float32}
    found = []
    coded = code(x, scale, None, grid=Grid(8), per=PerTensor(), ste=SteKind.CLIPPED_IDENTITY)
    wanted = integer_linear(coded, channels(w))
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
        run = partial(linear_by_kept_scale, given, kept, w, ste=ste, dtype=torch.float32, **records)
        size = size_of(kept_by(run))
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
        assert size_of(kept_by(run)) == x.numel() + w.numel() + scales
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
