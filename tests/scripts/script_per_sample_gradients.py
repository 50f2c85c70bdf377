"""Per-sample gradients by torch.func, each clipped before their mean becomes the gradient."""

from __future__ import annotations

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


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def clipped_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    def loss(weights: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        scores = torch.func.functional_call(model, weights, one[None])
        return functional.cross_entropy(scores, target[None])

    weights = {name: p.detach() for name, p in model.named_parameters()}
    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, inputs, targets)
    norms = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
    factor = (0.5 / norms).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factor, slope) / len(inputs) for name, slope in slopes.items()}


def plain(batches: Batches) -> State:
    model, optimizer = build()
    for epoch in range(2):
        for inputs, targets in batches(epoch):
            slopes = clipped_gradients(model, inputs, targets)
            for name, parameter in model.named_parameters():
                parameter.grad = slopes[name]
            optimizer.step()
    return model.state_dict()


def script(prepare: Prepare) -> State:
    model, optimizer = build()
    run = prepare(model, optimizer, dataset(), batch_size=BATCH)
    for epoch in range(2):
        for inputs, targets in run.microbatches(epoch):
            slopes = clipped_gradients(model, inputs, targets)
            for name, parameter in model.named_parameters():
                parameter.grad = slopes[name]
            run.reduce_gradients()
            optimizer.step()
    return run.state()
