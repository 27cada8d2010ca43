"""Verification: what ``verify`` found, as records, as a table and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

# Of float arithmetic in another order: the largest difference, as a share of the largest value; for float16 more.
_CLOSE, _CLOSE_HALF = 1e-4, 1e-2
# Of 8-bit codes behind such arithmetic: the share that may lie on the other side of a rounding boundary.
_FLIPS, _FLIPS_HALF = 1e-4, 1e-1
_ROWS = 40
_WIDTH = 120
_NAME = 56


@dataclass(frozen=True)
class Codes:
    """How many codes of how many differ, and by how many steps at most"""

    elements: int = 0
    differing: int = 0
    largest: int = 0

    @property
    def share(self) -> float:
        """differing / elements"""
        return self.differing / self.elements if self.elements else 0.0

    def __add__(self, other: Codes) -> Codes:
        differing = self.differing + other.differing
        return Codes(self.elements + other.elements, differing, max(self.largest, other.largest))


@dataclass(frozen=True)
class Values:
    """How two arrays of values differ

    - ``differing``: the values whose bits differ; every NaN is the same, and so are 0 and -0
    - ``largest``: max abs(a - b);  ``relative``: that, divided by max abs(b), or by the largest term of a layer's sums
      where that is larger: they may cancel
    - ``decibels``: 10 log10(sum b^2 / sum (a - b)^2), inf where nothing differs
    - ``agreement``: the share of rows, along the last axis, with the largest value, or one that only the order of a sum
      makes smaller, in the same place; of integers, the share of equal values
    """

    elements: int
    differing: int
    largest: float
    relative: float
    decibels: float
    agreement: float

    def __str__(self) -> str:
        if not self.differing:
            return "equal to the bit"
        agree = f"argmax agrees on {_percent(self.agreement)} of the rows"
        largest = f"by at most {self.largest:.2g} ({self.relative:.1g} of the largest value)"
        return f"{self.differing:,} of {self.elements:,} values differ, {largest}, {self.decibels:.1f} dB; {agree}"


@dataclass(frozen=True)
class Tensor:
    """The codes of one quantizer, in all its calls

    ``free``: both sides ran from the inputs. ``alone``: the model was given the file's codes of all quantizers before
    this one, so what differs arose since those. ``exact``: no arithmetic between those and this one rounds differently
    on the two sides, so that nothing may differ. ``dtype`` is that of the values that are quantized.
    """

    name: str
    dtype: str
    bits: int
    calls: int
    free: Codes
    alone: Codes
    exact: bool

    @property
    def flips(self) -> float:
        """The share of such codes that may be one step off: 1 of 10,000, of a grid finer than 8 bits as many more"""
        return min((_FLIPS_HALF if self.dtype == "float16" else _FLIPS) * 2 ** max(self.bits - 8, 0), 1.0)

    @property
    def ok(self) -> bool:
        """Whether no code differs by more than one step, and of an exact tensor none; how many may is for all to say"""
        return self.alone.largest <= (0 if self.exact else 1)


def breaking(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that break the rule for codes: those not ok; where too many of all differ, those above that share

    Tensors of equally fine grids are counted together.
    """
    together: dict[float, Codes] = {}
    for tensor in tensors:
        together[tensor.flips] = together.get(tensor.flips, Codes()) + tensor.alone
    # A single code of a few is a larger share than that, and no sign of anything.
    many = {flips for flips, codes in together.items() if codes.differing > max(1, int(codes.elements * flips))}
    return [
        tensor for tensor in tensors if not tensor.ok or (tensor.flips in many and tensor.alone.share > tensor.flips)
    ]


@dataclass(frozen=True)
class Layer:
    """The output of one layer, given the file's codes of its input; ``exact``: it is a product of integers

    A layer with a forward of its own may compute more than that, and is then not exact.
    """

    path: str
    dtype: str
    values: Values
    exact: bool

    @property
    def ok(self) -> bool:
        """Whether all bits are equal; of a float product, whether the values are close."""
        return self.values.differing == 0 or (not self.exact and self.values.relative <= _close(self.dtype))


@dataclass(frozen=True)
class Output:
    """An output of the model; ``free``, ``alone`` and ``exact`` as those of a Tensor"""

    name: str
    dtype: str
    free: Values
    alone: Values
    exact: bool

    @property
    def ok_alone(self) -> bool:
        """Given equal codes: whether all bits are equal; behind float arithmetic, whether the values are close"""
        close = not self.dtype.startswith("float") or self.alone.relative <= _close(self.dtype)
        return self.alone.differing == 0 or (not self.exact and close)

    @property
    def ok(self) -> bool:
        """``ok_alone``, and in the free run the same argmax on every row."""
        return self.ok_alone and self.free.agreement == 1


