"""Refuse losses of a part of the batch that do not add up to the loss of the batch, by their autograd graph.

The mean over a batch is the mean of its parts' means. Its square root is not, nor a sum that is divided by what some
samples count, as a mask does. Such a loss depends on how the batch is divided over workers and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from tutti.comm.collectives import is_collective_node
from tutti.errors import UsageError, counted, script_line
from tutti.parallel.ddp.output_graph import graph_within, leaf_of_node, nodes_below
from tutti.torch_compat import (
    constant_operand,
    count_of_nansum,
    divisor_of_node,
    factor_of_node,
    index_of_node,
    is_scalar_node,
    label_smoothing_of,
    mask_of_node,
    reduces_first_dimension,
    reduces_losses,
    shape_of_node,
    sums_losses,
)
from tutti.types.micro_batch import MicroBatch

_MIXING = frozenset(
    (
        *("Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Mode", "Topk", "Logsumexp"),
        *("Var", "Std", "Norm", "LinalgVectorNorm", "Dist", "Prod"),
    )
)
"""Functions that reduce a tensor, and are not linear."""
_CURVED = _MIXING | frozenset(
    (
        *("Sqrt", "Rsqrt", "Pow", "Exp", "Log", "Log1P", "Abs", "Reciprocal", "Tanh", "Sigmoid", "Softplus", "Relu"),
        *("Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "LogSigmoid", "Softmax", "LogSoftmax", "LeakyRelu"),
        *("Elu", "Gelu", "Silu", "Sin", "Cos", "Atan", "LinalgDet", "LinalgSlogdet", "LinalgSvd", "LinalgEigh"),
    )
)
"""Functions that are not linear."""
_LOSSES = frozenset(
    f"{name}Backward0"
    for name in (
        *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
        *("NllLoss", "NllLoss2D", "MultiMarginLoss", "MultilabelMarginLoss", "SoftMarginLoss"),
    )
)
"""Nodes that reduce a batch, whatever they are given."""
_COUNTED = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
"""Of the losses those whose targets ``loss_count`` counts."""
_SUMS = frozenset(("Sum", "Nansum", "Dot", "Vdot"))
"""Functions that add up elements."""
_REDUCTIONS = _SUMS | {"Mean"}
_PASSING = frozenset(("Add", "Sub", "Neg", "View", "Clone", "ToCopy", "Squeeze", "Mean", "Sum"))
"""Functions below which a sum over samples is looked for that nothing divides."""
_PRODUCTS = frozenset(("Mul", "Dot", "Vdot", "Mm", "Mv"))
_LAYERS = frozenset(("Addmm", "Mm", "Bmm", "Convolution", "Embedding"))
"""Functions of the model's layers, below which no constant divides the loss."""
_TRANSPOSES = frozenset(("T", "Transpose", "Permute"))
_VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias"))
"""Functions that may join the dimension of the samples and the next ones into one."""
_ELEMENTWISE = frozenset(
    ("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Addcmul", "Addcdiv", "Lerp", "Maximum", "Minimum")
)
"""Functions whose second input may be a number."""
_BY_ELEMENT = _CURVED - _MIXING | {"Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Clone", "MaskedFill"}
"""Functions whose output has an element for each of an input, as of a covariance that a constant is taken from."""
_BY_INDICES = frozenset(
    ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "MaskedSelect", "Take", "Where")
)
"""Functions that choose rows or elements by a tensor without gradient, which may be of the batch."""
_FACTORS = frozenset(("NegBackward0", "MulBackward0", "DivBackward0", "ViewBackward0", "CloneBackward0"))
"""Nodes that multiply a number by a constant, or pass it on."""
_CHOICES = frozenset(("IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0"))
"""Nodes that choose elements or rows of a tensor, as by a mask."""
_RESHAPING = _VIEWS | _TRANSPOSES | {"Squeeze", "Unsqueeze", "Clone"}
_MATRIX_PRODUCTS = frozenset(("Mm", "Mv", "Bmm"))
_ADDITIVE = (
    _BY_ELEMENT
    | _MIXING
    | _REDUCTIONS
    | _RESHAPING
    | _MATRIX_PRODUCTS
    | {"Addmm", "Stack", "Cat", "Slice", "Select", "Trace", "ToCopy", "Expand"}
)
"""Functions between a loss and what it adds up of the samples that divide by no number of them."""
TARGETS = "tutti.targets"
"""Key of a node's metadata for the number of targets of the loss that it computed."""
_STAGED = "_ThroughBackward"
"""Node of a call of a model in stages (``staged_call``), which depends on all its parameters."""
_MOST, _DEEP = 64, 4096
_REMEDY = (
    "return (sum, count), with what divides the sum as the count; or take one worker without micro_batch; for the mean"
    " of the parts' losses, as gradient accumulation by hand gives it, return (loss * n, n) of n samples"
)
_OF_ALL = (
    "compute it for each sample, and take the mean; or take one worker without micro_batch; or, with as many workers as"
    " devices and one micro-batch each, compute it from the outputs and targets of all ranks (tutti.allgather) and call"
    " run.backward or run.step; for the mean of the parts' losses, as gradient accumulation by hand gives it, return"
    " (loss * n, n) of n samples"
)


