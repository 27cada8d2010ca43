"""convert: every layer by itself, with every kind of recipe, dtype and shape."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from converting import assert_products, assert_same_outputs, call_output, prepared, run, watch, weights
from models.small import Residual, images
from nn.layers import LAYERS, batch_of, in_dtype
from preparing import MORE_LAYERS, MORE_SPECS, PRESETS, SPECS

# torch pads an uneven 'same' by a copy, and projects without oneDNN; it says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
LAYER_SPECS = [(name, spec) for name in LAYERS for spec in SPECS]
LAYER_SPECS += [(name, spec) for name in MORE_LAYERS for spec in MORE_SPECS]


@pytest.mark.parametrize(("name", "spec"), LAYER_SPECS, ids=map("-".join, LAYER_SPECS))
def test_layers_in_float_are_the_same(name: str, spec: str) -> None:
    layer, batch = LAYERS[name](), batch_of(name)
    model = prepared(layer, (SPECS | MORE_SPECS)[spec], batch)
    converted = lowbit.convert(model, "float")
    assert weights(converted) or not list(layer.parameters())
    assert_same_outputs(converted, model, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", ["w8a8", "w4a8", "dorefa"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_other_dtypes(name: str, spec: str, dtype: torch.dtype) -> None:
    if name == "avg pool3d" and dtype.itemsize == 2:
        pytest.skip("torch has no such kernel")
    if "pool" in name and spec == "dorefa" and dtype == torch.float64:
        pytest.skip("a model without parameters has no dtype")
    layer, batch = in_dtype((LAYERS[name](), batch_of(name)), dtype)
    model = prepared(layer, SPECS[spec], batch)
    converted = lowbit.convert(model, "float")
    assert_same_outputs(converted, model, batch)
    integer = run(lowbit.convert(model), batch)
    assert [output.dtype for output in integer] == [output.dtype for output in run(model, batch)]


class TestShapes:
    @pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a8", "binary", "dorefa"])
    @pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "reflect", "avg pool2d", "adaptive pool2d"])
    def test_an_empty_batch(self, name: str, preset: str, arithmetic: str) -> None:
        batch = batch_of(name)
        model = prepared(LAYERS[name](), PRESETS[preset](), batch)
        assert_same_outputs(lowbit.convert(model, arithmetic), model, batch[:0])

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "conv3d", "avg pool2d", "adaptive pool2d"])
    def test_without_a_batch(self, name: str, preset: str, arithmetic: str) -> None:
        if preset == "w4" and "pool" in name:
            pytest.skip("nothing to quantize")
        x = batch_of(name)[0]
        x = x[0] if name == "linear" and x.dim() > 1 else x
        model = prepared(LAYERS[name](), PRESETS[preset](), x)
        converted = lowbit.convert(model, arithmetic)
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            calls = watch(converted)
            torch.testing.assert_close(run(converted, x), run(model, x), rtol=1e-5, atol=1e-5)
            assert calls or preset in (
                "w4",
                "w8a8_dynamic",
                "w4a8",
                "ternary",
                "binary",
            )  # whose scales are each sample's
            for *call, result in calls.get("", []):
                assert_same_bits(result, call_output(model, *call))

    def test_channels_last(self, arithmetic: str) -> None:
        x = images().to(memory_format=torch.channels_last)
        model = prepared(Residual(3), lowbit.recipes.w8a8(), x).to(memory_format=torch.channels_last)
        converted = lowbit.convert(model, arithmetic).to(memory_format=torch.channels_last)
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)


def test_a_forward_of_the_layers_own() -> None:
    """Padding before the product is the grid's; what changes values is not, and then the product is in float."""

    class Padded(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.conv2d(F.pad(x, (1, 2, 0, 1)), self.weight, None, self.stride) + self.bias.view(-1, 1, 1)

    class Gained(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.linear(x * 1.7, self.weight, self.bias)

    class Standardized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.linear(x, self.weight - self.weight.mean(), self.bias)

    Standardized.forward.__module__ = "transformers.models.bit.modeling_bit"  # which has some like that

    class Inner(nn.Conv1d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.conv1d(F.pad(input=x, pad=(2, 0)), weight, bias)

    class Shifted(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.conv1d(F.pad(x, (1, 0), value=0.3), self.weight, self.bias)

    for preset in ("w8a8", "w8a8_dynamic", "w4a8"):
        for layer, x in (
            (Padded(3, 4, 3, stride=2), images(size=7)),
            (Gained(8, 4), torch.randn(5, 8)),
            (Standardized(8, 4), torch.randn(5, 8)),
            (Inner(3, 4, 3), torch.randn(2, 3, 6)),
            (Shifted(3, 4, 3), torch.randn(2, 3, 6)),
        ):
            model = prepared(layer, PRESETS[preset](), x)
            assert_same_outputs(lowbit.convert(model, "float"), model, x)
            integer = lowbit.convert(model)
            torch.testing.assert_close(run(integer, x), run(model, x), rtol=1e-5, atol=1e-5)
            if isinstance(layer, Inner):
                assert_products(integer, model, x)
