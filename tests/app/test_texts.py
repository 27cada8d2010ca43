"""Transformers models from a local folder: texts from files, and the whole way of ``lowbit train``."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from commanding import command, metrics_of, one_error
from lowbit.app.config import TrainConfig
from lowbit.app.data import DataError
from lowbit.app.run import Run
from lowbit.app.sources import build
from lowbit.app.texts import read_texts, texts_of
from lowbit.app.train import Event, train

transformers = pytest.importorskip("transformers")

WORDS = {"bad": ["dull", "poor", "cold"], "good": ["fine", "warm", "bright"]}
FILL = ["the", "film", "was", "and", "very", "a"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts with one word that tells."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        label = rng.choice(sorted(WORDS))
        words = [*rng.choices(FILL, k=rng.randint(1, 4)), rng.choice(WORDS[label])]
        rng.shuffle(words)
        found.append((" ".join(words), label))
    return found


def texts() -> tuple[list[tuple[str, str]], ...]:
    """The function of a user's own."""
    return rows(160, 0), rows(40, 1), rows(40, 2)


def save_tokenizer(folder: Path) -> int:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *FILL, *WORDS["bad"], *WORDS["good"]]
    transformers.BertTokenizerFast({word: i for i, word in enumerate(words)}).save_pretrained(folder)
    return len(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model without a classifier, "bert", and "texts"."""
    folder = tmp_path_factory.mktemp("texts")
    count = save_tokenizer(folder / "bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=count, max_position_embeddings=12, **SIZES)
    transformers.BertModel(config).save_pretrained(folder / "bert")
    (folder / "texts").mkdir()
    table = "".join(f'"{text}",{label}\n' for text, label in rows(160, 0))
    (folder / "texts" / "train.csv").write_text(f"text,label\n{table}")
    lines = "".join(json.dumps({"label": label, "text": text}) + "\n" for text, label in rows(40, 2))
    (folder / "texts" / "test.jsonl").write_text(lines)
    return folder


FLAGS = [
    *("--optimizer=adamw", "--rate=1e-2", "--quantized-rate=5e-3", "--batch-size=16", "--recipe=w8a8"),
    *("--float-epochs=4", "--epochs=2", "--held-out=0.2", "--calibration-batches=2"),
]


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    answer = command(folder, "train", "--model=bert", "--data=text", "--folder=texts", *FLAGS, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["folder"] == "runs/bert-w8a8"
    return folder / "runs" / "bert-w8a8"


def test_the_whole_way(run: Path) -> None:
    metrics = metrics_of(run)
    assert metrics["verify"]["verification"]["ok"] is True
    assert metrics["export"]["labels"] == ["bad", "good"]
    assert metrics["quantized"]["accuracy"]["held_out"]["of"] == 32
    assert metrics["quantized"]["accuracy"]["test"]["of"] == 40
    assert metrics["quantized"]["accuracy"]["test"]["percent"] > 80
    assert "bert, w8a8" in (run / "report.html").read_text()
    tensors = {row["layer"] for row in metrics["measure"]["noise"]}
    assert any("attention" in name for name in tensors)
    assert "classifier" in tensors


def test_the_file_loads_into_a_model_of_transformers(folder: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # the run's config has the path as it was given
    model, data = Run.open(run).model()
    inputs, _ = next(iter(data.test))
    own = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "bert", num_labels=2)
    loaded = lowbit.load(run / "model.safetensors", own)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, lowbit.convert(model, "integer")(**inputs).logits)


def own_config(folder: Path, **changes: Any) -> TrainConfig:
    """Of the same model, with this file's function as data."""
    given = {"float_epochs": 2, "epochs": 2, "batch_size": 32, "optimizer": "adamw", "rate": 1e-2}
    return TrainConfig(
        **{"model": str(folder / "bert"), "data": "texts_of_a_user:texts", "recipe": "w8a8", **given, **changes}
    )


@pytest.fixture
def own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "texts_of_a_user", sys.modules[__name__])


class StoppedError(Exception):
    pass


@pytest.mark.usefixtures("own_texts")
def test_texts_of_a_function_stopped_and_resumed_are_the_same(folder: Path, tmp_path: Path) -> None:
    config = own_config(folder, output=str(tmp_path / "whole"))
    whole = train(config)
    assert whole.ok
    assert (
        whole.metrics["float"]["accuracy"]["held_out"]["of"] == 40
    )  # the function's, not a share of its training rows
    stopped = replace(config, output=str(tmp_path / "stopped"))
    for step in ("float", "quantized"):

        def stop(event: Event, step: str = step) -> None:
            if (event.step, event.kind) == (step, "epoch"):
                raise StoppedError

        with pytest.raises(StoppedError):
            train(stopped, on_event=stop)
    assert train(stopped).metrics == whole.metrics


