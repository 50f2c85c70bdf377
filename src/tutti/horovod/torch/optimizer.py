"""``DistributedOptimizer``: an optimizer whose gradients are reduced over the ranks before ``step``.

Parameters are put into buckets, fixed by their order alone, and a bucket is one collective: it is started by the hook
of its last gradient, or by ``synchronize``, where gradients that are missing count as zeros.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tutti.comm import async_collectives, collectives
from tutti.comm.collective_session import CollectiveHandle
from tutti.comm.process_set import ProcessSet
from tutti.comm.process_set import all_ranks as global_process_set
from tutti.horovod.common.exceptions import translated
from tutti.horovod.torch import job, mpi_ops
from tutti.horovod.torch.bucket_autotune import BUCKET_BYTES, make_autotune
from tutti.horovod.torch.compression import Compression
from tutti.horovod.torch.functions import group_name
from tutti.horovod.torch.mpi_ops import Adasum, Average, Sum
from tutti.nn.gradient_hooks import add_accumulation_hook
from tutti.torch_compat import accept_gradient_scale, is_wrapped_by_scheduler, mark_stepped, tensor_version

T = TypeVar("T")

_FIRST_BUCKET_BYTES = 1 << 20
_OVERTAKEN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)
_RACE = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
_CHANGED = (
    "Gradients were changed after loss.backward() but before optimizer.step() or optimizer.synchronize(), while they "
    "are reduced, so that the change would be lost. Call optimizer.synchronize() before gradients are clipped or "
    "unscaled, and optimizer.step() in the context optimizer.skip_synchronize()."
)
_GRAPH = (
    "Gradients were computed by backward(create_graph=True). Their graph leads to this rank's loss alone, so that "
    "second derivatives would differ between ranks. Use torch.autograd.grad for these, and loss.backward() alone."
)
_DIFFER = (
    "Parameters differ between ranks before the first step, so that the average of their gradients is that of no "
    "model. Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training"
)
_MARK = 1 << 24


@dataclass(slots=True)
class _Sent:
    """A gradient that is not in its place when its reduction is complete: it was compressed, missing or sparse."""

    parameter: Tensor
    gradient: Tensor
    compressed: Tensor
    context: Any
    present: bool


class _Bucket:
    """Parameters whose gradients are reduced by one collective."""

    def __init__(self, name: str, parameters: list[Tensor]) -> None:
        self.name, self.parameters = name, parameters
        self.forget()

    def forget(self) -> None:
        """Drop the reduction under way, if there is one."""
        self.missing, self.started = len(self.parameters), False
        self.handle: CollectiveHandle | None = None
        self.sent: list[_Sent] = []
        # Parameters, with their gradients and how often these were written to.
        self.gradients: list[tuple[Tensor, Tensor, int]] = []


class _Backward:
    """Passes that a parameter's gradient still adds up before its bucket may start."""

    __slots__ = ("bucket", "delay")

    def __init__(self, bucket: _Bucket, delay: int) -> None:
        self.bucket, self.delay = bucket, delay


