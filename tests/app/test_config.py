"""TrainConfig: TOML in and out, and every wrong value an error that names its key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.app.config import TrainConfig
from lowbit.recipes import presets, w4a8

CONFIGS = [
    TrainConfig(),
    TrainConfig(data="mnist", folder="data/mnist", recipe="w8a8", held_out=5000),
    TrainConfig(model="package.module:function", style="qdq", float_epochs=0, output="runs/mine"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_toml_in_and_out(config: TrainConfig, tmp_path: Path) -> None:
    assert TrainConfig.from_toml(config.to_toml()) == config
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert TrainConfig.read(tmp_path / "config.toml") == config
    assert TrainConfig.read(tmp_path / "config.toml", {"seed": 7}) == replace(config, seed=7)


def test_keys_left_out_have_their_defaults() -> None:
    assert TrainConfig.from_toml("") == TrainConfig()
    assert TrainConfig.from_toml("rate = 1") == TrainConfig(rate=1.0)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("data", "imagenet", "must be one of 'digits'"),
        ("data", 3, "must be a text"),
        ("folder", "somewhere", "'digits' needs none"),
        ("folder", "", "leave it out"),
        ("model", "resnet", "'package.module:function'"),
        ("model", "a/b:c", "'package.module:function'"),
        ("recipe", None, "must be a text"),
        ("float_epochs", -1, "at least 0"),
        ("epochs", 1.5, "must be an int"),
        ("epochs", True, "must be an int"),
        ("batch_size", 0, "at least 1"),
        ("rate", 0.0, "must be above 0"),
        ("rate", float("inf"), "must be finite"),
        ("quantized_rate", "fast", "must be a number"),
        ("weight_decay", -1e-4, "must be above 0"),
        ("seed", -1, "at least 0"),
        ("held_out", 0.0, "between 0 and 1"),
        ("held_out", 1.5, "between 0 and 1"),
        ("held_out", 0, "at least 1"),
        ("calibration_batches", 0, "at least 1"),
        ("style", "int", "must be one of 'qdq', 'integer'"),
    ],
)
def test_wrong_values_name_their_key(key: str, value: object, wanted: str) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{key} is .*{wanted}"):
        TrainConfig(**{key: value})  # type: ignore[arg-type]


def test_data_from_files_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="folder is not given, but data 'mnist' is read from files"):
        TrainConfig(data="mnist")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("epoch = 3", "c.toml: TrainConfig has no key 'epoch'; its keys are data, folder"),
        ("epochs = -3", "c.toml: epochs is -3, but it must be at least 0"),
        ("epochs =", "c.toml: this is no TOML text"),
        ("[train]\nepochs = 3", "c.toml: TrainConfig has no key 'train'"),
    ],
)
def test_errors_in_a_file_name_the_file(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=wanted):
        TrainConfig.read(tmp_path / "c.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such config"):
        TrainConfig.read(tmp_path / "c.toml")


def test_recipes_are_presets_or_files(tmp_path: Path) -> None:
    for name, function in presets().items():
        assert TrainConfig(recipe=name).load_recipe() == function()
    w4a8().save(tmp_path / "mine.toml")
    assert TrainConfig(recipe=str(tmp_path / "mine.toml")).load_recipe() == w4a8()
    with pytest.raises(ValueError, match="recipe is 'w9', which is no preset, and there is no such file"):
        TrainConfig(recipe="w9").load_recipe()
    with pytest.raises(ValueError, match="which is a folder"):
        TrainConfig(recipe=str(tmp_path)).load_recipe()


def test_folders_of_runs() -> None:
    assert TrainConfig(recipe="w8a8").output_folder == Path("runs/digits-w8a8")
    assert TrainConfig(model="a.b:make", recipe="my/own.toml").output_folder == Path("runs/make-own")
    assert TrainConfig(output="here").output_folder == Path("here")


def test_differences_name_the_keys() -> None:
    config = TrainConfig()
    assert config.differences(replace(config, output="elsewhere")) == []
    assert config.differences(replace(config, seed=3, style="qdq")) == [
        "seed is 0, there 3",
        "style is 'integer', there 'qdq'",
    ]
