"""The table that every strategy and optimizer joins. One line here puts a member through every contract."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import tutti
from tutti import strategies
from tutti.errors import UsageError

STEPS = 5
DEVICES = (1, 2, 3, 4)

STRATEGIES = {
    # name: (specification, reference on one device, whether it is bit-identical in reproducible mode)
    "mirrored": ("mirrored", "single", True),
    "mirrored, native": ("mirrored:algorithm=native", "single", True),
    "mirrored, small buckets": ("mirrored:algorithm=native,bucket_mb=0.001", "single", True),
    "model_parallel": ("model_parallel", "single", True),
    "model_parallel × 2": ("model_parallel:stages=2", "single", True),
    "local_sgd": ("local_sgd:period=2", "local_sgd:period=2", True),
    "tensor": ("tensor:least=1", "single", False),
    "tensor × 2": ("tensor:tensor=2,least=1", "single", False),
    "sharded": ("sharded:units=Linear+Conv2d", "single", False),
    "sharded, stage 2": ("sharded:stage=2,units=Linear", "single", False),
    "sharded, stage 1": ("sharded:stage=1", "single", False),
    "sharded × 2": ("sharded:shards=2,units=9+Conv2d", "single", False),
    "hybrid": ("hybrid:stages=2,tensor=2,least=1", "single", False),
    "hybrid, shards": ("hybrid:shards=2,tensor=2,least=1", "single", False),
    "hybrid, shards of stages": ("hybrid:shards=2,stages=2", "single", False),
    "hybrid, sequence": ("hybrid:tensor=2,least=1,sequence=true", "single", False),
    "hybrid zero_bubble": ("hybrid:stages=2,tensor=2,least=1,schedule=zero_bubble", "single", False),
    "pipeline gpipe": ("pipeline:schedule=gpipe", "single", True),
    "pipeline 1f1b": ("pipeline:schedule=1f1b", "single", True),
    "pipeline interleaved": ("pipeline:schedule=interleaved", "single", True),
    "pipeline zero_bubble": ("pipeline:schedule=zero_bubble", "single", True),
    "pipeline 1f1b × 2": ("pipeline:stages=2,schedule=1f1b", "single", True),
    "pipeline interleaved × 2": ("pipeline:stages=2,schedule=interleaved,virtual=3", "single", True),
    "parameter_server": ("parameter_server", "single", True),
    "parameter_server × 2": ("parameter_server:servers=2,transport=tcp", "single", True),
    "central_storage": ("central_storage", "single", True),
    "local_sgd, post": ("local_sgd:period=2,post=2", "local_sgd:period=2,post=2", True),
    "diloco": ("diloco:period=2", "diloco:period=2", True),
}
OPTIMIZERS = {
    "sgd": "sgd:lr=0.1",
    "sgd momentum": "sgd:lr=0.05,momentum=0.9,nesterov=true,weight_decay=0.01",
    "adam": "adam:lr=0.01",
    "adamw": "adamw:lr=0.01,weight_decay=0.1",
    "lars": "lars:lr=2,trust=0.01,weight_decay=0.01",
    "larc": "larc:lr=0.05,weight_decay=0.01,nesterov=true,adapt_1d=true",
    "lamb": "lamb:lr=0.01,max_grad_norm=0.5",
    "novograd": "novograd:lr=0.01,weight_decay=0.01,decay_1d=true",
    "muon": "muon:lr=0.02,adam_lr=0.01,weight_decay=0.1,adam=9.*",
}
# micro-batch, clipping, channels-last, batch norm
VARIANTS = ((None, None, False, "worker"), (2, 0.5, True, "worker"), (None, None, True, "ghost:size=2"))


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    strategy: str
    optimizer: str
    workers: int
    devices: int
    micro_batch: int | None = None
    clip: float | None = None
    channels_last: bool = False
    batch_norm: str = "worker"

    def __str__(self) -> str:
        last = " channels-last" * self.channels_last
        extra = "".join([f" micro={self.micro_batch}" * bool(self.micro_batch), f" clip={self.clip}" * bool(self.clip)])
        norm = f" {self.batch_norm}" * (self.batch_norm != "worker")
        return f"{self.strategy} {self.optimizer} N={self.workers} P={self.devices}{extra}{last}{norm}".replace(
            " ", "-"
        )

    def possible(self) -> bool:
        try:
            strategies.check(STRATEGIES[self.strategy][0], self.devices, workers=self.workers)
        except UsageError:
            return False
        return True


def whole() -> list[Case]:
    """Strategy × optimizer × workers × devices, with micro-batches and clipping on and off."""
    cases = [
        Case(s, o, n, p, *rest) for s, o, n, p, rest in product(STRATEGIES, OPTIMIZERS, (1, 3, 4, 8), DEVICES, VARIANTS)
    ]
    return [case for case in cases if case.possible()]


def pairwise() -> list[Case]:
    """Few cases that together hold every pair of values of any two columns."""
    rows = whole()
    names = ("strategy", "optimizer", "workers", "devices", "micro_batch", "batch_norm")
    pairs = {(a, getattr(r, a), b, getattr(r, b)) for r in rows for a in names for b in names if a < b}
    chosen = []
    while pairs:
        best = max(rows, key=lambda r: len(pairs & _pairs(r, names)))
        chosen.append(best)
        pairs -= _pairs(best, names)
    return chosen


def _pairs(row: Case, names: tuple[str, ...]) -> set[tuple[Any, ...]]:
    return {(a, getattr(row, a), b, getattr(row, b)) for a in names for b in names if a < b}


class Noisy(nn.Module):
    """Draws by a function, not by a module of PyTorch's."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(inputs, 0.1, self.training).tanh()


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


def samples(count: int = 70) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return images, torch.randint(0, 4, (count,), generator=generator)


def loss(model: Any, batch: Any) -> Any:
    images, labels = batch
    logits = model(images)
    correct = (logits.argmax(1) == labels).sum()
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": correct}


def train(
    strategy: str,
    optimizer: str,
    workers: int,
    *,
    steps: int = STEPS,
    batch_size: int = 25,
    precision: str = "fp64",
    **options: Any,
) -> tuple[dict[str, NDArray[Any]], list[float], str]:
    """Train for a few steps on this world: state as one plain model's, losses, hash. Batches of 25, 25, 20 samples.

    The average of the weights is in the state too, and evaluated beside them.
    """
    run = tutti.prepare(
        model(),
        optimizer,
        samples(),
        loss,
        strategy=strategy,
        workers=workers,
        batch_size=batch_size,
        ema="0.8:warmup",
        precision=precision,
        **options,
    )
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        losses += [run.step(batch) for batch in run.epoch(epoch)]
        epoch += 1
    for averaged in (True, False):
        evaluation = run.evaluate(run.feed.source, batch=7, averaged=averaged)
        losses += [evaluation.loss, evaluation.metrics["accuracy"]]
    state = {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    state |= {f"average of {name}": tensor.numpy().copy() for name, tensor in run.state(averaged=True).items()}
    return state, losses, run.weights_sha256() + run.weights_sha256(averaged=True)


def largest_difference(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> float:
    """max|Δ| relative to max(1, max|p|), over all tensors. Fails where names differ."""
    if a.keys() != b.keys():
        raise AssertionError(f"different names: {sorted(a.keys() ^ b.keys())}")
    scale = max(1.0, *(float(np.abs(v).max()) for v in b.values()))
    return max(float(np.abs(a[n].astype(float) - b[n].astype(float)).max()) for n in a) / scale
