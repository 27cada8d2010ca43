"""More than 2^31 elements: indices that overflow 32 bits."""

from __future__ import annotations

import os

import pytest
import torch

from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerTensor
from lowbit.functional import dequantize, fake_quantize, quantize
from lowbit.functional.statistics import abs_max

ROWS, COLUMNS = 2**16 + 1, 2**15  # 2^31 + 2^15 elements

MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(MEMORY < 22 * 2**30, reason="needs 22 GiB of memory"),
]


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    """bfloat16 whose rows at the start, at element 2^31 and at the end hold known values."""
    tensor = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    for row in EDGES:
        tensor[row] = torch.linspace(-300, 300, COLUMNS).bfloat16()
    return tensor


EDGES = (0, 2**16 - 1, 2**16)


def test_quantize_and_dequantize(x: torch.Tensor) -> None:
    assert x.numel() > 2**31
    scale = torch.tensor(0.7)
    q = quantize(x, scale, dtype=torch.int8)
    y = dequantize(q, scale, dtype=torch.bfloat16)
    for row in EDGES:
        alone = quantize(x[row], scale, dtype=torch.int8)
        assert_same_bits(q[row], alone)
        assert_same_bits(y[row], dequantize(alone, scale, dtype=torch.bfloat16))
    assert q[1:-2].count_nonzero() == 0


def test_fake_quantize(x: torch.Tensor) -> None:
    for per, scale in ((PerTensor(), torch.tensor(0.7)), (PerChannel(0), torch.linspace(0.1, 3, ROWS))):
        y = fake_quantize(x, scale, grid=Grid(8), per=per)
        for row in EDGES:
            own = scale if scale.dim() == 0 else scale[row]
            assert_same_bits(y[row], fake_quantize(x[row], own, grid=Grid(8)))
        del y


def test_statistics(x: torch.Tensor) -> None:
    found = abs_max(x, PerChannel(0))
    assert [found[row].item() for row in (*EDGES, 1)] == [300, 300, 300, 0]
