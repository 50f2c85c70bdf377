"""Choose the tensors and optimizer state that a rank writes, and read them back from any partition over ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.optim.optimizer_copy import NestedState, inner_optimizers
from tutti.optim.several import members_of
from tutti.torch_compat import sparse_indices
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import ShardSpec, TensorSlice

_ROWS = ".rows"


def optimizer_tensors(optimizer: Optimizer, named: NamedParameters) -> dict[str, Tensor]:
    """Return an optimizer's state of some parameters as tensors by name, to be saved in a checkpoint.

    Numbers become 0-d tensors. A sparse tensor, such as SGD's momentum of sparse gradients, becomes two: its values as
    a dense tensor, and under ``{key}.rows`` a uint8 flag for each row, 1 for rows that its indices name.

    Args:
        optimizer: the optimizer.
        named: (name, parameter) pairs whose state is returned.

    Returns:
        Tensors by ``{parameter}/{key}``, such as ``layer.weight/exp_avg``. Dense ones are the optimizer's live tensors,
        which its next step changes.
    """
    tensors: dict[str, Tensor] = {}
    nested = NestedState(optimizer)
    for name, parameter in named:
        for key, value in nested.of(parameter).items():
            if isinstance(value, Tensor) and value.is_sparse:
                rows = torch.zeros(len(value), dtype=torch.uint8, device=value.device)
                rows[sparse_indices(value)[0]] = 1
                tensors |= {f"{name}/{key}": value.to_dense(), f"{name}/{key}{_ROWS}": rows}
            elif value is not None:
                tensors[f"{name}/{key}"] = number_tensor(value)
    return tensors


def load_optimizer(
    optimizer: Optimizer,
    named: NamedParameters,
    saved: SavedState,
    group: str,
    prefix: str = "",
    specs: Mapping[str, ShardSpec] | None = None,
) -> None:
    """Load an optimizer's state from a checkpoint, named as by ``optimizer_tensors``; each rank reads only its slices.

    Sets ``optimizer.state`` of each parameter that has saved state; other parameters keep their state. The tensors are
    copies in the saved dtype on the parameter's device, step counters on the device from which the optimizer's kernels
    read them. Not collective.

    Args:
        optimizer: the optimizer over this rank's parameters.
        named: (name, parameter) pairs of this rank.
        saved: the tensors of the checkpoint.
        group: the checkpoint's group of tensors, such as ``optim``.
        prefix: beginning of the tensors' names before ``{parameter}/{key}``.
        specs: by name of each parameter a ``ShardSpec``: the shape of the whole parameter, the offset of this rank's
            slice in it, and further (tied) names; None if this rank holds all parameters whole.

    Raises:
        CheckpointError: a file differs from the checkpoint's manifest.
    """
    keys: dict[str, list[str]] = {}
    nested = NestedState(optimizer)
    for entry in saved.names(group):
        if entry.startswith(prefix):
            owner, _, key = entry.removeprefix(prefix).rpartition("/")
            keys.setdefault(owner, []).append(key)
    for name, parameter in named:
        spec = ShardSpec(tuple(parameter.shape), ()) if specs is None else specs[name]
        known = next((n for n in (name, *spec.tied) if n in keys), None)
        if known is not None:
            entries = {key: f"{prefix}{known}/{key}" for key in sorted(keys[known])}
            state = {
                key: _like(_part(saved, group, entry, spec, parameter.shape), parameter)
                for key, entry in entries.items()
            }
            for key in [key for key in state if key.endswith(_ROWS)]:
                rows, whole = state.pop(key).nonzero(), key.removesuffix(_ROWS)
                values = state[whole][rows.squeeze(1)]
                state[whole] = torch.sparse_coo_tensor(
                    rows.T, values, state[whole].shape, is_coalesced=True, check_invariants=False
                )
            nested.put(parameter, state)
    place_step_counters(optimizer)


def written(
    tensors: Mapping[str, Tensor],
    replica: ReplicaRunner,
    comm: Communicator,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor | TensorSlice]:
    """Return the tensors that this rank writes into a checkpoint, so that every tensor is written by one rank alone.

    Tensors that another rank of this replica owns (such as tied weights) are left out, and tensors of which the ranks
    of ``comm`` hold copies are divided among these ranks by size. A whole tensor beside a sliced parameter, such as a
    step counter, is written by a rank with the parameter's first slice. Not collective; every rank computes the same
    division.

    Args:
        tensors: tensors by parameter or buffer name, or by ``{parameter}/{key}`` for an optimizer's state.
        replica: this rank's part of the model: the shape of each whole tensor and the place of this rank's slice.
        comm: the ranks that hold the same tensors and share the writing.
        shapes: for an optimizer's state, this rank's local shape of each parameter by its name: a state tensor of this
            shape is a slice like the parameter; another, such as a step counter, is whole. None: the tensors are
            parameters and buffers.

    Returns:
        Tensors by name, those of ``tensors`` without a copy; a slice of a larger tensor as a ``TensorSlice`` with the
        whole shape and its offset.
    """
    found: dict[str, Tensor | TensorSlice] = {}
    own = {name: _owner(name, replica) for name in tensors}
    not_owned = {name for name, owner in own.items() if owner in replica.not_owned}
    for name, tensor in mine_of({n: t for n, t in tensors.items() if n not in not_owned}, comm.rank, comm.size).items():
        spec = replica.specs[own[name]]
        local = tuple(tensor.shape) if shapes is None else shapes[own[name]]
        if tensor.shape == local and tensor.dim() == len(spec.shape) and local != spec.shape:
            found[name] = TensorSlice(tensor, spec.shape, spec.offset, spec.dim, spec.ranges)
        elif not any(spec.offset):
            # A scalar beside a sliced tensor, such as a step counter, is equal on all ranks: the first one writes it.
            found[name] = tensor
    return found


def read_local(saved: SavedState, group: str, name: str, replica: ReplicaRunner, local: Sequence[int]) -> Tensor:
    """Read this rank's slice of one tensor from saved state, whose sharding may have been another. Not collective.

    Args:
        saved: the tensors of the checkpoint.
        group: the checkpoint's group of tensors, such as ``model``.
        name: the tensor's name, a key of ``replica.specs``; the checkpoint must have it, or a tied name.
        replica: this rank's part of the model, whose ``specs`` give the whole shape and the slice's place.
        local: shape of this rank's slice.

    Returns:
        The slice, on the CPU if read from files; the whole saved tensor where its shape is not that of the model's
        whole tensor. Of a state in memory (``GivenState``) it may be a view.

    Raises:
        CheckpointError: there is no such tensor, or a file differs from the checkpoint's manifest.
    """
    spec = replica.specs[name]
    return _part(saved, group, stored_name(saved.names(group), name, spec), spec, local)


def stored_name(names: Collection[str], name: str, spec: ShardSpec, prefix: str = "") -> str:
    """Return the first name of a model's tensor, its own or a tied one, under which a checkpoint has the tensor.

    If the checkpoint has it under no name, the result is the tensor's own name. ``prefix`` is part of the result.

    Args:
        names: names of the checkpoint's tensors.
        name: the tensor's name in the model.
        spec: shape and place of the tensor, whose ``tied`` lists its other names.
        prefix: beginning of the checkpoint's names of such tensors, before the name in the model.
    """
    return prefix + next((n for n in (name, *spec.tied) if prefix + n in names), name)


def _part(saved: SavedState, group: str, name: str, spec: ShardSpec, local: Sequence[int]) -> Tensor:
    if tuple(local) == spec.shape or saved.shape(group, name) != spec.shape:
        return saved.get(group, name)
    parts = [saved.part(group, name, offset, shape) for offset, shape in spec.regions(local)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, spec.dim)


def region_index(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a rectangular region of a tensor, one ``slice`` a dimension.

    Args:
        offset: index of the region's first element, one number a dimension.
        shape: shape of the region.

    >>> region_index((2, 0), (3, 4))
    (slice(2, 5, None), slice(0, 4, None))
    """
    return tuple(slice(begin, begin + length) for begin, length in zip(offset, shape, strict=True))


