"""U-Net (Ronneberger, Fischer & Brox 2015, arXiv:1505.04597), padded so that scores are as large as the image.

An ``nn.Sequential`` of three children, which may be cut between them: into the first scale, everything below it with
the way back, and the last layer.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tutti.tasks.config import Unet


def unet(config: Unet) -> nn.Sequential:
    """Grey images (samples, 1, height, width) → scores of the foreground of the same shape.

    Height and width are multiples of 2^depth. He initialisation (He et al. 2015, arXiv:1502.01852), biases zero.
    """
    norm = config.batch_norm
    below: nn.Module = nn.Identity()
    for scale in range(config.depth - 1, -1, -1):
        below = Descent(config.width * 2**scale, below, norm=norm)
    model = nn.Sequential(
        OrderedDict(
            stem=_double(1, config.width, norm=norm),
            scales=below,
            head=nn.Conv2d(config.width, 1, 1),
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            # PyTorch takes twice too many inputs of a transposed one, which makes up for the ReLU that it has not.
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class Descent(nn.Module):
    """Down by half, through what lies below, back up, and together with what came in.

    Args:
        width: channels in and out; there are twice as many below.
        below: keeps its input's shape.
        norm: batch norm after each convolution.
    """

    def __init__(self, width: int, below: nn.Module, *, norm: bool) -> None:
        super().__init__()
        self.down = nn.Sequential(OrderedDict(pool=nn.MaxPool2d(2), convs=_double(width, 2 * width, norm=norm)))
        self.below = below
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2, bias=not norm)
        self.join = _double(2 * width, width, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, width, height, width of the image) → the same."""
        out: Tensor = self.join(torch.cat([x, self.up(self.below(self.down(x)))], dim=1))
        return out


def _double(inputs: int, outputs: int, *, norm: bool) -> nn.Sequential:
    """Two 3×3 convolutions, each with batch norm if ``norm`` and with ReLU."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, channels in enumerate((inputs, outputs), 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, outputs, 3, padding=1, bias=not norm)
        if norm:
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)
