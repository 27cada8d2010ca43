"""Linear layers that multiply codes in training: when they do, and that all around them stays as it is."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import lowbit
from compare import assert_same_bits
from lowbit import EMA, Learned, PerBatch, PerChannel, PerGroup, PerToken, QuantSpec, Recipe, SteKind
from lowbit.bench.runner import count_saved
from lowbit.kernels import plan
from lowbit.nn import linear
from models.small import Projections, all_state, assert_same_states, mlp

PRESETS = ("w8a8", "w8a8_dynamic", "ternary")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Layers of any size multiply codes; the shapes of what came out."""
    seen: list[tuple[int, ...]] = []

    def watch(inner: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Tensor:
            y = inner(*args, **options)
            seen.append(tuple(y.shape))
            return y

        return watched

    monkeypatch.setattr(linear, "_LEAST", {"cpu": 0})
    for name in ("integer_linear", "linear_per_batch", "linear_by_kept_scale"):
        monkeypatch.setattr(linear, name, watch(getattr(linear, name)))
    return seen


def trained(model: nn.Module, batches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of some steps, and the state after them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs, all_state(model)


def batches(count: int = 3, width: int = 8) -> list[Tensor]:
    return [torch.randn(16, width) for _ in range(count)]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("make", [lambda: mlp(8, 12, 8), Projections], ids=["mlp", "projections"])
def test_training_is_that_of_the_float_product(
    preset: str, make: Any, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = make(), batches()
    by_codes, by_values = (lowbit.prepare(model, lowbit.recipes.presets()[preset](), data[0]).train() for _ in "ab")
    outputs, state = trained(by_codes, data)
    assert len(products) == 3 * sum(isinstance(module, nn.Linear) for module in model.modules())
    monkeypatch.setattr(linear, "_LEAST", {})
    products.clear()
    wanted, wanted_state = trained(by_values, data)
    assert not products
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
    for key, value in wanted_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_trained_is_what_an_integer_model_computes(preset: str, products: list[Any]) -> None:
    model = lowbit.prepare(mlp(8, 12, 8), lowbit.recipes.presets()[preset](), batches(1)[0]).train()
    trained(model, batches())
    lowbit.freeze(model)
    (batch,) = batches(1)
    converted = lowbit.convert(model)
    model.train()
    products.clear()
    with torch.no_grad():
        output = model(batch)
        assert products == [(16, 12), (16, 8)]
        assert_same_bits(output, converted(batch))


def test_small_layers_multiply_values() -> None:
    layer = nn.Linear(8, 4)
    model = lowbit.prepare(layer, lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).train()
    x = torch.randn(16, 8)
    wanted = nn.functional.linear(model.input_quantizer(x), model.weight_quantizer(model.weight), model.bias)
    assert_same_bits(model(x), wanted)


def test_eval_mode_multiplies_values(products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).eval()
    model(torch.randn(16, 8))
    assert not products


@pytest.mark.parametrize("preset", PRESETS)
def test_nan_is_seen_and_an_infinity_is_clipped(preset: str, products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.presets()[preset](), torch.randn(3, 8)).train()
    x = torch.randn(16, 8)
    x[2, 3] = float("inf")
    assert model(x).isfinite().all()
    x[2, 3] = float("nan")
    y = model(x)
    assert y[2].isnan().all()
    assert y[:2].isfinite().all()
    assert y[3:].isfinite().all()
    with torch.no_grad():
        model.weight[1, 1] = float("nan")
    y = model(torch.randn(16, 8))
    assert y[:, 1].isnan().all()
    assert len(products) == 3


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
def test_an_input_of_several_layers_is_coded_once(preset: str, products: list[Any]) -> None:
    model = lowbit.prepare(Projections(), lowbit.recipes.presets()[preset](), torch.randn(3, 8)).train()
    calls = []
    quantizer = model.q.input_quantizer
    inner = quantizer.code
    quantizer.code = lambda x: calls.append(quantizer.observing) or inner(x)
    model(torch.randn(16, 8)).sum().backward()
    assert calls == [True]
    assert len(products) == 3


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Both(nn.Module):
    """Two layers of one tensor: one takes codes, one takes values."""

    def __init__(self, *, values_first: bool) -> None:
        super().__init__()
        self.by_codes, self.by_values, self.values_first = nn.Linear(8, 8), Own(8, 8), values_first

    def forward(self, x: Tensor) -> Tensor:
        if self.values_first:
            return self.by_values(x) * self.by_codes(x)
        return self.by_codes(x) * self.by_values(x)


@pytest.mark.parametrize("values_first", [True, False])
def test_codes_and_values_of_one_tensor(
    values_first: bool, products: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = Both(values_first=values_first), batches()
    by_codes, by_values = (lowbit.prepare(model, lowbit.recipes.w8a8(), data[0]).train() for _ in "ab")
    outputs, state = trained(by_codes, data)
    assert len(products) == (0 if values_first else 3)  # values that are there already are taken
    monkeypatch.setattr(linear, "_LEAST", {})
    wanted, wanted_state = trained(by_values, data)
    for output, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
    for key, value in wanted_state.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
def test_activation_checkpointing(preset: str, reentrant: bool, products: list[Any]) -> None:
    model, data = mlp(8, 12, 8), batches(1)[0]
    plain, again = (lowbit.prepare(model, lowbit.recipes.presets()[preset](), data).train() for _ in "ab")
    x = data.clone().requires_grad_()
    plain(x).square().sum().backward()
    y = data.clone().requires_grad_()
    checkpoint(again, y, use_reentrant=reentrant).square().sum().backward()
    assert len(products) > 4  # twice, but for what torch stops after its last saved tensor
    assert_same_bits(y.grad, x.grad)
    assert_same_states(all_state(again), all_state(plain))
    for one, other in zip(again.parameters(), plain.parameters(), strict=True):
        assert_same_bits(one.grad, other.grad)


W8, TOKEN = QuantSpec(bits=8, per=PerChannel(0)), QuantSpec(bits=8, per=PerToken())
REFUSALS: dict[str, tuple[nn.Module, Recipe, str]] = {
    "a forward of its own": (Own(8, 4), Recipe(W8, TOKEN), "a forward of its own"),
    "a float input": (nn.Linear(8, 4), Recipe(W8), "the input has no quantizer"),
    "a learned scale": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, scale_mode=Learned()), TOKEN),
        "the weight's quantizer: its scale is learned",
    ),
    "9 bits": (nn.Linear(8, 4), Recipe(QuantSpec(bits=9), TOKEN), "the weight's quantizer: it has 9 bits"),
    "tanh": (
        nn.Linear(8, 4),
        Recipe(W8, QuantSpec(bits=8, scale_mode=EMA(), ste=SteKind.TANH)),
        "the input's quantizer: its gradient TANH",
    ),
    "groups": (nn.Linear(8, 4), Recipe(W8, QuantSpec(bits=8, per=PerGroup(4))), r"scales PerGroup\(size=4\)"),
    "affine weights": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, symmetric=False, scale_mode=PerBatch()), TOKEN),
        "the weight has zero points",
    ),
    "integer bias": (
        nn.Linear(8, 4),
        Recipe(W8, QuantSpec(bits=8, scale_mode=EMA()), bias=True),
        "its bias is one of integers",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, products: list[Any]) -> None:
    layer, recipe, reason = REFUSALS[name]
    model: Any = lowbit.prepare(layer, recipe, torch.randn(3, 8)).train()
    assert re.search(reason, model.product_refusal())
    model(torch.randn(16, 8)).sum().backward()
    assert not products


