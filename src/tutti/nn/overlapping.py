"""Detect parameters that overlap in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutti.errors import UsageError
from tutti.torch_compat import is_dtensor, storage_key


def check_memory(model: nn.Module) -> None:
    """Check that a model is not sharded, and that no two elements of its trainable parameters share an address.

    On one device an optimizer would update such an element twice; strategies that move parameters would duplicate it.
    Tied parameters, one object under several names, are allowed. The model is not changed.

    Args:
        model: the script's model; frozen and empty parameters are not checked.

    Raises:
        UsageError: one of the trainable parameters is a ``DTensor`` (sharded), or is expanded (several of its elements
            are one place in memory); or two of them overlap in memory.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    if any(is_dtensor(parameter) for _, parameter in trained):
        raise UsageError("the model is sharded already", remedy="build it anew for another run")
    for name, parameter in trained:
        if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            raise UsageError(
                f"the parameter {name} has elements that are one place in memory",
                why=f"it was expanded: shape {tuple(parameter.shape)}, strides {parameter.stride()}",
                remedy="make it of a copy: nn.Parameter(tensor.clone()), or expand the small one in forward",
            )
    by_storage: dict[int, list[tuple[int, int, str, nn.Parameter]]] = {}
    for name, parameter in trained:
        by_storage.setdefault(storage_key(parameter), []).append((*_span(parameter), name, parameter))
    for members in by_storage.values():
        seen: list[tuple[int, int, str, nn.Parameter]] = []
        for member in sorted(members, key=lambda member: member[:2]):
            begin, _, second, b = member
            seen = [other for other in seen if other[1] > begin]
            for _, _, first, a in seen:
                if bool(torch.isin(_places(a), _places(b)).any()):
                    raise UsageError(
                        f"the parameters {first} and {second} share memory and are not one parameter",
                        why="an optimizer would update it twice, and devices that exchange parameters would part them",
                        remedy="tie them (module.weight = other.weight), or make one of tensor.clone()",
                    )
            seen.append(member)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's first offset in its storage, and the offset after its last element."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset())
    return begin, begin + int(reach) + 1


def _places(tensor: Tensor) -> Tensor:
    """Return the storage offset of each element, flattened."""
    begin, end = _span(tensor)
    return torch.arange(begin, end).as_strided(tensor.shape, tensor.stride()).flatten()
