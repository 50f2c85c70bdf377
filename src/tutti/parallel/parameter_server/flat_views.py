"""Views of parameters in one flat byte buffer, laid out by a ``ServerPlan``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tutti.parallel.parameter_server.server_partition import ServerPlan, Size
from tutti.torch_compat import foreach_copy_


def sizes(parameters: Sequence[nn.Parameter]) -> list[Size]:
    """Return the size of each parameter, from which ``plan_servers`` divides the parameters over servers.

    Args:
        parameters: the trained parameters, in the model's order.

    Returns:
        For each parameter, in order, a ``Size`` (named tuple): its number of elements (``elements``), the bytes of an
        element (``itemsize``), and the dtype's name (``dtype``, such as ``"torch.float32"``).
    """
    return [Size(p.numel(), p.element_size(), str(p.dtype)) for p in parameters]


def over(plan: ServerPlan, parameters: Sequence[nn.Parameter], memory: Tensor) -> list[Tensor]:
    """Return a view of one flat buffer for each parameter, in the parameter's dtype, shape and memory format.

    Args:
        plan: partition of the parameters over the parameter servers, with the position of each parameter in the buffer.
        parameters: the parameters in the order of ``plan.sizes``; their values are not read.
        memory: the buffer, (plan.size,) uint8.

    Returns:
        A view for each parameter, in the order of ``parameters``.
    """
    views: list[Tensor] = [memory] * len(parameters)
    for section in plan.sections:
        for index, offset in zip(section.order, section.offsets, strict=True):
            parameter, at = parameters[index], section.start + offset * section.itemsize
            views[index] = shaped(memory[at : at + parameter.nbytes].view(parameter.dtype), parameter)
    return views


def shaped(vector: Tensor, parameter: Tensor) -> Tensor:
    """View a flat tensor in a parameter's shape, and with its strides if the parameter is contiguous or channels-last.

    Args:
        vector: (n,), one element for each element of the parameter.
        parameter: gives shape and strides; its values are not read.

    Returns:
        The view; contiguous where the parameter's own strides leave gaps.
    """
    return vector.as_strided(parameter.shape, strides(parameter))


def strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides, in elements, of a parameter's view in a flat buffer.

    Args:
        parameter: gives shape and strides; its values are not read.

    Returns:
        The parameter's own strides where it is dense (contiguous, or channels-last); otherwise the strides of a
        contiguous tensor of its shape.
    """
    own = parameter.stride()
    dense = torch.empty_like(parameter, device="meta").stride() == own
    return own if dense else torch.empty(parameter.shape, device="meta").stride()


def in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Flatten a tensor into a copy (n,) whose elements are in the parameter's memory order (the inverse of ``shaped``).

    Args:
        tensor: a tensor of the parameter's shape, in any memory format, such as its optimizer state.
        parameter: gives shape and memory order; its values are not read.

    Returns:
        A new tensor (n,) on the CPU, in the dtype of ``tensor``.
    """
    flat = torch.empty(parameter.numel(), dtype=tensor.dtype)
    shaped(flat, parameter).copy_(tensor)
    return flat


def write_gradients(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[bool]:
    """Copy gradients into the buffer that is sent to the parameter servers, zeros where a gradient is None.

    Args:
        views: for each parameter a view of the send buffer in the parameter's shape, as ``over`` returns them.
        gradients: for each parameter its gradient or None.

    Returns:
        For each parameter whether it had a gradient.
    """
    used = [gradient is not None for gradient in gradients]
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) == len(used):
        if there:
            foreach_copy_(list(views), there)
        return used
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
    return used
