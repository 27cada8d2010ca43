"""convert: whole networks, the same to the bit with codes in the place of weights; the original stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from compare import assert_same_bits
from converting import assert_same_outputs, call_output, prepared, products, run, watch
from lowbit.fake_quantize import FakeQuantize
from models import networks
from models.small import all_state, assert_same_states, mlp
from preparing import ARITHMETICS, PRESETS, case_of

SLOW = {"efficientnet": ("w8a8", "w4a8", "w2a2"), "minilm": ("w8a8", "w4a8", "dorefa")}
PAIRS = [(name, preset) for name in networks.ALL for preset in SLOW.get(name, PRESETS)]


@pytest.mark.parametrize(("name", "preset"), PAIRS, ids=map("-".join, PAIRS))
def test_networks(name: str, preset: str) -> None:
    """In float to the bit; in integers every product to the bit, and the whole nearer than quantization came."""
    case = case_of(name)
    model = prepared(case.model, PRESETS[preset](), case.batch)
    wanted = run(model, case.batch)[0]
    converted = lowbit.convert(model, "float")
    assert_same_bits(run(converted, case.batch)[0], wanted)
    assert not any(isinstance(module, FakeQuantize) for module in converted.modules())
    integer = lowbit.convert(model)
    calls = watch(integer)
    output = run(integer, case.batch)[0]
    assert bool(calls) == (preset != "w4")
    for path, made in calls.items():
        for *call, result in made:
            assert_same_bits(result, call_output(model.get_submodule(path), *call).detach())
    noise = (wanted - run(case.model, case.batch)[0]).norm()
    assert (output - wanted).norm() <= noise
    for path, how in products(integer).items():
        assert how == "integer" or how.startswith("float: "), path


@pytest.mark.parametrize("name", ["encoder", "unet", "functional", "twice"])
def test_compiled_it_is_the_same(name: str, arithmetic: str) -> None:
    torch._dynamo.reset()
    case = case_of(name)
    converted = lowbit.convert(prepared(case.model, lowbit.recipes.w8a8(), case.batch), arithmetic)
    compiled: Any = torch.compile(converted, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        output = networks.logits(lowbit.flow.call(compiled, case.batch))
    assert_same_bits(output, run(converted, case.batch)[0])
    torch._dynamo.reset()


def test_converting_in_inference_mode(arithmetic: str) -> None:
    case = case_of("unet")
    model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
    with torch.inference_mode():
        converted = lowbit.convert(model, arithmetic)
    wanted = lowbit.convert(model, arithmetic)
    assert_same_outputs(converted, wanted, case.batch)
    assert_same_outputs(copy.deepcopy(converted).double().float(), wanted, case.batch)
    x = case.batch.clone().requires_grad_()
    assert_same_bits(converted(x).detach(), run(wanted, case.batch)[0])


class TestTheOriginal:
    @pytest.mark.parametrize("name", ["resnet", "gpt2", "lstm", "parametrized", "functional", "reader"])
    def test_is_unchanged(self, name: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch).train()
        state, classes = all_state(model), [type(module) for module in model.modules()]
        flags = [(parameter.requires_grad, parameter.data_ptr()) for parameter in model.parameters()]
        for arithmetic in ARITHMETICS:
            lowbit.convert(model, arithmetic)
        assert_same_states(model.state_dict(), state)
        assert [type(module) for module in model.modules()] == classes
        assert [(parameter.requires_grad, parameter.data_ptr()) for parameter in model.parameters()] == flags
        assert all(module.training for module in model.modules())
        case.loss(lowbit.flow.call(model, case.batch)).backward()

    def test_shares_no_memory_with_the_result(self) -> None:
        case = case_of("unet")
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        converted = lowbit.convert(model, "float")
        wanted = run(converted, case.batch)[0]
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        assert_same_bits(run(converted, case.batch)[0], wanted)


class TestWrappers:
    def test_are_looked_through(self, arithmetic: str) -> None:
        class Parallel(nn.Module):
            """As DistributedDataParallel."""

            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self.module = module

            def forward(self, *args: Any) -> Any:
                return self.module(*args)

        x = torch.randn(2, 8)
        model = prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(Parallel(model), arithmetic)
        assert isinstance(converted, nn.Sequential)
        assert_same_outputs(converted, lowbit.convert(model, arithmetic), x)

    def test_a_model_with_a_loader_of_its_own(self) -> None:
        class Picky(nn.Sequential):
            def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
                raise AssertionError("only I know how")

        x = torch.randn(2, 8)
        model = prepared(Picky(nn.Linear(8, 4)), lowbit.recipes.w8a8(), x)
        assert_same_outputs(lowbit.convert(model, "float"), model, x)
