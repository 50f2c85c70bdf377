"""Trace the phases of a few steps on all devices, as a picture with one row a device and as a trace file.

A segment costs two reads of the clock, far less than a profiler, so that the measured shares of time are those of the
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tutti.comm.communicator import Communicator
from tutti.comm.stall import Call, StallInspector
from tutti.errors import DiskError, counted
from tutti.launcher.encoding import strict_json
from tutti.metrics import timeline
from tutti.metrics.profile import named_as
from tutti.metrics.timeline import WAITING, TimelineSegment

TABLE = "shares.txt"


class TraceRecorder:
    """Records on this rank the time spent in each phase of the traced steps (``--trace``).

    Every rank makes one before the first traced step, enters ``during`` around each phase and ``waits`` around all
    traced steps, and calls ``write`` after the last one. Collective over all ranks: two all-gathers of a digest in the
    constructor, which compare ``step``; as barriers they align the ranks' clocks.

    Args:
        comm: communicator of all ranks.
        step: steps taken before the trace, the same on all ranks.

    Raises:
        MismatchError: ranks have taken different numbers of steps.
    """

    def __init__(self, comm: Communicator, step: int) -> None:
        self._comm, self._step = comm, step
        self._segments: list[TimelineSegment] = []
        self._open: list[tuple[str, str, tuple[int, ...]]] = []
        self._since = 0.0
        # ``agree`` acts as a barrier. All ranks enter the second one soon after the first, and so leave it at nearly
        # the same time.
        for _ in range(2):
            comm.agree([f"trace from step {step}"], "what is traced", "make every rank trace the same steps")
        self._start = time.perf_counter()

    @contextmanager
    def during(self, phase: str, call: str = "", ranks: tuple[int, ...] = ()) -> Iterator[None]:
        """Return a context manager that records the time within its block as a segment of ``phase`` on this rank.

        A nested block of another phase interrupts the segment: its time is recorded for the inner phase alone.

        Args:
            phase: the phase's name: ``data``, ``forward``, ``backward``, ``weight`` (gradients of weights in a
                zero-bubble pipeline), ``exchange`` (reduction of gradients) or ``update``; or ``WAITING``, for a wait
                in a collective.
            call: name of the collective that the block waits for; empty for other phases.
            ranks: the global ranks that take part in that collective; by name and ranks the waits of different ranks
                are matched.
        """
        self._cut()
        self._open.append((phase, call, ranks))
        try:
            yield
        finally:
            self._cut()
            self._open.pop()

    def _cut(self) -> None:
        """End the open segment and begin another."""
        now = time.perf_counter()
        if self._open and now > self._since:
            phase, call, ranks = self._open[-1]
            self._segments.append(TimelineSegment(phase, self._since, now, call, ranks))
        self._since = now

    def waits(self) -> AbstractContextManager[None]:
        """Return a context manager that records each wait of this rank for a collective within its block.

        A wait is recorded as a segment of the phase ``WAITING``, with the name of the collective and its ranks. The
        block is around the traced steps; waits outside of it are not recorded. Until the block ends, the method
        ``poll`` of the class ``StallInspector`` is replaced in this process.
        """

        def wait(inner: Callable[..., Any], inspector: StallInspector, done: Any, call: Call) -> Any:
            with self.during(WAITING, call.text, call.ranks):
                return inner(inspector, done, call)

        return named_as(StallInspector, "poll", wait)

    def write(self, folder: Path, step: int) -> None:
        """Write the trace of all ranks to ``folder``, on rank 0: ``timeline.svg``, ``trace.json`` and ``shares.txt``.

        ``trace.json`` is for ui.perfetto.dev or chrome://tracing, ``shares.txt`` has each device's time by phase.
        Called by all ranks after the last traced step. Collective over all ranks that are alive: one broadcast of the
        recorded segments from each of them; blocks.

        Args:
            folder: folder of the files, used on rank 0 alone, and created if it does not exist.
            step: number of the last traced step, for the title of picture and table.

        Raises:
            DiskError: rank 0 cannot write; raised there alone.
            ValueError: on rank 0, no rank has recorded a segment.
        """
        alive = self._comm.alive_ranks
        rows = _gathered(self._comm, alive, self._segments, self._start)
        if self._comm.rank == 0:
            title = f"steps {self._step + 1} to {step} on {counted(self._comm.size, 'device')}"
            _write(folder, timeline.resolve_waits(rows, [self._comm.ranks[i] for i in alive]), title)


def _gathered(
    comm: Communicator, alive: Sequence[int], own: list[TimelineSegment], start: float
) -> list[list[TimelineSegment]]:
    """Return the segments of the ranks ``alive``, in seconds since each rank's own start of the trace.

    Collective: one broadcast a rank.
    """
    segments = [[s.phase, s.start - start, s.end - start, s.call, s.ranks] for s in own]
    rows = [comm.broadcast_json(segments, source, "the trace") for source in alive]
    return [[TimelineSegment(p, a, b, call, tuple(ranks)) for p, a, b, call, ranks in row] for row in rows]


def _write(folder: Path, rows: list[list[TimelineSegment]], title: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.svg").write_text(timeline.timeline_svg(rows, title), encoding="utf-8")
        (folder / "trace.json").write_text(strict_json(timeline.chrome(rows)), encoding="utf-8")
        (folder / TABLE).write_text(f"{title}\n{timeline.table(rows)}", encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the trace", where=str(folder), why=error.strerror) from error
