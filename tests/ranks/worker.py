"""One rank of several: python worker.py RANK WORLD_SIZE STORE. tests/test_ranks.py starts one of these for each rank.

What every rank holds is compared with a quantizer, or a network, that sees the whole batch in one process.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import inputs
from compare import assert_same_bits
from lowbit import EMA, FakeQuantize, Fixed, Learned, PerBatch, PerBlock, PerChannel, PerGroup, PerTensor, PerToken
from lowbit.granularity import Granularity
from lowbit.observers import Histogram, MinMax, MovingAverage, Observer
from lowbit.ranks import Ranks, replicate
from lowbit.scale import ScaleMode
from lowbit.ste import SteKind

# Scales from maxima and minima are those of one process to the bit; scales from means, within rounding.
EXACT = ((PerBatch(), True), (PerBatch(), False), (EMA(0.75), True), (EMA(0.75), False), (Learned(), False))
ROUNDED = (
    *((PerBatch("mean_abs"), True), (Learned(), True), (Learned("lsq+"), True), (Learned("lsq+"), False)),
    (Learned("pact"), True),
)
PERS = (PerTensor(), PerChannel(1))


def part(batch: Tensor, step: int = 0) -> Tensor:
    """This rank's rows of 8: ranks have different numbers of them, and in every other step rank 1 has none."""
    rank, ends = dist.get_rank(), {2: [0, 3, 8], 4: [0, 3, 4, 6, 8]}[dist.get_world_size()]
    if step % 2:
        ends[1] = ends[2]
    return batch[ends[rank] : ends[rank + 1]]


def batches() -> Iterator[tuple[str, list[Tensor]]]:
    """Named lists of batches, three steps each."""
    steps = [inputs.random((8, 6), seed=seed).float() for seed in range(3)]
    yield "random", steps
    yield "positive", [step.abs() + 1 for step in steps]
    zeros = [step.abs() + 1 for step in steps]
    for step in zeros:
        step[:3] = 0  # all of rank 0's
    yield "zeros on rank 0", zeros
    nonfinite = [step.abs() + 1 for step in steps]
    for step in nonfinite:
        step[:3] = torch.inf
        step[0], step[4, 2] = torch.nan, -torch.inf
    yield "nothing finite on rank 0", nonfinite
    started_late = [steps[0] * 0, steps[1], steps[2]]
    yield "zeros at first", started_late
    one_channel = [step.clone() for step in steps]
    for step in one_channel:
        step[3:, 1] = 0
    yield "a channel of rank 0's", one_channel
    far = [step + 1000 for step in steps]
    yield "far from 0", far


def make(mode: ScaleMode, per: Granularity, *, symmetric: bool = True, **options: object) -> FakeQuantize:
    signed = False if mode == Learned("pact") else None
    return FakeQuantize(4, symmetric, per=per, scale_mode=mode, signed=signed, **options)


def alone(quantizer: FakeQuantize) -> FakeQuantize:
    """The same, in a process that has the whole batch."""
    quantizer = copy.deepcopy(quantizer)
    quantizer.across_ranks = False
    return quantizer


def assert_ranks_agree(tensor: Tensor) -> None:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bool:
        tensor = tensor.byte()
    all_of_them = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, tensor)
    for other in all_of_them:
        assert_same_bits(other, tensor)


