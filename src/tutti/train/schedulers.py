"""PyTorch's learning-rate schedulers, stepped once for each update or epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tutti.checkpoint.json_codec import decode_json, encode_json
from tutti.errors import CheckpointError, UsageError, counted, kind_of, script_line
from tutti.torch_compat import mark_stepped

Given: TypeAlias = "LRScheduler | Sequence[LRScheduler] | None"


class Schedulers:
    """Steps the PyTorch learning-rate schedulers of a run, after each update or each epoch.

    From now on a call of a scheduler's ``step`` by the script raises UsageError: the object's class becomes a subclass.

    Args:
        given: a scheduler, several, or None.
        every: when the schedulers step: ``update``, after each update, or ``epoch``, after each epoch.
        optimizers: the script's optimizers.
        excluded: text of an option with which no scheduler can be combined, for the error; empty for none.

    Raises:
        UsageError: an object is no scheduler of one of the optimizers, needs a metric, or cannot be saved.
    """

    def __init__(self, given: Given, every: str, optimizers: Sequence[Optimizer], excluded: str = "") -> None:
        if every not in ("update", "epoch"):
            raise UsageError(f"scheduler_every is '{every}'", remedy="choices: update, epoch")
        self._every, self._stepping = every, False
        self._own = [given] if isinstance(given, LRScheduler | type) else list(given or ())
        if self._own and excluded:
            raise UsageError(f"a scheduler cannot be combined with {excluded}", remedy="leave out one of the two")
        for scheduler in self._own:
            self._check(scheduler, optimizers)
        for number, scheduler in enumerate(self._own):
            encode_json(scheduler.state_dict(), f"the state of scheduler {number}")
            self._reserve(scheduler)

    def _check(self, scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
        name = type(scheduler).__name__
        if isinstance(scheduler, type):
            raise UsageError(
                f"the scheduler is {kind_of(scheduler)}", remedy=f"give {scheduler.__name__}(optimizer, …)"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                f"a {name} needs a metric, and tutti.prepare has none",
                remedy="leave it out there, and call scheduler.step(run.evaluate(held_out).loss) on every rank",
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
            if not schedulers._stepping:
                raise UsageError(
                    f"the script calls {kind.__name__}.step() of a scheduler that it gave to tutti.prepare",
                    where=script_line(),
                    why=f"the run steps it once an {schedulers._every}, and the rate would change twice",
                    remedy="leave the call out, or leave scheduler out of tutti.prepare",
                )
            kind.step(self, *arguments, **named)

        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "_unreserved": kind})

    def after_update(self, optimizer: Optimizer | None) -> None:
        """Step the script's learning-rate schedulers after an update; do nothing if they step once an epoch.

        Args:
            optimizer: the optimizer that made the update, whose schedulers step; None: the schedulers of all of the
                script's optimizers step.
        """
        if self._every == "update":
            self._step([s for s in self._own if optimizer is None or s.optimizer is optimizer])

    def after_epoch(self) -> None:
        """Step all learning-rate schedulers at the end of an epoch; do nothing if they step after updates."""
        if self._every == "epoch":
            self._step(self._own)

    def _step(self, schedulers: Sequence[LRScheduler]) -> None:
        for scheduler in schedulers:
            # Where each rank's optimizer has a part of the parameters, the script's own is not called.
            mark_stepped(scheduler.optimizer)
            with self._open():
                scheduler.step()

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
        return [encode_json(scheduler.state_dict(), "the state of a scheduler") for scheduler in self._own]

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the states of the run's learning-rate schedulers from a checkpoint.

        Args:
            saved: the checkpoint's facts; ``saved["schedulers"]`` is the result of ``facts``.

        Raises:
            CheckpointError: the checkpoint has another number of schedulers.
        """
        states = saved.get("schedulers", [])
        if len(states) != len(self._own):
            raise CheckpointError(
                f"the checkpoint has {counted(len(states), 'scheduler')}, and the run {len(self._own)}",
                remedy="give tutti.prepare the schedulers of the saved run",
            )
        for scheduler, state in zip(self._own, states, strict=True):
            scheduler.load_state_dict(decode_json(state))
