"""convert: biases as integers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from compare import assert_same_bits
from converting import assert_products, assert_same_outputs, prepared, run
from inputs import FLOATS
from lowbit import EMA, PerChannel, QuantSpec, Recipe
from models.small import folded_pair, images
from nn.layers import LAYERS, batch_of, in_dtype

INTEGER_BIAS = Recipe(
    QuantSpec(bits=8, per=PerChannel(0)), QuantSpec(bits=8, symmetric=False, scale_mode=EMA()), bias=True
)


class TestBias:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize(
        "name", ["linear", "conv2d", "grouped", "conv transpose2d", "transposed groups", "embedding"]
    )
    def test_as_integers(self, name: str, dtype: torch.dtype, arithmetic: str) -> None:
        layer, batch = in_dtype((LAYERS[name](), batch_of(name)), dtype)
        model = prepared(layer, INTEGER_BIAS, batch)
        converted = lowbit.convert(model, arithmetic)
        assert ("bias_codes" in converted.state_dict()) == (name != "embedding")
        assert not list(converted.parameters())
        if arithmetic == "float" or name not in ("linear", "conv2d", "grouped"):
            assert_same_outputs(converted, model, batch)
        else:
            assert_products(converted, model, batch)

    def test_of_a_folded_layer(self, arithmetic: str) -> None:
        model, x = folded_pair(), images(size=5)
        found = prepared(model, INTEGER_BIAS, x)
        converted = lowbit.convert(found, arithmetic)
        assert converted.state_dict()["0.bias_codes"].dtype == torch.int32
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    def test_that_rounds_to_minus_zero(self) -> None:
        layer, x = nn.Linear(4, 1), torch.eye(4)
        nn.init.constant_(layer.bias, -1e-9)
        model = prepared(layer, INTEGER_BIAS, x)
        converted: Any = lowbit.convert(model, "float")
        assert_same_bits(model._prepared_bias(model.bias).detach(), torch.zeros(1))
        assert_same_bits(converted._prepared_bias(None), torch.zeros(1))

    def test_too_large_for_32_bits_stays_float(self, arithmetic: str) -> None:
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.bias.fill_(3e6)
        x = torch.randn(3, 4)
        model = prepared(layer, INTEGER_BIAS, x)
        converted = lowbit.convert(model, arithmetic)
        assert "bias_codes" not in converted.state_dict()
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    def test_with_its_input_in_float(self) -> None:
        x = torch.randn(3, 12)
        model = prepared(nn.Linear(12, 6), INTEGER_BIAS, x)
        model.input_quantizer.enabled = False
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    def test_moves_and_loads(self) -> None:
        x = torch.randn(3, 12)
        converted = lowbit.convert(prepared(nn.Linear(12, 6), INTEGER_BIAS, x))
        other = copy.deepcopy(converted)
        other.load_state_dict(converted.state_dict(), assign=True)
        assert_same_outputs(other, converted, x)
        assert run(other.to(torch.bfloat16), x.bfloat16())[0].dtype == torch.bfloat16
