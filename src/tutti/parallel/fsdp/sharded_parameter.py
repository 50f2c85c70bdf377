"""One parameter sharded by rows: the rows that this rank's optimizer updates, with their place in checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.comm.partition import block
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import ShardSpec, TensorSlice


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """This rank's rows (a block of the first dimension) of one parameter that is sharded by ZeRO or FSDP2.

    Attributes:
        name: the parameter's name in the unsharded model.
        parameter: the rows, as a plain leaf tensor. It is the parameter object that the model had before the sharding,
            so that an optimizer built from the model's parameters updates the rows.
        spec: global shape and offset of the rows. A 0-d parameter is one row.
        local: shape of the tensor that the rows are cut from: a tensor slice under tensor parallelism.
        leads: whether that slice is at offset 0; only its ranks write optimizer scalars into a checkpoint.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    local: tuple[int, ...]
    leads: bool = True

    def tensor_slice(self, tensor: Tensor) -> Tensor | TensorSlice | None:
        """Return a tensor of the shape of this rank's rows, such as optimizer state, with its place in the full tensor.

        The object describes one parameter that ZeRO or FSDP2 shards: this rank's rows, a block of the first dimension.
        This rank writes the result into a checkpoint; it shares memory with ``tensor``.

        Args:
            tensor: of the shape of this rank's rows of the parameter.

        Returns:
            A ``TensorSlice``, which holds the tensor, the parameter's global shape and the offset of the rows in it; a
            0-d view of ``tensor`` for a 0-d parameter; None where this rank has no rows.
        """
        if not tensor.numel():
            return None
        if not self.spec.shape:
            return tensor.view(())
        return TensorSlice(tensor, self.spec.shape, self.spec.offset, self.spec.dim, self.spec.ranges)

    def read(self, saved: SavedState, group: str, name: str) -> Tensor:
        """Read this rank's rows of one sharded parameter, or of its optimizer state, from a checkpoint.

        The rows are this rank's block of the parameter's first dimension. Only their bytes are read. Not collective.

        Args:
            saved: the checkpoint.
            group: group of tensors in the checkpoint: ``model``, ``ema`` (moving average of the weights) or ``optim``.
            name: name of the tensor in the group, which has the parameter's global shape.

        Returns:
            A tensor on the CPU of the shape of this rank's rows, in the dtype of the checkpoint; where the rank has no
            rows, an empty tensor in the parameter's dtype. It may be a view of memory that ``saved`` keeps: the caller
            copies it before writing to it.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or one of its files is damaged.
        """
        if not self.parameter.numel():
            return self.parameter.detach().cpu().clone()
        if not self.spec.shape:
            return saved.get(group, name).view(self.parameter.shape)
        parts = [saved.part(group, name, *region) for region in self.spec.regions(self.parameter.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.spec.dim)

    def known(self, names: Collection[str]) -> str:
        """Return the one of this sharded parameter's names that is in ``names``.

        A parameter that several modules share (tied weights) has one name in each; a checkpoint may have any of them.

        Args:
            names: names of parameters, such as those in a checkpoint.

        Returns:
            The parameter's own name if it is in ``names``, else the first of its tied names that is in ``names``; its
            own name if none of them is.
        """
        return next((name for name in (self.name, *self.spec.tied) if name in names), self.name)


def local_rows(
    name: str, parameter: nn.Parameter, spec: ShardSpec, local: Sequence[int], comm: Communicator
) -> ShardedParameter:
    """Describe this rank's rows of a parameter: the parameter's name, the rows' shape and offset in the parameter.

    Nothing is cut or copied here. The ranks of ``comm`` hold contiguous blocks of the first dimension.

    Args:
        name: name of the parameter in the unsharded model.
        parameter: this rank's rows, already cut.
        spec: global shape and offset of the tensor that the rows are cut from.
        local: shape of that tensor, which is a tensor slice under tensor parallelism; () for a 0-d parameter.
        comm: the ranks that share the rows of the parameter.

    Returns:
        A ``ShardedParameter`` for optimizers and checkpoints: ``name``, ``parameter``, the offset of the rows in the
        global tensor, ``local``, and whether the tensor that the rows are cut from is at offset 0.
    """
    leads = not any(spec.offset)
    if local:
        spec = spec.cut(block(local[0], comm.size, comm.rank).start)
    return ShardedParameter(name, parameter, spec, tuple(local), leads)
