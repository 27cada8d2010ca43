"""Data: every published format gives the images that were written, and every damaged file one error that names it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lowbit.app.data import NAMES, Data, DataError, EpochBatches, Normalized, Split, load_data, normalize

RNG = np.random.default_rng(0)
COUNT = 4  # images in each batch of CIFAR-10
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


class Batch(NamedTuple):
    """Images uint8 (n, channels, height, width), and their labels."""

    images: np.ndarray
    labels: list[int]


def draw(count: int, channels: int, size: int) -> Batch:
    pixels = RNG.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    return Batch(pixels, RNG.integers(0, 10, count).tolist())


def joined(batches: list[Batch]) -> Batch:
    return Batch(np.concatenate([b.images for b in batches]), [label for b in batches for label in b.labels])


def assert_holds(split: Split, batch: Batch) -> None:
    assert split.images.dtype == torch.uint8
    assert split.images.is_contiguous()
    assert split.labels.dtype == torch.int64
    assert np.array_equal(split.images.numpy(), batch.images)
    assert split.labels.tolist() == batch.labels
    assert len(split) == len(batch.labels)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(
    folder: Path, mark: str = "-", end: str = "", train: Batch | None = None, test: Batch | None = None
) -> tuple[Batch, Batch]:
    """The four idx files, spelled with ``mark`` before idx, and with ``end`` .gz compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (train or draw(12, 1, 5), test or draw(3, 1, 5))
    for stem, batch in zip(("train", "t10k"), parts, strict=True):
        arrays = {"images": batch.images[:, 0], "labels": np.array(batch.labels, np.uint8)}
        for what, array in arrays.items():
            name = f"{stem}-{what}{mark}idx{array.ndim}-ubyte{end}"
            (folder / name).write_bytes(gzip.compress(idx(array)) if end else idx(array))
    return parts


def text(value: bytes) -> bytes:
    """A Python 2 string in a pickle of protocol 2."""
    return b"T" + struct.pack("<i", len(value)) + value


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def python2_pickle(batch: Batch, *, fortran: bool = False, dtype: bytes = b"u1", columns: int = 3072) -> bytes:
    """The opcodes that Python 2 wrote: pickle itself no longer has strings of bytes in protocol 2."""
    rows = batch.images.reshape(-1, columns)
    shape = number(len(rows)) + number(columns) + b"\x86"
    dtype = (
        b"cnumpy\ndtype\n" + text(dtype) + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + 2 * number(-1) + b"K\x00tb"
    )
    values = rows.tobytes(order="F" if fortran else "C")
    state = b"(K\x01" + shape + dtype + (b"\x88" if fortran else b"\x89") + text(values) + b"t"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    labels = b"](" + b"".join(map(number, batch.labels)) + b"e"
    entries = [(b"batch_label", text(b"batch 1 of 5")), (b"labels", labels), (b"data", empty + state + b"b")]
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in entries) + b"u."


def binary(batch: Batch) -> bytes:
    return np.column_stack([np.array(batch.labels, np.uint8), batch.images.reshape(-1, 3072)]).tobytes()


def write_python(folder: Path, batches: list[Batch]) -> None:
    for name, batch in zip(BATCHES, batches, strict=True):
        (folder / name).write_bytes(python2_pickle(batch))


def write_binary(folder: Path, batches: list[Batch]) -> None:
    for name, batch in zip(BATCHES, batches, strict=True):
        (folder / f"{name}.bin").write_bytes(binary(batch))


def write_sheets(folder: Path, batches: list[Batch]) -> None:
    for name, batch in zip(BATCHES, batches, strict=True):
        Image.fromarray(batch.images.transpose(0, 2, 3, 1).reshape(-1, 1024, 3)).save(folder / f"{name}.png")
    *train, test = batches
    (folder / "train_lables.json").write_text(json.dumps(joined(train).labels))
    (folder / "test_lables.json").write_text(json.dumps(test.labels))


WRITERS: dict[str, Callable[[Path, list[Batch]], None]] = {
    "python": write_python,
    "binary": write_binary,
    "sheets": write_sheets,
}


def write_cifar10(folder: Path, form: str) -> tuple[Batch, Batch]:
    folder.mkdir(parents=True, exist_ok=True)
    batches = [draw(COUNT, 3, 32) for _ in BATCHES]
    WRITERS[form](folder, batches)
    return joined(batches[:5]), batches[5]


def refuse(name: str, folder: Path, *parts: object) -> None:
    """load_data raises a DataError that says all parts, in this order."""
    with pytest.raises(DataError, match=".*".join(re.escape(str(part)) for part in parts)):
        load_data(name, folder)


# Formats.


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("below", ["", "raw"])
def test_idx(tmp_path: Path, name: str, mark: str, end: str, below: str) -> None:
    train, test = write_mnist(tmp_path / below, mark, end)
    data = load_data(name, str(tmp_path), held_out=0)
    assert (data.name, data.classes) == (name, 10)
    assert_holds(data.train, train)
    assert_holds(data.test, test)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("below", ["", "cifar-10-batches"])
