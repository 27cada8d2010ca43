"""Training for small images of 32 x 32 pixels that stays on the device: a step is one CUDA graph."""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit

FLOAT_BITS = 32  # of a network that is not quantized
PADDING = 4
PIXEL_MEAN, PIXEL_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TEMPERATURE = 4.0  # of distillation
EVALUATION_BATCH = 1000
WARM_UP_STEPS = 3
RISE = 0.03  # the share of a training in which the rate rises: at once it would undo what float learned

Labelled = tuple[Tensor, Tensor]  # uint8 images [n, height, width, channel], int64 labels


def crop(padded: Tensor, batch: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Images of the batch, cut from their padded ones at ``shift`` (row, column) and mirrored where ``flip``."""
    line = torch.arange(32, device=padded.device)
    rows = shift[:, :1] + line
    columns = shift[:, 1:] + torch.where(flip[:, None], 31 - line, line)
    return padded[batch[:, None, None], rows[:, :, None], columns[:, None, :]]


def normalize(pixels: Tensor) -> Tensor:
    """(x / 255 - mean) / std, [n, channel, height, width] in channels_last memory"""
    factor, offset = _normal_form(pixels.device)
    return (pixels * factor + offset).permute(0, 3, 1, 2)


@cache
def _normal_form(device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept on the device: a copy from the host could not be part of a CUDA graph.
    center, spread = (torch.tensor(values, device=device) for values in (PIXEL_MEAN, PIXEL_STD))
    return 1 / (255 * spread), -center / spread


@torch.no_grad()
def accuracy(model: nn.Module, data: Labelled) -> float:
    """The share of images that the network recognizes, in percent; computed in float32."""
    model.eval()
    batches = zip(*(part.split(EVALUATION_BATCH) for part in data), strict=True)
    right = [(model(normalize(images)).argmax(1) == labels).sum() for images, labels in batches]
    return 100 * torch.stack(right).sum().item() / len(data[1])


class Settings(NamedTuple):
    """How a network is trained."""

    bits: int
    seed: int
    rate: float
    weight_decay: float
    batch_size: int
    distill: float
    scale_rate: float
    scale_start: str  # of activations: "lsq", the formula's, or "least_error"

    @property
    def name(self) -> str:
        if self.bits == FLOAT_BITS:
            return f"float-seed{self.seed}"
        scales = f"scales{self.scale_rate:g}-{self.scale_start}"
        return f"{self.bits}bit-rate{self.rate:g}-{scales}-distill{self.distill:g}-seed{self.seed}"


class Trainer:
    """One network in training: nesterov SGD, random crops and flips, all on the device.

    Everything that changes from step to step (place in the order of images, learning rate) is a tensor that the step
    itself moves on, so that on a GPU the step is one CUDA graph and the host only says "again".
    """

    def __init__(
        self, model: nn.Module, teacher: nn.Module | None, settings: Settings, padded: Tensor, labels: Tensor
    ) -> None:
        self.model, self.teacher, self.settings, self.padded, self.labels = model, teacher, settings, padded, labels
        device = labels.device
        self.steps = len(labels) // settings.batch_size  # an epoch leaves out the few images of a last, smaller batch
        self.generator = torch.Generator(device).manual_seed(settings.seed)
        self.order = torch.zeros(self.steps * settings.batch_size, dtype=torch.int64, device=device)
        self.shift = torch.zeros((len(self.order), 2), dtype=torch.int64, device=device)
        self.flip = torch.zeros(len(self.order), dtype=torch.bool, device=device)
        self.within = torch.arange(settings.batch_size, device=device)
        self.rates, self.rate = torch.zeros(self.steps, device=device), torch.zeros((), device=device)
        self.scale_rate = torch.zeros((), device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), device=device)
        # Scales, biases and batch norm are not decayed; scales have a rate of their own.
        scales = [] if settings.bits == FLOAT_BITS else lowbit.scale_parameters(model)
        rest = [p for p in model.parameters() if all(p is not scale for scale in scales)]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
            {"params": scales, "weight_decay": 0.0, "lr": self.scale_rate},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.SGD(groups, lr=self.rate, momentum=0.9, nesterov=True, fused=True)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self, *, capture: bool) -> None:
        """Start the scales from a batch, compile what there is to compile, capture the step; train nothing."""
        self.synchronize()
        with self._on_stream():
            self.begin_epoch(0.0, 0.0)
            self.model.train()
            with torch.no_grad(), self._autocast():
                self.model(self._next_batch()[0])
        self.synchronize()
        some, center = slice(EVALUATION_BATCH), slice(PADDING, -PADDING)
        accuracy(self.model, (self.padded[some, center, center], self.labels[some]))
        self.synchronize()
        self.model.train()
        start = [tensor.detach().clone() for tensor in self._state()]
        with self._on_stream():
            for _ in range(WARM_UP_STEPS):
                self.index.zero_()  # an epoch may have fewer steps
                self._step()
        self.synchronize()
        if capture:
            self.graph = torch.cuda.CUDAGraph()
            # On its own stream: graphs captured on one stream would share cuBLAS's workspace, and race when replayed.
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._step()
        with torch.no_grad():
            for tensor, value in zip(self._state(), start, strict=True):
                tensor.copy_(value)
            for state in self.optimizer.state.values():
                state["momentum_buffer"].zero_()
        self.synchronize()

    def begin_epoch(self, progress: float, until: float) -> None:
        """Draw a new order, crops and flips; the learning rate rises, then follows a cosine, by ``progress``."""
        device, generator, count = self.labels.device, self.generator, len(self.order)
        with self._on_stream():
            self.order.copy_(torch.randperm(len(self.labels), generator=generator, device=device)[:count])
            self.shift.random_(0, 2 * PADDING + 1, generator=generator)
            self.flip.random_(0, 2, generator=generator)
            at = progress + (until - progress) * torch.arange(self.steps, device=device) / self.steps
            rising = (at / RISE).clamp(max=1)
            self.rates.copy_(self.settings.rate * rising * (1 + torch.cos(math.pi * at)) / 2)
            self.index.zero_()
            self.loss.zero_()

    def step(self) -> None:
        """Train on the next batch."""
        with self._on_stream():
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()

    def synchronize(self) -> None:
        """Wait for the device: a stream of one's own and the default stream do not wait for each other."""
        if self.stream is not None:
            torch.cuda.synchronize()

    def _next_batch(self) -> Labelled:
        places = self.index * self.settings.batch_size + self.within
        batch, shift, flip = (table.index_select(0, places) for table in (self.order, self.shift, self.flip))
        return normalize(crop(self.padded, batch, shift, flip)), self.labels.index_select(0, batch)

    def _step(self) -> None:
        images, labels = self._next_batch()
        weight = self.settings.distill
        with self._autocast():
            logits = self.model(images)
            loss = functional.cross_entropy(logits, labels)
            if self.teacher is not None:
                with torch.no_grad():
                    target = functional.log_softmax(self.teacher(images) / TEMPERATURE, 1)
                logs = functional.log_softmax(logits / TEMPERATURE, 1)
                soft = functional.kl_div(logs, target, reduction="batchmean", log_target=True) * TEMPERATURE**2
                loss = (1 - weight) * loss + weight * soft
        loss.backward()
        self.rate.copy_(self.rates.index_select(0, self.index).squeeze())
        self.scale_rate.copy_(self.rate * self.settings.scale_rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss += loss.detach() / self.steps
        self.index += 1

    def _state(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _autocast(self) -> AbstractContextManager[None]:
        # A cache of casted weights would outlive the graph's capture.
        on_gpu = self.stream is not None
        return torch.autocast(self.labels.device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False)

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
