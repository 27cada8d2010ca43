"""The commands of the command line: what their arguments mean, and what they print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from lowbit.app.study_command import study
from lowbit.app.terminal import INTERRUPTED, OK, WRONG, Terminal, UsageError, command_line, remember
from lowbit.version import __version__

# torch and Lightning take seconds to import, so that each command imports what it needs.
if TYPE_CHECKING:
    from lowbit.app.config import TrainConfig
    from lowbit.app.train import Event

app = typer.Typer(
    name="lowbit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
recipes_app = typer.Typer(rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a lowbit train.")]
Style = Annotated[str | None, typer.Option(help="integer or qdq; by default that of the run.")]


def examples(*lines: str) -> str:
    """The end of a help text; the character before it keeps its lines as they are."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def run(arguments: Sequence[str]) -> int:
    """The exit code."""
    remember(arguments)
    try:
        app(args=list(arguments), prog_name="lowbit")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


@app.callback(
    invoke_without_command=True,
    epilog=examples(
        "lowbit train                         train, export and verify a ternary network on digits, within a minute",
        "lowbit inspect runs/digits-ternary    what is quantized how, and which layers it costs most",
        "lowbit recipes                       list the recipes",
        "lowbit train --help                  more on one command",
    ),
)
def _lowbit(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Quantization-aware training in PyTorch, right to the bit.

    Exit codes: 0 ok, 1 the run or the verification is wrong, 2 wrong usage, 130 interrupted.
    """
    if version:
        typer.echo(f"lowbit {__version__}")
        raise typer.Exit


@app.command(
    epilog=examples(
        "lowbit train",
        "lowbit train --recipe w8a8 --epochs 5 --output runs/first",
        "lowbit train --data fashion-mnist --folder ~/data/fashion --float-epochs 5 --epochs 5",
        "lowbit train --model mypackage.models:make --recipe my.toml --float-epochs 0",
        "lowbit train --model bert/ --data text --folder reviews/ --recipe w8a8 --optimizer adamw \\",
        "    --rate 5e-5 --quantized-rate 2e-5 --float-epochs 3 --epochs 1",
        "lowbit train --config run.toml --seed 1 --output runs/seed1 --json",
        "torchrun --nproc-per-node 2 -m lowbit.cli train --data cifar10 --folder ~/data/cifar",
    )
)
def train(
    config: ConfigFile = None,
    data: DataName = None,
    folder: DataFolder = None,
    model: ModelName = None,
    recipe: Annotated[str | None, typer.Option(help="A preset's name, or a recipe's TOML file.")] = None,
    float_epochs: FloatEpochs = None,
    epochs: Epochs = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a batch, of all processes together.")] = None,
    rate: Annotated[float | None, typer.Option(help="Learning rate in float.")] = None,
    quantized_rate: Annotated[float | None, typer.Option(help="Learning rate with quantizers.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of weights, not of scales.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, or adamw, as for transformers.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order and held-out images.")] = None,
    held_out: Annotated[str | None, typer.Option(help="A share of the training images, or a number.")] = None,
    calibration_batches: Annotated[int | None, typer.Option(help="Batches that set the first scales.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a text, at most.")] = None,
    style: Annotated[str | None, typer.Option(help="Of the ONNX file: integer or qdq.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="The run's folder; runs/DATA-RECIPE.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train in float, quantize, train on, export, verify, and write a report.

    Every finished step is kept in the output folder: the same command run again goes on where it stopped. Options
    given here are taken before those of the config file. Under torchrun, the processes share every batch.
    """
    given = {key: value for key, value in locals().items() if value is not None}
    terminal = Terminal(as_json=as_json, debug=debug)
    with terminal.guarded(resume=command_line()):
        changes = {key: given[key] for key in given if key not in ("config", "as_json", "debug")}
        if held_out is not None:
            changes["held_out"] = _number("held_out", held_out)
        chosen = _config(config, changes)
        from lowbit.app.run import REPORT
        from lowbit.app.train import train as run_training
        from lowbit.app.train_report import NAMES

        terminal.say(f"training into {chosen.output_folder}")
        with terminal.bar() as move:

            def on_event(event: Event) -> None:
                terminal.heed()
                if event.kind in ("begin", "progress"):
                    move(event.step, event.done, event.total, event.text)
                if event.kind == "begin" and not terminal.console.is_terminal:
                    terminal.say(f"{event.step}: ...")
                elif event.kind in ("epoch", "end", "kept"):
                    words = [event.text, "(kept from before)" if event.kind == "kept" else ""]
                    terminal.say(f"{event.step}: {' '.join(filter(None, words)) or 'done'}")

            result = run_training(chosen, on_event=on_event, command=command_line())
        if not terminal.here.is_first:
            return
        rows = [
            [name, *(f"{result.metrics[step]['accuracy'][part]['percent']:.2f}" for part in ("held_out", "test"))]
            for step, name in NAMES.items()
        ]
        terminal.say()
        terminal.table("accuracy (%)", ["model", "held out", "test"], rows)
        terminal.say(f"report: {result.folder / REPORT}")
        terminal.answer(result.to_dict())
        if not result.ok:
            _fail_verification(terminal, result.metrics["verify"]["verdict"])
    raise typer.Exit(terminal.code)


@app.command(
    epilog=examples(
        "lowbit inspect runs/digits-ternary",
        "lowbit inspect run.toml --no-sensitivity",
        "lowbit inspect runs/digits-ternary --json | jq .sensitivity",
    )
)
def inspect(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run's folder, or a config's TOML file.")],
    sensitivity: Annotated[bool, typer.Option(help="Measure what each layer costs.")] = True,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what is quantized how, how noisy each quantizer is, and what each layer costs.

    The sensitivity of a layer is measured: the accuracy on held-out data with only this layer left in float, against
    that with all of them quantized. Of a trained run it is measured on the float network that the run trained first,
    since weights that were trained on a grid have adapted to it. Of a config that has no run yet, the model is
    calibrated, but not trained.
    """
    terminal = Terminal(as_json=as_json, debug=debug)
    with terminal.guarded():
        from lowbit.app.inspection import inspect as look

        with terminal.bar() as move:
            found = look(
                _target(target),
                sensitivity=sensitivity,
                on_layer=lambda layer, done, total: move("layers", done, total, layer),
            )
        terminal.say(f"{found.title}\n")
        terminal.say(str(found.summary))
        terminal.say()
        noise = [[row["layer"] or "(model)", row["tensor"], _decibels(row["snr_db"])] for row in found.noise]
        terminal.table("noise, the noisiest first", ["layer", "tensor", "SNR (dB)"], noise)
        if found.sensitivity is not None:
            lines = [
                [line.layer or "(model)", f"{line.accuracy:.2f}", f"{line.gain:+.2f}"]
                for line in found.sensitivity.lines
            ]
            title = (
                f"sensitivity: all quantized {found.sensitivity.quantized:.2f} % of {found.sensitivity.of:,} held out; "
                "with only this layer in float"
            )
            terminal.say()
            terminal.table(title, ["layer", "accuracy (%)", "gain (points)"], lines)
            if found.note:
                terminal.say(found.note)
        terminal.answer(found.to_dict())
    raise typer.Exit(terminal.code)


@app.command(
    epilog=examples(
        "lowbit export runs/digits-ternary model.onnx",
        "lowbit export runs/digits-ternary model-qdq.onnx --style qdq",
        "lowbit export runs/digits-ternary model.safetensors",
    )
)
def export(
    run_folder: RunFolder,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .onnx or .safetensors file to write.")],
    style: Style = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a run's model as an ONNX or safetensors file."""
    terminal = Terminal(as_json=as_json, debug=debug)
    with terminal.guarded():
        chosen = _style(style)
        from lowbit.app.shipping import export_run

        size = export_run(run_folder, path, chosen)
        terminal.say(f"wrote {path}: {size:,} bytes")
        terminal.answer({"ok": True, "path": str(path), "bytes": size})
    raise typer.Exit(terminal.code)


@app.command(
    epilog=examples(
        "lowbit verify runs/digits-ternary",
        "lowbit verify runs/digits-ternary model-qdq.onnx --json",
    )
)
def verify(
    run_folder: RunFolder,
    path: Annotated[Path | None, typer.Argument(metavar="[PATH]", help="An ONNX file; by default the run's.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run an ONNX file and the run's model, and compare their codes and outputs. Exit code 1 where they differ."""
    terminal = Terminal(as_json=as_json, debug=debug)
    with terminal.guarded():
        from lowbit.app.shipping import verify_run

        found = verify_run(run_folder, path)
        terminal.say(str(found))
        terminal.answer(found.to_dict())
        terminal.code = OK if found.ok else WRONG
    raise typer.Exit(terminal.code)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    epilog=examples(
        "lowbit bench --quick",
        "lowbit bench --models --json models.json",
    ),
)
def bench(context: typer.Context) -> None:
    """Measure lowbit's ops on this machine; lowbit bench --help lists its options."""
    from lowbit.bench.__main__ import main

    raise typer.Exit(main(context.args))


app.command(
    epilog=examples(
        "lowbit study --bits 2",
        "lowbit study --bits 3 --bits 2 --rules clipped_identity --rules tanh --scales learned --scales ema --seeds 8",
        "lowbit study --model mypackage.models:make --output runs/mine --jobs 4",
    )
)(study)


@recipes_app.callback(
    invoke_without_command=True,
    epilog=examples(
        "lowbit recipes",
        "lowbit recipes show w4a8",
        "lowbit recipes write w8a8 my.toml",
    ),
)
def _recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List, show and write recipes; alone, it lists them."""
    if context.invoked_subcommand is None:
        list_recipes(as_json=as_json)


@recipes_app.command(
    "list",
    epilog=examples(
        "lowbit recipes list",
        "lowbit recipes list --json",
    ),
)
def list_recipes(as_json: AsJson = False) -> None:
    """List the presets, each with its formula."""
    from lowbit.recipes import presets

    terminal = Terminal(as_json=as_json)
    formulas = {name: (function.__doc__ or "").strip().partition("\n")[0] for name, function in presets().items()}
    terminal.table("recipes", ["name", "formula"], [[name, text] for name, text in formulas.items()])
    terminal.answer({"recipes": formulas})


@recipes_app.command(
    "show",
    epilog=examples(
        "lowbit recipes show w8a8",
        "lowbit recipes show w2a2 > my.toml",
    ),
)
def show_recipe(
    name: Annotated[str, typer.Argument(help="A preset's name.")], as_json: AsJson = False, debug: Debug = False
) -> None:
    """Print a preset as TOML."""
    terminal = Terminal(as_json=as_json, debug=debug)
    with terminal.guarded():
        recipe = _preset(name)
        if not as_json:
            typer.echo(recipe.to_toml(), nl=False)
        terminal.answer({"name": name, "recipe": recipe.to_dict()})
    raise typer.Exit(terminal.code)


@recipes_app.command(
    "write",
    epilog=examples(
        "lowbit recipes write w8a8 my.toml",
        "lowbit train --recipe my.toml",
    ),
)
def write_recipe(
    name: Annotated[str, typer.Argument(help="A preset's name.")],
    path: Annotated[Path, typer.Argument(help="The TOML file to write; it must not be there yet.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a preset as a TOML file to start from."""
    terminal = Terminal(as_json=as_json, debug=debug)
    with terminal.guarded():
        recipe = _preset(name)
        if path.exists():
            raise UsageError(f"{path} is there already; name another file, or remove it first")
        recipe.save(path)
        terminal.say(f"wrote {path}; use it: lowbit train --recipe {path}")
        terminal.answer({"ok": True, "path": str(path)})
    raise typer.Exit(terminal.code)


def _fail_verification(terminal: Terminal, verdict: str) -> None:
    terminal.code = WRONG
    typer.echo(f"error: {verdict}", err=True)


def _config(path: Path | None, changes: dict[str, Any]) -> TrainConfig:
    """The config of a file and flags; what is wrong with it is wrong usage."""
    from lowbit.app.config import TrainConfig

    with wrong_usage():
        chosen = TrainConfig.from_dict(changes) if path is None else TrainConfig.read(path, changes)
        chosen.load_recipe()
    return chosen


def _target(path: Path) -> Path | TrainConfig:
    """A run's folder, or a config."""
    if path.is_dir():
        return path
    if not path.exists():
        raise UsageError(f"{path} does not exist; name a run's folder, or a config's TOML file")
    return _config(path, {})


def _number(key: str, text: str) -> float:
    """An int is a number of images, a float a share of them."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"{key} is {text!r}, but it must be a share, such as 0.1, or a number, such as 100")


def _style(style: str | None) -> str | None:
    from lowbit.export.onnx import STYLES

    if style is not None and style not in STYLES:
        raise UsageError(f"style is {style!r}, but it must be one of {', '.join(map(repr, STYLES))}")
    return style


def _preset(name: str) -> Any:
    from lowbit.recipes import presets

    if name not in presets():
        raise UsageError(f"there is no recipe {name!r}; the presets are {', '.join(presets())}")
    return presets()[name]()


def _decibels(value: float | None) -> str:
    return "no loss" if value is None else f"{value:.1f}"
