"""Codes of weights: their sizes, and weights that are shared or computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import lowbit
from compare import assert_same_bits
from converting import assert_products, assert_same_outputs, prepared, products, weights
from lowbit import PerBlock, PerChannel, PerGroup, PerToken, QuantSpec, Recipe, Rule
from models.small import Joined, Projections, Tied, all_state, assert_same_states, images, mlp
from nn.layers import LAYERS, batch_of
from preparing import ARITHMETICS, PRESETS, case_of


@pytest.mark.parametrize("bits", [2, 3, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_bits_of_weights(bits: int, symmetric: bool, signed: bool) -> None:
    spec = QuantSpec(bits=bits, symmetric=symmetric, signed=signed, per=PerChannel(0))
    x = torch.randn(3, 12)
    model = prepared(nn.Linear(12, 5), Recipe(spec, 8), x)
    converted = lowbit.convert(model, "float")
    assert_same_outputs(converted, model, x)
    (coded,) = weights(converted)
    assert coded.codes.nbytes == {2: 15, 3: 30, 5: 60, 7: 60, 8: 60, 9: 120, 16: 120}[bits]


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv transpose2d", "embedding", "transformers conv1d"])
@pytest.mark.parametrize("per", [PerBlock(2, 4), PerBlock(4, 2), PerGroup(8), PerToken()], ids=str)
def test_scales_inside_of_rows(name: str, per: Any) -> None:
    batch = batch_of(name)
    model = prepared(LAYERS[name](), Recipe(QuantSpec(bits=4, per=per), 8), batch)
    assert_same_outputs(lowbit.convert(model, "float"), model, batch)


class TestSize:
    def test_four_bits_in_groups_of_32(self) -> None:
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
        batch = torch.randint(0, 100, (2, 3))
        converted = lowbit.convert(prepared(model, lowbit.recipes.w4(), batch))
        held = sum(tensor.nbytes for coded in weights(converted) for tensor in coded.state_dict().values())
        assert held <= 0.157 * 4 * (6400 + 64 * 128 * 2)
        kept = {key for key, _ in converted.named_parameters()}
        assert kept == {"1.bias"}

    @pytest.mark.parametrize("name", ["bert", "gpt2", "lstm", "mobilenet", "reader", "conv3d", "bag"])
    @pytest.mark.parametrize("arithmetic", ARITHMETICS)
    def test_no_float_weight_is_left(self, name: str, arithmetic: str) -> None:
        case = case_of(name)
        converted = lowbit.convert(prepared(case.model, lowbit.recipes.w4a8(), case.batch), arithmetic)
        float_layers = (nn.LayerNorm, nn.BatchNorm2d)
        left = {
            f"{path}.{key}"
            for path, module in converted.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1 and not isinstance(module, float_layers)
        }
        assert not {key for key in left if "position" not in key}


class TestShared:
    def test_tied_weights_are_coded_once(self, arithmetic: str) -> None:
        index = torch.tensor([[1, 2, 3]])
        model = prepared(Tied(), lowbit.recipes.w8a8(), index)
        converted: Any = lowbit.convert(model, arithmetic)
        assert len(weights(converted)) == 1
        assert not list(converted.parameters())
        assert converted.head.weight_quantizer is converted.embedding.weight_quantizer
        assert_same_bits(converted.head.weight, converted.embedding.weight)
        if arithmetic == "float":
            assert_same_outputs(converted, model, index)
        again = copy.deepcopy(converted)
        assert again.head.weight_quantizer is again.embedding.weight_quantizer

    def test_one_of_the_tied_in_float(self) -> None:
        index = torch.tensor([[1, 2, 3]])
        rest = lowbit.recipes.w8a8()
        model = prepared(Tied(), Recipe(rest.weight, rest.activation, rules=[Rule("head")]), index)
        converted = lowbit.convert(model, "float")
        assert [key for key, _ in converted.named_parameters()] == ["head.weight"]
        assert_same_outputs(converted, model, index)

    def test_one_of_the_tied_has_a_batch_norm(self, arithmetic: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1))
        model[3].weight = model[0].weight
        model[1].running_var.copy_(torch.tensor([0.5, 2.0, 4.0]))
        x = images()
        found = prepared(model, lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(found, arithmetic)
        assert len(weights(converted)) == 2
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    @pytest.mark.parametrize("preset", ["w4a8", "ternary"])
    def test_one_weight_by_rows_and_by_columns(self, preset: str, arithmetic: str) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.layer(x)) @ self.layer.weight

        x = torch.randn(3, 64)
        model = prepared(Both(), PRESETS[preset](), x)
        converted = lowbit.convert(model, arithmetic)
        assert len(weights(converted)) == 2
        assert [key for key, _ in converted.named_parameters()] == ["layer.bias"]
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)

    def test_an_edge_is_quantized_once(self) -> None:
        x = torch.randn(3, 8)
        model = prepared(Projections(), lowbit.recipes.w8a8(), x)
        converted: Any = lowbit.convert(model, "float")
        assert converted.q.input_quantizer is converted.k.input_quantizer is converted.v.input_quantizer
        seen = []
        converted.q.input_quantizer.register_forward_hook(lambda *_: seen.append(1))
        assert_same_outputs(converted, model, x)
        assert len(seen) == 1

    def test_a_join_gives_its_grid(self) -> None:
        x = images()
        model = prepared(Joined(), lowbit.recipes.w8a8(), x)
        converted: Any = lowbit.convert(model)
        assert converted.after.input_quantizer is None
        assert converted.after.grid_of("input_quantizer") is converted.quantized_ops.cat_0.result_quantizer
        assert products(converted)["after"] == "integer"
        assert_products(converted, model, x)
        dynamic = lowbit.convert(prepared(Joined(), lowbit.recipes.w8a8_dynamic(), x))
        assert "follows each batch" in products(dynamic)["after"]


class TestComputedWeights:
    @pytest.mark.parametrize("preset", ["w8a8", "w2a2"])
    def test_pruned(self, preset: str, arithmetic: str) -> None:
        model = mlp(8, 16, 5)
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        prune.random_unstructured(model[0], "weight", amount=0.2)
        prune.random_unstructured(model[2], "bias", amount=0.5)
        x = torch.randn(6, 8)
        found = lowbit.prepare(model, PRESETS[preset](), x, inplace=True)  # torch copies no pruned layer
        found(x).sum().backward()  # which leaves a weight with a gradient in the pruned layer
        torch.optim.SGD(found.parameters(), lr=0.1).step()  # and then an old one
        found.eval()
        converted: Any = lowbit.convert(found, arithmetic)
        zeros = found[0].weight_mask == 0
        assert zeros.any()
        assert not converted[0].weight[zeros].any()
        assert not [key for key in converted.state_dict() if key.startswith("0.weight_") and "quantizer" not in key]
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    def test_parametrized(self, arithmetic: str) -> None:
        model = nn.Sequential(weight_norm(nn.Linear(8, 6)), nn.ReLU(), weight_norm(nn.Conv1d(1, 2, 3, padding=1)))

        class Through(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, _, self.conv = model

            def forward(self, x: Tensor) -> Tensor:
                return self.conv(self.linear(x).unsqueeze(1))

        x = torch.randn(4, 8)
        found = prepared(Through(), lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(found, arithmetic)
        assert {key for key, _ in converted.named_parameters()} == {"linear.bias", "conv.bias"}
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        assert_same_outputs(found, lowbit.convert(found, "float"), x)  # the prepared one runs on

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
    @pytest.mark.parametrize(
        "hook", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm], ids=["weight", "spectral"]
    )
    def test_by_older_hooks(self, hook: Any) -> None:
        x = torch.randn(4, 8)
        found = lowbit.prepare(nn.Sequential(hook(nn.Linear(8, 6)), nn.ReLU()), lowbit.recipes.w4(), inplace=True)
        found(x).sum().backward()
        torch.optim.SGD(found.parameters(), lr=0.1).step()
        state = all_state(found)
        converted = lowbit.convert(found, "float")
        assert_same_states(all_state(found), state)
        assert {key for key, _ in converted.named_parameters()} == {"0.bias"}
        assert_same_outputs(converted, found.eval(), x)
