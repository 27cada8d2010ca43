"""Processes: the ranks of one run, as torchrun starts them, which share every batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_BACKEND = "gloo"


class FirstFailedError(RuntimeError):
    """The first process failed, and has said why."""

    def __init__(self) -> None:
        super().__init__("the first process failed; see its message")


@dataclass(frozen=True)
class Processes:
    """This one's rank, of ``size`` on ``nodes`` machines; rank 0 alone prints, and writes files

    All must see the run's folder: the others read there what the first has written.
    """

    rank: int = 0
    size: int = 1
    nodes: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def trainer_options(self) -> dict[str, Any]:
        """For Lightning's Trainer"""
        if self.size == 1:
            return {"devices": 1}
        return {"devices": self.size // self.nodes, "num_nodes": self.nodes, "strategy": "ddp"}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The processes as one group, which the ranks' statistics and gradients go through"""
        if self.size == 1:
            yield
            return
        import torch.distributed as dist

        dist.init_process_group(_BACKEND)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def first(self, do: Callable[[], object]) -> None:
        """Do it in the first process, while the others wait; where it fails, all of them stop"""
        error: BaseException | None = None
        if self.is_first:
            try:
                do()
            except BaseException as raised:  # whatever it is: the others must not wait for ever
                error = raised
        if self.size > 1:
            import torch.distributed as dist

            told = [error is not None]
            dist.broadcast_object_list(told, src=0)
            if told[0] and not self.is_first:
                raise FirstFailedError
        if error is not None:
            raise error


def processes() -> Processes:
    """What torchrun wrote into the environment; alone without it"""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Processes()
    rank, size, on_node = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return Processes(rank, size, size // on_node)