def check_adds_up(root: Any, micro_batch: MicroBatch) -> None:
    """Check by the autograd graph of a loss that it is linear in means or sums over the micro-batch's samples.

    Only then do the losses of the micro-batches add up to the loss of the global batch. The check looks at graph nodes
    whose output has no dimension of the samples, at most 64. A loss in which it finds no violation passes, and so
    does a loss of tensors that ranks have gathered.

    Args:
        root: ``grad_fn`` of the loss; None passes.
        micro_batch: the part of the global batch that the loss was computed on; its number of samples is used.

    Raises:
        UsageError: the loss is a function of all samples that is no mean or sum (such as the largest, a norm, or a
            variance), a nonlinear function of a mean or sum over samples (such as a square root), a ratio or product
            of two, a mean over a number of elements that is not a multiple of the samples, a sum over samples that
            nothing divides, or one divided by a number that is not a multiple of the samples.
    """
    try:
        _check_adds_up(root, micro_batch)
    except UsageError:
        if not is_gathered(root):
            raise


def is_gathered(root: Any) -> bool:
    """Return whether a loss is computed from tensors that a collective has gathered, such as ``tutti.allgather``.

    The function searches the loss's autograd graph, at most 4,096 nodes.

    Args:
        root: ``grad_fn`` of the loss.
    """
    return any(map(is_collective_node, nodes_below(root, lambda _: True, _DEEP)))


def _check_adds_up(root: Any, micro_batch: MicroBatch) -> None:
    ahead, seen, samples = [root], set[Any](), micro_batch.samples
    while ahead and len(seen) < _MOST:
        node = graph_within(ahead.pop())
        if node is None or node in seen or not _lacks_samples(node, samples) or is_zero(node):
            continue
        seen.add(node)
        if (rows := _masked_rows_of_mean(node, samples)) is not None and node is not _below_factors(root):
            raise _refused(f"the loss adds other terms to a mean over {rows} rows that a mask has chosen")
        if _reduces(node, samples):
            # A loss of one row beside others may be the loss of a single sample, whose sum with the others is a mean.
            one_of_all = node is not _below_factors(root) and _is_of_one_row(node)
            if not one_of_all and (node is not _below_factors(root) or not _is_mean_of_chosen(node)):
                _check_elements(node, micro_batch)
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        name = _function(node)
        if name in _MIXING and _over_samples(node, samples) and not _of_stack(node, samples):
            raise _refused(f"the loss is no mean over samples: it takes {_text(name)} over them", _OF_ALL)
        if name in _CURVED and any(_holds(each, samples) for each in before):
            what = f"the loss is no mean over samples: it takes {_text(name)} of a mean or a sum over them"
            raise _refused(what, _OF_ALL)
        if len(before) == 2 and (name in _PRODUCTS or name == "Div"):
            below = before[1:] if name == "Div" else before
            if all(_holds(each, samples) for each in below):
                kind = "divides by a mean or a sum" if name == "Div" else "multiplies means or sums"
                raise _refused(f"the loss is no mean over samples: it {kind} over them", _OF_ALL)
        ahead += before
    _check_divisor(root, micro_batch)
    _check_sums(root, samples)


def averages_masked(root: Any, samples: int) -> bool:
    """Return whether a loss is a mean over the samples that a boolean mask selects, such as ``losses[mask].mean()``.

    The mask may select rows or elements of a tensor with a row for each sample. Constant factors on the mean are
    allowed.

    Args:
        root: ``grad_fn`` of the loss.
        samples: number of samples of the micro-batch.
    """
    node = _below_factors(root)
    return node is not None and _masked_rows_of_mean(node, samples) is not None


def _masked_rows_of_mean(node: Any, samples: int) -> int | None:
    """Return how many rows of the samples a mask has chosen for a node's mean; None for no mean of such rows."""
    is_mean = _function(node) == "Mean" or _is_mean_of_elements(node)
    alike = _alike(node.next_functions[0][0]) if is_mean else ()
    return next((rows for each in alike if (rows := _rows_of_mask(each, samples)) is not None), None)


def _check_elements(node: Any, micro_batch: MicroBatch) -> None:
    """Raise UsageError if a loss of PyTorch is a mean over elements that are not equally many for each sample."""
    samples, inputs = micro_batch.samples, node.next_functions[0][0] if node.name() in _LOSSES - _COUNTED else None
    shape = None if inputs is None else shape_of_node(inputs)
    if shape is not None and samples and math.prod(shape) % samples and _of_outputs(node, samples):
        raise _refused(
            f"the loss is a mean over {math.prod(shape)} elements, of {counted(micro_batch.samples, 'sample')}"
        )


