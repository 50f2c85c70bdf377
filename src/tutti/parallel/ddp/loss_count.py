"""Find by how many targets a mean loss has been divided, so that a mean over tokens stays one over the global batch.

A mean of cross-entropy is divided by the targets that ``ignore_index`` leaves, or by the sum of their class weights.
Micro-batches of padded sequences have different numbers of them, and the mean of their means is not the mean of the
batch. The autograd graph of the loss holds the divisor, also where the loss comes out of the model (``outputs.loss``).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tutti.errors import UsageError, script_line
from tutti.parallel.ddp.loss_shape import (
    TARGETS,
    averages_masked,
    check_adds_up,
    count_of_nanmean,
    host_divisor,
    is_zero,
    rows_of_mean,
)
from tutti.parallel.ddp.output_graph import graph_within
from tutti.torch_compat import (
    CrossEntropyNode,
    cross_entropy_of,
    divisor_of_cross_entropy,
    divisor_of_node,
    is_scalar_node,
    label_smoothing_of,
)
from tutti.types.micro_batch import MicroBatch

_MOST = 64
"""Nodes of a loss that are looked at: a sum of more scalars is a penalty and no model's loss."""


class _Term(NamedTuple):
    """A cross-entropy within a loss; ``divisor``: by which its sum is divided, where it is no mean.

    ``scores``: the node of the log-softmax that it read; ``by_factor``: whether the divisor is the inverse of a factor.
    """

    reduction: str
    total: Tensor
    targets: int
    divisor: Tensor | None
    scores: Any = None
    by_factor: bool = False


def annotate_targets(loss: Tensor, count: Tensor, targets: int, reduction: str = "mean") -> Tensor:
    """Record on the autograd node of a loss that the loss is the mean, or the sum, over ``count`` targets.

    ``loss_count``, which looks for the divisor of a loss in its autograd graph, then finds ``count``. Used for a
    cross-entropy that is computed in parts, whose graph has no node of PyTorch's own cross-entropy.

    Args:
        loss: () the mean or the sum.
        count: () the divisor of the mean: number of targets that are not ignored, or the sum of their class weights.
        targets: number of all targets, also of ignored targets.
        reduction: ``mean`` or ``sum``.

    Returns:
        ``loss`` itself; nothing is recorded where the loss needs no gradient.
    """
    if loss.grad_fn is not None:
        # The stubs of PyTorch call this property a method.
        metadata = cast(dict[str, Any], loss.grad_fn.metadata)
        metadata[TARGETS] = CrossEntropyNode(reduction, count.detach(), targets)
    return loss


def loss_count(objective: Tensor, micro_batch: MicroBatch) -> Tensor | None:
    """Return the number of targets, or the sum of their class weights, by which a scalar loss has been divided.

    The function finds the number in the loss's autograd graph, so that targets of ``ignore_index`` do not count.

    Args:
        objective: () the loss of the micro-batch.
        micro_batch: the micro-batch, of at least one sample; ``micro_batch.whole`` is true if it is the whole global
            batch.

    Returns:
        The divisor, a tensor (), where the loss is one cross-entropy alone, with or without label smoothing, which is a
        mean or a sum divided by the samples or the targets. Where the micro-batch is not the whole batch, a divisor is
        also returned for three losses without a cross-entropy: the number of elements that are not NaN, for the
        ``nanmean()`` of a tensor; the number of rows of the reduced tensor, for a ``mean()`` or a mean loss of PyTorch
        such as ``mse_loss``, unless the samples are along another dimension; and 0 for a loss that is multiplied by 0,
        as scripts return it for samples without targets. None for any other loss, which the caller then takes for a
        mean over samples.

    Raises:
        UsageError: the micro-batch is one of several of the global batch, and their losses cannot be added up, for one
            of four reasons. The loss adds other terms than label smoothing to a cross-entropy that is a mean over a
            part of the micro-batch's targets; the loss is the sum of a cross-entropy, not divided by samples or
            targets; the loss is a nonlinear function of means over samples, such as a root or a ratio; or the loss is a
            mean over a number of elements, or a sum divided by a number, that is not a multiple of the samples.
    """
    root = graph_within(objective.grad_fn)
    if root is not None and TARGETS not in root.metadata and (total := divisor_of_cross_entropy(root)) is not None:
        # Most losses: nothing but a mean over targets, which adds up.
        return total
    if not micro_batch.whole:
        if root is not None and is_zero(root):
            return torch.zeros(())
        check_adds_up(objective.grad_fn, micro_batch)
    means, others = _terms(objective.grad_fn)
    counts = [_count(term, micro_batch) for term in means]
    if len(means) == 1 and not others:
        return counts[0]
    if not means and not micro_batch.whole:
        if (count := count_of_nanmean(objective.grad_fn)) is not None:
            return count
        rows = rows_of_mean(objective.grad_fn, micro_batch.samples)
        return None if rows is None else torch.tensor(float(rows))
    for term, count in zip(means, counts, strict=True):
        uneven = count is not None and (float(count) != term.targets or term.targets % micro_batch.samples)
        if uneven and not micro_batch.whole:
            raise _refused(
                f"the loss adds other terms to a mean over {float(term.total):g} of {term.targets} targets",
                "other micro-batches have another number of targets, so that over the global batch the terms' means"
                " have other weights",
                "; or, in a loop of your own, call run.backward(term, retain_graph=True) for each term, which has a"
                " count of its own",
            )
    return None


