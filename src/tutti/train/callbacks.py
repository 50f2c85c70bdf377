"""Callbacks: functions and objects of the script that a run calls at the events of training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.checkpoint.json_codec import decode_json, encode_json
from tutti.comm.stall import TellFailures
from tutti.config.metric_direction import Metric
from tutti.errors import CheckpointError, UsageError, counted, did_you_mean, kind_of
from tutti.train.best_value import BestValue
from tutti.train.evaluation import Evaluation

if TYPE_CHECKING:
    from tutti.train.run import Run

EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_end",
    "on_evaluation",
    "on_checkpoint",
    "on_epoch_end",
    "on_train_end",
)
"""Methods that a callback may have. ``on_epoch_…`` get the epoch, ``on_evaluation`` the means, ``on_checkpoint`` the
directory, after the run."""

_STATE = ("state_dict", "load_state_dict")


class Callbacks:
    """Calls the callbacks of a training run at its events (``EVENTS``, such as ``on_epoch_end``), in the order given.

    Args:
        given: functions ``function(run)``, called after each step, and objects with methods named as in ``EVENTS``.
            The attribute ``ranks`` of a callback says where it is called: ``"first"`` (rank 0, the default) or
            ``"all"``.

    Attributes:
        own: the callbacks, in the order given.
        reason: why a callback has stopped training; None while it goes on.
        in_epoch: whether ``on_epoch_begin`` has been called and ``on_epoch_end`` has not.

    Raises:
        UsageError: an object is no callback, or its state cannot be saved.
    """

    def __init__(self, given: Sequence[Any] = ()) -> None:
        if not isinstance(given, Iterable):
            raise UsageError(f"callbacks is {kind_of(given)}", remedy="give a list of callbacks")
        self.own = [_checked(each) for each in given]
        self.reason: str | None = None
        self._asked = ""
        self.in_epoch = False
        self._inside = self._begun = False
        self._step_open = self._left_step = self._left_training = False

    def names(self) -> list[str]:
        """Return a text for each callback of the run; ``tutti.prepare`` compares the texts over ranks.

        Returns:
            A list of ``NAME on RANKS``, in the order of the callbacks; NAME is the qualified name of the function or
            class, RANKS is ``first`` (called on rank 0 alone) or ``all``.
        """
        return [f"{_name(each)} on {_ranks(each)}" for each in self.own]

    def stop(self, reason: str) -> None:
        """Ask for the end of training on all ranks once the event under way is over; only a callback may ask.

        Only records the reason on this rank; after the event an all-gather tells all ranks, and then ``reason`` is set.

        Args:
            reason: why training ends, for messages. If several callbacks or ranks ask in one event, the first callback
                of the lowest rank counts.

        Raises:
            UsageError: no callback is being called.
        """
        if not self._inside:
            raise UsageError("run.stop outside of a callback", remedy="leave the loop with break, on every rank")
        self._asked = self._asked or reason or "no reason given"

    def ended(self) -> bool:
        """Return True if a callback has asked to stop training of the run.

        Every rank gets the same answer, because after each event the ranks exchange the reasons to stop.
        """
        return self.reason is not None

    def handles(self, event: str) -> bool:
        """Return whether any callback of the run has a method for an event; a plain function has ``on_step_end`` alone.

        Callbacks that are called on rank 0 alone count on every rank, so that all ranks get the same answer.

        Args:
            event: name of the event and the method, such as ``on_evaluation``.
        """
        return any(_handler(each, event) is not None for each in self.own)

    def begin(self, run: Run) -> None:
        """Call ``on_train_begin`` of the run's callbacks, once for each run: later calls of this method do nothing.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if a callback has the method: afterwards the ranks all-gather the reasons to stop training that callbacks
        have given (a text or True as result, or a call of ``stop``). An exception of a callback propagates; other ranks
        raise PeerError.

        Args:
            run: the training run, passed to the callbacks.
        """
        if not self._begun:
            self._begun = True
            self._call("on_train_begin", run)

    def end(self, run: Run) -> None:
        """Call ``on_train_end`` of the run's callbacks; each call of this method does so.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if a callback has the method: afterwards the ranks all-gather the reasons to stop training that callbacks
        have given (a text or True as result, or a call of ``stop``). An exception of a callback propagates; other ranks
        raise PeerError.

        Args:
            run: the training run, passed to the callbacks.
        """
        self._call("on_train_end", run)

    def begin_epoch(self, run: Run, number: int) -> None:
        """Call ``on_epoch_begin`` of the run's callbacks, and set ``in_epoch``.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if a callback has the method: afterwards the ranks all-gather the reasons to stop training that callbacks
        have given (a text or True as result, or a call of ``stop``). An exception of a callback propagates; other ranks
        raise PeerError.

        Args:
            run: the training run, passed to the callbacks.
            number: the epoch, from 0, passed to the callbacks.
        """
        self.in_epoch = True
        self._call("on_epoch_begin", run, number)

    def end_epoch(self, run: Run, number: int) -> None:
        """Call ``on_epoch_end`` of the run's callbacks, and clear ``in_epoch``; do nothing unless it is set.

        ``begin_epoch`` sets it, so that each epoch has the event once. ``tutti train`` calls this before it saves,
        because a checkpoint holds the states of callbacks after the events of its step.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if ``in_epoch`` is set and a callback has the method: afterwards the ranks all-gather the reasons to stop
        training that callbacks have given (a text or True as result, or a call of ``stop``). An exception of a callback
        propagates; other ranks raise PeerError.

        Args:
            run: the training run, passed to the callbacks.
            number: the epoch, from 0, passed to the callbacks.
        """
        if self.in_epoch:
            self.in_epoch = False
            self._call("on_epoch_end", run, number)

    def step_taken(self) -> None:
        """Note that the run has taken a step: the next call of ``end_step`` calls ``on_step_end``. Not collective."""
        self._step_open = True

    def end_step(self, run: Run) -> None:
        """Call ``on_step_end`` of the run's callbacks for the step taken last, unless that has been done for this step.

        ``step_taken`` makes the event due, and this method makes it no longer due; while it is not due, a call does
        nothing and is not collective. ``tutti train`` calls this before it saves, because a checkpoint holds the states
        of callbacks after the events of its step.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if the event is due and a callback has the method (a plain function has): afterwards the ranks all-gather
        the reasons to stop training that callbacks have given (a text or True as result, or a call of ``stop``). An
        exception of a callback propagates; other ranks raise PeerError.

        Args:
            run: the training run, passed to the callbacks.
        """
        if self._step_open:
            self._step_open = False
            self._call("on_step_end", run)

    def leave_step(self) -> None:
        """Note that a ``break`` or an exception has left a loop over batches within a step. Not collective.

        The next call of ``end_left`` then calls ``on_step_end``, if that is still due for the step.
        """
        self._left_step = True

    def leave_training(self) -> None:
        """Note that a ``break`` or an exception has left a loop over epochs. Not collective.

        The next call of ``end_left`` then calls ``on_train_end``.
        """
        self._left_training = True

    def end_left(self, run: Run) -> None:
        """Call ``on_step_end`` and ``on_train_end`` if a ``break`` out of a loop has left them out, and end its step.

        First ends the step of a custom loop that was left, which under local SGD may average the workers' parameters
        (collective over the data ranks). Then calls ``on_step_end`` if a loop over batches was left (``leave_step``)
        and the event is still due, and ``on_train_end`` if a loop over epochs was left (``leave_training``); each is
        collective over all ranks, by an all-gather of the reasons to stop, if a callback has the method. Does nothing
        if no loop was left since the previous call. Every rank calls this before each collective call of the script:
        when Python closes the loop's generator, it does not tell a ``break`` from an exception, and swallows
        exceptions. An exception of a callback propagates; other ranks raise PeerError.

        Args:
            run: the training run, passed to the callbacks.

        Raises:
            UsageError: the ``break`` has lost an update (``CustomLoop.check_break``).
        """
        run.custom.end_left()
        step, self._left_step = self._left_step, False
        training, self._left_training = self._left_training, False
        if step:
            self.end_step(run)
        if training:
            self.end(run)

    def checkpoint_written(self, run: Run, path: Path) -> None:
        """Call ``on_checkpoint`` of the run's callbacks, after a checkpoint is on disk.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if a callback has the method: afterwards the ranks all-gather the reasons to stop training that callbacks
        have given (a text or True as result, or a call of ``stop``). An exception of a callback propagates; other ranks
        raise PeerError.

        Args:
            run: the training run, passed to the callbacks.
            path: the checkpoint's directory, passed to the callbacks.
        """
        self._call("on_checkpoint", run, path)

    def evaluated(self, run: Run, evaluation: Evaluation) -> None:
        """Call ``on_evaluation`` of the run's callbacks with the result of an evaluation, the same on every rank.

        A callback is called on rank 0, or on every rank if its attribute ``ranks`` is ``"all"``. Collective over all
        ranks if a callback has the method: rank 0's loss and metrics are broadcast first, and after the callbacks the
        ranks all-gather the reasons to stop training that callbacks have given (a text or True as result, or a call of
        ``stop``). Without such a callback nothing happens. An exception of a callback propagates; other ranks raise
        PeerError.

        Args:
            run: the training run, passed to the callbacks.
            evaluation: this rank's result, which may differ from rank 0's in the last bit.
        """
        if not self.handles("on_evaluation"):
            return
        # Sums in another order may differ in the last bit between ranks of one replica: one rank decides.
        mine = [encode_json(evaluation.loss, "loss"), encode_json(evaluation.metrics, "metrics")]
        loss, metrics = decode_json(run.context.comms.world.broadcast_json(mine, 0, "evaluation for the callbacks"))
        self._call("on_evaluation", run, replace(evaluation, loss=loss, metrics=metrics))

    @TellFailures()
    def _call(self, event: str, run: Run, *arguments: Any) -> None:
        """Call the method ``event`` of each callback that has it, in order, and agree over ranks whether to stop.

        A callback with ``ranks = "first"`` is called on rank 0 alone. If any callback has the method, the call is
        collective over all ranks: an all-gather of the reasons to stop. A callback that returns True or a string stops
        training; the string is the reason. An exception of a callback propagates, with a note that names the callback;
        other ranks raise PeerError.

        Args:
            event: name of the method, one of ``EVENTS``.
            run: the training run, passed to the method as its first argument.
            arguments: further arguments of the method, such as the epoch for ``on_epoch_end``.
        """
        handlers = [(each, handler) for each in self.own if (handler := _handler(each, event)) is not None]
        if not handlers:
            return
        outer, self._inside = self._inside, True
        first = run.context.comms.world.rank == 0
        try:
            for each, handler in handlers:
                if not first and _ranks(each) == "first":
                    continue
                try:
                    answer = handler(run, *arguments)
                except Exception as error:
                    error.add_note(f"raised by the callback {_name(each)}, {event}, after step {run.global_step}")
                    raise
                if isinstance(answer, str) or answer is True:
                    self.stop(answer if isinstance(answer, str) else f"{_name(each)} asked for it")
        finally:
            self._inside = outer
        reasons = run.context.comms.world.all_gather_strings(self._asked, f"reasons to stop, {event}")
        self._asked = ""
        self.reason = self.reason or next(filter(None, reasons), None)

    def facts(self) -> list[Any]:
        """Return the states of this rank's callbacks for a checkpoint. Not collective.

        Returns:
            A list with the ``state_dict()`` of each callback, in order, as a JSON value; None for a callback that lacks
            ``state_dict`` or ``load_state_dict``.

        Raises:
            UsageError: a state holds a value that JSON cannot hold.
        """
        return [_state(each) for each in self.own]

    def saved(self) -> dict[str, Any]:
        """Return the callbacks' entries of a checkpoint's manifest; empty without callbacks.

        Returns:
            A dict with ``callbacks`` (list of their states, as ``facts`` returns it), ``callback_names`` (list, as
            ``names`` returns it) and ``stopped`` (why a callback has stopped training, or None).

        Raises:
            UsageError: a state holds a value that JSON cannot hold.
        """
        if not self.own:
            return {}
        return {"callbacks": self.facts(), "callback_names": self.names(), "stopped": self.reason}

    def load_run(self, saved: Mapping[str, Any]) -> None:
        """Load the callbacks' states from a checkpoint of ``tutti train``, and why a callback had stopped training.

        A run that a callback had stopped remains stopped after the load.

        Args:
            saved: entries of the checkpoint's manifest: ``callbacks`` (list of states), ``callback_names`` and
                ``stopped`` (reason or None).

        Raises:
            CheckpointError: the checkpoint was saved with other callbacks. Errors of ``load_state_dict`` propagate.
        """
        self.load(saved)
        reason = saved.get("stopped")
        self.reason = None if reason is None else str(reason)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Call ``load_state_dict`` of each callback with its state in a checkpoint; do nothing if there are no states.

        Args:
            saved: entries of the checkpoint's manifest: ``callbacks`` (list of states, None for a callback without one)
                and ``callback_names`` (as ``names()`` returns).

        Raises:
            CheckpointError: the checkpoint was saved with other callbacks. Errors of ``load_state_dict`` propagate.
        """
        states, names = saved.get("callbacks", []), saved.get("callback_names", [])
        if not states:
            return
        if names != self.names():
            raise CheckpointError(
                f"the checkpoint has the callbacks {', '.join(names)}, and the run {', '.join(self.names()) or 'none'}",
                remedy="give the callbacks of the saved run, in the same order",
            )
        for each, state in zip(self.own, states, strict=True):
            if state is not None:
                each.load_state_dict(decode_json(state))


