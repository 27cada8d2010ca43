"""What prepare makes of a model, rule by rule, on small networks."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import lowbit
from compare import assert_same_bits
from lowbit import (
    EMA,
    FakeQuantize,
    Fixed,
    Learned,
    PerBatch,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
    Recipe,
    Rule,
    SteKind,
    prepare,
    recipes,
)
from lowbit.functional import fake_quantize
from lowbit.nn.batch_norm import FoldedBatchNorm
from lowbit.nn.layer import QuantLayer
from lowbit.preparation import quantizers
from lowbit.scale import NotCalibratedError


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """y = x + conv2(relu(conv1(x)))"""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class Projections(nn.Module):
    """Three layers of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * torch.sigmoid(self.k(x)) + torch.tanh(self.v(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embedding(index))


class Joined(nn.Module):
    """Two branches, joined, moved about, and given to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.after = nn.Conv2d(8, 4, 1)
        self.also = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), self.right(x)], 1)
        return self.after(joined).mean((2, 3))[:, :2] + self.also(joined.mean((2, 3)))


def images(count: int = 2, channels: int = 3, size: int = 6) -> Tensor:
    return torch.randn(count, channels, size, size)


def all_state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert_same_bits(actual[key], value)


def activations(model: nn.Module) -> dict[str, Any]:
    return {path: quantizer for path, role, quantizer in quantizers(model) if role != "weight"}


class TestRules:
    def test_the_first_that_matches_counts(self) -> None:
        rules = [Rule("0", weight=4), Rule("type:Linear", weight=2), Rule("*", weight=3)]
        model = prepare(mlp(8, 8, 8), Recipe(weight=8, rules=rules))
        assert (model[0].weight_quantizer.bits, model[2].weight_quantizer.bits) == (4, 2)

    def test_one_with_nothing_leaves_in_float(self) -> None:
        model = prepare(mlp(8, 8, 8), Recipe(weight=8, activation=8, rules=[Rule("0")]), torch.randn(2, 8))
        assert type(model[0]) is nn.Linear
        assert isinstance(model[2], QuantLayer)
        assert {line.path: line.note for line in lowbit.summary(model).lines}["0"] == "rule '0'"

    def test_a_function_and_a_class_match(self) -> None:
        def is_wide(path: str, module: nn.Module) -> bool:
            return getattr(module, "out_features", 0) == 16

        model = prepare(mlp(8, 16, 4), Recipe(rules=[Rule(is_wide, weight=4), Rule(nn.Linear, weight=2)]))
        assert (model[0].weight_quantizer.bits, model[2].weight_quantizer.bits) == (4, 2)

    @pytest.mark.parametrize("inputs", [None, torch.ones(1, 8)], ids=["untraced", "traced"])
    def test_one_that_matches_nothing_is_named(self, inputs: Tensor | None) -> None:
        with pytest.raises(ValueError, match=r"rules\[1\] matches nothing in the model: match is 'fc\*'"):
            prepare(mlp(8, 8), Recipe(weight=8, rules=[Rule("0"), Rule("fc*")]), inputs)

    def test_ops_have_names_too(self) -> None:
        model = prepare(Residual(), Recipe(weight=8, activation=8, rules=[Rule("add_0")]), images(channels=4))
        assert not any("add_0" in path for path, _, _ in quantizers(model))
        assert "add_0" in {line.path for line in lowbit.summary(model).lines if not line.slot}

    def test_an_op_in_float_is_not_taken_for_one_of_the_module_around(self) -> None:
        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block, self.conv = Residual(), nn.Conv2d(4, 4, 1)

            def forward(self, x: Tensor) -> Tensor:
                y = self.block(x)
                return y + self.conv(y)

        rules = [Rule("block.add_0")]
        model = prepare(Around(), Recipe(weight=8, activation=8, rules=rules), images(channels=4))
        seen, given = [], []
        model.get_submodule("quantized_ops.add_0.other_quantizer").register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        model.conv.register_forward_hook(lambda _, args, output: given.append(output))
        model(images(channels=4))
        assert seen[0] is given[0]


class TestRefusals:
    def test_layers_that_have_no_quantized_form_are_listed(self) -> None:
        model = nn.ModuleDict(
            {"pair": nn.Bilinear(2, 2, 2), "ok": nn.Linear(2, 2), "words": nn.Embedding(4, 2, sparse=True)}
        )
        with pytest.raises(ValueError, match="can't") as error:
            prepare(model, recipes.w8a8())
        assert "pair (Bilinear): there is no quantized Bilinear" in str(error.value)
        assert "words (Embedding): its gradient is sparse" in str(error.value)
        assert "ok" not in str(error.value)
        assert type(model["ok"]) is nn.Linear

    def test_allow_float_lets_them_be(self) -> None:
        model = nn.ModuleDict({"pair": nn.Bilinear(2, 2, 2), "ok": nn.Linear(2, 2)})
        prepared = prepare(model, Recipe(weight=8, allow_float=["pair"]))
        assert type(prepared["pair"]) is nn.Bilinear
        notes = {line.path: line.note for line in lowbit.summary(prepared).lines}
        assert notes["pair"] == "allowed: there is no quantized Bilinear"

    @pytest.mark.parametrize(
        ("model", "recipe", "error", "message"),
        [
            ("a model", recipes.w8a8(), TypeError, "model is str, but it must be an nn.Module"),
            (nn.Linear(2, 2), "w8a8", TypeError, "recipe is 'w8a8' .str., but it must be a lowbit.Recipe"),
        ],
    )
    def test_wrong_types(self, model: Any, recipe: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            prepare(model, recipe)

    @pytest.mark.parametrize(
        "function",
        [
            lowbit.restore,
            lowbit.summary,
            lowbit.freeze,
            lowbit.scale_parameters,
            lambda model: lowbit.calibrate(model, [torch.ones(1, 2)]),
            lambda model: lowbit.noise(model, torch.ones(1, 2)),
        ],
    )
    def test_a_model_that_is_not_prepared(self, function: Callable[[nn.Module], Any]) -> None:
        with pytest.raises(ValueError, match="the model is not prepared"):
            function(nn.Linear(2, 2))


class TestPreparing:
    def test_a_copy_by_default(self) -> None:
        model = mlp(8, 8)
        prepared = prepare(model, recipes.w8a8(), torch.randn(2, 8))
        assert type(model[0]) is nn.Linear
        assert prepared is not model
        assert prepared[0].weight is not model[0].weight

    def test_in_place_if_asked(self) -> None:
        model = mlp(8, 8)
        weight = model[0].weight
        assert prepare(model, recipes.w8a8(), torch.randn(2, 8), inplace=True) is model
        assert model[0].weight is weight
        assert isinstance(model[0], QuantLayer)
        assert isinstance(model[0], nn.Linear)

    def test_twice_is_once(self) -> None:
        model = prepare(mlp(8, 8), recipes.w8a8(), torch.randn(2, 8), inplace=True)
        assert prepare(model, recipes.w8a8(), inplace=True) is model
        again = prepare(model, recipes.w8a8())
        assert again is not model
        assert str(again) == str(model)

    def test_another_recipe_needs_a_float_model(self) -> None:
        model = prepare(mlp(8, 8), recipes.w8a8())
        with pytest.raises(ValueError, match=r"prepared already, by another recipe; call lowbit\.restore"):
            prepare(model, recipes.w4())
        prepare(lowbit.restore(model), recipes.w4())

    def test_a_part_that_is_prepared_is_named(self) -> None:
        with pytest.raises(ValueError, match="0 is prepared already"):
            prepare(nn.Sequential(prepare(nn.Linear(2, 2), recipes.w8a8())), recipes.w8a8())

    def test_the_mode_and_the_statistics_stay(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.5))
        model[2].eval()
        before, inputs = all_state(model), images()
        random = torch.get_rng_state()
        prepared = prepare(model, recipes.w8a8(), inputs)
        assert torch.equal(torch.get_rng_state(), random)
        assert [module.training for module in prepared[:]] == [True, True, False]
        assert_same_states({key: prepared.state_dict()[key] for key in before}, before)

    def test_a_slice_of_a_prepared_sequential_runs(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w8a8_dynamic(), torch.randn(2, 8))
        x = torch.randn(2, 8)
        assert_same_bits(model[2:](model[:2](x)), model(x))
        assert len(model) == 3

    def test_without_inputs_summary_says_what_was_not_seen(self) -> None:
        model = prepare(Residual(), recipes.w8a8())
        assert "no example_inputs" in str(lowbit.summary(model))
        assert not any("add" in path for path, _, _ in quantizers(model))
        model(images(channels=4))

    def test_the_forward_of_a_linear_layer_to_the_bit(self) -> None:
        spec = QuantSpec(bits=4, scale_mode=Fixed())
        model = prepare(nn.Linear(8, 4), Recipe(weight=spec, activation=spec), torch.randn(2, 8))
        x, (a, b) = torch.randn(5, 8), (torch.tensor(0.3), torch.tensor(0.05))
        model.input_quantizer.update_params(a)
        model.weight_quantizer.update_params(b)
        grid = model.input_quantizer.grid
        x_q, w_q = fake_quantize(x, a, grid=grid), fake_quantize(model.weight, b, grid=grid)
        assert_same_bits(model(x), F.linear(x_q, w_q, model.bias))

    def test_weights_that_are_computed_each_have_their_own_quantizer(self) -> None:
        layers = [weight_norm(nn.Linear(8, 8)) for _ in range(6)]
        model = prepare(nn.Sequential(*layers), recipes.w2a2(), torch.randn(2, 8))
        assert len({id(layer.weight_quantizer) for layer in model}) == 6

    def test_a_batch_of_another_size_finds_the_same_ops(self) -> None:
        class Placed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.place = nn.Parameter(torch.randn(1, 4, 8))
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x) + self.place
                return x + self.second(x)

        for example in (1, 3):
            model = prepare(Placed(), recipes.w8a8(), torch.randn(example, 4, 8))
            model(torch.randn(2, 4, 8))
            assert all(quantizer.initialized for quantizer in activations(model).values())
            assert len(activations(model)) == 3

    def test_a_model_that_gives_nan_keeps_its_sums(self) -> None:
        class Broken(Residual):
            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
                return super().forward(x), x.new_full((2,), math.nan)

        assert "add_0" in prepare(Broken(), recipes.w8a8(), images(channels=4)).quantized_ops

    def test_a_model_that_drops_the_result_of_a_sum_keeps_it_in_float(self) -> None:
        class Dropped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                y = self.first(x)
                y.add_(self.second(x))
                return y

        model = Dropped()
        prepared = prepare(model, recipes.w8a8(), torch.randn(2, 8))
        assert prepared._lowbit.floats["add_0"] == "the model drops the result of an in-place sum"
        for _, _, quantizer in quantizers(prepared):
            quantizer.enabled = quantizer.observing = False
        x = torch.randn(2, 8)
        assert_same_bits(prepared(x), model(x))

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_pruned_layer(self, when: str) -> None:
        model = mlp(8, 8, 4)
        if when == "before":
            prune.l1_unstructured(model[0], "weight", 0.5)
        model = prepare(model, recipes.w8a8_dynamic(), torch.randn(2, 8), inplace=True)
        if when == "after":
            prune.l1_unstructured(model[0], "weight", 0.5)
        output = model[0](torch.randn(2, 8))
        output.square().sum().backward()
        assert (model[0].weight == 0).sum() == 32
        assert ((model[0].weight_orig.grad != 0) <= model[0].weight_mask.bool()).all()
        lowbit.restore(model)(torch.randn(2, 8))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_other_dtypes(self, dtype: torch.dtype) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).to(
            dtype
        )
        prepared = prepare(model, recipes.w8a8(), images().to(dtype))
        output = prepared(images().to(dtype))
        output.sum().backward()
        assert output.dtype == prepared.eval()(images().to(dtype)).dtype == dtype
        assert prepared[0].weight.grad.dtype == dtype
        assert prepared[0].input_quantizer.scale.dtype == torch.float32


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


def folded_pair(gamma: Tensor | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -1.5, 2.0, 0.1]) if gamma is None else gamma)
        model[1].bias.copy_(torch.randn(4))
        model[1].running_mean.copy_(torch.randn(4))
        model[1].running_var.copy_(torch.rand(4) + 0.3)
    return model


def along(x: Tensor) -> Tensor:
    return x.view(-1, 1, 1, 1)


WEIGHTS_ONLY = Recipe(weight=QuantSpec(bits=4, per=PerChannel(0), scale_mode=PerBatch()))


class TestFolding:
    def test_training_quantizes_as_if_folded(self) -> None:
        model = prepare(folded_pair(), WEIGHTS_ONLY, images())
        conv, norm, x = model[0], copy.deepcopy(model[1]), images(5)
        f = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
        weight = conv.weight_quantizer(conv.weight * along(f)) / along(f)
        y = F.conv2d(x, weight, conv.bias)
        expected = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, norm.momentum)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        assert_same_bits(model[1].running_mean, norm.running_mean)
        assert_same_bits(model[1].running_var, norm.running_var)
        assert not torch.allclose(
            expected, F.batch_norm(F.conv2d(x, conv.weight, conv.bias), None, None, norm.weight, norm.bias, True)
        )

    @pytest.mark.parametrize("frozen", [False, True], ids=["eval", "frozen in training"])
    def test_settled_it_is_the_folded_convolution(self, frozen: bool) -> None:
        model = prepare(folded_pair(), WEIGHTS_ONLY, images())
        conv, norm, x = model[0], model[1], images(5)
        model.train(frozen)
        if frozen:
            lowbit.freeze(model)
        before = all_state(model)
        f = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        bias = (conv.bias - norm.running_mean) * f + norm.bias
        expected = F.conv2d(x, conv.weight_quantizer(conv.weight * along(f)), bias)
        output = model(x)
        assert_same_bits(output, expected)
        assert_same_states(all_state(model), before)
        output.square().sum().backward()
        assert norm.weight.grad.any()
        assert norm.bias.grad.any()
        assert conv.weight.grad.any()

    def test_a_gamma_of_zero_gives_finite_values(self) -> None:
        model = prepare(folded_pair(torch.tensor([0.0, 1.0, 0.0, -1.0])), recipes.w8a8(), images())
        output = model(images(5))
        output.square().sum().backward()
        assert output.isfinite().all()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert model[1].weight.grad[0] != 0
        assert model.eval()(images(5)).isfinite().all()

    def test_a_linear_layer_folds_too(self) -> None:
        model = prepare(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), WEIGHTS_ONLY, torch.randn(3, 6))
        for _ in range(3):
            model(torch.randn(8, 6))
        model.eval()
        linear, norm, x = model[0], model[1], torch.randn(3, 6)
        f = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        bias = (linear.bias - norm.running_mean) * f + norm.bias
        assert_same_bits(model(x), F.linear(x, linear.weight_quantizer(linear.weight * f[:, None]), bias))

    def test_neighbours_in_a_sequential_fold_without_inputs(self) -> None:
        model = prepare(folded_pair(), WEIGHTS_ONLY)
        assert model[0].folds
        notes = {line.path: line.note for line in lowbit.summary(model).lines}
        assert notes["1"] == "folded into 0"

    def test_a_second_consumer_prevents_it(self) -> None:
        class Leaky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

            def forward(self, x: Tensor) -> Tensor:
                y = self.conv(x)
                return self.norm(y) + y.mean()

        model = prepare(Leaky(), WEIGHTS_ONLY, images())
        assert not model.conv.folds
        assert not isinstance(model.norm, FoldedBatchNorm)

    def test_the_models_output_is_a_consumer(self) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

            def forward(self, x: Tensor) -> dict[str, Tensor]:
                y = self.conv(x)
                return {"before": y, "after": self.norm(y)}

        assert not prepare(Both(), WEIGHTS_ONLY, images()).conv.folds

    def test_not_if_the_recipe_says_so(self) -> None:
        model = prepare(folded_pair(), Recipe(weight=4, fold=False), images())
        assert not model[0].folds

    def test_switched_off_it_runs_unfolded(self) -> None:
        float_model = folded_pair().eval()
        model = prepare(float_model, WEIGHTS_ONLY, images())
        model[0].weight_quantizer.enabled = False
        x = images(5)
        assert_same_bits(model(x), float_model(x))

    def test_estimate_batch_norm_takes_the_mean_and_nothing_else(self) -> None:
        model = prepare(folded_pair(), recipes.w8a8(), images())
        model(images(4))
        lowbit.freeze(model)
        before = all_state(model)
        conv, batches = model[0], [images(4) for _ in range(3)]
        assert lowbit.estimate_batch_norm(model, iter(batches)) == 3
        after = all_state(model)
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert changed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert model[1].momentum == 0.1
        assert model[1].frozen
        assert all(module.training for module in model.modules())
        assert conv.input_quantizer.observing is False


class TestCalibrate:
    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2)
        )
        model[3].eval()
        return prepare(model, recipes.w8a8(), images())

    def test_nothing_but_quantizer_state_changes(self) -> None:
        model = self.model()
        lowbit.freeze(model, scales=False)
        model[0].weight_quantizer.enabled = False
        before, modes = all_state(model), [module.training for module in model.modules()]
        gradients = [parameter.grad for parameter in model.parameters()]
        assert lowbit.calibrate(model, [images(), images()]) == 2
        changed = {key for key, value in all_state(model).items() if not torch.equal(value, before[key])}
        assert changed
        assert all("input_quantizer." in key and not key.endswith("_extra_state") for key in changed)
        assert [module.training for module in model.modules()] == modes
        assert [parameter.grad for parameter in model.parameters()] == gradients
        assert (model[0].weight_quantizer.enabled, model[5].weight_quantizer.enabled) == (False, True)
        model.eval()(images())

    def test_what_is_seen_is_the_float_models(self) -> None:
        model, x = self.model(), images()
        float_model = lowbit.restore(copy.deepcopy(model)).eval()
        lowbit.calibrate(model, [x])
        reach = float_model[:5](x).amax()
        torch.testing.assert_close(model[5].input_quantizer.high, reach, rtol=1e-6, atol=0)

    @pytest.mark.parametrize(
        "batches",
        [
            lambda x: [x],
            lambda x: [(x,)],
            lambda x: [[x]],
            lambda x: [{"input": x}],
            lambda x: (part for part in [x]),
        ],
        ids=["tensor", "tuple", "list", "dict", "generator"],
    )
    def test_batches_of_all_types(self, batches: Callable[[Tensor], Any]) -> None:
        model, x = prepare(nn.Linear(8, 2), recipes.w8a8()), torch.randn(3, 8)
        assert lowbit.calibrate(model, batches(x)) == 1
        assert_same_bits(model.input_quantizer.high, x.max())

    def test_no_batch_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="batches is empty"):
            lowbit.calibrate(prepare(nn.Linear(8, 2), recipes.w8a8()), [])

    def test_an_error_in_a_batch_leaves_the_flags(self) -> None:
        model = self.model()
        with pytest.raises(RuntimeError):
            lowbit.calibrate(model, [images(), torch.randn(1)])
        assert all(quantizer.enabled and quantizer.observing for _, _, quantizer in quantizers(model))
        assert model.training

    def test_eval_before_it_is_an_error(self) -> None:
        with pytest.raises(NotCalibratedError):
            self.model().eval()(images())

    def test_observers_decide(self) -> None:
        spec = QuantSpec(scale_mode=Fixed(), observer={"observer": "min_max"})
        model, x = prepare(nn.Linear(8, 2), Recipe(weight=8, activation=spec)), torch.randn(3, 8)
        lowbit.calibrate(model, [x, x / 2])
        torch.testing.assert_close(model.input_quantizer.scale, x.abs().max() / 127, rtol=1e-6, atol=0)

    def test_learned_scales_start(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w2a2(), torch.randn(2, 8))
        lowbit.calibrate(model, [torch.randn(4, 8)])
        assert all(quantizer.initialized for quantizer in activations(model).values())
        model.eval()(torch.randn(2, 8))


class TestFreeze:
    def test_scales_stop(self) -> None:
        model = prepare(mlp(8, 8), recipes.w8a8(), torch.randn(2, 8))
        model(torch.randn(4, 8))
        assert lowbit.freeze(model) is model
        before = all_state(model)
        model(100 * torch.randn(4, 8)).sum().backward()
        assert_same_states(all_state(model), before)
        assert model[0].weight.grad.any()

    def test_either_alone(self) -> None:
        model = prepare(folded_pair(), recipes.w8a8(), images())
        lowbit.freeze(model, scales=False)
        assert model[1].frozen
        assert model[0].input_quantizer.observing
        model = prepare(folded_pair(), recipes.w8a8(), images())
        lowbit.freeze(model, batch_norm=False)
        assert not model[1].frozen
        assert not model[0].input_quantizer.observing


class TestReports:
    def test_noise_ranks_and_changes_nothing(self) -> None:
        rules = [Rule("2", weight=2, activation=8)]
        model = prepare(mlp(16, 16, 16, 4), Recipe(weight=8, activation=8, rules=rules), torch.randn(4, 16))
        model(torch.randn(32, 16))
        before, x = all_state(model), torch.randn(32, 16)
        found = lowbit.noise(model, x)
        assert_same_states(all_state(model), before)
        assert all(module.training for module in model.modules())
        assert found.lines[0].path == "2.weight_quantizer"
        assert [line.decibels for line in found.lines] == sorted(line.decibels for line in found.lines)
        assert len(found.lines) == 6
        quantizer = model[2].weight_quantizer
        weight = model[2].weight.detach().double()
        lost = (quantizer(model[2].weight).detach().double() - weight).square().mean()
        assert math.isclose(found.lines[0].decibels, 10 * math.log10(weight.square().mean() / lost), rel_tol=1e-6)
        assert "2.weight_quantizer" in str(found)
        assert not any(quantizer._forward_hooks for _, _, quantizer in quantizers(model))

    def test_summary_counts_parameters_and_bytes(self) -> None:
        model = prepare(mlp(64, 8, 4), recipes.w4(), torch.randn(2, 64))
        found = lowbit.summary(model)
        weights = {line.path: line for line in found.lines if line.slot == "weight"}
        assert weights["0"].parameters == 512
        assert weights["0"].float_bytes == 2048
        assert weights["0"].bytes == 512 // 2 + 4 * 16  # 4 bits each, and a scale for each 32
        assert weights["2"].bytes == 32 // 2 + 4 * 4  # 8 inputs: a scale for each output
        assert found.parameters == sum(p.numel() for p in model.parameters()) == 512 + 8 + 32 + 4
        assert found.float_bytes == 4 * found.parameters
        assert found.bytes == weights["0"].bytes + weights["2"].bytes + 4 * 12
        assert found.to_dict()["bytes"] == found.bytes
        assert "556 parameters" in str(found)

    def test_summary_counts_a_tied_weight_once_and_no_scales(self) -> None:
        model = prepare(Tied(), recipes.w2a2(), torch.arange(4))
        assert lowbit.summary(model).parameters == 80
        assert lowbit.summary(model).bytes == 80 * 2 // 8 + 4

    def test_summary_says_who_shares(self) -> None:
        text = str(lowbit.summary(prepare(Projections(), recipes.w8a8(), torch.randn(2, 8))))
        assert text.count("shared with q.input_quantizer") == 2

    def test_summary_counts_every_parameter_of_a_network(self) -> None:
        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.norm = nn.Parameter(torch.randn(8, 8)), nn.LayerNorm(8)
                self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
                self.lstm = nn.LSTM(8, 8, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                x = self.norm(x @ self.table)
                return self.lstm(self.attention(x, x, x)[0])[0]

        model = Own()
        count = sum(parameter.numel() for parameter in model.parameters())
        for recipe in (recipes.w8a8(), recipes.w2a2(), recipes.dorefa()):
            assert lowbit.summary(prepare(model, recipe, torch.randn(2, 3, 8))).parameters == count


class TestLearnedScales:
    def test_scale_parameters_are_each_there_once(self) -> None:
        model = prepare(Projections(), recipes.w2a2(), torch.randn(2, 8))
        scales = lowbit.scale_parameters(model)
        assert len({id(scale) for scale in scales}) == len(scales)
        named = {key for key, parameter in model.named_parameters() if any(parameter is scale for scale in scales)}
        assert all(key.endswith("_quantizer.scale") for key in named)
        assert len(scales) == len(list(quantizers(model)))
        assert lowbit.scale_parameters(prepare(Projections(), recipes.w8a8(), torch.randn(2, 8))) == []

    def test_they_act_positive_at_any_rate(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w2a2(), torch.randn(2, 8))
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        sank = False
        for _ in range(20):
            sgd.zero_grad()
            output = model(torch.randn(16, 8))
            (output - 3).square().mean().backward()
            sgd.step()
            sank |= any(bool(scale <= 0) for scale in lowbit.scale_parameters(model))
            for path, _, quantizer in quantizers(model):
                low, high = quantizer.float_range()
                assert (low < high).all(), path
                assert high.isfinite().all()
        assert sank  # else this shows nothing
        assert model.eval()(torch.randn(4, 8)).isfinite().all()


class TestCheckpoints:
    @pytest.mark.parametrize(
        "recipe", [recipes.w8a8(), recipes.w2a2(), recipes.dorefa()], ids=["w8a8", "w2a2", "dorefa"]
    )
    def test_a_float_checkpoint_loads(self, recipe: Recipe) -> None:
        model = prepare(mlp(8, 8, 8), recipe, torch.randn(2, 8))
        model(torch.randn(4, 8))
        other = mlp(8, 8, 8)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(7)
        before = all_state(model)
        float_state = other.state_dict()
        keys = list(float_state)
        model.load_state_dict(float_state)
        assert list(float_state) == keys
        assert_same_bits(model[0].weight, other[0].weight)
        for key, value in before.items():
            if "input_quantizer" in key:
                assert_same_bits(model.state_dict()[key], value)
        if recipe == recipes.w2a2():
            fresh = prepare(other, recipe)
            assert_same_bits(model[0].weight_quantizer.scale, fresh[0].weight_quantizer.scale)
            assert not torch.equal(model[0].weight_quantizer.scale, before["0.weight_quantizer.scale"])

    def test_a_float_checkpoint_of_a_folded_pair_starts_from_the_folded_weight(self) -> None:
        other = folded_pair()
        model = prepare(folded_pair(), recipes.w2a2(), images())
        model.load_state_dict(other.state_dict())
        fresh = prepare(other, recipes.w2a2(), images())
        assert_same_bits(model[0].weight_quantizer.scale, fresh[0].weight_quantizer.scale)

    def test_strict_still_finds_what_is_missing(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w8a8(), torch.randn(2, 8))
        state = mlp(8, 8, 8).state_dict()
        del state["0.weight"]
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            model.load_state_dict(state)

    def test_one_of_another_recipe_names_the_layers(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w8a8(), torch.randn(2, 8))
        rules = [Rule("2")]
        other = prepare(mlp(8, 8, 8), Recipe(weight=8, activation=8, rules=rules), torch.randn(2, 8))
        with pytest.raises(ValueError, match=r"not in the checkpoint: 2\.input_quantizer, 2\.weight_quantizer"):
            model.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match=r"quantized in the checkpoint, but not here: 2\.input_quantizer"):
            other.load_state_dict(model.state_dict())

    def test_after_restore_loading_is_torchs_own(self) -> None:
        model = lowbit.restore(prepare(mlp(8, 8), recipes.w8a8(), torch.randn(2, 8)))
        assert not model._load_state_dict_pre_hooks
        assert not model._load_state_dict_post_hooks
        assert set(model.__dict__) == set(mlp(8, 8).__dict__)
        model.load_state_dict(mlp(8, 8).state_dict())

    def test_a_copy_guards_itself(self) -> None:
        model = prepare(mlp(8, 8), recipes.w2a2(), torch.randn(2, 8))
        other = copy.deepcopy(model)
        state = {key: 3 * value for key, value in mlp(8, 8).state_dict().items()}
        untouched = all_state(model)
        other.load_state_dict(state)
        assert_same_states(all_state(model), untouched)
        assert not torch.equal(other[0].weight_quantizer.scale, model[0].weight_quantizer.scale)


class TestTraining:
    def test_gradients_accumulate(self) -> None:
        model = prepare(Residual(), recipes.w2a2(), images(channels=4))
        x = images(channels=4)
        model(x)
        lowbit.freeze(model)
        parts = []
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            parts.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
        for _ in range(2):
            model(x).square().sum().backward()
        for parameter, first, second in zip(model.parameters(), *parts, strict=True):
            assert_same_bits(first, second)
            assert_same_bits(parameter.grad, first + second)

    @pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
    def test_checkpointing_a_part_of_what_takes_a_tensor(self, reentrant: bool) -> None:
        """One consumer of x is inside, one outside; the part that runs again is no module of ops."""

        class Part(nn.Module):
            def __init__(self, use: bool) -> None:
                super().__init__()
                self.stem, self.outside, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
                self.inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Projections())

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                y = self.outside(x)
                z = checkpoint(self.inside, x, use_reentrant=reentrant) if self.use else self.inside(x)
                return torch.tanh(y) * z

        plain = prepare(Part(use=False), recipes.w8a8(), torch.randn(4, 8))
        assert plain.outside.input_quantizer is plain.inside[0].input_quantizer
        saving = copy.deepcopy(plain)
        saving.use = True
        for _ in range(2):
            x = torch.randn(4, 8)
            for model in (plain, saving):
                model.zero_grad()
                model(x).square().sum().backward()
            assert_same_states(all_state(saving), all_state(plain))
            for wanted, got in zip(plain.parameters(), saving.parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
    def test_activation_checkpointing_takes_statistics_once(self, reentrant: bool) -> None:
        class Checkpointed(nn.Module):
            def __init__(self, use: bool) -> None:
                super().__init__()
                self.stem, self.use = nn.Conv2d(3, 4, 1), use
                self.blocks = nn.ModuleList([Residual(), Residual()])

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant) if self.use else block(x)
                return x

        plain = prepare(Checkpointed(use=False), recipes.w8a8(), images())
        saving = copy.deepcopy(plain)
        saving.use = True
        for _ in range(2):
            x = images()
            for model in (plain, saving):
                model.zero_grad()
                model(x).square().sum().backward()
            assert_same_states(all_state(saving), all_state(plain))
            for wanted, got in zip(plain.parameters(), saving.parameters(), strict=True):
                assert_same_bits(got.grad, wanted.grad)

    def test_autocast(self) -> None:
        model = prepare(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Residual()), recipes.w8a8(), images()
        )
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images())
        output.float().square().sum().backward()
        assert output.dtype == torch.bfloat16
        assert all(
            p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any()
            for p in model.parameters()
            if p.dim() > 1
        )
        assert all(quantizer.scale.dtype == torch.float32 for quantizer in activations(model).values())
        model.eval()
        exact = model(x := images())
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(x).float() - exact).abs().max() < 0.1 * exact.abs().max()

    def test_a_gradient_scaler(self) -> None:
        models = [prepare(mlp(8, 8, 4), recipes.w2a2(), torch.randn(2, 8))]
        models.append(copy.deepcopy(models[0]))
        x = torch.randn(16, 8)
        for model, scaled in zip(models, (False, True), strict=True):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
            for _ in range(3):
                sgd.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(sgd)
                scaler.update()
        for wanted, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)

    def test_an_averaged_model(self) -> None:
        model = prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Residual()), recipes.w2a2(), images())
        model(images())
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            averaged.update_parameters(model)
        wanted = model[0].weight_quantizer.scale * (1 / 1.1 + 1) / 2
        torch.testing.assert_close(averaged.module[0].weight_quantizer.scale, wanted, rtol=1e-5, atol=0)
        assert averaged.eval()(images()).isfinite().all()
        assert lowbit.summary(averaged).parameters > 0

    @pytest.mark.parametrize("recipe", ["w8a8", "w2a2"])
    def test_compiled_it_is_the_same(self, recipe: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.block, self.head = nn.Conv2d(3, 4, 3), Residual(), Joined()
                self.widen = nn.Conv2d(4, 3, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.widen(self.block(F.relu(self.stem(x)))))

        torch._dynamo.reset()
        eager = prepare(Net(), recipes.presets()[recipe](), images())
        eager(images())
        traced = copy.deepcopy(eager)
        run = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for training in (True, False):
            eager.train(training)
            traced.train(training)
            x = images(4)
            wanted, got = eager(x), run(x)
            assert_same_bits(got, wanted)
            for model, output in ((eager, wanted), (traced, got)):
                model.zero_grad()
                output.square().sum().backward()
            for a, b in zip(eager.parameters(), traced.parameters(), strict=True):
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)  # sums in another order
            assert_same_states(all_state(traced), all_state(eager))
        torch._dynamo.reset()

    def test_compiled_with_a_batch_norm_it_is_nearly_the_same(self) -> None:
        """The compiler's batch norm rounds in its own way, and some codes fall on the other side."""
        torch._dynamo.reset()
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Residual())
        eager = prepare(model, recipes.w8a8(), images())
        eager(images())
        traced = copy.deepcopy(eager)
        run = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for training in (True, False):
            eager.train(training)
            traced.train(training)
            x = images(4)
            wanted, got = eager(x), run(x)
            assert (wanted - got).square().mean() < 1e-4 * wanted.square().mean()
        assert_same_bits(traced[1].num_batches_tracked, eager[1].num_batches_tracked)
        torch.testing.assert_close(traced[1].running_var, eager[1].running_var, rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()

    def test_inference_mode_leaves_nothing_behind(self) -> None:
        model = prepare(Residual(), recipes.w8a8(), images(channels=4))
        model(images(channels=4))
        with torch.inference_mode():
            model(images(channels=4))
        model(images(channels=4)).sum().backward()

    def test_an_error_in_the_forward_leaves_it_usable(self) -> None:
        model = prepare(Residual(), recipes.w8a8(), images(channels=4))
        x = images(channels=4)
        copied = copy.deepcopy(model)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 4, 4, 4, 4))
        model.load_state_dict(copied.state_dict())
        assert_same_bits(model(x), copied(x))
        assert not model.conv1._running


