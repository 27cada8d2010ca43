"""Runtime: what ONNX Runtime makes of a file, with its optimisations off and on."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.export.extra import require
from lowbit.export.metadata import LAYER, QUANTIZER, STYLE
from lowbit.export.onnx import STYLES

# One correctly rounded operation for each value, or none: these give the same bits wherever they run.
_EXACT = {
    *("Identity", "Reshape", "Transpose", "Concat", "Split", "Slice", "Gather", "GatherElements", "GatherND"),
    *("Squeeze", "Unsqueeze", "Flatten", "Expand", "Tile", "Pad", "Shape", "Size", "Constant", "ConstantOfShape"),
    *("Range", "Where", "SplitToSequence", "SequenceAt", "SequenceConstruct", "DepthToSpace", "SpaceToDepth"),
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "LeakyRelu", "Max", "Min", "Clip", "Round", "Floor"),
    *("Ceil", "Sign", "IsNaN", "IsInf", "And", "Or", "Not", "Equal", "Greater", "GreaterOrEqual", "Less"),
    *("LessOrEqual", "MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin"),
    *("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "ConvInteger"),
}

Array = Any
Arrays = dict[str, Array]


class Input(NamedTuple):
    """What a file takes; an axis of any length has a name in the place of its length"""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.shape))}) {self.dtype}"


class File:
    """An ONNX file that export_onnx wrote, and where in it the codes and the outputs of layers are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file; write it with lowbit.export_onnx")
        onnx = require("onnx", "onnx")
        try:
            self.proto = onnx.load_model_from_string(path.read_bytes())
        except Exception as error:  # protobuf's own, of which it has several
            raise ValueError(f"{path} is not an ONNX file: {error}") from error
        self.style = _properties(self.proto).get(STYLE, "")
        if self.style not in STYLES:
            raise ValueError(
                f"{path} was not written by lowbit.export_onnx: its metadata have no {STYLE!r} that is one of "
                f"{', '.join(STYLES)}; export the model with lowbit.export_onnx"
            )
        self.inputs = [_input(onnx, value) for value in self.proto.graph.input]
        self.outputs = [value.name for value in self.proto.graph.output]
        self.nodes = list(self.proto.graph.node)
        self._makers = {output: node for node in self.nodes for output in node.output if output}

    @cached_property
    def codes(self) -> dict[str, list[str]]:
        """By quantizer, the values that hold its codes, in the order of the calls"""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            if (name := _properties(node).get(QUANTIZER)) is not None:
                found.setdefault(name, []).append(node.output[0])
        return found

    def layer_output(self, path: str) -> str | None:
        """The value that the module at this path gives, which is that of its last node; None where it has none"""
        return self._layers.get(path)

    @cached_property
    def _layers(self) -> dict[str, str]:
        # Not by the beginning of the path: others may call a quantizer that lies inside.
        scopes = [(_properties(node).get(LAYER), node.output[0]) for node in self.nodes]
        return {path: value for path, value in scopes if path is not None}

    def params(self, codes: str) -> tuple[str, str] | None:
        """The values that hold the scale and the zero point of these codes, where the file computes them"""
        node = self._makers.get(codes)
        while node is not None and node.op_type != "QuantizeLinear":  # a Clip, and of 16 bits the Casts around it
            node = self._makers.get(node.input[0])
        if node is None:  # no file of ours; the runtime will say what is wrong with it
            return None
        scale, zero_point = node.input[1:3]
        return (scale, zero_point) if {scale, zero_point} <= self._makers.keys() else None

    def is_exact(self, value: str) -> bool:
        """Whether all arithmetic between other codes, or the inputs, and this value gives the same bits anywhere"""
        return value not in self._inexact

    @cached_property
    def _inexact(self) -> set[str]:
        """Values, and codes whose quantizer takes such a value"""
        found: set[str] = set()
        spread: set[str] = set()
        params = {name for values in self.codes.values() for codes in values for name in self.params(codes) or ()}
        for node in self.nodes:
            quantizes = QUANTIZER in _properties(node)
            # Codes are given from the file, and so are scales that it computes: what follows starts anew.
            taken = spread if quantizes else spread - params
            if not self._is_single(node) or not taken.isdisjoint(node.input):
                found.update(node.output)
                if not quantizes:
                    spread.update(node.output)
        return found

    def _is_single(self, node: Any) -> bool:
        """Whether each value is one correctly rounded operation"""
        if node.op_type == "Cast":
            # The runtime drops a cast to half precision and back, even with its optimisations off.
            types = require("onnx", "onnx").TensorProto
            return node.attribute[0].i not in (types.FLOAT16, types.BFLOAT16)
        return not node.domain and (node.op_type in _EXACT or self._adds_integers(node))

    def _adds_integers(self, node: Any) -> bool:
        if node.op_type != "ReduceSum":
            return False
        types = require("onnx", "onnx").TensorProto
        return self._types.get(node.input[0]) in (types.INT32, types.INT64)

    @cached_property
    def _types(self) -> dict[str, int]:
        return {value.name: value.type.tensor_type.elem_type for value in self.proto.graph.value_info}

    def run(self, feeds: Arrays, fetch: Sequence[str]) -> Arrays:
        """These values, with all optimisations off"""
        onnx = require("onnx", "onnx")
        opened = onnx.ModelProto()
        opened.CopyFrom(self.proto)
        known = set(self.outputs)
        wanted = list(dict.fromkeys([*self.outputs, *fetch]))
        opened.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in known)
        try:
            session = open_session(opened.SerializeToString())
            return dict(zip(wanted, session.run(wanted, feeds), strict=True))
        except Exception as error:  # the runtime's own, which have no class in common but this
            raise RuntimeError(f"ONNX Runtime {version()} can't run {self.path}: {error}") from error

    def run_optimised(self, feeds: Arrays) -> tuple[Arrays, Counter[str]]:
        """The outputs with all optimisations on, and the operators that are left"""
        onnx = require("onnx", "onnx")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimised.onnx"
            session = open_session(self.proto.SerializeToString(), optimise=True, save=path)
            outputs = dict(zip(self.outputs, session.run(self.outputs, feeds), strict=True))
            operators = count_operators(onnx.load(path, load_external_data=False))
        return outputs, operators

    def operators(self) -> Counter[str]:
        """How many nodes of each type"""
        return count_operators(self.proto)


def version() -> str:
    """Of the runtime."""
    return str(require("onnxruntime", "onnx").__version__)


def count_operators(proto: Any) -> Counter[str]:
    """How many nodes of each type, those of other domains than ONNX's own with that before the name"""
    return Counter(f"{node.domain}.{node.op_type}".removeprefix(".") for node in proto.graph.node)


def open_session(model: bytes, *, optimise: bool = False, save: Path | None = None) -> Any:
    """The runtime with this model, on the CPU; ``optimise``: with all graph optimisations, and what they made saved"""
    ort = require("onnxruntime", "onnx")
    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    options.log_severity_level = 4  # what goes wrong is raised as well
    if save is not None:
        options.optimized_model_filepath = str(save)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _properties(part: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in part.metadata_props}


def _input(onnx: Any, value: Any) -> Input:
    tensor = value.type.tensor_type
    # An axis without a length or a name has one of its own.
    axes = enumerate(tensor.shape.dim)
    shape = tuple(
        axis.dim_value if axis.HasField("dim_value") else axis.dim_param or f"{value.name}.{place}"
        for place, axis in axes
    )
    return Input(value.name, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape)
