"""A study, driven by its command: what it prints, writes and returns, resumed where it was killed, on any processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from commanding import STUDY, Answer, Command, command, flags, kill, kill_study, one_error, results_of
from lowbit.app.run import RunError
from lowbit.app.study import study
from lowbit.app.study_config import StudyConfig

CASES = ["2-w.clipped_identity.learned-a.clipped_identity.learned", "2-w.tanh.learned-a.clipped_identity.learned"]
CONFIG = StudyConfig(bits=(2,), rules=("clipped_identity", "tanh"), roles=("weight",), rates=(0.03,), seeds=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def answer(folder: Path) -> Answer:
    """Of a study that nothing stopped, into "whole"."""
    return command(folder, "study", *flags(STUDY), "--output=whole", "--json")


def test_a_study_answers_json_and_leaves_its_files(folder: Path, answer: Answer) -> None:
    assert answer.code == 0, answer.err
    found, results = answer.json, results_of(folder / "whole")
    assert found["ok"] is True
    assert found["verification"]["ok"] is True
    assert found["report"] == "whole/report.html"
    assert len(results) == 7
    for name, row in zip(CASES, found["rows"], strict=True):
        runs = [results[f"results/{name}-rate.0.03-seed.{seed}.json"] for seed in range(2)]
        assert row["rate"] == 0.03
        assert row["held_out"] == sum(run["held_out"] for run in runs) / 2
        assert row["test"] == sum(run["test"] for run in runs) / 2
    best = max(range(2), key=lambda i: found["rows"][i]["held_out"])
    shipped = results["verification.json"]
    assert shipped["case"] == CASES[best]
    assert shipped["test"] == results[f"results/{CASES[best]}-rate.0.03-seed.0.json"]["test"]
    names = {path.name for path in (folder / "whole").iterdir()}
    assert {"study.json", "model.onnx", "model.safetensors", "report.html"} <= names
    assert not list((folder / "whole").rglob(".*.partial"))


def test_a_study_says_what_it_found(folder: Path, answer: Answer) -> None:
    assert "study of 2 cases, 4 runs, into whole" in answer.err
    assert "quantized networks 4/4: " in answer.err
    assert "every case:" in answer.err
    assert "\nwhole/model.onnx, style integer" in answer.err
    report = (folder / "whole" / "report.html").read_text()
    assert len(answer.json["findings"]) == 3
    for finding in answer.json["findings"]:
        assert finding in answer.err
        assert finding in report
    assert "TANH for weights" in answer.json["findings"][2]


def test_run_again_it_runs_nothing(folder: Path, answer: Answer) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder / "whole").rglob("*.json") if path.name != "study.json"}
    again = command(folder, "study", *flags(STUDY), "--output=whole", "--json")
    assert (again.code, again.json) == (0, answer.json)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_killed_and_resumed_is_the_same(folder: Path, answer: Answer) -> None:
    assert results_of(kill_study(folder, 3, 0)) == results_of(folder / "whole")


def test_two_processes_find_what_one_does(folder: Path, answer: Answer) -> None:
    study(StudyConfig.from_dict({**CONFIG.to_dict(), "float_epochs": 2, "epochs": 1, "jobs": 2}), folder / "two")
    whole = results_of(folder / "whole")
    del whole["verification.json"]
    assert results_of(folder / "two") == whole


def assert_nothing_comes(folder: Path) -> None:
    """The workers of a study that ended have ended too."""
    time.sleep(1)  # for them to see it
    kept = results_of(folder)
    time.sleep(1.5)  # in which they would have finished more
    assert results_of(folder) == kept
    assert len(kept) < 6


def test_workers_end_with_a_study_that_is_killed(folder: Path) -> None:
    running = Command(folder, ["study", *flags(STUDY, jobs=2, epochs=4), "--output=orphans"])
    running.wait_for(lambda: len(results_of(folder / "orphans")) >= 3)
    kill(running, 0)
    assert_nothing_comes(folder / "orphans")


def test_workers_end_with_a_study_that_is_stopped(tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int, text: str) -> None:
        if (stage, done) == ("quantized networks", 1):
            raise KeyboardInterrupt

    changes = {"float_epochs": 2, "epochs": 4, "jobs": 2}
    with pytest.raises(KeyboardInterrupt):
        study(StudyConfig.from_dict({**CONFIG.to_dict(), **changes}), tmp_path, stop)
    assert_nothing_comes(tmp_path)


def test_interrupted_says_how_to_go_on(folder: Path) -> None:
    arguments = ["study", *flags(STUDY), "--output=stopped"]
    running = Command(folder, arguments)
    running.wait_for(lambda: len(results_of(folder / "stopped")) >= 2)
    os.kill(running.process.pid or 0, signal.SIGINT)
    answer = running.wait()
    assert answer.code == 130
    assert answer.err == f"stopped; what is finished is kept. To go on: lowbit {' '.join(arguments)}\n"


@pytest.mark.parametrize(
    ("changes", "code", "wanted"),
    [
        ({"seeds": 3}, 1, "whole holds a study of another config: seeds is 3, there 2"),
        ({"seeds": 1}, 2, "seeds is 1, but it must be at least 2"),
        ({"rules": ["sign"]}, 2, "rules is 'sign', but it must be one of"),
        ({"bits": 1}, 2, "bits is 1, but it must be from 2 to 8"),
        ({"config": "none.toml"}, 2, "none.toml: there is no such config"),
    ],
)
def test_wrong_arguments(folder: Path, answer: Answer, changes: dict[str, object], code: int, wanted: str) -> None:
    before = results_of(folder / "whole")
    wrong = command(folder, "study", *flags(STUDY, **changes), "--output=whole")
    assert wrong.code == code
    assert wanted in one_error(wrong.err)
    assert results_of(folder / "whole") == before


def test_a_diverging_case_is_a_result(tmp_path: Path) -> None:
    changes = {"rates": (0.03, 1e30), "rules": ("clipped_identity",), "float_epochs": 1, "epochs": 1, "jobs": 1}
    analysis = study(StudyConfig.from_dict({**CONFIG.to_dict(), **changes}), tmp_path / "study")
    assert analysis.rows[2][0].rate == 0.03
    diverged = [result for name, result in results_of(tmp_path / "study").items() if "1e+30" in name]
    assert len(diverged) == 2
    assert all("training diverged" in result["diverged"] for result in diverged)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunError, match=r"holds no study, but config\.toml; name a new folder"):
        study(CONFIG, tmp_path)
