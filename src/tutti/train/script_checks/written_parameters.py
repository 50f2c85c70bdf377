"""Find parameters that the script writes, and refuse values that differ between data ranks or repeated writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tutti.checkpoint.fingerprint import is_compared, tensor_digests
from tutti.comm.random_keys import mix
from tutti.errors import UsageError, counted, script_line
from tutti.nn.swap import parameters
from tutti.torch_compat import FunctionModesDisabled, tensor_version
from tutti.train.replicas import differing_copies
from tutti.types.micro_batch import LossFn, MicroBatch
from tutti.types.optimizer_protocols import NamedParameters

if TYPE_CHECKING:
    from tutti.train.run import Run

_FIRST = 4
"""Beginnings of epochs that are all compared."""


_APART = 16
"""Least number of steps between digests at beginnings of epochs, for tiny data sets (a guess)."""
_GUARDED = 3
"""Steps in which loss functions are guarded: an average of a copy of the weights changes from the second on."""


class WrittenParameters:
    """Finds parameters that the script has written since the last update, where every data rank has all of them.

    The version counters of the tensors tell of such writes. A write through ``parameter.data`` does not change the
    counter: at the beginning of an epoch, where scripts reset layers, and before the 2nd, 3rd, 5th, 9th step and so on,
    ``digest`` therefore reads the values in any case.

    Args:
        run: the training run, whose parameters are watched.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._count, self._steps = run, 0, 0
        self._epochs = self._digested = 0
        # Whether forwards are guarded in this step, and in pipeline stages those that have had one; whether backwards
        # of other micro-batches follow.
        self._guards, self._stages, self._in_flight = False, set[int](), False
        sync = run.gradient_sync
        together = run.context.comms.replica.size > 1 and sync.loss_normalisation == "step"
        place = sync.gradient_at if together else None
        self._watched, self._served = place in ("rank", "rows", "stages", "servers"), place == "servers"
        self.watch()

    def watch(self) -> None:
        """Begin to watch the parameters that the model has now for writes by the script; record their version counters.

        To be called again when the model gets other parameter objects. Not collective.
        """
        named = parameters(self._run.replica.parts) if self._watched else []
        # Parameter servers have values of the trained ones, which replace the ranks' own.
        self._parameters = [p for _, p in named if not (self._served and p.requires_grad)]
        self.note()

    def note(self) -> None:
        """Record the version counters of the watched parameters.

        Called after each update, so that later changes of a counter are writes by the script.
        """
        self._versions = [tensor_version(p) for p in self._parameters]

    def digest_once(self) -> Callable[[], int]:
        """Return a function without arguments that calls ``digest`` when it is called first, and then keeps the result.

        The returned function is to be called after a step's forwards: a forward may write parameters, too, as a layer
        that is initialised from its first batch (ActNorm, arXiv 1807.03039), which then has other values on each data
        rank.

        Returns:
            The function; each call returns the result of the one call of ``digest``.
        """
        found: list[int] = []

        def once() -> int:
            if not found:
                found.append(self.digest())
            return found[0]

        return once

    def digest(self) -> int:
        """Return a positive hash of the bytes of all parameters in steps that compare them over ranks, else 0.

        A hash reads every parameter, and therefore not every step compares them:

        - If a version counter has changed since ``note``, so that the script has written a parameter: the first four of
          such steps, then the 8th, 16th, 32nd and so on; and each in which a logical worker (share of the global batch)
          has no samples, where forwards that write run on some ranks alone.
        - Otherwise the first steps of epochs: the first four, then each that is at least 16 steps after the last one
          compared; and steps before which a power of two of steps was taken, for writes that change no counter.

        Always 0 with one data rank, or where not every data rank has all parameters. Not collective: the hash is
        compared over ranks together with the gradients.
        """
        if self._seen():
            self._count += 1
            if not (is_compared(self._count) or self._lacks_samples()):
                return 0
        elif not self._parameters or not (self._epoch_begins() or self._is_due()):
            return 0
        return (mix(*tensor_digests(p.data for p in self._parameters)) >> 1) or 1

    def _seen(self) -> bool:
        """Return whether a version says that the script has written a parameter since ``note``."""
        return [tensor_version(p) for p in self._parameters] != self._versions

    def _lacks_samples(self) -> bool:
        """Return whether a logical worker has no samples in this step, so that a rank may call no forward."""
        return self._run.lifecycle.step_context.samples < self._run.context.workers

    def _epoch_begins(self) -> bool:
        """Return whether the coming step is the first of an epoch whose parameters are to be compared.

        After the first few epochs only steps that are far enough from the last one compared.
        """
        run = self._run
        if run.data_position.batch or (self._epochs >= _FIRST and run.local_step < self._digested + _APART):
            return False
        self._epochs, self._digested = self._epochs + 1, run.local_step
        return True

    def _is_due(self) -> bool:
        """Return whether the number of steps so far is a power of two: writes of every step are found early."""
        taken = self._run.local_step
        return taken > 0 and not taken & (taken - 1)

    def guarded(self, loss: LossFn, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> LossFn:
        """Return the loss function wrapped to raise UsageError if its forward changes parameters in every micro-batch.

        An example is a moving average of the weights that the forward updates: it would change once a micro-batch, and
        so less often on more devices. Writes that change nothing when they are repeated, such as a clamp, are allowed.
        To be called once in each step.

        Args:
            loss: the loss function of ``run.step``.
            work: pairs (index of a worker, its micro-batches) of this rank's logical workers (shares of the global
                batch).

        Returns:
            The wrapped function in the first three steps, and at the turn of an epoch (``WatchWindows``). ``loss``
            itself in all other ones, and also in each of these cases: no parameter of this rank is used by several
            micro-batches of the step; parameters are sharded; the model is cut into pipeline stages (``unmoved`` checks
            these); or other ranks write into the same memory, so that a change during a forward may be theirs.
        """
        run = self._run
        self._steps += 1
        self._stages, self._in_flight = set(), False
        counts = [len(micro_batches) for _, micro_batches in work]
        self._guards = (self._steps <= _GUARDED or run.lifecycle.windows.is_open) and sum(counts) > 1
        if not self._guards or run.replica.sharded or run.gradient_sync.shares_parameters:
            self._guards = False
            return loss
        if run.context.mesh.stage > 1:
            self._in_flight = not run.replica.own_backward and max(counts) > 1
            return loss
        named = _plain_parameters(run.replica.parts)
        if run.gradient_sync.loss_normalisation == "worker" and max(counts) < 2:
            # Workers that train alone have trained parameters of their own, and share the frozen ones of the rank.
            named = [(name, p) for name, p in named if not p.requires_grad]
        return _Guard(loss, named, run) if named else loss

    @contextmanager
    def unmoved(self, stage: int) -> Iterator[None]:
        """Return a context manager around a pipeline stage's forward that raises UsageError if it writes parameters.

        It checks forwards of the first three steps, and at the turn of an epoch (``WatchWindows``), with gradients
        enabled, on a rank that has several micro-batches in the step; elsewhere it does nothing. A stage's first
        forward of a step may change parameters, unless backwards of other micro-batches follow.

        Args:
            stage: number of the stage.

        Raises:
            UsageError: a later forward of the step changes a parameter again; or a forward writes one while backwards
                of other micro-batches are still to come.
        """
        if not self._guards or self._run.context.mesh.stage == 1 or not torch.is_grad_enabled():
            yield
            return
        named = _plain_parameters(self._run.replica.parts)
        versions = [tensor_version(p) for _, p in named]
        before = _digests(named) if stage in self._stages else None
        self._stages.add(stage)
        yield
        if before is not None:
            _refuse_moved(self._run, named, before)
        changed = [name for (name, p), version in zip(named, versions, strict=True) if tensor_version(p) != version]
        if self._in_flight and changed:
            raise UsageError(
                f"the forward writes the parameter {changed[0]}",
                where=f"step {self._run.global_step + 1}",
                why="pipeline stages compute forwards of other micro-batches before a backward, which needs the values"
                " of its own forward",
                remedy="write it between two steps; or take micro_batches=1, or strategy='model_parallel'",
            )

    def compare(self) -> None:
        """Raise UsageError, on every data rank, if copies of a parameter differ because the script has written them.

        To be called on all data ranks of a pipeline stage (without stages, on all data ranks) in a step in which their
        hashes of parameters (``digest``), or of other values that the script keeps, differ. Collective over these
        ranks: two small all-gathers of digests of each copy, and a third one where copies differ. If all copies turn
        out to be equal, the method returns.

        Raises:
            UsageError: copies differ; the error names a parameter and the ranks that differ.
        """
        run = self._run
        found = differing_copies(run, run.context.comms.replica, f"step {run.global_step + 1}")
        if found is None:
            return
        names, sides = found
        way = "" if self._seen() else ", such as through .data, or a device computes wrongly"
        if self._lacks_samples():
            raise UsageError(
                f"the script has written other values into {names} on each rank: {sides}",
                where=f"before step {run.global_step + 1}, {script_line()}",
                why=f"the global batch has {counted(run.lifecycle.step_context.samples, 'sample')}, and a rank without"
                " any calls no forward: what a forward writes, such as a clamp, it has not written",
                remedy="write after the update, on every rank; or give tutti.prepare drop_last=True or another"
                " batch_size, so that every rank has samples in every step",
            )
        raise UsageError(
            f"the script has written other values into {names} on each rank{way}: {sides}",
            where=f"before step {run.global_step + 1}, {script_line()}",
            why="random draws between steps come from each rank's own generator (reset_parameters, torch.randn), and"
            " numbers of a rank's own samples are its own, too",
            remedy="call torch.manual_seed with the same number on every rank right before the draw, or compute the"
            " values from what is the same everywhere, such as run.stats or run.state(); keep what a forward computes"
            " from samples (a codebook's averages) in buffers; for a layer that its first batch initialises, call the"
            " model on a batch, the same on every rank, before tutti.prepare",
        )


class _Guard:
    """A loss function of one step that refuses to move parameters in its second or a later call.

    Args:
        loss: the loss function.
        parameters: the parameters, by name.
        run: the run.
    """

    def __init__(self, loss: LossFn, parameters: NamedParameters, run: Run) -> None:
        self._loss, self._parameters, self._run = loss, parameters, run
        self._calls = 0

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return the loss. Raises UsageError if this call, and not the first one alone, has moved a parameter."""
        self._calls += 1
        before = _digests(self._parameters) if self._calls > 1 else None
        result = self._loss(model, batch)
        if before is not None:
            _refuse_moved(self._run, self._parameters, before)
        return result


def _digests(named: NamedParameters) -> list[int]:
    # A mode of the script's reads would handle each call for each parameter.
    with FunctionModesDisabled():
        return tensor_digests(p.data for _, p in named)


def _refuse_moved(run: Run, named: NamedParameters, before: Sequence[int]) -> None:
    """Raise UsageError if parameters have other digests than before a forward."""
    moved = [name for (name, _), a, b in zip(named, before, _digests(named), strict=True) if a != b]
    if moved:
        raise UsageError(
            f"the forward writes the parameter {moved[0]}, and moves it in every micro-batch",
            where=f"step {run.global_step + 1}",
            why="a device has several micro-batches of a global batch, and on more devices the parameter would move"
            " less often",
            remedy=f"write it between two steps; or take as many workers as data ranks ({run.context.mesh.data_ranks}),"
            " and no micro_batch; or give tutti.prepare ema=… for an average",
        )


def _plain_parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of the modules, without embeddings whose forward limits the norm of their rows."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    kept = {m.weight for part in parts for m in part.modules() if isinstance(m, tables) and m.max_norm is not None}
    return [(name, p) for name, p in parameters(parts) if p not in kept]
