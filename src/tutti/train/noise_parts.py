"""Squared norms of gradients in a measured step, from which its gradient noise is estimated.

A part is a micro-batch, or the share of a whole logical worker where a layout runs the micro-batches of a worker
together (pipelines). Gradients of parts are compared with the gradient of the batch (``MeasuredParts``), with that of
the worker at its own parameters (``MeasuredWorkers``), or workers with one another while their parameters are equal
(``MeasuredRound``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.optim.noise_scale import NoiseEstimate, noise_estimate
from tutti.optim.several import members_of
from tutti.parallel.ddp.gradient_arithmetic import accumulated, scaled_squares_of, squares_of
from tutti.parallel.normalisation import divisor_of_backward, mean_factor
from tutti.train.partial_state import gathered_state
from tutti.types.gradient_sync import OwnGradients
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.replica_runner import ReplicaRunner, SilentHook
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext, StepStats


class StepNoise(NamedTuple):
    """Estimates of the gradient noise from one step: of tr Σ and |G|².

    Σ is the covariance of one sample's gradient, G the expected gradient.

    Attributes:
        simple: estimates for the gradient; None if the step gave none.
        scaled: estimates for the gradient scaled by Adam's preconditioner; None without Adam's second moments.
    """

    simple: NoiseEstimate | None = None
    scaled: NoiseEstimate | None = None


class MeasuredParts:
    """Sums the squared gradient norms of the parts of a global batch, from which the gradient noise is estimated.

    A part is a micro-batch, or all micro-batches of a logical worker (fixed share of the global batch) where a pipeline
    runs them together. ``estimates`` compares the parts' gradients with the gradient of the global batch.

    Args:
        own: parameters in whose ``.grad`` backward leaves the parts' gradients, and their optimizers.
        step_context: the step under way.
        apart: whether each micro-batch is a part; False where all micro-batches of a worker are one part.
        roots: Adam's factors (√v̂ + ε)^(-1/2), a tensor for each parameter, from ``gathered_roots``, where each rank
            updates other parameters (``own.slices``); else None.
    """

    def __init__(
        self, own: OwnGradients, step_context: StepContext, apart: bool, roots: list[Tensor] | None = None
    ) -> None:
        self._own, self._step_context, self._apart = own, step_context, apart
        self._factors_of: dict[int, list[Tensor] | None] = {} if own.slices is None else {-1: roots}
        # Of the parts so far: Σ ‖s‖²/c for the gradient s of a sum over c counts, the same scaled, and their number.
        self._squares = self._scaled = 0.0
        self._parts = 0
        if own.take_squares is not None:
            own.take_squares()

    def run(self, replica: ReplicaRunner, micro_batches: Sequence[MicroBatch], loss: LossFn) -> LossSums:
        """Run forward and backward of a worker's micro-batches as ``ReplicaRunner.run``, and add up squared norms.

        A logical worker is a fixed share of the global batch. No gradient-ready hook is called, so that no all-reduce
        of gradients overlaps with backward.

        Args:
            replica: this rank's part of the model.
            micro_batches: the worker's micro-batches, in order; at least one.
            loss: the loss function.

        Returns:
            The ``LossSums`` of the micro-batches together.

        Raises:
            ValueError: ``micro_batches`` is empty.
        """
        worker, total = micro_batches[0].worker, None
        for part in [[each] for each in micro_batches] if self._apart else [micro_batches]:
            samples = sum(each.samples for each in part)
            sums = self.measure(lambda part=part: replica.run(part, loss, SilentHook()), worker, samples)  # type: ignore[misc]
            total = sums if total is None else total + sums
        if total is None:
            raise ValueError("run needs at least one micro-batch")
        total.whole = micro_batches[0].whole
        self.end_worker(worker, total)
        return total

    def measure(self, compute: Callable[[], LossSums], worker: int, samples: int) -> LossSums:
        """Run backward of one part, and add its squared gradient norm, and its gradient, to those of earlier parts.

        ``.grad`` has the same bits afterwards as without the measurement. Performs only the collectives of ``compute``.

        Args:
            compute: runs the part's backward, which leaves the gradient in ``.grad``, and returns its loss sums.
            worker: index of the part's logical worker, a fixed share of the global batch.
            samples: samples of the part; 0 for a dummy micro-batch, which is not counted.

        Returns:
            The result of ``compute``.
        """
        parameters = self._own.parameters
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        sums = compute()
        count = float(sums.sums[1]) if samples else 0.0
        plain, scaled = self._squares_of(worker)
        if self._own.take_squares is not None:
            plain += self._own.take_squares()
        if count > 0:
            below = count * self._step_context.loss_scale**2
            self._squares += plain / below
            self._scaled += scaled / below
            self._parts += 1
        for p, earlier in zip(parameters, before, strict=True):
            if earlier is not None:
                p.grad = earlier if p.grad is None else accumulated(earlier, p.grad)
        return sums

    def end_worker(self, worker: int, part: LossSums) -> None:
        """Do nothing; subclasses read here the gradient of all of a logical worker's samples from ``.grad``.

        Called after the worker's last backward, before ``GradientSync.end_worker``. Not collective.

        Args:
            worker: index of the logical worker, a fixed share of the global batch.
            part: the worker's loss sums, with ``samples`` and ``whole``.
        """

    def estimates(self, stats: StepStats, run_context: RunContext) -> StepNoise:
        """Return the step's estimates of the gradient noise, equal on all ranks.

        Collective over all ranks: an all-reduce of five numbers, for which the host waits. Called after
        ``GradientSync.reduce_gradients``, whose result is in ``.grad``.

        Args:
            stats: the step's loss, count and gradient norm, reduced over the global batch.
            run_context: mesh and communicators.

        Returns:
            A ``StepNoise``; without estimates if a gradient is not finite or if the batch has a single part, which has
            no variance. ``scaled`` is None unless every rank has Adam's second moments of the parameters, or slices of
            parameters, that it updates.
        """
        comms, mesh = run_context.comms, run_context.mesh
        able = self._factors(0) is not None
        whole = 0.0
        if able and self._own.slices is not None:
            whole = _squares_of_pieces(self._own)
        elif able and mesh.data_rank == 0:
            whole = self._squares_of(0)[1]
        leads = comms.model.rank == 0
        numbers = [self._squares, leads * self._parts, self._scaled, whole, float(able)]
        squares, parts, scaled, scaled_whole, ranks = self._sum(numbers, comms.world)
        if not stats.finite or parts < 2:
            return StepNoise()
        # Σ pᵢ‖gᵢ‖² from Σ ‖sᵢ‖²/cᵢ of the sums sᵢ over cᵢ counts.
        factor = mean_factor(divisor_of_backward(self._step_context), stats.count) ** 2 * stats.count
        count, samples = round(parts), self._step_context.samples
        simple = noise_estimate(squares * factor, stats.grad_norm**2, count, samples)
        if ranks < comms.world.size:
            return StepNoise(simple)
        return StepNoise(simple, noise_estimate(scaled * factor, scaled_whole, count, samples))

    def _sum(self, numbers: Sequence[float], comm: Communicator) -> list[float]:
        """Return the sums of numbers over the ranks of a communicator. Collective over them."""
        message = torch.tensor(numbers, dtype=torch.float64, device=comm.device)
        comm.all_reduce(message, f"all_reduce of gradient noise in step {self._step_context.local_step + 1}")
        return [float(number) for number in message.tolist()]

    def _factors(self, worker: int) -> list[Tensor] | None:
        """Return the factors of the preconditioned gradient by the worker's optimizer; None without second moments."""
        optimizer = self._own.optimizer_of.get(worker)
        key = -1 if optimizer is None else worker
        if key not in self._factors_of:
            optimizers = self._own.optimizers if optimizer is None else [optimizer]
            self._factors_of[key] = preconditioner_roots(self._own, optimizers)
        return self._factors_of[key]

    @torch.no_grad()
    def _squares_of(self, worker: int) -> tuple[float, float]:
        """Return ‖g‖² of the present gradient, and Σ g²/(√v̂ + ε) by the worker's Adam; 0 without second moments."""
        factors = self._factors(worker)
        rows = [(p.grad, place) for place, p in enumerate(self._own.parameters) if p.grad is not None]
        gradients = [gradient for gradient, _ in rows]
        if factors is None:
            return sum(squares_of(gradients)), 0.0
        return scaled_squares_of(gradients, [factors[place] for _, place in rows])


