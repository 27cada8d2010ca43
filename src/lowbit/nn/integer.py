"""Which layers and ops of a converted model multiply codes, and how each comes to its product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lowbit.granularity import PerChannel, PerTensor, PerToken
from lowbit.nn.coded import CodedActivation, CodedWeight
from lowbit.nn.layer import BIAS_LIMIT, QuantLayer
from lowbit.nn.layers import LookUpLayer, TransposedLayer
from lowbit.nn.ops import KINDS, QuantOp
from lowbit.nn.products import Operands, average, convolve, linear

Product = Callable[..., Any]
_LIMIT = 2**31


class Choice(NamedTuple):
    """How a holder computes: by this product of integers, or, for this reason, in float."""

    product: Product | None
    reason: str = ""


def choose(holder: Any) -> Choice:
    """The integer product of a layer or op of a converted model, or why it has none."""
    kind = _kind(holder)
    if kind is None:
        return Choice(None, "it has no product of integers")
    reason = _activation_problem(holder, kind)
    if kind != "pool":
        reason = reason or _weight_problem(holder, kind) or _size_problem(holder)
    elif isinstance(holder, QuantLayer):
        reason = reason or _pool_problem(holder)
    if reason:
        return Choice(None, reason)
    if isinstance(holder, QuantOp):
        return Choice(_OP_PRODUCTS[kind])
    return Choice(_LAYER_PRODUCTS[kind] if kind == "pool" or not _has_own_forward(holder) else _layer_watched)


def _slot(holder: Any, role: str) -> str:
    """The first slot of this role; "" where there is none."""
    return next((slot for slot, its in holder.slots().items() if its == role), "")


def _has_own_forward(layer: Any) -> bool:
    """Whether a class of the user's computes otherwise than torch's."""
    cls = type(layer).float_class
    methods = [getattr(cls, name) for name in ("forward", "_conv_forward") if hasattr(cls, name)]
    known = "torch.nn.modules.", "transformers.pytorch_utils"
    return not all(method.__module__.startswith(known) for method in methods)


def _kind(holder: Any) -> str | None:
    """linear, conv or pool"""
    if isinstance(holder, QuantOp):
        return {"linear": "linear", "matmul": "linear", "conv": "conv", "pool": "pool"}.get(holder.kind.name)
    if not isinstance(holder, QuantLayer) or isinstance(holder, LookUpLayer):
        return None
    if not holder.has_weight:
        return "pool"
    if isinstance(holder, nn.modules.conv._ConvNd):  # noqa: SLF001
        return None if isinstance(holder, TransposedLayer) else "conv"
    return "linear"


def _activation_problem(holder: Any, kind: str) -> str:
    slot = _slot(holder, "activation")
    activation = holder.grid_of(slot)
    if activation is None:
        return "its input is not quantized"
    if not isinstance(activation, CodedActivation):
        return f"its input is quantized by {type(activation).__name__}, which has no codes"
    if activation.bits > 8:
        return f"its input has {activation.bits} bits, and the product takes 8"
    per = activation.per
    apart = {"linear": (PerToken(), PerChannel(0)), "conv": (PerChannel(0),), "pool": (PerChannel(0), PerChannel(1))}
    if per not in (PerTensor(), *apart[kind]):
        return f"its input has scales {per}, which change along the sum"
    if kind != "linear" and per != PerTensor() and not activation.form.symmetric:
        return f"its input has zero points {per}, and a padding of one code"
    if activation.form.statistic is not None and holder.quantizer(slot) is None:
        return "its input is quantized elsewhere, with a scale that follows each batch"
    return ""


def _weight_problem(holder: Any, kind: str) -> str:
    weight = holder.quantizer(_slot(holder, "weight"))
    if weight is not None and not isinstance(weight, CodedWeight):
        return "its weight is quantized on every call, as a forward computes it, or takes it elsewhere too"
    if weight is None:
        return "its weight is not quantized"
    form = weight.form
    if form.largest > 255 or (form.odd and form.bits > 7):
        return f"its weight has {form.bits} bits, and the product takes 8"
    by_output = isinstance(form.per, PerTensor) or form.per == PerChannel(form.output_axis)
    if not (by_output or form.per.divides_rows) or (kind == "linear" and len(form.shape) != 2):
        return f"its weight of {len(form.shape)} axes has scales {form.per}"
    if form.affine and (kind == "conv" or not by_output or form.signed):
        return "its weight has zero points"
    return ""


def _size_problem(holder: Any) -> str:
    form, grid = holder.quantizer(_slot(holder, "weight")).form, holder.grid_of(_slot(holder, "activation")).grid
    has_codes = isinstance(holder, QuantLayer) and holder.held_bias_codes() is not None
    terms = math.prod(form.shape) // max(form.shape[form.output_axis], 1)
    reach = max(grid.quant_max - grid.quant_min, -grid.quant_min, grid.quant_max) + 1
    largest = terms * reach * (form.largest + 1)
    fits = largest < _LIMIT - (BIAS_LIMIT if has_codes else 0)
    return "" if fits else f"a sum of {terms:,} products may not fit 32 bits"


def _pool_problem(layer: Any) -> str:
    if _has_own_forward(layer):
        return "its forward is its own"
    is_fixed = not hasattr(layer, "output_size")
    return "its windows differ in size" if is_fixed and _fixed_window(layer) is None else ""


def _operands(layer: Any) -> Operands:
    biases = layer.float_bias(), layer.held_bias_codes()
    return Operands(layer.grid_of("input_quantizer"), layer.quantizer("weight_quantizer"), *biases)


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def _layer_linear(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return linear(_input(args, kwargs), _operands(layer))


def _layer_conv(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    x = _input(args, kwargs)
    padding = layer._reversed_padding_repeated_twice  # noqa: SLF001 (torch has no public name)
    return convolve(x, _operands(layer), layer.stride, padding, layer.dilation, layer.groups, layer.padding_mode)


class _Watch(TorchFunctionMode):
    """Hands the products of a layer's weight to integers, wherever in its forward they are."""

    def __init__(self, layer: Any, x: Tensor, quantized: Tensor) -> None:
        super().__init__()
        self.layer, self.x = layer, x
        self.on_grid = [quantized]  # what has only values of the quantized input, and zeros

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What runs in here is the layer's own affair, and no op of the module around it.
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            kind = KINDS.get(func)
            names = {"linear": _LINEAR, "conv": _CONV}.get(kind.name) if kind is not None else None
            given = _bind(names, args, kwargs) if names else {}
            result = self._multiply(names, given) if self._is_on_grid(given.get("input")) else None
            if result is None:
                result = func(*args, **kwargs)
                padded = _bind(_PAD, args, kwargs) if func is functional.pad else {}
                if self._is_on_grid(padded.get("input")) and not padded.get("value"):
                    self.on_grid.append(result)
            return result

    def _is_on_grid(self, x: Any) -> bool:
        return any(x is known for known in self.on_grid)

    def _multiply(self, names: Sequence[str] | None, given: dict[str, Any]) -> Tensor | None:
        """The product with the layer's weight; None where it is another's."""
        read = self.layer._running  # noqa: SLF001
        if given["weight"] is not read.get("weight"):
            return None
        operands = _operands(self.layer)._replace(source=self.x)
        bias = given.get("bias")
        if bias is None or bias is not read.get("bias"):
            operands = operands._replace(bias=bias, bias_codes=None)
        x = self.x if given["input"] is self.on_grid[0] else given["input"]
        return linear(x, operands) if names is _LINEAR else _convolve_given(given | {"input": x}, operands)


