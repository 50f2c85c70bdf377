"""Small models of several kinds as tasks of ``tutti train``, on random data: ``benchmarks/step_models.py:convs``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tutti.tasks.task import Task

CLASSES, SAMPLES = 10, 4096


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def _task(name: str, model: Callable[[], nn.Module], inputs: Callable[[torch.Generator], Tensor]) -> Task:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return Task(name=name, model=model, loss=_loss, train=TensorDataset(inputs(generator), labels))


class _Residual(nn.Module):
    """Normalised linear layers with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class _Mixer(nn.Module):
    """Linear layers over positions, then over features, each with a shortcut."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.over_positions, self.over_features = _Residual(positions), _Residual(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.over_positions(x.transpose(1, 2)).transpose(1, 2)
        return self.over_features(x)  # type: ignore[no-any-return]


class _Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _vectors(generator: torch.Generator, width: int = 64) -> Tensor:
    return torch.randn(SAMPLES, width, generator=generator)


def _pictures(generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 16, 16, generator=generator)


def _sequences(generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 16, 32, generator=generator)


def _words(generator: torch.Generator) -> Tensor:
    return torch.randint(2000, (SAMPLES, 24), generator=generator)


def _residual(width: int, depth: int) -> nn.Module:
    layers = [_Residual(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, CLASSES))


def _conv(channels: int, depth: int, groups: bool) -> nn.Module:
    found: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        split = channels if groups else 1
        found += [
            nn.Conv2d(channels, channels, 3, padding=1, groups=split),
            nn.Conv2d(channels, channels, 1),
            nn.ReLU(),
        ]
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def _mixer(width: int, depth: int) -> nn.Module:
    layers = [_Mixer(16, width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(32, width), *layers, _Mean(), nn.Linear(width, CLASSES))


def _bag(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(2000, width), _Mean(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


residual_small = functools.partial(_task, "residual-small", functools.partial(_residual, 64, 2), _vectors)
residual_deep = functools.partial(_task, "residual-deep", functools.partial(_residual, 128, 8), _vectors)
residual_wide = functools.partial(_task, "residual-wide", functools.partial(_residual, 512, 2), _vectors)
convs_small = functools.partial(_task, "convs-small", functools.partial(_conv, 16, 1, False), _pictures)
convs_deep = functools.partial(_task, "convs-deep", functools.partial(_conv, 16, 5, False), _pictures)
convs_wide = functools.partial(_task, "convs-wide", functools.partial(_conv, 48, 1, False), _pictures)
separable_small = functools.partial(_task, "separable-small", functools.partial(_conv, 16, 2, True), _pictures)
separable_wide = functools.partial(_task, "separable-wide", functools.partial(_conv, 64, 2, True), _pictures)
mixer_small = functools.partial(_task, "mixer-small", functools.partial(_mixer, 32, 2), _sequences)
mixer_wide = functools.partial(_task, "mixer-wide", functools.partial(_mixer, 256, 2), _sequences)
mixer_deep = functools.partial(_task, "mixer-deep", functools.partial(_mixer, 64, 8), _sequences)
bag_small = functools.partial(_task, "bag-small", functools.partial(_bag, 64), _words)
bag_wide = functools.partial(_task, "bag-wide", functools.partial(_bag, 512), _words)
