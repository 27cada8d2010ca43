"""transformers' callback: the schedule follows the Trainer's steps, and a resumed run has the same bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from compare import assert_same_bits
from lowbit.preparation import quantizers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from lowbit.integrations.transformers import QuantizationCallback


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 50, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 3}


def run(folder: Path, steps: int, *, resume: bool = False) -> tuple[Any, QuantizationCallback]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=8, num_labels=3, **sizes))
    batch = {"input_ids": torch.randint(5, 50, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    prepared = lowbit.prepare(model, lowbit.recipes.w8a8(), batch)
    lowbit.calibrate(prepared, [batch])
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        lr_scheduler_type="constant",
        seed=0,
    )
    callback = QuantizationCallback({"freeze_scales": 3})
    trainer = Trainer(prepared, arguments, train_dataset=Sentences(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return prepared, callback


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole, callback = run(tmp_path / "whole", 4)
    run(tmp_path / "part", 2)
    resumed, other = run(tmp_path / "part", 4, resume=True)
    assert callback.schedule is not None
    assert other.schedule is not None
    assert (callback.schedule.count, other.schedule.count) == (4, 4)
    assert not any(quantizer.observing for _, _, quantizer in quantizers(resumed))
    for name, value in whole.state_dict().items():
        assert_same_bits(resumed.state_dict()[name], value)
