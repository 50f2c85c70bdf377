"""Sum of sparse gradients (``nn.Embedding(sparse=True)``) over ranks by all-gather of their indices and values.

A rank sends the rows that its samples name, and not the whole table. An optimizer treats a sparse gradient differently
from a dense one with the same numbers: ``SparseAdam`` updates the rows that the gradient names, a row of zeros among
them, and no other. One device's gradient names the rows of all samples of the global batch; the sum over several ranks
therefore names the union of the ranks' rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tutti.comm.uneven_gather import gather_uneven
from tutti.device import widest_float
from tutti.errors import UsageError
from tutti.nn.gradient_hooks import coalesce_micro_batches
from tutti.nn.sparse_layers import sparse_parameters
from tutti.parallel.ddp.buckets import FIRST_BYTES, ReducedSums
from tutti.parallel.ddp.gradient_arithmetic import own_part, squares_by
from tutti.parallel.ddp.reducers import OverlappedReducer, Reducer, StartAllReduce, TreeReducer
from tutti.parallel.ddp.sparse_addends import RankAddends, SparseAddends, Term, WorkerAddends
from tutti.torch_compat import sparse_indices, sparse_values
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext

_DENSE, _NONE = -1, 0
_CHUNK_BYTES = FIRST_BYTES
"""Largest piece of a dense sum: no gradient bucket's memory is smaller, and schedules have as much."""


@dataclass(frozen=True)
class RowForm:
    """The matrix (rows, width) as which a sparse gradient of shape (*sparse, *dense) is sent: shapes and dtype.

    Rows are the indices of the sparse dimensions, flattened; ``width`` is the number of elements of the dense ones.

    Attributes:
        shape: shape of the parameter.
        sparse: number of sparse dimensions, 1 for an embedding.
        dtype: dtype of the values in messages.
    """

    shape: torch.Size
    sparse: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Number of rows of the matrix: product of the sizes of the parameter's sparse dimensions."""
        return math.prod(self.shape[: self.sparse])

    @property
    def width(self) -> int:
        """Number of elements of a row of the matrix: product of the sizes of the parameter's dense dimensions."""
        return math.prod(self.shape[self.sparse :])

    @property
    def index_dtype(self) -> torch.dtype:
        """Dtype in which messages carry row numbers: int32, or int64 for more than 2³¹ rows."""
        return torch.int32 if self.rows <= 1 << 31 else torch.int64

    def fewer_bytes(self, rows: Sequence[int]) -> bool:
        """Return whether an all-gather of the ranks' rows sends fewer bytes than an all-reduce of the whole matrix.

        Of an all-gather of m bytes a rank, and of an all-reduce of M bytes, a ring sends (R-1)·m and 2·(R-1)/R·M bytes
        a rank (Thakur et al. 2005). The matrix has one more column, of flags for rows that have an entry.

        Args:
            rows: number of rows that each of the R ranks has.

        >>> form = RowForm(torch.Size([100, 3]), 1, torch.float32)
        >>> form.fewer_bytes([100, 0]), form.fewer_bytes([100, 100, 100])
        (True, False)
        """
        sent = self.index_dtype.itemsize + self.width * self.dtype.itemsize
        return len(rows) * max(rows) * sent <= 2 * self.rows * (self.width + 1) * self.dtype.itemsize

    def matrix(self, index: Tensor, values: Tensor) -> Tensor:
        """Build the sparse matrix (rows, width), a coalesced COO tensor of one sparse dimension.

        Args:
            index: (n,), increasing row numbers.
            values: n · width elements.
        """
        index, values, size = index.long().unsqueeze(0), values.view(index.numel(), self.width), (self.rows, self.width)
        return torch.sparse_coo_tensor(index, values, size, is_coalesced=True, check_invariants=False)

    def matrix_of(self, gradient: Tensor) -> Tensor:
        """Convert a sparse gradient to a sparse matrix (rows, width) with one sparse dimension.

        Args:
            gradient: coalesced COO tensor in the parameter's shape.
        """
        index, *more = gradient.indices()
        for size, other in zip(self.shape[1:], more, strict=False):
            index = index * size + other
        return self.matrix(index, gradient.values())

    def gradient(self, index: Tensor, values: Tensor) -> Tensor:
        """Build the sparse gradient, a coalesced COO tensor in the parameter's shape, from rows of the matrix.

        Args:
            index: (n,) int64 row numbers, increasing.
            values: (n, width) their values, which are copied.
        """
        indices = torch.stack(torch.unravel_index(index, self.shape[: self.sparse]))
        # Also a copy, which does not keep the memory of a whole message.
        values = values.view(len(values), *self.shape[self.sparse :]) + 0.0
        return torch.sparse_coo_tensor(indices, values, self.shape, is_coalesced=True, check_invariants=False)


