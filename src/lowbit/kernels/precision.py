"""What dtype a kernel computes in, and what it guarantees about the bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class PrecisionGuarantee:
    """What may be relied on: the dtypes of the arithmetic and of sums (None where nothing is summed), and the bits.

    ``deterministic``: the same bits on every run and for any number of threads. ``bit_stable``: the same bits in every
    backend; sums are within n eps of each other across backends instead, and tanh within 4 ulp.
    """

    math_dtype: torch.dtype
    accumulator: torch.dtype | None
    deterministic: bool
    bit_stable: bool