def cut_state(optimizer: Optimizer, slices: Mapping[Tensor, ShardSpec]) -> None:
    """Cut optimizer state that has the shape of whole parameters to this rank's slices, in place.

    Optimizers such as Adagrad make such state in their constructor.

    Args:
        optimizer: the optimizer, whose ``state`` is changed; tensors of other shapes, such as step counters, stay.
        slices: by parameter object of the optimizer, which is this rank's slice, a ``ShardSpec``: the shape of the
            whole parameter and the offset of the slice in it.
    """
    nested = NestedState(optimizer)
    for parameter, spec in slices.items():
        state = nested.of(parameter)
        cuts: dict[str, Tensor] = {}
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.shape != spec.shape or parameter.shape == spec.shape:
                continue
            if not spec.shape:
                # A 0-d parameter is one row, on the first rank. Its step counter is also 0-d, but is not sharded.
                cut = value if is_step_counter(key) else value.view(1)[: parameter.numel()]
            elif not parameter.numel():
                cut = value.new_empty(parameter.shape)
            else:
                cut = torch.cat([value[region_index(*region)] for region in spec.regions(parameter.shape)], spec.dim)
            cuts[key] = cut.clone()
        if cuts:
            nested.put(parameter, {**state, **cuts})


def _owner(name: str, replica: ReplicaRunner) -> str:
    return name if name in replica.specs else name.rpartition("/")[0]


