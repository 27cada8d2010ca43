"""Comparisons that say what differs, and can fail: tests/test_compare.py shows each of them failing."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle import Codes

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The raw bits, with every NaN made the same."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(_BITS[tensor.element_size()]) if tensor.dtype != torch.bool else tensor


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    differ = bits(actual) != bits(expected)
    if differ.any():
        first = differ.reshape(-1).nonzero()[0].item()
        got, wanted = (value.detach().cpu().reshape(-1)[first].item() for value in (actual, expected))
        raise AssertionError(
            f"{int(differ.sum())} of {differ.numel()} differ; first at {first}: got {got!r}, not {wanted!r}"
        )


def assert_codes(actual: Tensor, expected: Codes, eps: float) -> None:
    """Equal wherever the margin exceeds one eps of x / s; at most one off inside it. NaN matches NaN."""
    actual = actual.detach().cpu().double()
    nan = expected.codes.isnan()
    assert torch.equal(actual.isnan(), nan), "NaN where there should be none, or none where there should be"
    distance = torch.where(nan, 0.0, (actual - expected.codes).abs())
    near = expected.margin <= eps * (expected.unclamped.abs() + 1)
    assert not (distance > 0)[~near].any(), f"{int((distance > 0)[~near].sum())} codes differ away from any boundary"
    assert not (distance > 1).any(), "a code is more than one off"


def assert_gradient(
    actual: Tensor, expected: Tensor, margin: Tensor, x_over_s: Tensor, eps: float, slack: Tensor
) -> None:
    """Within ``slack`` wherever x is more than an eps of x / s away from where the rule jumps."""
    actual = actual.detach().cpu().double()
    far = ~(margin <= eps * (x_over_s.abs() + 1))  # NaN and infinite margins are far
    wrong = far & ~((actual - expected).abs() <= slack) & ~(actual.isnan() & expected.isnan())
    same_inf = actual.isinf() & (actual == expected)
    wrong &= ~same_inf
    if wrong.any():
        first = wrong.reshape(-1).nonzero()[0].item()
        raise AssertionError(
            f"{int(wrong.sum())} gradients are off; first at {first}: "
            f"got {actual.reshape(-1)[first].item()!r}, not {expected.reshape(-1)[first].item()!r}"
        )
