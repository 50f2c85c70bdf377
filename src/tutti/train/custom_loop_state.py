"""State of a custom training loop, which its parts share: the global batch and the body of the loop under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import UsageError, script_line
from tutti.train.noise_parts import MeasuredParts
from tutti.train.script_checks.body_comparison import BodyComparison
from tutti.train.script_checks.gradient_origin import GradientOrigin
from tutti.train.void_body import VoidBody
from tutti.types.custom_loop_sync import AloneLoopSync
from tutti.types.micro_batch import LossSums, MicroBatch
from tutti.types.step_records import StepContext

if TYPE_CHECKING:
    from tutti.train.run import Run

Gradients: TypeAlias = dict[nn.Parameter, Tensor]


@dataclass
class Contribution:
    """Gradients and loss sums of a rank's earlier micro-batches of a global batch, kept until the last one is reduced.

    Attributes:
        gradients: gradient by parameter; parameters without a gradient are missing.
        used: under FSDP2, whose backward reduces gradients by itself: for each parameter of ``pop_reached``, in its
            order, whether a backward on this rank has given it a gradient; empty under other strategies.
        loss_sums: loss sums of each logical data-parallel worker (a fixed share of the global batch) by its number, in
            increasing order.
    """

    gradients: Gradients = field(default_factory=dict)
    used: list[bool] = field(default_factory=list)
    loss_sums: dict[int, LossSums] = field(default_factory=dict)


@dataclass
class GlobalBatchState:
    """State of the global batch that the bodies of a custom training loop train on this rank; it lasts until the next.

    Attributes:
        is_open: whether the batch has begun, and neither an update nor the end of the last body has ended it.
        is_counted: whether it counts as consumed.
        busy: workers of this rank with samples in it, in order.
        idle: workers of this rank without.
        is_watched: whether the losses of its bodies are checked for values of other workers' samples.
        bank: gradients of earlier bodies, by reduction of the body and by worker (-1: of all together).
        settings: the optimizers' settings at each reduction of the first body, by which ranks of any number of bodies
            compare them.
        alone: whether workers make updates of their own in this step (local SGD).
        ending: the step, until the parameters of such workers are averaged where that is due; None otherwise.
        averaged: whether they were averaged in this step.
        measured: measures the gradient noise in the first reduction of the batch; None where it is not measured.
    """

    is_open: bool = False
    is_counted: bool = False
    busy: Sequence[int] = ()
    idle: Sequence[int] = ()
    is_watched: bool = False
    bank: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    alone: bool = False
    ending: StepContext | None = None
    averaged: bool = False
    measured: MeasuredParts | None = None


class CustomLoopState:
    """Global batch and body under way in a custom training loop, and the records of what the script does in it.

    Args:
        run: the run to train.
        optimizers: the script's optimizers, in the order of ``tutti.prepare``.

    Attributes:
        optimizers: as given.
        origin: tells reduced gradients from those of one micro-batch.
        bodies: compares the calls that the script makes in the bodies of a global batch.
        local: the synchronisation where workers may make updates of their own (local SGD); None for all others.
        batch: the global batch under way, or the last one.
        micro_batch: the micro-batch of the body under way, or of the last one; None before the first and after the last
            body of a global batch.
        in_body: whether the script is in a body.
        is_last_body: whether that body is of the rank's last micro-batch of the global batch.
        void: undoes the body of a worker without samples, where workers make updates of their own; None in other
            bodies.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.origin, self.bodies = GradientOrigin(run, optimizers), BodyComparison(run)
        self.local = run.gradient_sync if isinstance(run.gradient_sync, AloneLoopSync) else None
        self.batch = GlobalBatchState()
        self.micro_batch: MicroBatch | None = None
        self.in_body = self.is_last_body = False
        self.void: VoidBody | None = None

    def micro_batch_of_body(self, call: str) -> MicroBatch:
        """Return the micro-batch of the body that the script is in.

        Args:
            call: the script's call, for the message.

        Raises:
            UsageError: the call is outside of a body.
        """
        if self.micro_batch is None or not self.in_body:
            raise UsageError(
                f"{call} needs a batch of run.microbatches()",
                where=script_line(),
                why="only its batches have a weight in the global batch",
                remedy="loop over run.microbatches(epoch), in place of the old loader",
            )
        return self.micro_batch
