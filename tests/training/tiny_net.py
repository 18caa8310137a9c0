"""A backbone of a user, small enough for every test: quick to train, and quicker to export."""

from torch import Tensor, nn


class TinyNet(nn.Module):
    """Four convolutions with batch norm, from (B, 3, S, S) to (B, 96, S / 8, S / 8)."""

    channels = 96

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for before, after, side in ((3, 32, 8), (32, 32, 1), (32, 32, 1), (32, self.channels, 1)):
            self.layers.append(nn.Conv2d(before, after, side, stride=side, bias=False))
            self.layers.append(nn.BatchNorm2d(after))
            self.layers.append(nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]
