"""The watchdog: what it takes for a stall, what it says, and that it lives and dies with its rank."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.launching import Running, alive, launched, launching, until
from tutti.config.watchdog_limits import WatchdogLimits
from tutti.errors import UsageError
from tutti.launcher import failure, heartbeat, watchdog
from tutti.launcher.heartbeat import Lane, Phase, ProcessHeartbeat, Seen
from tutti.launcher.watchdog import Stall, Watch, phase_limit

LIMITS = WatchdogLimits(start=100, step=10, save=50)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Lane, Lane]]:
    monkeypatch.setattr(heartbeat, "process", ProcessHeartbeat())
    monkeypatch.setattr(heartbeat, "training", Lane())
    monkeypatch.setattr(heartbeat, "saving", Lane())
    yield heartbeat.training, heartbeat.saving


def test_without_log_and_stack_the_report_speaks_of_no_log(
    lanes: tuple[Lane, Lane], capfd: pytest.CaptureFixture[str]
) -> None:
    tools: Any = SimpleNamespace(stacks=lambda pid: "")
    watchdog._report(3, Stall(lanes[0].seen(), 10.0), tools, os.getpid(), launched=False)
    said = capfd.readouterr().err
    assert "tutti: rank 3 made no progress for 10 s" in said and "log" not in said


# --- what is a stall -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [
        (Phase.IDLE, math.inf),
        (Phase.START, 100),
        (Phase.DATA, 10),
        (Phase.COMPUTE, 10),
        (Phase.WAITING, 14),
        (Phase.CONNECTING, 2 * 300 + 60),
        (Phase.EVALUATE, 100),
        (Phase.SAVE, 50),
        (Phase.REPORT, 50),
        (Phase.END, 100),
    ],
)
def test_each_phase_has_its_limit(phase: int, seconds: float, lanes: tuple[Lane, Lane]) -> None:
    assert phase_limit(LIMITS, phase) == seconds
    watch = Watch(LIMITS)
    lanes[0].enter(phase, 3)
    assert watch.look(1e6, False) is None, "it has just moved"
    if seconds == math.inf:
        assert watch.look(1e9, False) is None
        return
    assert watch.look(seconds - 1, False) is None
    stall = watch.look(1, False)
    assert stall == Stall(lanes[0].seen(), seconds)


def test_whatever_moves_is_no_stall(lanes: tuple[Lane, Lane]) -> None:
    training, _ = lanes
    watch = Watch(LIMITS)
    moves = [
        lambda: training.enter(Phase.COMPUTE, 1),
        lambda: training.enter(Phase.COMPUTE, 1),
        lambda: training.beat(),
        lambda: training.enter(Phase.WAITING),
        lambda: training.beat("a call"),
        lambda: training.enter(Phase.COMPUTE, 2),
    ]
    for move in moves * 3:
        move()
        assert watch.look(9, False) is None
        assert watch.look(9, False) is None


def test_the_thread_that_saves_is_watched_by_itself(lanes: tuple[Lane, Lane]) -> None:
    training, saving = lanes
    watch = Watch(LIMITS)
    saving.enter(Phase.SAVE, 20)
    for _ in range(10):
        training.enter(Phase.COMPUTE, 21)
        assert watch.look(5, False) is None
    training.enter(Phase.COMPUTE, 22)
    stall = watch.look(5, False)
    assert stall is not None and stall.background and stall.seen.step == 20


def test_a_stopped_process_is_a_stall_in_any_phase(lanes: tuple[Lane, Lane]) -> None:
    for phase in range(len(Phase.NAMES)):
        watch = Watch(LIMITS)
        lanes[0].enter(phase, 5)
        assert watch.look(9, True) is None
        assert watch.look(9, False) is None, "it was woken"
        lanes[0].beat()
        assert watch.look(9, True) is None
        stall = watch.look(1, True)
        assert stall is not None and stall.stopped and stall.seconds == 10


def test_a_step_may_last_as_long_as_ranks_wait_for_each_other_unless_said_otherwise(lanes: tuple[Lane, Lane]) -> None:
    assert phase_limit(WatchdogLimits(), Phase.COMPUTE) == 300
    heartbeat.process.set_timeout(7200)
    assert phase_limit(WatchdogLimits(), Phase.COMPUTE) == 7200
    assert phase_limit(LIMITS, Phase.COMPUTE) == 10
    never = WatchdogLimits(0, 0, 0)
    assert never.never and not WatchdogLimits().never
    watched = {phase for phase in range(len(Phase.NAMES)) if phase_limit(never, phase) < math.inf}
    assert watched == {Phase.CONNECTING}


def test_limits_that_mean_nothing_are_refused() -> None:
    for name in ("start", "step", "save"):
        for value in (0.5, -1.0, math.nan, math.inf):
            with pytest.raises(UsageError, match=f"--{name}-timeout is"):
                WatchdogLimits(**{name: value})
        with pytest.raises(UsageError, match=f"TUTTI_{name.upper()}_TIMEOUT is 'soon'"):
            WatchdogLimits.read({f"TUTTI_{name.upper()}_TIMEOUT": "soon"})
    assert WatchdogLimits.read({}) == WatchdogLimits()
    assert WatchdogLimits.read({"TUTTI_STEP_TIMEOUT": "60", "TUTTI_SAVE_TIMEOUT": "0"}) == WatchdogLimits(
        step=60, save=0
    )


# --- what is said --------------------------------------------------------------------------------------------------

SAID = [
    (Stall(Seen(Phase.START, 0, 1, 1, ""), 60.4), "made no progress for 60 s at the start (phase start), in f (a.py)"),
    (Stall(Seen(Phase.START, 9, 1, 1, ""), 1800.0), "for 1800 s in step 9 (phase start), in f (a.py)"),
    (Stall(Seen(Phase.COMPUTE, 17, 1, 1, ""), 60.0), "for 60 s in step 17 (phase compute), in f (a.py)"),
    (Stall(Seen(Phase.WAITING, 17, 1, 1, "sum"), 9.0), "for 9 s in step 17 (phase waiting: sum), in f (a.py)"),
    (Stall(Seen(Phase.EVALUATE, 17, 1, 1, ""), 9.0), "in the evaluation after step 17 (phase evaluate), in f (a.py)"),
    (Stall(Seen(Phase.REPORT, 17, 1, 1, ""), 9.0), "for 9 s after step 17 (phase report), in f (a.py)"),
    (Stall(Seen(Phase.SAVE, 20, 1, 1, ""), 9.0, background=True), "in the save of step 20 (phase save), in f (a.py)"),
    (Stall(Seen(Phase.DATA, 17, 1, 1, ""), 9.0, stopped=True), "in step 17 (phase data), stopped by a signal"),
]


@pytest.mark.parametrize(("stall", "said"), SAID)
def test_what_is_said(stall: Stall, said: str) -> None:
    assert stall.describe("f (a.py)").endswith(said)


# --- real processes ------------------------------------------------------------------------------------------------

IMPORTS = """
        from tutti.launcher import heartbeat
        from tutti.launcher.heartbeat import Phase
        from tutti.config.watchdog_limits import WatchdogLimits
