"""GAN: the generator's backward goes through the discriminator."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, EPOCHS = 14, 2


def dataset() -> TensorDataset:
    """Points on a circle, and the noise that the generator begins with."""
    draw = torch.Generator().manual_seed(1)
    angles = torch.rand(41, generator=draw, dtype=torch.float64) * 6.28
    return TensorDataset(
        torch.stack([angles.cos(), angles.sin()], 1), torch.randn(41, 3, generator=draw, dtype=torch.float64)
    )


def build() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).double()
    opt_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    return generator, discriminator, opt_g, opt_d


def is_real(scores: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


def is_fake(scores: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))


def plain(batches: Batches) -> State:
    generator, discriminator, opt_g, opt_d = build()
    for epoch in range(EPOCHS):
        for real, noise in batches(epoch):
            fake = generator(noise)
            opt_d.zero_grad()
            loss_d = is_real(discriminator(real)) + is_fake(discriminator(fake.detach()))
            loss_d.backward()
            opt_d.step()
            opt_g.zero_grad()
            loss_g = is_real(discriminator(fake))
            loss_g.backward()
            opt_g.step()
    return nn.ModuleList([generator, discriminator]).state_dict()


def script(prepare: Prepare) -> State:
    generator, discriminator, opt_g, opt_d = build()
    run = prepare([generator, discriminator], [opt_g, opt_d], dataset(), batch_size=BATCH)
    for epoch in range(EPOCHS):
        for real, noise in run.microbatches(epoch):
            fake = generator(noise)
            opt_d.zero_grad()
            loss_d = is_real(discriminator(real)) + is_fake(discriminator(fake.detach()))
            run.backward(loss_d)
            opt_d.step()
            opt_g.zero_grad()
            loss_g = is_real(discriminator(fake))
            run.backward(loss_g)
            opt_g.step()
    return run.state()
