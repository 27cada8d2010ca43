"""Which fast backends can run here, and on which device: native, and Triton on a GPU or in its interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor

from compare import assert_same_bits
from lowbit import Plan
from lowbit.kernels import plan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

FAST = [name for name in ("native", "triton") if not plan.absence(name)]


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


# Every pair of a device and a backend that can run here.
RUNNABLE = [("cpu", "reference"), *((device_of(name).type, name) for name in FAST)]
if torch.cuda.is_available():
    RUNNABLE.append(("cuda", "reference"))


def other_memory(x: Tensor) -> Iterator[Tensor]:
    """The same values in other strides, and a tensor that repeats one row."""
    yield x
    yield x.contiguous(memory_format=torch.channels_last)
    yield x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    yield torch.stack([x, x], -1)[..., 0]
    yield x[:1].expand_as(x)
    padded = x.new_zeros(x.numel() + 1)
    padded[1:] = x.reshape(-1)
    yield padded[1:].view(x.shape)


def call(op: str, backend: str, x: Tensor, *args: object, **records: object) -> object:
    """What the op's plan for x gives on one backend."""
    options = {name: records.pop(name) for name in ("dtype", "method", "symmetric") if name in records}
    return Plan.select(op, x, prefer=backend, **records).run(*args, **options)


def assert_all_same_bits(op: str, backend: str, x: Tensor, *args: object, **records: object) -> None:
    """Every result of the op has the reference's bits."""
    got = call(op, backend, x, *args, **records)
    wanted = call(op, "reference", x, *args, **records)
    if isinstance(wanted, Tensor):
        got, wanted = (got,), (wanted,)
    for actual, expected in zip(got, wanted, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert_same_bits(actual, expected)