"""


def ranks_and_watchdogs(running: Running) -> tuple[list[psutil.Process], list[psutil.Process]]:
    ranks = psutil.Process(running.launcher.pid).children()
    watchdogs = [child for rank in ranks for child in rank.children()]
    # Its name is the last thing that a new one gives itself.
    until(lambda: all(watchdog.name() == "tutti-watchdog" for watchdog in watchdogs))
    assert len(running.workers()) == len(ranks) + len(watchdogs)
    return ranks, watchdogs


def test_a_rank_has_one_that_holds_nothing_and_ignores_what_a_terminal_sends(tmp_path: Path) -> None:
    body = """
        def entry():
            ready()
            while not (HERE / "go").exists():
                time.sleep(0.02)
        """
    with launching(tmp_path, body) as running:
        running.wait_ready(3)
        ranks, watching = ranks_and_watchdogs(running)
        assert [watchdog.ppid() for watchdog in watching] == [rank.pid for rank in ranks]
        for watchdog in watching:
            files = [os.readlink(file) for file in Path(f"/proc/{watchdog.pid}/fd").iterdir()]
            assert sorted(files)[:3] == [os.devnull] * 3
            assert len(files) == 5 and sum("memfd:" in file for file in files) == 1
            for name in ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM", "SIGUSR1"):
                watchdog.send_signal(getattr(signal, name))
        (tmp_path / "go").touch()
        result = running.finish()
        until(lambda: not alive(watching))
    assert (result.code, result.out, result.err) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank{rank}.log" for rank in range(3)]


@pytest.mark.parametrize("victim", ["rank", "launcher", "watchdog"])
def test_it_dies_with_its_rank_and_the_rank_lives_without_it(victim: str, tmp_path: Path) -> None:
    body = """
        def entry():
            ready()
            time.sleep(600)
        """
    with launching(tmp_path, body) as running:
        running.wait_ready(3)
        ranks, watching = ranks_and_watchdogs(running)
        assert (len(ranks), len(watching)) == (3, 3)
        if victim == "watchdog":
            watching[1].kill()
            until(lambda: not alive([watching[1]]))
            assert alive(ranks) == ranks
            running.launcher.send_signal(signal.SIGTERM)
        else:
            (ranks[1] if victim == "rank" else psutil.Process(running.launcher.pid)).kill()
        running.launcher.wait()
        if victim == "launcher":
            until(lambda: not alive(ranks + watching))
        assert not alive(ranks + watching)


WAYS = [
    "while True: continue",
    # Native code that never lets go of Python's lock.
    "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "os.kill(os.getpid(), signal.SIGSTOP)",
    "(lambda f: f(f, 500))(lambda f, n: f(f, n - 1) if n else time.sleep(600))",
]


def test_stuck_ranks_are_named_with_their_stacks(tmp_path: Path) -> None:
    ways = "".join(f"\n            if RANK() == {rank}:\n                {way}" for rank, way in enumerate(WAYS))
    body = f"""{IMPORTS}
        def stuck():{ways}
        def entry():
            # All are to be ended by their watchdogs, however many of them have been already.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            heartbeat.training.enter(Phase.COMPUTE, 17)
            stuck()
            # Being asked for its stack wakes it: it comes no further than here.
            heartbeat.training.enter(Phase.IDLE)
        """
    result = launched(tmp_path, body, processes=len(WAYS), limits=Raw("WatchdogLimits(step=1)"))
    assert result.code == 5, result.err
    first, *rest = result.err.splitlines()
    assert re.fullmatch(r"tutti: rank \d made no progress for \d+ s in step 17 \(phase compute\), .*", first)
    named = int(first.split()[2])
    assert any('launcher.py", line' in line for line in rest)
    assert f"The stacks of all its threads are in {tmp_path / 'logs' / f'rank{named}.log'}" in rest[-1]
    for rank, way in enumerate(WAYS):
        record = failure.read_failure((tmp_path / "logs",), rank)
        assert record is not None
        assert (record.step, record.exit_code, record.signal) == (17, 5, signal.SIGKILL)
        where = (
            ", stopped by a signal" if "SIGSTOP" in way else ", in <lambda> (" if "lambda" in way else ", in stuck ("
        )
        assert where in record.message and "launcher.py" in record.traceback
        log = failure.log_path(tmp_path / "logs", rank).read_text()
        assert record.message in log and "hread 0x" in log


class Raw(str):
    """Text that is put into the launcher's script as it is."""

    __repr__ = str.__str__


def test_what_a_script_does_without_tutti_is_not_watched(tmp_path: Path) -> None:
    body = f"{IMPORTS}\n        def entry():\n            time.sleep(2.5)\n"
    result = launched(tmp_path, body, limits=Raw("WatchdogLimits(start=1, step=1, save=1)"))
    assert (result.code, result.err) == (0, "")
