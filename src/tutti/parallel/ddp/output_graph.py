"""Follow the autograd graph of a loss into a model whose graph is not that of its outputs, such as one in stages."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from tutti.torch_compat import is_scalar_node

_WITHIN = "tutti.within_model"
_MOST = 64


def annotate_output(output: Tensor, within: Tensor | None) -> Tensor:
    """Return a copy of a number that a model has returned, whose autograd node leads to the graph within the model.

    Args:
        output: () what the script would get; it requires a gradient.
        within: () the same number with its graph in the model, to which ``graph_within`` then leads; None on ranks
            that do not have this graph.
    """
    copy = output.clone()
    # The stubs of PyTorch call this property a method.
    cast(dict[str, Any], cast(Any, copy.grad_fn).metadata)[_WITHIN] = None if within is None else within.grad_fn
    return copy


def graph_within(node: Any) -> Any:
    """Return the autograd node within the model for that of an ``annotate_output``; any other node as it is."""
    return node.metadata.get(_WITHIN) or node


def reads_output(loss: Tensor) -> bool:
    """Return whether a number of ``annotate_output`` is in a loss's graph, below nodes of one number each."""
    ahead, seen = [loss.grad_fn], set[Any]()
    while ahead and len(seen) < _MOST:
        node: Any = ahead.pop()
        if node is None or node in seen or not is_scalar_node(node):
            continue
        if _WITHIN in node.metadata:
            return True
        seen.add(node)
        ahead += [before for before, _ in node.next_functions]
    return False
