"""Warnings from before there is a listener reach it, in order and once; an error of one listener stops no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.metrics.listener import EarlyWarnings, Listeners


def test_warnings_are_kept_until_there_is_a_listener() -> None:
    warnings, heard = EarlyWarnings(), list[str]()
    warnings("first")
    warnings("second")
    warnings.pass_to(heard.append)
    warnings("third")
    assert heard == ["first", "second", "third"]


def test_a_listener_that_cannot_close_leaves_none_open() -> None:
    closed: list[Any] = []

    def fails() -> None:
        closed.append("first")
        raise OSError("the disk is full")

    first, second = SimpleNamespace(close=fails), SimpleNamespace(close=lambda: closed.append("second"))
    with pytest.raises(OSError, match="the disk is full"):
        Listeners([first, second]).close()  # type: ignore[list-item]
    assert closed == ["first", "second"]