@dataclass(frozen=True)
class Optimised:
    """What ONNX Runtime's graph optimisations did: to the operators, and to the outputs of the file

    ``error`` says why no session could be built or run with them; there are no outputs then.
    """

    outputs: Mapping[str, Values]
    removed: Mapping[str, int]
    added: Mapping[str, int]
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"with its optimisations on, ONNX Runtime does not run the file: {self.error}"
        changed = {name: values for name, values in self.outputs.items() if values.differing}
        done = [f"{word} {_counts(ops)}" for word, ops in (("removed", self.removed), ("added", self.added)) if ops]
        ops = f" ({'; '.join(done)})" if done else " (no operator changed)"
        if not changed:
            return f"ONNX Runtime's optimisations leave the outputs equal to the bit{ops}"
        return f"ONNX Runtime's optimisations change {_outputs(changed)}{ops}"


@dataclass(frozen=True)
class Probe:
    """Whether the runtime's products of 8-bit integers are exact on this processor; ``wrong`` says which are not"""

    exact: bool
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.exact:
            return "ONNX Runtime's products of 8-bit integers are exact on this processor"
        saturates = "some processors saturate sums of uint8 x int8 at 16 bits"
        return f"ONNX Runtime's products of 8-bit integers are NOT exact on this processor ({saturates}): " + ", ".join(
            self.wrong
        )


