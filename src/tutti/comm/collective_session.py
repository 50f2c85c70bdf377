"""Sessions of the public collectives: calls that ranks match by name within one namespace, and handles to await them.

A call is described to the coordinator (``tutti.comm.negotiation``) and returns a handle. The engine's thread, or the
thread that waits for a posted all-reduce, completes it (``tutti.comm.collective_engine``).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.comm import collective_execution as execution
from tutti.comm.collective_call import CollectiveCall
from tutti.comm.communicator import Communicator
from tutti.comm.negotiation import SHUT_DOWN, SessionOptions
from tutti.comm.posted_reduction import PostedReduction, PostedReductions, posted_bytes
from tutti.comm.process_groups import process_groups
from tutti.device import current_stream, is_accelerator, synchronize
from tutti.errors import MismatchError, PeerError, TuttiError, UsageError

if TYPE_CHECKING:
    from tutti.comm.collective_engine import CollectiveEngine

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)
SETTLE = 0.1
"""Seconds for which a completed call that nobody has waited for keeps its name."""
_PATIENCE = 2.0
"""Seconds after which a waiting rank tells the coordinator so."""
_REPORT = 0.01
"""Seconds after which a rank that waits for posts of other ranks reports its own to the coordinator."""
_SPINS, _YIELDS = 200, 2000
_NAPS = (0.0002, 0.01)
"""Bounds of the seconds between two reads of the counters by a waiting rank: a fiftieth of the time waited so far."""


class DuplicateNameError(UsageError, ValueError):
    """Raised where a collective gets a name under which an earlier call of the same rank is still pending."""


@dataclass(eq=False)
class CollectiveHandle:
    """Handle of an asynchronous collective, whose ``wait`` returns its result.

    Attributes:
        call: description of the collective.
        session: namespace in which the ranks' calls are matched by name; carries the call out.
        inputs: this rank's tensors; emptied once the collective is complete.
        outputs: tensors that take the result; None: new tensors are made.
        convert: turns ``result`` into what ``wait`` returns; None: ``wait`` returns ``result``.
        result: result of the collective, before conversion to what ``wait`` returns; None until the collective is
            complete.
        error: exception that ``wait`` raises; None if the collective has not failed.
        ready_at: event of the accelerator's stream after which ``inputs`` have their values; None on the CPU.
        started, completed: times of the call and of its end, of ``time.perf_counter``; ``completed`` is 0 before.
        turn: the session's ``turn`` at the end of the collective; 0 before.
        finished: set once the collective has ended, successfully or not.
        reduction: shared memory in which the ranks of a node perform this all-reduce; None for a collective that is
            performed by messages.
        attempt: number of the attempt in ``reduction`` for which this rank has written its tensors.
        reported: whether the coordinator has been told of this attempt, because the rank has waited for a while.
    """

    call: CollectiveCall
    session: CollectiveSession
    inputs: list[Tensor]
    outputs: list[Tensor] | None = None
    convert: Callable[[Any], Any] | None = None
    result: Any = None
    error: TuttiError | None = None
    ready_at: Any = None
    started: float = field(default_factory=time.perf_counter)
    completed: float = 0.0
    turn: int = 0
    finished: threading.Event = field(default_factory=threading.Event)
    # Of a call that is posted: where, the number of the attempt, and whether the coordinator knows.
    reduction: PostedReduction | None = None
    attempt: int = 0
    reported: bool = False

    @property
    def done(self) -> bool:
        """Whether the collective has ended, successfully or not, so that ``wait`` returns or raises at once.

        Does not block. Where it has ended, its name becomes free for a new call of this rank.
        """
        if self.session.advance(self):
            self.session.forget(self)
            return True
        return False

    def wait(self) -> Any:
        """Block until this asynchronous collective is complete and return its result.

        Returns:
            The result of the blocking function of the same kind, such as the reduced tensor for ``allreduce_async``,
            and the list of results for grouped calls; for a call in place the caller's own tensors. A second call
            returns the same result again, or raises the same error.

        Raises:
            MismatchError: ranks' calls differ; on every rank, with both calls. Or every rank waits in a call that at
                least one other rank has not made.
            PeerError: a rank has ended or left, or did not make the call in time.
        """
        self.session.await_(self)
        self.session.forget(self)
        if self.error is not None:
            raise self.error
        return self.result if self.convert is None else self.convert(self.result)

    def complete(self, result: Any = None, error: TuttiError | None = None) -> None:
        """Record the result or the error of the asynchronous collective, and wake the threads that wait for it.

        The engine calls this method when the collective has ended. It also drops the input tensors. Does nothing if a
        result or error is recorded already.

        Args:
            result: result of the collective; ``wait`` returns ``convert(result)`` if the handle has a ``convert``.
            error: what ``wait`` raises; None for success.
        """
        if self.finished.is_set():
            return
        self.result, self.error, self.completed = result, error, time.perf_counter()
        self.turn = self.session.turn
        self.inputs = []
        self.finished.set()


class CollectiveSession:
    """One rank's part of a session: a namespace in which collectives are matched by name over the ranks.

    A session has process sets (sets of ranks) and cached calls of its own, from its opening until ``close``. The
    constructor tells the coordinator on rank 0 that the session is open, and does not wait for other ranks.

    Args:
        engine: this rank's thread that performs the collectives.
        number: number of the session, equal on all ranks.
        options: timeouts and limits; those of rank 0 hold for all ranks.

    Attributes:
        engine, number, options: as the arguments.
        sets: global ranks of the members of each process set, by its number; 0: all ranks.
        closed: whether ``close`` was called.
        pending: handles of this rank's calls whose names are not free yet, by ``CollectiveCall.key``.
        joins: handles of this rank's calls of ``join`` that wait for other ranks.
        turn: counts this rank's calls of ``submit``, ``join`` and ``forget``. A complete call that nobody has awaited
            keeps its name until the next of these calls, or for 0.1 s.
        lock: guards the attributes above against other threads of this process.
        translated: decorates the backward passes of collectives, so that they raise the exceptions of the interface
            that has opened the session, such as Horovod's; by default they raise tutti's.
    """

    def __init__(self, engine: CollectiveEngine, number: int, options: SessionOptions) -> None:
        self.engine, self.number, self.options = engine, number, options
        self.translated: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(engine.size))}
        self.closed = False
        self.turn = 0
        self.joins: list[CollectiveHandle] = []
        self.lock = threading.Lock()
        self.pending: dict[tuple[int, str], CollectiveHandle] = {}
        self._numbers: dict[CollectiveCall, int] = {}
        self._keys: dict[int, CollectiveCall] = {}
        self._counters: dict[tuple[int, str], int] = {}
        self._epoch = 0
        self._acknowledged = threading.Event()
        # Places of posted all-reduces by number; the lock of their posts and results.
        self._reductions: dict[int, PostedReduction] = {}
        self._memory: PostedReductions | None = None
        self._posting = threading.Lock()
        # Threads that make calls; those that wait, with the calls they wait for.
        self._threads: set[threading.Thread] = set()
        self._blocked: dict[threading.Thread, CollectiveHandle] = {}
        engine.sessions[number] = self
        engine.send(["open", number, vars(options)])

    def name(self, process_set: int, kind: str) -> str:
        """Make up the name of a collective that the user has not named: ``KIND.noname.EPOCH.COUNT``.

        COUNT is the number of earlier calls of this method on this rank with the same arguments. Ranks that make these
        calls in the same order so get the same names, by which the calls match. EPOCH counts how often all ranks have
        called ``join``, which resets COUNT.

        Args:
            process_set: number of the process set (set of ranks) that performs the call; 0: all ranks.
            kind: ``call`` for a collective of dense tensors or of an object, whatever it does; ``sparse`` for an
                all-reduce of sparse tensors; ``barrier``; ``sets`` to add or remove a process set.
        """
        with self.lock:
            count = self._counters.get((process_set, kind), 0)
            self._counters[process_set, kind] = count + 1
            return f"{kind}.noname.{self._epoch}.{count}"

    def submit(self, handle: CollectiveHandle) -> CollectiveHandle:
        """Start a collective: send its description to the coordinator on rank 0, which matches the ranks' calls.

        Does not wait for other ranks. Where all ranks are on one node, an all-reduce that repeats an earlier one (same
        name, shapes, dtype and operation) sends no message, but copies its tensors to shared memory, unless shared
        memory cannot serve its operation, dtype or size.

        Args:
            handle: the new call: its description, this rank's input tensors, which must not be changed before the end
                of the collective, and optionally tensors for the result.

        Returns:
            ``handle``, whose ``wait`` blocks and returns the result.

        Raises:
            DuplicateNameError: a call with this name is still pending on this rank.
            PeerError: the session is closed, or a rank is lost.
        """
        call = handle.call
        with self.lock:
            self._check_open()
            if (before := self.pending.get(call.key)) is not None and not self._settled(before):
                raise DuplicateNameError(DUPLICATE, where=f"rank {self.engine.rank}, {before.call}")
            self.pending[call.key] = handle
            self._threads.add(threading.current_thread())
            self.turn += 1
            number = self._numbers.get(call.signature)
            # While this rank joins, its engine makes calls that the coordinator has agreed upon.
            posted = self._reductions.get(number) if number is not None and not self.joins else None
        if posted is not None:
            try:
                with self._posting:
                    handle.attempt, handle.reduction = posted.post(handle.inputs), posted
            except Exception:
                self.forget(handle)
                raise
            return handle
        if handle.inputs and is_accelerator(handle.inputs[0].device):
            handle.ready_at = current_stream(handle.inputs[0].device).record_event()
        if number is None:
            self.engine.send(["call", self.number, call.to_json()])
        else:
            self.engine.send(["hit", self.number, number, call.extents])
        return handle

    def join(self) -> int:
        """Declare that this rank has no more data, and contribute zeros to the other ranks' all-reduces from now on.

        Until all have joined, the other ranks may all-reduce by sum, average or Adasum; their other collectives but
        barriers raise MismatchError. Every rank of the job must call this method in the end; blocks until all ranks
        have.

        Returns:
            The global rank that called this method last, the same on all ranks.

        Raises:
            PeerError: a rank has ended or left.
        """
        handle = CollectiveHandle(CollectiveCall("join", "join"), self, [])
        with self.lock:
            self._check_open()
            self.joins.append(handle)
            self.turn += 1
        self._report()
        self.engine.send(["join", self.number])
        return int(handle.wait())

    def await_(self, handle: CollectiveHandle) -> None:
        """Block until an asynchronous collective is complete or has failed; leave the outcome in its handle.

        The outcome is in the attributes ``result`` and ``error`` of ``handle``; this method raises neither. If after
        two seconds all threads of this rank that make collective calls are waiting, the coordinator on rank 0, which
        matches the ranks' calls, is told, so that it can find a deadlock between ranks that wait for different calls.

        Args:
            handle: the collective, from ``submit``.
        """
        if self.advance(handle):
            return
        me = threading.current_thread()
        with self.lock:
            self._blocked[me] = handle
        try:
            if self._wait(handle, _PATIENCE):
                return
            if handle.call.kind != "join":
                with self.lock:
                    stuck = all(t in self._blocked for t in self._threads if t.is_alive())
                if stuck:
                    with contextlib.suppress(PeerError):
                        self.engine.send(["wait", self.number, list(handle.call.key)])
            self._wait(handle, None)
        finally:
            with self.lock:
                self._blocked.pop(me, None)

    def _wait(self, handle: CollectiveHandle, seconds: float | None) -> bool:
        """Block until a call is complete, at most ``seconds``; return whether it is."""
        if handle.reduction is None:
            return handle.finished.wait(seconds)
        for turn in range(_SPINS + _YIELDS):
            if self.advance(handle):
                return True
            if turn > _SPINS:
                os.sched_yield()
        began = time.monotonic()
        while not self.advance(handle):
            waited = time.monotonic() - began
            if seconds is not None and waited > seconds:
                return False
            if waited > _REPORT and not handle.reported:
                with contextlib.suppress(PeerError):
                    self._report()
            # An error ends the wait at once.
            handle.finished.wait(min(max(waited / 50, _NAPS[0]), _NAPS[1]))
        return True

    def advance(self, handle: CollectiveHandle) -> bool:
        """Return whether an asynchronous collective has ended, successfully or not.

        Does not block; safe from any thread. This call computes the result of an all-reduce in shared memory, if all
        ranks have written their tensors and the result was not computed before.

        Args:
            handle: handle of the collective, from ``submit``.
        """
        reduction = handle.reduction
        if reduction is not None and not handle.finished.is_set():
            if reduction.complete(handle.attempt):
                with self._posting:
                    if not handle.finished.is_set():
                        self._collect(handle, reduction, handle.attempt)
            elif not handle.reported and reduction.revoked(handle.attempt):
                with self._posting:
                    if not handle.reported and reduction.revoked(handle.attempt):
                        handle.attempt = reduction.post_again(handle.attempt)
        return handle.finished.is_set()

    def _collect(self, handle: CollectiveHandle, reduction: PostedReduction, attempt: int) -> None:
        began = time.perf_counter()
        outputs = handle.outputs
        if outputs is None:
            outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in handle.inputs]
        reduction.reduce_into(outputs, attempt)
        # Before the caller goes on, which may end the timeline.
        self.engine.event(handle.call, began, handle.started)
        handle.complete(outputs)

    def _report(self) -> None:
        """Tell the coordinator which calls this rank has posted and other ranks have not. Raises PeerError."""
        with self._posting:
            with self.lock:
                pending = list(self.pending.values())
            numbers = []
            for handle in pending:
                if handle.reduction is not None and not handle.reported and not handle.finished.is_set():
                    handle.reported = True
                    numbers.append([self._numbers[handle.call.signature], handle.attempt])
            if numbers:
                self.engine.send(["posted", self.number, numbers])

    def forget(self, handle: CollectiveHandle) -> None:
        """Make the name of a collective free for a new call of this rank. Local.

        Called when the user has seen the result or error of the collective; a call of a name that is not free raises
        DuplicateNameError.

        Args:
            handle: the collective, from ``submit``.
        """
        with self.lock:
            if self.pending.get(handle.call.key) is handle:
                del self.pending[handle.call.key]
            self.turn += 1

    def close(self) -> None:
        """End this rank's part in a session (namespace of collectives); a second call does nothing.

        Not a barrier: other ranks may go on. Collectives on which all ranks have agreed already are performed first.
        Pending calls that some rank has not made fail with PeerError, on all ranks, and so do later calls in this
        session. Blocks until the coordinator on rank 0 has answered.
        """
        with self.lock:
            if self.closed:
                return
            self.closed = True
        if self.engine.broken is None:
            with contextlib.suppress(PeerError):
                self._report()
                self.engine.send(["close", self.number])
                # What was agreed upon before is performed: other ranks take part in it already.
                self._acknowledged.wait()
        self.fail_all(PeerError(SHUT_DOWN, where=f"rank {self.engine.rank}"))
        self.engine.sessions.pop(self.number, None)

    def fail_all(self, error: TuttiError) -> None:
        """Make this rank's pending collectives, and its pending ``join``, fail: their ``wait`` raises ``error``. Local.

        Called when the session is closed or a rank is lost. All-reduces in shared memory for which all ranks have
        written their tensors get their results instead.

        Args:
            error: the exception.
        """
        with self.lock:
            pending = [*self.pending.values(), *self.joins]
            self.pending, self.joins = {}, []
        for handle in pending:
            # A posted call is complete once all ranks have posted it, also where one of them has ended since.
            if not self.advance(handle):
                handle.complete(error=error)
        self._acknowledged.set()

    def _check_open(self) -> None:
        if self.engine.broken is not None:
            raise self.engine.broken
        if self.closed:
            raise PeerError(SHUT_DOWN, where=f"rank {self.engine.rank}")

    def _settled(self, before: CollectiveHandle) -> bool:
        """Whether a call that was never waited for has given its name free."""
        if not self.advance(before):
            return False
        return self.turn > before.turn or time.perf_counter() - before.completed > SETTLE

    # --- in the engine's thread ------------------------------------------------------------------------------------

    def answer(self, kind: str, rest: list[Any]) -> None:
        """Carry out one message of the coordinator, rank 0's thread that matches the ranks' calls.

        Called in the engine's thread, which performs the collectives and has received the message.

        Args:
            kind: kind of the message, see ``rest``.
            rest: further fields of the message; their number and meaning depend on ``kind``.

                - ``run``, perform collectives on which all ranks agree: one list of quadruples (call, sizes, number,
                  joined). ``call`` is the key of this rank's pending call (process set, name), or the number of a call
                  that was agreed upon before; ``sizes`` are the ranks' ``extents``; ``number`` stands for the call in
                  later messages, or is None; ``joined`` describes the call as JSON for ranks that have joined, or is
                  None.
                - ``post``, write the tensors of a call, for which other ranks wait, to shared memory: its number.
                - ``again``, tell the coordinator again of a pending all-reduce in shared memory: its number.
                - ``done``, a call without tensors, such as a barrier, is complete: its key and its result.
                - ``error``, a call has failed: its key (None: ``join``), reason (``mismatch`` for MismatchError, else
                  PeerError) and the error's text.
                - ``joined``, all ranks have called ``join``: the rank that was the last.
                - ``closed``, the coordinator has noted ``close``: no field.

        Raises:
            ValueError: another kind.
            KeyError: the message is about a call that has failed on this rank meanwhile.
        """
        if kind == "run":
            self._run(rest[0])
        elif kind == "post":
            self._post(rest[0])
        elif kind == "again":
            with self.lock:
                handle = self.pending.get(self._keys[rest[0]].key)
            if handle is not None:
                handle.reported = False
        elif kind == "done":
            key, value = rest
            handle = self._take(tuple(key))
            if handle.call.kind == "add_process_set":
                self.sets[value] = handle.call.ranks
                # Collective over all ranks of the job, at the same place of the order on each.
                with self.engine.performing(self.sets[0], handle.call):
                    process_groups(handle.call.ranks, "engine")
            handle.complete(value)
        elif kind == "closed":
            self._acknowledged.set()
        elif kind == "error":
            key, reason, text = rest
            where = f"rank {self.engine.rank}"
            error = MismatchError(text, where=where) if reason == "mismatch" else PeerError(text, where=where)
            if key is None:
                joins, self.joins = self.joins, []
                for handle in joins:
                    handle.complete(error=error)
            else:
                self._take(tuple(key)).complete(error=error)
        elif kind == "joined":
            with self.lock:
                self._epoch += 1
                self._counters.clear()
                joins, self.joins = self.joins, []
            for handle in joins:
                handle.complete(rest[0])
        else:
            raise ValueError(f"rank 0 has sent a message of an unknown kind: {kind}")

    def _take(self, key: Any) -> CollectiveHandle:
        with self.lock:
            return self.pending[key]

    def _learn(self, number: int, call: CollectiveCall) -> None:
        """Take note of the number of a call; make its place in shared memory if ranks can post it. Collective."""
        with self.lock:
            self._keys[number] = call
            self._numbers[call] = number
        if not self.engine.one_node or not posted_bytes(call, self.engine.size):
            return
        ranks = self.sets[0]
        with self.engine.performing(ranks, call):
            if self._memory is None:
                _, fast = process_groups(ranks, "engine")
                self._memory = PostedReductions(Communicator("collectives", ranks, self.engine.world, fast, fast))
            reduction = self._memory.make(call)
            if reduction is not None:
                self.engine.share(self.number, number, reduction)
                with self.lock:
                    self._reductions[number] = reduction

    def _post(self, number: int) -> None:
        """Post a call that ranks wait for: zeros if this rank has joined, else the call that it made meanwhile."""
        handle = self._handle_of(self._keys[number])
        if handle.reduction is None:
            with self.engine.performing(self.sets[0], handle.call):
                self._perform_posts([(handle, self._reductions[number])])

    def _perform_posts(self, handles: list[tuple[CollectiveHandle, PostedReduction]]) -> None:
        """Post calls from the engine's thread, and complete those of this rank's callers."""
        attempts = []
        for handle, reduction in handles:
            with self._posting:
                attempts.append(reduction.post(handle.inputs))
        for (handle, reduction), attempt in zip(handles, attempts, strict=True):
            if self.pending.get(handle.call.key) is not handle:
                continue
            while not reduction.complete(attempt):
                if self.engine.broken is not None:
                    raise self.engine.broken
                if reduction.revoked(attempt):
                    # The coordinator's answer says why.
                    break
                time.sleep(_NAPS[0])
            else:
                with self._posting:
                    self._collect(handle, reduction, attempt)

    def _handle_of(self, call: CollectiveCall) -> CollectiveHandle:
        """Return this rank's call, or zeros: it has joined, or its session is closed and nobody reads the outcome."""
        with self.lock:
            handle = self.pending.get(call.key)
        return self._zeros(call) if handle is None or handle.finished.is_set() else handle

    def _run(self, items: list[Any]) -> None:
        handles, posted = [], []
        for name, extents, number, joined in items:
            if isinstance(name, int):
                call = self._keys[name]
            elif joined is not None:
                call = CollectiveCall.from_json(joined)
            else:
                call = self._take(tuple(name)).call.signature
            if number is not None and number not in self._keys:
                self._learn(number, call)
            handle = self._handle_of(call)
            if number in self._reductions:
                posted.append((handle, self._reductions[number]))
            else:
                handles.append((handle, extents))
        began = time.perf_counter()
        if self.engine.broken is not None:
            self.fail_all(self.engine.broken)
            return
        first = [*posted, *handles][0][0].call
        with self.engine.performing(self.sets[first.process_set], first):
            self._perform_posts(posted)
            if first.kind != "allreduce":
                for handle, extents in handles:
                    handle.complete(self._perform(handle, extents))
            elif handles:
                self._reduce([handle for handle, _ in handles])
            for handle, _ in handles:
                self.engine.event(handle.call, began, handle.started)

    def _zeros(self, call: CollectiveCall) -> CollectiveHandle:
        device = torch.device(call.device) if call.device == "cpu" else self.engine.world.device
        inputs = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
        ]
        return CollectiveHandle(call, self, inputs)

    def _group(self, call: CollectiveCall) -> tuple[tuple[int, ...], int, Any]:
        ranks = self.sets[call.process_set]
        return ranks, ranks.index(self.engine.rank), process_groups(ranks, "engine")[1]

    def _reduce(self, handles: list[CollectiveHandle]) -> None:
        """All-reduce the tensors of several calls, those of one dtype together."""
        ranks, _, group = self._group(handles[0].call)
        for handle in handles:
            self._await_inputs(handle)
        by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
        for index, handle in enumerate(handles):
            for place, tensor in enumerate(handle.inputs):
                by_dtype.setdefault(tensor.dtype, []).append((index, place))
        results: list[list[Any]] = [[None] * len(handle.inputs) for handle in handles]
        for places in by_dtype.values():
            reduced = execution.reduce_all([handles[i].inputs[p] for i, p in places], handles[0].call, ranks, group)
            if self.engine.broken is not None:
                # The callers have their error, and their tensors may be in use again.
                raise self.engine.broken
            for (i, p), tensor in zip(places, reduced, strict=True):
                outputs = handles[i].outputs
                if outputs is not None:
                    tensor = outputs[p].copy_(tensor)
                elif len(places) > 1:
                    # A result of its own storage, so that saving it saves no other.
                    tensor = tensor.clone()
                results[i][p] = tensor
        if handles[0].inputs:
            _settle(handles[0].inputs[0])
        for handle, result in zip(handles, results, strict=True):
            handle.complete(result)

    def _perform(self, handle: CollectiveHandle, extents: list[list[int]] | None) -> Any:
        call, inputs = handle.call, handle.inputs
        ranks, me, group = self._group(call)
        self._await_inputs(handle)
        result: Any
        if call.kind == "allgather":
            assert extents is not None
            result = [
                execution.gather_all(tensor, [counts[i] for counts in extents], ranks, me, group)
                for i, tensor in enumerate(inputs)
            ]
        elif call.kind == "broadcast":
            outputs = handle.outputs
            assert outputs is not None
            carried = [t if t.is_contiguous() else t.contiguous() for t in outputs]
            execution.broadcast_from(carried, call.root, group)
            for output, tensor in zip(outputs, carried, strict=True):
                if output is not tensor:
                    output.copy_(tensor)
            result = outputs
        elif call.kind == "alltoall":
            assert extents is not None
            receive = [splits[me] for splits in extents]
            result = [execution.exchange_all(inputs[0], extents[me], receive, group), receive]
        else:
            result = [execution.scatter_reduced(tensor, call, me, len(ranks), group) for tensor in inputs]
        if inputs:
            _settle(inputs[0])
        return result

    @staticmethod
    def _await_inputs(handle: CollectiveHandle) -> None:
        if handle.ready_at is not None:
            current_stream(handle.inputs[0].device).wait_event(handle.ready_at)


def _settle(tensor: Tensor) -> None:
    """Wait for the device, so that a complete handle's result is there on every stream."""
    if is_accelerator(tensor.device):
        synchronize(tensor.device)
