"""Negotiation of collectives that are matched by name: the coordinator's rules, without sockets or threads.

Every rank sends a description of each call. Once all members of a process set have sent the calls of one name, the
coordinator compares them and answers every member: *run*, in one order that is the same on all ranks, or an error
that shows both calls. A call that was agreed upon before travels as a number (the response cache); an all-reduce that
ranks of one node repeat is performed without messages (``tutti.comm.posted_reduction``), and a rank reports that it
waits for one only after a while, so that mismatches, stalls and joins are seen.

Messages are JSON lists. To the coordinator: ``open``, ``call``, ``hit`` (a call by its number), ``posted`` (calls by
number and attempt that a rank has posted), ``join``, ``wait`` (a rank's threads all wait for calls that are not
complete), ``close``; and to the engine around the coordinator ``failed`` (the rank cannot go on) and ``bye`` (the rank
ends in order). From it: ``run``, ``post`` (post a call whose other ranks have posted it), ``again`` (a reported attempt
was revoked before), ``done``, ``error``, ``joined``, ``closed``; ``lost`` (a rank) and ``bye`` on a connection of their
own (``loss_line``), because a rank reads no other within a collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tutti.comm.collective_call import UNEVEN, CollectiveCall, ReduceOperation, describe_mismatch
from tutti.comm.posted_reduction import PostedReduction

Key = tuple[int, str]
Answer = tuple[int, list[Any]]
"""A message of the coordinator, behind the number of the rank's connection that it goes to."""

log = logging.getLogger("tutti.collectives")


def loss_line(rank: int, size: int) -> int:
    """Return the number of the connection to rank 0 on which a rank is told of lost ranks: ``size + rank``.

    The numbers 0 … ``size`` - 1 are the ranks' connections for all other messages.

    Args:
        rank: the rank.
        size: number of ranks of the job.
    """
    return size + rank


CONTROL = frozenset(("barrier", "add_process_set", "remove_process_set"))
"""Kinds without tensors: they overtake collectives that are still incomplete."""

SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)


@dataclass
class SessionOptions:
    """Timeouts and limits of a session, a namespace of collectives that are matched by name; rank 0's apply to all.

    Attributes:
        warn: seconds after which an incomplete call is reported, with the missing ranks; 0: never.
        limit: seconds after which an incomplete call fails; 0: never.
        fusion: bytes up to which all-reduces that are ready together are performed as one.
        capacity: number of calls whose descriptions are cached, so that repeating them needs a short message only.
    """

    warn: float = 60.0
    limit: float = 0.0
    fusion: int = 64 << 20
    capacity: int = 1024


@dataclass
class _Waiting:
    """A call that some members have not made yet, or not reported.

    Attributes:
        posted: number and attempt of the call on the ranks that have posted it and wait.
        asked: whether the engines of all other ranks were told to post it.
    """

    since: float
    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    posted: dict[int, tuple[int, int]] = field(default_factory=dict)
    asked: bool = False
    warned: bool = False


@dataclass
class _Ready:
    """An agreed call, to be performed."""

    call: CollectiveCall
    extents: list[tuple[int, ...]] | None
    number: int | None
    hit: bool
    joined: bool

    @property
    def size(self) -> int:
        """Bytes of this rank's tensors in the call."""
        call = self.call
        return sum(
            math.prod(shape) * getattr(torch, dtype).itemsize
            for shape, dtype in zip(call.shapes, call.dtypes, strict=True)
        )

    def to_json(self) -> list[Any]:
        name: Any = self.number if self.hit and not self.joined else list(self.call.key)
        return [name, self.extents, self.number, self.call.to_json() if self.joined else None]