def assert_states_agree(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        assert_ranks_agree(tensor)


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The collectives that ran meanwhile, by the name of their reduction."""
    seen: list[str] = []
    before = dist.all_reduce

    def counted(tensor: Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> object:
        seen.append(str(op).rsplit(".", maxsplit=1)[-1])
        return before(tensor, op=op, group=group)

    dist.all_reduce = counted
    try:
        yield seen
    finally:
        dist.all_reduce = before


def shared_out(number: int) -> tuple[Granularity, ...]:
    """Two ranks take every granularity; more, which are slower, one of them in turn."""
    return PERS if dist.get_world_size() == 2 else (PERS[number % len(PERS)],)


def check_scales_of_every_mode() -> None:
    for number, (name, steps) in enumerate(batches()):
        for index, (mode, symmetric) in enumerate((*EXACT, *ROUNDED)):
            for per in shared_out(number + index):
                exact = (mode, symmetric) in EXACT
                same = assert_same_bits if exact else torch.testing.assert_close
                quantizer = make(mode, per, symmetric=symmetric)
                single = alone(quantizer)
                for step, whole in enumerate(steps):
                    x, joined = part(whole, step).clone().requires_grad_(), whole.clone().requires_grad_()
                    try:
                        y, expected = quantizer(x), single(joined)
                        y.sum().backward()
                        expected.sum().backward()
                        scale, zero_point = quantizer._params(x.detach(), quantizer._ranks())
                        wanted, wanted_zero = single._params(joined.detach())
                        same(scale, wanted)
                        assert_ranks_agree(scale)
                        if zero_point is not None:
                            same(zero_point, wanted_zero)
                            assert_ranks_agree(zero_point)
                        if exact:
                            assert_same_bits(y, part(expected, step))
                            assert_same_bits(x.grad, part(joined.grad, step))
                        for key, tensor in single.state_dict().items():
                            same(quantizer.state_dict()[key], tensor)
                    except Exception as error:
                        error.add_note(f"{name}, {per}, {mode}, symmetric={symmetric}, step {step}")
                        raise
                assert_states_agree(quantizer)


def check_other_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        whole = inputs.random((8, 6)).to(dtype)
        for mode, symmetric in EXACT:
            quantizer = make(mode, PerChannel(1), symmetric=symmetric)
            single = alone(quantizer)
            assert_same_bits(quantizer(part(whole)), part(single(whole)))


def check_backward_by_hand_takes_the_scale_of_all_ranks() -> None:
    whole = inputs.random((8, 6)).float()
    quantizer = FakeQuantize(4, scale_mode=PerBatch(), ste=SteKind.TANH)
    single = alone(quantizer)
    grad = torch.ones_like(whole)
    assert_same_bits(quantizer.backward(part(grad), part(whole)), part(single.backward(grad, whole)))


def check_collectives_run_only_where_needed() -> None:
    x = inputs.random((6, 6), seed=dist.get_rank()).float()

    def count(quantizer: FakeQuantize, call: Callable[[FakeQuantize], object] = lambda q: q(x)) -> list[str]:
        with collectives() as seen:
            call(quantizer)
        return seen

    assert count(make(EMA(), PerTensor())) == ["MAX"]
    assert count(make(EMA(), PerTensor(), symmetric=False)) == ["MAX"]
    assert count(make(PerBatch(), PerTensor())) == ["MAX"]
    assert count(make(PerBatch(), PerTensor(), symmetric=False)) == ["MAX"]
    assert count(make(PerBatch("mean_abs"), PerTensor())) == ["SUM"]
    assert count(make(Fixed(), PerTensor())) == []
    started = make(Learned(), PerTensor())
    assert count(started) == ["MAX", "SUM"]
    assert count(started) == []
    assert count(make(Learned("lsq+"), PerTensor())) == ["MAX", "SUM", "SUM"]
    assert count(make(Learned("lsq+"), PerTensor(), symmetric=False)) == ["MAX", "MAX", "SUM"]
    assert count(make(Learned("pact"), PerTensor())) == []
    for per in (PerToken(), PerGroup(3), PerBlock(2, 3)):
        quantizer = make(PerBatch(), per)
        assert count(quantizer) == []
        assert_same_bits(quantizer(x), alone(quantizer)(x))
    for mode in (PerBatch(), EMA(), PerBatch("mean_abs")):
        quantizer = make(mode, PerTensor(), observer=MovingAverage())
        quantizer(x)
        for flag in ("observing", "across_ranks", "training"):
            setattr(quantizer, flag, False)
            assert count(quantizer) == []
            setattr(quantizer, flag, True)
        assert count(quantizer, lambda q: q.quantization_noise(x)) == []
    off = make(PerBatch(), PerTensor())
    off.enabled = False
    assert count(off) == []
    off = make(EMA(), PerTensor())
    off.enabled = False
    assert count(off) == ["MAX"]
    assert_ranks_agree(off.scale)
    # One rank may run alone in eval mode.
    if dist.get_rank() == 0:
        quantizer.eval()(x)


def check_ranks_start_together() -> None:
    """What a quantizer knows without reading its state, as on a GPU, is the same on every rank."""
    x = inputs.random((8, 6)).float()
    for mode in (EMA(), Learned()):
        quantizer = make(mode, PerTensor())
        quantizer(part(x, step=1))
        assert quantizer._started
    late = make(Learned(), PerTensor())
    if dist.get_rank() == 0:
        late.update_params(0.5)
    for tensor in late._group_state().values():
        dist.broadcast(tensor.detach(), 0)
    with collectives() as seen:
        late(x)
    assert late._started
    assert seen == []
    assert late.scale.item() == 0.5


def check_a_group_of_some_ranks() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    first_two = dist.new_group([0, 1])
    x = torch.full((3,), float(rank + 1))
    quantizer = make(EMA(), PerTensor())
    quantizer.process_group = first_two
    quantizer(x)
    expected = 2.0 if rank < 2 else float(rank + 1)
    assert_same_bits(quantizer.scale, torch.tensor(expected) / 7)
    assert (Ranks.of(first_two) is None) == (rank >= 2)
    alone_here = [dist.new_group([r]) for r in range(world)]
    assert Ranks.of(alone_here[rank]) is None


def check_observers() -> None:
    def observers(per: Granularity) -> list[Observer]:
        return [MinMax(per), MovingAverage(per, decay=0.5), Histogram(per, bins=64), Histogram(per, "mse", bins=64)]

    for number, (name, steps) in enumerate(batches()):
        for index in range(len(observers(PERS[0]))):
            for per in shared_out(number + index):
                observer = observers(per)[index]
                quantizer = make(Fixed(), per, symmetric=False, observer=observer)
                single = alone(quantizer)
                for step, whole in enumerate(steps):
                    quantizer(part(whole, step))
                    single(whole)
                try:
                    for key, tensor in single.state_dict().items():
                        assert_same_bits(quantizer.state_dict()[key], tensor)
                    for watched in (quantizer, single):
                        watched.update_params_from_observer()
                    assert_same_bits(quantizer.scale, single.scale)
                except Exception as error:
                    error.add_note(f"{name}, {observer}")
                    raise


def check_activation_checkpointing() -> None:
    whole = inputs.random((8, 6)).float()
    for mode, symmetric in EXACT:
        quantizer = make(mode, PerTensor(), symmetric=symmetric, observer=MovingAverage(decay=0.5), ste=SteKind.TANH)
        single = alone(quantizer)
        x, joined = part(whole).clone().requires_grad_(), whole.clone().requires_grad_()
        for _ in range(2):
            torch.utils.checkpoint.checkpoint(quantizer, x, use_reentrant=False).square().sum().backward()
            single(joined).square().sum().backward()
        assert_same_bits(x.grad, part(joined.grad))
        for key, tensor in single.state_dict().items():
            assert_same_bits(quantizer.state_dict()[key], tensor)


def check_compiled() -> None:
    whole = inputs.random((8, 6)).float()
    x = even(whole)
    for mode, symmetric in EXACT[:: dist.get_world_size() // 2]:
        quantizer = make(mode, PerChannel(1), symmetric=symmetric)
        quantizer(x)
        single = alone(quantizer)
        compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
        for scale in (2, 3):
            assert_same_bits(compiled(x * scale), even(single(whole * scale)))
        assert_states_agree(quantizer)


class QuantLinear(nn.Linear):
    """y = q_a(x) q_w(W)^T + b"""

    def __init__(self, inputs: int, outputs: int, mode: ScaleMode, weight_mode: ScaleMode) -> None:
        super().__init__(inputs, outputs)
        self.activation = FakeQuantize(4, False, scale_mode=mode)
        self.quantized_weight = FakeQuantize(4, scale_mode=weight_mode)
        self.quantized_weight.across_ranks = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.activation(x), self.quantized_weight(self.weight), self.bias)


def make_net(mode: ScaleMode, weight_mode: ScaleMode) -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(QuantLinear(6, 8, mode, weight_mode), nn.Tanh(), QuantLinear(8, 4, mode, weight_mode))
    return net.double()


def train(net: nn.Module, take: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        x, target = (take(inputs.random((8, size), seed=step)) for size in (6, 4))
        optimizer.zero_grad()
        F.mse_loss(net(x), target).backward()
        optimizer.step()


def even(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train_alone(mode: ScaleMode, weight_mode: ScaleMode) -> nn.Module:
    single = make_net(mode, weight_mode)
    for module in single.modules():
        if isinstance(module, FakeQuantize):
            module.across_ranks = False
    train(single, lambda batch: batch)
    return single


def assert_trained_alike(net: nn.Module, single: nn.Module) -> None:
    expected = single.state_dict()
    for name, tensor in net.state_dict().items():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert_ranks_agree(tensor)
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


MODES = (Learned(batch_axis=0), Learned("lsq+", batch_axis=0), EMA(0.9), PerBatch())


def check_ddp() -> None:
    for mode in MODES:
        net = make_net(mode, Learned())
        train(nn.parallel.DistributedDataParallel(net), even)
        assert_trained_alike(net, train_alone(mode, Learned()))


def check_ddp_and_scales_without_a_shape() -> None:
    x = inputs.random((8, 6), seed=dist.get_rank()).float()

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), make(Learned(batch_axis=0), PerChannel(1)))

    with pytest.raises(RuntimeError, match="run one batch before wrapping the model"):
        nn.parallel.DistributedDataParallel(make_model())(x)
    model = make_model()
    model(x)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(x).sum().backward()
    assert_ranks_agree(model[1].scale.grad)


def check_fully_shard() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for mode, weight_mode in ((EMA(0.9), PerBatch()), (PerBatch(), EMA()), *((mode, Learned()) for mode in MODES)):
        net = make_net(mode, weight_mode)
        scales = [p for m in net.modules() if isinstance(m, FakeQuantize) for p in m.parameters(recurse=False)]
        whole = replicate(scales)
        for layer in (net[0], net[2], net):
            fully_shard(layer, mesh=mesh, ignored_params=whole)
        train(net, even)
        assert_trained_alike(net, train_alone(mode, weight_mode))
        assert all(scale.grad is not None for scale in scales)
    # What replicate is for; should torch take such parameters one day, it may have had its.
    with pytest.raises(ValueError, match="doesn't support scalar parameters"):
        fully_shard(make_net(Learned(), Learned()), mesh=mesh)


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    checks = [value for name, value in globals().items() if name.startswith("check_")]
    for check in checks:
        try:
            check()
        except Exception as error:
            error.add_note(f"in {check.__name__} on rank {rank} of {world}")
            raise
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
