from __future__ import annotations

import math

import pytest
import torch

import inputs
import oracle
from compare import assert_same_bits
from lowbit import Grid, PerChannel, PerTensor, SteKind
from lowbit.functional import fake_quantize, fake_quantize_backward, learned_fake_quantize
from lowbit.functional.learned import floor_scale
from lowbit.granularity import Granularity

PERS = (PerTensor(), PerChannel(0), PerChannel(-1), *inputs.PERS[-2:])


@pytest.mark.parametrize("method", ["lsq", "pact"])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("per", PERS, ids=str)
@pytest.mark.parametrize("dtype", inputs.FLOATS, ids=str)
def test_every_gradient_is_its_formula(
    dtype: torch.dtype, per: Granularity, affine: bool, method: str, device: torch.device
) -> None:
    for name, x in inputs.tensors(dtype, device).items():
        grid = Grid(3)
        scale, zero_point = inputs.params(x, per, grid, affine=affine)
        scale.requires_grad_()
        zero_point = zero_point.float().requires_grad_() if affine else None
        leaf = x.detach().requires_grad_()
        g = inputs.random(tuple(x.shape), seed=4).to(dtype).to(device)
        y = learned_fake_quantize(leaf, scale, zero_point, grid=grid, per=per, grad_scale=False, method=method)
        y.backward(g)
        z = zero_point.detach().int() if affine else None
        assert_same_bits(y, fake_quantize(x, scale.detach(), z, grid=grid, per=per))
        assert_same_bits(leaf.grad, fake_quantize_backward(g, x, scale.detach(), z, grid=grid, per=per))
        ds, dz, allowed = oracle.learned_gradient(g, x, scale, z, grid, per, method)
        assert scale.grad.dtype == torch.float32
        assert ((scale.grad.cpu().double() - ds).abs() <= allowed).all(), name
        if affine:
            assert ((zero_point.grad.cpu().double() - dz).abs() <= allowed * 4).all(), name


def test_gradient_scale(device: torch.device) -> None:
    x, grid = inputs.random((4, 6)).float().to(device), Grid(4)

    def ds(per: Granularity, shape: tuple[int, ...], **options: object) -> torch.Tensor:
        scale = torch.full(shape, 0.2, device=device, requires_grad=True)
        learned_fake_quantize(x, scale, grid=grid, per=per, **options).sum().backward()
        return scale.grad

    plain = ds(PerTensor(), (), grad_scale=False)
    torch.testing.assert_close(ds(PerTensor(), ()), plain / math.sqrt(24 * 7))
    torch.testing.assert_close(ds(PerTensor(), (), batch_axis=0), plain / math.sqrt(6 * 7))
    columns, rows = ds(PerChannel(1), (6,), grad_scale=False), ds(PerChannel(0), (4,), grad_scale=False)
    torch.testing.assert_close(ds(PerChannel(1), (6,)), columns / math.sqrt(4 * 7))
    torch.testing.assert_close(ds(PerChannel(1), (6,), batch_axis=0), columns / math.sqrt(1 * 7))
    torch.testing.assert_close(ds(PerTensor(), (), batch_axis=1), plain / math.sqrt(4 * 7))
    # an axis that lies across scale groups is not counted in any of them
    torch.testing.assert_close(ds(PerChannel(0), (4,), batch_axis=0), rows / math.sqrt(6 * 7))
    torch.testing.assert_close(
        ds(PerTensor(), (), method="pact"), ds(PerTensor(), (), method="pact", grad_scale=False) / 49
    )


def test_ds_of_one_element_by_hand(device: torch.device) -> None:
    # s = 0.5, 3 bits [-4, 3]: inside round(v) - v, below -4, above 3
    for value, wanted in [
        (0.6, 1 - 1.2),
        (-9.0, -4.0),
        (9.0, 3.0),
        (math.inf, 3.0),
        (-math.inf, -4.0),
        (math.nan, 0.0),
    ]:
        scale = torch.tensor(0.5, device=device, requires_grad=True)
        x = torch.tensor([value], device=device)
        learned_fake_quantize(x, scale, grid=Grid(3), grad_scale=False).backward(torch.ones_like(x))
        assert scale.grad.item() == pytest.approx(wanted, abs=1e-6)


def test_gradient_scale_of_the_zero_point(device: torch.device) -> None:
    x = inputs.random((24,)).float().to(device)
    found = []
    for grad_scale in (False, True):
        zero_point = torch.tensor(1.0, device=device, requires_grad=True)
        learned_fake_quantize(x, 0.2, zero_point, grid=Grid(4), grad_scale=grad_scale).sum().backward()
        found.append(zero_point.grad)
    torch.testing.assert_close(found[1], found[0] / math.sqrt(24 * 7))


def test_a_learned_zero_point_is_rounded_into_the_grid(device: torch.device) -> None:
    grid, x = Grid(4, signed=False), inputs.random((32,)).float().to(device)
    scale = torch.tensor(0.3, device=device)
    for value, snapped in [(2.4, 2), (2.5, 2), (-3.0, 0), (99.0, 15)]:
        zero_point = torch.tensor(value, device=device, requires_grad=True)
        y = learned_fake_quantize(x, scale, zero_point, grid=grid)
        assert_same_bits(y, fake_quantize(x, scale, snapped, grid=grid))


@pytest.mark.parametrize("wanted", [("x",), ("scale",), ("zero_point",), ("x", "scale"), ("x", "scale", "zero_point")])
def test_any_subset_of_arguments_may_require_a_gradient(wanted: tuple[str, ...], device: torch.device) -> None:
    args = {
        "x": inputs.random((8,)).float().to(device),
        "scale": torch.tensor(0.2, device=device),
        "zero_point": torch.tensor(1.0, device=device),
    }
    for name in wanted:
        args[name].requires_grad_()
    learned_fake_quantize(*args.values(), grid=Grid(4)).sum().backward()
    assert {name for name, tensor in args.items() if tensor.grad is not None} == set(wanted)


def test_ste_rules_apply_to_dx(device: torch.device) -> None:
    x = inputs.random((32,)).float().to(device)
    scale = torch.tensor(0.2, device=device)
    for ste in SteKind:
        leaf = x.clone().requires_grad_()
        learned_fake_quantize(leaf, scale, grid=Grid(3), ste=ste).sum().backward()
        assert_same_bits(leaf.grad, fake_quantize_backward(torch.ones_like(x), x, scale, grid=Grid(3), ste=ste))


@pytest.mark.parametrize("shape", [(100_003,), (3, 40_001), (1, 5, 33_333), (1000, 36), (1000, 37), (4096, 100)])
def test_sums_do_not_depend_on_the_number_of_threads(shape: tuple[int, ...]) -> None:
    x = inputs.random(shape).float()
    before = torch.get_num_threads()
    try:
        for per in (PerTensor(), PerChannel(0), PerChannel(-1)):
            found = []
            for threads in (1, 2, 3, 8, 16):
                torch.set_num_threads(threads)
                scale = torch.full(per.scale_shape(x.shape), 0.1, requires_grad=True)
                learned_fake_quantize(x, scale, grid=Grid(4), per=per).sum().backward()
                found.append(scale.grad)
            for other in found[1:]:
                assert_same_bits(other, found[0])
    finally:
        torch.set_num_threads(before)


def test_the_floor_passes_the_gradient(device: torch.device) -> None:
    scale = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    y = floor_scale(scale, torch.tensor([0.1, 0.1], device=device))
    assert y.tolist() == pytest.approx([0.5, 0.1])
    y.backward(torch.tensor([2.0, 3.0], device=device))
    assert scale.grad.tolist() == [2.0, 3.0]
