"""The reproducible all-reduce: bit-identical for any number of ranks.

Vectors of logical workers are summed in the tree of ``tutti.comm.summation_tree``. Ranks exchange the sums of their
maximal subtrees in an all-to-all, each adds one slice of all subtrees in tree order, and the slices are all-gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.comm.partition import even_share
from tutti.comm.summation_tree import Node, fold, merge_siblings, subtree_roots


class TreeSum:
    """Sum one vector per worker over all workers, in the tree's order.

    Sent per rank: (its subtrees + 1) · length · (R-1)/R elements; one all-to-all and one all-gather.

    Args:
        comm: the R data ranks.
        workers: N, over all ranks.
        length: elements of a worker's vector.
    """

    def __init__(self, comm: Communicator, workers: int, length: int) -> None:
        self._comm, self._workers, self._length = comm, workers, length
        self._nodes = [subtree_roots(even_share(workers, comm.size, r), workers) for r in range(comm.size)]
        self._pieces: dict[Node, Tensor] = {}

    def add(self, worker: int, vector: Tensor) -> None:
        """Add one worker's vector (length,), in increasing order of workers. The tensor is kept and written to."""
        self._pieces[worker, worker + 1] = vector
        merge_siblings(self._pieces, worker, self._workers, Tensor.add_)

    def total(self) -> Tensor:
        """Return the sum over all workers (length,), bit-identical on every rank, and reset. Collective."""
        pieces, self._pieces = self._pieces, {}
        if self._comm.size == 1:
            return fold((0, self._workers), pieces, Tensor.add_)
        mine = self._nodes[self._comm.rank]
        width = -(-self._length // self._comm.size)
        first = pieces[mine[0]]
        rows = first.new_zeros(len(mine), self._comm.size * width)
        for row, node in zip(rows, mine, strict=True):
            row[: self._length] = pieces.pop(node)
        send = rows.view(len(mine), self._comm.size, width).transpose(0, 1).reshape(-1, width)
        counts = [len(nodes) for nodes in self._nodes]
        receive = first.new_empty(sum(counts), width)
        self._comm.exchange_slices(send, receive, counts, len(mine), "all-to-all of gradient subtrees")
        order = [node for nodes in self._nodes for node in nodes]
        slice_ = fold((0, self._workers), dict(zip(order, receive.unbind(), strict=True)), torch.add)
        return self._comm.gather_slices(slice_.contiguous(), "all-gather of summed gradients")[: self._length]
