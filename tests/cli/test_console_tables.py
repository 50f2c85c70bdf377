"""Tables on standard output: columns that a program can split, and drawn ones where somebody looks."""

from __future__ import annotations

import io
import sys

import pytest

from tutti.cli.console_tables import print_table

HEADS, ROWS = ("fault", "at step"), [("kill rank 1", "25"), ("stop", "7")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEADS, ROWS)
    assert capsys.readouterr().out == "fault        at step\nkill rank 1       25\nstop               7\n"


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(HEADS, ROWS)
    assert "\x1b[1m" in terminal.getvalue() and "kill rank 1" in terminal.getvalue()
