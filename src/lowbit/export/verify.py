"""verify: whether an ONNX file computes what the model computes, and where the two part."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from lowbit.blueprint import conversion_of
from lowbit.conversion import convert
from lowbit.export import comparison, runtime
from lowbit.export.onnx import STYLES
from lowbit.export.probe import probe
from lowbit.export.recording import recording
from lowbit.export.runtime import Arrays, File
from lowbit.export.verification import Verification
from lowbit.flow import call, in_eval_mode

_BATCH = 4


@torch.no_grad()
def verify(model: nn.Module, path: str | os.PathLike[str], inputs: Any = None) -> Verification:
    """Run the file in ONNX Runtime and the model in torch, and compare their codes and outputs

    ``model`` is the prepared model that was exported, or the converted one. ``inputs`` is one batch, as ``prepare``
    takes it; None generates one from the shapes in the file: 4 samples of normal floats, of the integers 0 and 1 (masks
    are 1 throughout), of True and False in turn.

    The model runs twice: freely, from the inputs as the file does; then with the file's codes in the place of its own,
    which shows for each quantizer and layer what differs though all before it is equal. See ``Verification`` for what
    is reported, and when it is ``ok``.

    The file runs with the optimisations of the runtime off, and once more with them on, since those fuse operators
    and change results; what they changed is in the report, and so is whether products of 8-bit integers are exact on
    this processor.
    """
    file = File(Path(path))
    converted = _converted(model, file)
    batch = _generate(file, converted) if inputs is None else _on_cpu(inputs)
    feeds = _feeds(file, batch)
    with recording(converted) as free:
        free_outputs = _run(converted, batch, file, generated=inputs is None)
    layer_values = comparison.layer_values(file, converted)
    codes = [value for values in file.codes.values() for value in values]
    params = [name for value in codes for name in file.params(value) or ()]
    arrays = file.run(feeds, [*codes, *params, *layer_values.values()])
    pairs, missing = comparison.align(free, file, arrays)
    with recording(converted, comparison.given(free, pairs, file, arrays)) as alone:
        alone_outputs = _run(converted, batch, file, generated=inputs is None)
    codes_free, codes_alone = (comparison.compare_run(run, pairs, arrays) for run in (free, alone))
    tensors = comparison.tensors(free, codes_free, codes_alone, pairs, file)
    layers, skipped = comparison.layers(alone, layer_values, file, arrays)
    terms = {value: alone.terms.get(path, 0.0) for path, value in layer_values.items()}
    outputs, unmatched = comparison.outputs(free_outputs, alone_outputs, file, arrays, terms)
    return Verification(
        path=str(file.path),
        style=file.style,
        runtime=runtime.version(),
        generated=inputs is None,
        inputs={name: tuple(array.shape) for name, array in feeds.items()},
        tensors=tensors,
        layers=layers,
        outputs=outputs,
        missing=(*missing, *unmatched),
        skipped=skipped,
        first=comparison.first(alone, codes_alone, tensors, layers, outputs),
        optimised=comparison.optimised(file, feeds, arrays),
        probe=probe(),
    )


def _converted(model: nn.Module, file: File) -> nn.Module:
    """A copy, in the file's arithmetic."""
    arithmetic, conversion = STYLES[file.style], conversion_of(model)
    if conversion is not None and conversion.blueprint.arithmetic != arithmetic:
        raise ValueError(
            f"{file.path} has style {file.style!r}, but the model is converted to {conversion.blueprint.arithmetic} "
            f"arithmetic; pass the prepared model, or convert it with arithmetic={arithmetic!r}"
        )
    return convert(model, arithmetic).cpu().eval()


def _generate(file: File, model: nn.Module) -> Any:
    """A batch of what the file takes, by name where the model's forward has these names"""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for name, dtype, axes in file.inputs:
        shape = [_BATCH if isinstance(axis, str) else axis for axis in axes]
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator).to(kind)
        elif kind == torch.bool:
            # Some mask where it is True, some where it is False; and a row that is masked throughout has no result.
            places = torch.arange(shape[-1]) if shape else torch.zeros(())
            batch[name] = places.remainder(2).eq(0).expand(shape).clone()
        elif "mask" in name:
            batch[name] = torch.ones(shape, dtype=kind)
        else:
            batch[name] = torch.randint(0, 2, shape, generator=generator).to(kind)
    names = inspect.signature(model.forward).parameters
    return batch if all(name in names for name in batch) else tuple(batch.values())


def _on_cpu(batch: Any) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)


def _feeds(file: File, batch: Any) -> Arrays:
    """The tensors of a batch by the names that they have in the file, checked"""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    names = [wanted.name for wanted in file.inputs]
    by_name = isinstance(batch, Mapping) and all(isinstance(batch.get(name), torch.Tensor) for name in names)
    if by_name and len(tensors) == len(names):
        tensors = [batch[name] for name in names]
    if len(tensors) != len(names):
        wanted_all = ", ".join(map(str, file.inputs)) or "nothing"
        raise ValueError(
            f"inputs holds {len(tensors)} tensors, but {file.path} takes {len(names)}: {wanted_all}; "
            "pass one batch as export_onnx took it"
        )
    lengths: dict[str, int] = {}
    for tensor, wanted in zip(tensors, file.inputs, strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if wanted.dtype == "bfloat16":
            raise ValueError(
                f"{file.path} takes {wanted}, which ONNX Runtime does not run on processors; verify what export_onnx "
                "writes of model.float()"
            )
        if dtype != wanted.dtype:
            raise TypeError(f"inputs: {wanted.name} is {dtype}, but {file.path} takes {wanted}; convert it")
        # An axis with a name has one length in all inputs.
        sizes = [
            lengths.setdefault(axis, size) if isinstance(axis, str) else axis
            for axis, size in zip(wanted.shape, tensor.shape, strict=False)
        ]
        if len(wanted.shape) != tensor.dim() or sizes != list(tensor.shape):
            raise ValueError(
                f"inputs: {wanted.name} has shape {tuple(tensor.shape)}, but {file.path} takes {wanted}; "
                "pass a batch of that shape, or export the model again with this one as example_inputs"
            )
    return {name: tensor.numpy().copy() for name, tensor in zip(names, tensors, strict=True)}


def _run(model: nn.Module, batch: Any, file: File, *, generated: bool) -> list[Any]:
    """The outputs as arrays; the batch stays as it is, whatever the model does to it in place"""
    copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
    try:
        with in_eval_mode(model):
            outputs = call(model, copied)
    except Exception as error:
        if not generated:
            raise
        takes = ", ".join(map(str, file.inputs))
        raise RuntimeError(
            f"the model does not run on inputs generated from {file.path}, {takes}: {error}; pass inputs, one batch"
        ) from error
    # NumPy has no bfloat16; and nor has the runtime, which says so.
    return [
        (leaf.float() if leaf.dtype == torch.bfloat16 else leaf.clone()).numpy()
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor)
    ]
