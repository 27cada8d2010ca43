"""Linear layers on integer products: codes in, sums in int32, values out; and the gradients of the same in float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.functional.apply import apply, apply_plain
from lowbit.functional.check import check_params
from lowbit.functional.statistics import params_from_data
from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.kernels import plan
from lowbit.kernels.float_products import product, transpose, wants_rows
from lowbit.kernels.linear_codes import LinearCodes
from lowbit.kernels.products import (
    code_rows,
    code_weights,
    column_sums,
    has_linear_step,
    linear_step,
    scaled_product,
    select,
    selected_product,
)
from lowbit.ste import SteKind

if TYPE_CHECKING:
    from lowbit.kernels.triton_linear import LinearStep

    # A step; x; the codes of w, where it has some; and a scale and zero point that are kept.
    _Step = tuple[LinearStep, Tensor, tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor | None] | None]

# Of rows up to this long, every sum of products of codes fits 32 bits.
LONGEST_ROW = 2**16


class Coded(NamedTuple):
    """A quantized tensor as int8 codes: its values are (q - z) * s, with one z for all, or one for each s

    ``carrier`` has the tensor's shape and dtype, and no value is ever read from it: it is where a gradient of the
    values goes, which then follows the quantizer's rule. It has no memory, or is a parameter, which lives anyway.
    """

    carrier: Tensor
    q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    per: Granularity

    def divide(self, factor: Tensor) -> Coded:
        """The codes of the values divided by a factor for each index of the first axis, which takes no gradient"""
        factor, ones = factor.detach(), [1] * (self.q.dim() - 1)
        scale, per = (self.scale, self.per) if self.scale.dim() else (self.scale.expand(len(factor)), PerChannel(0))
        carrier = apply(_Divide, self.carrier, factor.view(-1, *ones))
        return self._replace(carrier=carrier, scale=scale / factor.view(-1, *ones[: scale.dim() - 1]), per=per)

    def move(self, source: int, target: int) -> Coded:
        """The same with one axis, along which scales do not change, in another place"""
        return self._replace(carrier=self.carrier.movedim(source, target), q=self.q.movedim(source, target))

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """y = (q - z) * s, in the tensor's dtype or in another"""
        zero_point = None if self.zero_point is None else self.zero_point.expand(self.scale.shape)
        codes, dtype = (self.q, self.scale, zero_point), dtype or self.carrier.dtype
        y: Tensor
        if torch.is_grad_enabled():
            y = apply(_Decode, self.carrier, *codes, self.per, dtype)
        else:
            y = plan.run("dequantize", self.q, *codes, per=self.per, dtype=dtype)
        return y

    def columns(self, dtype: torch.dtype) -> Tensor:
        """The values of all rows as columns of a matrix, without a derivative; they share a scale, or have one"""
        q, scale, zero_point = transpose(self.q.reshape(-1, self.q.shape[-1])), self.scale, self.zero_point
        zero_point = None if zero_point is None else zero_point.expand(scale.shape)
        per: Granularity = PerTensor()
        if scale.dim():
            scale, zero_point = scale.reshape(-1), None if zero_point is None else zero_point.reshape(-1)
            per = PerChannel(1)
        y: Tensor = plan.run("dequantize", q, q, scale, zero_point, per=per, dtype=dtype)
        return y


def _carrier(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)


def _as_carrier(x: Tensor) -> Tensor:
    """A carrier of x;  dx = g"""
    memory = _carrier(x)
    if not x.requires_grad:
        return memory
    carrier: Tensor = torch.ops.aten._unsafe_view.default(x, x.shape)  # noqa: SLF001
    carrier.data = memory  # x's own is not held
    return carrier


class _Code(torch.autograd.Function):
    """q = clamp(round(x / s) + z, quant_min, quant_max);  dx = the rule's, of what comes to the carrier"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: Grid, per: Granularity, ste: SteKind
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.clips = ste is not SteKind.IDENTITY and ctx.needs_input_grad[0]
        q, bits, marked = code_rows(x, scale, zero_point, grid=grid, per=per, ste=ste if ctx.clips else None)
        if ctx.clips:
            ctx.save_for_backward(bits)
        ctx.mark_non_differentiable(*(tensor for tensor in (q, marked) if tensor is not None))
        ctx.set_materialize_grads(False)  # none of the codes'
        return _carrier(x), q, marked

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        dx = select(grad_output, *ctx.saved_tensors) if ctx.clips and grad_output is not None else grad_output
        return dx, None, None, None, None, None


class _CodePerBatch(torch.autograd.Function):
    """The same with the scale of x's own range, which clips nothing: dx = g"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: Grid, per: Granularity, symmetric: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, scale, zero_point = plan.run("quantize_per_batch", x, x, grid=grid, per=per, symmetric=symmetric)
        found = [tensor for tensor in (q, scale, zero_point) if tensor is not None]
        ctx.mark_non_differentiable(*found)
        ctx.set_materialize_grads(False)
        return _carrier(x), q, scale, zero_point

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        return grad_output, None, None, None


