"""Gradient hooks that a script has registered.

``Tensor.register_hook`` (called with the gradient before it is accumulated),
``register_post_accumulate_grad_hook`` (called with the parameter afterwards), ``Module.register_full_backward_hook``
and ``register_full_backward_pre_hook``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tutti.nn.owned_hooks import OwnedHook
from tutti.torch_compat import accumulation_hooks, gradient_hooks, set_gradient_hooks


def add_accumulation_hook(parameter: Tensor, method: Callable[[Tensor], None]) -> RemovableHandle:
    """Register a bound method as ``register_post_accumulate_grad_hook`` of a parameter, by a weak reference.

    The hook does nothing once the method's object is gone (``OwnedHook``).

    Args:
        parameter: a trainable leaf.
        method: bound method, called with the parameter after its gradient was accumulated.

    Returns:
        The handle of PyTorch, whose ``remove()`` takes the hook off the parameter.
    """
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(OwnedHook(method))
    return handle


def hook_package(hook: Any) -> str:
    """Return the top-level package that defines a hook, such as "torch" or "tutti"; "" where none is known.

    Args:
        hook: a function, a method, or an object that wraps a function as its attribute ``func``, such as a ``partial``.
    """
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0]


def has_gradient_hook(parameter: Tensor) -> bool:
    """Return whether a parameter has a hook registered by ``Tensor.register_hook``.

    ``register_post_accumulate_grad_hook`` does not count, and ``coalesce_micro_batches`` neither.
    """
    return any(hook is not _coalesced for hook in (gradient_hooks(parameter) or {}).values())


def coalesce_micro_batches(parameter: Tensor) -> None:
    """Make autograd coalesce each sparse gradient of a parameter before adding it to ``.grad``, from now on.

    Entries of one micro-batch for the same row are then summed first. Otherwise autograd would add them one by one to
    the sum of earlier micro-batches, which another rank may have computed, so that the rounding would depend on the
    number of ranks. A second call does nothing.

    Args:
        parameter: a trainable leaf.
    """
    if _coalesced not in (gradient_hooks(parameter) or {}).values():
        parameter.register_hook(_coalesced)


def _coalesced(gradient: Tensor) -> Tensor:
    return gradient.coalesce() if gradient.is_sparse else gradient


def has_accumulation_hook(parameter: Tensor) -> bool:
    """Return whether a script has registered a ``register_post_accumulate_grad_hook`` on the parameter.

    Hooks of tutti's own do not count.
    """
    return any(hook_package(hook) != "tutti" for hook in (accumulation_hooks(parameter) or {}).values())


class ScriptHook:
    """A hook on a gradient that calls a hook of the script, except in the backward of a dummy micro-batch.

    A rank without samples of a global batch computes a dummy micro-batch, whose gradients are zero, only to keep
    collectives aligned.

    Args:
        hook: the script's hook.
        is_dummy: function without arguments that returns whether the present backward is that of a dummy micro-batch.
        script_code: function without arguments that returns a context manager, within which the script's hook is
            called; there tutti checks how the hook reads parameters.
    """

    def __init__(
        self,
        hook: Callable[[Tensor], Tensor | None],
        is_dummy: Callable[[], bool],
        script_code: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._hook, self._is_dummy, self._script_code = hook, is_dummy, script_code

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Return what the script's hook returns, or None for a dummy micro-batch. Not collective.

        Args:
            gradient: the micro-batch's gradient.
        """
        if self._is_dummy():
            return None
        with self._script_code():
            return self._hook(gradient)


def wrap_hooks(
    named: Iterable[tuple[str, Tensor]], wrap: Callable[[Callable[[Tensor], Tensor | None]], ScriptHook]
) -> list[str]:
    """Replace the script's ``register_hook`` hooks of parameters by wrapped ones, in place in PyTorch's hook tables.

    The handles that ``register_hook`` returned still remove the hooks, and their order stays. Hooks that are a
    ``ScriptHook`` already, as after an earlier call, stay as they are.

    Args:
        named: (name, parameter) pairs.
        wrap: function of one of the script's hooks that returns the ``ScriptHook`` to be called in its place.

    Returns:
        The parameter's name for each hook that this call has wrapped; the name of a parameter with several such hooks
        occurs as often.
    """
    found = []
    for name, parameter in named:
        hooks = gradient_hooks(parameter) or {}
        for key, hook in hooks.items():
            if not isinstance(hook, ScriptHook):
                hooks[key] = wrap(hook)
                found.append(name)
    return found


def share_gradient_hooks(parameter: Tensor, other: Tensor) -> None:
    """Let ``other`` run the ``register_hook`` hooks of ``parameter`` in backward, by sharing their table.

    A hook that is later added to either tensor, or removed by its handle, is added or removed for both. Nothing is done
    if ``parameter`` has no hook.

    Args:
        parameter: the tensor on which the hooks were registered.
        other: the tensor that is to run them, too; hooks of its own are replaced.
    """
    if gradient_hooks(parameter):
        set_gradient_hooks(other, gradient_hooks(parameter))


def shares_gradient_hooks(parameter: Tensor, other: Tensor) -> bool:
    """Return whether both tensors share one table of ``register_hook`` hooks, set by ``share_gradient_hooks``.

    Also True if neither has had a hook.

    Args:
        parameter, other: the tensors to compare.
    """
    return gradient_hooks(parameter) is gradient_hooks(other)
