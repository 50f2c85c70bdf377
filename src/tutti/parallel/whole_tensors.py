"""Optimizer steps on whole tensors where ranks hold slices: an owner rank gathers each tensor and steps it.

Optimizers that are not elementwise (``torch.optim.Muon``, ``Adafactor``, gradient clipping by tensor) compute another
update on slices than on whole tensors. ``tutti.optim.mixing`` detects them by trial. Every tensor then has one owner
among the ranks that hold its slices. In each update the owner receives all slices of gradient and parameter, steps the
whole tensor with its optimizer state, and sends slices of the result back: two all-to-alls. Owners are chosen for an
even load, and the state of each tensor is on its owner only. Where an update depends on several tensors together, one
rank owns all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import load_optimizer, optimizer_tensors
from tutti.comm.communicator import Communicator
from tutti.comm.partition import owners
from tutti.errors import UsageError
from tutti.optim.mixing_rules import optimizer_class_name
from tutti.optim.optimizer_copy import NestedState
from tutti.optim.several import slots, trained_by
from tutti.parallel.split_optimizer import SliceRegions
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import ShardSpec

Region = tuple[slice, ...]
"""Index of a region in a whole tensor, one slice a dimension; empty for a 0-d tensor."""


class GatheredTensor(NamedTuple):
    """A parameter whose slices the ranks of one device mesh axis send to an owner rank for the optimizer's step.

    Attributes:
        parameter: this rank's parameter.
        local: shape of ``parameter``: of this rank's slices, concatenated along the first dimension.
        shape: shape of the gathered tensor.
        regions: for each rank of the axis, in rank order, the regions of its slices in the gathered tensor, each a
            tuple of one ``slice`` a dimension.
        alike: whether every rank of the axis holds the whole tensor.
        dim: the dimension along which this rank's slices are concatenated.
    """

    parameter: nn.Parameter
    local: tuple[int, ...]
    shape: tuple[int, ...]
    regions: Sequence[Sequence[Region]]
    alike: bool = False
    dim: int = 0


class WholeTensors:
    """Steps an optimizer on whole tensors, of which each rank holds only slices.

    Each tensor has an owner rank, which gathers the slices of parameter and gradient, steps on the whole tensor, sends
    the slices of the result back, and alone keeps the tensor's optimizer state. It serves optimizers whose update of an
    element depends on others.

    Args:
        axes: mesh axes in the order of gathering, each an object that ``gather_axis`` returns, with its tensors and
            their owners. An axis lists only tensors that this rank owns on the axes before it.
        optimizer: the optimizer; its present state of tensors that this rank does not own is dropped.
    """

    def __init__(self, axes: Sequence[GatherAxis], optimizer: Optimizer) -> None:
        self._axes = axes
        self._gathered = {part.parameter for axis in axes for part in axis.parts}
        self._owned = {p for p in self._gathered if all(axis.owns(p) for axis in axes)}
        self._members = {p for group in optimizer.param_groups for p in group["params"]}
        nested = NestedState(optimizer)
        for parameter in self._gathered - self._owned:
            nested.drop(parameter)

    def gathers(self, parameter: Tensor) -> bool:
        """Return whether the slices of this tensor are gathered on one owner rank for the optimizer's step.

        True on every rank that holds a slice, if the tensor is split over ranks and its optimizer cannot step on
        slices. Only the owner rank then has the optimizer state of the tensor.

        Args:
            parameter: one of this rank's parameters.
        """
        return parameter in self._gathered

    def is_new(self, parameter: Tensor) -> bool:
        """Return whether this parameter was not in the optimizer's groups when this object was constructed.

        Slices of such a parameter would not be gathered for the steps, which need whole tensors.

        Args:
            parameter: one of this rank's parameters.
        """
        return parameter not in self._members

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Run ``optimizer.step()`` on the whole tensors that this rank owns, and on its tensors that are not gathered.

        Each tensor that is split over ranks has one owner rank. All ranks send their slices of parameter and gradient
        to the owner and receive slices of the updated parameter; afterwards ``.data``, in its former memory, and
        ``.grad`` are this rank's slices again. ``optimizer.step()`` is not called on a rank that owns no tensor and has
        no gradient of its other parameters. Collective: on each mesh axis of the constructor, two all-to-alls over the
        axis's ranks for each dtype, also for a rank whose parameters have no gradient.

        An exception, of ``optimizer.step()`` or of a collective, leaves ``.data`` and ``.grad`` of the split tensors as
        they were. Other ranks' optimizer states, and tensors that are not split, may be updated by then.

        Args:
            optimizer: an optimizer whose parameters are this rank's slices.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        memory: dict[Tensor, Tensor] = {p: p.data for p in self._gathered}
        values = dict(memory)
        gradients: dict[Tensor, Tensor | None] = {p: p.grad for p in self._gathered}
        shown = dict(gradients)
        try:
            for axis in self._axes:
                axis.gather(values, gradients)
            for parameter in self._gathered:
                parameter.grad = None
                if parameter in self._owned:
                    parameter.data = values[parameter]
                    parameter.grad = gradients[parameter]
            self._step_owned(optimizer)
            for parameter in self._owned:
                values[parameter] = parameter.data
            for axis in reversed(self._axes):
                axis.give_back(values)
        finally:
            for tensor, slice_ in memory.items():
                tensor.grad = None
                tensor.data = slice_
                tensor.grad = shown[tensor]
        for tensor, slice_ in memory.items():
            if tensor in values:
                slice_.copy_(values[tensor])

    def _step_owned(self, optimizer: Optimizer) -> None:
        """Run ``optimizer.step()`` without the tensors that other ranks own."""
        members = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in self._owned or p not in self._gathered]
        try:
            rest = [p for group in optimizer.param_groups for p in group["params"] if p not in self._owned]
            # Skipped where no parameter has a gradient, which some optimizers refuse.
            if self._owned or any(p.grad is not None for p in rest):
                optimizer.step()
        finally:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = parameters

    def tensors(self, optimizer: Optimizer, named: NamedParameters) -> dict[str, Tensor]:
        """Return the optimizer state, for a checkpoint, of the parameters that this rank gathers whole for the step.

        Each tensor that is split over ranks has one owner rank, which gathers the whole tensor; no other rank has the
        optimizer state of the tensor. Not collective.

        Args:
            optimizer: the optimizer.
            named: (name, parameter) pairs; parameters that another rank owns, or that are not gathered, are left out.

        Returns:
            A dict with keys ``"{parameter name}/{state key}"``, such as ``"head.weight/exp_avg"``; the tensors have the
            shape of the whole parameter, or are 0-d. They are the optimizer's own, which the next step changes.
        """
        return optimizer_tensors(optimizer, [(name, p) for name, p in named if p in self._owned])

    def load(
        self,
        optimizer: Optimizer,
        named: NamedParameters,
        saved: SavedState,
        specs: Mapping[str, ShardSpec],
    ) -> None:
        """Load the optimizer state of the parameters that this rank gathers whole for the step from a checkpoint.

        Each tensor that is split over ranks has one owner rank, which gathers the whole tensor; no other rank has the
        optimizer state of the tensor. Not collective. The parameters keep their values.

        Args:
            optimizer: the optimizer, whose ``state`` is written.
            named: (name, parameter) pairs of its parameters; those that another rank owns, or that are not gathered,
                are ignored.
            saved: the checkpoint, whose group ``optim`` is read.
            specs: global shape and tied names of each parameter, by name.

        Raises:
            CheckpointError: a file of the checkpoint differs from its manifest.
        """
        mine = [(name, p) for name, p in named if p in self._owned]
        whole_specs = {
            name: ShardSpec(specs[name].shape, (0,) * len(specs[name].shape), specs[name].tied) for name, _ in mine
        }
        memory = {p: p.data for _, p in mine}
        try:
            for name, parameter in mine:
                parameter.data = parameter.data.new_empty(specs[name].shape)
            load_optimizer(optimizer, mine, saved, "optim", specs=whole_specs)
        finally:
            for parameter, slice_ in memory.items():
                parameter.data = slice_


class WholeTensorsOf:
    """Steps each optimizer of a run on whole tensors where it needs them: holds one ``WholeTensors`` for each.

    Args:
        found: pairs of an optimizer that cannot step on slices of tensors, and the object that steps it on whole ones.
    """

    def __init__(self, found: Sequence[tuple[Optimizer, WholeTensors]]) -> None:
        self._found = found

    def of(self, optimizer: Optimizer) -> WholeTensors | None:
        """Return the object that steps ``optimizer`` on whole tensors; None where the optimizer can step on slices.

        Such an object gathers each tensor that is split over ranks on one owner rank for the step.

        Args:
            optimizer: one of the run's optimizers.
        """
        return next((gathers for member, gathers in self._found if member is optimizer), None)

    def check_members(self, named: NamedParameters) -> None:
        """Raise UsageError if the script has added a parameter to an optimizer that steps on whole tensors.

        Not collective.

        Args:
            named: (name, parameter) pairs of this rank's parameters.

        Raises:
            UsageError: names the first such parameter; which rank gathers each tensor was decided at the start.
        """
        for member, gathers in self._found:
            members = set(trained_by(member, [p for _, p in named]))
            if name := next((name for name, p in named if p in members and gathers.is_new(p)), None):
                refuse_growth(member, name)

    def gathers(self, parameter: Tensor) -> bool:
        """Return whether the slices of this tensor are gathered on an owner rank for any optimizer's step.

        If so, the owner steps on the whole tensor, and only the owner has the optimizer state of the tensor.

        Args:
            parameter: one of this rank's parameters.
        """
        return any(member.gathers(parameter) for _, member in self._found)

    def tensors(self, named: NamedParameters) -> dict[str, Tensor]:
        """Return all optimizers' state, for a checkpoint, of the parameters that this rank gathers whole for a step.

        Each tensor that is split over ranks has one owner rank, which gathers the whole tensor; no other rank has the
        optimizer state of the tensor. Not collective.

        Args:
            named: (name, parameter) pairs; parameters that another rank owns, or that are not gathered, are left out.

        Returns:
            A dict with keys ``"{parameter name}/{state key}"``, such as ``"head.weight/exp_avg"``; the tensors have the
            shape of the whole parameter, or are 0-d. They are the optimizers' own, which the next step changes.
        """
        return {
            name: tensor for member, gathers in self._found for name, tensor in gathers.tensors(member, named).items()
        }

    def load(self, named: NamedParameters, saved: SavedState, specs: Mapping[str, ShardSpec]) -> None:
        """Load the state of the parameters that this rank gathers whole for a step into each of the run's optimizers.

        Each tensor that is split over ranks has one owner rank, which gathers the whole tensor; no other rank has the
        optimizer state of the tensor. Not collective. The parameters keep their values.

        Args:
            named: (name, parameter) pairs; parameters that another rank owns, or that are not gathered, are ignored.
            saved: the checkpoint, whose group ``optim`` is read.
            specs: global shape and tied names of each parameter, by name.

        Raises:
            CheckpointError: a file of the checkpoint differs from its manifest.
        """
        for member, gathers in self._found:
            gathers.load(member, named, saved, specs)


def gatherers_of_optimizers(
    optimizer: Optimizer | None, complete: Callable[[Optimizer | None], WholeTensors | None]
) -> WholeTensorsOf | None:
    """Build the object that gathers whole tensors for the step of each optimizer that cannot step on slices.

    Sends nothing itself; the calls of ``complete``, one for each optimizer that the run combines, may be collective.

    Args:
        optimizer: the run's optimizer, which may combine several; None without parameters on this rank.
        complete: prepares one optimizer and returns the object that steps it on whole tensors, None if it can step on
            slices; called with None for an optimizer without parameters on this rank.

    Returns:
        A ``WholeTensorsOf``, whose method ``of(optimizer)`` returns the object that steps this optimizer on whole
        tensors; None where no optimizer of this rank needs one.
    """
    made = [(member, complete(member)) for member in slots(optimizer)]
    found = [(member, gathers) for member, gathers in made if member is not None and gathers is not None]
    return WholeTensorsOf(found) if found else None


def refuse_growth(optimizer: Optimizer | None, name: str) -> NoReturn:
    """Raise UsageError: a script trains a further parameter, and the optimizer steps on whole tensors.

    Args:
        optimizer: the optimizer, named in the error.
        name: the parameter that the script has unfrozen, or added to the optimizer.

    Raises:
        UsageError: always; which rank gathers each tensor and keeps its state was decided at the start.
    """
    raise UsageError(
        f"the script trains {name} from here on, which was frozen or not in the optimizer in tutti.prepare",
        why=f"{optimizer_class_name(optimizer)} needs whole tensors, and which rank keeps the state of each was decided"
        " then",
        remedy="give it to the optimizer and freeze it after tutti.prepare, or take strategy='mirrored'",
    )


class GatherAxis:
    """The tensors that are gathered along one mesh axis, in the same order on all its ranks.

    Args:
        comm: the ranks of the axis.
        parts: the tensors.
        owner: for each tensor the rank that gathers it.
    """

    def __init__(self, comm: Communicator, parts: Sequence[GatheredTensor], owner: Sequence[int]) -> None:
        self._comm, self.parts, self._owner = comm, parts, owner
        mine = [part.parameter for part, rank in zip(parts, owner, strict=True) if rank == comm.rank]
        self._mine = set(mine)
        self._here = {part.parameter for part in parts}
        self._dtypes = sorted({part.parameter.dtype for part in parts}, key=str)

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this rank gathers the slices of this tensor along the mesh axis, or no rank does.

        Args:
            parameter: one of this rank's parameters; True if it is not gathered along this axis.
        """
        return parameter in self._mine or parameter not in self._here

    def gather(self, values: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor | None]) -> None:
        """Gather slices of parameters and gradients to whole tensors on each tensor's owner rank along the mesh axis.

        Other ranks drop their slices from ``values``.

        Collective: an all-to-all for each dtype. Ranks without a gradient send zeros; the whole gradient is None only
        where no rank has one.

        Args:
            values: this rank's slices by parameter. The dict is changed in place: tensors that this rank owns become
                whole, other tensors are removed.
            gradients: gradients by parameter. The dict is changed in place: on the owner the whole gradient, on other
                ranks None.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        for dtype in self._dtypes:
            parts = [(part, owner) for part, owner in zip(self.parts, self._owner, strict=True) if _is(part, dtype)]
            messages: list[list[Tensor]] = [[] for _ in range(self._comm.size)]
            for part, owner in parts:
                if _count(part, self._comm.rank, owner):
                    messages[owner] += _packed(part, self._comm.rank, values, gradients)
            come = [
                sum(2 * n + 1 for part, owner in parts if owner == self._comm.rank and (n := _count(part, rank, owner)))
                for rank in range(self._comm.size)
            ]
            received = self._exchange(messages, come, dtype, "tensors for the optimizer").split(come)
            places = [0] * self._comm.size
            for part, owner in parts:
                local = values.pop(part.parameter)
                if owner == self._comm.rank:
                    values[part.parameter], gradients[part.parameter] = self._join(part, local, received, places)
                else:
                    gradients[part.parameter] = None

    def _join(
        self, part: GatheredTensor, local: Tensor, received: Sequence[Tensor], places: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Join the slices of a tensor and of its gradient that the ranks have sent to this rank, which owns it.

        Args:
            part: the tensor.
            local: this rank's slice, for dtype and device.
            received: message of each rank.
            places: index in each message behind which the slices begin; moved on.

        Returns:
            The whole tensor, and the whole gradient, None where no rank has one.
        """
        value, gradient, used = local.new_empty(part.shape), local.new_zeros(part.shape), False
        for rank, message in enumerate(received):
            if n := _count(part, rank, self._comm.rank):
                packed = message[places[rank] : places[rank] + 2 * n + 1].to(local.device)
                places[rank] += 2 * n + 1
                used = used or bool(packed[0])
                _put(value, part.regions[rank], packed[1 : n + 1])
                _put(gradient, part.regions[rank], packed[n + 1 :])
        return value, gradient if used else None

    def give_back(self, values: dict[Tensor, Tensor]) -> None:
        """Send slices of the updated whole tensors from their owner ranks back to all ranks of the mesh axis.

        Collective: an all-to-all for each dtype.

        Args:
            values: whole tensors by parameter on their owner. The dict is changed in place to this rank's slices of all
                tensors.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        here, ranks = self._comm.rank, range(self._comm.size)
        for dtype in self._dtypes:
            parts = [(part, owner) for part, owner in zip(self.parts, self._owner, strict=True) if _is(part, dtype)]
            mine = [part for part, owner in parts if owner == here]
            messages = [
                [values[part.parameter][region].reshape(-1) for part in mine for region in part.regions[rank]]
                for rank in ranks
            ]
            come = [sum(_numbers(part, here) for part, owner in parts if owner == rank) for rank in ranks]
            received = self._exchange(messages, come, dtype, "tensors after the update").split(come)
            places = [0] * self._comm.size
            for part, owner in parts:
                n = _numbers(part, here)
                values[part.parameter] = _joined(part, here, received[owner][places[owner] : places[owner] + n])
                places[owner] += n

    def _exchange(
        self, messages: Sequence[Sequence[Tensor]], come: Sequence[int], dtype: torch.dtype, text: str
    ) -> Tensor:
        sizes = [sum(t.numel() for t in message) for message in messages]
        flat = [tensor.to(self._comm.device) for message in messages for tensor in message]
        send = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._comm.device)
        return self._comm.exchange_parts(send, sizes, come, text)


def _packed(
    part: GatheredTensor, rank: int, values: Mapping[Tensor, Tensor], gradients: Mapping[Tensor, Tensor | None]
) -> list[Tensor]:
    """Return the parts of a message with a slice and its gradient: a flag of the gradient, and the numbers of both."""
    value, gradient = values[part.parameter], gradients[part.parameter]
    flag = value.new_full((1,), float(gradient is not None))
    sent = torch.zeros_like(value) if gradient is None else gradient
    return [flag, *_by_region(part, rank, value), *_by_region(part, rank, sent)]


def _by_region(part: GatheredTensor, rank: int, local: Tensor) -> list[Tensor]:
    """Return the numbers of this rank's slice, flat, for each region of the gathered tensor that it holds."""
    regions = part.regions[rank]
    if len(regions) < 2:
        return [local.reshape(-1)]
    lengths = [region[part.dim].stop - region[part.dim].start for region in regions]
    return [piece.reshape(-1) for piece in local.split(lengths, part.dim)]


