"""python -m lowbit.bench: choose cases, measure, print the table, write JSON."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowbit.bench.contenders import Contender
from lowbit.bench.linear import LAYERS, QUICK_SHAPES, SHAPES, run_linear
from lowbit.bench.linear import LEGEND as LINEAR_LEGEND
from lowbit.bench.models import LEGEND as MODELS_LEGEND
from lowbit.bench.models import TRAINEES, describe_models, run_models, write_models_json
from lowbit.bench.networks import NETWORKS, QUICK_NETWORKS
from lowbit.bench.overhead import describe_overhead, measure_overhead
from lowbit.bench.peers import CONTENDERS
from lowbit.bench.registry import HEADLINE, QUICK, Case, find_cases
from lowbit.bench.report import LEGEND, describe, environment, write_json
from lowbit.bench.runner import FLOOR, run


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where ours is wrong or fails, 2 for a mistake in the arguments, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        device = _device(options.device)
        cases = _cases(options.case, device, quick=options.quick)
        contenders = _contenders(options.contender, device, quick=options.quick)
        _check_writable(options.json)
        _check_models(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    command = shlex.join(["python", "-m", "lowbit.bench", *arguments])
    print(_headline(device))
    if options.models or options.linear:
        return _in_units_of_float(options, device, command)
    seconds = options.seconds or (0.05 if options.quick else 1.0)
    if options.overhead:
        print(describe_overhead(measure_overhead(device, seconds=seconds)))
        return 0
    blocks = ((describe(block), block) for block in run(cases, contenders, device, seconds))
    ours = {contender.name for contender in contenders if contender.is_ours}
    write = partial(write_json, device=device, command=command)
    return _measure(LEGEND, blocks, f"of {len(cases)} cases", options.json, write, ours)


def _in_units_of_float(options: argparse.Namespace, device: torch.device, command: str) -> int:
    """Whole models, or the linear layer, as ``main`` measures ops."""
    quick, kind = options.quick, device.type
    run_all: Any = run_models if options.models else run_linear
    places: Any
    ways: list[Any]
    if options.models:
        places, what = (QUICK_NETWORKS if quick else NETWORKS[kind]), "networks"
        ways = [trainee for trainee in TRAINEES if kind == "cuda" or not trainee.captured]
        legend, seconds = MODELS_LEGEND, 30.0
    else:
        places, what, ways = (QUICK_SHAPES if quick else SHAPES[kind]), "shapes", list(LAYERS)
        legend, seconds = LINEAR_LEGEND, 10.0
    ways = [way for way in ways if not (quick and way.compiled)]
    blocks = run_all(places, ways, device, options.seconds or (0.05 if quick else seconds))
    described = ((describe_models(block), block) for block in blocks)
    write = partial(write_models_json, device=device, command=command)
    return _measure(
        legend, described, f"of {len(places)} {what}", options.json, write, {way.name for way in ways if way.is_ours}
    )


def _measure(
    legend: str,
    blocks: Iterator[tuple[str, Any]],
    total: str,
    path: Path | None,
    write: Callable[..., None],
    ours: set[str],
) -> int:
    """Print each block as it comes, write all that came; 130 where interrupted, 1 where ours was wrong or failed."""
    print(legend)
    rows: list[Any] = []
    done, interrupted = 0, False
    try:
        for text, block in blocks:
            print(f"\n{text}", flush=True)
            rows += block
            done += 1
    except KeyboardInterrupt:
        interrupted = True
        print(f"\nInterrupted: {done} {total} are done.")
    if path is not None:
        write(path, rows)
        print(f"\nWrote {path}")
    if interrupted:
        return 130
    return int(any(row.contender in ours and row.status in ("wrong", "failed") for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lowbit.bench",
        description="Measure lowbit's ops beside torch's, a hand-made straight-through estimator, torchao's and "
        "Brevitas', in turn, in one process, after a check that each computes the right answer.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1")
    parser.add_argument(
        "--case",
        action="append",
        metavar="GLOB",
        help="cases by name, such as 'per_channel*/bf16/16384x4096/*'; may be repeated; '*' is all of them "
        "(default: the rows of the design's table)",
    )
    parser.add_argument(
        "--contender", action="append", metavar="GLOB", help="only these, and the copy; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cases, and measure nothing")
    parser.add_argument("--seconds", type=_positive, help="time to spend on each case (default: 1; models: 30)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows with all versions to this file")
    parser.add_argument(
        "--quick", action="store_true", help="small tensors, little time, nothing compiled: a smoke test"
    )
    parser.add_argument(
        "--models",
        action="store_true",
        help="measure training steps of whole networks instead of ops: time and memory, quantized over float",
    )
    parser.add_argument(
        "--linear",
        action="store_true",
        help="measure a linear layer instead of ops: forward and backward, quantized over float",
    )
    parser.add_argument("--overhead", action="store_true", help="show where the microseconds of a small call go")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device is {name!r}, but it must be cpu or cuda") from error
    if device.type not in HEADLINE:
        raise ValueError(f"--device is {name!r}, but it must be cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA device(s) here")
    return device


def _cases(globs: list[str] | None, device: torch.device, *, quick: bool) -> list[Case]:
    cases = find_cases(globs or (QUICK if quick else HEADLINE[device.type]))
    if not cases:
        raise ValueError(f"no case matches {' or '.join(globs or ())}; --case '*' --list shows all names")
    return cases


def _contenders(globs: list[str] | None, device: torch.device, *, quick: bool) -> list[Contender]:
    if globs is None:
        return [c for c in CONTENDERS if not (quick and c.compiled) and (c.name != "relu" or device.type == "cpu")]
    for glob in globs:
        if not any(fnmatchcase(contender.name, glob) for contender in CONTENDERS):
            names = ", ".join(contender.name for contender in CONTENDERS)
            raise ValueError(f"no contender matches {glob!r}; they are {names}")
    return [c for c in CONTENDERS if c.name == FLOOR or any(fnmatchcase(c.name, glob) for glob in globs)]


def _check_writable(path: Path | None) -> None:
    """An hour of measuring must not end in a path that cannot be written."""
    if path is None:
        return
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror}") from error


def _check_models(options: argparse.Namespace) -> None:
    others = options.case or options.contender or options.list or options.overhead
    for name, what in (("models", "whole networks"), ("linear", "a linear layer")):
        if getattr(options, name) and (others or (options.models and options.linear)):
            raise ValueError(f"--{name} measures {what}; it goes with --device, --seconds, --json and --quick only")


def _headline(device: torch.device) -> str:
    facts = environment(device)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version is not None)
    place = f"device {facts['device']}, {facts['cpu']}, {facts['threads']} threads"
    return f"{versions}; {place}" + (f", load {facts['load']:.1f}" if facts["load"] is not None else "")


if __name__ == "__main__":
    sys.exit(main())
