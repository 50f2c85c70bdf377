"""The workloads of the benchmarks: plain PyTorch models, batches in memory, one loss, a fused optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """One model to train and how long to measure it.

    Attributes:
        build: makes the model; draws its initial weights from torch's global generator.
        batch: makes one batch of this many samples: inputs and class indices.
        optimizer: makes the optimizer of these parameters.
        samples: samples in a batch, on each rank.
        launches: pairs of processes to measure in, one after the other.
        rounds: rounds of a launch; in each, every contestant has one block.
        steps: timed steps in a block.
        lead: untimed steps before them, so that a short step does not pay for the caches that others emptied.
        processes: ranks that train together.
        device: type of the device that each of them has.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    samples: int
    launches: int
    rounds: int
    steps: int
    lead: int
    processes: int = 2
    device: str = "cpu"


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a projected shortcut, without normalization (He et al. 2015, 1512.03385)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(inputs, width, 1)
        self.middle = nn.Conv2d(width, width, 3, stride, padding=1)
        self.expand = nn.Conv2d(width, outputs, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.middle(functional.relu(self.reduce(x))))
        return functional.relu(self.expand(y) + self.shortcut(x))


class Patches(nn.Module):
    """Embeddings of an image's 4 x 4 patches: [samples, 3, 32, 32] to [samples, 64, width] (2010.11929)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, width))

    def forward(self, images: Tensor) -> Tensor:
        # Contiguous, as PyTorch's own pipelines send it.
        embedded: Tensor = self.embed(images).flatten(2).transpose(1, 2).contiguous() + self.positions
        return embedded


class Block(nn.Module):
    """A pre-norm transformer block: attention, causal or not, then a feed-forward network four times as wide.

    Its attention has no bias: the gradient of a key bias is zero but for rounding, which AdamW would amplify.
    """

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.mix(seen.transpose(1, 2).reshape(samples, length, width))
        x = x + self.feed(self.norm2(x))
        return x


class Gpt(nn.Module):
    """Token and position embeddings, a stack of blocks, logits: [samples, length] to [samples, length, vocabulary]."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))
        return logits


class Vit(nn.Module):
    """Embedded patches, a stack of blocks, a head on their mean: [samples, 3, 32, 32] to [samples, 10]."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.blocks(self.patches(images))).mean(1))
        return scores


def course_cnn() -> nn.Module:
    """The small residual network of a first course: [samples, 3, 32, 32] to [samples, 10], Xavier initialization."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        Bottleneck(64, 64, 256, 1),
        Bottleneck(256, 128, 512, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model


def tiny_mlp() -> nn.Module:
    """Three linear layers whose arithmetic takes a tenth of a millisecond: what is left is the cost of a step."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Residual(nn.Module):
    """x + ReLU(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * functional.relu(self.linear(x))


def many_tensors() -> nn.Module:
    """161 parameter tensors, as many as ResNet-50 has, of hardly any arithmetic: the cost of a tensor shows."""
    return nn.Sequential(*(Residual(32) for _ in range(80)), nn.Linear(32, 10, bias=False))


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over every label of the batch."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def labelled(shape: tuple[int, ...]) -> Callable[[int, torch.Generator], Batch]:
    """Returns a function that makes a batch of this many random samples of a shape, with one of ten labels each."""

    def make(samples: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(10, (samples,), generator=generator)
        return torch.randn(samples, *shape, generator=generator), labels

    return make


def text(samples: int, generator: torch.Generator) -> Batch:
    """Returns [samples, 128] random tokens, and for each the token that follows it."""
    tokens = torch.randint(1024, (samples, 129), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns a fused SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns a fused AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def small_gpt() -> nn.Module:
    """3.7 M parameters: [samples, 128] tokens to [samples, 128, 1024] logits."""
    return Gpt(vocabulary=1024, length=128, width=256, heads=4, depth=4)


def small_vit() -> nn.Module:
    """3.2 M parameters: [samples, 3, 32, 32] images to [samples, 10] logits."""
    return Vit(width=256, heads=4, depth=4)


_TABLE = [
    Workload("mlp", tiny_mlp, labelled((32,)), sgd, samples=32, launches=5, rounds=200, steps=5, lead=1),
    Workload("gpt", small_gpt, text, adamw, samples=8, launches=4, rounds=20, steps=1, lead=0),
    Workload("vit", small_vit, labelled((3, 32, 32)), adamw, samples=16, launches=4, rounds=20, steps=1, lead=0),
    Workload("deep", many_tensors, labelled((32,)), sgd, samples=32, launches=4, rounds=60, steps=2, lead=1),
    Workload("cnn", course_cnn, labelled((3, 32, 32)), sgd, samples=64, launches=4, rounds=30, steps=1, lead=0),
]
WORKLOADS = {work.name: work for work in _TABLE}
