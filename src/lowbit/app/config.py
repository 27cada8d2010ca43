"""TrainConfig: what a run of ``lowbit train`` is, as a record that reads and writes TOML."""

from __future__ import annotations

import errno
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import tomli_w

from lowbit.app.data import NAMES
from lowbit.app.networks import NETWORKS
from lowbit.export.onnx import STYLES
from lowbit.recipe import Recipe
from lowbit.recipes import presets
from lowbit.record import Record, check_choice, check_finite, check_integer

TEXT = "text"
OPTIMIZERS = ("sgd", "adamw")

_TEXTS = ("data", "folder", "model", "recipe", "output")


@dataclass(frozen=True)
class TrainConfig(Record):
    """What is trained, on what, how long and by which recipe

    - ``data``: "digits", or "fashion-mnist", "mnist" or "cifar10" from the files in ``folder``
    - ``model``: "convnet", or "package.module:function" of a function that returns (model, data): ``data`` is then a
      ``lowbit.app.data.Data`` or three loaders of (inputs, labels), for training, held out and test. Or a folder that
      transformers' ``save_pretrained`` wrote, with its tokenizer: ``data`` is then "text", from files in ``folder``, or
      "package.module:function" of a function that returns rows (text, label), for training, held out and test;
      ``max_length`` is in tokens
    - ``recipe``: the name of a preset, or the path of a recipe's TOML file
    - ``float_epochs`` at ``rate``, then ``epochs`` with quantizers at ``quantized_rate``; 0 leaves the part out
    - ``batch_size``: of all processes together, where torchrun starts several
    - ``optimizer``: "sgd" or "adamw"
    - ``held_out``: a share of the training data, or a number, on which choices are made
    - ``style``: of the ONNX file, "integer" or "qdq"
    - ``output``: the folder of the run; None is runs/DATA-RECIPE

    >>> TrainConfig.from_toml(TrainConfig(epochs=3).to_toml()) == TrainConfig(epochs=3)
    True
    """

    data: str = "digits"
    folder: str | None = None
    model: str = "convnet"
    recipe: str = "ternary"
    float_epochs: int = 30
    epochs: int = 30
    batch_size: int = 64
    rate: float = 0.05
    quantized_rate: float = 0.05
    weight_decay: float = 5e-4
    optimizer: str = OPTIMIZERS[0]
    seed: int = 0
    held_out: float = 0.1
    calibration_batches: int = 8
    max_length: int = 128
    style: str = "integer"
    output: str | None = None

    def __post_init__(self) -> None:
        for key in _TEXTS:
            value = getattr(self, key)
            optional = key in ("folder", "output")
            if not (isinstance(value, str) or (value is None and optional)):
                raise TypeError(f"{key} is {value!r} ({type(value).__name__}), but it must be a text")
            if value == "":
                raise ValueError(f"{key} is empty; {'leave it out' if optional else 'name one'}")
        self._check_model()
        check_choice("style", self.style, tuple(STYLES))
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        for key in ("float_epochs", "epochs", "seed"):
            check_integer(key, getattr(self, key), 0)
        for key in ("batch_size", "calibration_batches", "max_length"):
            check_integer(key, getattr(self, key), 1)
        for key in ("rate", "quantized_rate", "weight_decay"):
            number = check_finite(key, getattr(self, key))
            if number < 0 or (number == 0 and key != "weight_decay"):
                raise ValueError(f"{key} is {number:g}, but it must be above 0")
            object.__setattr__(self, key, number)
        self._check_held_out()

    @property
    def is_builtin(self) -> bool:
        """Whether the model is one that lowbit knows by name."""
        return self.model in NETWORKS

    @property
    def is_transformer(self) -> bool:
        """Whether the model is a folder that transformers wrote."""
        return not self.is_builtin and (Path(self.model) / "config.json").is_file()

    @property
    def output_folder(self) -> Path:
        """Where the run is kept."""
        if self.output is not None:
            return Path(self.output)
        name = self.data if self.is_builtin else self.model.partition(":")[2] or Path(self.model).resolve().name
        return Path("runs") / f"{name}-{Path(self.recipe).stem}"

    def load_recipe(self) -> Recipe:
        """The preset of this name, or what the file holds."""
        known = presets()
        if self.recipe in known:
            return known[self.recipe]()
        if not Path(self.recipe).is_file():
            what = "is a folder" if Path(self.recipe).is_dir() else "is no preset, and there is no such file"
            raise ValueError(f"recipe is {self.recipe!r}, which {what}; the presets are {', '.join(known)}")
        return Recipe.load(self.recipe)

    def to_toml(self) -> str:
        """The config as TOML text, which ``from_toml`` reads."""
        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The config that this TOML text holds; a key left out has its default."""
        return cls.from_dict(_parse(text))

    @classmethod
    def read(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Self:
        """The config in a TOML file, with some keys changed"""
        return read_config(cls, Path(path), changes or {})

    def differences(self, other: TrainConfig) -> list[str]:
        """The keys that differ, with both values; the folder of the run is none of them."""
        keys = [field.name for field in fields(self) if field.name != "output"]
        pairs = [(key, getattr(self, key), getattr(other, key)) for key in keys]
        return [f"{key} is {ours!r}, there {theirs!r}" for key, ours, theirs in pairs if ours != theirs]

    def _check_model(self) -> None:
        if self.is_builtin:
            check_choice("data", self.data, NAMES)
            if self.data == "digits" and self.folder is not None:
                raise ValueError(f"folder is {self.folder!r}, but 'digits' needs none; leave it out, or name the data")
            if self.data != "digits" and self.folder is None:
                raise ValueError(f"folder is not given, but data {self.data!r} is read from files; name their folder")
        elif self.is_transformer:
            self._check_texts()
        elif not is_function(self.model):
            known = ", ".join(map(repr, NETWORKS))
            raise ValueError(
                f"model is {self.model!r}, but it must be {known} or like 'package.module:function', or a folder "
                "with a config.json, as transformers writes it"
            )

    def _check_texts(self) -> None:
        if self.data != TEXT and not is_function(self.data):
            raise ValueError(
                f"data is {self.data!r}, but a transformers model needs {TEXT!r}, with the texts' folder, or a "
                "function like 'package.module:function' that returns texts"
            )
        if (self.data == TEXT) != (self.folder is not None):
            wanted = (
                "data 'text' is read from files; name their folder" if self.data == TEXT else "a function needs none"
            )
            raise ValueError(f"folder is {self.folder!r}, but {wanted}")

    def _check_held_out(self) -> None:
        if isinstance(self.held_out, int):
            check_integer("held_out", self.held_out, 1)
        elif not 0 < check_finite("held_out", self.held_out) < 1:
            raise ValueError(
                f"held_out is {self.held_out:g}, but a share must be between 0 and 1, and a number of images an int"
            )


def is_function(name: str) -> bool:
    """Whether this is like package.module:function"""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


Config = TypeVar("Config", bound=Record)


def read_config(cls: type[Config], path: Path, changes: Mapping[str, Any]) -> Config:
    """The config in a TOML file, with some keys changed; errors name the file"""
    try:
        return cls.from_dict(_parse(path.read_text(encoding="utf-8")) | dict(changes))
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such config; name a TOML file", str(path)) from error
    except (TypeError, ValueError) as error:
        kind = TypeError if type(error) is TypeError else ValueError
        raise kind(f"{path}: {error}") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"this is no TOML text: {error}") from error
