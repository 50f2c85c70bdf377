"""Give a checkpoint, plain weights or a state dict to gradient synchronisation, and check that they fit the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from tutti.checkpoint.dtypes import tensor_from_bytes
from tutti.checkpoint.manifest import REMEDY, Manifest
from tutti.checkpoint.read import TensorReader
from tutti.checkpoint.state_shards import region_index
from tutti.checkpoint.tensorfile import check_within
from tutti.checkpoint.weights import Weights, whole_tensor
from tutti.comm.communicator import Communicator
from tutti.errors import CheckpointError, did_you_mean
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.shard_spec import ShardSpec

_MOST_LISTED = 8


class CheckpointReader:
    """Reads tensors of a checkpoint, or regions of them, by group and name; implements the protocol ``SavedState``.

    A group is a kind of state: ``model`` for parameters and buffers, ``ema`` for averaged weights, ``optim`` for
    optimizer state, ``workers`` for the state of each logical worker (fixed share of the global batch), or another of
    ``manifest.GROUPS``. No method is collective: each rank reads for itself.

    Args:
        manifest: the manifest of a verified checkpoint.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._reader = manifest, TensorReader(manifest)

    def names(self, group: str) -> Collection[str]:
        """Return the names of the checkpoint's tensors in a group, a kind of state.

        Args:
            group: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer state) or
                ``workers`` (state of each logical worker, a fixed share of the global batch); a group that was not
                saved has no names.
        """
        return self._manifest.tensors.get(group, {}).keys()

    def get(self, group: str, name: str) -> Tensor:
        """Read one whole tensor from the checkpoint's files, on the CPU and in the saved dtype.

        Args:
            group: kind of state: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer
                state) or ``workers`` (state of each logical worker, a fixed share of the global batch).
            name: the tensor's name within the group.

        Returns:
            A new tensor, which shares no memory with this object.

        Raises:
            CheckpointError: no such tensor, or a file that differs from the manifest.
        """
        return next(iter(self._reader.read(group, [name])))[1]

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Return the shape of one whole tensor of the checkpoint, from the manifest; no tensor file is read.

        Args:
            group: kind of state: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer
                state) or ``workers`` (state of each logical worker, a fixed share of the global batch).
            name: the tensor's name within the group.

        Raises:
            CheckpointError: no such tensor.
        """
        return self._reader.record(group, name).shape

    def part(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a region of one tensor of the checkpoint, and no other bytes where its files allow it.

        Args:
            group: kind of state: ``model`` (parameters and buffers), ``ema`` (averaged weights), ``optim`` (optimizer
                state) or ``workers`` (state of each logical worker, a fixed share of the global batch).
            name: the tensor's name.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region, one number a dimension.

        Returns:
            The region as a new tensor on the CPU, in the saved dtype.

        Raises:
            CheckpointError: no such tensor, a region outside it, or a file that differs from the manifest.
        """
        return self._reader.read_slice(group, name, offset, shape)


