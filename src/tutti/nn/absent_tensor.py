"""Placeholders for parameters and buffers that live on other ranks; reading or writing one raises UsageError."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tutti.errors import UsageError, script_line
from tutti.nn.partial_gradient import PartGradient
from tutti.nn.swap import BufferRef, buffers
from tutti.nn.written_tensors import METADATA
from tutti.torch_compat import TorchFunctionDisabled, end_traced_graph

_REMEDY = (
    "take run.state() for the whole model, run.evaluate(…) for its results, ema=… for an average of its weights and"
    " init_from=… for other weights; or strategy='mirrored'"
)
_REMEDY_FOR_ATTRIBUTE = "let the model's forward return the value; or take strategy='mirrored'"
_ADDING = {Tensor.add_, Tensor.sub_, Tensor.__iadd__, Tensor.__isub__}


class _Absent:
    """Base of the placeholders: shape, dtype and ``requires_grad`` are the tensor's; its values are on other ranks.

    Attributes:
        called: the tensor's name in the model.
        place: words for the location of its values, for the error message.
        remedy: the remedy in the error message.
        undo: called before an operation is refused; None for nothing.
    """

    called: str = "tensors"
    place: str = "on other ranks"
    remedy: str = _REMEDY
    undo: Callable[[], None] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with TorchFunctionDisabled():
                return func(*args, **(kwargs or {}))
        if func is Tensor.detach:
            with TorchFunctionDisabled():
                detached = args[0].detach().as_subclass(AbsentBuffer)
            _call(detached, args[0].called, {args[0].called: args[0].place})
            detached.undo = args[0].undo
            return detached
        if func in _ADDING and isinstance(args[0], PartGradient) and args[0].elsewhere:
            # The rank that has both adds them.
            args[0].note(None)
            return args[0]
        if func is Tensor.copy_ and args[0] is args[1]:
            # ``load_state_dict`` of the placeholder itself: the ranks that hold the values have loaded them already.
            return args[0]
        _refuse(next(_found([*args, *(kwargs or {}).values()]), _Absent))

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.called}, {tuple(self.shape)}, {self.place})"  # type: ignore[attr-defined]


class AbsentParameter(_Absent, nn.Parameter):  # type: ignore[misc]
    """Placeholder of a parameter whose values are on other ranks, with its shape, dtype and ``requires_grad``.

    It takes the memory of one element. Operations that read or write its values raise UsageError; its metadata can be
    read, and ``detach`` returns an ``AbsentBuffer``.
    """


class AbsentBuffer(_Absent, Tensor):  # type: ignore[misc]
    """Placeholder of a buffer whose values are on other ranks, with its shape and dtype.

    It takes the memory of one element. Operations that read or write its values raise UsageError; its metadata can be
    read.
    """


class AbsentContainer:
    """Placeholder of a list, dict or set of a module that is on another rank; reading or writing it raises UsageError.

    Args:
        called: the attribute's name in the model.
        place: words for the rank that has it, for the error message.
    """

    def __init__(self, called: str, place: str) -> None:
        vars(self).update(called=called, place=place, remedy=_REMEDY_FOR_ATTRIBUTE, undo=None)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self)

    def _refused(self, *args: Any) -> NoReturn:
        _refuse(self)

    __iter__ = __len__ = __bool__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _refused
    __add__ = __radd__ = __iadd__ = __or__ = __ior__ = __setattr__ = _refused


def put_away(
    plain: nn.Module,
    places: Mapping[str, str],
    here: Sequence[nn.Module],
    undo: Callable[[], None] | None = None,
    device: torch.device | None = None,
) -> None:
    """Replace parameters and persistent buffers that this rank does not compute with by placeholders without memory.

    For a model that is cut into pipeline stages, on a rank that computes some of them. A placeholder has the tensor's
    shape and dtype; an operation that reads or writes its values raises UsageError, which says where the values are. A
    parameter stays the same object, so that the script's optimizer still holds it, but its class becomes
    ``AbsentParameter`` and its ``grad`` None; a buffer is replaced in its module. No communication.

    Args:
        plain: the whole model, changed in place.
        places: for the error's text, where the values of a tensor are (such as "on another stage"), by the name of
            the parameter or persistent buffer in ``plain`` (of a tied one, the first name); tensors without an entry
            are "on another rank".
        here: the modules that this rank computes; their tensors stay, and so do all non-persistent buffers.
        undo: function without arguments that is called before an operation on a parameter's placeholder raises the
            error, to revert writes that the script has made to other parameters; None for no call.
        device: device of the placeholders, so that a script groups parameters alike on every rank; None for that of
            the tensors.
    """
    own = {id(tensor) for part in here for tensor in (*part.parameters(), *part.buffers())}
    for name, parameter in plain.named_parameters():
        if id(parameter) not in own and not isinstance(parameter, AbsentParameter):
            parameter.grad = None
            parameter.data = _empty(parameter.data, device)
            parameter.__class__ = AbsentParameter
            _call(parameter, name, places)
            parameter.undo = undo  # type: ignore[attr-defined]
    for slot in buffers([plain]):
        if id(slot.get()) not in own:
            _put_away(slot, places, device)


def put_attributes_away(plain: nn.Module, written: Mapping[str, str], here: Sequence[nn.Module]) -> None:
    """Set attributes that a forward writes on modules of other ranks to placeholders, which raise UsageError when read.

    For a model that is cut into pipeline stages: an attribute that a module's forward sets, such as attention weights
    that it keeps, is set only on the rank that computes the module, and would be stale on others.

    Args:
        plain: the whole model, changed in place.
        written: for the error's text, where an attribute is set (such as "on another stage"), by its dotted name in the
            model.
        here: the modules that this rank computes; their attributes stay.
    """
    own = {module for part in here for module in part.modules()}
    for name, place in written.items():
        path, _, key = name.rpartition(".")
        module = plain.get_submodule(path)
        if module not in own:
            placeholder: Any = AbsentContainer(name, place)
            if not isinstance(vars(module).get(key), list | dict | set | deque):
                placeholder = torch.zeros(()).as_subclass(AbsentBuffer)
                _call(placeholder, name, {name: place})
                placeholder.remedy = _REMEDY_FOR_ATTRIBUTE
            vars(module)[key] = placeholder


def _put_away(slot: BufferRef, places: Mapping[str, str], device: torch.device | None) -> None:
    buffer = _empty(slot.get(), device).as_subclass(AbsentBuffer)
    _call(buffer, slot.name, places)
    slot.put(buffer)


def _call(tensor: Any, name: str, places: Mapping[str, str]) -> None:
    tensor.called, tensor.place = name, places.get(name, "on another rank")


def _empty(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a tensor of the same shape that takes the memory of one element."""
    return tensor.new_zeros((), device=device).expand(tensor.shape)


def is_absent(tensor: Tensor) -> bool:
    """Return whether a tensor is a placeholder without values, because its values are on another rank.

    True for an ``AbsentParameter`` or ``AbsentBuffer``, whose values no operation may read.

    Args:
        tensor: a parameter, a buffer or any other tensor.
    """
    return isinstance(tensor, _Absent)


def _found(values: Any) -> Any:
    for value in values:
        if isinstance(value, _Absent):
            yield value
        elif isinstance(value, list | tuple):
            yield from _found(value)


def _refuse(tensor: _Absent | type[_Absent] | AbsentContainer) -> NoReturn:
    # Dynamo traces a module's forward, and not the function that ``replace_call`` has set: the graph ends before the
    # call, which is then made as in eager mode.
    end_traced_graph(f"{tensor.called} is on another rank")
    if tensor.undo is not None:
        tensor.undo()
    raise UsageError(
        f"the script reads or writes the model's {tensor.called}, which this rank does not have",
        where=script_line(),
        why=f"its values are {tensor.place}",
        remedy=tensor.remedy,
    )
