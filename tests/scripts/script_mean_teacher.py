"""Mean teacher: its weights are a moving average of the student's, made by hand after every update."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from tests.scripts import Batches, Prepare, State

BATCH, RANDOM = 7, True


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(25, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (25,), generator=draw)
    )


def build() -> tuple[nn.Module, nn.Module, Optimizer]:
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    return student, teacher, torch.optim.SGD(student.parameters(), lr=0.1)


def loss_of(student: nn.Module, teacher: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    scores = student(inputs)
    teacher.to(inputs.device)
    apart = functional.mse_loss(scores.softmax(1), teacher(inputs).softmax(1))
    return functional.cross_entropy(scores, targets) + apart


def follow(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)


def both(student: State, teacher: nn.Module) -> State:
    return {**student, **{f"teacher.{name}": tensor for name, tensor in teacher.state_dict().items()}}


def plain(batches: Batches) -> State:
    student, teacher, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            optimizer.zero_grad()
            loss_of(student, teacher, inputs, targets).backward()
            optimizer.step()
            follow(teacher, student)
    return both(student.state_dict(), teacher)


def script(prepare: Prepare) -> State:
    student, teacher, optimizer = build()
    run = prepare(student, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(loss_of(student, teacher, inputs, targets))
            optimizer.step()
            if run.stepped:
                follow(teacher, student)
    return both(run.state(), teacher)
