"""PyTorch's learning-rate schedulers, stepped once for each update, epoch or evaluation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tutti.checkpoint.json_codec import decode_json, encode_json
from tutti.comm.communicator import Communicator
from tutti.config.named_changes import NamedChanges
from tutti.errors import CheckpointError, MismatchError, UsageError, counted, did_you_mean, kind_of, script_line
from tutti.torch_compat import mark_stepped

Given: TypeAlias = "LRScheduler | Sequence[LRScheduler] | None"

_ROUNDING = 1e-6
"""Largest relative difference between ranks of a metric that is a sum in another order; a guess."""


class Schedulers:
    """Steps the PyTorch learning-rate schedulers of a run, after each update, epoch or evaluation.

    From now on a call of a scheduler's ``step`` by the script raises UsageError: the object's class becomes a subclass.
    A ``ReduceLROnPlateau`` needs a metric: the script steps it, with the same metric on all ranks, unless evaluations
    do.

    Args:
        given: a scheduler, several, or None.
        every: when the schedulers step: ``update``, after each update; ``epoch``, after each epoch; ``evaluation``,
            after each evaluation, a ``ReduceLROnPlateau`` with its loss; ``evaluation:METRIC``, with this metric.
        optimizers: the script's optimizers.
        excluded: text of an option with which no scheduler can be combined, for the error; empty for none.

    Attributes:
        own: the schedulers.

    Raises:
        UsageError: an object is no scheduler of one of the optimizers, or cannot be saved; or ``every`` is malformed.
    """

    def __init__(self, given: Given, every: str, optimizers: Sequence[Optimizer], excluded: str = "") -> None:
        self._every, colon, metric = every.partition(":")
        choices = ("update", "epoch", "evaluation")
        if self._every not in choices or (colon and (self._every != "evaluation" or not metric)):
            raise UsageError(
                f"scheduler_every is '{every}'", remedy=f"choices: {', '.join(choices)}, evaluation:METRIC"
            )
        self._metric, self._stepping = metric or "loss", False
        self._epochs, self._evaluations = 0, 0
        self._comm: Communicator | None = None
        self.own = [given] if isinstance(given, LRScheduler | type) else list(given or ())
        if self.own and excluded:
            raise UsageError(f"a scheduler cannot be combined with {excluded}", remedy="leave out one of the two")
        for scheduler in self.own:
            self._check(scheduler, optimizers)
        for number, scheduler in enumerate(self.own):
            encode_json(scheduler.state_dict(), f"the state of scheduler {number}")
            self._reserve(scheduler)

    def _check(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
        name = type(scheduler).__name__
        if isinstance(scheduler, type):
            raise UsageError(
                f"the scheduler is {kind_of(scheduler)}", remedy=f"give {scheduler.__name__}(optimizer, …)"
            )
        if not isinstance(scheduler, LRScheduler):
            raise UsageError(
                f"the scheduler is a {name}",
                remedy="give a torch.optim.lr_scheduler.LRScheduler, and call others in the loop, where run.stepped",
            )
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise UsageError(
                f"the {name} is of another optimizer than tutti.prepare was given",
                remedy="make the scheduler of the optimizer that is given, as an object and not as text",
            )

    def _reserve(self, scheduler: LRScheduler) -> None:
        """Let the scheduler's ``step`` raise UsageError when the script calls it: the rate would change twice."""
        kind = getattr(type(scheduler), "_unreserved", type(scheduler))
        schedulers = self

        def step(self: LRScheduler, *arguments: Any, **named: Any) -> None:
            if isinstance(self, ReduceLROnPlateau) and schedulers._every != "evaluation":
                arguments, named = schedulers._shared(kind.__name__, *arguments, **named)
            elif not schedulers._stepping:
                raise UsageError(
                    f"the script calls {kind.__name__}.step() of a scheduler that it gave to tutti.prepare",
                    where=script_line(),
                    why=f"the run steps it once an {schedulers._every}, and the rate would change twice",
                    remedy="leave the call out, or leave scheduler out of tutti.prepare",
                )
            kind.step(self, *arguments, **named)

        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "_unreserved": kind})

    def begin(self, comm: Communicator) -> None:
        """Set the communicator over which the schedulers compare the metrics that the script passes to ``step``.

        Args:
            comm: all ranks of the run.
        """
        self._comm = comm

    def _shared(self, name: str, metrics: Any, *arguments: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a plateau's ``step`` with rank 0's metric. Collective: an all-gather of metrics.

        Raises MismatchError if ranks differ by more than rounding.
        """
        value = float(metrics)
        if self._comm is not None:
            mine = torch.tensor([value], dtype=torch.float64)
            values = [float(each) for each in self._comm.all_gather(mine, f"metric of {name}")]
            value = values[0]
            other = next((each for each in values if not _nearly_equal(each, value)), None)
            if other is not None:
                raise MismatchError(
                    f"{name}.step() gets {value:g} on one rank and {other:g} on another",
                    where=script_line(),
                    why="each rank has measured its own samples or weights, and ranks would use different rates",
                    remedy="give it run.evaluate(held_out).loss, or run.stats.loss, the mean over the global batch",
                )
        return (value, *arguments), named

    def after_update(self, optimizer: Optimizer | None) -> None:
        """Step the script's learning-rate schedulers after an update, if ``every`` (of the constructor) is ``update``.

        Args:
            optimizer: the optimizer that made the update, whose schedulers step; None: the schedulers of all of the
                script's optimizers step.
        """
        if self._every == "update":
            self._step([s for s in self.own if optimizer is None or s.optimizer is optimizer])

    def after_epoch(self) -> None:
        """Step all learning-rate schedulers at the end of an epoch, if ``every`` (of the constructor) is ``epoch``.

        Warns once, at the end of the second epoch, if ``every`` is ``evaluation`` and the run has made no evaluation.
        """
        self._epochs += 1
        if self._every == "epoch":
            self._step(self.own)
        if self._every == "evaluation" and self.own and (self._epochs, self._evaluations) == (2, 0):
            warnings.warn(
                f"no scheduler has stepped: scheduler_every='evaluation' steps {type(self.own[0]).__name__} after each"
                " run.evaluate, and there was none in two epochs; call run.evaluate(held_out), or take"
                " scheduler_every='epoch'",
                stacklevel=2,
            )

    def after_evaluation(self, values: Mapping[str, float]) -> None:
        """Step all learning-rate schedulers after an evaluation, if ``every`` (of the constructor) is ``evaluation``.

        Collective over all ranks if one is a ``ReduceLROnPlateau``: a broadcast of rank 0's metric, because sums in
        another order may differ in the last bit.

        Args:
            values: held-out loss and metrics by name.

        Raises:
            UsageError: ``values`` lacks the metric of ``scheduler_every``.
        """
        self._evaluations += 1
        if self._every != "evaluation" or not self.own:
            return
        if self._metric not in values:
            raise UsageError(
                f"the evaluation has no '{self._metric}'",
                where=f"scheduler_every='evaluation:{self._metric}'",
                remedy=did_you_mean(self._metric, values),
            )
        self._step(self.own)
        plateaus = [scheduler for scheduler in self.own if isinstance(scheduler, ReduceLROnPlateau)]
        if plateaus and self._comm is not None:
            mine = encode_json(float(values[self._metric]), self._metric)
            self._step(plateaus, decode_json(self._comm.broadcast_json(mine, 0, "metric of the schedulers")))

    def _step(self, schedulers: Sequence[Any], *metrics: float) -> None:
        for scheduler in schedulers:
            if not metrics and isinstance(scheduler, ReduceLROnPlateau):
                # The script steps it, or an evaluation.
                continue
            # Where each rank's optimizer has a part of the parameters, the script's own is not called.
            mark_stepped(scheduler.optimizer)
            with self._open():
                scheduler.step(*metrics)

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def facts(self) -> list[Any]:
        """Return the states of the run's learning-rate schedulers for a checkpoint.

        Returns:
            A list with each scheduler's ``state_dict()`` as a JSON value, in the order in which the script gave them.

        Raises:
            UsageError: a state holds a value that JSON cannot hold.
        """
        return [encode_json(scheduler.state_dict(), "the state of a scheduler") for scheduler in self.own]

    def refuse_change(self, named: NamedChanges) -> None:
        """Raise UsageError if a resume names the learning rate, which the saved state of a scheduler sets.

        Args:
            named: settings in which the resumed run may differ from its checkpoint.
        """
        if "lr" in named.names and self.own:
            raise UsageError(
                "lr cannot be changed while tutti.prepare has a scheduler",
                why="the scheduler's saved state sets the rate",
                remedy="leave scheduler out of tutti.prepare and step your own in the loop, where run.stepped",
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the states of the run's learning-rate schedulers from a checkpoint.

        Args:
            saved: the checkpoint's facts; ``saved["schedulers"]`` is the result of ``facts``.

        Raises:
            CheckpointError: the checkpoint has another number of schedulers.
        """
        states = saved.get("schedulers", [])
        if len(states) != len(self.own):
            raise CheckpointError(
                f"the checkpoint has {counted(len(states), 'scheduler')}, and the run {len(self.own)}",
                remedy="give tutti.prepare the schedulers of the saved run",
            )
        for scheduler, state in zip(self.own, states, strict=True):
            scheduler.load_state_dict(decode_json(state))


def _nearly_equal(one: float, other: float) -> bool:
    """Return whether two metrics differ by rounding at most; NaN equals NaN."""
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=_ROUNDING)
