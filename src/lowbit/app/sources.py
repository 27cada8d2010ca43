"""Where a run's model and data come from: lowbit's own, a function of the user's, or a transformers folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lowbit.app.config import TrainConfig
from lowbit.app.data import Data, load_data
from lowbit.app.fit import Course, Loaders, evaluation_batches, training_batches
from lowbit.app.networks import NETWORKS
from lowbit.app.processes import Processes
from lowbit.app.sharing import rows_of
from lowbit.app.texts import Texts, build_transformer, read_texts, texts_of

Source = Data | Loaders

_PARTS = ("train", "held_out", "test")
_WANTED = "it must return (model, data), where data is a lowbit.app.data.Data or the loaders (train, held_out, test)"
_WANTED_TEXTS = "it must return (train, held_out, test), each a list of (text, label)"


def build(config: TrainConfig) -> tuple[nn.Module, Source]:
    """The float model, its weights drawn from the seed, and the data; the same each time"""
    if config.is_transformer:
        return build_transformer(config, _texts(config))
    if not config.is_builtin:
        return _own(config)
    data = load_data(config.data, config.folder, held_out=config.held_out, seed=config.seed)
    _, channels, height, width = data.train.images.shape
    torch.manual_seed(config.seed)
    return NETWORKS[config.model](channels, data.classes, min(height, width)), data


def calibration_inputs(config: TrainConfig, data: Source, here: Processes = Processes()) -> list[Any]:
    """The inputs of the first training batches, or of each this process's rows"""
    course = Course(batch_size=config.batch_size, seed=config.seed)
    torch.manual_seed(config.seed)  # by which a loader of the user's may shuffle
    batches = islice(training_batches(data, course, here.rank, here.size), config.calibration_batches)
    if isinstance(data, Data):
        return [inputs for inputs, _ in batches]
    return [rows_of(inputs, here.rank, here.size) for inputs, _ in batches]


def example_inputs(data: Source, part: str = "held_out", count: int = 8) -> Any:
    """The first inputs of a part, at most so many"""
    inputs, _ = next(iter(evaluation_batches(data, getattr(data, part))))
    return tree_map(lambda leaf: leaf[:count] if isinstance(leaf, Tensor) else leaf, inputs)


def _own(config: TrainConfig) -> tuple[nn.Module, Source]:
    """What the user's function returns, checked"""
    torch.manual_seed(config.seed)
    found = _call("model", config.model)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        raise TypeError(f"{config.model} returned {type(found).__name__}, but {_WANTED}")
    model, data = found
    return model, _source(config.model, data)


def _texts(config: TrainConfig) -> Texts:
    """Those of the files, or of the user's function"""
    if config.folder is not None:
        return read_texts(Path(config.folder))
    found = _call("data", config.data)
    if not (isinstance(found, tuple) and len(found) == len(_PARTS)):
        raise TypeError(f"{config.data} returned {type(found).__name__}, but {_WANTED_TEXTS}")
    return texts_of(config.data, found)


def _call(key: str, path: str) -> Any:
    """What the function of this key returns."""
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does, and an installed script does not
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own imports
        raise ValueError(f"{key} is {path!r}, but there is no module {error.name!r} to import") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{key} is {path!r}, but {module_name} has no function {name!r}")
    return function()


def _source(name: str, data: Any) -> Source:
    if isinstance(data, Data | Loaders):
        return data
    if isinstance(data, Mapping) and set(data) == set(_PARTS):
        data = [data[part] for part in _PARTS]
    if isinstance(data, list | tuple) and len(data) == len(_PARTS) and all(isinstance(part, Iterable) for part in data):
        try:
            len(data[0])
        except TypeError as error:
            raise TypeError(
                f"{name} returned training data ({type(data[0]).__name__}) without a length, which the learning rate "
                "needs; give a DataLoader of a dataset that has one, or a list of batches"
            ) from error
        return Loaders(*data)
    raise TypeError(f"{name} returned a {type(data).__name__} as data, but {_WANTED}")
