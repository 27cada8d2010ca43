"""Networks that the command line knows by name."""

from __future__ import annotations

from torch import nn


def convnet(channels: int, classes: int, size: int, width: int = 16) -> nn.Module:
    """Three convolutions with batch norm, a mean over what is left, and one linear layer

    ``size`` is that of the images: of 8 or more, the second and third convolution halve it.
    """
    stride = 2 if size >= 8 else 1
    layers: list[nn.Module] = []
    for before, after, step in ((channels, width, 1), (width, 2 * width, stride), (2 * width, 2 * width, stride)):
        layers += [nn.Conv2d(before, after, 3, step, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes))


NETWORKS = {"convnet": convnet}