def test_cifar10(tmp_path: Path, form: str, below: str) -> None:
    train, test = write_cifar10(tmp_path / below, form)
    data = load_data("cifar10", tmp_path, held_out=0)
    assert_holds(data.train, train)
    assert_holds(data.test, test)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_python_batches_written_anew(tmp_path: Path, protocol: int) -> None:
    """By Python 3 and a NumPy of today."""
    train, _ = write_cifar10(tmp_path, "python")
    first = Batch(train.images[:COUNT], train.labels[:COUNT])
    content = {b"data": first.images.reshape(-1, 3072), b"labels": first.labels}
    written = pickle.dumps(content, protocol)
    (tmp_path / "data_batch_1").write_bytes(written)
    if protocol == 2:  # here bytes are a call of _codecs.encode, which no published batch makes
        refuse("cifar10", tmp_path, "data_batch_1", "_codecs.encode")
    else:
        assert_holds(load_data("cifar10", tmp_path, held_out=0).train, train)


def test_python_batches_in_fortran_order(tmp_path: Path) -> None:
    _, test = write_cifar10(tmp_path, "python")
    (tmp_path / "test_batch").write_bytes(python2_pickle(test, fortran=True))
    assert_holds(load_data("cifar10", tmp_path).test, test)


def test_numpy_reads_what_the_writer_writes() -> None:
    """The hand-made pickle is one that NumPy itself restores to the same array."""
    batch = draw(COUNT, 3, 32)
    batch_of = "pickle.load(sys.stdin.buffer, encoding='bytes')"
    code = f"import pickle, sys; sys.stdout.buffer.write({batch_of}[b'data'].tobytes())"
    command = [sys.executable, "-W", "ignore", "-c", code]  # numpy.core has moved, and says so
    run = subprocess.run(command, input=python2_pickle(batch), capture_output=True, check=True)
    assert run.stdout == batch.images.tobytes()


def test_the_folder_itself_comes_first(tmp_path: Path) -> None:
    train, _ = write_mnist(tmp_path)
    write_mnist(tmp_path / "other")
    assert_holds(load_data("mnist", tmp_path, held_out=0).train, train)


def test_another_format_is_taken_where_one_is_incomplete(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "py", "python")
    (tmp_path / "py" / "data_batch_2").unlink()
    train, _ = write_cifar10(tmp_path / "bin", "binary")
    assert_holds(load_data("cifar10", tmp_path, held_out=0).train, train)


# Digits.


def digest(split: Split) -> str:
    return hashlib.sha256(split.images.numpy().tobytes() + split.labels.numpy().tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_data("digits")


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


def test_sheets_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, "sheets")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[app\]'"):
        load_data("cifar10", tmp_path)


# What is held out.


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


