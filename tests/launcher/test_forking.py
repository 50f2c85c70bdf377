"""Children that are stuck before their first line are ended, and others take their place."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tutti.launcher import forking


def forks(monkeypatch: pytest.MonkeyPatch, stuck: int) -> list[int]:
    """Have the first children wait for ever in ``os.fork``; the list gets all children."""
    fork, made = os.fork, list[int]()

    def wrapped() -> int:
        pid = fork()
        if pid == 0 and len(made) < stuck:
            while True:
                signal.pause()
        made.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", wrapped)
    monkeypatch.setattr(forking, "_PATIENCE", 0.3)
    return made


def opened(fork: Callable[[], int]) -> tuple[int, int]:
    """Fork a child; its number, and the number of descriptors that it has and this process has not."""
    before = set(os.listdir("/proc/self/fd"))
    pid = fork()
    if pid == 0:
        os._exit(40 + len(set(os.listdir("/proc/self/fd")) - before))
    return pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 40


@pytest.mark.parametrize("stuck", [0, 2])
def test_a_stuck_child_is_replaced(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Libraries that other tests have imported open and close descriptors of their own in forked children.
    _, of_libraries = opened(os.fork)
    made = forks(monkeypatch, stuck)
    before = set(os.listdir("/proc/self/fd"))
    pid, found = opened(forking.fork)
    assert found == of_libraries, "the pipe is closed in the child, too"
    assert len(made) == stuck + 1 and made[-1] == pid
    assert set(os.listdir("/proc/self/fd")) == before
    assert not any(map(psutil.pid_exists, made))


def test_none_that_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = forks(monkeypatch, 100)
    with pytest.raises(OSError, match="of 5 forked processes, none started"):
        forking.fork()
    assert len(made) == 5 and not any(map(psutil.pid_exists, made))


def test_a_child_that_ends_at_once_is_a_child() -> None:
    pid = forking.fork()
    if pid == 0:
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_signal_during_a_fork_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own functions that run at a fork, such as those of logging, drop what a signal's handler raises."""
    fork, lost, made = os.fork, list[str](), list[int]()

    def wrapped() -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            lost.append("SIGINT")
        made.append(fork())
        return made[0]

    monkeypatch.setattr(os, "fork", wrapped)
    try:
        if forking.fork() == 0:
            os._exit(3)
    except KeyboardInterrupt:
        pass
    else:
        lost.append("no handler has run")
    os.waitpid(made[0], 0)
    assert not lost
