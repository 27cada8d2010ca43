"""weights_once: one quantization for many passes, with the gradients of many."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit
from compare import assert_same_bits
from lowbit.nn import context, linear
from models.small import mlp

PRESETS = ("w8a8", "w8a8_dynamic", "w4a8")


class Net(nn.Module):
    """A convolution, and linear layers that may be run again by checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rest = nn.Conv2d(3, 8, 1), mlp(32, 32, 32)
        self.checkpointed: bool | None = None  # else: whether it is reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        return self.rest(x) if self.checkpointed is None else checkpoint(self.rest, x, use_reentrant=self.checkpointed)


def prepared(preset: str) -> Net:
    return lowbit.prepare(Net(), lowbit.recipes.presets()[preset](), torch.randn(2, 3, 2, 2)).train()


def calls_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of weight quantizers, each time that they run, or that a layer does their work."""
    seen: list[str] = []
    names = {weight: f"{name}_quantizer" for name, weight in model.named_parameters()}

    def watch(run: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Tensor:
            seen.extend(names[w] for w in args if isinstance(w, nn.Parameter) and w.dim() == 2)
            return run(*args, **options)

        return watched

    for name in ("linear_per_batch", "linear_by_kept_scale"):
        monkeypatch.setattr(linear, name, watch(getattr(linear, name)))
    for name, module in model.named_modules():
        if name.endswith("weight_quantizer"):
            for method in ("_quantize", "code"):
                inner = getattr(module, method)
                watched = lambda *args, inner=inner, name=name: seen.append(name) or inner(*args)  # noqa: E731
                monkeypatch.setattr(module, method, watched)
    return seen


def gradients(model: nn.Module, batches: Any) -> list[Tensor]:
    model.zero_grad()
    for batch in batches:
        model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_are_the_same_and_weights_quantized_once(
    preset: str, codes: bool, reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0} if codes else {})
    model, batches = prepared(preset), torch.randn(4, 5, 3, 2, 2)
    model.checkpointed = reentrant
    wanted = gradients(copy.deepcopy(model), batches)
    seen = calls_of(model, monkeypatch)
    with lowbit.weights_once(model):
        found = gradients(model, batches)
    for got, want in zip(found, wanted, strict=True):
        assert_same_bits(got, want)
    # A reentrant checkpoint runs its first forward without gradients.
    rest = ["rest.0.weight_quantizer", "rest.2.weight_quantizer"]
    assert sorted(seen) == sorted(["conv.weight_quantizer", *rest, *(rest if reentrant else [])])
    seen.clear()
    model.checkpointed = None
    gradients(model, batches)
    assert len(seen) == 12  # as ever, when it is over


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers of any size multiply codes, as on a GPU; how many weights were coded at once, each time."""
    counts: list[int] = []
    inner = context.code_parameters

    def counted(parameters: list[nn.Parameter], grid: lowbit.Grid) -> Any:
        counts.append(len(parameters))
        return inner(parameters, grid=grid)

    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0})
    monkeypatch.setattr(context, "plan", SimpleNamespace(runs=lambda *_: True))
    monkeypatch.setattr(context, "code_parameters", counted)
    return counts


