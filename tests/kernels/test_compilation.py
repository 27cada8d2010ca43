"""Every Triton kernel compiles for the GPUs that it is for: what its interpreter does not ask, and needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import Grid, PerChannel, PerGroup, PerTensor, PerToken, SteKind
from lowbit.kernels import plan
from lowbit.kernels.signature import Signature

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
OLDEST, NEWEST = 80, 90  # compute capabilities
SHARED = {80: 166912, 90: 232448}  # bytes that a program may have


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches compile, and run nothing; the names of the kernels."""
    from lowbit.kernels import triton_launch

    names: list[str] = []

    def compile_only(self: Any, *tensors: Tensor | None) -> None:
        arguments = [*tensors, *self.arguments]
        types, constants, aligned = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.function.params, arguments, strict=True)):
            if value is None or (type(value) is int and value == 1) or parameter.is_constexpr:
                types[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, Tensor):
                types[parameter.name], aligned[index,] = POINTERS[value.dtype], [["tt.divisibility", 16]]
            else:
                types[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        source = triton.compiler.ASTSource(self.function, types, constants, aligned)
        capability = NEWEST if self.function.__name__ == "_product" else OLDEST
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        kernel = triton.compile(source, target=target, options=self.options)
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED[capability]
        names.append(self.function.__name__)

    monkeypatch.setattr(triton_launch.Launch, "__call__", compile_only)
    return names


def run(op: str, x: Tensor, *args: Any, per: Any = PerTensor(), grid: Grid = Grid(8), **options: Any) -> None:
    from lowbit.kernels import triton as backend

    ste = options.pop("ste", SteKind.IN_RANGE)
    signature = Signature(op, tuple(x.shape), x.stride(), x.dtype, x.device, grid, per, ste)
    assert plan.OPS[op].tensors
    backend.kernel(signature)(*args, **options)


HEADS = torch.randn(2, 8, 3, 4, 64).permute(2, 0, 3, 1, 4)[1]
ROWS = torch.randn(64, 256)
SCALE, ZERO = torch.tensor(0.1), torch.tensor(3, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("op", ["fake_quantize_per_batch", "quantize_per_batch"])
def test_rows(op: str, symmetric: bool, dtype: torch.dtype, compiled: list[str]) -> None:
    for x, per in ((ROWS, PerToken()), (ROWS, PerChannel(0)), (HEADS, PerToken())):
        run(op, x.to(dtype), x.to(dtype), per=per, grid=Grid(4), symmetric=symmetric)
    run(op, ROWS.to(dtype), ROWS.to(dtype), grid=Grid(4), symmetric=symmetric)
    assert compiled[:3] == ["_quantize_rows"] * 3
    assert set(compiled[3:]) <= {"_quantize_rows", "_reduce", "_finish", "_map"}


@pytest.mark.parametrize("ste", SteKind)
def test_gradients(ste: SteKind, compiled: list[str]) -> None:
    run("fake_quantize_backward", ROWS, ROWS, ROWS, SCALE, ZERO, ste=ste)
    run("learned_fake_quantize_backward", ROWS, ROWS, ROWS, SCALE, ZERO, ste=ste)
    assert compiled


def test_other_ops(compiled: list[str]) -> None:
    codes = torch.zeros(64, 256, dtype=torch.int8)
    run("quantize", ROWS, ROWS, SCALE, ZERO, dtype=torch.int8)
    run("dequantize", codes, codes, SCALE, ZERO, dtype=torch.bfloat16)
    run("gradient_bits", ROWS, ROWS, SCALE, ZERO)
    run("min_max", ROWS, ROWS, per=PerGroup(32))
    state = torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.bool)
    run("ema_scale", state[0], *state, 0.9)
    from lowbit.kernels import triton as backend

    backend.select(ROWS, torch.zeros(64 * 256 // 8, dtype=torch.uint8))
    assert {"_map", "_gradient_bits", "_reduce", "_ema", "_select"} <= set(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [64, 8 * 700])
def test_codes_by_a_scale_that_is_given(columns: int, dtype: torch.dtype, compiled: list[str]) -> None:
    from lowbit.kernels import triton as backend

    x = torch.randn(16, columns).to(dtype)
    for rule in (None, SteKind.CLIPPED_IDENTITY, SteKind.IN_RANGE):
        backend.code_rows(x, SCALE, ZERO, Grid(8), rule)
    backend.code_rows(x, torch.ones(16), None, Grid(8), SteKind.IN_RANGE)
    assert compiled == ["_code_row"] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [3072, 33])
def test_many_weights(columns: int, dtype: torch.dtype, compiled: list[str]) -> None:
    from lowbit.kernels import triton as backend

    found = backend.code_weights([torch.randn(4, 768).to(dtype), torch.randn(3, columns).to(dtype)], Grid(8))
    assert [(q.shape, scale.shape) for q, scale in found] == [((4, 768), (4,)), ((3, columns), (3,))]
    assert compiled == ["_code_weights"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [256, 250])
def test_products(columns: int, dtype: torch.dtype, compiled: list[str]) -> None:
    from lowbit.kernels import triton_products

    q_x, q_w = torch.zeros(512, 256, dtype=torch.int8), torch.zeros(columns, 256, dtype=torch.int8)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales, bias = (torch.ones(512, dtype=wide), torch.ones(columns, dtype=wide)), torch.ones(columns, dtype=dtype)
    sums = torch.zeros(columns, dtype=torch.int32)
    triton_products.scaled_product(q_x, q_w, *scales, None, None, bias, dtype)
    triton_products.scaled_product(q_x, q_w, scales[0][0], scales[1], ZERO, sums, None, dtype)
    assert compiled == ["_product", "_product"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outputs"), [(512, 256, 256), (500, 272, 250), (1, 16, 1)])
def test_a_linear_step(rows: int, inner: int, outputs: int, dtype: torch.dtype, compiled: list[str]) -> None:
    from lowbit.kernels import triton_linear

    device, wide = torch.device("cpu"), torch.float32
    x, w, bias = (torch.ones(shape, dtype=dtype) for shape in ((rows, inner), (outputs, inner), (outputs,)))
    decoding = ["_decode_operands", "_add_sums", "_decode_operands", "_decode_operands", "_add_sums"]
    kept = torch.ones((), dtype=wide), torch.ones((), dtype=torch.int32)
    kinds = {
        "_code_operands": (None, Grid(8), None, None),
        "_code_by_kept": (None, Grid(8, signed=False), SteKind.CLIPPED_IDENTITY, kept),
        "values": (8, Grid(8), None, None),
    }
    for kind, (group, grid, ste, params) in kinds.items():
        scales = torch.ones(outputs) if group is None else torch.ones(outputs, inner // group)
        for held in (None, (torch.ones(outputs, inner, dtype=torch.int8), scales)):
            w_grid = None if held else Grid(8)
            step = triton_linear.LinearStep(rows, outputs, inner, group, grid, w_grid, ste, dtype, device)
            y, codes = step.forward(x, w, bias, held, params)
            for of_x, of_w, given in ((True, True, dtype), (True, False, None), (False, False, dtype)):
                found = step.decode(y, codes, of_x, of_w, given)
                assert [part is not None for part in found] == [of_x, of_w, given is not None]
            if kind == "values":
                wanted = ["_code_operands", *(["_decode_operands"] if held else [])]
            else:
                wanted = [kind, "_product"] if held is None or ste is None else ["_sum_rows", kind, "_product"]
            assert compiled == [*wanted, *decoding]
            compiled.clear()


def test_a_linear_step_of_long_groups(compiled: list[str]) -> None:
    from lowbit.kernels import triton_linear

    x, w, device = torch.ones(512, 1024), torch.ones(130, 1024), torch.device("cpu")
    step = triton_linear.LinearStep(512, 130, 1024, 256, Grid(8), Grid(4), None, torch.float32, device)
    _, codes = step.forward(x, w, torch.ones(130))
    assert codes.w_scale.shape == (130, 4)
    assert compiled == ["_code_operands", "_grouped_product"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(512, 256, 256), (500, 248, 24)])
def test_a_product_where_bits_are_set(
    rows: int, inner: int, columns: int, dtype: torch.dtype, compiled: list[str]
) -> None:
    from lowbit.kernels import triton_products

    bits = torch.zeros(rows * columns // 8, dtype=torch.uint8)
    triton_products.selected_product(
        torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype), bits
    )
    assert compiled == ["_selected_product"]
