"""The reproducible sum: the same bits on any number of ranks, those of a literal recursive sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tutti
from tests import worlds
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.partition import even_share
from tutti.comm.rank_mesh import RankMesh
from tutti.comm.tree_sum import TreeSum
from tutti.launcher import context

WORKERS = (8, 9, 11, 16, 33)
LENGTHS = (1, 7, 64)


def vector(worker: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different size, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(100 * worker + length)
    return (torch.randn(length, generator=generator) * 10 ** torch.randn(length, generator=generator)).to(dtype)


def literal(low: int, high: int, length: int, dtype: torch.dtype) -> Tensor:
    if high - low == 1:
        return vector(low, length, dtype)
    half = 1
    while half * 2 < high - low:
        half *= 2
    return literal(low, low + half, length, dtype) + literal(low + half, high, length, dtype)


def sums(dtype: torch.dtype) -> list[bytes]:
    comm = Communicators(context.current(), RankMesh(replica=tutti.size(), rank=tutti.rank())).replica
    found = []
    for workers in WORKERS:
        for length in LENGTHS:
            total = TreeSum(comm, workers, length, dtype)
            for _ in range(2):  # it is ready for the next step
                for worker in even_share(workers, comm.size, comm.rank):
                    total.add(worker, vector(worker, length, dtype))
                found.append(total.total().numpy().tobytes())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bits_do_not_depend_on_the_ranks(size: int, dtype: torch.dtype) -> None:
    want = [literal(0, w, n, dtype).numpy().tobytes() for w in WORKERS for n in LENGTHS for _ in range(2)]
    for rank, got in enumerate(worlds.run(size, sums, dtype=dtype)):
        assert got == want, f"rank {rank}"


def test_bits_on_eight_ranks() -> None:
    want = [literal(0, w, n, torch.float32).numpy().tobytes() for w in WORKERS for n in LENGTHS for _ in range(2)]
    assert worlds.run(8, sums, dtype=torch.float32) == [want] * 8


def test_the_numbers_do_depend_on_the_order() -> None:
    """Otherwise the tests above could not fail."""
    flat = vector(0, 64, torch.float32)
    for worker in range(1, 33):
        flat = flat + vector(worker, 64, torch.float32)
    assert not torch.equal(flat, literal(0, 33, 64, torch.float32))