@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_it_has_the_same_bits(preset: str, products: list[Any]) -> None:
    model = lowbit.prepare(mlp(8, 12, 8), lowbit.recipes.presets()[preset](), torch.randn(3, 8)).train()
    data, compiled = batches(2), copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    wanted, wanted_state = trained(model, data)
    outputs, state = trained(compiled, data)
    assert products == 4 * [(16, 12), (16, 8)]
    for got, want in zip(outputs, wanted, strict=True):
        assert_same_bits(got, want)
    assert_same_states(state, wanted_state)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_nan_is_seen(preset: str, backend: str, products: list[Any]) -> None:
    torch._dynamo.reset()
    with plan.prefer(backend):
        model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.presets()[preset](), torch.randn(3, 8)).train()
        model(torch.randn(16, 8))
        model.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(16, 8)
        x[2, 3] = float("nan")
        y = model(x)
    assert products
    assert y[2].isnan().all()
    assert y[3:].isfinite().all()
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_sharded_weight_is_multiplied_by_values(compiled: bool, products: list[Any], tmp_path: Path) -> None:
    """DTensor has no rule for ops of ours."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = lowbit.prepare(nn.Sequential(nn.Linear(8, 4)), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).train()
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
        x = torch.randn(5, 8)
        with plan.prefer("reference"):  # which is what is traced on CUDA
            run = torch.compile(model, backend="aot_eager") if compiled else model
            run(x).sum().backward()
        assert isinstance(model[0].weight.grad, DTensor)
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def test_compiled_it_keeps_codes(products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(64, 96), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 64)).train()
    x = torch.randn(32, 64, requires_grad=True)
    _, kept = count_saved(lambda: model(x))
    model.compile(backend="inductor", fullgraph=True)
    assert count_saved(lambda: model(x))[1] <= kept


def test_exported_it_multiplies_values(products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8_dynamic(), torch.randn(3, 8)).train()
    torch.export.export(model, (torch.randn(16, 8),))
    assert not products


def test_autocast(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and their gradients in its dtype, parameters and their gradients in their own."""
    model, x = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8(), torch.randn(3, 8)).train(), torch.randn(16, 8)
    found = []
    for least in ({"cpu": 0}, {}):
        monkeypatch.setattr(linear, "_LEAST", least)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        found.append((y.detach().float(), *(parameter.grad.clone() for parameter in model.parameters())))
    assert len(products) == 1
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_summary_says_which() -> None:
    layers = nn.Sequential(nn.Linear(512, 256))
    texts = {
        name: str(lowbit.summary(lowbit.prepare(layers, getattr(lowbit.recipes, name)(), torch.randn(3, 512))))
        for name in ("w8a8", "w4a8", "w4")
    }
    assert "product in training: integer from 128 rows on" in texts["w8a8"]
    assert "product in training: float: the sums of PerGroup(size=32) take longer to scale" in texts["w4a8"]
    assert "product in training" not in texts["w4"]


