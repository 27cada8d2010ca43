"""calibrate, freeze, noise, summary, and scales that are learned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from lowbit.preparation import quantizers
from lowbit.scale import NotCalibratedError
from models.small import Projections, Tied, activations, all_state, assert_same_states, folded_pair, images, mlp


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
