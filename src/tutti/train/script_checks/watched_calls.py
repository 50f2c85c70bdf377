"""Tell, for the function modes of this folder, which module calls PyTorch, and which values the call reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.nn.script_mode import is_function_mode
from tutti.nn.swap import buffers
from tutti.torch_compat import engine_backward, local_tensor, tree_leaves
from tutti.train.script_checks.in_place_updates import REPLACING, fills_tensor
from tutti.train.script_checks.storage_records import fills_memory, memories_of

Root: TypeAlias = "tuple[Tensor, Tensor | None]"
"""A tensor from which a backward begins, and the gradient that the call gives for it."""
EXCHANGING = ("torch.distributed", "tutti.comm")
"""Packages whose code sends tensors to other ranks."""
NOT_OF_SCRIPT = ("tutti.", "torch.distributed.")
"""Packages whose code runs in a backward without being a hook of the script, as FSDP2's, which gathers weights."""
_DISPATCHING = ("torch._ops", "torch.overrides")
"""Modules of PyTorch that call function modes."""
_NORMS = frozenset((functional.batch_norm, functional.instance_norm))
"""Functions whose second and third argument are averages of a worker's own batches."""
_CONVERSIONS = frozenset(("to", "type_as"))
"""Functions that take dtype and device of their second argument, and no values."""


def own_tensors(parts: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the parameters of modules, their gradients and all buffers; where parameters are sharded, this rank's rows.

    Args:
        parts: the modules.
    """
    for part in parts:
        for parameter in part.parameters():
            for each in (parameter, parameter.grad):
                yield each if each is None else local_tensor(each)
    for slot in buffers(parts, persistent=False):
        yield slot.get()


def calling_module(caller: FrameType | None) -> str:
    """Return the name of the Python module that makes a call of PyTorch; empty if there is none.

    Args:
        caller: the frame that calls ``__torch_function__``; further function modes may be between.
    """
    while caller is not None:
        module = str(caller.f_globals.get("__name__"))
        if module not in _DISPATCHING and not is_function_mode(caller):
            return module
        caller = caller.f_back
    return ""


def roots_of_backward(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Root]:
    """Return the tensors from which a call of ``Tensor.backward`` or ``torch.autograd.backward`` begins.

    Args:
        func: the function of PyTorch that is called.
        args: its positional arguments.
        kwargs: its other arguments.

    Returns:
        Each tensor with the gradient that the call gives for it, None for none; an empty list for other functions.
    """
    if func is Tensor.backward:
        return [(args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))]
    if func is not torch.autograd.backward:
        return []
    given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
    gradients = given if isinstance(given, Sequence) else [given] * len(args[0])
    return [root for root in zip(args[0], gradients, strict=True) if isinstance(root[0], Tensor)]


def number_of_gradients(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the number of which a call of ``torch.autograd.grad`` computes gradients.

    Args:
        func: the function of PyTorch that is called.
        args: its positional arguments.
        kwargs: its other arguments.

    Returns:
        The number; None for other calls, several numbers, or gradients that the script gives for it.
    """
    roots = tree_leaves(args[0]) if func is torch.autograd.grad and len(args) == 2 else []
    is_number = len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1
    return roots[0] if is_number and kwargs.get("grad_outputs") is None else None


def backward_within(
    mode: TorchFunctionMode,
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run ``loss.backward(…)`` with a function mode on, so that the mode sees the PyTorch calls of hooks in backward.

    To be called by the mode as it handles ``Tensor.backward``, while PyTorch has turned it off. The mode stays off in a
    backward with ``create_graph`` or ``inputs``, and of a loss that is no plain tensor.

    Args:
        mode: the mode.
        loss: the tensor.
        gradient, retain_graph, create_graph, inputs: arguments of ``Tensor.backward``.
    """
    if create_graph or inputs is not None or type(loss) is not Tensor or (gradient is None and loss.numel() != 1):
        loss.backward(gradient, retain_graph, create_graph, inputs)
        return
    given = torch.ones_like(loss) if gradient is None else gradient
    with mode:
        engine_backward(loss, given, bool(retain_graph))


def values_read(func: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
    """Return the leaves of a call's arguments whose values its result depends on.

    Left out are arguments of which only the shape or dtype counts, such as in ``zeros_like``; running statistics of
    norms; and a tensor that the call overwrites as a whole, such as by ``copy_``.

    Args:
        func: the function of PyTorch.
        name: its name.
        args, kwargs: arguments of the call.
    """
    if func in _NORMS:
        return tree_leaves((args[:1], args[3:], {key: kwargs[key] for key in kwargs if not key.startswith("running")}))
    if name.endswith(("_like", "storage")) or name.startswith("new_"):
        return []
    if name in _CONVERSIONS:
        return tree_leaves(args[:1])
    whole = name in REPLACING and bool(memories_of(args[:1])) and fills_tensor(name, args)
    replaces = whole and fills_memory(args[0])
    return tree_leaves((args[1:] if replaces else args, kwargs))
