"""What a converted network goes through: copies, files, other dtypes and runs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from compare import assert_same_bits
from converting import prepared, products, run, weights
from models import networks
from models.small import assert_same_states
from nn.layers import in_dtype
from preparing import LIFE, PRESETS, case_of


@pytest.mark.parametrize("name", LIFE)
class TestLife:
    """What a model goes through."""

    @pytest.fixture(params=["w8a8", "w4a8"])
    def converted(self, request: pytest.FixtureRequest, name: str, arithmetic: str) -> nn.Module:
        case = case_of(name)
        return lowbit.convert(prepared(case.model, PRESETS[request.param](), case.batch), arithmetic)

    def test_copies(self, name: str, converted: nn.Module) -> None:
        batch = case_of(name).batch
        wanted = run(converted, batch)[0]
        copies = [copy.deepcopy(converted)]
        if name != "parametrized":  # on which torch leaves a hook that can't be pickled
            copies.append(pickle.loads(pickle.dumps(converted)))
        for each in copies:
            assert_same_bits(run(each, batch)[0], wanted)
            assert products(each) == products(converted)
            assert_same_states(each.state_dict(), converted.state_dict())
            mine = {tensor.data_ptr() for tensor in converted.state_dict().values() if tensor.numel()}
            assert not mine & {tensor.data_ptr() for tensor in each.state_dict().values()}

    def test_state_dict(self, name: str, converted: nn.Module) -> None:
        batch = case_of(name).batch
        wanted, file = run(converted, batch)[0], io.BytesIO()
        torch.save(converted.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(converted)
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.zero_()
        other.load_state_dict(torch.load(file, weights_only=True))
        assert_same_bits(run(other, batch)[0], wanted)

    def test_inference_mode(self, name: str, converted: nn.Module) -> None:
        batch = case_of(name).batch
        wanted = run(converted, batch)[0]
        with torch.inference_mode():
            assert_same_bits(run(converted, batch)[0], wanted)
        assert_same_bits(run(converted, batch)[0], wanted)

    def test_with_gradients_on(self, name: str, converted: nn.Module) -> None:
        batch = case_of(name).batch
        assert not any(parameter.requires_grad for parameter in converted.parameters())
        output = networks.logits(lowbit.flow.call(converted, batch))
        assert not output.requires_grad
        assert_same_bits(output, run(converted, batch)[0])

    def test_half_keeps_scales(self, name: str, converted: nn.Module) -> None:
        batch = in_half(case_of(name).batch)
        scales = {key: value for key, value in converted.state_dict().items() if key.endswith("scale")}
        halved = copy.deepcopy(converted).to(torch.bfloat16)
        for key, value in scales.items():
            assert_same_bits(halved.state_dict()[key], value)
        assert all(coded.dtype == torch.bfloat16 and coded().dtype == torch.bfloat16 for coded in weights(halved))
        output = run(halved, batch)[0]
        assert output.dtype == torch.bfloat16
        back = halved.float()
        assert all(coded().dtype == torch.float32 for coded in weights(back))
        for coded, first in zip(weights(back), weights(converted), strict=True):
            assert_same_bits(coded(), first())

    def test_nothing_is_held_between_runs(self, name: str, converted: nn.Module) -> None:
        run(converted, case_of(name).batch)
        holders = [module for module in converted.modules() if hasattr(module, "_context")]
        assert holders
        for holder in holders:
            assert not holder._context.owners
            assert all(edge.source is None and edge.result is None for edge in holder._context.edges)


def in_half(batch: Any) -> Any:
    return in_dtype((nn.Identity(), batch), torch.bfloat16)[1]
