"""A run that does not fit says so, and what needs less; starting it again would change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.commands import complaint, tutti, write_task
from tutti.errors import no_memory

GREEDY = """
def loss(model, batch):
    if RANK == {rank}:
        torch.empty(1 << 60, dtype=torch.uint8)
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
"""


@pytest.mark.parametrize("devices", [1, 3])
def test_what_does_not_fit_is_refused_with_what_needs_less(devices: int, tmp_path: Path) -> None:
    own = write_task(tmp_path, GREEDY.format(rank=devices - 1))
    words = ("--batch-size", "12", "--devices", str(devices), "--out", "out", "--max-restarts", "2")
    result = tutti(tmp_path, "train", own, *words)
    assert result.code == 2, result.err
    said = "\n".join(complaint(result))
    assert "there is not enough memory" in said and "can't allocate" in said and "strategies sharded" in said
    assert "own.py:" in said
    log = tmp_path / "out" / "logs" / f"rank{devices - 1}.log"
    assert devices == 1 or "torch.empty(1 << 60" in log.read_text(), "where it was asked for"
    assert "report it" not in result.err and "restarting" not in result.err


@pytest.mark.parametrize(("error", "there"), [(MemoryError(), True), (RuntimeError("shapes"), False)])
def test_other_errors_are_left_alone(error: Exception, there: bool) -> None:
    assert (no_memory(error) is not None) == there


@pytest.mark.parametrize("text", ["can't start new thread", "Resource temporarily unavailable"])
def test_a_thread_that_cannot_be_started_names_the_limits(text: str) -> None:
    told = no_memory(RuntimeError(text))
    assert told is not None and "ulimit -u" in str(told)
    assert no_memory(OSError(text)) is None
