"""A small GPT on bytes of text: the same training in float and quantized, loss curves and step times side by side.

    python examples/gpt.py --data TEXT --output FOLDER --steps 500
    python examples/gpt.py --data TEXT --output FOLDER --steps 500 --compile

12 layers of width 768 on 1024 bytes at a time, in bf16 by autocast, AdamW. Every training starts from the same weights
and sees the same batches. Each is a JSON file in ``--output``: the loss of every step, the median time of one, memory.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowbit
from lowbit.bench.networks import Transformer

FLOAT = "float"
WARM_UP = 10  # steps that are not timed: the first ones compile


def read_bytes(path: Path) -> Tensor:
    """The bytes of a text."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def draw_batch(text: Tensor, options: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random stretches of the text, and the byte that follows each byte of them."""
    starts = torch.randint(len(text) - options.length, (options.batch_size, 1), generator=generator)
    pieces = text[starts + torch.arange(options.length + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


def build(name: str, options: argparse.Namespace, tokens: Tensor, device: torch.device) -> nn.Module:
    """The float network, or what a preset makes of it; always from the same weights."""
    torch.manual_seed(options.seed)
    model: nn.Module = Transformer(options.layers, options.width, options.width // 64, options.length).to(device)
    if name != FLOAT:
        model = lowbit.prepare(model, getattr(lowbit.recipes, name)(), (tokens.to(device),))
    model.train()
    if options.compile:
        model.compile()
    return model


def train(name: str, text: Tensor, options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """The losses and the time of a training."""
    generator = torch.Generator().manual_seed(options.seed)
    model = build(name, options, draw_batch(text, options, torch.Generator().manual_seed(0))[0][:1], device)
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, fused=device.type == "cuda")
    losses, seconds = [], []
    for step in range(options.steps):
        inputs, targets = (part.to(device) for part in draw_batch(text, options, generator))
        optimizer.param_groups[0]["lr"] = options.rate * min(1.0, (step + 1) / (0.1 * options.steps))
        _wait(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            print(f"{name}: step {step}, loss {losses[-1]:.4f}, {1000 * seconds[-1]:.1f} ms", flush=True)
    timed = seconds[min(WARM_UP, options.steps - 1) :]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {"name": name, "losses": losses, "step_ms": 1000 * median(timed), "peak_gib": memory}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Train the float network and the quantized ones, one after the other."""
    parser = argparse.ArgumentParser(description="A small GPT in float and quantized.")
    parser.add_argument("--data", type=Path, required=True, help="a text file")
    parser.add_argument("--output", type=Path, required=True, help="where results are written")
    parser.add_argument("--recipes", nargs="+", default=["w8a8_dynamic"], help="presets to train beside float")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(lowbit.recipes.presets()):
        parser.error(f"{', '.join(sorted(unknown))}: no such preset; there are {', '.join(lowbit.recipes.presets())}")
    if not options.data.is_file():
        parser.error(f"{options.data} is no file")
    text = read_bytes(options.data)
    if len(text) <= options.length + 1:
        parser.error(f"{options.data} has {len(text)} bytes, but a batch takes {options.length + 1}")
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = {"lowbit": lowbit.__version__, "torch": torch.__version__}
    results = []
    for name in (FLOAT, *options.recipes):
        result = train(name, text, options, device) | {"versions": versions, "command": " ".join(sys.argv)}
        suffix = "-compiled" if options.compile else ""
        (options.output / f"gpt-{name}{suffix}.json").write_text(json.dumps(result) + "\n")
        results.append(result)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    for result in results:
        last, ratio = mean(result["losses"][-20:]), result["step_ms"] / results[0]["step_ms"]
        print(f"{result['name']}: {result['step_ms']:.1f} ms a step ({ratio:.2f} of float), last losses {last:.4f}")


if __name__ == "__main__":
    main()
