"""ResNet-20, 32, 44, 56 for images of 32 x 32 pixels (He et al. 2016, section 4.2), in plain torch."""

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """y = relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))"""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut.append(nn.Conv2d(in_channels, channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu2(y + self.shortcut(x))


class ResNet(nn.Module):
    """6 * blocks + 2 layers: three stages of ``blocks`` blocks with 16, 32 and 64 channels.

    Where the channels change, the shortcut is a 1 x 1 convolution with batch norm (He's option B), as in the published
    code of APoT, whose results are the ones to compare with; option A would have 2,752 parameters fewer, of 272,474.
    """

    def __init__(self, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.flatten(self.pool(x)))


def resnet20(classes: int = 10) -> ResNet:
    """Three blocks a stage."""
    return ResNet(3, classes)


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    later = (BasicBlock(channels, channels, 1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(in_channels, channels, stride), *later)
