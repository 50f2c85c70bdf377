"""Options of the built-in tasks' models; the fields are the keys of ``--model``. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LineConfig:
    """Options of the model y = w·x + b, which has two parameters; there are none."""


@dataclass(frozen=True, kw_only=True)
class CnnConfig:
    """Options of a small CNN: three 3×3 convolutions and two linear layers.

    Attributes:
        batch_norm: whether batch norm follows each convolution.
        dropout: probability that a feature is dropped before the last layer.

    Raises:
        ValueError: ``dropout`` is not at least 0 and below 1.
    """

    batch_norm: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_probability("dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Options of an MLP with two linear layers.

    Attributes:
        hidden: number of hidden features between the two layers.
        dropout: probability that a hidden feature is dropped.

    Raises:
        ValueError: ``hidden`` is below 1, or ``dropout`` not at least 0 and below 1.
    """

    hidden: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("hidden", self.hidden)
        _check_probability("dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class CourseConfig:
    """Options of the small residual network of a distributed-training course, with two bottleneck blocks.

    Attributes:
        batch_norm: whether batch norm follows each convolution.
    """

    batch_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class Resnet18Config:
    """Options of ResNet-18 for 32×32 images, with a 3×3 stem, no max-pool and batch norm; there are none."""


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """Options of a decoder-only transformer over characters.

    Attributes:
        layers: number of blocks of attention and feed-forward.
        heads: number of attention heads in each block.
        width: number of features of a character; a multiple of ``heads``.
        block: context length, in characters.
        dropout: probability that a feature, or the attention to one position, is dropped.

    Raises:
        ValueError: a number of layers, heads, features or characters is below 1, ``width`` is no multiple of ``heads``,
            or ``dropout`` is not at least 0 and below 1.
    """

    layers: int = 4
    heads: int = 4
    width: int = 128
    block: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "block"):
            _check_positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(f"width is {self.width} and should be a multiple of heads, which is {self.heads}")
        _check_probability("dropout", self.dropout)


@dataclass(frozen=True, kw_only=True)
class UnetConfig:
    """Options of a U-Net of 3×3 convolutions.

    Attributes:
        depth: number of downsampling scales; an image's height and width are multiples of 2^depth.
        width: number of channels at full resolution; doubles at each scale.
        batch_norm: whether batch norm follows each convolution.

    Raises:
        ValueError: ``depth`` or ``width`` is below 1.
    """

    depth: int = 4
    width: int = 16
    batch_norm: bool = False

    def __post_init__(self) -> None:
        _check_positive("depth", self.depth)
        _check_positive("width", self.width)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value} and should be at least 1")


def _check_probability(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value} and should be at least 0 and below 1")
