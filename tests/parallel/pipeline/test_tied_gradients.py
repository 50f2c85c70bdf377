"""Sums over stages of the gradients of shared parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests import worlds
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.launcher import context
from tutti.parallel.pipeline.tied_gradients import SharedGradients


def summed(exact: bool) -> list[list[float] | None]:
    """Gradients after a step of two micro-batches: of a parameter without any, and of one used by the last stage."""
    world = context.current()
    comm = Communicators(world, RankMesh(stage=world.identity.size, rank=world.identity.rank)).axis("stage")
    unused, used = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    shared = SharedGradients([(comm, [unused, used])], exact)
    shared.begin()
    for micro in range(2):
        if comm.rank == comm.size - 1:
            used.grad = torch.tensor([1.0, 2.0]) * (micro + 1)
        shared.take(micro)
    shared.finish(2)
    return [None if p.grad is None else p.grad.tolist() for p in (unused, used)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_a_parameter_without_a_gradient_has_none(size: int, exact: bool) -> None:
    """So that weight decay and momentum skip it, as on one device."""
    assert worlds.run(size, summed, exact=exact) == [[None, [3.0, 6.0]]] * size
