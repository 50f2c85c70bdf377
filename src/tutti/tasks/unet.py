"""U-Net (Ronneberger, Fischer & Brox 2015, arXiv:1505.04597), padded so that logits are as large as the image.

The model is an ``nn.Sequential`` of three children, between which it can be partitioned into stages: the first scale,
all lower scales with their upsampling path, and the last layer.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tutti.config.task_config import UnetConfig


def unet(config: UnetConfig) -> nn.Sequential:
    """Build a U-Net: grey images (samples, 1, height, width) → logits of the foreground of the same shape.

    Height and width are multiples of 2^depth. He initialisation (He et al. 2015, arXiv:1502.01852), biases zero.

    Args:
        config: ``depth`` (scales), ``width`` (channels of the first scale), and whether batch norm is used.
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
            # PyTorch's fan_in of a transposed convolution is twice too large, which cancels ReLU's gain of 2: no ReLU
            # follows it.
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


class Descent(nn.Module):
    """One scale of a U-Net, with all scales below it: downsamples by 2, applies the lower scales, and upsamples.

    The result is concatenated with the input (skip connection); two convolutions give the input's channels.

    Args:
        width: channels in and out; the lower scales have twice as many.
        below: the lower scales; keeps its input's shape.
        norm: whether batch norm follows each convolution.
    """

    def __init__(self, width: int, below: nn.Module, *, norm: bool) -> None:
        super().__init__()
        self.down = nn.Sequential(OrderedDict(pool=nn.MaxPool2d(2), convs=_double(width, 2 * width, norm=norm)))
        self.below = below
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2, bias=not norm)
        self.join = _double(2 * width, width, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Apply one level of the U-Net and all levels below it, and join the result with the input (skip connection).

        The upsampled result is concatenated with ``x`` along the channels; two convolutions give ``x``'s channels.

        Args:
            x: activations (samples, channels, height, width), height and width even.

        Returns:
            Activations of the same shape.
        """
        out: Tensor = self.join(torch.cat([x, self.up(self.below(self.down(x)))], dim=1))
        return out


def _double(inputs: int, outputs: int, *, norm: bool) -> nn.Sequential:
    """Build two 3×3 convolutions, each followed by batch norm (if ``norm``) and ReLU."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, channels in enumerate((inputs, outputs), 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, outputs, 3, padding=1, bias=not norm)
        if norm:
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{number}"] = nn.ReLU()
    return nn.Sequential(layers)
