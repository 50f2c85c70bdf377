"""Gather named tensors that are sharded or partitioned over ranks into whole tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.checkpoint.state_shards import region_index
from tutti.comm.broadcast import in_messages
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
    def _size(self, name: str) -> int:
        """Return the bytes of the whole tensor whose first name is ``name``."""

    @abstractmethod
    def _wholes(self, names: Sequence[str]) -> list[Tensor]:
        """Return the whole tensors whose first names are ``names``, gathered together."""

    def pairs(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Gather tensors of a model that is distributed over ranks, and yield each with its name.

        Collective over the ranks that together hold one copy of the model, which must ask for the same names. Tensors
        of up to 64 MiB in all are gathered as one message, a larger tensor alone. For a message with tensors of one
        dtype there is one all-gather if they are sharded by rows, otherwise one broadcast from each rank with slices of
        them; with several dtypes each dtype has its own. Beyond its own part of the model, a rank needs memory for one
        message and its tensors, if the caller drops each tensor before it takes the next.

        Args:
            names: names of tensors, in the order to yield them.

        Yields:
            Pairs (name, whole tensor), as ``mapping[name]`` gives it.

        Raises:
            MismatchError: the ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        for message in in_messages(names, lambda name: self._size(self._owners[name])):
            first = list(dict.fromkeys(self._owners[name] for name in message))
            wholes = dict(zip(first, self._wholes(first), strict=True))
            for name in message:
                yield name, wholes[self._owners[name]]
            del wholes  # before the next message is made

    def all(self) -> dict[str, Tensor]:
        """Gather every tensor of a model that is distributed over ranks, and return the whole tensors.

        Collective over the ranks that together hold one copy of the model, each of which must call it, as ``pairs``.
        Needs memory for the whole model on each rank.

        Returns:
            The whole tensors by name; a tied tensor is gathered once and is found under each of its names. Tensors that
            this rank holds whole may be the model's live ones, which the next step changes.

        Raises:
            MismatchError: the ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        found: dict[str, Tensor] = {}
        for name, whole in self.pairs(self._tied):
            found |= dict.fromkeys((name, *self._tied[name]), whole)
        return found

    def __getitem__(self, name: str) -> Tensor:
        [whole] = self._wholes([self._owners[name]])
        return whole

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

    Each access is collective over the ranks of ``comm``: one broadcast from each rank that holds slices of the tensors,
    for each dtype; the results are new tensors, or with one rank the tensors of ``local`` themselves. The constructor
    is collective, too: it broadcasts names and shapes from every rank that is alive.

    Args:
        local: this rank's tensors and slices, by name.
        specs: shape of each whole tensor and place of this rank's slice in it, by name.
        not_owned: names in ``local`` of tensors that another rank holds, too, such as tied weights; this rank does not
            broadcast them.
        comm: the ranks of one replica.
    """

    def __init__(
        self,
        local: Mapping[str, Tensor],
        specs: Mapping[str, ShardSpec],
        not_owned: Collection[str],
        comm: Communicator,
    ) -> None:
        self._local, self._comm = local, comm
        self._parts: dict[str, list[_Part]] = {}
        own = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), *_place(specs[name])]
            for name, t in local.items()
            if name not in not_owned
        ]
        for source in comm.alive_ranks:
            for name, dtype, part, shape, offset, tied, dim, ranges in comm.broadcast_json(
                own, source, "names of the state"
            ):
                places = tuple((begin, end) for begin, end in ranges)
                spec = ShardSpec(tuple(shape), tuple(offset), tuple(tied), dim, places)
                self._parts.setdefault(name, []).append(_Part(source, getattr(torch, dtype), tuple(part), spec))
        super().__init__({name: parts[0].spec.tied for name, parts in self._parts.items()})

    def _size(self, name: str) -> int:
        part = self._parts[name][0]
        return math.prod(part.spec.shape) * part.dtype.itemsize

    def _wholes(self, names: Sequence[str]) -> list[Tensor]:
        if self._comm.size == 1:
            return [self._local[name] for name in names]
        messages: dict[tuple[int, torch.dtype], list[tuple[str, _Part]]] = {}
        for name in names:
            for part in self._parts[name]:
                # A rank has no rows where there are fewer rows than ranks.
                if 0 not in part.shape or 0 in part.spec.shape:
                    messages.setdefault((part.source, part.dtype), []).append((name, part))
        wholes: dict[str, Tensor] = {}
        for (source, dtype), parts in messages.items():
            for (name, part), tensor in zip(parts, self._broadcast(source, dtype, parts), strict=True):
                full = part.shape == part.spec.shape
                wholes[name] = tensor if full else _put(wholes.get(name), tensor, part.spec)
        return [wholes[name] for name in names]

    def _broadcast(self, source: int, dtype: torch.dtype, parts: Sequence[tuple[str, _Part]]) -> list[Tensor]:
        """Broadcast the slices of one rank in one message, and return new tensors that share no memory."""
        sizes = [math.prod(part.shape) for _, part in parts]
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._comm.device)
        views = [view.view(part.shape) for view, (_, part) in zip(flat.split(sizes), parts, strict=True)]
        if self._comm.rank == source:
            for view, (name, _) in zip(views, parts, strict=True):
                view.copy_(self._local[name])
        self._comm.broadcast(flat, source, f"state '{parts[0][0]}'" + f" and {len(parts) - 1} more" * (len(parts) > 1))
        return views if len(views) == 1 else [view.clone() for view in views]


def _place(spec: ShardSpec) -> tuple[object, ...]:
    return list(spec.shape), list(spec.offset), list(spec.tied), spec.dim, list(spec.ranges)


def _put(whole: Tensor | None, part: Tensor, spec: ShardSpec) -> Tensor:
    """Copy ``part`` into the whole tensor, which is allocated if None, and return the whole tensor."""
    if whole is None:
        whole = part.new_empty(spec.shape)
    regions = spec.regions(part.shape)
    pieces = part.split([shape[spec.dim] for _, shape in regions], spec.dim) if len(regions) > 1 else (part,)
    for piece, region in zip(pieces, regions, strict=True):
        whole[region_index(*region)] = piece
    return whole


def gather_rows(
    rows: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], comm: Communicator
) -> dict[str, Tensor]:
    """Gather tensors that are sharded along their first dimension.

    Collective over the ranks of ``comm``: one all-gather for each dtype; blocks. ``rows`` must have the same names in
    the same order on all ranks.

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
    whole: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(mine.dtype for mine in rows.values()):
        padded = {}
        for name, mine in rows.items():
            if mine.dtype == dtype:
                padded[name] = mine.new_zeros(len(block(shapes[name][0], comm.size, 0)), *shapes[name][1:])
                padded[name][: len(mine)] = mine
        first, *more = padded
        flat = padded[first].view(-1) if not more else torch.cat([each.view(-1) for each in padded.values()])
        text = f"rows of '{first}'" + f" and {len(more)} more" * bool(more)
        sizes = [each.numel() for each in padded.values()]
        ranks = [part.split(sizes) for part in comm.all_gather(flat, text)]
        for (name, each), parts in zip(padded.items(), zip(*ranks, strict=True), strict=True):
            whole[name] = torch.cat([part.view_as(each) for part in parts])[: shapes[name][0]]
    return {name: whole[name] for name in rows}


class GatheredRows(GatheredModel):
    """Mapping from names to whole tensors of a model of which some tensors are sharded by rows.

    Each access of sharded tensors is collective: one all-gather over the ranks of ``comm`` for each dtype. An access of
    another tensor sends nothing and returns that of ``local``. The constructor sends nothing.

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

    def _size(self, name: str) -> int:
        return math.prod(self._specs[name].shape) * self._local[name].dtype.itemsize

    def _wholes(self, names: Sequence[str]) -> list[Tensor]:
        rows = {name: self._local[name] for name in names if name in self._cut}
        shapes = {name: self._specs[name].shape for name in rows}
        gathered = gather_rows(rows, shapes, self._comm)
        return [gathered.get(name, self._local[name]) for name in names]


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
        at_first_shard: whether this rank is the first on the mesh axis ``shard``; tensors that are not sharded by rows,
            of which all ranks of the axis hold copies, are taken from that rank alone.

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
    not_owned = set(replica.not_owned)
    if not at_first_shard:
        not_owned |= merged.keys() - replica.sharded.keys()
    return GatheredParts(merged, replica.specs, not_owned, comms.axis("shard", "stage", "tensor"))
