"""Comparison: the codes, layers and outputs of a run of a file against those of a run of its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lowbit.export.recording import Call, Given, Recording
from lowbit.export.runtime import Arrays, File
from lowbit.export.verification import Codes, Layer, Optimised, Output, Tensor, Values, breaking
from lowbit.nn.layer import QuantLayer

# Of each call of a quantizer, by name and number, the value of the file that holds its codes.
Pairs = dict[tuple[str, int], str]
ByCall = dict[tuple[str, int], Codes]

# Two values of a row that differ by so many eps of all are as large: another order of sums may swap them.
_TIES = 8


def compare_codes(actual: Any, expected: Any) -> Codes:
    """How many codes differ, and by how many steps at most"""
    steps = np.abs(actual.astype(np.int64) - expected.astype(np.int64))
    return Codes(steps.size, int(np.count_nonzero(steps)), int(steps.max(initial=0)))


def compare_values(actual: Any, expected: Any, terms: float = 0.0) -> Values:
    """How two arrays of values differ; where only one has NaN, by infinity

    ``terms``: the values are sums of terms that may be as large as this, though they cancel.
    """
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        noise = np.where(same, 0.0, a - b)
    noise = np.abs(np.where(np.isnan(noise), np.inf, noise))
    finite = np.abs(b[np.isfinite(b)])
    largest, reach = float(noise.max(initial=0.0)), float(finite.max(initial=terms))
    relative = 0.0 if largest == 0 else largest / reach if reach else math.inf
    decibels = _decibels(float(np.square(finite).sum()), float(np.square(noise).sum()))
    rows = np.issubdtype(expected.dtype, np.floating) and b.ndim > 0 and b.size > 0
    agree = _agree(a, b, _TIES * float(np.finfo(expected.dtype).eps) * reach) if rows else same
    agreement = float(np.mean(agree)) if np.size(agree) else 1.0
    return Values(same.size, int(np.count_nonzero(~same)), largest, relative, decibels, agreement)


def _agree(a: Any, b: Any, tie: float) -> Any:
    """Of each row, whether b is largest where a is, or there lower by no more than this"""
    place, top = np.argmax(a, -1), np.max(b, -1)
    there = np.take_along_axis(b, place[..., None], -1)[..., 0]
    with np.errstate(invalid="ignore"):
        return (place == np.argmax(b, -1)) | (top - there <= tie)


def _decibels(signal: float, lost: float) -> float:
    if lost == 0:
        return math.inf
    return 10 * math.log10(signal / lost) if signal > 0 and math.isfinite(lost) else -math.inf


def align(run: Recording, file: File, arrays: Arrays) -> tuple[Pairs, list[str]]:
    """Which codes of the file are those of which call, and in words what only one of both has

    The calls of one name come in the same order. Where a file has fewer, it has merged equal computations: a call that
    takes and gives the same as an earlier one, with the same scale, shares the codes of that one. Codes that a file
    repeats along an axis are in ``arrays`` once afterwards.
    """
    pairs: Pairs = {}
    twins: dict[tuple[str, int], list[Call]] = {}
    calls = [event for event in run.events if isinstance(event, Call)]
    fewer = {name for name, own in run.calls.items() if len(file.codes.get(name, ())) < len(own)}
    for place, call in enumerate(calls):
        if call.name in fewer:
            twins[call.key] = [earlier for earlier in calls[:place] if call.is_like(earlier)]
    for name, own in run.calls.items():
        values = file.codes.get(name, [])
        dropped = _dropped(own, values, arrays, twins)
        kept = [call for call in own if call.number not in dropped]
        pairs.update(zip((call.key for call in kept), values, strict=False))
    for call in calls:
        found = [pairs[twin.key] for twin in twins.get(call.key, ()) if twin.key in pairs]
        if call.key not in pairs and found:
            pairs[call.key] = found[-1]
    for call in calls:
        if call.key in pairs:
            value = pairs[call.key]
            arrays[value] = _without_repeats(arrays[value], tuple(call.codes.q.shape))
    missing = [f"{name} is in the file, but not in the model" for name in file.codes if name not in run.calls]
    for name, own in run.calls.items():
        if text := _mismatch(name, own, pairs, file, arrays):
            missing.append(text)
            pairs = {key: value for key, value in pairs.items() if key[0] != name}
    return pairs, missing


def _dropped(
    calls: list[Call], values: list[str], arrays: Arrays, twins: Mapping[tuple[str, int], list[Call]]
) -> tuple[int, ...]:
    """The numbers of the calls that a file has merged into others: of all choices, that with the fewest differences"""
    surplus = len(calls) - len(values)
    # By how many are dropped so far: the codes that differ, and which are dropped.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for call in calls:
        after: dict[int, tuple[int, tuple[int, ...]]] = {}
        for count, (cost, dropped) in best.items():
            if call.number - count < len(values):
                kept = cost + _distance(call, arrays[values[call.number - count]]) if surplus > 0 else 0
                after[count] = min(after.get(count, (kept, dropped)), (kept, dropped))
            if count < surplus and twins[call.key]:
                choice = cost, (*dropped, call.number)
                after[count + 1] = min(after.get(count + 1, choice), choice)
        best = after
    return best[surplus][1] if surplus in best else ()


def _without_repeats(codes: Any, shape: tuple[int, ...]) -> Any:
    """One of each repeated slice: a model may repeat keys and values for all queries only while it is exported"""
    if codes.shape == shape or codes.ndim != len(shape) or 0 in (*codes.shape, *shape):
        return codes
    times = [many // few for many, few in zip(codes.shape, shape, strict=True)]
    if 0 in times:
        return codes
    once = again = codes[tuple(slice(None, None, count) for count in times)]
    for axis, count in enumerate(times):
        again = again.repeat(count, axis)
    return once if once.shape == shape and np.array_equal(again, codes) else codes


def _distance(call: Call, codes: Any) -> int:
    q = call.codes.q.numpy()
    return compare_codes(codes, q).differing if codes.shape == q.shape else max(q.size, 1)


def _mismatch(name: str, calls: list[Call], pairs: Pairs, file: File, arrays: Arrays) -> str:
    """Why the codes of a quantizer can't be compared; nothing where they can"""
    found = file.codes.get(name, [])
    if not found and not any(call.key in pairs for call in calls):
        return f"{name} is in the model, but not in the file"
    if not all(call.key in pairs for call in calls) or not {*found} <= {*pairs.values()}:
        return f"{name} quantizes {len(calls)} times in the model, {len(found)} times in the file"
    for call in calls:
        ours, theirs = tuple(call.codes.q.shape), arrays[pairs[call.key]].shape
        if ours != theirs:
            return f"{name} has codes of shape {ours} in the model, {theirs} in the file"
    return ""