def _check_divisor(root: Any, micro_batch: MicroBatch) -> None:
    root = graph_within(root)
    divisor = None if root is None else divisor_of_node(root)
    if divisor is None or divisor.numel() != 1 or divisor.requires_grad or micro_batch.samples < 1:
        return
    total = _below_factors(next((before for before, _ in root.next_functions if before is not None), None))
    if total is None or TARGETS in total.metadata or _function(total) not in _SUMS:
        return
    if not _over_samples(total, micro_batch.samples):
        return
    number = float(divisor)
    if number % micro_batch.samples and number != count_of_nansum(total):
        raise _refused(f"the loss is a sum divided by {number:g}, of {counted(micro_batch.samples, 'sample')}")


def _check_sums(root: Any, samples: int) -> None:
    """Raise UsageError if a loss adds a sum over samples that neither a number nor a factor of each sample divides."""
    ahead: list[tuple[Any, float | None]] = [(root, None)]
    seen = set[Any]()
    while ahead and len(seen) < _MOST:
        node, divisor = ahead.pop()
        node = graph_within(node)
        if node is None or node in seen or not _lacks_samples(node, samples):
            continue
        seen.add(node)
        name, before = _function(node), [each for each, _ in node.next_functions]
        if TARGETS in node.metadata:
            continue
        if _is_loss(node) or (name in _REDUCTIONS and _over_samples(node, samples)):
            # A cross-entropy alone is looked at with its targets. What a constant vector weights may be a mean.
            told = (node is graph_within(root) or divisor is not None) and node.name() in _COUNTED
            is_sum = sums_losses(node) or (name in _SUMS and not (name in ("Dot", "Vdot") and None in before))
            if is_sum and not (told or _is_divided(before, samples) or _of_stack(node, samples)):
                if divisor is not None and abs(divisor) > 1:
                    raise _refused(f"the loss has a sum divided by {divisor:g}, of {counted(samples, 'sample')}")
                raise _refused(
                    f"the loss is a sum over {counted(samples, 'sample')}, and no mean",
                    "return (sum, n) of n samples for the mean over the global batch; or (sum * batch_size, n) for its"
                    " sum, as plain PyTorch gives it",
                )
        elif name in _PASSING or (name == "Mul" and None not in before):
            ahead += [(each, divisor) for each in before]
        elif _scales_otherwise(node, samples):
            ahead += [(each, host_divisor(node)) for each in before]


def undivided_sum(
    root: Any, samples: int, may_divide: Callable[[Tensor], bool], may_scale: Callable[[float], bool]
) -> bool:
    """Return whether a loss has a sum over samples that neither a number nor a constant tensor has divided.

    Four kinds of sums count: ``sum()`` of a tensor; an inner product; ``sum(losses)`` over as many pieces as there are
    samples; and a sum of as many losses of single rows, as in a script that calls the model for each sample. The
    function searches the loss's autograd graph, at most 4,096 nodes, from the loss through elementwise functions and
    sums. It leaves out cross-entropies, which ``loss_count`` examines.

    Args:
        root: ``grad_fn`` of the loss.
        samples: number of samples of the micro-batch.
        may_divide: called with a constant factor of several elements, returns whether it may already include 1 /
            samples; called with a divisor of one element, returns whether it is a sum over the samples.
        may_scale: called with a constant, returns whether it may come from the number of samples. A factor above 1 may
            then be (samples of the whole data set) / (samples of the batch), and so counts as a division.
    """
    known = _Dividers(samples, may_divide, may_scale)
    ahead: list[tuple[Any, int, tuple[float, ...]]] = [(root, 0, ())]
    seen, pieces, singles = set[Any](), dict[Any, set[int]](), 0
    while ahead and len(seen) < _DEEP:
        node, output, divisors = ahead.pop()
        node = graph_within(node)
        if node is None or (node, output) in seen or is_zero(node) or TARGETS in node.metadata:
            continue
        seen.add((node, output))
        before, name = [edge for edge in node.next_functions if edge[0] is not None], _function(node)
        inputs = [each for each, _ in before]
        piece = index_of_node(node, output)
        is_piece = piece is not None and samples > 1 and _has_samples_first(inputs[0], samples)
        # Not one of a parameter with as many elements as samples, such as weights of losses.
        if piece is not None and is_piece and not _is_last_sum(node) and _of_outputs(inputs[0], samples):
            of_samples = pieces.setdefault(inputs[0], set())
            of_samples.add(piece)
            adds = len(of_samples) == samples
        elif samples > 1 and _is_of_one_row(node) and _of_outputs(node, samples):
            singles += 1
            adds = singles == samples
        elif (rows := _rows_of_mask(node, samples)) is not None:
            # Where a mask has as many rows as the samples, or twice as many, they are no number of samples.
            adds, divisors = True, tuple(each for each in divisors if each != rows)
        else:
            adds = _adds_samples(node, samples) and count_of_nansum(node) not in divisors
            adds = adds and not _of_stack(node, samples)
        if adds:
            constant = constant_operand(node)
            is_divided = any(known.is_size(each) or (abs(each) < 1 and may_scale(each)) for each in divisors)
            is_divided |= constant is not None and constant.numel() > 1 and known.may_be_in(constant, inverse=True)
            if not (is_divided or _is_divided(inputs, samples, known)):
                return True
        elif (
            (name in _ADDITIVE or node.name() in _LOSSES)
            and _lacks_samples(node, samples)
            and not _divides_samples(node, samples)
        ):
            number = _divisor_in(node)
            below = divisors if number is None else (*divisors, number)
            divisor = factor_of_node(node) if name == "Div" else None
            by_sum = divisor is not None and divisor.numel() == 1 and may_divide(divisor)
            if label_smoothing_of(node) is None and not by_sum:
                ahead += [(*edge, below) for edge in (before[:1] if name == "Div" else before)]
    return False


