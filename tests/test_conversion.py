"""convert: networks, layers and what surrounds them, the same to the bit with codes in the place of weights."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import lowbit
from compare import assert_same_bits
from converting import assert_same_outputs, call_output, prepared, products, run, watch
from lowbit import EMA, Fixed, Learned, PerBatch, PerBlock, PerChannel, PerGroup, PerToken, QuantSpec, Recipe, Rule
from lowbit.fake_quantize import FakeQuantize
from lowbit.nn.coded import CodedActivation, CodedWeight, Waiting
from lowbit.nn.quantizers import Stateless
from lowbit.preparation import quantizers
from lowbit.scale import NotCalibratedError
from models import networks
from models.small import Joined, Projections, Residual, Tied, all_state, assert_same_states, folded_pair, images, mlp
from nn.layers import LAYERS, batch_of, in_dtype

PRESETS = lowbit.recipes.presets()
ARITHMETICS = ["float", "integer"]
# torch pads an uneven 'same' by a copy, and projects without oneDNN; it says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def weights(model: nn.Module) -> list[CodedWeight]:
    return [module for module in model.modules() if isinstance(module, CodedWeight)]


@functools.cache
def case_of(name: str) -> networks.Case:
    case = networks.ALL[name]()
    if name == "minilm":  # half of its weights are words; as files, in tests/export, it has them all
        case.model.resize_token_embeddings(2000)
        case.batch["input_ids"] %= 2000
    return case


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


SPECS: dict[str, Recipe] = {
    **{name: PRESETS[name]() for name in ("w8a8", "w4a8", "binary", "dorefa")},
    "learned": Recipe(
        QuantSpec(bits=3, per=PerChannel(0), scale_mode=Learned()),
        QuantSpec(bits=3, symmetric=False, scale_mode=Learned("lsq+")),
    ),
    "groups of 4": Recipe(QuantSpec(bits=3, per=PerGroup(4), scale_mode=EMA()), QuantSpec(bits=7, scale_mode=EMA())),
    "16 bits": Recipe(QuantSpec(bits=16, symmetric=False, per=PerChannel(0)), QuantSpec(bits=16, scale_mode=EMA())),
}
MORE_SPECS: dict[str, Recipe] = {
    **{name: PRESETS[name]() for name in ("w2a2", "ternary", "w8a8_dynamic")},
    "affine": Recipe(
        QuantSpec(bits=6, per=PerChannel(0), symmetric=False), QuantSpec(bits=5, symmetric=False, scale_mode=EMA())
    ),
    "unsigned": Recipe(
        QuantSpec(bits=8, symmetric=False, signed=False), QuantSpec(bits=8, signed=False, scale_mode=EMA())
    ),
    "9 bits": Recipe(QuantSpec(bits=9, per=PerChannel(0)), QuantSpec(bits=12, symmetric=False, scale_mode=EMA())),
    "rows": Recipe(QuantSpec(bits=7, per=PerToken()), QuantSpec(bits=8, per=PerToken(), symmetric=False)),
}
MORE_LAYERS = ("linear", "conv2d", "conv transpose2d", "embedding", "avg pool2d", "attention", "lstm", "gru cell")
LAYER_SPECS = [(name, spec) for name in LAYERS for spec in SPECS]
LAYER_SPECS += [(name, spec) for name in MORE_LAYERS for spec in MORE_SPECS]


@pytest.mark.parametrize(("name", "spec"), LAYER_SPECS, ids=map("-".join, LAYER_SPECS))
def test_layers_in_float_are_the_same(name: str, spec: str) -> None:
    layer, batch = LAYERS[name](), batch_of(name)
    model = prepared(layer, (SPECS | MORE_SPECS)[spec], batch)
    converted = lowbit.convert(model, "float")
    assert weights(converted) or not list(layer.parameters())
    assert_same_outputs(converted, model, batch)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("spec", ["w8a8", "w4a8", "dorefa"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_other_dtypes(name: str, spec: str, dtype: torch.dtype) -> None:
    if name == "avg pool3d" and dtype.itemsize == 2:
        pytest.skip("torch has no such kernel")
    if "pool" in name and spec == "dorefa" and dtype == torch.float64:
        pytest.skip("a model without parameters has no dtype")
    layer, batch = in_dtype((LAYERS[name](), batch_of(name)), dtype)
    model = prepared(layer, SPECS[spec], batch)
    converted = lowbit.convert(model, "float")
    assert_same_outputs(converted, model, batch)
    integer = run(lowbit.convert(model), batch)
    assert [output.dtype for output in integer] == [output.dtype for output in run(model, batch)]


@pytest.mark.parametrize("bits", [2, 3, 5, 7, 8, 9, 16])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_bits_of_weights(bits: int, symmetric: bool, signed: bool) -> None:
    spec = QuantSpec(bits=bits, symmetric=symmetric, signed=signed, per=PerChannel(0))
    x = torch.randn(3, 12)
    model = prepared(nn.Linear(12, 5), Recipe(spec, 8), x)
    converted = lowbit.convert(model, "float")
    assert_same_outputs(converted, model, x)
    (coded,) = weights(converted)
    assert coded.codes.nbytes == {2: 15, 3: 30, 5: 60, 7: 60, 8: 60, 9: 120, 16: 120}[bits]


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv transpose2d", "embedding", "transformers conv1d"])
@pytest.mark.parametrize("per", [PerBlock(2, 4), PerBlock(4, 2), PerGroup(8), PerToken()], ids=str)
def test_scales_inside_of_rows(name: str, per: Any) -> None:
    batch = batch_of(name)
    model = prepared(LAYERS[name](), Recipe(QuantSpec(bits=4, per=per), 8), batch)
    assert_same_outputs(lowbit.convert(model, "float"), model, batch)


class TestSize:
    def test_four_bits_in_groups_of_32(self) -> None:
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
        batch = torch.randint(0, 100, (2, 3))
        converted = lowbit.convert(prepared(model, lowbit.recipes.w4(), batch))
        held = sum(tensor.nbytes for coded in weights(converted) for tensor in coded.state_dict().values())
        assert held <= 0.157 * 4 * (6400 + 64 * 128 * 2)
        kept = {key for key, _ in converted.named_parameters()}
        assert kept == {"1.bias"}

    @pytest.mark.parametrize("name", ["bert", "gpt2", "lstm", "mobilenet", "reader", "conv3d", "bag"])
    @pytest.mark.parametrize("arithmetic", ARITHMETICS)
    def test_no_float_weight_is_left(self, name: str, arithmetic: str) -> None:
        case = case_of(name)
        converted = lowbit.convert(prepared(case.model, lowbit.recipes.w4a8(), case.batch), arithmetic)
        float_layers = (nn.LayerNorm, nn.BatchNorm2d)
        left = {
            f"{path}.{key}"
            for path, module in converted.named_modules()
            for key, parameter in module.named_parameters(recurse=False)
            if parameter.dim() > 1 and not isinstance(module, float_layers)
        }
        assert not {key for key in left if "position" not in key}


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


@pytest.fixture(params=ARITHMETICS)
def arithmetic(request: pytest.FixtureRequest) -> str:
    return request.param


LIFE = ["resnet", "gpt2", "lstm", "parametrized", "functional", "encoder", "unet", "reader"]


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


class TestShared:
    def test_tied_weights_are_coded_once(self, arithmetic: str) -> None:
        index = torch.tensor([[1, 2, 3]])
        model = prepared(Tied(), lowbit.recipes.w8a8(), index)
        converted: Any = lowbit.convert(model, arithmetic)
        assert len(weights(converted)) == 1
        assert not list(converted.parameters())
        assert converted.head.weight_quantizer is converted.embedding.weight_quantizer
        assert_same_bits(converted.head.weight, converted.embedding.weight)
        if arithmetic == "float":
            assert_same_outputs(converted, model, index)
        again = copy.deepcopy(converted)
        assert again.head.weight_quantizer is again.embedding.weight_quantizer

    def test_one_of_the_tied_in_float(self) -> None:
        index = torch.tensor([[1, 2, 3]])
        rest = lowbit.recipes.w8a8()
        model = prepared(Tied(), Recipe(rest.weight, rest.activation, rules=[Rule("head")]), index)
        converted = lowbit.convert(model, "float")
        assert [key for key, _ in converted.named_parameters()] == ["head.weight"]
        assert_same_outputs(converted, model, index)

    def test_one_of_the_tied_has_a_batch_norm(self, arithmetic: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1))
        model[3].weight = model[0].weight
        model[1].running_var.copy_(torch.tensor([0.5, 2.0, 4.0]))
        x = images()
        found = prepared(model, lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(found, arithmetic)
        assert len(weights(converted)) == 2
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    @pytest.mark.parametrize("preset", ["w4a8", "ternary"])
    def test_one_weight_by_rows_and_by_columns(self, preset: str, arithmetic: str) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 64)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.layer(x)) @ self.layer.weight

        x = torch.randn(3, 64)
        model = prepared(Both(), PRESETS[preset](), x)
        converted = lowbit.convert(model, arithmetic)
        assert len(weights(converted)) == 2
        assert [key for key, _ in converted.named_parameters()] == ["layer.bias"]
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)

    def test_an_edge_is_quantized_once(self) -> None:
        x = torch.randn(3, 8)
        model = prepared(Projections(), lowbit.recipes.w8a8(), x)
        converted: Any = lowbit.convert(model, "float")
        assert converted.q.input_quantizer is converted.k.input_quantizer is converted.v.input_quantizer
        seen = []
        converted.q.input_quantizer.register_forward_hook(lambda *_: seen.append(1))
        assert_same_outputs(converted, model, x)
        assert len(seen) == 1

    def test_a_join_gives_its_grid(self) -> None:
        x = images()
        model = prepared(Joined(), lowbit.recipes.w8a8(), x)
        converted: Any = lowbit.convert(model)
        assert converted.after.input_quantizer is None
        assert converted.after.grid_of("input_quantizer") is converted.quantized_ops.cat_0.result_quantizer
        assert products(converted)["after"] == "integer"
        assert_products(converted, model, x)
        dynamic = lowbit.convert(prepared(Joined(), lowbit.recipes.w8a8_dynamic(), x))
        assert "follows each batch" in products(dynamic)["after"]


def assert_products(converted: nn.Module, model: Any, batch: Any) -> None:
    """Every product of integers is what is written out."""
    calls = watch(converted)
    run(converted, batch)
    assert calls
    for path, made in calls.items():
        for *call, result in made:
            assert_same_bits(result, call_output(model.get_submodule(path), *call).detach())


class TestBatchNorms:
    @pytest.mark.parametrize("bias", [True, False])
    def test_are_gone(self, bias: bool, arithmetic: str) -> None:
        model, x = folded_pair(), images(size=5)
        if not bias:
            model[0].register_parameter("bias", None)
        found = prepared(model, lowbit.recipes.w8a8(), x)
        converted: Any = lowbit.convert(found, arithmetic)
        assert type(converted[1]) is nn.Identity
        assert set(converted.state_dict()) == {
            *("0.bias", "0.input_quantizer.scale", "0.input_quantizer.zero_point"),
            *("0.weight_quantizer.codes", "0.weight_quantizer.scale"),
        }
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    def test_stay_where_the_layer_is_in_float(self) -> None:
        model, x = folded_pair(), images(size=5)
        found = prepared(model, lowbit.recipes.w8a8(), x)
        found[0].weight_quantizer.enabled = False
        converted: Any = lowbit.convert(found, "float")
        assert type(converted[1]) is nn.BatchNorm2d
        assert_same_outputs(converted, found, x)

    def test_stay_where_the_recipe_does_not_fold(self) -> None:
        model, x = folded_pair(), images(size=5)
        recipe = lowbit.recipes.w8a8()
        found = prepared(model, Recipe(recipe.weight, recipe.activation, fold=False), x)
        converted: Any = lowbit.convert(found, "float")
        assert type(converted[1]) is nn.BatchNorm2d
        assert_same_outputs(converted, found, x)


class Own(nn.Module):
    """y = linear(x, w, b), by functional; ``also`` says what else takes w."""

    def __init__(self, also: Callable[[Any, Tensor], Tensor] = lambda self, y: y) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))
        self.b = nn.Parameter(torch.randn(6))
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        return self.also(self, F.linear(x, self.w, self.b))


class TestOwnParameters:
    """Of modules that compute by torch.nn.functional."""

    @pytest.mark.parametrize("preset", PRESETS)
    def test_are_dropped_where_nothing_else_takes_them(self, preset: str, arithmetic: str) -> None:
        x = torch.randn(3, 8)
        model = prepared(Own(), PRESETS[preset](), x)
        converted: Any = lowbit.convert(model, arithmetic)
        assert {key for key, _ in converted.named_parameters()} == {"b"}
        assert_same_bits(converted.w, model.quantized_ops.linear_0.weight_quantizer(model.w).detach())
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        elif preset != "w4":
            assert_products(converted, model, x)

    @pytest.mark.parametrize(
        "also",
        [
            lambda self, y: y + self.w.sum(),
            lambda self, y: y + y @ torch.tanh(self.w @ self.w.t()),
            lambda self, y: (y, self.w),
        ],
        ids=["a sum", "another product", "the output"],
    )
    def test_are_kept_where_something_does(self, also: Any, arithmetic: str) -> None:
        x = torch.randn(3, 8)
        model = prepared(Own(also), lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(model, arithmetic)
        assert {"w", "b"} == {key for key, _ in converted.named_parameters()}
        assert_same_bits(converted.get_parameter("w"), model.w)
        assert not weights(converted)
        assert_same_outputs(converted, model, x)

    def test_several_modules_take_them(self, arithmetic: str) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Own()
                self.list = nn.ParameterList([nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(5, 6))])

            def forward(self, x: Tensor) -> Tensor:
                x = self.inner(torch.tanh(F.linear(self.inner(x), self.list[0])))
                return F.linear(x, self.list[1])

        x = torch.randn(3, 8)
        model = prepared(Twice(), lowbit.recipes.w4a8(), x)
        assert_same_outputs(lowbit.convert(model, arithmetic), model, x)

    def test_one_op_takes_several(self) -> None:
        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

            def forward(self, x: Tensor, first: bool) -> Tensor:
                return F.linear(x, self.a if first else self.b)

        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.either = Either()

            def forward(self, x: Tensor) -> Tensor:
                return self.either(torch.tanh(self.either(x, True)), False)

        x = torch.randn(3, 8)
        converted = lowbit.convert(prepared(Calls(), lowbit.recipes.w8a8(), x), "float")
        with pytest.raises(RuntimeError, match=r"either\.linear_0 takes another weight now than with prepare's"):
            run(converted, x)

    def test_computed_weights_are_quantized_on_every_call(self, arithmetic: str) -> None:
        class Standardized(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(6, 3, 3, 3))

            def forward(self, x: Tensor) -> Tensor:
                return F.conv2d(x, (self.w - self.w.mean()) / self.w.std())

        for preset in ("w8a8", "w4a8", "binary", "dorefa", "w2a2"):
            x = images()
            model = prepared(Standardized(), PRESETS[preset](), x)
            with torch.no_grad():  # as training does
                model.w.add_(torch.randn_like(model.w))
            converted = lowbit.convert(model, arithmetic)
            assert_same_outputs(converted, model, x)
            if arithmetic == "integer":
                assert "quantized on every call" in products(converted)["quantized_ops.conv_0"]

    def test_a_weight_that_was_exchanged(self) -> None:
        x = torch.randn(3, 8)
        model = prepared(Own(), lowbit.recipes.w8a8(), x)
        state = {key: value.clone() for key, value in model.state_dict().items()}
        state["w"] = torch.randn(6, 8)
        model.load_state_dict(state, assign=True)
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    @pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a8", "dorefa"])
    def test_of_every_kind(self, preset: str, arithmetic: str) -> None:
        class Kinds(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                shapes = {"one": (8, 4, 3), "up": (8, 4, 2), "mix": (4, 4), "out": (4, 5), "bmm": (2, 5, 3)}
                for name, shape in shapes.items():
                    self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))

            def forward(self, x: Tensor) -> Tensor:
                x = F.conv1d(x, self.one, None, 1, "same", 2)
                x = F.avg_pool1d(F.conv_transpose1d(x, self.up, stride=2), 2)
                x = torch.matmul(x.transpose(1, 2), self.mix)
                x = torch.addmm(x.new_zeros(5), x.flatten(0, 1), self.out).unflatten(0, (2, -1))
                return torch.bmm(x, self.bmm)

        x = torch.randn(2, 4, 6)
        model = prepared(Kinds(), PRESETS[preset](), x)
        converted = lowbit.convert(model, arithmetic)
        assert not list(converted.parameters())
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)


class TestComputedWeights:
    @pytest.mark.parametrize("preset", ["w8a8", "w2a2"])
    def test_pruned(self, preset: str, arithmetic: str) -> None:
        model = mlp(8, 16, 5)
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        prune.random_unstructured(model[0], "weight", amount=0.2)
        prune.random_unstructured(model[2], "bias", amount=0.5)
        x = torch.randn(6, 8)
        found = lowbit.prepare(model, PRESETS[preset](), x, inplace=True)  # torch copies no pruned layer
        found(x).sum().backward()  # which leaves a weight with a gradient in the pruned layer
        torch.optim.SGD(found.parameters(), lr=0.1).step()  # and then an old one
        found.eval()
        converted: Any = lowbit.convert(found, arithmetic)
        zeros = found[0].weight_mask == 0
        assert zeros.any()
        assert not converted[0].weight[zeros].any()
        assert not [key for key in converted.state_dict() if key.startswith("0.weight_") and "quantizer" not in key]
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    def test_parametrized(self, arithmetic: str) -> None:
        model = nn.Sequential(weight_norm(nn.Linear(8, 6)), nn.ReLU(), weight_norm(nn.Conv1d(1, 2, 3, padding=1)))

        class Through(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, _, self.conv = model

            def forward(self, x: Tensor) -> Tensor:
                return self.conv(self.linear(x).unsqueeze(1))

        x = torch.randn(4, 8)
        found = prepared(Through(), lowbit.recipes.w8a8(), x)
        converted = lowbit.convert(found, arithmetic)
        assert {key for key, _ in converted.named_parameters()} == {"linear.bias", "conv.bias"}
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        assert_same_outputs(found, lowbit.convert(found, "float"), x)  # the prepared one runs on

    @pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
    @pytest.mark.parametrize(
        "hook", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm], ids=["weight", "spectral"]
    )
    def test_by_older_hooks(self, hook: Any) -> None:
        x = torch.randn(4, 8)
        found = lowbit.prepare(nn.Sequential(hook(nn.Linear(8, 6)), nn.ReLU()), lowbit.recipes.w4(), inplace=True)
        found(x).sum().backward()
        torch.optim.SGD(found.parameters(), lr=0.1).step()
        state = all_state(found)
        converted = lowbit.convert(found, "float")
        assert_same_states(all_state(found), state)
        assert {key for key, _ in converted.named_parameters()} == {"0.bias"}
        assert_same_outputs(converted, found.eval(), x)


INTEGER_BIAS = Recipe(
    QuantSpec(bits=8, per=PerChannel(0)), QuantSpec(bits=8, symmetric=False, scale_mode=EMA()), bias=True
)


class TestBias:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "name", ["linear", "conv2d", "grouped", "conv transpose2d", "transposed groups", "embedding"]
    )
    def test_as_integers(self, name: str, dtype: torch.dtype, arithmetic: str) -> None:
        layer, batch = in_dtype((LAYERS[name](), batch_of(name)), dtype)
        model = prepared(layer, INTEGER_BIAS, batch)
        converted = lowbit.convert(model, arithmetic)
        assert ("bias_codes" in converted.state_dict()) == (name != "embedding")
        assert not list(converted.parameters())
        if arithmetic == "float" or name not in ("linear", "conv2d", "grouped"):
            assert_same_outputs(converted, model, batch)
        else:
            assert_products(converted, model, batch)

    def test_of_a_folded_layer(self, arithmetic: str) -> None:
        model, x = folded_pair(), images(size=5)
        found = prepared(model, INTEGER_BIAS, x)
        converted = lowbit.convert(found, arithmetic)
        assert converted.state_dict()["0.bias_codes"].dtype == torch.int32
        if arithmetic == "float":
            assert_same_outputs(converted, found, x)
        else:
            assert_products(converted, found, x)

    def test_that_rounds_to_minus_zero(self) -> None:
        layer, x = nn.Linear(4, 1), torch.eye(4)
        nn.init.constant_(layer.bias, -1e-9)
        model = prepared(layer, INTEGER_BIAS, x)
        converted: Any = lowbit.convert(model, "float")
        assert_same_bits(model._prepared_bias(model.bias).detach(), torch.zeros(1))
        assert_same_bits(converted._prepared_bias(None), torch.zeros(1))

    def test_too_large_for_32_bits_stays_float(self, arithmetic: str) -> None:
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.bias.fill_(3e6)
        x = torch.randn(3, 4)
        model = prepared(layer, INTEGER_BIAS, x)
        converted = lowbit.convert(model, arithmetic)
        assert "bias_codes" not in converted.state_dict()
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    def test_with_its_input_in_float(self) -> None:
        x = torch.randn(3, 12)
        model = prepared(nn.Linear(12, 6), INTEGER_BIAS, x)
        model.input_quantizer.enabled = False
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    def test_moves_and_loads(self) -> None:
        x = torch.randn(3, 12)
        converted = lowbit.convert(prepared(nn.Linear(12, 6), INTEGER_BIAS, x))
        other = copy.deepcopy(converted)
        other.load_state_dict(converted.state_dict(), assign=True)
        assert_same_outputs(other, converted, x)
        assert run(other.to(torch.bfloat16), x.bfloat16())[0].dtype == torch.bfloat16


class TestQuantizers:
    @pytest.mark.parametrize("name", ["linear", "conv2d", "avg pool2d", "embedding"])
    def test_of_outputs(self, name: str, arithmetic: str) -> None:
        batch = batch_of(name)
        recipe = Recipe(8, 8, output=QuantSpec(bits=4, symmetric=False, scale_mode=EMA()))
        model = prepared(LAYERS[name](), recipe, batch)
        converted = lowbit.convert(model, arithmetic)
        assert isinstance(converted.output_quantizer, CodedActivation)
        if arithmetic == "float":
            assert_same_outputs(converted, model, batch)
        output = run(converted, batch)[0]
        assert_same_bits(converted.output_quantizer(output), output)

    @pytest.mark.parametrize("role", ["weight", "activation"])
    @pytest.mark.parametrize("name", LIFE)
    def test_that_are_off(self, name: str, role: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        for _, its, quantizer in quantizers(model):
            quantizer.enabled = (its == "weight") != (role == "weight")
        converted = lowbit.convert(model, "float")
        assert bool(weights(converted)) == (role != "weight")
        assert_same_outputs(converted, model, case.batch)
        assert_same_outputs(lowbit.convert(model), model, case.batch)  # nothing multiplies codes by codes

    @pytest.mark.parametrize("name", LIFE)
    def test_some_of_them_off(self, name: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        for number, (_, _, quantizer) in enumerate(quantizers(model)):
            quantizer.enabled = number % 3 != 0
        assert_same_outputs(lowbit.convert(model, "float"), model, case.batch)

    @pytest.mark.parametrize("name", ["lstm", "reader", "resnet"])
    def test_all_off(self, name: str, arithmetic: str) -> None:
        case = case_of(name)
        model = prepared(case.model, lowbit.recipes.w8a8(), case.batch)
        for _, _, quantizer in quantizers(model):
            quantizer.enabled = False
        model.requires_grad_(False)  # by which torch chooses how to multiply, even under no_grad
        converted = lowbit.convert(model, arithmetic)
        assert not weights(converted)
        assert_same_outputs(converted, model, case.batch)

    @pytest.mark.parametrize(
        "mode", [Fixed(), EMA(), Learned(), Learned("lsq+"), PerBatch(), PerBatch("mean_abs")], ids=str
    )
    @pytest.mark.parametrize("per", [lowbit.PerTensor(), PerChannel(0)], ids=str)
    def test_scale_modes(self, mode: Any, per: Any, arithmetic: str) -> None:
        x = torch.randn(4, 12)
        spec = QuantSpec(bits=5, scale_mode=mode)
        model = prepared(nn.Linear(12, 6), Recipe(QuantSpec(bits=5, scale_mode=mode, per=per), spec), x)
        converted = lowbit.convert(model, arithmetic)
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert products(converted) == {"": "integer"}
            assert_products(converted, model, x)

    def test_learned_scales_below_their_floor(self, arithmetic: str) -> None:
        x = torch.randn(4, 8)
        model = prepared(mlp(8, 16, 5), lowbit.recipes.w2a2(), x)
        with torch.no_grad():
            for number, scale in enumerate(lowbit.scale_parameters(model)):
                scale.mul_(-1 if number % 2 else 1e-6)
        converted = lowbit.convert(model, arithmetic)
        assert all((value > 0).all() for key, value in converted.state_dict().items() if key.endswith("scale"))
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)

    def test_binary_weights_that_are_all_zero(self, arithmetic: str) -> None:
        layer = nn.Linear(8, 3)
        with torch.no_grad():
            layer.weight[1] = 0.0
            layer.weight[2] = -0.0
        x = torch.randn(4, 8)
        model = prepared(layer, lowbit.recipes.binary(), x)
        converted = lowbit.convert(model, arithmetic)
        assert_same_bits(run(converted, x)[0][:, 1:], layer.bias[1:].expand(4, 2))
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_weights_that_are_all_zero(self, preset: str) -> None:
        layer, x = nn.Linear(64, 3), torch.randn(4, 64)
        with torch.no_grad():
            layer.weight[1:] = 0.0
        model = prepared(layer, PRESETS[preset](), x)
        assert_same_outputs(lowbit.convert(model, "float"), model, x)

    def test_none_is_left(self) -> None:
        case = case_of("bert")
        for preset in ("w8a8", "w2a2", "ternary"):
            converted = lowbit.convert(prepared(case.model, PRESETS[preset](), case.batch))
            assert not [module for module in converted.modules() if isinstance(module, FakeQuantize | Stateless)]


class TestShapes:
    @pytest.mark.parametrize("preset", ["w8a8", "w8a8_dynamic", "w4a8", "binary", "dorefa"])
    @pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "reflect", "avg pool2d", "adaptive pool2d"])
    def test_an_empty_batch(self, name: str, preset: str, arithmetic: str) -> None:
        batch = batch_of(name)
        model = prepared(LAYERS[name](), PRESETS[preset](), batch)
        assert_same_outputs(lowbit.convert(model, arithmetic), model, batch[:0])

    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "conv3d", "avg pool2d", "adaptive pool2d"])
    def test_without_a_batch(self, name: str, preset: str, arithmetic: str) -> None:
        if preset == "w4" and "pool" in name:
            pytest.skip("nothing to quantize")
        x = batch_of(name)[0]
        x = x[0] if name == "linear" and x.dim() > 1 else x
        model = prepared(LAYERS[name](), PRESETS[preset](), x)
        converted = lowbit.convert(model, arithmetic)
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            calls = watch(converted)
            torch.testing.assert_close(run(converted, x), run(model, x), rtol=1e-5, atol=1e-5)
            assert calls or preset in (
                "w4",
                "w8a8_dynamic",
                "w4a8",
                "ternary",
                "binary",
            )  # whose scales are each sample's
            for *call, result in calls.get("", []):
                assert_same_bits(result, call_output(model, *call))

    def test_channels_last(self, arithmetic: str) -> None:
        x = images().to(memory_format=torch.channels_last)
        model = prepared(Residual(3), lowbit.recipes.w8a8(), x).to(memory_format=torch.channels_last)
        converted = lowbit.convert(model, arithmetic).to(memory_format=torch.channels_last)
        if arithmetic == "float":
            assert_same_outputs(converted, model, x)
        else:
            assert_products(converted, model, x)


class TestErrors:
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_a_weight_that_is_not_finite(self, bad: float) -> None:
        x = torch.randn(2, 8)
        model = prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x)
        with torch.no_grad():
            model[2].weight[0, 0] = bad
        with pytest.raises(ValueError, match=r"2\.weight_quantizer: the weight holds NaN or infinity"):
            lowbit.convert(model)
        own = prepared(Own(), lowbit.recipes.w8a8(), x)
        with torch.no_grad():
            own.w[0, 0] = bad
        with pytest.raises(ValueError, match=r"^linear_0\.weight_quantizer: the weight holds"):
            lowbit.convert(own)

    @pytest.mark.parametrize("preset", ["w8a8", "w2a2"])
    def test_an_uncalibrated_model(self, preset: str) -> None:
        model = lowbit.prepare(mlp(8, 16, 5), PRESETS[preset](), torch.randn(2, 8))
        with pytest.raises(NotCalibratedError, match=r"no scale yet: 0\.input_quantizer, 2\.input_quantizer; call"):
            lowbit.convert(model)

    def test_a_model_that_is_not_prepared(self) -> None:
        with pytest.raises(ValueError, match=r"the model is not prepared; call lowbit\.prepare"):
            lowbit.convert(nn.Linear(2, 2))

    def test_an_arithmetic_that_is_none(self) -> None:
        model = lowbit.prepare(nn.Linear(2, 2), lowbit.recipes.w4())
        with pytest.raises(ValueError, match="arithmetic is 'int8', but it must be one of 'float', 'integer'"):
            lowbit.convert(model, "int8")

    def test_converting_twice(self, arithmetic: str) -> None:
        x = torch.randn(2, 8)
        converted = lowbit.convert(prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x), arithmetic)
        again = lowbit.convert(converted, arithmetic)
        assert again is not converted
        assert_same_outputs(again, converted, x)
        other = "float" if arithmetic == "integer" else "integer"
        for model in (converted, nn.Sequential(converted)):
            with pytest.raises(
                ValueError, match=f"converted already, to {arithmetic} arithmetic; convert the prepared"
            ):
                lowbit.convert(model, other)

    @pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["itself", "in a model"])
    def test_what_takes_no_converted_model(self, wrap: Any) -> None:
        x = torch.randn(2, 8)
        converted = wrap(lowbit.convert(prepared(mlp(8, 16, 5), lowbit.recipes.w8a8(), x)))
        for action in (
            lambda: lowbit.prepare(converted, lowbit.recipes.w8a8(), x),
            lambda: lowbit.prepare(converted, lowbit.recipes.w8a8(), x, inplace=True),
            lambda: lowbit.restore(converted),
            lambda: lowbit.calibrate(converted, [x]),
            lambda: lowbit.freeze(converted),
            lambda: lowbit.scale_parameters(converted),
            lambda: lowbit.noise(converted, x),
        ):
            with pytest.raises(ValueError, match="the model is converted; "):
                action()
        run(converted, x)

    def test_a_place_that_saw_no_data(self) -> None:
        """Without example_inputs, attention has a quantizer for each of its inputs, though they are one tensor."""
        x, other = torch.randn(2, 5, 16), torch.randn(2, 5, 16)

        class Self(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

            def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
                other = x if other is None else other
                return self.attention(x, other, other)[0]

        model = lowbit.prepare(Self().eval(), lowbit.recipes.w8a8())
        lowbit.calibrate(model, [x])
        converted: Any = lowbit.convert(model, "float")
        assert isinstance(converted.attention.key_quantizer, Waiting)
        assert_same_outputs(converted, model, x)
        with pytest.raises(
            RuntimeError, match=r"attention\.key_quantizer had seen no data when the model was converted"
        ):
            converted(x, other)


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


def test_a_forward_of_the_layers_own() -> None:
    """Padding before the product is the grid's; what changes values is not, and then the product is in float."""

    class Padded(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.conv2d(F.pad(x, (1, 2, 0, 1)), self.weight, None, self.stride) + self.bias.view(-1, 1, 1)

    class Gained(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.linear(x * 1.7, self.weight, self.bias)

    class Standardized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.linear(x, self.weight - self.weight.mean(), self.bias)

    Standardized.forward.__module__ = "transformers.models.bit.modeling_bit"  # which has some like that

    class Inner(nn.Conv1d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.conv1d(F.pad(input=x, pad=(2, 0)), weight, bias)

    class Shifted(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return F.conv1d(F.pad(x, (1, 0), value=0.3), self.weight, self.bias)

    for preset in ("w8a8", "w8a8_dynamic", "w4a8"):
        for layer, x in (
            (Padded(3, 4, 3, stride=2), images(size=7)),
            (Gained(8, 4), torch.randn(5, 8)),
            (Standardized(8, 4), torch.randn(5, 8)),
            (Inner(3, 4, 3), torch.randn(2, 3, 6)),
            (Shifted(3, 4, 3), torch.randn(2, 3, 6)),
        ):
            model = prepared(layer, PRESETS[preset](), x)
            assert_same_outputs(lowbit.convert(model, "float"), model, x)
            integer = lowbit.convert(model)
            torch.testing.assert_close(run(integer, x), run(model, x), rtol=1e-5, atol=1e-5)
            if isinstance(layer, Inner):
                assert_products(integer, model, x)