def given(run: Recording, pairs: Pairs, file: File, arrays: Arrays) -> dict[tuple[str, int], Given]:
    """The file's codes for each call; of a scale that each run computes, the file's as well"""
    found = {}
    for calls in run.calls.values():
        for call in calls:
            if (value := pairs.get(call.key)) is None:
                continue
            params = file.params(value) if call.quantizer.form.statistic is not None else None
            tensors = [_tensor(arrays[name]) for name in (value, *(params or ()))]
            # A file repeats the scales of blocks of several rows for each of them; those stay the model's own.
            fits = params is not None and tensors[1].numel() == call.codes.scale.numel()
            found[call.key] = Given(*tensors) if fits else Given(tensors[0])
    return found


def _tensor(array: Any) -> torch.Tensor:
    """As int32 or float32: torch has little arithmetic for uint16"""
    return torch.from_numpy(array.astype(np.int32 if array.dtype.kind in "iu" else np.float32))


def compare_run(run: Recording, pairs: Pairs, arrays: Arrays) -> ByCall:
    """The codes of each call against the file's"""
    calls = [call for calls in run.calls.values() for call in calls if call.key in pairs]
    return {call.key: compare_codes(arrays[pairs[call.key]], call.codes.q.numpy()) for call in calls}


def tensors(run: Recording, free: ByCall, alone: ByCall, pairs: Pairs, file: File) -> tuple[Tensor, ...]:
    """One line for each quantizer, over all its calls"""
    lines = []
    for name, calls in run.calls.items():
        keys = [call.key for call in calls if call.key in pairs]
        if keys:
            exact = file.style == "integer" and all(file.is_exact(pairs[key]) for key in keys)
            both, one_by_one = (sum((by_call[key] for key in keys), Codes()) for by_call in (free, alone))
            kind = str(calls[0].x.dtype).removeprefix("torch."), calls[0].quantizer.bits
            lines.append(Tensor(name, *kind, len(calls), both, one_by_one, exact))
    return tuple(lines)


