"""fit: one network, one data set, one training run on Lightning's Trainer, which can be stopped and resumed."""

from __future__ import annotations

import logging
import math
import signal
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lowbit.app.config import OPTIMIZERS
from lowbit.app.data import Data, EpochBatches, Normalized, Split
from lowbit.app.processes import Processes, processes
from lowbit.app.sharing import joint_batch_norm, shared_batches
from lowbit.files import write_tensors
from lowbit.flow import call, in_eval_mode
from lowbit.model import preparation_of, scale_parameters
from lowbit.ranks import Ranks
from lowbit.record import Record, check_choice, check_integer

_MOMENTUM = 0.9


class DivergedError(RuntimeError):
    """The loss is no longer a finite number."""


@dataclass(frozen=True)
class Course(Record):
    """rate(step) = rate * (1 + cos(pi step / steps)) / 2,  SGD with momentum 0.9, or AdamW

    Learned scales have a tenth of the rate, and no weight decay. ``batch_size`` is of all processes together.
    """

    epochs: int = 10
    batch_size: int = 64
    rate: float = 0.05
    weight_decay: float = 5e-4
    seed: int = 0
    optimizer: str = OPTIMIZERS[0]

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_integer("epochs", self.epochs, 0)
        check_integer("batch_size", self.batch_size, 1)
        check_integer("seed", self.seed, 0)


@dataclass(frozen=True, eq=False)
class Loaders:
    """Batches (inputs, labels) of a data set of one's own; ``train`` is gone through once for each epoch."""

    train: Iterable[Any]
    held_out: Iterable[Any]
    test: Iterable[Any]


