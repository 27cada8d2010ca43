"""A convolution's forward and backward by the float product of quantized values and by codes, over float's.

    python benchmarks/convolutions.py [w8a8 | w8a8_dynamic] [ROUNDS]

In turn, in one process, the least time of each; codes whatever their size. Also the bytes that autograd saves.
"""

import copy
import sys
import time

import torch
from torch import nn

import lowbit
from lowbit.bench.runner import count_saved
from lowbit.nn import convolution

IMAGES = 32
SHAPES = (  # channels in and out, pixels, window, stride
    *((3, 32, 32, 3, 1), (16, 16, 32, 3, 1), (32, 32, 32, 3, 1), (64, 64, 32, 3, 1), (64, 64, 16, 3, 1)),
    *((128, 128, 16, 3, 1), (256, 256, 8, 3, 1), (128, 128, 28, 3, 1), (256, 256, 14, 3, 1), (64, 128, 32, 3, 2)),
    *((128, 256, 16, 3, 2), (64, 64, 32, 1, 1), (128, 128, 16, 1, 1), (256, 256, 14, 1, 1), (256, 256, 28, 1, 1)),
    *((64, 256, 28, 1, 1), (256, 64, 28, 1, 1)),
)
WAYS = {"float": {}, "values": {}, "codes": {"cpu": 0}}  # from how many multiplications on codes are multiplied


def measure(shape: tuple[int, ...], memory: torch.memory_format, preset: str, rounds: int) -> str:
    """Float's milliseconds; the time by values and by codes over it, and by codes over values; bytes saved likewise."""
    inputs, outputs, pixels, window, stride = shape
    torch.manual_seed(0)
    x = torch.randn(IMAGES, inputs, pixels, pixels).relu_().contiguous(memory_format=memory).requires_grad_()
    layer = nn.Conv2d(inputs, outputs, window, stride, window // 2, bias=False).to(memory_format=memory)
    prepared = lowbit.prepare(copy.deepcopy(layer), lowbit.recipes.presets()[preset](), x[:2].detach()).train()
    g = torch.randn_like(layer(x))
    times, saved = {name: [] for name in WAYS}, {}
    for _ in range(rounds + 1):
        for name, least in WAYS.items():
            convolution._LEAST = least
            model = layer if name == "float" else prepared
            start = time.perf_counter()
            y, saved[name] = count_saved(lambda model=model: model(x))
            torch.autograd.grad(y, [x, model.weight], g)
            times[name].append(time.perf_counter() - start)
    base, values, codes = (min(seconds[1:]) for seconds in times.values())
    kept = " ".join(f"{saved[name] / saved['float']:4.2f}" for name in ("values", "codes"))
    return f"{base * 1e3:8.2f} {values / base:5.2f} {codes / base:5.2f} {codes / values:5.2f} {kept}"


def main() -> None:
    """All shapes, contiguous and with channels last."""
    preset = sys.argv[1] if len(sys.argv) > 1 else "w8a8"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    convolution._LEAST_POSITIONS = convolution._LEAST_USES = 0
    threads = torch.get_num_threads()
    print(f"{preset}, {IMAGES} images, {threads} threads, torch {torch.__version__}, least of {rounds} rounds")
    print(
        "channels pixels window stride | float ms, values, codes, codes/values, saved by both | channels last: the same"
    )
    for shape in SHAPES:
        parts = [measure(shape, memory, preset, rounds) for memory in (torch.contiguous_format, torch.channels_last)]
        print(" ".join(f"{number:4d}" for number in shape), "|", " | ".join(parts), flush=True)


if __name__ == "__main__":
    main()
