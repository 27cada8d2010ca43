"""Data: the splits of every dataset, where their files are looked for, and what is refused."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lowbit.app.data import NAMES, Data, Split, load_data, normalize
from publishing import Batch, assert_holds, draw, refuse, write_cifar10, write_mnist


def digest(split: Split) -> str:
    return hashlib.sha256(split.images.numpy().tobytes() + split.labels.numpy().tobytes()).hexdigest()[:16]


def test_digits(digits: Data) -> None:
    for split in (digits.train, digits.held_out, digits.test):
        assert split.images.shape == (len(split), 1, 8, 8)
        assert split.images.dtype == torch.float32
        assert split.labels.dtype == torch.int64
        assert split.images.min() == 0
        assert split.images.max() == 1
    assert (len(digits.train), len(digits.held_out), len(digits.test)) == (1294, 144, 359)
    assert digits.test.labels.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]


def test_digits_keep_their_test_images(digits: Data) -> None:
    """Whatever the seed, and whatever the release: figures of other days were measured on these."""
    other = load_data("digits", seed=1, held_out=200)
    assert digest(other.test) == digest(digits.test) == "46505f9bb1483353"
    assert digest(other.held_out) != digest(digits.held_out)


def test_digits_are_all_there(digits: Data) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    splits = (digits.train, digits.held_out, digits.test)
    images = torch.cat([split.images for split in splits]).reshape(-1, 64) * 16
    wanted = datasets.load_digits().data
    assert sorted(images.tolist()) == sorted(wanted.tolist())


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[app\]'"):
        load_data("digits")


@pytest.mark.parametrize(("held_out", "count"), [(0, 0), (0.0, 0), (0.25, 10), (7, 7), (39, 39)])
def test_held_out(tmp_path: Path, held_out: float, count: int) -> None:
    whole, test = write_mnist(tmp_path, train=draw(40, 1, 5))
    data = load_data("mnist", tmp_path, held_out=held_out, seed=3)
    assert len(data.held_out) == count
    assert_holds(data.test, test)
    rows = {image.tobytes(): i for i, image in enumerate(whole.images)}
    kept, chosen = ([rows[image.numpy().tobytes()] for image in s.images] for s in (data.train, data.held_out))
    assert sorted(kept + chosen) == list(range(40))
    assert (kept, chosen) == (sorted(kept), sorted(chosen))
    assert data.held_out.labels.tolist() == [whole.labels[i] for i in chosen]


def test_seed_draws_what_is_held_out(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=draw(40, 1, 5))
    first, again, other = (load_data("mnist", tmp_path, held_out=10, seed=seed).held_out for seed in (0, 0, 1))
    assert digest(first) == digest(again) != digest(other)


def test_mean_and_std_are_those_of_the_training_split(tmp_path: Path) -> None:
    write_cifar10(tmp_path, "binary")
    data = load_data("cifar10", tmp_path, held_out=6)
    pixels = data.train.images.numpy().astype(np.float64) / 255
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(data.std, pixels.std((0, 2, 3)), rtol=1e-6)


def test_equal_pixels_normalize_to_zero(tmp_path: Path) -> None:
    gray = Batch(np.full((12, 1, 5, 5), 77, np.uint8), [0] * 12)
    write_mnist(tmp_path, train=gray)
    data = load_data("mnist", tmp_path)
    assert data.std == (1.0,)
    assert normalize(data.train.images, data.mean, data.std).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"name": "cifar100"}, ValueError, "name is 'cifar100', but it must be one of 'digits', 'fashion-mnist'"),
        ({"name": "digits", "folder": "x"}, ValueError, "comes with scikit-learn; leave the folder out"),
        ({"name": "mnist"}, ValueError, "'mnist' is read from files, but no folder was given"),
        ({"name": "digits", "seed": -1}, ValueError, "seed is -1"),
        ({"name": "digits", "held_out": 1.0}, ValueError, "held_out is 1.0, but a share must be .* less than 1"),
        ({"name": "digits", "held_out": float("nan")}, ValueError, "held_out is nan"),
        ({"name": "digits", "held_out": 1e-5}, ValueError, "held_out is 1e-05, which is 0 of 1438 training images"),
        ({"name": "digits", "held_out": 0.9999}, ValueError, "which is 1438 of 1438"),
        ({"name": "digits", "held_out": 1438}, ValueError, "held_out is 1438, but it must be from 0 to 1437"),
        ({"name": "digits", "held_out": True}, TypeError, "held_out is True"),
    ],
)
def test_arguments(arguments: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        load_data(**arguments)


@pytest.mark.parametrize("name", NAMES[1:])
def test_folder(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.touch()
    refuse(name, tmp_path / "nowhere", tmp_path / "nowhere", "does not exist")
    refuse(name, file, file, "is not a folder")


def test_the_folder_itself_comes_first(tmp_path: Path) -> None:
    train, _ = write_mnist(tmp_path)
    write_mnist(tmp_path / "other")
    assert_holds(load_data("mnist", tmp_path, held_out=0).train, train)


def test_another_format_is_taken_where_one_is_incomplete(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "py", "python")
    (tmp_path / "py" / "data_batch_2").unlink()
    train, _ = write_cifar10(tmp_path / "bin", "binary")
    assert_holds(load_data("cifar10", tmp_path, held_out=0).train, train)


def test_nothing_found_says_what_was_looked_for(tmp_path: Path) -> None:
    write_mnist(tmp_path / "two" / "down")
    refuse(
        "mnist", tmp_path, tmp_path, "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images", "t10k-labels"
    )
    wanted = ("data_batch_1", "test_batch", "data_batch_1.bin", "data_batch_1.png", "train_lables.json")
    refuse("cifar10", tmp_path, tmp_path, *wanted)


def test_incomplete(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refuse("mnist", tmp_path, tmp_path, "has train-images-idx3-ubyte, but not t10k-labels-idx1-ubyte")
    write_cifar10(tmp_path, "sheets")
    (tmp_path / "train_lables.json").unlink()
    refuse("cifar10", tmp_path, "has data_batch_1.png, but not train_lables.json")


def test_two_copies(tmp_path: Path) -> None:
    write_mnist(tmp_path / "a")
    write_mnist(tmp_path / "b", end=".gz")
    refuse("mnist", tmp_path, "more than one folder", tmp_path / "a", tmp_path / "b", "name one of them")


def test_folders_that_may_not_be_entered(tmp_path: Path) -> None:
    write_mnist(tmp_path / "raw")
    locked = tmp_path / "lost+found"
    locked.mkdir(mode=0)
    load_data("mnist", tmp_path)
    locked.chmod(0o700)
