"""Follow the autograd graph of a loss into a model whose graph is not that of its outputs, such as one in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor

from tutti.torch_compat import is_scalar_node

_WITHIN = "tutti.within_model"


def annotate_output(output: Tensor, within: Tensor | None) -> Tensor:
    """Return a copy of a scalar model output, and record on the copy's autograd node its graph in the model.

    Used where the model's outputs do not lead autograd into the model, as with pipeline stages; ``graph_within`` reads
    the record.

    Args:
        output: () the result of the script's call of the model; it requires a gradient.
        within: () the same number, computed with a graph in the model, whose ``grad_fn`` is recorded; None on ranks
            that do not have this graph.

    Returns:
        The copy (), with ``output``'s autograd graph.
    """
    copy = output.clone()
    # The stubs of PyTorch call this property a method.
    cast(dict[str, Any], cast(Any, copy.grad_fn).metadata)[_WITHIN] = None if within is None else within.grad_fn
    return copy


def graph_within(node: Any) -> Any:
    """Return the node in the model's own graph that ``annotate_output`` has recorded on an autograd node.

    Args:
        node: an autograd node, or None. Returned as it is if ``annotate_output`` has recorded nothing on it.
    """
    return node if node is None else node.metadata.get(_WITHIN) or node


def nodes_below(root: Any, enter: Callable[[Any], bool], most: int = 64) -> Iterator[Any]:
    """Walk an autograd graph depth first from a node towards its inputs, and yield each node once.

    A model's output that is a number, such as a loss, has a node of ``annotate_output`` (this module) in place of its
    graph; the walk goes on from this node in the model's graph.

    Args:
        root: the first node; None yields nothing.
        enter: predicate of a node; a node for which it is False is not yielded, nor are its inputs through it.
        most: largest number of nodes to yield.
    """
    ahead, seen = [root], set[Any]()
    while ahead and len(seen) < most:
        node = ahead.pop()
        if node is None or node in seen or not enter(node):
            continue
        seen.add(node)
        yield node
        ahead += [before for before, _ in graph_within(node).next_functions]


def leaf_of_node(node: Any) -> Tensor | None:
    """Return the tensor in whose ``.grad`` an autograd node accumulates; None for the nodes of functions.

    Args:
        node: an autograd node, not None.
    """
    leaf: Tensor | None = node.variable if node.name() == "torch::autograd::AccumulateGrad" else None
    return leaf


def reads_output(loss: Tensor) -> bool:
    """Return whether a loss is computed, through scalars alone, from a model output that ``annotate_output`` returned.

    Searches the loss's autograd graph, at most 64 nodes, and follows only nodes whose results have one element each.

    Args:
        loss: the loss, a tensor of one element.
    """
    return any(_WITHIN in node.metadata for node in nodes_below(loss.grad_fn, is_scalar_node))
