"""Ranks that were killed and that a run goes on without: which, after which step, and what that means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.training.steps import Steps


class Losses:
    """Of one run, on rank 0.

    Attributes:
        found: a line for each lost rank, as in ``summary.json``.
        tell: takes a text.
    """

    def __init__(self, run: Steps) -> None:
        self._run = run
        self.found: list[dict[str, Any]] = []
        self.tell: Callable[[str], None] = lambda text: print(f"tutti: {text}", file=sys.stderr, flush=True)

    def look(self) -> None:
        """Tell of those that were lost since the last look."""
        lost = self._run.setting.comms.world.lost()
        if len(lost) == len(self.found):
            return
        known, contract = {line["rank"] for line in self.found}, self._run.feed.contract
        [first, *_] = self._run.exchange.facts()["servers"]
        for rank in sorted(lost.keys() - known):
            workers = list(contract.mine(rank))
            steps = max(first["steps"][worker] for worker in workers)
            share = sum(len(contract.worker(contract.batch, worker)) for worker in workers)
            self.found.append({"rank": rank, "workers": workers, "steps": steps, "cause": lost[rank]})
            missed = f"its share of every further batch, {share} of {contract.batch} samples, is not trained on"
            if self._run.updated is not None and self._run.updated.clock is not None:
                missed = "make its steps as well"
            self.tell(f"rank {rank} {lost[rank]} after step {steps}: the others go on without it, and {missed}")
