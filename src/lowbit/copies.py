"""copied: a copy of a model, computed weights and all."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model) -> Model:
    """A deep copy; torch copies no tensor that has a gradient's history, as the weight of a pruned layer has."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = {id(value): value.detach().clone() for value in attributes if isinstance(value, Tensor)}
    copied = copy.deepcopy(model, computed)
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):  # whose weights lie in one piece on a GPU, which copies of each do not
            module.flatten_parameters()
    return copied
