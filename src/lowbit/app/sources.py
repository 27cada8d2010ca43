"""Where a run's model and data come from: lowbit's own, or a function of the user's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit.app.config import TrainConfig
from lowbit.app.data import Data, load_data
from lowbit.app.fit import Course, Loaders, evaluation_batches, training_batches
from lowbit.app.networks import NETWORKS

Source = Data | Loaders

_PARTS = ("train", "held_out", "test")
_WANTED = "it must return (model, data), where data is a lowbit.app.data.Data or the loaders (train, held_out, test)"


def build(config: TrainConfig) -> tuple[nn.Module, Source]:
    """The float model, its weights drawn from the seed, and the data; the same each time"""
    if not config.is_builtin:
        return _call(config)
    data = load_data(config.data, config.folder, held_out=config.held_out, seed=config.seed)
    _, channels, height, width = data.train.images.shape
    torch.manual_seed(config.seed)
    return NETWORKS[config.model](channels, data.classes, min(height, width)), data


def calibration_inputs(config: TrainConfig, data: Source) -> list[Any]:
    """The inputs of the first training batches"""
    course = Course(batch_size=config.batch_size, seed=config.seed)
    torch.manual_seed(config.seed)  # by which a loader of the user's may shuffle
    return [inputs for inputs, _ in islice(training_batches(data, course), config.calibration_batches)]


def example_inputs(data: Source, part: str = "held_out", count: int = 8) -> Any:
    """The first inputs of a part, at most so many"""
    inputs, _ = next(iter(evaluation_batches(data, getattr(data, part))))
    return inputs[:count]


def _call(config: TrainConfig) -> tuple[nn.Module, Source]:
    """What the user's function returns, checked"""
    module_name, _, name = config.model.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, and an installed script does not
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own imports
        raise ValueError(f"model is {config.model!r}, but there is no module {error.name!r} to import") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"model is {config.model!r}, but {module_name} has no function {name!r}")
    torch.manual_seed(config.seed)
    found = function()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        raise TypeError(f"{config.model} returned {type(found).__name__}, but {_WANTED}")
    model, data = found
    return model, _source(config.model, data)


def _source(name: str, data: Any) -> Source:
    if isinstance(data, Data | Loaders):
        return data
    if isinstance(data, Mapping) and set(data) == set(_PARTS):
        data = [data[part] for part in _PARTS]
    if isinstance(data, list | tuple) and len(data) == len(_PARTS) and all(isinstance(part, Iterable) for part in data):
        return Loaders(*data)
    raise TypeError(f"{name} returned a {type(data).__name__} as data, but {_WANTED}")
