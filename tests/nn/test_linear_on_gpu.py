"""Linear layers that multiply codes on a GPU: their values, what they keep, NaN, graphs and compiled code."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit.bench.runner import count_saved
from lowbit.nn import linear
from models.small import mlp

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # what torch says, once, where a product is the first thing that its backward thread does
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
    # and where it compiles one of float32
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

PRESETS = ("w8a8", "w8a8_dynamic", "w4a8", "ternary")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size multiply codes; cuBLAS has no deterministic mode without a setting of the environment."""
    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0, "cuda": 0})
    torch.use_deterministic_algorithms(False)


def prepared(model: nn.Module, preset: str, dtype: torch.dtype, width: int) -> nn.Module:
    model = model.to("cuda", dtype)
    x = torch.randn(3, width, device="cuda", dtype=dtype)
    return lowbit.prepare(model, lowbit.recipes.presets()[preset](), x).train()


@pytest.mark.parametrize("shape", [(300, 272, 520), (1, 16, 8), (33, 40, 7), (257, 144, 129)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_values_and_gradients_are_those_of_float64(preset: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows, inputs, outputs = shape
    layer = prepared(nn.Linear(inputs, outputs), preset, dtype, inputs)
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype, requires_grad=True)
    g = torch.randn(rows, outputs, device="cuda", dtype=dtype)
    y = layer(x)
    found = y.detach(), *torch.autograd.grad(y, [x, layer.weight, layer.bias], g)
    layer.eval()  # the scales stay
    x_hat, w_hat = layer.input_quantizer(x), layer.weight_quantizer(layer.weight)
    passed = torch.autograd.grad(x_hat, x, torch.ones_like(x_hat))[0].double()
    x_hat, w_hat, wide = x_hat.detach().double(), w_hat.detach().double(), g.double()
    wanted = x_hat @ w_hat.t() + layer.bias.detach().double(), (wide @ w_hat) * passed, wide.t() @ x_hat, wide.sum(0)
    eps = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-3  # tf32 or not
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=4 * eps * float(want.abs().max()))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_bits_are_the_cpus(preset: str) -> None:
    layer = prepared(nn.Linear(272, 520), preset, torch.float32, 272)
    other, x = copy.deepcopy(layer).cpu(), torch.randn(300, 272)
    assert_same_bits(layer(x.cuda()).cpu(), other(x))


@pytest.mark.parametrize("preset", PRESETS)
def test_nan_is_seen(preset: str) -> None:
    layer, x = prepared(nn.Linear(64, 48), preset, torch.bfloat16, 64), torch.randn(40, 64, device="cuda").bfloat16()
    x[2, 3] = float("inf")
    assert layer(x).isfinite().all()
    x[2, 3] = float("nan")
    y = layer(x)
    assert y[2].isnan().all()
    assert y[:2].isfinite().all()


@pytest.mark.parametrize(("preset", "bits", "group"), [("w8a8", 1, 256), ("w8a8_dynamic", 0, 256), ("w4a8", 0, 32)])
def test_codes_are_what_is_kept(preset: str, bits: int, group: int) -> None:
    layer = prepared(nn.Linear(256, 512), preset, torch.bfloat16, 256)
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    _, kept = count_saved(lambda: layer(x))
    codes, scales, zero_point = 1024 * 256 + 512 * 256, 4 * (512 * (256 // group) + 1024), 4
    assert codes <= kept <= codes + scales + bits * (1024 * 256 // 8 + zero_point)


def steps(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The outputs of some training steps, then the gradients of the last."""
    outputs = []
    for x in batches:
        model.zero_grad()
        y = model(x)
        y.float().square().mean().backward()
        outputs.append(y.detach().clone())
    return outputs + [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_captured_step_is_the_step(preset: str, once: bool) -> None:
    """Nothing waits for the host, and what the graph replays has the same bits, states of scales included."""
    model = prepared(mlp(64, 96, 64), preset, torch.bfloat16, 64)
    batches = [torch.randn(128, 64, device="cuda").bfloat16() for _ in range(5)]
    twin = copy.deepcopy(model)
    wanted = steps(twin, batches)
    x = batches[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    weights_once = lowbit.weights_once if once else nullcontext
    with torch.cuda.stream(stream):
        found = []
        for batch in batches[:2]:  # which compiles the kernels
            with weights_once(model):
                found.append(steps(model, [batch])[0])
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), weights_once(model):
        y = model(x)
        y.float().square().mean().backward()
    for batch in batches[2:]:
        x.copy_(batch)
        for parameter in model.parameters():
            parameter.grad.zero_()
        graph.replay()
        found.append(y.detach().clone())
    found += [parameter.grad for parameter in model.parameters()]
    for got, want in zip(found, wanted, strict=True):
        assert_same_bits(got, want)
    for got, want in zip(model.buffers(), twin.buffers(), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_it_is_the_same(preset: str) -> None:
    model = prepared(mlp(64, 96, 64), preset, torch.float32, 64)
    twin, batches = copy.deepcopy(model), [torch.randn(128, 64, device="cuda") for _ in range(3)]
    twin.compile(fullgraph=True)
    for got, want in zip(steps(twin, batches), steps(model, batches), strict=True):
        # Sums come in another order, so that a few values come to the code beside.
        assert float((got - want).double().norm() / want.double().norm()) < 1e-2


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_another_width_are_torchs_error(preset: str) -> None:
    layer = prepared(nn.Linear(64, 48), preset, torch.bfloat16, 64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(40, 32, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a8"])
def test_a_layer_is_one_step(preset: str) -> None:
    layer = prepared(nn.Linear(64, 48), preset, torch.bfloat16, 64)
    assert type(layer(torch.randn(40, 64, device="cuda").bfloat16()).grad_fn).__name__ == "_LinearByStepBackward"
