"""What a rank writes is what its watchdog reads, before and after they share memory."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Lane, Phase, ProcessHeartbeat


@pytest.fixture(autouse=True)
def own_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, kind in (("process", ProcessHeartbeat), ("training", Lane), ("saving", Lane)):
        monkeypatch.setattr(heartbeat, name, kind())
    yield


def test_everything_that_is_written_moves_the_lane() -> None:
    lane = Lane()
    seen = [lane.seen()]
    assert seen[0].phase == Phase.IDLE
    assert lane.enter(Phase.COMPUTE, 7) == Phase.IDLE
    seen.append(lane.seen())
    lane.enter(Phase.COMPUTE)
    seen.append(lane.seen())
    lane.beat()
    seen.append(lane.seen())
    lane.beat("sum of gradients in step 7")
    seen.append(lane.seen())
    assert len(set(seen)) == len(seen)
    assert (seen[-1].phase, seen[-1].step, seen[-1].text) == (Phase.COMPUTE, 7, "sum of gradients in step 7")
    assert seen[-1].thread == threading.get_ident()
    assert lane.enter(Phase.WAITING) == Phase.COMPUTE
    assert (lane.seen().text, lane.seen().step) == ("", 7)


def test_a_phase_within_another_goes_back_to_it_even_after_an_error() -> None:
    lane = Lane()
    lane.enter(Phase.COMPUTE, 1)
    with pytest.raises(ZeroDivisionError), lane.during(Phase.WAITING):
        assert lane.seen().phase == Phase.WAITING
        raise ZeroDivisionError
    assert lane.seen().phase == Phase.COMPUTE


def test_a_text_of_any_length_and_kind_is_cut_to_its_place() -> None:
    lane = Lane()
    for text in ("", "é" * 4000, "x" * 100_000):
        lane.beat(text)
        assert text.startswith(lane.seen().text.rstrip("\ufffd"))


def test_another_process_sees_what_was_written_before_and_after_they_shared_memory() -> None:
    heartbeat.process.set_timeout(12.5)
    heartbeat.process.report_to(Path("logs"))
    heartbeat.training.enter(Phase.START)
    heartbeat.beat_into(memoryview(mmap.mmap(-1, heartbeat.SIZE)))
    heartbeat.training.beat("a call")
    theirs, ours = os.pipe()
    pid = os.fork()
    if not pid:
        heartbeat.saving.enter(Phase.SAVE, 20)
        os.write(ours, repr((heartbeat.process.timeout(), heartbeat.process.directory())).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(theirs, 100).decode() == repr((12.5, Path("logs")))
    assert (heartbeat.training.seen().phase, heartbeat.training.seen().text) == (Phase.START, "a call")
    assert (heartbeat.saving.seen().phase, heartbeat.saving.seen().step) == (Phase.SAVE, 20)


def test_a_rank_that_said_nothing() -> None:
    assert (heartbeat.process.timeout(), heartbeat.process.directory()) == (None, None)
