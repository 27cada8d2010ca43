"""CodedWeight and CodedActivation: the values of the quantizers they stand for, to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from converting import prepared
from inputs import FLOATS
from lowbit import (
    EMA,
    FakeQuantize,
    Fixed,
    Grid,
    Learned,
    PerBatch,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
    Recipe,
)
from lowbit.nn.coded import ActivationForm, CodedActivation, CodedWeight, Codes, WeightForm, code_dtype
from nn.layers import LAYERS as ALL

SPECS = {
    "8 bits": QuantSpec(bits=8, per=PerChannel(0), narrow=True),
    "affine": QuantSpec(bits=8, per=PerChannel(0), symmetric=False),
    "signed affine": QuantSpec(bits=5, symmetric=False, signed=True),
    "unsigned": QuantSpec(bits=4, signed=False),
    "1 bit": QuantSpec(bits=1, signed=False, symmetric=False),
    "2 bits": QuantSpec(bits=2, narrow=True, scale_mode=PerBatch("mean_abs")),
    "3 bits": QuantSpec(bits=3, per=PerChannel(0), scale_mode=Learned()),
    "groups": QuantSpec(bits=4, per=PerGroup(4)),
    "blocks": QuantSpec(bits=6, per=PerBlock(2, 4), symmetric=False),
    "rows": QuantSpec(bits=7, per=PerToken()),
    "9 bits": QuantSpec(bits=9, per=PerGroup(8)),
    "16 bits": QuantSpec(bits=16, scale_mode=EMA()),
    "unsigned 16 bits": QuantSpec(bits=16, symmetric=False, per=PerChannel(0)),
    "fixed": QuantSpec(bits=8, scale_mode=Fixed()),
    "binary": QuantSpec(bits=1, per=PerChannel(0), method="binary"),
    "binary groups": QuantSpec(bits=1, per=PerGroup(4), method="binary"),
    **{f"dorefa {bits}": QuantSpec(bits=bits, method="dorefa_weight") for bits in (2, 3, 7, 8, 9, 16)},
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 6),
    "conv": lambda: nn.Conv2d(4, 6, 2),
    "transposed": lambda: nn.ConvTranspose1d(4, 6, 2),
    "columns": ALL["transformers conv1d"],
}


def pair(name: str, spec: QuantSpec, dtype: torch.dtype = torch.float32) -> tuple[Any, CodedWeight]:
    """A prepared layer and the codes of its weight."""
    model = lowbit.prepare(LAYERS[name]().to(dtype), Recipe(spec)).eval()
    coded: Any = lowbit.convert(model, "float").get_submodule("weight_quantizer")
    return model, coded


def value(model: Any) -> Tensor:
    """What the prepared layer multiplies with."""
    with torch.no_grad():
        return model.quantize_weight("weight_quantizer", model.weight, model.output_axis)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", LAYERS)
class TestWeights:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_have_the_quantizers_value(self, name: str, spec: str, dtype: torch.dtype) -> None:
        model, coded = pair(name, SPECS[spec], dtype)
        wanted = value(model)
        assert_same_bits(coded(), wanted)
        assert coded().stride() == wanted.stride()

    def test_are_integers_of_their_grid(self, name: str, spec: str) -> None:
        model, coded = pair(name, SPECS[spec])
        q, form, bits = coded.integers(), coded.form, SPECS[spec].bits
        assert q.shape == form.laid_out
        assert q.int().abs().max() <= form.largest
        if form.odd:
            assert (q % 2 != 0).all()
            assert q.dtype == (torch.int8 if bits < 8 else torch.int32)
        else:
            grid = model.weight_quantizer.grid
            assert grid.quant_min <= q.int().min()
            assert q.int().max() <= grid.quant_max
            sizes = (torch.int8, torch.int16) if grid.signed else (torch.uint8, torch.int32)
            assert q.dtype == sizes[bits > 8]
        packed = {1: 8, 2: 4, 3: 2, 4: 2}.get(bits, 1)
        assert coded.codes.numel() == -(-model.weight.numel() // packed)
        assert coded.codes.element_size() == (1 if bits <= 8 else 2)

    def test_form(self, name: str, spec: str) -> None:
        _, coded = pair(name, SPECS[spec])
        again = CodedWeight(WeightForm.from_dict(coded.form.to_dict()), torch.float32)
        assert again.form == coded.form
        again.load_state_dict(coded.state_dict())
        assert_same_bits(again(), coded())


class TestWeight:
    @pytest.mark.parametrize("spec", ["8 bits", "groups", "affine", "binary", "dorefa 9"])
    def test_open_codes_are_the_same_weight(self, spec: str) -> None:
        _, coded = pair("conv", SPECS[spec])
        wanted, integers = coded(), coded.integers()
        coded.open()
        assert torch.equal(coded.codes, integers)
        assert_same_bits(coded(), wanted)

    def test_moves_without_its_scale(self) -> None:
        _, coded = pair("linear", SPECS["groups"])
        wanted, scale = coded(), coded.scale.clone()
        for move in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.type(torch.float16)):
            moved = move(copy.deepcopy(coded))
            assert_same_bits(moved.scale, scale)
            assert moved.codes.dtype == torch.uint8
            assert_same_bits(moved(), wanted.to(moved.dtype))
            assert moved.dtype in (torch.float16, torch.bfloat16)
            assert_same_bits(moved.float()(), wanted)
        assert coded.double()().dtype == torch.float64
        assert coded.to("meta")().device.type == "meta"

    def test_takes_any_order_of_memory(self) -> None:
        for spec in ("8 bits", "groups", "binary"):
            layer = nn.Conv2d(4, 6, (2, 4)).to(memory_format=torch.channels_last)
            model: Any = lowbit.prepare(layer, Recipe(SPECS[spec])).eval()
            coded: Any = lowbit.convert(model, "float").get_submodule("weight_quantizer")
            wanted = value(model)
            assert_same_bits(coded(), wanted)
            assert coded().stride() == wanted.stride()

    def test_takes_an_empty_weight(self) -> None:
        form = WeightForm(4, True, PerChannel(0), (0, 3), 0)
        coded = CodedWeight.of(form, torch.float32, Codes(torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0), None))
        assert coded().shape == (0, 3)

    def test_shows_its_size(self) -> None:
        _, coded = pair("linear", SPECS["groups"])
        assert repr(coded) == "CodedWeight(4 bits, PerGroup(size=4), (6, 8), 72 bytes)"

    def test_is_pickled(self) -> None:
        _, coded = pair("linear", SPECS["affine"])
        assert_same_bits(pickle.loads(pickle.dumps(coded))(), coded())


ACTIVATIONS = {
    "affine": FakeQuantize(8, False, scale_mode=EMA()),
    "symmetric": FakeQuantize(8, scale_mode=EMA()),
    "unsigned": FakeQuantize(4, signed=False, scale_mode=EMA()),
    "narrow": FakeQuantize(2, narrow=True, scale_mode=Learned()),
    "learned affine": FakeQuantize(3, False, scale_mode=Learned("lsq+")),
    "pact": FakeQuantize(4, signed=False, scale_mode=Learned("pact")),
    "channels": FakeQuantize(8, False, per=PerChannel(1), scale_mode=EMA()),
    "token": FakeQuantize(8, per=PerToken(), scale_mode=PerBatch()),
    "affine token": FakeQuantize(8, False, per=PerToken(), scale_mode=PerBatch()),
    "sample": FakeQuantize(8, per=PerChannel(0), scale_mode=PerBatch()),
    "groups": FakeQuantize(5, per=PerGroup(4), scale_mode=PerBatch("mean_abs")),
    "blocks": FakeQuantize(5, False, per=PerBlock(2, 4), scale_mode=PerBatch()),
    "16 bits": FakeQuantize(16, scale_mode=EMA()),
    "unsigned 16 bits": FakeQuantize(16, False, scale_mode=EMA()),
    "1 bit": FakeQuantize(1, False, scale_mode=Fixed(), scale=0.3, zero_point=1),
    "fixed": FakeQuantize(9, scale=0.01, per=PerChannel(0)),
}


def coded_like(quantizer: FakeQuantize) -> CodedActivation:
    """What stands in the place of a quantizer."""
    if isinstance(quantizer.scale_mode, PerBatch):
        form = ActivationForm(quantizer.grid, quantizer.per, quantizer.symmetric, quantizer.scale_mode.statistic)
        return CodedActivation(form)
    scale, zero_point = quantizer.kept_params()
    coded = CodedActivation(
        ActivationForm(quantizer.grid, quantizer.per, quantizer.symmetric, scale_shape=tuple(scale.shape))
    )
    coded.scale, coded.zero_point = scale.clone(), zero_point
    return coded


@pytest.mark.parametrize("name", ACTIVATIONS)
class TestActivations:
    def given(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[FakeQuantize, CodedActivation, Tensor]:
        quantizer, x = copy.deepcopy(ACTIVATIONS[name]), torch.randn(4, 6, 8)
        quantizer(x)  # starts it
        return quantizer.eval(), coded_like(quantizer.eval()), (2 * torch.randn(4, 6, 8)).to(dtype)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_have_the_quantizers_value(self, name: str, dtype: torch.dtype) -> None:
        quantizer, coded, x = self.given(name, dtype)
        x.view(-1)[:4] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
        assert_same_bits(coded(x), quantizer(x).detach())

    def test_codes_stand_for_it(self, name: str) -> None:
        _, coded, x = self.given(name)
        q, scale, zero_point = coded.codes(x)
        assert q.dtype == code_dtype(coded.grid)
        assert coded.grid.quant_min <= q.min()
        assert q.max() <= coded.grid.quant_max
        assert_same_bits(lowbit.functional.dequantize(q, scale, zero_point, per=coded.per), coded(x))

    def test_codes_by_the_scale_of_another(self, name: str) -> None:
        _, coded, x = self.given(name)
        q, scale, _ = coded.codes(x / 2, x)
        assert_same_bits(scale, coded.codes(x).scale)
        assert q.shape == x.shape

    def test_gradient_is_the_identity(self, name: str) -> None:
        _, coded, x = self.given(name)
        (gradient,) = torch.autograd.grad(coded(x.requires_grad_()).sum(), x)
        assert_same_bits(gradient, torch.ones_like(x))

    def test_form(self, name: str) -> None:
        _, coded, x = self.given(name)
        again = CodedActivation(ActivationForm.from_dict(coded.form.to_dict()))
        again.load_state_dict(coded.state_dict())
        assert again.form == coded.form
        assert_same_bits(again(x), coded(x))

    def test_scales_stay_full(self, name: str) -> None:
        _, coded, x = self.given(name)
        moved = copy.deepcopy(coded).half()
        assert moved(x.half()).dtype == torch.float16
        for key, tensor in coded.state_dict().items():
            assert_same_bits(moved.state_dict()[key], tensor)
        assert copy.deepcopy(coded).double()(x.double()).dtype == torch.float64

    def test_an_empty_batch(self, name: str) -> None:
        if name == "fixed":
            pytest.skip("one scale for each sample")
        _, coded, x = self.given(name)
        assert coded(x[:0]).shape == (0, 6, 8)
        assert coded.codes(x[:0]).q.shape == (0, 6, 8)


class Both(nn.Module):
    """A weight and an activation, as an exporter sees them."""

    def __init__(self, weight: CodedWeight, activation: CodedActivation) -> None:
        super().__init__()
        self.weight, self.activation = weight, activation

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.weight(), self.activation(x), self.activation.codes(x).q


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("8 bits", "affine"),
        ("affine", "token"),
        ("groups", "sample"),
        ("blocks", "groups"),
        ("rows", "blocks"),
        ("unsigned 16 bits", "unsigned 16 bits"),
        ("binary", "channels"),
        ("dorefa 3", "affine token"),
    ],
)
def test_exported_they_are_the_same(spec: str, name: str) -> None:
    _, weight = pair("linear", SPECS[spec])
    _, activation, x = TestActivations().given(name)
    both = Both(weight, activation)
    program = torch.export.export(both, (x,))
    called = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("lowbit.")]
    assert called == ["lowbit.dequantize.default", "lowbit.fake_quantize.default", "lowbit.quantize.default"]
    for output, wanted in zip(program.module()(x), both(x), strict=True):
        assert_same_bits(output, wanted)


def test_a_binary_weight_of_zeros_is_exported() -> None:
    layer = nn.Linear(4, 2)
    nn.init.zeros_(layer.weight)
    x = torch.randn(3, 4)
    converted = lowbit.convert(prepared(layer, lowbit.recipes.binary(), x), "float")
    program = torch.export.export(converted, (x,))
    assert_same_bits(program.module()(x), converted(x))


def test_code_dtypes() -> None:
    grids = {Grid(8): torch.int8, Grid(8, signed=False): torch.uint8, Grid(9): torch.int32, Grid(1, False): torch.uint8}
    assert {grid: code_dtype(grid) for grid in grids} == grids


def test_per_tensor_is_one_scale() -> None:
    coded = CodedActivation(ActivationForm(Grid(8), PerTensor(), symmetric=True))
    assert coded.params(torch.zeros(2, 3))[0].shape == ()
