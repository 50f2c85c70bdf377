"""Gather named tensors that are sharded or partitioned over ranks into whole tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.checkpoint.state_shards import region_index
from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.partition import block
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.shard_spec import ShardSpec


class GatheredModel(Mapping[str, Tensor], ABC):
    """Mapping from names to the whole tensors of a model that is distributed over ranks; gathers on access.

    A tied tensor is found under each of its names. Each access is collective over the ranks that together hold one copy
    of the model, which must access the same names in the same order; the subclass says how tensors are gathered.
    Tensors that this rank has whole may be returned without a copy: they are the live ones of the model.

    Args:
        tied: the further names of each tensor, by its first name.
    """

    def __init__(self, tied: Mapping[str, Sequence[str]]) -> None:
        self._tied = tied
        self._owners = {other: name for name, others in tied.items() for other in (name, *others)}

    @abstractmethod
    def _whole(self, name: str) -> Tensor:
        """Return the whole tensor whose first name is ``name``."""

    def all(self) -> dict[str, Tensor]:
        """Gather every tensor of a model that is distributed over ranks, and return the whole tensors.

        Collective over the ranks that together hold one copy of the model, each of which must call it: an all-gather of
        a tensor's rows, or a broadcast of each of its slices, one tensor after the other. Needs memory for the whole
        model on each rank.

        Returns:
            The whole tensors by name; a tied tensor is gathered once and is found under each of its names. Tensors that
            this rank holds whole may be the model's live ones, which the next step changes.

        Raises:
            MismatchError: the ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        found: dict[str, Tensor] = {}
        for name, others in self._tied.items():
            found |= dict.fromkeys((name, *others), self._whole(name))
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._whole(self._owners[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


class _Part(NamedTuple):
    """The slice of a tensor that rank ``source`` holds: its dtype, its own shape, and its place in the tensor."""

    source: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    spec: ShardSpec


class GatheredParts(GatheredModel):
    """Mapping from names to whole tensors of a model whose tensors, or slices of them, lie on the ranks of one replica.

    Each access is collective over the ranks of ``comm``: one broadcast from each rank that holds a slice of the tensor;
    the result is a new tensor, with one rank that of ``local``. The constructor is collective, too: it broadcasts names
    and shapes from every rank that is alive.

    Args:
        local: this rank's tensors and slices, by name.
        specs: shape of each whole tensor and place of this rank's slice in it, by name.
        borrowed: names in ``local`` of tensors that another rank holds, too, such as tied weights; this rank does not
            broadcast them.
        comm: the ranks of one replica.
    """

    def __init__(
        self, local: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], borrowed: Collection[str], comm: Communicator
    ) -> None:
        self._local, self._comm = local, comm
        self._parts: dict[str, list[_Part]] = {}
        own = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), *_place(specs[name])]
            for name, t in local.items()
            if name not in borrowed
        ]
        for source in comm.alive_ranks:
            for name, dtype, part, shape, offset, tied, blocks, rows in comm.broadcast_json(
                own, source, "names of the state"
            ):
                spec = ShardSpec(tuple(shape), tuple(offset), tuple(tied), blocks, rows and tuple(rows))
                self._parts.setdefault(name, []).append(_Part(source, getattr(torch, dtype), tuple(part), spec))
        super().__init__({name: parts[0].spec.tied for name, parts in self._parts.items()})

    def _whole(self, name: str) -> Tensor:
        comm = self._comm
        if comm.size == 1:
            return self._local[name]
        whole: Tensor | None = None
        for source, dtype, shape, spec in self._parts[name]:
            if 0 in shape and 0 not in spec.shape:
                continue  # fewer rows than ranks
            tensor = torch.empty(shape, dtype=dtype, device=comm.device)
            if comm.rank == source:
                tensor.copy_(self._local[name])
            comm.broadcast(tensor, source, f"state '{name}'")
            whole = tensor if shape == spec.shape else _put(whole, tensor, spec)
        if whole is None:
            raise KeyError(name)
        return whole


def _place(spec: ShardSpec) -> tuple[object, ...]:
    return list(spec.shape), list(spec.offset), list(spec.tied), spec.blocks, spec.rows


