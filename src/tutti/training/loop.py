"""The loop around the step: epochs, schedule, evaluation, and what is told to listeners."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tutti.data.source import Source
from tutti.errors import Preempted
from tutti.training.checkpoint import Checkpoints
from tutti.training.listener import EvalRecord, Header, Listener, Pace
from tutti.training.run import Evaluation, Run
from tutti.types import StepRecord

_WINDOW = 30


@dataclass
class Means:
    """Means over samples of what the steps of one epoch reported."""

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, count: float, metrics: Mapping[str, float]) -> None:
        """Take one step's means over ``count`` samples."""
        self.loss += loss * count
        self.count += count
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * count

    def summary(self) -> dict[str, float]:
        """``{"loss": …, "accuracy": …}``."""
        count = self.count or 1.0
        return {"loss": self.loss / count, **{name: value / count for name, value in self.metrics.items()}}


class Speed:
    """Samples per second of training: over the last steps, and over the whole run without evaluations."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._start = total, done, time.perf_counter()
        self._marks: deque[tuple[float, int]] = deque([(self._start, done)], maxlen=_WINDOW + 1)
        self._paused = 0.0

    def mark(self, samples: int) -> Pace:
        """A step has ended; ``samples`` are consumed so far."""
        now = time.perf_counter() - self._paused
        self._marks.append((now, samples))
        (before, then), elapsed = self._marks[0], now - self._start
        rate = (samples - then) / max(now - before, 1e-9)
        return Pace(rate, elapsed, (self._total - samples) / max(rate, 1e-9))

    def pause(self, since: float) -> None:
        """Do not count the time since ``since``."""
        self._paused += time.perf_counter() - since

    def overall(self) -> tuple[float, float]:
        """Samples per second, and seconds, from the first step to the last."""
        now, samples = self._marks[-1]
        seconds = now - self._start
        return (samples - self._done) / max(seconds, 1e-9), seconds


@dataclass(frozen=True)
class Plan:
    """How long to train, and after how many steps to evaluate and to save (None: only at the end; never)."""

    total: int
    evaluate: int | None = None
    save: int | None = None


def train(
    run: Run,
    plan: Plan,
    held_out: Source | None,
    header: Header,
    listener: Listener,
    saver: Checkpoints | None = None,
    means: Means | None = None,
) -> dict[str, Any]:
    """Train from where ``run`` is to the end of the plan.

    Args:
        run: fresh, or restored from a checkpoint.
        plan: how long, and what in between.
        held_out: samples to evaluate on.
        header: told to the listener first.
        listener: told of every step.
        saver: saves as planned, at the end, and before stopping when a rank was asked to stop.
        means: of the epoch that a restored run was in.

    Returns:
        What the run adds to the summary: steps, updates, samples, train and eval means, speed, hash.

    Raises:
        Preempted: a rank was asked to stop; the state is saved if there is a saver.
    """
    listener.started(header)
    contract, per_epoch = run.feed.contract, run.feed.contract.steps_per_epoch
    speed = Speed(contract.consumed(plan.total), contract.consumed(run.clock))
    evaluated, skipped = None, 0
    means = means or Means()
    while run.clock < plan.total:
        number, start = divmod(run.clock, per_epoch)
        means = means if start else Means()
        for batch in run.epoch(number, start):
            run.step(batch)
            skipped += _report(run, number, speed, means, listener)
            if held_out is not None and _due(run.clock, plan.evaluate, plan.total):
                evaluated = _evaluate(run, held_out, number, speed, listener)
            _save(run, plan, means, saver, speed)
            if run.clock == plan.total:
                break
    if saver is not None:
        saver.wait()
    if evaluated is None and held_out is not None:
        evaluated = _evaluate(run, held_out, max(run.clock - 1, 0) // per_epoch, speed, listener)
    rate, seconds = speed.overall()
    return {
        "epochs": contract.consumed(run.clock) / contract.dataset,
        "steps": run.clock,
        "updates": run.updates,
        "skipped": skipped,
        "samples": contract.consumed(run.clock),
        "train": means.summary(),
        "eval": None if evaluated is None else {"loss": evaluated.loss, **evaluated.metrics},
        "samples_per_second": rate,
        "seconds": seconds,
        "weights_sha256": run.weights_sha256(),
    }


def _report(run: Run, epoch: int, speed: Speed, means: Means, listener: Listener) -> int:
    """Tell of the step just made; 1 if it was skipped."""
    agreed, updated = run.agreed, run.updated
    if agreed is None or updated is None:
        raise ValueError("no step has been made")
    means.add(agreed.loss, agreed.count, agreed.metrics)
    samples = run.feed.contract.consumed(run.clock)
    groups = [group for optimizer in run.exchange.optimizers for group in optimizer.param_groups]
    record = StepRecord(
        step=run.clock,
        epoch=epoch + 1,
        samples=samples,
        updates=run.updates,
        loss=agreed.loss,
        metrics=agreed.metrics,
        grad_norm=agreed.grad_norm,
        lr=float(groups[0]["lr"]) if groups else None,
        skipped=updated.skipped,
    )
    if updated.skipped:
        where = ", ".join(updated.nonfinite[:3])
        kept = "weights are unchanged" if not updated.updates else "the workers concerned kept their weights"
        listener.warned(f"step {run.clock} skipped: the gradient of {where} is not finite; {kept}")
    listener.stepped(record, speed.mark(samples))
    return int(updated.skipped)


def _due(clock: int, every: int | None, total: int) -> bool:
    return clock == total or (every is not None and clock % every == 0)


def _save(run: Run, plan: Plan, means: Means, saver: Checkpoints | None, speed: Speed) -> None:
    """Save where it is due; stop where a rank was asked to."""
    stop = run.agreed is not None and run.agreed.stop
    if saver is not None and (stop or (plan.save is not None and _due(run.clock, plan.save, plan.total))):
        start = time.perf_counter()
        saver.save({"means": asdict(means)})
        speed.pause(start)
    if stop:
        if saver is not None:
            saver.wait()
        saved = "state saved, continue with --resume" if saver is not None else "nothing was saved"
        raise Preempted("the run was asked to stop", where=f"step {run.clock}", remedy=saved)


def _evaluate(run: Run, held_out: Source, epoch: int, speed: Speed, listener: Listener) -> Evaluation:
    start = time.perf_counter()
    evaluated = run.evaluate(held_out)
    record = EvalRecord(run.clock, epoch + 1, evaluated.loss, evaluated.metrics, evaluated.samples)
    listener.evaluated(record)
    speed.pause(start)
    return evaluated