def _checked(callback: Any) -> Any:
    """Return the callback. Raises UsageError if it is none."""
    if isinstance(callback, type):
        raise UsageError(
            f"the callback {callback.__name__} is a class", remedy=f"give an object: {callback.__name__}()"
        )
    events = [name for name in dir(callback) if name.startswith("on_")]
    for name in events:
        if name not in EVENTS:
            raise UsageError(f"the callback {_name(callback)} has '{name}'", remedy=did_you_mean(name, EVENTS))
    if not events and not callable(callback):
        raise UsageError(
            f"the callback {_name(callback)} cannot be called, and has no method of an event",
            remedy=f"give a function, or an object with {', '.join(EVENTS)}",
        )
    if getattr(callback, "ranks", "first") not in ("first", "all"):
        raise UsageError(f"ranks of the callback {_name(callback)} is {callback.ranks!r}", remedy="choices: first, all")
    _state(callback)
    return callback


def _name(callback: Any) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


def _ranks(callback: Any) -> str:
    return str(getattr(callback, "ranks", "first"))


def _handler(callback: Any, event: str) -> Any:
    """Return the callback's function for an event; None for none."""
    if event == "on_step_end" and not any(hasattr(callback, name) for name in EVENTS):
        return callback
    return getattr(callback, event, None)