class _DistributedOptimizer:
    """What ``DistributedOptimizer`` adds to the class of the user's optimizer; it has the name of Horovod's class."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def _distribute(
        self,
        named: list[tuple[str, Tensor]],
        compression: Any,
        passes: int,
        op: Any,
        predivide: float,
        groups: list[list[Tensor]],
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._parameter_names = {parameter: name for name, parameter in named}
        self._compression, self.op, self.process_set = compression, op, process_set
        self.backward_passes_per_step, self.gradient_predivide_factor = passes, predivide
        self._prescale, self._postscale = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        self.sparse_as_dense = sparse_as_dense
        self._synchronized, self._should_synchronize = False, True
        self._backward: dict[Tensor, _Backward] = {}
        self._sparse: dict[Tensor, Any] = {}
        # Where ranks join and leave, a later rank has its first step alone.
        self._compares = os.environ.get("HOROVOD_ELASTIC") != "1"
        # Parameters that have had sparse gradients: one that a rank misses counts as a gradient without rows.
        self._had_sparse: set[Tensor] = set()
        self._frozen: list[Tensor] = []
        self._buckets: list[_Bucket] = []
        self._hooks: list[Any] = []
        self._groups, self._bucket_bytes, self._autotune = groups, BUCKET_BYTES, None
        self._reduces = process_set.included() and (process_set.size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")
        self._adopt(groups)
        # Whether a gradient scaler's factor is left to the user's optimizer, as to a fused one.
        self._fused = accept_gradient_scale(self) if self._reduces and op != Adasum else True
        if op != Adasum and self._buckets:
            self._autotune = make_autotune(named[0][0], process_set)

    # --- buckets ---------------------------------------------------------------------------------------------------

    def _adopt(self, groups: list[list[Tensor]]) -> None:
        """Reduce the gradients of all parameters that require them from now on, and keep a list of the others.

        Args:
            groups: parameters whose gradients travel together; the others are put into buckets by size.
        """
        new = []
        for i, rows in enumerate(self.param_groups):
            for j, parameter in enumerate(rows["params"]):
                self._parameter_names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                if parameter not in self._backward:
                    new.append(parameter)
        if self._reduces:
            self._frozen = [parameter for parameter in new if not parameter.requires_grad]
            new = [parameter for parameter in new if parameter.requires_grad]
            self._plan(new, groups)
            self._register(new)

    def _plan(self, parameters: Iterable[Tensor], groups: list[list[Tensor]]) -> None:
        """Put parameters into buckets: the given groups, the others by size in their reverse order."""
        grouped = {parameter for group in groups for parameter in group}
        for group in groups:
            self._add_bucket(group)
        rest: dict[tuple[torch.dtype, str], list[Tensor]] = {}
        for parameter in parameters:
            if parameter not in grouped:
                rest.setdefault((parameter.dtype, parameter.device.type), []).append(parameter)
        for alike in rest.values():
            bucket: list[Tensor] = []
            room = min(_FIRST_BUCKET_BYTES, self._bucket_bytes)
            for parameter in reversed(alike):
                size = parameter.numel() * parameter.element_size()
                if bucket and size > room:
                    self._add_bucket(bucket)
                    room, bucket = self._bucket_bytes, []
                bucket.append(parameter)
                room -= size
            self._add_bucket(bucket)

    def _add_bucket(self, parameters: list[Tensor]) -> None:
        names = [self._parameter_names[parameter] for parameter in parameters]
        # The digest tells apart ranks whose parameters are in another order, which would mix their gradients.
        bucket = _Bucket(group_name("gradients", names), parameters)
        self._buckets.append(bucket)
        for parameter in parameters:
            if (backward := self._backward.get(parameter)) is None:
                self._backward[parameter] = _Backward(bucket, self.backward_passes_per_step)
            else:
                backward.bucket = bucket

    def _register(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is None and self.op == Adasum:
                # Horovod's scripts read .grad before the first backward.
                parameter.grad = torch.zeros_like(parameter)
            self._hooks.append(add_accumulation_hook(parameter, self._on_gradient))

    def _on_gradient(self, parameter: Tensor) -> None:
        backward = self._backward[parameter]
        bucket = backward.bucket
        if backward.delay <= 0 or bucket.handle is not None or (self._sparse and parameter in self._sparse):
            raise AssertionError(self._too_many(parameter))
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(f"{_GRAPH} (rank {job.rank()}, parameter '{self._parameter_names[parameter]}')")
        backward.delay -= 1
        if backward.delay > 0:
            return
        bucket.missing -= 1
        if gradient is not None and gradient.is_sparse and not self.sparse_as_dense:
            self._start_sparse(parameter, gradient)
        if bucket.missing == 0:
            self._start(bucket)

    def _too_many(self, parameter: Tensor) -> str:
        return f"{_TOO_MANY} (rank {job.rank()}, parameter '{self._parameter_names[parameter]}')"

    def _start_sparse(self, parameter: Tensor, gradient: Tensor) -> None:
        self._had_sparse.add(parameter)
        self._sparse[parameter] = mpi_ops.sparse_allreduce_async(
            gradient, f"gradient.{self._parameter_names[parameter]}", self.op, self.process_set
        )

    def _start(self, bucket: _Bucket) -> None:
        """Start the collective of a bucket."""
        bucket.started = True
        tensors = []
        for parameter in bucket.parameters:
            if self._sparse and parameter in self._sparse:
                continue
            found = parameter.grad
            if found is None and parameter in self._had_sparse and not self.sparse_as_dense:
                self._start_sparse(parameter, torch.zeros_like(parameter).to_sparse(1))
                continue
            gradient = torch.zeros_like(parameter) if found is None else found
            if gradient.is_sparse:
                self._had_sparse.add(parameter)
                gradient = gradient.to_dense()
            compressed, context = self._compression.compress(gradient)
            # The collective's own writes count for the alias.
            tensors.append(compressed.data)
            if found is not None:
                bucket.gradients.append((parameter, found, tensor_version(found)))
            if compressed is not found:
                bucket.sent.append(_Sent(parameter, gradient, compressed, context, found is not None))
        if not tensors:
            return
        bucket.handle = translated(async_collectives.grouped_allreduce_async)(
            tensors,
            self.op,
            bucket.name if len(tensors) == len(bucket.parameters) else f"{bucket.name}.{len(tensors)}",
            prescale=self._prescale,
            postscale=self._postscale,
            process_set=self.process_set,
            in_place=True,
        )

    def _compare(self) -> None:
        """Raise ValueError on all ranks if parameters differ between ranks. Collective: an all-reduce; blocks."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        names = [self._parameter_names[parameter] for parameter in parameters]
        marks = torch.stack([_mark(parameter) for parameter in parameters])
        moving = torch.tensor([1, any(_is_nonzero(parameter.grad) for parameter in parameters)])
        numbers = torch.cat([moving, marks, marks * marks])
        name = group_name("values", names)
        sums = translated(collectives.allreduce)(numbers, Sum, name, process_set=self.process_set)
        # Steps with zeros may stand before the broadcast, to make the optimizer's state.
        self._compares = not sums[1]
        # n numbers x are equal if and only if n · Σ x² = (Σ x)²; ranks that have joined add zeros to n, too.
        first, second = sums[2:].chunk(2)
        unequal = [*itertools.compress(names, (sums[0] * second != first * first).tolist())]
        if unequal and not self._compares:
            shown = ", ".join(f"'{name}'" for name in unequal[:3])
            raise ValueError(f"{_DIFFER} (rank {job.rank()}, {len(unequal)} of {len(names)} parameters: {shown})")

    # --- what scripts call -----------------------------------------------------------------------------------------

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are added up before they are all-reduced for one ``step``.

        Args:
            passes: number of backward passes for each ``step``, counted anew from this call.
        """
        self.backward_passes_per_step = passes
        self._reset_delays()

    def synchronize(self) -> None:
        """Wait until the gradients of all parameters are all-reduced over the ranks; ``.grad`` then has the result.

        Starts the all-reduces that backward has not started; a missing gradient counts as zeros. Collective over the
        optimizer's process set: one all-reduce for each bucket of parameters; blocks. Nothing is reduced on ranks
        outside of the process set, nor in a process set of one rank, unless the job is elastic.

        Raises:
            HorovodInternalError: ranks' gradients differ in shape or dtype, or a rank is lost.
            AssertionError: a gradient was changed since its reduction began, such as by clipping.
        """
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            self._adopt([])
        for bucket in self._buckets:
            if not bucket.started:
                self._start(bucket)
        try:
            for bucket in self._buckets:
                self._finish(bucket)
            for parameter, wait in self._sparse.items():
                parameter.grad = wait()
        finally:
            self._forget_reductions()
        if self._buckets and self._compares:
            self._compare()
        self._synchronized = True

    def _finish(self, bucket: _Bucket) -> None:
        if bucket.handle is None:
            return
        for parameter, gradient, writes in bucket.gradients:
            if parameter.grad is not gradient or tensor_version(gradient) != writes:
                raise AssertionError(f"{_CHANGED} (rank {job.rank()}, parameter '{self._parameter_names[parameter]}')")
        # In place: what was handed over is reduced.
        translated(bucket.handle.wait)()
        for sent in bucket.sent:
            parameter, gradient = sent.parameter, sent.gradient
            if sent.compressed is not gradient:
                gradient.copy_(self._compression.decompress(sent.compressed, sent.context))
            # A parameter that was frozen meanwhile must not move by weight decay or momentum.
            if not sent.present and parameter.requires_grad:
                parameter.grad = gradient.to_sparse(1) if parameter in self._had_sparse else gradient
            elif parameter.grad is not None and parameter.grad.is_sparse:
                # Optimizers for sparse gradients take no dense ones.
                parameter.grad = gradient.to_sparse(parameter.grad.sparse_dim())

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step`` all-reduce no gradients within a ``with`` block, because the script has called ``synchronize``.

        For scripts that change the reduced gradients before ``step``, for example clip them.
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """All-reduce the gradients over the process set, then perform the step of the user's optimizer.

        Collective over the process set; blocks. Within ``skip_synchronize`` no gradient is reduced. Warns if
        ``synchronize`` was called before outside ``skip_synchronize``, because the gradients are then reduced twice.

        Args:
            closure: computes the gradients and returns the loss of this rank; the gradients are reduced after it.

        Returns:
            What the ``step`` of the user's optimizer returns; None, without a step, where a ``GradScaler`` has found
            infinite gradients.

        Raises:
            ValueError: the user's optimizer calls ``closure`` several times, as L-BFGS does.
            AssertionError: gradients were changed, such as by ``GradScaler.step``, before they were reduced.
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        scales: dict[str, Any] = {}
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            if not self._accept_scale(found_inf):
                self._synchronized = False
                return None
            if not self._fused:
                # Other optimizers refuse them; the scaler deletes them after the step.
                scales = {name: vars(self).pop(name) for name in ("found_inf", "grad_scale")}
        if self._should_synchronize and closure is not None:
            closure = self._reduced(closure)
        elif self._should_synchronize:
            if self._synchronized:
                warnings.warn(_OVERTAKEN, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        try:
            result = super().step(closure)  # type: ignore[misc]
        finally:
            vars(self).update(scales)
        self._synchronized = False
        if self._autotune is not None and (size := self._autotune.after_step()) is not None:
            self._bucket_bytes, self._buckets = size, []
            self._plan(self._backward, self._groups)
        return result

    def _accept_scale(self, found_inf: Tensor) -> bool:
        """Unscale the gradients for a ``GradScaler``, which has set ``found_inf`` and ``grad_scale``.

        Returns:
            Whether to step: the gradients are finite.
        """
        if computed := self._computed():
            name = self._parameter_names[computed[0]]
            raise AssertionError(f"{_CHANGED} (rank {job.rank()}, parameter '{name}', GradScaler.step)")
        if self._fused:
            return True
        if found_inf.item():
            return False
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        return True

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def reduced() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ValueError(
                    f"{type(self).__name__} calls the closure several times in a step. How often depends on the loss "
                    "of each rank, and ranks would diverge. Use an optimizer that calls the closure once"
                )
            loss = closure()
            if not self._synchronized:
                self.synchronize()
            return loss

        return reduced

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, as ``zero_grad`` of the user's optimizer does with the same arguments.

        Raises:
            AssertionError: between a backward and ``step`` or ``synchronize``, where its gradients would be lost.
        """
        if computed := self._computed():
            names = ", ".join(f"'{self._parameter_names[parameter]}'" for parameter in computed[:3])
            more = f" and {len(computed) - 3} more" if len(computed) > 3 else ""
            raise AssertionError(f"{_RACE} (rank {job.rank()}, parameters {names}{more})")
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _computed(self) -> list[Tensor]:
        """Return the parameters whose gradients were computed since the last ``step`` or ``synchronize``."""
        passes = self.backward_passes_per_step
        return [parameter for parameter, backward in self._backward.items() if backward.delay != passes]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, and reduce their gradients, too; call it on every rank.

        Args:
            param_group: ``params`` and options, as the user's optimizer takes them. The ranks' gradients of these
            parameters are matched by position, unless ``named_parameters`` has named them.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        self._adopt([])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the user's optimizer, and drop all-reduces of gradients that are under way.

        Args:
            state_dict: state that ``state_dict`` of an optimizer over the same parameters has returned.
        """
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)  # type: ignore[misc]
        # The given optimizer has the same dicts, and a scheduler may hold that one.
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(self.state)
        self.param_groups, self.state = groups, state
        self._forget_reductions()
        self._synchronized, self._should_synchronize = False, True

    def _forget_reductions(self) -> None:
        for bucket in self._buckets:
            bucket.forget()
        self._sparse = {}
        self._reset_delays()

    def _reset_delays(self) -> None:
        for backward in self._backward.values():
            backward.delay = self.backward_passes_per_step

    @property
    def between_steps(self) -> bool:
        """Whether no gradient was computed and ``synchronize`` was not called since the last ``step``.

        The state of the job can then be saved without gradients.
        """
        return not self._synchronized and not self._computed()