class TestRestore:
    def test_nothing_is_left(self) -> None:
        float_model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Residual(), nn.Flatten(2), nn.TransformerEncoderLayer(16, 2, 16)
        )
        model = prepare(float_model, recipes.w8a8(), images())
        model(images())
        lowbit.freeze(model)
        lowbit.restore(model)
        for (path, module), expected in zip(model.named_modules(), float_model.modules(), strict=True):
            assert type(module) is type(expected), path
            assert set(module.__dict__) == set(expected.__dict__), path

    def test_hooks_stay(self) -> None:
        model, seen = mlp(8, 8), []
        model[0].register_forward_hook(lambda *_: seen.append(1))
        prepared = prepare(model, recipes.w8a8_dynamic(), torch.randn(2, 8))
        seen.clear()
        prepared(torch.randn(2, 8))
        lowbit.restore(prepared)(torch.randn(2, 8))
        assert len(seen) == 2


def test_a_recipe_reaches_every_key_of_a_quantizer() -> None:
    spec = QuantSpec(
        bits=5, per=PerTensor(), symmetric=False, ste=SteKind.TANH, scale_mode=Learned("lsq+", batch_axis=0)
    )
    quantizer = prepare(nn.Linear(8, 4), Recipe(activation=spec), torch.randn(2, 8)).input_quantizer
    found = (quantizer.bits, quantizer.per, quantizer.symmetric, quantizer.ste, quantizer.scale_mode)
    assert found == (5, PerTensor(), False, SteKind.TANH, Learned("lsq+", batch_axis=0))