@pytest.mark.parametrize("layer", [nn.Linear(512, 256), nn.Conv2d(64, 64, 3)], ids=["linear", "convolution"])
def test_a_recipe_can_have_every_product_in_float(layer: nn.Module) -> None:
    x = torch.randn(256, 512) if isinstance(layer, nn.Linear) else torch.randn(16, 64, 18, 18)
    every = lowbit.recipes.w8a8()
    recipe = lowbit.Recipe(every.weight, every.activation, integer_products=False)
    found = {name: lowbit.prepare(layer, chosen, x).train() for name, chosen in (("on", every), ("off", recipe))}
    assert "integer from" in str(lowbit.summary(found["on"]))
    assert "product in training: float: the recipe has integer_products off" in str(lowbit.summary(found["off"]))
    model = copy.deepcopy(found["off"])  # the copy too
    values = model.input_quantizer(x), model.weight_quantizer(model.weight), model.bias
    wanted = F.linear(*values) if isinstance(layer, nn.Linear) else F.conv2d(*values)
    assert_same_bits(found["off"](x), wanted)
    assert not torch.equal(found["on"](x), wanted)


class TiedLayers(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.relu(self.one(x)))


def test_a_tied_weight_is_taken_in_once(products: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(QuantSpec(bits=8, scale_mode=EMA(0.5)), TOKEN)
    data, model = batches(1), TiedLayers()
    by_codes, by_values = (lowbit.prepare(model, recipe, data[0]).train() for _ in "ab")
    with torch.no_grad():
        for prepared in (by_codes, by_values):
            prepared.one.weight *= 3  # so that the scale has a way to go
    _, state = trained(by_codes, data)
    assert len(products) == 2
    monkeypatch.setattr(linear, "_LEAST", {})
    _, wanted = trained(by_values, data)
    for key, value in wanted.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def test_a_quantizer_with_a_forward_of_its_own_or_hooks_gives_values(products: list[Any]) -> None:
    class Loud(lowbit.FakeQuantize):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 0

    model = lowbit.prepare(nn.Linear(8, 4), Recipe(W8, TOKEN), torch.randn(3, 8)).train()
    seen = []
    handle = model.input_quantizer.register_forward_hook(lambda *args: seen.append(args))
    model(torch.randn(16, 8))
    assert len(seen) == 1
    handle.remove()
    model.input_quantizer.__class__ = Loud
    assert_same_bits(model(torch.randn(16, 8)), model.bias.expand(16, 4))
    assert not products


def test_a_computed_weight_is_computed_once(products: list[Any]) -> None:
    calls = []

    class Halved(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(1)
            return weight / 2

    layer = nn.Linear(8, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
    model = lowbit.prepare(layer, Recipe(W8, TOKEN), torch.randn(3, 8)).train()
    for mode in (True, False):
        model.train(mode)
        calls.clear()
        model(torch.randn(16, 8))
        assert len(calls) == 1
    assert len(products) == 1


def test_a_dynamic_batch_is_exported_in_training_mode() -> None:
    model = lowbit.prepare(nn.Linear(512, 512), Recipe(W8, TOKEN), torch.randn(3, 512)).train()
    batch = torch.export.Dim("batch", min=2, max=4096)
    torch.export.export(model, (torch.randn(8, 512),), dynamic_shapes=({0: batch},))


def test_gradients_in_batches(products: list[Any]) -> None:
    model = lowbit.prepare(nn.Linear(8, 4), lowbit.recipes.w8a8(), torch.randn(3, 8)).train()
    x = torch.randn(6, 8, requires_grad=True)
    y = model(x)
    directions = torch.randn(3, *y.shape)
    (together,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    for direction, got in zip(directions, together, strict=True):
        (alone,) = torch.autograd.grad(y, x, direction, retain_graph=True)
        torch.testing.assert_close(got, alone)
    assert products


def test_a_fixed_scale_may_change_before_the_backward(products: list[Any]) -> None:
    recipe = Recipe(W8, QuantSpec(bits=8, scale_mode=lowbit.Fixed(), ste=SteKind.IDENTITY))
    model = lowbit.prepare(nn.Linear(8, 4), recipe, torch.randn(3, 8)).train()
    model.input_quantizer.update_params(0.02, 0)
    x = torch.randn(16, 8)
    (wanted,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    y = model(x)
    model.input_quantizer.update_params(0.5, 0)
    (got,) = torch.autograd.grad(y.square().sum(), model.weight)
    assert_same_bits(got, wanted)
    assert len(products) == 2


@pytest.mark.parametrize("isa", ["AVX2", "SSE41"])
def test_processors_whose_products_saturate(isa: str) -> None:
    """With oneDNN held back to older instructions, a product of integers is still exact, and no longer fast."""
    script = """
import torch, lowbit
from lowbit.kernels.products import int_mm, is_exact, refusal
torch.manual_seed(0)
x, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((40, 96), (96, 33)))
assert torch.equal(int_mm(x, w).long(), x.long() @ w.long())
ends = torch.full((40, 96), 127, dtype=torch.int8), torch.full((96, 33), -128, dtype=torch.int8)
assert torch.equal(int_mm(*ends).long(), ends[0].long() @ ends[1].long())
assert (refusal("cpu", None, 64) == "") == is_exact()
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic"])
@pytest.mark.parametrize("rows", [(256,), (4, 64)], ids=["matrix", "batches"])
def test_what_follows_may_change_the_output_in_place(rows: tuple[int, ...], preset: str) -> None:
    found = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(inplace=inplace), nn.Linear(512, 8))
        model = lowbit.prepare(model, lowbit.recipes.presets()[preset](), torch.randn(2, 512)).train()
        model(torch.randn(*rows, 512)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for got, want in zip(*found, strict=True):
        assert_same_bits(got, want)


def test_fixed_parameters_that_change_before_the_backward(products: list[tuple[int, ...]]) -> None:
    spec = QuantSpec(bits=8, signed=True, symmetric=False, scale_mode=lowbit.Fixed())
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = lowbit.prepare(nn.Linear(16, 16), Recipe(lowbit.recipes.w8a8().weight, spec), torch.randn(4, 16))
        model.train().input_quantizer.update_params(0.1, 3)
        loss = model(torch.randn(4, 16)).square().sum()
        if changes:
            model.input_quantizer.update_params(0.2, 5)
        loss.backward()
        found.append(model.weight.grad)
    assert_same_bits(*found)
    assert len(products) == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_another_width_are_torchs_error(preset: str, products: list[tuple[int, ...]]) -> None:
    layer = lowbit.prepare(nn.Linear(16, 8), lowbit.recipes.presets()[preset](), torch.randn(4, 16)).train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(4, 32))
    assert not products


@pytest.mark.parametrize("preset", PRESETS)
def test_a_weight_of_another_width_is_torchs_error(preset: str, products: list[tuple[int, ...]]) -> None:
    layer = lowbit.prepare(nn.Linear(16, 8), lowbit.recipes.presets()[preset](), torch.randn(4, 16)).train()
    layer.weight = nn.Parameter(torch.randn(8, 32))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(4, 16))
    assert layer(torch.randn(4, 32)).shape == (4, 8)
    assert products == [(4, 8)]
