"""The engine of the public collectives: one thread a rank that performs what all ranks have agreed upon, in one order.

A call is described to the coordinator (``tutti.comm.negotiation``, in rank 0's hub thread) and returns a handle. The
engine's thread sleeps until an answer arrives, and performs the collective on process groups of its own. An all-reduce
that ranks of one node repeat needs neither: the call posts its tensors in shared memory, and the thread that waits adds
those of all ranks (``tutti.comm.posted_reduction``). The engine's thread does so the first time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tutti import process_context
from tutti.comm.collective_call import CollectiveCall
from tutti.comm.collective_session import CollectiveSession
from tutti.comm.message_hub import HubConnection, MessageHub
from tutti.comm.negotiation import SHUT_DOWN, Answer, Coordinator, SessionOptions, loss_line
from tutti.comm.posted_reduction import PostedReduction
from tutti.comm.process_groups import process_groups
from tutti.device import is_accelerator
from tutti.errors import PeerError, TuttiError
from tutti.launcher import context
from tutti.launcher.context import World

log = logging.getLogger("tutti.collectives")

_ABANDONED = 0.5
"""Seconds for which a collective under way may end by itself when its engine is abandoned or one of its ranks lost."""
_PATIENCE = 2.0
"""Seconds for which a failed collective waits for the message that names a lost rank."""

EventSink = Callable[[str, str, float, float], None]
"""Called with a call's name, an activity, and its start and end in seconds of ``time.perf_counter``."""


