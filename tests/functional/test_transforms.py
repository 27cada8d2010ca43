"""The ops behave as torch's own do: compiled, vmapped, under autocast, differentiated in every way torch has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import inputs
import lowbit.functional as F
from compare import assert_same_bits
from lowbit import FakeQuantize, Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.functional.statistics import abs_max, params_from_data
from lowbit.granularity import Granularity
from lowbit.kernels import plan

Op = Callable[[torch.Tensor], torch.Tensor]
GRID = Grid(4)
PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerToken(), PerGroup(4), PerBlock(3, 4))


def ops(x: torch.Tensor) -> dict[str, Op]:
    """Every differentiable op as a function of x alone, at scales that fit x."""
    found: dict[str, Op] = {
        "round": F.round,
        "ceil": F.ceil,
        "floor": F.floor,
        "clamp": lambda x: F.clamp(x, -1.0, 1.0),
        "step_quantize": lambda x: F.step_quantize(x, 0.3),
        "k_bit_quantize": lambda x: F.k_bit_quantize(x, 3),
        "affine_k_bit_quantize": lambda x: F.affine_k_bit_quantize(x, 3, 2.0, 1.0),
        "clamp_by_linear": F.clamp_by_linear,
    }
    for per in PERS:
        scale, zero_point = inputs.params(x, per, GRID, affine=True)
        where = {"grid": GRID, "per": per}
        for ste in SteKind:
            found[f"fake_quantize {per} {ste}"] = lambda x, s=scale, z=zero_point, w=where, ste=ste: F.fake_quantize(
                x, s, z, **w, ste=ste
            )
        found[f"fake_quantize {per} symmetric"] = lambda x, s=scale, w=where: F.fake_quantize(x, s, **w)
        found[f"quantize {per}"] = lambda x, s=scale, z=zero_point, w=where: F.quantize(x, s, z, **w)
        found[f"dequantize {per}"] = lambda x, s=scale, z=zero_point, per=per: F.dequantize(x, s, z, per=per)
    return found


NAMES = tuple(ops(torch.zeros(6, 8)))


def value_and_gradient(op: Op, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    y = op(leaf)
    y.backward(inputs.random(tuple(x.shape), seed=6).to(y.dtype).to(y.device))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def assert_matches(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits; tanh within 4 ulp."""
    if name.endswith(" tanh"):
        bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
        apart = (actual.view(bits).long() - expected.view(bits).long()).abs()
        tiny = (actual.abs() < 1e-30) & (expected.abs() < 1e-30)  # beyond the normal numbers
        assert (apart[~tiny & ~expected.isnan()] <= 4).all()
    else:
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", ["straight-through", *map(str, PERS)])
def test_compile_gives_the_same_bits(group: str, dtype: torch.dtype, device: torch.device) -> None:
    """One graph holds a group of ops, each on an input of its own."""
    x = inputs.tensors(dtype, device)["hard"]
    if device.type == "cuda" and group == "straight-through":
        x[x.abs() < 1e-37] = 0  # on a GPU, Inductor's ceil takes subnormals for 0
    chosen = {name: op for name, op in ops(x).items() if (group in name if "Per" in group else "Per" not in name)}
    # Ordinary autograd of several torch ops, between which Inductor may keep bfloat16 in float32.
    chosen.pop("clamp_by_linear", None)
    if dtype == torch.bfloat16:
        chosen.pop("affine_k_bit_quantize", None)

    def all_of_them(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(op(x) for op, x in zip(chosen.values(), xs, strict=True))

    torch.compiler.reset()
    leaves = [x.clone().requires_grad_() for _ in chosen]
    results = torch.compile(all_of_them, fullgraph=True)(*leaves)
    upstream = [inputs.random(tuple(x.shape), seed=6).to(y.dtype).to(device) for y in results]
    torch.autograd.backward(results, upstream)
    for (name, op), leaf, result in zip(chosen.items(), leaves, results, strict=True):
        value, gradient = value_and_gradient(op, x)
        assert_matches(name, result.detach(), value)
        assert_matches(name, leaf.grad, gradient)


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerGroup(4)], ids=str)
def test_compile_learned(per: object, device: torch.device) -> None:
    x = inputs.tensors(torch.float32, device)["random"]
    results = []
    torch.compiler.reset()
    for compiled in (False, True):
        scale, zero_point = inputs.params(x, per, GRID, affine=True)
        leaves = [x.clone().requires_grad_(), scale.requires_grad_(), zero_point.float().requires_grad_()]

        def op(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return F.learned_fake_quantize(x, s, z, grid=GRID, per=per)

        y = (torch.compile(op, fullgraph=True) if compiled else op)(*leaves)
        y.sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    eager, compiled_ = results
    assert_same_bits(compiled_[0], eager[0])
    assert_same_bits(compiled_[1], eager[1])
    torch.testing.assert_close(compiled_[2:], eager[2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per", PERS, ids=str)
def test_compile_integer_codes_and_statistics(per: object, symmetric: bool, device: torch.device) -> None:
    x = inputs.tensors(torch.float32, device)["hard"]

    def op(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale, zero_point = params_from_data(x, grid=GRID, per=per, symmetric=symmetric)
        q = F.quantize(x, scale, zero_point, grid=GRID, per=per, dtype=torch.int8)
        return scale, q, F.dequantize(q, scale, zero_point, per=per)

    torch.compiler.reset()
    for actual, expected in zip(torch.compile(op, fullgraph=True)(x), op(x), strict=True):
        assert_same_bits(actual, expected)


def test_compile_with_dynamic_shapes(device: torch.device) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, s: F.fake_quantize(x, s, grid=GRID, per=PerGroup(4)), fullgraph=True, dynamic=True
    )
    for rows in (3, 5, 17):
        x = inputs.random((rows, 8)).float().to(device)
        scale = torch.full((rows, 2), 0.3, device=device)
        assert_same_bits(compiled(x, scale), F.fake_quantize(x, scale, grid=GRID, per=PerGroup(4)))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "clamp_by_linear"])
def test_vmap_is_a_loop(name: str, device: torch.device) -> None:
    batch = inputs.random((3, 6, 8)).float().to(device)
    op = ops(batch[0])[name]
    assert_matches(name, torch.func.vmap(op)(batch), torch.stack([op(x) for x in batch]))
    gradient = torch.func.grad(lambda x: op(x).sum())
    assert_matches(name, torch.func.vmap(gradient)(batch), torch.stack([gradient(x) for x in batch]))


def test_vmap_over_scales_and_zero_points(device: torch.device) -> None:
    x = inputs.random((6, 8)).float().to(device)
    scales, zero_points = torch.tensor([0.1, 0.2], device=device), torch.tensor([1, -2], device=device)

    def op(s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return F.fake_quantize(x, s, z, grid=GRID)

    for axes in ((0, 0), (0, None), (None, 0)):
        args = [p if axis == 0 else p[0] for p, axis in zip((scales, zero_points), axes, strict=True)]
        rows = [[p[i] if axis == 0 else p for p, axis in zip(args, axes, strict=True)] for i in range(2)]
        assert_same_bits(torch.func.vmap(op, in_dims=axes)(*args), torch.stack([op(*row) for row in rows]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_leaves_the_law_alone(dtype: torch.dtype, device: torch.device) -> None:
    x, w = inputs.random((6, 8)).float().to(device), inputs.random((4, 8)).float().to(device)
    scale = torch.tensor(0.2, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=dtype):
        hidden = torch.nn.functional.linear(x, w)
        assert hidden.dtype == dtype
        leaf = hidden.detach().requires_grad_()
        y = F.fake_quantize(leaf, scale.detach(), grid=GRID)
        z = F.learned_fake_quantize(leaf, scale, grid=GRID)
    assert_same_bits(y, F.fake_quantize(hidden, scale.detach(), grid=GRID))
    assert_same_bits(z, y)
    (y.sum() + z.sum()).backward()
    assert leaf.grad.dtype == dtype
    assert scale.grad.dtype == torch.float32


def test_double_use_in_one_graph(device: torch.device) -> None:
    x = inputs.random((6, 8)).float().to(device).requires_grad_()
    scale, other = torch.tensor(0.2, device=device), torch.tensor(0.01, device=device)
    y = F.fake_quantize(x, scale, grid=GRID) + F.fake_quantize(F.fake_quantize(x, other, grid=GRID), scale, grid=GRID)
    y.sum().backward()
    ones, outer = torch.ones_like(y), F.fake_quantize(x.detach(), other, grid=GRID)
    twice = F.fake_quantize_backward(ones, outer, scale, grid=GRID)
    expected = F.fake_quantize_backward(ones, x.detach(), scale, grid=GRID)
    expected = expected + F.fake_quantize_backward(twice, x.detach(), other, grid=GRID)
    assert_same_bits(x.grad, expected)


def test_an_input_modified_in_place_is_an_error(device: torch.device) -> None:
    x = inputs.random((6, 8)).float().to(device).requires_grad_()
    scale = torch.tensor(0.2, device=device)
    for change in ("x", "scale"):
        hidden, s = x * 1, scale.clone()
        y = F.fake_quantize(hidden, s, grid=GRID)
        (hidden if change == "x" else s).detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    hidden = x * 1
    y = F.fake_quantize(hidden, scale, grid=GRID, ste=SteKind.IDENTITY)  # saves nothing, so nothing is lost
    hidden.detach().add_(1)
    y.sum().backward()


def test_autograd_functional(device: torch.device) -> None:
    x, v = inputs.random((5,)).float().to(device), inputs.random((5,), seed=7).float().to(device)
    scale = torch.tensor(0.5, device=device)
    for ste in SteKind:

        def op(x: torch.Tensor, ste: SteKind = ste) -> torch.Tensor:
            return F.fake_quantize(x, scale, grid=GRID, ste=ste)

        slope = F.fake_quantize_backward(torch.ones_like(x), x, scale, grid=GRID, ste=ste)
        torch.testing.assert_close(torch.autograd.functional.jacobian(op, x), slope.diag())
        torch.testing.assert_close(torch.autograd.functional.vjp(op, x, v)[1], slope * v)
        torch.testing.assert_close(torch.autograd.functional.jvp(op, x, v)[1], slope * v)
        torch.testing.assert_close(torch.func.jacrev(op)(x), slope.diag())


@pytest.mark.parametrize("ste", [SteKind.TANH, SteKind.HARD_TANH])
def test_second_derivative_is_that_of_the_rule(ste: SteKind, device: torch.device) -> None:
    x = (inputs.random((7,)) * 0.3).to(device).requires_grad_()
    scale = torch.tensor(0.5, device=device)
    slope = lambda x: F.fake_quantize_backward(torch.ones_like(x), x, scale, grid=GRID, ste=ste)  # noqa: E731
    (first,) = torch.autograd.grad(F.fake_quantize(x, scale, grid=GRID, ste=ste).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    step = 1e-6
    numeric = (slope(x.detach() + step) - slope(x.detach() - step)) / (2 * step)
    torch.testing.assert_close(second, numeric, rtol=1e-4, atol=1e-6)


def test_no_gradient_asked_for_none_given(device: torch.device) -> None:
    x, scale = inputs.random((5,)).float().to(device), torch.tensor(0.5, device=device)
    assert not F.fake_quantize(x, scale).requires_grad
    with torch.no_grad():
        assert not F.fake_quantize(x.requires_grad_(), scale.requires_grad_()).requires_grad


def ops_of(function: Callable[..., object], *args: torch.Tensor) -> set[str]:
    """The names of the ops in what torch.compile traced."""
    recorded = EagerAndRecordGraphs()
    torch.compiler.reset()
    torch.compile(function, backend=recorded, fullgraph=True)(*args)
    modules = [module for graph in recorded.graphs for module in graph.modules() if hasattr(module, "graph")]
    return {str(node.target) for module in modules for node in module.graph.nodes}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="this torch says that compiling is exporting")
def test_compiled_cpu_code_calls_the_native_kernel() -> None:
    x, scale = torch.randn(4, 8, requires_grad=True), torch.tensor(0.1)
    assert "lowbit.kernel" in ops_of(lambda x: F.fake_quantize(x, scale), x)
    assert "lowbit.kernel" in ops_of(lambda x: abs_max(x, PerChannel(1)), x)
    with plan.prefer("reference"):
        assert "lowbit.kernel" not in ops_of(lambda x: F.fake_quantize(x, scale), x)


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(0), PerToken(), PerGroup(2)], ids=str)
@pytest.mark.parametrize("name", ["transposed", "strided", "expanded", "channels_last"])
def test_compiled_code_keeps_the_strides(name: str, per: Granularity) -> None:
    x = inputs.tensors(torch.float32, torch.device("cpu"))[name]
    scale, _ = inputs.params(x, per, GRID, affine=False)
    results = []
    for compiled in (True, False):
        torch.compiler.reset()
        leaf = x.detach().requires_grad_()
        function = torch.compile(F.fake_quantize, fullgraph=True) if compiled else F.fake_quantize
        y = function(leaf, scale, grid=GRID, per=per)
        results.append((y, *torch.autograd.grad(y, leaf, torch.ones_like(y))))
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)
        assert actual.stride() == expected.stride()


def test_compiled_vmap_and_export_trace_the_reference() -> None:
    x, scale = torch.randn(3, 4, 8), torch.tensor(0.1)
    torch.compiler.reset()
    mapped = torch.compile(torch.func.vmap(lambda x: F.fake_quantize(x, scale)), fullgraph=True)
    assert_same_bits(mapped(x), F.fake_quantize(x, scale))
    exported = torch.export.export(FakeQuantize(8, scale=0.1).eval(), (x,))
    assert not any("lowbit" in str(node.target) for node in exported.graph.nodes)


def test_a_compiled_public_backward_is_differentiable() -> None:
    torch.compiler.reset()
    x, scale = torch.randn(4, 8, requires_grad=True), torch.tensor(0.5)
    compiled = torch.compile(F.fake_quantize_backward, fullgraph=True)
    for function in (F.fake_quantize_backward, compiled):
        dx = function(torch.ones(4, 8), x, scale, ste=SteKind.TANH)
        (second,) = torch.autograd.grad(dx.sum(), x)
        assert second.abs().sum() > 0


def test_a_compiled_grad_transform_is_refused() -> None:
    """torch would differentiate the rounding itself, and give 0."""
    torch.compiler.reset()
    gradient = torch.func.grad(lambda x: F.fake_quantize(x, torch.tensor(0.5)).sum())
    assert (gradient(torch.ones(3)) == 1).all()
    with pytest.raises(Exception, match="compile the loss and call"):
        torch.compile(gradient, fullgraph=True)(torch.ones(3))
