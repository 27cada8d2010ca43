"""Products on a GPU: what lowbit runs, and what was tried beside it: python benchmarks/products.py

1. The backward's products by Triton, of values or with codes that become values as they are loaded, with or without a
   rule's bits in the epilogue; beside cuBLAS's product, after a kernel that makes values of the codes.
2. The forward's product of codes with a scale for every group of a weight's row; beside the product of values.

Of what was tried, every result is compared with that of float32 first. The times are those of CUDA events, in
microseconds: the best of rounds in which all take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.grid import Grid
from lowbit.kernels.products import multiplies_groups, scaled_product
from lowbit.kernels.triton import select
from lowbit.kernels.triton_linear import linear_step
from lowbit.kernels.triton_products import TOGETHER, allocate, corner, selected_product

SHAPES = ((16384, 4096, 14336), (16384, 4096, 4096), (8192, 2048, 8192), (16384, 1024, 4096))
GROUPS = (32, 64, 128, 256, 512, 1024)


class Tiles(NamedTuple):
    """What is worth tuning: rows, columns and inner of a tile, warps, stages, programs of a multiprocessor, and whether
    the product is turned
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    programs: int = 1
    turned: bool = False


BACKWARD = (
    Tiles(128, 256, 64, 8, 3),
    Tiles(256, 128, 64, 8, 3),
    Tiles(128, 128, 64, 4, 3, 2),
    Tiles(256, 128, 64, 8, 3, turned=True),
)
FORWARD = (
    Tiles(128, 128, 128, 8, 4),
    Tiles(128, 128, 128, 8, 3, 2),
    Tiles(128, 256, 128, 8, 3),
    Tiles(128, 256, 128, 16, 3),
    Tiles(64, 256, 128, 8, 4),
    Tiles(64, 128, 128, 4, 4, 2),
    Tiles(64, 128, 128, 4, 3, 3),
)


