"""Input checks: once, at the public door, in the user's words. Kernels trust what passed here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.granularity import Granularity
from lowbit.grid import Grid
from lowbit.kernels.plan import is_traced
from lowbit.kernels.precision import math_dtype
from lowbit.record import check_number
from lowbit.ste import SteKind

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The smallest positive (subnormal) and the largest finite number.
_SCALE_LIMITS = {
    dtype: ((info := torch.finfo(dtype)).smallest_normal * info.eps, info.max)
    for dtype in (torch.float32, torch.float64)
}
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def check_tensor(name: str, value: object) -> None:
    """Refuse what is not a Tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}), but it must be a Tensor; wrap it: torch.tensor(...)"
        )


def check_float(name: str, value: Tensor) -> None:
    """Refuse what is not a Tensor of one of the four float dtypes."""
    check_tensor(name, value)
    if value.dtype not in FLOATS:
        raise TypeError(
            f"{name} is {value.dtype}, but it must be float16, bfloat16, float32 or float64; convert it: {name}.float()"
        )


def check_grad(grad_output: Tensor, x: Tensor) -> None:
    """Refuse a gradient that does not belong to x."""
    check_float("grad_output", grad_output)
    if grad_output.shape != x.shape:
        raise ValueError(
            f"grad_output has shape {tuple(grad_output.shape)}, but x has {tuple(x.shape)}; "
            "pass the gradient of the op's result"
        )
    _check_device("grad_output", grad_output, x)


def check_grid(grid: object) -> None:
    """Refuse what is not a Grid."""
    if not isinstance(grid, Grid):
        raise TypeError(f"grid is {grid!r} ({type(grid).__name__}), but it must be a lowbit.Grid, such as Grid(8)")


def check_per(per: object) -> None:
    """Refuse what is not a granularity."""
    if not isinstance(per, Granularity):
        raise TypeError(f"per is {per!r} ({type(per).__name__}), but it must be a granularity, such as PerTensor()")


def check_ste(ste: object) -> None:
    """Refuse what is not a SteKind."""
    if not isinstance(ste, SteKind):
        raise TypeError(f"ste is {ste!r} ({type(ste).__name__}), but it must be a SteKind, such as SteKind.IDENTITY")


def check_scale(scale: Tensor | float, x: Tensor, per: Granularity, *, learned: bool = False) -> Tensor:
    """The scale as a Tensor of the shape that ``per`` asks for; positive and finite."""
    shape, dtype = per.scale_shape(x.shape), math_dtype(x.dtype)
    if not isinstance(scale, Tensor):
        return torch.full(shape, check_scale_number(scale, dtype), dtype=dtype, device=x.device)
    check_scale_values(scale, dtype)
    _check_shape("scale", scale, x, per, shape)
    _check_device("scale", scale, x)
    if not learned:
        _check_no_gradient(scale)
    return scale


def check_scale_number(scale: object, dtype: torch.dtype) -> float:
    """Refuse a number that is no positive, finite scale in ``dtype``."""
    value = check_number("scale", scale)
    _check_scale_range(value, value, dtype)
    return value


def check_scale_values(scale: Tensor, dtype: torch.dtype) -> None:
    """Refuse a scale that is no float tensor, or not positive and finite in ``dtype``; reads values only for free."""
    if scale.dtype not in FLOATS:
        raise TypeError(
            f"scale is {scale.dtype}, but it must be a float tensor, best float32; convert it: scale.float()"
        )
    if scale.numel() and values_are_readable(scale):
        _check_scale_range(*_ends(scale), dtype)


def check_zero_point(
    zero_point: Tensor | int | None, x: Tensor, per: Granularity, grid: Grid | None, *, learned: bool = False
) -> Tensor | None:
    """The zero point as a Tensor of the scale's shape, inside the grid; None stands for 0."""
    if zero_point is None:
        return None
    shape = per.scale_shape(x.shape)
    if not isinstance(zero_point, Tensor):
        return torch.full(shape, check_zero_point_number(zero_point, grid), dtype=torch.int32, device=x.device)
    if not (learned and zero_point.dtype in FLOATS):
        zero_point = check_zero_point_values(zero_point, grid)
    elif values_are_readable(zero_point) and not zero_point.isfinite().all():
        raise ValueError("zero_point holds a value that is not finite; start it inside the grid")
    _check_shape("zero_point", zero_point, x, per, shape)
    _check_device("zero_point", zero_point, x)
    return zero_point


