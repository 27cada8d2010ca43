"""One of the ranks that torchrun starts: whole models, prepared, against one process on the joined batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowbit
from compare import assert_same_bits

STEPS, EACH = 4, 6


class Block(nn.Module):
    """A residual block without batch norm, whose statistics would be each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(4 * 36, 5)).double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(EACH * dist.get_world_size(), 3, 8, 8, generator=generator, dtype=torch.float64)


def own(whole: Tensor) -> Tensor:
    return whole[EACH * dist.get_rank() : EACH * (dist.get_rank() + 1)]


def prepared(recipe: lowbit.Recipe) -> nn.Module:
    model = lowbit.prepare(make_net(), recipe, example_inputs=batch(0)[:2])
    if lowbit.scale_parameters(model):
        lowbit.calibrate(model, [own(batch(0))])  # the first values of learned scales, on all ranks
    return model


def train(model: nn.Module, take: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        model(take(batch(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(start: nn.Module) -> nn.Module:
    """The same training in one process, on whole batches."""
    model = copy.deepcopy(start)
    for module in model.modules():
        if isinstance(module, lowbit.FakeQuantize):
            module.across_ranks = False
    train(model, lambda whole: whole)
    return model


def assert_alike(state: dict[str, Tensor], single: dict[str, Tensor]) -> None:
    for name, value in state.items():
        if name.endswith(("low", "high", "initialized", "_extra_state")):
            continue
        assert torch.allclose(value.double(), single[name].double(), rtol=1e-9, atol=1e-12), name
    for value in state.values():
        gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, value.contiguous())
        for other in gathered:
            assert_same_bits(other, value)


def check_first_scales_to_the_bit() -> None:
    """After one batch, a moving average holds that batch's own statistic: of all ranks, to the bit."""
    model, single = prepared(lowbit.recipes.w8a8()), prepared(lowbit.recipes.w8a8())
    for module in single.modules():
        if isinstance(module, lowbit.FakeQuantize):
            module.across_ranks = False
    model(own(batch(0)))
    single(batch(0))
    name = "0.input_quantizer"
    assert_same_bits(model.get_submodule(name).scale, single.get_submodule(name).scale)
    assert_same_bits(model.get_submodule(name).low, single.get_submodule(name).low)


def check_ddp() -> None:
    for recipe in (lowbit.recipes.w8a8(), lowbit.recipes.w2a2()):
        start = prepared(recipe)
        single = train_alone(start)
        model = DistributedDataParallel(copy.deepcopy(start))
        train(model, own)
        assert_alike(model.module.state_dict(), single.state_dict())
        lowbit.summary(model)  # looks through the wrapper


def check_fully_shard() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in (lowbit.recipes.w8a8(), lowbit.recipes.w2a2()):
        start = prepared(recipe)
        single = train_alone(start)
        model = copy.deepcopy(start)
        kept = lowbit.replicate(lowbit.scale_parameters(model))
        for layer in (model[1], model[2], model):
            fully_shard(layer, mesh=mesh, ignored_params=kept)
        train(model, own)
        state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
        assert_alike(state, single.state_dict())


def main() -> None:
    dist.init_process_group("gloo")
    for check in (check_first_scales_to_the_bit, check_ddp, check_fully_shard):
        check()
        dist.barrier()  # a rank that leaves early would close the connections of the others
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still run, and the interpreter's own end would abort on them


if __name__ == "__main__":
    main()
