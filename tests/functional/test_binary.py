from __future__ import annotations

import math

import pytest
import torch

import inputs
import lowbit.functional as F
from compare import assert_same_bits
from lowbit import PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.granularity import Granularity

RULES = (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY)


def expected_values(x: torch.Tensor, per: Granularity) -> torch.Tensor:
    """a * sign(x), group by group, with numbers."""
    split = per.split(x)
    groups = per.by_group(split).double().cpu()
    out = torch.empty_like(groups)
    for row, values in enumerate(groups.tolist()):
        finite = [abs(v) for v in values if math.isfinite(v)]
        a = math.fsum(v / len(finite) for v in finite)
        out[row] = torch.tensor([v if math.isnan(v) else (-a if v < 0 else a) for v in values], dtype=torch.float64)
    index = per.by_group(torch.arange(x.numel(), device=x.device).reshape(split.shape)).flatten().cpu()
    flat = torch.empty(x.numel(), dtype=torch.float64)
    flat[index] = out.flatten()
    return flat.reshape(x.shape)


@pytest.mark.parametrize("per", inputs.PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_values(dtype: torch.dtype, per: Granularity, device: torch.device) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        y = F.binarize(x, per=per)
        assert (y.dtype, y.shape) == (dtype, x.shape), name
        expected = expected_values(x, per)
        # The mean is a sum, the result one more rounding.
        slack = x.numel() * inputs.eps(dtype) + torch.finfo(dtype).eps
        tiny = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(y.cpu().double(), expected, rtol=slack, atol=tiny, equal_nan=True)


def test_zero_is_positive_and_infinity_counts_for_its_sign_only(device: torch.device) -> None:
    x = torch.tensor([0.0, -0.0, -1e-45, 3.0, math.inf, -math.inf, math.nan], device=device)
    assert F.binarize(x).tolist()[:6] == [0.75, 0.75, -0.75, 0.75, 0.75, -0.75]
    assert F.binarize(x)[6].isnan()


def test_groups_without_finite_values_give_zero(device: torch.device) -> None:
    x = torch.tensor([[0.0, 0.0], [math.inf, -math.inf], [2.0, -4.0]], device=device)
    assert F.binarize(x, per=PerChannel(0)).tolist() == [[0, 0], [0, 0], [3, -3]]


def test_half_precision_takes_the_mean_in_float32(device: torch.device) -> None:
    """In float16 the sum of these would be infinite, in bfloat16 it would stand still."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((4096,), 1000.0, dtype=dtype, device=device)
        assert_same_bits(F.binarize(-x), -x)


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
@pytest.mark.parametrize("per", [PerTensor(), PerChannel(1), PerGroup(4)], ids=str)
def test_gradients_are_their_formulas(per: Granularity, dtype: torch.dtype, device: torch.device) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        g = inputs.random(tuple(x.shape), seed=3).to(dtype).to(device)
        clipped = torch.where(x.abs() <= 1, g, torch.zeros_like(g))
        for ste, expected in zip(RULES, (g, clipped), strict=True):
            leaf = x.detach().requires_grad_()
            F.binarize(leaf, per=per, ste=ste).backward(g)
            assert leaf.grad is not None, name
            assert_same_bits(leaf.grad, expected)


def test_the_clip_is_inclusive_and_selects(device: torch.device) -> None:
    above = math.nextafter(1.0, 2.0)
    x = torch.tensor([1.0, -1.0, above, -above, math.nan, math.inf], dtype=torch.float64, device=device)
    x.requires_grad_()
    F.binarize(x, ste=SteKind.CLIPPED_IDENTITY).backward(torch.full_like(x, math.inf))
    assert x.grad is not None
    assert x.grad.tolist() == [math.inf, math.inf, 0, 0, 0, 0]  # 0 * inf would be NaN


def test_identity_saves_nothing_and_the_clip_saves_x(device: torch.device) -> None:
    x = torch.randn(4, device=device, requires_grad=True)
    for ste, expected in zip(RULES, ([], [x]), strict=True):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t), lambda _: x):
            F.binarize(x, ste=ste)
        assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in expected]


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(1), PerToken(), PerGroup(4)], ids=str)
def test_memory_format_is_kept(per: Granularity, device: torch.device) -> None:
    x = inputs.tensors(torch.float32, device)["channels_last"]
    assert F.binarize(x, per=per).is_contiguous(memory_format=torch.channels_last)


def test_a_scalar_and_an_empty_tensor(device: torch.device) -> None:
    assert F.binarize(torch.tensor(-3.0, device=device)).item() == -3
    x = torch.empty(0, 4, device=device, requires_grad=True)
    F.binarize(x, per=PerGroup(2)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize("ste", RULES, ids=str)
@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerGroup(4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(dtype: torch.dtype, per: Granularity, ste: SteKind, device: torch.device) -> None:
    """The reference sums in an order of its own when compiled."""
    x = inputs.tensors(dtype, device)["hard"].clamp(-100, 100)
    torch.compiler.reset()
    results = []
    for op in (F.binarize, torch.compile(F.binarize, fullgraph=True)):
        leaf = x.detach().requires_grad_()
        y = op(leaf, per=per, ste=ste)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))))
    (value, gradient), (compiled, compiled_gradient) = results
    slack = x.numel() * inputs.eps(dtype) + torch.finfo(dtype).eps
    torch.testing.assert_close(compiled, value, rtol=slack, atol=0, equal_nan=True)
    assert_same_bits(compiled_gradient, gradient)


@pytest.mark.parametrize("ste", RULES, ids=str)
def test_vmap_is_a_loop(ste: SteKind, device: torch.device) -> None:
    batch = inputs.random((3, 6, 8)).float().to(device)
    op = lambda x: F.binarize(x, per=PerChannel(0), ste=ste)  # noqa: E731
    # The mean of a batch is a sum of another shape.
    torch.testing.assert_close(torch.func.vmap(op)(batch), torch.stack([op(x) for x in batch]))
    gradient = torch.func.grad(lambda x: (op(x) * x.detach()).sum())
    assert_same_bits(torch.func.vmap(gradient)(batch), torch.stack([gradient(x) for x in batch]))


def test_second_derivative_is_that_of_the_rule() -> None:
    x = torch.tensor([0.5, 2.0], requires_grad=True)
    (first,) = torch.autograd.grad((F.binarize(x, ste=SteKind.CLIPPED_IDENTITY) ** 2).sum(), x, create_graph=True)
    assert first.tolist() == [2.5, 0]
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: F.binarize([1.0]), TypeError, "x is .1.0. .list., but it must be a Tensor"),
        (lambda: F.binarize(torch.ones(2, dtype=torch.int32)), TypeError, "x is torch.int32, but it must be float16"),
        (lambda: F.binarize(torch.ones(2), per=0), TypeError, "per is 0 .int., but it must be a granularity"),
        (lambda: F.binarize(torch.ones(2), ste="identity"), TypeError, "ste is 'identity' .str., but it must be"),
        (lambda: F.binarize(torch.ones(2), per=PerChannel(1)), ValueError, "does not fit a tensor of 1 dimensions"),
        (lambda: F.binarize(torch.ones(3), per=PerGroup(2)), ValueError, "size must divide 3"),
        *(
            (lambda ste=ste: F.binarize(torch.ones(2), ste=ste), ValueError, f"ste is {ste}, but .* use SteKind.IDEN")
            for ste in SteKind
            if ste not in RULES
        ),
    ],
)
def test_refused(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
