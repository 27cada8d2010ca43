"""Products: sums of products of codes, exact, and then scaled in one order.

y = float(sum (q_x - z_x) * (q_w - z_w) + b_q) * (s_x * s_w) + b

The sum is exact, in int32; then one product of scales, one product and one sum, each rounded once, in float32 (float64
for float64 layers), and y is rounded to the layer's dtype. With scales for groups of a row, each group's sum is scaled
so, and the groups are added in halves: the first half and the second half, an odd one left over last, until one is
left. An average of n codes has s_x / n in the place of s_x * s_w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lowbit import graph
from lowbit.division import divide
from lowbit.granularity import Granularity, PerChannel, PerTensor, PerToken
from lowbit.kernels.precision import math_dtype
from lowbit.nn.coded import CodedActivation, CodedWeight, Codes


class Operands(NamedTuple):
    """What a product takes; ``bias`` is float, ``bias_codes`` int32 at the scale s_x * s_w

    ``source`` is the tensor whose scale quantizes x, where x is made of that tensor's values.
    """

    activation: CodedActivation
    weight: CodedWeight
    bias: Tensor | None = None
    bias_codes: Tensor | None = None
    source: Tensor | None = None

    def codes(self, x: Tensor) -> Codes:
        """The codes of x, and what they stand for."""
        return self.activation.codes(x, x if self.source is None else self.source)


def _scale(total: Tensor, scale: Tensor, operands: Operands, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """y = float(total + b_q) * scale + b,  with biases of this shape"""
    if operands.bias_codes is not None:
        total = total + operands.bias_codes.view(shape)
    y = total.to(scale.dtype) * scale
    if operands.bias is not None:
        y = y + operands.bias.to(scale.dtype).view(shape)
    return y.to(dtype)


def _multiply(x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """s_x * s_w, in the precision of a layer of this dtype"""
    wide = math_dtype(dtype)
    return x_scale.to(wide) * w_scale.to(wide)


def _along(values: Tensor, axis: int, dims: int) -> Tensor:
    """One value, or one for each index of an axis, ready to broadcast."""
    return values if values.dim() == 0 else values.view([-1 if i == axis % dims else 1 for i in range(dims)])


def linear(x: Tensor, operands: Operands) -> Tensor | None:
    """y = float(sum_k (q_x - z_x) * (q_w - z_w) + b_q) * (s_x * s_w) + b

    None where the scales of x change along the sum, as those of its first axis do where it is the only one.
    """
    weight, per = operands.weight, operands.activation.per
    if x.dim() == 1 and per == PerChannel(0):
        return None
    q, scale, zero_point = operands.codes(x)
    scale, zero_point = _by_row(scale, x, per), None if zero_point is None else _by_row(zero_point, x, per)
    codes = Codes(q, scale, zero_point)
    if weight.per.divides_rows:
        return _linear_by_groups(codes, operands, x.dtype)
    integers = weight.integers()
    matrix = integers if weight.form.output_axis % 2 else integers.t()
    total = graph.integer_matmul(codes.q, codes.zero_point, matrix, weight.zero_point)
    return _scale(total, _multiply(codes.scale, weight.scale, x.dtype), operands, (-1,), x.dtype)


def _by_row(values: Tensor, x: Tensor, per: Granularity) -> Tensor:
    """One value, or one for each row of x."""
    if isinstance(per, PerToken):
        return values.unsqueeze(-1)
    return _along(values, 0, x.dim()).expand(*x.shape[:-1], 1) if values.dim() else values


def _linear_by_groups(codes: Codes, operands: Operands, dtype: torch.dtype) -> Tensor:
    weight = operands.weight
    blocks = weight.per.blocks(weight.form.laid_out)
    inputs, groups = weight.form.laid_out[1], weight.form.laid_out[1] // blocks.size
    scale, _ = blocks.spread(weight.scale, None)  # (outputs, groups)
    rows = codes.q.reshape(-1, inputs).unflatten(1, (groups, blocks.size)).movedim(1, 0)
    zero_point = codes.zero_point
    if zero_point is not None and zero_point.dim():
        zero_point = zero_point.reshape(-1, 1)
    matrices = weight.integers().unflatten(1, (groups, blocks.size)).permute(1, 2, 0)
    total = graph.integer_matmul_by_groups(rows, zero_point, matrices)
    row_scale = codes.scale.reshape(-1, 1) if codes.scale.dim() else codes.scale
    scales = _multiply(row_scale, scale.t().unsqueeze(1), dtype)
    y = _add_in_halves(total.to(scales.dtype) * scales)
    y = y if operands.bias is None else y + operands.bias.to(y.dtype)
    return y.to(dtype).view(*codes.q.shape[:-1], y.shape[-1])


def _add_in_halves(parts: Tensor) -> Tensor:
    while (count := parts.shape[0]) > 1:
        half = count // 2
        sums = parts[:half] + parts[half : 2 * half]
        parts = torch.cat([sums, parts[2 * half :]]) if count % 2 else sums
    return parts[0]


def convolve(
    x: Tensor,
    operands: Operands,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    padding_mode: str = "zeros",
) -> Tensor | None:
    """y = float(sum (q_x - z_x) * q_w + b_q) * (s_x * s_w) + b, over the window of each output

    ``padding`` is as functional.pad takes it. A zero has the code z_x; the other modes repeat codes. None where the
    scales of x change along the sum: those of its first axis do where that is no batch.
    """
    weight = operands.weight
    is_single = x.dim() < len(weight.form.shape)
    if is_single and operands.activation.per != PerTensor():
        return None
    q, scale, zero_point = operands.codes(x)
    q = q.unsqueeze(0) if is_single else q
    if padding_mode != "zeros" and any(padding):
        q = functional.pad(q.float(), tuple(padding), mode=padding_mode).to(q.dtype)
        padding = [0] * len(padding)
    if weight.per.divides_rows:
        y = _convolve_by_groups(
            Codes(q, scale, zero_point), operands, (list(stride), list(padding), list(dilation)), groups, x.dtype
        )
        return y.squeeze(0) if is_single else y
    total = graph.integer_conv(q, zero_point, weight.integers(), list(stride), list(padding), list(dilation), groups)
    dims = total.dim()
    scales = _multiply(_along(scale, 0, dims), _along(weight.scale, 1, dims), x.dtype)
    y = _scale(total, scales, operands, (-1, *[1] * (dims - 2)), x.dtype)
    return y.squeeze(0) if is_single else y


def _convolve_by_groups(
    codes: Codes, operands: Operands, steps: tuple[list[int], ...], groups: int, dtype: torch.dtype
) -> Tensor:
    """Each group of a row's weights takes a few channels: one convolution with a part for each such group."""
    weight, dims = operands.weight, codes.q.dim()
    shape, outputs = weight.form.shape, weight.form.laid_out[0]
    blocks = weight.per.blocks(weight.form.laid_out)
    channels, columns = _groups_of_a_row(shape[1], math.prod(shape[2:]), blocks.size)
    parts, width = len(channels), len(channels[0])
    taken = [offset * shape[1] + channel for offset in range(groups) for part in channels for channel in part]
    q = codes.q.index_select(1, torch.tensor(taken, device=codes.q.device))
    integers = weight.integers()
    nothing = torch.zeros((outputs, 1), dtype=integers.dtype, device=integers.device)
    kernels = torch.cat([integers, nothing], 1).index_select(1, torch.tensor(columns, device=integers.device))
    kernels = kernels.view(groups, outputs // groups, parts, width, *shape[2:]).transpose(1, 2)
    total = graph.integer_conv(
        q,
        codes.zero_point,
        kernels.reshape(groups * parts * (outputs // groups), width, *shape[2:]),
        *steps,
        groups * parts,
    )
    total = total.unflatten(1, (groups, parts, outputs // groups))
    scale, _ = blocks.spread(weight.scale, None)  # (outputs, parts)
    scale = scale.view(groups, outputs // groups, parts).transpose(1, 2).reshape(groups, parts, -1, *[1] * (dims - 2))
    scales = _multiply(_along(codes.scale, 0, dims + 2), scale, dtype)
    y = _add_in_halves((total.to(scales.dtype) * scales).movedim(2, 0)).flatten(1, 2)
    if operands.bias is not None:
        y = y + operands.bias.to(y.dtype).view(-1, *[1] * (dims - 2))
    return y.to(dtype)


def _groups_of_a_row(channels: int, taps: int, size: int) -> tuple[list[list[int]], list[int]]:
    """Of every group of weights, the channels it takes, as many for each; and the columns of a row for those

    A column that is not the group's is one past the last.
    """
    inputs = channels * taps
    spans = [(first // taps, (first + size - 1) // taps) for first in range(0, inputs, size)]
    width = max(last - first for first, last in spans) + 1
    starts = [min(first, channels - width) for first, _ in spans]
    taken = [list(range(start, start + width)) for start in starts]
    columns = [
        column if number * size <= column < (number + 1) * size else inputs
        for number, start in enumerate(starts)
        for column in range(start * taps, (start + width) * taps)
    ]
    return taken, columns


def average(
    x: Tensor,
    activation: CodedActivation,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count: int,
) -> Tensor | None:
    """y = float(sum (q_x - z_x)) * (s_x / n), over the window of each output

    None where the scales of x change along the sum: those of its second axis do where the first is no batch.
    """
    dims, is_single = len(kernel), x.dim() < len(kernel) + 2
    axis = activation.per.axis + is_single if isinstance(activation.per, PerChannel) else 0
    if axis > 1:
        return None
    q, scale, zero_point = activation.codes(x)
    q = q.unsqueeze(0) if is_single else q
    ones = torch.ones((q.shape[1], 1, *kernel), dtype=torch.int8, device=q.device)
    total = graph.integer_conv(q, zero_point, ones, list(stride), list(padding), [1] * dims, q.shape[1])
    wide = math_dtype(x.dtype)
    share = divide(scale.to(wide), torch.full((), count, dtype=wide, device=scale.device))
    y = (total.to(wide) * _along(share, axis, total.dim())).to(x.dtype)
    return y.squeeze(0) if is_single else y
