"""Trace the phases of a few steps on all devices, as a picture with one row a device and as a trace file.

As in ``profile``, the run's own methods are wrapped while it is traced and unwrapped afterwards. A segment costs two
reads of the clock, far less than a profiler, so that the measured shares of time are those of the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.comm.communicator import Communicator
from tutti.comm.stall import Call, StallInspector
from tutti.errors import DiskError
from tutti.metrics import timeline
from tutti.metrics.profile import named_as, phases
from tutti.metrics.timeline import WAITING, TimelineSegment

if TYPE_CHECKING:
    from tutti.train.run import Run

TABLE = "shares.txt"


class _Recorder:
    """Record this rank's segments: at any time, the innermost open phase."""

    def __init__(self) -> None:
        self.segments: list[TimelineSegment] = []
        self._open: list[tuple[str, str, tuple[int, ...]]] = []
        self._since = 0.0

    @contextmanager
    def during(self, phase: str, call: str = "", ranks: tuple[int, ...] = ()) -> Iterator[None]:
        """Record ``phase`` within the block, except for nested phases.

        Args:
            phase: the phase's name.
            call: the collective that it waits for, if any.
            ranks: the ranks that take part in that collective.
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
            self.segments.append(TimelineSegment(phase, self._since, now, call, ranks))
        self._since = now


@contextmanager
def traced(run: Run, folder: Path) -> Iterator[None]:
    """Trace every rank's phases within the block. Collective at its beginning and its end.

    Rank 0 writes ``timeline.svg``, ``trace.json`` for ui.perfetto.dev or chrome://tracing, and ``shares.txt``. A
    barrier at the block's beginning aligns the ranks' clocks. Raises DiskError where rank 0 cannot write.
    """
    comm, clock, recorder = run.context.comms.world, run.taken, _Recorder()

    def wait(inner: Callable[..., Any], inspector: StallInspector, done: Any, call: Call) -> Any:
        with recorder.during(WAITING, call.text, call.ranks):
            return inner(inspector, done, call)

    # ``agree`` acts as a barrier. All ranks enter the second one soon after the first, and so leave it at nearly the
    # same time.
    for _ in range(2):
        comm.agree([f"trace from step {clock}"], "what is traced", "make every rank trace the same steps")
    start = time.perf_counter()
    with phases(run, recorder.during), named_as(StallInspector, "poll", wait):
        yield
    rows = _gathered(comm, recorder.segments, start)
    if comm.rank == 0:
        _write(folder, timeline.resolve_waits(rows), f"steps {clock + 1} to {run.taken} on {comm.size} devices")


def _gathered(comm: Communicator, own: list[TimelineSegment], start: float) -> list[list[TimelineSegment]]:
    """Return every rank's segments, in seconds since its own start of the trace. Collective: one broadcast a rank."""
    segments = [[s.phase, s.start - start, s.end - start, s.call, s.ranks] for s in own]
    rows = [comm.broadcast_json(segments, source, "the trace") for source in comm.alive_ranks]
    return [[TimelineSegment(p, a, b, call, tuple(ranks)) for p, a, b, call, ranks in row] for row in rows]


def _write(folder: Path, rows: list[list[TimelineSegment]], title: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.svg").write_text(timeline.timeline_svg(rows, title), encoding="utf-8")
        (folder / "trace.json").write_text(json.dumps(timeline.chrome(rows)), encoding="utf-8")
        (folder / TABLE).write_text(f"{title}\n{timeline.table(rows)}", encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the trace", where=str(folder), why=error.strerror) from error