class CollectiveEngine:
    """One rank's thread that performs collectives, and on rank 0 the coordinator, which matches the ranks' calls.

    Calls match by name within a session, a namespace that all ranks open. The constructor starts the threads, and
    blocks until rank 0 has made its engine.

    Args:
        world: rank, store and device of this process.

    Attributes:
        world: as the argument.
        rank, size: this process's global rank, number of ranks of the job.
        one_node: whether the job has several ranks, all on one node, so that they may share memory.
        sessions: this rank's open sessions, by number.
        broken: the error that all later collectives raise; None while collectives are possible.
        sink: timeline callback, see ``event``; None: events are not reported.

    Raises:
        PeerError: rank 0 has ended, or did not make its engine within the job's timeout.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rank, self.size = world.identity.rank, world.identity.size
        self.one_node = 1 < self.size == world.identity.local_size
        self.sessions: dict[int, CollectiveSession] = {}
        self.broken: TuttiError | None = None
        self.sink: EventSink | None = None
        self._opened = 0
        self._closing = False
        # Ranks of the collective that the engine's thread performs; why ranks are lost, by rank.
        self._under_way: tuple[int, ...] = ()
        self._lost: dict[int, str] = {}
        self._heard = threading.Event()
        generation = world.store.add(f"engine/{self.rank}", 1)
        store = dist.PrefixStore(f"engine/{generation}", world.store)
        self._coordinator: Coordinator | None = None
        self._hub = self._make_hub(store) if self.rank == 0 else None
        self._connection = HubConnection(store, self.rank, world.timeout)
        # Losses have a connection of their own: the engine's thread reads nothing while it waits in native code.
        self._losses = HubConnection(store, loss_line(self.rank, self.size), world.timeout)
        self._thread = threading.Thread(target=self._serve, name="tutti-collectives", daemon=True)
        self._thread.start()
        threading.Thread(target=self._listen, name="tutti-losses", daemon=True).start()

    def open_session(self, options: SessionOptions) -> CollectiveSession:
        """Open a new session: a namespace of collectives with its own process sets (sets of ranks) and cached calls.

        Every rank must open its sessions in the same order, because they are matched by number. Does not wait for other
        ranks.

        Args:
            options: the seconds after which an incomplete call is reported, and those after which it fails; the bytes
                up to which all-reduces are fused; and the number of cached calls. Rank 0's options hold for all ranks.

        Returns:
            The session, an object with ``submit`` (start a collective), ``join`` (no more data on this rank) and
            ``close``.

        Raises:
            PeerError: rank 0 has ended.
        """
        self._opened += 1
        return CollectiveSession(self, self._opened, options)

    def make_group(self) -> None:
        """Make the ``torch.distributed`` process group of all ranks of the job now instead of at the first collective.

        Collective over all ranks of the job; blocks. A second call, or a call in a job of one rank, does nothing.

        Raises:
            RuntimeError: a rank did not make the call in time.
        """
        process_groups(tuple(range(self.size)), "engine")

    def send(self, message: list[Any]) -> None:
        """Send a message to rank 0's coordinator, which matches the ranks' calls, without waiting for an answer.

        Args:
            message: JSON list: kind, such as ``call`` or ``close``; number of the session, a namespace in which calls
                are matched by name; further fields of the kind.

        Raises:
            PeerError: rank 0 has ended.
        """
        self._connection.send(message)

    def share(self, session_number: int, call_number: int, reduction: PostedReduction) -> None:
        """Give rank 0's coordinator the shared memory in which the ranks perform an all-reduce. Local.

        The coordinator reads the memory's counters to find which ranks have contributed their tensors. A session calls
        this method on every rank once it has reserved the memory; on ranks other than 0, which have no coordinator, it
        does nothing.

        Args:
            session_number: number of the session, a namespace in which the ranks' calls are matched by name.
            call_number: number of the call in its session.
            reduction: buffers and counters of the all-reduce in shared memory.
        """
        if self._coordinator is not None:
            self._coordinator.share(session_number, call_number, reduction)

    @contextlib.contextmanager
    def performing(self, ranks: tuple[int, ...], call: CollectiveCall) -> Iterator[None]:
        """Return a context manager for the execution of a collective, which turns exceptions into errors on all ranks.

        If the block raises, or one of ``ranks`` is lost while the block runs, all pending and later calls of this
        process fail with PeerError, and the other ranks are told. An exception of the block is not passed on.

        Args:
            ranks: global ranks that take part.
            call: description of the collective, which the PeerError names.
        """
        self._under_way = ranks
        try:
            yield
        except Exception as error:
            self._break(error, call)
        finally:
            self._under_way = ()

    def _break(self, error: Exception, call: CollectiveCall) -> None:
        """Fail all calls, now and later, because a collective failed half-way."""
        if self._closing or self.broken is not None:
            return
        # The hub sees the end of a process at once and names its rank; give its message time to arrive.
        self._heard.wait(_PATIENCE)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        self._fail(next(iter(self._lost.values()), f"a collective failed on rank {self.rank}: {reason}"), f"in {call}")

    def _fail(self, text: str, place: str) -> None:
        """Fail all calls, now and later; other ranks hear of it, because they may wait for this one."""
        self.broken = self.broken or PeerError(text, where=f"rank {self.rank}, {place}")
        with contextlib.suppress(PeerError):
            self.send(["failed", 0, text])
        for session in list(self.sessions.values()):
            session.fail_all(self.broken)

    def _listen(self) -> None:
        """Hear of lost ranks; fail a collective with one of them that does not end by itself."""
        connected = True
        while self.broken is None and not self._closing:
            if not connected:
                time.sleep(_ABANDONED)
            elif self._losses.readable(_ABANDONED if self._lost else None):
                messages = self._losses.receive()
                connected = bool(messages)
                for kind, rank, text in messages or [("lost", 0, "rank 0 has ended")]:
                    if kind == "bye" or self._closing:
                        return
                    self._lost.setdefault(rank, text)
                self._heard.set()
                continue
            # Without rank 0 no rank hears of the others that give up.
            lost = [rank for rank in self._lost if rank in self._under_way or (self._under_way and not connected)]
            if lost:
                self._fail(self._lost[lost[0]], "in a collective")

    def event(self, call: CollectiveCall, began: float, submitted: float) -> None:
        """Report one collective to the engine's timeline callback, the attribute ``sink``, unless that is None. Local.

        Called when a collective has been performed. ``sink(name, activity, start, end)`` is called twice: for
        ``NEGOTIATE_ALLREDUCE`` (or another kind), from ``submitted`` to ``began``, and for ``ALLREDUCE``, from
        ``began`` to now.

        Args:
            call: the collective, which ends at the time of this call.
            began: start of its execution, in seconds of ``time.perf_counter``.
            submitted: time at which this rank called it, on the same clock.
        """
        if (sink := self.sink) is not None:
            now = time.perf_counter()
            sink(call.name, f"NEGOTIATE_{call.kind.upper()}", submitted, began)
            sink(call.name, call.kind.upper(), began, now)

    def close(self) -> None:
        """End this rank's collective engine: fail pending collectives with PeerError, end its connections and threads.

        Other ranks that still use their engines are told, and their calls with this rank fail. May block until rank 0
        has answered, and up to 5 seconds for the threads to end; a thread that waits for a lost rank in native code
        ends when the collective's timeout has passed. A second call does nothing.
        """
        if self._closing:
            return
        self._closing = True
        for session in list(self.sessions.values()):
            session.close()
        with contextlib.suppress(PeerError):
            self.send(["bye", 0])
        self._connection.close()
        self._losses.close()
        # A thread that waits for a lost rank in native code ends when the collective's timeout does.
        self._thread.join(5 if self.broken is None else _ABANDONED)
        if self._hub is not None:
            self._hub.close()

    def interrupt(self, text: str) -> None:
        """Make all collectives of this process, pending and later ones, raise PeerError because a rank is lost. Local.

        Other ranks are not told. Safe from any thread.

        Args:
            text: the error message, such as why the rank was lost.
        """
        self.broken = self.broken or PeerError(text, where=f"rank {self.rank}")
        for session in list(self.sessions.values()):
            session.fail_all(self.broken)

    def abandon(self) -> None:
        """End this rank's collective engine without telling or awaiting other ranks, some of which may be gone.

        Pending collectives of this rank fail with PeerError. Waits for the engine's thread for half a second at most;
        on rank 0 then ends the message hub, too, so that other ranks can start no collective either.
        """
        self._closing = True
        self.interrupt(SHUT_DOWN)
        self._connection.close()
        self._losses.close()
        self._thread.join(_ABANDONED)
        if self._hub is not None:
            self._hub.close()

    def _make_hub(self, store: dist.Store) -> MessageHub:
        coordinator = self._coordinator = Coordinator(self.size, time.monotonic)
        left: set[int] = set()
        farewell: list[Answer] = []

        def on_message(rank: int, message: list[Any]) -> None:
            if message[0] == "bye":
                left.add(rank)
                if rank == 0:
                    farewell.extend((loss_line(r, self.size), ["bye", 0, ""]) for r in range(self.size))
            elif message[0] == "failed":
                coordinator.lose(rank, message[2], orderly=False)
            else:
                coordinator.receive(rank, message)

        def on_end(rank: int) -> None:
            if rank >= self.size:
                return
            orderly = rank in left
            text = f"rank {rank} has left the job" if orderly else f"rank {rank} has ended without a word"
            coordinator.lose(rank, f"{text}; collectives with it cannot complete", orderly)

        def on_turn() -> tuple[list[tuple[int, Any]], float | None]:
            pause = coordinator.seconds_to_stall()
            if pause == 0:
                for text in coordinator.check_stalls():
                    log.warning(text)
                pause = coordinator.seconds_to_stall()
            answers = coordinator.take_answers() + farewell
            farewell.clear()
            return answers, pause

        return MessageHub(store, _hub_address(self.world), on_message, on_end, on_turn)

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        if is_accelerator(self.world.device):
            torch.accelerator.set_device_index(self.world.device.index or 0)
        while messages := self._connection.receive():
            for message in messages:
                self._handle(message)
        if not self._closing:
            self.broken = self.broken or PeerError(
                "rank 0 has ended", where=f"rank {self.rank}", remedy="look at the log of rank 0"
            )
        # Also while closing: rank 0 may have left before it answered a session's ``close``, which waits for it.
        for session in list(self.sessions.values()):
            session.fail_all(self.broken or PeerError(SHUT_DOWN, where=f"rank {self.rank}"))

    def _handle(self, message: list[Any]) -> None:
        kind, number, *rest = message
        session = self.sessions.get(number)
        if session is None:
            return
        try:
            session.answer(kind, rest)
        except Exception:
            # Answers to calls that have failed meanwhile find none of them.
            if self.broken is None:
                raise


def _hub_address(world: World) -> str | None:
    """Return the address that rank 0 listens on; None on one node."""
    if world.identity.local_size == world.identity.size:
        return None
    return process_context.rendezvous(os.environ, world.identity)[0]


_engine: CollectiveEngine | None = None
_default: CollectiveSession | None = None
_lock = threading.Lock()


def engine() -> CollectiveEngine:
    """Return the collective engine of this process, whose thread performs collectives; start it if none runs.

    Starting is collective: every rank of the job must call this function, and a call blocks until rank 0 has called it.
    An engine from before a new ``tutti.init`` is closed and replaced.

    Returns:
        The engine, an object with ``open_session`` (make a namespace in which collectives are started) and ``close``.

    Raises:
        UsageError: before ``tutti.init``.
        PeerError: rank 0 did not start its engine in time.
    """
    global _engine, _default
    world = context.current()
    with _lock:
        if _engine is None or _engine.world is not world:
            if _engine is not None:
                _engine.close()
            else:
                atexit.register(close_engine)
                context.before_shutdown(close_engine)
            _engine, _default = CollectiveEngine(world), None
        return _engine


def default_session() -> CollectiveSession:
    """Return the session in which ``tutti.allreduce`` and the other public collectives match their calls by default.

    A session is a namespace in which the ranks' calls are matched by name. The first call opens it and starts the
    thread that performs collectives; every rank of the job must make this call, which blocks until rank 0 has made it.

    Returns:
        The session, an object with ``submit`` (start a collective), ``join`` (no more data on this rank) and ``close``.

    Raises:
        UsageError: before ``tutti.init``.
        PeerError: rank 0 did not start its thread in time.
    """
    global _default
    running = engine()
    with _lock:
        if _default is None or _default.closed:
            _default = CollectiveSession(running, 0, SessionOptions(limit=running.world.timeout))
        return _default


def close_engine() -> None:
    """End the thread that performs this process's collectives, if it runs; pending collectives fail with PeerError.

    Calls of other ranks that need this rank then fail, too. May block until rank 0 has answered. Called at
    ``tutti.shutdown`` and at the end of the process.
    """
    global _engine, _default
    with _lock:
        ending, _engine, _default = _engine, None, None
    if ending is not None:
        ending.close()


def abandon_engine() -> None:
    """End the thread that performs this process's collectives, if it runs, without telling or awaiting other ranks.

    Pending collectives of this rank fail with PeerError.
    """
    global _engine, _default
    with _lock:
        ending, _engine, _default = _engine, None, None
    if ending is not None:
        ending.abandon()


def interrupt_engine(text: str) -> None:
    """Make all collectives of this process, pending and later ones, raise PeerError.

    Local: nothing is sent to other ranks. No effect if the thread that performs collectives was not started. Safe from
    any thread.

    Args:
        text: the error message, such as why a rank was lost.
    """
    if (running := _engine) is not None:
        running.interrupt(text)
