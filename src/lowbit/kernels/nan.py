"""NaN, which codes cannot hold: it is seen by the scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.granularity import Granularity


def mark_nan(scale: Tensor, x: Tensor, *, per: Granularity) -> Tensor:
    """s[c], NaN where group c of x holds NaN"""
    if x.numel() == 0:
        return scale
    return scale.masked_fill(per.reduce(torch.amax, per.split(x)).isnan(), math.nan)  # a maximum keeps NaN


def may_hold_nan(x: Tensor) -> bool:
    """Whether to look for NaN in x: a sum that is finite, which one read tells, has none."""
    return not math.isfinite(x.detach().sum(dtype=torch.float32))
