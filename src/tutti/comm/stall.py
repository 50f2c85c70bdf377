"""Stall inspector: wait for collectives with a timeout, and name the ranks that are missing or deadlocked.

A rank that waits longer than 2 s writes a note with its call to the shared store, renews it while it waits, and reads
the notes of all ranks. If *every* rank waits and no call has all of its ranks, none can ever complete: MismatchError is
raised at once, with all calls. A rank that has left a call counts among its ranks: it has sent its data, which are on
their way, as those of a broadcast are when its source waits in the next call. Otherwise, at the timeout, PeerError
names the ranks that are waited for and wait for none themselves. A collective that fails on one of its ranks, because
another has ended, fails on its other ranks, too, within seconds. So does a collective that a rank will not reach,
because an error has ended the function in which all ranks call it (``TellFailures``). A collective that completes
within 2 s does not access the store.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tutti.errors import MismatchError, PeerError, script_line
from tutti.launcher import context, heartbeat
from tutti.launcher.context import World
from tutti.launcher.heartbeat import Phase

if TYPE_CHECKING:
    from torch.distributed import Work

T = TypeVar("T")
_F = TypeVar("_F", bound=Callable[..., Any])

_PATIENCE = timedelta(seconds=2)
_POLL = timedelta(seconds=0.5)
# A note that was not renewed for this many seconds belongs to a stopped process.
_STALE = 6 * _POLL.total_seconds()
# The beat of a rank that has given up. Its note stays, so that ranks that time out later do not report it as missing.
_GAVE_UP = -1
# The beat of a rank whose call failed because another rank of it ended. In a collective over sockets only ranks that
# exchange data with the ended rank notice it; the others would wait until their timeout while this rank lives on.
_BROKEN = -2
# The beat of a rank that has left collective code by an error, which is the text of its note.
_FAILED = -3
_MOST_TEXT = 500
# Completed calls that a rank remembers: more than a source of broadcasts can be ahead of the other ranks.
_REMEMBERED = 64
ENDED_RANK = (
    "look for the first error in the other ranks' logs. Without one, the script of that rank was at its end: make this"
    " call on every rank, and not under 'if tutti.rank() == 0:', and end loops by run.global_step, because ranks may"
    " have unequal numbers of micro-batches"
)
"""Remedy of a collective that has failed because another rank ended."""
_SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\] ")


@dataclass(frozen=True)
class Call:
    """Description of a collective or transfer in which a rank waits, for error messages.

    While a rank waits long, it writes this description to the job's key-value store, so that other ranks can detect a
    deadlock.

    Attributes:
        text: operation and name.
        ranks: global ranks that take part.
        sent: in a description read from the store: the texts of transfers that the waiting rank has started to send and
            not waited for.
        before: in a description read from the store: how often the waiting rank has completed this call before.
        left: in a description read from the store: the calls that the waiting rank has completed last, by ``key`` → how
            often.
        counted: False for barriers in shared memory, which each rank notices to be complete as soon as all ranks have
            arrived. Most of them end before ``StallInspector`` is asked, so that ranks count different numbers of them.
    """

    text: str
    ranks: tuple[int, ...]
    sent: tuple[str, ...] = field(default=(), compare=False)
    before: int = field(default=0, compare=False)
    left: Mapping[str, int] = field(default_factory=dict, compare=False)
    counted: bool = field(default=True, compare=False)

    @property
    def key(self) -> str:
        """Short text that identifies the collective or transfer: operation, name, first two and last rank, and size.

        Equal calls that a rank repeats have the same key; ``StallInspector`` counts by it how often a rank has
        completed each.
        """
        return f"{self.text} {self.ranks[:2]}{self.ranks[-1:]}{len(self.ranks)}"


class _Notes:
    """The notes that this process has read since it began to wait."""

    def __init__(self) -> None:
        # By rank: call, first and latest beat of its note, and the time at which the latest was first read.
        self._seen: dict[int, tuple[Call, int, int, float]] = {}
        # Calls and beats at the reading since which all ranks have waited in the same calls.
        self._calls: dict[int, Call] = {}
        self._beats: dict[int, int] = {}

    def look(self, notes: Mapping[int, tuple[Call, int]]) -> None:
        """Record the notes as just read: rank → (call, beat)."""
        now, before = time.monotonic(), self._seen
        self._seen = {}
        for rank, (call, beat) in notes.items():
            old = before.get(rank)
            if old is None or old[0] != call:
                self._seen[rank] = call, beat, beat, now
            else:
                self._seen[rank] = call, old[1], beat, now if beat != old[2] else old[3]

    def waiting(self) -> dict[int, Call]:
        """Return the ranks that wait or have given up, with their calls."""
        now = time.monotonic()
        return {rank: call for rank, (call, _, beat, at) in self._seen.items() if beat < 0 or now - at < _STALE}

    def broken(self, call: Call) -> list[int]:
        """Return the ranks for which ``call`` failed."""
        return [rank for rank, (there, _, beat, _) in self._seen.items() if beat == _BROKEN and there == call]

    def failed(self) -> dict[int, Call]:
        """Return the ranks that an error keeps from the call, with the error's text and number (``before``)."""
        return {rank: call for rank, (call, _, beat, _) in self._seen.items() if beat == _FAILED}

    def together(self) -> dict[int, Call]:
        """Return the ranks that wait in one call since a moment that is the same for all of them, with their calls.

        That moment is the end of an earlier reading; each of these ranks has renewed its note since. Notes are read one
        after another, so that those of one reading may never have been true at once.
        """
        calls = {rank: call for rank, (call, *_) in self._seen.items()}
        beats = {rank: latest for rank, (_, _, latest, _) in self._seen.items()}
        if self._calls != calls or any(beats[rank] < self._beats[rank] for rank in beats):
            self._calls, self._beats = calls, beats
        return {rank: call for rank, call in calls.items() if beats[rank] > self._beats[rank]}


