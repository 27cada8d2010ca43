"""A small MobileNetV2 (Sandler et al. 2018) for images of 32 x 32 pixels, in plain torch."""

from torch import Tensor, nn

# Expansion, channels, blocks, stride of the first block.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 3, 2), (6, 96, 2, 1))


class InvertedResidual(nn.Module):
    """y = project(depthwise(expand(x))), plus x where the shapes agree; no ReLU after the projection"""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = _conv(in_channels, hidden, 1) if expansion > 1 else nn.Identity()
        self.depthwise = _conv(hidden, hidden, 3, stride, groups=hidden)
        self.project = nn.Sequential(nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.residual = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """A convolution, five stages of inverted residuals, a 1 x 1 convolution, channel means, a linear layer."""

    def __init__(self, classes: int = 10, width: int = 320) -> None:
        super().__init__()
        self.stem = _conv(3, 16, 3)
        blocks, channels = [], 16
        for expansion, wanted, count, stride in STAGES:
            for block in range(count):
                blocks.append(InvertedResidual(channels, wanted, stride if block == 0 else 1, expansion))
                channels = wanted
        self.blocks = nn.Sequential(*blocks)
        self.head = _conv(channels, width, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.pool(self.head(self.blocks(self.stem(x))))))


def _conv(in_channels: int, channels: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, channels, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU6())
