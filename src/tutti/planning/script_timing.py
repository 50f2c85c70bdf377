"""Time the first training steps of a script with the options of a plan, in each rank of a job of ``tutti run``.

``tutti plan SCRIPT --verify K`` starts ``tutti run -m tutti.planning.script_timing RESULT OPTIONS SCRIPT …``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from tutti.device import synchronize
from tutti.errors import UsageError, counted
from tutti.launcher import context
from tutti.planning.script_training import EnoughSteps, train_script
from tutti.train.run import Run
from tutti.train.run_options import RunOptions

WARM_STEPS = 5
"""First steps of a script, which are slower and not timed."""
TIMED_STEPS = 20
"""Steps that are timed."""
_BLOCK, _LEAST_BLOCKS = 4, 2


class StepClock:
    """Callback that times the first steps of a run in blocks of steps, and then ends the script.

    Attributes:
        ranks: ``all``: the run calls the callback on every rank.
        taken: number of steps so far.
    """

    ranks = "all"

    def __init__(self) -> None:
        self.taken = 0
        self._marks: list[tuple[float, int]] = []
        self._run: Run | None = None

    def on_step_end(self, run: Run) -> None:
        """Count a step, and record the time after each block of steps, once an accelerator's kernels have ended.

        Args:
            run: the script's run.

        Raises:
            EnoughSteps: the last step has been timed.
        """
        self.taken, self._run = self.taken + 1, run
        late = self.taken - WARM_STEPS
        if late >= 0 and late % _BLOCK == 0:
            synchronize(context.current().device)
            self._marks.append((time.perf_counter(), run.samples))
        if late >= TIMED_STEPS:
            raise EnoughSteps

    def timing(self, script: str) -> dict[str, Any]:
        """Return the measured seconds of a step, with their error and the devices, as a JSON object.

        Args:
            script: path of the script, for messages.

        Returns:
            ``seconds`` of a step of a whole global batch, the median over blocks of steps (a block may include an
            evaluation or save of the script); ``spread``, the standard error of its natural logarithm; ``steps``, the
            number of steps timed; ``devices``, the number of ranks; and ``device``, the type of their devices.

        Raises:
            UsageError: the script has trained too few steps.
        """
        blocks = list(pairwise(self._marks))
        if self._run is None or len(blocks) < _LEAST_BLOCKS:
            raise UsageError(
                f"the script has trained {counted(self.taken, 'step')}, too few to time",
                where=script,
                remedy=f"let it train {WARM_STEPS + _BLOCK * _LEAST_BLOCKS} steps or more",
            )
        batch = self._run.feed.contract.batch
        each = [(end - start) * batch / (after - before) for (start, before), (end, after) in blocks]
        spread = statistics.stdev(map(math.log, each)) / math.sqrt(len(each))
        return {
            "seconds": statistics.median(each),
            "spread": spread,
            "steps": len(blocks) * _BLOCK,
            "devices": context.size(),
            "device": context.current().device.type,
        }


def time_script(script: str, arguments: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Train a script for a few steps with other options than its own, and time its steps. Collective over all ranks.

    The script's checkpoints are neither read nor written.

    Args:
        script: path of the script, which calls ``tutti.prepare``.
        arguments: its command-line arguments.
        options: options of ``tutti.prepare`` that replace the script's own, such as ``strategy`` and ``batch_size``.

    Returns:
        The result of ``StepClock.timing``: ``seconds`` of a step, ``spread`` (standard error of their natural
        logarithm), ``steps`` that were timed, number of ``devices``, and type of a ``device``.

    Raises:
        UsageError: the script raises, exits with another code than 0, or trains too few steps.
        TuttiError: the run is refused, or training fails.
    """
    clock = StepClock()

    def change(dataset: Any, given: RunOptions) -> tuple[Any, RunOptions]:
        chosen = dict(options)
        if isinstance(dataset, DataLoader) and (batch := chosen.pop("batch_size", None)) is not None:
            dataset = _of_batch(dataset, batch, script)
        return dataset, dataclasses.replace(given, **chosen, callbacks=[*given.callbacks, clock])

    train_script(script, arguments, change, f"tutti plan {script} --verify 1", checkpoints=False)
    return clock.timing(script)


def _of_batch(loader: DataLoader[Any], batch: int, script: str) -> DataLoader[Any]:
    """Return a ``DataLoader`` with another batch size; raise UsageError where a batch sampler of its own decides it."""
    if loader.batch_size is None:
        raise UsageError(
            f"the script's batches cannot be made ones of {batch}",
            where=script,
            why="its DataLoader has a batch sampler, which decides them",
            remedy="give the batch of the script to --batch-size, or leave out --verify",
        )
    return DataLoader(
        loader.dataset,
        batch_size=batch,
        sampler=None if isinstance(loader.dataset, IterableDataset) else loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )


def _main(result: str, options: str, script: str, *arguments: str) -> None:
    found = time_script(script, arguments, json.loads(options))
    if context.rank() == 0:
        Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
