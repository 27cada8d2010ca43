"""CodedWeight, CodedActivation: what stands in the slots of a converted model, where quantizers stood in training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from lowbit import graph
from lowbit.functional import fake_quantize, quantize
from lowbit.functional.statistics import params_from_data
from lowbit.granularity import Granularity
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.observers import keep_full_precision
from lowbit.packing import pack, unpack
from lowbit.record import Record
from lowbit.ste import SteKind
from lowbit.tracing import is_exporting


class Codes(NamedTuple):
    """y = (q - z) * s;  q holds integers, z is None for 0"""

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class WeightForm(Record):
    """How the codes of a weight lie: on which grid, with which scales, and in which shape the weight is wanted

    ``odd``: the codes are the odd numbers 2 c - (2^b - 1) of a field c of b bits, as +1 and -1 are for one bit.
    ``strides``: of the weight, where they are not those that the codes give it: a product of another order of memory
    may round otherwise.
    """

    bits: int
    signed: bool
    per: Granularity
    shape: tuple[int, ...]
    output_axis: int
    odd: bool = False
    affine: bool = False
    strides: tuple[int, ...] = ()

    @property
    def laid_out(self) -> tuple[int, ...]:
        """The shape of the codes: the weight's, or one row for each output where scales divide the rows."""
        if not self.per.divides_rows:
            return self.shape
        outputs = self.shape[self.output_axis]
        return outputs, math.prod(self.shape) // max(outputs, 1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the fields that are packed."""
        signed = self.signed and not self.odd
        if self.bits > 8:
            return torch.int16 if signed else torch.int32
        return torch.int8 if signed else torch.uint8

    @property
    def largest(self) -> int:
        """The largest magnitude that a code can have."""
        if self.odd or not self.signed:
            return 2**self.bits - 1
        return 2 ** (self.bits - 1)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"per": self.per.to_dict(), "shape": list(self.shape), "strides": list(self.strides)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        tuples = {key: tuple(data[key]) for key in ("shape", "strides") if key in data}
        return super().from_dict({**data, **tuples, "per": Granularity.from_dict(data["per"])})


class CodedWeight(nn.Module):
    """w = (q - z) * s, from codes of 1, 2, 4, 8 or 16 bits, packed

    Its value is that of the weight's quantizer, to the bit. ``dtype`` is the weight's; scales stay float32.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    enabled, observing = True, False
    is_open = False

    def __init__(self, form: WeightForm, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.per, self.bits, self.dtype = form, form.per, form.bits, dtype
        self.register_buffer("codes", pack(torch.zeros(form.laid_out, dtype=form.dtype), form.bits))
        scale_shape = form.per.scale_shape(form.laid_out)
        self.register_buffer("scale", torch.ones(scale_shape, dtype=torch.float64 if dtype == torch.float64 else None))
        self.register_buffer("zero_point", torch.zeros(scale_shape, dtype=torch.int32) if form.affine else None)

    @classmethod
    def of(cls, form: WeightForm, dtype: torch.dtype, codes: Codes) -> CodedWeight:
        """The module that holds these codes."""
        coded = cls(form, dtype).to(codes.q.device)
        q = (codes.q.to(torch.int32) + (2**form.bits - 1)) // 2 if form.odd else codes.q
        coded.codes = pack(q.to(form.dtype), form.bits)
        coded.scale = codes.scale.clone()
        if form.affine:
            assert codes.zero_point is not None
            coded.zero_point = codes.zero_point.to(torch.int32).clone()
        return coded

    def integers(self) -> Tensor:
        """q, in the shape that the scales go with; of the smallest dtype that holds them"""
        form = self.form
        if self.is_open:
            return self.codes
        field = unpack(self.codes, form.bits, form.dtype, form.laid_out)
        if not form.odd:
            return field
        return (2 * field.to(torch.int32) - (2**form.bits - 1)).to(torch.int8 if form.bits < 8 else torch.int32)

    def open(self) -> None:
        """Hold the codes as ``integers`` gives them, for an exporter to see."""
        self.codes = self.integers()
        self.is_open = True

    def forward(self, x: Tensor | None = None) -> Tensor:
        """w, whatever the float weight was."""
        form = self.form
        q, scale, zero_point = self.integers(), self.scale, self.zero_point
        if is_exporting():
            blocks = form.per.blocks(form.laid_out)
            w = graph.dequantize(q, *blocks.spread(scale, zero_point), blocks.axis, blocks.size, self.dtype)
            return self.in_shape(w)
        w = self.in_shape(plan.run("dequantize", q, q, scale, zero_point, per=form.per, dtype=self.dtype))
        if not form.strides:
            return w
        return torch.empty_strided(w.shape, form.strides, dtype=w.dtype, device=w.device).copy_(w)

    def in_shape(self, w: Tensor) -> Tensor:
        """What was laid out in rows, in the weight's own shape."""
        form = self.form
        if not form.per.divides_rows:
            return w
        moved = [form.shape[form.output_axis], *(n for i, n in enumerate(form.shape) if i != form.output_axis)]
        return w.view(moved).movedim(0, form.output_axis)

    def extra_repr(self) -> str:
        return f"{self.bits} bits, {self.per}, {tuple(self.form.shape)}, {self.codes.nbytes + self.scale.nbytes} bytes"

    def _apply(self, fn: Any, recurse: bool = True) -> CodedWeight:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device)).dtype
        return super()._apply(keep_full_precision(fn), recurse)


