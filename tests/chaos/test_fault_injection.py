"""What a fault may cost, as far as that follows from what is on the disk when it strikes."""

from __future__ import annotations

import pytest

from tutti.chaos.fault_injection import Rules
from tutti.chaos.faults import Fault


@pytest.mark.parametrize(
    ("kind", "since_full", "most"),
    [
        ("kill", None, 20),
        ("corrupt", None, 30),
        ("slow", None, 0),
        ("fill", None, None),
        ("kill", 0, None),
        ("kill", 1, 20),
        # The newest is damaged: what the run falls back on is the one before, with a gap between them.
        ("corrupt", 1, None),
        ("corrupt", 2, 30),
        ("terminate", 0, 0),
    ],
)
def test_steps_that_a_fault_may_cost(kind: str, since_full: int | None, most: int | None) -> None:
    assert Rules(every=10).most_lost(Fault(kind), since_full) == most  # type: ignore[arg-type]
    assert Rules().most_lost(Fault(kind), since_full) in (None, 0)  # type: ignore[arg-type]
