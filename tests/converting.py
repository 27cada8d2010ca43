"""Converted models and what they are compared with: the prepared model, and products of integers written out."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import lowbit
from compare import assert_same_bits
from lowbit import PerBlock, PerChannel, PerGroup, PerToken
from lowbit.flow import call
from lowbit.nn.coded import CodedWeight
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight
from oracle import group_index


def run(model: nn.Module, batch: Any) -> list[Tensor]:
    """The tensors of model(batch), without gradients."""
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(call(model, batch)) if isinstance(leaf, Tensor)]


def prepared(model: nn.Module, recipe: lowbit.Recipe, batch: Any) -> Any:
    """The prepared model in eval mode, after a calibration."""
    found = lowbit.prepare(model.eval(), recipe, batch)
    lowbit.calibrate(found, [batch])
    return found


def assert_same_outputs(actual: nn.Module, expected: nn.Module, batch: Any) -> None:
    outputs, wanted = run(actual, batch), run(expected, batch)
    assert len(outputs) == len(wanted) > 0
    for output, want in zip(outputs, wanted, strict=True):
        assert_same_bits(output, want)


def products(model: nn.Module) -> dict[str, str]:
    """Of each layer and op, how it multiplies."""
    return model.__dict__["_lowbit_converted"].products


def weights(model: nn.Module) -> list[CodedWeight]:
    """Of a converted model."""
    return [module for module in model.modules() if isinstance(module, CodedWeight)]


class Operand(NamedTuple):
    """Codes less their zero points as float64, which holds them, and the scale of each element."""

    codes: Tensor
    scale: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _spread(param: Tensor | None, shape: tuple[int, ...], per: Any) -> Tensor:
    return torch.zeros(shape) if param is None else param.detach().reshape(-1)[group_index(shape, per)]


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, grid: lowbit.Grid, per: Any) -> Operand:
    """q - z,  q = clamp(round(x / s) + z, quant_min, quant_max)"""
    s = _spread(scale, tuple(x.shape), per).to(wide(x.dtype))
    z = _spread(zero_point, tuple(x.shape), per).double()
    q = (torch.round(x.to(s.dtype) / s).double() + z).clamp(grid.quant_min, grid.quant_max)
    return Operand(q - z, s)


def input_codes(quantizer: Any, x: Tensor) -> Operand:
    if isinstance(quantizer, DoReFaActivation):
        return quantize(x, quantizer.scale(x), None, quantizer.grid, quantizer.per)
    return quantize(x, *quantizer.params(x), quantizer.grid, quantizer.per)


def weight_codes(quantizer: Any, weight: Tensor, axis: int) -> Operand:
    """Both as one row for each output."""
    rows = weight.movedim(axis, 0).flatten(1)
    laid_out = rows if isinstance(quantizer.per, PerGroup | PerBlock | PerToken) else weight
    if isinstance(quantizer, Binarize):
        values = quantizer(laid_out)
        found = Operand(torch.where(laid_out < 0, -1.0, 1.0).double(), values.abs().to(wide(weight.dtype)))
    elif isinstance(quantizer, DoReFaWeight):
        n = torch.tensor(2**quantizer.bits - 1, dtype=wide(weight.dtype))
        found = Operand(torch.round(quantizer(laid_out).double() * n), (1 / n).expand(laid_out.shape))
    else:
        found = quantize(laid_out, *quantizer.params(laid_out), quantizer.grid, quantizer.per)
    return found if laid_out is rows else Operand(*(part.movedim(axis, 0).flatten(1) for part in found))


def groups_of(per: Any, columns: int) -> list[slice]:
    """The columns of a row that share a scale."""
    size = {PerGroup: "size", PerBlock: "columns"}.get(type(per))
    size = columns if size is None else getattr(per, size)
    return [slice(start, start + size) for start in range(0, columns, size)]


def add_in_halves(parts: list[Tensor]) -> Tensor:
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [parts[i] + parts[half + i] for i in range(half)] + parts[2 * half :]
    return parts[0]


def x_scale(quantizer: Any, x: Tensor, dims: int) -> Tensor:
    """The scale of an input, ready to broadcast to an output of so many axes."""
    scale = quantizer.scale(x) if isinstance(quantizer, DoReFaActivation) else quantizer.params(x)[0]
    scale = scale.to(wide(x.dtype))
    if isinstance(quantizer.per, PerToken):
        return scale.unsqueeze(-1)
    axis = quantizer.per.axis if isinstance(quantizer.per, PerChannel) else 0
    return scale if scale.dim() == 0 else scale.view([-1 if i == axis else 1 for i in range(dims)])


class Product(NamedTuple):
    """A product to write out: ``multiply`` takes float64 and is exact for integers; outputs are on axis ``out``."""

    x_quantizer: Any
    w_quantizer: Any
    weight: Tensor
    axis: int
    multiply: Any
    out: int
    bias: Tensor | None = None
    rounds_bias: bool = False


def write_out(x: Tensor, product: Product) -> Tensor:
    """y = float(sum (q_x - z_x) * (q_w - z_w) + b_q) * (s_x * s_w) + b"""
    codes = input_codes(product.x_quantizer, x).codes
    w = weight_codes(product.w_quantizer, product.weight, product.axis)
    parts = []
    for group in groups_of(product.w_quantizer.per, w.codes.shape[1]):
        only = torch.zeros_like(w.codes)
        only[:, group] = w.codes[:, group]
        total = product.multiply(codes, _in_shape(only, product.weight, product.axis))
        assert total.abs().max() < 2**31 if total.numel() else True
        assert torch.equal(total, total.round())
        along = [1] * total.dim()
        along[product.out] = -1
        scale = x_scale(product.x_quantizer, x, total.dim()) * w.scale[:, group.start].view(along)
        if product.rounds_bias:
            assert product.bias is not None
            total = total + torch.round(product.bias.to(scale.dtype) / scale.flatten()).double().view(along)
        parts.append(total.long().to(scale.dtype) * scale)
    y = add_in_halves(parts)
    if product.bias is not None and not product.rounds_bias:
        y = y + product.bias.detach().to(y.dtype).view(along)
    return y.to(x.dtype)


def _in_shape(rows: Tensor, weight: Tensor, axis: int) -> Tensor:
    return rows.view(weight.movedim(axis, 0).shape).movedim(0, axis)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """What the converted layer should give, from the prepared one."""
    grid = layer.grid_of("input_quantizer")
    if not layer.has_weight:
        torchs = next(cls for cls in type(layer).__mro__ if cls.__module__ == "torch.nn.modules.pooling")
        return average(x, grid, plain(layer), window_size(x, vars(layer), int(torchs.__name__[-2])))
    weight, axis = layer.slot_weight("weight_quantizer")
    bias = layer._float("bias")
    if layer.folds:
        bias = layer._norm[0].folded_bias(bias)
    is_conv = isinstance(layer, nn.modules.conv._ConvNd)
    multiply = convolution(layer) if is_conv else matrix_product(axis)
    out = x.dim() - weight.dim() + 1 if is_conv else -1
    quantizers = grid, layer.quantizer("weight_quantizer")
    return write_out(x, Product(*quantizers, weight.detach(), axis, multiply, out, bias, layer.integer_bias))


def plain(layer: Any) -> Any:
    """The torch layer, without quantizers, in float64."""
    alone = copy.deepcopy(layer).double()
    alone.strip()
    alone.__class__ = type(alone).float_class
    return alone


def convolution(layer: Any) -> Any:
    """The layer's own forward: its padding and its strides."""
    alone = plain(layer)

    def multiply(codes: Tensor, weight: Tensor) -> Tensor:
        alone.bias, alone.weight = None, nn.Parameter(weight)
        with torch.no_grad():
            return alone(codes)

    return multiply


