"""export_onnx: a prepared or converted model as an ONNX file."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.blueprint import conversion_of
from lowbit.conversion import convert
from lowbit.copies import copied
from lowbit.export.extra import require
from lowbit.export.metadata import STYLE, VERSION, CodeKind
from lowbit.nn.coded import CodedWeight
from lowbit.record import check_choice, check_integer
from lowbit.version import __version__

STYLES = {"qdq": "float", "integer": "integer"}
_OPSET = 21
_LARGEST = 2**31  # bytes of one file


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    style: str = "qdq",
    *,
    opset: int = _OPSET,
    dynamic_batch: bool = True,
) -> None:
    """Write the model as an ONNX file that computes what was trained

    - ``style="qdq"``: QuantizeLinear and DequantizeLinear around float operators; weights are stored as codes. What
      TensorRT, OpenVINO, QNN and ONNX Runtime consume.
    - ``style="integer"``: MatMulInteger and ConvInteger, in the order of operations of ``convert(model, "integer")``:
      for equal input codes a layer's output has the same bits.

    ``example_inputs`` is one batch, as ``prepare`` takes it. ``dynamic_batch``: the first axis of every input that is
    as long as that of the first may have any length in the file; False fixes it to the example's. ``opset`` is at least
    21; from 25 on, codes of 2 bits are stored as int2. ``lowbit.verify`` runs the file and compares.
    """
    check_choice("style", style, tuple(STYLES))
    check_integer("opset", opset, _OPSET, 25)
    ir = require("onnx_ir", "onnx")
    require("onnxscript", "onnx")
    converted = _converted(model, style)
    args, kwargs = _arguments(example_inputs)
    if dynamic_batch:
        args, kwargs = _at_least_two((args, kwargs))
    _run(converted, args, kwargs)
    kinds = _open(converted)
    from lowbit.export import passes

    with _quiet():
        program = _export(converted, args, kwargs, opset, dynamic_batch)
        passes.finish(program.model, kinds, opset)
    if dynamic_batch:
        passes.name_batch(program.model)
    program.model.metadata_props.update({STYLE: style, VERSION: __version__})
    _write(ir.to_proto(program.model), Path(path))


def _converted(model: nn.Module, style: str) -> nn.Module:
    """A copy that this call may change."""
    conversion = conversion_of(model)
    if conversion is None:
        converted = convert(model, STYLES[style])
    elif conversion.blueprint.arithmetic != STYLES[style]:
        raise ValueError(
            f"style is {style!r}, but the model is converted to {conversion.blueprint.arithmetic} arithmetic; "
            f"convert the prepared model with arithmetic={STYLES[style]!r}"
        )
    else:
        converted = copied(model)
    for name, tensor in (*converted.named_parameters(), *converted.named_buffers()):
        if tensor.dtype == torch.float64:
            raise TypeError(f"{name} is float64, but ONNX quantizes float32; export model.float()")
    return converted.cpu().eval()


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As ``prepare`` passes them."""
    if any(map(_is_packed, tree_leaves(batch, is_leaf=_is_packed))):
        raise TypeError(
            "example_inputs holds a PackedSequence, which ONNX has no type for; export the model with padded sequences"
        )
    batch = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, batch)
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return tuple(batch), {}
    return (batch,), {}


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _batch_of(inputs: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise ValueError("example_inputs holds no tensor with axes; pass one batch, or dynamic_batch=False")
    return tensors[0].shape[0]


def _at_least_two(inputs: Any) -> Any:
    """A batch of one twice: the exporter would take the one for a constant."""
    if _batch_of(inputs) > 1:
        return inputs
    if _batch_of(inputs) == 0:
        raise ValueError("example_inputs is an empty batch; pass at least one sample")

    def twice(leaf: Any) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == 1
        return torch.cat([leaf, leaf]) if has_batch else leaf

    return tree_map(twice, inputs)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Once before the export: what a model can't do anyway is its own error, and none of the exporter's."""
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with torch.no_grad():
        model(*args, **kwargs)


def _open(model: nn.Module) -> dict[str, CodeKind]:
    """The codes of every weight as plain integers, for the exporter to see; by name, of which kind they are"""
    kinds = {}
    for path, module in model.named_modules():
        if isinstance(module, CodedWeight):
            module.open()
            # Odd numbers from -(2^b - 1) to 2^b - 1 take a bit more.
            form = module.form
            kinds[f"{path}.codes".removeprefix(".")] = CodeKind(form.bits + form.odd, form.signed or form.odd)
    return kinds


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], opset: int, dynamic_batch: bool) -> Any:
    from lowbit.export.translation import TABLE

    shapes: Any = None
    if dynamic_batch:
        batch = _batch_of((args, kwargs))

        def axes(leaf: Any) -> Any:
            has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
            return {0: torch.export.Dim.AUTO} if has_batch else None

        shapes = tree_map(axes, args) or tree_map(axes, kwargs)
    with torch.no_grad():
        try:
            program = torch.export.export(_without_gradients(model), args, kwargs, dynamic_shapes=shapes, strict=False)
            if dynamic_batch:
                _check_batch(program)
            exported = torch.onnx.export(
                program, custom_translation_table=TABLE, opset_version=opset, optimize=False, verbose=False
            )
        except _BatchError as error:
            raise RuntimeError(f"{error}; export it with dynamic_batch=False") from None
        except Exception as error:  # torch's own, of which it has many
            raise RuntimeError(f"torch {torch.__version__} can't export this model: {_reason(error)}") from error
    assert exported is not None
    return exported


class _Gradless(TorchFunctionMode):
    """Keeps the changes of the gradient mode from the exporter: there are no gradients, and it takes long over each."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return None if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))  # noqa: SLF001


def _without_gradients(model: nn.Module) -> nn.Module:
    forward = model.forward

    @functools.wraps(forward)
    def gradless(*args: Any, **kwargs: Any) -> Any:
        with _Gradless():
            return forward(*args, **kwargs)

    gradless.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = gradless
    return model


class _BatchError(Exception):
    pass


def _check_batch(program: Any) -> None:
    """Whatever a forward asks of the length of a batch, the exporter answers once, for all."""
    wanted = set(program.graph_signature.user_inputs)
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]
    batch = next(value for value in inputs if isinstance(value, Tensor) and value.dim() > 0).shape[0]
    bounds = None if isinstance(batch, int) else program.range_constraints.get(batch.node.expr)
    if bounds is None:
        raise _BatchError(f"the model runs only with a batch of {int(batch)}, which its forward makes a constant")
    # The exporter takes no batch for one of 1, or of none.
    where = [f"below {bounds.lower}"] if bounds.lower > 2 else []
    where += [f"above {bounds.upper}"] if bounds.upper < 2**62 else []
    if where:
        raise _BatchError(f"the model does otherwise with batches {' and '.join(where)}")


def _reason(error: BaseException) -> str:
    """The first line of what went wrong first, and the line of the model where it did"""
    lines = _model_lines(error)
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().partition("\n")[0]
    return f"{text} (in {lines[-1]!r})" if lines else text


def _model_lines(error: BaseException) -> list[str]:
    """The lines of the user's code on the way to an error; torch tells the last line of all, which is ours"""
    ours = [contextlib.__file__, *(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parent))]
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.line for frame in frames if frame.line and not frame.filename.startswith((*ours, "<"))]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the exporter says while it works is of its own affairs; what goes wrong, it raises."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write(proto: Any, path: Path) -> None:
    """Checked, and whole or not at all."""
    onnx = require("onnx", "onnx")
    if proto.ByteSize() >= _LARGEST:
        raise ValueError(f"{path}: the model takes {proto.ByteSize():,} bytes, and one ONNX file holds less than 2 GiB")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        opset = proto.opset_import[0].version
        hint = "; a later opset, or model.float(), may do" if "unsupported type" in str(error) else ""
        raise RuntimeError(f"ONNX has no model like this one in opset {opset}: {error}{hint}") from error
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with draft.open("wb") as file:
            file.write(proto.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
