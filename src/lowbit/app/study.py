"""study: a grid of runs by an honest protocol, in several processes, each result kept as it comes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import nn

from lowbit.app.analysis import Analysis, analyse
from lowbit.app.fit import Course, DivergedError, accuracy, fit
from lowbit.app.run import RunError, locked, refuse_strangers, remove_drafts, threads
from lowbit.app.sources import Source, build, calibration_inputs, example_inputs
from lowbit.app.study_config import Case, StudyConfig
from lowbit.files import write_json, write_tensors
from lowbit.model import calibrate, prepare

CONFIG, RESULTS, FLOATS = "study.json", "results", "float"

OnEvent = Callable[[str, int, int, str], None]


class Job(NamedTuple):
    """One run of one case."""

    case: Case
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of the file of its result."""
        return f"{self.case.name}-rate.{self.rate:g}-seed.{self.seed}"


def study(config: StudyConfig, folder: Path, on_event: OnEvent = lambda *_: None) -> Analysis:
    """Run what has no result yet, and compare all

    ``on_event`` gets the stage, how many runs of it are done, of how many, and a text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        remove_drafts(folder)
        _check_config(config, folder)
        (folder / RESULTS).mkdir(exist_ok=True)
        floats = [(seed,) for seed in range(config.seeds) if not (folder / FLOATS / f"{seed}.json").exists()]
        _run_all("float networks", train_float, config, folder, floats, config.seeds, on_event)
        jobs = [
            Job(case, rate, seed) for case in config.cases() for rate in config.rates for seed in range(config.seeds)
        ]
        waiting = [(job,) for job in jobs if not _result(folder, job).exists()]
        _run_all("quantized networks", run_job, config, folder, waiting, len(jobs), on_event)
        return analyse(config, dict(_results(folder, jobs)), [_float_result(folder, s) for s in range(config.seeds)])


def _check_config(config: StudyConfig, folder: Path) -> None:
    path = folder / CONFIG
    if path.exists():
        there = StudyConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
        if differences := config.differences(there):
            raise RunError(
                f"{folder} holds a study of another config: {'; '.join(differences)}. "
                "Name another folder as output, or delete this one to start anew"
            )
    else:
        refuse_strangers(folder, (), "study")
    write_json(path, asdict(config))


def _run_all(
    stage: str,
    function: Callable[..., str],
    config: StudyConfig,
    folder: Path,
    tasks: list[tuple[Any, ...]],
    total: int,
    on_event: OnEvent,
) -> None:
    done = total - len(tasks)
    on_event(stage, done, total, "")
    if not tasks:
        return
    workers = min(config.jobs or os.cpu_count() or 1, len(tasks))
    if workers == 1:
        with threads(1):
            for task in tasks:
                text = function(config, folder, *task)
                done += 1
                on_event(stage, done, total, text)
        return
    context = _context()
    stop, stopper = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker, initargs=(stop,))
    try:
        for future in as_completed([pool.submit(function, config, folder, *task) for task in tasks]):
            done += 1
            on_event(stage, done, total, future.result())
    except BaseException:
        stopper.send_bytes(b"stop")  # what they are at is run again when the study goes on
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    """New processes, not forks: a fork of a process that has threads may wait for ever. A server that has imported what
    is needed, and has no threads, may fork.
    """
    if "forkserver" not in get_all_start_methods():  # not on Windows
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _begin_worker(stop: Connection) -> None:
    """One thread; and an end at once when told, or with the process that gives the work, which may be killed: the study
    that goes on would write the same files. Ctrl-C is that process's affair.
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel, stop])
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def train_float(config: StudyConfig, folder: Path, seed: int) -> str:
    """The float network from which every case of this seed starts"""
    train = config.train_config(seed)
    model, data = _build(config, seed)
    course = Course(
        config.float_epochs, config.batch_size, config.float_rate, config.weight_decay, seed, config.optimizer
    )
    working = folder / FLOATS / f".{seed}"
    fit(model, data, course, working)
    write_tensors(folder / FLOATS / f"{seed}.pt", model.state_dict())
    found = {"held_out": accuracy(model, data, data.held_out), "test": accuracy(model, data, data.test)}
    write_json(folder / FLOATS / f"{seed}.json", found)
    shutil.rmtree(working, ignore_errors=True)
    return f"{train.data}, seed {seed}: {found['held_out']:.1f} % held out"


def _build(config: StudyConfig, seed: int) -> tuple[nn.Module, Source]:
    """The network of this seed; the data is split as for seed 0, so that all are judged by the same images."""
    _, data = build(config.train_config(0))
    model, _ = build(config.train_config(seed))
    return model, data


def run_job(config: StudyConfig, folder: Path, job: Job) -> str:
    """One case from its float network on, at one rate"""
    try:
        _, held_out, test = train_case(config, folder, job)
        found: dict[str, Any] = {"held_out": held_out, "test": test}
    except DivergedError as error:  # a rate too large for this rule is a result
        found = {"held_out": 0.0, "test": 0.0, "diverged": str(error)}
    write_json(_result(folder, job), found)
    return f"{job.name}: {found['held_out']:.1f} % held out"


def train_case(config: StudyConfig, folder: Path, job: Job) -> tuple[nn.Module, float, float]:
    """The trained network of a job, prepared, and its accuracy on held-out and test data; the same bits each time"""
    model, data = _build(config, job.seed)
    model.load_state_dict(torch.load(folder / FLOATS / f"{job.seed}.pt", weights_only=True))
    prepared = prepare(model, job.case.recipe(), example_inputs(data), inplace=True)
    calibrate(prepared, calibration_inputs(config.train_config(job.seed), data))
    course = Course(config.epochs, config.batch_size, job.rate, config.weight_decay, job.seed, config.optimizer)
    working = folder / RESULTS / f".{job.name}"
    shutil.rmtree(working, ignore_errors=True)
    try:
        fit(prepared, data, course, working)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return prepared, accuracy(prepared, data, data.held_out), accuracy(prepared, data, data.test)


def _result(folder: Path, job: Job) -> Path:
    return folder / RESULTS / f"{job.name}.json"


def _results(folder: Path, jobs: list[Job]) -> Iterator[tuple[tuple[Case, float, int], dict[str, Any]]]:
    for job in jobs:
        yield (job.case, job.rate, job.seed), json.loads(_result(folder, job).read_text(encoding="utf-8"))


def _float_result(folder: Path, seed: int) -> dict[str, Any]:
    return json.loads((folder / FLOATS / f"{seed}.json").read_text(encoding="utf-8"))