class MeasuredWorkers(MeasuredParts):
    """Estimates each logical worker's gradient noise from its micro-batches, where workers have their own parameters.

    For strategies whose logical workers (fixed shares of the global batch) make updates of their own, such as local
    SGD: a worker's micro-batches are compared with the worker's gradient. The step's estimates are means over the
    workers.

    Args:
        own: parameters in whose ``.grad`` backward leaves the gradients of micro-batches, and the workers' optimizers.
        step_context: the step under way.
        meets: whether all ranks make the step together, so that the means are over the workers of all ranks; False:
            over this rank's workers alone.
    """

    def __init__(self, own: OwnGradients, step_context: StepContext, meets: bool) -> None:
        super().__init__(own, step_context, apart=True)
        self._meets = meets
        self._found: list[StepNoise] = []

    def end_worker(self, worker: int, part: LossSums) -> None:
        """Estimate a logical worker's gradient noise from its gradient in ``.grad`` and its micro-batches' norms.

        A worker (fixed share of the global batch) with a single micro-batch in this step is left out. Not collective.

        Args:
            worker: index of the worker.
            part: its loss sums, with ``samples``.
        """
        squares, scaled, parts = self._squares, self._scaled, self._parts
        self._squares, self._scaled, self._parts = 0.0, 0.0, 0
        if parts < 2:
            return
        count, scale = float(part.sums[1]), self._step_context.loss_scale
        # Backward has divided losses by the worker's samples.
        factor = mean_factor(part.samples, count) ** 2
        whole, scaled_whole = (square * factor / scale**2 for square in self._squares_of(worker))
        simple = noise_estimate(squares * factor * count, whole, parts, part.samples)
        noise = None
        if self._factors_of.pop(worker, None) is not None:
            noise = noise_estimate(scaled * factor * count, scaled_whole, parts, part.samples)
        self._found.append(StepNoise(simple, noise))

    def estimates(self, stats: StepStats, run_context: RunContext) -> StepNoise:
        """Return the means, over logical workers, of their estimates of the gradient noise.

        A worker is a fixed share of the global batch. If all ranks make the step together, the means are over all
        workers, and the call is collective over all ranks: an all-reduce of six numbers. Otherwise they are over this
        rank's workers, and nothing is sent.

        Args:
            stats: the step's results, of which ``finite`` is read.
            run_context: communicators.

        Returns:
            A ``StepNoise``; without estimates if a gradient is not finite. ``scaled`` needs second moments of all
            workers.
        """
        numbers: list[float] = []
        for found in ([noise.simple for noise in self._found], [noise.scaled for noise in self._found]):
            there = [estimate for estimate in found if estimate is not None]
            numbers += [len(there), sum(each.trace for each in there), sum(each.square for each in there)]
        if self._meets:
            numbers = self._sum(numbers, run_context.comms.world)
        workers, trace, square, able, *scaled = numbers
        if not stats.finite or not workers:
            return StepNoise()
        simple = NoiseEstimate(trace / workers, square / workers)
        return StepNoise(simple, NoiseEstimate(*(sums / able for sums in scaled)) if able == workers else None)