@dataclass(frozen=True)
class Verification:
    """What the file computes, against what the model computes; ``str`` gives a table

    ``tensors`` are in the order of the first call, and so are ``layers``. ``skipped`` says of the layers whose outputs
    could not be compared why; their inputs and what follows were. ``missing``: what only one side has.

    ``ok`` is True where

    - neither side has a quantizer or an output that the other lacks;
    - given equal input codes, the output of every layer that is a product of integers has equal bits, and that of any
      other layer differs by at most 1e-4 of its largest value (float16: 1e-2), or of the largest product that it adds;
    - given equal codes before it, no code differs by more than one step, and of all codes together at most 1 of 10,000
      differs (a single one of fewer). Codes of b > 8 bits are counted apart, and 2^(b - 8) as many may; of float16,
      1 of 10. In a file of style "integer" no code of a tensor may, unless something between the quantizers is computed
      in float by more than single operations, such as a softmax;
    - given equal codes before them, the outputs are held to the same as layers;
    - in the free run, the largest value of every row of every output (last axis) is in the same place; outputs of
      integers are equal.

    What the optimisations of the runtime change, and whether its products are exact, is told but not part of it.
    """

    path: str
    style: str
    runtime: str
    generated: bool
    inputs: Mapping[str, tuple[int, ...]]
    tensors: tuple[Tensor, ...]
    layers: tuple[Layer, ...]
    outputs: tuple[Output, ...]
    missing: tuple[str, ...]
    skipped: Mapping[str, str]
    first: str
    optimised: Optimised
    probe: Probe

    @property
    def ok(self) -> bool:
        """Whether the file computes what the model computes; the rule is above."""
        return not self.missing and self._ok_alone() and all(output.ok for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: plain values; infinities, which JSON has no numbers for, as the strings "inf" and "-inf"."""
        return _plain(self)

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        yield from _wrap(self._verdict())
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.inputs.items()) or "none"
        whose = "generated inputs" if self.generated else "inputs"
        yield from _wrap(f"{self.path}, style {self.style}, ONNX Runtime {self.runtime}; {whose} {shapes}")
        yield from _wrap(str(self.probe))
        yield from _wrap(str(self.optimised))
        for text in self.missing:
            yield from _wrap(f"missing: {text}")
        for output in self.outputs:
            yield from _wrap(f"output {output.name}: {output.free}")
            if output.alone != output.free:
                yield from _wrap(f"output {output.name}, given equal codes: {output.alone}")
        if self.tensors:
            yield ""
            yield from self._tensor_table()
        if self.layers:
            yield ""
            yield from self._layer_table()
        for path, reason in self.skipped.items():
            yield from _wrap(f"not compared: the output of {path}, {reason}")

    def _verdict(self) -> str:
        if self.ok:
            return f"the file computes what the model computes: {self._codes()}; {self._given()}"
        if not self.missing and self._ok_alone():
            agree = "layer by layer the file computes what the model computes, but NOT as a whole"
            return f"{agree}: steps of codes add up, from {self.first} on; {self._codes()}; {self._given()}"
        where = f"they part at {self.first}" if self.first else "one has what the other lacks"
        return f"the file does NOT compute what the model computes: {where}; {self._codes()}; {self._given()}"

    def _ok_alone(self) -> bool:
        parts = all(layer.ok for layer in self.layers) and all(output.ok_alone for output in self.outputs)
        return parts and not breaking(self.tensors)

    def _codes(self) -> str:
        total = sum((tensor.alone for tensor in self.tensors), Codes())
        if not self.tensors:
            return "no quantized activations to compare"
        of = f"{total.elements:,} codes of {len(self.tensors)} quantized tensors"
        if not total.differing:
            return f"given equal codes before them, all {of} are equal"
        steps = "one step" if total.largest == 1 else f"up to {total.largest} steps"
        return f"given equal codes before them, {total.differing:,} of {of} differ, by {steps}"

    def _given(self) -> str:
        free = [output.free for output in self.outputs]
        if not free:
            return "no outputs to compare"
        if not any(values.differing for values in free):
            return "the outputs are equal to the bit"
        decibels, agreement = min(values.decibels for values in free), min(values.agreement for values in free)
        return f"outputs {decibels:.1f} dB, argmax agrees on {_percent(agreement)} of the rows"

    def _tensor_table(self) -> Iterator[str]:
        head = ("quantized tensor", "codes", "differ", "steps", "alone: differ", "steps", "")
        differ = [tensor for tensor in self.tensors if tensor.free.differing or tensor.alone.differing]
        bad = {tensor.name for tensor in breaking(self.tensors)}
        shown = self.tensors if len(self.tensors) <= _ROWS else tuple(differ)
        rows = []
        for tensor in shown:
            cells = [f"{tensor.free.elements:,}"]
            for codes in (tensor.free, tensor.alone):
                cells += (
                    [f"{codes.differing:,} ({_percent(codes.share)})", str(codes.largest)]
                    if codes.differing
                    else ["0", "0"]
                )
            rows.append((_short(tensor.name), *cells, "<-" if tensor.name in bad else ""))
        yield from _table(head, rows)
        if rest := len(self.tensors) - len(shown):
            equal = sum(tensor.free.elements for tensor in self.tensors if tensor not in differ)
            yield f"and {rest} quantized tensors, {equal:,} codes, without a difference"
        yield from _wrap("alone: given the file's codes of all quantizers before")

    def _layer_table(self) -> Iterator[str]:
        head = ("output of layer, given equal codes", "held to", "values", "differ", "of the largest", "")
        differ = [layer for layer in self.layers if layer.values.differing]
        shown = self.layers if len(self.layers) <= _ROWS else tuple(differ)
        yield from _table(head, [_layer_row(layer) for layer in shown])
        if rest := len(self.layers) - len(shown):
            yield f"and {rest} layers whose outputs are equal to the bit"


def _layer_row(layer: Layer) -> tuple[str, ...]:
    values, kind = layer.values, "the bit" if layer.exact else f"{_close(layer.dtype):.0e}"
    relative = f"{values.relative:.1e}" if values.differing else "0"
    counts = f"{values.elements:,}", f"{values.differing:,}"
    return _short(layer.path or "(model)"), kind, *counts, relative, "" if layer.ok else "<-"


def _close(dtype: str) -> float:
    return _CLOSE_HALF if dtype == "float16" else _CLOSE


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        cells = zip(row, widths, strict=True)
        text = [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells)]
        yield "  ".join(text).rstrip()


def _short(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    return name if len(name) <= _NAME else f"...{name[3 - _NAME :]}"


def _wrap(text: str) -> list[str]:
    """Lines of at most 120 columns, the later ones indented; words longer than that stay whole."""
    lines, line = [], ""
    for word in text.split(" "):
        if line.strip() and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _percent(share: float) -> str:
    """Rounded, but never to 0 or 100 what is not."""
    percent = 100 * share
    text = f"{percent:.3g}"
    if share and percent < 0.001:
        return "<0.001 %"
    return ">99.9 %" if share < 1 and text == "100" else f"{text} %"


def _counts(ops: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in ops.items())


def _outputs(changed: Mapping[str, Values]) -> str:
    return "; ".join(f"output {name}: {values}" for name, values in changed.items())


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        kept = {field.name: getattr(value, field.name) for field in fields(value)}
        said = {name: getattr(value, name) for name in ("ok", "share") if hasattr(value, name)}
        return _plain(said | kept)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
