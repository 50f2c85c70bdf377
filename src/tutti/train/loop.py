"""The training loop: epochs, evaluations, checkpoints and reports to listeners."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tutti.checkpoint.manifest import REMEDY
from tutti.checkpoint.write import step_name
from tutti.config.metric_direction import RAW
from tutti.config.spec import Duration
from tutti.data.epochs import Epochs
from tutti.errors import CheckpointError, Preempted
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.metrics.listener import Clock, EvalRecord, Listener, Pace, RunHeader
from tutti.metrics.throughput import DeviceThroughput, device_rates
from tutti.optim.loss_scale import LossScale
from tutti.train.evaluation import BLOCK, evaluate_samples
from tutti.train.run import Run
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.step_windows import Window
from tutti.train.target_watch import EvaluatedAt, TargetWatch, wall_seconds
from tutti.types.micro_batch import Batch
from tutti.types.step_records import StepRecord

_WINDOW = 30


@dataclass
class Means:
    """Sums from which the means of loss and metrics over one epoch follow; each step is weighted by its count.

    Attributes:
        loss: sum over steps of mean loss times count.
        count: sum of the counts: samples, or other units that the loss function counts.
        metrics: sum over steps of mean times count, by name.
    """

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, loss: float, count: float, metrics: Mapping[str, float]) -> None:
        """Add the mean loss and metrics of one step, times its count, to the sums from which an epoch's means follow.

        Args:
            loss: mean loss of the step.
            count: weight of the step: its samples, or other units that the loss function counts.
            metrics: means by name.
        """
        self.loss += loss * count
        self.count += count
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * count

    def facts(self) -> dict[str, Any]:
        """Return the sums of the present epoch's means so far as a JSON value for a checkpoint.

        Returns:
            A dict with ``count``, and ``loss`` and ``metrics`` (a dict by name), which are sums weighted by the steps'
            counts. Numbers that are not finite are None.
        """
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        return {"loss": _finite(self.loss), "count": _finite(self.count), "metrics": metrics}

    @classmethod
    def saved(cls, facts: Mapping[str, Any]) -> Means:
        """Return a ``Means`` (sums for the means of loss and metrics over an epoch), restored from a checkpoint.

        Args:
            facts: the checkpoint's facts; ``facts["means"]`` is the result of ``facts()``, in which null stands for
                NaN.

        Raises:
            CheckpointError: ``facts`` has no entry ``means``, or the entry does not hold numbers.
        """
        try:
            kept = facts["means"]
            metrics = {str(name): _number(value) for name, value in kept["metrics"].items()}
            return cls(_number(kept["loss"]), _number(kept["count"]), metrics)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError("the checkpoint's 'means' are not numbers", why=repr(error), remedy=REMEDY) from error

    def summary(self) -> dict[str, float]:
        """Return the mean loss and metrics of the epoch's steps so far, each step weighted by its count.

        Returns:
            Python floats by name: ``{"loss": …, "accuracy": …}``; ``{"loss": 0.0}`` before the first step.
        """
        count = self.count or 1.0
        return {"loss": self.loss / count, **{name: value / count for name, value in self.metrics.items()}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


class Speed:
    """Measures samples per second of training over the last 30 steps and over the whole run.

    Time of evaluations, saves and callbacks is excluded.

    For a compiled model the first step counts as start-up, as it includes compilation.

    Args:
        total: samples in the whole run.
        done: samples consumed before this start.
        compiled: whether the model is compiled.
        spent: seconds of training before this start, of a resumed run.
    """

    def __init__(self, total: float, done: int, compiled: bool = False, spent: float = 0.0) -> None:
        self._total, self._start, self._spent = total, time.perf_counter(), spent
        self._first, self._startup = (self._start, done), compiled
        self._marks: deque[tuple[float, int]] = deque([(self._start, done)], maxlen=_WINDOW + 1)
        self._paused = self._waited = 0.0
        self._factors: Mapping[str, float] = {}

    def worth(self, throughput: DeviceThroughput) -> None:
        """Set the tokens and FLOP of one sample, so that ``mark`` and ``overall`` report tokens/s, MFU and HFU.

        This object measures the speed of training. Tokens/s and FLOP utilisation (MFU, HFU) are per device; those that
        cannot be computed from the numbers given are left out.

        Args:
            throughput: tokens and FLOP of one sample, and number and peak FLOP/s of the devices.
        """
        self._factors = throughput.factors()

    def mark(self, samples: int) -> Pace:
        """Record the end of a training step in this meter of training speed, and return the present speed.

        Args:
            samples: samples that the run has consumed so far.

        Returns:
            A ``Pace`` of floats: ``samples_per_second`` over the last 30 steps, ``elapsed`` seconds of training,
            ``remaining`` expected seconds to the end of the run, ``device`` (a dict by name, such as
            ``throughput/device/mfu``: samples/s, tokens/s, MFU and HFU of a device, unknown ones left out), and
            ``data``, seconds that the step waited for its batch.
        """
        now = time.perf_counter() - self._paused
        self._marks.append((now, samples))
        (before, then), elapsed = self._marks[0], self._spent + now - self._start
        rate = (samples - then) / max(now - before, 1e-9)
        if self._startup:
            self._startup, self._first = False, (now, samples)
            self._marks.clear()
            self._marks.append(self._first)
        remaining = (self._total - samples) / max(rate, 1e-9)
        return Pace(rate, elapsed, remaining, device_rates(self._factors, rate), self._waited)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and measure the seconds that the training loop waits for each.

        The next call of ``mark`` reports the wait for the batch that was yielded most recently.

        Args:
            batches: the batches of an epoch.
        """
        while True:
            begin = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited = time.perf_counter() - begin
            yield batch

    def elapsed(self) -> float:
        """Return seconds of training since the first start of the run, without pauses such as evaluations."""
        return self._spent + time.perf_counter() - self._paused - self._start

    def pause(self, since: float) -> None:
        """Exclude the time from ``since`` until now from the training time, on which samples per second are based.

        Args:
            since: a value of ``time.perf_counter()``.
        """
        self._paused += time.perf_counter() - since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager; the time within, such as that of callbacks, does not count as training time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.pause(begin)

    def overall(self) -> dict[str, float]:
        """Return the speed of the run for ``summary.json``, by key.

        Returns:
            ``samples_per_second`` of all devices since this process started, for a compiled model without its first
            step; as far as known the figures of one device, ``throughput/device/`` with ``samples_per_sec``,
            ``tokens_per_sec``, ``mfu`` and ``hfu``; ``seconds`` of training from the run's first start to the last call
            of ``mark``; and ``startup_seconds``, those of a compiled model's first step, otherwise 0.
        """
        (now, samples), (begun, done) = self._marks[-1], self._first
        rate = (samples - done) / max(now - begun, 1e-9)
        return {
            "samples_per_second": rate,
            **device_rates(self._factors, rate),
            "seconds": self._spent + now - self._start,
            "startup_seconds": begun - self._start,
        }


