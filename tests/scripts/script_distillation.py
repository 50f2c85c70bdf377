"""Distillation from a frozen teacher that the loss function calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH = 7


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, nn.Module, Optimizer]:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double().eval()
    student = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    return student, teacher, torch.optim.Adam(student.parameters(), lr=0.01)


def distilling(teacher: nn.Module) -> Any:
    def loss_fn(student: Any, batch: Any) -> Tensor:
        inputs, targets = batch
        teacher.to(inputs.device)
        with torch.no_grad():
            soft = functional.softmax(teacher(inputs) / 2, dim=1)
        scores = student(inputs)
        near = functional.kl_div(functional.log_softmax(scores / 2, dim=1), soft, reduction="batchmean")
        return 0.5 * functional.cross_entropy(scores, targets) + 2 * near

    return loss_fn


def plain(batches: Batches) -> State:
    student, teacher, optimizer = build()
    loss_fn = distilling(teacher)
    for epoch in range(2):
        for batch in batches(epoch):
            optimizer.zero_grad()
            loss_fn(student, batch).backward()
            optimizer.step()
    return student.state_dict()


def script(prepare: Prepare) -> State:
    student, teacher, optimizer = build()
    run = prepare(student, optimizer, dataset(), distilling(teacher), batch_size=BATCH)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()
