"""The runner: check every contender, then measure them in turn, round after round, in one process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lowbit.bench.check import Outcome, call, find_difference, find_error
from lowbit.bench.contenders import Contender, Runnable, UnfitError, lowbit
from lowbit.bench.data import Data, make_data
from lowbit.bench.registry import Case, Op
from lowbit.kernels import plan

FLOOR, OURS = "copy", "lowbit"
Result = TypeVar("Result")
# A sample lasts about this long, so that the clock's own cost does not show; on a GPU, nor the wait for the first call.
_SAMPLE_SECONDS = {"cpu": 2e-3, "cuda": 1e-2}
_ROUNDS = (3, 1000)


class Clock(Protocol):
    """Measures: seconds for one of ``repeats`` calls."""

    def __call__(self, function: Callable[[], Any], repeats: int) -> float: ...


def cpu_clock(function: Callable[[], Any], repeats: int) -> float:
    """Wall time."""
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - start) / repeats


def cuda_clock(function: Callable[[], Any], repeats: int) -> float:
    """The time between two events on the GPU's queue."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


@dataclass
class Row:
    """One contender in one case. Ratios are medians of the rounds' own ratios, and None where not measured.

    ``status`` is ok, skipped (``note`` says why), wrong or failed; only what is ok was timed. ``spread`` is the
    interquartile range of the ratio to the floor's time, over the median.
    """

    case: Case
    contender: str
    status: str = "ok"
    note: str = ""
    seconds: float | None = None
    ratio_to_floor: float | None = None
    ratio_to_ours: float | None = None
    spread: float | None = None
    peak_bytes: int | None = None
    saved_bytes: int | None = None
    rounds: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the case by its name and parts."""
        case = self.case
        parts = {
            "case": case.name,
            "op": case.op.value,
            "per": case.per.to_dict(),
            "dtype": str(case.dtype).removeprefix("torch."),
            "shape": list(case.shape),
            "channels_last": case.channels_last,
            "ste": case.ste.value,
            "direction": case.direction.value,
            "tensor_bytes": case.tensor_bytes,
            "floor_bytes": case.floor_bytes,
        }
        return parts | {name: value for name, value in asdict(self).items() if name != "case"}


def run_case(
    case: Case, contenders: Sequence[Contender], device: torch.device, seconds: float, clock: Clock | None = None
) -> list[Row]:
    """The rows of one case, one for each contender, in their order; the floor must be among them."""
    clock = clock or (cuda_clock if device.type == "cuda" else cpu_clock)
    data = make_data(case, device)
    with plan.prefer("reference"):
        reference = call(lowbit(case, data), case, data)
    rows, calls = [], {}
    for contender in contenders:
        row = Row(case, contender.name)
        rows.append(row)
        try:
            runnable = contender.prepare(case, data)
            _check(row, contender, runnable, data, reference)
        except UnfitError as unfit:
            row.status, row.note = "skipped", str(unfit)
        except torch.cuda.OutOfMemoryError:
            row.status, row.note = "failed", "out of memory"
        except Exception as error:  # whatever a contender raises is its result
            row.status, row.note = "failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if row.status == "ok":
            calls[contender.name] = _timed(contender, runnable, case, data)
    del reference
    for row in rows:
        if row.status == "ok" and row.contender != FLOOR:
            row.peak_bytes = cuda_peak_bytes(calls[row.contender], device) if device.type == "cuda" else None
    _fill_in(rows, alternate(calls, clock, seconds, _SAMPLE_SECONDS[device.type]))
    return rows


def _check(row: Row, contender: Contender, runnable: Runnable, data: Data, reference: Outcome) -> None:
    """The first call: is it right, and what does it keep for the backward?"""
    if contender.name == FLOOR:
        return
    got, row.saved_bytes = count_saved(lambda: call(runnable, row.case, data))
    if contender.is_yardstick:
        return
    if contender.is_ours:
        row.note = _backend(row.case, data) if not contender.compiled else ""
        difference = find_difference(row.case, got, reference)
    else:
        difference = find_error(row.case, data, got, reference, runnable.factor)
    if difference:
        row.status, row.note = "wrong", difference


def _timed(contender: Contender, runnable: Runnable, case: Case, data: Data) -> Callable[[], Any]:
    """A copy has no backward; all else is called as it was checked."""
    if contender.name == FLOOR:
        return lambda: runnable.forward(data.x)
    return lambda: call(runnable, case, data)


def _backend(case: Case, data: Data) -> str:
    ops = {Op.PER_BATCH: "fake_quantize_per_batch", Op.EMA: "fake_quantize", Op.LEARNED: "learned_fake_quantize"}
    op = ops.get(case.op, case.op.value)
    return plan.Plan.select(op, data.x, per=case.per, ste=case.ste).backend


def count_saved(function: Callable[[], Result]) -> tuple[Result, int]:
    """What the function gives, and the bytes that autograd holds from forward to backward; x counts, if it is held."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(), sum(held.values())


def cuda_peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """What one call needs at its peak beyond what was there before: its results, and all it makes on the way."""
    function()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def alternate(
    calls: dict[str, Callable[[], Any]], clock: Clock, seconds: float, sample: float
) -> dict[str, list[float]]:
    """Seconds for one call, a sample for each contender in each round: all contenders in turn, again and again."""
    repeats = {}
    for name, function in calls.items():
        clock(function, 2)
        once = max(clock(function, 3), 1e-9)
        repeats[name] = max(1, min(1000, round(sample / once)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        spent, rounds = 0.0, 0
        while rounds < _ROUNDS[0] or (spent < seconds and rounds < _ROUNDS[1]):
            for name, function in calls.items():
                samples[name].append(clock(function, repeats[name]))
                spent += samples[name][-1] * repeats[name]
            rounds += 1
    finally:
        if was_enabled:
            gc.enable()
    return samples


def _fill_in(rows: Sequence[Row], samples: dict[str, list[float]]) -> None:
    for row in rows:
        if row.status != "ok":
            continue
        times, copies = samples[row.contender], samples[FLOOR]
        floors = [seconds * row.case.floor_bytes / row.case.copy_bytes for seconds in copies]
        row.seconds, row.rounds = median(times), len(times)
        ratios = [mine / floor for mine, floor in zip(times, floors, strict=True)]
        row.ratio_to_floor = median(ratios)
        quarter, _, three_quarters = quantiles(ratios, n=4)
        row.spread = (three_quarters - quarter) / row.ratio_to_floor
        if OURS in samples:
            row.ratio_to_ours = median(mine / ours for mine, ours in zip(times, samples[OURS], strict=True))


def run(
    cases: Sequence[Case], contenders: Sequence[Contender], device: torch.device, seconds: float
) -> Iterator[list[Row]]:
    """The rows of each case, as soon as they are there."""
    for case in cases:
        yield run_case(case, contenders, device, seconds)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