Length: TypeAlias = int | Duration
"""Steps; or samples or whole epochs, where their number of steps is not known beforehand (streams, growing batches)."""


@dataclass(frozen=True)
class TrainPlan:
    """Length of training, and intervals of evaluations and checkpoints.

    Attributes:
        total: length of the run.
        evaluate: interval of evaluations; None: only at the end.
        save: interval of checkpoints; None: never.
    """

    total: Length
    evaluate: Length | None = None
    save: Length | None = None


def passed(length: Length, run: Run) -> int:
    """Return how many whole intervals of ``length`` the run has trained so far, counted from its first start.

    Args:
        length: an interval: a number of steps, or a ``Duration`` in samples or epochs.
        run: the run; steps, samples and epochs before a resume count, too.
    """
    if isinstance(length, int):
        return run.clock // length
    return int((run.at.epoch if length.unit == "ep" else run.samples) // length.value)


def ended(length: Length, run: Run) -> bool:
    """Return whether the run has trained for ``length``, counted from its first start.

    A length in steps counts the schedule's steps (``Run.progress``), which differ from steps of the run with AdaScale.

    Args:
        length: length of training in steps (an int), samples or epochs (a ``Duration``).
        run: the run.
    """
    return run.progress >= length if isinstance(length, int) else passed(length, run) > 0


class Due:
    """Tells after each step whether a periodic event, such as an evaluation, is due.

    The event is due when a further whole interval has been trained, and at the end of the run.

    Args:
        every: the interval in steps, samples or epochs; None: only at the end.
        total: length of the run.
        run: the run, which may be resumed.
    """

    def __init__(self, every: Length | None, total: Length, run: Run) -> None:
        self._every, self._total, self._run = every, total, run
        self._count = 0 if every is None else passed(every, run)

    def __call__(self) -> bool:
        """Return whether the periodic event is due after the last training step; must be called exactly once a step.

        The event is due when a whole interval has passed since the last call, or the run has ended.
        """
        before, self._count = self._count, 0 if self._every is None else passed(self._every, self._run)
        return self._count > before or ended(self._total, self._run)


def train_loop(
    run: Run,
    plan: TrainPlan,
    held_out: Any,
    header: RunHeader,
    listener: Listener,
    saver: Checkpoints | None = None,
    means: Means | None = None,
    windows: Sequence[Window] = (),
    clock: Clock | None = None,
    throughput: Callable[[Batch], DeviceThroughput] | None = None,
    watch: TargetWatch | None = None,
) -> dict[str, Any]:
    """Train from the position of ``run`` to the end of the plan, or to an evaluation or callback that ends the run.

    Collective over all ranks, which call it with equal arguments, except that ``listener`` and ``throughput`` may
    differ: steps, evaluations, callbacks, saves and the hash of the weights at the end.

    Args:
        run: a fresh run, or one restored from a checkpoint.
        plan: length of the run, and intervals of evaluations and checkpoints.
        held_out: samples to evaluate on; None for no evaluation.
        header: reported to the listener first.
        listener: receives every step, evaluation and warning.
        saver: writes checkpoints as planned, also at the end, and before the run stops on request; None for none.
        means: means of the epoch under way in a restored run.
        windows: steps to profile or to trace.
        clock: first start of a resumed run, and its seconds of training; default: the run starts now.
        throughput: returns tokens and FLOP of one sample and peak FLOP/s of a device, from this rank's first batch;
            None to report no tokens/s and MFU.
        watch: tells which evaluation ends the run; None: only the plan ends it.

    Returns:
        Entries of ``summary.json`` by key: ``epochs``, ``steps``, ``updates``, ``skipped`` (updates), ``loss_scale``,
        ``samples``, ``train`` and ``eval`` (means by name, ``eval`` None without an evaluation), ``target`` and
        ``early_stopping`` of ``watch``, ``stopped`` (the reason, if a callback ended the run), ``lost_ranks``,
        ``adascale``, ``eval_weights`` with ``ema_sha256``, and ``best`` where the run has them, figures of the strategy
        (``GradientSync.facts``), ``samples_per_second`` and other figures of speed, ``weights_sha256``, and
        ``diagnoses`` (findings of the checks for mistakes).

    Raises:
        UsageError: the loss function does not report the metric that ``watch`` follows; or as ``Run.step`` and
            ``Run.evaluate``.
        NonFiniteError: too many updates in a row were skipped because a gradient is not finite.
        MismatchError, PeerError: ranks differ in copies or calls, or a rank has died.
        DiskError: too many saves in a row have failed.
        Preempted: a rank was asked to stop; a checkpoint is written if there is a saver.
    """
    listener.started(header)
    contract = run.feed.contract
    total = math.inf if run.adascale is not None else _samples(plan.total, run.feed.epochs)
    clock = clock or Clock(time.time())
    speed = Speed(total, run.samples, run.context.compile is not None, clock.spent)
    to_evaluate, to_save = (Due(every, plan.total, run) for every in (plan.evaluate, plan.save))
    evaluated, skipped = None, 0
    means = means or Means()
    unchecked = watch is not None
    finished = run.callbacks.ended()
    with speed.paused():
        run.callbacks.begin(run)
    _look(windows, speed)
    while not _over(plan, run, watch):
        number, start = run.at
        means = means if start else Means()
        for batch in speed.timed(run.epoch(number, start)):
            if throughput is not None:
                begin = time.perf_counter()
                speed.worth(throughput(batch))
                throughput = None
                speed.pause(begin)
            run.step(batch)
            heartbeat.training.enter(Phase.REPORT)
            _look(windows, speed)
            epoch = number if run.taken == run.clock else run.feed.epochs.place(max(run.clock - 1, 0))[0]
            skipped += _report(run, epoch, speed, means, listener)
            if unchecked and watch is not None and held_out is not None:
                _check_watch(watch, run, held_out, speed)
                unchecked = False
            with speed.paused():
                run.callbacks.end_step(run)
                if run.at.epoch > number:
                    run.callbacks.end_epoch(run, number)
            # Before the save: the checkpoint records the held-out values of its own step.
            fresh = None
            # A stop by a callback is followed by the evaluation of the last weights.
            if (to_evaluate() or run.callbacks.ended()) and held_out is not None:
                evaluated = fresh = _evaluate(run, held_out, epoch, speed, listener)
                if watch is not None:
                    _watch(watch, run, fresh, clock)
            due = to_save() or (watch is not None and watch.ending is not None) or run.callbacks.ended()
            _save(run, due and plan.save is not None, means, fresh, saver, speed, clock, watch)
            if _over(plan, run, watch):
                break
    if run.callbacks.ended() and not finished and saver is not None and saver.saved_step != run.clock > 0:
        # A callback has stopped the run between two steps.
        _save(run, plan.save is not None, means, None, saver, speed, clock, watch)
    if saver is not None:
        saver.wait()
    heartbeat.training.enter(Phase.END)
    if evaluated is None and held_out is not None:
        evaluated = _evaluate(run, held_out, max(run.at.epoch - (run.at.batch == 0), 0), speed, listener)
    run.callbacks.end(run)
    return {
        "epochs": run.samples / contract.dataset if contract.dataset is not None else run.at.epoch,
        "steps": run.clock,
        "updates": run.updates,
        "skipped": skipped,
        "loss_scale": None if run.loss_scale is None else run.loss_scale.value,
        "samples": run.samples,
        "train": means.summary(),
        "eval": None if evaluated is None else evaluated.values,
        **({} if watch is None else watch.summary()),
        **({} if run.stopped is None else {"stopped": run.stopped}),
        **_chosen(run, saver),
        **run.gradient_sync.facts(),
        **speed.overall(),
        "weights_sha256": run.weights_sha256(),
        "diagnoses": run.checks.diagnoses.found,
    }


def _over(plan: TrainPlan, run: Run, watch: TargetWatch | None) -> bool:
    """Return whether the run has its planned length, or an evaluation or a callback has ended it."""
    return ended(plan.total, run) or (watch is not None and watch.ending is not None) or run.callbacks.ended()


def _check_watch(watch: TargetWatch, run: Run, held_out: Any, speed: Speed) -> None:
    """Check after the first step that the watched metric exists. Collective: a broadcast, or an evaluation besides.

    A loss function may report metrics in evaluations alone: then the model is evaluated once. Raises UsageError.
    """
    averaged, stats = run.average is not None, run.stats
    # A rank without samples in this step knows no names.
    mine = list(stats.metrics) if stats is not None else []
    reported = ["loss", *run.context.comms.world.broadcast_json(mine, 0, "names of the metrics")]
    if watch.metric.name.removeprefix(RAW) not in reported:
        start = time.perf_counter()
        reported = list(evaluate_samples(run, held_out, BLOCK, None, averaged).values)
        speed.pause(start)
    watch.check(reported, averaged)


def _watch(watch: TargetWatch, run: Run, record: EvalRecord, clock: Clock) -> None:
    """Let ``watch`` judge an evaluation on every rank, by the values of rank 0. Collective: a broadcast."""
    watch.check(["loss", *record.metrics], record.raw is not None)
    # Sums in another order may differ in the last bit between ranks of one replica: one rank decides.
    value = run.context.comms.world.broadcast_json(_finite(record.values[watch.metric.name]), 0, "value of the target")
    dataset = run.feed.contract.dataset
    watch.evaluated(
        EvaluatedAt(
            step=run.clock,
            updates=run.updates,
            samples=run.samples,
            epochs=run.samples / dataset if dataset is not None else float(run.at.epoch),
            seconds=record.seconds or 0.0,
            wall_seconds=wall_seconds(clock.started),
            value=_number(value),
        )
    )


def _look(windows: Sequence[Window], speed: Speed) -> None:
    """Open or close profiles and traces that are due; their time does not count as training."""
    if windows:
        start = time.perf_counter()
        for window in windows:
            window.look()
        speed.pause(start)


def _samples(total: Length, epochs: Epochs) -> float:
    """Return the number of samples in the whole run; infinite if unknown."""
    if isinstance(total, Duration):
        return total.value if total.unit == "sa" else math.inf
    return epochs.consumed(total) if epochs.first.dataset is not None else total * epochs.first.batch


def _report(run: Run, epoch: int, speed: Speed, means: Means, listener: Listener) -> int:
    """Report the last step to the listener; return 1 if its update was skipped, else 0."""
    stats, updated = run.stats, run.updated
    if stats is None or updated is None:
        raise ValueError("no step has been made")
    means.add(stats.loss, stats.count, stats.metrics)
    groups = [group for optimizer in run.gradient_sync.optimizers for group in optimizer.param_groups]
    record = StepRecord(
        step=run.clock,
        epoch=epoch + 1,
        samples=run.samples,
        updates=run.updates,
        loss=stats.loss,
        metrics=stats.metrics,
        grad_norm=stats.grad_norm,
        lr=float(groups[0]["lr"]) if groups else None,
        skipped=updated.skipped,
        loss_scale=None if run.loss_scale is None else run.loss_scale.used,
        adascale={} if run.adascale is None else run.adascale.values(),
        noise={} if run.noise_probe is None else run.noise_probe.values(),
    )
    if updated.skipped:
        where = ", ".join(updated.nonfinite[:3])
        kept = "weights are unchanged" if not updated.updates else "the workers concerned kept their weights"
        text = f"step {run.clock} skipped: the gradient of {where} is not finite{_scales(run.loss_scale)}; {kept}"
        listener.warned(text)
    listener.stepped(record, speed.mark(run.samples))
    return int(updated.skipped)


def _scales(scale: LossScale | None) -> str:
    """Return text with the loss scale of a skipped step and, if it falls, the next one."""
    if scale is None:
        return ""
    falls = f", the next is {scale.value:g}" if scale.value != scale.used else ""
    return f" at loss scale {scale.used:g}{falls}"


def _chosen(run: Run, saver: Checkpoints | None) -> dict[str, Any]:
    """Return the summary's entries on lost ranks, AdaScale, the average and the best checkpoint. Collective."""
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
    run: Run,
    due: bool,
    means: Means,
    evaluated: EvalRecord | None,
    saver: Checkpoints | None,
    speed: Speed,
    clock: Clock,
    watch: TargetWatch | None,
) -> None:
    """Write a checkpoint if one is due, may be the best, or a rank was asked to stop. Collective.

    Args:
        run: the run.
        due: whether a checkpoint is due by its interval or at the end.
        means: means of the epoch under way, for the checkpoint.
        evaluated: held-out values of this step, None without an evaluation.
        saver: writes checkpoints; None for none.
        speed: excludes the time of the save.
        clock: first start of the run, for the checkpoint.
        watch: its state is stored in the checkpoint; None for none.

    Raises:
        Preempted: a rank was asked to stop.
    """
    stop = run.stats is not None and run.stats.stop
    if saver is not None and (stop or due or (saver.best is not None and evaluated is not None)):
        start = time.perf_counter()
        spent: dict[str, Any] = {"started": clock.started, "seconds": speed.elapsed()}
        if watch is not None:
            spent["target"] = watch.state()
        spent |= run.callbacks.saved()
        saver.save({"means": means.facts(), **spent}, None if evaluated is None else evaluated.values)
        _tell_checkpoint(run, saver)
        speed.pause(start)
    if stop:
        if saver is not None:
            saver.wait()
        saved = "state saved, continue with --resume" if saver is not None else "nothing was saved"
        raise Preempted("the run was asked to stop", where=f"step {run.clock}", remedy=saved)


def _tell_checkpoint(run: Run, saver: Checkpoints) -> None:
    """Call ``on_checkpoint`` once the checkpoint is on disk. Collective if a callback has the method."""
    if not run.callbacks.handles("on_checkpoint"):
        return
    saver.wait()
    path = saver.folder / step_name(run.clock)
    if run.context.comms.world.broadcast_json(path.is_dir(), 0, "checkpoint for the callbacks"):
        run.callbacks.checkpoint_written(run, path)


def _evaluate(run: Run, held_out: Any, epoch: int, speed: Speed, listener: Listener) -> EvalRecord:
    """Evaluate the average of the weights, if any, and the model; report and return the record. Collective."""
    # Without synchronous steps the first rank waits here for the last: the wait counts as training, not as evaluation.
    run.together("an evaluation")
    start = time.perf_counter()
    seconds = speed.elapsed()
    first = run.evaluate(held_out)
    # Callbacks see one evaluation of a step.
    raw = evaluate_samples(run, held_out, BLOCK, None, False).values if first.averaged else None
    record = EvalRecord(run.clock, epoch + 1, first.loss, first.metrics, first.samples, raw, seconds)
    listener.evaluated(record)
    speed.pause(start)
    return record
