"""ONNX Runtime's QuantizeLinear and DequantizeLinear: the law, to the bit, for every input that is not NaN."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from onnx import TensorProto, ValueInfoProto, helper
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
from torch import Tensor

from compare import assert_same_bits
from conformance import draw
from lowbit import Grid, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.functional import dequantize, fake_quantize, quantize


class Code(NamedTuple):
    """One ONNX integer type, its grid, and the torch dtype that holds its codes."""

    onnx: int
    grid: Grid
    dtype: torch.dtype


CODES = {
    "int4": Code(TensorProto.INT4, Grid(4), torch.int8),
    "uint4": Code(TensorProto.UINT4, Grid(4, signed=False), torch.uint8),
    "int8": Code(TensorProto.INT8, Grid(8), torch.int8),
    "uint8": Code(TensorProto.UINT8, Grid(8, signed=False), torch.uint8),
    "int16": Code(TensorProto.INT16, Grid(16), torch.int16),
    "uint16": Code(TensorProto.UINT16, Grid(16, signed=False), torch.int32),
}
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


class Place(NamedTuple):
    """Where ONNX puts its scales: one in all, one for each index of an axis, or one for each block along it."""

    axis: int | None = None
    block: int | None = None


@lru_cache
def session(code: int, place: Place, has_zero_point: bool, starts_at: str) -> InferenceSession:
    """x -> QuantizeLinear -> q -> DequantizeLinear -> y, from x or from q on; q and z travel as int32."""
    attributes = {} if place.axis is None else {"axis": place.axis}
    attributes |= {} if place.block is None else {"block_size": place.block}
    nodes, inputs, outputs = [], [_value("s", TensorProto.FLOAT)], [_value("y", TensorProto.FLOAT)]
    params = ["s"]
    if has_zero_point:
        nodes.append(helper.make_node("Cast", ["z"], ["narrow z"], to=code))
        inputs.append(_value("z", TensorProto.INT32))
        params.append("narrow z")
    if starts_at == "x":
        nodes.append(helper.make_node("QuantizeLinear", ["x", *params], ["codes"], output_dtype=code, **attributes))
        nodes.append(helper.make_node("Cast", ["codes"], ["wide codes"], to=TensorProto.INT32))
        inputs.append(_value("x", TensorProto.FLOAT))
        outputs.append(_value("wide codes", TensorProto.INT32))
    else:
        nodes.append(helper.make_node("Cast", ["q"], ["codes"], to=code))
        inputs.append(_value("q", TensorProto.INT32))
    nodes.append(helper.make_node("DequantizeLinear", ["codes", *params], ["y"], **attributes))
    graph = helper.make_graph(nodes, "peer", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _value(name: str, dtype: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None)


def run_peer(code: Code, place: Place, **feed: Tensor | None) -> list[Tensor]:
    """y and, where the feed starts at x, the codes."""
    arrays = {name: tensor.contiguous().numpy() for name, tensor in feed.items() if tensor is not None}
    peer = session(code.onnx, place, "z" in arrays, "x" if "x" in arrays else "q")
    return [torch.from_numpy(output) for output in peer.run(None, arrays)]


def assert_conforms(
    code: Code, x: Tensor, scale: Tensor, zero_point: Tensor | None, per: object = PerTensor(), place: Place = Place()
) -> None:
    """quantize, dequantize and fake_quantize have the bits of ONNX Runtime."""
    shape = scale.shape
    if place.block is not None:
        shape = [-1 if i == place.axis % x.dim() else n for i, n in enumerate(x.shape)]
    z = None if zero_point is None else zero_point.reshape(shape)
    y, q = run_peer(code, place, x=x, s=scale.reshape(shape), z=z)
    codes = quantize(x, scale, zero_point, grid=code.grid, per=per, dtype=code.dtype)
    assert_same_bits(codes, q.to(code.dtype))
    assert_same_bits(quantize(x, scale, zero_point, grid=code.grid, per=per), q.float())
    assert_same_bits(dequantize(codes, scale, zero_point, per=per), y)
    assert_same_bits(fake_quantize(x, scale, zero_point, grid=code.grid, per=per), y)


def inputs(code: Code, place: Place = Place()) -> draw.Draw:
    """Any inputs at all, except where ONNX Runtime does not saturate as ONNX asks.

    It takes 4-bit codes, and blocks along any axis but the last, through an int32 that wraps.
    """
    wraps = code.grid.bits == 4 or (place.block is not None and place.axis != -1)
    return draw.within(2.0**30, draw.mixed_inputs) if wraps else draw.mixed_inputs


@every_code
@pytest.mark.parametrize("magnitude", range(-6, 7))
def test_per_tensor(code: Code, magnitude: int) -> None:
    generator = torch.Generator().manual_seed(magnitude)
    power_of_two = torch.tensor(2.0 ** round(magnitude * math.log2(10)))
    other = torch.tensor(10.0**magnitude) * (1 + torch.rand((), generator=generator))
    for scale in (power_of_two, other):
        zero_point = draw.zero_points((), code.grid, generator)
        x = inputs(code)(code.grid, scale.expand(30_000), zero_point, generator)
        assert_conforms(code, x, scale, zero_point)


@every_code
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -3])
def test_per_axis(code: Code, axis: int) -> None:
    per, place = PerChannel(axis), Place(axis)
    assert_conforms(code, *draw.case(code.grid, (6, 9, 8, 35), per, inputs(code)), per, place)


@every_code
def test_per_axis_in_channels_last_memory(code: Code) -> None:
    x, *params = draw.case(code.grid, (6, 9, 8, 35), PerChannel(1), inputs(code))
    assert_conforms(code, x.contiguous(memory_format=torch.channels_last), *params, PerChannel(1), Place(1))


BLOCKS = {
    PerGroup(1): Place(-1, 1),
    PerGroup(6): Place(-1, 6),
    PerGroup(36): Place(-1, 36),
    PerToken(): Place(-1, 36),
    PerBlock(1, 9): Place(-1, 9),
    PerBlock(4, 1): Place(-2, 4),
}


@every_code
@pytest.mark.parametrize(("per", "place"), BLOCKS.items(), ids=map(str, BLOCKS))
def test_blocked(code: Code, per: object, place: Place) -> None:
    assert_conforms(code, *draw.case(code.grid, (10, 8, 36), per, inputs(code, place)), per, place)


@every_code
@pytest.mark.parametrize("axis", [0, 1])
def test_blocked_along_an_axis_moved_to_the_end(code: Code, axis: int) -> None:
    place = Place(axis, 5)
    moved, *params = draw.case(code.grid, (8, 36, 10), PerGroup(5), inputs(code, place))
    x = moved.movedim(-1, axis).contiguous()
    s, z = (param.movedim(-1, axis) for param in params)
    y, q = run_peer(code, place, x=x, s=s, z=z)
    view = x.movedim(axis, -1)
    assert not view.is_contiguous()
    codes = quantize(view, *params, grid=code.grid, per=PerGroup(5), dtype=code.dtype)
    assert_same_bits(codes, q.to(code.dtype).movedim(axis, -1))
    assert_same_bits(fake_quantize(view, *params, grid=code.grid, per=PerGroup(5)), y.movedim(axis, -1))


@every_code
def test_per_block_is_blocked_with_repeated_scales(code: Code) -> None:
    x, *params = draw.case(code.grid, (3, 8, 36), PerBlock(4, 9), inputs(code))
    s, z = (param.repeat_interleave(4, -2) for param in params)
    y, _ = run_peer(code, Place(-1, 9), x=x, s=s, z=z)
    assert_same_bits(fake_quantize(x, *params, grid=code.grid, per=PerBlock(4, 9)), y)


@every_code
def test_without_zero_point(code: Code) -> None:
    for seed in range(10):
        x, scale, _ = draw.case(code.grid, (5_000,), PerTensor(), inputs(code), seed)
        assert_conforms(code, x, scale, None)


@every_code
def test_every_code_dequantizes_alike(code: Code) -> None:
    codes = torch.arange(code.grid.quant_min, code.grid.quant_max + 1, dtype=torch.int32)
    for seed in range(10):
        _, s, z = draw.case(code.grid, (), PerTensor(), seed=seed)
        (y,) = run_peer(code, Place(), q=codes, s=s, z=z)
        assert_same_bits(dequantize(codes.to(code.dtype), s, z), y)
        assert_same_bits(dequantize(codes.float(), s, z), y)


@every_code
@pytest.mark.parametrize("scale", [1e-6, 0.1, 0.5, 1e6])
def test_infinite_and_huge_values_saturate(code: Code, scale: float) -> None:
    x = torch.tensor([math.inf, -math.inf, 3.4e38, -3.4e38, 1e20, -1e20, 1e10, -1e10]).repeat(4)
    assert_conforms(code, x, torch.tensor(scale), torch.tensor(3, dtype=torch.int32))


@every_code
def test_every_length_and_rank(code: Code) -> None:
    shapes = [(), (0,), (3, 0, 2), *((length,) for length in range(1, 70))]
    for shape in shapes:
        assert_conforms(code, *draw.case(code.grid, shape, PerTensor(), inputs(code), seed=math.prod(shape)))
