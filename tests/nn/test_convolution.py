"""Convolutions that multiply codes in training: when they do, and that all around them stays as it is."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit
from compare import assert_same_bits
from lowbit import EMA, Learned, PerBatch, PerChannel, PerGroup, PerToken, QuantSpec, Recipe, SteKind
from lowbit.bench.runner import count_saved
from lowbit.nn import convolution
from models.small import all_state, assert_same_states

PRESETS = ("w8a8", "w8a8_dynamic", "ternary")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Layers of any size multiply codes; the shapes of what came out."""
    seen: list[tuple[int, ...]] = []
    inner = convolution.integer_convolution

    def watched(*args: Any, **options: Any) -> Tensor:
        y = inner(*args, **options)
        seen.append(tuple(y.shape))
        return y

    monkeypatch.setattr(convolution, "_LEAST", {"cpu": 0})
    monkeypatch.setattr(convolution, "_LEAST_POSITIONS", 0)
    monkeypatch.setattr(convolution, "_LEAST_USES", 0)
    monkeypatch.setattr(convolution, "integer_convolution", watched)
    return seen


def images(count: int = 4, channels: int = 8, size: int = 9) -> Tensor:
    return torch.randn(count, channels, size, size)


def prepared(model: nn.Module, preset: str = "w8a8", **changes: Any) -> Any:
    recipe = lowbit.recipes.presets()[preset]()
    for name, value in changes.items():
        recipe = Recipe(recipe.weight, recipe.activation, **{name: value})
    return lowbit.prepare(model, recipe, images()).train()


def pair(bias: bool = True) -> nn.Sequential:
    """A convolution and a batch norm, some of whose factors are negative, and one near 0."""
    norm = nn.BatchNorm2d(6)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, -1.5, 2.0, -0.25, 1.0, 1e-9]))
        norm.bias.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.running_mean.normal_()
    return nn.Sequential(nn.Conv2d(8, 6, 3, padding=1, bias=bias), norm)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "3x3": lambda: nn.Conv2d(8, 6, 3, padding=1),
    "1x1": lambda: nn.Conv2d(8, 6, 1, bias=False),
    "stride": lambda: nn.Conv2d(8, 6, 3, stride=2, padding=1),
    "dilation": lambda: nn.Conv2d(8, 6, 3, dilation=2, padding=(2, 1)),
    "same": lambda: nn.Conv2d(8, 6, (3, 5), padding="same"),
    "valid": lambda: nn.Conv2d(8, 6, 3, padding="valid"),
    "batch norm": pair,
    "batch norm, no bias": lambda: pair(bias=False),
    "batch norm without parameters": lambda: nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6, affine=False)),
}


def step(model: nn.Module, x: Tensor, g: Tensor | None = None) -> dict[str, Tensor]:
    """The output, the gradients and the state of one training step."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (torch.sin(y) if g is None else y * g).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert x.grad is not None
    return {"output": y.detach(), "input": x.grad} | grads | {f"state {k}": v for k, v in all_state(model).items()}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], eps: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        assert found[key].dtype == want.dtype
        # the gradient of a bias before a batch norm is 0, and what is computed of it is noise
        atol = eps * max(float(want.abs().max()), 30.0) if want.numel() and want.is_floating_point() else 0.0
        torch.testing.assert_close(found[key], want, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def both(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A step by codes and a step by values, of the same model."""
    twin = copy.deepcopy(model)
    found = step(model, x)
    with monkeypatch.context() as patch:
        patch.setattr(convolution, "_LEAST", {})
        return found, step(twin, x)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_the_float_product(
    name: str, memory: torch.memory_format, preset: str, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a batch norm folded in: by the batch's statistics, by its own once frozen, and unfolded."""
    x = images().contiguous(memory_format=memory)
    for fold in (True, False):
        model = prepared(MODELS[name](), preset, fold=fold)
        model.to(memory_format=memory)
        found, wanted = both(model, x, monkeypatch)
        assert_near(found, wanted)
        assert found["output"].stride() == wanted["output"].stride()
        assert len(products) == 1
        lowbit.freeze(model)
        assert_near(*both(model, x, monkeypatch))
        assert len(products) == 2
        products.clear()


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_and_values_are_those_of_float64(preset: str, products: list[Any]) -> None:
    layer, x = prepared(nn.Conv2d(8, 6, 3, 2, 1), preset), images().requires_grad_()
    y = layer(x)
    g = torch.randn_like(y)
    found = y.detach(), *torch.autograd.grad(y, [x, layer.weight, layer.bias], g)
    layer.eval()  # the scales stay
    x_hat, w_hat = layer.input_quantizer(x), layer.weight_quantizer(layer.weight)
    passed = torch.autograd.grad(x_hat, x, torch.ones_like(x_hat))[0].double()
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x_hat, w_hat, layer.bias)]
    wanted = nn.functional.conv2d(*leaves, 2, 1)
    grads = list(torch.autograd.grad(wanted, leaves, g.double()))
    grads[0] = grads[0] * passed
    for got, want in zip(found, [wanted.detach(), *grads], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6 * float(want.abs().max()))
    assert len(products) == 1