class _Decode(torch.autograd.Function):
    """y = (q - z) * s;  the carrier's gradient = g"""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *codes: Any) -> Tensor:
        q, scale, zero_point, per, dtype = codes
        ctx.dtype = carrier.dtype
        y: Tensor = plan.run("dequantize", q, q, scale, zero_point, per=per, dtype=dtype)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output.to(ctx.dtype), None, None, None, None, None


class _Divide(torch.autograd.Function):
    """The carrier's gradient = g / f"""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return _carrier(carrier)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output / ctx.saved_tensors[0].to(grad_output.dtype), None


class _Linear(torch.autograd.Function):
    """y = x @ w^T + b;  dx = g @ w, dw = g^T @ x, db = sum g, of the values of x and w"""

    @staticmethod
    def forward(ctx: Any, x_carrier: Tensor, w_carrier: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        ctx.dtype, q_x, x_scale, zero_point, x_per, q_w, w_scale, w_per = rest
        ctx.pers, ctx.bias_dtype = (x_per, w_per), None if bias is None else bias.dtype
        ctx.carriers = x_carrier, w_carrier  # not saved: a hook that copies what is saved would give them memory
        ctx.save_for_backward(q_x, x_scale, zero_point, q_w, w_scale)
        zero_point = None if zero_point is None else _by_row(zero_point)
        rows, scales = q_x.reshape(-1, q_x.shape[-1]), (_by_row(x_scale), w_scale)
        multiply = torch.ops.lowbit.scaled_product if torch.compiler.is_compiling() else scaled_product
        y = multiply(rows, q_w, *scales, zero_point, bias, dtype=ctx.dtype)
        # To autograd no view: those that a Function gives cannot be changed in place.
        return torch.ops.aten._unsafe_view.default(y, (*q_x.shape[:-1], q_w.shape[0]))  # noqa: SLF001

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q_x, x_scale, zero_point, q_w, w_scale = ctx.saved_tensors
        x_carrier, w_carrier = ctx.carriers
        x = Coded(x_carrier, q_x, x_scale, zero_point, ctx.pers[0])
        w = Coded(w_carrier, q_w, w_scale, None, ctx.pers[1])
        return *_gradients(ctx, grad_output, x, w), *[None] * 8


class _LinearByStep(torch.autograd.Function):
    """The same by a backend's LinearStep, of an x that it codes and a w that it codes too, unless codes are given"""

    @staticmethod
    def forward(ctx: Any, x_carrier: Tensor, w: Tensor, bias: Tensor | None, rest: _Step) -> Tensor:
        ctx.step, x, w_codes, kept = rest
        ctx.dtype, ctx.bias_dtype = ctx.step.dtype, None if bias is None else bias.dtype
        ctx.carriers = x_carrier, w
        y, codes = ctx.step.forward(x, w, bias, w_codes, kept, ctx.needs_input_grad[0])
        ctx.save_for_backward(*codes)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        codes, (x, w) = LinearCodes(*ctx.saved_tensors), ctx.carriers
        if torch.is_grad_enabled() or plan.is_traced(grad_output):
            dx, dw, db = _gradients(ctx, grad_output, *_coded(codes, x, w))
            return dx if dx is None or codes.bits is None else select(dx, codes.bits), dw, db, None
        wants_x, wants_w, wants_bias, _ = ctx.needs_input_grad
        g = (grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, w.shape[0])).contiguous()
        x_values, w_values, db = ctx.step.decode(g, codes, wants_w, wants_x, ctx.bias_dtype if wants_bias else None)
        dx = dw = None
        if w_values is not None:
            dx = g @ w_values if codes.bits is None else selected_product(g, w_values, codes.bits)
            dx = _shaped(dx, x)
            del w_values
        if x_values is not None:
            dw = _shaped(g.t() @ x_values, w)
        return dx, dw, db, None


class _OpaqueLinearPerBatch(torch.autograd.Function):
    """The same in code that is being compiled, where a LinearStep is two ops"""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, x_grid: Grid, w_grid: Grid, dtype: torch.dtype
    ) -> Tensor:
        grids = plan.encode_grid(x_grid), plan.encode_grid(w_grid)
        y, *codes = torch.ops.lowbit.linear_step(x, w, bias, *grids, dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*codes)
        ctx.carriers = _carrier(x), _carrier(w)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.carriers
        wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
        g, bias_dtype = grad_output.reshape(-1, w.shape[0]), ctx.bias_dtype if wants_bias else None
        found = iter(torch.ops.lowbit.linear_values(g, list(ctx.saved_tensors), wants_w, wants_x, bias_dtype))
        dw = _shaped(g.t() @ next(found), w) if wants_w else None
        dx = _shaped(g @ next(found), x) if wants_x else None
        return dx, dw, next(found) if wants_bias else None, None, None, None


