"""spikingjelly.activation_based.quantize 2.0.0: the same values, gradients and errors, and the differences we chose."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from spikingjelly.activation_based import quantize as spikingjelly
from torch import Tensor

from compare import assert_same_bits
from inputs import hard_values, random, tensors
from lowbit import Grid, functional

DTYPES = (torch.float32, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

CALLS = [
    ("round", ()),
    ("ceil", ()),
    ("floor", ()),
    ("clamp", (-1.0, 1.25)),
    ("clamp", (0, 0)),
    ("clamp", (0.0, math.inf)),
    ("clamp", (-math.inf, 1)),
    ("clamp", (2.0, -2.0)),  # the upper bound wins
    ("step_quantize", ()),
    *(("step_quantize", (step,)) for step in (0.5, 0.1, 1 / 3, 1e-3, 7, 1e4)),
    *(("k_bit_quantize", (k,)) for k in (1, 2, 3, 8, 16, 24, 25, 31, 60)),
]
every_call = pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[f"{name}{args}" for name, args in CALLS])


def value_and_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Under a gradient of either sign and never 0; where a mask multiplies, its -0.0 is made the 0.0 of ours."""
    leaves = [leaf.detach().requires_grad_() for leaf in inputs]
    y = function(*leaves)
    g = random(tuple(y.shape), seed=1).to(y)
    return [y.detach(), *(dx + 0.0 for dx in torch.autograd.grad(y, leaves, torch.where(g == 0, 1, g)))]


def assert_alike(name: str, x: Tensor, *arguments: float) -> None:
    ours, theirs = (
        value_and_gradients(lambda x, module=module: getattr(module, name)(x, *arguments), x)
        for module in (functional, spikingjelly)
    )
    for actual, expected in zip(ours, theirs, strict=True):
        assert_same_bits(actual, expected)


@every_call
@every_dtype
def test_hard_inputs(name: str, arguments: tuple, dtype: torch.dtype) -> None:
    step = arguments[0] if name == "step_quantize" and arguments else 1
    boundaries = ((torch.arange(-300, 300) + 0.5) * step).to(dtype)
    kinds = [*tensors(dtype, torch.device("cpu")).values(), torch.tensor(2.5, dtype=dtype), boundaries]
    kinds += [boundaries.nextafter(boundaries + 1), boundaries.nextafter(boundaries - 1)]
    for x in kinds:
        assert_alike(name, x, *arguments)


@st.composite
def float_tensors(draw: st.DrawFn, **bounds: object) -> Tensor:
    width = draw(st.sampled_from([32, 64]))
    shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    elements = st.floats(width=width, **bounds)
    return torch.from_numpy(draw(arrays.arrays(f"float{width}", shapes, elements=elements, fill=st.nothing())))


FINITE = st.floats(-100, 100)
STEPS = st.floats(1e-4, 1e4)


@given(x=float_tensors(), low=FINITE, high=FINITE, step=STEPS, k=st.integers(1, 60))
def test_any_inputs(x: Tensor, low: float, high: float, step: float, k: int) -> None:
    for name in ("round", "ceil", "floor"):
        assert_alike(name, x)
    assert_alike("clamp", x, low, high)
    assert_alike("step_quantize", x, step)
    assert_alike("k_bit_quantize", x, k)


