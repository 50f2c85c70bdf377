"""Ranks that were killed while the run continued: rank, step and consequence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tutti.errors import counted

if TYPE_CHECKING:
    from tutti.train.run import Run


class LostRanks:
    """Records the ranks that were killed while the run continues without them, and warns of each; used on rank 0.

    Only runs with asynchronous parameter servers continue without a lost rank. The constructor searches nothing:
    ``look``, which the run calls after each step and at its end, adds the ranks that were lost since its last call.

    Args:
        run: the run, whose parameter servers know how many steps each worker made.
        steps_remade: whether the other ranks make the steps of a lost rank as well (``steps=all``); otherwise the
            rank's share of every further batch is not trained on. Changes only the text of the warning.
        warn: receives the text of each warning; None prints to stderr.

    Attributes:
        found: one dict for each lost rank, empty at first, with the keys ``rank``, ``workers`` (indices of its logical
            data-parallel workers, which are fixed shares of the global batch), ``steps`` (largest number of steps that
            one of these workers made) and ``cause`` (text).
    """

    def __init__(self, run: Run, steps_remade: bool, warn: Callable[[str], None] | None) -> None:
        self._run, self._steps_remade = run, steps_remade
        self._warn = warn or (lambda text: print(f"tutti: {text}", file=sys.stderr, flush=True))
        self.found: list[dict[str, Any]] = []

    def look(self) -> None:
        """Find ranks of the run that were killed since the last call; append a dict for each to ``found``, and warn.

        The run calls this on rank 0 after each step and at its end. Not collective; if a rank was lost, rank 0 asks the
        parameter servers for the steps of its workers and waits for their answers. Keys of a dict: ``rank``,
        ``workers`` (list of the indices of the rank's logical data-parallel workers, which are fixed shares of the
        global batch), ``steps`` (largest number of steps that one of these workers made) and ``cause`` (text).
        """
        lost = self._run.context.comms.world.lost_ranks()
        if len(lost) == len(self.found):
            return
        known, contract = {line["rank"] for line in self.found}, self._run.feed.contract
        [first, *_] = self._run.gradient_sync.facts()["servers"]
        for rank in sorted(lost.keys() - known):
            workers = list(contract.mine(rank))
            steps = max(first["steps"][worker] for worker in workers)
            share = sum(len(contract.worker(contract.batch, worker)) for worker in workers)
            self.found.append({"rank": rank, "workers": workers, "steps": steps, "cause": lost[rank]})
            missed = (
                f"its share of every further batch, {share} of {counted(contract.batch, 'sample')}, is not trained on"
            )
            if self._steps_remade:
                missed = "make its steps as well"
            self._warn(
                f"rank {rank} {lost[rank]} after step {steps}: the other ranks continue without it, and {missed}"
            )
