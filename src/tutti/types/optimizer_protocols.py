"""Factory of optimizers over parameters of a rank, and protocols of reductions that the optimizers' steps need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

NamedParameters: TypeAlias = "Sequence[tuple[str, nn.Parameter]]"
"""Pairs (name, parameter) of a model's parameters, as ``nn.Module.named_parameters`` yields."""

OptimizerFactory: TypeAlias = "Callable[[NamedParameters], Optimizer | None]"
"""Builds an optimizer over this rank's named parameters (None where none of them is trained). A ``GradientSync`` may
call it several times."""


class NormReducer(Protocol):
    """Function that sums squared norms of slices of tensors over the ranks that hold the slices.

    A ``GradientSync`` (reduces gradients and makes the update) installs it in a layer-wise optimizer (such as LAMB) if
    ranks hold slices of layers: rows over the shard ranks, slices over the tensor ranks, or both. The optimizer needs
    the norm of the whole layer.
    """

    def __call__(self, squares: Tensor) -> Tensor:
        """Return the squared norms of full tensors, from those of this rank's slices.

        Collective: an all-reduce over the shard ranks where they hold rows, then one over the tensor ranks where they
        hold slices. Every one of these ranks must pass as many numbers, in the same order. A tensor that is not split
        over the tensor ranks counts once, not once a rank.

        Args:
            squares: sum of squares of each of this rank's slices, a 1-d float64 tensor on the CPU; it may be
                overwritten.

        Returns:
            A tensor on the CPU of the same shape, with the sum of squares of each full tensor in the order of
            ``squares``.
        """


class FullTensorGatherer(Protocol):
    """Gatherer (protocol) of full tensors from the slices that ranks hold.

    A ``GradientSync`` (reduces gradients and makes the update) installs it in an optimizer that needs full matrices
    (Muon). All ranks among which parameters are split must call ``gather`` for the same parameters in the same order.
    """

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather full tensors, such as gradients or momenta of a parameter, from the slices that the ranks hold.

        An optimizer calls this in its step, for each parameter whose update needs full matrices (Muon). Collective:
        where the parameter is sharded by rows, one all-gather over the shard ranks for each tensor; where it is split
        by tensor parallelism, then one all-reduce over the tensor ranks. Nothing is sent for a parameter that is not
        split. All these ranks must call it for the same parameters in the same order, with as many tensors.

        Args:
            parameter: the parameter, the object in the optimizer's groups; ``tensors`` are split over ranks in the same
                way.
            tensors: this rank's slices, each of the parameter's local shape.

        Returns:
            One full tensor for each of ``tensors``, on every rank: new tensors, or ``tensors`` themselves where the
            parameter is not split.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Cut this rank's slice of a parameter out of a tensor of the parameter's full shape. Not collective.

        An optimizer that has computed an update from full matrices (``gather``) calls this to apply its rank's slice.

        Args:
            parameter: the parameter, as this rank holds it; the tensor is split over ranks in the same way.
            whole: a tensor of the parameter's full shape, such as an orthogonalised gradient (Muon).

        Returns:
            The slice, of the parameter's local shape; it may be a view of ``whole``, and is ``whole`` itself where the
            parameter is not split.
        """
