"""The products of a linear layer's step on the CPU, by torch, by oneDNN and of codes; the least that a step can take.

    python benchmarks/float_products.py [--rounds 30]

y = x @ w^T, dx = g @ w, dw = g^T @ x in float32, in turn, in one process; the median of each. "bound" is the product of
codes and two products of floats by oneDNN over three by torch. "pieces": dx by three products of 8 bits, g being split
into three, without the splitting and the adding up.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter

import torch

from lowbit.kernels import float_products

SHAPES = ((2048, 1024, 1024), (1024, 384, 384), (1024, 384, 1536), (1024, 1536, 384))


@torch.no_grad()
def measure(rows: int, inputs: int, outputs: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each product."""
    x, w, g = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    q_x, q_w = ((10 * values).to(torch.int8) for values in (x, w))
    pieces = (10 * g).to(torch.int8).repeat(3, 1)
    ways = {
        "torch y": lambda: x @ w.t(),
        "dx": lambda: g @ w,
        "dw": lambda: g.t() @ x,
        "oneDNN y": lambda: float_products.linear(x, w, None),
        "dx ": lambda: float_products.product(g, w),
        "dw ": lambda: float_products.product(g.t(), x),
        "codes": lambda: torch._int_mm(q_x, q_w.t()),
        "pieces": lambda: torch._int_mm(pieces, q_w),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = perf_counter()
            way()
            times[name].append(1e3 * (perf_counter() - start))
    return {name: median(found[1:]) for name, found in times.items()}


def main() -> None:
    """A table: a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not float_products.has_faster():
        raise SystemExit("torch's own library for products of floats is the one that lowbit takes here too")
    for shape in SHAPES:
        found = measure(*shape, options.rounds)
        by_torch = found["torch y"] + found["dx"] + found["dw"]
        least = found["codes"] + found["dx "] + found["dw "]
        if shape == SHAPES[0]:
            print(f"{'ms':20}" + "".join(f"{name.strip():>10}" for name in found) + f"{'bound':>10}")
        cells = "".join(f"{value:10.2f}" for value in found.values())
        print(f"{' x '.join(map(str, shape)):20}{cells}{least / by_torch:10.2f}")


if __name__ == "__main__":
    main()