def test_codes_of_the_last_time_are_made_at_once(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = prepared("w8a8_dynamic"), torch.randn(3, 5, 3, 2, 2)
    wanted = gradients(copy.deepcopy(model), batches)
    seen = calls_of(model, monkeypatch)
    for wanted_made, wanted_seen in (([], 3), ([2], 1)):  # the convolution's by itself; it has no codes
        seen.clear()
        with lowbit.weights_once(model):
            found = gradients(model, batches)
        for got, want in zip(found, wanted, strict=True):
            assert_same_bits(got, want)
        assert (made, len(seen)) == (wanted_made, wanted_seen)
    model.rest[0].weight.requires_grad_(False)  # no longer like the other
    with lowbit.weights_once(model):
        model(batches[0]).sum().backward()
    assert made == [2]
    assert copy.deepcopy(model).conv._context.expected == ()


def test_what_is_made_at_once_is_made_once(made: list[int]) -> None:
    """Weights that were not asked for the last time make nothing anew; those that are gone are not made."""
    model = lowbit.prepare(mlp(8, 8, 8, 8), lowbit.recipes.w8a8_dynamic(), torch.randn(2, 8)).train()
    first, second, third = (layer for layer in model if isinstance(layer, nn.Linear))
    x = torch.randn(4, 8)
    with lowbit.weights_once(model):
        second(first(x))
    with lowbit.weights_once(model):
        third(first(x))
        third(second(x))
        with torch.no_grad():
            first.weight.add_(1)
        with pytest.raises(RuntimeError, match="a weight changed inside"):
            first(x)
    assert made == [2]
    second.weight = nn.Parameter(second.weight.detach().clone())
    with lowbit.weights_once(model):
        model(x)
    assert made == [2, 2]  # the first and the third, without the weight that is gone


def test_a_weight_that_changes_is_an_error_and_nothing_stays() -> None:
    model, batches = prepared("w8a8"), torch.randn(2, 5, 3, 2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with lowbit.weights_once(model):
        model(batches[0]).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"a weight changed inside lowbit\.weights_once"):
            model(batches[1])
    model(batches[0]).sum().backward()
    with lowbit.weights_once(model):
        model(batches[0])
        copied = copy.deepcopy(model)
    assert copied.conv._context.held is None


@pytest.mark.parametrize("recipe", ["w2a2", "ternary", "dorefa"])
def test_other_quantizers_run_as_ever(recipe: str) -> None:
    model, batches = prepared(recipe), torch.randn(3, 5, 3, 2, 2)
    wanted = gradients(copy.deepcopy(model), batches)
    with lowbit.weights_once(model):
        for got, want in zip(gradients(model, batches), wanted, strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("tied", [False, True], ids=["computed", "tied"])
def test_computed_and_tied_weights_run_as_ever(tied: bool) -> None:
    net = mlp(8, 8, 8)
    if tied:
        net[2].weight = net[0].weight
    else:
        nn.utils.parametrizations.weight_norm(net[2])
    model, batches = lowbit.prepare(net, lowbit.recipes.w8a8(), torch.randn(2, 8)).train(), torch.randn(3, 4, 8)
    wanted = gradients(copy.deepcopy(model), batches)
    with lowbit.weights_once(model):
        for got, want in zip(gradients(model, batches), wanted, strict=True):
            assert_same_bits(got, want)


def test_a_float_model_is_refused() -> None:
    with pytest.raises(ValueError, match="prepare"), lowbit.weights_once(nn.Linear(2, 2)):
        pass


class Loud(lowbit.FakeQuantize):
    pass


@pytest.mark.parametrize("what", ["hook", "observer", "subclass", "off"])
def test_a_quantizer_that_does_more_runs_in_every_pass(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = prepared("w8a8"), torch.randn(3, 5, 3, 2, 2)
    quantizer = model.conv.weight_quantizer
    if what == "hook":
        quantizer.register_forward_hook(lambda *_: None)
    elif what == "observer":
        quantizer.observer = lowbit.observers.MinMax(per=quantizer.per)
    elif what == "subclass":
        quantizer.__class__ = Loud
    else:
        quantizer.enabled = False
    seen = calls_of(model, monkeypatch)
    with lowbit.weights_once(model):
        gradients(model, batches)
    assert seen.count("conv.weight_quantizer") == (0 if what == "off" else 3)
    assert seen.count("rest.0.weight_quantizer") == 1


def test_a_weight_that_thaws_has_its_gradient() -> None:
    model, batch = prepared("w8a8"), torch.randn(5, 3, 2, 2)
    with lowbit.weights_once(model):
        model.requires_grad_(False)
        model(batch)
        model.requires_grad_(True)
        (found,) = gradients(model, [batch])[:1]
    assert_same_bits(found, gradients(model, [batch])[0])


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        model, batch = prepared("w8a8"), torch.randn(5, 3, 2, 2)
        with lowbit.weights_once(model):
            assert_same_bits(model(batch), model(batch))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_code_quantizes_in_every_pass() -> None:
    torch._dynamo.reset()
    model, batches = prepared("w8a8_dynamic"), torch.randn(2, 5, 3, 2, 2)
    wanted = gradients(copy.deepcopy(model), batches)
    model.compile(backend="aot_eager")
    with lowbit.weights_once(model):
        for got, want in zip(gradients(model, batches), wanted, strict=True):
            torch.testing.assert_close(got, want)
    torch._dynamo.reset()
