"""Records of a training step: its facts before it, its results, its update, and its line in ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


@dataclass(frozen=True)
class StepContext:
    """Facts of one training step that are the same for all logical workers, the N fixed shares of the global batch.

    Attributes:
        local_step: steps that this rank has taken before this one; ranks of asynchronous servers may differ in it.
        samples: samples in this step's global batch; for a batch that the caller passed to ``run.step``, as many as the
            configuration states.
        lr_factor: factor on every parameter group's initial learning rate; None leaves the rate to the user.
        stop: whether this rank asks all ranks to stop after the step; may differ between ranks, and so is reduced with
            the loss sums.
        loss_scale: factor on the loss in backward; gradients are divided by it before their norm is taken.
        call: index of this gradient synchronisation within the step, from 0; a custom training loop may make several.
        whole: whether the global batch is a single micro-batch, whose backward divides by the loss's count.
        settings: learning rates, momenta and weight decays of the script's optimizers, compared over data ranks.
        data_position: epoch and global batch after which the data stand, compared over data ranks; (0, 0) for a batch
            that the caller made.
        written: returns the digest of the parameters if the script or a forward has written them since the last
            update, compared over data ranks; 0 if not. To be called after the rank's last forward.
        compare: function that compares the parameters over the data ranks and raises UsageError where they differ. It
            is collective: all data ranks call it if ``written`` differs between any of them. None where the strategy
            cannot compare parameters.
        edits: a line for each parameter, of which each rank has a part, that the script has written since the last
            step; compared over all ranks.
        edited_in: place in the script of the last such write, as ``FILE:LINE``.
    """

    local_step: int
    samples: int
    lr_factor: float | None = None
    stop: bool = False
    loss_scale: float = 1.0
    call: int = 0
    whole: bool = False
    settings: str = ""
    data_position: tuple[int, int] = (0, 0)
    written: Callable[[], int] = int
    compare: Callable[[], None] | None = None
    edits: Sequence[str] = ()
    edited_in: str = ""


class GradientVariance(NamedTuple):
    """Mean square of the logical workers' own gradients, before clipping and without loss scale.

    A logical worker is one of N fixed shares of the global batch.

    Attributes:
        mean_of_squares: Σ pᵢ‖gᵢ‖², where pᵢ is worker i's part of the global count.
        workers: number of workers with at least one sample.
    """

    mean_of_squares: float
    workers: int


@dataclass(frozen=True)
class StepStats:
    """Results of one training step, reduced over the global batch.

    With asynchronous parameter servers the results are reduced over this rank's logical workers (fixed shares of the
    global batch) alone.

    Attributes:
        loss: mean over ``count``.
        count: samples, tokens, pixels or other units that the loss function counts.
        metrics: means over ``count`` by name.
        grad_norm: norm of the complete gradient, before clipping and without loss scale; where workers make updates of
            their own, the mean of their gradients' norms.
        finite: whether no gradient has a NaN or infinity.
        stop: whether a rank asked all ranks to stop after this step.
        gradient_variance: mean square of the workers' own gradients; None where it is not measured.
    """

    loss: float
    count: float
    metrics: Mapping[str, float]
    grad_norm: float
    finite: bool
    stop: bool = False
    gradient_variance: GradientVariance | None = None

    def known(self) -> StepStats:
        """Return the step's results as numbers in host memory, which is this object itself.

        The subclass ``PendingStats``, whose results are still on the device, waits for them.
        """
        return self


class PendingStats(StepStats):
    """Results of one training step that are still on the device; the first read of an attribute waits for them.

    ``AllReduceSync.reduce_gradients`` returns one on accelerators where the device itself can skip the update, so that
    the host launches the update before it has read the results.

    Args:
        read: waits for the device; returns the results, and whether the device has allowed the update. Called once; it
            may raise.
        launch: launches the step's update, which the device skips where it must not be made; does not wait.
    """

    _found: tuple[StepStats, bool] | None

    def __init__(self, read: Callable[[], tuple[StepStats, bool]], launch: Callable[[StepContext], None]) -> None:
        for name, value in (("_read", read), ("_launch", launch), ("_found", None)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.known(), name) if name in _RESULTS else super().__getattribute__(name)

    def known(self) -> StepStats:
        """Wait for the device if the results have not been read yet, and return them as a plain ``StepStats``."""
        return self._wait()[0]

    def _wait(self) -> tuple[StepStats, bool]:
        found: tuple[StepStats, bool] = self._read() if self._found is None else self._found
        object.__setattr__(self, "_found", found)
        return found

    def update_first(self, step_context: StepContext) -> bool:
        """Launch the step's update, and then wait for the results.

        Called in place of the usual update, by ``optimizer_step`` or a custom training loop. Not collective, except
        where the results show that ranks differ: all ranks then all-gather the differing values.

        Args:
            step_context: the step under way, with the factor on the initial learning rate.

        Returns:
            True if the update was made. False if it was not, so that the caller makes the usual update, or skips it by
            ``finite``: the device has skipped it, because a gradient is not finite, gradients had first to be divided
            by a count other than the batch's samples (which is done now), or ranks differ only in which parameters the
            script has written, with equal values; or the results had been read before, and nothing was launched.

        Raises:
            MismatchError: ranks are in different steps, or differ in batches, settings or parameters; nothing is
                updated.
            UsageError: parameters that the script has written, or its edits of split ones, differ between ranks; or an
                error in the script's writes of buffers, as in ``AllReduceSync.reduce_gradients``.
            PeerError: ranks differ, and one does not take part in the comparison.
        """
        if self._found is not None:
            return False
        self._launch(step_context)
        return self._wait()[1]

    def __repr__(self) -> str:
        return repr(self.known())

    def __eq__(self, other: object) -> bool:
        return self.known() == (other.known() if isinstance(other, StepStats) else other)

    __hash__ = None  # type: ignore[assignment]


_RESULTS = frozenset(each.name for each in fields(StepStats))


@dataclass(frozen=True)
class UpdateResult:
    """Result of the update at the end of a training step (``GradientSync.optimizer_step``).

    A worker is a logical worker, one of N fixed shares of the global batch; under local SGD each updates by itself.

    Attributes:
        updates: number of updates of the parameters that this step counts for: 1, 0 for a skipped update; with
            asynchronous parameter servers all updates since this rank's last step.
        skipped: whether the update, or that of one of the workers, was skipped because a gradient is not finite.
        nonfinite: names of parameters whose gradient is not finite.
        in_sync: whether the parameters on this rank are now those of the whole run, and not one worker's own.
        global_step: steps of all workers together, where the run counts these (asynchronous servers); None where each
            rank's own steps count.
    """

    updates: int
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    in_sync: bool = True
    global_step: int | None = None

    @classmethod
    def joint(cls, stats: StepStats, nonfinite: tuple[str, ...]) -> UpdateResult:
        """Return the result of the one update that all workers make together, which a non-finite gradient skips.

        A worker is a logical worker, one of N fixed shares of the global batch. Makes no update itself.

        Args:
            stats: results of the step; its ``finite`` tells whether the update was made.
            nonfinite: names of parameters whose gradient is not finite; empty where all are.

        Returns:
            An ``UpdateResult`` with ``updates`` 1 and ``skipped`` False, or 0 and True where ``finite`` is False.
        """
        return cls(int(stats.finite), skipped=not stats.finite, nonfinite=nonfinite)


@dataclass(frozen=True)
class StepRecord:
    """Numbers of one training step for loggers; each step is a line of ``metrics.jsonl``.

    Attributes:
        step: number of steps made so far, this one included.
        epoch: epoch of the step, from 1.
        samples: number of training samples so far.
        updates: number of updates of the parameters so far.
        loss, metrics: means over the global batch.
        grad_norm: norm of the gradient, before clipping; None if unknown.
        lr: learning rate of the first parameter group; None without one.
        skipped: whether the update was skipped because a gradient is not finite.
        loss_scale: factor on the loss in backward; None without loss scaling.
        adascale: figures of AdaScale by name; empty without it.
        noise: figures of the gradient noise by name; empty in steps that do not measure it.
        bubble: idle fraction, 0 to 1, of the pipeline's schedule in this step; None without pipeline stages.
    """

    step: int
    epoch: int
    samples: int
    updates: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float | None = None
    skipped: bool = False
    loss_scale: float | None = None
    adascale: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    bubble: float | None = None