def reads_statistic(root: Any, samples: int) -> bool:
    """Return whether tensors with a row a sample are computed from a mean, sum, norm or variance over samples.

    Examples are ``output - output.mean(0)`` and a contrastive loss. Calls of PyTorch's batch norm do not count, nor
    statistics without a gradient. The function searches the loss's autograd graph, at most 4,096 nodes.

    Args:
        root: ``grad_fn`` of the loss.
        samples: number of samples of the micro-batch.
    """
    for node in nodes_below(root, lambda _: True, _DEEP):
        inputs = [graph_within(each) for each, _ in graph_within(node).next_functions if each is not None]
        if len(inputs) == 2 and (shape_of_node(node) or ())[:1] == (samples,) and not _is_reduced(node, samples):
            others = [each for each in inputs if samples not in (shape_of_node(each) or (samples,))]
            below = (each for other in others for each in nodes_below(other, lambda b: _lacks_samples(b, samples)))
            if any(_reduces_samples(each, samples) and _of_outputs(each, samples) for each in map(graph_within, below)):
                return True
    return False


def _adds_samples(node: Any, samples: int) -> bool:
    """Return whether a node is a sum, a trace or a product over the samples, or the last of their running sums."""
    if _function(node) in _MATRIX_PRODUCTS:
        return _contracts_samples(node, samples)
    if _is_last_sum(node):
        return _over_samples(_only_input(node), samples, left=shape_of_node(node))
    return _function(node) in (*_SUMS, "Trace") and _over_samples(node, samples)


def _is_last_sum(node: Any) -> bool:
    """Return whether a node takes the last of the running sums along a first dimension."""
    inputs = _only_input(node) if _function(node) == "Select" else None
    if inputs is None or _function(inputs) != "Cumsum" or not reduces_first_dimension(inputs):
        return False
    return index_of_node(node) == (shape_of_node(inputs) or (0,))[0] - 1


def _rows_of_mask(node: Any, samples: int) -> int | None:
    """Return the number of rows that a mask has chosen of values by sample.

    None for other nodes, and where the mask has chosen all rows, or as many of each sample, as a one-hot mask does.
    """
    mask = mask_of_node(node)
    inputs = _only_input(node) if mask is not None else None
    if mask is None or inputs is None or not _has_samples_first(inputs, samples):
        return None
    by_sample = mask.flatten(1).sum(1) if mask.dim() > 1 and len(mask) == samples > 1 else mask.flatten()
    return None if bool((by_sample == by_sample[:1]).all()) else (shape_of_node(node) or (0,))[0]


def _divides_samples(node: Any, samples: int) -> bool:
    """Return whether a node is the mean over samples, of values that were put together, or of chosen ones."""
    if _function(node) != "Mean" and (not _is_loss(node) or sums_losses(node)):
        return False
    alike = _alike(node.next_functions[0][0])
    put = any(_function(each) in ("Stack", "Cat") or each.name() in _CHOICES for each in alike)
    return put or _over_samples(node, samples)


class _Dividers(NamedTuple):
    """Decides which constants in a loss may have divided it by the number of samples.

    Attributes:
        samples: number of samples of the micro-batch.
        may_divide: function that returns whether a constant of several elements may have done so.
        may_scale: function that returns whether a constant may come from the number of samples; one or two may be of a
            formula.
    """

    samples: int
    may_divide: Callable[[Tensor], bool]
    may_scale: Callable[[float], bool]

    def is_size(self, number: float) -> bool:
        """Return whether a divisor may be a multiple of the number of samples."""
        return (self.samples > 2 or self.may_scale(number)) and _is_multiple(number, self.samples)

    def may_be_in(self, constant: Tensor, inverse: bool) -> bool:
        """Return whether a factor (``inverse``) or a divisor of several elements may have divided by the samples."""
        first = constant.flatten()[0]
        number = float(first) if not constant.is_complex() and bool((constant == first).all()) else 0.0
        if not 0 < abs(number) < math.inf:
            return self.may_divide(constant)
        return self.is_size(1 / number if inverse else number)


