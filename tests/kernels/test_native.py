"""What is the native backend's own: its instruction sets, its threads, and its absence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import inputs
from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerGroup, PerTensor, PerToken, Plan, SteKind
from lowbit.functional import fake_quantize
from lowbit.kernels import native
from lowbit.kernels import plan as plan_module

PERS = (PerTensor(), PerChannel(0), PerChannel(1), PerToken(), PerGroup(25), PerGroup(500))
GRID = Grid(4)


@pytest.fixture
def library() -> Iterator[native.Library]:
    found = native.library()
    assert isinstance(found, native.Library), found
    yield found
    found.set_level(found.levels[-1])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything(x: Tensor, per: object) -> dict[str, Tensor]:
    """What every native kernel makes of x: large enough to be shared out among threads."""
    scale, zero_point = inputs.params(x, per, GRID, affine=True)
    g = inputs.random(tuple(x.shape), seed=7).to(x.dtype)
    results: dict[str, Tensor] = {}

    def run(op: str, *args: object, ste: SteKind = SteKind.IDENTITY, **options: object) -> None:
        found = Plan.select(op, x, grid=GRID, per=per, ste=ste, prefer="native").run(*args, **options)
        found = found if isinstance(found, tuple) else (found,)
        results.update({f"{op} {ste} {options} {i}": value for i, value in enumerate(found) if value is not None})

    run("fake_quantize", x, scale, zero_point)
    run("quantize", x, scale, zero_point, dtype=torch.int8)
    run("quantize_backward", g, x, scale, zero_point)
    run("abs_max", x)
    run("min_max", x)
    for symmetric in (True, False):
        run("fake_quantize_per_batch", x, symmetric=symmetric)
    for ste in SteKind:
        run("fake_quantize_backward", g, x, scale, zero_point, ste=ste)
    for method in ("lsq", "pact"):
        run("learned_fake_quantize_backward", g, x, scale, zero_point, ste=SteKind.HARD_TANH, method=method)
    return results


@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
@pytest.mark.parametrize("per", PERS, ids=str)
def test_every_level_gives_the_same_bits(dtype: torch.dtype, per: object, library: native.Library) -> None:
    """Sums and tanh too: the loops name the lanes themselves."""
    x = torch.cat([inputs.random((40, 500)), inputs.hard_values().repeat(11)[:500][None]]).to(dtype)
    library.set_level("baseline")
    baseline = everything(x, per)
    assert len(library.levels) > 1 or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    for level in library.levels[1:]:
        library.set_level(level)
        for name, value in everything(x, per).items():
            assert_same_bits(value, baseline[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per", PERS, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, per: object, threads: None) -> None:
    x = inputs.random((300, 500), seed=4).to(dtype)
    torch.set_num_threads(1)
    alone = everything(x, per)
    for count in (2, 3, 16):
        torch.set_num_threads(count)
        for name, value in everything(x, per).items():
            assert_same_bits(value, alone[name])


@pytest.mark.parametrize("reason", ["they were not built", "they do not load"])
def test_absence_is_one_warning_with_the_remedy(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (plan_module._select, plan_module._settle, plan_module.absence, plan_module._warn_once):
        cached.cache_clear()
    monkeypatch.setattr(native, "library", lambda: reason)
    x, scale = torch.randn(4), torch.tensor(0.5)
    with pytest.warns(RuntimeWarning, match=f"reference kernels.*{reason}.*C compiler.*pip install"):
        y = fake_quantize(x, scale)
    fake_quantize(x.double(), scale)  # without a second one, which would be an error here
    with pytest.raises(ValueError, match=f"backend 'native' cannot run quantize: .*{reason}"):
        Plan.select("quantize", x, prefer="native")
    monkeypatch.undo()
    for cached in (plan_module._select, plan_module._settle, plan_module.absence, plan_module._warn_once):
        cached.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(fake_quantize(x, scale), y)
    assert Plan.select("quantize", x).backend == "native"


def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, library: native.Library) -> None:
    monkeypatch.setattr(native.ctypes, "sizeof", lambda _: 1)
    with pytest.raises(OSError, match="was built from other sources"):
        native.Library(library.path)


def test_a_library_that_does_not_load_is_an_absence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_bytes(b"half a library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.setattr(native, "EXTENSION_SUFFIXES", [".so"])
    assert "do not load" in str(native.library.__wrapped__())


def test_two_threads_may_run_one_plan() -> None:
    """What a call sets is its own, not the plan's."""
    from concurrent.futures import ThreadPoolExecutor

    x = inputs.random((64, 512)).float()
    scales = [torch.tensor(0.1 * (k + 1)) for k in range(16)]
    plan = Plan.select("fake_quantize", x)
    wanted = [plan.run(x, scale) for scale in scales]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            for got, expected in zip(pool.map(lambda scale: plan.run(x, scale), scales), wanted, strict=True):
                assert_same_bits(got, expected)
