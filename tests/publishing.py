"""Images in the formats in which MNIST and CIFAR-10 are published."""

from __future__ import annotations

import gzip
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from lowbit.app.data import DataError, Split, load_data

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
