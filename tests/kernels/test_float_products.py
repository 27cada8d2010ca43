"""Products of floats by oneDNN: those of float64 within rounding, wherever they are taken; and where they are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit.kernels import float_products, native, plan
from lowbit.kernels.float_products import linear, product, transpose

MEMORY: dict[str, Callable[[int, int], Tensor]] = {
    "rows": torch.randn,
    "columns": lambda rows, columns: torch.randn(columns, rows).t(),
    "one number": lambda rows, columns: torch.randn(1, 1).expand(rows, columns),
    "one row": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
    "one column": lambda rows, columns: torch.randn(rows, 1).expand(rows, columns),
    "apart": lambda rows, columns: torch.randn(2 * rows, 3 * columns)[::2, ::3],
    "a part": lambda rows, columns: torch.randn(rows, columns + 5)[:, 2:-3],
    "overlapping rows": lambda rows, columns: torch.randn(3 * rows + columns).as_strided((rows, columns), (3, 1)),
    "overlapping columns": lambda rows, columns: torch.randn(rows + 2 * columns).as_strided((rows, columns), (1, 2)),
    "an odd address": lambda rows, columns: torch.randn(rows * columns + 3)[3:].view(rows, columns),
}
SIZES = [(1, 1, 1), (1, 5, 3), (7, 1, 3), (7, 5, 1), (64, 96, 33), (17, 129, 65)]


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN multiplies, whatever the processor; the shapes of what came out."""
    seen: list[tuple[int, ...]] = []
    inner = float_products._onednn

    def watched(*args: Tensor) -> Tensor:
        y = inner(*args)
        seen.append(tuple(y.shape))
        return y

    monkeypatch.setattr(float_products, "_has_faster", lambda: True)
    monkeypatch.setattr(float_products, "_onednn", watched)
    return seen


def assert_near(found: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of a sum of that many products."""
    wanted, most = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        wanted, most = wanted + bias.double(), most + bias.double().abs()
    assert found.shape == wanted.shape
    assert bool(((found.double() - wanted).abs() <= (a.shape[1] + 1) * torch.finfo(found.dtype).eps * most).all())


@pytest.mark.parametrize("other", MEMORY)
@pytest.mark.parametrize("memory", MEMORY)
def test_products_of_any_memory(memory: str, other: str, by_onednn: list[tuple[int, ...]]) -> None:
    for rows, inner, columns in SIZES:
        a, b, bias = MEMORY[memory](rows, inner), MEMORY[other](inner, columns), torch.randn(columns)
        with torch.no_grad():
            assert_near(product(a, b), a, b)
            assert_near(linear(a, b.t(), bias), a, b, bias)
    assert len(by_onednn) == 2 * len(SIZES)


@pytest.mark.parametrize("bias", [torch.randn(8)[::2], torch.randn(1).expand(4)], ids=["strided", "expanded"])
def test_a_bias_of_any_memory(bias: Tensor, by_onednn: list[tuple[int, ...]]) -> None:
    x, w = torch.randn(6, 5), torch.randn(4, 5)
    with torch.no_grad():
        assert_near(linear(x, w, bias), x, w.t(), bias)
    assert by_onednn


@pytest.mark.parametrize("shape", [(), (1,), (1, 4), (6, 4)], ids=str)
def test_a_bias_that_is_no_row_is_torchs(shape: tuple[int, ...], by_onednn: list[tuple[int, ...]]) -> None:
    x, w, bias = torch.randn(6, 5), torch.randn(4, 5), torch.randn(shape)
    with torch.no_grad():
        assert torch.equal(linear(x, w, bias), torch.nn.functional.linear(x, w, bias))
        with pytest.raises(RuntimeError, match=r"must match|is invalid for input|The expanded size"):
            linear(x, w, torch.randn(3))
    assert not by_onednn


def test_nan_and_infinity_stay_in_their_rows(by_onednn: list[tuple[int, ...]]) -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    a[1, 2], a[2, 5] = torch.nan, torch.inf
    with torch.no_grad():
        y = product(a, b)
    assert y[1].isnan().all()
    assert y[2].isinf().all()
    assert y[[0, 3]].isfinite().all()
    assert by_onednn


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(dtype: torch.dtype, by_onednn: list[tuple[int, ...]]) -> None:
    a, b = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype)
    with torch.no_grad():
        assert torch.equal(product(a, b), a @ b)
        assert torch.equal(linear(a, b.t(), None), torch.nn.functional.linear(a, b.t()))
    assert not by_onednn


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_empty_products(sizes: tuple[int, int, int], by_onednn: list[tuple[int, ...]]) -> None:
    rows, inner, columns = sizes
    with torch.no_grad():
        assert torch.equal(product(torch.ones(rows, inner), torch.ones(inner, columns)), torch.zeros(rows, columns))
    assert not by_onednn


def test_where_someone_watches_the_product_is_torchs(
    by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(6, 5, requires_grad=True), torch.randint(-9, 9, (5, 4)).float()
    assert torch.equal(torch.autograd.grad(product(a, b).sum(), a)[0], b.sum(1).expand(6, 5))
    with torch.no_grad():
        batched = torch.func.vmap(product, in_dims=(0, None))(a.detach().expand(3, 6, 5), b)
        assert torch.equal(batched[1], a @ b)
        with plan.prefer("reference"):
            assert torch.equal(product(a, b), a @ b)
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "enabled", False)
            assert torch.equal(product(a, b), a @ b)
        assert not by_onednn
        product(a, b)
        assert by_onednn


def test_autocast_changes_nothing(by_onednn: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(6, 5), torch.randn(4, 5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w, None).dtype == torch.float32
        monkeypatch.setattr(float_products, "_has_faster", lambda: False)
        assert linear(x, w, None).dtype == torch.float32
    assert len(by_onednn) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_it_is_an_op(backend: str, by_onednn: list[tuple[int, ...]]) -> None:
    a, b, bias = torch.randn(6, 5), torch.randn(5, 4), torch.randn(4)

    def both(a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return product(a, b), linear(a, b.t(), bias)

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(both, backend=backend, fullgraph=True)(a, b, bias)
        wanted = both(a, b, bias)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
    with torch.no_grad():
        batched = torch.compile(torch.func.vmap(product, in_dims=(0, None)), backend=backend)(a.expand(3, 6, 5), b)
    assert torch.equal(batched[1], a @ b)
    torch.library.opcheck(torch.ops.lowbit.float_linear, (a, b.t(), bias))
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_transposes(backend: str, memory: str) -> None:
    for rows, _, columns in SIZES:
        values = MEMORY[memory](rows, columns)
        for x in (values, (100 * values).to(torch.int8)):
            with plan.prefer(backend):
                y = transpose(x)
            assert y.is_contiguous()
            assert torch.equal(y, x.t())


def test_which_processors_take_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with AVX-512 that Intel did not make, where torch has both libraries and the op."""

    def is_faster() -> bool:
        return float_products._has_faster.__wrapped__()

    library = native.loaded()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(library, "is_intel", False)
    assert is_faster() == torch.backends.mkl.is_available()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    torch.set_default_dtype(torch.float64)
    try:
        assert is_faster()
    finally:
        torch.set_default_dtype(torch.float32)
    for owner, name, value in (
        (library, "is_intel", True),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"),
        (torch.backends.mkl, "is_available", lambda: False),
        (torch.backends.mkldnn, "is_available", lambda: False),
        (plan, "absence", lambda name: "not built"),
        (float_products, "_onednn", lambda x, w, bias: torch.zeros(len(x), len(w))),
        (float_products, "_onednn", lambda x: x),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not is_faster()
    assert is_faster()
