"""Passes: from what torch's exporter gives to the file that we write."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from lowbit.export.metadata import LAYER, CodeKind

# Where the exporter keeps the path of a node's module.
_SCOPES = "pkg.torch.onnx.name_scopes"
_NOWHERE = "_empty_nn_module_stack_from_metadata_hook"
_KEPT = ("QuantizeLinear", "DequantizeLinear", "MatMulInteger", "ConvInteger")
_SMALL = 1 << 16


def finish(model: ir.Model, kinds: dict[str, CodeKind], opset: int) -> None:
    """Fold what is constant, merge what is there twice, and store codes in as many bits as they have."""
    common.InlinePass()(model)
    graph = model.graph
    codes = {name: kind for name, kind in kinds.items() if name in graph.initializers}
    sizes = max((value.const_value.size for value in graph.initializers.values() if value.const_value), default=0)
    limit = max(int(sizes) * 8, 8192)
    optimizer.fold_constants_ir(
        model,
        input_size_limit=limit,
        output_size_limit=limit,
        should_fold=lambda node: False if _is_kept(node) or _takes_codes(node, codes) else None,
    )
    common.CommonSubexpressionEliminationPass()(model)  # a layer that runs twice takes its codes once
    _fold_codes(graph, codes)
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for step in (
        common.DeduplicateInitializersPass(size_limit=_SMALL),
        common.CommonSubexpressionEliminationPass(),
        *(() if _has_subgraphs(graph) else (common.IdentityEliminationPass(),)),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    ):
        step(model)
    _narrow(model, codes, opset)
    common.TopologicalSortPass()(model)
    common.NameFixPass()(model)
    _strip(model)


def _has_subgraphs(graph: ir.Graph) -> bool:
    """Whether there are loops or branches; the Identity that one ends in is not onnx_ir's to take away, but it does."""
    return any(node.graph is not graph for node in graph.all_nodes())


def _is_kept(node: ir.Node) -> bool:
    return node.op_type in _KEPT


def _takes_codes(node: ir.Node, codes: dict[str, CodeKind]) -> bool:
    return any(value is not None and value.name in codes for value in node.inputs)


def _array(value: ir.Value | None) -> Any:
    """The numbers of a constant; None for what is not one."""
    if value is None:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    producer = value.producer()
    if producer is not None and producer.op_type == "Constant":
        attribute = next(iter(producer.attributes.values()))
        return attribute.value.numpy() if attribute.name == "value" else np.asarray(attribute.value)
    return None


def _fold_codes(graph: ir.Graph, codes: dict[str, CodeKind]) -> None:
    """Codes in the shape and order in which a node takes them."""
    for node in list(graph):
        source: Any = node.inputs[0] if node.inputs else None
        if source is None or source.name not in codes or node.op_type not in ("Transpose", "Reshape"):
            continue
        if len(source.uses()) > 1:  # a file holds no codes twice
            continue
        array = source.const_value.numpy()
        if node.op_type == "Transpose":
            folded = np.transpose(array, node.attributes["perm"].as_ints())
        else:
            folded = array.reshape(_array(node.inputs[1]))
        value = _new_constant(
            graph, f"{source.name}.{node.op_type.lower()}", np.ascontiguousarray(folded), source.dtype
        )
        codes[value.name] = codes[source.name]
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        graph.remove(node, safe=True)
        del graph.initializers[source.name]


def _narrow(model: ir.Model, codes: dict[str, CodeKind], opset: int) -> None:
    """Weights of 4 bits as int4, of 2 as int2 where the opset has it; products of integers take them as int8."""
    graph = model.graph
    for name, kind in codes.items():
        value: Any = graph.initializers.get(name)
        if value is None or value.const_value is None:
            continue
        dtype = _narrowest(kind, opset)
        if dtype == value.dtype:
            continue
        uses, wide = list(value.uses()), value.dtype
        _retype(value, dtype)
        for node, index in uses:
            if node.op_type == "DequantizeLinear":
                zero_point = node.inputs[2] if len(node.inputs) > 2 else None
                if zero_point is not None and zero_point.dtype != dtype:
                    array = _array(zero_point).astype(dtype.numpy())
                    node.replace_input_with(2, _new_constant(graph, f"{zero_point.name}.narrow", array, dtype))
                continue
            cast = ir.node("Cast", [value], attributes={"to": wide})
            cast.outputs[0].dtype, cast.outputs[0].shape = wide, value.shape
            node.graph.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])


def _narrowest(kind: CodeKind, opset: int) -> ir.DataType:
    """The smallest type that holds such codes; odd numbers of 17 bits are left as int32"""
    widths = [width for width in (2, 4, 8, 16) if kind.bits <= width and (width > 2 or opset >= 25)]
    return ir.DataType[f"{'' if kind.signed else 'U'}INT{widths[0]}"] if widths else ir.DataType.INT32


def _retype(value: ir.Value, dtype: ir.DataType) -> None:
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy().astype(dtype.numpy()), dtype=dtype, name=value.name)
    value.dtype = dtype


def _new_constant(graph: ir.Graph, name: str, array: Any, dtype: ir.DataType) -> Any:
    """A constant of this name, or of one like it that is not taken."""
    taken, serial = name, 0
    while taken in graph.initializers:
        serial += 1
        taken = f"{name}_{serial}"
    value = ir.Value(name=taken, const_value=ir.tensor(array, dtype=dtype, name=taken))
    value.dtype, value.shape = dtype, ir.Shape(array.shape)
    graph.register_initializer(value)
    return value


def _strip(model: ir.Model) -> None:
    """Of what the exporter noted, the module that a node belongs to; nothing of the machine, such as stack traces."""
    for node in model.graph.all_nodes():
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        for key in [key for key in node.metadata_props if not key.startswith("lowbit.")]:
            del node.metadata_props[key]
        if len(scopes) > 1 and scopes[-2] != _NOWHERE:  # the last is the node's own name
            node.metadata_props[LAYER] = scopes[-2]
        node.doc_string = None
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def name_batch(model: ir.Model) -> None:
    """The first axis of the first input is called "batch", wherever it is met."""
    graph = model.graph
    values: list[Any] = [*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)]
    batch = values[0].shape[0]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if size == batch:
                value.shape[axis] = ir.SymbolicDim("batch")