class Classifier(LightningModule):
    """A network that gives scores of classes, trained by cross entropy."""

    def __init__(self, model: nn.Module, course: Course) -> None:
        super().__init__()
        self.model, self.course = model, course
        self.history: dict[str, list[float]] = {"loss": [], "accuracy": []}
        self._losses: list[Tensor] = []

    def on_train_epoch_start(self) -> None:
        self._losses = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels, *shared = batch
        with joint_batch_norm():
            scores = self._scores(inputs)
        if shared:  # by several processes, maybe in unequal parts: the mean of their losses is that of the whole batch
            (count,) = shared
            loss = functional.cross_entropy(scores, labels, reduction="sum") * (self.trainer.world_size / count)
        else:
            loss = functional.cross_entropy(scores, labels)
        self._losses.append(loss.detach())
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(labels))
        return loss

    @property
    def epoch_loss(self) -> float:
        """The mean over the batches of this epoch so far, and over the processes."""
        mean, ranks = torch.stack(self._losses).double().mean(), Ranks.of()
        return float(mean if ranks is None else ranks.sum(mean) / ranks.size)

    def on_train_epoch_end(self) -> None:
        mean = self.epoch_loss
        if not math.isfinite(mean):
            raise self._diverged(f"the loss is {mean}")
        self.history["loss"].append(mean)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        hits = (self._scores(inputs).argmax(1) == labels).float().mean()
        self.log("accuracy", 100 * hits, prog_bar=True, batch_size=len(labels), on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.history["accuracy"].append(float(self.trainer.callback_metrics["accuracy"]))

    def _scores(self, inputs: Any) -> Tensor:
        try:
            return scores_of(self.model, inputs)
        except ValueError as error:  # a quantizer takes no scale that is not finite
            if all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
                raise
            raise self._diverged("weights or scales are not finite") from error

    def _diverged(self, what: str) -> DivergedError:
        epoch, rate = self.current_epoch + 1, self.course.rate
        return DivergedError(f"training diverged: {what} in epoch {epoch}; take a smaller rate than {rate:g}")

    def configure_optimizers(self) -> Any:
        scales = scale_parameters(self.model) if preparation_of(self.model) is not None else []
        known = {id(scale) for scale in scales}
        course = self.course
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if id(p) not in known], "weight_decay": course.weight_decay}
        ]
        if scales:
            groups.append({"params": scales, "weight_decay": 0.0, "lr": course.rate / 10})
        optimizer: torch.optim.Optimizer
        if course.optimizer == "adamw":
            optimizer = torch.optim.AdamW(groups, lr=course.rate)
        else:
            optimizer = torch.optim.SGD(groups, lr=course.rate, momentum=_MOMENTUM)
        steps = max(int(self.trainer.estimated_stepping_batches), 1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = checkpoint["history"]


class _Epochs:
    """The batches of the trainer's epoch: the same, whether or not the run was stopped before it

    Lightning asks a resumed run's loader for its first iterator before it tells the epoch to the sampler; a generator
    asks for the epoch when its first batch is wanted. ``here``: the processes that share the loader's batches.
    """

    def __init__(self, loader: Any, trainer: Trainer, seed: int, here: Processes | None) -> None:
        self.loader, self.trainer, self.seed, self.here = loader, trainer, seed, here

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.trainer.current_epoch
        sampler: Any = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        seed = self.seed * 1_000_003 + epoch
        torch.manual_seed(seed)
        yield from self.loader if self.here is None else shared_batches(self.loader, self.here, seed)


class _Whole(TorchCheckpointIO):
    """Checkpoints that are written whole or not at all: Lightning moves its own from the temporary folder, by a copy
    where that is another disk.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_tensors(Path(path), checkpoint)


def fit(
    model: nn.Module,
    data: Data | Loaders,
    course: Course,
    folder: Path,
    *,
    callbacks: Sequence[Callback] = (),
    options: dict[str, Any] | None = None,
) -> dict[str, list[float]]:
    """Train the model in place; a run that stopped goes on from its last epoch, to the same bits. Gives its history.

    ``folder`` keeps the checkpoint of the last epoch. ``options`` go to Lightning's Trainer. Under torchrun
    the processes share every batch, and all end with the same model.
    """
    here = processes()
    folder.mkdir(parents=True, exist_ok=True)
    module = Classifier(model.train(), course)
    # At the end of the training epoch, when its loss is in the history too.
    keep = ModelCheckpoint(
        folder, filename="last", save_top_k=1, save_on_train_epoch_end=True, enable_version_counter=False
    )
    checkpoint = folder / "last.ckpt"
    _check_whole(checkpoint)
    settings = {
        "accelerator": "cpu",
        **here.trainer_options(),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "plugins": [_Whole()],
        **(options or {}),
    }
    with quiet(), _interruptible():
        trainer = Trainer(max_epochs=course.epochs, callbacks=[*callbacks, keep], **settings)
        batches = training_batches(data, course, here.rank, here.size)
        shared = here if here.size > 1 and isinstance(data, Loaders) else None
        trainer.fit(
            module,
            _Epochs(batches, trainer, course.seed, shared),
            evaluation_batches(data, data.held_out),
            ckpt_path=str(checkpoint) if checkpoint.exists() else None,
            weights_only=False,
        )
    return module.history


def _check_whole(checkpoint: Path) -> None:
    """A ValueError where there is a checkpoint that cannot be read."""
    if not checkpoint.exists():
        return
    try:
        found = torch.load(checkpoint, map_location="cpu", weights_only=False)
        whole = isinstance(found, dict) and "state_dict" in found
    except (EOFError, KeyError, RuntimeError, UnpicklingError):
        whole = False
    if not whole:
        raise ValueError(f"{checkpoint} is damaged; delete it, and the training begins anew")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C as KeyboardInterrupt: Lightning makes it an exit with code 1, and turns the signal off."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            signal.signal(signal.SIGINT, before)
            raise KeyboardInterrupt from None
        raise


def training_batches(data: Data | Loaders, course: Course, rank: int = 0, ranks: int = 1) -> Any:
    """The training batches, of one rank, in the order of the epoch that its sampler is set to; of loaders, of all"""
    if isinstance(data, Loaders):
        return data.train
    dataset = Normalized(data.train, data.mean, data.std)
    batches = EpochBatches(len(dataset), course.batch_size, course.seed, rank=rank, ranks=ranks)
    return DataLoader(dataset, sampler=batches, batch_size=None)


def evaluation_batches(data: Data | Loaders, part: Split | Iterable[Any]) -> Iterable[Any]:
    """The batches of ``data.held_out`` or ``data.test``, in their order"""
    if not isinstance(part, Split):
        return part
    assert isinstance(data, Data)
    return DataLoader(Normalized(part, data.mean, data.std), batch_size=512)


def scores_of(model: nn.Module, inputs: Any) -> Tensor:
    """What the model gives for a batch; of transformers' models, their logits"""
    output = call(model, inputs)
    scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(scores, Tensor):
        raise TypeError(f"the model gives a {type(output).__name__}, but it must give a tensor of scores, (n, classes)")
    return scores


@torch.no_grad()
def accuracy(model: nn.Module, data: Data | Loaders, part: Split | Iterable[Any]) -> float:
    """The share of images, in %, whose highest score is that of their class; the model runs in eval mode."""
    hits, count = count_hits(model, data, part)
    return 100 * hits / count


@torch.no_grad()
def count_hits(model: nn.Module, data: Data | Loaders, part: Split | Iterable[Any]) -> tuple[int, int]:
    """How many have the highest score where their class is, and of how many; the model runs in eval mode."""
    hits = count = 0
    with in_eval_mode(model):
        for inputs, labels in evaluation_batches(data, part):
            hits += int((scores_of(model, inputs).argmax(1) == labels).sum())
            count += len(labels)
    if count == 0:
        raise ValueError("there is nothing to measure the accuracy on; hold some images out")
    return hits, count


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning's notes on devices, workers and products of its makers are no news here."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