def is_mean_over_samples(objective: Tensor, count: Tensor, micro_batch: MicroBatch) -> bool:
    """Return whether the divisor that ``loss_count`` has found is proportional to the samples of any micro-batch.

    If so, means over micro-batches weighted by samples give the mean over the global batch. False where targets were
    ignored or weighted, or where a mask has selected elements: other micro-batches then have other proportions, even if
    the divisor happens to be a multiple of this micro-batch's samples.

    Args:
        objective: () the loss of the micro-batch.
        count: () the divisor, as ``loss_count`` returns it.
        micro_batch: the micro-batch.
    """
    means, _ = _terms(objective.grad_fn)
    if means:
        return float(count) == means[0].targets or (means[0].reduction == "sum" and float(count) == micro_batch.samples)
    chosen = count_of_nanmean(objective.grad_fn) is not None or averages_masked(objective.grad_fn, micro_batch.samples)
    return not chosen and not float(count) % micro_batch.samples


def _terms(root: Any) -> tuple[list[_Term], bool]:
    """Return the cross-entropies of a loss, and whether it has other terms."""
    means: list[_Term] = []
    ahead: list[tuple[Any, Tensor | None, bool]] = [(root, None, False)]
    others, seen = False, set[Any]()
    smoothing: list[tuple[Any, Tensor]] = []
    while ahead and len(seen) < _MOST:
        node, divisor, by_factor = ahead.pop()
        node = graph_within(node)
        if node is None or node in seen or is_zero(node):
            continue
        seen.add(node)
        found = node.metadata.get(TARGETS) or cross_entropy_of(node)
        if found is not None and found.reduction == "sum" and divisor is None and node is not root:
            others = True
        elif found is not None:
            means.append(_Term(found.reduction, found.total, found.targets, divisor, found.scores, by_factor))
        elif (smooth := label_smoothing_of(node)) is not None:
            smoothing.append(smooth)
        elif is_scalar_node(node) and node.next_functions:
            divisor, by_factor = divisor_of_node(node), False
            if divisor is None and (number := host_divisor(node)) is not None and abs(number) >= 1:
                divisor, by_factor = torch.tensor(number, dtype=torch.float64), True
            ahead += [(before, divisor, by_factor) for before, _ in node.next_functions]
        else:
            others = True
    return means, others or bool(ahead) or not all(_smooths(means, *smooth) for smooth in smoothing)


def _smooths(means: list[_Term], scores: Any, divisor: Tensor) -> bool:
    """Return whether a term is the label smoothing of the only cross-entropy: over the same targets, divided alike."""
    return len(means) == 1 and means[0].scores is scores and math.isclose(divisor, means[0].total, rel_tol=1e-4)


def _count(term: _Term, micro_batch: MicroBatch) -> Tensor | None:
    """Return the divisor of a cross-entropy; None for a sum over the whole batch. Raises UsageError for other sums."""
    if term.reduction == "mean":
        return term.total
    number = None if term.divisor is None else float(term.divisor)
    counts = micro_batch.samples, float(term.total), term.targets
    if number is not None and any(math.isclose(number, each) for each in counts):
        return term.divisor
    # A factor may be, for example, half the inverse of the samples.
    by_samples = term.by_factor and number is not None and math.isclose(number % micro_batch.samples, 0, abs_tol=1e-6)
    if micro_batch.whole or by_samples:
        return None
    by = "no mean" if term.divisor is None else f"not a mean: it is divided by {float(term.divisor):g}"
    raise _refused(
        f"the loss is the sum of a cross-entropy over {float(term.total):g} targets, and {by}",
        "a micro-batch has a part of the global batch, whose loss the sums of its parts would have to be added up to",
    )


def _refused(what: str, why: str, otherwise: str = "") -> UsageError:
    return UsageError(
        what,
        where=script_line(),
        why=why,
        remedy="return (sum, count), with the terms in one sum (reduction='sum', and as the count the targets that are"
        " not ignored, or the sum of their class weights); a model of transformers returns the sum for"
        f" model(**batch, num_items_in_batch=1){otherwise}",
    )