def check_zero_point_number(zero_point: object, grid: Grid | None) -> int:
    """Refuse what is no int inside the grid."""
    if isinstance(zero_point, bool) or not isinstance(zero_point, int):
        kind = type(zero_point).__name__
        raise TypeError(f"zero_point is {zero_point!r} ({kind}), but it must be an int or an integer Tensor")
    limits = (grid.quant_min, grid.quant_max) if grid is not None else (-(2**31), 2**31 - 1)
    _check_zero_point_range(zero_point, zero_point, limits)
    return zero_point


def check_zero_point_values(zero_point: Tensor, grid: Grid | None) -> Tensor:
    """Refuse a zero point that is no integer tensor, or outside the grid; reads values only for free."""
    if zero_point.is_floating_point() or zero_point.is_complex() or zero_point.dtype == torch.bool:
        raise TypeError(f"zero_point is {zero_point.dtype}, but it must be an integer tensor, best int32")
    if zero_point.dtype not in INTEGERS:
        zero_point = zero_point.to(torch.int64)  # torch has few ops for its wider unsigned integers
    if grid is not None and zero_point.numel() and values_are_readable(zero_point):
        low, high = _ends(zero_point)
        _check_zero_point_range(int(low), int(high), (grid.quant_min, grid.quant_max))
    return zero_point


def check_params(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | int | None,
    grid: Grid,
    per: Granularity,
    *,
    learned: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """x, scale, zero point, grid and granularity of one call, checked together; those ``learned`` take a gradient.

    What shapes, dtypes and devices decide is decided once: a call like one that passed has only its values checked.
    """
    key = None if is_traced() else _key(x, scale, zero_point, grid, per, learned)
    dtype = None if key is None else _passed.get(key)
    if dtype is None:
        check_float("x", x)
        check_grid(grid)
        check_per(per)
        scale = check_scale(scale, x, per, learned=learned)
        zero_point = check_zero_point(zero_point, x, per, grid, learned=learned)
        if key is not None:
            _passed[key] = math_dtype(x.dtype)
            if len(_passed) > _MOST_PASSED:
                _passed.clear()
        return scale, zero_point
    assert isinstance(scale, Tensor)
    check_scale_values(scale, dtype)
    if not learned:
        _check_no_gradient(scale)
    if zero_point is not None:
        zero_point = check_zero_point(zero_point, x, per, grid, learned=learned)
    return scale, zero_point


_passed: dict[tuple[Any, ...], torch.dtype] = {}
_MOST_PASSED = 4096


def _key(
    x: object, scale: object, zero_point: object, grid: object, per: object, learned: bool
) -> tuple[Any, ...] | None:
    """All of a call that its checks look at, besides the values; None where a plain number is among the tensors."""
    if not (isinstance(x, Tensor) and isinstance(scale, Tensor) and isinstance(grid, Grid)):
        return None
    if not isinstance(per, Granularity):
        return None
    key = (x.shape, x.dtype, x.device, scale.shape, scale.dtype, scale.device, grid, per, learned)
    if zero_point is None:
        return key
    return (*key, zero_point.shape, zero_point.dtype, zero_point.device) if isinstance(zero_point, Tensor) else None


def values_are_readable(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing and changes nothing: a plain CPU tensor in an eager call."""
    return tensor.device.type == "cpu" and not is_traced(tensor)


def _check_no_gradient(scale: Tensor) -> None:
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "scale requires a gradient, but this op gives it none; use learned_fake_quantize or scale.detach()"
        )


def _ends(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest value."""
    if tensor.dim() == 0:
        return (value := tensor.item()), value
    low, high = tensor.detach().aminmax()
    return low.item(), high.item()


def _check_scale_range(low: float, high: float, dtype: torch.dtype) -> None:
    smallest, largest = _SCALE_LIMITS[dtype]
    if not (low >= smallest and high <= largest):  # NaN fails both
        bad = low if not low >= smallest else high
        raise ValueError(
            f"scale holds {bad}, but every scale must be positive and finite in {dtype}; "
            "a scale from data is max(abs(x)) / quant_max, at least 1e-12"
        )


def _check_zero_point_range(low: int, high: int, limits: tuple[int, int]) -> None:
    if low < limits[0] or high > limits[1]:
        bad = low if low < limits[0] else high
        raise ValueError(f"zero_point holds {bad}, but it must lie inside the grid's {limits[0]} to {limits[1]}")


def _check_shape(name: str, value: Tensor, x: Tensor, per: Granularity, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but {per} of a {tuple(x.shape)} tensor needs {tuple(shape)}"
        )


def _check_device(name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, but x is on {x.device}; move it: {name}.to({str(x.device)!r})")