def _state(callback: Any) -> Any:
    if not all(hasattr(callback, name) for name in _STATE):
        return None
    return encode_json(callback.state_dict(), f"the state of the callback {_name(callback)}")


class _Follower:
    """Base of callbacks that compare a metric of each evaluation with its best value so far.

    Args:
        metric: ``loss``, or a metric of the loss function.
        mode: ``min`` or ``max``; default: by the metric's name.
    """

    ranks = "all"

    def __init__(self, metric: str, mode: str | None) -> None:
        self.values = BestValue(Metric.parse(metric if mode is None else f"{metric}:{mode}", type(self).__name__))

    def better(self, evaluation: Evaluation) -> bool:
        """Add an evaluation, and return whether its value of the callback's metric is better than all before.

        Args:
            evaluation: loss and metrics on held-out samples.

        Raises:
            UsageError: the evaluation does not report the metric.
        """
        name = self.values.metric.name
        if name not in evaluation.values:
            raise UsageError(
                f"the evaluation has no '{name}'",
                where=type(self).__name__,
                remedy=did_you_mean(name, evaluation.values),
            )
        return self.values.add(evaluation.values[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a callback that follows a metric's best value, for a checkpoint.

        Returns:
            A dict with ``metric`` (its name), ``best`` (best value, or None) and ``stale`` (number of evaluations since
            the best one).
        """
        return {"metric": str(self.values.metric.name), "best": self.values.best, "stale": self.values.stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a callback's best value and the number of evaluations since from a checkpoint.

        A state of another metric is ignored.

        Args:
            state: the result of ``state_dict``.

        Raises:
            CheckpointError: the saved best value is not finite.
        """
        if state["metric"] == self.values.metric.name:
            best, stale = state["best"], int(state["stale"])
            if best is not None and not math.isfinite(float(best)):
                raise CheckpointError(f"the saved best value of {type(self).__name__} is {best}")
            self.values.best, self.values.stale = None if best is None else float(best), stale


class EarlyStopping(_Follower):
    """Callback that stops training after ``patience`` evaluations in a row without a better value of a metric.

    Args:
        metric: ``loss``, or the name of a metric that the loss function reports.
        patience: the number of evaluations.
        mode: ``min`` or ``max``, whether lower or higher values are better; default: by the metric's name.

    Raises:
        UsageError: ``patience`` is below 1, ``mode`` is invalid, or is not given for a metric whose name does not tell
            it.
    """

    def __init__(self, metric: str = "loss", patience: int = 5, mode: str | None = None) -> None:
        super().__init__(metric, mode)
        if patience < 1:
            raise UsageError(f"patience is {patience}", where="EarlyStopping", remedy="give 1 or more")
        self.patience = patience

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Compare an evaluation's metric with its best value so far; stop the run if it has not improved for too long.

        The run calls this on every rank after each evaluation. The run is stopped once ``patience`` evaluations in a
        row had no better value. Metric and ``patience`` are those of the callback's constructor.

        Args:
            run: the training run, which is stopped.
            evaluation: loss and metrics of the evaluation, the same on every rank.

        Raises:
            UsageError: the evaluation does not report the metric.
        """
        self.better(evaluation)
        if self.values.exhausted(self.patience):
            run.stop(f"no better {self.values.metric.name} in {counted(self.values.stale, 'evaluation')}")


class BestModel(_Follower):
    """Callback that saves a checkpoint after each evaluation that is the best so far, and keeps only the last one.

    Args:
        folder: directory for these checkpoints and nothing else, on a file system that all ranks share.
        metric: ``loss``, or the name of a metric that the loss function reports.
        mode: ``min`` or ``max``, whether lower or higher values are better; default: by the metric's name.

    Attributes:
        path: directory of the best checkpoint; None before the first is saved.

    Raises:
        UsageError: ``mode`` is invalid, or is not given for a metric whose name does not tell it.
    """

    def __init__(self, folder: str | Path, metric: str = "loss", mode: str | None = None) -> None:
        super().__init__(metric, mode)
        self.folder = Path(folder)
        self.path: Path | None = None

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Save a checkpoint of the run if an evaluation's metric is the best so far.

        The run calls this on every rank after each evaluation. The metric is named in the callback's constructor. The
        checkpoint goes to the callback's folder, from which the earlier one is deleted. The save is collective over all
        ranks (``Run.save``), and returns when the files are on disk.

        Args:
            run: the training run, which is saved.
            evaluation: loss and metrics of the evaluation, the same on every rank.

        Raises:
            UsageError: the evaluation does not report the metric, or the run cannot be saved now, such as in the middle
                of a global batch.
            DiskError: the checkpoint could not be written.
            CheckpointError: the ranks do not share the folder.
            MismatchError: ranks hold different copies of a parameter.
        """
        if self.better(evaluation):
            self.path = run.save(self.folder, keep=1)
