"""Copies of whole parameters that stand for views, where a rank has a part of the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from tutti.checkpoint.fingerprint import tensor_digest
from tutti.errors import UsageError, script_line
from tutti.nn.state_copy import SourceValues, StateCopy
from tutti.nn.written_tensors import read_only, share_memory
from tutti.torch_compat import TorchFunctionDisabled, local_tensor, tree_map_only


class ViewedPart(SourceValues):
    """Source of a ``StateCopy`` of a parameter of which this rank has a part: tells whether the copy is up to date.

    Where a script takes a view of such a parameter, it gets a ``StateCopy``, a view of a gathered copy of the whole
    parameter. That asks this object before each use whether the part has changed since.

    Args:
        part: this rank's part, a slice or a ``DTensor`` of rows. When this object is made, the part must have the
            copy's values.
    """

    def __init__(self, part: Tensor) -> None:
        self._part, self._before = part, _digest(part)

    def unchanged(self) -> bool:
        """Return whether this rank's part has the values that it had when this object was made. Not collective.

        A ``StateCopy``, the gathered copy that a script has got for a view of the parameter, is up to date as long as
        this is True. Digests are compared; a change of another rank's part is not seen.
        """
        return _digest(self._part) == self._before

    def undo(self) -> None:
        """Do nothing: the script's writes to this rank's part stay.

        A ``StateCopy``, the gathered copy that a script has got for a view of the parameter, calls this before it
        raises UsageError for a read or write. Other classes revert the script's writes to the model here. Not
        collective.
        """


def as_views(func: Any, result: Any, wholes: Mapping[Tensor, tuple[str, Tensor]]) -> Any:
    """Replace gathered copies of parameters, and views of them, in the result of a function that the script has called.

    The model's own parameter replaces a copy; a ``StateCopy`` (tensor subclass) with the same memory replaces a view of
    a copy, and raises UsageError when the script writes it, or reads it after the parameter has changed. Not
    collective.

    Args:
        func: the function, as ``__torch_function__`` is given it.
        result: the function's result, computed with the copies in place of the parameters.
        wholes: for each parameter (this rank's part) that the script gave the function, its name in the model and the
            gathered copy.

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


def refuse_shared_data(name: str) -> NoReturn:
    """Raise UsageError: the script assigns a split parameter's memory to the ``.data`` of another tensor.

    This rank has a part of the parameter; the other tensor would get a gathered copy, which does not change with the
    parameter. Never returns.

    Args:
        name: the parameter's name in the model.
    """
    raise UsageError(
        f"the script assigns the memory of {name} to the .data of another tensor",
        where=script_line(),
        why="this rank has a part of the parameter, and a whole copy would not change with it",
        remedy="assign a copy (parameter.data.clone()), or write into the tensor (tensor.copy_(parameter))",
    )


def _digest(part: Tensor) -> int:
    with TorchFunctionDisabled(), torch.no_grad():
        return int(tensor_digest(local_tensor(part).detach()))
