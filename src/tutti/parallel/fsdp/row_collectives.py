"""Norms and full tensors of parameters sharded by rows, for optimizers that cannot step on rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.comm.partition import block
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter
from tutti.parallel.whole_tensors import GatheredTensor, Region


def along_rows(rows: Sequence[ShardedParameter], comm: Communicator) -> list[GatheredTensor]:
    """Return, for each parameter sharded by rows, the shape before sharding and the region that each rank holds.

    Optimizers that need whole tensors, such as those with matrix preconditioners, gather tensors by these descriptions.
    Nothing is gathered here.

    Args:
        rows: this rank's rows of each parameter.
        comm: the ranks that each hold a contiguous block of rows (of the first dimension).

    Returns:
        One ``GatheredTensor`` for each of ``rows``, in order: ``parameter``, the row tensor; ``local``, the shape of
        the row tensor; ``shape``, the shape of the tensor that the rows are cut from (under tensor parallelism this
        rank's slice); and ``regions``, for each rank a list of the regions of that tensor that the rank holds: a single
        tuple with one ``slice`` for each dimension, or an empty list for a rank without rows.
    """
    found = []
    for sharded in rows:
        shape = sharded.local
        regions: list[list[Region]] = []
        for rank in range(comm.size):
            rows_here = block(shape[0] if shape else 1, comm.size, rank)
            other_dims = tuple(slice(0, size) for size in shape)
            regions.append(
                [(slice(rows_here.start, rows_here.stop), *other_dims[1:]) if shape else ()] if len(rows_here) else []
            )
        found.append(GatheredTensor(sharded.parameter, tuple(sharded.parameter.shape), shape, regions))
    return found


class RowNormReducer:
    """Sums squared norms of sharded parameters over the shard ranks, for layer-wise optimizers such as LARS.

    The optimizer's step calls the object, ``reducer(squares)``, with a 1-d tensor: the squared norms of this rank's
    rows, one for each parameter. The call is collective over the shard ranks (one all-reduce, which may overwrite
    ``squares``) and returns a 1-d tensor on the CPU, the squared norms of the full tensors in the same order.
    Implements the protocol ``NormReducer``.

    Args:
        comm: the ranks that each hold some rows (of the first dimension) of every parameter.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, squares: Tensor) -> Tensor:
        """Sum squared norms of this rank's rows over the shard ranks. Collective: one all-reduce.

        Args:
            squares: 1-d tensor with the squared norm of this rank's rows of each parameter; it may be overwritten.

        Returns:
            A 1-d tensor on the CPU with the squared norms of the full tensors, in the same order.
        """
        whole = squares.to(self._comm.device)
        self._comm.start_all_reduce(whole, "all_reduce of the norms of layers").wait()
        return whole.cpu()


class RowGatherer:
    """All-gathers full tensors of which each shard rank holds some rows, for optimizers that need whole tensors.

    Implements the protocol ``FullTensorGatherer``, by which an optimizer such as Muon calls it in its step.

    Args:
        comm: the ranks that each hold some rows (of the first dimension) of every parameter.
        shapes: for each parameter, as the optimizer has it, the shape of the tensor that its rows are cut from.
    """

    def __init__(self, comm: Communicator, shapes: Mapping[Tensor, tuple[int, ...]]) -> None:
        self._comm, self._shapes = comm, shapes

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-gather the full tensors of which ``tensors`` are this rank's rows.

        Collective over the ranks that share the rows: one all-gather for each tensor.

        Args:
            parameter: the tensor of this rank's rows of the parameter, as the optimizer has it; it gives the full
                shape.
            tensors: this rank's rows of a value, a gradient or a state of that parameter, each of the shape of
                ``parameter``.

        Returns:
            One new tensor for each of ``tensors``, of the parameter's shape before it was cut into rows: its full
            shape, or that of this rank's slice under tensor parallelism.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        shape = self._shapes[parameter]
        most, here = len(block(shape[0], self._comm.size, 0)), self._comm.rank
        found = []
        for rows in tensors:
            table = rows.new_empty(self._comm.size * most, *shape[1:])
            send = table[here * most : (here + 1) * most]
            send[: len(rows)].copy_(rows)
            self._comm.gather_into(table.view(-1), send.view(-1), "all_gather of a matrix")
            found.append(table[: shape[0]])
        return found

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's rows of a full tensor, as a view of it. Not collective.

        Each shard rank has a contiguous block of the first dimension of every parameter, its rows. The inverse of
        ``gather``.

        Args:
            parameter: unused here; classes with other layouts than rows look up the parameter's split by it.
            whole: the full tensor, such as one that ``gather`` has returned.
        """
        place = block(len(whole), self._comm.size, self._comm.rank)
        return whole[place.start : place.stop]
