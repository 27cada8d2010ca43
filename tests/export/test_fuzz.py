"""Random networks with random quantizers: a file that computes what the model does, or an error that says why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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

# An export takes longer than a small network's part of it, so that a file holds several side by side.
NETWORKS, LAYERS, SIDE_BY_SIDE = 5, 8, 8
# torch pads an uneven 'same' by a copy, and projects without oneDNN; it says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a smaller example would take minutes to find


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
    cls, (both, layers) = choose(draw, nn.RNN, nn.LSTM, nn.GRU), choose(draw, (False, 1), (True, 1), (False, 2))
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
    """To sizes that divide the input's: ONNX has no other, and export_onnx says so."""
    cls = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[x.dim() - 3]
    return cls(tuple(choose(draw, *(size for size in (1, 2, 3) if of % size == 0)) for of in x.shape[2:]))


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


def fits(model: nn.Module, recipe: Recipe, batch: Any) -> bool:
    """Whether there is something to quantize, in groups that divide the axes, and not only zeros (no scale)"""
    try:
        prepared = lowbit.prepare(model.eval(), recipe, batch)
        lowbit.calibrate(prepared, [batch])
        lowbit.convert(prepared, "float")
    except NotCalibratedError:
        return False
    except ValueError as error:
        if "quantizes nothing" not in str(error) and "does not fit" not in str(error):
            raise
        return False
    return True


class Network(NamedTuple):
    """A module, a batch for it, and for each of its parts a choice of quantizers."""

    module: nn.Module
    batch: Tensor
    rules: list[Rule]

    def fitting(self) -> Network | None:
        """Itself, or one without groups; None where there is nothing to quantize."""
        for rules in (self.rules, [fitting(rule) for rule in self.rules]):
            if fits(self.module, Recipe(rules=rules), self.batch):
                return self._replace(rules=rules)
        return None


@st.composite
def networks(draw: st.DrawFn, count: int) -> Network:
    """One or two steps, with a choice of quantizers for each, and a batch of so many"""
    kind = choose(draw, "rows", "sequences", "words", "images", "images")
    steps: list[nn.Module] = []
    if kind == "images":
        dims = draw(st.integers(1, 3))
        x = torch.randn(count, choose(draw, 1, 2, 4), *(choose(draw, 4, 5, 6) for _ in range(dims)))
    elif kind == "words":
        x = torch.randint(0, 9, (count, 2))
        steps.append(nn.Embedding(9, choose(draw, *WIDTHS)))
    else:
        shape = [count] if kind == "rows" else [count, 2]
        x = torch.randn(*shape, choose(draw, *WIDTHS))
    y = steps[0](x) if steps else x
    for _ in range(draw(st.integers(1, 2))):
        steps.append(choose(draw, *steps_of(y, kind))(draw, y).eval())
        with torch.no_grad():
            y = steps[-1](y)
    if kind == "images":
        steps += [nn.Flatten(), nn.Linear(y[0].numel(), 3)] if draw(st.booleans()) else []
    elif not any(map(is_quantized, steps)):
        steps.append(nn.Linear(y.shape[-1], 3))
    model = nn.Sequential(*steps)
    settle(model, x)
    numbers = [number for number, step in enumerate(steps) if is_quantized(step)]
    return Network(model, x, [draw(rules(f"{number}*")) for number in numbers])


@st.composite
def layers(draw: st.DrawFn, count: int) -> Network:
    """A single layer with quantizers of its own."""
    rows, images = torch.randn(count, 8), torch.randn(count, 4, 4, 4)
    makers = [
        lambda: (nn.Linear(8, choose(draw, 3, 4)), rows),
        lambda: (nn.Linear(8, 6, bias=False), rows),
        lambda: (nn.Conv2d(4, choose(draw, 2, 4), choose(draw, 1, 2), groups=choose(draw, 1, 2)), images),
        lambda: (nn.Conv2d(4, 4, 3, padding=1, stride=choose(draw, 1, 2)), images),
        lambda: (nn.ConvTranspose2d(4, 4, 2, groups=choose(draw, 1, 2)), images),
        lambda: (nn.Embedding(9, choose(draw, 4, 8)), torch.randint(0, 9, (count, 2))),
        lambda: (nn.AvgPool2d(2), images),
    ]
    layer, x = choose(draw, *makers)()
    return Network(nn.Sequential(layer), x, [draw(rules("0"))])


@st.composite
def side_by_side(draw: st.DrawFn, kind: Callable[[int], st.SearchStrategy[Network]]) -> Case:
    """Several, each with its own inputs and outputs; of a batch of one length."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    count = draw(st.integers(2, 4))
    found: list[Network] = []
    while len(found) < SIDE_BY_SIDE:
        network = draw(kind(count)).fitting()
        found += [] if network is None else [network]
    chosen = [
        dataclasses.replace(rule, match=f"networks.{number}.{rule.match}")
        for number, network in enumerate(found)
        for rule in network.rules
    ]
    model = SideBySide([network.module for network in found])
    recipe = Recipe(rules=chosen, fold=draw(st.booleans()))
    return Case(model, recipe, ([network.batch for network in found],), dynamic=draw(st.integers(0, 2)) == 0)


class Case(NamedTuple):
    """Networks side by side, the quantizers of all, and a batch for each."""

    model: nn.Module
    recipe: Recipe
    batch: tuple[list[Tensor]]
    dynamic: bool

    def __repr__(self) -> str:
        """Short, since hypothesis warns of a long one; what fails is told in full."""
        return "Case(...)"


class SideBySide(nn.Module):
    """Networks that have nothing in common."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, batches: list[Tensor]) -> list[Tensor]:
        return [network(batch) for network, batch in zip(self.networks, batches, strict=True)]


def is_quantized(step: nn.Module) -> bool:
    return any(isinstance(module, QUANTIZED) for module in step.modules())


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


def like(x: Tensor, count: int, spread: float) -> Tensor:
    """Another batch, of another length, whose values reach farther."""
    shape = (count, *x.shape[1:])
    return torch.randn(shape) * spread if x.is_floating_point() else torch.randint(0, 9, shape)


def check(case: Case, count: int, spread: float, path: Path) -> None:
    """Both styles, with another batch than that of the export, of another length where that may be."""
    model, recipe, batch, dynamic = case
    prepared = lowbit.prepare(model.eval(), recipe, batch)
    lowbit.calibrate(prepared, [batch])
    other = ([like(x, count if dynamic else len(x), spread) for x in batch[0]],)
    for style in STYLES:
        export_onnx(prepared, batch, path, style, dynamic_batch=dynamic)
        report = verify(prepared, path, other)
        assert report.ok, f"{report}\n{prepared}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "model.onnx"


@hypothesis.settings(max_examples=NETWORKS, phases=PHASES)
@given(side_by_side(networks), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.5]))
def test_networks(path: Path, case: Case, count: int, spread: float) -> None:
    check(case, count, spread, path)


@hypothesis.settings(max_examples=LAYERS, phases=PHASES)
@given(side_by_side(layers), st.integers(1, 5))
def test_layers(path: Path, case: Case, count: int) -> None:
    check(case, count, 1.5, path)