@triton.jit
def _backward(
    out_ptr, a_ptr, b_ptr, scale_ptr, bits_ptr, rows, columns, inner,
    by_column: tl.constexpr, turned: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
    block_inner: tl.constexpr, together: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    """out[r, c] = sum_i a[r, i] * (b[i, c] * s[i]), where its bit is set; a is laid out column by column or not"""
    if by_column:
        a = tl.make_tensor_descriptor(a_ptr, [inner, rows], [rows, 1], [block_inner, block_rows])
    else:
        a = tl.make_tensor_descriptor(a_ptr, [rows, inner], [inner, 1], [block_rows, block_inner])
    b = tl.make_tensor_descriptor(b_ptr, [inner, columns], [columns, 1], [block_inner, block_columns])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [block_rows, block_columns])
    tiles = tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        row, column = corner(tile, rows, columns, block_rows, block_columns, together)
        if turned:
            total = tl.zeros((block_columns, block_rows), tl.float32)
        else:
            total = tl.zeros((block_rows, block_columns), tl.float32)
        for step in range(tl.cdiv(inner, block_inner)):
            at = step * block_inner
            left = a.load([at, row]).T if by_column else a.load([row, at])
            right = b.load([at, column])
            if scale_ptr is not None:
                scale = tl.load(scale_ptr + at + tl.arange(0, block_inner)[:, None])
                right = (right.to(tl.float32) * scale).to(tl.bfloat16)
            else:
                right = right.to(tl.bfloat16)
            total = tl.dot(right.T, left.T, total) if turned else tl.dot(left, right, total)
        value = (total.T if turned else total).to(tl.bfloat16)
        if bits_ptr is not None:
            octet = tl.arange(0, block_columns // 8)[None, :]
            down = row + tl.arange(0, block_rows)[:, None]
            bits = tl.load(bits_ptr + down.to(tl.int64) * (columns // 8) + column // 8 + octet)
            passed = bits[:, :, None] >> tl.arange(0, 8)[None, None, :] & 1
            value = tl.where(passed.reshape(block_rows, block_columns) != 0, value, 0.0)
        out.store([row, column], value)


@triton.jit
def _forward(
    y_ptr, x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, rows, columns, inner, group: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, most: tl.constexpr, together: tl.constexpr,
    programs: tl.constexpr,
):  # fmt: skip
    """y[r, c] = s_x[r] * sum_g s_w[g, c] * float(sum_k x[r, k] * w[c, k]), k in group g"""
    part: tl.constexpr = min(group, most)
    x = tl.make_tensor_descriptor(x_ptr, [rows, inner], [inner, 1], [block_rows, part])
    w = tl.make_tensor_descriptor(w_ptr, [columns, inner], [inner, 1], [block_columns, part])
    y = tl.make_tensor_descriptor(y_ptr, [rows, columns], [columns, 1], [block_rows, block_columns])
    tiles = tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        row, column = corner(tile, rows, columns, block_rows, block_columns, together)
        across = column + tl.arange(0, block_columns)[None, :]
        total = tl.zeros((block_rows, block_columns), tl.float32)
        sums = tl.zeros((block_rows, block_columns), tl.int32)
        for step in range(inner // part):
            left, right = x.load([row, step * part]), w.load([column, step * part])
            sums = tl.dot(left, right.T, sums, out_dtype=tl.int32)
            if (step + 1) * part % group == 0:
                total += sums.to(tl.float32) * tl.load(w_scale_ptr + step * part // group * columns + across)
                sums = tl.zeros((block_rows, block_columns), tl.int32)
        total *= tl.load(x_scale_ptr + row + tl.arange(0, block_rows)[:, None])
        y.store([row, column], total.to(tl.bfloat16))


class Case(NamedTuple):
    """A launch that was tried, of a shape M x K x N"""

    what: str  # "dx" or "dw"; "y" for the forward
    tiles: Tiles
    kind: str  # of a backward's operand: "values", "codes" without scales, "scaled codes"; "bits": values, and bits
    group: int = 0

    def __call__(self, data: Data) -> Tensor:
        if self.what == "y":
            return self._forward(data)
        of_x = self.what == "dx"
        values, q, scale = (data.w, data.q_w, data.w_scale) if of_x else (data.x, data.q_x, data.x_scale)
        b = values if self.kind in ("values", "bits") else q
        rows, inner = data.g.shape if of_x else data.g.shape[::-1]
        out = torch.empty(rows, b.shape[1], dtype=torch.bfloat16, device="cuda")
        t = self.tiles
        programs = _programs(t)
        _backward[(programs,)](
            *(out, data.g, b, scale if self.kind == "scaled codes" else None),
            *(data.bits if self.kind == "bits" else None, *out.shape, inner),
            *(not of_x, t.turned, t.rows, t.columns, t.inner, TOGETHER, programs),
            num_warps=t.warps,
            num_stages=t.stages,
        )
        return out

    def _forward(self, data: Data) -> Tensor:
        y, t = torch.empty(len(data.x), len(data.w), dtype=torch.bfloat16, device="cuda"), self.tiles
        programs, scales = _programs(t), data.group_scales[self.group]
        _forward[(programs,)](
            *(y, data.q_x, data.q_w, data.x_scale, scales, *y.shape, data.x.shape[1], self.group),
            *(t.rows, t.columns, t.inner, TOGETHER, programs),
            num_warps=t.warps,
            num_stages=t.stages,
        )
        return y

    def expected(self, data: Data) -> Tensor:
        if self.what == "y":
            scales = data.group_scales[self.group].t().repeat_interleave(self.group, 1)
            return data.q_x.float() * data.x_scale[:, None] @ (data.q_w.float() * scales).t()
        codes = self.kind == "codes"
        b = (data.q_w if codes else data.w) if self.what == "dx" else data.q_x if codes else data.x
        out = (data.g if self.what == "dx" else data.g.t()).float() @ b.float()
        passed = (data.bits[:, :, None] >> torch.arange(8, device="cuda", dtype=torch.uint8) & 1).flatten(1)
        return out * passed if self.kind == "bits" else out


class Data:
    """Operands of a shape: x and w as codes, and as the values of these"""

    def __init__(self, rows: int, inner: int, outputs: int) -> None:
        chance = torch.Generator("cuda").manual_seed(0)
        self.g, x, w = (
            torch.randn(size, device="cuda", generator=chance).bfloat16()
            for size in ((rows, outputs), (rows, inner), (outputs, inner))
        )
        self.step = linear_step(rows, outputs, inner, None, Grid(8), Grid(8), None, torch.bfloat16, x.device)
        _, self.codes = self.step.forward(x, w, None)
        self.q_x, self.x_scale, self.q_w, self.w_scale, _, _ = self.codes
        self.zero = torch.tensor(3, dtype=torch.int32, device="cuda")
        self.x, self.w = self.decode(x=True), self.decode(x=False)
        self.bits = torch.randint(256, (rows, inner // 8), dtype=torch.uint8, device="cuda", generator=chance)
        self.group_scales = {
            size: torch.rand(inner // size, outputs, device="cuda", generator=chance) * 0.01 for size in GROUPS
        }

    def decode(self, *, x: bool) -> Tensor:
        """The values of x, or of w"""
        values = self.step.decode(self.g, self.codes, x, not x, None)[0 if x else 1]
        assert values is not None
        return values


def _programs(tiles: Tiles) -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count * tiles.programs)


def _cases() -> list[Case]:
    backward = product(("dx", "dw"), BACKWARD, ("values", "codes", "scaled codes"))
    cases = [Case(*case) for case in backward if case[1].turned <= (case[2] != "values")]
    cases += [Case("dx", tiles, "bits") for tiles in BACKWARD if not tiles.turned]
    return cases + [Case("y", tiles, "codes", group) for tiles, group in product(FORWARD, GROUPS)]


def _try(case: Case) -> str:
    """Why a launch is left out; "" for one that runs and is right"""
    triton.set_allocator(allocate)
    data = Data(512, 1024, 1024)
    try:
        found = case(data).float()
    except Exception as error:  # whatever the compiler says
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    off = (found - (expected := case.expected(data))).abs().max() / expected.abs().max()
    return "" if off < 0.01 else f"off by {off:.3f} of the greatest"


def _clock(call: Callable[[], object], seconds: float) -> float:
    """Microseconds"""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = max(3, int(seconds * 1000 / start.elapsed_time(end)))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / calls


def _used(data: Data) -> dict[str, dict[str, Callable[[], object]]]:
    """What lowbit runs, and cuBLAS's product beside it"""
    g, bits = data.g, data.bits.flatten()
    return {
        "dx": {
            "values of w, then cuBLAS": lambda: g @ data.decode(x=False),
            "cuBLAS alone": lambda: g @ data.w,
            "cuBLAS, then bits": lambda: select(g @ data.w, bits),
            "Triton, bits in the epilogue": lambda: selected_product(g, data.w, bits),
        },
        "dw": {
            "values of x, then cuBLAS": lambda: g.t() @ data.decode(x=True),
            "cuBLAS alone": lambda: g.t() @ data.x,
        },
        "y": {
            "cuBLAS, of values": lambda: data.x @ data.w.t(),
            "codes, one scale a row": lambda: scaled_product(
                data.q_x, data.q_w, data.x_scale, data.w_scale, dtype=torch.bfloat16
            ),
            **{
                f"codes, groups of {size}{', zero points' if zero is not None else ''}": partial(
                    _grouped, data, size, zero
                )
                for size, zero in product(GROUPS, (None, data.zero))
                if multiplies_groups("cuda", data.x.shape[1], size, zero is not None)
            },
        },
    }


def _grouped(data: Data, size: int, zero: Tensor | None) -> Tensor:
    scales = data.x_scale, data.group_scales[size].t().contiguous()
    return scaled_product(data.q_x, data.q_w, *scales, zero, dtype=torch.bfloat16)


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.03, help="that a launch is timed for in a round")
    seconds = parser.parse_args().seconds
    triton.set_allocator(allocate)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    cases = _cases()
    with get_context("spawn").Pool(12) as pool:  # compiling takes most of the time
        reasons = pool.map(_try, cases, chunksize=1)
    for case, reason in zip(cases, reasons, strict=True):
        if reason:
            print(f"left out: {case.what} {case.kind} {case.group or ''} {tuple(case.tiles)}: {reason}")
    right = [case for case, reason in zip(cases, reasons, strict=True) if not reason]
    for shape in SHAPES:
        data = Data(*shape)
        print(f"{' x '.join(map(str, shape))}: us")
        for what, used in _used(data).items():
            calls: dict[tuple[str, str], Callable[[], object]] = {("used", name): call for name, call in used.items()}
            for case in right:
                if case.what == what:
                    name = f"groups of {case.group}" if case.group else case.kind
                    calls[name, str(tuple(case.tiles))] = partial(case, data)
            times: dict[tuple[str, str], float] = {}
            for _ in range(3):
                for key, call in calls.items():
                    times[key] = min(times.get(key, float("inf")), _clock(call, seconds))
            for kind in dict.fromkeys(kind for kind, _ in times):
                own = sorted((took, name) for (found, name), took in times.items() if found == kind)
                for took, name in own if kind == "used" else own[:2]:
                    print(f"  {what} {kind:14} {took:8.0f}  {name}")


if __name__ == "__main__":
    main()
