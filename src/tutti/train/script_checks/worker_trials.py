"""Refuse a loss that depends on values which another logical worker's micro-batch has left in Python objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from tutti.config.variables import is_off
from tutti.data.batches import map_tensors
from tutti.errors import UsageError
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.swap import buffers
from tutti.nn.written_tensors import ParameterWriteError
from tutti.train.script_checks.cross_step_watch import CrossStepWatch
from tutti.train.script_checks.cross_worker_watch import micro_batch_key, refuse_cross_worker
from tutti.train.script_checks.iterator_watch import iterators_unread
from tutti.train.script_checks.metric_objects import metric_objects
from tutti.train.script_checks.plain_numbers import plain_digest
from tutti.train.script_checks.python_state import PythonState, trial_call
from tutti.types.micro_batch import LossFn, MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


_FIRST = 8
"""Steps in which losses are all tried (a guess); a threshold may leave the first ones as they are."""
_MOST = 8
"""Most Python objects that are tried one by one (a guess)."""


class WorkerTrials:
    """Raises UsageError where a micro-batch's loss depends on Python objects that another logical worker has changed.

    A running mean, a counter or an array that the loss function or the model keeps would have other values if each
    logical worker (fixed share of the global batch) had a device of its own. A trial computes a micro-batch's loss
    anew, without gradients: with former values of such objects, with the present ones and, where the two losses differ,
    once more with the former ones, to leave out losses that draw random numbers by themselves. A trial leaves no trace
    in the objects of a ``PythonState``, in buffers or in RNG streams. Values on which the loss does not depend, such as
    means for a log, are allowed. On a rank with several workers, random generators of the script's own that an earlier
    worker's micro-batch has advanced are tried like other objects. Trials depend on this rank's share of the work:

    - Several workers: in steps 1 to 8, 16, 32, … and at the turn of an epoch (``WatchWindows``), for the first
      micro-batch of each worker but the first, if the workers before it have changed objects in this step. Former
      values are those from before the step.
    - One worker, whose micro-batches other ranks share: in the same steps, for each micro-batch whose forward has
      changed objects. Former values are those from before the forward.
    - One worker alone, beside other data ranks: in steps 2 to 8, for numbers, and containers of numbers, that have
      changed since step 1; and at the turn of an epoch for those that have changed since its first step there. Nothing
      is refused here: ``kept`` compares the numbers over the data ranks.

    No loss is tried if forwards are collective, as of a model that is split or sharded over ranks, nor with
    ``TUTTI_DIAGNOSTICS=off``. ``CrossWorkerWatch`` finds such values by the script's calls of PyTorch and arithmetic,
    and names the line; the trials find values that pass through ``float()``, ``math``, NumPy or a condition.

    Args:
        run: the run.
        kept: the run's check of values that ranks have kept; it compares the numbers that ``watched`` passes to it over
            the data ranks.
    """

    def __init__(self, run: Run, kept: CrossStepWatch) -> None:
        self._run, self._kept, self._steps = run, kept, 0
        # The objects as they were in the first step, on a rank with one worker.
        self._begun: PythonState | None = None
        self._enabled = not is_off("DIAGNOSTICS", os.environ)

    def watched(self, loss: LossFn, guarded: LossFn, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> LossFn:
        """Return ``guarded`` with a check for losses that depend on Python objects another worker has changed.

        To be called once in each step; not collective. A logical worker is a fixed share of the global batch. What is
        checked depends on this rank's share:

        - It computes several workers, or shares one with other ranks: whether a loss depends on objects that the code
          for a micro-batch has changed. Checked in steps 1 to 8, 16, 32, 64, … and at the turn of an epoch
          (``WatchWindows``).
        - It has one worker for itself, and there are other data ranks, with which it makes common updates: which
          numbers have changed since step 1, and whether the loss depends on them, in steps 2 to 8. They are passed to
          the constructor's ``kept``, by which ranks compare them.

        Nothing is checked with ``TUTTI_DIAGNOSTICS=off``, where forwards are collective, or where the loss function
        uses a metric object (with ``update``, ``compute`` and ``reset``).

        Args:
            loss: the script's loss function, of which the check makes further calls without gradients.
            guarded: the same function with other checks around it, whose result the returned function returns.
            work: pairs (index of a logical worker, its micro-batches) of this rank in the step, in the order in which
                they are computed.

        Returns:
            A function with the arguments and the result of ``guarded``, to be called once for each micro-batch, in the
            order of ``work``. In the first case above it raises UsageError, after its call of ``guarded``, if the loss
            depends on such objects. ``guarded`` itself in steps in which nothing is checked.
        """
        run = self._run
        self._steps += 1
        turn = run.lifecycle.windows.is_open
        if not self._enabled or (self._steps > _FIRST and self._steps & (self._steps - 1) and not turn):
            self._begun = None
            return guarded
        left = [micro_batch for _, micro_batches in work for micro_batch in micro_batches]
        keys = [micro_batch_key(each, run) for each in left]
        collective = run.context.comms.model.size > 1 or run.replica.sharded or run.feed.workers_as_one
        if collective or metric_objects(loss):
            return guarded
        if run.feed.contract.shared:
            return self._watched_alone(loss, guarded, left)
        if len(set(keys)) < 2:
            return self._watched_over_steps(loss, guarded, left)
        begun = PythonState(run.replica.parts, loss)
        tried = {keys[0]}

        def watch(model: Any, batch: Any) -> Any:
            if not left:
                return guarded(model, batch)
            micro_batch, key = left.pop(0), keys.pop(0)
            is_due = key not in tried and micro_batch.samples
            changed, drawn = (begun.changed(), begun.drawn()) if is_due else ([], [])
            names = changed + drawn
            tried.add(key)
            depends = bool(names) and self._depends(loss, model, micro_batch, begun.restore)
            result = guarded(model, batch)
            if depends and not changed:
                why = (
                    "this rank computes several logical workers in turn, and each would draw the same on its own device"
                )
                self._refuse_drawn(drawn[0], why)
            if depends:
                what = f"the loss of a micro-batch depends on what another one has left in {', '.join(names[:3])}"
                refuse_cross_worker(run, what, "in the loss function or the model's forward")
            return result

        return watch

    def _refuse_drawn(self, name: str, why: str) -> NoReturn:
        raise UsageError(
            f"the loss of a micro-batch depends on the generator {name}, which another micro-batch has advanced",
            where=f"step {self._run.global_step + 1}, in the loss function or the model's forward",
            why=why,
            remedy="draw by PyTorch's default generator, or seed the generator by run.global_step in each step; or take"
            f" as many workers as data ranks ({self._run.context.mesh.data_ranks})",
        )

    def _watched_over_steps(self, loss: LossFn, guarded: LossFn, left: list[MicroBatch]) -> LossFn:
        """Return ``guarded`` with the check of a rank with one worker, for numbers that have changed since step 1.

        The check finds out on which of these numbers the loss depends. Ranks compare the numbers, as each rank may have
        kept them of its own samples (``CrossStepWatch.note_state``).
        """
        run, own = self._run, self._run.gradient_sync.loss_normalisation == "worker"
        turn = run.lifecycle.windows.is_open
        if (self._steps > _FIRST and not turn) or own or run.context.comms.replica.size == 1:
            self._begun = None
            return guarded
        if self._begun is None:
            self._begun = PythonState(run.replica.parts, loss)
            return guarded
        changes = [change for change in self._begun.changes() if plain_digest(change.value) is not None][:_MOST]

        def restore() -> None:
            for change in changes:
                change.restore()

        def watch(model: Any, batch: Any) -> Any:
            micro_batch = left.pop(0) if left else None
            if micro_batch is not None and micro_batch.samples and changes:
                depends = self._depends(loss, model, micro_batch, restore)
                for change in changes:
                    reached = depends and self._depends(loss, model, micro_batch, change.restore)
                    self._kept.note_state(change.name, change.value, reached)
                changes.clear()
            return guarded(model, batch)

        return watch

    def _watched_alone(self, loss: LossFn, guarded: LossFn, left: list[MicroBatch]) -> LossFn:
        """Return ``guarded`` with the check of a rank that shares a worker: losses must not depend on kept objects.

        These are Python objects that a forward has changed, and buffers that are not persistent. The worker's next
        micro-batch may be on another rank, which gets only persistent buffers from this rank.
        """
        run = self._run

        def watch(model: Any, batch: Any) -> Any:
            micro_batch = left.pop(0) if left else None
            if micro_batch is None or not micro_batch.samples:
                return guarded(model, batch)
            begun, former = PythonState(run.replica.parts, loss), self._volatile()
            result = guarded(model, batch)
            run.trainability.check_buffers()
            drawn = begun.drawn()
            names = begun.changed() or [n for n, tensor in self._volatile().items() if not _same(tensor, former.get(n))]
            draws = run.replica.draws
            moment, state = draws.moment, draws.state
            restore = partial(begun.restore, generators=False)
            if names and self._depends(loss, model, micro_batch, restore, former):
                raise UsageError(
                    f"the loss of a micro-batch depends on what another one has left in {', '.join(names[:3])}",
                    where=f"step {run.global_step + 1}, in the loss function or the model's forward",
                    why="ranks share the micro-batches of a logical worker, and each would get the values that its own"
                    " have left",
                    remedy="keep the values in a persistent buffer that the model has before tutti.prepare; or take as"
                    f" many workers as data ranks ({run.context.mesh.data_ranks}), and no micro_batch",
                )
            if drawn and self._depends(loss, model, micro_batch, begun.restore, former):
                self._refuse_drawn(
                    drawn[0], "ranks share the micro-batches of a logical worker, and each would draw the same"
                )
            draws.moment, draws.state = moment, state
            return result

        return watch

    def _volatile(self) -> dict[str, Tensor]:
        """Return copies of the buffers that are not handed on between ranks that share a worker."""
        specs = self._run.replica.specs
        slots = buffers(self._run.replica.parts, persistent=False)
        return {slot.name: slot.get().clone() for slot in slots if slot.name not in specs}

    def _depends(
        self,
        loss: LossFn,
        model: Any,
        micro_batch: MicroBatch,
        restore: Callable[[], None],
        former: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Return whether a micro-batch's loss differs with former values of Python objects.

        ``restore``: gives the objects their former values. ``former``: buffers that take theirs, too.
        """
        run = self._run
        now = PythonState(run.replica.parts, loss)
        replica = run.replica
        by_worker = run.gradient_sync.loss_normalisation == "worker"
        compiled = has_compiled_code([run.model], run.context)

        def value(restored: Callable[[], None] | None) -> list[Tensor]:
            with ExitStack() as stack:
                stack.callback(now.restore)
                stack.enter_context(run.checks.aside())
                if compiled:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(trial_call(run.replica.parts))
                if restored is not None and former is not None:
                    for slot in buffers(run.replica.parts, persistent=False):
                        if slot.name in former:
                            slot.put(former[slot.name].clone())
                replica.begin(micro_batch)
                now.restore(generators=False)
                if restored is not None:
                    restored()
                try:
                    with iterators_unread(loss):
                        found = loss(model, map_tensors(micro_batch.batch, torch.clone))
                except ParameterWriteError:
                    # Workers that train alone have parameters of their own, which this forward would write for each.
                    if not by_worker:
                        raise
                    return []
                total = found[:2] if isinstance(found, tuple | list) else [found]
                return [torch.as_tensor(each).detach().clone() for each in total]

        try:
            before, after = value(restore), value(None)
            # A loss that draws by itself has another value for the same state.
            return not _equal(before, after) and _equal(before, value(restore))
        except Exception:
            # The loss may need gradients, or write parameters.
            return False
        finally:
            replica.begin(micro_batch)


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
