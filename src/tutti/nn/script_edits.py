"""Record what a script does to tensors of which each rank has a part, so that ranks can compare it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tutti.comm.random_keys import mix, name_key
from tutti.device import widest_float
from tutti.nn.script_mode import QuietMode, self_of, tensors_among
from tutti.nn.written_tensors import ASSIGN_DATA, DATA, METADATA, may_write
from tutti.python_compat import calling_frame
from tutti.torch_compat import TorchFunctionDisabled, local_tensor, storage_key

_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_VALUES_STAY = frozenset(("requires_grad_", "detach_", "share_memory_", "rename_"))
_PLAIN = (bool, int, float, complex, str, slice, torch.dtype, torch.device, type(None), type(...))


@dataclass(slots=True)
class _Record:
    """Hash of the calls that have made or written a tensor; 0 for none. ``last``: the last call, with its numbers."""

    value: int = 0
    last: str = ""


class ScriptEdits:
    """Records of the script's calls of PyTorch that have made or written tensors of which each rank has a part.

    Ranks hold different values of such a tensor, so that a comparison of values does not show whether all ranks have
    edited it alike. A comparison of records does: a record is a hash of the functions called, of the numbers and whole
    tensors among their arguments, and of the records of their other arguments. Views of a tensor have the tensor's
    record. A torch function mode calls ``note`` for each call of the script. Nothing here is collective.

    Attributes:
        line: place in the script of the most recent edit on this rank, as ``FILE:LINE``; ``the script`` before the
            first.
        ids: ``id`` of each tensor that has a record, for a fast test whether a call concerns one; ids of tensors that
            are deleted may remain. A function mode may add the ids of other tensors whose calls it handles.
    """

    def __init__(self) -> None:
        self.line = "the script"
        self._covered: dict[str, _Record] = {}
        # Whether a tensor was ever written: records of gradients outlive a ``take``.
        self._edited = False
        self._records: Any = WeakIdKeyDictionary()
        self.ids: set[int] = set()

    def cover(self, named: Mapping[str, Tensor]) -> None:
        """Record the script's edits of these tensors, and of tensors that it computes from them, from now on.

        ``take`` returns the edits. Replaces the tensors of an earlier call.

        Args:
            named: parameters by name, as this rank has them.
        """
        self._covered = {name: self._record(tensor) for name, tensor in named.items()}

    def alias(self, tensor: Tensor, source: Tensor) -> None:
        """Make two objects for the same values, ``tensor`` and ``source``, share one record of edits.

        Args:
            tensor: the object that gets the record.
            source: the object whose record it gets; a new, empty record if it has none.
        """
        self._records[tensor] = self._record(source)
        self.ids.add(id(tensor))

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call of PyTorch by the script after the call has returned. Not collective.

        A call without a recorded tensor among its arguments is not recorded. Neither are calls by tutti's own code,
        such as those that load a checkpoint's slices.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.
            result: result of the call.
        """
        if not kwargs and not any(id(each) in self.ids or isinstance(each, list | tuple) for each in args):
            # Most calls of a script.
            return
        known: dict[int, tuple[Tensor, _Record]] = {}
        for tensor in tensors_among(args, kwargs):
            if id(tensor) in self.ids and (record := self._records.get(tensor)) is not None:
                known[id(tensor)] = tensor, record
        if not known or (func in METADATA and func != _GRADIENT):
            return
        if func == _GRADIENT:
            if result is not None:
                self._record(result)
            return
        if func == DATA:
            self.alias(result, args[0])
            return
        caller = _caller()
        if caller is None or str(caller.f_globals.get("__name__", "")).startswith("tutti."):
            return
        name: str = getattr(func, "__name__", "")
        number = mix(name_key(name), *_hashes([args, *kwargs.items()], known))
        numbers = (repr(each) for each in (*args, *kwargs.values()) if isinstance(each, int | float))
        last = f"{name.strip('_')}({', '.join(numbers)})"
        written = {id(each): each for each in _written(func, name, args, kwargs)}
        self._edited = self._edited or bool(written)
        self.line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        for place, (key, tensor) in enumerate(written.items()):
            record = known[key][1] if key in known else self._record(tensor)
            record.value, record.last = mix(number, place), last
        made = [each for each in tensors_among((result,), {}) if id(each) not in known and id(each) not in written]
        shared = {_memory(each): record for each, record in known.values()} if made else {}
        for place, tensor in enumerate(made):
            self._records[tensor] = shared.get(_memory(tensor)) or _Record(mix(number, place), last)
            self.ids.add(id(tensor))

    def lines(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return a line of text for each of these tensors that the script has edited. Does not clear the records.

        Ranks that have made the same edits have the same lines, such as ``weight: mul(0.5) #1f3a``: name, the last call
        with its numbers, and a hash of all calls.

        Args:
            named: (name, tensor) pairs.

        Returns:
            The lines, in the order of ``named``; tensors without an edit have none.
        """
        found = [(name, self._records[each]) for name, each in named if self._knows(each)]
        return [_line_of(name, record) for name, record in found if record.value]

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Clear the records of tensors to which tutti has given new values, so that earlier edits no longer count.

        Args:
            tensors: the tensors, such as gradients that have just been reduced.
        """
        for tensor in tensors if self._edited else ():
            if self._knows(tensor):
                self._records[tensor].value = 0

    def take(self) -> list[str]:
        """Return a line of text for each covered tensor that the script has edited, and clear these records.

        Covered are the tensors of the latest ``cover``; edits count from the previous ``take`` on. Not collective: the
        caller compares the lines, which are equal on all ranks that have made the same edits.
        """
        found = [(name, record) for name, record in self._covered.items() if record.value] if self._edited else []
        lines = [_line_of(name, record) for name, record in found]
        for _, record in found:
            record.value = 0
        return lines

    def _knows(self, tensor: Tensor) -> bool:
        return id(tensor) in self.ids and tensor in self._records

    def _record(self, tensor: Tensor) -> _Record:
        if not self._knows(tensor):
            self._records[tensor] = _Record()
            self.ids.add(id(tensor))
        record: _Record = self._records[tensor]
        return record


class EditWatch(QuietMode):
    """Torch function mode that records which tensors the script writes in place, by which calls; it changes no call.

    Subclasses check calls before they are made, and decide which tensors are watched.

    Attributes:
        edits: the records, a ``ScriptEdits``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.edits = ScriptEdits()

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch, and record the call in ``edits`` unless the attribute ``quiet`` is True.

        Called for each call of PyTorch while the mode is active.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.

        Returns:
            The function's result.

        Raises:
            UsageError: in subclasses, the call is one that they refuse.
        """
        if self.quiet:
            return func(*args, **kwargs)
        result = self._checked(func, args, kwargs)
        self.edits.note(func, args, kwargs, result)
        return result

    def _checked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of the script; subclasses refuse some calls, and change the result of some."""
        return func(*args, **kwargs)


def _written(func: Any, name: str, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors whose values a call writes."""
    writes = may_write(func) and name not in _VALUES_STAY and (name != "__set__" or func == ASSIGN_DATA)
    yield from tensors_among((*(args[:1] if writes else ()), kwargs.get("out")), {})


def _hashes(values: Iterable[Any], known: Mapping[int, tuple[Tensor, _Record]]) -> Iterator[int]:
    """Yield a hash for each of the arguments of a call; ``known``: tensors with a record, by ``id``."""
    for value in values:
        if isinstance(value, Tensor):
            yield known[id(value)][1].value if id(value) in known else _hash_of_whole(value)
        elif isinstance(value, list | tuple):
            yield from _hashes(value, known)
        else:
            yield name_key(repr(value) if isinstance(value, _PLAIN) else type(value).__name__)


def _line_of(name: str, record: _Record) -> str:
    return f"{name}: {record.last} #{record.value:x}"


def _caller() -> FrameType | None:
    """Return the frame outside of PyTorch, and of the function modes, that has called a function of PyTorch.

    Of the script's own frames the local variables are not read: that would keep their values alive with the frame.
    """
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == "tutti":
            mode = self_of(frame) if module != __name__ else None
            # Other function modes, such as those that watch losses, pass the script's calls on.
            passed = isinstance(mode, TorchFunctionMode) and frame.f_code.co_name == "__torch_function__"
            if module != __name__ and not passed and not isinstance(mode, QuietMode):
                return frame
        elif package not in ("torch", "contextlib"):
            return frame
        frame = frame.f_back
    return None


def _memory(tensor: Tensor) -> int:
    """Return a number that tells the memory of a tensor, or of this rank's part of a ``DTensor``.

    Tensors without a storage, such as sparse ones, have a number of their own.
    """
    with TorchFunctionDisabled(), torch.no_grad():
        try:
            return storage_key(local_tensor(tensor))
        except (NotImplementedError, RuntimeError):
            return id(tensor)


def _hash_of_whole(tensor: Tensor) -> int:
    """Return a hash of a whole tensor's values; 0 for a part, whose values differ between ranks, and for others."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_complex():
        return 0
    with TorchFunctionDisabled(), torch.no_grad():
        wide = tensor.to(widest_float(tensor.device))
        return name_key(repr(torch.stack([wide.sum(), wide.square().sum()]).tolist()))
