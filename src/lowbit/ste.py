"""SteKind: the straight-through gradient rules, one formula each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from lowbit.record import check_choice


class SteKind(StrEnum):
    """How the gradient passes the rounding: dx as a function of the upstream gradient g and the input x.

    With ``lo, hi = (quant_min - z) * s, (quant_max - z) * s``:

    - ``IDENTITY``          dx = g
    - ``CLIPPED_IDENTITY``  dx = g where lo <= x <= hi, else 0
    - ``IN_RANGE``          dx = g where quant_min <= round(x / s) + z <= quant_max, else 0
    - ``TANH``              dx = g * (1 - tanh(x / s)^2), 0 where x is not finite
    - ``HARD_TANH``         dx = g * (1 - abs(x) / bound) where abs(x) < bound, else 0;
      bound = hi for x >= 0 and -lo for x < 0

    >>> SteKind("tanh") is SteKind.TANH
    True
    """

    IDENTITY = "identity"
    CLIPPED_IDENTITY = "clipped_identity"
    IN_RANGE = "in_range"
    TANH = "tanh"
    HARD_TANH = "hard_tanh"

    @property
    def only_clips(self) -> bool:
        """Whether the rule is IDENTITY for every x that the grid's range holds."""
        return self in (SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE)

    def to_dict(self) -> dict[str, str]:
        """``{"ste": "tanh"}``, as ``from_dict`` reads it."""
        return {"ste": self.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SteKind:
        """The rule that ``to_dict`` wrote."""
        if not isinstance(data, Mapping):
            raise TypeError(f"SteKind.from_dict got {data!r}, but it takes a dict such as {{'ste': 'tanh'}}")
        for key in data:
            if key != "ste":
                raise ValueError(f"SteKind has no key {key!r}; its key is 'ste'")
        value = data.get("ste", "")
        check_choice("ste", value, tuple(kind.value for kind in cls))
        return cls(value)
