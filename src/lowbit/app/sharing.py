"""A batch that several processes share: each takes its rows, and batch norms take the statistics of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lowbit.app.processes import Processes
from lowbit.ranks import Ranks


def rows_of(batch: Any, rank: int, ranks: int) -> Any:
    """Rows n*r/R to n*(r+1)/R of every tensor in a batch of n"""

    def cut(leaf: Any) -> Any:
        return leaf[len(leaf) * rank // ranks : len(leaf) * (rank + 1) // ranks] if isinstance(leaf, Tensor) else leaf

    return tree_map(cut, batch)


def shared_batches(loader: Any, here: Processes, seed: int) -> Iterator[tuple[Any, Tensor, int]]:
    """(inputs, labels, n) for each batch of n rows that a loader gives: this process's rows of it

    Every process goes through the whole loader, so that the batches are those of one process. For that the loader draws
    from random numbers of its own, the same in each; what the model draws differs from rank to rank.
    """
    batches = iter(loader)
    of_loader = torch.get_rng_state()
    torch.manual_seed(seed + (here.rank << 40))
    while True:
        of_model = torch.get_rng_state()
        torch.set_rng_state(of_loader)
        batch = next(batches, None)
        of_loader = torch.get_rng_state()
        torch.set_rng_state(of_model)
        if batch is None:
            return
        inputs, labels = batch
        yield rows_of(inputs, here.rank, here.size), rows_of(labels, here.rank, here.size), len(labels)


def joint_batch_norm() -> AbstractContextManager[Any]:
    """Batch norms in training normalize by the mean and variance over all ranks' rows, as one process does

    torch.nn.SyncBatchNorm does so on GPUs alone.
    """
    ranks = Ranks.of()
    return nullcontext() if ranks is None else _JointBatchNorm(ranks)


class _JointBatchNorm(TorchFunctionMode):
    """y = gamma * (x - mu) / sqrt(var + eps) + beta,  mu and var of all ranks' x"""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm and kwargs.get("training", args[5] if len(args) > 5 else False):
            return self._normalize(*args, **kwargs)
        return func(*args, **kwargs)

    def _normalize(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, -1, *(1 for _ in axes[1:])]
        count = self.ranks.sum(torch.tensor(x.numel() / x.shape[1], dtype=torch.float64)).item()
        if count == 1:
            raise ValueError(
                f"a batch norm in training needs more than one value per channel, but got {tuple(x.shape)}"
            )
        mean = self._sum(x.sum(axes)) / count
        centred = x - mean.view(shape)
        var = self._sum(centred.square().sum(axes)) / count
        with torch.no_grad():
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean, momentum)
                running_var.lerp_(var * (count / (count - 1)), momentum)
        y = centred * torch.rsqrt(var + eps).view(shape)
        y = y if weight is None else y * weight.view(shape)
        return y if bias is None else y + bias.view(shape)

    def _sum(self, own: Tensor) -> Tensor:
        """The sum over ranks; its gradient is the sum of theirs, since every rank's loss depends on it"""
        total = own.clone()
        with torch.no_grad():
            total.copy_(self.ranks.sum(total))
        if total.requires_grad:
            total.register_hook(self.ranks.sum)
        return total
