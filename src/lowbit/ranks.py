"""Ranks: the processes that share one batch, and what their parts of it give together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranks:
    """The processes of one torch.distributed group, each with its part of the batch.

    Each method is one collective on a tensor of one value per scale group: all ranks call it, in the same order, and
    all get the same bits.
    """

    group: dist.ProcessGroup | None

    @staticmethod
    def of(group: dist.ProcessGroup | None = None) -> Ranks | None:
        """The ranks of a group (None: the default one); None where this process is alone."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return Ranks(group) if dist.get_world_size(group) > 1 else None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    def max(self, values: Tensor) -> Tensor:
        """m[c] = max(values[c]) over ranks"""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum(self, values: Tensor) -> Tensor:
        """m[c] = sum(values[c]) over ranks"""
        return self._reduce(values, dist.ReduceOp.SUM)

    def range(self, low: Tensor, high: Tensor, has_data: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """lo[c], hi[c] = min(low[c]), max(high[c]) over the ranks that have data, 0 and 0 where none has"""
        ends = torch.stack([-low, high])
        if has_data is not None:
            ends = torch.where(has_data, ends, -torch.inf)
        ends = self.max(ends)
        ends = torch.where(ends.isfinite(), ends, 0)
        return -ends[0] + 0.0, ends[1] + 0.0  # adding 0 makes -0 and 0 one

    def mean(self, means: Tensor, counts: Tensor) -> Tensor:
        """m[c] = sum(means[c] * counts[c]) / sum(counts[c]) over ranks, 0 where no rank counts any"""
        total, count = self.sum(torch.stack([means.double() * counts, counts.double().expand_as(means)]))
        return torch.div(total, count.clamp_min(1)).to(means.dtype)

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, op=op, group=self.group)
        return values


def replicate(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> set[nn.Parameter]:
    """grad = sum(grad) / ranks after each backward, for parameters that every rank holds whole; gives them back

    ``fully_shard`` refuses parameters of no dimension, and drops what a forward writes into one, as a learned scale's
    start does. So learned scales stay whole: what this gives back is what ``fully_shard`` must leave alone.

        whole = replicate(scale_parameters(model))
        fully_shard(model, ignored_params=whole)

    DistributedDataParallel needs none of it. The ranks must start from equal values, and every rank must use every
    parameter in every step.
    """

    @torch.no_grad()
    def average(parameter: Tensor) -> None:
        ranks = Ranks.of(group)
        if ranks is not None and parameter.grad is not None:
            parameter.grad.copy_(ranks.sum(parameter.grad) / ranks.size)

    whole = set(parameters)
    for parameter in whole:
        parameter.register_post_accumulate_grad_hook(average)
    return whole
