"""The device mesh: P = replica · shard · stage · tensor ranks. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tutti.errors import UsageError

AXES = ("replica", "shard", "stage", "tensor")


@dataclass(frozen=True)
class RankMesh:
    """Device mesh of four named axes (replica, shard, stage, tensor), and the position of one rank on it.

    The replica axis varies slowest: stage and tensor ranks of one replica have adjacent numbers, because they
    communicate most.

    Attributes:
        replica: number of copies of the model.
        shard: number of ranks that shard one copy of parameters, gradients or optimizer state.
        stage: number of pipeline stages.
        tensor: number of tensor-parallel ranks.
        rank: global rank of this process.

    Raises:
        UsageError: an axis is shorter than 1, or the mesh has no such rank.

    >>> mesh = RankMesh(replica=2, stage=2, rank=3)
    >>> mesh.at("replica"), mesh.at("stage"), mesh.along("replica"), mesh.along("stage")
    (1, 1, (1, 3), (2, 3))
    """

    replica: int = 1
    shard: int = 1
    stage: int = 1
    tensor: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if min(self.shape) < 1 or not 0 <= self.rank < self.size:
            raise UsageError(f"a device mesh of shape {self.shape} has no rank {self.rank}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Number of ranks along each axis of the device mesh: (replica, shard, stage, tensor)."""
        return self.replica, self.shard, self.stage, self.tensor

    @property
    def size(self) -> int:
        """Number of ranks of the whole device mesh: replica · shard · stage · tensor."""
        return self.replica * self.shard * self.stage * self.tensor

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel positions on the device mesh, replica · shard; each sees different samples."""
        return self.replica * self.shard

    @property
    def data_rank(self) -> int:
        """Data-parallel index of this rank on the device mesh, 0 … ``data_ranks`` - 1.

        Ranks with the same index see the same samples.
        """
        return self.at("replica") * self.shard + self.at("shard")

    def at(self, axis: str) -> int:
        """Return this rank's coordinate on one axis of the device mesh, from 0.

        Args:
            axis: ``replica``, ``shard``, ``stage`` or ``tensor``; another name raises ValueError.
        """
        return self._coordinates(self.rank)[AXES.index(axis)]

    def along(self, *axes: str) -> tuple[int, ...]:
        """Return the global ranks with the same coordinates on the device mesh as this rank on all axes but ``axes``.

        Args:
            axes: some of ``replica``, ``shard``, ``stage`` and ``tensor``; other names have no effect.

        Returns:
            The ranks in increasing order, this rank included.
        """
        here = self._coordinates(self.rank)
        choices = [
            range(extent) if axis in axes else (here[i],)
            for i, (axis, extent) in enumerate(zip(AXES, self.shape, strict=True))
        ]
        return tuple(self._rank(c) for c in product(*choices))

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        coordinates = []
        for extent in reversed(self.shape):
            rank, here = divmod(rank, extent)
            coordinates.append(here)
        return tuple(reversed(coordinates))

    def _rank(self, coordinates: tuple[int, ...]) -> int:
        rank = 0
        for extent, here in zip(self.shape, coordinates, strict=True):
            rank = rank * extent + here
        return rank