def mine_of(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Divide the writing of tensors that several ranks hold in copies: return the tensors for this rank to write.

    Of the tensors in the order of their sizes, largest first and equal ones by name, number i goes to rank i mod
    ``ranks``, so that all ranks write about as many bytes. Not collective: every rank computes the same division.

    Args:
        tensors: all tensors, by name.
        rank: this rank, from 0.
        ranks: number of ranks that hold the tensors.

    Returns:
        Tensors by name, without a copy; together the ranks' results are ``tensors``.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    return {name: tensors[name] for name in ordered[rank::ranks]}


def number_tensor(value: Any) -> Tensor:
    """Return a tensor unchanged, and a Python number as a 0-d float64 tensor, so that checkpoints can hold both.

    Args:
        value: a tensor or a number of an optimizer's state, such as a step counter.
    """
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def is_step_counter(key: str) -> bool:
    """Return whether a key of optimizer state names a step counter of PyTorch's: ``step``, or ``PATH.step``.

    The second form is that of an optimizer inside another one, such as ``base_optimizer.step``.
    """
    return key.rpartition(".")[2] == "step"


def place_step_counters(optimizer: Optimizer) -> None:
    """Move the step counters of an optimizer's state to the device from which the optimizer's kernels read them.

    For parameter groups with ``fused`` or ``capturable`` this is the parameter's device, in float32; for other groups
    it is the CPU. ``Optimizer.load_state_dict`` does the same.

    Args:
        optimizer: the entries ``step`` of its ``state`` are replaced.
    """
    outer = members_of(optimizer)
    members = [*outer, *(inner for member in outer for inner in inner_optimizers(member).values())]
    for each, group in [(member, group) for member in members for group in member.param_groups]:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            step = each.state[parameter].get("step") if parameter in each.state else None
            if isinstance(step, Tensor):
                placed = step.to(parameter.device, torch.float32) if on_device else step.cpu()
                each.state[parameter]["step"] = placed


def _like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Copy a state to the parameter's device and memory format; of another shape than it, only to its device."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