def matrix_product(axis: int) -> Any:
    def multiply(codes: Tensor, weight: Tensor) -> Tensor:
        matrix = weight if axis % 2 else weight.t()
        return (codes.long() @ matrix.long()).double()

    return multiply


def average(x: Tensor, quantizer: Any, pool: Any, count: int) -> Tensor:
    """y = float(sum (q_x - z_x)) * (s_x / n)"""
    total = torch.round(pool(input_codes(quantizer, x).codes) * count)
    share = x_scale(quantizer, x, total.dim())
    share = share / torch.tensor(count, dtype=share.dtype)
    return (total.to(share.dtype) * share).to(x.dtype)


def window_size(x: Tensor, options: dict[str, Any], dims: int) -> int:
    """By how much a pooling divides; of options as nn.AvgPool2d and nn.AdaptiveAvgPool2d have them."""
    if options.get("divisor_override"):
        return options["divisor_override"]
    sizes = options.get("kernel_size", options.get("output_size"))
    sizes = sizes if isinstance(sizes, tuple | list) else [sizes] * dims
    sizes = [*sizes] * dims if len(sizes) == 1 else sizes
    if "kernel_size" in options:
        return math.prod(sizes)
    return math.prod(
        have // (have if want is None else want) for have, want in zip(x.shape[-dims:], sizes, strict=True)
    )


def watch(converted: nn.Module) -> dict[str, list[tuple[Any, ...]]]:
    """By path, the calls of every layer and op that multiplies integers: what came in, and what came out."""
    seen: dict[str, list[tuple[Any, ...]]] = {}
    for path, how in products(converted).items():
        if how != "integer":
            continue
        holder: Any = converted.get_submodule(path)

        def product(holder: Any, *call: Any, path: str = path, inner: Any = holder.product) -> Any:
            call = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, call)
            output = inner(holder, *call)
            if output is not None:  # what follows may change it in place
                seen.setdefault(path, []).append((*call, output.clone()))
            return output

        holder.product = product
    return seen


def call_output(holder: Any, *call: Any) -> Tensor:
    """What one call of a converted layer or op should give, from the prepared one."""
    *function, args, kwargs = call
    if not function:
        return layer_output(holder, args[0] if args else next(iter(kwargs.values())))
    x, *rest = args
    grid = holder.grid_of("input_quantizer")
    if holder.kind.name == "pool":
        name = function[0].__name__
        names = ("output_size",) if name.startswith("adaptive") else ("kernel_size",)
        count = window_size(x, dict(zip(names, rest, strict=False)) | kwargs, int(name[-2]))
        return average(x, grid, lambda codes: function[0](codes, *rest, **kwargs), count)
    slot = next(slot for slot, role in holder.slots().items() if role == "weight")
    weight, axis = holder.slot_weight(slot)
    quantizers = grid, holder.quantizer(slot)
    if holder.kind.name == "conv":
        options = dict(zip(("bias", "stride", "padding", "dilation", "groups"), rest[1:], strict=False)) | kwargs
        bias = options.pop("bias", None)
        return write_out(
            x, Product(*quantizers, weight.detach(), axis, lambda q, w: function[0](q, w, **options), 1, bias)
        )
    bias = (rest[1] if len(rest) > 1 else kwargs.get("bias")) if holder.kind.name == "linear" else None
    return write_out(x, Product(*quantizers, weight.detach(), axis, matrix_product(axis), -1, bias))


def assert_products(converted: nn.Module, model: Any, batch: Any) -> None:
    """Every product of integers is what is written out."""
    calls = watch(converted)
    run(converted, batch)
    assert calls
    for path, made in calls.items():
        for *given, result in made:
            assert_same_bits(result, call_output(model.get_submodule(path), *given).detach())
