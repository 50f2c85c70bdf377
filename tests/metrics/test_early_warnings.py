"""Warnings from before there is a listener reach it, in order and once."""

from __future__ import annotations

from tutti.metrics.listener import EarlyWarnings


def test_warnings_are_kept_until_there_is_a_listener() -> None:
    warnings, heard = EarlyWarnings(), list[str]()
    warnings("first")
    warnings("second")
    warnings.pass_to(heard.append)
    warnings("third")
    assert heard == ["first", "second", "third"]
