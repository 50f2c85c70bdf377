"""The same training written four ways: a plain loop, hand-written DDP, ``run.step`` and a gated custom loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

import tutti
from tutti.comm.partition import even_share
from tutti.data.adapt import adapt
from tutti.data.order import permutation

EPOCHS, BATCH, SAMPLES = 2, 13, 32
"""Batches of 13, 13 and 6 samples, which neither 2 nor 3 ranks share evenly."""

Result = tuple[dict[str, NDArray[Any]], list[float], list[float]]
"""Weights, losses over the global batches, and the last learning rate of each group."""


class Pair(NamedTuple):
    """A batch with names."""

    inputs: Tensor
    targets: Tensor


class Scale(NamedTuple):
    """A loss scale that falls and rises within a few steps; far from where rounding decides what overflows."""

    init: float = 2.0**30
    backoff: float = 2.0**-20
    interval: int = 2

    def text(self) -> str:
        return f"dynamic:init={self.init},max={self.init},backoff_factor={self.backoff},growth_interval={self.interval}"


class Words(nn.Module):
    """Embedding and output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.mix(self.embed(words)).tanh())
        return scores


class Unused(nn.Module):
    """A layer that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(inputs).tanh())
        return scores


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def frozen() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)  # type: ignore[index]
    return model


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(16, 3))


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


def pictures() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 2, 5, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


class Named:
    """A map-style dataset of named tuples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Pair:
        inputs, targets = vectors()
        return Pair(inputs[index], targets[index])


class Sentences:
    """A map-style dataset of dicts: words, and how many of them count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(index))
        return {"words": words, "length": torch.tensor(index % 6 + 2)}


def entropy(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="sum"), torch.tensor(len(targets))


def named_entropy(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return entropy(model, (batch.inputs, batch.targets))


def next_words(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Sum over the words that count: samples do not weigh the same."""
    words, counts = batch["words"], torch.arange(7) < batch["length"][:, None] - 1
    each = nn.functional.cross_entropy(model(words[:, :-1]).transpose(1, 2), words[:, 1:], reduction="none")
    return (each * counts).sum(), counts.sum()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)


def groups(kind: Any, **options: Any) -> Callable[[nn.Module], Optimizer]:
    """Matrices decay, vectors do not and learn slower."""

    def make(model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        optimizer: Optimizer = kind(
            [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.005}], **options
        )
        return optimizer

    return make


def steps(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=2, gamma=0.3)


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """Cycles the momentum, too."""
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=EPOCHS * 3)


