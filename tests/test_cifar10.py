"""The CIFAR-10 example: its reader of PNG sheets, its crops and schedule, and all phases at a tiny size."""

import json
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import cifar10  # noqa: E402
from mobilenet import MobileNet  # noqa: E402
from resnet import resnet20  # noqa: E402
from trainer import FLOAT_BITS, PADDING, PIXEL_MEAN, PIXEL_STD, Settings, Trainer, crop, normalize  # noqa: E402


def predict(kind: int, left: int, up: int, corner: int) -> int:
    """PNG's five filters, as the standard (W3C PNG, section 9) writes them."""
    if kind == 4:
        p = left + up - corner
        return min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
    return [0, left, up, (left + up) // 2][kind]


def write_png(path: Path, pixels: np.ndarray, kinds: list[int], form: tuple[int, ...] = (8, 2, 0, 0, 0)) -> None:
    """An RGB image whose row i has the filter ``kinds[i % len(kinds)]``, its data in two chunks."""
    height, width, _ = pixels.shape
    values, raw = pixels.astype(int).reshape(height, -1), bytearray()
    for y in range(height):
        kind = kinds[y % len(kinds)]
        raw.append(kind)
        for x in range(3 * width):
            left, up = values[y, x - 3] if x >= 3 else 0, values[y - 1, x] if y else 0
            corner = values[y - 1, x - 3] if y and x >= 3 else 0
            raw.append((values[y, x] - predict(kind, left, up, corner)) % 256)
    packed = zlib.compress(bytes(raw))
    half = len(packed) // 2
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, *form)), (b"IDAT", packed[:half])]
    chunks += [(b"IDAT", packed[half:]), (b"IEND", b"")]
    coded = (struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(coded))


def random_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("kinds", [[0], [1], [2], [3], [4], [4, 3, 2, 1, 0]])
def test_a_sheet_of_every_filter_is_read(tmp_path, kinds):
    pixels = random_pixels(11, 7, 3)
    pixels[5] = pixels[4] // 16 * 16  # equal distances, which Paeth's order of choices decides
    write_png(tmp_path / "sheet.png", pixels, kinds)
    np.testing.assert_array_equal(cifar10.read_sheet(tmp_path / "sheet.png"), pixels)


def test_what_is_no_such_sheet_is_refused(tmp_path):
    path = tmp_path / "sheet.png"
    path.write_bytes(b"GIF89a, and more bytes")
    with pytest.raises(ValueError, match="not a PNG file"):
        cifar10.read_sheet(path)
    write_png(path, random_pixels(2, 2, 3), [0], form=(8, 2, 0, 0, 1))
    with pytest.raises(ValueError, match="without interlace"):
        cifar10.read_sheet(path)


def test_the_published_sheets_are_decoded_once(tmp_path):
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    images = random_pixels(12, 32, 32, 3)
    for i, name in enumerate(names):
        write_png(tmp_path / f"{name}.png", images[2 * i : 2 * i + 2].reshape(2, 1024, 3), [2])
    (tmp_path / "train_lables.json").write_text(json.dumps(list(range(10))))
    (tmp_path / "test_lables.json").write_text("[3, 1]")
    for _ in range(2):
        train, test = cifar10.load_cifar10(tmp_path)
        np.testing.assert_array_equal(np.concatenate([train[0], test[0]]), images)
        assert (train[1].tolist(), test[1].tolist()) == (list(range(10)), [3, 1])
        for name in names:  # the second time, they are not needed
            (tmp_path / f"{name}.png").unlink(missing_ok=True)


def test_crops_are_shifted_and_mirrored_images():
    padded = torch.from_numpy(random_pixels(5, 32 + 2 * PADDING, 32 + 2 * PADDING, 3))
    batch, shift = torch.tensor([4, 0, 2]), torch.tensor([[0, 8], [3, 5], [8, 0]])
    crops = crop(padded, batch, shift, torch.tensor([False, True, False]))
    for image, (top, left), mirrored, result in zip(batch, shift.tolist(), (False, True, False), crops, strict=True):
        expected = padded[image, top : top + 32, left : left + 32]
        assert torch.equal(result, expected.flip(1) if mirrored else expected)


