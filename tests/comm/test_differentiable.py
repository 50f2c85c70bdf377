"""Collectives that autograd goes through: values and gradients, for shares that are not even."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tutti.comm.differentiable import TensorRanks
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.partition import even_share
from tutti.comm.rank_mesh import RankMesh
from tutti.launcher import context


def ranks() -> TensorRanks:
    world = context.current()
    mesh = RankMesh(tensor=world.identity.size, rank=world.identity.rank)
    return TensorRanks(Communicators(world, mesh).axis("tensor"))


def computed(length: int, dim: int) -> Any:
    """Shares of 0, 1, 2 … gathered; the sum of all ranks' numbers; the gradient of a whole that each uses otherwise."""
    line, rank = ranks(), tutti.rank()
    mine = even_share(length, line.size, rank)
    part = torch.arange(float(length))[mine.start : mine.stop].expand(2, -1).clone()
    part = (part if dim else part.t().contiguous()).requires_grad_()
    whole = line.all_gather(part, dim, length, "a layer")
    counted = torch.arange(1.0, length + 1)
    (whole * (counted if dim else counted.unsqueeze(1))).sum().backward()  # type: ignore[no-untyped-call]
    own = torch.tensor([rank + 1.0], requires_grad=True)
    total = line.all_reduce(own, "a layer")
    (3 * total).sum().backward()
    shared = torch.tensor([1.0], requires_grad=True)
    twice = line.all_reduce_gradient(shared, "a layer"), line.all_reduce_gradient(shared, "a layer")
    assert twice[0] is twice[1], "one message for both"
    ((rank + 1) * (twice[0] + twice[1])).sum().backward()
    row = whole[0] if dim else whole[:, 0]
    gradient = part.grad[0] if dim else part.grad[:, 0]  # type: ignore[index]
    return row.tolist(), gradient.tolist(), float(total), own.grad, shared.grad


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_values_and_gradients(size: int, dim: int) -> None:
    everyone = size * (size + 1) / 2
    for rank, (whole, gradient, total, own, shared) in enumerate(worlds.run(size, computed, length=7, dim=dim)):
        assert whole == list(range(7))
        assert gradient == [i + 1.0 for i in even_share(7, size, rank)], "of this rank's share, and not summed"
        assert (total, own, shared) == (everyone, 3, 2 * everyone)


def penalised(whole: torch.Tensor, inputs: torch.Tensor, weights: list[torch.Tensor]) -> list[Any]:
    """Gradients of a gradient's square with respect to inputs and weights, and its value."""
    # Only whole numbers, the same on all ranks, are summed.
    value = (whole.sin() * torch.arange(1.0, whole.numel() + 1, dtype=torch.float64).view_as(whole)).sum()
    [slope] = torch.autograd.grad(value, [inputs], create_graph=True)
    penalty = slope.square().sum() + value
    found = torch.autograd.grad(penalty, [inputs, *weights])
    return [penalty.detach().numpy(), *(each.numpy() for each in found)]


def drawn(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def twice(kind: str, split: bool) -> list[Any]:
    """Five inputs of four features, seven hidden ones, split over the ranks or not; gradients of weights are shares."""
    line = ranks() if split else None
    x = drawn(5, 4).requires_grad_()
    first, last, scale = drawn(4, 7), drawn(7, 3), drawn(4).requires_grad_()
    mine = even_share(7, line.size, line.rank) if line else range(7)
    first = first[:, mine.start : mine.stop].clone().requires_grad_()
    last = last[mine.start : mine.stop].clone().requires_grad_()
    if line is None:
        hidden = ((x * scale if kind == "sequence" else x) @ first).tanh()
        if kind == "take":
            hidden = (x @ drawn(4, 7)).tanh() * first[0]
        whole = hidden if kind == "gather" else hidden @ last
        weights = {"gather": [first], "take": [first, last], "sequence": [first, last, scale]}
        return penalised(whole, x, weights.get(kind, [first, last]))
    if kind == "reduce":
        whole = line.all_reduce((line.all_reduce_gradient(x, "a") @ first).tanh() @ last, "b")
        return penalised(whole, x, [first, last])
    if kind == "gather":
        return penalised(line.all_gather((line.all_reduce_gradient(x, "a") @ first).tanh(), 1, 7, "a"), x, [first])
    if kind == "take":
        part = line.take_slice((x @ drawn(4, 7)).tanh(), 1, 7, "a") * first[0]
        return penalised(line.all_reduce(part @ last, "b"), x, [first, last])
    # Between layers each rank has some of the five inputs, and a gradient of the scale from these alone.
    [same] = line.all_reduce_gradients([scale], "norm")
    wide = line.all_gather_input(line.take_slice(x, 0, 5, "a") * same, 0, 5, "a")
    rows = line.reduce_scatter((wide @ first).tanh() @ last, 0, 5, "b")
    return penalised(line.all_gather(rows, 0, 5, "c"), x, [first, last, scale])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["reduce", "gather", "take", "sequence"])
def test_gradients_of_gradients(size: int, kind: str) -> None:
    want = twice(kind, split=False)
    for rank, found in enumerate(worlds.run(size, twice, kind=kind, split=True)):
        mine = even_share(7, size, rank)
        parts = [*want[:2], want[2][:, mine.start : mine.stop]]
        parts += [want[3][mine.start : mine.stop]] if len(want) > 3 else []
        for have, expected in zip(found, [*parts, *want[4:]], strict=True):
            assert abs(have - expected).max() <= 1e-10 * max(1.0, abs(expected).max())
