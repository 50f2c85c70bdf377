"""Arithmetic of lists of gradients: squares, scaling and accumulation, each with few kernels for all tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from tutti.device import widest_float
from tutti.native.compiled_passes import passes
from tutti.parallel.ddp.buckets import values_of
from tutti.torch_compat import foreach_mul, foreach_mul_, foreach_norm
from tutti.types.step_records import StepContext


def squares_of(tensors: Sequence[Tensor]) -> list[float]:
    """Return the sum of squares of each tensor's elements, with one synchronisation of host and device for all.

    Args:
        tensors: dense or sparse tensors; sparse ones are coalesced first.

    Returns:
        Python floats in the order of ``tensors``, computed in float32 or wider; an empty list for no tensors.
    """
    return [norm * norm for norm in norms_of(tensors).tolist()] if tensors else []


def scaled_squares_of(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> tuple[float, float]:
    """Return the sum of squares of all elements of some tensors, without and with a factor on each element.

    On a CPU, in float32 and float64, one compiled loop reads each element once; elsewhere PyTorch's kernels do, with
    one synchronisation of host and device.

    Args:
        tensors: dense or sparse tensors, such as gradients; sparse ones are coalesced first.
        factors: dense tensors of the same shapes, in the same order.

    Returns:
        A pair of Python floats, (Σ g², Σ (f·g)²), over all tensors; zeros for no tensors.
    """
    pairs = [_stored(g, f) for g, f in zip(tensors, factors, strict=True)]
    if not pairs:
        return 0.0, 0.0
    tensors, factors = [g for g, _ in pairs], [f for _, f in pairs]
    loops = passes(tensors[0])
    if loops is not None and all(passes(g) is passes(f) is loops and g.stride() == f.stride() for g, f in pairs):
        found = loops.scaled_squares(factors, tensors)
        return sum(plain for _, plain in found), sum(scaled for scaled, _ in found)
    squares = squares_of([*tensors, *foreach_mul(tensors, factors)])
    return sum(squares[: len(pairs)]), sum(squares[len(pairs) :])


def _stored(tensor: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stored elements of a tensor and the factors at their places; a dense tensor and its factor as is."""
    if not tensor.is_sparse:
        return tensor, factor
    tensor = tensor.coalesce()
    return tensor.values(), factor[tuple(tensor.indices())]


def read_with_squares(numbers: Tensor, tensors: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Copy a vector of numbers to the host together with the sum of squares of each tensor's elements.

    One synchronisation of host and device where all tensors are on the device of ``numbers``, else two or more.

    Args:
        numbers: (n,), any dtype.
        tensors: dense or sparse tensors.

    Returns:
        Two lists of Python floats: the n numbers, and the sum of squares of each tensor in the order of ``tensors``,
        computed in float32 or wider.
    """
    if not tensors or any(t.device != numbers.device for t in tensors):
        return list(numbers.tolist()), squares_of(tensors)
    norms = norms_of(tensors)
    if norms.dtype != numbers.dtype:
        wide = widest_float(numbers.device)
        numbers, norms = numbers.to(wide), norms.to(wide)
    both = torch.cat([numbers, norms]).tolist()
    return both[: len(numbers)], [norm * norm for norm in both[len(numbers) :]]


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norms of tensors without waiting for their device, (n,), in float32 or wider.

    Args:
        tensors: one or more dense or sparse tensors on one device.
    """
    tensors = [values_of(t) for t in tensors]
    norms = foreach_norm([t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors])
    wide = widest_float(norms[0].device)
    same = len({n.dtype for n in norms}) == 1
    return torch.stack(norms if same else [n.to(wide) for n in norms])


def squares_by(parameters: Sequence[nn.Parameter], without: Collection[nn.Parameter] = ()) -> list[float]:
    """Return the sum of squares of each parameter's ``.grad``, in the order of ``parameters``.

    Args:
        parameters: the parameters; one without a gradient counts 0.
        without: parameters that count 0 in any case.

    Returns:
        One Python float for each of ``parameters``.
    """
    gradients = [None if p in without else p.grad for p in parameters]
    found = iter(squares_of([g for g in gradients if g is not None]))
    return [0.0 if g is None else next(found) for g in gradients]


def own_part(squares: Sequence[float], step_context: StepContext, loss_sums: Tensor | None) -> Tensor:
    """Return the numbers that one logical worker adds to a sum for the variance of the workers' gradients (AdaScale).

    A logical worker is one of N fixed shares of the global batch.

    Args:
        squares: sums of squares of the worker's gradients, one for each parameter.
        step_context: the step under way, with the loss scale that the gradients contain.
        loss_sums: the worker's ``[loss, count, *metrics]``; None if the worker had no samples.

    Returns:
        A float64 vector of one number more than ``squares``, to be summed over the workers by the caller: first each
        sum of squares, divided by the square of the loss scale and by the worker's count; the last number is 1, to
        count the workers. All zeros for a worker without samples.
    """
    count = 0.0 if loss_sums is None else float(loss_sums[1])
    if not count > 0:
        return torch.zeros(len(squares) + 1, dtype=torch.float64)
    below = count * step_context.loss_scale**2
    return torch.tensor([*(square / below for square in squares), 1.0], dtype=torch.float64)


def scale_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by a factor, in place, with few kernels.

    Args:
        tensors: tensors of any shapes and dtypes, such as gradients; an empty sequence is allowed.
        factor: the number that each element is multiplied by.
    """
    if tensors:
        foreach_mul_(list(tensors), factor)


def accumulated(before: Tensor, after: Tensor | None) -> Tensor:
    """Add a gradient of a parameter to an earlier one in place, as autograd accumulates, and return the sum.

    Args:
        before: the earlier gradient. It is written and returned, unless it is sparse and ``after`` dense.
        after: the gradient to add; None for none. It is written and returned if it is dense and ``before`` is sparse.
    """
    if after is None:
        return before
    return after.add_(before) if before.is_sparse and not after.is_sparse else before.add_(after)
