"""The benchmarks: what is measured, what it is held against, and that nothing wrong is timed. Never how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit.bench import __main__ as command
from lowbit.bench import check, contenders, overhead, peers, registry, report, runner
from lowbit.bench.contenders import Contender, Runnable, UnfitError
from lowbit.bench.data import Data, in_steps, make_data
from lowbit.bench.registry import Case, Direction, Op, all_cases, find_cases
from lowbit.ste import SteKind

CPU = torch.device("cpu")
NAMES = {contender.name: contender for contender in peers.CONTENDERS}
EAGER = [NAMES[name] for name in ("copy", "lowbit", "torch", "hand-made", "relu")]
ALL = list(all_cases())
TINY = "per_tensor/float32/256x64/clipped_identity/forward+backward"


def one(name: str) -> Case:
    (case,) = find_cases([name])
    return case


def fake_clock(function: Callable[[], Any], repeats: int) -> float:
    function()
    return 1e-3


def rows_of(name: str, *those: Contender) -> dict[str, runner.Row]:
    return {row.contender: row for row in runner.run_case(one(name), those, CPU, 1e-9, fake_clock)}


def test_names_are_unique() -> None:
    names = [case.name for case in ALL]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("dtype", registry.DTYPES)
@pytest.mark.parametrize("ste", SteKind)
@pytest.mark.parametrize("op", [Op.FAKE_QUANTIZE, Op.PER_BATCH, Op.LEARNED, Op.EMA])
def test_every_family_has_every_rule(op: Op, ste: SteKind, dtype: torch.dtype) -> None:
    families = {family.name for family in registry.FAMILIES if family.op is op}
    for shape in registry.MATRICES:
        found = {
            case.family.name
            for case in ALL
            if (case.op, case.ste, case.dtype, case.shape) == (op, ste, dtype, shape) and case.has_backward
        }
        assert found == families


def test_the_issue_is_covered() -> None:
    families = {family.name for family in registry.FAMILIES}
    assert families >= {"per_tensor", "per_channel0", "per_channel1", "per_token", "per_group32"}
    assert families >= {"learned_per_tensor", "ema_per_tensor", "quantize_per_tensor", "dequantize_per_tensor"}
    assert registry.MATRICES[0] == (256, 64)
    assert registry.MATRICES[-1] == (16384, 4096)
    for form in ("64x64x56x56", "64x64x56x56-channels_last"):
        assert find_cases([f"per_channel1/bf16/{form}/clipped_identity/forward"])


def test_a_glob_may_leave_the_last_parts_out() -> None:
    assert {case.direction for case in find_cases(["per_channel0/bf16/16384x4096/clipped_identity"])} == set(Direction)
    assert find_cases(["nothing"]) == []


@pytest.mark.parametrize("device", registry.HEADLINE)
def test_every_headline_glob_finds_cases(device: str) -> None:
    for glob in (*registry.HEADLINE[device], *registry.QUICK):
        assert find_cases([glob]), glob


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        # x read, y written, and the scale
        ("per_tensor/float32/256x64/clipped_identity/forward", 2 * 65536 + 4),
        # ... then g and x read, dx written, and the scale again
        ("per_tensor/float32/256x64/clipped_identity/forward+backward", 5 * 65536 + 8),
        ("per_tensor/float32/256x64/identity/forward+backward", 2 * 65536 + 4),
        ("per_group32/bf16/256x64/tanh/forward+backward", 5 * 32768 + 2 * 4 * 512),
        # the data's own range: clipping is IDENTITY; a row stays at hand, a whole tensor is read twice
        ("per_batch_per_token/bf16/16384x4096/clipped_identity/forward+backward", 2 * 2**27 + 4 * 16384),
        ("per_batch_per_tensor/bf16/16384x4096/clipped_identity/forward+backward", 3 * 2**27 + 4),
        ("per_batch_per_tensor/bf16/16384x4096/tanh/forward+backward", 6 * 2**27 + 8),
        ("ema_per_tensor/bf16/16384x4096/clipped_identity/forward+backward", 6 * 2**27 + 8),
        ("learned_per_tensor/bf16/16384x4096/identity/forward+backward", 5 * 2**27 + 8),
        # bf16 to int8 and back
        ("quantize_per_tensor/bf16/256x64/clipped_identity/forward", 32768 + 16384 + 4),
        ("dequantize_per_tensor/bf16/256x64/clipped_identity/forward", 16384 + 32768 + 4),
        # float32 codes: x read, codes written; their gradient and x read, dx written
        ("quantize_per_tensor/bf16/256x64/clipped_identity/forward+backward", 3 * 32768 + 2 * 65536 + 8),
        ("dequantize_per_tensor/bf16/256x64/clipped_identity/forward+backward", 4 * 32768 + 8),
    ],
)
def test_floor_bytes(name: str, floor: int) -> None:
    assert one(name).floor_bytes == floor


def test_a_copy_of_x_is_its_own_floor() -> None:
    case = one("per_tensor/float32/256x64/identity/forward+backward")
    assert case.copy_bytes == 2 * case.tensor_bytes == 2 * 256 * 64 * 4


@pytest.mark.parametrize("family", registry.FAMILIES, ids=lambda family: family.name)
def test_data_lies_where_the_rules_agree(family: registry.Family) -> None:
    case = Case(family, torch.float32, (256, 64), False, SteKind.IN_RANGE, Direction.BOTH)
    data = make_data(case, CPU)
    if case.op is Op.DEQUANTIZE:
        return
    steps = in_steps(data.x, data.scale, case).detach().abs()
    if case.op.follows_data:
        assert steps.max() <= 127.001
    else:
        assert not ((steps > 127) & (steps < 129)).any()
        assert 0 < (steps > 127).float().mean() < 0.01


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
@pytest.mark.parametrize("family", [family.name for family in registry.FAMILIES])
@pytest.mark.parametrize("dtype", registry.DTYPES.values())
def test_everyone_here_is_right(family: str, dtype: str) -> None:
    for direction in Direction:
        rows = rows_of(f"{family}/{dtype}/256x64/clipped_identity/{direction}", *EAGER)
        assert rows["lowbit"].status == rows["hand-made"].status == rows["copy"].status == "ok"
        # torch's moving average takes neither bfloat16 nor axis 1
        assert rows["torch"].status in ("ok", "failed" if family.startswith("ema") else "skipped")


@pytest.mark.parametrize("ste", SteKind)
def test_every_rule_has_a_hand_made_form(ste: SteKind) -> None:
    rows = rows_of(f"per_channel1/float32/256x64/{ste.value}/forward+backward", NAMES["copy"], *EAGER[1:4])
    assert rows["lowbit"].status == rows["hand-made"].status == "ok"
    assert (rows["torch"].status == "skipped") == (ste in (SteKind.TANH, SteKind.HARD_TANH))


def broken(change: Callable[[torch.Tensor], torch.Tensor], *, is_ours: bool) -> Contender:
    def build(case: Case, data: Data) -> Runnable:
        right = contenders.lowbit(case, data)
        return right._replace(forward=lambda x: change(right.forward(x)))

    return Contender("broken", build, is_ours=is_ours)


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda y: y + 0.1,
        lambda y: 2 * y,
        lambda y: torch.full_like(y, torch.nan) + 0 * y,
        lambda y: y.detach() + 0.5 * (y - y.detach()),
    ],
    ids=["moved", "doubled", "nan", "half the gradient"],
)
def test_what_is_wrong_is_not_timed(change: Callable[[torch.Tensor], torch.Tensor], is_ours: bool) -> None:
    calls = []

    def clock(function: Callable[[], Any], repeats: int) -> float:
        calls.append(function)
        return fake_clock(function, repeats)

    contender = broken(change, is_ours=is_ours)
    row = runner.run_case(one(TINY), [NAMES["copy"], contender], CPU, 1e-9, clock)[1]
    assert row.status == "wrong"
    assert row.seconds is None
    assert len(set(calls)) == 1  # the copy's


def test_to_do_nothing_is_wrong() -> None:
    idle = Contender("idle", lambda case, data: Runnable(lambda x: x * 1))
    row = rows_of("per_batch_per_tensor/float32/256x64/identity/forward+backward", NAMES["copy"], idle)["idle"]
    assert row.status == "wrong"
    assert "steps from x" in row.note


def test_a_scale_without_its_gradient_is_wrong() -> None:
    def build(case: Case, data: Data) -> Runnable:
        return contenders.hand_made(case, data)._replace(factor=1.5)

    rows = rows_of(
        "learned_per_tensor/float32/256x64/identity/forward+backward", NAMES["copy"], Contender("off", build)
    )
    assert rows["off"].status == "wrong"
    assert "scale's gradient" in rows["off"].note


def test_codes_one_off_are_wrong_for_ours_and_two_off_for_a_peer() -> None:
    case = one("quantize_per_tensor/float32/256x64/clipped_identity/forward")
    data = make_data(case, CPU)
    reference = check.call(contenders.lowbit(case, data), case, data)
    moved = reference._replace(y=(reference.y.int() + 2).clamp(max=127).to(torch.int8))
    assert check.find_difference(case, reference, reference) == check.find_error(case, data, reference, reference) == ""
    assert "differs" in check.find_difference(case, moved, reference)
    assert "more than a step off" in check.find_error(case, data, moved, reference)


def test_a_contender_that_cannot_says_why() -> None:
    def unfit(case: Case, data: Data) -> Runnable:
        raise UnfitError("not installed")

    def raises(case: Case, data: Data) -> Runnable:
        raise RuntimeError("no such kernel\nand a stack trace")

    rows = rows_of(TINY, NAMES["copy"], Contender("absent", unfit), Contender("raises", raises))
    assert (rows["absent"].status, rows["absent"].note) == ("skipped", "not installed")
    assert (rows["raises"].status, rows["raises"].note) == ("failed", "RuntimeError: no such kernel")


def test_a_missing_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(peers, "import_module", missing)
    rows = rows_of(
        "per_token/float32/256x64/identity/forward+backward", NAMES["copy"], NAMES["torchao"], NAMES["brevitas"]
    )
    assert rows["torchao"].note == rows["brevitas"].note == "not installed"


def test_ratios_are_of_the_same_round() -> None:
    """The machine slows down threefold in the middle; the ratios do not see it."""
    case = one("per_tensor/float32/256x64/identity/forward+backward")
    those = [NAMES["copy"], NAMES["lowbit"], NAMES["relu"]]
    times = iter([1e-3] * 6 + [1.0, 4.0, 2.0, 3.0, 12.0, 6.0, 1.0, 4.0, 2.0])
    rows = runner.run_case(case, those, CPU, 1e-9, lambda function, repeats: next(times))
    lowbit_row, relu_row = rows[1:]
    assert lowbit_row.seconds == 4.0
    assert lowbit_row.ratio_to_floor == pytest.approx(4.0 * case.copy_bytes / case.floor_bytes)
    assert relu_row.ratio_to_ours == 0.5
    assert lowbit_row.spread == 0.0
    assert lowbit_row.rounds == 3


def test_saved_bytes() -> None:
    identity = rows_of("per_tensor/float32/256x64/identity/forward+backward", *EAGER)
    clipped = rows_of(TINY, *EAGER)
    x = 256 * 64 * 4
    assert identity["lowbit"].saved_bytes == 0
    assert x <= clipped["lowbit"].saved_bytes <= x + 64  # x itself, and the scale
    assert clipped["torch"].saved_bytes == x // 4  # a mask of bools


def test_report_round_trips(tmp_path: Path) -> None:
    rows = list(rows_of(TINY, *EAGER, NAMES["torchao"]).values())
    report.write_json(tmp_path / "rows.json", rows, CPU, "python -m lowbit.bench")
    read = json.loads((tmp_path / "rows.json").read_text())
    assert read["rows"] == [row.to_dict() for row in rows]
    assert read["versions"]["torch"] == torch.__version__
    assert read["versions"]["lowbit"] == lowbit.__version__
    assert set(read["versions"]) == {"lowbit", "torch", "triton", "torchao", "brevitas", "python"}
    assert {"device", "cpu", "threads", "load", "date", "command"} <= set(read)
    text = report.describe(rows)
    assert text.startswith(TINY)
    for row in rows:
        assert row.contender in text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--device", "cpu", "--case", TINY, "--contender", "lowbit", "--contender", "torch"]
    assert command.main([*arguments, "--seconds", "0.001", "--json", str(path)]) == 0
    assert TINY in capsys.readouterr().out
    assert [row["contender"] for row in json.loads(path.read_text())["rows"]] == ["copy", "lowbit", "torch"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--case", "per_tensor/*", "--list"]) == 0
    assert TINY in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--case", "nonsense"], "no case matches nonsense"),
        (["--contender", "nonsense"], "no contender matches 'nonsense'"),
        (["--device", "nonsense"], "--device is 'nonsense'"),
        (["--device", "meta"], "must be cpu or cuda"),
        (["--device", "cuda:99"], "CUDA device(s) here"),
        (["--json", "/nowhere/rows.json"], "cannot be written"),
        (["--seconds", "-1"], "not a positive number"),
        (["--seconds", "soon"], "not a positive number"),
    ],
)
def test_mistakes(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = [] if "--device" in arguments else ["--device", "cpu"]
    with pytest.raises(SystemExit) as exit_:
        command.main([*device, *arguments])
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        yield list(rows_of(TINY, *EAGER).values())
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    path = tmp_path / "rows.json"
    assert command.main(["--device", "cpu", "--quick", "--json", str(path)]) == 130
    assert "1 of" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"]) == len(EAGER)


def test_ours_wrong_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = broken(lambda y: y + 0.1, is_ours=True)
    monkeypatch.setattr(command, "CONTENDERS", (NAMES["copy"], bad))
    assert command.main(["--device", "cpu", "--case", TINY, "--seconds", "0.001"]) == 1


def test_overhead_parts_add_up() -> None:
    parts = {part.name: part.microseconds for part in overhead.measure_overhead(CPU, seconds=1e-9)}
    inside = ["  checks", "  plan: look up, dispatch", "  kernel, without allocation", "  allocation"]
    whole = sum(parts[name] for name in inside) + parts["  autograd and the rest"]
    assert parts["fake_quantize, forward"] == pytest.approx(whole)


def test_lowbit_itself_does_not_import_the_benchmarks() -> None:
    code = "import sys, lowbit; sys.exit(any(name.startswith('lowbit.bench') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
