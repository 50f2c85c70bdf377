"""What a rank writes of named tensors and of an optimizer's state, and reads again, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.types import Piece, Replica, SavedState, ShardSpec

Named = Sequence[tuple[str, nn.Parameter]]


def optimizer_tensors(optimizer: Optimizer, named: Named) -> dict[str, Tensor]:
    """``{parameter}/{key}`` → tensor, of everything that the optimizer keeps for these parameters; numbers as 0-d."""
    tensors = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}/{key}"] = as_tensor(value)
    return tensors


def load_optimizer(
    optimizer: Optimizer,
    named: Named,
    saved: SavedState,
    group: str,
    prefix: str = "",
    specs: Mapping[str, ShardSpec] | None = None,
) -> None:
    """Give the optimizer the state that ``optimizer_tensors`` named; parameters without any start afresh.

    ``specs``: of the parameters, where some are slices or have other names.
    """
    keys: dict[str, list[str]] = {}
    for entry in saved.names(group):
        if entry.startswith(prefix):
            owner, _, key = entry.removeprefix(prefix).rpartition("/")
            keys.setdefault(owner, []).append(key)
    for name, parameter in named:
        spec = ShardSpec(tuple(parameter.shape), ()) if specs is None else specs[name]
        known = next((n for n in (name, *spec.tied) if n in keys), None)
        if known is not None:
            entries = {key: f"{prefix}{known}/{key}" for key in sorted(keys[known])}
            optimizer.state[parameter] = {
                key: _like(_part(saved, group, entry, spec, parameter.shape), parameter)
                for key, entry in entries.items()
            }


def written(tensors: Mapping[str, Tensor], replica: Replica, comm: Communicator) -> dict[str, Tensor | Piece]:
    """This rank's part of named tensors, or ``{parameter}/{key}``, that all of ``comm`` hold alike.

    Those of which another rank of this replica has the same are left to it; slices say of what they are one.
    """
    found: dict[str, Tensor | Piece] = {}
    own = {name: _owner(name, replica) for name in tensors}
    lent = {name for name, owner in own.items() if owner in replica.borrowed}
    for name, tensor in mine_of({n: t for n, t in tensors.items() if n not in lent}, comm.rank, comm.size).items():
        spec = replica.specs[own[name]]
        if tensor.dim() == len(spec.shape) and tensor.shape != spec.shape:
            found[name] = Piece(tensor, spec.shape, spec.offset, spec.blocks, spec.rows)
        elif not any(spec.offset):
            # A number beside a tensor that is split, such as a step counter, is the same on all ranks.
            found[name] = tensor
    return found


def read(saved: SavedState, group: str, name: str, replica: Replica, local: Sequence[int]) -> Tensor:
    """What this rank holds, of shape ``local``, of one of the replica's tensors in ``saved``."""
    spec, names = replica.specs[name], saved.names(group)
    found = next((n for n in (name, *spec.tied) if n in names), name)
    return _part(saved, group, found, spec, local)


def _part(saved: SavedState, group: str, name: str, spec: ShardSpec, local: Sequence[int]) -> Tensor:
    if tuple(local) == spec.shape or saved.shape(group, name) != spec.shape:
        return saved.get(group, name)
    blocks = [saved.part(group, name, offset, shape) for offset, shape in spec.regions(local)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _owner(name: str, replica: Replica) -> str:
    return name if name in replica.specs else name.rpartition("/")[0]


def mine_of(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """This rank's part of tensors that all ``ranks`` hold alike: every ``ranks``-th by size, for even writing."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    return {name: tensors[name] for name in ordered[rank::ranks]}


def as_tensor(value: Any) -> Tensor:
    """A number as a 0-d tensor of float64, a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """On the parameter's device and in its layout; step counters stay on the CPU, where optimizers want them."""
    if tensor.dim() == 0:
        return tensor.clone()
    placed = torch.empty_like(parameter, dtype=tensor.dtype)
    return placed.copy_(tensor) if tensor.shape == parameter.shape else tensor.to(parameter.device)
