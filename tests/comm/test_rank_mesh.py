"""Mesh arithmetic against the definition: coordinates in a nested loop, neighbours by comparison."""

from __future__ import annotations

from itertools import chain, combinations, product

import pytest

from tutti.comm.rank_mesh import AXES, RankMesh
from tutti.errors import UsageError

SHAPES = [(1, 1, 1, 1), (3, 1, 1, 1), (2, 1, 3, 1), (2, 3, 1, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_coordinates_and_lines(shape: tuple[int, int, int, int]) -> None:
    places = list(product(*map(range, shape)))
    for rank, place in enumerate(places):
        mesh = RankMesh(*shape, rank=rank)
        assert mesh.shape == shape and mesh.size == len(places)
        assert tuple(mesh.at(axis) for axis in AXES) == place
        assert mesh.data_ranks == shape[0] * shape[1]
        assert mesh.data_rank == place[0] * shape[1] + place[1]
        for axes in chain.from_iterable(combinations(AXES, n) for n in range(5)):
            fixed = [i for i, axis in enumerate(AXES) if axis not in axes]
            same = tuple(r for r, p in enumerate(places) if all(p[i] == place[i] for i in fixed))
            assert mesh.along(*axes) == same


def test_stages_and_tensor_ranks_of_a_replica_are_neighbours() -> None:
    assert RankMesh(replica=2, stage=2, tensor=2, rank=5).along("stage", "tensor") == (4, 5, 6, 7)


@pytest.mark.parametrize("options", [{"rank": 1}, {"replica": 2, "rank": -1}, {"replica": 0}, {"stage": 2, "rank": 2}])
def test_no_such_rank(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        RankMesh(**options)