def fuses(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Return whether two all-reduces can be performed as one message; False for other collectives. Local.

    The calls must agree in operation (not Adasum), process set (the ranks that take part), device type and scale
    factors, and all tensors of the two calls must have one dtype.

    Args:
        one: description of one call of a collective.
        other: description of another call.
    """
    alike = one.kind == other.kind == "allreduce" and one.op == other.op != ReduceOperation.ADASUM
    return (
        alike
        and {*one.dtypes} == {*other.dtypes}
        and len({*one.dtypes}) == 1
        and (one.process_set, one.device, one.prescale, one.postscale)
        == (other.process_set, other.device, other.prescale, other.postscale)
    )


class _Session:
    """The calls between one ``open`` and ``close``; names, process sets and cache belong to it."""

    def __init__(self, number: int, ranks: tuple[int, ...], clock: Callable[[], float]) -> None:
        self.number, self.clock = number, clock
        self.options = SessionOptions()
        self.sets: dict[int, tuple[int, ...]] = {0: ranks}
        self.waiting: dict[Key, _Waiting] = {}
        self.joined: list[int] = []
        self.gone: dict[int, str] = {}
        self.blocked: dict[int, Key] = {}
        self.ready: list[_Ready | Answer] = []
        # Shared memory of posted all-reduces, by number.
        self.reductions: dict[int, PostedReduction] = {}
        self._cache: list[CollectiveCall] = []
        self._numbers: dict[CollectiveCall, int] = {}
        self._next_set = 1

    def open(self, options: dict[str, Any]) -> None:
        self.options = SessionOptions(**options)

    def call(self, rank: int, call: CollectiveCall, post: tuple[int, int] | None = None) -> None:
        """Record a rank's call; complete it if it was the last. ``post``: number and attempt of a posted call."""
        self.blocked.pop(rank, None)
        self.drop_complete()
        members = self.sets.get(call.process_set)
        if members is None:
            self._fail([rank], call.key, "mismatch", f"process set {call.process_set} does not exist any more: {call}.")
            return
        gone = [r for r in members if r in self.gone]
        if gone:
            if post is not None and not self._revoked(post):
                return
            # A rank that has ended is the cause; other ranks may have left because of it.
            lost = min(gone, key=lambda r: self.gone[r].startswith(SHUT_DOWN))
            self._fail([rank], call.key, "lost", self.gone[lost])
            return
        waiting = self.waiting.get(call.key)
        if waiting is None:
            waiting = self.waiting[call.key] = _Waiting(self.clock())
        waiting.calls[rank] = call
        if post is not None:
            waiting.posted[rank] = post
        self._try(call.key)

    def report(self, rank: int, number: int, attempt: int) -> None:
        """Record that ``rank`` has posted a call and waits for it."""
        reduction = self.reductions[number]
        if reduction.revoked(attempt):
            self.ready.append((rank, ["again", self.number, number]))
        elif not reduction.complete(attempt):
            self.call(rank, self._cache[number], (number, attempt))

    def drop_complete(self) -> None:
        """Forget calls that all ranks have posted, most of them without a report."""
        for key, waiting in list(self.waiting.items()):
            for number, attempt in waiting.posted.values():
                if self.reductions[number].complete(attempt):
                    self._take(key)
                    break

    def _take(self, key: Key) -> _Waiting:
        """Remove and return a call that waits no longer, and so blocks no rank."""
        self.blocked = {rank: blocking for rank, blocking in self.blocked.items() if blocking != key}
        return self.waiting.pop(key)

    def _revoked(self, post: tuple[int, int]) -> bool:
        """Revoke a posted call; return False where it is complete."""
        number, attempt = post
        return self.reductions[number].revoke(attempt)

    def _fail_waiting(self, key: Key, ranks: Iterable[int], kind: str, text: str) -> None:
        """Fail a call on the ranks that have made it, unless all ranks have posted it by now."""
        waiting = self._take(key)
        # Of every number that ranks have posted, so that none of them takes part in another rank's next call.
        if all([self._revoked(post) for post in set(waiting.posted.values())]):
            self._fail(ranks, key, kind, text)

    def hit(self, rank: int, number: int, extents: Iterable[int]) -> None:
        """Record a rank's call that the cache knows."""
        known = self._cache[number]
        extents = tuple(extents)
        self.call(rank, replace(known, extents=extents) if extents else known)

    def join(self, rank: int) -> None:
        """Let ``rank`` take part in all-reduces with zeros until all ranks have joined."""
        self.blocked.pop(rank, None)
        self.drop_complete()
        self.joined.append(rank)
        for key in list(self.waiting):
            self._try(key)
        if len(self.joined) == len(self.sets[0]):
            last = self.joined[-1]
            self.ready += [(r, ["joined", self.number, last]) for r in self.sets[0]]
            self.joined = []

    def leave(self, rank: int, kind: str, text: str) -> None:
        """Fail every call, now and later, in which ``rank`` takes part."""
        self.gone[rank] = text
        self.blocked.pop(rank, None)
        for key, waiting in list(self.waiting.items()):
            if rank in self.sets[key[0]]:
                self._fail_waiting(key, [r for r in waiting.calls if r != rank], kind, text)
        if self.joined:
            self.ready += [(r, ["error", self.number, None, kind, text]) for r in self.joined if r != rank]
            self.joined = []

    def wait(self, rank: int, key: Key) -> None:
        """Record that all threads of ``rank`` wait; fail all calls if no rank can make another call."""
        self.drop_complete()
        if key not in self.waiting:
            return
        self.blocked[rank] = key
        able = {*self.sets[0]} - {*self.blocked} - {*self.joined}
        if able or not all(k in self.waiting for k in self.blocked.values()):
            return
        shown = {r: str(self.waiting[k].calls[r]) for r, k in self.blocked.items() if r in self.waiting[k].calls}
        shown |= dict.fromkeys(self.joined, "join")
        text = "Ranks wait for different collectives, none of which can complete: "
        text += "; ".join(f"rank {r} called {shown[r]}" for r in sorted(shown)) + "."
        for key, waiting in list(self.waiting.items()):
            self._fail_waiting(key, waiting.calls, "mismatch", text)
        self.blocked.clear()

    def stalled(self, now: float) -> list[str]:
        """Return warnings about calls that have waited for long; fail calls that have waited beyond the limit."""
        warnings = []
        self.drop_complete()
        for key, waiting in list(self.waiting.items()):
            age = now - waiting.since
            if self.options.limit and age >= self.options.limit:
                self._fail_waiting(key, waiting.calls, "lost", self._stall_text(key, waiting, age))
            elif self.options.warn and age >= self.options.warn and not waiting.warned:
                waiting.warned = True
                warnings.append(self._stall_text(key, waiting, age))
        return warnings

    def next_stall(self) -> float | None:
        """Return the time of the next check of stalls; None while no call waits."""
        times = [
            waiting.since + seconds
            for waiting in self.waiting.values()
            for seconds in (self.options.limit, 0 if waiting.warned else self.options.warn)
            if seconds
        ]
        return min(times, default=None)

    def _stall_text(self, key: Key, waiting: _Waiting, age: float) -> str:
        called = {*waiting.calls}
        for number, attempt in waiting.posted.values():
            called.update(self.reductions[number].posted(attempt))
        missing = [r for r in self.sets[key[0]] if r not in called and r not in self.joined]
        call = next(iter(waiting.calls.values()))
        return (
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
            f"waiting for remainder of ranks for more than {age:.0f} seconds: {call} was called by ranks "
            f"{sorted(called)}; missing ranks: {missing}."
        )

    def _try(self, key: Key) -> None:
        waiting = self.waiting[key]
        members = self.sets[key[0]]
        absent = [r for r in members if r not in waiting.calls]
        if absent and any(r not in self.joined for r in absent):
            return
        calls = waiting.calls
        text = describe_mismatch(calls)
        call = next(iter(calls.values()))
        if text is None and absent and call.kind != "barrier":
            text = _unsupported_with_join(call)
        if text is not None:
            self._fail_waiting(key, calls, "mismatch", text)
            return
        if waiting.posted:
            # The other ranks have joined, or called while they did.
            if not waiting.asked:
                waiting.asked = True
                number, _ = next(iter(waiting.posted.values()))
                self.ready += [(r, ["post", self.number, number]) for r in members if r not in waiting.posted]
            return
        self._take(key)
        if call.kind in CONTROL:
            self._control(call, calls)
        else:
            self._agree(call, [calls[r].extents for r in members] if call.kind in UNEVEN else None, bool(absent))

    def _agree(self, call: CollectiveCall, extents: list[tuple[int, ...]] | None, joined: bool) -> None:
        signature = call.signature
        number = self._numbers.get(signature)
        hit = number is not None
        if number is None and not call.unnamed and len(self._cache) < self.options.capacity:
            number = self._numbers[signature] = len(self._cache)
            self._cache.append(signature)
        self.ready.append(_Ready(signature, extents, number, hit, joined))

    def _control(self, call: CollectiveCall, calls: Iterable[int]) -> None:
        value = None
        if call.kind == "add_process_set":
            value, self._next_set = self._next_set, self._next_set + 1
            self.sets[value] = call.ranks
        elif call.kind == "remove_process_set":
            removed = int(call.root)
            del self.sets[removed]
            for key, waiting in list(self.waiting.items()):
                if key[0] == removed:
                    self._fail_waiting(key, waiting.calls, "mismatch", f"Process set {removed} was removed.")
        self.ready += [(r, ["done", self.number, list(call.key), value]) for r in calls]

    def _fail(self, ranks: Iterable[int], key: Key, kind: str, text: str) -> None:
        self.ready += [(r, ["error", self.number, list(key), kind, text]) for r in ranks]

    def take_answers(self) -> list[Answer]:
        """Return what was decided since the last call, in order, and all-reduces that go together as one."""
        found: list[Answer] = []
        ready, self.ready = self.ready, []
        groups: list[list[_Ready]] = []

        def flush() -> None:
            for group in groups:
                items = [item.to_json() for item in group]
                for rank in self.sets.get(group[0].call.process_set, ()):
                    found.append((rank, ["run", self.number, items]))
            groups.clear()

        room = 0
        for item in ready:
            if not isinstance(item, _Ready):
                flush()
                found.append(item)
                continue
            size = item.size
            if groups and size <= room and fuses(groups[-1][0].call, item.call):
                groups[-1].append(item)
            else:
                groups.append([item])
                room = self.options.fusion
            room -= size
        flush()
        return found


def _unsupported_with_join(call: CollectiveCall) -> str | None:
    summing = (ReduceOperation.SUM, ReduceOperation.AVERAGE, ReduceOperation.ADASUM)
    if call.kind == "allreduce" and call.op in summing:
        return None
    what = call.kind.capitalize() + f" with {call.op}" * (call.kind == "allreduce")
    return f"{what} is not supported with Join at this time. A rank has joined; another rank called {call}."


class Coordinator:
    """Rank 0's coordinator of named collectives: matches the ranks' calls by name and orders their execution.

    It holds no socket and no thread: the caller passes the ranks' messages to ``receive``, and sends the answers that
    ``take_answers`` returns.

    Args:
        size: number of ranks.
        clock: returns seconds, by which timeouts are measured.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        self._ranks, self._clock = tuple(range(size)), clock
        self._sessions: dict[int, _Session] = {}
        self._lost: dict[int, str] = {}
        self._touched: dict[int, None] = {}
        # Answers of sessions that have ended, and notices to all ranks.
        self._last: list[Answer] = []

    def receive(self, rank: int, message: list[Any]) -> None:
        """Process one message of a rank about its collectives, such as a call; answers are left for ``take_answers``.

        The coordinator runs on rank 0 and matches the ranks' calls by name; a session is a namespace of such names.

        Args:
            rank: global rank of the sender.
            message: JSON list of kind, number of the session, and at most one field of the kind, except ``hit``:

                - ``open``, open the session: its options, of which those of rank 0 are used.
                - ``call``, a collective: its description as JSON.
                - ``hit``, a collective that was agreed upon before: its number, and the ``extents`` of this call.
                - ``posted``, all-reduces for which the rank has written its tensors to shared memory: a list of pairs
                  (number of the collective, attempt).
                - ``join``: the rank has no more data.
                - ``wait``, all threads of the rank wait in collectives: key of one of them (process set, name).
                - ``close``: the rank leaves the session.

        Raises:
            ValueError: another kind.
        """
        kind, number, *rest = message
        session = self._sessions.get(number)
        if session is None:
            session = self._sessions[number] = _Session(number, self._ranks, self._clock)
            for lost, text in self._lost.items():
                session.leave(lost, "lost", text)
        self._touched[number] = None
        if kind == "hit":
            session.hit(rank, *rest)
        elif kind == "posted":
            for call_number, attempt in rest[0]:
                session.report(rank, call_number, attempt)
        elif kind == "call":
            session.call(rank, CollectiveCall.from_json(rest[0]))
        elif kind == "open":
            if rank == 0:
                session.open(rest[0])
        elif kind == "join":
            session.join(rank)
        elif kind == "wait":
            session.wait(rank, (rest[0][0], rest[0][1]))
        elif kind == "close":
            session.leave(rank, "closed", f"{SHUT_DOWN} Rank {rank} has left the job.")
            session.ready.append((rank, ["closed", number]))
            if len(session.gone) == len(self._ranks):
                self._last += session.take_answers()
                del self._sessions[number]
        else:
            raise ValueError(f"rank {rank} has sent a message of an unknown kind: {kind}")

    def share(self, session_number: int, call_number: int, reduction: PostedReduction) -> None:
        """Give the coordinator the shared memory in which an all-reduce runs, to see which ranks have contributed.

        The coordinator matches the ranks' calls of collectives on rank 0. Must be called before any rank can report its
        contribution, from the thread of rank 0 that performs collectives.

        Args:
            session_number: number of the session (namespace of calls); no effect if this session is closed.
            call_number: number of the call in its session.
            reduction: buffers and counters of the all-reduce in shared memory.
        """
        if (session := self._sessions.get(session_number)) is not None:
            session.reductions[call_number] = reduction

    def lose(self, rank: int, text: str, orderly: bool) -> None:
        """Fail every pending and later collective of which ``rank`` is a member, because the rank ended or failed.

        A method of rank 0's coordinator, which matches the ranks' calls. Nothing is sent: ``take_answers`` returns the
        messages to the other ranks. A second call for a rank does nothing.

        Args:
            rank: global rank.
            text: reason, the message of the PeerError that these collectives raise.
            orderly: whether the rank announced that it leaves; otherwise all other ranks are told at once, so that they
                can leave collectives that are under way.
        """
        if rank in self._lost:
            return
        self._lost[rank] = text
        if not orderly:
            self._last += [(loss_line(r, len(self._ranks)), ["lost", rank, text]) for r in self._ranks if r != rank]
        for number, session in self._sessions.items():
            session.leave(rank, "lost", text)
            self._touched[number] = None

    def take_answers(self) -> list[Answer]:
        """Return the messages that rank 0's coordinator of collectives has still to send to the ranks, and forget them.

        Returns:
            Pairs (number, message), in the order in which they must be sent. The number is the rank, or
            ``loss_line(rank, size)`` ≥ ``size`` for the rank's second connection, on which the rank is told of lost
            ranks. A message is a JSON list that begins with its kind.
        """
        touched, self._touched = self._touched, {}
        last, self._last = self._last, []
        return last + [
            answer for number in touched if number in self._sessions for answer in self._sessions[number].take_answers()
        ]

    def check_stalls(self) -> list[str]:
        """Return warnings about collectives that wait long for some ranks, and fail calls beyond their time limit.

        A call is warned about after ``warn`` seconds, and fails after ``limit`` seconds, two values of the
        `SessionOptions` of the session (namespace of calls) in which it was made. ``take_answers`` afterwards returns
        the messages by which the ranks learn of failures.

        Returns:
            One text for each warning, which names the missing ranks.
        """
        now = self._clock()
        self._touched |= dict.fromkeys(self._sessions)
        return [text for session in self._sessions.values() for text in session.stalled(now)]

    def seconds_to_stall(self) -> float | None:
        """Return the seconds, at least 0, until ``check_stalls`` must be called next.

        The thread of rank 0 that runs the coordinator waits for messages no longer than this. None if no rank waits in
        a collective that others have not called, or no time limits are set.
        """
        times = [at for session in self._sessions.values() if (at := session.next_stall()) is not None]
        return max(0.0, min(times) - self._clock()) if times else None
