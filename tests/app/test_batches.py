"""Batches: normalized images, in an order that seed and epoch alone decide."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader

from lowbit.app.data import Data, EpochBatches, Normalized, normalize


def test_normalize() -> None:
    x = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    assert normalize(x, [0.5, 0.25], [0.5, 0.25]).tolist() == [[[[-1.0]], [[3.0]]]]
    assert normalize(x[0] / 255, [0.5, 0.25], [0.5, 0.25]).tolist() == [[[-1.0]], [[3.0]]]


def test_loaders(digits: Data) -> None:
    """Whole batches, collated images, and the split itself are the same numbers."""
    dataset = Normalized(digits.train, digits.mean, digits.std)
    batches = EpochBatches(len(dataset), 100, seed=0)
    whole = list(DataLoader(dataset, sampler=batches, batch_size=None))
    collated = list(DataLoader(dataset, batch_sampler=batches))
    assert len(whole) == len(collated) == len(batches) == 13
    for (images, labels), (same_images, same_labels), indices in zip(whole, collated, batches, strict=True):
        assert images.dtype == torch.float32
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
        assert torch.equal(labels, digits.train.labels[indices])
    images = torch.cat([images for images, _ in whole])
    assert abs(images.mean().item()) < 1e-5
    assert abs(images.std().item() - 1) < 1e-4


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int, batch_size: int = 10) -> list[int]:
        batches = EpochBatches(50, batch_size, seed)
        batches.set_epoch(epoch)
        return [*chain(*batches)]

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert all(sorted(found) == list(range(50)) for found in orders.values())
    assert len(set(map(tuple, orders.values()))) == 9
    torch.manual_seed(1)
    assert order(1, 2) == orders[1, 2] == order(1, 2, batch_size=7)


def test_iteration_keeps_the_epoch_it_began_with() -> None:
    batches = EpochBatches(50, 10, seed=0)
    expected, running = list(batches), iter(batches)
    batches.set_epoch(1)
    assert list(running) == expected


@pytest.mark.parametrize("size", [64, 65, 66, 68, 71])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_the_batch_of_one_process(size: int, ranks: int, drop_last: bool) -> None:
    alone = list(EpochBatches(size, 16, seed=5))
    parts = [EpochBatches(size, 16, seed=5, rank=rank, ranks=ranks, drop_last=drop_last) for rank in range(ranks)]
    steps = [[*chain(*step)] for step in zip(*parts, strict=True)]
    partial = size % 16
    kept = partial > 0 and not drop_last and partial % ranks == 0
    assert steps == alone[: 4 + kept]
    for part in parts:
        assert len(part) == len(list(part)) == 4 + kept
        assert part.dropped == (0 if kept else partial)
        assert {len(step) for step in list(part)[:4]} == {16 // ranks}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"ranks": 0}, "ranks is 0"),
        ({"rank": 2, "ranks": 2}, "rank is 2, but it must be from 0 to 1"),
        ({"batch_size": 9, "ranks": 2}, "batch_size is 9, but 2 ranks share it: it must be a multiple of 2"),
        (
            {"size": 5, "drop_last": True},
            "leaves no batch for 1 ranks with drop_last=True; choose a batch_size of at most 5",
        ),
        ({"size": 5, "ranks": 2}, "leaves no batch for 2 ranks"),
    ],
)
def test_batches_refuse(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochBatches(**({"size": 50, "batch_size": 10, "seed": 0} | arguments))


def test_epoch_is_checked() -> None:
    with pytest.raises(ValueError, match="epoch is -1"):
        EpochBatches(50, 10, seed=0).set_epoch(-1)
