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
from tutti.types.custom_loop_sync import LocalStepSync
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
        used: under FSDP2, whose backward reduces gradients by itself: for each parameter, in the order of
            ``GradientSync.pop_reached``, whether a backward on this rank has given it a gradient; empty under other
            strategies.
        loss_sums: loss sums of each logical data-parallel worker (a fixed share of the global batch) by its number, in
            increasing order.
    """

    gradients: Gradients = field(default_factory=dict)
    used: list[bool] = field(default_factory=list)
    loss_sums: dict[int, LossSums] = field(default_factory=dict)


@dataclass
class GlobalBatchState:
    """State of one global batch in a custom training loop on this rank, from its first loop body to the next batch.

    A body is one pass of the script's loop: the code for one micro-batch. A worker is a logical worker, a fixed share
    of the global batch.

    Attributes:
        is_open: whether the batch has begun, and neither an update nor the end of the last body has ended it.
        is_counted: whether the run's step number and data position count the batch as consumed.
        busy: indices of this rank's workers with samples in the batch, in increasing order.
        idle: indices of this rank's workers without samples in it.
        is_watched: whether ``CrossWorkerWatch`` or ``CrossStepWatch`` checks the losses of its bodies.
        bank: gradients of the rank's earlier bodies, by index of the reduction in the body and index of the worker; -1
            in place of the worker where the strategy sums all workers together.
        settings: text of the optimizers' settings, such as ``lr``, at each reduction of the first body, which ranks
            compare.
        is_local_step: whether each worker makes an update of its own in this step (local SGD).
        ending: the step's context while an average of the workers' parameters may still be due; else None.
        averaged: whether the workers' parameters were averaged in this step.
        measured: measures the gradient noise in the first reduction of the batch; None where it is not measured.
    """

    is_open: bool = False
    is_counted: bool = False
    busy: Sequence[int] = ()
    idle: Sequence[int] = ()
    is_watched: bool = False
    bank: dict[tuple[int, int], Contribution] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    is_local_step: bool = False
    ending: StepContext | None = None
    averaged: bool = False
    measured: MeasuredParts | None = None


class CustomLoopState:
    """State of a custom training loop: the global batch and loop body under way, and records of the script's calls.

    A body is one pass of the script's loop: the code for one micro-batch.

    Args:
        run: the run to train.
        optimizers: the script's optimizers, in the order of ``tutti.prepare``.

    Attributes:
        optimizers: as given.
        origin: records which gradients in ``.grad`` were reduced over ranks, and which are of one micro-batch.
        bodies: compares the script's calls in the bodies of a global batch, which must be the same in each.
        local: the gradient synchronisation if each logical worker may make its own updates (local SGD); else None.
        batch: the global batch under way, or the last one.
        micro_batch: the micro-batch of the body under way, or of the last one; None before the first and after the last
            body of a global batch.
        in_body: whether the script is in a body.
        is_last_body: whether that body is for the rank's last micro-batch of the global batch.
        void: under local SGD, undoes the effects of a body of a worker without samples; None in other bodies.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.origin, self.bodies = GradientOrigin(run, optimizers), BodyComparison(run)
        self.local = run.gradient_sync if isinstance(run.gradient_sync, LocalStepSync) else None
        self.batch = GlobalBatchState()
        self.micro_batch: MicroBatch | None = None
        self.in_body = self.is_last_body = False
        self.void: VoidBody | None = None

    def micro_batch_of_body(self, call: str) -> MicroBatch:
        """Return the micro-batch for which the script's loop body is running; raise UsageError outside of a body.

        Args:
            call: the script's call that needs it, such as ``run.backward``, for the message.

        Raises:
            UsageError: no body of a loop over ``run.microbatches`` is running.
        """
        if self.micro_batch is None or not self.in_body:
            raise UsageError(
                f"{call} needs a batch of run.microbatches()",
                where=script_line(),
                why="only its batches have a weight in the global batch",
                remedy="loop over run.microbatches(epoch), in place of the old loader",
            )
        return self.micro_batch
