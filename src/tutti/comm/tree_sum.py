"""The reproducible all-reduce: bit-identical for any number of ranks.

Vectors of logical workers are summed in the tree of ``tutti.comm.summation_tree``. Ranks exchange the sums of their
maximal subtrees in an all-to-all, each adds one slice of all subtrees in tree order, and the slices are all-gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.comm.partition import even_share, workers_of
from tutti.comm.summation_tree import Node, fold, merge_siblings, subtree_roots


def tree_sum_traffic(ranks: int, workers: int, rank: int, length: int, itemsize: int) -> dict[str, int]:
    """Predict the bytes of a rank's two collectives in one reproducible sum of the logical workers' vectors.

    A logical worker is a fixed share of the global batch. The sum is that of `TreeSum.total`: an all-to-all of partial
    sums and an all-gather of the result. Holds where each worker is computed by one rank alone.

    Args:
        ranks: number of data-parallel ranks, R.
        workers: number of logical workers over all ranks.
        rank: index of the data-parallel rank, from 0.
        length: elements of a worker's vector.
        itemsize: bytes of an element.

    Returns:
        Kind of collective, ``all_to_all`` or ``all_gather`` → bytes of the whole tensor: all rows that the rank sends,
        and the gathered result, both padded to a multiple of R elements; the rank's own R-th part does not travel.
        Empty for one rank.

    >>> tree_sum_traffic(2, 4, 0, 5, 4)
    {'all_to_all': 24, 'all_gather': 24}
    """
    if ranks == 1:
        return {}
    padded = -(-length // ranks) * ranks * itemsize
    return {"all_to_all": len(subtree_roots(even_share(workers, ranks, rank), workers)) * padded, "all_gather": padded}


class TreeSum:
    """Reproducible all-reduce: sums one vector of each logical worker in the order of a binary tree over the workers.

    A logical worker is a fixed share of the global batch. With R data-parallel ranks and N workers, a rank sends (its
    subtrees + 1) · length · (R-1)/R elements, in one all-to-all and one all-gather. For R ≤ N the bits of the sum do
    not depend on R.

    Where R > N, ranks share workers. A worker's vector is then the sum of its ranks' vectors, added one after the other
    in the order of ranks and calls of ``add``, and a rank may call ``add`` any number of times. One more all-gather
    exchanges these numbers.

    Args:
        comm: communicator of the R data-parallel ranks.
        workers: N, over all ranks.
        length: elements of a worker's vector.
        dtype: dtype of the vectors.

    Attributes:
        addends: number of vectors in the last total: N; where ranks share workers, the calls of ``add`` on all ranks.
    """

    def __init__(self, comm: Communicator, workers: int, length: int, dtype: torch.dtype) -> None:
        self._comm, self._workers, self._length, self._dtype = comm, workers, length, dtype
        self._shared = comm.size > workers
        self._nodes = (
            []
            if self._shared
            else [subtree_roots(even_share(workers, comm.size, r), workers) for r in range(comm.size)]
        )
        self._pieces: dict[Node, Tensor] = {}
        self._addends: list[Tensor] = []
        self.addends = workers

    def add(self, worker: int, vector: Tensor) -> None:
        """Add the vector of one logical worker to this rank's partial sums, which ``total`` adds up over ranks. Local.

        A logical worker is a fixed share of the global batch, and its vector for example its gradient.

        Args:
            worker: index of the worker among all N logical workers. With at least as many workers as ranks: each worker
                of this rank once, in increasing order. With more ranks than workers: always the one worker whose
                micro-batches this rank shares with other ranks, in one call for each micro-batch, possibly none.
            vector: the worker's (or micro-batch's) vector, shape (length,); this object keeps and overwrites it.
        """
        if self._shared:
            self._addends.append(vector)
            return
        self._pieces[worker, worker + 1] = vector
        merge_siblings(self._pieces, worker, self._workers, Tensor.add_)

    def add_subtree(self, node: Node, vector: Tensor) -> None:
        """Add the sum over a subtree of logical workers that the caller has added up in tree order itself. Local.

        A logical worker is a fixed share of the global batch. Takes the place of calls of ``add`` where no two ranks
        share a worker.

        Args:
            node: one of the rank's ``subtree_roots``, a range (low, high) of workers.
            vector: sum of these workers' vectors, shape (length,); this object keeps and overwrites it.
        """
        self._pieces[node] = vector

    def total(self) -> Tensor:
        """Return the sum of the vectors of all logical workers, which ``add`` was given; bit-identical on every rank.

        A logical worker is a fixed share of the global batch. Collective over the data-parallel ranks: an all-to-all of
        partial sums and an all-gather of the result, before them an all-gather of the numbers of vectors where several
        ranks compute one worker; blocks. The bits do not depend on the number of ranks, unless several ranks compute
        one worker. Forgets the vectors, so that the next sum can begin.

        Returns:
            The sum, a tensor of shape (length,), equal on all ranks; ``length`` is the number of elements of each
            vector. With one rank it is one of the vectors that ``add`` was given, overwritten.

        Raises:
            KeyError: a worker of this rank was not added; only where no two ranks share a worker.
            MismatchError: deadlock: the ranks wait in different calls.
            PeerError: a rank has ended, a connection broke, or the timeout has passed.
        """
        if self._shared:
            return self._shared_total()
        pieces, self._pieces = self._pieces, {}
        if self._comm.size == 1:
            return fold((0, self._workers), pieces, Tensor.add_)
        mine = self._nodes[self._comm.rank]
        received = self._exchange([pieces.pop(node) for node in mine], [len(nodes) for nodes in self._nodes])
        order = [node for nodes in self._nodes for node in nodes]
        return self._gathered(dict(zip(order, received, strict=True)))

    def _exchange(self, vectors: list[Tensor], counts: list[int]) -> tuple[Tensor, ...]:
        """Return this rank's slice of all ranks' vectors, in rank order; ``counts``: vectors of each rank."""
        size = self._comm.size
        width = -(-self._length // size)
        device = vectors[0].device if vectors else self._comm.device
        rows = torch.zeros(len(vectors), size * width, dtype=self._dtype, device=device)
        for row, vector in zip(rows, vectors, strict=True):
            row[: self._length] = vector
        send = rows.view(len(vectors), size, width).transpose(0, 1).reshape(-1, width)
        receive = rows.new_empty(sum(counts), width)
        self._comm.exchange_slices(send, receive, counts, len(vectors), "all-to-all of gradient subtrees")
        return receive.unbind()

    def _gathered(self, slices: dict[Node, Tensor]) -> Tensor:
        """Return the whole sum from this rank's slice of each subtree."""
        slice_ = fold((0, self._workers), slices, torch.add)
        return self._comm.gather_slices(slice_.contiguous(), "all-gather of summed gradients")[: self._length]

    def _shared_total(self) -> Tensor:
        """Return the sum where ranks share workers."""
        addends, self._addends = self._addends, []
        number = torch.tensor([len(addends)], device=self._comm.device)
        counts = [int(n) for n in self._comm.gather_slices(number, "numbers of gradients of shared workers")]
        self.addends = sum(counts)
        slices: dict[Node, Tensor] = {}
        received = iter(self._exchange(addends, counts))
        for rank, count in enumerate(counts):
            worker = workers_of(self._workers, self._comm.size, rank)[0]
            for _ in range(count):
                piece, before = next(received), slices.get((worker, worker + 1))
                slices[worker, worker + 1] = piece if before is None else before + piece
        return self._gathered(slices)
