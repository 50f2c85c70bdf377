"""A layer's slice on this rank, and dropout of a slice."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional

from tutti.comm.differentiable import TensorRanks
from tutti.comm.partition import even_share
from tutti.errors import UsageError, script_line


class SliceNames(Protocol):
    """Finds the split parameter of a model from which a tensor was computed by elementwise functions (protocol)."""

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the split parameter from which a tensor was computed by elementwise functions, or None.

        Args:
            tensor: any tensor, also the parameter itself.
        """


SLICE_NAMES: WeakSet[SliceNames] = WeakSet()
"""Those of all split models of this process."""


def slice_of(tensor: Tensor) -> str | None:
    """Return the name of the parameter from whose tensor-parallel slice the script has made a tensor, or None.

    All split models of this process are looked through; ``SplitReads.name_of`` looks through one of them. Results of
    elementwise functions count, such as a moving average of the slice's values or a copy of them, and so does the
    parameter itself.

    Args:
        tensor: any tensor.
    """
    return next((name for names in SLICE_NAMES if (name := names.name_of(tensor)) is not None), None)


def check_input(value: Tensor, layer: str) -> None:
    """Raise UsageError if the script's input of a split layer is this rank's slice of a parameter, not a whole tensor.

    Args:
        value: the layer's input.
        layer: name of the layer in the whole model.
    """
    if (name := slice_of(value)) is None:
        return
    module = name.rpartition(".")[0]
    raise UsageError(
        f"the script gives the layer {layer} the parameter {name}, of which each tensor rank has a slice",
        where=script_line(),
        why="the layer would compute with some rows alone",
        remedy=f"leave the parameter whole by tensor:whole={module or name}, or take strategy='mirrored'",
    )


class SilentRanks(TensorRanks):
    """Rank and number of tensor-parallel ranks without communication: every collective raises RuntimeError.

    For trials of a split model on one rank.

    Args:
        rank: index of this rank among the tensor-parallel ranks.
        size: number of tensor-parallel ranks.

    Attributes:
        rank, size: as given.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a trial on one rank has no other ranks to communicate with")

    all_reduce_gradient = all_reduce_gradients = all_reduce = all_gather = all_gather_input = _refuse
    take_slice = reduce_scatter = all_gather_stacked = _refuse
    all_reduce_detached = all_gather_detached = reduce_scatter_detached = _refuse


class LayerSlice(NamedTuple):
    """Slice of a tensor-parallel layer or tensor that this rank holds, with the ranks that hold the other slices.

    Attributes:
        name: name of the layer in the whole model.
        ranks: collectives over the tensor-parallel ranks that hold the slices.
        length: number of outputs, inputs, heads, rows of a table, features or positions that the ranks divide.
        sequence: sequence parallelism: outputs that would be whole on all ranks are split by positions.
    """

    name: str
    ranks: TensorRanks
    length: int
    sequence: bool = False

    @property
    def mine(self) -> range:
        """Range of the layer's heads, features or other units that this tensor-parallel rank holds.

        The units 0 … ``length`` - 1 are divided over the ranks, contiguously and in rank order. The shares are
        equal; if the number of ranks does not divide ``length``, the first ranks have one unit more.
        """
        return even_share(self.length, self.ranks.size, self.ranks.rank)


def mark_local(part: Tensor, sections: tuple[int, ...] = ()) -> None:
    """Record on a tensor that it is this rank's slice of a tensor that a tensor-parallel layer computes.

    Args:
        part: the slice.
        sections: sizes of the parts of the whole tensor's last dimension that are split alike, such as queries, keys
            and values; none for one part.
    """
    part.tutti_sections = sections  # type: ignore[attr-defined]


def local_sections(tensor: object) -> tuple[int, ...] | None:
    """Return the sizes of a slice's sections that ``mark_local`` has recorded, or None for a tensor without the mark.

    Sections are the parts of the whole tensor's last dimension that are split alike, such as queries, keys and values;
    the tuple is empty for a single part.

    Args:
        tensor: any object.
    """
    found: tuple[int, ...] | None = getattr(tensor, "tutti_sections", None)
    return found


def unmark_local(whole: Tensor) -> None:
    """Remove the mark of ``mark_local`` from a tensor that is whole on every rank.

    Args:
        whole: the tensor, such as a sum over ranks that a function mode has taken for a slice.
    """
    whole.tutti_sections = None  # type: ignore[attr-defined]


def dropped(part: Tensor, p: float, dim: int, slice_: LayerSlice) -> Tensor:
    """Apply dropout to this rank's slice of a tensor, with the random draws that one device makes for the whole tensor.

    For tensor parallelism. Not collective: each rank draws for the whole tensor, from equal RNG states, and uses its
    slice of the mask.

    Args:
        part: this rank's slice of the tensor.
        p: probability of zero.
        dim: the split dimension; may count from the end.
        slice_: position of this rank's slice. Its ``length`` is the size of the whole tensor along ``dim``, or the
            number of groups of equal size along it, such as heads.

    Returns:
        ``part`` times the mask and 1 / (1 - p), in a new tensor; ``part`` itself for ``p`` 0.
    """
    here = len(slice_.mine)
    if p == 0.0:
        return part
    shape, each = list(part.shape), part.shape[dim] // here
    shape[dim] = each * slice_.length
    # Dropout draws in memory order.
    order = sorted(range(part.dim()), key=lambda d: -part.stride()[d])
    ones = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device).fill_(1)
    noise = functional.dropout(ones, p)
    return part * noise.narrow(dim, each * slice_.mine.start, part.shape[dim])
