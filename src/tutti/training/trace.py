"""What every device does when, over a few steps: one row a device, as a picture and as a trace.

As in a profile the names are put around the run's own methods while it is traced and taken away afterwards. A segment
costs two looks at the clock, which is little beside what a profiler costs, so that shares of time are those of the run.
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
from tutti.measure import timeline
from tutti.measure.timeline import WAITING, Segment
from tutti.training.profile import named_as, phases

if TYPE_CHECKING:
    from tutti.training.run import Run

TABLE = "shares.txt"


class _Recorder:
    """This rank's segments: at any time the innermost phase that is open."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._open: list[tuple[str, str, tuple[int, ...]]] = []
        self._since = 0.0

    @contextmanager
    def during(self, phase: str, call: str = "", ranks: tuple[int, ...] = ()) -> Iterator[None]:
        """Within the block this rank is in ``phase``."""
        self._cut()
        self._open.append((phase, call, ranks))
        try:
            yield
        finally:
            self._cut()
            self._open.pop()

    def _cut(self) -> None:
        """End the segment that is open, and begin another."""
        now = time.perf_counter()
        if self._open and now > self._since:
            phase, call, ranks = self._open[-1]
            self.segments.append(Segment(phase, self._since, now, call, ranks))
        self._since = now


@contextmanager
def traced(run: Run, folder: Path) -> Iterator[None]:
    """Record what every rank does within the block. Collective at its beginning and its end.

    Rank 0 leaves ``timeline.svg``, ``trace.json`` for ui.perfetto.dev or chrome://tracing, and ``shares.txt``. Ranks'
    clocks are set to each other by the moment in which all have come to the block's beginning. Raises DiskError where
    rank 0 cannot write.
    """
    comm, clock, recorder = run.setting.comms.world, run.taken, _Recorder()

    def wait(inner: Callable[..., Any], inspector: StallInspector, done: Any, call: Call) -> Any:
        with recorder.during(WAITING, call.text, call.ranks):
            return inner(inspector, done, call)

    # The second meeting begins when all have left the first, so that all leave it at nearly the same time.
    for _ in range(2):
        comm.agree([f"trace from step {clock}"], "what is traced", "make every rank trace the same steps")
    start = time.perf_counter()
    with phases(run, recorder.during), named_as(StallInspector, "poll", wait):
        yield
    rows = _gathered(comm, recorder.segments, start)
    if comm.rank == 0:
        _write(folder, timeline.resolve(rows), f"steps {clock + 1} to {run.taken} on {comm.size} devices")


def _gathered(comm: Communicator, own: list[Segment], start: float) -> list[list[Segment]]:
    """Every rank's segments, in seconds from its own start of the trace. One broadcast a rank."""
    told = [[s.phase, s.start - start, s.end - start, s.call, s.ranks] for s in own]
    rows = [comm.broadcast_json(told, source, "the trace") for source in comm.there]
    return [[Segment(p, a, b, call, tuple(ranks)) for p, a, b, call, ranks in row] for row in rows]


def _write(folder: Path, rows: list[list[Segment]], title: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.svg").write_text(timeline.svg(rows, title), encoding="utf-8")
        (folder / "trace.json").write_text(json.dumps(timeline.chrome(rows)), encoding="utf-8")
        (folder / TABLE).write_text(f"{title}\n{timeline.table(rows)}", encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the trace", where=str(folder), why=error.strerror) from error
