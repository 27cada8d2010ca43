"""Random networks with random quantizers: a file that computes what the model does, or an error that says why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from exporting import STYLES
from lowbit import (
    EMA,
    Fixed,
    Learned,
    PerBatch,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
    QuantSpec,
    Recipe,
    Rule,
    SteKind,
)
from lowbit.export.onnx import export_onnx
from lowbit.export.verify import verify
from lowbit.scale import NotCalibratedError

NETWORKS, BRANCHES = 100, 30
# torch pads an uneven 'same' by a copy, and projects without oneDNN; it says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a smaller example would take minutes to find
# What ONNX or its exporter has no operator for, in the words of the error; anything else is a fault.
REFUSED = re.compile(r"ONNX has no pooling of windows that differ in size")


class Residual(nn.Module):
    """x + body(x)"""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Join(nn.Module):
    """One body's features after another's."""

    def __init__(self, left: nn.Module, right: nn.Module, axis: int) -> None:
        super().__init__()
        self.left, self.right, self.axis = left, right, axis

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], self.axis)


class Steps(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Attend(nn.Module):
    """Rows that attend to each other."""

    def __init__(self, layer: nn.Module, need_weights: bool) -> None:
        super().__init__()
        self.layer, self.need_weights = layer, need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.need_weights)[0]


Draw = Callable[[st.SearchStrategy[Any]], Any]
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.LeakyReLU)
WIDTHS = (1, 3, 4, 6, 8)


def choose(draw: Draw, *options: Any) -> Any:
    return draw(st.sampled_from(options))


def activation(draw: Draw, x: Tensor) -> nn.Module:
    return choose(draw, *ACTIVATIONS)()


def linear(draw: Draw, x: Tensor) -> nn.Module:
    layer = nn.Linear(x.shape[-1], choose(draw, *WIDTHS), bias=draw(st.booleans()))
    norms = [nn.BatchNorm1d(layer.out_features)] if x.dim() == 2 and draw(st.booleans()) else []
    return nn.Sequential(layer, *norms, *([activation(draw, x)] if draw(st.booleans()) else []))


def residual_linear(draw: Draw, x: Tensor) -> nn.Module:
    return Residual(nn.Linear(x.shape[-1], x.shape[-1]))


def joined_linear(draw: Draw, x: Tensor) -> nn.Module:
    return Join(linear(draw, x), linear(draw, x), -1)


def recurrent(draw: Draw, x: Tensor) -> nn.Module:
    cls, both, layers = choose(draw, nn.RNN, nn.LSTM, nn.GRU), draw(st.booleans()), choose(draw, 1, 2)
    return Steps(cls(x.shape[-1], 4, layers, batch_first=True, bidirectional=both, bias=draw(st.booleans())))


def attention(draw: Draw, x: Tensor) -> nn.Module:
    width = x.shape[-1]
    heads = choose(draw, *(heads for heads in (1, 2, 3) if width % heads == 0))
    layer = nn.MultiheadAttention(width, heads, batch_first=True, bias=draw(st.booleans()))
    return Attend(layer, draw(st.booleans()))


def norm(draw: Draw, x: Tensor) -> nn.Module:
    return nn.LayerNorm(x.shape[-1])


def convolution(draw: Draw, x: Tensor) -> nn.Module:
    dims, channels = x.dim() - 2, x.shape[1]
    groups = choose(draw, *(groups for groups in (1, 2, channels) if channels % groups == 0))
    kernel = tuple(choose(draw, 1, 2, 3) for _ in range(dims))
    mode = choose(draw, "zeros", "zeros", "reflect", "replicate", "circular") if dims < 3 else "zeros"
    padding = "same" if draw(st.integers(0, 4)) == 0 else tuple(choose(draw, 0, 1) for _ in range(dims))
    stride = 1 if padding == "same" else tuple(choose(draw, 1, 2) for _ in range(dims))
    dilation = choose(draw, 1, 1, 2) if min(x.shape[2:]) > 4 else 1
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    width, bias = groups * choose(draw, 1, 2, 4), draw(st.booleans())
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "padding_mode": mode}
    kernel = tuple(min(k, size) for k, size in zip(kernel, x.shape[2:], strict=True))
    layer = cls(channels, width, kernel, bias=bias, **options)
    return _with_norm(draw, x, layer, width)


def _with_norm(draw: Draw, x: Tensor, layer: nn.Module, width: int) -> nn.Module:
    norms = [(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[x.dim() - 3](width)] if draw(st.booleans()) else []
    return nn.Sequential(layer, *norms, *([activation(draw, x)] if draw(st.booleans()) else []))


def transposed(draw: Draw, x: Tensor) -> nn.Module:
    cls, groups = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[x.dim() - 3], 1
    if x.shape[1] % 2 == 0:
        groups = choose(draw, 1, 2)
    stride, width = choose(draw, 1, 2), groups * choose(draw, 1, 2, 3)
    extra = choose(draw, *range(stride))
    layer = cls(x.shape[1], width, 2, stride, output_padding=extra, groups=groups, bias=draw(st.booleans()))
    return _with_norm(draw, x, layer, width)


def residual_convolution(draw: Draw, x: Tensor) -> nn.Module:
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[x.dim() - 3]
    return Residual(cls(x.shape[1], x.shape[1], 3, padding=1))


def joined_convolution(draw: Draw, x: Tensor) -> nn.Module:
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[x.dim() - 3]
    return Join(cls(x.shape[1], choose(draw, 1, 4), 1), nn.Sequential(cls(x.shape[1], 2, 1), activation(draw, x)), 1)


def pooling(draw: Draw, x: Tensor) -> nn.Module:
    dims = x.dim() - 2
    kernel = choose(draw, *range(1, min(3, *x.shape[2:]) + 1))
    padding = choose(draw, 0, kernel // 2)
    if draw(st.booleans()):
        return (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](kernel, choose(draw, 1, 2), padding)
    cls, counted, ceil = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[dims - 1], draw(st.booleans()), draw(st.booleans())
    divisor = {"divisor_override": 3} if dims > 1 and not ceil and draw(st.booleans()) else {}
    return cls(kernel, choose(draw, 1, 2), padding, ceil, counted, **divisor)


def adaptive(draw: Draw, x: Tensor) -> nn.Module:
    cls = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[x.dim() - 3]
    return cls(choose(draw, 1, 2, 3))


ROWS = (linear, linear, residual_linear, joined_linear, activation)
SEQUENCES = (*ROWS, recurrent, attention, norm)
IMAGES = (convolution, convolution, transposed, residual_convolution, joined_convolution, pooling, adaptive, activation)


def steps_of(x: Tensor, kind: str) -> tuple[Any, ...]:
    if kind == "images":
        return IMAGES
    return SEQUENCES if x.dim() == 3 else ROWS


@st.composite
def specs(draw: st.DrawFn, role: str) -> QuantSpec:
    """A spec that its own checks take."""
    if draw(st.integers(0, 7)) == 0:
        if role == "weight" and draw(st.booleans()):
            return QuantSpec(
                bits=1, method="binary", per=choose(draw, PerTensor(), PerChannel(0)), ste=SteKind.IDENTITY
            )
        method = "dorefa_weight" if role == "weight" else "dorefa_activation"
        return QuantSpec(bits=draw(st.integers(2, 16)), method=method)
    symmetric, signed = draw(st.booleans()), choose(draw, None, True, False)
    is_signed = symmetric if signed is None else signed
    least = 2 if is_signed else 1
    channels = PerChannel(0 if role == "weight" else 1)
    per = choose(draw, PerTensor(), PerTensor(), channels, PerToken(), PerGroup(2), PerGroup(4), PerBlock(1, 2))
    modes: list[Any] = [PerBatch(), PerBatch("mean_abs") if symmetric else PerBatch()]
    if not isinstance(per, PerToken) and (role == "weight" or isinstance(per, PerTensor | PerChannel)):
        modes += [EMA(), Fixed(), Learned(choose(draw, "lsq", "lsq+"), batch_axis=None if role == "weight" else 0)]
        modes += [Learned("pact")] if symmetric and not is_signed else []
    return QuantSpec(
        bits=draw(st.integers(least, 8) | st.integers(least, 16)),
        per=per,
        symmetric=symmetric,
        signed=signed,
        narrow=is_signed and draw(st.booleans()),
        scale_mode=choose(draw, *modes),
    )


@st.composite
def rules(draw: st.DrawFn, match: str) -> Rule:
    weight, x = draw(specs("weight")), draw(specs("activation"))
    weight, x = choose(draw, (weight, x), (weight, x), (weight, None), (None, x))
    output = draw(specs("output")) if draw(st.integers(0, 5)) == 0 else None
    return Rule(match, weight, x, output, takes_bias(weight, x) and draw(st.booleans()))


def takes_bias(weight: QuantSpec | None, x: QuantSpec | None) -> bool:
    """Whether a bias can be an integer of the accumulator's scale."""
    if weight is None or x is None or isinstance(x.scale_mode, PerBatch):
        return False
    if (weight.method, x.method) != ("uniform", "uniform"):
        return False
    return isinstance(x.per, PerTensor) and isinstance(weight.per, PerTensor | PerChannel)


