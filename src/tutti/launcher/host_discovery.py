"""Slots for ranks: a discovery script names them, failures take them away for a while. No torch."""

from __future__ import annotations

import math
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tutti.errors import UsageError

_EVERY, _LIMIT = 0.5, 60.0
_TRY = "run it by hand: it must print HOST:SLOTS and end with code 0 within a minute"


def parse_slots(text: str, default: int | None) -> dict[str, int]:
    """Parse the output of a host discovery script: lines ``HOST:SLOTS`` or ``HOST``; a slot is room for one rank.

    Blank lines are skipped; the slots of lines with the same host are added. Only names of this machine are permitted.

    Args:
        text: output of a discovery script.
        default: number of slots of a line without a number; None: such lines are refused.

    Returns:
        Host → number of slots.

    Raises:
        UsageError: a line is malformed, has no number of slots while ``default`` is None, or names another machine.

    >>> parse_slots("localhost:2\\n127.0.0.1\\n", 4)
    {'localhost': 2, '127.0.0.1': 4}
    """
    found: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        host, colon, slots = line.partition(":")
        if colon and not slots.isdecimal():
            raise UsageError(f"the host discovery script printed '{line}'", remedy="print lines HOST:SLOTS")
        if not colon and default is None:
            raise UsageError(
                f"the host discovery script printed '{line}' without slots",
                remedy="print HOST:SLOTS, or give --slots-per-host",
            )
        if not (host.startswith("127.") or host in ("localhost", socket.gethostname(), socket.getfqdn())):
            raise UsageError(
                f"the host discovery script names {host}",
                why="an elastic job starts ranks on this machine only",
                remedy="print localhost:SLOTS; on several machines use torchrun or -H, with a fixed number of ranks",
            )
        found[host] = found.get(host, 0) + (int(slots) if colon else default or 0)
    return found


class SlotTable:
    """Table of the slots of an elastic job on each host: a slot is room for one rank, as in Horovod.

    A host discovery script names the hosts and their slots, and is called anew about twice a second. A rank that fails
    takes a slot of its host away for a while (its cooldown). ``ElasticDriver`` calls ``poll`` and ``slots`` in each
    turn of its loop (every 20 ms), and ``fail`` when a rank's process has ended with an error.

    Args:
        script: executable that prints the hosts, called once at construction; None: ``fixed`` slots on localhost.
        fixed: number of slots on localhost without a script.
        default: number of slots of a host that the script prints without a number; None: such lines are refused.
        cooldown: pair of seconds for which a failed rank takes a slot of its host away: after the host's first failure,
            and the upper limit, as the time doubles with each further failure there; None: for the rest of the job.
        warn: called with a message when a later call of the script fails.

    Raises:
        UsageError: the first call of the script fails, lasts longer than a minute, or prints a malformed line.
    """

    def __init__(
        self,
        script: Path | None,
        fixed: int,
        default: int | None,
        cooldown: tuple[float, float] | None,
        warn: Callable[[str], None],
    ) -> None:
        self._script, self._default, self._cooldown, self._warn = script, default, cooldown, warn
        self._hosts = {"localhost": fixed} if script is None else self._first(script)
        self._taken: dict[str, list[float]] = {}
        self._failures: dict[str, int] = {}
        self._running: _Call | None = None
        self._next = 0.0
        self._warned = False

    def poll(self, now: float) -> None:
        """Start the host discovery script if it is due, or read its output if it has ended. Does not block.

        The script prints the hosts and their slots (places for a rank). To be called often; does nothing without a
        script. The script is due half a second after its last call ended. A call of the script fails if it cannot
        start, ends with an error, prints a malformed line, or lasts longer than a minute, after which it is killed. A
        failed call leaves the hosts and their slots as they were; the first of several in a row is reported by the
        function ``warn`` of the constructor.

        Args:
            now: seconds of a monotonic clock.
        """
        if self._script is None:
            return
        if self._running is None:
            if now >= self._next:
                try:
                    self._running, self._next = _Call(self._script), now + _LIMIT
                except OSError as error:
                    self._next = now + _EVERY
                    self._fail(UsageError(f"the host discovery script {self._script} cannot be run", why=str(error)))
        elif (code := self._running.process.poll()) is not None:
            output, _ = self._running.printed()
            self._running, self._next = None, now + _EVERY
            self._take(code, output)
        elif now >= self._next:
            self._running.process.kill()

    def fail(self, host: str, now: float) -> None:
        """Take one slot of a host away because a rank on the host failed, for a time that doubles with each failure.

        A slot is room for one rank. The time starts with the first value of ``cooldown`` and is at most the second,
        both given to the constructor in seconds. If ``cooldown`` is None, the slot does not come back.

        Args:
            host: host name, as the script prints it.
            now: seconds of the same clock as in ``poll``.
        """
        count = self._failures.get(host, 0)
        self._failures[host] = count + 1
        seconds = math.inf if self._cooldown is None else min(self._cooldown[0] * 2.0**count, self._cooldown[1])
        self._taken.setdefault(host, []).append(now + seconds)

    def slots(self, now: float) -> dict[str, int]:
        """Return the slots of each host of an elastic job, without those that failures have taken away at present.

        A slot is room for one rank; slots that running ranks occupy count. This method does not call the host discovery
        script: ``poll`` does.

        Args:
            now: seconds of the same clock as in ``poll``.

        Returns:
            Name of the host → number of slots, 0 if failures have taken all.
        """
        return {
            host: max(0, count - sum(until > now for until in self._taken.get(host, [])))
            for host, count in self._hosts.items()
        }

    def close(self) -> None:
        """Kill the host discovery script if a call of it is running, and wait for its end.

        Processes that the script has started are left alone.
        """
        if self._running is not None:
            self._running.end()

    def _first(self, script: Path) -> dict[str, int]:
        try:
            call = _Call(script)
            try:
                code = call.process.wait(_LIMIT)
                output, errors = call.printed()
            finally:
                call.end()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(
                f"the host discovery script {script} cannot be run", why=str(error), remedy=_TRY
            ) from error
        if code:
            raise UsageError(
                f"the host discovery script {script} ended with code {code}", why=errors.strip(), remedy=_TRY
            )
        return parse_slots(output, self._default)

    def _take(self, code: int, output: str) -> None:
        try:
            if code:
                raise UsageError(f"the host discovery script {self._script} ended with code {code}")
            self._hosts, self._warned = parse_slots(output, self._default), False
        except UsageError as error:
            self._fail(error)

    def _fail(self, error: UsageError) -> None:
        if not self._warned:
            self._warn(f"{str(error).removesuffix('.')}; the hosts that it named before still hold")
        self._warned = True


class _Call:
    """A call of the host discovery script, which prints into temporary files.

    A pipe would block the script where the output is larger than the pipe's buffer, and its reader until all processes
    that the script has started have closed the pipe.

    Raises OSError if the script cannot be started.
    """

    def __init__(self, script: Path) -> None:
        with ExitStack() as stack:
            output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self.process = subprocess.Popen([script], stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
            self._files = stack.pop_all()
        self._output, self._errors = output, errors

    def printed(self) -> tuple[str, str]:
        """Return what the script has printed on standard output and standard error."""
        with self._files:
            for file in (self._output, self._errors):
                file.seek(0)
            return self._output.read().decode(errors="replace"), self._errors.read().decode(errors="replace")

    def end(self) -> None:
        """Kill the script unless it has ended, wait for its end, and delete the files."""
        self.process.kill()
        self.process.wait()
        self._files.close()
