"""convert: batch norms, folded into the codes of the layer before them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import lowbit
from converting import assert_products, assert_same_outputs, prepared
from lowbit import Recipe
from models.small import folded_pair, images


class TestBatchNorms:
    @pytest.mark.parametrize("bias", [True, False])
    def test_are_gone(self, bias: bool, arithmetic: str) -> None:
        model, x = folded_pair(), images(size=5)
        if not bias:
            model[0].register_parameter("bias", None)
        found = prepared(model, lowbit.recipes.w8a8(), x)
        converted: Any = lowbit.convert(found, arithmetic)
        assert type(converted[1]) is nn.Identity
        assert set(converted.state_dict()) == {
            *("0.bias", "0.input_quantizer.scale", "0.input_quantizer.zero_point"),
            *("0.weight_quantizer.codes", "0.weight_quantizer.scale"),
        }
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    def test_stay_where_the_layer_is_in_float(self) -> None:
        model, x = folded_pair(), images(size=5)
        found = prepared(model, lowbit.recipes.w8a8(), x)
        found[0].weight_quantizer.enabled = False
        converted: Any = lowbit.convert(found, "float")
        assert type(converted[1]) is nn.BatchNorm2d
        assert_same_outputs(converted, found, x)

    def test_stay_where_the_recipe_does_not_fold(self) -> None:
        model, x = folded_pair(), images(size=5)
        recipe = lowbit.recipes.w8a8()
        found = prepared(model, Recipe(recipe.weight, recipe.activation, fold=False), x)
        converted: Any = lowbit.convert(found, "float")
        assert type(converted[1]) is nn.BatchNorm2d
        assert_same_outputs(converted, found, x)
