"""The GPT example, at a tiny size: it learns, quantized as in float."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
sys.path.insert(0, str(EXAMPLE.parent))

import gpt  # noqa: E402

SMALL = ["--layers", "1", "--width", "64", "--length", "32", "--batch-size", "4", "--steps", "40", "--rate", "3e-3"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_both_learn_the_same(tmp_path):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    result = run("--data", str(tmp_path / "text"), "--output", str(tmp_path / "out"), *SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    losses = {}
    for name in ("float", "w8a8_dynamic"):
        found = json.loads((tmp_path / "out" / f"gpt-{name}.json").read_text())
        assert len(found["losses"]) == 40
        losses[name] = found["losses"]
    # From the same weights, on the same batches: at first the same loss, but for the rounding.
    assert abs(losses["float"][0] - losses["w8a8_dynamic"][0]) < 0.05
    assert all(found[-1] < 0.7 * found[0] for found in losses.values())
    assert "of float" in result.stdout


def test_mistakes(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_bytes(b"short")
    for arguments, complaint in (
        (["--data", str(tmp_path / "text")], "has 5 bytes"),
        (["--data", str(tmp_path / "none")], "is no file"),
        (["--data", str(tmp_path / "text"), "--recipes", "w9"], "w9: no such preset"),
    ):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments, "--output", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as stopped:
            gpt.main()
        assert stopped.value.code == 2
        assert complaint in capsys.readouterr().err