class SparseReducer:
    """Sums sparse gradients over the data ranks by an all-gather of rows, beside a reducer of all other gradients.

    A step takes two more all-gathers: of the numbers of rows, and of indices and values. Where the ranks name so many
    rows that a dense all-reduce sends fewer bytes, all ranks take that by the same numbers, and the sum is sparse again
    afterwards. A parameter of which any rank has a dense gradient, as where another layer uses the same weight, has a
    dense sum. Terms are added in the order of the ranks, or in reproducible mode in the order of the tree over logical
    workers (fixed shares of the global batch).

    Collective over the data ranks: the constructor makes shared memory for small messages.

    Args:
        reducer: sums the gradients of all other parameters over the data ranks.
        parameters: (name, parameter) pairs that may have a sparse gradient, the same on every rank.
        run_context: communicators and settings of the run.
        not_owned: names of parameters that another rank of the replica counts in the norm.
        narrow: dtype of values in messages; None for the parameter's own.
        all_reduce: starts the all-reduce of a dense vector; None takes the all-reduce of the backend.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: NamedParameters,
        run_context: RunContext,
        not_owned: Collection[str] = (),
        narrow: torch.dtype | None = None,
        all_reduce: StartAllReduce | None = None,
    ) -> None:
        self._reducer, self._comm, self._begins = reducer, run_context.comms.replica, run_context.begins_worker
        self._order, self._narrow = [p for _, p in parameters], narrow
        self._places = {p: i for i, p in enumerate(self._order)}
        self._not_owned = {p for name, p in parameters if name in not_owned}
        self._measured, self._wide = run_context.gradient_variance, widest_float(self._comm.device)
        self._by_worker = isinstance(reducer, TreeReducer)
        self._addends: SparseAddends = (
            WorkerAddends(self._comm, run_context.workers)
            if self._by_worker
            else RankAddends(self._comm, all_reduce, _CHUNK_BYTES, narrow)
        )
        # For each parameter the sparse dimensions of its gradients in this step, _NONE, or _DENSE.
        self._kinds = [_NONE] * len(self._order)
        for parameter in self._order if self._by_worker else ():
            coalesce_micro_batches(parameter)
        self._comm.share_memory()

    @property
    def listens(self) -> bool:
        """Whether ``gradient_ready`` must be registered as a post-accumulate-grad hook on every trained parameter.

        True if the reducer of the other parameters needs the hook because it starts all-reduces during backward.
        """
        return self._reducer.listens

    def prepare_for_backward(self, step_context: StepContext) -> None:
        """Tell the reducer of the other parameters that this rank's last backward of the step follows.

        Args:
            step_context: the step under way, which the ranks compare.
        """
        self._reducer.prepare_for_backward(step_context)

    def gradient_ready(self, parameter: Tensor) -> None:
        """Report a complete gradient to the reducer of the other parameters; a sparse one waits for ``finish``.

        Called by autograd as a post-accumulate-grad hook.

        Args:
            parameter: the parameter whose gradient backward has just completed.
        """
        if parameter not in self._places:
            self._reducer.gradient_ready(parameter)

    def collect(self, step_context: StepContext, worker: int, loss_sums: Tensor | None) -> None:
        """Add a logical worker's sparse gradients to the sum, where gradients are summed worker by worker.

        A logical worker is one of N fixed shares of the global batch. Worker by worker: in reproducible mode, or for a
        measured gradient variance; ``.grad`` of the parameters is None afterwards. In other runs autograd accumulates
        the gradients of the rank's workers, and sparse gradients stay in ``.grad``. Also calls ``collect`` of the
        reducer of the other parameters.

        Args:
            step_context: the step under way, which the ranks compare; its loss scale is taken out of a measured
                gradient variance.
            worker: index of the worker; calls come in increasing order.
            loss_sums: the worker's ``[loss, count, *metrics]``; None if the worker had no samples.
        """
        if self._by_worker and (loss_sums is not None or self._begins):
            term = self._take()
            if self._measured:
                squares = [0.0 if t is None else float(_values(t).double().square().sum()) for t in term]
                term.append(own_part(squares, step_context, loss_sums)[:-1].to(self._comm.device, self._wide))
            self._addends.put(worker, term)
        self._reducer.collect(step_context, worker, loss_sums)

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Sum all gradients over the data ranks and set each trained parameter's ``.grad`` to its sum.

        Collective over the data ranks: the collectives of the other parameters' reducer, an all-gather of numbers of
        rows, and an all-gather of rows, an all-reduce of dense vectors, or both.

        Args:
            step_context: the step under way, which the ranks compare.
            loss_sums: this rank's ``[loss, count, *metrics]``, summed over its logical workers (fixed shares of the
                global batch); None if this rank had no samples.

        Returns:
            A ``ReducedSums`` (named tuple), equal on all data ranks: sums over the global batch of loss (``loss``),
            count of samples or tokens (``samples``) and metrics (``metrics``, a list of floats); whether a rank asks to
            stop (``stop``); for each parameter whether any rank had a gradient (the list ``used``, sparse parameters
            last); and the sequence ``own`` of the other parameters' reducer with the sparse ones' numbers.

        Raises:
            MismatchError: ranks are in different steps or hold different parameters.
            UsageError: gradients of a parameter are sparse in different numbers of dimensions; a gradient of another
                parameter is sparse; or the script's edits of parameters or gradients that are split over ranks differ
                between these ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        sums = self._reducer.finish(step_context, loss_sums)
        if not self._by_worker:
            self._addends.put(0, self._take())
        terms, text = self._addends.take(), f"sparse gradients in step {step_context.local_step + 1}"
        plan = self._plan(terms, text)
        totals = self._gather(terms, plan, f"rows of {text}") | self._reduce(terms, plan, f"sum of {text}")
        own: list[float] = []
        if self._measured:
            vectors = [squares for term in terms if (squares := term[-1]) is not None]
            own = self._addends.dense_total(vectors, len(self._order), self._wide, f"squares of {text}").tolist()
        for place, parameter in enumerate(self._order):
            # ``central_storage`` has parameters in host memory here, and accelerators have computed the gradients.
            parameter.grad = totals[place].to(parameter.device) if place in totals else None
        used = [parameter.grad is not None for parameter in self._order]
        return sums._replace(used=[*sums.used, *used], own=[*sums.own[:-1], *own, *sums.own[-1:]])

    def release(self) -> None:
        """Let the reducer of the other parameters move sums out of memory that ranks share. Not collective.

        A script may then keep views of ``.grad``. Sparse gradients have memory of their own.
        """
        self._reducer.release()

    def squares(self) -> list[float]:
        """Return sums of squares of all reduced gradients, sparse ones included, which add up to their squared L2 norm.

        Not collective.

        Returns:
            The numbers of the other parameters' reducer, and one for each parameter that may have a sparse gradient.
        """
        return [*self._reducer.squares(), *squares_by(self._order, self._not_owned)]

    def scale(self, factor: float) -> None:
        """Multiply the gradients that ``finish`` has summed, dense and sparse ones, by ``factor``, in place.

        Not collective.

        Args:
            factor: the number that each element is multiplied by.
        """
        self._reducer.scale(factor)
        for parameter in self._order:
            if parameter.grad is not None:
                _values(parameter.grad).mul_(factor)

    def _take(self) -> Term:
        """Move the gradients out of ``.grad``, sparse ones as coalesced matrices, and note their kinds."""
        term: Term = []
        for place, parameter in enumerate(self._order):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                term.append(None)
                continue
            gradient = gradient.detach()
            if not gradient.is_sparse:
                self._kinds[place] = _DENSE
                term.append(gradient)
                continue
            gradient = gradient.coalesce()
            if self._kinds[place] != _DENSE:
                self._kinds[place] = gradient.sparse_dim()
            term.append(RowForm(gradient.shape, gradient.sparse_dim(), gradient.dtype).matrix_of(gradient))
        return term

    def _plan(self, terms: Sequence[Term], text: str) -> _Plan:
        """Agree with all ranks how each gradient is summed. Collective: an all-gather of a few integers."""
        here, counts = len(self._order), self._addends.counts(len(terms), f"numbers of {text}")
        rows = [[0 if t is None or not t.is_sparse else len(sparse_values(t)) for t in term[:here]] for term in terms]
        rows += [[0] * here] * (max(counts) - len(rows))
        mine = torch.tensor([self._kinds, *rows], device=self._comm.device)
        self._kinds = [_NONE] * here
        table = self._comm.gather_slices(mine.flatten(), f"numbers of rows of {text}")
        kinds, *by_term = table.view(self._comm.size, -1, here).transpose(0, 1).tolist()
        plan = _Plan([[by_term[n][rank] for n in range(count)] for rank, count in enumerate(counts)])
        for place, parameter in enumerate(self._order):
            found = {row[place] for row in kinds} - {_NONE}
            if _DENSE in found:
                plan.reduced[place] = None
            elif len(found) > 1:
                raise UsageError(
                    f"gradients of a parameter of shape {list(parameter.shape)} are sparse in {min(found)} dimensions"
                    f" on one device and in {max(found)} on another",
                    why="PyTorch has no sum of such tensors",
                    remedy="use the parameter alike on all devices, or leave out sparse_grad=True",
                )
            elif found:
                form = RowForm(parameter.shape, found.pop(), self._narrow or parameter.dtype)
                sent = [sum(row[place] for row in rows) for rows in plan.rows]
                (plan.gathered if form.fewer_bytes(sent) else plan.reduced)[place] = form
        return plan

    def _gather(self, terms: Sequence[Term], plan: _Plan, text: str) -> dict[int, Tensor]:
        """Return sums by place of the parameter, from an all-gather of the rows of all ranks' terms. Collective."""
        vectors: list[Tensor] = []
        lengths: list[list[int]] = [[] for _ in plan.rows]
        for place, form in plan.gathered.items():
            found = [matrix for term in terms if (matrix := term[place]) is not None]
            vectors.append(self._joined([sparse_indices(m) for m in found], form.index_dtype))
            vectors.append(self._joined([sparse_values(m) for m in found], form.dtype))
            for sizes, counted in zip(lengths, plan.rows, strict=True):
                count = sum(row[place] for row in counted)
                sizes += [count, count * form.width]
        gathered = gather_uneven(self._comm, vectors, lengths, text) if vectors else []
        totals: dict[int, Tensor] = {}
        for n, (place, form) in enumerate(plan.gathered.items()):
            ranks: list[list[Tensor | None]] = []
            for counted, received in zip(plan.rows, gathered, strict=True):
                counts = [row[place] for row in counted]
                indices = received[2 * n].split(counts)
                values = received[2 * n + 1].to(self._order[place].dtype).split([form.width * n for n in counts])
                ranks.append([form.matrix(i, v) for i, v in zip(indices, values, strict=True)])
            if (total := self._addends.total(ranks)) is not None:
                totals[place] = form.gradient(sparse_indices(total)[0], sparse_values(total))
        return totals

    def _joined(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        empty = torch.empty(0, dtype=dtype, device=self._comm.device)
        return torch.cat([empty, *(tensor.flatten().to(dtype) for tensor in tensors)])

    def _reduce(self, terms: Sequence[Term], plan: _Plan, text: str) -> dict[int, Tensor]:
        """Return sums by place of the parameter, from a sum of dense vectors. Collective; one vector for each dtype.

        Where all terms are sparse, the vector has a flag for each row, and the sum is sparse.
        """
        totals: dict[int, Tensor] = {}
        for dtype in sorted({self._order[place].dtype for place in plan.reduced}, key=str):
            forms = {place: form for place, form in plan.reduced.items() if self._order[place].dtype == dtype}
            sizes = [self._order[place].numel() + (form.rows if form else 0) for place, form in forms.items()]
            vectors = []
            for term in terms:
                vectors.append(torch.zeros(sum(sizes), dtype=dtype, device=self._comm.device))
                for (place, form), part in zip(forms.items(), vectors[-1].split(sizes), strict=True):
                    _fill(part, term[place], form)
            whole = self._addends.dense_total(vectors, sum(sizes), dtype, text)
            for (place, form), part in zip(forms.items(), whole.split(sizes), strict=True):
                if form is None:
                    totals[place] = part.view(self._order[place].shape)
                else:
                    numbers, flags = part.split([form.rows * form.width, form.rows])
                    index = flags.nonzero().squeeze(1)
                    totals[place] = form.gradient(index, numbers.view(form.rows, form.width).index_select(0, index))
        return totals


@dataclass
class _Plan:
    """How the sparse gradients of a step are summed, equal on all ranks.

    Attributes:
        rows: for each rank, each of its terms and each parameter the number of rows.
        gathered: forms of gradients that are all-gathered, by place of the parameter.
        reduced: forms of gradients that are summed as dense vectors; None where the sum stays dense.
    """

    rows: list[list[list[int]]]
    gathered: dict[int, RowForm] = field(default_factory=dict)
    reduced: dict[int, RowForm | None] = field(default_factory=dict)


def _fill(part: Tensor, gradient: Tensor | None, form: RowForm | None) -> None:
    """Write a term's gradient, and with ``form`` flags of its rows, into a vector of zeros."""
    if gradient is None:
        return
    if not gradient.is_sparse:
        part.copy_(gradient.reshape(-1))
        return
    index, (rows, width) = sparse_indices(gradient)[0], gradient.shape
    part[: rows * width].view(rows, width).index_copy_(0, index, sparse_values(gradient))
    if form is not None:
        part[rows * width :].index_fill_(0, index, 1)


def _values(gradient: Tensor) -> Tensor:
    return sparse_values(gradient) if gradient.is_sparse else gradient


def with_sparse_gradients(
    make: Callable[[NamedParameters], Reducer],
    named: NamedParameters,
    parts: Sequence[nn.Module],
    run_context: RunContext,
    not_owned: Collection[str] = (),
    narrow: torch.dtype | None = None,
    all_reduce: StartAllReduce | None = None,
) -> Reducer:
    """Build a reducer that also sums sparse gradients (``nn.Embedding(sparse=True)``).

    Collective over the data ranks where a trained parameter may have sparse gradients, and as ``make`` is.

    Args:
        make: builds the reducer of dense gradients of (name, parameter) pairs.
        named: (name, parameter) pairs; those with ``requires_grad`` are reduced.
        parts: the modules on this rank; those with an attribute ``sparse`` that is True have sparse gradients.
        run_context: communicators and settings of the run.
        not_owned: names of parameters that another rank of the replica counts in the norm.
        narrow: dtype of values in messages; None for the parameter's own.
        all_reduce: starts the all-reduce of a dense vector; None takes the all-reduce of the backend.

    Returns:
        A ``SparseReducer`` around the reducer of all other parameters; the reducer of all parameters where none has
        sparse gradients, or for an ``OverlappedReducer`` of a single data rank, which leaves ``.grad`` unchanged.
    """
    found = {p for p in sparse_parameters(parts).values() if p.requires_grad}
    reducer = make([(name, p) for name, p in named if p not in found])
    if not found:
        return reducer
    if run_context.comms.replica.size == 1 and isinstance(reducer, OverlappedReducer):
        # This reducer leaves every ``.grad`` of a single rank unchanged.
        return make(named)
    sparse = [(name, p) for name, p in named if p in found]
    return SparseReducer(reducer, sparse, run_context, not_owned, narrow, all_reduce)
