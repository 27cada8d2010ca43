"""What the host spends on a linear layer's step, and which kernels the device runs: python benchmarks/linear_step.py

The host's times are those of small tensors, for which it never waits: minimum and median of rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import lowbit
from lowbit.bench.linear import Step
from lowbit.nn import linear

PRESETS = ("w8a8_dynamic", "w8a8", "w4a8")
SHAPES = {"cuda": ((16384, 4096, 14336), (16384, 4096, 4096), (8192, 2048, 8192)), "cpu": ((64, 64, 64),)}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=list(SHAPES))
    device = torch.device(parser.parse_args().device)
    linear._LEAST[device.type] = 0  # layers of any size multiply codes
    x, w = (torch.randn(256, 256, device=device).bfloat16() for _ in "xw")
    print("host, us: minimum, median")
    _print_host("a product", lambda: x @ w, device)
    for name, step in _steps((256, 256, 256), device).items():
        _print_host(f"a step of {name}", step, device)
    for shape in SHAPES[device.type]:
        for name, step in _steps(shape, device).items():
            print(f"{name}, {' x '.join(map(str, shape))}: kernels, us")
            _print_kernels(step, device)


def _steps(shape: tuple[int, int, int], device: torch.device) -> dict[str, Step]:
    rows, inputs, outputs = shape
    layer = nn.Linear(inputs, outputs).to(device, torch.bfloat16)
    x, g = (torch.randn(rows, width, device=device).bfloat16() for width in (inputs, outputs))
    layers = {"float": layer} | {name: lowbit.prepare(layer, lowbit.recipes.presets()[name]()) for name in PRESETS}
    return {name: Step(found.train(), x, g) for name, found in layers.items()}


def _print_host(name: str, call: Callable[[], object], device: torch.device, rounds: int = 8, calls: int = 40) -> None:
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        _wait(device)
    print(f"  {name}: {min(times[1:]):.0f}, {median(times[1:]):.0f}")


def _print_kernels(step: Step, device: torch.device, calls: int = 8) -> None:
    for _ in range(3):
        step()
    _wait(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            step()
        _wait(device)
    own = [
        (event, "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total")
        for event in profile.key_averages()
        if device.type == "cpu" or event.device_type.name == "CUDA"
    ]
    found = sorted(((getattr(event, what) / calls, event.key) for event, what in own), reverse=True)
    print(f"  {sum(took for took, _ in found):8.0f} in all")
    for took, name in found[:8]:
        print(f"  {took:8.1f} {name[:90]}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
