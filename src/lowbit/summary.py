"""summary: what of a model is quantized, how, what it weighs, and what was left in float and why."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor, nn

from lowbit.blueprint import conversion_of
from lowbit.fake_quantize import FakeQuantize
from lowbit.model import require_preparation
from lowbit.nn.code_layer import CodeLayer
from lowbit.nn.coded import CodedActivation, CodedWeight
from lowbit.nn.slots import Slotted, rows
from lowbit.preparation import UNSEEN, slotted_modules

_SCALE_BYTES = 4


@dataclass(frozen=True)
class Line:
    """One quantizer of one layer or op; or, with ``slot`` empty, something left in float and the reason.

    ``bytes`` are those of the codes and scales of a quantized weight, of the parameters of what is in float. ``note``
    is that reason; of a converted layer, how it multiplies.
    """

    path: str
    type: str
    slot: str
    quantizer: str
    parameters: int
    float_bytes: int
    bytes: int
    note: str = ""

    @property
    def text(self) -> str:
        """How it is quantized, and the note."""
        return ", ".join(filter(None, (self.quantizer, self.note)))


@dataclass(frozen=True)
class Summary:
    """The lines, and whether prepare saw the flow of data; ``str`` gives a table."""

    lines: tuple[Line, ...]
    traced: bool

    @property
    def parameters(self) -> int:
        """All parameters of the model, those of scales aside."""
        return sum(line.parameters for line in self.lines)

    @property
    def float_bytes(self) -> int:
        """The bytes of these parameters in float."""
        return sum(line.float_bytes for line in self.lines)

    @property
    def bytes(self) -> int:
        """The bytes of the same, with quantized weights as codes and scales."""
        return sum(line.bytes for line in self.lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "lines": [asdict(line) for line in self.lines],
            "traced": self.traced,
            "parameters": self.parameters,
            "float_bytes": self.float_bytes,
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        head = ("layer", "type", "of", "quantizer", "parameters", "bytes")
        rows = [
            (line.path or "(model)", line.type, line.slot or "float", line.text)
            + ((f"{line.parameters:,}", f"{line.bytes:,}") if line.parameters else ("", ""))
            for line in self.lines
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        text = [
            "  ".join(
                cell.rjust(width) if column > 3 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, tuple("-" * width for width in widths), *rows)
        ]
        ratio = self.bytes / self.float_bytes if self.float_bytes else 1.0
        sizes = f"{self.float_bytes:,} bytes in float, {self.bytes:,} quantized ({ratio:.3f})"
        text.append(f"{self.parameters:,} parameters, {sizes}")
        return "\n".join(text if self.traced else [*text, f"Note: {UNSEEN}."])


def summary(model: nn.Module) -> Summary:
    """What of a prepared or converted model is quantized and how, line by line, in the order of the model

    >>> import lowbit
    >>> print(summary(lowbit.prepare(nn.Linear(64, 8), lowbit.recipes.w4())))  # doctest: +ELLIPSIS
    layer    type    of      quantizer ...
    """
    conversion = conversion_of(model)
    if conversion is None:
        preparation = require_preparation(model)
        floats, traced, products = preparation.floats, preparation.traced, {}
    else:
        floats, traced = conversion.blueprint.floats, True
        products = {path.replace("quantized_ops.", ""): product for path, product in conversion.products.items()}
    counted: set[int] = set()
    seen: dict[int, str] = {}
    lines = []
    for path, holder in slotted_modules(model):
        for slot, role in holder.slots().items():
            quantizer = holder.quantizer(slot)
            if quantizer is not None:
                lines.append(_line(path, holder, slot, role, quantizer, seen, counted))
                if role == "weight" and path in products:
                    lines[-1] = replace(lines[-1], note=f"product: {products[path]}")
                elif role == "weight" and isinstance(holder, CodeLayer) and holder.is_on("input_quantizer"):
                    reason = holder.product_refusal()
                    least = holder.least_sums(holder.slot_weight(slot)[0].device.type)
                    how = f"float: {reason}" if reason else f"integer from {least:,} {holder.sums} on"
                    lines[-1] = replace(lines[-1], note=f"product in training: {how}")
    reasons = dict(floats)
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantize):
            continue
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in counted]
        counted.update(id(parameter) for parameter in own)
        if own or path in reasons:
            size = sum(parameter.numel() for parameter in own)
            weight = sum(parameter.nbytes for parameter in own)
            reason = reasons.pop(path, _reason(module))
            lines.append(Line(path, _type(module), "", "", size, weight, weight, reason))
    lines.extend(Line(path, "op", "", "", 0, 0, 0, reason) for path, reason in reasons.items())
    return Summary(tuple(lines), traced)


def _reason(module: nn.Module) -> str:
    """Why parameters of a module are in float, where the preparation did not say."""
    if not isinstance(module, Slotted):
        return "no quantizer of this type"
    roles = [role for slot, role in module.slots().items() if module.quantizer(slot) is not None]
    return "bias" if "weight" in roles else "its weight is not quantized"


def _line(
    path: str, holder: Slotted, slot: str, role: str, quantizer: Any, seen: dict[int, str], counted: set[int]
) -> Line:
    name = slot.removesuffix("_quantizer")
    where = f"{path}.{slot}".removeprefix(".")
    first = seen.setdefault(id(quantizer), where)
    text = _describe(quantizer) if first == where else f"shared with {first}"
    if isinstance(quantizer, CodedWeight):
        size = math.prod(quantizer.form.shape) if first == where else 0
        held = sum(buffer.nbytes for buffer in quantizer.buffers()) if first == where else 0
        return Line(path, _type(holder), name, text, size, size * quantizer.dtype.itemsize, held)
    parameter = holder.slot_parameter(slot) if role == "weight" else None
    if role != "weight" or (parameter is not None and id(parameter) in counted):
        return Line(path, _type(holder), name, text, 0, 0, 0)
    if parameter is not None:
        counted.add(id(parameter))
    weight, axis = holder.slot_weight(slot)
    return Line(path, _type(holder), name, text, weight.numel(), weight.nbytes, _code_bytes(weight, axis, quantizer))


def _code_bytes(weight: Tensor, axis: int, quantizer: Any) -> int:
    """Codes, packed, and a float32 scale for each group."""
    shape = rows(weight, axis).shape if quantizer.per.divides_rows else weight.shape
    scales = math.prod(quantizer.per.scale_shape(shape))
    return math.ceil(weight.numel() * quantizer.bits / 8) + scales * _SCALE_BYTES


def _describe(quantizer: Any) -> str:
    if isinstance(quantizer, CodedWeight | CodedActivation):
        return quantizer.extra_repr()
    if not isinstance(quantizer, FakeQuantize):
        return repr(quantizer)
    low, high = quantizer.quant_range()
    scheme = "symmetric" if quantizer.symmetric else "affine"
    off = [word for word, on in (("off", quantizer.enabled), ("frozen", quantizer.observing)) if not on]
    words = [f"{quantizer.bits} bits [{low}, {high}]", scheme, quantizer.per, quantizer.scale_mode, quantizer.ste.name]
    return ", ".join(map(str, words + off))


def _type(module: nn.Module) -> str:
    """The torch class's name; what has none is an op."""
    own = "op" if isinstance(module, Slotted) else type(module).__name__
    return getattr(getattr(type(module), "float_class", None), "__name__", own)