@pytest.mark.usefixtures("own_texts")
def test_all_texts_have_one_length(folder: Path) -> None:
    _, data = build(own_config(folder, max_length=5))
    shapes = {inputs["input_ids"].shape[1] for part in (data.train, data.held_out, data.test) for inputs, _ in part}
    assert shapes == {5}
    _, again = build(own_config(folder, max_length=5))
    first, second = (next(iter(source.train))[0]["input_ids"] for source in (data, again))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "has none of train.csv, train.tsv, train.jsonl"),
        ({"train.csv": "text,label\na,0\n"}, "has none of test.csv"),
        ({"train.csv": "text,label\na,0\n", "train.tsv": ""}, "has train.csv and train.tsv; leave one"),
        (
            {"train.csv": "words,label\na,0\n", "test.csv": ""},
            "has the columns words, label, but it needs text and label",
        ),
        (
            {"train.csv": "text,label\nhello, world,pos\n", "test.csv": ""},
            "line 2: it has more cells than columns; quote",
        ),
        ({"train.tsv": "text\tlabel\na\n", "test.csv": ""}, "train.tsv, line 2: it needs"),
        ({"train.csv": "text,label\na,\n", "test.csv": ""}, "train.csv, line 2: it needs"),
        ({"train.csv": "text,label\n", "test.csv": ""}, "train.csv has no rows"),
        ({"train.jsonl": '{"text": "a", "label": 1}\n{"text"', "test.csv": ""}, r"train.jsonl, line 2: Expecting"),
        ({"train.jsonl": '{"text": "a", "label": 0.5}\n', "test.csv": ""}, "train.jsonl, line 1: it needs"),
        ({"train.jsonl": "[1]\n", "test.csv": ""}, "train.jsonl, line 1: it needs"),
        ({"train.csv": 'text,label\n"a,0\n', "test.csv": ""}, "train.csv cannot be read"),
    ],
)
def test_wrong_files(tmp_path: Path, files: dict[str, str], wanted: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=wanted):
        read_texts(tmp_path)


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ([("a", -1)], r"train\[0\]: it needs a text and a label, a number from 0 on or a name"),
        ([("a", None)], r"train\[0\]: it needs"),
        ([("a", 1), (2, 1)], r"train\[1\]: it needs"),
        ([1, 2, 3], r"returned 1 in train, but every row must be \(text, label\)"),
        ([], "returned no rows in train"),
    ],
)
def test_wrong_rows_of_a_function(part: list[Any], wanted: str) -> None:
    with pytest.raises(DataError, match=wanted):
        texts_of("mine:texts", (part, [], [("a", 0)]))


def test_what_a_spreadsheet_writes(tmp_path: Path) -> None:
    """A mark before the first column, spaces around a label, a text longer than csv's own limit."""
    (tmp_path / "train.csv").write_bytes("\ufefftext,label\r\nhello, pos\r\n".encode())
    (tmp_path / "test.csv").write_text(f"text,label\n{'word ' * 40_000},neg\n")
    found = read_texts(tmp_path)
    assert found.train == [("hello", "pos")]
    assert len(found.test[0][0]) == 200_000
    (tmp_path / "train.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"train\.csv is not UTF-8 text.*save it as UTF-8"):
        read_texts(tmp_path)


def test_rows_of_all_formats(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text('text\tlabel\none, two\t1\n"a ""b"""\t0\n')
    (tmp_path / "held_out.csv").write_text('text,label\n"one, two\nthree",good\n')
    (tmp_path / "test.jsonl").write_text('{"text": "a", "label": 1}\n\n{"text": "b", "label": "0"}\n')
    found = read_texts(tmp_path)
    assert found.train == [("one, two", 1), ('a "b"', 0)]
    assert found.held_out == [("one, two\nthree", "good")]
    assert found.test == [("a", 1), ("b", 0)]


def test_labels_must_fit_the_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = save_tokenizer(tmp_path / "three")
    config = transformers.BertConfig(vocab_size=count, max_position_embeddings=12, num_labels=3, **SIZES)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "three")
    chosen = TrainConfig(model=str(tmp_path / "three"), data="text", folder=str(folder / "texts"))
    with pytest.raises(DataError, match="has 3 classes, but the texts have 2"):
        build(chosen)
    # The names that the model has for its classes come first: "good" is its third.
    config.id2label = {0: "awful", 1: "bad", 2: "good"}
    config.label2id = {"awful": 0, "bad": 1, "good": 2}
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "three")
    _, data = build(chosen)
    assert {int(label) for _, labels in data.test for label in labels} == {1, 2}


def test_what_is_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = TrainConfig(model=str(folder / "bert"), data="text", folder=str(folder / "texts"))
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / "bert" / name).read_bytes())
    with pytest.raises(ValueError, match="bare holds no tokenizer"):
        build(replace(chosen, model=str(bare)))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers, which is not installed; install it: pip install"):
        build(chosen)


@pytest.mark.parametrize(
    ("arguments", "code", "wanted"),
    [
        (["--model=bert"], 2, "data is 'digits', but a transformers model needs 'text'"),
        (["--model=bert", "--data=text"], 2, "folder is None, but data 'text' is read from files"),
        (["--model=texts"], 2, "or a folder with a config.json"),
        (["--model=bert", "--data=text", "--folder=none"], 1, "none does not exist"),
        (["--model=bert", "--data=nowhere:texts"], 1, "data is 'nowhere:texts', but there is no module"),
        (["--model=bert", "--data=commanding:make_nothing"], 1, "returned NoneType, but it must return (train"),
        (["--optimizer=adam"], 2, "optimizer is 'adam', but it must be one of 'sgd', 'adamw'"),
    ],
)
def test_wrong_arguments(folder: Path, tmp_path: Path, arguments: list[str], code: int, wanted: str) -> None:
    answer = command(folder, "train", *arguments, f"--output={tmp_path / 'run'}")
    assert answer.code == code
    assert wanted in one_error(answer.err)