def _reason(error: RuntimeError) -> str:
    """Return the reason of a broken connection without the native source line in front and the advice behind.

    >>> _reason(RuntimeError("[/src/pair.cc:537] Read error [::1]:2: Connection reset by peer. This is typically …"))
    'Read error [::1]:2: Connection reset by peer'
    """
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return _SOURCE_LINE.sub("", text).partition(". This is typically")[0]


class StallInspector:
    """Waits for the collectives of one process within a timeout, and explains a timeout by the ranks that are missing.

    Args:
        world: rank and store of this process, and three records that all inspectors of the process share: the transfers
            that it has started to send, the calls that it has completed last, and its errors.
        timeout: seconds that a call may take.

    Attributes:
        sent: texts of transfers that this process has started to send and not waited for.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self._store, self._rank, self._size = world.store, world.identity.rank, world.identity.size
        self._timeout, self._failure = timeout, world.failure
        self.sent, self._left = world.sent, world.left
        self._asking: threading.Thread | None = None

    def wait(self, work: Work, call: Call) -> None:
        """Block until ``work``, an asynchronous collective of ``torch.distributed``, is complete.

        The time limit is the ``timeout`` that the constructor was given.

        Args:
            work: the collective under way.
            call: description of the collective, which other ranks read if this rank waits long, and which errors state.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """

        def done(limit: timedelta) -> bool:
            try:
                work.wait(limit)
            except RuntimeError as error:
                if _is_timeout(error):
                    return False
                # The traceback of the native error names lines of a foreign build and no cause.
                raise self._broken(call, error) from None
            return True

        self.poll(done, call)

    def poll(self, done: Callable[[timedelta], bool], call: Call) -> None:
        """Block until ``done`` returns True, but not much longer than the ``timeout`` that the constructor was given.

        For waits without a ``Work`` of ``torch.distributed``.

        Args:
            done: called repeatedly with a time limit of two seconds at most; waits for completion, not longer than the
                limit, and returns whether the call is complete.
            call: description of the collective, which other ranks read if this rank waits long, and which errors state.

        Raises:
            MismatchError: deadlock: every rank waits in a call that at least one other rank has not made.
            PeerError: a connection broke, or the timeout has passed; names the missing ranks.
        """
        before = heartbeat.training.enter(Phase.WAITING)
        if self._failure.written:
            # The script has caught the error, and goes on.
            self._failure.written = False
            self._clear()
        try:
            if not self._done(done, _PATIENCE, call):
                self._explain(done, call)
            if call.counted:
                self._leave(call)
        finally:
            heartbeat.training.enter(before)

    def _done(self, done: Callable[[timedelta], bool], limit: timedelta, call: Call) -> bool:
        """Call ``done``; where it raises PeerError, leave a note that ``call`` failed, for the call's other ranks.

        If another rank's error is the cause, the PeerError states it.
        """
        try:
            return done(limit)
        except PeerError:
            self._note(call, _BROKEN)
            seen = _Notes()
            seen.look(self._notes() or {})
            self._check_failed(call, seen.failed())
            raise

    def _leave(self, call: Call) -> None:
        """Count a completed call, and forget the one that was completed longest ago."""
        self._left[call.key] = self._left.pop(call.key, 0) + 1
        if len(self._left) > _REMEMBERED:
            del self._left[next(iter(self._left))]

    def _explain(self, done: Callable[[timedelta], bool], call: Call) -> None:
        """Continue to wait, with a note in the store; raise on a deadlock or at the timeout."""
        start, seen, beat = time.monotonic(), _Notes(), 0
        self._note(call, beat)
        while not self._done(done, _POLL, call):
            beat += 1
            notes = self._notes()
            if notes is not None:
                seen.look(notes)
                failed = seen.failed()
                # A rank may have arrived after the wait above, have left the call, and have failed since.
                if failed and self._done(done, _POLL, call):
                    break
                self._check_failed(call, failed)
                self._check_broken(call, seen.broken(call))
                self._check_deadlock(call, seen.together(), beat)
            if time.monotonic() - start > self._timeout:
                late = self._late(call, seen.waiting())
                # Ranks that began to wait a moment later shall reach their own timeout before this rank's connections
                # close.
                time.sleep(2 * _POLL.total_seconds())
                self._note(call, _GAVE_UP)
                raise late
            self._note(call, beat)
            heartbeat.training.beat(call.text)
        self._clear()

    def _check_failed(self, call: Call, failed: dict[int, Call]) -> None:
        """Raise PeerError if an error of another rank, which this rank has not had as well, keeps it from the call."""
        for rank, note in failed.items():
            if note.before > self._failure.count:
                error = PeerError(
                    f"rank {rank} failed, and {call.text} waits for it",
                    where=f"rank {self._rank}",
                    why=note.text,
                    remedy=f"mend the error of rank {rank}",
                )
                self._failure.count, error.told = note.before, True  # type: ignore[attr-defined]
                raise error

    def tell_failure(self, error: Exception) -> None:
        """Write a note into the job's store that an error keeps this rank from its next collectives. Not collective.

        Other ranks that wait for this rank in a collective, now or later, read the note and raise PeerError with the
        error's text. The note holds until this rank's next collective. No note is written for a PeerError, which has
        its cause on another rank, nor in a job of one rank. A second call for the same error does nothing.

        Args:
            error: the error, which ends a function in which all ranks call collectives.
        """
        if self._size == 1 or getattr(error, "told", False):
            return
        error.told = True  # type: ignore[attr-defined]
        self._failure.count += 1
        if not isinstance(error, PeerError):
            self._failure.written = True
            text = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            note = json.dumps([text, [], _FAILED, [], self._failure.count])
            self._ask(lambda: self._store.set(self._key(self._rank), note))

    def _clear(self) -> None:
        self._ask(lambda: self._store.set(self._key(self._rank), ""))

    def _check_broken(self, call: Call, broken: list[int]) -> None:
        """Raise PeerError if the call has failed for one of its other ranks."""
        if broken:
            self._note(call, _GAVE_UP)
            raise PeerError(
                f"{call.text} failed",
                where=f"rank {self._rank}, {script_line()}",
                why=f"it failed on {', '.join(f'rank {rank}' for rank in broken)}",
                remedy=ENDED_RANK,
            )

    def _check_deadlock(self, call: Call, waiting: dict[int, Call], beat: int) -> None:
        """Raise MismatchError if all ranks wait, each still in the same call, and no call has all of its ranks."""
        if len(waiting) < self._size or any(is_complete(each, waiting) for each in waiting.values()):
            return
        # Every rank must have read the notes before the first rank raises and its connections close.
        for later in range(1, 9):
            self._note(call, beat + later)
            time.sleep(_POLL.total_seconds() / 2)
        self._note(call, _GAVE_UP)
        calls: dict[str, list[str]] = {}
        for rank in range(self._size):
            calls.setdefault(waiting[rank].text, []).append(f"rank {rank}")
        raise MismatchError(
            "ranks wait for each other in different calls: "
            + "; ".join(f"{', '.join(ranks)} in {text}" for text, ranks in calls.items()),
            where=f"rank {self._rank}, {script_line()}",
            why="they did not run the same sequence of collectives",
            remedy="make every rank take the same steps, evaluations and collectives in the same order; read norms and"
            " values of split or sharded tensors on every rank, and print them on rank 0",
        )

    def _late(self, call: Call, waiting: dict[int, Call]) -> PeerError:
        if self._rank not in waiting:
            return PeerError(
                f"{call.text} did not finish within {self._timeout:g} s, and rank 0 does not answer",
                where=f"rank {self._rank}",
                why="its process or its host has ended, or the network between the hosts is down",
                remedy="look at rank 0's log and at the network",
            )
        missing = self._absent(call, waiting) or [r for r in call.ranks if waiting.get(r, call) != call]
        waiting_in = "; ".join(f"rank {r} is in {waiting[r].text}" for r in missing if r in waiting)
        return PeerError(
            f"{call.text} did not finish within {self._timeout:g} s; missing: "
            f"{', '.join(f'rank {r}' for r in missing) or 'no rank, the transfer itself is slow'}",
            where=f"rank {self._rank}",
            why=waiting_in or "they wait in no call: stopped, busy, or in other code",
            remedy="look at their logs, or raise --timeout",
        )

    def _absent(self, call: Call, waiting: dict[int, Call]) -> list[int]:
        """Return the ranks that do not wait, found by following this call's ranks to the ranks of their own calls."""
        absent, asked, ahead = [], {self._rank}, list(call.ranks)
        while ahead:
            rank = ahead.pop()
            if rank in asked:
                continue
            asked.add(rank)
            if rank in waiting:
                ahead.extend(waiting[rank].ranks)
            else:
                absent.append(rank)
        return sorted(absent)

    def _broken(self, call: Call, error: RuntimeError) -> PeerError:
        return PeerError(
            f"{call.text} failed, because another rank ended or the network broke",
            where=f"rank {self._rank}, {script_line()}",
            why=_reason(error),
            remedy=ENDED_RANK,
        )

    def _key(self, rank: int) -> str:
        return f"stall/{rank}"

    def _note(self, call: Call, beat: int) -> None:
        before, left = self._left.get(call.key, 0), self._left.copy()
        note = json.dumps([call.text, call.ranks, beat, self.sent, before, left, call.counted])
        self._ask(lambda: self._store.set(self._key(self._rank), note))

    def _notes(self) -> dict[int, tuple[Call, int]] | None:
        """Read the notes of all ranks; None while the store does not answer."""

        def read() -> dict[int, tuple[Call, int]]:
            notes = {}
            for rank in range(self._size):
                if self._store.check([self._key(rank)]):
                    raw = self._store.get(self._key(rank))
                    if raw:
                        text, ranks, beat, sent, *counts = json.loads(raw)
                        notes[rank] = Call(text, tuple(ranks), tuple(sent), *counts), beat
            return notes

        return self._ask(read)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Run ``question``, a call to the store, in a thread; return its result, or None without an answer in 2 s.

        A thread, because a call of the store's client cannot be cancelled when the network is down.
        """
        answers: list[T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=ask, daemon=True)
            self._asking.start()
            self._asking.join(_PATIENCE.total_seconds())
        return answers[0] if answers else None


class TellFailures(contextlib.ContextDecorator):
    """Context manager, or decorator, that tells other ranks of an exception in code that all ranks run.

    If the block raises on this rank alone, such as because of a full disk or a bad sample, the other ranks would wait
    for it in their next collective until the timeout. They raise PeerError with this rank's error instead, once they
    have waited for two seconds. The exception itself propagates. No communication, but for a note in the job's store
    where the block raises; none before ``tutti.init``.
    """

    def __call__(self, function: _F) -> _F:
        """Return the function wrapped in this context manager; a call without an exception enters none.

        Args:
            function: a function or method, which may be called in each step.
        """

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self._tell(error)
                raise

        return cast(_F, call)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if context.is_initialized():
            world = context.current()
            StallInspector(world, world.timeout).tell_failure(error)


def is_complete(call: Call, waiting: Mapping[int, Call]) -> bool:
    """Return whether a collective or transfer waits for no rank any more, as far as the ranks' descriptions tell.

    True if for each rank of the call at least one of these holds:

    - The rank waits in an equal call: ``waiting[rank] == call``.
    - The rank has completed the call already: ``left`` of ``waiting[rank]`` counts it. Not considered for barriers in
      shared memory, whose ``counted`` is False.
    - The call is a point-to-point transfer that the rank has begun to send: ``sent`` of ``waiting[rank]`` lists it.

    ``StallInspector`` reports a deadlock only if no rank's call is complete.

    Args:
        call: description of the collective or transfer.
        waiting: global rank → the call in which it waits now; has all ranks of ``call``.
    """
    return all(
        there == call or call.text in there.sent or (call.counted and there.left.get(call.key, 0) > call.before)
        for there in (waiting[rank] for rank in call.ranks)
    )


def _is_timeout(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower() and "operation" in str(error).lower()
