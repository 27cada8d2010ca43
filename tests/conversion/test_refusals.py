"""convert: what it refuses, and what refuses its models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from converting import assert_same_outputs, prepared, run
from lowbit.nn.coded import Waiting
from lowbit.scale import NotCalibratedError
from models.small import Own, mlp
from preparing import PRESETS


class TestErrors:
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_a_weight_that_is_not_finite(self, bad: float) -> None:
        x = torch.randn(2, 8)
        model = prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x)
        with torch.no_grad():
            model[2].weight[0, 0] = bad
        with pytest.raises(ValueError, match=r"2\.weight_quantizer: the weight holds NaN or infinity"):
            lowbit.convert(model)
        own = prepared(Own(), lowbit.recipes.w8a8(), x)
        with torch.no_grad():
            own.w[0, 0] = bad
        with pytest.raises(ValueError, match=r"^linear_0\.weight_quantizer: the weight holds"):
            lowbit.convert(own)

    @pytest.mark.parametrize("preset", ["w8a8", "w2a2"])
    def test_an_uncalibrated_model(self, preset: str) -> None:
        model = lowbit.prepare(mlp(8, 16, 5), PRESETS[preset](), torch.randn(2, 8))
        with pytest.raises(NotCalibratedError, match=r"no scale yet: 0\.input_quantizer, 2\.input_quantizer; call"):
            lowbit.convert(model)

    def test_a_model_that_is_not_prepared(self) -> None:
        with pytest.raises(ValueError, match=r"the model is not prepared; call lowbit\.prepare"):
            lowbit.convert(nn.Linear(2, 2))

    def test_an_arithmetic_that_is_none(self) -> None:
        model = lowbit.prepare(nn.Linear(2, 2), lowbit.recipes.w4())
        with pytest.raises(ValueError, match="arithmetic is 'int8', but it must be one of 'float', 'integer'"):
            lowbit.convert(model, "int8")

    def test_converting_twice(self, arithmetic: str) -> None:
        x = torch.randn(2, 8)
        converted = lowbit.convert(prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x), arithmetic)
        again = lowbit.convert(converted, arithmetic)
        assert again is not converted
        assert_same_outputs(again, converted, x)
        other = "float" if arithmetic == "integer" else "integer"
        for model in (converted, nn.Sequential(converted)):
            with pytest.raises(
                ValueError, match=f"converted already, to {arithmetic} arithmetic; convert the prepared"
            ):
                lowbit.convert(model, other)

    @pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["itself", "in a model"])
    def test_what_takes_no_converted_model(self, wrap: Any) -> None:
        x = torch.randn(2, 8)
        converted = wrap(lowbit.convert(prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x)))
        for action in (
            lambda: lowbit.prepare(converted, lowbit.recipes.w8a8(), x),
            lambda: lowbit.prepare(converted, lowbit.recipes.w8a8(), x, inplace=True),
            lambda: lowbit.restore(converted),
            lambda: lowbit.calibrate(converted, [x]),
            lambda: lowbit.freeze(converted),
            lambda: lowbit.scale_parameters(converted),
            lambda: lowbit.noise(converted, x),
        ):
            with pytest.raises(ValueError, match="the model is converted; "):
                action()
        run(converted, x)

    def test_a_place_that_saw_no_data(self) -> None:
        """Without example_inputs, attention has a quantizer for each of its inputs, though they are one tensor."""
        x, other = torch.randn(2, 5, 16), torch.randn(2, 5, 16)

        class Self(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

            def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
                other = x if other is None else other
                return self.attention(x, other, other)[0]

        model = lowbit.prepare(Self().eval(), lowbit.recipes.w8a8())
        lowbit.calibrate(model, [x])
        converted: Any = lowbit.convert(model, "float")
        assert isinstance(converted.attention.key_quantizer, Waiting)
        assert_same_outputs(converted, model, x)
        with pytest.raises(
            RuntimeError, match=r"attention\.key_quantizer had seen no data when the model was converted"
        ):
            converted(x, other)
