"""Tensors whose memory does not say what they hold, and modes that change what an op means: the kernels must notice."""

from __future__ import annotations

from typing import Self

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import return_and_correct_aliasing

import lowbit.functional as F
from compare import assert_same_bits
from lowbit import EMA, FakeQuantize, Grid, Learned, PerBatch, PerChannel, PerGroup, Plan, SteKind

SCALE = torch.tensor(0.1)


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, as a distributed tensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        def unwrap(value: object) -> object:
            return value.inner if isinstance(value, Wrapper) else value

        out = func(*[unwrap(arg) for arg in args], **{k: unwrap(v) for k, v in (kwargs or {}).items()})
        wrapped = Wrapper(out) if isinstance(out, torch.Tensor) else out
        return return_and_correct_aliasing(func, args, kwargs or {}, wrapped)


def test_a_subclass_among_the_arguments() -> None:
    x, zero_point = torch.randn(4, 4), torch.tensor(3, dtype=torch.int32)
    expected = F.fake_quantize(x, SCALE, zero_point)
    for scale, z in ((Wrapper(SCALE), zero_point), (SCALE, Wrapper(zero_point))):
        assert_same_bits(F.fake_quantize(x, scale, z).inner, expected)
    g = torch.randn(4, 4)
    dx = F.fake_quantize_backward(Wrapper(g), x, SCALE, ste=SteKind.HARD_TANH)
    assert_same_bits(dx.inner, F.fake_quantize_backward(g, x, SCALE, ste=SteKind.HARD_TANH))


@pytest.mark.parametrize("mode", [PerBatch(), EMA(), Learned()], ids=str)
def test_another_default_device(mode: object) -> None:
    quantizer = FakeQuantize(4, symmetric=False, scale_mode=mode)
    x = torch.randn(64, 8, requires_grad=True)
    quantizer(x)
    with torch.device("meta"):
        y = quantizer(x)
    y.sum().backward()
    assert x.grad is not None
    assert y.device.type == "cpu"


def test_a_module_in_double() -> None:
    x = torch.randn(8, 8)
    quantizer = FakeQuantize(scale_mode=EMA()).double()
    quantizer(x)
    torch.testing.assert_close(quantizer.scale.double(), x.abs().max().double() / 127)


def test_one_compiled_function_of_several_grids_and_granularities() -> None:
    torch.compiler.reset()
    x = torch.randn(4, 16)
    compiled = torch.compile(F.fake_quantize)
    for records in (
        {"grid": Grid(8)},
        {"grid": Grid(4)},
        {"grid": Grid(4), "per": PerChannel(0)},
        {"per": PerChannel(1)},
    ):
        scale = torch.full((x.shape[records["per"].axis],), 0.1) if "per" in records else SCALE
        assert_same_bits(compiled(x, scale, **records), F.fake_quantize(x, scale, **records))


def test_compiled_statistics_of_groups_of_one() -> None:
    torch.compiler.reset()
    x = torch.randn(6, 4).t()
    quantizer = FakeQuantize(scale_mode=PerBatch(), per=PerGroup(1))
    assert_same_bits(torch.compile(quantizer)(x), quantizer(x))


def test_batched_gradients() -> None:
    jacobian = torch.autograd.functional.jacobian(lambda x: F.fake_quantize(x, SCALE), torch.randn(5), vectorize=True)
    assert torch.equal(jacobian, torch.eye(5))


def test_forward_mode_of_a_public_backward() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
        dx = F.fake_quantize_backward(dual, torch.zeros(3), SCALE)
        assert forward_ad.unpack_dual(dx).tangent.tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_every_op(mode: str) -> None:
    traced = make_fx(lambda x, scale: F.fake_quantize(x, scale), tracing_mode=mode)(torch.zeros(4, 5), SCALE)
    x, scale = torch.randn(4, 5), torch.tensor(0.3)
    assert_same_bits(traced(x, scale), F.fake_quantize(x, scale))


def test_a_negative_view() -> None:
    negative = torch.tensor(1 - 0.5j).conj().imag
    assert negative.is_neg()
    assert F.fake_quantize(torch.tensor([0.9, -1.6]), negative, grid=Grid(4, signed=False)).tolist() == [1, 0]


def test_a_tensor_that_left_its_transform() -> None:
    kept: list[torch.Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(torch.ones(4))
    assert_same_bits(F.fake_quantize(kept[0], SCALE), F.fake_quantize(torch.ones(4), SCALE))


def test_subnormal_halves_while_denormals_are_flushed() -> None:
    x = torch.arange(1, 500, dtype=torch.int16).view(torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        found = Plan.select("abs_max", x).run(x)
    finally:
        torch.set_flush_denormal(False)
    assert found == x.max().float()


def test_plans_of_the_state_and_of_long_codes() -> None:
    x = torch.rand(3)
    plan = Plan.select("ema_scale", x)
    assert plan.can_implement(x, torch.rand(3), torch.ones(3, dtype=torch.bool), 0.9).ok
    codes = Plan.select("quantize", x).run(x, SCALE, dtype=torch.int64)
    assert torch.equal(codes, F.quantize(x, SCALE, dtype=torch.int32).long())
