"""Protocol of the tensors of a checkpoint, read by group and name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class SavedState(Protocol):
    """Read access (protocol) to the tensors of a checkpoint, by group and name.

    A weights file (group ``model`` alone), or a state dict in memory (``model``, and ``optim`` where servers need it),
    may stand for the checkpoint. No method is collective: each rank reads for itself. Tensors that are read are on the
    CPU (those of a state dict on their own device), in the saved dtype, and may be memory that the reader keeps: copy
    them before you write to them.
    """

    def names(self, group: str) -> Collection[str]:
        """Return the names of the checkpoint's tensors in one group; empty if the checkpoint does not have the group.

        Args:
            group: ``model``, ``ema`` (average of the weights), ``optim`` or ``workers`` (state of each logical worker,
                a fixed share of the global batch).
        """

    def get(self, group: str, name: str) -> Tensor:
        """Read one tensor of the checkpoint in full, in the saved dtype.

        Args:
            group: ``model``, ``ema`` (averaged weights), ``optim`` or ``workers`` (state of each logical worker, a
                fixed share of the global batch).
            name: the tensor's name, one of ``names(group)``.

        Returns:
            The tensor, on the CPU if it comes from a file. It may be memory that this object keeps: the caller copies
            it before writing to it.

        Raises:
            CheckpointError: the checkpoint lacks the tensor, or the tensor's file is damaged.
        """

    def shape(self, group: str, name: str) -> tuple[int, ...]:
        """Return the full shape of one tensor of the checkpoint, without reading the tensor.

        Args:
            group: ``model``, ``ema`` (averaged weights), ``optim`` or ``workers`` (state of each logical worker, a
                fixed share of the global batch).
            name: the tensor's name.

        Returns:
            The size of each dimension; empty for a 0-d tensor.

        Raises:
            CheckpointError: the checkpoint lacks the tensor.
        """

    def part(self, group: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a rectangular region of one tensor of the checkpoint.

        A rank that holds a slice of a tensor reads its slice alone.

        Args:
            group: group of the tensor: ``model``, ``ema`` (averaged weights), ``optim`` or ``workers`` (state of each
                logical worker, a fixed share of the global batch).
            name: the tensor's name, one of ``names(group)``.
            offset: index of the region's first element in the tensor, one number for each dimension.
            shape: shape of the region, one number for each dimension.

        Returns:
            The region, in the saved dtype. It may be a view of memory that the reader keeps: copy it before you write
            to it.

        Raises:
            CheckpointError: the checkpoint lacks the tensor, the region does not lie within the tensor, or the tensor's
                file is damaged.
        """
