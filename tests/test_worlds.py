"""``worlds.Pool`` signals the processes of its ranks, and no process that has got the id of one later."""

from __future__ import annotations

import os

import pytest

from tests import worlds


def rank() -> int:
    return int(os.environ["RANK"])


def test_a_closed_pool_sends_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = worlds.Pool(2)
    sent: list[int] = []
    kill = os.killpg

    def recorded(pid: int, number: int) -> None:
        sent.append(pid)
        kill(pid, number)

    monkeypatch.setattr(os, "killpg", recorded)
    assert pool.run(rank) == [0, 1]
    pool.close()
    assert len(sent) == 2
    pool.close()
    assert len(sent) == 2
