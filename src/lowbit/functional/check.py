"""Input checks: once, at the public door, in the user's words. Kernels trust what passed here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.granularity import Granularity
from lowbit.grid import Grid
from lowbit.kernels.precision import math_dtype
from lowbit.record import check_finite
from lowbit.ste import SteKind

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
        raise ValueError(f"grad_output has shape {tuple(grad_output.shape)}, but x has {tuple(x.shape)}")
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
    shape = per.scale_shape(x.shape)
    if not isinstance(scale, Tensor):
        value = check_finite("scale", scale)
        _check_scale_range(value, value)
        return torch.full(shape, scale, dtype=math_dtype(x.dtype), device=x.device)
    if scale.dtype not in FLOATS:
        raise TypeError(f"scale is {scale.dtype}, but it must be a float tensor, best float32")
    _check_shape("scale", scale, x, per, shape)
    _check_device("scale", scale, x)
    if scale.requires_grad and torch.is_grad_enabled() and not learned:
        raise ValueError(
            "scale requires a gradient, but this op gives it none; use learned_fake_quantize or scale.detach()"
        )
    if values_are_readable(scale):
        check_scale_values(scale)
    return scale


def check_scale_values(scale: Tensor) -> None:
    """Refuse a scale that is not positive and finite; reads the values."""
    if scale.numel():
        low, high = scale.detach().aminmax()
        _check_scale_range(low.item(), high.item())


def check_zero_point(
    zero_point: Tensor | int | None, x: Tensor, per: Granularity, grid: Grid | None, *, learned: bool = False
) -> Tensor | None:
    """The zero point as a Tensor of the scale's shape, inside the grid; None stands for 0."""
    if zero_point is None:
        return None
    shape = per.scale_shape(x.shape)
    if isinstance(zero_point, int) and not isinstance(zero_point, bool):
        _check_zero_point_range(zero_point, zero_point, grid)
        return torch.full(shape, zero_point, dtype=torch.int32, device=x.device)
    if not isinstance(zero_point, Tensor):
        raise TypeError(
            f"zero_point is {zero_point!r} ({type(zero_point).__name__}), but it must be an int or a Tensor"
        )
    if zero_point.dtype not in (INTEGERS + FLOATS if learned else INTEGERS):
        raise TypeError(f"zero_point is {zero_point.dtype}, but it must be an integer tensor, best int32")
    _check_shape("zero_point", zero_point, x, per, shape)
    _check_device("zero_point", zero_point, x)
    if not zero_point.is_floating_point() and values_are_readable(zero_point):
        check_zero_point_values(zero_point, grid)
    return zero_point


def check_zero_point_values(zero_point: Tensor, grid: Grid | None) -> None:
    """Refuse a zero point outside the grid; reads the values."""
    if zero_point.numel():
        low, high = zero_point.detach().aminmax()
        _check_zero_point_range(int(low.item()), int(high.item()), grid)


def check_params(
    x: Tensor, scale: Tensor | float, zero_point: Tensor | int | None, grid: Grid, per: Granularity
) -> tuple[Tensor, Tensor | None]:
    """x, scale, zero point, grid and granularity of one call, checked together."""
    check_float("x", x)
    check_grid(grid)
    check_per(per)
    return check_scale(scale, x, per), check_zero_point(zero_point, x, per, grid)


def values_are_readable(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing and changes nothing: a plain CPU tensor in an eager call."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        # torch has no public name for "inside vmap or torch.func.grad"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
    )


def _check_scale_range(low: float, high: float) -> None:
    if not (low > 0 and high < math.inf):  # NaN fails both
        bad = high if low > 0 else low
        raise ValueError(f"scale holds {bad}, but every scale must be positive and finite")


def _check_zero_point_range(low: int, high: int, grid: Grid | None) -> None:
    if grid is not None and (low < grid.quant_min or high > grid.quant_max):
        bad = low if low < grid.quant_min else high
        raise ValueError(
            f"zero_point holds {bad}, but it must lie inside the grid's {grid.quant_min} to {grid.quant_max}"
        )


def _check_shape(name: str, value: Tensor, x: Tensor, per: Granularity, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but {per} of a {tuple(x.shape)} tensor needs {tuple(shape)}"
        )


def _check_device(name: str, value: Tensor, x: Tensor) -> None:
    if value.device != x.device:
        raise ValueError(f"{name} is on {value.device}, but x is on {x.device}; move it: {name}.to({str(x.device)!r})")
