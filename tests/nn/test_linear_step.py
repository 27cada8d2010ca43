"""Linear layers whose training step is one LinearStep: which they are, and that it is the step of the values.

Without a GPU, Triton's interpreter runs them; the other backends have no such step, and show what it must give.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import inputs
import lowbit
from lowbit import EMA, Fixed, PerBatch, PerChannel, PerGroup, PerTensor, PerToken, QuantSpec, Recipe
from lowbit.kernels import plan
from lowbit.nn import linear
from lowbit.ranks import Ranks

OWN_ROWS = QuantSpec(bits=8, per=PerChannel(0), scale_mode=PerBatch(), narrow=True)
TOKENS = QuantSpec(bits=8, per=PerToken(), scale_mode=PerBatch())


def groups(size: int) -> QuantSpec:
    return QuantSpec(bits=4, per=PerGroup(size), scale_mode=PerBatch(), narrow=True)


STEPS = {
    "an EMA": Recipe(weight=OWN_ROWS, activation=QuantSpec(bits=8, symmetric=False, scale_mode=EMA(0.9))),
    "a symmetric EMA": Recipe(weight=OWN_ROWS, activation=QuantSpec(bits=8, scale_mode=EMA(0.9))),
    "a fixed scale": Recipe(weight=OWN_ROWS, activation=QuantSpec(bits=4, scale_mode=Fixed())),
    "tokens": Recipe(weight=OWN_ROWS, activation=TOKENS),
    "short groups": Recipe(weight=groups(16), activation=TOKENS),
    "groups of whole rows": Recipe(weight=groups(64), activation=TOKENS),
}


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size multiply codes, and a step may run wherever its kernels do."""
    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0, "cuda": 0})
    torch.use_deterministic_algorithms(False)


