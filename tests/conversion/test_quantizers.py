"""convert: quantizers of outputs, those that are off, and their scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from compare import assert_same_bits
from converting import assert_products, assert_same_outputs, prepared, products, run, weights
from lowbit import EMA, Fixed, Learned, PerBatch, PerChannel, QuantSpec, Recipe
from lowbit.fake_quantize import FakeQuantize
from lowbit.nn.coded import CodedActivation
from lowbit.nn.quantizers import Stateless
from lowbit.preparation import quantizers
from models.small import mlp
from nn.layers import LAYERS, batch_of
from preparing import LIFE, PRESETS, case_of


class TestQuantizers:
    @pytest.mark.parametrize("name", ["linear", "conv2d", "avg pool2d", "embedding"])
    def test_of_outputs(self, name: str, arithmetic: str) -> None:
        batch = batch_of(name)
        recipe = Recipe(8, 8, output=QuantSpec(bits=4, symmetric=False, scale_mode=EMA()))
        model = prepared(LAYERS[name](), recipe, batch)
        converted = lowbit.convert(model, arithmetic)
        assert isinstance(converted.output_quantizer, CodedActivation)
        if arithmetic == "float":
            assert_same_outputs(converted, model, batch)
        output = run(converted, batch)[0]
        assert_same_bits(converted.output_quantizer(output), output)

    @pytest.mark.parametrize("role", ["weight", "activation"])
    @pytest.mark.parametrize("name", LIFE)
    def test_that_are_off(self, name: str, role: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        for _, its, quantizer in quantizers(model):
            quantizer.enabled = (its == "weight") != (role == "weight")
        converted = lowbit.convert(model, "float")
        assert bool(weights(converted)) == (role != "weight")
        assert_same_outputs(converted, model, case.batch)
        assert_same_outputs(lowbit.convert(model), model, case.batch)  # nothing multiplies codes by codes

    @pytest.mark.parametrize("name", LIFE)
    def test_some_of_them_off(self, name: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        for number, (_, _, quantizer) in enumerate(quantizers(model)):
            quantizer.enabled = number % 3 != 0
        assert_same_outputs(lowbit.convert(model, "float"), model, case.batch)

    @pytest.mark.parametrize("name", ["lstm", "reader", "resnet"])
    def test_all_off(self, name: str, arithmetic: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        for _, _, quantizer in quantizers(model):
            quantizer.enabled = False
        model.requires_grad_(False)  # by which torch chooses how to multiply, even under no_grad
        converted = lowbit.convert(model, arithmetic)
        assert not weights(converted)
        assert_same_outputs(converted, model, case.batch)

    @pytest.mark.parametrize(
        "mode", [Fixed(), EMA(), Learned(), Learned("lsq+"), PerBatch(), PerBatch("mean_abs")], ids=str
    )
    @pytest.mark.parametrize("per", [lowbit.PerTensor(), PerChannel(0)], ids=str)
    def test_scale_modes(self, mode: Any, per: Any, arithmetic: str) -> None:
        x = torch.randn(4, 12)
        spec = QuantSpec(bits=5, scale_mode=mode)
        model = prepared(nn.Linear(12, 6), Recipe(QuantSpec(bits=5, scale_mode=mode, per=per), spec), x)
        converted = lowbit.convert(model, arithmetic)
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert products(converted) == {"": "integer"}
            assert_products(converted, model, x)

    def test_learned_scales_below_their_floor(self, arithmetic: str) -> None:
        x = torch.randn(4, 8)
        model = prepared(mlp(8, 16, 5), lowbit.recipes.w2a2(), x)
        with torch.no_grad():
            for number, scale in enumerate(lowbit.scale_parameters(model)):
                scale.mul_(-1 if number % 2 else 1e-6)
        converted = lowbit.convert(model, arithmetic)
        assert all((value > 0).all() for key, value in converted.state_dict().items() if key.endswith("scale"))
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)

    def test_binary_weights_that_are_all_zero(self, arithmetic: str) -> None:
        layer = nn.Linear(8, 3)
        with torch.no_grad():
            layer.weight[1] = 0.0
            layer.weight[2] = -0.0
        x = torch.randn(4, 8)
        model = prepared(layer, lowbit.recipes.binary(), x)
        converted = lowbit.convert(model, arithmetic)
        assert_same_bits(run(converted, x)[0][:, 1:], layer.bias[1:].expand(4, 2))
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_weights_that_are_all_zero(self, preset: str) -> None:
        layer, x = nn.Linear(64, 3), torch.randn(4, 64)
        with torch.no_grad():
            layer.weight[1:] = 0.0
        model = prepared(layer, PRESETS[preset](), x)
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    def test_none_is_left(self) -> None:
        case = case_of("bert")
        for preset in ("w8a8", "w2a2", "ternary"):
            converted = lowbit.convert(prepared(case.model, PRESETS[preset](), case.batch))
            assert not [module for module in converted.modules() if isinstance(module, FakeQuantize | Stateless)]