class MeasuredRound(MeasuredParts):
    """Estimates the gradient noise from logical workers' gradients, in the first step after an average (local SGD).

    All workers (fixed shares of the global batch) then have equal parameters, so that their gradients are comparable
    even with one micro-batch each. Their sum, the gradient of the global batch, is computed for this measurement alone.
    The noise of the preconditioned gradient is not estimated, because workers' optimizers differ.

    Args:
        own: parameters in whose ``.grad`` backward leaves the workers' gradients.
        step_context: the step under way.
    """

    def __init__(self, own: OwnGradients, step_context: StepContext) -> None:
        super().__init__(OwnGradients(own.parameters), step_context, apart=True)
        self._sums: list[Tensor | None] = [None] * len(own.parameters)
        # Of ended workers: Σ ‖s‖²/c over parts, for the gradient s of a sum over c counts; counts, samples and parts.
        self._ended = [0.0] * 4

    @torch.no_grad()
    def end_worker(self, worker: int, part: LossSums) -> None:
        """Add a logical worker's gradient, and its squared norms, to the sums from which ``estimates`` computes.

        The gradient is first multiplied by the worker's samples or targets, by which backward has divided it. Nothing
        is added for a worker without samples. Not collective.

        Args:
            worker: index of the logical worker, a fixed share of the global batch.
            part: its loss sums, with ``samples`` and ``whole``.
        """
        squares, parts, count = self._squares, self._parts, float(part.sums[1])
        self._squares, self._parts = 0.0, 0
        if not parts:
            return
        # Backward has divided the sum of losses by their count, or by the worker's samples.
        size = count if part.whole else part.samples
        own = [squares * size**2, count, part.samples, parts]
        self._ended = [before + now for before, now in zip(self._ended, own, strict=True)]
        for place, p in enumerate(self._own.parameters):
            if p.grad is not None:
                gradient = p.grad * (size / self._step_context.loss_scale)
                earlier = self._sums[place]
                self._sums[place] = gradient if earlier is None else earlier.add_(gradient)

    def estimates(self, stats: StepStats, run_context: RunContext) -> StepNoise:
        """Return estimates of the gradient noise from the workers' gradients. Collective over the data ranks.

        There are two all-reduces: of four numbers, and of the gradient. A worker is a logical worker, a fixed share of
        the global batch.

        Args:
            stats: the step's results, of which ``finite`` is read.
            run_context: communicators.

        Returns:
            A ``StepNoise`` with ``simple`` alone; without it if a gradient is not finite or if the batch has a single
            part.
        """
        comm = run_context.comms.replica
        squares, count, samples, parts = self._sum(self._ended, comm)
        pairs = zip(self._own.parameters, self._sums, strict=True)
        dense = [torch.zeros_like(p) if own is None else own.to_dense() if own.is_sparse else own for p, own in pairs]
        total = torch.cat([own.reshape(-1) for own in dense])
        comm.all_reduce(total, f"all_reduce of gradients for their noise in step {self._step_context.local_step + 1}")
        if not stats.finite or parts < 2:
            return StepNoise()
        whole = sum(squares_of([total])) / count**2
        return StepNoise(noise_estimate(squares / count, whole, round(parts), round(samples)))


