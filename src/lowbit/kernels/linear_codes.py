"""LinearCodes: what the step of a linear layer keeps for its backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Codes of a group of w's row that has a scale: to scale the sums of fewer takes longer than to multiply values. On a
# GPU so it is with more, where x has a zero point.
LEAST_GROUP, LEAST_GROUP_WITH_ZERO = 256, 512


class LinearCodes(NamedTuple):
    """x = (q_x - z) * s_x, with a scale for each row; w = q_w * s_w, with one for each row or group of a row

    ``bits``: one for each element of x, whether its rule passes a gradient.
    """

    q_x: Tensor
    x_scale: Tensor
    q_w: Tensor
    w_scale: Tensor
    zero_point: Tensor | None = None
    bits: Tensor | None = None
