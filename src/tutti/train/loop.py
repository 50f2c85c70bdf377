"""The training loop: epochs, evaluations, checkpoints and reports to listeners."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tutti.checkpoint.folder import last_step
from tutti.checkpoint.write import step_name
from tutti.config.metric_direction import RAW
from tutti.config.spec import Duration
from tutti.config.training_target import check_metric
from tutti.data.adapt import Collate
from tutti.data.epochs import Epochs
from tutti.errors import Preempted
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.metrics.listener import Clock, EvalRecord, Listener, RunHeader
from tutti.metrics.metrics_file import from_json_number, to_json_number
from tutti.metrics.throughput import DeviceThroughput
from tutti.optim.loss_scale import LossScale
from tutti.optim.plateau import Plateau
from tutti.train.evaluation import BLOCK, evaluate_samples
from tutti.train.loop_meters import Means, Speed
from tutti.train.run import Run
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.run_state import optimizer_facts
from tutti.train.step_windows import Window
from tutti.train.target_watch import EvaluatedAt, TargetWatch, wall_seconds
from tutti.train.train_plan import Due, Length, TrainPlan, ended
from tutti.types.micro_batch import Batch
from tutti.types.step_records import StepRecord


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
    plateau: Plateau | None = None,
    collate: Collate | None = None,
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
        means: means of the epoch under way in a restored run; None for an epoch that begins.
        windows: steps to profile or to trace.
        clock: first start of a resumed run, and its seconds of training; None: the run starts now.
        throughput: called once, with this rank's first batch; returns tokens and FLOP of one sample, and peak FLOP/s of
            a device. None to report no tokens/s and MFU.
        watch: tells which evaluation ends the run; None: only the plan ends it.
        plateau: state of the schedule ``plateau``, which follows the evaluations; None for another schedule.
        collate: makes a batch of a list of held-out samples; None: as PyTorch's ``DataLoader``.

    Returns:
        Entries of ``summary.json`` by key: ``epochs``, ``steps``, ``updates``, ``skipped`` (updates), ``loss_scale``,
        ``samples``, ``train`` and ``eval`` (means by name, ``eval`` None without an evaluation), ``target`` and
        ``early_stopping`` of ``watch``, ``stopped`` (the reason, if a callback ended the run), ``lost_ranks``,
        ``adascale``, ``eval_weights`` with ``ema_sha256``, and ``best`` where the run has them, figures of the strategy
        (``GradientSync.facts``), ``samples_per_second`` and other figures of speed, ``weights_sha256``, and
        ``diagnoses`` (findings of the checks for mistakes).

    Raises:
        UsageError: the loss function does not report the metric that ``watch`` or ``plateau`` follows, or a step or an
            evaluation cannot be made, such as with a gradient hook of the script that the strategy cannot call.
        NonFiniteError: too many updates in a row were skipped because a gradient is not finite.
        MismatchError, PeerError: ranks differ in copies or calls, or a rank has died.
        DiskError: too many saves in a row have failed, or the last one of the run.
        Preempted: a rank was asked to stop; a checkpoint is written if there is a saver, and the text says so.
    """
    listener.started(header)
    loop = _TrainLoop(
        run,
        plan,
        held_out,
        listener,
        saver,
        means or Means(),
        windows,
        clock or Clock(time.time()),
        watch,
        plateau,
        collate,
    )
    loop.begin()
    while not loop.is_over():
        epoch, start = run.data_position
        loop.begin_epoch(start)
        for batch in loop.speed.timed(run.epoch(epoch, start)):
            if throughput is not None:
                with loop.speed.paused():
                    loop.speed.worth(throughput(batch))
                throughput = None
            run.step(batch)
            loop.end_step(epoch)
            if loop.is_over():
                break
    loop.end()
    return loop.summary()


