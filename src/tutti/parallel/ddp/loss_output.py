"""Parse the result of a loss function into objective, start gradient and loss sums."""

from __future__ import annotations

from functools import lru_cache
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tutti.comm.collectives import sum_collective_gradients
from tutti.comm.random_keys import mix, name_key
from tutti.device import widest_float
from tutti.errors import UsageError, counted, kind_of
from tutti.parallel.ddp.loss_count import loss_count
from tutti.torch_compat import is_dtensor
from tutti.types.micro_batch import LossSums, MicroBatch

_NOISE = name_key("gradient noise")
_MASK = (1 << 63) - 1


def read_loss(outcome: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, LossSums]:
    """Parse the result of the user's loss function: find the tensor to call ``backward`` on, and the sums to report.

    Where the micro-batch has noise σ (``micro_batch.noise``, option ``--gradient-noise``), each sample's loss counts z
    ~ N(1, σ²) times in the gradient, and once in the loss sums (Hoffer et al. 2017, arXiv 1705.08741, §4). The weights
    z follow from the micro-batch's key. Gradients through gathers over ranks (``tutti.allgather``) become sums over
    ranks, unless the gradient is that of this micro-batch alone (``micro_batch.whole``).

    Args:
        outcome: a scalar (mean over the micro-batch's samples, or over the targets of a cross-entropy), ``(sum,
            count)`` or ``(sum, count, metric_sums)`` with a mapping of metrics by name. In place of the mean or of the
            sum a tensor (samples,) of one loss a sample is allowed.
        micro_batch: the micro-batch that the loss was computed on.

    Returns:
        A tuple of three. First the objective: the tensor to call ``backward`` on, () or (samples,). Second the start
        gradient to pass to that ``backward``, of the objective's shape, scaled so that the gradients of all
        micro-batches add up to that of the mean. Third a ``LossSums``, whose ``sums`` (2 + metrics,) are loss, count
        and metrics summed over the micro-batch, in float32, or float64 where the loss is. Start gradient and loss sums
        of a dummy micro-batch (one of no samples) are zero.

    Raises:
        UsageError: the loss function returned something else, such as a Python number, a complex number or a
            ``DTensor``; the micro-batch has noise, and there is no tensor of one loss a sample; or the loss is a scalar
            of a part of the global batch, and such losses do not add up to the loss of the whole batch, such as the
            root of a mean.
    """
    if not micro_batch.whole:
        sum_collective_gradients()
    if is_dtensor(outcome[0] if isinstance(outcome, tuple | list) and outcome else outcome):
        raise UsageError(
            "the loss is computed from the rows of parameters that this rank has",
            why="the first step read no parameter outside of the model's forward, and reads are checked until then",
            remedy="read model.parameters() in the loss from the first step on: multiply a penalty that begins later by"
            " 0 until then; or take strategy='sharded:stage=1' or 'mirrored'",
        )
    if isinstance(outcome, Tensor) and not _by_sample(outcome, micro_batch):
        objective = _scalar(outcome, micro_batch)
        count = loss_count(objective, micro_batch) if micro_batch.samples else None
        if count is not None and not _is_samples(count, micro_batch):
            return _mean_over(objective, count, micro_batch)
        dtype, value = _wide(objective), objective.detach()
        loss_sums = torch.addcmul(
            *_sums_of_mean(micro_batch.samples, dtype, objective.device),
            value if value.dtype == dtype else value.to(dtype),
        )
        return objective, _start(micro_batch.share, objective), _loss_sums(loss_sums, (), micro_batch)
    if isinstance(outcome, Tensor):
        outcome = outcome, micro_batch.samples
    if isinstance(outcome, tuple | list) and len(outcome) in (2, 3):
        losses = outcome[0]
        objective = losses if _by_sample(losses, micro_batch) else _scalar(losses, micro_batch)
        sums = outcome[2] if len(outcome) == 3 else {}
        dtype = _wide(objective)
        total = objective.detach().sum() if objective.dim() else objective.detach()
        values = [total, *(torch.as_tensor(v).detach() for v in (outcome[1], *sums.values()))]
        loss_sums = torch.stack([v.to(objective.device, dtype) for v in values])
        start = _noisy(micro_batch, objective) if micro_batch.noise else _start(micro_batch.weight, objective)
        if micro_batch.whole:
            start = start / _divisor(outcome[1], start)
        return objective, start, _loss_sums(loss_sums, tuple(sums), micro_batch)
    is_number = isinstance(outcome, Number)
    raise UsageError(
        f"the loss is {'a Python number' if is_number else kind_of(outcome)}",
        remedy="leave .item() and float() out"
        if is_number
        else "return a scalar (mean over the batch), (sum, count) or (sum, count, {name: sum})",
    )


