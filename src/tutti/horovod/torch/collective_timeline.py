"""Trace of rank 0's collectives in Chrome's format (``chrome://tracing``, Perfetto), with Horovod's activities."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class CollectiveTimeline:
    """Trace of a rank's collectives in Chrome's trace format, with the activities of Horovod's timeline.

    Each event is written at once; the file is complete JSON after ``close``. All methods may be called in any thread.

    Args:
        path: file to write, which the constructor opens; an older file of this name is overwritten.
        mark_cycles: whether to write an event ``CYCLE_START`` at the start of each activity that is not a negotiation.
    """

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._mark, self._start = mark_cycles, time.perf_counter()
        self._lanes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._file.write("[\n")
        epoch = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        self._file.write(json.dumps({"name": "process_name", "ph": "M", "pid": 0, "args": epoch}))

    def record(self, name: str, activity: str, began: float, ended: float) -> None:
        """Add an activity of a collective to this trace of rank 0's collectives; does nothing after ``close``.

        Args:
            name: name of the collective; each has a lane of its own.
            activity: name of the activity, such as ``ALLREDUCE`` or ``NEGOTIATE_ALLREDUCE``.
            began: start, in seconds of ``time.perf_counter``.
            ended: end, in the same clock.
        """
        with self._lock:
            if self._file.closed:
                return
            if name not in self._lanes:
                self._lanes[name] = len(self._lanes) + 1
                self._write(name="process_name", ph="M", pid=self._lanes[name], args={"name": name})
            began_us, ended_us = (int((at - self._start) * 1e6) for at in (began, ended))
            if self._mark and not activity.startswith("NEGOTIATE"):
                self._write(name="CYCLE_START", ph="i", pid=0, ts=began_us, s="g")
            lane = self._lanes[name]
            self._write(name=activity, ph="X", pid=lane, tid=0, ts=max(0, began_us), dur=max(0, ended_us - began_us))

    def close(self) -> None:
        """Complete the JSON text of the trace and close its file; events that are recorded later are dropped.

        A second call does nothing.
        """
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(",\n" + json.dumps(event))
        self._file.flush()
