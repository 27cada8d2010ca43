from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

import inputs
import oracle
from lowbit import PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.granularity import Granularity

SHAPES = ((6, 8), (2, 3, 12), (2, 4, 3, 8), (1, 3, 1, 4), (3, 4), (0, 8), (6, 0))


def fits(per: Granularity, shape: tuple[int, ...]) -> bool:
    return not isinstance(per, PerBlock) or shape[-2] % per.rows == 0


CASES = [(per, shape) for per, shape in itertools.product(inputs.PERS, SHAPES) if fits(per, shape)]


@pytest.mark.parametrize(("per", "shape"), CASES, ids=str)
def test_scale_shape(per: Granularity, shape: tuple[int, ...]) -> None:
    assert per.scale_shape(shape) == oracle.scale_shape(shape, per)


@pytest.mark.parametrize(("per", "shape"), CASES, ids=str)
def test_spread_gives_every_element_its_own_scale(per: Granularity, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    scale = torch.arange(math.prod(per.scale_shape(shape))).reshape(per.scale_shape(shape))
    split = per.split(x)
    each = per.join(per.spread(scale, split).expand(split.shape), shape)
    assert torch.equal(each, oracle.group_index(shape, per))
    assert per.group_size(shape) * scale.numel() == math.prod(shape) or not x.numel()


@pytest.mark.parametrize(("per", "shape"), CASES, ids=str)
def test_layout_of_every_dense_memory_order(per: Granularity, shape: tuple[int, ...]) -> None:
    """c = (i // period) * channels + (i // inner) % channels, for each element i of memory."""
    said = 0
    for order in itertools.permutations(range(len(shape))):
        memory = torch.zeros([shape[axis] for axis in order])
        x = memory.permute([order.index(axis) for axis in range(len(shape))])
        assert tuple(x.shape) == shape
        layout = per.layout(x.shape, x.stride())
        if layout is None:
            continue
        said += 1
        i = torch.arange(memory.numel())
        c = (i // layout.period) * layout.channels + (i // layout.inner) % layout.channels
        found = oracle.group_index(shape, per).permute(order).reshape(-1)
        assert torch.equal(c, found), (order, layout)
    assert said > 0


@pytest.mark.parametrize("per", [PerTensor(), PerChannel(1)], ids=str)
def test_layout_says_channels_last(per: Granularity) -> None:
    x = torch.zeros(2, 4, 3, 8).contiguous(memory_format=torch.channels_last)
    assert per.layout(x.shape, x.stride()) is not None


def test_layout_declines_memory_with_gaps() -> None:
    x = torch.zeros(6, 16)[:, ::2]
    for per in inputs.PERS:
        assert per.layout(x.shape, x.stride()) is None


def test_split_is_a_view_of_any_memory() -> None:
    for name, x in inputs.tensors(torch.float32, torch.device("cpu")).items():
        for per in (PerGroup(4), PerBlock(3, 4)):
            assert per.split(x).data_ptr() == x.data_ptr(), name


@pytest.mark.parametrize("per", inputs.PERS, ids=str)
def test_json_round_trip(per: Granularity) -> None:
    data = json.loads(json.dumps(per.to_dict()))
    assert Granularity.from_dict(data) == per
    assert type(per).from_dict(data) == per


def test_from_dict_of_the_wrong_kind() -> None:
    with pytest.raises(ValueError, match="'token'"):
        PerToken.from_dict(PerTensor().to_dict())


@pytest.mark.parametrize("per", inputs.PERS, ids=str)
def test_numbers_make_the_same_again(per: object) -> None:
    assert type(per)(*per.numbers) == per