@dataclass(frozen=True)
class Case:
    """What to train. ``mean`` says whether tutti is given a mean over samples or ``(sum, count)``."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    data: Callable[[], Any] = vectors
    loss: Callable[[Any, Any], tuple[Tensor, Tensor]] = entropy
    mean: bool = False
    micro: int | None = None
    clip: float | None = None
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    before: bool = False
    precision: str | None = "fp64"
    loss_scale: Scale | None = None
    channels_last: bool = False
    tolerance: float = 1e-10


CASES = {
    "sgd": Case(),
    "mean": Case(mean=True),
    "sgd, groups": Case(optimizer=groups(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), clip=0.3),
    "adam, frozen": Case(frozen, adam),
    "adam, frozen in a group": Case(frozen, groups(torch.optim.Adam, lr=0.01), micro=2),
    "adamw, groups": Case(optimizer=groups(torch.optim.AdamW, lr=0.01), micro=2, clip=0.3),
    "unused": Case(Unused, groups(torch.optim.AdamW, lr=0.01)),
    "unused, momentum": Case(Unused, groups(torch.optim.SGD, lr=0.1, momentum=0.9), micro=3),
    "tied, dict, counts": Case(Words, adam, Sentences, next_words),
    "tied, dict, counts, micro, clip": Case(Words, adam, Sentences, next_words, micro=2, clip=0.1),
    "named tuple": Case(data=Named, loss=named_entropy),
    "fused": Case(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)),
    "channels_last": Case(images, adam, pictures, channels_last=True),
    "dtype as it is": Case(images, sgd, pictures, precision=None, tolerance=1e-6),
    "bf16": Case(images, sgd, pictures, precision="bf16", tolerance=2e-3),
    "fp16": Case(images, sgd, pictures, precision="fp16", tolerance=5e-4, loss_scale=Scale()),
    "fp16, clip, groups": Case(
        images,
        groups(torch.optim.SGD, lr=0.1, momentum=0.9),
        pictures,
        precision="fp16",
        tolerance=5e-4,
        loss_scale=Scale(),
        clip=0.3,
        micro=2,
    ),
    "StepLR before": Case(scheduler=steps, before=True),
    "StepLR after": Case(scheduler=steps),
    "OneCycle before": Case(
        optimizer=groups(torch.optim.SGD, lr=0.1, momentum=0.9), scheduler=one_cycle, before=True, clip=0.3
    ),
    "OneCycle after": Case(optimizer=groups(torch.optim.SGD, lr=0.1, momentum=0.9), scheduler=one_cycle),
}


def new_model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.model()
    return model.double() if case.precision == "fp64" else model


def batches(case: Case) -> Iterator[Any]:
    """Global batches as tutti orders them."""
    source = adapt(case.data())
    for epoch in range(EPOCHS):
        order = permutation(0, epoch, SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            yield source.fetch(order[start : start + BATCH], None)


def rows(batch: Any, part: range | slice) -> Any:
    cut = slice(part.start, part.stop)
    if isinstance(batch, dict):
        return {key: value[cut] for key, value in batch.items()}
    pieces = [value[cut] for value in batch]
    return Pair(*pieces) if isinstance(batch, Pair) else tuple(pieces)


def ready(case: Case, batch: Any) -> Any:
    """What tutti does to a batch on its way: dtype and memory layout."""
    if isinstance(batch, dict):
        return batch
    inputs = batch[0].to(torch.float64 if case.precision == "fp64" else torch.float32)
    inputs = inputs.contiguous(memory_format=torch.channels_last) if case.channels_last else inputs
    return Pair(inputs, batch[1]) if isinstance(batch, Pair) else (inputs, batch[1])


def casting(case: Case) -> Any:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision or "")
    return torch.autocast("cpu", dtype) if dtype else nullcontext()


def by_hand(case: Case, ddp: bool) -> Result:
    """Plain PyTorch: one process, or DDP, whose mean over ranks is turned into the mean over the global batch."""
    model = new_model(case)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=case.model is Unused) if ddp else model
    init, backoff, interval = case.loss_scale or Scale()
    scaler = torch.amp.GradScaler(
        "cpu", init, backoff_factor=backoff, growth_interval=interval, enabled=case.loss_scale is not None
    )
    losses = []
    for batch in batches(case):
        batch = ready(case, batch)
        samples = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
        optimizer.zero_grad()
        with casting(case):
            total, count = case.loss(wrapped, rows(batch, even_share(samples, ranks, rank)))
        both = torch.stack([total.detach().double(), count.double()])
        if ddp:
            dist.all_reduce(both)
        scaler.scale(total * ranks / both[1].to(total.dtype)).backward()
        if case.clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        scaler.step(optimizer)
        scaler.update()
        if scheduler:
            scheduler.step()
        losses.append(float(both[0] / both[1]))
    return numbers(model), losses, rates(optimizer)


def prepared(case: Case, workers: int, custom_loop: bool) -> tuple[nn.Module, Optimizer, LRScheduler | None, tutti.Run]:
    model = new_model(case)
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer) if case.scheduler and case.before else None
    run = tutti.prepare(
        model,
        optimizer,
        case.data(),
        None if custom_loop else lambda model, batch: given(case, *case.loss(model, batch)),
        workers=workers,
        batch_size=BATCH,
        micro_batch=case.micro,
        precision=None if custom_loop and case.precision in ("bf16", "fp16") else case.precision,
        loss_scale=case.loss_scale.text() if case.loss_scale else None,
        channels_last=case.channels_last,
        clip=case.clip,
    )
    if case.scheduler and not case.before:
        scheduler = case.scheduler(optimizer)
    return model, optimizer, scheduler, run


def given(case: Case, total: Tensor, count: Tensor) -> Any:
    return total / count if case.mean else (total, count)


def by_step(case: Case, workers: int) -> Result:
    """One loop for every strategy."""
    model, optimizer, scheduler, run = prepared(case, workers, custom_loop=False)
    losses = []
    for epoch in range(EPOCHS):
        for batch in run.epoch(epoch):
            losses.append(run.step(batch))
            if scheduler:
                scheduler.step()
    return numbers(model), losses, rates(optimizer)


def by_cells(case: Case, workers: int) -> Result:
    """A loop that stays as it is."""
    model, optimizer, scheduler, run = prepared(case, workers, custom_loop=True)
    losses: list[float] = []
    for epoch in range(EPOCHS):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            with casting(case):
                total, count = case.loss(model, batch)
            run.backward(given(case, total, count))
            optimizer.step()
            if run.global_step > len(losses):
                losses.append(run.stats.loss)  # type: ignore[union-attr]
                if scheduler:
                    scheduler.step()
        # A rank without a sample in the last batch never saw it.
        losses += [run.stats.loss] * (run.global_step - len(losses))  # type: ignore[union-attr]
    return numbers(model), losses, rates(optimizer)


def numbers(model: nn.Module) -> dict[str, NDArray[Any]]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
