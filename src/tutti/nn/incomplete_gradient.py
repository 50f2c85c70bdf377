"""Placeholders in ``.grad`` for gradients that live on other ranks; reading one raises UsageError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from tutti.errors import UsageError, script_line
from tutti.nn.written_tensors import ASSIGN_DATA
from tutti.torch_compat import TorchFunctionDisabled, in_backward, make_wrapper_subclass

CLEARING = ("zero_", "detach_", "detach", "requires_grad_")
"""Functions of PyTorch that a script may call on any placeholder of a gradient."""


class IncompleteGradient(Tensor):
    """Placeholder in ``.grad`` for a gradient whose values are on other ranks.

    It has shape, strides, dtype and device of its parameter, but no memory. Operations that read or write its values
    raise ``UsageError``. Clearing by ``zero_grad`` and accumulation by autograd do not raise: ``zeroed`` and ``added``
    record them.

    Args:
        parameter: the parameter.
        place: location of the complete gradient, as text for the error message, such as "on other ranks".

    Attributes:
        zeroed: whether the script has set it to zero in place, as ``zero_grad(set_to_none=False)`` does.
        added: whether a backward of the script's own has accumulated into it since it was made or zeroed.
        place: the argument ``place``.
    """

    zeroed: bool
    added: bool
    place: str

    @staticmethod
    def __new__(cls, parameter: Tensor, place: str) -> IncompleteGradient:
        """Make a tensor without data of the parameter's shape, strides, dtype and device."""
        made: IncompleteGradient = make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.zeroed, made.added, made.place = False, False, place
        return made

    def __init__(self, parameter: Tensor, place: str) -> None:
        """Do nothing: ``__new__`` has made the tensor."""

    @property
    def edited(self) -> bool:
        """Whether the script has changed the gradient's values on this rank. Not collective.

        Always False in this class, whose placeholders refuse such changes; subclasses that allow them override it.
        """
        return False

    def compared(self) -> Tensor | None:
        """Return the tensor whose values all ranks must have alike after the script's edits of the gradient, or None.

        The caller compares it over the ranks. None in this class, whose gradients the script cannot edit; subclasses
        return a tensor of their own, not a copy.
        """
        return None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"IncompleteGradient({tuple(self.shape)}, {self.place})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == ASSIGN_DATA and isinstance(args[0], IncompleteGradient):
            # A placeholder has no memory to be exchanged.
            args[0].copy_(args[1])
            return None
        with TorchFunctionDisabled():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        found = next(_incomplete([*args, *(kwargs or {}).values()]), None)
        if name in CLEARING and found is not None:
            if name == "zero_":
                found.zeroed, found.added = True, False
            return found
        if name == "add_" and found is args[0] and in_backward():
            # No error yet: the script may still clear it, such as one that needs gradients of the inputs alone.
            found.added = True
            return found
        _refuse("on other ranks" if found is None else found.place, name)


def _incomplete(values: Any) -> Any:
    for value in values:
        if isinstance(value, IncompleteGradient):
            yield value
        elif isinstance(value, list | tuple):
            yield from _incomplete(value)


def _refuse(place: str, name: str) -> NoReturn:
    raise UsageError(
        f"the script reads or edits a gradient that this rank does not have whole ({name})",
        where=script_line(),
        why=f"the complete gradient is {place}",
        remedy="give tutti.prepare clip=… to clip it, put the term into the loss, or take strategy='mirrored'",
    )


def conceal(parameters: Sequence[nn.Parameter], place: str) -> None:
    """Set the ``.grad`` of each parameter to a placeholder that raises UsageError where the script reads or edits it.

    For gradients of which this rank has only a part, or none: a norm that the script computed from that part, for
    example, would be wrong. The script may still clear the placeholder, as ``zero_grad()`` does. The previous ``.grad``
    is dropped: a caller that needs it keeps it. Not collective.

    Args:
        parameters: the script's parameters.
        place: for the error's text, where the complete gradient is, such as "in rows over the ranks".
    """
    for parameter in parameters:
        parameter.grad = IncompleteGradient(parameter, place)


def is_cleared(gradient: Tensor | None) -> bool:
    """Return whether a script has cleared the placeholder that ``conceal`` set as ``.grad``.

    True for None, and for a placeholder that was zeroed in place; False for one that was left as it was, and for real
    gradients.

    Args:
        gradient: the parameter's ``.grad``.
    """
    return gradient is None or is_zeroed(gradient)


def is_zeroed(gradient: Tensor | None) -> bool:
    """Return whether a script has zeroed in place the placeholder that ``conceal`` set as ``.grad``.

    False for None, for a placeholder that was left as it was, and for real gradients.

    Args:
        gradient: the parameter's ``.grad``.
    """
    return isinstance(gradient, IncompleteGradient) and gradient.zeroed


def clear_gradient(parameter: nn.Parameter, set_to_none: bool) -> None:
    """Clear one parameter's ``.grad`` as ``zero_grad(set_to_none)`` does, in place.

    Args:
        parameter: the parameter.
        set_to_none: set ``.grad`` to None; False: detach it and fill it with zeros.
    """
    if set_to_none or parameter.grad is None:
        parameter.grad = None
        return
    if parameter.grad.grad_fn is not None:
        parameter.grad.detach_()
    parameter.grad.requires_grad_(False).zero_()


def after_clearing(gradient: Tensor, shown: Tensor | None) -> Tensor | None:
    """Clear a real gradient in the way in which the script has cleared its placeholder, to None or to zeros.

    Called where the script was shown a placeholder (``conceal``) in place of ``gradient``, to carry a ``zero_grad()``
    of the script over. None and zeros differ: an optimizer passes over a parameter without gradient, while momentum and
    weight decay change a parameter whose gradient is zero.

    Args:
        gradient: the real gradient; zeroed in place if the script has zeroed the placeholder.
        shown: the present ``.grad``: the placeholder, or None if the script has set ``.grad`` to None.

    Returns:
        None if ``shown`` is None, else ``gradient``, zeroed if the placeholder was zeroed.
    """
    if shown is None:
        return None
    return gradient.zero_() if is_zeroed(shown) else gradient
