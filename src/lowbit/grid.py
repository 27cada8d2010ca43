"""Grid: which integers a code may be."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.record import Record, check_flag, check_integer


@dataclass(frozen=True)
class Grid(Record):
    """signed: [-2^(b-1), 2^(b-1) - 1];  narrow: [-(2^(b-1) - 1), 2^(b-1) - 1];  unsigned: [0, 2^b - 1]

    Signed grids take 2 to 16 bits, unsigned ones 1 to 16. ``narrow`` gives up the lowest code, so that a signed grid is
    symmetric around 0.

    >>> Grid(4).quant_min, Grid(4).quant_max
    (-8, 7)
    """

    bits: int
    signed: bool = True
    narrow: bool = False

    def __post_init__(self) -> None:
        check_flag("signed", self.signed)
        check_flag("narrow", self.narrow)
        check_integer("bits", self.bits, 1, 16)
        if self.signed and self.bits < 2:
            raise ValueError("bits is 1, but a signed grid must have from 2 to 16; use signed=False for 1 bit")
        if self.narrow and not self.signed:
            raise ValueError("narrow is True, but an unsigned grid has no lowest code to give up; use signed=True")

    @property
    def quant_min(self) -> int:
        """The smallest code."""
        return -(1 << (self.bits - 1)) + self.narrow if self.signed else 0

    @property
    def quant_max(self) -> int:
        """The largest code."""
        return (1 << (self.bits - self.signed)) - 1

    @property
    def fits_int8(self) -> bool:
        """Whether every code is a number of int8."""
        return self.quant_max <= 127
