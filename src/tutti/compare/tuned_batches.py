"""Steps to a target at several batch sizes, with a learning rate tuned at each, over seeds.

Shallue et al. 2018, arXiv 1811.03600, in small: a grid of rates a batch, widened while the best one is at its edge, on
a seed of its own; then the best rate with other seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.compare.runs import Progress, Trial, finished, run_trial
from tutti.config.dotted import changed_fields
from tutti.config.optimizer_config import MuonConfig
from tutti.config.train_config import TrainConfig
from tutti.errors import ExitCode, TargetError, TuttiError, UsageError
from tutti.metrics.records import config_sha256, read_summary

TUNING_SEED = 1000
"""Added to the run's seed for runs that tune the rate, so that no seed that counts was tuned on."""

_FACTOR = 3.0
_WIDENED = 2


@dataclass(frozen=True)
class TunedBatch:
    """One batch size with the learning rate with which training needs the fewest samples to a target.

    Attributes:
        batch: samples in a global batch.
        rate: the learning rate with the fewest samples to the target.
        tuned: (rate, samples to the target) for each rate that was tried, by rate; ∞ where the run missed the target or
            diverged.
        edge: whether the best rate is still at an edge of the rates that were tried.
        runs: directories of the runs with the best rate, one a seed.
    """

    batch: int
    rate: float
    tuned: tuple[tuple[float, float], ...]
    edge: bool
    runs: tuple[Path, ...]


def check_batches(base: TrainConfig, batches: Sequence[int]) -> None:
    """Raise UsageError unless runs of several batch sizes to a target can be made from a configuration.

    There must be at least two different batch sizes of 1 or more, a target (``--until``), and no option that changes
    the batch size or scales the learning rate (``--batch-growth``, ``--regime-batch``, ``--lr-scale``).

    Args:
        base: the configuration, whose optimizer has the rate of its own batch size.
        batches: global batch sizes.
    """
    if len(set(batches)) < 2 or min(batches) < 1:
        raise UsageError(
            f"--batches is {' '.join(map(str, batches))}", remedy="give two sizes or more, such as --batches 32 128 512"
        )
    if base.target_text is None:
        raise UsageError("--batches needs a target", remedy="add --until NAME=VALUE, such as --until accuracy=0.9")
    if base.growth is not None or base.lr_rule.adaptive or base.regime_batch is not None or base.lr_scale != "none":
        raise UsageError(
            "--batches tunes the rate at each batch size",
            where="--lr-scale, --batch-growth or --regime-batch",
            remedy="leave these options out",
        )


def tuned_batches(
    task: str,
    base: TrainConfig,
    batches: Sequence[int],
    seeds: int,
    pool: Path,
    watch: Callable[[Trial, Progress], None],
) -> Iterator[TunedBatch]:
    """Train to a target (``--until``) at each batch size: a grid of learning rates, then the best with several seeds.

    The grid has three rates: the optimizer's rate times √(batch ÷ batch size of ``base``), a third of it and three
    times it. The best rate needs the fewest samples to the target. While it is the smallest or the largest, one more
    rate is tried beyond it, a factor of 3 away, twice at most. Finished runs are kept: the same call trains only the
    missing ones.

    Args:
        task: name of the task.
        base: configuration of the runs, with a target, and with an optimizer whose learning rate fits its batch size.
        batches: global batch sizes.
        seeds: number of runs with the best rate, with the seed of ``base`` and the numbers after it. The runs of the
            grid have another seed: that of ``base`` + 1000.
        pool: folder of the run directories.
        watch: called with a run and its progress while the run is trained.

    Yields:
        A ``TunedBatch`` for each batch size, smallest first, as soon as its runs are finished: ``batch``; ``rate``, the
        best rate; ``tuned``, pairs (rate, samples to the target, ∞ where it was missed) of the grid; ``edge``, whether
        the best rate is still the smallest or the largest of the grid; and ``runs``, the directories of the runs with
        the best rate, one a seed.

    Raises:
        TargetError: no rate reaches the target at a batch size.
        Preempted: a signal asked to stop; the same call continues.
        TuttiError: a run failed otherwise than by diverging, which counts as missing the target.
    """
    first = base.optimizer_choice.options.lr
    for batch in sorted(set(batches)):
        found: dict[int, float] = {}

        def reach(place: int, batch: int = batch) -> float:
            rate = first * math.sqrt(batch / base.batch_size) * _FACTOR**place
            trial = _trial(task, base, batch, rate, base.seed + TUNING_SEED, pool)
            return _samples(trial, task, watch)

        for place in (-1, 0, 1):
            found[place] = reach(place)
        for _ in range(_WIDENED):
            best = min(found, key=lambda place: (found[place], abs(place)))
            if min(found) < best < max(found) or math.isinf(found[best]):
                break
            place = best - 1 if best == min(found) else best + 1
            found[place] = reach(place)
        best = min(found, key=lambda place: (found[place], abs(place)))
        rates = {place: first * math.sqrt(batch / base.batch_size) * _FACTOR**place for place in sorted(found)}
        if math.isinf(found[best]):
            raise TargetError(
                f"no rate reached {base.target_text} at batch {batch}",
                why="rates tried: " + ", ".join(f"{rate:.3g}" for rate in rates.values()),
                remedy="train longer (--epochs), give another --optimizer rate, or a lower target",
            )
        trials = [_trial(task, base, batch, rates[best], base.seed + seed, pool) for seed in range(seeds)]
        for trial in trials:
            _samples(trial, task, watch)
        yield TunedBatch(
            batch=batch,
            rate=rates[best],
            tuned=tuple((rates[place], found[place]) for place in rates),
            edge=best in (min(found), max(found)),
            runs=tuple(trial.directory for trial in trials),
        )


def _trial(task: str, base: TrainConfig, batch: int, rate: float, seed: int, pool: Path) -> Trial:
    changes = [f"optimizer.lr={rate:.9g}"]
    chosen = base.optimizer_choice.options
    if isinstance(chosen, MuonConfig):
        changes.append(f"optimizer.adam_lr={chosen.adam_lr * rate / chosen.lr:.9g}")
    optimizer = changed_fields({"optimizer": base.optimizer}, changes)["optimizer"]
    config = dataclasses.replace(base, batch_size=batch, seed=seed, optimizer=optimizer)
    name = f"{Path(task.partition(':')[0]).stem}-{batch}-{config_sha256(config)[:12]}"
    return Trial(f"batch {batch}, rate {rate:.3g}", seed, config, pool / name)


def _samples(trial: Trial, task: str, watch: Callable[[Trial, Progress], None]) -> float:
    """Train a run unless it has ended, and return its samples to the target; ∞ where it missed it or diverged."""
    diverged = read_summary(trial.directory).get("exit_code") == ExitCode.NON_FINITE
    if not finished(trial) and not diverged:
        try:
            run_trial(trial, task, lambda progress: watch(trial, progress))
        except TuttiError as error:
            if error.exit_code is not ExitCode.NON_FINITE:
                raise
    samples = (read_summary(trial.directory).get("target") or {}).get("samples")
    return math.inf if samples is None else float(samples)