def _is_samples(count: Tensor, micro_batch: MicroBatch) -> bool:
    """Return whether ``count`` is the number of samples; False also on an accelerator, where a look would wait."""
    return count.is_cpu and count.item() == micro_batch.samples


def _mean_over(objective: Tensor, count: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, LossSums]:
    """Return the result of ``read_loss`` for a mean over ``count`` targets, which may be none."""
    # Few operators: on an accelerator each of them costs the host as much as a layer of a small model.
    device, dtype = objective.device, _wide(objective)
    same = count.dtype == dtype and count.device == device
    wide = count.detach() if same else count.detach().to(device, widest_float(device))
    total = (objective.detach().to(dtype) * wide).masked_fill_(wide == 0, 0.0)
    loss_sums = torch.stack([total.to(dtype), wide.to(dtype)])
    if micro_batch.whole:
        start = _start(micro_batch.share, objective)
    else:
        start = wide.to(widest_float(device)).mul(micro_batch.weight).to(objective.dtype)
    return objective, start, _loss_sums(loss_sums, (), micro_batch)


def check_trains(objective: Tensor) -> None:
    """Check that the loss depends on a trained parameter, so that ``backward`` can be called on it.

    Args:
        objective: the loss tensor to call ``backward`` on; the check is whether it has ``requires_grad``.

    Raises:
        UsageError: ``objective`` does not require a gradient.
    """
    if not objective.requires_grad:
        raise UsageError(
            "the loss does not depend on any trained parameter",
            why=f"it is a tensor of {str(objective.dtype).removeprefix('torch.')} that autograd has not recorded",
            remedy="compute it from the model's result without detach(), item(), argmax() or torch.no_grad()",
        )


def _start(factor: float, objective: Tensor) -> Tensor:
    return _filled(factor, objective.shape, objective.dtype, objective.device)


def _divisor(count: Any, start: Tensor) -> Any:
    """Return the count of a loss as the divisor of its sum; 1 for a count of 0."""
    if not isinstance(count, Tensor):
        return count or 1
    return torch.where(count > 0, count.detach(), 1).to(start.device, start.dtype).reshape(())


def _loss_sums(loss_sums: Tensor, names: tuple[str, ...], micro_batch: MicroBatch) -> LossSums:
    return LossSums(loss_sums if micro_batch.samples else torch.zeros_like(loss_sums), names, micro_batch.samples)


@lru_cache(maxsize=256)
def _filled(factor: float, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor filled with ``factor``, cached because most steps use the same one."""
    return torch.full(shape, factor, dtype=dtype, device=device)


def _noisy(micro_batch: MicroBatch, objective: Tensor) -> Tensor:
    """Return the micro-batch's weight times z of each sample, drawn on the CPU for equal numbers on every device."""
    generator = torch.Generator().manual_seed(mix(micro_batch.key, _NOISE) & _MASK)
    draws = torch.randn(micro_batch.samples, generator=generator, dtype=torch.float64)
    return draws.mul_(micro_batch.noise).add_(1.0).mul_(micro_batch.weight).to(objective.device, objective.dtype)


@lru_cache(maxsize=256)
def _sums_of_mean(samples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a = (0, n) and b = (n, 0): ``LossSums.sums`` of a mean loss are a + b · loss."""
    return (
        torch.tensor([0, samples], dtype=dtype, device=device),
        torch.tensor([samples, 0], dtype=dtype, device=device),
    )


def _wide(objective: Tensor) -> torch.dtype:
    return torch.float64 if objective.dtype == torch.float64 else torch.float32


def _by_sample(losses: Any, micro_batch: MicroBatch) -> bool:
    return isinstance(losses, Tensor) and losses.dim() == 1 and len(losses) == (micro_batch.samples or len(losses))


def _scalar(objective: Any, micro_batch: MicroBatch) -> Tensor:
    if not isinstance(objective, Tensor) or objective.numel() != 1:
        shape = tuple(objective.shape) if isinstance(objective, Tensor) else type(objective).__name__
        raise UsageError(
            f"the loss is not a scalar but {shape}",
            remedy=f"reduce it by mean or sum, or give one number for each of {counted(micro_batch.samples, 'sample')}",
        )
    if objective.is_complex():
        raise UsageError("the loss is a complex number", remedy="return a real one: loss.real, or loss.abs()")
    if micro_batch.noise:
        raise UsageError(
            "gradient noise needs the loss of each sample, and the loss function returned one number for all",
            remedy="return a 1-d tensor of one loss a sample, alone or in place of the sum; or leave the noise out",
        )
    return objective.reshape(()) if objective.dim() else objective
