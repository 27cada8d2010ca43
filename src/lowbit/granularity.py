"""Granularity: which elements of a tensor share a scale; the only file that does scale-shape arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lowbit.record import TaggedRecord, check_integer

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """c = (i // period) * channels + (i // inner) % channels

    The scale group ``c`` of element ``i`` of the dense memory: all that a fused kernel needs to know of a granularity.
    """

    period: int
    channels: int
    inner: int


class Blocks(NamedTuple):
    """The scales of a tensor as ONNX has them: one (axis None), one for each index of ``axis``, or, with a ``size``,
    one for each run of so many elements along it; each is then repeated ``rows`` times along the axis before.
    """

    axis: int | None = None
    size: int = 0
    rows: int = 1

    def spread(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point in the shape that this says."""
        return self._spread(scale), None if zero_point is None else self._spread(zero_point)

    def _spread(self, scale: Tensor) -> Tensor:
        if self.axis is not None and self.size and scale.dim() == self.axis:
            return scale.unsqueeze(-1)
        return scale if self.rows == 1 else scale.repeat_interleave(self.rows, -2)


class Granularity(TaggedRecord, tag="per"):
    """Which elements share a scale. Four views of one idea:

    - ``scale_shape`` says what shape the scale must have;
    - ``split``, ``spread`` and ``reduce`` give the broadcasting that plain torch runs on;
    - ``layout`` gives the index arithmetic that fused kernels run on;
    - ``blocks`` is what a file for other runtimes says of it.
    """

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        """The shape of the scale for data of this shape; ValueError where the granularity does not fit it."""
        raise NotImplementedError

    def split_shape(self, shape: Sequence[int]) -> Shape:
        """The shape in which every axis lies either inside a scale group or across groups."""
        return tuple(shape)

    def group_axes(self, rank: int) -> Shape:
        """The axes of the split shape, from the end (-1 is the last), that lie across groups."""
        raise NotImplementedError

    def layout(self, shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
        """The Layout of dense memory with these strides, or None where no Layout can say it."""
        raise NotImplementedError

    def blocks(self, shape: Sequence[int]) -> Blocks:
        """The scales of data of this shape, as ONNX has them."""
        return Blocks()

    def split(self, x: Tensor) -> Tensor:
        """``x`` in its split shape: always a view, whatever the strides."""
        return x.view(self.split_shape(x.shape)) if self.splits else x

    def join(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of ``split``."""
        return x.reshape(tuple(shape)) if self.splits else x

    def spread(self, scale: Tensor, split: Tensor) -> Tensor:
        """The scale with the rank of the split tensor, ready to broadcast against it."""
        shape = [1] * split.dim()
        for axis, size in zip(self.group_axes(split.dim()), scale.shape, strict=True):
            shape[axis] = size
        return scale.reshape(shape)

    def reduce(self, reduction: Callable[[Tensor, Shape], Tensor], split: Tensor) -> Tensor:
        """The reduction of each scale group of a split tensor, in the scale's shape."""
        across = self.group_axes(split.dim())
        axes = tuple(axis for axis in range(-split.dim(), 0) if axis not in across)
        # torch reads an empty tuple of axes as all of them.
        return reduction(split, axes) if axes else split

    def by_group(self, split: Tensor) -> Tensor:
        """A split tensor as one contiguous row for each scale group, in the scale's order."""
        across = self.group_axes(split.dim())
        inside = [axis for axis in range(-split.dim(), 0) if axis not in across]
        groups = math.prod([split.shape[axis] for axis in across])
        size = math.prod([split.shape[axis] for axis in inside])
        return split.permute([*across, *inside]).reshape(groups, size).contiguous()

    def group_size(self, shape: Sequence[int], batch_axis: int | None = None) -> int:
        """How many elements share one scale, those of one sample only where a batch axis is named."""
        groups = math.prod(self.scale_shape(shape))
        shared = math.prod(shape) // groups if groups else 0
        if batch_axis is None or not shared:
            return shared
        apart = self.splits or batch_axis % len(shape) - len(shape) in self.group_axes(len(shape))
        return shared if apart else shared // shape[batch_axis]

    def fits_scale(self, shape: Sequence[int]) -> bool:
        """Whether a scale of this shape can be one of this granularity's, for some data."""
        raise NotImplementedError

    @property
    def numbers(self) -> tuple[int, ...]:
        """The fields, in order: ``type(per)(*per.numbers) == per``"""
        return ()

    @property
    def splits(self) -> bool:
        """Whether the split shape differs from the shape."""
        return False

    @property
    def divides_rows(self) -> bool:
        """Whether the scales of a weight divide its rows, one row for each output."""
        return False

    @property
    def shape_follows_batch(self) -> bool:
        """Whether the scale's shape grows with the batch, so that no state can hold it."""
        return False


@dataclass(frozen=True)
class PerTensor(Granularity, kind="tensor"):
    """One scale for the whole tensor: shape ()."""

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        return ()

    def fits_scale(self, shape: Sequence[int]) -> bool:
        return len(shape) == 0

    def group_axes(self, rank: int) -> Shape:
        return ()

    def layout(self, shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
        size = max(math.prod(shape), 1)
        return Layout(size, 1, size) if _memory_order(shape, stride) is not None else None


@dataclass(frozen=True)
class PerChannel(Granularity, kind="channel"):
    """One scale for each index of ``axis``: shape (C,)."""

    axis: int

    def __post_init__(self) -> None:
        check_integer("axis", self.axis, -64, 63)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.axis,)

    def fits_scale(self, shape: Sequence[int]) -> bool:
        return len(shape) == 1

    def _axis(self, rank: int) -> int:
        if rank == 0:
            raise ValueError(f"{self} does not fit a tensor of 0 dimensions; use PerTensor()")
        if not -rank <= self.axis < rank:
            raise ValueError(
                f"{self} does not fit a tensor of {rank} dimensions; axis must be from {-rank} to {rank - 1}"
            )
        return self.axis % rank - rank

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        return (shape[self._axis(len(shape))],)

    def group_axes(self, rank: int) -> Shape:
        return (self._axis(rank),)

    def layout(self, shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
        order = _memory_order(shape, stride)
        if order is None:
            return None
        axis = self._axis(len(shape)) + len(shape)
        within = order[order.index(axis) + 1 :] if axis in order else []
        return _layout(max(math.prod(shape), 1), shape[axis], math.prod(shape[i] for i in within))

    def blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks(self._axis(len(shape)) + len(shape))


@dataclass(frozen=True)
class PerToken(Granularity, kind="token"):
    """One scale for each row along the last axis: shape x.shape[:-1]."""

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        _check_rank(self, shape, 1)
        return tuple(shape[:-1])

    def group_axes(self, rank: int) -> Shape:
        return tuple(range(-rank, -1))

    def fits_scale(self, shape: Sequence[int]) -> bool:
        return True

    def layout(self, shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
        _check_rank(self, shape, 1)
        order = _memory_order(shape, stride)
        last = len(shape) - 1
        if order is None or (rows := [axis for axis in order if axis != last]) != sorted(rows):
            return None
        faster = math.prod(shape[axis] for axis in order[order.index(last) + 1 :]) if last in order else 1
        return _layout(max(shape[-1], 1) * faster, faster, 1)

    def blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks(len(shape) - 1, shape[-1])

    @property
    def divides_rows(self) -> bool:
        return True

    @property
    def shape_follows_batch(self) -> bool:
        return True


@dataclass(frozen=True)
class PerGroup(Granularity, kind="group"):
    """One scale for each run of ``size`` elements of the last axis: shape x.shape[:-1] + (D / size,)."""

    size: int

    def __post_init__(self) -> None:
        check_integer("size", self.size, 1)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.size,)

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        return self.split_shape(shape)[:-1]

    def split_shape(self, shape: Sequence[int]) -> Shape:
        _check_rank(self, shape, 1)
        return (*shape[:-1], _divide(self, "size", self.size, shape, -1), self.size)

    def group_axes(self, rank: int) -> Shape:
        return tuple(range(-rank, -1))

    def fits_scale(self, shape: Sequence[int]) -> bool:
        return len(shape) >= 1

    def layout(self, shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
        self.scale_shape(shape)
        return Layout(self.size, 1, self.size) if _is_row_major(shape, stride) else None

    def blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks(len(shape) - 1, self.size)

    @property
    def divides_rows(self) -> bool:
        return True

    @property
    def splits(self) -> bool:
        return True


@dataclass(frozen=True)
class PerBlock(Granularity, kind="block"):
    """One scale for each block of ``rows`` x ``columns`` of the last two axes: shape (..., R / rows, C / columns)."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_integer("rows", self.rows, 1)
        check_integer("columns", self.columns, 1)

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.rows, self.columns

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        *leading, down, _, across, _ = self.split_shape(shape)
        return (*leading, down, across)

    def split_shape(self, shape: Sequence[int]) -> Shape:
        _check_rank(self, shape, 2)
        down = _divide(self, "rows", self.rows, shape, -2)
        across = _divide(self, "columns", self.columns, shape, -1)
        return (*shape[:-2], down, self.rows, across, self.columns)

    def group_axes(self, rank: int) -> Shape:
        return (*range(-rank, -3), -2)

    def fits_scale(self, shape: Sequence[int]) -> bool:
        return len(shape) >= 2

    def layout(self, shape: Sequence[int], stride: Sequence[int]) -> Layout | None:
        across = self.scale_shape(shape)[-1]
        period = max(self.rows * shape[-1], 1)
        return _layout(period, max(across, 1), self.columns) if _is_row_major(shape, stride) else None

    def blocks(self, shape: Sequence[int]) -> Blocks:
        return Blocks(len(shape) - 1, self.columns, self.rows)

    @property
    def divides_rows(self) -> bool:
        return True

    @property
    def splits(self) -> bool:
        return True


def _layout(period: int, channels: int, inner: int) -> Layout:
    """With one channel, a period is one run: as long a one as can be."""
    return Layout(period, channels, period if channels == 1 else inner)


def _check_rank(per: Granularity, shape: Sequence[int], rank: int) -> None:
    if len(shape) < rank:
        raise ValueError(f"{per} needs a tensor of at least {rank} dimension(s), but got shape {tuple(shape)}")


def _divide(per: Granularity, name: str, size: int, shape: Sequence[int], axis: int) -> int:
    if shape[axis] % size:
        raise ValueError(
            f"{per} does not fit shape {tuple(shape)}: {name} must divide {shape[axis]}, the size of axis {axis}"
        )
    return shape[axis] // size


def _memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The axes of more than one element, slowest first, if they fill memory without gap or overlap; else None."""
    if 0 in shape:
        return list(range(len(shape)))
    order = sorted((axis for axis in range(len(shape)) if shape[axis] != 1), key=lambda axis: -stride[axis])
    expected = 1
    for axis in reversed(order):
        if stride[axis] != expected:
            return None
        expected *= shape[axis]
    return order


def _is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    order = _memory_order(shape, stride)
    return order is not None and order == sorted(order)