def _layer_watched(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A forward of the layer's own, which pads its input, say, and then calls functional.conv2d."""
    x = _input(args, kwargs)
    args, kwargs = layer.with_quantized_input(args, kwargs)
    with torch._C._EnableTorchFunction(), _Watch(layer, x, _input(args, kwargs)):  # noqa: SLF001
        return layer.run_parent(args, kwargs)


def _layer_pool(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    x = _input(args, kwargs)
    is_adaptive = hasattr(layer, "output_size")
    window = _adaptive(x, layer.output_size, _dims(layer)) if is_adaptive else _fixed_window(layer)
    return None if window is None else average(x, layer.grid_of("input_quantizer"), *window)


def _dims(layer: Any) -> int:
    """1, 2 or 3, which torch's classes have in their names only"""
    names = [cls.__name__ for cls in type(layer).__mro__ if cls.__module__ == "torch.nn.modules.pooling"]
    return int(names[0][-2])


def _fixed_window(layer: Any) -> Window | None:
    override = getattr(layer, "divisor_override", None)
    options = (layer.stride, layer.padding, layer.ceil_mode, layer.count_include_pad, override)
    return _fixed(layer.kernel_size, *options, dims=_dims(layer))


Window = tuple[list[int], list[int], list[int], int]


def _fixed(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    dims: int,
) -> Window | None:
    """The windows of average pooling; None where they differ in size."""
    kernel, step, pads = (_tuple(value, dims) for value in (kernel_size, stride or kernel_size, padding))
    if ceil_mode or (any(pads) and not count_include_pad and not divisor_override):
        return None
    around = [pad for pad in reversed(pads) for _ in range(2)]
    return list(kernel), list(step), around, divisor_override or math.prod(kernel)


def _adaptive(x: Tensor, output_size: Any, dims: int) -> Window | None:
    """The windows of adaptive pooling; None where they differ in size."""
    sizes = x.shape[x.dim() - dims :]
    wanted = [size if want is None else want for want, size in zip(_tuple(output_size, dims), sizes, strict=True)]
    if any(size % want for want, size in zip(wanted, sizes, strict=True)):
        return None
    kernel = [size // want for want, size in zip(wanted, sizes, strict=True)]
    return kernel, list(kernel), [0] * (2 * dims), math.prod(kernel)


def _tuple(value: Any, dims: int) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(value) * dims if len(value) == 1 else tuple(value)
    return (value,) * dims


_LAYER_PRODUCTS: dict[str, Product] = {"linear": _layer_linear, "conv": _layer_conv, "pool": _layer_pool}

_LINEAR = ("input", "weight", "bias")
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1}
_POOL = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_ADAPTIVE = ("input", "output_size")
_PAD = ("input", "pad", "mode", "value")
# Whether the windows are as many as asked for, and how many axes they have.
_POOLS: dict[Callable[..., Any], tuple[bool, int]] = {
    functional.avg_pool1d: (False, 1),
    functional.avg_pool2d: (False, 2),
    functional.avg_pool3d: (False, 3),
    functional.adaptive_avg_pool1d: (True, 1),
    functional.adaptive_avg_pool2d: (True, 2),
    functional.adaptive_avg_pool3d: (True, 3),
}


def _bind(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _op_linear(op: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    slots = list(op.slots())
    x = args[0] if args else kwargs["input"]
    weight = next(slot for slot, role in op.slots().items() if role == "weight")
    bias = _bind(_LINEAR, args, kwargs).get("bias") if op.kind.name == "linear" else None
    return linear(x, Operands(op.grid_of(slots[0]), op.quantizer(weight), bias))


def _op_conv(op: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    given = _bind(_CONV, args, kwargs)
    operands = Operands(op.grid_of("input_quantizer"), op.quantizer("weight_quantizer"), given.get("bias"))
    return _convolve_given(given, operands)


def _convolve_given(given: dict[str, Any], operands: Operands) -> Tensor | None:
    """As functional.conv2d and its like take their arguments."""
    kernel = operands.weight.form.shape[2:]
    stride, padding, dilation = (given.get(name, default) for name, default in _DEFAULTS.items())
    dilation = _tuple(dilation, len(kernel))
    if padding == "same":
        totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
        around = [part for total in reversed(totals) for part in (total // 2, total - total // 2)]
    else:
        around = [pad for pad in reversed(_tuple(0 if padding == "valid" else padding, len(kernel))) for _ in range(2)]
    stride = _tuple(stride, len(kernel))
    return convolve(given["input"], operands, stride, around, dilation, given.get("groups", 1))


def _op_pool(op: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    is_adaptive, dims = _POOLS[function]
    if is_adaptive:
        given = _bind(_ADAPTIVE, args, kwargs)
        window = _adaptive(given["input"], given["output_size"], dims)
    else:
        given = _bind(_POOL, args, kwargs)
        window = _fixed(**{key: value for key, value in given.items() if key != "input"}, dims=dims)
    return None if window is None else average(given["input"], op.grid_of("input_quantizer"), *window)


_OP_PRODUCTS: dict[str, Product] = {"linear": _op_linear, "conv": _op_conv, "pool": _op_pool}
