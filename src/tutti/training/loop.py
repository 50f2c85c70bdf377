"""The loop around the step: epochs, schedule, evaluation, and what is told to listeners."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tutti.data.epochs import Epochs
from tutti.data.source import Source
from tutti.errors import CheckpointError, Preempted
from tutti.optim.loss_scale import LossScale
from tutti.spec import Duration
from tutti.state.manifest import REMEDY
from tutti.training.checkpoint import Checkpoints
from tutti.training.listener import EvalRecord, Header, Listener, Pace
from tutti.training.profile import Window
from tutti.training.run import Run
from tutti.types import StepRecord
from tutti.world import heartbeat
from tutti.world.heartbeat import Phase

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

    def facts(self) -> dict[str, Any]:
        """As JSON can hold it: what is not finite becomes null."""
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        return {"loss": _finite(self.loss), "count": _finite(self.count), "metrics": metrics}

    @classmethod
    def saved(cls, facts: Mapping[str, Any]) -> Means:
        """Those that a checkpoint keeps; null is NaN again. Raises CheckpointError where they are no numbers."""
        try:
            kept = facts["means"]
            metrics = {str(name): _number(value) for name, value in kept["metrics"].items()}
            return cls(_number(kept["loss"]), _number(kept["count"]), metrics)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError("the checkpoint's 'means' are no numbers", why=repr(error), remedy=REMEDY) from error

    def summary(self) -> dict[str, float]:
        """``{"loss": …, "accuracy": …}``."""
        count = self.count or 1.0
        return {"loss": self.loss / count, **{name: value / count for name, value in self.metrics.items()}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


class Speed:
    """Samples per second of training: over the last steps, and over the whole run without evaluations.

    Where the model is compiled the first step is counted as start-up: it takes as long as compiling does.
    """

    def __init__(self, total: float, done: int, compiled: bool = False) -> None:
        self._total, self._start = total, time.perf_counter()
        self._first, self._startup = (self._start, done), compiled
        self._marks: deque[tuple[float, int]] = deque([(self._start, done)], maxlen=_WINDOW + 1)
        self._paused = 0.0

    def mark(self, samples: int) -> Pace:
        """A step has ended; ``samples`` are consumed so far."""
        now = time.perf_counter() - self._paused
        self._marks.append((now, samples))
        (before, then), elapsed = self._marks[0], now - self._start
        rate = (samples - then) / max(now - before, 1e-9)
        if self._startup:
            self._startup, self._first = False, (now, samples)
            self._marks.clear()
            self._marks.append(self._first)
        return Pace(rate, elapsed, (self._total - samples) / max(rate, 1e-9))

    def elapsed(self) -> float:
        """Seconds until now."""
        return time.perf_counter() - self._paused - self._start

    def pause(self, since: float) -> None:
        """Do not count the time since ``since``."""
        self._paused += time.perf_counter() - since

    def overall(self) -> dict[str, float]:
        """Seconds to the last step, those of them that were start-up, and samples per second of the others."""
        (now, samples), (begun, done) = self._marks[-1], self._first
        return {
            "samples_per_second": (samples - done) / max(now - begun, 1e-9),
            "seconds": now - self._start,
            "startup_seconds": begun - self._start,
        }


Length: TypeAlias = int | Duration
"""Steps; or samples or whole epochs, where only the end of a stream will tell how many steps they are."""


@dataclass(frozen=True)
class Plan:
    """How long to train, and how often to evaluate and to save (None: only at the end; never)."""

    total: Length
    evaluate: Length | None = None
    save: Length | None = None


def passed(length: Length, run: Run) -> int:
    """How many times ``length`` fits into what ``run`` has done."""
    if isinstance(length, int):
        return run.clock // length
    return int((run.at.epoch if length.unit == "ep" else run.samples) // length.value)


def ended(length: Length, run: Run) -> bool:
    """Whether ``run`` is as long as that."""
    return run.progress >= length if isinstance(length, int) else passed(length, run) > 0


class Due:
    """Something that happens every so often, and at the end."""

    def __init__(self, every: Length | None, total: Length, run: Run) -> None:
        self._every, self._total, self._run = every, total, run
        self._count = 0 if every is None else passed(every, run)

    def __call__(self) -> bool:
        """Whether the step just made is one after which it happens."""
        before, self._count = self._count, 0 if self._every is None else passed(self._every, self._run)
        return self._count > before or ended(self._total, self._run)


def train(
    run: Run,
    plan: Plan,
    held_out: Source | None,
    header: Header,
    listener: Listener,
    saver: Checkpoints | None = None,
    means: Means | None = None,
    windows: Sequence[Window] = (),
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
        windows: steps to profile or to trace.

    Returns:
        What the run adds to the summary: steps, updates, samples, train and eval means, speed, hash.

    Raises:
        Preempted: a rank was asked to stop; the state is saved if there is a saver.
    """
    listener.started(header)
    contract = run.feed.contract
    total = math.inf if run.adascale is not None else _samples(plan.total, run.feed.epochs)
    speed = Speed(total, run.samples, run.setting.compile != "none")
    to_evaluate, to_save = (Due(every, plan.total, run) for every in (plan.evaluate, plan.save))
    evaluated, skipped = None, 0
    means = means or Means()
    _look(windows, speed)
    while not ended(plan.total, run):
        number, start = run.at
        means = means if start else Means()
        for batch in run.epoch(number, start):
            run.step(batch)
            heartbeat.training.enter(Phase.REPORT)
            _look(windows, speed)
            epoch = number if run.taken == run.clock else run.feed.epochs.place(max(run.clock - 1, 0))[0]
            skipped += _report(run, epoch, speed, means, listener)
            # Before the save, which keeps the values of its very step.
            fresh = None
            if to_evaluate() and held_out is not None:
                evaluated = fresh = _evaluate(run, held_out, epoch, speed, listener)
            _save(run, to_save() and plan.save is not None, means, fresh, saver, speed)
            if ended(plan.total, run):
                break
    if saver is not None:
        saver.wait()
    heartbeat.training.enter(Phase.END)
    if evaluated is None and held_out is not None:
        evaluated = _evaluate(run, held_out, max(run.at.epoch - (run.at.batch == 0), 0), speed, listener)
    return {
        "epochs": run.samples / contract.dataset if contract.dataset is not None else run.at.epoch,
        "steps": run.clock,
        "updates": run.updates,
        "skipped": skipped,
        "loss_scale": None if run.loss_scale is None else run.loss_scale.value,
        "samples": run.samples,
        "train": means.summary(),
        "eval": None if evaluated is None else evaluated.values,
        **_chosen(run, saver),
        **run.exchange.facts(),
        **speed.overall(),
        "weights_sha256": run.weights_sha256(),
        "diagnoses": run.checks.diagnoses.found,
    }