class _TrainLoop:
    """Reports each step of ``train_loop``, evaluates and saves where that is due, and ends training.

    The arguments are those of ``train_loop``.
    """

    def __init__(
        self,
        run: Run,
        plan: TrainPlan,
        held_out: Any,
        listener: Listener,
        saver: Checkpoints | None,
        means: Means,
        windows: Sequence[Window],
        clock: Clock,
        watch: TargetWatch | None,
        plateau: Plateau | None,
        collate: Collate | None,
    ) -> None:
        self._run, self._plan, self._held_out, self._collate = run, plan, held_out, collate
        self._listener, self._saver, self._means = listener, saver, means
        self._windows, self._clock, self._watch, self._plateau = windows, clock, watch, plateau
        total = math.inf if run.adascale is not None else _samples(plan.total, run.feed.epochs)
        self.speed = Speed(total, run.samples, run.context.compile is not None, clock.spent)
        self._evaluation_due, self._save_due = (Due(every, plan.total, run) for every in (plan.evaluate, plan.save))
        self._evaluated: EvalRecord | None = None
        self._skipped = 0
        self._unchecked = watch is not None or plateau is not None
        self._stopped_before = run.callbacks.ended()

    def begin(self) -> None:
        """Call the callbacks of the beginning, and open the profiles and traces of the first step."""
        with self.speed.paused():
            self._run.callbacks.begin(self._run)
        self._look_at_windows()

    def is_over(self) -> bool:
        """Return whether the run has its planned length, or an evaluation or a callback has ended it."""
        return ended(self._plan.total, self._run) or self._is_stopped()

    def _is_stopped(self) -> bool:
        """Return whether an evaluation or a callback has ended the run."""
        return (self._watch is not None and self._watch.ending is not None) or self._run.callbacks.ended()

    def begin_epoch(self, start: int) -> None:
        """Begin an epoch at batch ``start``: in the middle of an epoch, its means go on."""
        if not start:
            self._means = Means()

    def end_step(self, number: int) -> None:
        """Report the last step of epoch ``number``; call callbacks, evaluate and save where due. Collective."""
        run = self._run
        heartbeat.training.enter(Phase.REPORT)
        self._look_at_windows()
        epoch = number
        if run.local_step != run.global_step:
            # Asynchronous servers count the steps of all workers together.
            epoch, _ = run.feed.epochs.position_after(max(run.global_step - 1, 0))
        self._report(epoch)
        if self._unchecked and self._held_out is not None:
            self._check_metrics()
            self._unchecked = False
        with self.speed.paused():
            run.callbacks.end_step(run)
            if run.data_position.epoch > number:
                run.callbacks.end_epoch(run, number)
        # Before the save: the checkpoint records the held-out values of its own step.
        fresh = None
        # A stop by a callback is followed by the evaluation of the last weights.
        if (self._evaluation_due() or run.callbacks.ended()) and self._held_out is not None:
            self._evaluated = fresh = self._evaluate(epoch)
            if self._watch is not None:
                self._judge(self._watch, fresh)
            if self._plateau is not None:
                self._lower_rate(self._plateau, fresh)
        due = self._save_due() or self._is_stopped()
        self._save(due and self._plan.save is not None, fresh)

    def end(self) -> None:
        """Save a run that a callback has stopped between two steps, and evaluate it if it never was. Collective."""
        run, saver = self._run, self._saver
        stopped = run.callbacks.ended() and not self._stopped_before
        if stopped and saver is not None and saver.saved_step != run.global_step > 0:
            self._save(self._plan.save is not None, None)
        if saver is not None:
            saver.end()
        heartbeat.training.enter(Phase.END)
        if self._evaluated is None and self._held_out is not None:
            self._evaluated = self._evaluate(max(run.data_position.epoch - (run.data_position.batch == 0), 0))
        run.callbacks.end(run)

    def summary(self) -> dict[str, Any]:
        """Return the entries of ``summary.json``; see ``train_loop``. Collective: hashes of the weights."""
        run, dataset = self._run, self._run.feed.contract.dataset
        return {
            "epochs": run.samples / dataset if dataset is not None else run.data_position.epoch,
            "steps": run.global_step,
            "updates": run.updates,
            "skipped": self._skipped,
            "loss_scale": None if run.loss_scale is None else run.loss_scale.value,
            "samples": run.samples,
            "train": self._means.summary(),
            "eval": None if self._evaluated is None else self._evaluated.values,
            **({} if self._watch is None else self._watch.summary()),
            **({} if run.stopped is None else {"stopped": run.stopped}),
            **_optional_entries(run, self._saver),
            **run.gradient_sync.facts(),
            **self.speed.overall(),
            "weights_sha256": run.weights_sha256(),
            "diagnoses": run.checks.diagnoses.found,
        }

    def _look_at_windows(self) -> None:
        """Open or close profiles and traces that are due; their time does not count as training."""
        if self._windows:
            with self.speed.paused():
                for window in self._windows:
                    window.look()

    def _report(self, epoch: int) -> None:
        """Report the last step to the listener, and count its update if it was skipped."""
        run, stats, updated = self._run, self._run.stats, self._run.updated
        if stats is None or updated is None:
            raise ValueError("no step has been made")
        self._means.add(stats.loss, stats.count, stats.metrics)
        groups = [group for optimizer in run.gradient_sync.optimizers for group in optimizer.param_groups]
        record = StepRecord(
            step=run.global_step,
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
            bubble=run.replica.bubble,
        )
        if updated.skipped:
            self._skipped += 1
            where = ", ".join(updated.nonfinite[:3])
            kept = "weights are unchanged" if not updated.updates else "the workers concerned kept their weights"
            scales = _describe_scales(run.loss_scale)
            self._listener.warned(
                f"step {run.global_step} skipped: the gradient of {where} is not finite{scales}; {kept}"
            )
        self._listener.stepped(record, self.speed.mark(run.samples))

    def _check_metrics(self) -> None:
        """Check after the first step that the metrics of ``--until``, ``--patience`` and ``--schedule plateau`` exist.

        A loss function may report metrics in evaluations alone: then the model is evaluated once. Collective: a
        broadcast, or also an evaluation. Raises UsageError.
        """
        run, stats = self._run, self._run.stats
        wanted = {each.metric.name.removeprefix(RAW) for each in (self._watch, self._plateau) if each is not None}
        averaged = run.average is not None
        # A rank without samples in this step knows no names.
        mine = list(stats.metrics) if stats is not None else []
        reported = ["loss", *run.context.comms.world.broadcast_json(mine, 0, "names of the metrics")]
        if not wanted <= set(reported):
            with self.speed.paused():
                found = evaluate_samples(run, self._held_out, BLOCK, None, averaged, self._collate)
                reported = list(found.values)
        if self._watch is not None:
            self._watch.check(reported, averaged)
        if self._plateau is not None:
            check_metric(self._plateau.metric.name, "--schedule plateau, metric", reported, averaged)

    def _judge(self, watch: TargetWatch, record: EvalRecord) -> None:
        """Let ``watch`` judge an evaluation on every rank. Collective: a broadcast."""
        run, dataset = self._run, self._run.feed.contract.dataset
        watch.check(["loss", *record.metrics], record.raw is not None)
        watch.evaluated(
            EvaluatedAt(
                step=run.global_step,
                updates=run.updates,
                samples=run.samples,
                epochs=run.samples / dataset if dataset is not None else float(run.data_position.epoch),
                seconds=record.seconds or 0.0,
                wall_seconds=wall_seconds(self._clock.started),
                value=self._value(record, watch.metric.name),
            )
        )

    def _lower_rate(self, plateau: Plateau, record: EvalRecord) -> None:
        """Lower the learning rate on every rank if the evaluation is due for it. Collective: a broadcast."""
        name = plateau.metric.name
        check_metric(name, "--schedule plateau, metric", ["loss", *record.metrics], record.raw is not None)
        plateau.evaluated(self._value(record, name))

    def _value(self, record: EvalRecord, name: str) -> float:
        """Return rank 0's value of a metric: other ranks of a replica may differ in the last bit. Collective."""
        mine = to_json_number(record.values[name])
        return from_json_number(self._run.context.comms.world.broadcast_json(mine, 0, "held-out value"))

    def _evaluate(self, epoch: int) -> EvalRecord:
        """Evaluate the average of the weights, if any, and the model; report and return the record. Collective."""
        run = self._run
        # Without synchronous steps the first rank waits here for the last: that counts as training, not evaluation.
        run.check_same_call("an evaluation")
        with self.speed.paused():
            seconds = self.speed.elapsed()
            first = run.evaluate(self._held_out, collate=self._collate)
            raw = None
            if first.averaged:
                # Callbacks see one evaluation of a step.
                raw = evaluate_samples(run, self._held_out, BLOCK, None, False, self._collate).values
            record = EvalRecord(run.global_step, epoch + 1, first.loss, first.metrics, first.samples, raw, seconds)
            self._listener.evaluated(record)
        return record

    def _save(self, due: bool, evaluated: EvalRecord | None) -> None:
        """Write a checkpoint if one is due, may be the best, or a rank was asked to stop. Collective.

        Args:
            due: whether a checkpoint is due by its interval or at the end.
            evaluated: held-out values of this step, None without an evaluation.

        Raises:
            Preempted: a rank was asked to stop.
        """
        run, saver = self._run, self._saver
        stop = run.stats is not None and run.stats.stop
        if saver is not None and (stop or due or (saver.best is not None and evaluated is not None)):
            with self.speed.paused():
                facts: dict[str, Any] = {"started": self._clock.started, "seconds": self.speed.elapsed()}
                if self._watch is not None:
                    facts["target"] = self._watch.state()
                if self._plateau is not None:
                    facts["plateau"] = self._plateau.state()
                facts |= run.callbacks.saved()
                if run.optimizer is not None:
                    facts |= {**optimizer_facts(run), "epoch_under_way": run.open_epoch}
                values = None if evaluated is None else evaluated.values
                saver.save({"means": self._means.facts(), **facts}, values)
                _tell_checkpoint(run, saver)
        if stop:
            raise Preempted("the run was asked to stop", where=f"step {run.global_step}", remedy=_saved(saver))