def _joined(part: GatheredTensor, rank: int, flat: Tensor) -> Tensor:
    """Return this rank's slice from its numbers, which lie region by region."""
    regions = part.regions[rank]
    if len(regions) < 2:
        return flat.view(part.local)
    pieces = flat.split([_size(region) for region in regions])
    shapes = [[side.stop - side.start for side in region] for region in regions]
    return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], part.dim)


def along_slices(
    here: Sequence[tuple[nn.Parameter, tuple[int, ...], SliceRegions | None]], comm: Communicator, every: bool
) -> list[GatheredTensor]:
    """Return descriptions of the tensors that an owner rank must gather from slices on the ranks of ``comm``.

    Collective over ``comm``: each rank broadcasts the positions of its slices. The tensors themselves are not gathered.

    Args:
        here: for each parameter, the parameter, the shape of this rank's slice, and the slice's regions in the global
            tensor; None for the regions of a tensor that this rank holds whole.
        comm: the ranks, with the same parameters in the same order.
        every: whether to include tensors that all ranks hold whole, because one rank steps all tensors together.

    Returns:
        In the order of ``here``, one ``GatheredTensor`` (named tuple) for each tensor that some rank holds in part, and
        with ``every`` for each other one: the parameter (``parameter``), the shapes of this rank's slice (``local``)
        and of the whole tensor (``shape``), for each rank of ``comm`` the regions of its slices (``regions``), each
        region a tuple of one ``slice`` a dimension, and whether all ranks hold the tensor whole (``alike``).

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    mine = [
        None if split is None else [[[part.start, part.stop] for part in region] for region in split.regions]
        for _, _, split in here
    ]
    tables = [comm.broadcast_json(mine, rank, "slices of the tensors") for rank in range(comm.size)]
    found = []
    for index, (parameter, local, split) in enumerate(here):
        places = [table[index] for table in tables]
        if all(place is None for place in places):
            if every:
                whole = tuple(slice(0, size) for size in local)
                found.append(GatheredTensor(parameter, local, local, [[whole]] * comm.size, alike=True))
            continue
        shape = local if split is None else split.shape
        all_of_it = [[[0, size] for size in shape]]
        regions = [
            [tuple(slice(*part) for part in region) for region in (all_of_it if place is None else place)]
            for place in places
        ]
        found.append(GatheredTensor(parameter, local, shape, regions, dim=0 if split is None else split.dim))
    return found


def gather_axis(
    comm: Communicator, parts: Sequence[GatheredTensor], together: bool, sizes: Sequence[int] | None = None
) -> GatherAxis:
    """Assign an owner rank to each tensor that is gathered along one mesh axis. Not collective.

    The owner gathers the slices, steps the optimizer on the whole tensor and sends the slices of the result back.

    Args:
        comm: the ranks of the axis.
        parts: the tensors, the same on all ranks.
        together: whether rank 0 owns all tensors, for updates that depend on several tensors together.
        sizes: elements of each tensor, to balance the owners' load; default: elements gathered along this axis.

    Returns:
        A ``GatherAxis`` with ``comm``, the tensors and each tensor's owner (a rank of ``comm``), for the argument
        ``axes`` of ``WholeTensors``.
    """
    chosen = [math.prod(part.shape) for part in parts] if sizes is None else sizes
    return GatherAxis(comm, parts, [0] * len(parts) if together else owners(chosen, comm.size))


def _is(part: GatheredTensor, dtype: torch.dtype) -> bool:
    return part.parameter.dtype == dtype


def _numbers(part: GatheredTensor, rank: int) -> int:
    """Return the number of elements of a tensor that a rank holds."""
    return sum(_size(region) for region in part.regions[rank])


def _count(part: GatheredTensor, rank: int, owner: int) -> int:
    """Return the number of elements that a rank sends to the owner; of a replicated tensor only the owner sends."""
    return 0 if part.alike and rank != owner else _numbers(part, rank)


def _size(region: Region) -> int:
    count = 1
    for part in region:
        count *= part.stop - part.start
    return count


def _put(whole: Tensor, regions: Sequence[Region], flat: Tensor) -> None:
    at = 0
    for region in regions:
        target = whole[region]
        target.copy_(flat[at : at + target.numel()].view(target.shape))
        at += target.numel()
