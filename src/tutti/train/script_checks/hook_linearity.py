"""Find gradient hooks of parameters that are not linear, so that their results for micro-batches do not add up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.comm.current_session import collectives_refused
from tutti.data.global_generators import own_generators
from tutti.nn.gradient_hooks import hook_package
from tutti.nn.swap import parameters
from tutti.nn.written_tensors import DATA, METADATA, may_write, storage_of
from tutti.torch_compat import gradient_hooks, tree_leaves
from tutti.train.script_checks.python_state import python_state

_SIZES = 1.0, 1e3
"""Deviations of the gradients that hooks are tried with: the limits of a clamp lie below one of them (a guess)."""
_SMALL = 1e-3
"""Relative difference that counts as rounding."""


def nonlinear_hook(parts: Sequence[nn.Module]) -> str:
    """Return the name of the first parameter with a hook f for which f(a) + f(b) is not f(a + b); empty for none.

    The hooks of ``Tensor.register_hook`` are called a few times with drawn gradients a and b. Python objects that they
    change are restored. Hooks that draw, call collectives, raise errors or write in place to tensors of the script are
    not judged. Not collective.

    Args:
        parts: the modules, whose parameters must be whole.
    """
    draw = torch.Generator().manual_seed(0)
    for name, parameter in parameters(parts):
        for hook in list((gradient_hooks(parameter) or {}).values()):
            if hook_package(hook) != "tutti" and parameter.is_floating_point() and _is_nonlinear(hook, parameter, draw):
                return name
    return ""


def _is_nonlinear(hook: Any, parameter: Tensor, draw: torch.Generator) -> bool:
    for size in _SIZES:
        one, other = (
            (torch.randn(parameter.shape, generator=draw) * size).to(parameter.device, parameter.dtype)
            for _ in range(2)
        )
        with suppress(Exception), ExitStack() as stack:
            stack.enter_context(python_state([], hook))
            for each in (own_generators(), torch.no_grad(), collectives_refused()):
                stack.enter_context(each)
            first, second, both, again = (_called(hook, each) for each in (one, other, one + other, one))
            away = (first + second - both).abs().max()
            if bool(torch.equal(first, again)) and bool(away > _SMALL * max(first.abs().max(), both.abs().max())):
                return True
    return False


def _called(hook: Any, gradient: Tensor) -> Tensor:
    """Return what a hook makes of a gradient, which it may write in place."""
    given = gradient.clone()
    with _OwnWrites(given):
        result = hook(given)
    return given if result is None else result.clone()


class _OwnWrites(TorchFunctionMode):
    """Function mode that raises RuntimeError before a write in place to a tensor that was not made within it.

    Args:
        given: a tensor that may be written.
    """

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self._made = {storage_of(given)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = may_write(func) and func not in METADATA and func != DATA
        written = args[:1] if writes else [kwargs.get("out")]
        if any(isinstance(each, Tensor) and storage_of(each) not in self._made for each in tree_leaves(written)):
            raise RuntimeError("a hook on a gradient writes a tensor of the script")
        result = func(*args, **kwargs)
        given, made = (
            {storage_of(each) for each in tree_leaves(some) if isinstance(each, Tensor)} for some in (args, result)
        )
        self._made |= made - given
        return result
