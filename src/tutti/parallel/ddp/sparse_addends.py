"""Terms of a sum of sparse gradients: one for each data rank, or subtrees of logical workers in reproducible mode.

A term is a list of tensors, None where there is no gradient. Sparse gradients in it are matrices (rows, width) with one
sparse dimension, coalesced. The order of the terms is the order of addition, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.comm.partition import even_share, workers_of
from tutti.comm.summation_tree import Node, fold, merge_siblings, subtree_roots
from tutti.comm.tree_sum import TreeSum
from tutti.parallel.ddp.reducers import StartAllReduce
from tutti.torch_compat import sparse_indices, sparse_values

Term = list[Tensor | None]


class SparseAddends(Protocol):
    """Sums the data ranks' sparse gradients in a fixed order of terms (protocol).

    A term is a list of tensors, one for each parameter that may have a sparse gradient, None where there is no
    gradient. A rank contributes one or more terms in a step.
    """

    def put(self, worker: int, term: Term) -> None:
        """Add a term, a list of sparse gradients of this rank, to this step's sum. Not collective.

        Args:
            worker: index of the logical worker, a fixed share of the global batch; calls come in increasing order.
            term: the worker's gradients, one for each parameter; not copied.
        """

    def take(self) -> list[Term]:
        """Return the terms that this rank contributes to the step's sum, in the order of addition, and clear them.

        A term is a list of gradients, one for each parameter: those of a call of ``put``, or sums of several. Not
        collective.
        """

    def counts(self, here: int, text: str) -> list[int]:
        """Return for each data rank its number of terms. Collective only where ranks share logical workers.

        Args:
            here: number of this rank's terms in the step.
            text: names the call in errors; equal on all ranks.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
            MismatchError: the ranks wait in different calls.
        """

    def total(self, gathered: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
        """Return the sum of one gradient's terms, equal on all ranks; None if all terms are None. Not collective.

        Args:
            gathered: for each rank its terms, in the order of ``take``.
        """

    def dense_total(self, vectors: Sequence[Tensor], length: int, dtype: torch.dtype, text: str) -> Tensor:
        """Return the sum of dense vectors, one for each of this rank's terms. Collective over the data ranks.

        Args:
            vectors: in the order of ``take``; may be overwritten.
            length: elements of each vector.
            dtype: of the vectors.
            text: names the call in errors; equal on all ranks.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
            MismatchError: the ranks wait in different calls.
        """


class RankAddends:
    """Sums sparse gradients over the data ranks, each of which contributes one term in a step.

    A rank's term has the gradients that autograd has accumulated over the rank's micro-batches. Terms are added in the
    order of ranks.

    Args:
        comm: the data ranks.
        all_reduce: starts the all-reduce of a dense vector; None takes the all-reduce of the backend.
        chunk: most bytes that ``all_reduce`` is given at once.
        narrow: dtype in which dense vectors are sent; None for their own.
    """

    def __init__(
        self, comm: Communicator, all_reduce: StartAllReduce | None, chunk: int, narrow: torch.dtype | None
    ) -> None:
        self._start, self._chunk, self._narrow = all_reduce or comm.start_all_reduce, chunk, narrow
        self._size = comm.size
        self._terms: list[Term] = []

    def put(self, worker: int, term: Term) -> None:
        """Set the only term that this rank contributes in the step: its sparse gradients.

        Args:
            worker: unused.
            term: the gradients, one for each parameter, summed over all logical workers of the rank.
        """
        self._terms = [term]

    def take(self) -> list[Term]:
        """Return a list with the term that ``put`` has set in this step, or an empty list, and forget the term.

        A term is the list of this rank's gradients, one for each sparse parameter, None where there is none. Not
        collective.
        """
        terms, self._terms = self._terms, []
        return terms

    def counts(self, here: int, text: str) -> list[int]:
        """Return the number of terms of each data rank, in rank order: 1 for each. Not collective.

        Args:
            here, text: unused.
        """
        return [1] * self._size

    def total(self, gathered: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
        """Return the sum of the ranks' sparse matrices in the order of ranks, coalesced; None if all are None.

        Args:
            gathered: for each rank a list of one sparse matrix, or None.
        """
        terms = [term for [term] in gathered if term is not None]
        if len(terms) < 2:
            return terms[0] if terms else None
        indices = torch.cat([sparse_indices(term) for term in terms], 1)
        values = torch.cat([sparse_values(term) for term in terms])
        # Coalescing sorts the indices, and equal ones stay in their order.
        return torch.sparse_coo_tensor(indices, values, terms[0].shape, check_invariants=False).coalesce()

    def dense_total(self, vectors: Sequence[Tensor], length: int, dtype: torch.dtype, text: str) -> Tensor:
        """Return the sum of the ranks' dense vectors, by all-reduces of chunks. Collective over the data ranks.

        Args:
            vectors: a list of one vector, overwritten.
            length, dtype: unused.
            text: names the call in errors; equal on all ranks.

        Returns:
            The sum, in the dtype of the vector; with one rank the vector itself.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
            MismatchError: the ranks wait in different calls.
        """
        [vector] = vectors
        if self._size == 1:
            return vector
        sent = vector if self._narrow is None else vector.to(self._narrow)
        started = [self._start(part, text) for part in sent.split(max(self._chunk // sent.element_size(), 1))]
        for each in started:
            each.wait()
        return sent.to(vector.dtype)


class WorkerAddends:
    """Sums sparse gradients along the fixed tree over logical workers: the same bits for any number of data ranks.

    A logical worker is one of N fixed shares of the global batch. A rank's terms are the sums over the largest subtrees
    all of whose workers it computes; where several ranks share a worker, the rank's terms are the arguments of its
    calls of ``put``.

    Args:
        comm: the data ranks.
        workers: N.
    """

    def __init__(self, comm: Communicator, workers: int) -> None:
        self._comm, self._workers, self._shared = comm, workers, comm.size > workers
        self._pieces: dict[Node, Term] = {}
        self._calls: list[Term] = []

    def put(self, worker: int, term: Term) -> None:
        """Add the sparse gradients of a logical worker to the sum of the rank's subtree that contains the worker.

        Args:
            worker: index of the worker; calls come in increasing order. Where ranks share a worker, each of its
                micro-batches makes a call.
            term: the worker's gradients, or those of the micro-batch, one for each parameter.
        """
        if self._shared:
            self._calls.append(term)
            return
        self._pieces[worker, worker + 1] = term
        merge_siblings(self._pieces, worker, self._workers, _add_terms)

    def take(self) -> list[Term]:
        """Return the rank's terms of the step, and forget them. Not collective.

        The terms are the sums over the rank's subtrees of logical workers, from left to right, or where ranks share a
        worker the terms of all calls of ``put``.
        """
        pieces, calls = self._pieces, self._calls
        self._pieces, self._calls = {}, []
        return calls if self._shared else [pieces[node] for node in self._nodes(self._comm.rank)]

    def counts(self, here: int, text: str) -> list[int]:
        """Return for each data rank the number of sparse gradients that it has to send in the step (its terms).

        Terms are sums over subtrees of logical workers, whose number follows from the numbers of workers and ranks.
        Where data ranks share a worker, each micro-batch has a term, and the call is collective over the data ranks: an
        all-gather of ``here``.

        Args:
            here: number of this rank's terms in the step; read only where ranks share a worker.
            text: names the call in errors; equal on all ranks.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
            MismatchError: the ranks wait in different calls.
        """
        if self._shared:
            mine = torch.tensor([here], device=self._comm.device)
            counts: list[int] = self._comm.gather_slices(mine, text).tolist()
            return counts
        return [len(self._nodes(rank)) for rank in range(self._comm.size)]

    def total(self, gathered: Sequence[Sequence[Tensor | None]]) -> Tensor | None:
        """Return the sum of one gradient's terms in the order of the tree; None if all are None. Not collective.

        Args:
            gathered: for each rank its terms, in the order of ``take``.
        """
        pieces: dict[Node, Tensor | None] = {}
        for rank, terms in enumerate(gathered):
            if not self._shared:
                pieces.update(zip(self._nodes(rank), terms, strict=True))
                continue
            worker = workers_of(self._workers, self._comm.size, rank)[0]
            for term in terms:
                pieces[worker, worker + 1] = _add(pieces.get((worker, worker + 1)), term)
        return fold((0, self._workers), pieces, _add)

    def dense_total(self, vectors: Sequence[Tensor], length: int, dtype: torch.dtype, text: str) -> Tensor:
        """Sum dense vectors, one for each of this rank's terms, in the order of the summation tree over all ranks.

        Collective over the data ranks: the all-to-all and the all-gather of ``TreeSum.total``.

        Args:
            vectors: in the order of ``take``; overwritten.
            length: elements of each vector.
            dtype: of the vectors.
            text: unused.

        Returns:
            The sum (length,), equal on all ranks.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
            MismatchError: the ranks wait in different calls.
        """
        summed = TreeSum(self._comm, self._workers, length, dtype)
        if self._shared:
            for vector in vectors:
                summed.add(0, vector)
        else:
            for node, vector in zip(self._nodes(self._comm.rank), vectors, strict=True):
                summed.add_subtree(node, vector)
        return summed.total()

    def _nodes(self, rank: int) -> list[Node]:
        return subtree_roots(even_share(self._workers, self._comm.size, rank), self._workers)


def _add_terms(left: Term, right: Term) -> Term:
    return [_add(a, b) for a, b in zip(left, right, strict=True)]


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients of one parameter; None counts as zeros, and sparse + dense is dense."""
    if left is None or right is None:
        return right if left is None else left
    if left.is_sparse and right.is_sparse:
        return (left + right).coalesce()
    return right + left if left.is_sparse else left + right