def _is_divided(nodes: list[Any], samples: int, known: _Dividers | None = None) -> bool:
    """Return whether a constant may have divided values by the number of samples, or weighted each of the samples.

    Args:
        nodes: the nodes of the values.
        samples: number of samples of the micro-batch.
        known: which constants may do so; None: each of several elements, and each multiple of the samples.
    """
    ahead, seen = list(nodes), set[Any]()
    while ahead and len(seen) < _MOST:
        node = graph_within(ahead.pop())
        if node is None or node in seen or _function(node) in _LAYERS:
            continue
        seen.add(node)
        factor = factor_of_node(node)
        divides = False
        if factor is not None and factor.numel() > 1:
            divides = known is None or known.may_be_in(factor, inverse=_function(node) == "Mul")
        elif (number := _divisor_in(node)) is not None:
            divides = _is_multiple(number, samples) if known is None else known.is_size(number)
        if divides:
            return True
        ahead += [before for before, _ in node.next_functions]
    return False


def _scales_otherwise(node: Any, samples: int) -> bool:
    """Return whether a node multiplies by a constant that cannot come from the samples, such as one half.

    A mean is divided by a multiple of the samples, and of one sample every whole number is a multiple; a factor above
    one may be that of all data to the samples. Left out are the divisions within ``nanmean`` and within a cross-entropy
    with label smoothing.
    """
    number = host_divisor(node)
    if number is None or abs(number) < 1 or _is_multiple(number, samples):
        return False
    inputs = _only_input(node)
    return label_smoothing_of(node) is None and (inputs is None or count_of_nansum(inputs) != number)


def _is_multiple(number: float, samples: int) -> bool:
    """Return whether a number is a multiple of the samples, but for rounding."""
    return math.isclose(number / samples, round(number / samples), rel_tol=1e-6)