def _coded(codes: LinearCodes, x: Tensor, w: Tensor) -> tuple[Coded, Coded]:
    """x and w by the codes of a LinearStep, with these as their carriers"""
    carrier = x if codes.bits is None else apply(_Select, x, codes.bits)
    coded_x = Coded(carrier, codes.q_x.view(x.shape), codes.x_scale.view(x.shape[:-1]), codes.zero_point, PerToken())
    per = PerChannel(0) if codes.w_scale.dim() == 1 else PerGroup(w.shape[1] // codes.w_scale.shape[1])
    return coded_x, Coded(w, codes.q_w, codes.w_scale, None, per)


def _shaped(gradient: Tensor, like: Tensor) -> Tensor:
    """In the shape and dtype of another: without a call of torch's where it has them"""
    gradient = gradient if like.dim() == 2 else gradient.view(like.shape)
    return gradient if gradient.dtype == like.dtype else gradient.to(like.dtype)


def _gradients(ctx: Any, grad_output: Tensor, x: Coded, w: Coded) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw and db, as far as they are asked for"""
    wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
    g = grad_output.reshape(-1, grad_output.shape[-1])
    dx = dw = db = None
    if wants_x:
        dx = _shaped(product(g, w.values(ctx.dtype)), x.carrier)
    if wants_w:
        dw = _shaped(_weight_gradient(g, x, ctx.dtype), w.carrier)
    if wants_bias:
        db = column_sums(g, ctx.bias_dtype)
    return dx, dw, db


def _weight_gradient(g: Tensor, x: Coded, dtype: torch.dtype) -> Tensor:
    """g^T @ x;  or (x^T @ g)^T, where rows are wanted: the codes of x^T are fewer bytes to move than g^T"""
    if dtype == torch.float32 and wants_rows(g):
        return transpose(product(x.columns(dtype), g))
    return product(g.t(), x.values(dtype).reshape(-1, x.q.shape[-1]))


class _Select(torch.autograd.Function):
    """A carrier of x;  dx = g where its bit is set"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return _carrier(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return select(grad_output, *ctx.saved_tensors), None


def _by_row(values: Tensor) -> Tensor:
    """One number, or one for each row."""
    return values.reshape(-1) if values.dim() else values


def _has_channels_last(x: Tensor, per: Granularity) -> bool:
    """Whether x are images whose channels lie last in memory, with scales that do not ask where they lie."""
    if x.dim() < 4 or x.is_contiguous() or per not in (PerTensor(), PerChannel(0)):
        return False
    return x.movedim(1, -1).is_contiguous()


def code(x: Tensor, scale: Tensor, zero_point: Tensor | None, *, grid: Grid, per: Granularity, ste: SteKind) -> Coded:
    """The codes of x, in int8: those of an unsigned grid of 8 bits, and their zero point, are 128 less

    There is one scale for all of x, or one for each of its rows. Codes know no NaN: the scale of a row that holds one
    is NaN, and one scale for all of x then becomes one for each row.
    """
    scale, zero_point = check_params(x, scale, zero_point, grid, per)
    if _has_channels_last(x, per):
        coded = code(x.movedim(1, -1), scale, zero_point, grid=grid, per=per, ste=ste)
        if coded.per == per:
            return coded.move(-1, 1)
    x = x.contiguous()
    if not grid.fits_int8:
        if zero_point is None:
            zero_point = torch.zeros((), dtype=torch.int32, device=x.device)
        zero_point, grid = zero_point.to(torch.int32) - 128, Grid(8)
    points = None if zero_point is None else zero_point.expand(scale.shape)
    carrier, q, marked = apply(_Code, x, scale, points, grid, per, ste)
    if marked is not None:
        scale, per = marked, PerToken() if per == PerTensor() else per
    return Coded(carrier, q, scale, zero_point, per)


def code_per_batch(x: Tensor, *, grid: Grid, per: Granularity, symmetric: bool) -> Coded:
    """The same with the scale of x's own range, for a grid whose codes fit int8"""
    if plan.is_traced(x) and not plan.is_opaque("quantize_per_batch", x):
        scale, zero_point = params_from_data(x, grid=grid, per=per, symmetric=symmetric)
        return code(x, scale, zero_point, grid=grid, per=per, ste=SteKind.IDENTITY)
    if isinstance(x, nn.Parameter) and x.is_contiguous() and not plan.is_traced(x):
        with torch.no_grad():
            q, scale, zero_point = plan.run("quantize_per_batch", x, x, grid=grid, per=per, symmetric=symmetric)
        return Coded(x, q, scale, zero_point, per)
    if _has_channels_last(x, per):
        return code_per_batch(x.movedim(1, -1), grid=grid, per=per, symmetric=symmetric).move(-1, 1)
    carrier, q, scale, zero_point = apply(_CodePerBatch, x.contiguous(), grid, per, symmetric)
    return Coded(carrier, q, scale, zero_point, per)


def code_parameters(parameters: Sequence[nn.Parameter], *, grid: Grid) -> list[Coded]:
    """code_per_batch of matrices of one dtype, symmetric, with a scale for each row: all of them in one call"""
    with torch.no_grad():
        results = code_weights(parameters, grid)
    return [Coded(p, q, scale, None, PerChannel(0)) for p, (q, scale) in zip(parameters, results, strict=True)]


def integer_linear(x: Coded, w: Coded, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """y = float(sum_k (q_x - z_x) * q_w) * (s_x * s_w) + b

    The sum is exact; the rest is in float32 (float64 for float64), rounded to ``dtype`` (that of x) at the end. x has
    one scale or one for each row, w one or one for each output, or for each group of its row, and no zero point. Groups
    have a sum each, s_x stands outside of theirs; and of short ones values are multiplied, which is faster. dx, dw and
    db are those of F.linear in this dtype at the values of x and w, which are made of the codes again when the backward
    needs them: only codes are kept.
    """
    if x.q.shape[-1] > LONGEST_ROW:
        raise ValueError(f"rows of {x.q.shape[-1]} codes may have sums beyond 32 bits; the most is {LONGEST_ROW}")
    codes = x.q, x.scale, x.zero_point, x.per, w.q, w.scale, w.per
    y: Tensor = apply(_Linear, x.carrier, w.carrier, bias, dtype or x.carrier.dtype, *codes)
    return y


def linear_per_batch(
    x: Tensor,
    w: nn.Parameter | Coded,
    bias: Tensor | None = None,
    *,
    x_grid: Grid,
    w_grid: Grid,
    dtype: torch.dtype,
    group: int | None = None,
) -> Tensor:
    """integer_linear with a symmetric scale for each row of x, of its own range; and of w, if that is not coded yet

    On a GPU with fewer launches. The tensors are plain, unless they are compiled. w may have scales for each ``group``
    of its rows.
    """
    y: Tensor
    weight = w.carrier if isinstance(w, Coded) else w
    if torch.compiler.is_compiling():
        own = not isinstance(w, Coded) and group is None
        if own and has_linear_step(x.device.type, x.device.index, *weight.shape[::-1]):
            y = apply(_OpaqueLinearPerBatch, x, weight, bias, x_grid, w_grid, dtype)
            return y
    else:
        step = linear_step(x, weight, x_grid, None if isinstance(w, Coded) else w_grid, dtype, group=group)
        if step is not None:
            return _apply_step(step, x, w, bias)
    w_per = PerChannel(0) if group is None else PerGroup(group)
    if not isinstance(w, Coded):
        w = code_per_batch(w, grid=w_grid, per=w_per, symmetric=True)
    return integer_linear(code_per_batch(x, grid=x_grid, per=PerToken(), symmetric=True), w, bias, dtype=dtype)


def linear_by_kept_scale(
    x: Tensor,
    kept: tuple[Tensor, Tensor | None],
    w: nn.Parameter | Coded,
    bias: Tensor | None = None,
    *,
    x_grid: Grid,
    w_grid: Grid,
    ste: SteKind,
    dtype: torch.dtype,
) -> Tensor:
    """The same with one scale and zero point (None for 0) for all of x, which may change before the backward"""
    weight, grid = (w.carrier, None) if isinstance(w, Coded) else (w, w_grid)
    step = None if torch.compiler.is_compiling() else linear_step(x, weight, x_grid, grid, dtype, ste=ste)
    if step is not None:
        return _apply_step(step, x, w, bias, kept)
    if not isinstance(w, Coded):
        w = code_per_batch(w, grid=w_grid, per=PerChannel(0), symmetric=True)
    scale, zero_point = kept[0].clone(), None if kept[1] is None else kept[1].clone()
    coded = code(x, scale, zero_point, grid=x_grid, per=PerTensor(), ste=ste)
    return integer_linear(coded, w, bias, dtype=dtype)


def _apply_step(
    step: LinearStep,
    x: Tensor,
    w: nn.Parameter | Coded,
    bias: Tensor | None,
    kept: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """y by the step, with the scale and zero point of x, if one is kept"""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    weight, codes = (w.carrier, (w.q, w.scale)) if isinstance(w, Coded) else (w, None)
    y: Tensor = apply_plain(_LinearByStep, _as_carrier(x), weight, bias, (step, x, codes, kept))
    return y
