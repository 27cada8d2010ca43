"""Signature: what a kernel is made for, and the memory it runs on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.granularity import Granularity, Layout
from lowbit.grid import Grid
from lowbit.kernels.precision import math_dtype
from lowbit.ste import SteKind


class Signature(NamedTuple):
    """An op, the tensor it runs on (not its values), and the op's records: all that choosing a kernel needs."""

    op: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grid: Grid
    per: Granularity
    ste: SteKind

    @property
    def math_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return math_dtype(self.dtype)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the scale; ValueError where the granularity does not fit."""
        return self.per.scale_shape(self.shape)

    @property
    def memory(self) -> Memory:
        """The memory that a fused kernel runs on: the tensor's own where a Layout can say it, else a copy's."""
        layout = self.per.layout(self.shape, self.stride)
        if layout is not None:
            return Memory(self.shape, self.stride, layout, copies=False)
        # Dense in the order that the result of an op has, where a Layout can say that, else row by row.
        like = torch.empty_strided(self.shape, self.stride, device="meta")
        for stride in (torch.empty_like(like).stride(), torch.empty(self.shape, device="meta").stride()):
            layout = self.per.layout(self.shape, stride)
            if layout is not None:
                return Memory(self.shape, stride, layout, copies=True)
        raise AssertionError(f"{self.per} must have a Layout for contiguous memory")


class Memory(NamedTuple):
    """Dense memory: its strides, which element of it belongs to which scale group, and whether it is a copy."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout
    copies: bool

    def arrange(self, tensor: Tensor) -> Tensor:
        """``tensor`` in this memory: itself where it lies so already, else a copy."""
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        stride = tensor.stride()
        if stride == self.stride or all(
            size == 1 or own == wanted for size, own, wanted in zip(self.shape, stride, self.stride, strict=True)
        ):
            return tensor
        return self.empty(tensor.dtype, tensor.device).copy_(tensor)

    def restore(self, result: Tensor, like: Tensor) -> Tensor:
        """``result``, made in this memory, in the strides that torch gives the result of an op on ``like``."""
        if not self.copies:
            return result
        kept = torch.empty_like(like, dtype=result.dtype)
        return result if kept.stride() == result.stride() else kept.copy_(result)

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory of this kind."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device)