class Scaled(NamedTuple):
    """A mean or a sum over the samples of a micro-batch within a loss, and the constants between it and the loss.

    Attributes:
        is_mean: whether it is a mean.
        is_sum: whether it is a sum whose summands are not already divided by the samples; False for a mean.
        by_factor: whether one of the constants is a factor.
        elements: number of elements that it reduces; of a cross-entropy the number of targets.
        divisors: the constants as divisors, the inverse of each factor.
        tensors: the constants by which the loss divides, as the tensors that autograd has saved.
        factors: the constants by which the loss multiplies, as the tensors that autograd has saved.
        weights: tensors of several elements that are factors of the reduced tensor.
    """

    is_mean: bool = False
    is_sum: bool = False
    by_factor: bool = False
    elements: int = 0
    divisors: tuple[float, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    factors: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()


def scaled_reductions(root: Any, samples: int) -> Iterator[Scaled]:
    """Yield the means and sums over the samples of a micro-batch in a loss, with the constants that scale them.

    The function searches the loss's autograd graph, at most 64 nodes. It leaves out terms that are multiplied by 0, and
    cross-entropies whose sum is divided: ``loss_count`` finds their number of targets.

    Args:
        root: ``grad_fn`` of the loss; None yields nothing.
        samples: number of samples of the micro-batch.
    """
    ahead: list[tuple[Any, Scaled]] = [(root, Scaled())]
    seen = set[Any]()
    while ahead and len(seen) < _MOST:
        node, path = ahead.pop()
        node = graph_within(node)
        if node is None or node in seen or not _lacks_samples(node, samples) or TARGETS in node.metadata:
            continue
        seen.add(node)
        before = [each for each, _ in node.next_functions if each is not None]
        if _is_loss(node) or (_function(node) in _REDUCTIONS and _over_samples(node, samples)):
            counted = node.name() in _COUNTED and not path.by_factor
            is_sum = _function(node) in _SUMS or (sums_losses(node) and not counted)
            is_sum = is_sum and not _is_divided(before, samples) and not _of_stack(node, samples)
            weights = tuple(_weights_below(before)) if _function(node) in _SUMS else ()
            is_mean = _function(node) == "Mean" or (_is_loss(node) and not sums_losses(node))
            yield path._replace(is_mean=is_mean, is_sum=is_sum, elements=_elements(node), weights=weights)
        elif not is_zero(node):
            number, constant = _divisor_in(node), factor_of_node(node)
            if number is not None and constant is not None:
                path = path._replace(divisors=(*path.divisors, number))
                if _function(node) == "Mul":
                    path = path._replace(by_factor=True, factors=(*path.factors, constant))
                else:
                    path = path._replace(tensors=(*path.tensors, constant))
            ahead += [(each, path) for each in before]


def averages_samples(root: Any, samples: int) -> bool:
    """Return whether a number has a mean over the samples of a micro-batch, or a sum that a multiple of them divides.

    Args:
        root: ``grad_fn`` of the number.
        samples: number of samples of the micro-batch. Of two or one, divisors are rather numbers of a formula.
    """
    return any(
        each.is_mean or (samples > 2 and any(_is_multiple(divisor, samples) for divisor in each.divisors))
        for each in scaled_reductions(root, samples)
    )


def _elements(node: Any) -> int:
    """Return the number of elements that a reduction is given; of a cross-entropy the number of targets."""
    inputs = _only_input(node)
    shape = (None if inputs is None else shape_of_node(inputs)) or ()
    return math.prod(shape[:1] + shape[2:] if node.name() in _COUNTED and len(shape) > 1 else shape)


def _weights_below(nodes: list[Any]) -> Iterator[Tensor]:
    """Yield the constant factors of several elements below nodes, up to the model's layers."""
    for root in nodes:
        for each in nodes_below(root, lambda node: _function(node) not in _LAYERS):
            factor = factor_of_node(each)
            if factor is not None and factor.numel() > 1:
                yield factor


def is_zero(node: Any) -> bool:
    """Return whether a node multiplies by the constant 0, as scripts do for parameters that must have a gradient.

    False for a factor on an accelerator, because reading it would make the host wait.

    Args:
        node: an autograd node, not None.
    """
    factor = factor_of_node(node) if _function(node) == "Mul" else None
    return factor is not None and factor.is_cpu and factor.numel() == 1 and not factor.any()


def _divisor_in(node: Any) -> float | None:
    """Return the number by which a node divides, or by the inverse of which it multiplies; None for any other node."""
    factor = factor_of_node(node)
    if factor is None or factor.numel() > 1 or factor.is_complex():
        return None
    number = float(factor)
    if not 0 < abs(number) < math.inf:
        return None
    return number if _function(node) == "Div" else 1 / number


def host_divisor(node: Any) -> float | None:
    """Return the number by which a node divides, or by the inverse of which it multiplies; None for any other node.

    None also for a number on an accelerator, because reading it would make the host wait.

    Args:
        node: an autograd node, not None.
    """
    factor = factor_of_node(node)
    return _divisor_in(node) if factor is not None and factor.is_cpu else None


def count_of_nanmean(root: Any) -> Tensor | None:
    """Return the number of elements that are not NaN, where a loss is the ``nanmean()`` of a tensor times constants.

    Args:
        root: ``grad_fn`` of the loss.

    Returns:
        The number, a tensor (); None for any other loss.
    """
    above, node = None, graph_within(root)
    while node is not None and node.name() in _FACTORS:
        above, node = node, _only_input(node)
    number = None if node is None else count_of_nansum(node)
    divisor = None if above is None or number is None else divisor_of_node(above)
    return divisor if divisor is not None and divisor.numel() == 1 and float(divisor) == number else None


def rows_of_mean(root: Any, samples: int) -> int | None:
    """Return the number of rows of a tensor whose mean is the loss, such as the number of tokens that a mask selects.

    ``losses[mask].mean()`` is a mean over as many rows as the mask has, which differ between micro-batches.

    Args:
        root: ``grad_fn`` of the loss.
        samples: number of samples of the micro-batch.

    Returns:
        The size of the tensor's first dimension. None in four cases: the loss is not the ``mean()`` of one tensor,
        alone or times constants; the tensor depends on no more than one parameter, as a penalty does; the tensor itself
        is a mean over the samples, such as the mean of each column; or the samples are along another dimension of the
        tensor, as in the outputs of a recurrent network.
    """
    node = _below_factors(root)
    is_mean = node is not None and (_function(node) == "Mean" or _is_mean_of_elements(node))
    inputs = node.next_functions[0][0] if is_mean else None
    shape = None if inputs is None else shape_of_node(inputs)
    if not shape or not _of_outputs(node, samples) or _holds(inputs, samples):
        return None
    alike = nodes_below(inputs, lambda each: shape_of_node(each) == shape)
    return None if samples in shape[1:] and all(each.name() not in _CHOICES for each in alike) else shape[0]


def _below_factors(node: Any) -> Any:
    """Return the node of the number that a loss is a constant multiple of; None where there is none."""
    while (node := graph_within(node)) is not None and node.name() in _FACTORS:
        node = _only_input(node)
    return node


def _only_input(node: Any) -> Any:
    """Return the node of the only input that has a gradient; None if there are several."""
    before = [each for each, _ in node.next_functions if each is not None]
    return graph_within(before[0]) if len(before) == 1 else None


def _function(node: Any) -> str:
    """Return the name of the function that a node differentiates, such as ``Mul``."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _text(function: str) -> str:
    """Return the name of a function as scripts write it."""
    return function.removeprefix("LinalgVector").lower()


def _lacks_samples(node: Any, samples: int) -> bool:
    """Return whether a node's output is one number, several, or has no dimension of the samples.

    A dimension of as many elements as samples is that of features in what a reduction over the samples leaves.
    """
    shape = shape_of_node(node)
    if is_scalar_node(node) or _stacks(node):
        return True
    if shape is None or samples not in shape:
        return shape is not None
    return (math.prod(shape) == samples or shape == (samples, samples)) and _is_reduced(node, samples)


def _stacks(node: Any) -> bool:
    """Return whether a node puts numbers, such as several losses, into one tensor."""
    return _function(node) in ("Stack", "Cat") and all(b is None or is_scalar_node(b) for b, _ in node.next_functions)


def _of_stack(node: Any, samples: int) -> bool:
    """Return whether a node reduces a tensor of several numbers, which may be as many as the samples."""
    inputs = [each for each, _ in node.next_functions if each is not None]
    below = (nodes_below(each, lambda b: samples in (shape_of_node(b) or ())) for each in inputs)
    return any(_stacks(graph_within(each)) for nodes in below for each in nodes)


def _holds(node: Any, samples: int) -> bool:
    """Return whether a mean or a sum over samples is below a node, through nodes without a dimension of them."""
    below = nodes_below(node, lambda each: _lacks_samples(each, samples))
    within = (graph_within(each) for each in below)
    return any(_reduces(each, samples) and not _of_stack(each, samples) for each in within)


def _reduces(node: Any, samples: int) -> bool:
    """Return whether a node is a mean or a sum over the samples of the micro-batch, and not of parameters alone."""
    name = _function(node)
    if _is_loss(node) or TARGETS in node.metadata:
        return True
    if name in _MATRIX_PRODUCTS:
        return _contracts_samples(node, samples)
    return _is_last_sum(node) or (name in _REDUCTIONS and _over_samples(node, samples))


def _is_loss(node: Any) -> bool:
    """Return whether a node is that of a loss function of PyTorch that reduces the batch."""
    return node.name() in _LOSSES and reduces_losses(node)


def _is_mean_of_elements(node: Any) -> bool:
    """Return whether a node is that of a loss function of PyTorch that is the mean over all elements of its input."""
    return _is_loss(node) and node.name() not in _COUNTED and not sums_losses(node)


def _is_of_one_row(node: Any) -> bool:
    """Return whether a node reduces a tensor of one row, as the loss of a single sample does."""
    before = _only_input(node) if _is_loss(node) or _function(node) in _REDUCTIONS else None
    return before is not None and (shape_of_node(before) or ())[:1] == (1,)


def _is_mean_of_chosen(node: Any) -> bool:
    """Return whether a node is that of such a loss function, of elements or rows that are chosen, as by a mask."""
    return _is_mean_of_elements(node) and any(each.name() in _CHOICES for each in _alike(node.next_functions[0][0]))


def _alike(node: Any) -> Iterator[Any]:
    """Yield a node, and those below it through nodes of as many rows."""
    first = (shape_of_node(node) or ())[:1] if node is not None else ()
    return map(graph_within, nodes_below(node, lambda each: (shape_of_node(each) or ())[:1] == first) if first else ())


def _over_samples(node: Any, samples: int, left: tuple[int, ...] | None = None) -> bool:
    """Return whether an input of a node has the samples as its first dimension, and the output does not have them.

    ``left`` is the shape of the output where it is not that of the node.
    """
    first = any(_has_samples_first(each, samples) for each, _ in node.next_functions if each is not None)
    left = (shape_of_node(node) or ()) if left is None else left
    lacks = samples not in left or (math.prod(left) == samples and _reduces_samples(node, samples))
    return first and lacks and _of_outputs(node, samples)


def _has_samples_first(node: Any, samples: int) -> bool:
    """Return whether the first dimension is that of the samples, or of the samples and others that a view has joined.

    After a mean over the samples it is that of the features, of which there may be as many.
    """
    if (shape_of_node(node) or ())[:1] == (samples,):
        return not _is_reduced(node, samples)
    return _joins_samples(node, samples)


def _joins_samples(node: Any, samples: int) -> bool:
    """Return whether the first dimension is that of a view that has joined the samples with others, such as tokens."""
    first = (shape_of_node(node) or ())[:1]
    if not first or first[0] % samples:
        return False
    below = nodes_below(node, lambda each: (shape_of_node(each) or ())[:1] == first)
    inputs = (_only_input(each) for each in map(graph_within, below) if _function(each) in _VIEWS)
    shapes = (shape_of_node(each) or () for each in inputs if each is not None)
    return any(
        shape[:1] == (samples,) and first[0] in (math.prod(shape[:end]) for end in range(2, len(shape) + 1))
        for shape in shapes
    )


def _is_reduced(node: Any, samples: int) -> bool:
    """Return whether a node's output is computed by element of what a reduction over the samples has left."""
    shape = shape_of_node(node)
    alike = (graph_within(each) for each in nodes_below(node, lambda each: shape_of_node(each) == shape))
    if any(_reduces_samples(each, samples) for each in alike):
        return True
    # Of as many features as samples a covariance, which has an element for each pair of features.
    source = _source(node)
    return shape == (samples, samples) and _function(source) == "Mm" and _contracts(source, samples)


def _source(node: Any) -> Any:
    """Return the node that a tensor's values come from, below functions of each element by itself."""
    while _function(node) in _BY_ELEMENT and len(before := {each for each, _ in node.next_functions if each}) == 1:
        node = graph_within(before.pop())
    return node


def _reduces_samples(node: Any, samples: int) -> bool:
    """Return whether a node reduces the first dimension of a tensor that has as many rows as there are samples."""
    before = _only_input(node) if _function(node) in _REDUCTIONS | _MIXING else None
    return before is not None and reduces_first_dimension(node) and (shape_of_node(before) or ())[:1] == (samples,)


def _contracts(node: Any, samples: int) -> bool:
    """Return whether a product of two matrices sums over the samples, as that of a transposed output with an output."""
    (first, _), (second, _) = node.next_functions
    within = nodes_below(first, lambda each: samples in (shape_of_node(each) or ()))
    transposed = first is None or any(
        _function(each) in _TRANSPOSES and (shape_of_node(_only_input(each)) or ())[:1] == (samples,) for each in within
    )
    rows = second is None or (shape_of_node(second) or ())[:1] == (samples,)
    if samples in (shape_of_node(node) or ()):
        # As many features as samples: in a layer, and in a product of pairs of samples, the second one is transposed.
        transposed = first is not None and _function(_source(first)) in _TRANSPOSES
        rows = rows and second is not None and _function(_source(second)) not in _TRANSPOSES
    outputs = all(_of_outputs(each, samples) for each in (first, second) if each is not None)
    return transposed and rows and outputs


def _contracts_samples(node: Any, samples: int) -> bool:
    """Return whether a product of matrices, or of a matrix and a vector, sums over the samples.

    The sum may be over the samples and other dimensions that a view has joined, as of ``einsum("bi,bi->")``.
    """
    (first, _), (second, _) = node.next_functions
    left = shape_of_node(node) or ()
    if _function(node) == "Mm" and _contracts(node, samples):
        return True
    columns = None if first is None else (shape_of_node(first) or (0,))[-1]
    rows = None if second is None else (shape_of_node(second) or (0,))[-2:][0]
    summed = columns if rows is None else rows
    if not summed or summed % samples or columns not in (None, summed):
        return False
    if samples in left if summed == samples else any(not each % samples for each in left if each > 1 or samples == 1):
        return False
    return all(
        _reshapes_samples(each, samples) and _of_outputs(each, samples) for each in (first, second) if each is not None
    )


def _reshapes_samples(node: Any, samples: int) -> bool:
    """Return whether a tensor, or what it is a view of, has the samples as its first dimension."""
    within: Any = graph_within(node)
    while (shape_of_node(within) or ())[:1] != (samples,):
        if _function(within) not in _RESHAPING or (within := _only_input(within)) is None:
            return False
    return True


def _of_outputs(node: Any, samples: int) -> bool:
    """Return whether a node depends on the model's outputs, and is no penalty on weights.

    A penalty has one parameter in each term, or a number as a leaf where the weight is sharded. A term of several
    parameters is one if a parameter has a dimension of as many elements as samples, and no layer is given data.
    """
    leaves, as_many = 0, False
    for each in nodes_below(node, lambda _: True, _DEEP):
        if (leaf := leaf_of_node(each)) is not None:
            leaves += 1
            if leaf.dim() and not isinstance(leaf, nn.Parameter):
                return True
            as_many |= samples in leaf.shape
        if each.name() == _STAGED or _takes_data(each):
            return True
    return leaves > 1 and not as_many


def _takes_data(node: Any) -> bool:
    """Return whether a node is that of a layer or of a choice of rows, whose inputs or indices have no gradient."""
    name = _function(node)
    has_constant = any(each is None for each, _ in node.next_functions)
    return name in _BY_INDICES or (has_constant and name not in _ELEMENTWISE and node.name() not in _LOSSES)


def _refused(what: str, remedy: str = _REMEDY) -> UsageError:
    return UsageError(
        what,
        where=script_line(),
        why="a micro-batch has a part of the global batch, and the losses of the parts do not add up to that of the"
        " whole, so that the gradient would depend on workers and micro-batches",
        remedy=remedy,
    )
