"""Synchronised batch normalisation: statistics over the samples of all data ranks.

Each rank sends the count, mean and variance of its own values; from these every rank computes the same mean
μ = Σ nᵣμᵣ / N and variance Σ nᵣ(varᵣ + (μᵣ − μ)²) / N, exactly, whatever the counts (Chan, Golub, LeVeque 1983). The
running variance takes the unbiased one, with N − 1, as PyTorch's does. Backward sums Σdy and Σdy·x̂ over the ranks; the
gradients of weight and bias stay this rank's part, which gradient synchronisation sums like every other gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.errors import MismatchError, UsageError, counted
from tutti.nn.norms import BatchNormReplacement, replace_norms
from tutti.nn.rng_streams import module_draws, refuse_draws
from tutti.torch_compat import BatchNormBase, NormBase


class Peers:
    """State that all synchronised batch norms of one model share on this rank.

    Args:
        line: communicator of the ranks whose samples are normalised together, with a process group of its own, so that
            its messages never mix with those of gradients.

    Attributes:
        line: the argument ``line``.
        counts: whether the current samples enter the statistics; False during a dummy micro-batch, which a rank without
            samples runs to take part in the collectives.
    """

    def __init__(self, line: Communicator) -> None:
        self.line, self.counts = line, True

    def __deepcopy__(self, memo: Any) -> Peers:
        return self


class SyncBatchNorm(BatchNormReplacement):
    """A batch norm whose mean and variance are over the samples of all data-parallel ranks.

    Parameters, buffers and names are those of the plain batch norm. In training every data-parallel rank must call it
    equally often and in the same order, because the calls are collective over them: each forward all-gathers 2·channels
    + 2 float64 numbers a rank, and each backward all-reduces 2·channels numbers. In evaluation, or on a single rank, it
    is the plain batch norm.

    Args:
        plain: the batch norm to replace.
        peers: state shared with the model's other synchronised batch norms, with the ranks' communicator.
        number: index of this batch norm in the model, which all ranks compare in each forward.
    """

    def __init__(self, plain: BatchNormBase, peers: Peers, number: int) -> None:
        super().__init__(plain)
        self.peers, self.number = peers, number

    def normalised(self, input: Tensor) -> Tensor:
        """Normalise ``input``, (samples, channels, …), by statistics over all ranks' samples; return the same shape.

        In training it also updates the running statistics, equally on all data-parallel ranks. In training collective
        over these ranks, if there are several: an all-gather in the forward, which blocks until every rank has called
        it, and an all-reduce in the backward. In evaluation it is plain batch norm, by the running statistics or,
        without these, by those of this rank's samples.

        Args:
            input: this rank's samples, possibly zero of them.

        Raises:
            ValueError: ``input`` has fewer than two dimensions, or all ranks together have fewer than two values a
                channel.
            MismatchError: ranks call different batch norms at the same time, or wait in different calls.
            PeerError: a rank has ended, or did not make the call in time.
            UsageError: in a backward with ``create_graph=True``.
        """
        self._check_input_dim(input)
        if not self.training or self.peers.line.size == 1:
            return BatchNormBase.forward(self, input)
        count, mean, variance = self._gather(input.detach())
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, variance * (count / (count - 1)))
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        statistics = mean.to(wide), variance.to(wide)
        result: Tensor = _Normalise.apply(input, self.weight, self.bias, *statistics, count, self.eps, self)  # type: ignore[no-untyped-call]
        return result

    @torch.no_grad()
    def _gather(self, input: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the number of values a channel over all ranks, their mean and their variance, in float64."""
        channels = input.shape[1]
        mine = torch.zeros(2 + 2 * channels, dtype=torch.float64, device=input.device)
        mine[1] = self.number
        if self.peers.counts and input.numel():
            mine[0] = input.numel() // channels
            wide = torch.float64 if input.dtype == torch.float64 else torch.float32
            none = torch.zeros(channels, dtype=wide, device=input.device)
            # Wide running statistics make it compute in that dtype; momentum 0 leaves them unchanged.
            torch.cat(torch.batch_norm_update_stats(input, none, none, 0.0), out=mine[2:])
        table = self.peers.line.gather_slices(mine, f"statistics of batch norm {self.number}")
        table = table.view(-1, len(mine))
        heads = table[:, :2].tolist()
        self._compare([int(number) for _, number in heads])
        total = sum(count for count, _ in heads)
        if total < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got {total:g} over all devices")
        weights, (means, variances) = table[:, :1] / total, table[:, 2:].split(channels, dim=1)
        mean = (weights * means).sum(0)
        return total, mean, (weights * (variances + (means - mean) ** 2)).sum(0)

    def _compare(self, numbers: list[int]) -> None:
        if numbers.count(self.number) < len(numbers):
            raise MismatchError(
                f"devices are in different batch norms of the model: {', '.join(map(str, numbers))}",
                why="the model took another way on some of them",
                remedy="make its forward call the same modules on every device, or leave out batch_norm='sync'",
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics, identically on all ranks."""
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # type: ignore[arg-type]
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - rate) * running.double() + rate * value)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        """Return the text that ``print(model)`` shows for this layer: batch norm's own options, and ``over N devices``.

        N is the number of ranks whose samples are normalised together.
        """
        return f"{super().extra_repr()}, over {counted(self.peers.line.size, 'device')}"  # type: ignore[no-untyped-call]


class _Normalise(torch.autograd.Function):
    """x̂ = (x − μ) / √(var + ε), with statistics that depend on every rank's input.

    The loss is the sum of all ranks' losses, so that dx = γ/√(var + ε) · (dy − Σdy/N − x̂ · Σdy·x̂/N)
    with sums over all ranks (Ioffe, Szegedy 2015, arXiv 1502.03167, §3).
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: float,
        eps: float,
        norm: SyncBatchNorm,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.eps, ctx.norm, ctx.counts = count, eps, norm, norm.peers.counts and input.numel() > 0
        return _affine(input, weight, bias, mean, variance, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                f"batch_norm='sync' cannot be combined with gradients of gradients (batch norm {ctx.norm.number})",
                why="its statistics are of all devices' samples, and so would be the second derivative",
                remedy="compute the penalty without create_graph=True, or leave out batch_norm='sync'",
            )
        [above] = gradients
        input, weight, mean, variance = ctx.saved_tensors
        sums = torch.zeros(2, len(mean), dtype=mean.dtype, device=mean.device)
        below = torch.zeros_like(input)
        if ctx.counts:
            # Statistics taken as constants: dx, Σdy·x̂ and Σdy in one pass.
            scale = None if weight is None else weight.to(mean.dtype)
            given = (above, input, scale, mean, variance, None, None, False, ctx.eps, [True, True, True])
            below, by_scale, by_bias = torch.ops.aten.native_batch_norm_backward(*given)
            torch.stack([by_scale, by_bias], out=sums)
        own = (None, None) if weight is None else sums.to(weight.dtype, copy=True).unbind()
        if ctx.needs_input_grad[0]:
            line: Communicator = ctx.norm.peers.line
            line.sum_in_place(sums, f"sums of batch norm {ctx.norm.number} in backward")
            if ctx.counts:
                factor = (variance + ctx.eps).rsqrt_().div_(-ctx.count)
                slope, offset = sums * (factor if weight is None else factor * weight)
                below.add_(_affine(input, slope, offset, mean, variance, ctx.eps))
        return below, *own, None, None, None, None, None


def _affine(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Return x̂ · weight + bias, computed in one pass."""
    weight, bias = (None if t is None else t.to(mean.dtype) for t in (weight, bias))
    return torch.native_batch_norm(input, weight, bias, mean, variance, False, 0.0, eps)[0]


def convert_sync_batch_norm(model: nn.Module, line: Communicator, workers: int, ranks: int) -> nn.Module:
    """Replace every batch norm of ``model`` by a ``SyncBatchNorm`` over all ranks' samples, in place. Not collective.

    Parameters and names are kept. Logical workers are shares of the global batch; a rank may compute several.

    Args:
        model: the model, converted in place.
        line: communicator of the data ranks, used by batch norms alone.
        workers: number of logical workers.
        ranks: number of data-parallel ranks that run them.

    Returns:
        ``model``, or its replacement where ``model`` is itself a batch norm.

    Raises:
        UsageError: the model has no batch norm; or ``workers`` is above 1 and a norm layer that is no batch norm, such
            as an instance norm, has running statistics; or ``workers`` is above ``ranks`` and a layer, such as dropout,
            draws random numbers. The last two would train differently on another number of devices, because a device
            computes all its workers as one batch.
    """
    for name, module in model.named_modules():
        own = isinstance(module, NormBase) and not isinstance(module, BatchNormBase) and module.track_running_stats
        if own and workers > 1:
            raise UsageError(
                f"batch_norm='sync' cannot be combined with the running statistics of {name}",
                why="they follow each worker's own samples",
                remedy="make it with track_running_stats=False, or leave out batch_norm='sync'",
            )
        if module_draws(module) and workers > ranks:
            refuse_draws(f"{name}, which draws random numbers")
    peers, numbers = Peers(line), iter(range(len(list(model.modules()))))
    return replace_norms(model, lambda norm: SyncBatchNorm(norm, peers, next(numbers)))


def peers_of(part: nn.Module) -> Peers | None:
    """Return the state that all synchronised batch norms in ``part`` share on this rank.

    Args:
        part: the model, or the part of it on this rank.

    Returns:
        A ``Peers``: ``line``, the communicator of the ranks whose samples are normalised together, and ``counts``,
        which the caller sets to False while a dummy micro-batch runs, so that the samples of this micro-batch do not
        enter the statistics. None if there are no synchronised batch norms, or a single rank computes them.
    """
    found = (m.peers for m in part.modules() if isinstance(m, SyncBatchNorm))
    peers = next(found, None)
    return None if peers is None or peers.line.size == 1 else peers
