"""Train a small network on handwritten digits in float, then at 8, 4 and 2 bits with every gradient rule.

    python examples/digits.py [--epochs N] [--seeds N]

Each seed has one float network. Every network of that seed starts from it, sees the same batches and trains for as many
epochs; the float line of the table is that network, trained further in the same way. The learning rate is chosen for
each bits and rule by the mean validation accuracy, and the test images serve for the table alone. On one machine, the
figures are the same on every run.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import mean, stdev
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowbit import FakeQuantize, Learned, PerChannel, SteKind

BITS = (8, 4, 2)
LEARNING_RATES = (0.03, 0.1, 0.3)
FLOAT_LEARNING_RATE = 0.1
FLOAT_EPOCHS = 40
BATCH_SIZE = 64

Labelled = tuple[Tensor, Tensor]
MakeLinear = Callable[[int, int], nn.Module]


class Digits(NamedTuple):
    """Images as rows of 64 pixels from 0 to 1, with their labels."""

    train: Labelled
    validation: Labelled
    test: Labelled


class QuantizedLinear(nn.Linear):
    """y = quantize_input(x) @ quantize_weight(weight).T + bias"""

    def __init__(self, in_features: int, out_features: int, *, bits: int, ste: SteKind) -> None:
        super().__init__(in_features, out_features)
        # Pixels and the results of a ReLU are never negative, so their grid is unsigned.
        self.quantize_input = FakeQuantize(bits, signed=False, ste=ste, scale_mode=Learned(batch_axis=0))
        self.quantize_weight = FakeQuantize(bits, per=PerChannel(0), ste=ste, scale_mode=Learned())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.quantize_input(x), self.quantize_weight(self.weight), self.bias)


def load_digits() -> Digits:
    """1,797 images, split once and for all: 60 % to train, 20 % to choose the learning rate, 20 % to test."""
    try:
        from sklearn import datasets
    except ImportError as error:
        sys.exit(f"This example needs scikit-learn ({error}). Install it with: pip install 'lowbit[demo]'")
    pixels, digits = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return Digits(*((images[part], labels[part]) for part in order.split([1077, 360, 360])))


def build_network(linear: MakeLinear) -> nn.Sequential:
    """Three layers, float or quantized as ``linear`` makes them."""
    return nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 64), nn.ReLU(), linear(64, 10))


def train(network: nn.Module, data: Labelled, *, epochs: int, learning_rate: float, seed: int) -> None:
    """An ordinary training loop; the seed gives the order of the images."""
    images, labels = data
    shuffle = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    network.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=shuffle).split(BATCH_SIZE):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(network: nn.Module, data: Labelled) -> float:
    """The share of images that the network recognizes, in percent."""
    images, labels = data
    network.eval()
    return 100 * (network(images).argmax(1) == labels).double().mean().item()


def train_float(data: Digits, seed: int) -> dict[str, Tensor]:
    """The state of the float network from which every network of this seed starts."""
    torch.manual_seed(seed)
    network = build_network(nn.Linear)
    train(network, data.train, epochs=FLOAT_EPOCHS, learning_rate=FLOAT_LEARNING_RATE, seed=seed)
    return network.state_dict()


def fine_tune(name: str, linear: MakeLinear, starts: list[dict[str, Tensor]], data: Digits, epochs: int) -> str:
    """Mean and spread of the test accuracy, at the learning rate with the best mean validation accuracy."""
    best_rate, best_validation = 0.0, -1.0
    best_networks: list[nn.Sequential] = []
    for rate in LEARNING_RATES:
        networks = [build_network(linear) for _ in starts]
        for seed, (network, start) in enumerate(zip(networks, starts, strict=True)):
            # Not strict: the float state has no scales, and the quantizers take theirs from the first batch.
            network.load_state_dict(start, strict=False)
            train(network, data.train, epochs=epochs, learning_rate=rate, seed=seed)
        validation = mean(accuracy(network, data.validation) for network in networks)
        if validation > best_validation:
            best_rate, best_validation, best_networks = rate, validation, networks
    print(f"{name:<26} learning rate {best_rate:<5} validation accuracy {best_validation:.1f} %", flush=True)
    test = [accuracy(network, data.test) for network in best_networks]
    return f"{mean(test):.1f} ± {stdev(test):.1f}" if len(test) > 1 else f"{mean(test):.1f}"


def main() -> None:
    """Train every network, then print the table."""
    parser = argparse.ArgumentParser(description="Digits in float and at 8, 4 and 2 bits, with every gradient rule.")
    parser.add_argument("--epochs", type=int, default=6, help="epochs after the float training (default 6)")
    parser.add_argument("--seeds", type=int, default=5, help="networks behind each figure of the table (default 5)")
    options = parser.parse_args()
    if min(options.epochs, options.seeds) < 1:
        parser.error("--epochs and --seeds must be at least 1")
    torch.set_num_threads(1)  # Tensors this small gain nothing from a second core.
    data = load_digits()

    print("A 64-64-64-10 network. Every layer is quantized alike, the first and the last too: weights per output")
    print("channel, inputs per tensor, both with learned scales (LSQ) and the same gradient rule.", flush=True)
    starts = [train_float(data, seed) for seed in range(options.seeds)]
    table = [["float", fine_tune("float", nn.Linear, starts, data, options.epochs)]]
    table.append(["", *SteKind])
    for bits in BITS:
        row = [f"{bits} bits"]
        for ste in SteKind:
            linear = partial(QuantizedLinear, bits=bits, ste=ste)
            row.append(fine_tune(f"{bits} bits, {ste}", linear, starts, data, options.epochs))
        table.append(row)

    print("\nTest accuracy in %, by bits (rows) and gradient rule (columns)")
    for head, *cells in table:
        print(f"{head:<8}" + "".join(f"{text:>18}" for text in cells))
    print(f"Mean ± standard deviation over {options.seeds} seed(s): take smaller differences for noise.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped before the table was complete.", file=sys.stderr)
        sys.exit(130)
