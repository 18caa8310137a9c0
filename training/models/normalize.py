"""From pixels to what a trunk was trained on."""

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """uint8 RGB (B, 3, S, S) to the float32 input of a trunk: (peak · pixels / 255 − mean) / std.

    Args:
        mean: of each channel on 0..peak, in the order of the trunk.
        std: likewise.
        bgr: the trunk reads blue first.
        peak: what a white pixel is worth before mean and std, 1 or 255.
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        bgr: bool = False,
        peak: float = 1.0,
    ) -> None:
        super().__init__()
        self.bgr = bgr
        scale = peak / (255.0 * torch.tensor(std))
        shift = -torch.tensor(mean) / torch.tensor(std)
        self.register_buffer("scale", scale.view(3, 1, 1), persistent=False)
        self.register_buffer("shift", shift.view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) to the same shape."""
        if self.bgr:
            images = images.flip(1)
        scale, shift = self.get_buffer("scale"), self.get_buffer("shift")
        return images.float() * scale + shift
