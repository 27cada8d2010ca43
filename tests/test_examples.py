"""The examples run as a user runs them: in a process of their own, at a tiny size."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from lowbit import SteKind

DIGITS = [sys.executable, str(Path(__file__).parents[1] / "examples" / "digits.py"), "--epochs", "1", "--seeds", "1"]
ENVIRONMENT = os.environ | {"PYTHONUTF8": "1"}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*DIGITS, *arguments]
    return subprocess.run(command, env=ENVIRONMENT | variables, capture_output=True, encoding="utf-8", check=False)


def parse_table(output: str) -> tuple[float, list[str], dict[str, list[float]]]:
    """The float accuracy, the rules and the accuracies of each row, from the lines after the table's title."""
    lines = output.split("Test accuracy in %")[1].splitlines()[1:-1]
    (name, accuracy), rules, *rows = (line.split() for line in lines)
    assert name == "float"
    return float(accuracy), rules, {" ".join(row[:2]): [float(cell) for cell in row[2:]] for row in rows}


def test_digits_prints_an_accuracy_for_every_number_of_bits_and_rule():
    result = run()
    assert (result.returncode, result.stderr) == (0, "")
    float_accuracy, rules, rows = parse_table(result.stdout)
    assert rules == [ste.value for ste in SteKind]
    assert list(rows) == ["8 bits", "4 bits", "2 bits"]
    assert all(len(row) == len(rules) for row in rows.values())
    # Chance is 10 %. One epoch is enough for these, since they start from a trained float network.
    assert 80 < float_accuracy <= 100
    assert all(80 < accuracy <= 100 for accuracy in rows["8 bits"] + rows["4 bits"])
    assert all(0 <= accuracy <= 100 for accuracy in rows["2 bits"])
    progress = re.findall(r"^(\d bits, \w+|float) +learning rate", result.stdout, re.MULTILINE)
    assert progress == ["float", *(f"{bits}, {rule}" for bits in rows for rule in rules)]


def test_digits_without_scikit_learn_names_the_extra(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(\"No module named 'sklearn'\", name='sklearn')\n")
    result = run(PYTHONPATH=os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "This example needs scikit-learn (No module named 'sklearn'). Install it with: pip install 'lowbit[demo]'\n"
    )


def test_digits_refuses_a_size_below_one():
    result = run("--seeds", "0")
    assert result.returncode == 2
    assert "--epochs and --seeds must be at least 1" in result.stderr


def test_digits_ends_quietly_on_an_interrupt():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    listen = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a background job would ignore it
    with subprocess.Popen(DIGITS, env=ENVIRONMENT, preexec_fn=listen, **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().strip() == "Stopped before the table was complete."
