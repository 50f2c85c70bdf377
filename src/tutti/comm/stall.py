"""Waiting that never hangs silently: who waits for whom, in which call, and since when.

A rank that waits longer than a moment leaves a note with its call in the shared store, renews it while it waits, and
reads the notes of the others. If *every* rank waits and two of one group wait in different calls, none of them can ever
go on: that is said at once, with all calls. Otherwise, when the time is up, those are named that all wait for: ranks
without a note that is still renewed. A step that does not stall pays nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch.distributed as dist

from tutti.errors import MismatchError, PeerError
from tutti.world import heartbeat
from tutti.world.heartbeat import Phase

if TYPE_CHECKING:
    from torch.distributed import Work

T = TypeVar("T")

_PATIENCE = timedelta(seconds=2)
_POLL = timedelta(seconds=0.5)
# A note not renewed for this long was left by a process that has been stopped.
_STALE = 6 * _POLL.total_seconds()
# The beat of a rank that has given up: its note stays, so that those whose time is up later do not miss it, too.
_GAVE_UP = -1


@dataclass(frozen=True)
class Call:
    """One collective as its callers see it: what it is, and the global ranks that take part.

    ``sent``: in another rank's note, what that one has begun to send besides and not waited for.
    """

    text: str
    ranks: tuple[int, ...]
    sent: tuple[str, ...] = field(default=(), compare=False)


class _Notes:
    """What this process has seen of the others' notes since it began to wait."""

    def __init__(self) -> None:
        # For each rank its call, the first and the latest beat of its note, and when the latest came.
        self._seen: dict[int, tuple[Call, int, int, float]] = {}

    def look(self, notes: Mapping[int, tuple[Call, int]]) -> None:
        """Take the notes as they are now."""
        now, before = time.monotonic(), self._seen
        self._seen = {}
        for rank, (call, beat) in notes.items():
            old = before.get(rank)
            if old is None or old[0] != call:
                self._seen[rank] = call, beat, beat, now
            else:
                self._seen[rank] = call, old[1], beat, now if beat != old[2] else old[3]

    def waiting(self) -> dict[int, Call]:
        """Ranks that wait, and in which call."""
        now = time.monotonic()
        return {rank: call for rank, (call, _, beat, at) in self._seen.items() if beat == _GAVE_UP or now - at < _STALE}

    def renewed(self) -> dict[int, Call]:
        """Those of them that were seen to renew their note, which a stopped process does not."""
        return {rank: call for rank, (call, first, latest, _) in self._seen.items() if latest > first}


class StallInspector:
    """Waits for collectives of one process.

    Args:
        store: shared by all ranks.
        rank: this process.
        size: all processes.
        timeout: seconds that a call may take.

    Attributes:
        sent: texts of calls that this process has begun, as a sender, without waiting for them.
    """

    sent: ClassVar[list[str]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._asking: threading.Thread | None = None

    def wait(self, work: Work, call: Call) -> None:
        """Return when ``work`` is done. Raises as ``poll``."""

        def done(limit: timedelta) -> bool:
            try:
                work.wait(limit)
            except RuntimeError as error:
                if _is_timeout(error):
                    return False
                raise self._broken(call, error) from error
            return True

        self.poll(done, call)

    def poll(self, done: Callable[[timedelta], bool], call: Call) -> None:
        """Return when ``done(limit)``, which itself waits up to ``limit``, says so.

        Raises:
            MismatchError: all ranks wait, in calls that do not fit together.
            PeerError: a connection broke, or the time is up; the ranks that did not come are named.
        """
        before = heartbeat.training.enter(Phase.WAITING)
        try:
            if not done(_PATIENCE):
                self._explain(done, call)
        finally:
            heartbeat.training.enter(before)

    def _explain(self, done: Callable[[timedelta], bool], call: Call) -> None:
        """Go on waiting, in everybody's view."""
        start, seen, beat = time.monotonic(), _Notes(), 0
        try:
            while True:
                self._note(call, beat)
                heartbeat.training.beat(call.text)
                if done(_POLL):
                    break
                beat += 1
                notes = self._notes()
                if notes is not None:
                    seen.look(notes)
                    self._check_deadlock(call, seen.renewed(), beat)
                if time.monotonic() - start > self._timeout:
                    late = self._late(call, seen.waiting())
                    # Who came a moment later is told the same, and not of this rank's connections that close.
                    time.sleep(2 * _POLL.total_seconds())
                    raise late
        except BaseException:
            self._note(call, _GAVE_UP)
            raise
        self._ask(lambda: self._store.set(self._key(self._rank), ""))

    def _check_deadlock(self, call: Call, waiting: dict[int, Call], beat: int) -> None:
        """Raise if all ranks wait, each still in the same call, and no call has all of its ranks."""
        if len(waiting) < self._size or any(complete(each, waiting) for each in (call, *waiting.values())):
            return
        # Every rank must have read the notes before the first one leaves and its connections close.
        for later in range(1, 5):
            self._note(call, beat + later)
            time.sleep(_POLL.total_seconds() / 2)
        calls: dict[str, list[str]] = {}
        for rank in range(self._size):
            calls.setdefault(waiting[rank].text, []).append(f"rank {rank}")
        raise MismatchError(
            "ranks wait for each other in different calls: "
            + "; ".join(f"{', '.join(ranks)} in {text}" for text, ranks in calls.items()),
            where=f"rank {self._rank}",
            why="they did not run the same sequence of collectives",
            remedy="make every rank take the same steps, evaluations and collectives in the same order",
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
        said = "; ".join(f"rank {r} is in {waiting[r].text}" for r in missing if r in waiting)
        return PeerError(
            f"{call.text} did not finish within {self._timeout:g} s; missing: "
            f"{', '.join(f'rank {r}' for r in missing) or 'no rank, the transfer itself is slow'}",
            where=f"rank {self._rank}",
            why=said or "they wait in no call: stopped, busy, or in other code",
            remedy="look at their logs, or raise --timeout",
        )

    def _absent(self, call: Call, waiting: dict[int, Call]) -> list[int]:
        """Ranks that wait for nobody: from this call's ranks on to whatever those that wait elsewhere wait for."""
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
            f"{call.text} failed",
            where=f"rank {self._rank}",
            why=str(error).splitlines()[0],
            remedy="another rank ended or the network broke: look for the first error in the other ranks' logs",
        )

    def _key(self, rank: int) -> str:
        return f"stall/{rank}"

    def _note(self, call: Call, beat: int) -> None:
        self._ask(lambda: self._store.set(self._key(self._rank), json.dumps([call.text, call.ranks, beat, self.sent])))

    def _notes(self) -> dict[int, tuple[Call, int]] | None:
        """Everybody's notes; None while the store does not answer."""

        def read() -> dict[int, tuple[Call, int]]:
            notes = {}
            for rank in range(self._size):
                if self._store.check([self._key(rank)]):
                    raw = self._store.get(self._key(rank))
                    if raw:
                        text, ranks, beat, sent = json.loads(raw)
                        notes[rank] = Call(text, tuple(ranks), tuple(sent)), beat
            return notes

        return self._ask(read)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """``question`` to the store; None where no answer came.

        It is asked in a thread, because a client of the store cannot be told to give up when the network is gone.
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


def complete(call: Call, waiting: Mapping[int, Call]) -> bool:
    """Whether all ranks of a call are in it, or have sent their part of it."""
    return all(waiting[rank] == call or call.text in waiting[rank].sent for rank in call.ranks)


def _is_timeout(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower() and "operation" in str(error).lower()
