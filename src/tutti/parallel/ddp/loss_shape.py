"""Refuse losses of a part of the batch that do not add up to the loss of the batch, by their autograd graph.

The mean over a batch is the mean of its parts' means. Its square root is not, nor a sum that is divided by what some
samples count, as a mask does. Such a loss depends on how the batch is divided over workers and micro-batches.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from tutti.errors import UsageError, counted
from tutti.parallel.ddp.output_graph import graph_within, nodes_below
from tutti.torch_compat import divisor_of_node, is_scalar_node, shape_of_node
from tutti.types.micro_batch import MicroBatch

_CURVED = frozenset(
    f"{name}Backward0"
    for name in (
        *("Sqrt", "Rsqrt", "Pow", "Exp", "Log", "Log1P", "Abs", "Reciprocal", "Tanh", "Sigmoid", "Softplus", "Relu"),
        *("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum"),
    )
) | {"ClampBackward1", "PowBackward1"}
"""Nodes of functions that are not linear."""
_LOSSES = frozenset(
    f"{name}Backward0"
    for name in (
        *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        *("NllLoss", "NllLoss2D"),
    )
)
"""Nodes that reduce a batch, whatever they are given."""
_COUNTED = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
"""Of the losses those whose targets ``loss_count`` counts."""
_REDUCTIONS = frozenset({"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"})
_FACTORS = frozenset(("NegBackward0", "MulBackward0", "DivBackward0", "ViewBackward0", "CloneBackward0"))
"""Nodes that multiply a number by a constant, or pass it on."""
_CHOICES = frozenset(("IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0"))
"""Nodes that choose elements or rows of a tensor, as by a mask."""
_STAGED = "_ThroughBackward"
"""Node of a call of a model in stages (``staged_call``), which depends on all its parameters."""
_MOST, _DEEP = 64, 4096


def check_adds_up(root: Any, micro_batch: MicroBatch) -> None:
    """Check by the autograd graph of a loss that it is linear in means or sums over the micro-batch's samples.

    Only then do the losses of the micro-batches add up to the loss of the global batch. The check looks at graph nodes
    whose output is a single number, at most 64; a loss in which it finds no violation passes.

    Args:
        root: ``grad_fn`` of the loss; None passes.
        micro_batch: the part of the global batch that the loss was computed on; its number of samples is used.

    Raises:
        UsageError: the loss is a nonlinear function of a mean or sum over samples (such as a square root), a ratio or
            product of two, a mean over a number of elements that is not a multiple of the samples, or a sum divided by
            a number that is not a multiple of the samples.
    """
    ahead, seen = [root], set[Any]()
    while ahead and len(seen) < _MOST:
        node = graph_within(ahead.pop())
        if node is None or node in seen or not is_scalar_node(node):
            continue
        seen.add(node)
        if _reduces(node, micro_batch):
            _check_elements(node, micro_batch)
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        name = node.name()
        if name in _CURVED and any(_holds(each, micro_batch) for each in before):
            what = name.removesuffix("0").removesuffix("1").removesuffix("Backward").lower()
            raise _refused(f"the loss is no mean over samples: it takes {what} of a mean or a sum over them")
        if name in ("DivBackward0", "MulBackward0") and len(before) == 2:
            below = before[1:] if name == "DivBackward0" else before
            if all(_holds(each, micro_batch) for each in below):
                kind = "divides by a mean or a sum" if name == "DivBackward0" else "multiplies means or sums"
                raise _refused(f"the loss is no mean over samples: it {kind} over them")
        ahead += before
    _check_divisor(root, micro_batch)


def _check_elements(node: Any, micro_batch: MicroBatch) -> None:
    """Raise UsageError if a loss of PyTorch is a mean over elements that are not equally many for each sample."""
    inputs = node.next_functions[0][0] if node.name() in _LOSSES - _COUNTED else None
    shape = None if inputs is None else shape_of_node(inputs)
    if shape is not None and micro_batch.samples and math.prod(shape) % micro_batch.samples and _of_several(node):
        raise _refused(
            f"the loss is a mean over {math.prod(shape)} elements, of {counted(micro_batch.samples, 'sample')}"
        )


def _check_divisor(root: Any, micro_batch: MicroBatch) -> None:
    root = graph_within(root)
    divisor = None if root is None else divisor_of_node(root)
    if divisor is None or divisor.numel() != 1 or divisor.requires_grad or micro_batch.samples < 1:
        return
    total = _below_factors(next((before for before, _ in root.next_functions if before is not None), None))
    if total is None or total.name() not in ("SumBackward0", "SumBackward1") or not _reduces(total, micro_batch):
        return
    number = float(divisor)
    if number % micro_batch.samples:
        raise _refused(f"the loss is a sum divided by {number:g}, of {counted(micro_batch.samples, 'sample')}")


def rows_of_mean(root: Any, samples: int) -> int | None:
    """Return the number of rows of the tensor that a loss is the mean of, such as the number of chosen tokens.

    ``losses[mask].mean()`` is a mean over as many rows as the mask has, which differ between micro-batches.

    Args:
        root: ``grad_fn`` of the loss.
        samples: number of samples of the micro-batch.

    Returns:
        The size of the tensor's first dimension. None where the loss is no ``mean()`` of one tensor, alone or times
        constants; where the tensor depends on no more than one parameter, as a penalty does; and where another
        dimension is that of the samples, as in the outputs of a recurrent network.
    """
    node = _below_factors(root)
    inputs = None if node is None or node.name() != "MeanBackward0" else node.next_functions[0][0]
    shape = None if inputs is None else shape_of_node(inputs)
    if not shape or not _of_several(node):
        return None
    alike = nodes_below(inputs, lambda each: shape_of_node(each) == shape)
    return None if samples in shape[1:] and all(each.name() not in _CHOICES for each in alike) else shape[0]


def _below_factors(node: Any) -> Any:
    """Return the node of the number that a loss is a constant multiple of; None where there is none."""
    while (node := graph_within(node)) is not None and node.name() in _FACTORS:
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None
    return node


def _holds(node: Any, micro_batch: MicroBatch) -> bool:
    """Return whether a mean or a sum over samples is below a node, through nodes of one number each."""
    return any(_reduces(graph_within(each), micro_batch) for each in nodes_below(node, is_scalar_node))


def _reduces(node: Any, micro_batch: MicroBatch) -> bool:
    """Return whether a node is a mean or a sum over the samples of the micro-batch, and not of parameters alone."""
    if node.name() in _LOSSES:
        return True
    if node.name() not in _REDUCTIONS or not node.next_functions or node.next_functions[0][0] is None:
        return False
    shape = shape_of_node(node.next_functions[0][0])
    return bool(shape) and shape is not None and shape[0] == micro_batch.samples and _of_several(node)


def _of_several(node: Any) -> bool:
    """Return whether a value was computed from several parameters, a model in stages, or outputs that are leaves.

    A penalty on weights has one parameter in each term, or a number as a leaf where the weight is sharded.
    """
    leaves = 0
    for each in nodes_below(node, lambda _: True, _DEEP):
        if each.name() == "torch::autograd::AccumulateGrad":
            leaves += 1
            if leaves > 1 or (each.variable.dim() and not isinstance(each.variable, nn.Parameter)):
                return True
        if each.name() == _STAGED:
            return True
    return False


def _refused(what: str) -> UsageError:
    return UsageError(
        what,
        why="a micro-batch has a part of the global batch, and the losses of the parts do not add up to that of the"
        " whole, so that the gradient would depend on workers and micro-batches",
        remedy="return (sum, count), with what divides the sum as the count; or take one worker without micro_batch;"
        " for the mean of the parts' losses, as gradient accumulation by hand gives it, return (loss * n, n) of n"
        " samples",
    )
