"""`Task`: model, loss, data and metrics of a training task. A user's task function returns one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tutti.config.metric_direction import Direction, check_directions
from tutti.errors import UsageError
from tutti.types.micro_batch import LossFn

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, kw_only=True)
class Task:
    """Definition of a task for ``tutti train``.

    Attributes:
        name: name in output and records.
        model: builds the plain model, without arguments; called once a process under the run's seed.
        loss: ``loss(model, batch)`` → mean over the batch's samples, or ``(sum, count)``, or
            ``(sum, count, {"accuracy": number_correct, …})`` with sums over the samples as metrics.
        train: training samples, as for ``tutti.prepare``; no ``DataLoader``, which has a batch size of its own.
        eval: held-out samples, of the same types as ``train``, or a ``DataLoader``; None for no evaluation.
        images: whether batches hold NCHW images, for which models then have the channels-last memory layout.
        directions: ``lower`` or ``higher``, whichever is better, for metrics whose name does not decide it:
            ``{"distance": "lower"}``. ``--keep-best`` and ``tutti compare`` read it.
        callbacks: functions and objects that the run calls at its events, as in ``tutti.prepare``.
        collate: makes a batch of a list of samples, in training and evaluation; None: as PyTorch's ``DataLoader``.
        optimizer: function from the model to its optimizer, such as one with parameter groups, or to several; None: the
            command line's.
        scheduler: function from the result of ``optimizer`` to a PyTorch scheduler of it, or several; None: the command
            line's schedule.
        scheduler_every: when the run steps the schedulers, as in ``tutti.prepare``: ``update``, ``epoch``,
            ``evaluation`` or ``evaluation:METRIC``.
        describe: description of the data for the header, such as ``"50,000 + 10,000 images 32×32"``.

    Raises:
        UsageError: a direction is unknown, or ``scheduler`` is given without ``optimizer``.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: LossFn
    train: Any
    eval: Any = None
    images: bool = False
    directions: Mapping[str, Direction] = field(default_factory=dict)
    callbacks: Sequence[Any] = ()
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]] | None = None
    scheduler: Callable[[Any], LRScheduler | Sequence[LRScheduler]] | None = None
    scheduler_every: str = "update"
    describe: str = ""

    def __post_init__(self) -> None:
        check_directions(self.directions)
        if self.scheduler is not None and self.optimizer is None:
            raise UsageError(
                "Task(scheduler=…) needs Task(optimizer=…)",
                why="a PyTorch scheduler is made of an optimizer object, and --optimizer is text",
                remedy="let the task make the optimizer, or take --schedule",
            )
