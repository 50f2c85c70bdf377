"""Copies of whole parameters that stand for views, where a rank has a part of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint.fingerprint import tensor_digest
from tutti.nn.state_copy import SourceValues, StateCopy
from tutti.nn.written_tensors import read_only, share_memory
from tutti.torch_compat import TorchFunctionDisabled, local_tensor, tree_map_only


class ViewedPart(SourceValues):
    """A rank's part of a parameter of which the script has taken a view.

    Args:
        part: the part: a slice, or a ``DTensor`` of rows.
    """

    def __init__(self, part: Tensor) -> None:
        self._part, self._before = part, _digest(part)

    def unchanged(self) -> bool:
        """Return whether the part has had the same values since this object was made. Not collective."""
        return _digest(self._part) == self._before

    def undo(self) -> None:
        """Do nothing: the script has written no copy."""


def as_views(func: Any, result: Any, wholes: Mapping[Tensor, tuple[str, Tensor]]) -> Any:
    """Replace gathered copies of parameters, and views of them, in a function's result by what the script may keep.

    In place of a copy stands the script's own parameter, in place of a view of a copy a ``StateCopy``. Not collective.

    Args:
        func: the function, as ``__torch_function__`` is given it.
        result: the function's result, computed with the copies in place of the parameters.
        wholes: for each parameter that the script gave the function its name and the gathered copy.

    Returns:
        The result for the script, in the same structure.
    """

    def seen(tensor: Tensor) -> Tensor:
        for part, (name, whole) in wholes.items():
            if tensor is whole:
                return part  # such as .cpu() on a CPU
            if share_memory([tensor], [whole]):
                return StateCopy.of(tensor, name, ViewedPart(part))
        return tensor

    with TorchFunctionDisabled():
        return tree_map_only(Tensor, seen, read_only(func, result))


def _digest(part: Tensor) -> int:
    with TorchFunctionDisabled(), torch.no_grad():
        return int(tensor_digest(local_tensor(part).detach()))