def layer_of(recipe: Recipe, device: torch.device, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    example = torch.randn(2, width, device=device)
    return lowbit.prepare(nn.Sequential(nn.Linear(width, 8)).to(device), recipe, example).train()


def is_step(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_LinearByStepBackward"


def run(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    found = []
    for batch in (x, 1.5 * x, 0.5 * x):  # the scale of the last clips
        leaf = batch.detach().requires_grad_()
        y = model(leaf)
        found += [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], g)]
    return found + [state for state in model.buffers() if state.is_floating_point()]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_the_values(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layer_of(STEPS[name], device), inputs.random((2, 5, 64)).float().to(device)
    twin, g = copy.deepcopy(model), inputs.random((2, 5, 8), seed=1).float().to(device)
    assert is_step(copy.deepcopy(model)(x)) == plan.runs("triton", x)
    found = run(model, x, g)
    monkeypatch.setattr(linear, "_LEAST", {})
    for got, want in zip(found, run(twin, x, g), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_an_input_by_channels_is_none_of_tokens(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    channels = QuantSpec(bits=4, per=PerChannel(0), scale_mode=PerBatch())
    model, x = (
        layer_of(Recipe(weight=groups(16), activation=channels), device),
        inputs.random((2, 3, 64)).float().to(device),
    )
    y = model(x)
    assert not is_step(y)
    monkeypatch.setattr(linear, "_LEAST", {})
    torch.testing.assert_close(y, model(x))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a quantizer that is off": lambda layer: setattr(layer.input_quantizer, "enabled", False),
    "a hook": lambda layer: layer.input_quantizer.register_forward_hook(lambda *_: None),
    "a hook before": lambda layer: layer.weight_quantizer.register_forward_pre_hook(lambda *_: None),
    "an observer": lambda layer: setattr(layer.input_quantizer, "observer", lowbit.observers.MinMax(per=PerToken())),
    "more bits": lambda layer: setattr(layer.weight_quantizer, "grid", lowbit.Grid(9)),
    "other scales": lambda layer: setattr(layer.input_quantizer, "per", PerTensor()),
    "another mode": lambda layer: setattr(layer.input_quantizer, "scale_mode", lowbit.Learned()),
    "zero points": lambda layer: setattr(layer.weight_quantizer, "symmetric", False),
    "another rule": lambda layer: setattr(layer.input_quantizer, "ste", lowbit.SteKind.TANH),
    "integers for a bias": lambda layer: setattr(layer, "integer_bias", True),
    "products of values": lambda layer: setattr(layer._context, "integer_products", False),
    "a batch norm": lambda layer: setattr(layer, "_norm", (None,)),
    "an input of many": lambda layer: layer._edges.update(output_quantizer=None),
    "another width": lambda layer: setattr(layer, "in_features", 2**17),
    "other ranks": lambda layer: setattr(layer.weight_quantizer, "_ranks", lambda: Ranks(None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_choice_is_made_again_where_something_has_changed(change: str, device: torch.device) -> None:
    layer = layer_of(STEPS["tokens"], device)[0]
    assert [layer.way(device), layer.way(device)] == ["rows", "rows"]
    CHANGES[change](layer)
    assert layer.way(device) == copy.deepcopy(layer).way(device) != "rows"


def test_a_choice_is_made_again_for_a_scale_of_another_dtype(device: torch.device) -> None:
    layer = layer_of(STEPS["a fixed scale"], device)[0]
    assert layer.way(device) == "kept"
    layer.input_quantizer.scale = layer.input_quantizer.scale.double()
    assert layer.way(device) == "codes"


def test_a_choice_is_made_again_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cpu = layer_of(STEPS["tokens"], torch.device("cpu"))[0], torch.device("cpu")
    assert layer.way(cpu) == "rows"
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert layer.way(cpu) == ""


def test_a_layer_that_has_chosen_is_pickled(device: torch.device) -> None:
    model, x = layer_of(STEPS["tokens"], device), torch.randn(4, 64, device=device)
    y = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)


def test_the_memory_of_an_input_is_not_held(device: torch.device) -> None:
    model, x = layer_of(STEPS["tokens"], device), torch.randn(4, 64, device=device, requires_grad=True)
    hidden = x * 1
    storage = StorageWeakRef(hidden.untyped_storage())
    y = model(hidden)
    del hidden
    assert y.requires_grad
    assert storage.expired()


def test_groups_that_do_not_divide_a_row_are_an_error(device: torch.device) -> None:
    model = layer_of(STEPS["short groups"], device)
    model[0].weight_quantizer.per = PerGroup(48)
    with pytest.raises(ValueError, match=r"PerGroup\(size=48\) does not fit shape \(8, 64\)"):
        model(torch.randn(4, 64, device=device))


@pytest.mark.parametrize("name", STEPS)
def test_weights_once_ends_before_a_checkpoint_runs_again(name: str, device: torch.device) -> None:
    model, x = layer_of(STEPS[name], device), inputs.random((4, 64)).float().to(device).requires_grad_()
    twin = copy.deepcopy(model)
    with lowbit.weights_once(model):
        y = checkpoint(model, x, use_reentrant=False)
    found, wanted = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, twin(x)))
    torch.testing.assert_close(found, wanted)


class _Counted(nn.Module):
    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * 1.0


class _Masked(nn.Linear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("mask", torch.zeros(()))

    @property
    def weight(self) -> Tensor:
        return self.mask * self._parameters["weight"]


@pytest.mark.parametrize("name", ["short groups", "tokens", "an EMA"])
def test_a_weight_that_a_class_computes(name: str, device: torch.device) -> None:
    layer = nn.Sequential(_Masked(64, 8)).to(device)
    model = lowbit.prepare(layer, STEPS[name], torch.randn(2, 64, device=device)).train()
    assert torch.equal(model(torch.randn(4, 64, device=device)), layer[0].bias.expand(4, 8))


@pytest.mark.parametrize("name", ["short groups", "tokens", "an EMA"])
def test_a_computed_weight_is_computed_once(name: str, device: torch.device) -> None:
    float_model = nn.Sequential(nn.Linear(64, 8)).to(device)
    parametrize.register_parametrization(float_model[0], "weight", counted := _Counted())
    model = lowbit.prepare(float_model, STEPS[name], torch.randn(2, 64, device=device)).train()
    counted = next(module for module in model.modules() if isinstance(module, _Counted))
    counted.calls = 0
    model(torch.randn(4, 64, device=device))
    assert counted.calls == 1
