"""Copies of whole tensors of a model, gathered from ranks: readable until the model changes, and not writable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor

from tutti.errors import UsageError, script_line
from tutti.nn.script_mode import tensors_among
from tutti.nn.written_tensors import DATA, METADATA, may_write, read_only, share_memory, storage_of
from tutti.torch_compat import TorchFunctionDisabled, tree_map_only

WRITE_COPY = "write into copy.deepcopy(run.state()) and give it to model.load_state_dict, both on every rank"
"""Remedy that works under every strategy; a tensor of ``run.state()`` itself may be the model's own, or a copy."""


class SourceValues(ABC):
    """Tells whether a tensor of the model has changed since a ``StateCopy`` of it was made for a state dict."""

    @abstractmethod
    def unchanged(self) -> bool:
        """Return whether the model's tensor still has, on this rank, the values of the copy. Not collective.

        Abstract. ``StateCopy`` calls it before each read or write of the copy.
        """

    @abstractmethod
    def undo(self) -> None:
        """Revert the script's writes to the model's tensors, as far as that is possible. Not collective.

        Abstract. ``StateCopy`` calls it right before it raises UsageError for a read or write of the copy.
        """


class StateCopy(Tensor):
    """Copy of a whole tensor of the model that stands for the model's own in a state dict, or for a view of it.

    In plain PyTorch a state dict and views have the model's own values: updates change them, and writes to them change
    the model. A gathered copy does neither. Functions of PyTorch may therefore read it until the model has changed, and
    raise UsageError afterwards; a write raises it always. Results are plain tensors, but views of the copy are again
    such copies. ``copy.deepcopy`` gives a plain tensor.

    Attributes:
        called: the tensor's name in the model.
        source: tells whether the model's tensor still has the values of which the copy was made.
    """

    called: str
    source: SourceValues

    @classmethod
    def of(cls, tensor: Tensor, called: str, source: SourceValues) -> StateCopy:
        """Make a ``StateCopy`` that shares the memory and the graph of a gathered tensor.

        Args:
            tensor: a whole tensor of the model, gathered on every rank.
            called: its name in the model, for errors.
            source: tells whether the model's tensor still has the values of ``tensor``.

        Returns:
            The copy. A function of PyTorch that is called with it raises UsageError if it would write the copy in
            place, or if the model's tensor has changed since; metadata can always be read.
        """
        found = tensor.as_subclass(cls)
        found.called, found.source = called, source
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tensors_among(args, kwargs) if isinstance(each, StateCopy)]
        if not given or func in METADATA:
            with TorchFunctionDisabled():
                return func(*args, **kwargs)
        written = [*tensors_among(args[:1], {})] if may_write(func) and func != DATA else []
        written += tensors_among((), {"out": kwargs.get("out")})
        for each in given:
            if not each.source.unchanged():
                each._refuse_late()
            if any(each is tensor for tensor in written):
                each._refuse_write(getattr(func, "__name__", ""))
        with TorchFunctionDisabled():
            plain, named = tree_map_only(StateCopy, _plain, (args, kwargs))
            result = read_only(func, func(*plain, **named))
            return tree_map_only(Tensor, partial(_seen, given), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = found = self.clone()
        return found

    def _refuse_late(self) -> NoReturn:
        self.source.undo()
        raise UsageError(
            f"the script reads {self.called} in a state dict or view of the model from before the model changed",
            where=script_line(),
            why="both have the model's own values, which change with it; where each rank has a part of them, they are"
            " copies, which do not",
            remedy="call model.state_dict(), or take the view, again and on every rank; or keep"
            " copy.deepcopy(model.state_dict()) or parameter.clone()",
        )

    def _refuse_write(self, how: str) -> NoReturn:
        self.source.undo()
        raise UsageError(
            f"the script writes {self.called} in a state dict or view of the model ({how.strip('_')})",
            where=script_line(),
            why="it is a copy, because ranks have parts of the tensor or workers have tensors of their own, and the"
            " write would be lost",
            remedy=WRITE_COPY,
        )


class _Gathered(SourceValues):
    """The values of a tensor when it was gathered, which the script may read later, too."""

    def unchanged(self) -> bool:
        return True

    def undo(self) -> None:
        """Do nothing: reads are right."""


def read_only_copies(state: Mapping[str, Tensor], live: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return a state dict of whole tensors, in which tensors that are not the model's own refuse writes.

    A tensor that shares memory with one of ``live`` is returned as it is. Any other, gathered from ranks, is replaced
    by a ``StateCopy`` of the same memory, which can be read at any time; a function that would write it in place raises
    UsageError, since the write would not reach the model.

    Args:
        state: whole tensors by name; a tied tensor may be found under several names, which then keep one object.
        live: the model's own tensors on this rank.

    Returns:
        A dict with the names of ``state``, in their order.
    """
    own = {storage_of(tensor) for tensor in live} - {None}
    found = {
        id(tensor): tensor if storage_of(tensor) in own else StateCopy.of(tensor.detach(), name, _Gathered())
        for name, tensor in state.items()
    }
    return {name: found[id(tensor)] for name, tensor in state.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def _seen(given: Sequence[StateCopy], result: Tensor) -> Tensor:
    """Return a ``StateCopy`` for a result that is a view of a copy; any other result as it is."""
    found = next((each for each in given if share_memory([each], [result])), None)
    return result if found is None else StateCopy.of(result, found.called, found.source)
