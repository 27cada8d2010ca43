"""convert: parameters of modules that compute by torch.nn.functional."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from converting import assert_products, assert_same_outputs, prepared, products, run, weights
from models.small import Own, images
from preparing import PRESETS


class TestOwnParameters:
    """Of modules that compute by torch.nn.functional."""

    @pytest.mark.parametrize("preset", PRESETS)
    def test_are_dropped_where_nothing_else_takes_them(self, preset: str, arithmetic: str) -> None:
        x = torch.randn(3, 8)
        model = prepared(Own(), PRESETS[preset](), x)
        converted: Any = lowbit.convert(model, arithmetic)
        assert {key for key, _ in converted.named_parameters()} == {"b"}
        assert_same_bits(converted.w, model.quantized_ops.linear_0.weight_quantizer(model.w).detach())
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        elif preset != "w4":
            assert_products(converted, model, x)

    @pytest.mark.parametrize(
        "also",
        [
            lambda self, y: y + self.w.sum(),
            lambda self, y: y + y @ torch.tanh(self.w @ self.w.t()),
            lambda self, y: (y, self.w),
        ],
        ids=["a sum", "another product", "the output"],
    )
    def test_are_kept_where_something_does(self, also: Any, arithmetic: str) -> None:
        x = torch.randn(3, 8)
        model = prepared(Own(also), lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(model, arithmetic)
        assert {"w", "b"} == {key for key, _ in converted.named_parameters()}
        assert_same_bits(converted.get_parameter("w"), model.w)
        assert not weights(converted)
        assert_same_outputs(converted, model, x)

    def test_several_modules_take_them(self, arithmetic: str) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Own()
                self.list = nn.ParameterList([nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(5, 6))])

            def forward(self, x: Tensor) -> Tensor:
                x = self.inner(torch.tanh(F.linear(self.inner(x), self.list[0])))
                return F.linear(x, self.list[1])

        x = torch.randn(3, 8)
        model = prepared(Twice(), lowbit.recipes.w4a8(), x)
        assert_same_outputs(lowbit.convert(model, arithmetic), model, x)

    def test_one_op_takes_several(self) -> None:
        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

            def forward(self, x: Tensor, first: bool) -> Tensor:
                return F.linear(x, self.a if first else self.b)

        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.either = Either()

            def forward(self, x: Tensor) -> Tensor:
                return self.either(torch.tanh(self.either(x, True)), False)

        x = torch.randn(3, 8)
        converted = lowbit.convert(prepared(Calls(), lowbit.recipes.w8a8(), x), "float")
        with pytest.raises(RuntimeError, match=r"either\.linear_0 takes another weight now than with prepare's"):
            run(converted, x)

    def test_computed_weights_are_quantized_on_every_call(self, arithmetic: str) -> None:
        class Standardized(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(6, 3, 3, 3))

            def forward(self, x: Tensor) -> Tensor:
                return F.conv2d(x, (self.w - self.w.mean()) / self.w.std())

        for preset in ("w8a8", "w4a8", "binary", "dorefa", "w2a2"):
            x = images()
            model = prepared(Standardized(), PRESETS[preset](), x)
            with torch.no_grad():  # as training does
                model.w.add_(torch.randn_like(model.w))
            converted = lowbit.convert(model, arithmetic)
            assert_same_outputs(converted, model, x)
            if arithmetic == "integer":
                assert "quantized on every call" in products(converted)["quantized_ops.conv_0"]

    def test_a_weight_that_was_exchanged(self) -> None:
        x = torch.randn(3, 8)
        model = prepared(Own(), lowbit.recipes.w8a8(), x)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        state["w"] = torch.randn(6, 8)
        model.load_state_dict(state, assign=True)
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    @pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a8", "dorefa"])
    def test_of_every_kind(self, preset: str, arithmetic: str) -> None:
        class Kinds(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                shapes = {"one": (8, 4, 3), "up": (8, 4, 2), "mix": (4, 4), "out": (4, 5), "bmm": (2, 5, 3)}
                for name, shape in shapes.items():
                    self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))

            def forward(self, x: Tensor) -> Tensor:
                x = F.conv1d(x, self.one, None, 1, "same", 2)
                x = F.avg_pool1d(F.conv_transpose1d(x, self.up, stride=2), 2)
                x = torch.matmul(x.transpose(1, 2), self.mix)
                x = torch.addmm(x.new_zeros(5), x.flatten(0, 1), self.out).unflatten(0, (2, -1))
                return torch.bmm(x, self.bmm)

        x = torch.randn(2, 4, 6)
        model = prepared(Kinds(), PRESETS[preset](), x)
        converted = lowbit.convert(model, arithmetic)
        assert not list(converted.parameters())
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)
