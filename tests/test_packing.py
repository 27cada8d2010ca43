"""Packed codes: what goes in comes out, in as few bytes as the bits allow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.packing import pack, unpack, width

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
BITS = st.integers(1, 16)


def dtype_of(bits: int, signed: bool) -> torch.dtype:
    """That of codes with so many bits: int32 holds 16 without a sign."""
    if signed:
        return torch.int8 if bits <= 8 else torch.int16
    return torch.uint8 if bits <= 8 else torch.int32


def draw(bits: int, signed: bool, shape: tuple[int, ...], seed: int) -> Tensor:
    """Codes of the whole range; its ends come first."""
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(low, high, (math.prod(shape),), generator=generator)
    codes[:2] = torch.tensor([low, high - 1])[: codes.numel()]
    return codes.view(shape).to(dtype_of(bits, signed))


@given(bits=BITS, signed=st.booleans(), shape=SHAPES, seed=st.integers(0, 999))
def test_unpack_gives_what_pack_took(bits: int, signed: bool, shape: tuple[int, ...], seed: int) -> None:
    codes = draw(bits, signed, shape, seed)
    packed = pack(codes, bits)
    found = unpack(packed, bits, codes.dtype, shape)
    assert found.dtype == codes.dtype
    assert found.shape == shape
    assert torch.equal(found, codes)
    assert packed.nbytes == math.ceil(codes.numel() * width(bits) / 8)


@given(bits=st.integers(1, 4), signed=st.booleans(), shape=SHAPES, seed=st.integers(0, 999))
def test_the_first_code_is_in_the_lowest_bits(bits: int, signed: bool, shape: tuple[int, ...], seed: int) -> None:
    codes, w = draw(bits, signed, shape, seed), width(bits)
    wanted = []
    for start in range(0, codes.numel(), 8 // w):
        fields = codes.flatten()[start : start + 8 // w].tolist()
        wanted.append(sum((field % 2**w) << (w * i) for i, field in enumerate(fields)))
    assert pack(codes, bits).tolist() == wanted


@given(bits=BITS, signed=st.booleans(), seed=st.integers(0, 999))
def test_strides_do_not_matter(bits: int, signed: bool, seed: int) -> None:
    codes = draw(bits, signed, (4, 3, 5), seed)
    moved = codes.permute(2, 0, 1)
    assert torch.equal(unpack(pack(moved, bits), bits, codes.dtype, moved.shape), moved)


def test_width() -> None:
    assert [width(bits) for bits in range(1, 17)] == [1, 2, 4, 4, *[8] * 4, *[16] * 8]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_what_is_left_of_the_last_byte_is_zero(bits: int) -> None:
    ones = torch.full((3,), 2**bits - 1, dtype=torch.uint8)
    codes = int.from_bytes(bytes(pack(ones, bits).tolist()), "little")
    assert codes == 2 ** (3 * bits) - 1


def test_nothing_is_changed_in_place() -> None:
    codes = draw(4, True, (9,), 0)
    before = codes.clone()
    packed = pack(codes, 4)
    held = packed.clone()
    unpack(packed, 4, torch.int8, (9,))
    assert torch.equal(codes, before)
    assert torch.equal(packed, held)