@torch.no_grad()
def preconditioner_roots(own: OwnGradients, optimizers: Sequence[Optimizer]) -> list[Tensor] | None:
    """Return the factors (√v̂ + ε)^(-1/2) by which gradients are scaled for the preconditioned noise scale.

    Args:
        own: the parameters, whose second moments in Adam's state are v̂.
        optimizers: the optimizers that hold the parameters' state.

    Returns:
        One tensor for each of ``own.parameters``, of its shape and in its order. None if a parameter has no second
        moments, if there is no optimizer, or if backward itself reduces gradients (FSDP2).
    """
    if own.take_squares is not None or not optimizers:
        return None
    roots = _roots(optimizers)
    found = [root for p in own.parameters if (root := roots.get(p)) is not None]
    return found if len(found) == len(own.parameters) else None


@torch.no_grad()
def gathered_roots(own: OwnGradients, comm: Communicator) -> list[Tensor] | None:
    """Gather the factors (√v̂ + ε)^(-1/2) of all parameters on every rank, where each rank updates only some of them.

    v̂ are Adam's second moments. Collective over the ranks of ``comm``: a broadcast of names and shapes by each rank,
    and of its slices of the factors, together as many elements as the parameters have. Nothing is sent without
    ``own.slices``.

    Args:
        own: the parameters, and the parameters or slices that this rank updates (``slices``).
        comm: all ranks.

    Returns:
        One tensor for each of ``own.parameters``, in order and equal on all ranks. None if a parameter has no second
        moments, or without ``own.slices``.
    """
    if own.slices is None:
        return None
    roots, mine = _roots(own.optimizers), {}
    for piece in own.slices():
        root = roots.get(piece.tensor)
        placed = None if root is None else piece.placed(root)
        if placed is not None:
            mine[piece.name] = placed
    whole = gathered_state(mine, comm)
    found = [whole[name] for name in own.names if name in whole]
    return found if len(found) == len(own.parameters) else None


def _roots(optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor | None]:
    members = [member for optimizer in optimizers for member in members_of(optimizer)]
    groups = [(member.state, group) for member in members for group in member.param_groups]
    return {p: _inverse_root(p, state.get(p, {}), group) for state, group in groups for p in group["params"]}


@torch.no_grad()
def _squares_of_pieces(own: OwnGradients) -> float:
    """Return this rank's part of Σ g²/(√v̂ + ε) of the reduced gradient."""
    roots = _roots(own.optimizers)
    pairs = [(piece.tensor.grad, roots.get(piece.tensor)) for piece in (() if own.slices is None else own.slices())]
    known = [(gradient, root) for gradient, root in pairs if gradient is not None and root is not None]
    return scaled_squares_of([gradient for gradient, _ in known], [root for _, root in known])[1]


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
