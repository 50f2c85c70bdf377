"""Gradient noise scale of a run: in some steps compare gradients of parts of a batch with that of the whole.

McCandlish et al. 2018, arXiv 1812.06162, App. A.1. The small batches are micro-batches, or the shares of whole logical
workers where a layout runs the micro-batches of a worker together (pipelines). So they do not depend on the number of
devices. A measured step computes the same update, to the bit where micro-batches run by themselves: gradients are set
aside and added in the order of autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tutti.config.strategy_choice import StrategyChoice
from tutti.optim.noise_scale import NoiseAverage, NoiseEstimate
from tutti.parallel import NoiseBasis, compares_micro_batches
from tutti.train.noise_parts import MeasuredParts, MeasuredRound, MeasuredWorkers, gathered_roots
from tutti.types.gradient_sync import GradientSync
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext, StepStats

_THETA = 0.95

Runner = Callable[[Sequence[MicroBatch], LossFn, GradientReadyHook], LossSums]


class NoiseProbe:
    """Measures the gradient noise scale every few steps, of the gradient and of the gradient preconditioned as by Adam.

    The simple noise scale is tr Σ / |G|², in samples: Σ is the covariance of one sample's gradient, G the expected
    gradient (McCandlish et al. 2018, arXiv 1812.06162). That of the preconditioned gradient is the simple noise scale
    of P^(-1/2)·g, where P = diag(√v̂ + ε) has Adam's denominators before the step: squared norms are Σ g²/(√v̂ + ε). It
    is measured where each rank has the second moments of all parameters, or of the slices that it alone updates.

    Args:
        sync: gradient synchronisation.
        run_context: mesh, communicators and logical data-parallel workers (fixed shares of the global batch) of this
            rank.
        choice: the strategy.
        basis: the gradients that are compared, as ``noise_basis`` returns it. ``batch``: the gradients of parts of the
            global batch with the gradient of the batch. Where workers make updates of their own, ``worker``: the
            gradients of a worker's micro-batches with the worker's gradient; or ``average``: the gradients of all
            workers with their mean, in a step that begins with equal parameters.
        every: interval of measurements in steps; the first step is measured, too. With ``average`` the next step that
            begins with equal parameters is measured.
    """

    def __init__(
        self, sync: GradientSync, run_context: RunContext, choice: StrategyChoice, basis: NoiseBasis, every: int
    ) -> None:
        self._sync, self._run_context, self._row = sync, run_context, choice.row
        self._basis, self._every = basis, every
        self._by_micro_batch = compares_micro_batches(choice, choice.shape(run_context.mesh.size))
        self._simple, self._scaled = NoiseAverage(_THETA), NoiseAverage(_THETA)
        self._measured: MeasuredParts | None = None
        self._latest: dict[str, float] = {}

    def begin(self, step_context: StepContext) -> MeasuredParts | None:
        """Begin a training step, and return the object that measures its gradients; None if the step is not measured.

        Every ``every``-th step is measured, from the first one. Under local SGD, where noise is measured only in steps
        in which all logical workers (shares of the global batch) begin with equal parameters, the next such step is
        measured. Collective over all ranks in a measured step of ZeRO stage 1 and central storage, whose ranks each
        update other parameters: the factors of Adam's preconditioner are gathered (``gathered_roots``).

        Args:
            step_context: the step, whose number decides.
        """
        self._latest, self._measured = {}, None
        taken, basis = step_context.local_step, self._basis
        if basis != "average" and taken % self._every:
            return None
        own = self._sync.own_gradients()
        if basis == "worker":
            self._measured = MeasuredWorkers(own, step_context, meets=not self._row.fault_tolerant)
        elif basis == "batch":
            roots = gathered_roots(own, self._run_context.comms.world)
            self._measured = MeasuredParts(own, step_context, self._by_micro_batch, roots)
        elif own.equal_before is not None and _is_due(taken, self._every, own.equal_before):
            self._measured = MeasuredRound(own, step_context)
        return self._measured

    def runner(self, replica: ReplicaRunner, step_context: StepContext) -> Runner:
        """Begin a training step, and return the function that runs forward and backward of a worker's micro-batches.

        Collective as ``begin`` is. A worker is a logical data-parallel worker, a fixed share of the global batch; a
        rank may compute several.

        Args:
            replica: this rank's part of the model.
            step_context: the step's number, which decides whether the step is measured, and the step's factor on the
                loss.

        Returns:
            A function with the arguments and the result of ``replica.run``: (micro-batches, loss function, gradient
            hook) → ``LossSums``. In the first step and every ``every``-th one after it, this function also records the
            squared norms of the gradients, to measure the gradient noise scale, and does not call the hook; in other
            steps it is ``replica.run`` itself.

        Raises:
            UsageError: the step is measured, and the strategy's workers make updates of their own, as under local SGD.
        """
        measured = self.begin(step_context)
        if measured is None:
            return replica.run
        return lambda micro_batches, loss, grad_hook: measured.run(replica, micro_batches, loss)

    def finish(self, stats: StepStats) -> None:
        """Add a measured step's estimates of the gradient noise to the running averages; do nothing in other steps.

        Nothing is added either if a gradient or an estimate is not finite, or if the gradient of the step is that of a
        single part (a micro-batch or a worker's share), which has no variance. A second call in the same step does
        nothing.

        Collective over all ranks in measured steps: an all-reduce of a few numbers, for which the host waits; under
        local SGD with one micro-batch a worker, also one of the gradient; with asynchronous servers nothing is sent.
        Call it between ``GradientSync.reduce_gradients`` and ``optimizer_step``.

        Args:
            stats: the step's loss, count and gradient norm, reduced over the global batch.
        """
        measured, self._measured = self._measured, None
        if measured is None:
            return
        noise = measured.estimates(stats, self._run_context)
        self._add("noise", self._simple, noise.simple)
        self._add("noise/adam", self._scaled, noise.scaled)

    def _add(self, name: str, average: NoiseAverage, estimate: NoiseEstimate | None) -> None:
        if estimate is None or not all(map(math.isfinite, estimate)):
            return
        average.add(estimate)
        band = average.band()
        self._latest |= {
            f"{name}/scale": band.scale,
            f"{name}/low": band.low,
            f"{name}/high": band.high,
            f"{name}/trace": estimate.trace,
            f"{name}/square": estimate.square,
        }

    def values(self) -> Mapping[str, float]:
        """Return the gradient noise figures of the last step; empty if the step gave no estimate.

        Returns:
            Python floats by name: ``noise/trace`` and ``noise/square``, the step's own estimates of tr Σ (trace of the
            covariance of one sample's gradient) and |G|² (squared norm of the expected gradient); ``noise/scale``, the
            running average of tr Σ divided by that of |G|², in samples; and ``noise/low`` and ``noise/high``, the ends
            of the 90 % confidence interval of ``noise/scale``. Where logical workers (shares of the global batch) have
            parameters of their own, trace and square are means over the workers, at each one's parameters; with
            asynchronous servers over the workers of this rank. The same five names below ``noise/adam/`` are the
            figures of the gradient scaled by Adam's preconditioner, where these can be measured.
        """
        return self._latest

    def state(self) -> dict[str, Any]:
        """Return the running averages of the gradient noise estimates for a checkpoint; ``load`` restores them.

        Returns:
            A JSON value with the keys ``simple`` (of the gradient) and ``adam`` (of the gradient scaled by Adam's
            preconditioner). Each value is a dict: ``weight`` and ``squares`` (sums of the estimates' weights and
            squared weights), and ``sums``, a list of the weighted sums of T, S, T², TS and S², where T estimates tr Σ
            (trace of the covariance of one sample's gradient) and S estimates |G|² (squared norm of its mean).
        """
        return {"simple": self._simple.state(), "adam": self._scaled.state()}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the running averages of the gradient noise estimates from a checkpoint.

        Args:
            saved: the result of ``state``, with the keys ``simple`` and ``adam``.

        Raises:
            ValueError, KeyError, TypeError: ``saved`` is not a valid state.
        """
        self._simple.load(saved["simple"])
        self._scaled.load(saved["adam"])


def _is_due(taken: int, every: int, equal_before: Callable[[int], bool]) -> bool:
    """Return whether a step is the first with equal parameters at or after a multiple of ``every``.

    Args:
        taken: number of the step, from 0.
        every: interval of measurements in steps.
        equal_before: whether all workers have equal parameters before a step.

    >>> [step for step in range(20) if _is_due(step, 5, lambda step: step % 4 == 0)]
    [0, 8, 12, 16]
    """
    if not equal_before(taken):
        return False
    while taken % every:
        taken -= 1
        if equal_before(taken):
            return False
    return True
