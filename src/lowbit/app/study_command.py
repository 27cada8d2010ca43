"""``lowbit study``: the command."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.app.options import (
    AsJson,
    ConfigFile,
    DataFolder,
    DataName,
    Debug,
    Epochs,
    FloatEpochs,
    ModelName,
    wrong_usage,
)
from lowbit.app.terminal import WRONG, Terminal, UsageError, command_line


def study(
    config: ConfigFile = None,
    data: DataName = None,
    folder: DataFolder = None,
    model: ModelName = None,
    bits: Annotated[list[int] | None, typer.Option(help="Numbers of bits; may be given several times.")] = None,
    rules: Annotated[
        list[str] | None, typer.Option(help="Gradient rules; the first is what others compare to.")
    ] = None,
    scales: Annotated[list[str] | None, typer.Option(help="Scale rules: learned, ema, per_batch.")] = None,
    roles: Annotated[list[str] | None, typer.Option(help="What is varied: weight, activation.")] = None,
    rates: Annotated[list[float] | None, typer.Option(help="Learning rates to choose from.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each case.")] = None,
    float_epochs: FloatEpochs = None,
    float_rate: Annotated[float | None, typer.Option(help="Learning rate of the float networks.")] = None,
    epochs: Epochs = None,
    batch_size: Annotated[int | None, typer.Option(help="Images in a batch.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, or adamw, as for transformers.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a text, at most.")] = None,
    style: Annotated[str | None, typer.Option(help="Of the ONNX file: integer or qdq.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes at a time; one for each core.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The study's folder; runs/study-DATA.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare gradient rules, scale rules and bits on your own model, then export and verify the best.

    Every case of a seed starts from the same float network, its rate is chosen on held-out data, and differences are
    taken seed by seed. Each result is kept as it comes: the same command run again goes on where it stopped.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    terminal = Terminal(as_json=as_json, debug=debug)
    again = command_line()
    with terminal.guarded(resume=again):
        if terminal.here.size > 1:
            raise UsageError("study starts processes of its own; run it without torchrun, with --jobs")
        changes = {key: value for key, value in given.items() if key not in ("config", "as_json", "debug")}
        _run(terminal, config, changes, again)
    raise typer.Exit(terminal.code)


def _run(terminal: Terminal, path: Path | None, changes: dict[str, Any], again: str) -> None:
    from lowbit.app.report import write
    from lowbit.app.run import ONNX, REPORT
    from lowbit.app.study import study as run_study
    from lowbit.app.study_config import StudyConfig
    from lowbit.app.study_report import make_report, ship_best

    with wrong_usage():
        chosen = StudyConfig.from_dict(changes) if path is None else StudyConfig.read(path, changes)
    folder = Path(chosen.output or f"runs/study-{chosen.data}")
    runs = len(chosen.cases()) * len(chosen.rates) * chosen.seeds
    terminal.say(f"study of {len(chosen.cases())} cases, {runs} runs, into {folder}")
    with terminal.bar() as move:

        def on_event(stage: str, done: int, total: int, text: str) -> None:
            terminal.heed()
            move(stage, done, total, text)
            if text and not terminal.console.is_terminal:
                terminal.say(f"{stage} {done}/{total}: {text}")

        analysis = run_study(chosen, folder, on_event)
        move("best network", 0, 0, "training, exporting and verifying it")
        shipped = ship_best(chosen, folder, analysis)
    write(make_report(chosen, analysis, shipped, again), folder / REPORT)
    columns, rows = analysis.table()
    terminal.say()
    terminal.table("every case", columns, rows)
    terminal.say()
    for finding in analysis.findings():
        terminal.say(finding)
    terminal.say()
    terminal.say(f"best: {shipped['case']}, {shipped['test']:.1f} % on the test data; {folder / ONNX}")
    words = shipped["text"].partition("\n\n")[0]
    terminal.say(words.replace(f"\n{ONNX}, ", f"\n{folder / ONNX}, ", 1))
    terminal.say(f"report: {folder / REPORT}")
    keys = ("case", "rate", "held_out", "test", "spread", "difference", "low", "high")
    table = [{key: _plain(getattr(row, key)) for key in keys} for found in analysis.rows.values() for row in found]
    answer = {"ok": shipped["ok"], "rows": table, "findings": analysis.findings(), "report": str(folder / REPORT)}
    terminal.answer(answer | {"verification": shipped["verification"]})
    if not shipped["ok"]:
        terminal.code = WRONG


def _plain(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in fields(value)} if hasattr(value, "bits") else value
