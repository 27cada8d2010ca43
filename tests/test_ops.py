"""The ops of a module's own forward: which are quantized, how they are numbered, and where scales may lie."""

from __future__ import annotations

import inspect

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


def test_a_rule_that_names_only_a_container_is_an_error_that_says_so() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"0 is no layer, but may hold some: 0\.\*"):
        prepare(model, lowbit.Recipe(weight=8, rules=[Rule("0")]))


class Signed(nn.Module):
    """What follows the ReLU can be negative, by an operand that is no data."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.shift, self.fc = kind, nn.Parameter(-torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        match self.kind:
            case "scalar":
                x = x * -1
            case "parameter":
                x = x + self.shift
            case "joined":
                x = torch.cat([self.shift[None, :2].expand(len(x), 2), x[:, :2]], 1)
            case "padded":
                x = nn.functional.pad(x[:, :3], (0, 1), value=-2.0)
        return self.fc(x)


@pytest.mark.parametrize("kind", ["scalar", "parameter", "joined", "padded"])
def test_what_an_operand_may_make_negative_keeps_its_sign(kind: str) -> None:
    assert prepare(Signed(kind), recipes.w8a8_dynamic(), torch.randn(2, 4)).fc.input_quantizer.grid.signed
    assert not prepare(Signed(""), recipes.w8a8_dynamic(), torch.randn(2, 4)).fc.input_quantizer.grid.signed


def test_a_layer_called_twice_serves_both_inputs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu(x)) * self.fc(x)

    assert prepare(Twice(), recipes.w8a8_dynamic(), torch.randn(2, 4)).fc.input_quantizer.grid.signed


def test_the_sums_of_torchs_own_encoder_are_seen() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = prepare(nn.TransformerEncoder(layer, 2), recipes.w8a8(), torch.randn(2, 3, 8))
    assert "add_0" in model.layers[0].quantized_ops


def test_side_by_side_in_the_tree_is_not_one_after_the_other() -> None:
    """A module that is there twice, and a linear layer whose input may have more axes, are not folded unseen."""
    act, conv = nn.ReLU(), nn.Conv2d(3, 3, 1)
    for net in (
        nn.Sequential(nn.Conv2d(3, 3, 1), act, nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), act, nn.BatchNorm2d(3)),
        nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU(), conv, nn.BatchNorm2d(3)),
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    ):
        assert "folded" not in str(lowbit.summary(prepare(net, recipes.w8a8())))
    folded = prepare(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), recipes.w8a8())
    assert "folded into 0" in str(lowbit.summary(folded))


def test_integer_biases_behind_a_join_have_its_scale() -> None:
    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.cat([self.a(x), self.b(x)], 1))

    x = torch.randn(4, 4)
    model = prepare(Join(), lowbit.Recipe(weight=8, activation=8, bias=True), x)
    model(x)
    assert model.c.input_quantizer is None
    scale = model.quantized_ops.cat_0.result_quantizer.scale * model.c.weight_quantizer.params(model.c.weight)[0]
    assert_same_bits(model.c.accumulator_scale(), scale)


def test_an_attribute_error_inside_a_quantizer_is_no_float_weight() -> None:
    model = prepare(nn.Linear(4, 4), recipes.w8a8_dynamic())

    def broken(*_: object) -> None:
        raise AttributeError("broken")

    model.weight_quantizer.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="weight of a QuantLinear could not be quantized: broken"):
        model(torch.randn(2, 4))


def test_others_see_the_signature_of_the_float_class() -> None:
    model = prepare(Penalized(), recipes.w8a8(), torch.randn(4, 8))
    assert list(inspect.signature(model.forward).parameters) == ["x", "target"]
    assert list(inspect.signature(model.a.forward).parameters) == ["input"]


def test_a_recipe_that_does_not_fit_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(6, 10))
    recipe = lowbit.Recipe(weight=lowbit.QuantSpec(per=lowbit.PerBlock(4, 4), scale_mode=lowbit.EMA()))
    with pytest.raises(ValueError, match=r"1\.weight_quantizer: PerBlock"):
        prepare(model, recipe, inplace=True)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    prepare(model, recipes.w8a8(), inplace=True)


def test_attention_left_in_float_is_so_as_a_whole() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    recipe = lowbit.Recipe(weight=8, rules=[Rule("type:MultiheadAttention")])
    assert "self_attn, which is in float" in str(lowbit.summary(prepare(layer, recipe)))


def test_what_has_no_scale_yet_is_named() -> None:
    model = prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), recipes.w8a8(), torch.randn(2, 4)).eval()
    with pytest.raises(lowbit.scale.NotCalibratedError, match=r"0\.input_quantizer, 1\.input_quantizer; call lowbit"):
        model(torch.randn(2, 4))


def test_a_module_of_the_users_may_be_called_a_quantizer() -> None:
    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.vector_quantizer = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.vector_quantizer(self.fc(x))

    other = Coded()
    nn.init.constant_(other.vector_quantizer.weight, 3.0)
    model = prepare(Coded(), recipes.w8a8(), torch.randn(2, 4))
    model.load_state_dict(other.state_dict())
    assert model.vector_quantizer.weight[0] == 3


def test_what_would_be_done_in_silence_is_refused() -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="quantizes nothing"):
        prepare(nn.Sequential(nn.ReLU()), recipes.w8a8())
    prepared = prepare(nn.Linear(4, 4), recipes.w8a8())
    with pytest.raises(ValueError, match="without example_inputs"):
        prepare(prepared, recipes.w8a8(), x)
    with pytest.raises(TypeError, match="iterable of batches"):
        lowbit.calibrate(prepared, x)
    norm = prepare(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), recipes.w8a8())
    nn.init.constant_(norm[1].running_mean, 3.0)
    with pytest.raises(ValueError, match="batches is empty"):
        lowbit.estimate_batch_norm(norm, [])
    assert norm[1].running_mean[0] == 3
