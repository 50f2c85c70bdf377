"""Request handlers of a parameter server: synchronous (a barrier a step) and asynchronous (every push is an update)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tutti.parallel.ddp.buckets import METRICS, read_sums
from tutti.parallel.ddp.gradient_arithmetic import scale_all, squares_of
from tutti.parallel.ddp.step_agreement import DIGESTS
from tutti.parallel.normalisation import finite_by_norm, is_finite, mean_factor
from tutti.parallel.parameter_server.parameter_shard import ParameterShard, Vectors
from tutti.parallel.parameter_server.server_barrier import MOST_BEHIND, ServerBarrier
from tutti.parallel.parameter_server.server_wire import (
    APPLY,
    BACK,
    EDITED,
    LATE,
    OK,
    PULL,
    PUSH,
    REFUSED,
    SKIP,
    SUM,
    WAIT,
    MessageHeader,
)
from tutti.parallel.parameter_server.staleness import StalenessTracker

NONE = -1.0
"""Stands for a missing number among the extras of a request or reply."""


@dataclass
class Request:
    """A well-formed request of a rank to a parameter server.

    Attributes:
        header: first frame of the message.
        extras: floats, whose meaning and number depend on the kind of request.
        vectors: gradients of a PUSH, one flat tensor for each dtype of the parameters, in a buffer that is reused after
            the reply; empty where the request carries none.
    """

    header: MessageHeader
    extras: Sequence[float]
    vectors: Vectors


@dataclass
class Answer:
    """A parameter server's reply to a request.

    Attributes:
        status: OK; LATE for a gradient that came after the sum of its step; REFUSED for a non-finite gradient or a kind
            of request that the server does not handle.
        extras: floats, whose meaning and number depend on the kind of request.
        values: send the server's current parameters, too.
        gradients: summed gradients to send, one flat tensor for each dtype; None for none.
        blob: saved state or statistics to send; None for none. Not sent with parameters or gradients.
        seen: number of updates made so far.
    """

    status: int = OK
    extras: Sequence[float] = ()
    values: bool = False
    gradients: Vectors | None = None
    blob: bytes | None = None
    seen: int = field(default=0)


class RequestHandler(Protocol):
    """Protocol of a parameter server's handler of the requests PUSH, SUM, APPLY and PULL.

    PUSH brings gradients, SUM reads statistics of the summed gradients, APPLY makes the update, and PULL reads the
    parameters for a step. The server's loop, a single thread, answers all other kinds of request itself.
    """

    @property
    def version(self) -> int:
        """Number of updates made so far to the parameters that this server has, including those before a restart.

        The server sends the number with each reply, and makes snapshots by it.
        """

    def handle(self, request: Request) -> Answer | None:
        """Carry out a request of a rank to this parameter server, and return the reply. Does not block.

        PUSH brings gradients, SUM reads statistics of the summed gradients, APPLY makes the update, and PULL reads the
        parameters for a step.

        Args:
            request: one of these requests, with its header, floats and, for a PUSH, gradients, whose buffer is reused
                after the call.

        Returns:
            The reply, an ``Answer`` object: ``status``, floats (``extras``), and ``values``, whether the server's
            current parameters are sent with the reply. None if the request has to wait for requests of other logical
            workers (shares of the global batch). In this case the server calls ``handle`` again later with the same
            request.
        """

    def forget(self) -> None:
        """Reset this server's step numbers of all logical workers, after a checkpoint was loaded into the server.

        Logical workers are the N fixed shares of the global batch. The server's loop calls this; the next request sets
        the step numbers again. Parameters and optimizer state are not touched.
        """

    def state(self) -> dict[str, Any]:
        """Return the logical workers' step numbers and the counts of this parameter server, for a snapshot.

        The server's loop calls this for each snapshot; a server process that is started again takes the dict over with
        the method ``load``. Logical workers are fixed shares of the global batch.

        Returns:
            A dict that JSON can represent. For an asynchronous server ``version`` (updates made), ``clocks`` (steps of
            each worker), ``lost`` (updates that a crashed process had made after its newest snapshot) and ``stop_at``
            (step after which all workers stop, or None). Empty for a synchronous server, which cannot be restored.
            Parameters and optimizer state are not in it.
        """

    def load(self, state: dict[str, Any]) -> None:
        """Restore the logical workers' step numbers, and counts, in a server process that was started again.

        Called once, before the first request, if there is a snapshot. Logical workers are fixed shares of the global
        batch.

        Args:
            state: the dict that the method ``state`` returned for the snapshot.

        Raises:
            NotImplementedError: the server is synchronous; its pushed gradients are lost with the process.
        """

    def facts(self) -> dict[str, Any]:
        """Return this parameter server's statistics for the run's ``summary.json``.

        Called when a rank asks for them, at the end of a run.

        Returns:
            A dict that JSON can represent, with counts by name: ``updates``, the updates made, and counts of dropped
            pushes, whose names depend on the kind of server.
        """


class SyncHandler:
    """Request handler of a synchronous parameter server: one update a step, from the sum of the pushed gradients.

    The sum is over all pushes or, with backup workers, over the first to arrive.

    Args:
        shard: parameter shard of this server.
        rounds: barrier and sum of the gradients of a step.
        leaf: for each logical worker (share of the global batch) the index, among the gradients that the server sums,
            of the gradient that is pushed for this worker.
        parameters: number of trained tensors of the model, on all servers.
        ranks: number of data ranks, each of which asks for the sum of every step.

    Attributes:
        version: number of updates made.
    """

    def __init__(
        self, shard: ParameterShard, rounds: ServerBarrier, leaf: Mapping[int, int], parameters: int, ranks: int
    ) -> None:
        self._shard, self._rounds, self._leaf, self._parameters = shard, rounds, leaf, parameters
        self._ranks = ranks
        self._indices = [piece.tensor for piece in shard.slices]
        self._at: dict[int, int] = {}
        self._result: list[float] | None = None
        self._gradients: list[Tensor | None] = []
        self._summed: Vectors = []
        self._asked: set[int] = set()
        self.version = 0

    def handle(self, request: Request) -> Answer | None:
        """Carry out a request of a rank to this synchronous parameter server, and return the reply.

        PUSH adds a gradient to the step's sum, SUM reads statistics of the sum, APPLY steps the optimizer with the sum.
        A gradient comes from a logical worker (share of the global batch) or from a rank. A PUSH with the flag EDITED
        brings the gradients of the update itself, which the APPLY with this flag takes in place of the sum.

        Args:
            request: the request, with its header, floats and, for a PUSH, gradients. Floats of a PUSH: those that
                ``Tail.fill`` writes (digests, loss sums, a flag for each parameter), and where the gradient variance is
                measured the worker's sums of squares. Of a SUM: the number of samples by which backward has divided
                (0 for none), the loss scale, and for each worker or rank 1 (its gradient counts), 0 (it does not) or -1
                (this server decides). Of an APPLY: the clipping factor, the gradient's norm after clipping, the index
                of one of several optimizers or -1 for all, and the values of the hyperparameters.

        Returns:
            The reply, an ``Answer``: ``status``, floats (``extras``), and ``values``, whether the server's current
            parameters are sent with the reply. The status is LATE for a PUSH whose step has been summed already without
            this gradient, and REFUSED for other kinds of request. None for a SUM while other gradients of the step are
            missing, or while the requesting rank is 256 steps ahead of another rank, and for an APPLY with the flag
            WAIT while another rank has not asked; the server later calls ``handle`` again with the same request. To a
            SUM with the flag BACK the reply also brings the summed gradients. The floats of the reply to a SUM are, in
            this order: the sums of the floats that came with the pushes (hashes by which ranks in different steps are
            found, loss sums, flags); for each parameter the sum of squares of this server's slice of its gradient (0
            without a slice here); for each parameter 1 if this slice is finite, else 0; and for each worker or rank 1
            if its gradient is in the sum, else 0.

        Raises:
            ValueError: a PUSH is for a later step than the one whose gradients the server is summing.
        """
        kinds = {PUSH: self._push, SUM: self._sum, APPLY: self._apply}
        handle = kinds.get(request.header.kind)
        if request.header.flags & EDITED and self._rounds.clock is None:
            # No gradient has been summed yet, and another rank's APPLY may come before the PUSH of edited gradients.
            self._rounds.clock = request.header.clock
        return Answer(REFUSED) if handle is None else handle(request)

    def _push(self, request: Request) -> Answer:
        header = request.header
        if header.flags & EDITED:
            # The vectors stay as they are until all ranks have their replies to the APPLY that follows.
            used = read_sums(request.extras[DIGESTS:]).used
            self._gradients = self._used(request.vectors, used)
            return Answer()
        totals = torch.tensor(request.extras, dtype=torch.float64)
        taken = self._rounds.push(self._leaf[header.worker], header.clock, request.vectors, totals)
        return Answer(OK if taken else LATE)

    def _sum(self, request: Request) -> Answer | None:
        """Return the statistics of the step's sum; None while contributions are missing.

        Also None for a rank that is ``MOST_BEHIND`` steps ahead of another. A rank that is behind gets the kept
        statistics of its step.

        Request: [samples, loss scale, for each contribution 1 (counts), 0 (does not) or -1 (undecided)]; 0 samples
        where the gradient has been divided by its count already. Reply: [totals, squares by parameter, finiteness by
        parameter, for each contribution whether it counts].
        """
        clock = request.header.clock
        # A rank that has not asked yet is in the first step.
        self._at = self._at or dict.fromkeys(range(self._ranks), clock)
        self._at[request.header.client] = clock
        if clock - min(self._at.values()) >= MOST_BEHIND:
            return None
        if self._rounds.clock is not None and clock < self._rounds.clock:
            return Answer(extras=self._rounds.result(clock) or (), seen=self.version)
        samples, scale, *mask = request.extras
        counted = None if NONE in mask else {leaf for leaf, flag in enumerate(mask) if flag}
        total = self._rounds.total(counted)
        if total is None:
            return None
        if self._result is None:
            sums = read_sums(total.totals[DIGESTS:].tolist())
            factor = mean_factor(samples, sums.samples) / scale
            if factor != 1.0:
                for vector in total.vectors:
                    vector.mul_(factor)
            self._summed, self._gradients = total.vectors, self._used(total.vectors, sums.used)
            self._result = [*total.totals.tolist(), *self._looked_at(), *self._mask(len(mask))]
        asked = self._summed if request.header.flags & BACK else None
        return Answer(extras=self._result, gradients=asked, seen=self.version)

    def _used(self, vectors: Vectors, used: Sequence[bool]) -> list[Tensor | None]:
        """Return the views of gradients of this server's slices; None where no rank has a gradient."""
        views = zip(self._indices, self._shard.views(vectors), strict=True)
        return [view if used[index] else None for index, view in views]

    def _looked_at(self) -> list[float]:
        """Return Σ g² of each parameter (0 without a slice here), then for each 1.0 if finite here, else 0.0."""
        squares, finite = [0.0] * self._parameters, [1.0] * self._parameters
        there = [(i, g) for i, g in zip(self._indices, self._gradients, strict=True) if g is not None]
        for (index, gradient), square in zip(there, squares_of([g for _, g in there]), strict=True):
            squares[index] = square
            finite[index] = float(finite_by_norm(square, partial(is_finite, gradient)))
        return squares + finite

    def _mask(self, leaves: int) -> list[float]:
        return [float(leaf in self._rounds.counted) for leaf in range(leaves)]

    def _apply(self, request: Request) -> Answer | None:
        """Clip, step the optimizer and finish the step; with SKIP, only finish it.

        Request: [clipping factor of the gradient, norm after clipping, index of one of several optimizers or -1,
        hyperparameters]. The first request of a step acts, with WAIT the last one; the reply to each brings the
        parameters unless SKIP is set.
        """
        header, (factor, norm, index, *settings) = request.header, request.extras
        if header.clock == self._rounds.clock and (self._result is not None or header.flags & EDITED):
            self._asked.add(header.client)
            if header.flags & WAIT and len(self._asked) < self._ranks:
                return None
            self._asked.clear()
            if not header.flags & SKIP:
                if factor != 1.0:
                    scale_all([g for g in self._gradients if g is not None], factor)
                self._shard.update(self._gradients, settings, norm, optimizer=None if index < 0 else int(index))
                self.version += 1
            self._rounds.finish(self._result or [])
            self._result = None
        return Answer(values=not header.flags & SKIP, seen=self.version)

    def forget(self) -> None:
        """Reset the numbers of the server's current step and of each rank's latest step, after a checkpoint was loaded.

        The next PUSH sets the number of the current step. To be called between steps, when no gradients are summed:
        gradients that were pushed already are not dropped.
        """
        self._rounds.clock, self._at = None, {}

    def state(self) -> dict[str, Any]:
        """Return an empty dict: a synchronous parameter server makes no snapshots, because it cannot be restored."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Raise NotImplementedError: a synchronous parameter server cannot be restored after its process has ended.

        Gradients that ranks have pushed for the step under way are lost with the process.

        Args:
            state: unused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("what other ranks have already added is lost with the process")

    def facts(self) -> dict[str, Any]:
        """Return this synchronous parameter server's statistics for the run's ``summary.json``.

        Returns:
            A dict of two integers: ``updates``, the number of updates made, and ``late``, the number of pushes that
            came after the sum of their step and were dropped.
        """
        return {"updates": self.version, "late": self._rounds.late}


class AsyncProgress(NamedTuple):
    """Progress of the logical workers of an asynchronous server, in each of its replies to a PUSH or PULL, as floats.

    Attributes:
        staleness: updates by which the pushed gradient was late; 0 for a PULL.
        lost: updates that were lost with an earlier process of the server.
        stop_at: step after which all workers stop; ``NONE`` while no rank has asked for it.
        may_proceed: 1.0 if the worker may begin its next step, 0.0 if it must wait for the slowest one.
        clock: steps of all workers divided by their number, rounded down.
    """

    staleness: float
    lost: float
    stop_at: float
    may_proceed: float
    clock: float


class AsyncHandler:
    """Request handler of an asynchronous parameter server: every push of a finite gradient is one update.

    Args:
        shard: parameter shard of this server.
        core: numbers of steps and staleness of the logical workers (shares of the global batch).
        settings: number of hyperparameters that a push carries.
        over_staleness: divide the learning rate of an update by its staleness, where this is above 1.
    """

    def __init__(self, shard: ParameterShard, core: StalenessTracker, settings: int, over_staleness: bool) -> None:
        self._shard, self._core, self._settings, self._over = shard, core, settings, over_staleness
        self._indices = [piece.tensor for piece in shard.slices]
        self._refused = 0

    @property
    def version(self) -> int:
        """Number of updates made so far to the parameters that this server has, including those before a restart."""
        return self._core.version

    def handle(self, request: Request) -> Answer | None:
        """Carry out a request to an asynchronous server: PULL (read parameters) or PUSH (update with a gradient).

        A request comes from a logical worker, a share of the global batch that steps by itself.

        Args:
            request: the request, with its header, floats and, for a PUSH, gradients. Floats of a PUSH: the values of
                the hyperparameters, for each trained parameter 1 if it has a gradient, else 0, the norm of the
                gradient, and 1 to ask all workers to stop, else 0. A PULL has no floats.

        Returns:
            The reply, an ``Answer``. If its ``values`` is True, the server sends its current parameters with it: always
            for a PULL, and for a PUSH with the flag BACK. Its ``status`` is OK, or REFUSED for a non-finite gradient
            and, without floats, for other kinds of request. Its five floats, ``extras``: the staleness of the push (the
            number of updates since the worker's read of the parameters; 0 for a PULL); the updates that crashed server
            processes had made after their newest snapshot; the step after which all workers stop, or -1; 1 if the
            worker may begin its next step, else 0; the steps of all workers divided by the number of workers. None in
            place of an ``Answer`` for a PULL with the flag WAIT while the worker is further ahead of the slowest than
            the staleness bound allows; the server later calls ``handle`` again with the same request.
        """
        header = request.header
        if header.kind == PULL:
            self._core.hear(header.worker, header.clock, header.seen)
            allowed = self._core.may_proceed(header.worker)
            return None if header.flags & WAIT and not allowed else self._answer(allowed)
        return self._push(request) if header.kind == PUSH else Answer(REFUSED)

    def _push(self, request: Request) -> Answer:
        """Update the shard with a worker's gradient, unless it is skipped, repeated, too stale or non-finite.

        Request: [hyperparameters, for each parameter whether it has a gradient, norm of the gradient, whether to stop].
        """
        header, extras = request.header, request.extras
        settings, (*used, norm, stop) = extras[: self._settings], extras[self._settings :]
        sound = header.flags & SKIP or self._finite(request.vectors, extras)

        def update(staleness: int) -> None:
            views = self._shard.views(request.vectors)
            gradients = [view if used[i] else None for i, view in zip(self._indices, views, strict=True)]
            rate = 1.0 / max(1, staleness) if self._over else 1.0
            self._shard.update(gradients, settings, norm, rate)

        skip = header.flags & SKIP or not sound
        pushed = self._core.push(header.worker, header.clock, header.seen, None if skip else update)
        if stop:
            self._core.ask_to_stop()
        self._refused += not sound
        answer = self._answer(self._core.may_proceed(header.worker), pushed.staleness)
        answer.status, answer.values = (OK if sound else REFUSED), bool(header.flags & BACK)
        return answer

    def _finite(self, vectors: Vectors, extras: Sequence[float]) -> bool:
        # A sum is non-finite only if an element is, or if it overflows: only then look at the elements.
        sums = all(finite_by_norm(float(v.sum()), partial(is_finite, v)) for v in vectors)
        return sums and all(map(math.isfinite, extras))

    def _answer(self, allowed: bool, staleness: int = 0) -> Answer:
        """Reply with the parameters and the progress of the workers."""
        core = self._core
        stop_at = NONE if core.stop_at is None else core.stop_at
        progress = AsyncProgress(staleness, core.lost, stop_at, allowed, core.clock)
        return Answer(extras=[float(number) for number in progress], values=True, seen=self.version)

    def forget(self) -> None:
        """Reset this server's step numbers of all logical workers, after a checkpoint was loaded into the server.

        A logical worker is a share of the global batch that steps by itself. The next request of any worker sets the
        numbers of all of them. The step after which all workers stop is forgotten, too.
        """
        self._core.forget_workers()

    def state(self) -> dict[str, Any]:
        """Return the logical workers' step numbers and the counts of this asynchronous server, for a snapshot.

        A restarted server process takes them over with the method ``load``. A logical worker is a share of the global
        batch that steps by itself.

        Returns:
            A dict that JSON can represent: ``version`` (updates made), ``clocks`` (list of the steps of each worker),
            ``lost`` (updates that crashed processes had made after their newest snapshot) and ``stop_at`` (step after
            which all workers stop, or None). Parameters and optimizer state are not in it.
        """
        return self._core.state()

    def load(self, state: dict[str, Any]) -> None:
        """Restore the logical workers' step numbers, and counts, in a server process started again after a crash.

        Logical workers are shares of the global batch that step by themselves.

        Args:
            state: the dict that the method ``state`` returned for a snapshot.
        """
        self._core.load(state)

    def facts(self) -> dict[str, Any]:
        """Return this asynchronous parameter server's statistics for the run's ``summary.json``.

        Returns:
            A dict. ``updates``: number of updates made. ``steps``: list of the number of pushes of each logical worker
            (share of the global batch). ``staleness``: dict from a staleness, as text, to the number of updates with
            this staleness, which is the number of updates between a worker's read and its push. ``lost``: number of
            updates that crashed server processes had made after their newest snapshot. ``stale``: number of pushes
            dropped because they were too stale. ``refused``: number of pushes dropped because they were not finite.
        """
        core = self._core
        histogram = {str(tau): count for tau, count in sorted(core.staleness.items())}
        return {
            "updates": core.version,
            "steps": core.steps,
            "staleness": histogram,
            "lost": core.lost,
            "stale": core.stale,
            "refused": self._refused,
        }


TAIL = DIGESTS + 3 + METRICS
"""Floats of a push before the flags by parameter; see ``tutti.parallel.ddp.buckets.Tail``."""
