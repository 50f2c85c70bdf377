"""Placeholders in ``.grad`` for gradients that other processes have summed, read from them when a script needs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tutti.errors import UsageError, script_line
from tutti.nn.incomplete_gradient import CLEARING, IncompleteGradient
from tutti.nn.written_tensors import METADATA
from tutti.torch_compat import in_backward, tree_map_only


class GradientSums:
    """Reads the summed gradients of all parameters from parameter servers, at most once, until the update is made.

    Args:
        read: function without arguments that reads them; returns one new tensor for each parameter. It must not refer
            to a parameter in whose ``.grad`` a placeholder is: Python's garbage collector does not see that a parameter
            owns its ``.grad``.
    """

    def __init__(self, read: Callable[[], Sequence[Tensor]]) -> None:
        self._read: Callable[[], Sequence[Tensor]] | None = read
        self._values: Sequence[Tensor] | None = None

    @property
    def readable(self) -> bool:
        """Whether ``values`` can return the gradients: this rank has read them, or the servers still hold them.

        Sends nothing.
        """
        return self._read is not None or self._values is not None

    def values(self) -> Sequence[Tensor]:
        """Return the summed gradients of all parameters, which the first call reads from the parameter servers.

        The first call blocks until they have replied; later calls send nothing. Not collective: other ranks need not
        call it.

        Returns:
            One tensor for each parameter, in the order of the constructor's ``read``, the same objects in each call. Do
            not write to them.

        Raises:
            UsageError: ``close`` was called, as the update has been made, and this rank had not read the gradients
                before.
        """
        if self._values is None:
            if self._read is None:
                raise UsageError(
                    "the script reads a gradient after the update",
                    where=script_line(),
                    why="the parameter servers have applied it and keep none",
                    remedy="read it between run.backward and optimizer.step(), or take strategy='mirrored'",
                )
            self._values = self._read()
        return self._values

    def close(self) -> None:
        """Note that the parameter servers no longer hold the sums, because the update has been made. Sends nothing.

        If this rank has not called ``values`` before, the gradients are lost, and ``values`` raises UsageError.
        """
        self._read = None


class SummedGradient(IncompleteGradient):
    """Placeholder in ``.grad`` for a gradient that parameter servers have summed: the script computes with its values.

    The first operation that needs values reads the gradients of all parameters. This operation and all later ones act
    on a tensor of this rank, so that edits in place stay on this rank until the update. A script that does not look at
    its gradients, or only clears them, reads none.

    Args:
        parameter: the parameter.
        sums: the summed gradients of all parameters.
        index: position of this parameter's gradient in ``sums``.
    """

    _sums: GradientSums
    _index: int
    _own: Tensor | None
    _cleared: bool

    @staticmethod
    def __new__(cls, parameter: Tensor, sums: GradientSums, index: int) -> SummedGradient:
        """Make a tensor without data of the parameter's shape, strides, dtype and device."""
        made = cast(SummedGradient, IncompleteGradient.__new__(cls, parameter, "on the parameter servers"))
        made._sums, made._index, made._own, made._cleared = sums, index, None, False
        return made

    def __init__(self, parameter: Tensor, sums: GradientSums, index: int) -> None:
        """Do nothing: ``__new__`` has made the tensor."""

    @property
    def readable(self) -> bool:
        """Whether ``value`` can return the gradient: this rank has its values, or the servers still hold them.

        Sends nothing.
        """
        return self._own is not None or self.zeroed or self._sums.readable

    @property
    def edited(self) -> bool:
        """Whether the script has changed the gradient on this rank. Sends nothing.

        True if it has zeroed the gradient in place, or if its values differ from the sums that this rank has read, so
        that writes through ``.data`` or NumPy count.
        """
        if self.zeroed or self._cleared or self._own is None:
            return self.zeroed or self._cleared
        return not torch.equal(self._own.nan_to_num(), self._sums.values()[self._index].nan_to_num())

    def belongs_to(self, sums: GradientSums | None) -> bool:
        """Return whether this placeholder stands for one of the gradients that the parameter servers hold now.

        A script may have kept a placeholder of an earlier step, whose gradient the servers have dropped. Not
        collective.

        Args:
            sums: the gradients that the servers hold now, summed over the ranks; None if they hold none.
        """
        return self._sums is sums

    def compared(self) -> Tensor:
        """Return the gradient as the script has left it, which all ranks must have alike; the same tensor as ``value``.

        The caller compares it over the ranks. Not collective; like ``value``, the first call may read the gradients of
        all parameters.

        Raises:
            UsageError: the update has been made, and this rank had not read the gradient before.
        """
        return self.value()

    def value(self) -> Tensor:
        """Return the gradient as the script has left it: this rank's own tensor, which the script edits in place.

        Not a copy, and the same tensor in each call. The first call for any gradient of the same ``GradientSums`` reads
        the gradients of all parameters from the parameter servers, and blocks until they have replied. Not collective.

        Raises:
            UsageError: the update has been made, and this rank had not read the gradient before.
        """
        if self.zeroed:
            self.zeroed, self._cleared = False, True
            self._own = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if self._own is None:
            self._own = self._sums.values()[self._index].clone()
        return self._own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call functions of PyTorch with values; those that need none, and PyTorch's own, with the placeholder."""
        name = getattr(func, "__name__", "")
        private = name.startswith("_") and not name.startswith("__")
        if func in METADATA or name in CLEARING or private or in_backward():
            return super().__torch_function__(func, types, args, kwargs)
        return _with_values(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        read = name == "zero_" and isinstance(args[0], SummedGradient) and args[0]._own is not None
        if (name in CLEARING and not read) or in_backward():
            return super().__torch_dispatch__(func, types, args, kwargs)
        return _with_values(func, args, kwargs or {})


def _with_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` with the values of placeholders; return the first one where ``func`` returns its values."""
    own_args, own_kwargs = tree_map_only(SummedGradient, SummedGradient.value, (tuple(args), dict(kwargs)))
    result = func(*own_args, **own_kwargs)
    return args[0] if args and isinstance(args[0], SummedGradient) and result is own_args[0] else result
