"""The ops of a module's own forward: which are quantized, how they are numbered, and where scales may lie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit import PerChannel, PerTensor, PerToken, Rule, prepare, recipes


class Noisy(nn.Module):
    """A residual block that adds noise in training: a sum that eval mode does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.training:
            y = y + torch.randn_like(y)
        return x + self.b(y)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return scores.softmax(-1) @ self.v(x)


class Losing(nn.Module):
    """The result of the sum is dropped, and its effect wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.add_(self.b(x))
        return y


def with_bias(loss: Tensor, penalty: Tensor) -> Tensor:
    return loss + penalty


class Penalized(nn.Module):
    """Sums of losses, which come only with a target, are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = x + self.a(x)
        if target is None:
            return y
        return with_bias((y - target).square().mean(), y.abs().mean())


def test_an_op_that_only_training_runs_is_an_error_that_names_the_remedy() -> None:
    x = torch.randn(4, 8)
    model = prepare(nn.Sequential(Noisy()), recipes.w8a8(), x)
    with pytest.raises(RuntimeError, match=r"0 ran 2 ops of kind add, but 1 .*Rule\('0.add_\*'\)"):
        model(x)
    recipe = lowbit.Recipe(recipes.w8a8().weight, recipes.w8a8().activation, rules=[Rule("0.add_*")])
    prepare(nn.Sequential(Noisy()), recipe, x)(x)


def test_sums_of_losses_do_not_count() -> None:
    x = torch.randn(4, 8)
    model = prepare(Penalized(), recipes.w8a8(), x)
    model(x, torch.randn(4, 8)).backward()
    assert model.quantized_ops.add_0.input_quantizer.is_ready


def test_a_dropped_result_of_a_sum_in_place_keeps_its_effect() -> None:
    x = torch.randn(4, 8)
    model = Losing()
    prepared = prepare(model, recipes.w8a8(), x)
    assert "in-place sum" in str(lowbit.summary(prepared))
    for _, _, quantizer in lowbit.preparation.quantizers(prepared):
        quantizer.enabled = quantizer.observing = False
    assert_same_bits(prepared(x), model(x))


def test_token_scales_do_not_change_along_a_sum() -> None:
    model = prepare(Products(), recipes.w8a8_dynamic(), torch.randn(2, 5, 8))
    scores, attended = model.quantized_ops.matmul_0, model.quantized_ops.matmul_1
    assert scores.input_quantizer.per == attended.input_quantizer.per == PerToken()
    assert scores.other_quantizer.per == attended.other_quantizer.per == PerTensor()
    attention = prepare(nn.MultiheadAttention(8, 2), recipes.w8a8_dynamic())
    assert attention.attended_value_quantizer.per == PerTensor()
    assert attention.scores_key_quantizer.per == PerToken()


def test_the_tokens_of_images_are_samples_in_sums_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(x)

    model = prepare(Block(), recipes.w8a8_dynamic(), torch.randn(2, 3, 4, 4))
    assert model.quantized_ops.add_0.other_quantizer.per == PerChannel(0)
    assert not model.quantized_ops.add_0.other_quantizer.across_ranks


def test_a_rule_may_name_a_shared_layer_by_any_of_its_paths() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    recipe = lowbit.Recipe(weight=8, rules=[Rule("2", weight=4)])
    assert prepare(model, recipe)[0].weight_quantizer.bits == 4


def test_a_shared_quantizer_is_saved_once() -> None:
    model = prepare(Products(), recipes.w8a8(), torch.randn(2, 5, 8))
    assert model.k.input_quantizer is model.q.input_quantizer
    saved = [name for name in model.state_dict() if name.endswith("input_quantizer.scale")]
    assert "q.input_quantizer.scale" in saved
    assert "k.input_quantizer.scale" not in saved
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert len(set(pointers)) == len(pointers)
