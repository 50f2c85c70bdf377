"""Tensors laid over one stretch of bytes, as a plan says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tutti.exchanges.server.slices import Plan, Size


def sizes(parameters: Sequence[nn.Parameter]) -> list[Size]:
    """What there is to share out."""
    return [Size(p.numel(), p.element_size(), str(p.dtype)) for p in parameters]


def over(plan: Plan, parameters: Sequence[nn.Parameter], memory: Tensor) -> list[Tensor]:
    """A view of ``memory`` (plan.size,) uint8 for every parameter, in its shape and memory layout."""
    views: list[Tensor] = [memory] * len(parameters)
    for section in plan.sections:
        for index, offset in zip(section.order, section.offsets, strict=True):
            parameter, at = parameters[index], section.start + offset * section.itemsize
            views[index] = shaped(memory[at : at + parameter.nbytes].view(parameter.dtype), parameter)
    return views


def shaped(vector: Tensor, parameter: Tensor) -> Tensor:
    """``vector`` in the shape of ``parameter``, and in the order of its memory where that has no holes."""
    return vector.as_strided(parameter.shape, strides(parameter))


def strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own where its memory has no holes, else those of its shape alone."""
    own = parameter.stride()
    dense = torch.empty_like(parameter, device="meta").stride() == own
    return own if dense else torch.empty(parameter.shape, device="meta").stride()


def in_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    """All elements of ``tensor``, of the parameter's shape, in the order of ``shaped``."""
    flat = torch.empty(parameter.numel(), dtype=tensor.dtype)
    shaped(flat, parameter).copy_(tensor)
    return flat


def write(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[bool]:
    """Copy gradients into their views, zeros where there is none; which there were."""
    used = [gradient is not None for gradient in gradients]
    there = [gradient for gradient in gradients if gradient is not None]
    if len(there) == len(used):
        if there:
            torch._foreach_copy_(list(views), there)
        return used
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
    return used
