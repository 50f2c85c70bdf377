"""AMP by hand: autocast around the forward, a GradScaler around backward and step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def plain(batches: Batches) -> State:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
    return {**model.state_dict(), "scale": torch.tensor(scaler.get_scale())}


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(inputs), targets)
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
    return {**run.state(), "scale": torch.tensor(scaler.get_scale())}
