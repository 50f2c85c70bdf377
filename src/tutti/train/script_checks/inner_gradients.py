"""Refuse losses that depend on gradients of the micro-batch's own, as a penalty on the gradient of a mean does."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from tutti.data.global_generators import own_generators
from tutti.errors import UsageError
from tutti.nn.written_tensors import METADATA, may_write
from tutti.parallel.ddp.loss_shape import is_gathered
from tutti.train.script_checks.loss_calls import InnerGradient, LossCalls, RecordedCall, alike
from tutti.train.script_checks.loss_watch import SCALING, leaves_of_call

_SMALL = 1e-5
"""Relative difference of two losses that counts as rounding, or as that of a small number beside a norm."""
_COARSE = 1e-4
"""Relative distance of neighbouring numbers of a dtype, such as bfloat16, with which losses are not judged."""
_CURVED = 1e-2
"""Deviation from a line, relative to the change along it, that counts as a curve."""


def check_inner_gradients(record: LossCalls, loss: Any) -> None:
    """Check that a loss with inner gradients (of ``torch.autograd.grad``) is the same for micro-batches of any size.

    The gradient of a mean with respect to inputs is divided by the number of samples, so that it is larger in a
    micro-batch than in the global batch. The loss, and inputs of the model that are computed from this gradient, must
    therefore not depend on its scale, as behind ``sign()`` or ``normalize``: they are computed again with the gradient
    doubled for all samples but the first. A gradient with respect to parameters is a sum over samples; the loss must be
    linear in this gradient, as the ratio of two norms is not. Not judged are calls that write in place or draw random
    numbers, gradients that were changed otherwise (``torch.distributed.all_reduce``), scripts that multiply by the
    number of samples, numbers of 16 bits, and the model's outputs for inputs that are computed from such gradients.

    Args:
        record: the calls that have computed the loss, after ``finish``.
        loss: what the loss function returned, or what the script passed to ``run.backward``; tuples pass, by which
            scripts declare what a loss counts.

    Raises:
        UsageError: the loss depends on the scale of the gradient of a mean with respect to inputs, or is not linear in
            a gradient with respect to parameters.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or is_gathered(loss.grad_fn):
        return
    for gradient in record.inner_gradients:
        calls = record.following(gradient.tensor)
        if not _can_repeat(calls, gradient):
            continue
        made = {id(leaf) for call in calls for leaf in leaves_of_call((call.result,))}
        losses = [loss] if id(loss) in made else []
        if gradient.of_parameter:
            if losses and _is_curved(record, calls, gradient.tensor, loss):
                _refuse_curve(gradient)
        elif gradient.of_mean and record.has_rows(gradient.tensor) and record.samples not in _factors(calls):
            inputs = [given for given, _ in record.forwards if id(given) in made]
            if _depends_on_scale(record, calls, gradient.tensor, losses, inputs):
                _refuse_scale(gradient)


def _can_repeat(calls: list[RecordedCall], gradient: InnerGradient) -> bool:
    """Return whether the calls after a gradient can be made again with another one, precisely enough to compare."""
    if any(call.draws or (may_write(call.func) and call.func not in METADATA) for call in calls):
        return False
    return _precision(calls, gradient.tensor) <= _COARSE and not _was_changed(gradient)


def _factors(calls: list[RecordedCall]) -> set[float]:
    """Return the Python numbers by which calls multiply."""
    products = [call for call in calls if "mul" in (name := getattr(call.func, "__name__", "")) and name in SCALING]
    return {float(leaf) for call in products for leaf in leaves_of_call(call.args) if type(leaf) in (int, float)}


def _precision(calls: list[RecordedCall], gradient: Tensor) -> float:
    """Return the largest relative distance of neighbouring numbers among the dtypes of a gradient and of results."""
    tensors = [leaf for call in calls for leaf in leaves_of_call((call.result,)) if isinstance(leaf, Tensor)]
    return max(torch.finfo(each.dtype).eps for each in (gradient, *tensors) if each.is_floating_point())


def _was_changed(gradient: InnerGradient) -> bool:
    """Return whether a gradient has other values than when it was computed, or ones that are not finite."""
    with suppress(RuntimeError):
        return not bool(torch.linalg.vector_norm(gradient.tensor.detach()) == gradient.norm)
    return True


def _depends_on_scale(
    record: LossCalls, calls: list[RecordedCall], gradient: Tensor, losses: list[Tensor], inputs: list[Tensor]
) -> bool:
    """Return whether losses, or inputs of the model, change where the gradient doubles for all samples but one."""
    with suppress(Exception), own_generators():
        larger = gradient.detach().clone()
        larger[min(1, record.samples - 1) :] *= 2
        same, other = (_again(record, calls, gradient, each) for each in (gradient.detach().clone(), larger))
        if any(_differ(same[id(each)], each) for each in losses):
            # The calls depend on something that the record does not have.
            return False
        return any(_differ(same[id(each)], other[id(each)]) for each in losses) or any(
            not alike(same[id(each)].detach(), other[id(each)].detach()) for each in inputs
        )
    return False


def _differ(one: Tensor, other: Tensor) -> bool:
    first, second = float(one), float(other)
    return abs(first - second) > _SMALL * max(abs(first), abs(second))


def _is_curved(record: LossCalls, calls: list[RecordedCall], gradient: Tensor, loss: Tensor) -> bool:
    """Return whether a loss at a gradient is not the mean of the losses at two gradients whose mean it is."""
    with suppress(Exception), own_generators():
        factors = torch.linspace(0.5, 1.5, gradient.numel(), dtype=gradient.dtype, device=gradient.device)
        factors = factors.view(gradient.shape)
        middle, *ends = (
            float(_again(record, calls, gradient, gradient.detach() * each)[id(loss)])
            for each in (torch.ones_like(factors), factors, 2 - factors)
        )
        change = max(abs(end - middle) for end in ends)
        # Rounding must not look like a curve.
        least = max(_SMALL, 1_000 * _precision(calls, gradient))
        if _differ(torch.tensor(middle), loss):
            return False
        return change > least * abs(middle) and abs(sum(ends) - 2 * middle) > _CURVED * change
    return False


def _again(record: LossCalls, calls: list[RecordedCall], gradient: Tensor, value: Tensor) -> dict[int, Tensor]:
    values = {id(gradient): value}
    record.replay(values, calls)
    return values


def _refuse_scale(gradient: InnerGradient) -> NoReturn:
    raise UsageError(
        "the loss depends on the size of gradients of a mean over the micro-batch's samples",
        where=gradient.line,
        why="they are divided by the number of samples, which is smaller than that of the global batch",
        remedy="take the gradients of the sum (loss.sum(), reduction='sum'), which has each sample's own, or give them"
        " a norm of each sample's; or take one worker without micro_batch; for those of each micro-batch return"
        " (loss * n, n) of n samples",
    )


def _refuse_curve(gradient: InnerGradient) -> NoReturn:
    raise UsageError(
        "the loss is not linear in gradients of parameters that the script computes from a micro-batch",
        where=gradient.line,
        why="a micro-batch has a part of the global batch's gradient, and norms and ratios of the parts do not add up"
        " to those of the whole",
        remedy="average the gradients over ranks first (tutti.allreduce), with as many workers as devices; or take one"
        " worker without micro_batch; for those of each micro-batch return (loss * n, n) of n samples",
    )