def layer_values(file: File, model: nn.Module) -> dict[str, str]:
    """By the path of each layer, the value of the file that holds its output"""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantLayer):
            scope = f"{path}.output_quantizer".removeprefix(".") if module.is_on("output_quantizer") else path
            if (value := file.layer_output(scope)) is not None:
                found[path] = value
    return found


def layers(
    run: Recording, values: Mapping[str, str], file: File, arrays: Arrays
) -> tuple[tuple[Layer, ...], dict[str, str]]:
    """One line for each layer that ran once, and of the others why there is none"""
    lines, skipped = [], {}
    for path, output in run.layers.items():
        ours = output.numpy()
        theirs = arrays[values[path]] if path in values else None
        if run.times[path] > 1:
            skipped[path] = f"which runs {run.times[path]} times"
        elif theirs is None:
            skipped[path] = "of which the file has no node"
        elif (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            both = f"{ours.dtype} {ours.shape}", f"{theirs.dtype} {theirs.shape}"
            skipped[path] = f"which is {both[0]}, while its last node in the file gives {both[1]}"
        else:
            exact = path in run.integer and file.is_exact(values[path])
            values_of = compare_values(theirs, ours, run.terms.get(path, 0.0))
            lines.append(Layer(path, ours.dtype.name, values_of, exact))
    return tuple(lines), skipped


def outputs(
    free: Sequence[Any], alone: Sequence[Any], file: File, arrays: Arrays, terms: Mapping[str, float]
) -> tuple[tuple[Output, ...], list[str]]:
    """One line for each output, and in words what only one of both has; ``terms`` of those that a layer gives"""
    missing = []
    if len(free) != len(file.outputs):
        missing.append(f"the model has {len(free)} outputs, the file {len(file.outputs)}")
    lines = []
    for name, ours, ours_alone in zip(file.outputs, free, alone, strict=False):
        theirs = arrays[name]
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            both = f"{ours.dtype} {ours.shape} in the model, {theirs.dtype} {theirs.shape} in the file"
            missing.append(f"output {name} is {both}")
            continue
        exact = file.style == "integer" and file.is_exact(name)
        freely, by_codes = (compare_values(theirs, each, terms.get(name, 0.0)) for each in (ours, ours_alone))
        lines.append(Output(name, ours.dtype.name, freely, by_codes, exact))
    return tuple(lines), missing


def first(
    run: Recording,
    alone: ByCall,
    tensors: Sequence[Tensor],
    layers: Sequence[Layer],
    outputs: Sequence[Output],
) -> str:
    """Where the two part: the first quantizer, layer or output that breaks the rule though all codes before are equal

    Else the first quantizer whose codes differ though all before are equal; else the first in the free run.
    """
    bad = {tensor.name for tensor in breaking(tensors)}
    bad_layers = {layer.path for layer in layers if not layer.ok}
    for event in run.events:
        if isinstance(event, str):
            if event in bad_layers:
                return event or "(model)"
        elif event.name in bad and alone[event.key].differing:
            return event.name
    found = [f"output {output.name}" for output in outputs if not output.ok_alone]
    found += [event.name for event in run.events if isinstance(event, Call) and _differs(alone, event)]
    found += [tensor.name for tensor in tensors if tensor.free.differing]
    found += [f"output {output.name}" for output in outputs if not output.ok]
    return found[0] if found else ""


def _differs(by_call: ByCall, call: Call) -> bool:
    return call.key in by_call and by_call[call.key].differing > 0


def optimised(file: File, feeds: Arrays, arrays: Arrays) -> Optimised:
    """The file with the runtime's optimisations on, against itself with them off"""
    try:
        found, operators = file.run_optimised(feeds)
    except Exception as error:  # whatever the runtime's optimiser stumbles over is what this reports
        return Optimised({}, {}, {}, error=str(error))
    before = file.operators()
    compared = {name: compare_values(found[name], arrays[name]) for name in file.outputs}
    return Optimised(compared, removed=dict(before - operators), added=dict(operators - before))