def _mark(parameter: Tensor) -> Tensor:
    """Return a number from 0 to 2²⁴ - 1 that depends on all bits of a parameter, on the CPU."""
    values = parameter.detach().contiguous().view(-1)
    bits = values.view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    return bits.sum(dtype=torch.int64).remainder(_MARK).cpu()


def _is_nonzero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())


def trust_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Skip the comparison of the ranks' parameters that ``optimizer`` makes at its first step.

    Called for the optimizer of an elastic state, for which all ranks get rank 0's parameters.

    Args:
        optimizer: any optimizer; nothing is done for one that ``DistributedOptimizer`` has not wrapped.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer._compares = False


def check_between_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if a backward or ``optimizer.synchronize`` has made gradients that no ``step`` has used yet.

    Called before the state of an elastic job is saved, of which gradients are no part.

    Args:
        optimizer: any optimizer; nothing is raised for one that ``DistributedOptimizer`` has not wrapped.
    """
    if isinstance(optimizer, _DistributedOptimizer) and not optimizer.between_steps:
        raise ValueError("commit() and check_host_updates() must stand after optimizer.step(), not before it")


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """Adasum: every rank steps on its own, and the ranks' changes of the parameters are combined."""

    def step(self, closure: Any = None) -> Any:
        """Perform a step of the user's optimizer on this rank's gradients, then combine the ranks' changes by Adasum.

        Collective over the process set: an Adasum all-reduce of the changes of the parameters; blocks. Each parameter
        gets its value before the step plus the combined change.

        Args:
            closure: argument of the user's optimizer, a function that evaluates the loss again; None: none.

        Returns:
            What the ``step`` of the user's optimizer returns.
        """
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if self._buckets and self._compares:
            self._compare()
        before = [parameter.detach().clone() for parameter in parameters]
        result = super(_DistributedOptimizer, self).step(closure)  # type: ignore[misc]
        if self._buckets:
            changes = [p.detach() - start for p, start in zip(parameters, before, strict=True)]
            compressed = [self._compression.compress(change) for change in changes]
            reduced = translated(async_collectives.grouped_allreduce_async)(
                [tensor for tensor, _ in compressed], Adasum, "adasum.changes", process_set=self.process_set
            )
            combined = translated(reduced.wait)()
            with torch.no_grad():
                for parameter, start, change, (_, ctx) in zip(parameters, before, combined, compressed, strict=True):
                    parameter.copy_(start + self._compression.decompress(change, ctx))
        self._reset_delays()
        return result

    def _on_gradient(self, parameter: Tensor) -> None:
        backward = self._backward[parameter]
        if backward.delay <= 0:
            raise AssertionError(self._too_many(parameter))
        backward.delay -= 1

    def synchronize(self) -> None:
        """Do nothing: with Adasum ``step`` combines the ranks' changes of the parameters, and reduces no gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError, as Horovod does: with Adasum ``step`` cannot leave out its collective.

        Does nothing on a rank whose changes are not combined, such as one outside of the process set.
        """
        if self._buckets:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optimizer so that it all-reduces gradients over the ranks during backward, before ``step`` uses them.

    This call itself sends nothing. Backward starts an all-reduce of each bucket of gradients, without waiting for it;
    ``step`` is collective over ``process_set`` and waits for all of them. With ``Adasum``, each rank steps on its own
    gradients, and ``step`` combines the ranks' changes of the parameters by one Adasum all-reduce. A gradient that is
    None counts as zeros in the reduction, and is the reduced tensor afterwards; with ``Adasum`` over several ranks this
    call itself replaces gradients that are None by zeros.

    Args:
        optimizer: an optimizer of PyTorch's interface.
        named_parameters: pairs (name, parameter), by which gradients are matched between ranks; None: names by
            position.
        compression: form in which gradients are sent: ``Compression.none`` or ``Compression.fp16``.
        backward_passes_per_step: number of backward passes whose gradients are added up before they are reduced.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: with ``Average``, factor f: gradients are divided by f before the sum over the ranks,
            and by the number of ranks / f after it.
        num_groups: deprecated form of a number as ``groups``; 0: none.
        groups: number of collectives into which the parameters are divided evenly, or lists of parameters whose
            gradients are reduced by one collective; parameters in no list, and all for None, are divided into
            collectives of limited size in bytes.
        sparse_as_dense: whether sparse gradients are converted and reduced as dense gradients.
        process_set: ranks that take part; default: all ranks.

    Returns:
        New optimizer of a subclass of the class of ``optimizer``, which shares its options and state. The script steps
        it in place of ``optimizer``, whose own ``step`` would reduce no gradients. It has Horovod's further methods
        ``synchronize``, ``skip_synchronize`` and ``set_backward_passes_per_step``. Gradients are not reduced on a rank
        outside of the process set; in a process set of one rank they are reduced only if the job is elastic.

    Raises:
        ValueError: ``init`` was not called; ``optimizer`` is wrapped already; ``named_parameters`` lacks a parameter of
            the optimizer, names two alike, or does not consist of tuples; ``compression`` is no class of
            ``hvd.Compression``; ``op`` is another operation; ``backward_passes_per_step`` is not positive or not whole;
            ``gradient_predivide_factor`` is 0, or given with another ``op`` than ``Average``; ``groups`` is not
            positive, has a parameter twice, or holds something other than tensors; or a number in
            ``HOROVOD_AUTOTUNE_…`` variables is not whole. From ``step`` and
            ``synchronize``: ``optimizer`` calls its closure several times, or parameters differ between ranks before
            the first step.
        AssertionError: from backward, ``step``, ``synchronize`` or ``zero_grad`` of the new optimizer: there were more
            backward passes than ``backward_passes_per_step``, gradients were changed or set to zero while they are
            reduced, or backward had ``create_graph=True``.
        HorovodInternalError: from backward, ``step`` or ``synchronize``: the ranks' calls differ, or a rank is lost.
    """
    job.check_initialized()
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("optimizer is wrapped by DistributedOptimizer already; give it the optimizer of PyTorch")
    if not hasattr(compression, "compress"):
        raise ValueError(f"compression must be hvd.Compression.none or hvd.Compression.fp16, not {compression!r}")
    if gradient_predivide_factor == 0:
        raise ValueError("gradient_predivide_factor must not be 0")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op must be Average, Sum or Adasum, not {op}")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0 or backward_passes_per_step % 1:
        raise ValueError("backward_passes_per_step must be > 0, and a whole number")
    named = _checked_names(optimizer, named_parameters)
    base = _DistributedAdasumOptimizer if op == Adasum and process_set.size() > 1 else _DistributedOptimizer
    kind: Any = type(type(optimizer).__name__, (base, type(optimizer)), {})
    made = kind.__new__(kind)
    # Shared, not copied: schedulers and checkpoints that hold the given optimizer stay valid. A scheduler replaces the
    # method step of the optimizer that it holds by one that steps this optimizer alone, without a reduction.
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if not callable(getattr(kind, k, None))})
    if is_wrapped_by_scheduler(vars(optimizer).get("step")):
        mark_stepped(optimizer)
    made._distribute(
        named,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        _checked_groups(groups, optimizer),
        sparse_as_dense,
        process_set,
    )
    return made


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {parameter for _, parameter in named}
    if any(parameter not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            + ", ".join(str(id(p)) for group in optimizer.param_groups for p in group["params"] if p not in known)
        )
    return named


def _checked_groups(
    groups: int | Sequence[Sequence[Tensor]] | None, optimizer: torch.optim.Optimizer
) -> list[list[Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        count = min(groups, len(parameters))
        return [[*part] for part in split_list(parameters, count)] if count else []
    seen: set[Tensor] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if parameter in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(parameter)
    return [[p for p in group if p.requires_grad] for group in groups if any(p.requires_grad for p in group)]


def split_list(values: Sequence[T], n: int) -> list[Sequence[T]]:
    """Divide a sequence into ``n`` parts of consecutive elements, whose lengths differ by at most 1, longer ones first.

    Args:
        values: the sequence, such as the parameters of an optimizer.
        n: number of parts, at least 1; if it is larger than the number of values, the last parts are empty.
    """
    short, longer = divmod(len(values), n)
    starts = [part * short + min(part, longer) for part in range(n + 1)]
    return [values[start:end] for start, end in itertools.pairwise(starts)]
