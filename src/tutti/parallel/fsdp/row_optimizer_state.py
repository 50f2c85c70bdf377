"""Optimizer state of parameters sharded by rows in checkpoints: what a rank writes, and what it reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import is_step_counter, number_tensor, place_step_counters
from tutti.optim.optimizer_copy import NestedState
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice


def optimizer_slices(
    optimizer: Optimizer, rows: Iterable[ShardedParameter], scalars: bool
) -> dict[str, Tensor | TensorSlice]:
    """Return the optimizer state of this rank's rows, as the rank writes it into a checkpoint. Not collective.

    The rows are this rank's block of the first dimension of each parameter that ZeRO or FSDP2 shards.

    Args:
        optimizer: the optimizer whose parameters are the rows.
        rows: this rank's rows of each parameter whose state this rank writes.
        scalars: whether this rank also writes 0-d state, such as step counters, which all ranks hold alike. Even then
            0-d state is left out for a parameter of which this rank has a slice (tensor parallelism) that does not
            begin at offset 0.

    Returns:
        A dict with keys ``"{parameter name}/{state key}"``, such as ``"head.weight/exp_avg"``. A value is a
        ``TensorSlice``, the state tensor with its place in the full tensor; 0-d state is the plain tensor. State that
        is None and rows of size 0 have no entry. Tensors are not copied: they share memory with ``optimizer.state``,
        which the next step changes.
    """
    found: dict[str, Tensor | TensorSlice] = {}
    nested = NestedState(optimizer)
    for each in rows:
        for key, value in nested.of(each.parameter).items():
            if value is None:
                continue
            tensor = number_tensor(value)
            part = each.tensor_slice(tensor) if tensor.dim() else (tensor if scalars and each.leads else None)
            if part is not None:
                found[f"{each.name}/{key}"] = part
    return found


def load_optimizer_rows(optimizer: Optimizer, rows: Iterable[ShardedParameter], saved: SavedState) -> None:
    """Load the optimizer's state of these rows from a checkpoint; rows without saved state keep the state they have.

    The rows are this rank's block of the first dimension of each parameter that ZeRO or FSDP2 shards; only their bytes
    are read, of a checkpoint of any number of ranks. Not collective.

    Args:
        optimizer: the optimizer whose parameters are the rows; its ``state`` is written.
        rows: this rank's rows of each parameter.
        saved: the checkpoint, whose group ``optim`` has entries ``"{parameter name}/{state key}"``, such as
            ``"head.weight/exp_avg"``, of the full parameter's shape or 0-d.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    keys: dict[str, list[str]] = {}
    nested = NestedState(optimizer)
    for entry in saved.names("optim"):
        owner, _, key = entry.rpartition("/")
        keys.setdefault(owner, []).append(key)
    for each in rows:
        name = each.known(keys)
        # A rank without the element of a 0-d parameter keeps its state: it cannot tell a number from that element.
        if name in keys and (each.spec.shape or each.parameter.numel()):
            entries = {key: f"{name}/{key}" for key in sorted(keys[name])}
            nested.put(each.parameter, {key: _state(each, saved, entry, key) for key, entry in entries.items()})
    place_step_counters(optimizer)


def _state(rows: ShardedParameter, saved: SavedState, entry: str, key: str) -> Tensor:
    shape = saved.shape("optim", entry)
    # A 0-d parameter's state has its shape () throughout; ``step`` is the optimizer's scalar and not a row of it.
    if shape != rows.spec.shape or is_step_counter(key):
        return saved.get("optim", entry).to(rows.parameter.device, copy=True)
    tensor = rows.read(saved, "optim", entry)
    return torch.empty_like(rows.parameter, dtype=tensor.dtype).copy_(tensor)
