"""Sum the gradients of parameters that several virtual stages use, such as weights tied over stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.nn.incomplete_gradient import IncompleteGradient
from tutti.torch_compat import sparse_indices


class SharedGradients:
    """Sums the gradients of parameters that several virtual pipeline stages use, such as tied weights, over the stages.

    The order of calls in a step is ``begin``, ``take`` after each micro-batch's backward, and ``finish``.

    Args:
        groups: pairs of a communicator over the ranks that hold the same shared parameters (None where this rank alone
            holds them), and these parameters.
        exact: whether to add the gradients micro-batch by micro-batch, in the order in which one device adds them. This
            keeps one gradient for each micro-batch in memory.
        sparse: parameters of the model that may have sparse gradients, the same on all ranks. A sum of sparse gradients
            alone is sparse, with entries in all rows in which one of them has an entry.

    Attributes:
        parameters: the shared parameters of this rank that are trained.
        copies: pairs of a communicator and a list of these parameters, of which all ranks of the communicator hold
            copies.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Communicator | None, Sequence[nn.Parameter]]],
        exact: bool,
        sparse: Collection[nn.Parameter] = (),
    ) -> None:
        self._all = [(comm, p) for comm, parameters in groups for p in parameters]
        self._exact, self._sparse = exact, {*sparse}
        self.look()
        self._before: Mapping[nn.Parameter, Tensor | None] = {}
        self._parts: dict[nn.Parameter, dict[int, Tensor]] = {}

    def look(self) -> None:
        """Find which shared parameters are trained now: read ``requires_grad`` of each anew. Not collective.

        Shared parameters are those that several pipeline stages use, such as tied weights. Called before each step, as
        scripts freeze and unfreeze parameters; each rank that has a parameter must have the same ``requires_grad``.
        Sets two attributes: ``parameters``, the set of shared parameters that are trained, whose gradients this object
        sums, and ``copies``, pairs of a communicator and the list of trained parameters of which each of its ranks has
        a copy.
        """
        self._groups = [(comm, p) for comm, p in self._all if p.requires_grad]
        self.parameters = {p for _, p in self._groups}
        by_ranks: dict[Communicator, list[nn.Parameter]] = {}
        for comm, p in self._groups:
            if comm is not None:
                by_ranks.setdefault(comm, []).append(p)
        self.copies = [*by_ranks.items()]

    def replace(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take over new parameter objects that have replaced former ones in this rank's pipeline stages.

        From now on this object sums the gradients of the new objects over the stages. It also reads ``requires_grad``
        of each shared parameter anew, as ``look`` does. Not collective, but each rank that has a replaced parameter has
        to make the call.

        Args:
            by: mapping from each former parameter to the new one in its place; parameters that are not keys stay.
        """
        self._all = [(comm, by.get(p, p)) for comm, p in self._all]
        self._sparse = {by.get(p, p) for p in self._sparse}
        self.look()

    def begin(self) -> None:
        """Clear the ``.grad`` of parameters that pipeline stages share, before a logical worker's first micro-batch.

        A logical worker is one of N fixed shares of the global batch; a replica computes one or more of them in turn.
        The former ``.grad``, gradients of earlier logical workers, are kept aside; ``finish`` adds them again. Not
        collective.
        """
        self._before = {p: p.grad for p in self.parameters}
        self._parts = {p: {} for p in self.parameters}
        for p in self.parameters:
            p.grad = None

    def take(self, micro: int) -> None:
        """Move the gradients of parameters that stages share out of ``.grad``, after one micro-batch's backward.

        The gradients are kept until ``finish``, which sums them over the stages. Called between ``begin`` and
        ``finish``. A logical worker is one of N fixed shares of the global batch, computed in micro-batches. Not
        collective.

        Args:
            micro: index of the micro-batch among the logical worker's micro-batches, from 0. If the constructor's
                ``exact`` is True, gradients of different micro-batches are kept apart.
        """
        for p, parts in self._parts.items():
            if p.grad is not None:
                key = micro if self._exact else 0
                parts[key] = _added(parts[key], p.grad) if key in parts else p.grad
                p.grad = None

    def finish(self, micro_batches: int) -> None:
        """Sum the gradients of parameters that stages share over the stages, and write the sums into ``.grad``.

        Gradients of earlier logical workers (fixed shares of the global batch), which ``begin`` kept aside, are added.
        Collective over the ranks that hold the same parameters, for each parameter in turn: one all-reduce or, for more
        than two ranks, one all-gather. The message also has the number of ranks with a gradient and, for a parameter
        with sparse gradients, for each row the number of ranks with an entry in it. Where no rank has a gradient,
        ``.grad`` gets back the value that it had before ``begin``: None, with which the optimizer skips the parameter,
        or the gradient of earlier logical workers. Otherwise ``.grad`` is a new tensor, equal on these ranks. An
        ``IncompleteGradient``, a placeholder that was in ``.grad`` before ``begin``, comes back in place of the sum;
        its attribute ``added`` becomes True if there was a gradient.

        Args:
            micro_batches: number of the logical worker's micro-batches, equal on all ranks.

        Raises:
            PeerError: one of these ranks is lost or late.
            MismatchError: these ranks wait in different calls.
        """
        for comm, p in self._groups:
            rows = range(micro_batches if self._exact else 1)
            parts = [self._parts[p].get(row) for row in rows]
            if comm is not None:
                parts = _over_stages(comm, p, parts, p in self._sparse)
            total = self._before[p]
            if isinstance(total, IncompleteGradient):
                # In a backward of the script's own: the placeholder notes what is added to it.
                for part in parts:
                    total.added |= part is not None
                p.grad = total
                continue
            for part in parts:
                if part is not None:
                    total = part if total is None else _added(total, part)
            p.grad = total if total is None or total.is_sparse else torch.empty_like(p).copy_(total)


def _added(before: Tensor, after: Tensor) -> Tensor:
    """Return the sum of two gradients, each dense or sparse. PyTorch refuses to add a dense one to a sparse one."""
    return after + before if before.is_sparse else before + after


def _over_stages(
    comm: Communicator, parameter: nn.Parameter, parts: Sequence[Tensor | None], sparse: bool
) -> list[Tensor | None]:
    """Return the sums over the ranks of ``comm`` of several gradients of a parameter; an empty list where none has one.

    Args:
        comm: ranks of the stages that hold the parameter; one collective.
        parameter: the parameter, of shape (rows, ...) where ``sparse`` is True.
        parts: this rank's gradients, as many on all ranks; None for a gradient of zeros.
        sparse: whether gradients may be sparse; the sums are sparse where no rank has a dense one.
    """
    given, width = [g for g in parts if g is not None], parameter.numel()
    # Numbers of ranks with a gradient, with a dense one, and with a sparse one that names each row.
    seen = torch.zeros(2 + len(parameter) if sparse else 1, dtype=parameter.dtype, device=parameter.device)
    seen[0] = float(bool(given))
    if sparse:
        seen[1] = float(any(not g.is_sparse for g in given))
        for g in given:
            if g.is_sparse:
                seen[2:].index_fill_(0, sparse_indices(g)[0], 1)
    empty = torch.zeros_like(parameter)
    dense = [empty if g is None else g.to_dense() if g.is_sparse else g for g in parts]
    summed = _summed(comm, torch.cat([*(g.reshape(-1) for g in dense), seen]))
    sums, seen = summed[: width * len(parts)].view(len(parts), *parameter.shape), summed[width * len(parts) :]
    if not bool(seen[0]):
        return []
    if not sparse or bool(seen[1]):
        return list(sums)
    rows = seen[2:].nonzero().T
    return [
        torch.sparse_coo_tensor(rows, each[rows[0]], each.shape, is_coalesced=True, check_invariants=False)
        for each in sums
    ]


def _summed(comm: Communicator, mine: Tensor) -> Tensor:
    """Return the sum over ranks. More than two are added as backward adds: from the last one on."""
    text = "all_reduce of the gradient of shared weights"
    if comm.size == 2:
        comm.start_all_reduce(mine, text).wait()
        return mine
    rows = comm.gather_slices(mine.reshape(-1), text).view(comm.size, *mine.shape)
    total = rows[-1]
    for row in reversed(rows[:-1]):
        total = total + row
    return total