# Refusals.


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


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (IMAGES, lambda b: b[:-1], "is cut off: it has 299 bytes, but its header says 12 x 5 x 5"),
        (IMAGES, lambda b: b + b"0", "is too long: it has 301 bytes"),
        (IMAGES, lambda b: b[:9], "is cut off: it ends within its header of 16 bytes"),
        (IMAGES, lambda b: b"", "starts with nothing, but an idx file of bytes with 3 axes starts with 00000803"),
        (IMAGES, lambda b: b"\0\0\x0d\3" + b[4:], "starts with 00000d03, but"),
        (
            IMAGES,
            lambda b: b[:4] + b"\xff" * 12 + b[16:],
            "is cut off: it has 300 bytes, but its header says 4294967295",
        ),
        (IMAGES, lambda b: b[:4] + bytes(12), "has 0 images, but"),
        (LABELS, lambda b: b[:-1], "is cut off: it has 11 bytes, but its header says 12"),
        (LABELS, lambda b: b[:-1] + b"\x0a", "label 11 is 10, but it must be from 0 to 9"),
        (LABELS, lambda b: idx(np.zeros(11, np.uint8)), "has 12 images, but .*train-labels-idx1-ubyte has 11 labels"),
        (IMAGES, lambda b: idx(np.zeros((12, 4, 4), np.uint8)), "t10k-images-idx3-ubyte have images of 4x4 and 5x5"),
    ],
)
def test_damaged_idx(tmp_path: Path, file: str, change: Callable[[bytes], bytes], message: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load_data("mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_empty_idx(tmp_path: Path) -> None:
    write_mnist(tmp_path, test=Batch(np.zeros((0, 1, 5, 5), np.uint8), []))
    refuse("mnist", tmp_path, "t10k-images-idx3-ubyte", "has no pixels")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-9], "is cut off: its compressed data has no end"),
        (lambda b: b[:5], "is cut off"),
        (lambda b: gzip.decompress(b), "is not a sound gzip file"),
        (lambda b: b[:-8] + bytes(8), "is not a sound gzip file: CRC check failed"),
        (lambda b: b[:10] + b"\xff" * 20 + b[30:], "is not a sound gzip file"),
        (lambda b: gzip.compress(gzip.decompress(b)[:-1]), "is cut off: it has 299 bytes"),
    ],
)
def test_damaged_gzip(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    write_mnist(tmp_path, end=".gz")
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(change(path.read_bytes()))
    refuse("mnist", tmp_path, path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], f"is cut off: it has {COUNT * 3073 - 1} bytes, which is not a multiple of 3073"),
        (lambda b: b"\x0a" + b[1:], "label 0 is 10, but it must be from 0 to 9"),
        (lambda b: b"", "has no pixels"),
    ],
)
def test_damaged_binary_batch(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    write_cifar10(tmp_path, "binary")
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    refuse("cifar10", tmp_path, path, message)


@pytest.mark.parametrize("kept", [0, 7, 20, 40, 100, 0.5, 0.9])
def test_cut_png(tmp_path: Path, kept: float) -> None:
    write_cifar10(tmp_path, "sheets")
    path = tmp_path / "data_batch_3.png"
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    refuse("cifar10", tmp_path, path, "is not a whole PNG file")


def test_png_with_a_short_header(tmp_path: Path) -> None:
    write_cifar10(tmp_path, "sheets")
    path = tmp_path / "test_batch.png"
    content = path.read_bytes()
    header = b"IHDR" + content[16:28]  # a byte short, with a length and a checksum that say so
    path.write_bytes(
        content[:8] + struct.pack(">I", 12) + header + struct.pack(">I", zlib.crc32(header)) + content[33:]
    )
    refuse("cifar10", tmp_path, path, "is not a whole PNG file")


def test_other_png(tmp_path: Path) -> None:
    write_cifar10(tmp_path, "sheets")
    path = tmp_path / "test_batch.png"
    Image.new("RGB", (1023, 4)).save(path)
    refuse("cifar10", tmp_path, path, "is 1023 pixels wide, RGB, but a sheet of CIFAR-10 is 1024")
    Image.new("L", (1024, 4)).save(path)
    refuse("cifar10", tmp_path, path, "is 1024 pixels wide, L, but")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "is not sound JSON"),
        ("[" * 100_000, "is not sound JSON"),
        ('{"a": 1}', "has labels of type dict, but they must be a list"),
        ("[1, 2, 3]", "has 3 labels; the two must be of one copy"),
        ("[1, 2, 3, 10]", "label 3 is 10, but it must be from 0 to 9"),
        ("[1, 2, 3, -1]", "label 3 is -1"),
        ("[1, 2, 3, true]", "label 3 is True"),
        ("[1, 2, 3, 1.0]", "label 3 is 1.0"),
    ],
)
def test_damaged_json(tmp_path: Path, content: str, message: str) -> None:
    write_cifar10(tmp_path, "sheets")
    path = tmp_path / "test_lables.json"
    path.write_text(content)
    refuse("cifar10", tmp_path, path, message)


class Malice:
    """What a pickle runs when it is loaded."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    write_cifar10(tmp_path, "python")
    path, proof = tmp_path / "data_batch_1", tmp_path / "proof"
    path.write_bytes(pickle.dumps(Malice(os.mkdir, str(proof)), protocol))
    refuse("cifar10", tmp_path, path, "it asks for", "mkdir, which no batch of images needs")
    assert not proof.exists()
    pickle.loads(path.read_bytes())
    assert proof.exists()


def test_allowed_names_call_no_numpy(tmp_path: Path) -> None:
    """numpy.dtype and numpy.ndarray with forged arguments are written down, not called."""
    write_cifar10(tmp_path, "python")
    path = tmp_path / "data_batch_1"
    huge = pickle.dumps({b"data": Malice(np.ndarray, (2**60,), "u1"), b"labels": []}, 4)
    path.write_bytes(huge)
    refuse("cifar10", tmp_path, path, "has no sound array in b'data'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([1, 2]), "is not a batch of CIFAR-10"),
        (pickle.dumps({b"data": b"", "labels": []}), "must be a dict with b'data' and b'labels'"),
        (pickle.dumps({b"data": b"123", b"labels": []}), "has no sound array in b'data'"),
        (python2_pickle(draw(2, 3, 32), dtype=b"i1"), "must be uint8"),
        (python2_pickle(draw(2, 3, 32), dtype=b"O8"), "must be uint8"),
        (python2_pickle(draw(2, 3, 32), columns=1536), "of shape (n, 3072)"),
        (python2_pickle(draw(2, 3, 32)).replace(number(3072), number(3071)), "of shape (n, 3072)"),
        (python2_pickle(draw(2, 3, 32))[:-20], "was not unpickled"),
        (python2_pickle(Batch(draw(2, 3, 32).images, [1, 12])), "label 1 is 12"),
        (python2_pickle(Batch(draw(2, 3, 32).images, [1])), "has 1 labels"),
        (b"", "was not unpickled: Ran out of input"),
        (b"<html>", "was not unpickled"),
    ],
)
def test_damaged_python_batch(tmp_path: Path, content: bytes, message: str) -> None:
    write_cifar10(tmp_path, "python")
    path = tmp_path / "data_batch_2"
    path.write_bytes(content)
    refuse("cifar10", tmp_path, path, message)


# Batches.


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
