"""Ranks of an elastic job on one node: survivors keep process and memory; members change between generations.

When every rank of a generation has left it, the driver gives places in the next: survivors first, in their old order,
so that rank 0 holds the job's state; then ranks that were started since.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import ExitCode, UsageError
from tutti.launcher import child, failure, membership
from tutti.launcher.failure import Failure
from tutti.launcher.forking import fork
from tutti.launcher.host_discovery import SlotTable
from tutti.launcher.orphans import await_end

_POLL, _TELL, _END_WITHIN = 0.02, 0.2, 5.0
# Seconds for which a new rank waits for others that still start, so that one reset takes them all in.
_JOIN_TOGETHER = 10.0
_REMOVED, _ADDED = 1, 2


@dataclass(frozen=True)
class ElasticOptions:
    """Limits of an elastic job, whose set of ranks changes while it runs, as Horovod's ``horovodrun`` has them.

    A slot is room for one rank on a host. A generation is the time during which the set of ranks stays the same.

    Attributes:
        np: number of slots that must exist before the first generation begins.
        min_np: fewest ranks of a generation.
        max_np: most ranks of a generation.
        script: host discovery script, an executable that prints ``HOST:SLOTS``; None: ``np`` slots on localhost.
        slots_per_host: slots of a host that the script prints without a number; None: such hosts are refused.
        reset_limit: most generations after the first; None: no limit.
        cooldown: pair of seconds for which a failed rank takes a slot of its host away: after the host's first failure,
            and the upper limit, as the time doubles with each further failure there; None: for good.
        timeout: seconds to wait for ``min_np`` ranks before the job ends.

    Raises:
        UsageError: not 1 ≤ ``min_np`` ≤ ``np`` ≤ ``max_np``.
    """

    np: int
    min_np: int
    max_np: int
    script: Path | None = None
    slots_per_host: int | None = None
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_np <= self.np <= self.max_np:
            raise UsageError(
                f"--min-np {self.min_np}, -np {self.np} and --max-np {self.max_np} contradict each other",
                remedy="give 1 <= min-np <= np <= max-np",
            )


@dataclass(eq=False)
class _Member:
    number: int
    host: str
    pid: int
    line: socket.socket
    rank: int = sys.maxsize
    generation: int = -1
    ready: bool = False
    # When it asked for its place, on the monotonic clock.
    asked: float = 0.0
    # Has no slot at the moment; was told to end.
    leaving: bool = False
    dismissed: bool = False
    received: bytearray = field(default_factory=bytearray)


class ElasticDriver:
    """Driver of an elastic job on one node: starts ranks where slots are free, regroups the ranks, and ends the job.

    A slot is room for one rank. Whenever ranks fail, leave or are added, the driver forms a new generation, a new
    process group: it numbers the ranks anew, first those that survive, whose processes go on, then the new ones.

    Args:
        job: entry point, arguments and folders of every rank.
        options: limits of the job, such as the fewest and the most ranks.
        grace: seconds between a signal and SIGKILL.

    Raises:
        UsageError: the first call of the host discovery script fails, lasts longer than a minute, or prints a malformed
            line.
    """

    def __init__(self, job: child.Job, options: ElasticOptions, grace: float) -> None:
        self._job, self._options, self._grace = job, options, grace
        self._slots = SlotTable(options.script, options.np, options.slots_per_host, options.cooldown, _say)
        self._alive: list[_Member] = []
        self._failures: list[Failure] = []
        self._started = self._finished = 0
        self._generation = -1
        self._told = 0.0
        self._short_since: float | None = None
        self._stopped: signal.Signals | None = None
        self._stopped_again = False

    def run(self) -> int:
        """Run the elastic job until it ends and return the job's exit code. Blocks.

        Starts ranks on free slots (a slot is room for one rank), forms a new group of ranks whenever ranks come or go,
        and leaves no process behind. A signal is passed on to the ranks once; ranks that run on after the grace period
        are killed, and a second signal kills them at once. To be called in the main thread.

        Returns:
            0 if at least one rank has returned without an error and no rank is left, even if others have failed; if all
            have failed, the exit code of the failure that caused the others; ``ExitCode.PEER`` if the job was reset too
            often, or had too few ranks for too long; 128 + the number of the signal that stopped the job.
        """
        before = {number: signal.signal(number, self._stop) for number in child.forwarded_signals()}
        try:
            while True:
                code = self._turn(time.monotonic())
                if code is not None:
                    return code
                select.select([member.line for member in self._alive], [], [], _POLL)
        finally:
            self._end_all()
            self._slots.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame: Any) -> None:
        self._stopped_again = self._stopped is not None
        self._stopped = self._stopped or signal.Signals(number)

    def _turn(self, now: float) -> int | None:
        """Do all that there is to do; return the exit code at the end of the job."""
        if self._stopped is not None:
            self._signal(self._stopped)
            return 128 + self._stopped
        for member in list(self._alive):
            self._read(member)
        self._reap(now)
        if self._finished:
            self._dismiss()
        if not self._alive and self._finished:
            return int(ExitCode.DONE)
        if not self._alive and self._started:
            cause = failure.root_cause(self._failures)
            _say(failure.describe_failure(cause, failure.log_path(self._job.logs, cause.rank)).removeprefix("tutti: "))
            return cause.exit_code or int(ExitCode.UNEXPECTED)
        self._slots.poll(now)
        self._fill(now)
        return self._form(now)

    # --- members ---------------------------------------------------------------------------------------------------

    def _fill(self, now: float) -> None:
        """Start ranks in free slots; mark those without a slot."""
        if self._finished:
            # The rest of the work needs no slot.
            for member in self._alive:
                member.leaving = member.dismissed
            return
        slots = self._slots.slots(now)
        if not self._started and sum(slots.values()) < self._options.np:
            return
        for host in {member.host for member in self._alive} - slots.keys():
            slots[host] = 0
        staying = 0
        for host, count in slots.items():
            # Ranks with the job's state first. A rank that waits without a slot stays if the slot comes back.
            here = [member for member in self._alive if member.host == host and not member.dismissed]
            here.sort(key=lambda member: (member.rank, member.number))
            for index, member in enumerate(here):
                member.leaving = index >= count
            staying += min(len(here), count)
        for host, count in slots.items():
            free = count - sum(member.host == host for member in self._alive)
            for _ in range(min(free, self._options.max_np - staying)):
                self._start(host)
                staying += 1

    def _start(self, host: str) -> None:
        mine, theirs = socket.socketpair()
        number = self._started
        self._started += 1
        failure.clear(self._job.notes, [number])
        signal.pthread_sigmask(signal.SIG_BLOCK, child.SIGNALS)
        try:
            pid = fork()
            if pid == 0:
                for other in (mine, *(member.line for member in self._alive)):
                    other.close()
                os.environ.update(RANK=str(number), HOROVOD_HOSTNAME=host)
                _be_rank(self._job, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, child.SIGNALS)
        theirs.close()
        mine.setblocking(False)
        self._alive.append(_Member(number, host, pid, mine))

    def _read(self, member: _Member) -> None:
        try:
            while data := member.line.recv(65536):
                member.received += data
        except BlockingIOError:
            pass
        except OSError:
            return
        while (end := member.received.find(b"\n")) >= 0:
            message = json.loads(member.received[:end])
            del member.received[: end + 1]
            member.ready, member.asked = True, time.monotonic()
            if message["failed"]:
                self._interrupt(message["ready"], f"process {member.number} has left the generation", member)

    def _reap(self, now: float) -> None:
        for member in list(self._alive):
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if not pid:
                continue
            self._read(member)
            code = os.waitstatus_to_exitcode(status)
            self._bury(member)
            if code == 0:
                self._finished += not member.dismissed
                continue
            found = failure.read_failure(self._job.notes, member.number)
            found = found or failure.from_death(member.number, code, time.time())
            self._failures.append(found)
            self._slots.fail(member.host, now)
            text = f"rank {member.rank} has ended" if member.generation >= 0 else "a new process has ended"
            what = found.message.splitlines()[0] if found.message else found.kind
            if self._alive:
                _say(f"{text} (process {member.number}): {what}; {len(self._alive)} go on")
            if member.generation >= 0:
                self._interrupt(member.generation, text, member)

    def _bury(self, member: _Member) -> None:
        """Forget a rank that has ended; kill the processes that it has left behind, and reap them."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(member.pid, signal.SIGKILL)
        await_end(-member.pid, _END_WITHIN)
        member.line.close()
        self._alive.remove(member)

    def _dismiss(self) -> None:
        """End the ranks that have not joined: the others are ending, and hold the state."""
        for member in self._alive:
            if member.generation < 0 and member.ready:
                self._send_away(member)

    def _send_away(self, member: _Member) -> None:
        """Tell a rank that waits for a place to end."""
        member.ready, member.leaving, member.dismissed, member.generation = False, True, True, -1
        self._send(member, {"place": {}})

    def _interrupt(self, generation: int, text: str, cause: _Member) -> None:
        """Fail what the other ranks of a generation wait for."""
        for member in self._alive:
            if member is not cause and member.generation == generation:
                self._send(member, {"generation": generation, "lost": text})

    def _send(self, member: _Member, message: dict[str, Any]) -> None:
        with suppress(OSError):
            member.line.sendall(json.dumps(message).encode() + b"\n")

    # --- generations -----------------------------------------------------------------------------------------------

    def _form(self, now: float) -> int | None:
        """Tell the ranks of waiting ones, and form the next generation when all ranks have left this one."""
        members = [member for member in self._alive if member.generation == self._generation >= 0]
        waiting = [m for m in self._alive if m.ready and m.generation < self._generation and not m.leaving]
        starting = any(m.generation < 0 and not m.ready and not m.leaving for m in self._alive)
        joining = waiting and (not starting or now >= min(m.asked for m in waiting) + _JOIN_TOGETHER)
        kind = (_REMOVED if any(m.leaving for m in members) else 0) | (_ADDED if joining else 0)
        # Again and again: ranks that are just beginning a generation forget what they heard before.
        if kind and now >= self._told + _TELL:
            self._told = now
            for member in members:
                self._send(member, {"update": kind, "time": time.time()})
        if not all(member.ready for member in members):
            self._short_since = None
            return None
        places = [member for member in self._alive if member.ready and not member.leaving]
        places.sort(key=lambda member: (member.rank, member.number))
        needed = 1 if self._finished else self._options.min_np if self._generation >= 0 else self._wanted()
        if len(places) < max(1, needed):
            return self._wait(now, len(places), needed)
        self._short_since = None
        limit = self._options.reset_limit
        if limit is not None and self._generation >= limit:
            _say(f"the job was ended because its resets exceeded --reset-limit {limit}")
            return int(ExitCode.PEER)
        self._generation += 1
        self._told = 0.0
        for member in [member for member in self._alive if member.leaving and member.ready]:
            self._send_away(member)
        store = str(self._job.store / f"generation-{self._generation}")
        for rank, member in enumerate(places):
            member.rank, member.generation, member.ready = rank, self._generation, False
            place = {"generation": self._generation, "rank": rank, "size": len(places), "store": store}
            self._send(member, {"place": place})
        return None

    def _wanted(self) -> int:
        """Ranks that the first generation waits for: all that were started and live."""
        return max(self._options.min_np, len(self._alive)) if self._started else self._options.np

    def _wait(self, now: float, there: int, needed: int) -> int | None:
        """Wait for further ranks, at most ``timeout``; return the exit code after it."""
        self._short_since = now if self._short_since is None else self._short_since
        if now - self._short_since < self._options.timeout:
            return None
        _say(
            f"{there} of the {needed} ranks that --min-np needs are left; no slot became free within "
            f"{self._options.timeout:g} s (--elastic-timeout)"
        )
        return int(ExitCode.PEER)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _signal(self, number: signal.Signals) -> None:
        """Pass a signal on, and wait for the ranks' end: at most the grace period, or until another signal comes."""
        for member in self._alive:
            with suppress(ProcessLookupError):
                os.kill(member.pid, number)
        end = time.monotonic() + self._grace
        while self._alive and time.monotonic() < end and not self._stopped_again:
            for member in list(self._alive):
                if os.waitpid(member.pid, os.WNOHANG)[0]:
                    self._bury(member)
            time.sleep(_POLL)

    def _end_all(self) -> None:
        for member in list(self._alive):
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(member.pid, 0)
            self._bury(member)


def _be_rank(job: child.Job, line: socket.socket) -> None:
    membership.connect(line)
    child.child_main(job)


def _say(text: str) -> None:
    print(f"tutti: {text}", file=sys.stderr, flush=True)