def fitting(rule: Rule) -> Rule:
    """The same, without groups that may not divide an axis; a weight's own fall back to channels."""
    specs = {role: getattr(rule, role) for role in ("weight", "activation", "output")}
    for role, spec in specs.items():
        if spec is not None and isinstance(spec.per, PerGroup | PerBlock):
            per = PerGroup(2) if role == "weight" else PerToken()
            specs[role] = dataclasses.replace(spec, per=per)
    return Rule(rule.match, **specs, bias=rule.bias)


def prepare(model: nn.Module, recipe: Recipe, batch: Any) -> Any:
    """The prepared model, calibrated; None where there is nothing to quantize, or only zeros, which give no scale"""
    try:
        prepared = lowbit.prepare(model.eval(), recipe, batch)
        lowbit.calibrate(prepared, [batch])
    except ValueError as error:
        if "quantizes nothing" in str(error):
            return None
        if "does not fit" not in str(error):
            raise
        recipe = dataclasses.replace(recipe, rules=tuple(map(fitting, recipe.rules)))
        prepared = lowbit.prepare(model.eval(), recipe, batch)
        lowbit.calibrate(prepared, [batch])
    try:
        lowbit.convert(prepared, "float")
    except NotCalibratedError:
        return None
    return prepared


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, Recipe, Tensor]:
    """A network of one to three steps, with a choice of quantizers for each, and a batch"""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind = choose(draw, "rows", "sequences", "words", "images", "images")
    batch = draw(st.integers(2, 4))
    steps: list[nn.Module] = []
    if kind == "images":
        dims = draw(st.integers(1, 3))
        x = torch.randn(batch, choose(draw, 1, 2, 4), *(choose(draw, 4, 5, 6) for _ in range(dims)))
    elif kind == "words":
        x = torch.randint(0, 9, (batch, 3))
        steps.append(nn.Embedding(9, choose(draw, *WIDTHS)))
    else:
        shape = [batch] if kind == "rows" else [batch, choose(draw, 2, 3)]
        x = torch.randn(*shape, choose(draw, *WIDTHS))
    y = steps[0](x) if steps else x
    for _ in range(draw(st.integers(1, 3))):
        steps.append(choose(draw, *steps_of(y, kind))(draw, y).eval())
        with torch.no_grad():
            y = steps[-1](y)
    if kind == "images":
        steps += [nn.Flatten(), nn.Linear(y[0].numel(), 3)] if draw(st.booleans()) else []
    elif not any(isinstance(module, QUANTIZED) for step in steps for module in step.modules()):
        steps.append(nn.Linear(y.shape[-1], 3))
    model = nn.Sequential(*steps)
    settle(model, x)
    numbers = [n for n, step in enumerate(steps) if any(isinstance(module, QUANTIZED) for module in step.modules())]
    recipe = Recipe(rules=[draw(rules(f"{number}*")) for number in numbers], fold=draw(st.booleans()))
    return model, recipe, x