class WeightsReader:
    """Gives the weights and buffers of a file the interface of a checkpoint (the protocol ``SavedState``).

    All tensors are in the group ``model`` (kind of state: parameters and buffers); the other groups are empty, so that
    a run that loads this object starts with a fresh optimizer state. Not collective.

    Args:
        weights: the tensors of the file, read on demand.
        specs: for each tensor on this rank, by its name in the model, a ``ShardSpec``, of which the other names of tied
            weights are used.
        kept: whole tensors by name, which are returned in place of those of ``weights``: initial values of tensors that
            the file lacks or has in another shape.
    """

    def __init__(
        self, weights: Weights, specs: Mapping[str, ShardSpec], kept: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        self._weights, self._specs, self._kept = weights, specs, kept

    def names(self, group: str) -> Collection[str]:
        """Return the names of the tensors that ``get`` can return: those in the weights file, and the keys of ``kept``.

        ``kept`` is the constructor's mapping of tensors that keep their initial values because the file lacks them or
        has them in another shape.

        Args:
            group: kind of state, as in a checkpoint: a weights file has only ``model``; any other group gives an empty
                collection.
        """
        return self._weights.records.keys() | self._kept.keys() if group == "model" else ()

    def get(self, group: str, name: str) -> Tensor:
        """Return one whole tensor: of the constructor's ``kept`` if that has the name, else read from the weights file.

        Args:
            group: ``model``; not used here, because weights have no other group.
            name: the tensor's name in the model; the file may have a tied name instead.

        Returns:
            From the file a tensor on the CPU in the file's dtype; from ``kept`` the tensor itself.

        Raises:
            CheckpointError: neither ``kept`` nor the file has the tensor, or the tensor cannot be read.
        """
        if name in self._kept:
            return self._kept[name]
        found = self._found(name)
        return tensor_from_bytes(whole_tensor(self._weights, found), self._weights.records[found].dtype)

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Return the shape of one whole tensor, of the constructor's ``kept`` or from the header of the weights file.

        Args:
            group: ``model``; not used here, because weights have no other group.
            name: the tensor's name in the model; the file may have a tied name instead.

        Raises:
            CheckpointError: neither ``kept`` nor the file has the tensor; the message names the nearest.
        """
        if name in self._kept:
            return tuple(self._kept[name].shape)
        return tuple(self._weights.records[self._found(name)].shape)

    def _found(self, name: str) -> str:
        """Return the name under which the file has this tensor; a tied tensor may be stored under any of its names."""
        tied = self._specs[name].tied if name in self._specs else ()
        for known in (name, *tied):
            if known in self._weights.records:
                return known
        raise CheckpointError(f"the weights have no tensor {name!r}", remedy=did_you_mean(name, self._weights.records))

    def part(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a region of one tensor, and no other part of a plain file.

        Args:
            group: ``model``; not used here, because weights have no other group.
            name: the tensor's name in the model; the file may have a tied name instead.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region, one number a dimension.

        Returns:
            From the file a new tensor on the CPU, in the file's dtype; of ``kept`` a view, on the tensor's device.

        Raises:
            CheckpointError: neither the constructor's ``kept`` nor the file has the tensor, the tensor cannot be read,
                or the region does not lie within the tensor.
        """
        if name in self._kept:
            return _region(self._kept[name], name, offset, shape)
        found = self._found(name)
        numbers = np.array(self._weights.region(found, offset, shape))
        return tensor_from_bytes(numbers, self._weights.records[found].dtype)


class GivenState:
    """Gives full tensors in memory the interface of a checkpoint (the protocol ``SavedState``), to be loaded like one.

    For ``load_state_dict`` of a model in training, and for the state of parameter servers. A run that loads this object
    keeps the state of the ranks' own optimizers. Not collective.

    Args:
        tensors: full tensors by name.
        specs: for each tensor of the full model its shape and the other names of tied tensors.
        optim: optimizer state by ``{parameter}/{key}``, for optimizers on servers, which would otherwise start afresh.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], optim: Mapping[str, Tensor] | None = None
    ) -> None:
        self._tensors, self._specs, self._optim = tensors, specs, optim or {}

    def names(self, group: str) -> Collection[str]:
        """Return the names of the tensors that this object holds in memory for one group (kind of state).

        Args:
            group: ``model`` for parameters and buffers, or ``optim`` for optimizer state; other groups have no names.
        """
        return {"model": self._tensors, "optim": self._optim}.get(group, {}).keys()

    def get(self, group: str, name: str) -> Tensor:
        """Return one of the full tensors that this object holds in memory, without a copy.

        Args:
            group: ``model`` or ``optim``.
            name: the tensor's name, for a tied weight any of its names; ``{parameter}/{key}`` in ``optim``. The caller
                makes sure that it is one of ``names(group)``, or tied to one.
        """
        if group == "optim":
            return self._optim[name]
        tied = self._specs[name].tied if name in self._specs else ()
        return next(self._tensors[n].detach() for n in (name, *tied) if n in self._tensors)

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Return the shape of one of the full tensors that this object holds in memory.

        Args:
            group: ``model`` or ``optim``.
            name: the tensor's name, for a tied weight any of its names; ``{parameter}/{key}`` in ``optim``. The caller
                makes sure that it is one of ``names(group)``, or tied to one.
        """
        return tuple(self.get(group, name).shape)

    def part(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return a rectangular region of one of the full tensors that this object holds in memory, as a view.

        Args:
            group: ``model`` or ``optim``.
            name: the tensor's name, for a tied weight any of its names; ``{parameter}/{key}`` in ``optim``. The caller
                makes sure that it is one of ``names(group)``, or tied to one.
            offset: index of the region's first element in the full tensor, one number a dimension.
            shape: shape of the region, one number a dimension.

        Raises:
            CheckpointError: the region does not lie within the tensor.
        """
        return _region(self.get(group, name), name, offset, shape)


def _region(tensor: Tensor, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return a view of a region of a tensor. Raises CheckpointError for one outside it, where an index cuts off."""
    try:
        check_within(name, tensor.shape, offset, shape)
    except ValueError as error:
        raise CheckpointError(f"cannot read a region of {name!r}", why=str(error)) from error
    return tensor[region_index(offset, shape)]


def catalogue(replica: ReplicaRunner, comm: Communicator) -> dict[str, ShardSpec]:
    """Return the whole shape and the tied names of every tensor of a model whose parts lie on several ranks.

    Collective: one JSON broadcast from each rank of ``comm``; blocks until all have called it.

    Args:
        replica: this rank's part of the model; a tensor that several ranks hold is described by its owner alone.
        comm: the ranks of one replica, which together hold one copy of the model.

    Returns:
        The same dict on every rank: for each parameter and persistent buffer, by name, a ``ShardSpec`` with the full
        ``shape``, and ``tied``, the other names of a tied tensor; ``offset`` is 0.

    Raises:
        MismatchError: the ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    specs, not_owned = replica.specs, replica.not_owned
    local = {name: [spec.shape, spec.tied] for name, spec in specs.items() if name not in not_owned}
    whole = {}
    for source in range(comm.size):
        for name, (shape, tied) in comm.broadcast_json(local, source, "names of the model").items():
            whole[name] = ShardSpec(tuple(shape), (0,) * len(shape), tuple(tied))
    return whole


def check_model(
    own: Mapping[str, ShardSpec],
    saved: Mapping[str, Sequence[int]],
    where: str,
    remedy: str = "build the model that was saved",
) -> None:
    """Check that a checkpoint has the tensor names and shapes of this run's model.

    Args:
        own: every tensor of the model, from ``catalogue``; a tied tensor may be saved under any of its names.
        saved: shapes of the checkpoint's tensors, by name.
        where: the checkpoint's path, which the error states.
        remedy: advice at the end of the error.

    Raises:
        CheckpointError: names or shapes differ; the error lists tensors.
    """
    wrong = [
        text
        for kind, names in _differences(own, saved)
        if names
        for text in [f"{kind}: {', '.join(names[:_MOST_LISTED])}{_more(len(names))}"]
    ]
    if wrong:
        raise CheckpointError(
            "the checkpoint is of another model",
            where=where,
            why="; ".join(wrong),
            remedy=remedy,
        )


def _differences(own: Mapping[str, ShardSpec], saved: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, list[str]]]:
    known = {other: spec.shape for name, spec in own.items() for other in (name, *spec.tied)}
    yield "missing", sorted(name for name, spec in own.items() if not {name, *spec.tied} & saved.keys())
    yield "unexpected", sorted(saved.keys() - known.keys())
    yield (
        "of another shape",
        [
            f"{name} {list(saved[name])}, not {list(known[name])}"
            for name in sorted(saved.keys() & known.keys())
            if tuple(saved[name]) != known[name]
        ],
    )


def _more(count: int) -> str:
    return f" and {count - _MOST_LISTED} more" if count > _MOST_LISTED else ""


def load_checked(manifest: Manifest, load: Callable[[Any], None], saved: Any, name: str) -> None:
    """Restore a value from a checkpoint by ``load(saved)``; raise CheckpointError if the value is malformed.

    Args:
        manifest: the checkpoint's manifest, whose path the error states.
        load: function that restores the value; raises KeyError, TypeError or ValueError where it is malformed.
        saved: the value, taken from the manifest's ``facts`` (the run's state beside its tensors) and passed to
            ``load``.
        name: name of the value, which the error states.

    Raises:
        CheckpointError: ``load`` raised KeyError, TypeError or ValueError.
    """
    try:
        load(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's {name} is none", where=str(manifest.path), why=repr(error), remedy=REMEDY
        ) from error