@every_call
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_integers(name: str, arguments: tuple, dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    for x in (torch.tensor([0, 1, 2, 5, 100, top], dtype=dtype), torch.tensor(3, dtype=dtype)):
        assert_same_bits(getattr(functional, name)(x, *arguments), getattr(spikingjelly, name)(x, *arguments))


@every_dtype
@pytest.mark.parametrize("params", [(), (8,), (6, 1), (6, 8)], ids=str)
@pytest.mark.parametrize("k", [1, 2, 8])
def test_affine_k_bit_quantize(params: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    w, b = random(params, seed=2).to(dtype), random(params, seed=3).to(dtype)
    for x in (random((6, 8)).sigmoid().to(dtype), hard_values().reshape(6, 8).to(dtype)):
        ours, theirs = (
            value_and_gradients(lambda x, w, b, module=module: module.affine_k_bit_quantize(x, k, w, b), x, w, b)
            for module in (functional, spikingjelly)
        )
        for actual, expected in zip(ours, theirs, strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", ["k_bit_quantize", "affine_k_bit_quantize"])
@pytest.mark.parametrize(
    ("k", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError), (None, TypeError)], ids=str
)
def test_refused_by_both(name: str, k: object, error: type[Exception]) -> None:
    arguments = (k, torch.tensor(1.0), torch.tensor(0.0))[: 1 if name == "k_bit_quantize" else 3]
    for module in (functional, spikingjelly):
        with pytest.raises(error):
            getattr(module, name)(torch.tensor([0.5]), *arguments)


@pytest.mark.parametrize(("name", "arguments"), dict(CALLS).items(), ids=dict(CALLS))
def test_complex_numbers_are_refused_by_both(name: str, arguments: tuple) -> None:
    for module in (functional, spikingjelly):
        with pytest.raises((NotImplementedError, TypeError)):
            getattr(module, name)(torch.tensor([1 + 2j]), *arguments)


@given(x=float_tensors(min_value=-1000, max_value=1000), eps=st.sampled_from([0.0, 1e-5, 0.1]))
def test_clamp_by_linear_where_neither_order_of_eps_rounds(x: Tensor, eps: float) -> None:
    """eps = 0, or an end at 0: max + eps - min and max - min + eps are then the same single rounding."""
    if x.numel():
        for end in (x.min(), x.max()):
            assert_alike("clamp_by_linear", x - end, eps)
        assert_alike("clamp_by_linear", x, 0.0)


@every_dtype
def test_clamp_by_linear_elsewhere(dtype: torch.dtype) -> None:
    """The two denominators differ by the roundings of max + eps, max - min and their sums: half an eps of each."""
    for seed in range(50):
        x = random((100,), seed=seed, spread=10.0 ** (seed % 5 - 2)).to(dtype) + seed
        ours, theirs = functional.clamp_by_linear(x), spikingjelly.clamp_by_linear(x)
        width = (x.max() - x.min()).item() + 1e-5
        share = torch.finfo(dtype).eps * (1 + (x.max().abs().item() + 1e-5) / width)
        assert ((ours - theirs).abs() <= 2 * share * theirs).all()
        assert_same_bits(ours, (x - x.min()) / (x.max() - x.min() + 1e-5))


@pytest.mark.parametrize("x", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, 1.0], [0.0]], ids=str)
def test_clamp_by_linear_of_odd_values(x: list[float]) -> None:
    assert_alike("clamp_by_linear", torch.tensor(x))
    assert_alike("clamp_by_linear", torch.tensor(x[0]))


@pytest.mark.parametrize("scale", [0.5, 0.1, 1e-3])
@pytest.mark.parametrize("grid", [Grid(8), Grid(4, narrow=True), Grid(2, signed=False)], ids=str)
def test_clipped_identity_has_the_gradient_of_their_clamp(grid: Grid, scale: float) -> None:
    s = torch.tensor(scale)
    low, high = grid.quant_min * s, grid.quant_max * s
    ends = torch.stack([low, high])
    x = torch.cat([ends, ends.nextafter(ends + 1), ends.nextafter(ends - 1), hard_values().float()])
    _, ours = value_and_gradients(lambda x: functional.fake_quantize(x, s, grid=grid), x)
    _, theirs = value_and_gradients(lambda x: spikingjelly.clamp(x, low.item(), high.item()), x)
    assert_same_bits(ours, theirs)


def test_a_constant_tensor_is_0_where_theirs_loses_eps() -> None:
    x = torch.full((3,), 1e9)
    assert spikingjelly.clamp_by_linear(x).isnan().all()
    assert_same_bits(functional.clamp_by_linear(x), torch.zeros(3))


def test_masks_select_where_theirs_multiply() -> None:
    x, g = torch.tensor([-5.0, 5.0, 0.5], requires_grad=True), torch.tensor([math.inf, -1.0, math.inf])
    theirs, ours = (torch.autograd.grad(module.clamp(x, 0, 1), x, g)[0] for module in (spikingjelly, functional))
    assert_same_bits(theirs, torch.tensor([math.nan, -0.0, math.inf]))
    assert_same_bits(ours, torch.tensor([0.0, 0.0, math.inf]))
    assert_same_bits(functional.clamp_backward(g, x.detach(), 0, 1), ours)


HALVES = [
    ("step_quantize", (0.1,)),
    ("k_bit_quantize", (8,)),
    ("clamp_by_linear", (0.0,)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "arguments"), HALVES)