def test_what_is_trained_is_what_an_integer_model_computes(products: list[Any]) -> None:
    model = prepared(nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 1)))
    for _ in range(3):
        model(images()).square().mean().backward()
    lowbit.freeze(model)
    x, converted = images(), lowbit.convert(model)
    model.train()
    products.clear()
    with torch.no_grad():
        output = model(x)
    assert products == [(4, 12, 9, 9), (4, 4, 9, 9)]
    assert_same_bits(output, converted(x))


class Block(nn.Module):
    """Codes of one tensor for two convolutions, and its values for a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.other = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        return self.first(x) + self.other(x) + x


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
def test_a_residual_block(preset: str, products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(Block(), preset)
    calls = []
    quantizer = model.first[0].input_quantizer
    inner = type(quantizer).code
    monkeypatch.setattr(type(quantizer), "code", lambda self, x: calls.append(self is quantizer) or inner(self, x))
    found, wanted = both(model, images(), monkeypatch)
    assert len(products) == 2
    assert calls.count(True) == 1  # for both
    for key, want in wanted.items():  # a rounding may come to the code beside
        scale = float(want.double().norm())
        assert float((found[key].double() - want.double()).norm()) <= 1e-3 * scale, key


def test_other_dimensions(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for layer, x in (
        (nn.Conv1d(8, 6, 3, padding=1), torch.randn(4, 8, 20)),
        (nn.Conv3d(4, 6, 3, stride=2, padding=1), torch.randn(2, 4, 5, 6, 7)),
    ):
        model = lowbit.prepare(layer, lowbit.recipes.w8a8(), x).train()
        assert_near(*both(model, x, monkeypatch))
    assert len(products) == 2


def test_a_linear_layer_with_a_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.nn import linear

    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -1.5, 2.0, -0.25, 1.0, 3.0]))
    by_codes = lowbit.prepare(model, lowbit.recipes.w8a8(), torch.randn(5, 8)).train()
    by_values, x = copy.deepcopy(by_codes), torch.randn(16, 8)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "_LEAST", {"cpu": 0})
        assert by_codes[0].product_refusal() == ""
        found = step(by_codes, x)
    assert_near(found, step(by_values, x))


def test_a_single_image_and_an_empty_batch(products: list[Any]) -> None:
    layer = prepared(nn.Conv2d(8, 6, 3))
    layer(images(size=8)[0])
    assert not products
    layer(images()[:0]).sum().backward()
    assert products == [(0, 6, 7, 7)]


def test_eval_mode_and_small_layers_multiply_values(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = prepared(nn.Conv2d(8, 6, 3)), images()
    layer(x)
    products.clear()
    layer.eval()
    layer(x)
    layer.train()
    for name, value in (("_LEAST", {"cpu": 2**27}), ("_LEAST_POSITIONS", 500), ("_LEAST_USES", 128)):
        with monkeypatch.context() as patch:
            patch.setattr(convolution, name, value)
            lowbit.freeze(layer)
            wanted = nn.functional.conv2d(layer.input_quantizer(x), layer.weight_quantizer(layer.weight), layer.bias)
            assert_same_bits(layer(x), wanted)
    assert not products


@pytest.mark.parametrize("preset", PRESETS)
def test_nan_is_seen_and_an_infinity_is_clipped(preset: str, products: list[Any]) -> None:
    layer, x = prepared(nn.Conv2d(8, 6, 3, padding=1), preset), images()
    x[2, 3, 4, 4] = float("inf")
    assert layer(x).isfinite().all()
    x[2, 3, 4, 4] = float("nan")
    y = layer(x)
    assert y[2, :, 3:6, 3:6].isnan().all()
    assert y[:2].isfinite().all()
    with torch.no_grad():
        layer.weight[1, 1, 1, 1] = float("nan")
    y = layer(images())
    assert y[:, 1].isnan().all()
    assert len(products) == 3


@pytest.mark.parametrize("preset", PRESETS)
def test_nan_in_a_folded_weight_is_seen(preset: str, products: list[Any]) -> None:
    model = prepared(pair(), preset)
    model(images())
    with torch.no_grad():
        model[0].weight[1, 1, 1, 1] = float("nan")
    y = model(images())
    assert y[:, 1].isnan().all()
    assert y[:, 2:].isfinite().all()
    assert len(products) == 2


def test_a_frozen_weight(products: list[Any]) -> None:
    layer, x = prepared(nn.Conv2d(8, 6, 3)), images().requires_grad_()
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert x.grad.any()
    layer.weight.requires_grad_()
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None
    assert products


@pytest.mark.parametrize(("preset", "bits"), [("w8a8", 1), ("w8a8_dynamic", 0)])
def test_codes_are_what_is_kept(preset: str, bits: int, products: list[Any]) -> None:
    layer, x = prepared(nn.Conv2d(8, 6, 3), preset), images(16).requires_grad_()
    _, kept = count_saved(lambda: layer(x))
    codes, scales = x.numel() + layer.weight.numel(), 4 * (6 + 16 + 1)
    assert codes <= kept <= codes + scales + bits * x.numel() // 8


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, products: list[Any]) -> None:
    plain = prepared(nn.Sequential(nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    again, x = copy.deepcopy(plain), images().requires_grad_()
    plain(x).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    checkpoint(again, y, use_reentrant=reentrant).square().sum().backward()
    assert len(products) > 4  # twice, but for what torch stops after its last saved tensor
    assert_same_bits(y.grad, x.grad)
    for one, other in zip(again.parameters(), plain.parameters(), strict=True):
        assert_same_bits(one.grad, other.grad)


def test_autocast(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The product and its gradients in its dtype, parameters and their gradients in their own."""
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = both(prepared(nn.Conv2d(8, 6, 3)), images(), monkeypatch)
    assert found["output"].dtype == torch.bfloat16
    assert len(products) == 1
    assert_near(found, wanted, 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = lowbit.prepare(nn.Conv2d(8, 6, 3).to(dtype), lowbit.recipes.w8a8(), images().to(dtype)).train()
    assert_near(*both(model, images().to(dtype), monkeypatch), 4 * torch.finfo(dtype).eps)
    assert len(products) == 1


@pytest.mark.parametrize("fold", [True, False])
def test_compiled_it_multiplies_values_without_a_break(fold: bool, products: list[Any]) -> None:
    torch._dynamo.reset()
    model = prepared(pair(), fold=fold)
    twin, x = copy.deepcopy(model), images()
    twin.compile(backend="aot_eager", fullgraph=True)
    found = step(twin, x)
    assert not products
    assert_near(found, step(model, x))
    torch._dynamo.reset()


def test_exported_it_multiplies_values(products: list[Any]) -> None:
    torch.export.export(prepared(nn.Conv2d(8, 6, 3)), (images(),))
    assert not products


def test_gradients_in_batches(products: list[Any]) -> None:
    model, x = prepared(nn.Conv2d(8, 6, 3)), images().requires_grad_()
    y = model(x)
    directions = torch.randn(3, *y.shape)
    (together,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    for direction, got in zip(directions, together, strict=True):
        (alone,) = torch.autograd.grad(y, x, direction, retain_graph=True)
        torch.testing.assert_close(got, alone, rtol=1e-5, atol=1e-5)
    assert products


def test_weights_once(products: list[Any]) -> None:
    model, x = prepared(nn.Conv2d(8, 6, 3)), images()
    twin = copy.deepcopy(model)
    with lowbit.weights_once(model):
        for part in x.split(2):
            model(part).square().sum().backward()
    for part in x.split(2):
        twin(part).square().sum().backward()
    assert_same_bits(model.weight.grad, twin.weight.grad)
    assert len(products) == 4


class Own(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Standardized(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


W8 = QuantSpec(bits=8, per=PerChannel(0))
A8 = QuantSpec(bits=8, scale_mode=EMA())
REFUSALS: dict[str, tuple[nn.Module, Recipe, str]] = {
    "a forward of its own": (Own(8, 4, 3), Recipe(W8, A8), "a forward of its own"),
    "a product of its own": (Standardized(8, 4, 3), Recipe(W8, A8), "a forward of its own"),
    "groups": (nn.Conv2d(8, 8, 3, groups=8), Recipe(W8, A8), "it has 8 groups"),
    "padding": (nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"), Recipe(W8, A8), "its padding is reflect"),
    "one side": (nn.Conv2d(8, 4, (3, 2), padding="same"), Recipe(W8, A8), "not the same on both sides"),
    "a float input": (nn.Conv2d(8, 4, 3), Recipe(W8), "the input has no quantizer"),
    "a learned scale": (nn.Conv2d(8, 4, 3), Recipe(QuantSpec(bits=8, scale_mode=Learned()), A8), "scale is learned"),
    "9 bits": (nn.Conv2d(8, 4, 3), Recipe(QuantSpec(bits=9), A8), "the weight's quantizer: it has 9 bits"),
    "tanh": (
        nn.Conv2d(8, 4, 3),
        Recipe(W8, QuantSpec(bits=8, scale_mode=EMA(), ste=SteKind.TANH)),
        "the input's quantizer: its gradient TANH",
    ),
    "scale groups": (nn.Conv2d(8, 4, 3), Recipe(QuantSpec(bits=4, per=PerGroup(4)), A8), r"scales PerGroup\(size=4\)"),
    "affine weights": (
        nn.Conv2d(8, 4, 3),
        Recipe(QuantSpec(bits=8, symmetric=False, scale_mode=PerBatch()), A8),
        "the weight has zero points",
    ),
    "zero points by image": (
        nn.Conv2d(8, 4, 3),
        Recipe(W8, QuantSpec(bits=8, symmetric=False, per=PerToken(), scale_mode=PerBatch())),
        "the input has a zero point for each image",
    ),
    "integer bias": (nn.Conv2d(8, 4, 3), Recipe(W8, A8, bias=True), "its bias is one of integers"),
    "long rows": (nn.Conv2d(8, 1, (91, 91), padding=45), Recipe(W8, A8), "might not fit 32 bits"),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, products: list[Any]) -> None:
    layer, recipe, reason = REFUSALS[name]
    model: Any = lowbit.prepare(layer, recipe, images()).train()
    assert re.search(reason, model.product_refusal())
    model(images()).sum().backward()
    assert not products


def test_summary_says_which() -> None:
    layers = nn.Sequential(
        nn.Conv2d(8, 64, 3), nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64), nn.Conv2d(64, 512, 3)
    )
    text = str(lowbit.summary(lowbit.prepare(layers, lowbit.recipes.w8a8(), images())))
    few = "product in training: float: 64 multiplications for each element that comes in or goes out are too few"
    lines = [line for line in text.splitlines() if "product in training" in line]
    assert few in lines[0]
    assert "product in training: integer from 3,641 output positions on" in lines[1]
    assert "product in training: integer from 512 output positions on" in lines[2]
    assert "product in training" not in str(lowbit.summary(lowbit.prepare(layers, lowbit.recipes.w4(), images())))


def test_codes_and_values_have_the_same_life(products: list[Any]) -> None:
    """A copy, a state and a restored model know nothing of products."""
    model = prepared(pair())
    model(images())
    twin = copy.deepcopy(model)
    assert_same_states(all_state(twin), all_state(model))
    restored = lowbit.restore(model)
    assert type(restored[0]) is nn.Conv2d


@pytest.mark.parametrize("isa", ["AVX2", "SSE41"])
def test_processors_whose_products_saturate(isa: str) -> None:
    """With oneDNN held back to older instructions, a convolution of codes is refused, and still exact."""
    script = """
import torch
from lowbit.kernels.convolution import Steps, refusal, scaled_convolution
torch.manual_seed(0)
x, w = (torch.randint(0, 2, shape).mul(255).sub(128).to(torch.int8) for shape in ((2, 64, 6, 6), (32, 64, 3, 3)))
one = torch.ones(())
y = scaled_convolution(x, w, one, one, one.int() * 5, steps=Steps((1, 1), (1, 1), (1, 1)), dtype=torch.float32)
assert torch.equal(y.double(), torch.nn.functional.conv2d(x.double() - 5, w.double(), padding=1))
assert "not exact on this CPU" in refusal("cpu")
assert "on cuda" in refusal("cuda")
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_padding_that_changes_after_the_layer_is_made(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(8, 6, 3, padding=1)
    layer.padding = layer.dilation = (2, 2)  # as backbones are dilated
    model = prepared(layer)
    assert_near(*both(model, images(), monkeypatch))
    assert products == [(4, 6, 9, 9)]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_no_channels_at_all(products: list[Any]) -> None:
    layer, x = nn.Conv2d(0, 3, 1), torch.randn(2, 0, 4, 4)
    assert lowbit.prepare(layer, Recipe(W8, A8), x).train()(x).shape == layer(x).shape
    assert products == []


def test_a_folded_factor_is_divided_by_as_it_was_multiplied() -> None:
    model = pair()
    model[0].to(torch.bfloat16)  # and the batch norm in float32
    layer, norm = lowbit.prepare(model, lowbit.recipes.w8a8(), images().bfloat16()).train()
    weight, factor = layer.weight, norm.factor().bfloat16()
    whole = layer.code_weight("weight_quantizer", weight * factor.view(-1, 1, 1, 1))
    torch.testing.assert_close(layer._coded_weight(weight).scale * factor.float(), whole.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layer", ["convolution", "linear"])
def test_another_default_device(layer: str) -> None:
    """In a process of its own: what the CPU can do is found out once."""
    code = f"""
import torch, lowbit
from torch import nn
from lowbit.nn import convolution, linear
convolution._LEAST = linear._LEAST = {{"cpu": 0}}
convolution._LEAST_POSITIONS = convolution._LEAST_USES = 0
layers = {{"convolution": (nn.Conv2d(8, 6, 3), (2, 8, 9, 9)), "linear": (nn.Linear(64, 8), (4, 64))}}
layer, x = layers[{layer!r}][0], torch.randn(layers[{layer!r}][1])
model = lowbit.prepare(layer, lowbit.recipes.w8a8(), x).train()
torch.set_default_device("meta")
y = model(x)
assert y.device.type == "cpu", y.device
assert "integer from" in str(lowbit.summary(model)), lowbit.summary(model)
y.sum().backward()
assert layer.weight is not model.weight and model.weight.grad.isfinite().all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
