"""The models that every strategy and optimizer trains in the table: small, in float64, and of every kind of cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.config.task_config import CnnConfig, GptConfig, UnetConfig
from tutti.tasks.gpt import gpt
from tutti.tasks.losses import classification
from tutti.tasks.models import cnn
from tutti.tasks.unet import unet

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """One column of the table.

    Attributes:
        build: the model, the same each time.
        samples: so many inputs and targets.
        loss: as ``tutti.prepare`` takes it.
        names: modules and parameters that strategies and optimizers are told, by what they are there for.
    """

    build: Callable[[], nn.Module]
    samples: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Any]
    names: Mapping[str, str] = field(default_factory=dict)


class Noisy(nn.Module):
    """Draws by a function, not by a module of PyTorch's."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.dropout(inputs, 0.1, self.training).tanh()


def model() -> nn.Sequential:
    """Convolution, batch norm, dropout, a frozen layer; no parameter whose gradient is structurally zero."""
    torch.manual_seed(0)
    frozen = nn.Linear(12, 12)
    frozen.requires_grad_(False)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        Noisy(),
        nn.Flatten(),
        nn.Linear(12, 12),
        Noisy(),
        frozen,
        nn.Dropout(0.25),
        nn.Tanh(),
        nn.Linear(12, 4),
    ).double()


def samples(count: int = 70) -> Batch:
    """Images and classes of ``model``."""
    return _images(count, 4, 4)


def loss(model: Any, batch: Any) -> Any:
    """Cross-entropy: sum, count and a metric."""
    images, labels = batch
    logits = model(images)
    correct = (logits.argmax(1) == labels).sum()
    return functional.cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": correct}


def digits() -> nn.Module:
    """The digits' CNN, with batch norm and dropout."""
    torch.manual_seed(0)
    return cnn(CnnConfig(batch_norm=True, dropout=0.2), 10).double()


def tied() -> nn.Module:
    """A GPT whose last layer is its embedding, with dropout."""
    torch.manual_seed(0)
    model = gpt(GptConfig(layers=4, heads=4, width=16, block=6, dropout=0.1), 11).double()
    model.head.weight = model.embed.character.weight
    return model


def text(count: int) -> Batch:
    """Windows of characters, and the characters that follow."""
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(0, 11, (count, 7), generator=generator)
    return windows[:, :-1], windows[:, 1:]


def of_text(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Sum over characters, and how many there are."""
    inputs, targets = batch
    scores = model(inputs)
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def skipping() -> nn.Module:
    """A U-Net with batch norm, which is cut across its skip connections."""
    torch.manual_seed(0)
    return unet(
        UnetConfig(depth=2, width=2, batch_norm=True),
    ).double()


def masks(count: int) -> Batch:
    """Images and their foregrounds."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    return images, (images + images.roll(1, -1) > 0).double()


def of_masks(model: Any, batch: Batch) -> Tensor:
    """The mean over samples, as one number."""
    images, targets = batch
    return functional.binary_cross_entropy_with_logits(model(images), targets)


def _images(count: int, size: int, classes: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, size, size, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, classes, (count,), generator=generator)


MODELS = {
    "odd": Model(model, samples, loss, {"units": "Linear+Conv2d", "some": "Linear", "few": "9+Conv2d", "last": "9.*"}),
    "digits": Model(
        *(digits, lambda count: _images(count, 8, 10), classification),
        {"units": "Linear+Conv2d", "some": "Linear", "few": "fc2+Conv2d", "last": "fc2.*"},
    ),
    "gpt": Model(
        *(tied, text, of_text),
        {"units": "Block", "some": "Linear", "few": "Block+LayerNorm", "last": "embed.*"},
    ),
    "unet": Model(
        *(skipping, masks, of_masks),
        {"units": "Conv2d", "some": "Conv2d", "few": "Descent+head", "last": "head.*"},
    ),
}
