from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import inputs
import lowbit.functional as F
from compare import assert_same_bits
from lowbit import FakeQuantize, PerChannel, PerGroup, PerTensor, SteKind
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight

ALL = (Binarize(PerChannel(0)), DoReFaWeight(3), DoReFaActivation(4))


def by_name(quantizer: nn.Module) -> str:
    return type(quantizer).__name__


def test_binarize_is_the_op(device: torch.device) -> None:
    x = inputs.random((6, 8)).float().to(device).requires_grad_()
    for per in (PerTensor(), PerChannel(0)):
        for ste in (SteKind.IDENTITY, SteKind.CLIPPED_IDENTITY):
            y, expected = Binarize(per, ste)(x), F.binarize(x, per=per, ste=ste)
            assert_same_bits(y, expected)
            g = torch.ones_like(x)
            assert_same_bits(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(expected, x, g)[0])
    assert (Binarize().bits, Binarize().per, Binarize().ste) == (1, PerTensor(), SteKind.IDENTITY)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_dorefa_weight_is_the_papers_formula(bits: int, device: torch.device) -> None:
    w = inputs.random((6, 8)).to(device)
    levels = 2**bits - 1
    unit = w.tanh() / (2 * w.tanh().abs().max()) + 0.5
    y = DoReFaWeight(bits)(w)
    torch.testing.assert_close(y, 2 * (levels * unit).round() / levels - 1, rtol=0, atol=1e-15)
    assert y.abs().max() == 1
    assert len(y.unique()) <= 2**bits


def test_dorefa_weight_has_the_gradient_of_all_but_the_rounding(device: torch.device) -> None:
    """Through tanh and max; the rounding passes it unchanged."""
    w = inputs.random((6, 8)).to(device).requires_grad_()
    g = inputs.random((6, 8), seed=2).to(device)
    smooth = w.tanh() / w.tanh().abs().max()
    torch.testing.assert_close(
        torch.autograd.grad(DoReFaWeight(2)(w), w, g)[0], torch.autograd.grad(smooth, w, g)[0], rtol=1e-12, atol=1e-14
    )


def test_dorefa_weight_of_zeros_is_finite(device: torch.device) -> None:
    for bits in (2, 3, 8):
        w = torch.zeros(3, 4, device=device, requires_grad=True)
        y = DoReFaWeight(bits)(w)
        torch.testing.assert_close(y, torch.full_like(y, 1 / (2**bits - 1)))
        y.sum().backward()
        assert w.grad is not None
        assert (w.grad == 1).all()


def test_dorefa_weight_keeps_nan_to_itself(device: torch.device) -> None:
    y = DoReFaWeight(2)(torch.tensor([math.nan, 0.1, -0.1, 0.001], device=device))
    assert y[0].isnan()
    torch.testing.assert_close(y[1:].cpu(), torch.tensor([1, -1, 1 / 3]))


def test_dorefa_weight_in_half_precision_computes_in_float32(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        w = inputs.random((16, 16)).to(dtype).to(device)
        assert_same_bits(DoReFaWeight(8)(w), DoReFaWeight(8)(w.float()).to(dtype))


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_dorefa_activation(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([-0.5, 0.0, 0.2, 0.6, 1.0, 1.5, math.inf, math.nan], dtype=dtype, device=device).requires_grad_()
    y = DoReFaActivation(2)(x)
    expected = torch.tensor([0, 0, 1 / 3, 2 / 3, 1, 1, 1, math.nan], dtype=torch.float64).to(dtype).to(device)
    assert_same_bits(y.detach(), expected)
    y.backward(torch.full_like(y, 3.0))
    assert x.grad is not None
    assert x.grad.tolist() == [0, 3, 3, 3, 3, 0, 0, 0]
    assert DoReFaActivation(1)(x).tolist()[:7] == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("quantizer", ALL, ids=by_name)
def test_what_model_code_relies_on(quantizer: nn.Module) -> None:
    like = FakeQuantize()
    for name in ("bits", "enabled", "observing", "per", "ste"):
        assert type(getattr(quantizer, name)) is type(getattr(like, name)) or name == "per"
    assert not list(quantizer.parameters())
    assert not list(quantizer.buffers())
    assert f"{quantizer.bits} bit" in repr(quantizer)
    assert str(quantizer.per) in repr(quantizer)
    assert quantizer.ste.name in repr(quantizer)


@pytest.mark.parametrize("make", [Binarize, lambda: DoReFaWeight(2), lambda: DoReFaActivation(2)])
def test_disabled_is_the_identity_after_its_checks(make: type[nn.Module]) -> None:
    quantizer = make()
    quantizer.enabled = False
    x = torch.randn(4)
    assert quantizer(x) is x
    assert "enabled=False" in repr(quantizer)
    with pytest.raises(TypeError, match=r"x is torch\.int64"):
        quantizer(torch.ones(2, dtype=torch.int64))


def test_disabled_binarize_checks_the_shape() -> None:
    quantizer = Binarize(PerGroup(4))
    quantizer.enabled = False
    with pytest.raises(ValueError, match="size must divide 6"):
        quantizer(torch.ones(6))


@pytest.mark.parametrize("make", [Binarize, lambda: DoReFaWeight(2), lambda: DoReFaActivation(2)])
def test_flags_are_saved_as_those_of_fake_quantize(make: type[nn.Module]) -> None:
    saved = make()
    saved.enabled, saved.observing = False, True
    like = FakeQuantize()
    like.enabled = False
    assert torch.equal(saved.get_extra_state()[:2], like.get_extra_state()[:2])
    assert saved.get_extra_state()[2] == saved.bits
    loaded = make()
    loaded.observing = False
    loaded.load_state_dict(saved.state_dict())
    assert (loaded.enabled, loaded.observing) == (False, True)


@pytest.mark.parametrize("quantizer", ALL, ids=by_name)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_shapes_and_dtypes(quantizer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        leaf = x.detach().requires_grad_()
        y = quantizer(leaf)
        assert (y.shape, y.dtype) == (x.shape, dtype), name
        y.sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.shape == x.shape
        if name == "channels_last":
            assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("quantizer", ALL, ids=by_name)
def test_compile(quantizer: nn.Module, device: torch.device) -> None:
    torch.compiler.reset()
    x = inputs.random((6, 8)).float().to(device)
    results = []
    for module in (quantizer, torch.compile(quantizer, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Binarize(per=0), TypeError, "per is 0"),
        (lambda: Binarize(ste="identity"), TypeError, "ste is 'identity'"),
        (lambda: Binarize(ste=SteKind.TANH), ValueError, "ste is tanh, but binarize has no grid's range"),
        (lambda: DoReFaWeight(1), ValueError, "bits is 1, but .* from 2 to 16; for 1 bit use Binarize"),
        (lambda: DoReFaWeight(0), ValueError, "bits is 0, but it must be from 2 to 16"),
        (lambda: DoReFaWeight(17), ValueError, "bits is 17, but it must be from 2 to 16"),
        (lambda: DoReFaWeight(True), TypeError, "bits is True .bool., but it must be an int"),
        (lambda: DoReFaWeight("2"), TypeError, "bits is '2'"),
        (lambda: DoReFaActivation(0), ValueError, "bits is 0, but it must be from 1 to 16"),
        (lambda: DoReFaActivation(2.0), TypeError, "bits is 2.0"),
    ],
)
def test_refused(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
