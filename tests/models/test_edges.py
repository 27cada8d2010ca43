"""One quantizer for each tensor, and the grid that fits its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit import (
    EMA,
    FakeQuantize,
    PerChannel,
    PerGroup,
    PerToken,
    QuantSpec,
    Recipe,
    Rule,
    prepare,
    recipes,
)
from models.small import Joined, Projections, Residual, Tied, images, mlp


class TestEdges:
    def test_projections_of_one_tensor_share(self) -> None:
        model = prepare(Projections(), recipes.w8a8(), torch.randn(2, 8))
        assert model.q.input_quantizer is model.k.input_quantizer is model.v.input_quantizer
        assert model.q.weight_quantizer is not model.k.weight_quantizer

    def test_layers_that_disagree_do_not_share(self) -> None:
        rules = [Rule("k", weight=4, activation=4)]
        model = prepare(Projections(), Recipe(weight=8, activation=8, rules=rules), torch.randn(2, 8))
        assert model.q.input_quantizer is model.v.input_quantizer is not model.k.input_quantizer
        assert model.k.input_quantizer.bits == 4

    def test_the_residual_is_the_first_convolutions_input(self) -> None:
        model = prepare(Residual(), recipes.w8a8(), images(channels=4))
        assert model.quantized_ops["add_0"].input_quantizer is model.conv1.input_quantizer
        assert model.quantized_ops["add_0"].other_quantizer is not model.conv1.input_quantizer

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize("build", [Projections, Residual])
    def test_a_shared_quantizer_takes_a_tensor_in_once(self, build: type[nn.Module], compiled: bool) -> None:
        shape = (3, 8) if build is Projections else (2, 4, 5, 5)
        spec = QuantSpec(scale_mode=EMA(0.5))
        model = prepare(build(), Recipe(weight=8, activation=spec), torch.randn(shape))
        run: Any = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        first, second = torch.randn(shape), torch.randn(shape)
        model(first)
        run(second)
        quantizer: Any = model.q.input_quantizer if build is Projections else model.conv1.input_quantizer
        expected = 0.5 * first.abs().max() / 127 + 0.5 * second.abs().max() / 127
        torch.testing.assert_close(quantizer.scale, expected, rtol=1e-6, atol=0)
        torch._dynamo.reset()

    def test_it_quantizes_once(self) -> None:
        model = prepare(Projections(), recipes.w8a8(), torch.randn(2, 8))
        count = []
        model.q.input_quantizer.register_forward_hook(lambda *_: count.append(1))
        for _ in range(3):
            model(torch.randn(2, 8))
        assert len(count) == 3

    def test_a_layer_called_twice_quantizes_both(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(torch.tanh(self.layer(x)))

        model = prepare(Twice(), recipes.w8a8_dynamic(), torch.randn(2, 8))
        x, layer = torch.randn(2, 8), model.layer
        weight = layer.weight_quantizer(layer.weight)
        hidden = torch.tanh(F.linear(layer.input_quantizer(x), weight, layer.bias))
        assert_same_bits(model(x), F.linear(layer.input_quantizer(hidden), weight, layer.bias))

    def test_tied_weights_share_one_quantizer(self) -> None:
        for recipe in (recipes.w8a8(), recipes.w4a8(), recipes.w2a2()):
            model = prepare(Tied(), recipe, torch.arange(4))
            assert model.embedding.weight is model.head.weight
            assert model.embedding.weight_quantizer is model.head.weight_quantizer
            model(torch.arange(4)).square().sum().backward()
            assert len({key.rpartition(".")[2] for key, _ in model.named_parameters()} - {"weight", "scale"}) == 0
            lowbit.restore(model)
            assert model.embedding.weight is model.head.weight

    def test_tied_weights_are_quantized_once_in_a_run(self) -> None:
        model = prepare(Tied(), recipes.w8a8(), torch.arange(4))
        count = []
        model.head.weight_quantizer.register_forward_hook(lambda *_: count.append(1))
        model(torch.arange(4))
        assert len(count) == 1

    def test_a_concatenation_takes_statistics_once(self) -> None:
        spec = QuantSpec(scale_mode=EMA(0.5))
        model = prepare(Joined(), Recipe(weight=8, activation=spec), images())
        seen = []
        model.quantized_ops["cat_0"].result_quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for _ in range(2):
            model(images())
        expected = sum(0.5 * x.abs().max() / 127 for x in seen)
        assert len(seen) == 2
        torch.testing.assert_close(model.quantized_ops["cat_0"].result_quantizer.scale, expected, rtol=1e-6, atol=0)

    def test_a_concatenation_has_one_quantizer_and_its_consumer_none(self) -> None:
        model = prepare(Joined(), recipes.w8a8(), images())
        assert list(model.quantized_ops) == ["cat_0", "add_0"]
        assert isinstance(model.quantized_ops["cat_0"].result_quantizer, FakeQuantize)
        assert model.after.input_quantizer is None
        assert isinstance(model.also.input_quantizer, FakeQuantize)  # a mean is off the grid
        seen = []
        model.after.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(images())
        x = seen[0].detach()
        assert_same_bits(model.eval().quantized_ops["cat_0"].result_quantizer(x), x)

    def test_another_grid_after_a_concatenation_is_its_own(self) -> None:
        rules = [Rule("after", weight=4, activation=4)]
        model = prepare(Joined(), Recipe(weight=8, activation=8, rules=rules), images())
        assert model.after.input_quantizer.bits == 4

    def test_attention_has_no_quantizer_without_a_tensor(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        model = prepare(layer, recipes.w2a2(), torch.randn(2, 3, 8))
        assert model.self_attn.key_quantizer is None
        assert model.self_attn.value_quantizer is None
        model(torch.randn(2, 3, 8)).square().sum().backward()
        assert all(scale.grad is not None for scale in lowbit.scale_parameters(model))


class TestGrids:
    def test_what_cannot_be_negative_has_no_sign(self) -> None:
        class Signs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.after_relu, self.after_gelu = (nn.Linear(8, 8) for _ in range(3))
                self.after_relu6, self.after_pool = nn.Linear(8, 8), nn.Linear(4, 8)

            def forward(self, x: Tensor) -> Tensor:
                x = self.after_gelu(F.gelu(self.after_relu(F.relu(self.first(x)))))
                x = self.after_relu6(F.relu6(x))
                return self.after_pool(F.max_pool1d(torch.sigmoid(x), 2))

        model = prepare(Signs(), recipes.w2a2(), torch.randn(2, 8))
        ranges = {name: layer.input_quantizer.quant_range() for name, layer in model.named_children()}
        signed, unsigned = (-2, 1), (0, 3)
        wanted = {"first": signed, "after_relu": unsigned, "after_gelu": signed, "after_relu6": unsigned}
        assert ranges == wanted | {"after_pool": unsigned}

    def test_a_spec_that_says_signed_is_obeyed(self) -> None:
        spec = QuantSpec(bits=4, scale_mode=EMA(), signed=True)
        model = prepare(mlp(8, 8, 8), Recipe(activation=spec), torch.randn(2, 8))
        assert model[2].input_quantizer.quant_range() == (-8, 7)

    def test_groups_that_do_not_fit_become_channels(self) -> None:
        model = prepare(mlp(64, 33, 32, 8), recipes.w4())
        assert [model[i].weight_quantizer.per for i in (0, 2, 4)] == [PerGroup(32), PerChannel(0), PerGroup(32)]
        assert "PerChannel(axis=0)" in str(lowbit.summary(model))

    def test_groups_run_over_the_flattened_inputs(self) -> None:
        conv = prepare(nn.Conv2d(8, 4, 2), recipes.w4())
        expected = conv.weight_quantizer(conv.weight.flatten(1)).view(conv.weight.shape)
        x = images(channels=8)
        assert_same_bits(conv(x), F.conv2d(x, expected, conv.bias))
        up = prepare(nn.ConvTranspose2d(8, 4, 2), recipes.w4())
        assert up.weight_quantizer.per == PerGroup(32)
        by_output = up.weight.transpose(0, 1)
        expected = up.weight_quantizer(by_output.flatten(1)).view(by_output.shape).transpose(0, 1)
        assert_same_bits(up(x), F.conv_transpose2d(x, expected, up.bias))

    def test_channels_of_a_transposed_convolution_are_its_outputs(self) -> None:
        assert prepare(nn.ConvTranspose2d(8, 4, 2), recipes.w8a8()).weight_quantizer.per == PerChannel(1)

    def test_the_tokens_of_a_convolution_are_its_samples(self) -> None:
        model = prepare(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(144, 2)), recipes.w8a8_dynamic(), images()
        )
        assert model[0].input_quantizer.per == PerChannel(0)
        assert model[2].input_quantizer.per == PerToken()
        model(images(5))
