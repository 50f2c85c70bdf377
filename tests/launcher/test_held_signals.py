"""Signals wait for imports, one signal long."""

from __future__ import annotations

import signal
import threading

import pytest

from tutti.launcher.held_signals import held_signals


def test_the_first_signal_waits_and_the_second_does_not() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGINT)
        reached.append("first")
        signal.raise_signal(signal.SIGINT)
        reached.append("second")
    assert reached == ["first"]
    with pytest.raises(KeyboardInterrupt), held_signals():
        signal.raise_signal(signal.SIGINT)
        reached.append("end")
    assert reached == ["first", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ignored_signals_and_other_threads_are_left_alone() -> None:
    seen = []

    def look() -> None:
        with held_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]
