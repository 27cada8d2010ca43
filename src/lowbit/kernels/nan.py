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


def mark_rare_nan(scale: Tensor, x: Tensor, *, per: Granularity) -> Tensor:
    """The same, by a question to the device: most often there is none, which a sum tells in one read"""
    return scale if math.isfinite(x.sum(dtype=torch.float32)) else mark_nan(scale, x, per=per)
