"""Policy gradient: actions are drawn from the policy, and rewards weigh their log probabilities."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 9, True


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.actor, self.critic = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(states)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


def dataset() -> Tensor:
    """States of a bandit whose best action is the largest of the first three numbers."""
    return torch.randn(31, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = ActorCritic().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, states: Tensor) -> Tensor:
    scores, values = model(states)
    policy = torch.distributions.Categorical(logits=scores)
    actions = policy.sample()
    rewards = (actions == states[:, :3].argmax(1)).to(states.dtype)
    advantage = rewards - values.detach()
    losses = -policy.log_prob(actions) * advantage + 0.5 * (rewards - values) ** 2 - 0.01 * policy.entropy()
    return losses.mean()


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for states in batches(epoch):
            loss = loss_of(model, states)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for states in run.microbatches(epoch):
            loss = loss_of(model, states)
            optimizer.zero_grad()
            run.backward(loss)
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return run.state()
