"""What is the Triton backend's own; runs on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import inputs
from backends import FAST, assert_all_same_bits, device_of
from lowbit import Grid, PerChannel, PerGroup, PerTensor, PerToken, Plan, SteKind
from lowbit.kernels import plan
from lowbit.kernels.ops import OPS

pytestmark = pytest.mark.skipif("triton" not in FAST, reason="Triton needs a GPU, or TRITON_INTERPRET=1")
DEVICE = device_of("triton")


@pytest.fixture
def two_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reductions in so few programs that each takes several tiles."""
    from lowbit.kernels import tiling

    monkeypatch.setattr(tiling, "PROGRAMS", 2)
    plan._select.cache_clear()
    yield
    plan._select.cache_clear()


def test_a_program_that_takes_many_tiles(two_programs: None) -> None:
    for shape in ((70, 130), (16, 3, 40, 2)):
        x = inputs.random(shape).float().to(DEVICE)
        for per in (PerTensor(), PerChannel(1)):
            scale, zero_point = inputs.params(x, per, Grid(4), affine=True)
            assert_all_same_bits("fake_quantize", "triton", x, x, scale, zero_point, per=per)
            assert_all_same_bits("min_max", "triton", x, x, per=per)
            assert_all_same_bits("fake_quantize_per_batch", "triton", x, x, per=per, symmetric=False)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_too_long_for_one_read(symmetric: bool) -> None:
    x = inputs.random((2, 20000)).float().to(DEVICE)
    assert_all_same_bits("fake_quantize_per_batch", "triton", x, x, per=PerToken(), symmetric=symmetric)


def test_rows_of_a_width_that_no_tile_fits() -> None:
    for shape, per in (((24, 96), PerGroup(3)), ((2, 6, 192), PerGroup(32)), ((5, 7, 9, 11), PerChannel(2))):
        x = inputs.random(shape).to(torch.float16).to(DEVICE)
        scale, _ = inputs.params(x, per, Grid(4), affine=False)
        g = torch.randn_like(x)
        assert_all_same_bits("fake_quantize", "triton", x, x, scale, per=per)
        assert_all_same_bits("fake_quantize_backward", "triton", x, g, x, scale, per=per, ste=SteKind.IN_RANGE)


def test_ranges_wider_than_the_dtype() -> None:
    x = torch.tensor([[-3e38, 3e38], [1e-30, -1e-30], [math.nan, math.inf], [-0.0, 0.0]], device=DEVICE)
    for per in (PerTensor(), PerToken(), PerChannel(1)):
        for symmetric in (True, False):
            assert_all_same_bits("fake_quantize_per_batch", "triton", x, x, per=per, symmetric=symmetric)


def test_what_is_left_to_the_reference_says_why() -> None:
    from lowbit.kernels.triton_launch import MAKERS

    x = torch.zeros(4, device=DEVICE)
    for op in OPS:
        if op in MAKERS:
            assert Plan.select(op, x, prefer="triton").backend == "triton"
        else:
            with pytest.raises(ValueError, match=f"Triton kernels leave {op} to torch"):
                Plan.select(op, x, prefer="triton")
    with pytest.raises(ValueError, match=r"Triton kernels do not take torch\.float8"):
        Plan.select("fake_quantize", x.to(torch.float8_e4m3fn), prefer="triton")
    with pytest.raises(ValueError, match="an empty tensor needs no kernel"):
        Plan.select("fake_quantize", x[:0], prefer="triton")


def test_workspace_counts_partial_results_and_copies() -> None:
    x = torch.zeros(70, 530, device=DEVICE)
    whole = Plan.select("learned_fake_quantize_backward", x, prefer="triton").workspace_size
    assert 0 < whole < x.numel()
    assert Plan.select("learned_fake_quantize_backward", x, per=PerToken(), prefer="triton").workspace_size == 0
    assert Plan.select("fake_quantize", x[:, ::2], prefer="triton").workspace_size == x[:, ::2].numel() * 4
    # Rows that lie apart are read where they are, unless they are too long for one program.
    for columns, copied in ((64, 0), (2**15, 2 * 2**15 * 4)):
        rows = torch.empty(4, columns, device=DEVICE)[::2]
        size = Plan.select("quantize_per_batch", rows, per=PerToken(), prefer="triton").workspace_size
        assert (size >= copied) if copied else (size == 0)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("per", [PerTensor(), PerChannel(1), PerToken()], ids=str)
def test_a_cuda_graph_replays_a_training_step(per: object) -> None:
    """Statistics, scale, forward and backward: nothing waits for the host, nothing is allocated outside."""
    import lowbit

    quantizer = lowbit.FakeQuantize(4, per=per, ste=SteKind.HARD_TANH, scale_mode=lowbit.PerBatch())
    x = inputs.random((64, 256)).float().to(DEVICE)
    g = torch.randn_like(x)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y = quantizer(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, g)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        x.copy_(inputs.random((64, 256), seed=seed).float())
        graph.replay()
        for got, wanted in zip(captured, step(), strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_host() -> None:
    import lowbit

    x = torch.randn(64, 256, device=DEVICE, requires_grad=True)
    for mode in (lowbit.PerBatch(), lowbit.EMA(), lowbit.Learned(), lowbit.Fixed()):
        quantizer = lowbit.FakeQuantize(4, symmetric=False, scale_mode=mode).to(DEVICE)
        quantizer(x).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            quantizer(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