def test_pixels_are_normalized_by_channel():
    pixels = torch.from_numpy(random_pixels(2, 32, 32, 3))
    images = normalize(pixels)
    assert images.shape == (2, 3, 32, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for channel in range(3):
        expected = (pixels[..., channel].double() / 255 - PIXEL_MEAN[channel]) / PIXEL_STD[channel]
        torch.testing.assert_close(images[:, channel].double(), expected, rtol=1e-5, atol=1e-5)


def test_the_networks_have_the_published_size():
    images = torch.zeros(2, 3, 32, 32)
    assert sum(p.numel() for p in resnet20().parameters()) == 272_474
    assert resnet20()(images).shape == MobileNet()(images).shape == (2, 10)
    depthwise = [m for m in MobileNet().modules() if isinstance(m, torch.nn.Conv2d) and m.groups == m.in_channels > 1]
    assert len(depthwise) == 11


def make_trainer() -> Trainer:
    padded = torch.from_numpy(random_pixels(24, 32 + 2 * PADDING, 32 + 2 * PADDING, 3))
    settings = Settings(FLOAT_BITS, 0, 0.1, 0, 8, 0, 0.1, "none")
    return Trainer(resnet20(), None, settings, padded, torch.arange(24) % 10)


def test_warming_up_trains_nothing_and_training_does():
    trainer = make_trainer()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.warm_up(capture=False)
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
    assert not any(state["momentum_buffer"].any() for state in trainer.optimizer.state.values())
    trainer.begin_epoch(0.0, 0.5)
    assert trainer.order.unique().numel() == 24
    losses = []
    for _ in range(12):
        for _ in range(trainer.steps):
            trainer.step()
        losses.append(trainer.loss.item())
        trainer.begin_epoch(0.0, 0.5)
    assert losses[-1] < 0.7 * losses[0]


def test_a_step_takes_its_learning_rate_from_the_cosine():
    trainer = make_trainer()
    trainer.begin_epoch(0.5, 1.0)
    rates = []
    for _ in range(3):
        trainer.step()
        rates.append(trainer.rate.item())
    assert rates == pytest.approx([0.05 * (1 + np.cos(np.pi * at)) for at in (1 / 2, 4 / 6, 5 / 6)], rel=1e-4)


class Recorder:
    """Stands in for a Trainer: notes the shares of the schedule, and takes its time."""

    steps = 1
    loss = torch.zeros(())

    def __init__(self, seconds: float) -> None:
        self.seconds, self.shares = seconds, []

    def begin_epoch(self, progress: float, until: float) -> None:
        self.shares.append((progress, until))

    def step(self) -> None:
        time.sleep(self.seconds)

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("seconds", "budget"), [(0.0, float("inf")), (0.1, 0.65)])
def test_the_schedule_comes_to_its_end_in_any_number_of_epochs(seconds, budget):
    recorder = Recorder(seconds)
    figures = cifar10.train_together([recorder], 20, time.time() + budget)
    starts, ends = zip(*recorder.shares, strict=True)
    assert starts == (0.0, *ends[:-1])
    assert ends[-1] == pytest.approx(1.0)
    assert figures["epochs"] == len(ends)
    if budget < float("inf"):
        assert 1 < len(ends) < 20
    else:
        assert len(ends) == 20


def test_a_float_network_must_come_first_and_of_the_same_split(tmp_path, monkeypatch):
    options = ["cifar10.py", "--quick", "--data", str(tmp_path), "--output", str(tmp_path), "--phase", "qat"]
    write_archive(tmp_path)
    monkeypatch.setattr(sys, "argv", options)
    with pytest.raises(SystemExit, match=r"float-seed0\.json is missing: train that network first"):
        cifar10.main()
    (tmp_path / "float-seed0.json").write_text('{"held_out": 32}')
    with pytest.raises(SystemExit, match="was trained with --held-out 32, not 0"):
        cifar10.main()


def test_the_table_has_a_row_for_all_settings(tmp_path, capsys):
    runs = (2, 0, 0.01, 90.0), (2, 1, 0.01, 91.0), (2, 0, 0.03, 89.0), (FLOAT_BITS, 0, 0.1, 92.5)
    for bits, seed, rate, accuracy in runs:
        settings = {"bits": bits, "rate": rate, "scale_rate": 1.0, "scale_start": "lsq", "distill": 0.5}
        record = settings | {"test_accuracy": accuracy, "held_out_accuracy": None, "epochs": 7}
        (tmp_path / f"{bits}-{seed}-{rate}.json").write_text(json.dumps(record))
    cifar10.print_table(tmp_path)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| float | 0.1 | 1 | lsq | 0.5 | 92.50 | 1 | 7 | test | 92.96 |",
        "| 2 | 0.03 | 1 | lsq | 0.5 | 89.00 | 1 | 7 | test | 90.96 |",
        "| 2 | 0.01 | 1 | lsq | 0.5 | 90.50 ± 0.71 | 2 | 7 | test | 90.96 |",
    ]


def write_archive(folder: Path) -> None:
    images, labels = random_pixels(160, 32, 32, 3), np.arange(160, dtype=np.uint8) % 10
    arrays = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(folder / "cifar10.npz", **arrays)


def command(folder: Path, *arguments: str) -> list[str]:
    options = ["--quick", "--seeds", "1", "--bits", "2", "--data", str(folder), "--output", str(folder / "results")]
    return [str(EXAMPLES / "cifar10.py"), *options, *arguments]


def run(folder: Path, *arguments: str) -> str:
    line = [sys.executable, *command(folder, *arguments)]
    environment = os.environ | {"PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(line, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_all_phases_run_and_what_is_done_is_not_done_again(tmp_path, monkeypatch, capsys):
    write_archive(tmp_path)
    ways = "--scale-start", *cifar10.SCALE_STARTS
    scales = [f"scales0.1-{start}" for start in cifar10.SCALE_STARTS]
    phases = ("float", ["float-seed0"]), ("qat", [f"2bit-rate0.02-{how}-distill0.5-seed0" for how in scales])
    for phase, name in [(phase, name) for phase, names in phases for name in names]:
        if not (tmp_path / "results" / f"{name}.json").exists():
            output = run(tmp_path, "--phase", phase, "--held-out", "32", *ways)
            assert output.startswith("0 of")
        record = json.loads((tmp_path / "results" / f"{name}.json").read_text())
        assert (record["epochs"], record["seed"], record["train_images"]) == (1, 0, 96)
        # The test images are not looked at while some training images are held out.
        assert record["test_accuracy"] is None
        assert 0 <= record["held_out_accuracy"] <= 100
        assert torch.load(tmp_path / "results" / f"{name}.pt")["fc.weight"].isfinite().all()
    # Of 22 layers, the first and the last have 8 bits; only weights and images have a sign. Where a block changes the
    # channels, its first convolution and its shortcut share the quantizer of what they take.
    assert "3 x 8 bits signed, 1 x 8 bits unsigned, 20 x 2 bits signed, 18 x 2 bits unsigned" in output
    monkeypatch.setattr(sys, "argv", command(tmp_path, "--phase", "qat", "--held-out", "32", *ways))
    cifar10.main()
    assert capsys.readouterr().out == "2 of 2 runs are done already\n"
