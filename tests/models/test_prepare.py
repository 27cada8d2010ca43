"""prepare: which layers a recipe reaches, what it refuses, what stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import lowbit
from compare import assert_same_bits
from lowbit import (
    Fixed,
    QuantSpec,
    Recipe,
    Rule,
    prepare,
    recipes,
)
from lowbit.functional import fake_quantize
from lowbit.nn.layer import QuantLayer
from lowbit.preparation import quantizers
from models.small import Residual, activations, all_state, assert_same_states, images, mlp


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