def test_half_precision_is_theirs_in_float32(name: str, arguments: tuple, dtype: torch.dtype) -> None:
    x = random((10_000,)).to(dtype)
    ours, theirs = getattr(functional, name)(x, *arguments), getattr(spikingjelly, name)
    assert_same_bits(ours, theirs(x.float(), *arguments).to(dtype))
    assert (ours != theirs(x, *arguments)).any()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1 / 3), (torch.bfloat16, 0.7)], ids=str)
def test_half_precision_bounds_are_not_rounded(dtype: torch.dtype, bound: float) -> None:
    x = torch.tensor([bound, 1.0], dtype=dtype, requires_grad=True)  # rounds to just below the bound
    g = torch.ones(2, dtype=dtype)
    ours, theirs = (torch.autograd.grad(module.clamp(x, bound, 2.0), x, g)[0] for module in (functional, spikingjelly))
    assert ours.tolist() == [0.0, 1.0]
    assert theirs.tolist() == [1.0, 1.0]


REFUSED = {
    "step 0": ("step_quantize", [0.5], (0.0,), ValueError),
    "step below 0": ("step_quantize", [0.5], (-1.0,), ValueError),
    "infinite step": ("step_quantize", [0.5], (math.inf,), ValueError),
    "NaN for a bound": ("clamp", [0.5], (math.nan, 1.0), ValueError),
    "negative eps": ("clamp_by_linear", [0.5, 1.0], (-0.1,), ValueError),
    "integers": ("clamp_by_linear", [1, 2], (), TypeError),
}


@pytest.mark.parametrize(("name", "x", "arguments", "error"), REFUSED.values(), ids=REFUSED)
def test_refused_by_ours_only(name: str, x: list, arguments: tuple, error: type[Exception]) -> None:
    getattr(spikingjelly, name)(torch.tensor(x), *arguments)
    with pytest.raises(error):
        getattr(functional, name)(torch.tensor(x), *arguments)


def test_an_empty_tensor_is_refused_by_theirs_only() -> None:
    with pytest.raises(RuntimeError, match="numel"):
        spikingjelly.clamp_by_linear(torch.empty(0))
    assert functional.clamp_by_linear(torch.empty(0)).shape == (0,)


FUNCTIONS = {
    "round_atgf": (spikingjelly.RoundATGF, ()),
    "ceil_atgf": (spikingjelly.CeilATGF, ()),
    "floor_atgf": (spikingjelly.FloorATGF, ()),
    "clamp_atgf": (spikingjelly.ClampATGF, (-1.0, 1.25)),
    "step_quantize_atgf": (spikingjelly.StepQuantizeATGF, (0.1,)),
    "k_bit_quantize_atgf": (spikingjelly.KBitQuantizeATGF, (3,)),
}


@every_dtype
@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_functions(name: str, dtype: torch.dtype) -> None:
    theirs, arguments = FUNCTIONS[name]
    ours = getattr(functional, name)
    assert issubclass(ours, torch.autograd.Function)
    x = hard_values().to(dtype).reshape(6, 8).t()
    results = [value_and_gradients(lambda x, f=f: f.apply(x, *arguments), x) for f in (ours, theirs)]
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


FORMULAS = {
    "step_quantize_forward": (0.1, lambda x, step: np.rint(x / step) * step),
    "k_bit_quantize_forward": (3, lambda x, k: np.rint(x * (2.0**k - 1)) / (2.0**k - 1)),
}


@every_dtype
@pytest.mark.parametrize("name", FORMULAS)
def test_forwards_by_their_formula(name: str, dtype: torch.dtype) -> None:
    argument, formula = FORMULAS[name]
    x = hard_values().to(dtype).requires_grad_()
    y = getattr(functional, name)(x, argument)
    assert not y.requires_grad
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(y, torch.from_numpy(formula(x.detach().numpy(), argument)))


@every_dtype
def test_clamp_backward_by_its_formula(dtype: torch.dtype) -> None:
    x, g = hard_values().to(dtype), random((48,)).to(dtype)
    expected = [dy if -1.0 <= value <= 1.25 else 0.0 for value, dy in zip(x.tolist(), g.tolist(), strict=True)]
    assert_same_bits(functional.clamp_backward(g, x, -1.0, 1.25), torch.tensor(expected, dtype=dtype))
