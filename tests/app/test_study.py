"""A study, run for real: resumed where it was killed, and the same results in any number of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowbit.app.run import RunError
from lowbit.app.study import study
from lowbit.app.study_config import StudyConfig
from lowbit.app.study_report import make_report, ship_best

SMALL = StudyConfig(
    bits=(2,),
    rules=("clipped_identity", "tanh"),
    roles=("weight",),
    rates=(0.03,),
    seeds=2,
    float_epochs=2,
    epochs=1,
    jobs=1,
)

SCRIPT = """
import sys
from pathlib import Path
from lowbit.app.study import study
from lowbit.app.study_config import StudyConfig
if __name__ == "__main__":
    study(StudyConfig.from_dict({config!r}), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies") / "whole"
    study(SMALL, folder)
    return folder


def found(folder: Path) -> dict[str, object]:
    paths = sorted([*(folder / "results").glob("*.json"), *(folder / "float").glob("*.json")])
    return {path.name: json.loads(path.read_text()) for path in paths}


def test_a_killed_study_goes_on_to_the_same_results(whole: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    config = SMALL.to_dict() | {key: list(getattr(SMALL, key)) for key in ("bits", "rules", "scales", "roles", "rates")}
    script.write_text(SCRIPT.format(config=config))
    folder, kills = tmp_path / "study", 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for delay in (5.0, 7.0):
        process = subprocess.Popen([sys.executable, script, folder], env=environment, start_new_session=True)
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            kills += 1
        process.wait()
    assert kills > 0
    study(SMALL, folder)
    assert found(folder) == found(whole)


def test_two_processes_find_what_one_does(whole: Path, tmp_path: Path) -> None:
    study(StudyConfig.from_dict({**SMALL.to_dict(), "jobs": 2}), tmp_path / "study")
    assert found(tmp_path / "study") == found(whole)


def test_another_config_is_refused(whole: Path) -> None:
    with pytest.raises(RunError, match=r"holds a study of another config: seeds is 3, there 2"):
        study(StudyConfig.from_dict({**SMALL.to_dict(), "seeds": 3}), whole)


def test_the_best_is_shipped_and_reported(whole: Path) -> None:
    analysis = study(SMALL, whole)
    shipped = ship_best(SMALL, whole, analysis)
    assert shipped["ok"], shipped["text"]
    job = next(name for name in found(whole) if name.startswith(shipped["case"]) and name.endswith("seed.0.json"))
    assert found(whole)[job]["test"] == shipped["test"]  # type: ignore[index]
    report = make_report(SMALL, analysis, shipped)
    assert report.findings == analysis.findings()
    assert len(report.tables[0].rows) == len(SMALL.cases())


def test_a_diverging_case_is_a_result(tmp_path: Path) -> None:
    config = StudyConfig.from_dict({**SMALL.to_dict(), "rates": (0.03, 1e30), "rules": ("clipped_identity",)})
    analysis = study(config, tmp_path / "study")
    assert analysis.rows[2][0].rate == 0.03
    diverged = [result for name, result in found(tmp_path / "study").items() if "1e+30" in name]
    assert len(diverged) == 2
    assert all("training diverged" in result["diverged"] for result in diverged)  # type: ignore[index]
