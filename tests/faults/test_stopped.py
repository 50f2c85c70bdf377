"""Fault 5: a rank that is stopped is named by its watchdog, ended, and the run goes on to the same weights."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import starting, write_task
from tests.faults.survival import EVERY, MEMBERS, TASK, end, uninterrupted, when

pytestmark = [pytest.mark.faults, pytest.mark.row(5)]

LIMIT = 8


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.full) for turn in (1, 2))])
def test_a_stopped_rank_is_named_and_the_run_restarts(
    turn: int, tmp_path: Path, kept: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    member = MEMBERS[1 + (3 * seed + turn) % 5]
    devices, draw = member.devices(seed), random.Random(f"{member} {seed}")
    rank = draw.randrange(devices)
    fault = {"kind": "freeze", "rank": rank, "step": EVERY + draw.randrange(3 * EVERY)}
    write_task(tmp_path, TASK)
    words = member.words(devices, "--max-restarts", "2", "--step-timeout", str(LIMIT))
    with starting(tmp_path, *words, FAULT=json.dumps(fault)) as running:
        result = running.finish()
    assert result.code == 0, result.err
    assert re.search(rf"tutti: rank {rank} made no progress for \d+ s", result.err), result.err
    assert ", stopped by a signal" in result.err and "restarting, " in result.err
    record_property(
        f"recovery with a limit of {LIMIT} s, s", when(tmp_path, "began-0") - when(tmp_path, f"frozen-{rank}")
    )
    assert end(tmp_path) == uninterrupted(member, devices, kept)
