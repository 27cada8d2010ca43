"""Scale statistics over the ranks of torch.distributed: real processes, each of which runs tests/ranks/worker.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compare import assert_same_bits
from lowbit import EMA, FakeQuantize
from lowbit.ranks import Ranks, replicate

HERE = Path(__file__).parent


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_hold_the_scales_of_one_process_on_the_whole_batch(world_size: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
    worker = HERE / "ranks" / "worker.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(world_size), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [text for process, text in zip(processes, outputs, strict=True) if process.returncode != 0]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("world_size", [2, 4])
def test_prepared_models_train_as_in_one_process(world_size: int) -> None:
    """DistributedDataParallel and fully_shard, started by torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*torchrun, *rendezvous, str(HERE / "ranks" / "model_worker.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_process_is_alone() -> None:
    assert Ranks.of() is None
    quantizer = FakeQuantize(4, scale_mode=EMA())
    assert quantizer._ranks() is None
    assert "across_ranks" not in str(quantizer.state_dict())


def test_replicated_parameters_of_one_process_keep_their_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert replicate([parameter]) == {parameter}
    (parameter * torch.arange(3.0)).sum().backward()
    assert_same_bits(parameter.grad, torch.arange(3.0))
