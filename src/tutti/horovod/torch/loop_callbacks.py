"""What Horovod's Keras callbacks do, for PyTorch loops: averages of metrics, warm-up, learning-rate schedules.

``torch.optim.SGD`` needs no momentum correction: its velocity is a sum of gradients, which each step multiplies by the
learning rate of that step. The correction gives velocities that contain the learning rate the same values.

Source: warm-up, schedule and momentum correction, Goyal et al. 2017, arXiv:1706.02677, sections 2.2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tutti.comm.process_set import ProcessSet
from tutti.comm.process_set import all_ranks as global_process_set
from tutti.horovod.torch import job, mpi_ops


def average_metrics(
    metrics: Mapping[str, float | Tensor], process_set: ProcessSet = global_process_set
) -> dict[str, float]:
    """Return the mean of each metric over the ranks of ``process_set``.

    Collective over ``process_set``: one all-reduce of all metrics as float64 numbers, none without metrics; blocks.
    Every rank has the same weight, whatever its number of samples; for a mean over samples, all-reduce the sum and the
    count instead.

    Args:
        metrics: name → number or tensor of one element; the same names on all ranks.
        process_set: ranks that take part; default: all ranks.

    Returns:
        Name → mean, in the order of ``metrics``.

    Raises:
        ValueError: ``init`` was not called.
        HorovodInternalError: the ranks' metrics have different names, which the message lists, or a rank is lost.
    """
    names = sorted(metrics)
    values = torch.tensor([float(metrics[name]) for name in names], dtype=torch.float64)
    if names:
        values = mpi_ops.allreduce(values, name=f"metrics.{','.join(names)}", process_set=process_set)
    means = dict(zip(names, values.tolist(), strict=True))
    return {name: means[name] for name in metrics}


def learning_rate_schedule(
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    warmup_epochs: float = 5.0,
    multiplier: Callable[[float], float] = lambda _: 1.0,
    staircase: bool = True,
) -> LambdaLR:
    """Return a learning-rate scheduler with linear warm-up for large-batch training; step it after each optimizer step.

    Let n be ``hvd.size()``, read at each step, and e the steps so far divided by ``steps_per_epoch``. While e is less
    than ``warmup_epochs``, the optimizer's learning rate is multiplied by (1 + (n - 1) · e / ``warmup_epochs``) / n,
    which grows from 1/n to 1; afterwards by ``multiplier(e)``. Source: Goyal et al. 2017, arXiv:1706.02677, section
    2.2.

    Args:
        optimizer: the optimizer, wrapped by ``DistributedOptimizer`` or not. Its learning rate must be that of one rank
            times n.
        steps_per_epoch: optimizer steps of this rank in an epoch.
        warmup_epochs: length of the warm-up in epochs; 0: no warm-up.
        multiplier: takes e, in epochs, and returns the factor on the learning rate; default: 1.
        staircase: True rounds e down to whole epochs for ``multiplier``; False passes fractions, such as 1.5.

    Raises:
        ValueError: ``steps_per_epoch`` is not positive, ``warmup_epochs`` is negative, or there is a warm-up and
            ``init`` was not called.
    """
    if steps_per_epoch < 1 or warmup_epochs < 0:
        raise ValueError(
            f"steps_per_epoch is {steps_per_epoch} and must be positive; warmup_epochs is {warmup_epochs} and must not "
            "be negative"
        )

    def factor(step: int) -> float:
        epoch = step / steps_per_epoch
        if epoch < warmup_epochs:
            size = job.size()
            return (1 + (size - 1) * epoch / warmup_epochs) / size
        return multiplier(math.floor(epoch) if staircase else epoch)

    return LambdaLR(optimizer, factor)
