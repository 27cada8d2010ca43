"""Whole models in the benchmark: every row is there, and nothing wrong is timed. Never how fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit.bench import __main__ as command
from lowbit.bench import models, networks, peers
from lowbit.bench.contenders import UnfitError
from lowbit.bench.models import FLOAT, TRAINEES, ModelRow, Trainee
from lowbit.bench.networks import QUICK_NETWORKS, Network
from lowbit.kernels import float_products

CPU = torch.device("cpu")
NAMES = {trainee.name: trainee for trainee in TRAINEES}
RESNET, MLP, TRANSFORMER = QUICK_NETWORKS


def fake_clock(function: Callable[[], Any], repeats: int) -> float:
    return 1e-3


def rows_of(network: Network, *those: Trainee) -> dict[str, ModelRow]:
    rows = models.run_network(network, (NAMES[FLOAT], *those), CPU, 1e-9, fake_clock)
    return {row.contender: row for row in rows}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_products, "_has_faster", lambda: True)
    path = tmp_path / "models.json"
    assert command.main(["--models", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    eager = [trainee.name for trainee in TRAINEES if not (trainee.compiled or trainee.captured)]
    assert [(row["network"], row["contender"]) for row in report["rows"]] == [
        (network.name, name) for network in QUICK_NETWORKS for name in eager
    ]
    assert report["versions"]["torch"] == torch.__version__
    assert {"device", "cpu", "threads", "load", "date", "command"} <= set(report)
    out = capsys.readouterr().out
    for row in report["rows"]:
        assert row["contender"] in out
        if row["contender"] in ("torchao", "brevitas"):
            assert row["status"] in ("ok", "skipped"), row["note"]
        else:
            assert row["status"] == "ok", row["note"]
        if row["status"] == "ok":
            assert row["seconds"] > 0
            assert row["ratio_to_float"] > 0
            assert row["rounds"] >= 3
            assert row["peak_bytes"] > row["kept_bytes"] > 0
    skipped = [row for row in report["rows"] if row["contender"] == "torchao" and row["network"] == RESNET.name]
    assert skipped[0]["status"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "nonsense"], "--device is 'nonsense'"),
        (["--device", "cuda:99"], "CUDA device(s) here"),
        (["--device", "cpu", "--case", "*"], "--models measures whole networks"),
        (["--device", "cpu", "--list"], "--models measures whole networks"),
    ],
)
def test_mistakes(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(["--models", "--quick", *arguments])
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_ours_wrong_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TRAINEES", (NAMES[FLOAT], trainee(lambda model: model[0].weight.data.zero_())))
    monkeypatch.setattr(command, "QUICK_NETWORKS", (RESNET,))
    assert command.main(["--models", "--quick", "--device", "cpu"]) == 1


def trainee(change: Callable[[Any], Any]) -> Trainee:
    def build(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
        change(model)
        return model, ""

    return Trainee("changed", build, is_ours=True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda model: model[0].weight.data.zero_(), "dB of signal to noise"),
        (lambda model: model[0].weight.data.fill_(torch.nan), "the loss is nan"),
        (lambda model: model[0].weight.requires_grad_(False), "0.weight has no gradient"),
        (lambda model: model[0].weight.register_hook(lambda grad: grad * torch.inf), "not finite"),
    ],
    ids=["noise", "nan", "no gradient", "infinite gradient"],
)
def test_what_is_wrong_is_not_timed(change: Callable[[Any], Any], complaint: str) -> None:
    row = rows_of(RESNET, trainee(change))["changed"]
    assert row.status == "wrong"
    assert complaint in row.note
    assert row.seconds is None


@pytest.mark.parametrize("name", ["float compiled", "lowbit w8a8 compiled"])
def test_what_is_compiled_must_agree_with_itself_uncompiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_wrong(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: 1.5 * model(x)

    monkeypatch.setattr(torch, "compile", compile_wrong)
    row = rows_of(TRANSFORMER, NAMES[name])[name]
    assert row.status == "wrong"
    assert "compiled" in row.note
    assert "dB of signal to noise" in row.note  # of the compiled logits


def test_float_by_onednn_is_there_where_torch_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for faster, status in ((True, "ok"), (False, "skipped")):
        monkeypatch.setattr(float_products, "_has_faster", lambda faster=faster: faster)
        row = rows_of(MLP, NAMES["float by oneDNN"])["float by oneDNN"]
        assert row.status == status
        assert (row.snr_db or 0) > 60 or not faster


def test_a_trainee_that_cannot_says_why() -> None:
    def unfit(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
        raise UnfitError("no such layer")

    def raises(model: nn.Module, network: Network, inputs: Tensor) -> tuple[nn.Module, str]:
        raise RuntimeError("no such kernel\nand a stack trace")

    rows = rows_of(TRANSFORMER, Trainee("absent", unfit), Trainee("raises", raises))
    assert (rows["absent"].status, rows["absent"].note) == ("skipped", "no such layer")
    assert (rows["raises"].status, rows["raises"].note) == ("failed", "RuntimeError: no such kernel")


def test_a_missing_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(peers, "import_module", missing)
    rows = rows_of(TRANSFORMER, NAMES["torchao"], NAMES["brevitas"])
    assert rows["torchao"].note == rows["brevitas"].note == "not installed"
    assert rows["torchao"].status == rows["brevitas"].status == "skipped"


def test_allocations_are_counted() -> None:
    def call() -> Tensor:
        first = torch.empty(1000)  # alive when the second comes, gone at the end
        return first.new_empty(500)

    alive = models._allocations(call)
    assert max(alive) == 6000
    assert alive[-1] == 2000


def test_ratios_are_of_the_same_round() -> None:
    """The machine slows down threefold in the middle; the ratios do not see it."""
    rows = [ModelRow("net", FLOAT), ModelRow("net", "other"), ModelRow("net", "absent", status="skipped")]
    models.fill_in(rows, {FLOAT: [1.0, 3.0, 1.0], "other": [2.0, 6.0, 2.0]})
    assert (rows[1].ratio_to_float, rows[1].spread, rows[1].rounds) == (2.0, 0.0, 3)
    assert rows[2].seconds is None


def test_resnet_20_has_the_parameters_of_the_paper_with_option_b() -> None:
    assert sum(parameter.numel() for parameter in networks.ResNet().parameters()) == 272_474


def test_a_network_whose_package_is_missing_is_skipped() -> None:
    def build() -> nn.Module:
        raise ModuleNotFoundError("No module named 'somewhere'")

    (row,) = models.run_network(RESNET._replace(build=build), TRAINEES, CPU, 1e-9, fake_clock)
    assert (row.status, row.note) == ("skipped", "No module named 'somewhere'")
    assert "skipped: No module named 'somewhere'" in models.describe_models([row])
