"""Undo what a script has written into a stage's parameters when a write to another stage's parameter is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tutti.nn.script_mode import QuietMode, tensors_among, tutti_caller
from tutti.nn.written_tensors import METADATA, may_write, share_memory
from tutti.torch_compat import TorchFunctionDisabled


class StageWrites(QuietMode):
    """Function mode that keeps a copy of each parameter of this rank that the script writes or takes views of.

    A loop over all parameters writes those of this rank's stages before it meets one of another stage, which is
    refused. ``undo`` then restores the parameters, so that a refused loop changes nothing.

    Args:
        present: the parameters of this rank's stages, by name.
    """

    def __init__(self, present: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._present: Any = WeakIdKeyDictionary({parameter: name for name, parameter in present.items()})
        self._kept: list[tuple[nn.Parameter, Tensor]] = []

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch, and copy this rank's parameters that it may write or returns views of.

        This function mode copies a parameter of this rank's pipeline stages at the script's first call, since
        ``forget``, of a function that may write the parameter, or that returns a tensor which shares its memory.
        ``undo`` copies the value back.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.

        Returns:
            The result of ``func(*args, **kwargs)``, unchanged.
        """
        if self.quiet or func in METADATA:
            return func(*args, **kwargs)
        given = [
            tensor
            for tensor in tensors_among(args, kwargs)
            if tensor in self._present and all(tensor is not kept for kept, _ in self._kept)
        ]
        if not given or tutti_caller(__name__) is not None:
            return func(*args, **kwargs)
        if may_write(func) or "out" in kwargs:
            self._keep(given)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        with TorchFunctionDisabled():
            views = [tensor for tensor in given if share_memory([tensor], tensors_among((result,), {}))]
        self._keep(views)
        return result

    def _keep(self, parameters: Sequence[Any]) -> None:
        with TorchFunctionDisabled():
            self._kept += [(parameter, parameter.detach().clone()) for parameter in parameters]

    def forget(self) -> None:
        """Accept the script's writes to this rank's parameters so far: free the copies kept from before these writes.

        This function mode copies each parameter of this rank's pipeline stages before the script first writes it or
        takes a view of it. After this call ``undo`` no longer reverts the writes so far.
        """
        self._kept.clear()

    def undo(self) -> None:
        """Revert the script's writes to parameters of this rank's pipeline stages since the last ``forget``.

        This function mode has copied each parameter before the script first wrote it or took a view of it; the values
        are copied back in place, and the copies freed.
        """
        with TorchFunctionDisabled(), torch.no_grad():
            for parameter, before in self._kept:
                parameter.copy_(before)
        self.forget()
