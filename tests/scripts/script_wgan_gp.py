"""WGAN-GP: the critic's penalty is a gradient of a gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> TensorDataset:
    """Real points, noise, and where between a real and a fake point the penalty is taken."""
    draw = torch.Generator().manual_seed(1)
    real = torch.randn(26, 2, generator=draw, dtype=torch.float64) + 2
    noise = torch.randn(26, 3, generator=draw, dtype=torch.float64)
    return TensorDataset(real, noise, torch.rand(26, 1, generator=draw, dtype=torch.float64))


def build() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    opt_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.0, 0.9))
    return generator, critic, opt_g, torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.0, 0.9))


def penalty(critic: nn.Module, real: Tensor, fake: Tensor, alpha: Tensor) -> Tensor:
    between = (alpha * real + (1 - alpha) * fake).requires_grad_()
    [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def plain(batches: Batches) -> State:
    generator, critic, opt_g, opt_c = build()
    for epoch in range(2):
        for real, noise, alpha in batches(epoch):
            fake = generator(noise).detach()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake, alpha)
            opt_c.zero_grad()
            loss.backward()
            opt_c.step()
            opt_g.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            opt_g.step()
    return {
        **{f"generator.{k}": v for k, v in generator.state_dict().items()},
        **{f"critic.{k}": v for k, v in critic.state_dict().items()},
    }


def script(prepare: Prepare) -> State:
    generator, critic, opt_g, opt_c = build()
    run = prepare({"generator": generator, "critic": critic}, [opt_g, opt_c], dataset(), batch_size=BATCH)
    for epoch in range(2):
        for real, noise, alpha in run.microbatches(epoch):
            fake = generator(noise).detach()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake, alpha)
            opt_c.zero_grad()
            run.backward(loss)
            opt_c.step()
            opt_g.zero_grad()
            run.backward(-critic(generator(noise)).mean())
            opt_g.step()
    return run.state()