def _look(windows: Sequence[Window], speed: Speed) -> None:
    """Begin or end what is watched where it is time to; writing it is not counted as training."""
    if windows:
        start = time.perf_counter()
        for window in windows:
            window.look()
        speed.pause(start)


def _samples(total: Length, epochs: Epochs) -> float:
    """Samples in the whole run; infinite where only the end of a stream will tell."""
    if isinstance(total, Duration):
        return total.value if total.unit == "sa" else math.inf
    return epochs.consumed(total) if epochs.first.dataset is not None else total * epochs.first.batch


def _report(run: Run, epoch: int, speed: Speed, means: Means, listener: Listener) -> int:
    """Tell of the step just made; 1 if it was skipped."""
    agreed, updated = run.agreed, run.updated
    if agreed is None or updated is None:
        raise ValueError("no step has been made")
    means.add(agreed.loss, agreed.count, agreed.metrics)
    groups = [group for optimizer in run.exchange.optimizers for group in optimizer.param_groups]
    record = StepRecord(
        step=run.clock,
        epoch=epoch + 1,
        samples=run.samples,
        updates=run.updates,
        loss=agreed.loss,
        metrics=agreed.metrics,
        grad_norm=agreed.grad_norm,
        lr=float(groups[0]["lr"]) if groups else None,
        skipped=updated.skipped,
        loss_scale=None if run.loss_scale is None else run.loss_scale.used,
        adascale={} if run.adascale is None else run.adascale.values(),
    )
    if updated.skipped:
        where = ", ".join(updated.nonfinite[:3])
        kept = "weights are unchanged" if not updated.updates else "the workers concerned kept their weights"
        text = f"step {run.clock} skipped: the gradient of {where} is not finite{_scales(run.loss_scale)}; {kept}"
        listener.warned(text)
    listener.stepped(record, speed.mark(run.samples))
    return int(updated.skipped)


def _scales(scale: LossScale | None) -> str:
    """Which loss scale a gradient overflowed at, and what the next one is."""
    if scale is None:
        return ""
    falls = f", the next is {scale.value:g}" if scale.value != scale.used else ""
    return f" at loss scale {scale.used:g}{falls}"


def _chosen(run: Run, saver: Checkpoints | None) -> dict[str, Any]:
    """Besides the last weights: steps' worth, the weights' average, the best checkpoint, lost ranks. Collective."""
    found: dict[str, Any] = {}
    if run.losses is not None:
        run.losses.look()
        found |= {"lost_ranks": run.losses.found} if run.losses.found else {}
    if run.adascale is not None:
        mean = run.adascale.tau / run.updates if run.updates else None
        found["adascale"] = {**run.adascale.values(), "gain": mean}
    if run.average is not None:
        found["eval_weights"] = "ema"
        found["ema_sha256"] = run.weights_sha256(averaged=True)
    if saver is not None and saver.best is not None:
        found["best"] = saver.best_kept()
    return found


def _save(
    run: Run, due: bool, means: Means, evaluated: EvalRecord | None, saver: Checkpoints | None, speed: Speed
) -> None:
    """Save where it is due, or what may be the best; stop where a rank was asked to."""
    stop = run.agreed is not None and run.agreed.stop
    if saver is not None and (stop or due or (saver.best is not None and evaluated is not None)):
        start = time.perf_counter()
        saver.save({"means": means.facts()}, None if evaluated is None else evaluated.values)
        speed.pause(start)
    if stop:
        if saver is not None:
            saver.wait()
        saved = "state saved, continue with --resume" if saver is not None else "nothing was saved"
        raise Preempted("the run was asked to stop", where=f"step {run.clock}", remedy=saved)


def _evaluate(run: Run, held_out: Source, epoch: int, speed: Speed, listener: Listener) -> EvalRecord:
    """The model's values; where an average of the weights is kept, the average's and then the model's own."""
    # Where ranks do not keep step the first waits for the last: that is training's time, and not evaluation's.
    run.together("an evaluation")
    start = time.perf_counter()
    seconds = speed.elapsed()
    first = run.evaluate(held_out)
    raw = run.evaluate(held_out, averaged=False).values if first.averaged else None
    record = EvalRecord(run.clock, epoch + 1, first.loss, first.metrics, first.samples, raw, seconds)
    listener.evaluated(record)
    speed.pause(start)
    return record
