"""Files of data: each format gives the images that were written, and each damaged file one error that names it."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowbit.app.data import DataError, load_data
from publishing import (
    COUNT,
    WRITERS,
    Batch,
    assert_holds,
    draw,
    idx,
    number,
    python2_pickle,
    refuse,
    write_cifar10,
    write_mnist,
)


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


def test_sheets_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, "sheets")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[app\]'"):
        load_data("cifar10", tmp_path)


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
