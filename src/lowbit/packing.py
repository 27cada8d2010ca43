"""Packing: several codes in one byte, the first in the lowest bits, as ONNX stores them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def width(bits: int) -> int:
    """The bits that a code takes in memory: 1, 2, 4, 8 or 16"""
    return next(width for width in (1, 2, 4, 8, 16) if bits <= width)


def pack(codes: Tensor, bits: int) -> Tensor:
    """byte = sum_i (code_i mod 2^w) * 2^(w i) over the 8 / w codes of a byte

    Codes of 8 bits stay as they are, those of 16 become int16, which keeps their bits.

    >>> pack(torch.tensor([1, -2, 7]), 4)
    tensor([225,   7], dtype=torch.uint8)
    """
    w = width(bits)
    if w == 16:
        return codes.to(torch.int16)
    if w == 8:
        return codes
    fields = codes.flatten().to(torch.int32) & (2**w - 1)
    per_byte = 8 // w
    fields = functional.pad(fields, (0, -fields.numel() % per_byte)).view(-1, per_byte)
    return (fields << _shifts(w, codes)).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The codes that ``pack`` took: of int8 and int16, with their sign; of uint8 and int32, without

    >>> unpack(torch.tensor([225, 7], dtype=torch.uint8), 4, torch.int8, (3,))
    tensor([ 1, -2,  7], dtype=torch.int8)
    """
    w = width(bits)
    if w == 16:
        return packed if dtype == torch.int16 else packed.to(torch.int32) & 0xFFFF
    if w == 8:
        return packed
    fields = ((packed.to(torch.int32).unsqueeze(1) >> _shifts(w, packed)) & (2**w - 1)).flatten()[: math.prod(shape)]
    if dtype == torch.int8:
        half = 2 ** (w - 1)
        fields = (fields + half) % (2 * half) - half
    return fields.view(tuple(shape)).to(dtype)


def _shifts(w: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, w, device=like.device, dtype=torch.int32)