def _put(whole: Tensor | None, part: Tensor, spec: ShardSpec) -> Tensor:
    """Copy ``part`` into the whole tensor, which is allocated if None, and return the whole tensor."""
    if whole is None:
        whole = part.new_empty(spec.shape)
    regions = spec.regions(part.shape)
    for piece, (offset, shape) in zip(part.split([shape[0] for _, shape in regions]), regions, strict=True):
        whole[region_index(offset, shape)] = piece
    return whole


def gather_rows(
    rows: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], comm: Communicator
) -> dict[str, Tensor]:
    """Gather tensors that are sharded along their first dimension.

    Collective over the ranks of ``comm``: one all-gather for each tensor, in the order of ``rows``, which must have the
    same names on all ranks; blocks.

    Args:
        rows: this rank's shard of each tensor, by name: contiguous rows, divided as ``torch.chunk`` does. Each rank has
            ⌈rows / ranks⌉ of them, except the last ones, which have fewer or none.
        shapes: shapes of the whole tensors, by name.
        comm: the ranks that hold the shards, in the order of the rows.

    Returns:
        New, whole tensors by name, in the order of ``rows``, on the device of the shards.

    Raises:
        MismatchError: the ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    whole = {}
    for name, mine in rows.items():
        count, rest = shapes[name][0], tuple(shapes[name][1:])
        padded = mine.new_zeros(len(block(count, comm.size, 0)), *rest)
        padded[: len(mine)] = mine
        whole[name] = torch.cat(comm.all_gather(padded, f"rows of '{name}'"))[:count]
    return whole


class GatheredRows(GatheredModel):
    """Mapping from names to whole tensors of a model of which some tensors are sharded by rows.

    Each access of a sharded tensor is collective: one all-gather over the ranks of ``comm``. An access of another
    tensor sends nothing and returns that of ``local``. The constructor sends nothing.

    Args:
        local: this rank's whole tensors and row shards, by name.
        cut: names of the sharded tensors.
        specs: shapes and tied names of all tensors.
        comm: the ranks that shard one copy of the model.
    """

    def __init__(
        self, local: Mapping[str, Tensor], cut: Collection[str], specs: Mapping[str, ShardSpec], comm: Communicator
    ) -> None:
        super().__init__({name: specs[name].tied for name in local})
        self._local, self._cut, self._specs, self._comm = local, cut, specs, comm

    def _whole(self, name: str) -> Tensor:
        tensor = self._local[name]
        if name not in self._cut:
            return tensor
        return gather_rows({name: tensor}, {name: self._specs[name].shape}, self._comm)[name]


def gathered_model(
    replica: ReplicaRunner, comms: Communicators, merged: Mapping[str, Tensor], at_first_shard: bool
) -> GatheredModel:
    """Return a mapping from names to the whole tensors of a model that is sharded over ranks; gathers on access.

    Collective over the ranks that together hold one copy of the model; all must access the same names in the same
    order. An access all-gathers the tensor's rows where only the mesh axis ``shard`` divides the model. Otherwise it
    broadcasts the tensor's slices, and this call broadcasts their names and shapes.

    Args:
        replica: this rank's part of the model, with the shapes and places of its slices.
        comms: this rank's communicators along the axes of the device mesh.
        merged: this rank's tensors and slices by name, of the model (``GradientSync.merged``) or of its moving average.
        at_first_shard: whether this rank is the first on the mesh axis ``shard``; only that rank gives tensors that are
            not sharded by rows, which the ranks of the axis hold alike.

    Returns:
        A ``GatheredModel``: ``mapping[name]`` gathers and returns the whole tensor, a tied tensor under each of its
        names; ``all()`` returns all tensors as a dict. Tensors that this rank holds whole may be those of ``merged``
        themselves.

    Raises:
        MismatchError: the ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    if replica.sharded and comms.model.size == 1:
        return GatheredRows(merged, replica.sharded, replica.specs, comms.axis("shard"))
    if not replica.sharded:
        return GatheredParts(merged, replica.specs, replica.not_owned, comms.model)
    # Rows of tensor slices; tensors that are not sharded into rows are equal on all shards: the first one's count.
    borrowed = set(replica.not_owned)
    if not at_first_shard:
        borrowed |= merged.keys() - replica.sharded.keys()
    return GatheredParts(merged, replica.specs, borrowed, comms.axis("shard", "stage", "tensor"))
