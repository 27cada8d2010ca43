"""Every public function refuses bad input, and says what it got, what it wanted and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import lowbit.functional as F
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
    PerToken,
    Plan,
    ScaleMode,
    SteKind,
)
from lowbit.granularity import Granularity
from lowbit.observers import Histogram, MinMax, MovingAverage

X = torch.ones(8, 16)
S = torch.tensor(0.5)
INTS = torch.ones(8, 16, dtype=torch.int32)
META = torch.ones((), device="meta")
LEARNING = torch.tensor(0.5, requires_grad=True)
NAN, INF = math.nan, math.inf

Refusal = tuple[Callable[[], object], type[Exception], str]

RECORDS: list[Refusal] = [
    (lambda: Grid(1), ValueError, "bits is 1, but a signed grid must have from 2 to 16; use signed=False"),
    (lambda: Grid(17), ValueError, "bits is 17, but it must be from 1 to 16"),
    (lambda: Grid(0, signed=False), ValueError, "bits is 0, but it must be from 1 to 16"),
    (lambda: Grid(8.0), TypeError, "bits is 8.0 .float., but it must be an int"),
    (lambda: Grid(True), TypeError, "bits is True"),
    (lambda: Grid(8, signed=1), TypeError, "signed is 1"),
    (lambda: Grid(8, signed=False, narrow=True), ValueError, "narrow is True, but an unsigned grid"),
    (lambda: Grid.from_dict({"bits": 8, "bit": 4}), ValueError, "Grid has no key 'bit'; its keys are bits, signed"),
    (lambda: Grid.from_dict({}), ValueError, "Grid needs the key 'bits'"),
    (lambda: Grid.from_dict({"bits": 99}), ValueError, "bits is 99"),
    (lambda: Grid.from_dict(8), TypeError, "takes a dict"),
    (lambda: SteKind.from_dict({"ste": "sigmoid"}), ValueError, "ste is 'sigmoid', but it must be one of 'identity'"),
    (lambda: SteKind.from_dict({"kind": "tanh"}), ValueError, "SteKind has no key 'kind'"),
    (lambda: SteKind.from_dict({}), ValueError, "ste is ''"),
    (lambda: PerChannel("0"), TypeError, "axis is '0' .str., but it must be an int"),
    (lambda: PerGroup(0), ValueError, "size is 0, but it must be at least 1"),
    (lambda: PerBlock(2, -1), ValueError, "columns is -1, but it must be at least 1"),
    (lambda: Granularity.from_dict({"per": "row"}), ValueError, "per is 'row', but it must be one of 'tensor'"),
    (lambda: Granularity.from_dict({"per": "group"}), ValueError, "PerGroup needs the key 'size'"),
    (lambda: Granularity.from_dict({"per": "group", "size": 4, "sizes": 1}), ValueError, "no key 'sizes'"),
    (lambda: Granularity.from_dict([]), TypeError, "takes a dict"),
    (lambda: EMA(1.0), ValueError, "decay is 1.0, but it must be at least 0 and below 1"),
    (lambda: EMA(-0.1), ValueError, "decay is -0.1"),
    (lambda: EMA(NAN), ValueError, "decay is NaN"),
    (lambda: EMA("0.9"), TypeError, "decay is '0.9' .str., but it must be a number"),
    (lambda: PerBatch("max"), ValueError, "statistic is 'max', but it must be one of 'abs_max', 'mean_abs'"),
    (lambda: Learned("lsq2"), ValueError, "method is 'lsq2', but it must be one of 'lsq', 'lsq.', 'pact'"),
    (lambda: Learned(grad_scale=1), TypeError, "grad_scale is 1"),
    (lambda: Learned(batch_axis="0"), TypeError, "batch_axis is '0'"),
    (lambda: ScaleMode.from_dict({"mode": "ema", "decay": 2}), ValueError, "decay is 2"),
    (lambda: ScaleMode.from_dict({"mode": "ema", "rate": 0.9}), ValueError, "EMA has no key 'rate'"),
    (lambda: ScaleMode.from_dict({"mode": "emma"}), ValueError, "mode is 'emma', but it must be one of 'per_batch'"),
    (lambda: ScaleMode.from_dict({}), ValueError, "mode is None"),
    (lambda: ScaleMode(), TypeError, "ScaleMode names a family; choose one of PerBatch, EMA, Fixed, Learned"),
    (lambda: Granularity(), TypeError, "Granularity names a family; choose one of PerTensor"),
    (lambda: SteKind.from_dict("tanh"), TypeError, "takes a dict"),
]

STRAIGHT_THROUGH: list[Refusal] = [
    *(
        (lambda f=f: f([1.0]), TypeError, "x is .1.0. .list., but it must be a Tensor")
        for f in (F.round, F.ceil, F.floor)
    ),
    (lambda: F.clamp(X, "0", 1), TypeError, "min_value is '0'"),
    (lambda: F.clamp(X, 0, NAN), ValueError, "max_value is NaN"),
    (lambda: F.clamp(1.0, 0, 1), TypeError, "x is 1.0"),
    (lambda: F.clamp_backward(X[:2], X, 0, 1), ValueError, r"grad_output has shape \(2, 16\), but x has \(8, 16\)"),
    (lambda: F.clamp_backward(INTS, X, 0, 1), TypeError, "grad_output is torch.int32"),
    (lambda: F.clamp_backward(X, X, None, 1), TypeError, "min_value is None"),
    (lambda: F.step_quantize(X, 0.0), ValueError, "step is 0.0, but it must be positive"),
    (lambda: F.step_quantize(X, -1), ValueError, "step is -1, but it must be positive"),
    (lambda: F.step_quantize(X, INF), ValueError, "step is inf, but it must be finite"),
    (lambda: F.step_quantize(X, 1e-50), ValueError, "step is 1e-50, but it must be positive and finite in"),
    (lambda: F.step_quantize(X, 1e300), ValueError, "step is 1e.300"),
    (lambda: F.step_quantize(X, 10**400), ValueError, "step is an int too large"),
    (lambda: F.step_quantize(X.to(torch.complex64), 1.0), TypeError, "x is torch.complex64"),
    (lambda: F.k_bit_quantize(X, 200), ValueError, "k is 200, but it must be from 1 to 127"),
    (lambda: F.step_quantize_forward(X, NAN), ValueError, "step is NaN"),
    (lambda: F.step_quantize_forward(2.0, 1.0), TypeError, "x is 2.0"),
    (lambda: F.k_bit_quantize(X, 0), ValueError, "k is 0, but it must be from 1 to 127"),
    (lambda: F.k_bit_quantize(X, 2.0), TypeError, "k is 2.0 .float., but it must be an int"),
    (lambda: F.k_bit_quantize_forward(X, -1), ValueError, "k is -1"),
    (lambda: F.affine_k_bit_quantize(X, 0, 1.0, 0.0), ValueError, "k is 0"),
    (lambda: F.clamp_by_linear(X, -1e-5), ValueError, "eps is -1e-05, but it must not be negative"),
    (lambda: F.clamp_by_linear(INTS), TypeError, "x is torch.int32, but it must be float16"),
]


def bad_calls(name: str, call: Callable[..., object]) -> list[Refusal]:
    """What every op with (x, scale, zero_point, grid, per) refuses; ``call`` takes those by keyword."""
    good: dict[str, object] = {"x": X, "scale": S}

    def case(error: type[Exception], match: str, **bad: object) -> Refusal:
        return (lambda: call(**{**good, **bad}), error, match)

    per_channel = torch.ones(8)
    cases = [
        case(TypeError, "x is .* .list., but it must be a Tensor", x=[1.0]),
        case(TypeError, "x is torch.int32, but it must be float16", x=INTS),
        case(TypeError, "x is torch.complex64", x=X.to(torch.complex64)),
        case(TypeError, "scale is torch.int64, but it must be a float tensor", scale=torch.tensor(1)),
        case(TypeError, "scale is '0.5' .str., but it must be a number", scale="0.5"),
        case(ValueError, "scale holds 0.0, but every scale must be positive and finite", scale=torch.tensor(0.0)),
        case(ValueError, "scale holds -1.0", scale=-1.0),
        case(ValueError, "scale holds 1e-50", scale=1e-50),
        case(ValueError, "scale holds 1e.300", scale=1e300),
        case(ValueError, "scale holds .*e-50", scale=torch.tensor(1e-50, dtype=torch.float64)),
        case(ValueError, "scale holds 1e.300", scale=torch.tensor(1e300, dtype=torch.float64)),
        case(ValueError, "scale holds nan", scale=torch.tensor(NAN)),
        case(ValueError, "scale holds inf", scale=torch.tensor(INF)),
        case(ValueError, "scale holds -3.0", scale=torch.tensor([1.0] * 7 + [-3.0]), per=PerChannel(0)),
        case(
            ValueError,
            r"scale has shape \(3,\), but PerChannel\(axis=0\) of a \(8, 16\) tensor needs \(8,\)",
            scale=torch.ones(3),
            per=PerChannel(0),
        ),
        case(
            ValueError,
            r"scale has shape \(1,\), but PerTensor\(\) of a \(8, 16\) tensor needs \(\)",
            scale=torch.ones(1),
        ),
        case(ValueError, "scale is on meta, but x is on cpu; move it: scale.to", scale=META),
        case(TypeError, "zero_point is torch.bool, but it must be an integer tensor", zero_point=torch.tensor(True)),
        case(TypeError, "zero_point is 1.5 .float., but it must be an int or an integer Tensor", zero_point=1.5),
        case(
            ValueError,
            r"zero_point has shape \(\), but PerChannel",
            scale=per_channel,
            zero_point=torch.tensor(1),
            per=PerChannel(0),
        ),
        case(TypeError, "per is 'tensor' .str., but it must be a granularity, such as PerTensor", per="tensor"),
        case(ValueError, "axis=2. does not fit a tensor of 2 dimensions", per=PerChannel(2), scale=per_channel),
        case(ValueError, r"PerGroup\(size=5\) does not fit shape \(8, 16\): size must divide 16", per=PerGroup(5)),
        case(ValueError, "rows must divide 8", per=PerBlock(3, 4)),
        case(ValueError, "columns must divide 16", per=PerBlock(2, 5)),
        case(ValueError, r"PerToken\(\) needs a tensor of at least 1 dimension", x=torch.tensor(1.0), per=PerToken()),
    ]
    if name != "dequantize":
        cases += [
            case(TypeError, "grid is 8 .int., but it must be a lowbit.Grid", grid=8),
            case(ValueError, "zero_point holds 128, but it must lie inside the grid's -128 to 127", zero_point=128),
            case(ValueError, "zero_point holds -9", zero_point=torch.tensor(-9), grid=Grid(4)),
        ]
    if "learned" in name:
        return cases
    cases.append(case(ValueError, "scale requires a gradient, but .* use learned_fake_quantize", scale=LEARNING))
    return [*cases, case(TypeError, "zero_point is torch.float32", zero_point=torch.tensor(1.0))]


OPS = {
    "fake_quantize": lambda x, scale, **options: F.fake_quantize(x, scale, **options),
    "fake_quantize_backward": lambda x, scale, **options: F.fake_quantize_backward(X, x, scale, **options),
    "learned_fake_quantize": lambda x, scale, **options: F.learned_fake_quantize(x, scale, **options),
    "quantize": lambda x, scale, **options: F.quantize(x, scale, **options),
    "quantize_backward": lambda x, scale, **options: F.quantize_backward(X, x, scale, **options),
}

FUNCTIONAL: list[Refusal] = [
    *(refusal for name, call in OPS.items() for refusal in bad_calls(name, call)),
    (lambda: F.fake_quantize(X, S, ste="tanh"), TypeError, "ste is 'tanh' .str., but it must be a SteKind"),
    (
        lambda: F.fake_quantize_backward(X[:2], X, S),
        ValueError,
        r"grad_output has shape \(2, 16\), but x has \(8, 16\)",
    ),
    (lambda: F.fake_quantize_backward(X.to("meta"), X, S), ValueError, "grad_output is on meta, but x is on cpu"),
    (lambda: F.fake_quantize_backward(INTS, X, S), TypeError, "grad_output is torch.int32"),
    (lambda: F.quantize_backward(X[0], X, S), ValueError, "grad_output has shape"),
    (lambda: F.learned_fake_quantize(X, S, grad_scale=2.0), TypeError, "grad_scale is 2.0"),
    (lambda: F.learned_fake_quantize(X, S, method="lsq+"), ValueError, "method is 'lsq.'"),
    (lambda: F.learned_fake_quantize(X, S, batch_axis="0"), TypeError, "batch_axis is '0'"),
    (lambda: F.learned_fake_quantize(X, S, batch_axis=9, grad_scale=False), ValueError, "batch_axis is 9"),
    (
        lambda: F.learned_fake_quantize(X, S, torch.tensor(NAN)),
        ValueError,
        "zero_point holds a value that is not finite",
    ),
    (lambda: F.learned_fake_quantize(X, S, batch_axis=2), ValueError, "batch_axis is 2, but it must be from -2 to 1"),
    (lambda: F.quantize(X, S, dtype=torch.float32), TypeError, "dtype is torch.float32, but codes are int8"),
    (lambda: F.quantize(X, S, dtype=torch.uint8), ValueError, "dtype is torch.uint8, which holds 0 to 255, but Grid"),
    (lambda: F.quantize(X, S, dtype=torch.int8, grid=Grid(8, signed=False)), ValueError, "which holds -128 to 127"),
    (lambda: F.dequantize([1], S), TypeError, "q is .1. .list., but it must be a Tensor"),
    (lambda: F.dequantize(X > 0, S), TypeError, "q is torch.bool, but codes must be"),
    (lambda: F.dequantize(INTS, S, dtype=torch.int8), TypeError, "dtype is torch.int8, but it must be float16"),
    (lambda: F.dequantize(INTS, torch.ones(3)), ValueError, "scale has shape"),
    (lambda: F.dequantize(INTS, torch.tensor(-1.0)), ValueError, "scale holds -1.0"),
    (lambda: F.dequantize(INTS, LEARNING), ValueError, "scale requires a gradient"),
    (lambda: F.dequantize(INTS, S, torch.tensor(1.0)), TypeError, "zero_point is torch.float32"),
    (lambda: F.dequantize(INTS, S, per=None), TypeError, "per is None"),
    (lambda: F.dequantize_backward(INTS, S), TypeError, "grad_output is torch.int32"),
    (lambda: F.dequantize_backward(X, torch.ones(3)), ValueError, "scale has shape"),
    (lambda: F.dequantize_backward(X, 0.0), ValueError, "scale holds 0.0"),
]

MODULES: list[Refusal] = [
    (lambda: FakeQuantize(1), ValueError, "bits is 1"),
    (lambda: FakeQuantize(8, None), TypeError, "symmetric is None"),
    (lambda: FakeQuantize(scale=0.0), ValueError, "scale holds 0.0"),
    (lambda: FakeQuantize(scale=NAN), ValueError, "scale is NaN"),
    (lambda: FakeQuantize(scale=torch.tensor([1.0, INF]), per=PerChannel(0)), ValueError, "scale holds inf"),
    (
        lambda: FakeQuantize(scale=torch.ones(2)),
        ValueError,
        r"scale has shape \(2,\), but this quantizer .* holds \(\)",
    ),
    (lambda: FakeQuantize(zero_point=1), ValueError, "zero_point is 1, but a symmetric quantizer has zero point 0"),
    (lambda: FakeQuantize(8, False, 1.0, 256), ValueError, "zero_point holds 256, but it must lie inside"),
    (lambda: FakeQuantize(8, False, 1.0, 0.5), TypeError, "zero_point is 0.5 .float., but it must be an int"),
    (
        lambda: FakeQuantize(8, False, torch.ones(2), torch.zeros(3, dtype=torch.int32), per=PerChannel(0)),
        ValueError,
        "zero_point has shape",
    ),
    (lambda: FakeQuantize(narrow=True, signed=False), ValueError, "narrow is True"),
    (lambda: FakeQuantize(ste="identity"), TypeError, "ste is 'identity'"),
    (lambda: FakeQuantize(per=0), TypeError, "per is 0"),
    (lambda: FakeQuantize(scale_mode="ema"), TypeError, "scale_mode is 'ema', but it must be PerBatch"),
    (lambda: FakeQuantize(observer="minmax"), TypeError, "observer is 'minmax'"),
    (lambda: FakeQuantize(observer=MinMax(PerChannel(0))), ValueError, "observer watches PerChannel"),
    *(
        (lambda mode=mode: FakeQuantize(per=PerToken(), scale_mode=mode), ValueError, "scale_mode must be PerBatch")
        for mode in (Fixed(), EMA(), Learned())
    ),
    (lambda: FakeQuantize(8, False, scale_mode=PerBatch("mean_abs")), ValueError, "statistic='mean_abs'"),
    (lambda: FakeQuantize(scale_mode=Learned("pact")), ValueError, "method='pact' clips to"),
    (lambda: FakeQuantize(scale=0.5, scale_mode=PerBatch()), ValueError, "from each batch; leave them out"),
    (lambda: FakeQuantize(8, False, zero_point=3, scale_mode=PerBatch()), ValueError, "from each batch"),
    (
        lambda: FakeQuantize(8, False, zero_point=3, scale_mode=EMA()),
        ValueError,
        "zero_point is 3, but there is no scale",
    ),
    (lambda: FakeQuantize(8, False, zero_point=3, scale_mode=Learned()), ValueError, "give both, or leave both"),
    (lambda: FakeQuantize(scale=torch.ones(2, 3), per=PerChannel(0)), ValueError, "holds no such scale"),
    (lambda: FakeQuantize(scale=True), TypeError, "scale is True"),
    (lambda: FakeQuantize(scale=[1.0]), TypeError, "scale is .1.0. .list."),
    (lambda: FakeQuantize(scale=torch.tensor(1)), TypeError, "scale is torch.int64"),
    (lambda: FakeQuantize(scale="a"), TypeError, "scale is 'a'"),
    (lambda: FakeQuantize(zero_point=None), TypeError, "zero_point is None"),
    (lambda: FakeQuantize(8, False, 1.0, 2**70), ValueError, "zero_point holds 1180591620717411303424"),
    (lambda: FakeQuantize(scale_mode=PerBatch()).update_params(1.0), ValueError, "takes its scale from each batch"),
    (lambda: FakeQuantize(scale_mode=PerBatch()).float_range(), ValueError, "takes its range from each batch"),
    (lambda: FakeQuantize().update_params(-1.0), ValueError, "scale holds -1.0"),
    (lambda: FakeQuantize().update_params(1.0, 1), ValueError, "symmetric quantizer has zero point 0"),
    (lambda: FakeQuantize().update_params_from_observer(), ValueError, "has no observer; build it with"),
    (lambda: FakeQuantize(observer=MinMax()).update_params_from_observer(), ValueError, "has seen no data"),
    (lambda: FakeQuantize()([1.0]), TypeError, "x is .1.0. .list."),
    (lambda: FakeQuantize()(INTS), TypeError, "x is torch.int32"),
    (lambda: FakeQuantize().backward(X[:1], X), ValueError, "grad_output has shape"),
    (lambda: FakeQuantize(per=PerGroup(5))(X), ValueError, "size must divide 16"),
    (lambda: MinMax(per="tensor"), TypeError, "per is 'tensor'"),
    (lambda: MinMax().observe(INTS), TypeError, "x is torch.int32"),
    (lambda: MinMax().quant_params(8, True), TypeError, "grid is 8"),
    (lambda: MinMax().quant_params(Grid(8), "yes"), TypeError, "symmetric is 'yes'"),
    (lambda: MovingAverage(decay=1.0), ValueError, "decay is 1.0"),
    (lambda: Histogram(method="max"), ValueError, "method is 'max', but it must be one of 'percentile'"),
    (lambda: Histogram(bins=3), ValueError, "bins is 3, but it must be even"),
    (lambda: Histogram(bins=0), ValueError, "bins is 0"),
    (lambda: Histogram(percentile=0), ValueError, "percentile is 0"),
    (lambda: Histogram(candidates=0), ValueError, "candidates is 0"),
    (lambda: Plan.select("fake_quantise", X), ValueError, "op is 'fake_quantise', but it must be one of round, ceil"),
    (lambda: Plan.select("quantize", 8), TypeError, "like is int, but Plan.select needs a Tensor"),
    (lambda: Plan.select("quantize", X, prefer="cuda"), ValueError, "prefer is 'cuda', but it must be one of auto"),
    (lambda: Plan.select("quantize", X, per=PerGroup(5)), ValueError, "size must divide 16"),
    (lambda: Plan.select("quantize", INTS), TypeError, "like is torch.int32, but quantize takes a float tensor"),
    (lambda: Plan.select("quantize", X, grid=8), TypeError, "grid is 8"),
    (lambda: Plan.select("quantize", X, per=[1]), TypeError, "per is .1. .list."),
    (lambda: Plan.select(["quantize"], X), ValueError, "op is"),
    (lambda: Plan.select("quantize", X, per="tensor"), TypeError, "per is 'tensor'"),
    (lambda: Plan.select("quantize", X, ste="tanh"), TypeError, "ste is 'tanh'"),
]


@pytest.mark.parametrize(("call", "error", "match"), [*RECORDS, *STRAIGHT_THROUGH, *FUNCTIONAL, *MODULES])
def test_refused(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_checks_of_values_are_for_cpu_tensors_in_eager_calls() -> None:
    """Shapes and dtypes are always checked; values are not read under tracing."""
    torch.compiler.reset()
    negative = torch.tensor(-0.5)
    torch.compile(lambda x, s: F.fake_quantize(x, s), fullgraph=True)(X, negative)
    with pytest.raises(ValueError, match=r"scale holds -0\.5"):
        F.fake_quantize(X, negative)
