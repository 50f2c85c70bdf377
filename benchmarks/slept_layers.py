"""A task whose layers sleep in place of computing, so that two cores carry many ranks, with gradients of stated bytes.

    tutti train benchmarks/slept_layers.py:task --data layers=8,ms=5,kb=512,width=64

Each of ``layers`` layers sleeps ``ms`` milliseconds a sample in forward and twice as long in backward: one half before
it hands the gradient of its input on, the other half before its weight's gradient is complete. Its weight has ``kb``
KiB, and its output ``width`` numbers a sample. On fake tensors nothing sleeps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from tutti.tasks.task import Task
from tutti.torch_compat import is_fake

SAMPLES = 4096


@dataclass(frozen=True)
class Slept:
    """Sizes of the model.

    Attributes:
        layers: number of layers.
        ms: milliseconds of a layer's forward, a sample; its backward takes twice as many.
        kb: KiB of a layer's weight.
        width: numbers of a layer's output, a sample.
    """

    layers: int = 8
    ms: float = 5.0
    kb: int = 512
    width: int = 64

    def __str__(self) -> str:
        return f"layers={self.layers},ms={self.ms:g},kb={self.kb},width={self.width}"

    def seconds(self, passed: str, samples: float) -> float:
        """Return the seconds that a layer sleeps in a forward or backward of so many samples.

        >>> Slept(ms=5.0).seconds("forward", 4), Slept(ms=5.0).seconds("backward", 4)
        (0.02, 0.04)
        """
        return samples * self.ms / 1000 * (2 if passed == "backward" else 1)


def parse_slept(text: str | None) -> Slept:
    """Return the sizes that ``--data`` states, such as ``layers=8,ms=5``; the others keep their defaults.

    >>> parse_slept("layers=2,ms=1.5")
    Slept(layers=2, ms=1.5, kb=512, width=64)
    >>> parse_slept(str(Slept(kb=64))) == Slept(kb=64)
    True
    """
    given: dict[str, Any] = dict(part.split("=", 1) for part in (text or "").split(",") if part)
    kinds = {"layers": int, "ms": float, "kb": int, "width": int}
    return Slept(**{name: kinds[name](value) for name, value in given.items()})


class _Pause(Function):
    """Sleeps in forward and backward; the values pass through."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, before: float, after: float) -> Tensor:
        ctx.after = after
        _sleep(values, before)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        _sleep(gradient, ctx.after)
        return gradient, None, None


class _Weigh(Function):
    """The first number of a weight; backward sleeps, and fills the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, after: float) -> Tensor:
        ctx.after, ctx.size = after, weight.shape
        return weight[:1].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _sleep(gradient, ctx.after)
        return gradient.new_full(ctx.size, 1e-3), None


def _sleep(values: Tensor, seconds: float) -> None:
    if not is_fake(values):
        time.sleep(seconds)


class SleptLayer(nn.Module):
    """One weight; its work is slept."""

    def __init__(self, slept: Slept) -> None:
        super().__init__()
        self.slept = slept
        self.weight = nn.Parameter(torch.zeros(slept.kb * 256))

    def forward(self, values: Tensor) -> Tensor:
        """Sleep as long as the samples take."""
        half = self.slept.seconds("backward", len(values)) / 2
        # The autograd engine runs the newest function first: the input's half before the weight's.
        scale = _Weigh.apply(self.weight, half)
        found: Tensor = _Pause.apply(values, self.slept.seconds("forward", len(values)), half) + scale
        return found


class Block(nn.Module):
    """A layer as FSDP wraps it and a pipeline is cut between."""

    def __init__(self, slept: Slept) -> None:
        super().__init__()
        self.layer = SleptLayer(slept)

    def forward(self, values: Tensor) -> Tensor:
        """The layer's."""
        found: Tensor = self.layer(values)
        return found


class Bias(nn.Module):
    """A layer that costs nothing, and whose output needs a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor) -> Tensor:
        """Added to every sample."""
        return values + self.bias


class SleptModel(nn.Module):
    """Layers in a row, and a bias before them, so that the first also hands a gradient on."""

    def __init__(self, slept: Slept) -> None:
        super().__init__()
        self.first = Bias(slept.width)
        self.blocks = nn.Sequential(*(Block(slept) for _ in range(slept.layers)))

    def forward(self, values: Tensor) -> Tensor:
        """Through all layers."""
        found: Tensor = self.blocks(self.first(values))
        return found


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean that costs nothing."""
    found: Tensor = model(batch).square().mean()
    return found


def task(data: str | None = None, augment: bool = False) -> Task:
    """The task of ``tutti train``; ``data`` states the sizes."""
    slept = parse_slept(data)
    train = torch.zeros(SAMPLES, slept.width)
    return Task(name="slept", model=lambda: SleptModel(slept), loss=loss, train=train, describe=str(slept))
