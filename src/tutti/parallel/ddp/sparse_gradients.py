"""All-reduce of sparse gradients (``nn.Embedding(sparse=True)``); the optimizer receives sparse gradients again.

An optimizer treats a sparse gradient differently from a dense one with the same numbers: ``SparseAdam`` updates the
rows that the gradient names, a row of zeros among them, and no other. One device's gradient names the rows of all
samples of the global batch; the sum over several ranks therefore names the union of the ranks' rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError
from tutti.nn.sparse_layers import sparse_parameters
from tutti.parallel.ddp.buckets import ReducedSums
from tutti.parallel.ddp.reducers import OverlappedReducer, Reducer
from tutti.torch_compat import sparse_indices, sparse_values
from tutti.types.step_records import StepContext


@dataclass
class TouchedRows:
    """Rows of one parameter that have an entry in its sparse gradients of the current step.

    Attributes:
        rows: (rows of the parameter,) int32, 1 for a row that has an entry in a sparse gradient, else 0.
        dense: whether a gradient was dense, as where another layer uses the same weight.
        made: the dense copy of the sparse gradient, which has replaced it as ``.grad``; None before that.
    """

    rows: Tensor
    dense: bool = False
    made: Tensor | None = None


class SparseReducer:
    """Sums sparse gradients over data ranks by a reducer of dense ones, which it wraps.

    Converts sparse gradients to dense before the sum, and the sum back to a sparse tensor with the rows that any rank's
    gradient has. With several ranks this takes one more all-reduce a step, of a number for each row of ``parameters``
    and one for each parameter.

    Args:
        reducer: sums dense gradients over the data ranks.
        parameters: parameters that may have a sparse gradient, the same on every rank.
        comm: the data ranks.
    """

    def __init__(self, reducer: Reducer, parameters: Sequence[nn.Parameter], comm: Communicator) -> None:
        self._reducer, self._comm, self._parameters = reducer, comm, set(parameters)
        self._order = list(parameters)
        self._touched: dict[Tensor, TouchedRows] = {}
        self._summed: dict[nn.Parameter, Tensor] = {}
        self._armed = False

    @property
    def listens(self) -> bool:
        """Whether ``gradient_ready`` must be registered as a post-accumulate-grad hook on every trained parameter.

        True if the wrapped reducer, which sums the gradients once they are dense, needs the hook because it starts
        all-reduces during backward.
        """
        return self._reducer.listens

    def prepare_for_backward(self, step_context: StepContext, loss_sums: Tensor | None) -> None:
        """Tell the wrapped reducer, which sums dense gradients, that this rank's last backward of the step follows.

        From now on ``gradient_ready`` converts sparse gradients to dense ones; before, autograd accumulates them as
        sparse gradients.

        Args:
            step_context: the step under way, handed on to the wrapped reducer, which compares it over ranks.
            loss_sums: this rank's ``[loss, count, *metrics]`` in the step; None if these sums are not known yet.
        """
        self._armed = True
        self._reducer.prepare_for_backward(step_context, loss_sums)

    def gradient_ready(self, parameter: Tensor) -> None:
        """Convert ``parameter.grad`` from sparse to dense, and report it as complete to the wrapped reducer.

        The wrapped reducer sums the dense gradients over the data ranks. Called by autograd as a post-accumulate-grad
        hook. Before ``prepare_for_backward`` a gradient stays sparse.

        Args:
            parameter: the parameter whose gradient backward has just completed.

        Raises:
            UsageError: the gradient is sparse in more than its first dimension (as by ``torch.gather`` with
                ``sparse_grad=True``).
        """
        # Before this rank's last backward gradients stay sparse: autograd accumulates them by concatenating their rows.
        if self._armed and parameter in self._parameters:
            self._make_dense(parameter)
        self._reducer.gradient_ready(parameter)

    def collect(self, step_context: StepContext, worker: int, loss_sums: Tensor | None) -> None:
        """Convert a logical worker's sparse gradients to dense, and call ``collect`` of the wrapped reducer.

        A logical worker is one of N fixed shares of the global batch. The wrapped reducer sums dense gradients over the
        data ranks; if it sums worker by worker, its ``collect`` adds the worker's ``.grad`` to the sum. If it sums
        during backward instead (``listens`` is True), this call converts nothing: ``gradient_ready`` and ``finish`` do.

        Args:
            step_context: the step under way, handed on to the wrapped reducer, which compares it over ranks.
            worker: index of the worker; calls come in increasing order.
            loss_sums: the worker's ``[loss, count, *metrics]``; None if the worker had no samples.

        Raises:
            UsageError: a gradient is sparse in more than its first dimension, so that its entries are not whole rows.
        """
        if not self._reducer.listens:
            self._make_all_dense()
        self._reducer.collect(step_context, worker, loss_sums)

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Sum the gradients over the data ranks, as dense tensors, and make the sums of sparse gradients sparse again.

        Collective over the data ranks: the collectives of the wrapped reducer and one all-reduce. The sum of a
        parameter's gradients has a row where any rank's sparse gradient has one; the all-reduce finds these rows. Where
        any rank's gradient was dense, the sum stays dense.

        Args:
            step_context: the step under way, handed on to the wrapped reducer, which compares it over ranks.
            loss_sums: this rank's ``[loss, count, *metrics]``, summed over its logical workers (fixed shares of the
                global batch); None if this rank had no samples.

        Returns:
            A ``ReducedSums`` (named tuple), equal on all data ranks: sums over the global batch of loss (``loss``),
            count of samples or tokens (``samples``) and metrics (``metrics``, a list of floats); whether a rank asks to
            stop (``stop``); for each parameter whether any rank had a gradient (the list ``used``).

        Raises:
            MismatchError: ranks are in different steps or hold different parameters.
            UsageError: a gradient is sparse in more than its first dimension, so that its entries are not whole rows;
                or the script's edits of parameters or gradients that are split over ranks differ between these ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self._armed = False
        self._make_all_dense()
        sums = self._reducer.finish(step_context, loss_sums)
        touched, self._touched = self._touched, {}
        states = [touched.get(p) or TouchedRows(_no_rows(p)) for p in self._order]
        table = torch.cat([torch.cat([s.rows, s.rows.new_tensor([int(s.dense)])]) for s in states])
        if self._comm.size > 1:
            self._comm.start_all_reduce(table, f"rows of sparse gradients in step {step_context.taken + 1}").wait()
        self._summed = {}
        for parameter, part in zip(self._order, table.split([len(p) + 1 for p in self._order]), strict=True):
            if parameter.grad is not None and not part[-1]:
                self._summed[parameter] = parameter.grad
                parameter.grad = _sparse(parameter.grad, part[:-1].nonzero().squeeze(1))
        return sums

    def release(self) -> None:
        """Let the wrapped reducer move sums of dense gradients out of memory that ranks share. Not collective.

        A script may then keep views of ``.grad``. Sparse gradients have memory of their own.
        """
        sparse = {p: p.grad for p in self._summed}
        self._reducer.release()
        for parameter, gradient in sparse.items():
            parameter.grad = gradient

    def squares(self) -> list[float]:
        """Return sums of squares of all reduced gradients, sparse ones included, which add up to their squared L2 norm.

        The wrapped reducer, which has summed the gradients in dense form, computes the numbers. Not collective.

        Returns:
            Python floats, depending on the wrapped reducer one for each trained parameter or a single one for all.
        """
        return self._reducer.squares()

    def scale(self, factor: float) -> None:
        """Multiply the gradients that ``finish`` has summed, dense and sparse ones, by ``factor``, in place.

        Not collective.

        Args:
            factor: the number that each element is multiplied by.
        """
        sparse = {p: p.grad for p in self._summed if p.grad is not None}
        for parameter in sparse:
            parameter.grad = self._summed[parameter]
        self._reducer.scale(factor)
        for parameter, gradient in sparse.items():
            sparse_values(gradient).mul_(factor)
            parameter.grad = gradient

    def _make_all_dense(self) -> None:
        for parameter in self._order:
            self._make_dense(parameter)

    def _make_dense(self, parameter: Tensor) -> None:
        """Note the rows of a sparse ``.grad`` and replace it by a dense copy.

        Raises UsageError unless the entries of the gradient are whole rows.
        """
        gradient = parameter.grad
        if gradient is None:
            return
        if parameter not in self._touched:
            self._touched[parameter] = TouchedRows(_no_rows(parameter))
        touched = self._touched[parameter]
        if gradient is touched.made:
            return
        if not gradient.is_sparse:
            touched.dense = True
            return
        if gradient.sparse_dim() != 1:
            raise UsageError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse in {gradient.sparse_dim()} "
                "dimensions",
                why="several devices sum sparse gradients whose entries are whole rows",
                remedy="leave out sparse_grad=True",
            )
        touched.rows[sparse_indices(gradient)[0]] = 1
        parameter.grad = touched.made = gradient.to_dense()


def with_sparse_gradients(reducer: Reducer, parts: Sequence[nn.Module], comm: Communicator) -> Reducer:
    """Wrap a reducer such that it also sums sparse gradients (``nn.Embedding(sparse=True)``). Not collective.

    Args:
        reducer: sums dense gradients over the data ranks.
        parts: the modules on this rank; those with an attribute ``sparse`` that is True have sparse gradients.
        comm: the data ranks.

    Returns:
        A ``SparseReducer`` around ``reducer``; ``reducer`` itself where no trained parameter has sparse gradients, or
        for an ``OverlappedReducer`` of a single data rank, which leaves ``.grad`` unchanged.
    """
    if comm.size == 1 and isinstance(reducer, OverlappedReducer):
        # This reducer leaves every ``.grad`` of a single rank unchanged.
        return reducer
    found = [p for p in sparse_parameters(parts).values() if p.requires_grad]
    return SparseReducer(reducer, found, comm) if found else reducer


def _no_rows(parameter: Tensor) -> Tensor:
    return torch.zeros(len(parameter), dtype=torch.int32, device=parameter.device)


def _sparse(gradient: Tensor, rows: Tensor) -> Tensor:
    """Return rows (n,) of a dense gradient as a coalesced sparse tensor."""
    values = gradient.index_select(0, rows)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, gradient.shape, is_coalesced=True, check_invariants=False)
