"""Gradient noise scale of a run: in some steps compare each micro-batch's own gradient with the whole batch's.

McCandlish et al. 2018, arXiv 1812.06162, App. A.1. The small batches are micro-batches, or the shares of whole logical
workers where a layout runs the micro-batches of a worker together (pipelines). So they do not depend on the number of
devices. A measured step computes the same update, to the bit where micro-batches run by themselves: gradients are set
aside and added in the order of autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutti.config.strategy_choice import Choice
from tutti.optim.noise_scale import NoiseAverage, NoiseEstimate, noise_estimate
from tutti.optim.several import members_of
from tutti.parallel.ddp.gradient_arithmetic import squares_of
from tutti.parallel.normalisation import divisor_of_backward, mean_factor
from tutti.types.gradient_sync import GradientSync, OwnGradients
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext, StepStats

_THETA = 0.95

Runner = Callable[[Sequence[MicroBatch], LossFn, GradientReadyHook], LossSums]


class NoiseProbe:
    """Measures the simple noise scale, and that of the gradient scaled by Adam's preconditioner, every few steps.

    The simple noise scale is tr Σ / |G|², in samples: Σ is the covariance of one sample's gradient, G the expected
    gradient (McCandlish et al. 2018, arXiv 1812.06162). With P = diag(√v̂ + ε), the denominator of Adam before the
    step, the second is the simple noise scale of P^(-1/2)·g: squared norms are Σ g²/(√v̂ + ε). It is measured where
    each rank has the second moments of its whole gradients.

    Args:
        sync: gradient synchronisation.
        run_context: mesh, communicators and logical data-parallel workers (fixed shares of the global batch) of this
            rank.
        choice: the strategy.
        every: interval of measurements in steps.
    """

    def __init__(self, sync: GradientSync, run_context: RunContext, choice: Choice, every: int) -> None:
        self._sync, self._run_context, self._every = sync, run_context, every
        self._apart = choice.row.own_backward
        self._simple, self._scaled = NoiseAverage(_THETA), NoiseAverage(_THETA)
        self._measured: _MeasuredStep | None = None
        self._latest: dict[str, float] = {}

    def begin(self, replica: ReplicaRunner, step_context: StepContext) -> Runner:
        """Begin a training step, and return the function that runs forward and backward of a worker's micro-batches.

        Not collective. A worker is a logical data-parallel worker, a fixed share of the global batch; a rank may
        compute several.

        Args:
            replica: this rank's part of the model.
            step_context: the step's number, which decides whether the step is measured, and the step's factor on the
                loss.

        Returns:
            A function with the arguments and the result of ``replica.run``: (micro-batches, loss function, gradient
            hook) → ``LossSums``. In every ``every``-th step this function also records the squared norms of the
            gradients, to measure the gradient noise scale, and does not call the hook; in other steps it is
            ``replica.run`` itself.

        Raises:
            UsageError: the step is measured, and the strategy's workers make updates of their own, as under local SGD.
        """
        self._latest, self._measured = {}, None
        if step_context.taken % self._every:
            return replica.run
        own = self._sync.own_gradients()
        self._measured = _MeasuredStep(replica, own, self._apart, step_context)
        return self._measured.run

    def finish(self, stats: StepStats, step_context: StepContext) -> None:
        """Add a measured step's estimates of the gradient noise to the running averages; do nothing in other steps.

        Nothing is added either if a gradient or an estimate is not finite, or if the gradient of the step is that of a
        single part (a micro-batch or a worker's share), which has no variance.

        Collective over all ranks in measured steps: an all-reduce of five numbers, for which the host waits. Call it
        between ``GradientSync.reduce_gradients`` and ``optimizer_step``.

        Args:
            stats: the step's loss, count and gradient norm, reduced over the global batch.
            step_context: number of the step and samples of its global batch.
        """
        measured, self._measured = self._measured, None
        if measured is None:
            return
        comms, grid = self._run_context.comms, self._run_context.grid
        whole = measured.scaled_square() if grid.data_rank == 0 else 0.0
        leads = comms.model.rank == 0
        numbers = [measured.squares, leads * measured.parts, measured.scaled, whole, float(measured.has_scale)]
        message = torch.tensor(numbers, dtype=torch.float64, device=comms.world.device)
        comms.world.all_reduce(message, f"all_reduce of gradient noise in step {step_context.taken + 1}")
        squares, parts, scaled, scaled_whole, able = message.tolist()
        if not stats.finite or parts < 2:
            return
        # Σ pᵢ‖gᵢ‖² from Σ ‖sᵢ‖²/cᵢ of the sums sᵢ over cᵢ counts.
        factor = (measured.mean_factor(stats) ** 2) * stats.count
        count, samples = round(parts), step_context.samples
        estimate = noise_estimate(squares * factor, stats.grad_norm**2, count, samples)
        self._add("noise", self._simple, estimate)
        if able == comms.world.size:
            estimate = noise_estimate(scaled * factor, scaled_whole, count, samples)
            self._add("noise/adam", self._scaled, estimate)

    def _add(self, name: str, average: NoiseAverage, estimate: NoiseEstimate) -> None:
        if not all(map(math.isfinite, estimate)):
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
            of the 90 % confidence interval of ``noise/scale``. The same five names below ``noise/adam/`` are the
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


class _SilentHook:
    """A gradient-ready hook that starts no message during backward: gradients are measured before they are sent."""

    def prepare_for_backward(self, part: LossSums | None) -> None:
        """Do nothing: the reduction begins in ``reduce_gradients``."""

    def gradient_ready(self, parameter: Tensor) -> None:
        """Do nothing."""


class _MeasuredStep:
    """Runs the micro-batches of one step and sums the squares of each part's own gradient.

    Attributes:
        squares: Σ ‖sᵢ‖²/cᵢ over the parts of this rank, where sᵢ is the gradient of a sum over cᵢ counts.
        scaled: the same of the preconditioned gradient.
        parts: number of parts with samples.
        has_scale: whether this rank has second moments of all its gradients.
    """

    def __init__(self, replica: ReplicaRunner, own: OwnGradients, apart: bool, step_context: StepContext) -> None:
        self._replica, self._own, self._apart, self._step_context = replica, own, apart, step_context
        self._roots = _inverse_roots(own)
        self._products: list[Tensor] = []
        self.has_scale = self._roots is not None
        self.squares = self.scaled = 0.0
        self.parts = 0
        if own.take_squares is not None:
            own.take_squares()

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook) -> LossSums:
        """As ``ReplicaRunner.run``; ``grad_hook`` is not called."""
        total: LossSums | None = None
        for part in [[each] for each in micro_batches] if self._apart else [micro_batches]:
            sums = self._measure(part, loss)
            total = sums if total is None else total + sums
        if total is None:
            raise ValueError("run needs at least one micro-batch")
        return total

    def _measure(self, part: Sequence[MicroBatch], loss: LossFn) -> LossSums:
        parameters = self._own.parameters
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        sums = self._replica.run(part, loss, _SilentHook())
        own = [p.grad for p in parameters]
        count = float(sums.sums[1]) if any(each.samples for each in part) else 0.0
        square = sum(squares_of([g for g in own if g is not None]))
        if self._own.take_squares is not None:
            square += self._own.take_squares()
        if count > 0:
            below = count * self._step_context.loss_scale**2
            self.squares += square / below
            self.parts += 1
            self.scaled += self._weighted_square(own) / below
        for p, earlier in zip(parameters, before, strict=True):
            if earlier is not None:
                p.grad = earlier if p.grad is None else earlier.add_(p.grad)
        return sums

    def mean_factor(self, stats: StepStats) -> float:
        """Return the factor from a sum of this step's gradients to the mean over the global batch."""
        return mean_factor(divisor_of_backward(self._step_context), stats.count)

    def scaled_square(self) -> float:
        """Return the square of this rank's part of the preconditioned gradient of the whole batch, after reduction."""
        return self._weighted_square([p.grad for p in self._own.parameters])

    @torch.no_grad()
    def _weighted_square(self, gradients: Sequence[Tensor | None]) -> float:
        """Return Σ g²/(√v̂ + ε); 0 without second moments.

        The products are written to the same memory for each part: fresh memory would cost more than the arithmetic.
        """
        if self._roots is None:
            return 0.0
        if not self._products:
            self._products = [
                torch.empty_like(root, dtype=torch.promote_types(p.dtype, root.dtype))
                for p, root in zip(self._own.parameters, self._roots, strict=True)
            ]
        rows = zip(gradients, self._roots, self._products, strict=True)
        return sum(squares_of([torch.mul(g, root, out=product) for g, root, product in rows if g is not None]))


@torch.no_grad()
def _inverse_roots(own: OwnGradients) -> list[Tensor] | None:
    """Return (√v̂ + ε)^(-1/2) of each parameter from Adam's second moments; None where any has none."""
    if own.take_squares is not None or not own.optimizers:
        return None
    members = [member for optimizer in own.optimizers for member in members_of(optimizer)]
    groups = [(member.state, group) for member in members for group in member.param_groups]
    roots = {p: _inverse_root(p, state.get(p, {}), group) for state, group in groups for p in group["params"]}
    found = [root for p in own.parameters if (root := roots.get(p)) is not None]
    return found if len(found) == len(own.parameters) else None


def _inverse_root(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """Return (√v̂ + ε)^(-1/2) of one parameter; None without second moments.

    Args:
        parameter: the parameter.
        state: its state, with ``exp_avg_sq`` (``max_exp_avg_sq`` with amsgrad) and ``step``.
        group: its parameter group, with ``betas`` and ``eps``.
    """
    moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if not isinstance(moment, Tensor) or moment.shape != parameter.shape or "betas" not in group:
        return None
    correction = 1 - group["betas"][1] ** float(state["step"]) if "step" in state else 1.0
    return (moment / correction).sqrt_().add_(group["eps"]).rsqrt_()
