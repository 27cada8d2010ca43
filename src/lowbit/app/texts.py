"""Texts: labelled sentences from files, and a transformers model and tokenizer from a local folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lowbit.app.config import TrainConfig
from lowbit.app.data import DataError, EpochBatches, hold_out
from lowbit.app.fit import Loaders

_PARTS = ("train", "held_out", "test")
_ENDINGS = (".csv", ".tsv", ".jsonl")
_EVALUATED = 64  # texts at a time
_LONGEST = 2**30  # characters of a text, which is then cut to max_length tokens

Row = tuple[str, int | str]


@dataclass(frozen=True)
class Texts:
    """Rows (text, label) of three parts; ``held_out`` may be empty: it is then cut from the training rows."""

    train: list[Row]
    held_out: list[Row]
    test: list[Row]


def read_texts(folder: Path) -> Texts:
    """train, test and, where there is one, held_out: .csv or .tsv with the columns text and label, or .jsonl

    A label is a number from 0 on, or a name.
    """
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {kind}; name the folder that holds the texts")
    found = {part: _find(folder, part) for part in _PARTS}
    for part in ("train", "test"):
        if found[part] is None:
            wanted = ", ".join(f"{part}{ending}" for ending in _ENDINGS)
            raise DataError(f"{folder} has none of {wanted}; each holds rows with text and label")
    return Texts(*([] if path is None else _read(path) for path in found.values()))


def _find(folder: Path, part: str) -> Path | None:
    found = [path for ending in _ENDINGS if (path := folder / f"{part}{ending}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} has {found[0].name} and {found[1].name}; leave one of them")
    return found[0] if found else None


def _read(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # with or without the mark that Excel writes
            rows = _json_rows(path, file) if path.suffix == ".jsonl" else _table_rows(path, file)
            found = [_row(f"{path}, line {number}", row) for number, row in rows]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not found:
        raise DataError(f"{path} has no rows")
    return found


def _json_rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}: {error.msg}") from error


def _table_rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(_LONGEST)
    reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    columns = list(reader.fieldnames or ())
    if not {"text", "label"} <= set(columns):
        raise DataError(f"{path} has the columns {', '.join(columns) or '(none)'}, but it needs text and label")
    for row in reader:
        if None in row:
            raise DataError(f"{path}, line {reader.line_num}: it has more cells than columns; quote a text with commas")
        yield reader.line_num, row


def _row(place: str, row: Any) -> Row:
    label: Any
    text, label = (row.get("text"), row.get("label")) if isinstance(row, dict) else (None, None)
    label = label.strip() if isinstance(label, str) else label
    if isinstance(label, str) and label.isdecimal():
        label = int(label)
    is_label = isinstance(label, int) and not isinstance(label, bool) and label >= 0
    if not isinstance(text, str) or not (is_label or (isinstance(label, str) and label)):
        raise DataError(f"{place}: it needs a text and a label, a number from 0 on or a name")
    return text, label


def texts_of(name: str, parts: Sequence[Iterable[Any]]) -> Texts:
    """What a function of the user's returned, checked as files are"""
    checked = []
    for part, rows in zip(_PARTS, parts, strict=True):
        pairs = list(rows) if isinstance(rows, Iterable) else [rows]
        bad = next((pair for pair in pairs if not (isinstance(pair, list | tuple) and len(pair) == 2)), None)
        if bad is not None:
            raise DataError(f"{name} returned {bad!r} in {part}, but every row must be (text, label)")
        checked.append(
            [_row(f"{name}, {part}[{i}]", {"text": text, "label": label}) for i, (text, label) in enumerate(pairs)]
        )
        if not checked[-1] and part != "held_out":
            raise DataError(f"{name} returned no rows in {part}")
    return Texts(*checked)


class Tokens(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """dataset[i] = (inputs by name, label), of one text or, with a list of indices, of a batch"""

    def __init__(self, inputs: dict[str, Tensor], labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int | list[int]) -> tuple[dict[str, Tensor], Tensor]:
        return {name: values[index] for name, values in self.inputs.items()}, self.labels[index]


def build_transformer(config: TrainConfig, texts: Texts) -> tuple[nn.Module, Loaders]:
    """A sequence classifier with the folder's weights, and the texts as its tokenizer cuts them

    A folder of a model without a classifier gets one, drawn from the seed. All texts have one length in tokens, that of
    the longest, at most ``max_length``.
    """
    transformers = _transformers()
    if not any(_is_tokenizers(path.name) for path in Path(config.model).iterdir()):
        # transformers would make one that knows no word.
        raise ValueError(f"{config.model} holds no tokenizer; write it beside the model: tokenizer.save_pretrained")
    parts = _parts(texts, config)
    with _quiet(transformers):
        settings = transformers.AutoConfig.from_pretrained(config.model, local_files_only=True)
        names = _label_names(parts, settings, config.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        torch.manual_seed(config.seed)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            config.model, num_labels=len(names), local_files_only=True, dtype=torch.float32
        )
        model.config.id2label = {i: str(name) for i, name in enumerate(names)}
        tokens = tokenizer(
            [text for part in parts for text, _ in part],
            padding=True,
            truncation=True,
            max_length=config.max_length,
            return_tensors="pt",
        )
    datasets, start = [], 0
    for part in parts:
        rows = slice(start, start + len(part))
        labels = torch.tensor([names.index(label) for _, label in part])
        datasets.append(Tokens({name: values[rows] for name, values in tokens.items()}, labels))
        start = rows.stop
    batches = EpochBatches(len(datasets[0]), config.batch_size, config.seed)
    held_out, test = (DataLoader(dataset, batch_size=_EVALUATED) for dataset in datasets[1:])
    return model, Loaders(DataLoader(datasets[0], sampler=batches, batch_size=None), held_out, test)


def _parts(texts: Texts, config: TrainConfig) -> list[list[Row]]:
    if texts.held_out:
        return [texts.train, texts.held_out, texts.test]
    kept, chosen = hold_out(len(texts.train), config.held_out, config.seed)
    return [[texts.train[i] for i in kept.tolist()], [texts.train[i] for i in chosen.tolist()], texts.test]


def _label_names(parts: Sequence[Sequence[Row]], settings: Any, folder: str) -> list[int | str]:
    """What each score is the score of"""
    labels = {label for part in parts for _, label in part}
    known = [settings.id2label[i] for i in range(settings.num_labels)]
    is_classifier = any(name.endswith("ForSequenceClassification") for name in settings.architectures or ())
    if is_classifier and labels <= set(known):
        return known
    if all(isinstance(label, int) for label in labels):
        names: list[int | str] = list(range(max(int(label) for label in labels) + 1))
    elif all(isinstance(label, str) for label in labels):
        names = sorted(labels, key=str)
    else:
        raise DataError(f"labels are numbers and names: {sorted(map(str, labels))[:5]}; take one of them throughout")
    if is_classifier and len(names) != settings.num_labels:
        raise DataError(f"the model in {folder} has {settings.num_labels} classes, but the texts have {len(names)}")
    return names


def _is_tokenizers(name: str) -> bool:
    return name.startswith(("tokenizer", "vocab")) or name.endswith((".model", ".tiktoken"))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "a model from a folder needs transformers, which is not installed; "
            "install it: pip install 'lowbit[transformers]'"
        ) from error
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Bars and notes on new weights are no news here."""
    log = transformers.utils.logging
    level, shown = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()