@dataclass(frozen=True)
class ActivationForm(Record):
    """How an activation is quantized: on which grid, with which scales; ``statistic`` is None where they are kept"""

    grid: Grid
    per: Granularity
    symmetric: bool
    statistic: str | None = None
    scale_shape: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        records = {"grid": self.grid.to_dict(), "per": self.per.to_dict(), "scale_shape": list(self.scale_shape)}
        return super().to_dict() | records

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        grid, per = Grid.from_dict(data["grid"]), Granularity.from_dict(data["per"])
        return super().from_dict({**data, "grid": grid, "per": per, "scale_shape": tuple(data["scale_shape"])})


class CodedActivation(nn.Module):
    """y = (q - z) * s,  q = clamp(round(x / s) + z, quant_min, quant_max), with a scale that is kept, or the data's own

    ``name`` is that of its place in the model; an exported file knows it by that.
    """

    scale: Tensor | None
    zero_point: Tensor | None
    enabled, observing = True, False
    is_ready = True

    def __init__(self, form: ActivationForm, name: str = "") -> None:
        super().__init__()
        self.form, self.grid, self.per, self.name = form, form.grid, form.per, name
        kept = form.statistic is None
        affine = kept and not form.symmetric
        self.register_buffer("scale", torch.ones(form.scale_shape) if kept else None)
        self.register_buffer("zero_point", torch.zeros(form.scale_shape, dtype=torch.int32) if affine else None)

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return self.grid.bits

    @torch.no_grad()
    def params(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scale and zero point (None for 0) that quantize x."""
        form = self.form
        if form.statistic is not None:
            return params_from_data(x, grid=form.grid, per=form.per, symmetric=form.symmetric, statistic=form.statistic)
        assert self.scale is not None
        shape = form.per.scale_shape(x.shape)
        return self.scale.expand(shape), None if self.zero_point is None else self.zero_point.expand(shape)

    def forward(self, x: Tensor) -> Tensor:
        """The values that the codes stand for."""
        scale, zero_point = self.params(x)
        if is_exporting():
            return graph.fake_quantize(x, *self._exported(x, scale, zero_point))
        return fake_quantize(x, scale, zero_point, grid=self.grid, per=self.per, ste=SteKind.IDENTITY)

    def codes(self, x: Tensor, source: Tensor | None = None) -> Codes:
        """The codes, as int8 or uint8 (more than 8 bits: int32), and what they stand for; with the scale of ``source``

        Without one it is x's own.
        """
        scale, zero_point = self.params(x if source is None else source)
        if is_exporting():
            return Codes(graph.quantize(x, *self._exported(x, scale, zero_point)), scale, zero_point)
        dtype = code_dtype(self.grid)
        return Codes(quantize(x, scale, zero_point, grid=self.grid, per=self.per, dtype=dtype), scale, zero_point)

    def _exported(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> tuple[Any, ...]:
        blocks = self.per.blocks(x.shape)
        own_range = self.form.statistic == "abs_max" and self.form.symmetric and self.grid.signed
        ends = self.grid.quant_min, self.grid.quant_max
        return *blocks.spread(scale, zero_point), *ends, blocks.axis, blocks.size, not own_range, self.name

    def extra_repr(self) -> str:
        scales = "kept" if self.form.statistic is None else f"{self.form.statistic} of the data"
        scheme = "symmetric" if self.form.symmetric else "affine"
        return f"{self.bits} bits [{self.grid.quant_min}, {self.grid.quant_max}], {scheme}, {self.per}, {scales}"

    def _apply(self, fn: Any, recurse: bool = True) -> CodedActivation:
        return super()._apply(keep_full_precision(fn), recurse)


class Waiting(nn.Module):
    """No y: the quantizer of this place had seen no data when the model was converted, and so has no scale

    The model runs as long as nothing comes here, as it did before.
    """

    enabled, observing = True, False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(
            f"{self.name} had seen no data when the model was converted; calibrate the prepared model with batches "
            "that come there, and convert it again"
        )


def code_dtype(grid: Grid) -> torch.dtype:
    """The dtype of an activation's codes."""
    if grid.bits > 8:
        return torch.int32
    return torch.int8 if grid.signed else torch.uint8
