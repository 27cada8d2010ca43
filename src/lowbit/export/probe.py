"""probe: whether the runtime's products of 8-bit integers are exact on this processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lowbit.export.extra import require
from lowbit.export.runtime import Arrays, open_session
from lowbit.export.verification import Probe

# 67 terms: a multiple of no vector's length; the sums leave 16 bits with the second or third.
_TERMS = 67
_PRODUCTS: Mapping[str, tuple[tuple[str, int], tuple[str, int]]] = {
    "255 x 127 (uint8 x int8)": (("uint8", 255), ("int8", 127)),
    "255 x -128 (uint8 x int8)": (("uint8", 255), ("int8", -128)),
    "255 x 255 (uint8 x uint8)": (("uint8", 255), ("uint8", 255)),
    "127 x 127 (int8 x int8)": (("int8", 127), ("int8", 127)),
    "-128 x -128 (int8 x int8)": (("int8", -128), ("int8", -128)),
}
# What the sums of operators with 8-bit results are divided down to.
_CODE = 100


def probe() -> Probe:
    """sum of 67 products of the largest 8-bit integers, by each operator that files use or are optimised to

    Processors without VNNI instructions add pairs of uint8 x int8 in 16 bits, where 255 x 127 + 255 x 127 saturates.
    """
    wrong = []
    for product, (a, b) in _PRODUCTS.items():
        total = _TERMS * a[1] * b[1]
        feeds = {"a": np.full((5, _TERMS), a[1], a[0]), "c": np.full((1, _TERMS, 4, 4), a[1], a[0])}
        for optimise in (False, True):
            for name, got in run_probe(_model(a[0], *b, total), feeds, optimise).items():
                wanted = total if name.endswith("Integer") else _CODE
                off = np.unique(got[got != wanted]).tolist()
                if off:
                    how = " with optimisations" if optimise else ""
                    wrong.append(f"{name} of {_TERMS} times {product}{how} gives {off[0]}, not {wanted}")
    return Probe(not wrong, tuple(wrong))


def run_probe(model: Any, feeds: Arrays, optimise: bool) -> Arrays:
    """The outputs of the probe's model, by operator"""
    session = open_session(model.SerializeToString(), optimise=optimise)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _model(dtype: str, weight_dtype: str, weight: int, total: int) -> Any:
    """Products of a (5, 67) and c (1, 67, 4, 4) with constant weights, each output named for its operator"""
    onnx = require("onnx", "onnx")
    helper, types = onnx.helper, onnx.TensorProto
    code = types.UINT8 if dtype == "uint8" else types.INT8
    constants = {
        "w": np.full((_TERMS, 17), weight, weight_dtype),
        "k": np.full((17, _TERMS, 1, 1), weight, weight_dtype),
        "zero": np.zeros((), dtype),
        "zero_w": np.zeros((), weight_dtype),
        "one": np.ones((), np.float32),
        "step": np.asarray(abs(total) / _CODE, np.float32),
    }
    scales = ("one", "zero"), ("one", "zero_w", "step", "zero")
    operands = {
        "MatMulInteger": ["a", "w"],
        "ConvInteger": ["c", "k"],
        "QLinearMatMul": ["a", *scales[0], "w", *scales[1]],
        "QLinearConv": ["c", *scales[0], "k", *scales[1]],
    }
    if total < 0:  # no code of a uint8
        operands = {name: names for name, names in operands.items() if name.endswith("Integer")}
    nodes = [helper.make_node(name, names, [name]) for name, names in operands.items()]
    outputs = [
        helper.make_tensor_value_info(
            name, types.INT32 if name.endswith("Integer") else code, [5, 17] if "MatMul" in name else [1, 17, 4, 4]
        )
        for name in operands
    ]
    inputs = [
        helper.make_tensor_value_info("a", code, [5, _TERMS]),
        helper.make_tensor_value_info("c", code, [1, _TERMS, 4, 4]),
    ]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "probe", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