def _saved(saver: Checkpoints | None) -> str:
    """Wait for the save of a run that was asked to stop; return what is saved and how to continue, as a remedy."""
    if saver is None:
        return "nothing was saved"
    saver.wait()
    if not saver.failure:
        return "state saved, continue with --resume"
    step = last_step(saver.folder)
    return f"this step was not saved, --resume continues from step {step}" if step else "nothing could be saved"


def _samples(total: Length, epochs: Epochs) -> float:
    """Return the number of samples in the whole run; infinite if unknown."""
    if isinstance(total, Duration):
        return total.value if total.unit == "sa" else math.inf
    return epochs.consumed(total) if epochs.first.dataset is not None else total * epochs.first.batch


def _describe_scales(scale: LossScale | None) -> str:
    """Return text with the loss scale of a skipped step and, if it falls, the next one."""
    if scale is None:
        return ""
    falls = f", the next is {scale.value:g}" if scale.value != scale.used else ""
    return f" at loss scale {scale.used:g}{falls}"


def _optional_entries(run: Run, saver: Checkpoints | None) -> dict[str, Any]:
    """Return the summary's entries on lost ranks, AdaScale, the average and the best checkpoint. Collective."""
    found: dict[str, Any] = {}
    if run.lost_ranks is not None:
        run.lost_ranks.look()
        found |= {"lost_ranks": run.lost_ranks.found} if run.lost_ranks.found else {}
    if run.adascale is not None:
        mean = run.adascale.tau / run.updates if run.updates else None
        found["adascale"] = {**run.adascale.values(), "gain": mean}
    if run.average is not None:
        found["eval_weights"] = "ema"
        found["ema_sha256"] = run.weights_sha256(averaged=True)
    if saver is not None and saver.best is not None:
        found["best"] = saver.best_kept()
    return found


def _tell_checkpoint(run: Run, saver: Checkpoints) -> None:
    """Call ``on_checkpoint`` once the checkpoint is on disk. Collective if a callback has the method."""
    if not run.callbacks.handles("on_checkpoint"):
        return
    saver.wait()
    path = saver.folder / step_name(run.global_step)
    if run.context.comms.world.broadcast_json(path.is_dir(), 0, "checkpoint for the callbacks"):
        run.callbacks.checkpoint_written(run, path)
