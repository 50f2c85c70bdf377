"""Synchronised batch normalisation with Horovod's name and arguments, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.comm import collectives
from tutti.comm.collective_call import ReduceOperation
from tutti.horovod.common.exceptions import translated
from tutti.horovod.torch import job
from tutti.torch_compat import BatchNormBase


class SyncBatchNorm(BatchNormBase):
    """Batch norm that normalises in training by the mean and variance of all ranks' samples, as Horovod's.

    Collective over all ranks in training: each forward all-reduces C + 1 sums (the channels' and the count), then C
    sums of squared deviations, two passes so that the variance does not cancel; each backward all-reduces as many.
    Every rank must call the layer equally often and in the same order. The gradients of weight and bias contain only
    this rank's samples, as for any other layer.

    Args:
        num_features: channels C of the input (N, C, …).
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None: their plain average.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics; without them evaluation, too, uses statistics of the
            samples, as in training.
        given: ``device`` and ``dtype`` of parameters and buffers, as for PyTorch's layers.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **given)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, in training by the statistics of all ranks' samples, else by the running statistics.

        A layer without running statistics uses those of the samples in evaluation, too. Where the samples' statistics
        are used, the call is collective over all ranks: it all-reduces sums, then squared deviations, and blocks; its
        backward all-reduces the gradients of both, and blocks, too. In training the running statistics are updated.
        With one rank it is plain batch norm, without communication.

        Args:
            input: tensor of shape (N, C, …), with any N on each rank.

        Returns:
            Tensor of the shape and dtype of ``input``.

        Raises:
            ValueError: ``input`` has fewer than two dimensions, or the samples' statistics are used and ``init`` was
                not called.
            HorovodInternalError: ranks' calls differ, such as by another number of channels C, or a rank is lost.
        """
        self._check_input_dim(input)
        whole = self.training or self.running_mean is None
        if not whole or job.size() == 1:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        view = [1, -1] + [1] * (input.dim() - 2)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = self._summed(torch.cat([values.sum(axes), count]), "mean")
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centred = values - mean.view(view)
        variance = self._summed((centred * centred).sum(axes), "variance") / total
        self._track(mean.detach(), variance.detach(), float(total))
        result = centred * torch.rsqrt(variance + self.eps).view(view)
        if self.weight is not None:
            result = result * self.weight.view(view) + self.bias.view(view)
        return result.to(input.dtype)

    def _summed(self, tensor: Tensor, what: str) -> Tensor:
        summed: Tensor = translated(collectives.allreduce)(tensor, ReduceOperation.SUM, f"sync_batch_norm.{what}")
        return summed

    def _track(self, mean: Tensor, variance: Tensor, total: float) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = variance * (total / max(total - 1, 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