def settle(model: nn.Module, x: Tensor) -> None:
    """Batch norms with statistics, and no bias of zeros: sums of codes alone lie on rounding boundaries too often."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.3)
        model.train()(x)
    model.eval()


QUANTIZED = (
    *(nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.RNNBase, nn.MultiheadAttention),
    *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)


class Branches(nn.Module):
    """Layers side by side: of rows, of images and of words."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, rows: Tensor, images: Tensor, words: Tensor) -> list[Tensor]:
        taken = {nn.Linear: rows, nn.Embedding: words}
        return [
            layer(taken.get(layer.float_class if hasattr(layer, "float_class") else type(layer), images))
            for layer in self.layers
        ]


@st.composite
def branches(draw: st.DrawFn) -> tuple[nn.Module, Recipe]:
    """Eight layers, each with quantizers of its own."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    makers = [
        lambda: nn.Linear(8, choose(draw, 3, 4)),
        lambda: nn.Linear(8, 6, bias=False),
        lambda: nn.Conv2d(
            4, choose(draw, 2, 4), choose(draw, 1, 2), groups=choose(draw, 1, 2), padding=choose(draw, 0, 1)
        ),
        lambda: nn.ConvTranspose2d(4, 4, 2, groups=choose(draw, 1, 2)),
        lambda: nn.Embedding(9, choose(draw, 4, 8)),
        lambda: nn.AvgPool2d(2),
    ]
    layers = [choose(draw, *makers)() for _ in range(8)]
    return Branches(layers), Recipe(rules=[draw(rules(f"layers.{number}")) for number in range(len(layers))])


def check(prepared: Any, batch: Any, other: Any, folder: Path) -> None:
    """Both styles, or the words of a refusal."""
    for style in STYLES:
        path = folder / f"{style}.onnx"
        try:
            export_onnx(prepared, batch, path, style)
        except RuntimeError as error:
            if not REFUSED.search(str(error)):
                raise
            continue
        report = verify(prepared, path, other)
        assert report.ok, f"{report}\n{prepared}"


def like(x: Tensor, count: int, spread: float) -> Tensor:
    """Another batch, of another length, whose values reach farther."""
    shape = (count, *x.shape[1:])
    return torch.randn(shape) * spread if x.is_floating_point() else torch.randint(0, 9, shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@hypothesis.settings(max_examples=NETWORKS, phases=PHASES)
@given(networks(), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.5]))
def test_networks(folder: Path, network: tuple[nn.Module, Recipe, Tensor], count: int, spread: float) -> None:
    model, recipe, x = network
    prepared = prepare(model, recipe, x)
    if prepared is not None:
        check(prepared, x, like(x, count, spread), folder)


@hypothesis.settings(max_examples=BRANCHES, phases=PHASES)
@given(branches(), st.integers(1, 5))
def test_quantizers(folder: Path, network: tuple[nn.Module, Recipe], count: int) -> None:
    model, recipe = network
    batch = torch.randn(3, 8), torch.randn(3, 4, 4, 4), torch.randint(0, 9, (3, 2))
    prepared = prepare(model, recipe, batch)
    if prepared is not None:
        check(prepared, batch, tuple(like(x, count, 1.5) for x in batch), folder)
