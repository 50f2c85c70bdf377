"""Warnings of lost ranks: correct from the first step on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.train.lost_ranks import LostRanks


def run_that_lost(rank: int) -> Any:
    """A run of 4 workers on 2 ranks, before its first update has been recorded."""
    world = SimpleNamespace(lost_ranks=lambda: {rank: "was killed by SIGKILL"})
    gradient_sync = SimpleNamespace(facts=lambda: {"servers": [{"steps": [1, 1, 0, 0]}]})
    contract = SimpleNamespace(batch=8, mine=lambda rank: range(2 * rank, 2 * rank + 2))
    contract.worker = lambda batch, worker: range(2 * worker, 2 * worker + 2)
    return SimpleNamespace(
        context=SimpleNamespace(comms=SimpleNamespace(world=world)),
        gradient_sync=gradient_sync,
        feed=SimpleNamespace(contract=contract),
        updated=None,
    )


@pytest.mark.parametrize(
    ("remade", "consequence"),
    [(True, "make its steps as well"), (False, "4 of 8 samples, is not trained on")],
)
def test_the_consequence_is_known_in_the_first_step(remade: bool, consequence: str) -> None:
    told: list[str] = []
    lost = LostRanks(run_that_lost(1), remade, told.append)
    lost.look()
    lost.look()
    [warning] = told
    assert warning.startswith("rank 1 was killed by SIGKILL after step 0") and consequence in warning
    assert lost.found == [{"rank": 1, "workers": [2, 3], "steps": 0, "cause": "was killed by SIGKILL"}]
