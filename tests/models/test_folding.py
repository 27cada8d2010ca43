"""Batch norms as part of the weight before them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit import (
    PerBatch,
    PerChannel,
    QuantSpec,
    Recipe,
    prepare,
    recipes,
)
from lowbit.nn.batch_norm import FoldedBatchNorm
from models.small import all_state, assert_same_states, folded_pair, images


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
