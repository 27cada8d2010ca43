"""Case: one thing to measure; and the list of them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

import torch

from lowbit.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.grid import Grid
from lowbit.ste import SteKind

GRID = Grid(8)

# A scale group that spans more memory than this is read twice when its scale follows from its own data: about what one
# core or one streaming multiprocessor keeps at hand.
ON_CHIP = 2**20


class Op(StrEnum):
    """What is called: ``functional.fake_quantize`` at a given scale, FakeQuantize with a PerBatch or EMA scale, …"""

    FAKE_QUANTIZE = "fake_quantize"
    PER_BATCH = "per_batch"
    EMA = "ema"
    LEARNED = "learned"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"

    @property
    def follows_data(self) -> bool:
        """Whether the scale comes from the data of the same call."""
        return self in (Op.PER_BATCH, Op.EMA)


class Direction(StrEnum):
    """What one call is: the forward of a training step, or the forward and its backward."""

    FORWARD = "forward"
    BOTH = "forward+backward"


@dataclass(frozen=True)
class Family:
    """An op at a granularity, by the name that cases carry."""

    name: str
    op: Op
    per: Granularity


@dataclass(frozen=True)
class Case:
    """One thing to measure: a family at a dtype, a shape in memory, a gradient rule and a direction."""

    family: Family
    dtype: torch.dtype
    shape: tuple[int, ...]
    channels_last: bool
    ste: SteKind
    direction: Direction

    @property
    def name(self) -> str:
        """family/dtype/shape/rule/direction, as in ``per_channel0/bf16/16384x4096/clipped_identity/forward``"""
        shape = "x".join(str(size) for size in self.shape) + ("-channels_last" if self.channels_last else "")
        return "/".join((self.family.name, DTYPES[self.dtype], shape, self.ste.value, self.direction.value))

    @property
    def op(self) -> Op:
        """What is called."""
        return self.family.op

    @property
    def per(self) -> Granularity:
        """Which elements share a scale."""
        return self.family.per

    @property
    def numel(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def has_backward(self) -> bool:
        """Whether a call runs the backward too."""
        return self.direction is Direction.BOTH

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of quantize's and dequantize's codes: int8, or the float codes that carry a gradient."""
        if not self.has_backward:
            return torch.int8
        return torch.float32 if self.op is Op.QUANTIZE else self.dtype

    @property
    def backward_needs_x(self) -> bool:
        """Whether dx depends on x: not under IDENTITY, nor where a rule that clips meets the data's own range."""
        if self.op is Op.LEARNED or self.op is Op.QUANTIZE:
            return True
        if self.op is Op.DEQUANTIZE or self.ste is SteKind.IDENTITY:
            return False
        return not (self.op is Op.PER_BATCH and self.ste.only_clips)

    @property
    def tensor_bytes(self) -> int:
        """The bytes of x."""
        return self.numel * self.dtype.itemsize

    @property
    def copy_bytes(self) -> int:
        """The bytes that a copy of x moves: one read, one write."""
        return 2 * self.tensor_bytes

    @property
    def floor_bytes(self) -> int:
        """The fewest bytes that a call can move.

        - forward: x is read and y written (an x whose scale follows from data that no cache holds: read twice)
        - backward: g and, where the rule needs it, x are read, and dx is written; IDENTITY hands g on and moves nothing
        - the float32 scales are read in each pass that uses them
        """
        x, codes = self.tensor_bytes, self.numel * self.code_dtype.itemsize
        scales = 4 * math.prod(self.per.scale_shape(self.shape))
        if self.op is Op.QUANTIZE:
            return x + codes + scales + (codes + 2 * x + scales if self.has_backward else 0)
        if self.op is Op.DEQUANTIZE:
            return codes + x + scales + (x + codes + scales if self.has_backward else 0)
        forward = 2 * x + scales
        if self.op.follows_data and self._group_span > ON_CHIP:
            forward += x
        return forward + (3 * x + scales if self.has_backward and self.backward_needs_x else 0)

    @property
    def _group_span(self) -> int:
        """The bytes of memory from a scale group's first element to its last."""
        if isinstance(self.per, PerTensor) or (isinstance(self.per, PerChannel) and self.per.axis != 0):
            return self.tensor_bytes
        return self.per.group_size(self.shape) * self.dtype.itemsize


