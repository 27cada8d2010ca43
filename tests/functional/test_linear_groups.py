"""Linear layers whose weight has scales for groups of a row: the sums of groups written out, gradients in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import inputs
from compare import assert_same_bits
from inputs import leaf as data
from lowbit import Grid, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional.linear import Coded, code, code_per_batch, integer_linear
from lowbit.kernels import products

FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def clipped(grid: Grid, *, affine: bool) -> Callable[[Tensor], Coded]:
    def quantize(x: Tensor) -> Coded:
        scale, zero_point = inputs.params(x, PerTensor(), grid, affine=affine)
        return code(x, scale * 0.7, zero_point, grid=grid, per=PerTensor(), ste=SteKind.CLIPPED_IDENTITY)

    return quantize


QUANTIZERS: dict[str, Callable[[Tensor], Coded]] = {
    "tokens": lambda x: code_per_batch(x, grid=Grid(8), per=PerToken(), symmetric=True),
    "affine tokens": lambda x: code_per_batch(x, grid=Grid(7, signed=False), per=PerToken(), symmetric=False),
    "a tensor": clipped(Grid(8), affine=False),
    "an affine tensor": clipped(Grid(8, signed=False), affine=True),
}
# x, outputs, group; and whether sums of codes are what is scaled
CASES = [((6, 64), 5, 16, False), ((1, 3, 512), 9, 256, True), ((3, 64), 30, 64, True), ((4, 600), 3, 300, True)]
CASES += [((2, 1024), 3, 512, True)]  # a GPU multiplies these also where there is a zero point


def coded_pair(name: str, x: Tensor, w: Tensor, group: int) -> tuple[Coded, Coded]:
    return QUANTIZERS[name](x), code_per_batch(w, grid=Grid(4, narrow=True), per=PerGroup(group), symmetric=True)


def write_out(x: Coded, w: Coded, bias: Tensor) -> Tensor:
    """y = (sum_g float(sum_k (q_x - z) * q_w) * s_w[g]) * s_x + b; of one group, float(sum) * (s_x * s_w) + b"""
    dtype, groups = x.carrier.dtype, w.scale.shape[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q_x, x_scale, q_w, w_scale = (part.detach().cpu() for part in (x.q, x.scale, w.q, w.scale))
    zero_point = torch.zeros(()) if x.zero_point is None else x.zero_point.cpu()
    codes = q_x.long() - (zero_point[..., None] if zero_point.dim() else zero_point).long()
    sums = [a @ b.t() for a, b in zip(codes.chunk(groups, -1), q_w.long().chunk(groups, 1), strict=True)]
    x_scale = (x_scale[..., None] if x_scale.dim() else x_scale).to(wide)
    scales = w_scale.to(wide).unbind(1)
    if groups == 1:
        y = sums[0].to(wide) * (x_scale * scales[0])
    else:
        y = torch.zeros((), dtype=wide)
        for total, scale in zip(sums, scales, strict=True):
            y = y + total.to(wide) * scale
        y = y * x_scale
    return (y + bias.detach().cpu().to(wide)).to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
def test_values_and_gradients(
    dtype: torch.dtype, name: str, case: tuple[tuple[int, ...], int, int, bool], device: torch.device
) -> None:
    shape, outputs, group, by_codes = case
    leaves = [data((outputs, shape[-1]), dtype, seed=1), data((outputs,), dtype, seed=2)]
    x, w, bias = (tensor.detach().to(device).requires_grad_() for tensor in (data(shape, dtype), *leaves))
    coded = coded_pair(name, x, w, group)
    y = integer_linear(*coded, bias)
    values = [tensor.detach().double() for tensor in (coded[0].values(), coded[1].values(), bias)]
    eps, most = torch.finfo(dtype).eps, F.linear(*(tensor.abs() for tensor in values))
    assert bool(((y.double() - F.linear(*values)).abs() <= 2 * eps * most).all())
    multiplied = products.multiplies_groups(device.type, shape[-1], group, coded[0].zero_point is not None)
    assert multiplied == by_codes or device.type == "cuda"
    if multiplied:
        assert_same_bits(y.detach().cpu(), write_out(*coded, bias))
    g = inputs.random(tuple(y.shape), seed=3).to(dtype).to(device)
    dx, dw, db = torch.autograd.grad(y, [x, w, bias], g, retain_graph=True)
    rows, wide = g.double().flatten(0, -2), values[0].flatten(0, -2)
    passed = torch.autograd.grad(coded[0].carrier, x, torch.ones_like(x))[0].double()
    assert bool((passed == 0).any()) == ("tensor" in name)
    size = float(max(rows.abs().sum(), 1))
    torch.testing.assert_close(dx.double(), (g.double() @ values[1]) * passed, rtol=8 * eps, atol=eps * size)
    torch.testing.assert_close(dw.double(), rows.t() @ wide, rtol=8 * eps, atol=eps * size)
    torch.testing.assert_close(db.double(), rows.sum(0), rtol=8 * eps, atol=eps * size)


@pytest.mark.parametrize("group", [32, 256])
def test_the_dtype_is_the_one_that_is_asked_for(group: int, device: torch.device) -> None:
    x, w = data((4, 512)).detach().to(device), data((5, 512), seed=1).detach().to(device)
    wanted = integer_linear(*coded_pair("tokens", x, w, group))
    with torch.autocast(device.type, torch.bfloat16):
        assert_same_bits(integer_linear(*coded_pair("tokens", x, w, group)).cpu(), wanted.cpu())


@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize(("rows", "outputs"), [(0, 3), (2, 0)])
def test_empty_products(rows: int, outputs: int, group: int, device: torch.device) -> None:
    x, w = (torch.ones(size, 512, device=device) for size in (rows, outputs))
    assert integer_linear(*coded_pair("tokens", x, w, group)).shape == (rows, outputs)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_codes_scales_and_clip_bits_are_all_that_is_kept(
    name: str, case: tuple[tuple[int, ...], int, int, bool], device: torch.device
) -> None:
    shape, outputs, group, _ = case
    x, w = data(shape).detach().to(device).requires_grad_(), data((outputs, shape[-1]), seed=1).detach().to(device)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        integer_linear(*coded_pair(name, x, w.requires_grad_(), group))
    rows, bits = x.numel() // shape[-1], x.numel() // 8 if "tensor" in name else 0
    codes = x.numel() + w.numel() + bits
    numbers = 4 * (2 * rows + 1 + w.numel() // group)  # scales and zero points
    assert codes < sum(kept.values()) <= codes + numbers
