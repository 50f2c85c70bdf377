"""GAN with two batches a step: the discriminator learns from one, the generator from the next; both draw noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM, ONE_EACH = 8, True, True


def dataset() -> Tensor:
    """Images of 4 × 4 pixels."""
    return torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def build() -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Unflatten(1, (1, 4, 4)))
    discriminator = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(12, 1))
    models = {"generator": generator.double(), "discriminator": discriminator.double()}
    return models, {name: torch.optim.RMSprop(model.parameters(), lr=0.005) for name, model in models.items()}


def learn_to_tell(models: dict[str, nn.Module], real: Tensor) -> Tensor:
    with torch.no_grad():
        fake = models["generator"](torch.randn(len(real), 3, dtype=real.dtype, device=real.device))
    scores = models["discriminator"](real), models["discriminator"](fake)
    return functional.softplus(-scores[0]).mean() + functional.softplus(scores[1]).mean()


def learn_to_fool(models: dict[str, nn.Module], real: Tensor) -> Tensor:
    fake = models["generator"](torch.randn(len(real), 3, dtype=real.dtype, device=real.device))
    return functional.softplus(-models["discriminator"](fake)).mean()


def plain(batches: Batches) -> State:
    models, optimizers = build()
    for epoch in range(2):
        for number, real in enumerate(batches(epoch)):
            whose = "generator" if number % 2 else "discriminator"
            loss = learn_to_fool(models, real) if number % 2 else learn_to_tell(models, real)
            optimizers[whose].zero_grad()
            loss.backward()
            optimizers[whose].step()
    return nn.ModuleDict(models).state_dict()


def script(prepare: Prepare) -> State:
    models, optimizers = build()
    run = prepare(models, list(optimizers.values()), dataset(), batch_size=BATCH)
    for epoch in range(2):
        for number, real in enumerate(run.microbatches(epoch)):
            whose = "generator" if number % 2 else "discriminator"
            loss = learn_to_fool(models, real) if number % 2 else learn_to_tell(models, real)
            optimizers[whose].zero_grad()
            run.backward(loss)
            optimizers[whose].step()
    return run.state()