DTYPES = {torch.float32: "float32", torch.bfloat16: "bf16"}
MATRICES = ((256, 64), (1024, 1024), (4096, 1024), (16384, 4096))
IMAGES = (64, 64, 56, 56)

_PER = {
    "per_tensor": PerTensor(),
    "per_channel0": PerChannel(0),
    "per_channel1": PerChannel(1),
    "per_token": PerToken(),
    "per_group32": PerGroup(32),
}
_KEPT = ("per_tensor", "per_channel0", "per_channel1")  # scales that a state can hold

FAMILIES = (
    *(Family(name, Op.FAKE_QUANTIZE, per) for name, per in _PER.items()),
    *(Family(f"per_batch_{name}", Op.PER_BATCH, per) for name, per in _PER.items()),
    *(Family(f"{op}_{name}", op, _PER[name]) for op in (Op.LEARNED, Op.EMA) for name in _KEPT),
    *(Family(f"{op}_{name}", op, per) for op in (Op.QUANTIZE, Op.DEQUANTIZE) for name, per in _PER.items()),
)

# The rows of DESIGN.md's table: what runs where no case is asked for.
HEADLINE = {
    "cuda": (
        "per_*/bf16/16384x4096/clipped_identity/forward+backward",
        "learned_*/bf16/16384x4096/clipped_identity/forward+backward",
        "ema_per_tensor/bf16/16384x4096/clipped_identity/forward+backward",
        "*quantize_per_tensor/bf16/16384x4096/*/forward",
        "per_tensor/*/256x64/clipped_identity/*",
    ),
    "cpu": (
        "per_*/float32/4096x1024/clipped_identity/*",
        "learned_*/float32/4096x1024/clipped_identity/forward+backward",
        "ema_per_tensor/float32/4096x1024/clipped_identity/*",
        "*quantize_per_tensor/float32/4096x1024/*/forward",
        "per_tensor/*/256x64/clipped_identity/*",
    ),
}
QUICK = (
    "per_*/float32/256x64/clipped_identity/forward+backward",
    "learned_per_tensor/float32/256x64/clipped_identity/forward+backward",
    "ema_per_tensor/float32/256x64/clipped_identity/forward+backward",
    "*quantize_per_tensor/float32/256x64/*/forward",
)


def all_cases() -> Iterator[Case]:
    """Every family, dtype, shape and rule with its backward; each forward once, since no rule changes it."""
    for family in FAMILIES:
        for dtype in DTYPES:
            for shape, channels_last in _places(family):
                yield Case(family, dtype, shape, channels_last, SteKind.CLIPPED_IDENTITY, Direction.FORWARD)
                for ste in _rules(family.op):
                    yield Case(family, dtype, shape, channels_last, ste, Direction.BOTH)


def find_cases(globs: Iterable[str]) -> list[Case]:
    """The cases that some glob matches, in the registry's order; a glob may leave a name's last parts out."""
    globs = [pattern for glob in globs for pattern in (glob, f"{glob}/*")]
    return [case for case in all_cases() if any(fnmatchcase(case.name, glob) for glob in globs)]


def _places(family: Family) -> Iterator[tuple[tuple[int, ...], bool]]:
    for shape in MATRICES:
        yield shape, False
    # Activations: their channels are axis 1, and a row of 56 has no whole groups of 32.
    if isinstance(family.per, PerTensor | PerToken) or family.per == PerChannel(1):
        yield IMAGES, False
        yield IMAGES, True


def _rules(op: Op) -> tuple[SteKind, ...]:
    if op is Op.QUANTIZE or op is Op.DEQUANTIZE:  # their backward is given
        return (SteKind.CLIPPED_IDENTITY,)
    return tuple(SteKind)
