"""Lightning's callback: prepared before the optimizer, calibrated once, on schedule, and the same bits when resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowbit
from compare import assert_same_bits
from lowbit.preparation import quantizers

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer

from lowbit.integrations.lightning import QuantizationCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(64, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    return DataLoader(TensorDataset(images, labels), 16)


def run(
    epochs: int, checkpoint: Path | None = None, **options: Any
) -> tuple[Trainer, Classifier, QuantizationCallback]:
    torch.manual_seed(1)
    module = Classifier()
    callback = QuantizationCallback(lowbit.recipes.w2a2(), torch.randn(4, 8), **options)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), ckpt_path=None if checkpoint is None else str(checkpoint), weights_only=False)
    return trainer, module, callback


def test_learned_scales_are_trained() -> None:
    _, module, _ = run(1)
    before = QuantizationCallback(lowbit.recipes.w2a2(), torch.randn(4, 8))
    assert before.schedule is None
    scales = lowbit.scale_parameters(module.model)
    assert len(scales) == 4
    assert all(scale.grad is not None for scale in scales)
    assert all(quantizer.is_ready for _, _, quantizer in quantizers(module.model))


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    options = {"schedule": {"freeze_batch_norm": 6, "freeze_scales": 5}}
    _, whole, callback = run(3, **options)
    first, _, _ = run(1, **options)
    first.save_checkpoint(tmp_path / "first.ckpt")
    _, resumed, other = run(3, tmp_path / "first.ckpt", **options)
    assert callback.schedule is not None
    assert other.schedule is not None
    assert (callback.schedule.count, other.schedule.count) == (12, 12)
    for name, value in whole.state_dict().items():
        assert_same_bits(resumed.state_dict()[name], value)


def test_the_schedule_is_kept() -> None:
    _, module, _ = run(2, schedule={"weight_start": 100, "freeze_scales": 3})
    assert not any(quantizer.enabled for _, role, quantizer in quantizers(module.model) if role == "weight")
    assert not any(quantizer.observing for _, _, quantizer in quantizers(module.model))


def test_calibration_starts_the_scales_from_the_first_batches() -> None:
    _, module, _ = run(0, calibration_batches=2)
    assert not all(quantizer.is_ready for _, _, quantizer in quantizers(module.model))
    images = next(iter(loader()))[0]
    torch.manual_seed(1)
    expected = lowbit.prepare(Classifier().model, lowbit.recipes.w2a2(), images)
    lowbit.calibrate(expected, [images])
    _, module, _ = run(1, calibration_batches=1)
    assert_same_bits(module.model[0].input_quantizer.initial_scale, expected[0].input_quantizer.initial_scale)


def test_an_unknown_network_is_an_error() -> None:
    with pytest.raises(ValueError, match="network is 'encoder', but the Classifier has no module of that name"):
        run(1, network="encoder")


def test_the_whole_module_can_be_prepared() -> None:
    class Whole(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    module = Whole()
    callback = QuantizationCallback(lowbit.recipes.w8a8(), torch.randn(4, 8), network="")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    assert len(list(quantizers(module))) == 4
