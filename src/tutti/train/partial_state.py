"""``optimizer.state`` of which this rank has a part: refuse functions of the script that need the whole state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.gather import GatheredParts
from tutti.comm.communicator import Communicator
from tutti.errors import UsageError, script_line
from tutti.nn.script_mode import SIZES, acts_by_element, self_of, size_of_whole, tensors_among
from tutti.nn.written_tensors import ASSIGN_DATA, DATA, METADATA
from tutti.python_compat import calling_frame
from tutti.torch_compat import TorchFunctionDisabled
from tutti.types.shard_spec import ShardSpec, TensorSlice

_PASSED_BY = frozenset((__name__, "collections.abc", "contextlib"))


@dataclass(frozen=True)
class StatePart:
    """Name and shapes of a parameter of which this rank has a part: its rows (sharding) or slice (tensor parallelism).

    Tensors of optimizer state with the part's shape, such as ``exp_avg``, are parts in the same way.

    Attributes:
        name: the parameter's name in the model.
        whole: shape of the whole parameter.
        local: shape of this rank's part.
    """

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]


class PartialState(MutableMapping[Tensor, Any]):
    """Mapping in place of ``optimizer.state`` where parameters are sharded or split over tensor ranks.

    Its result depends on the caller. The optimizer's ``step``, PyTorch and tutti get the plain state. The script gets
    this rank's part of each tensor as a ``StateSlice``, which allows element-wise functions alone: a norm of a part,
    for example, would differ between ranks and raises UsageError.

    Args:
        plain: the optimizer's own state.
        optimizer: the optimizer.
        parts: function from a parameter in the optimizer's groups to a ``StatePart``; it returns None for a parameter
            that every rank has whole.
        member: function from a parameter of the script's model to the object in the optimizer's groups that stands for
            it; any other tensor is returned as it is.
        refuse: function without arguments that raises UsageError if the script must not use the state at all; it is
            called before each use by the script. None if the script may use it.
    """

    def __init__(
        self,
        plain: MutableMapping[Tensor, Any],
        optimizer: Optimizer,
        parts: Callable[[Tensor], StatePart | None],
        member: Callable[[Tensor], Tensor],
        refuse: Callable[[], None] | None = None,
    ) -> None:
        self._plain, self._optimizer, self._parts, self._member = plain, ref(optimizer), parts, member
        self._refuse = refuse

    def __getitem__(self, key: Tensor) -> Any:
        if not self._by_script():
            return self._plain[key]
        owner = self._member(key)
        entry, part = self._plain[owner], self._parts(owner)
        return entry if part is None else _Entry(entry, part)

    def __setitem__(self, key: Tensor, value: Any) -> None:
        if not self._by_script():
            self._plain[key] = value
            return
        owner = self._member(key)
        part = self._parts(owner)
        self._plain[owner] = value if part is None else {name: _plain(each, name, part) for name, each in value.items()}

    def __delitem__(self, key: Tensor) -> None:
        del self._plain[self._member(key) if self._by_script() else key]

    def __contains__(self, key: object) -> bool:
        return (self._member(key) if isinstance(key, Tensor) and self._by_script() else key) in self._plain

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse_script()
        return iter(self._plain)

    def __len__(self) -> int:
        self._refuse_script()
        return len(self._plain)

    def get(self, key: Tensor, default: Any = None) -> Any:
        """Return the state of a parameter, or ``default`` where the optimizer has none; adds no entry.

        This mapping takes the place of ``optimizer.state`` where parameters are split over ranks. The result depends on
        the caller, found from the call stack. Code of PyTorch and tutti, and the optimizer's ``step``, get the plain
        dict of tensors. The script gets, for a parameter that is split, a mapping in which this rank's part of each
        tensor is a ``StateSlice``, which shares its memory and allows only element-wise functions. Not collective.

        Args:
            key: the parameter; in a call of the script, the object that the script's model has.
            default: result for a parameter without state.

        Raises:
            UsageError: the script makes the call, and the strategy lets it read no state, as under local SGD where a
                rank has several logical workers: the optimizer has the state of one.
        """
        if key not in self:
            return default
        return self[key]

    def clear(self) -> None:
        """Remove the state of all parameters; the optimizer makes it anew in its next update.

        This mapping takes the place of ``optimizer.state`` where parameters are split over ranks.

        Raises:
            UsageError: the script makes the call, and the strategy does not let it change state, as under local SGD
                where a rank has several logical workers: the optimizer has the state of one.
        """
        self._refuse_script()
        self._plain.clear()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("optimizer.state", "a copy or pickle")

    def _by_script(self) -> bool:
        """Return whether the script asks; refuse if it may not."""
        asked = self._asked()
        if asked and self._refuse is not None:
            self._refuse()
        return asked

    def _refuse_script(self) -> None:
        """Refuse the call where the script makes it and may not; for calls that are alike for script and optimizer."""
        if self._refuse is not None and self._asked():
            self._refuse()

    def _asked(self) -> bool:
        """Return whether the caller of this mapping's method is the script, and not PyTorch, tutti or ``step``."""
        optimizer = self._optimizer()
        frame: FrameType | None = calling_frame(3)
        asked = False
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module not in _PASSED_BY:
                if module.partition(".")[0] in ("torch", "tutti"):
                    return asked
                # Called by the optimizer's step; its hooks are functions of the script.
                if self_of(frame) is optimizer and frame.f_code.co_name == "step":
                    return False
                asked = True
            frame = frame.f_back
        return asked


class _Entry(MutableMapping[str, Any]):
    """The state of one parameter, as the script sees it.

    Args:
        plain: the optimizer's own state of the parameter.
        part: the parameter.
    """

    def __init__(self, plain: MutableMapping[str, Any], part: StatePart) -> None:
        self._plain, self._part = plain, part

    def __getitem__(self, key: str) -> Any:
        value = self._plain[key]
        return StateSlice.of(value, key, self._part) if isinstance(value, Tensor) and value.dim() else value

    def __setitem__(self, key: str, value: Any) -> None:
        self._plain[key] = _plain(value, key, self._part)

    def __delitem__(self, key: str) -> None:
        del self._plain[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{key!r}: {value!r}' for key, value in self.items())}}}"


class StateSlice(Tensor):
    """This rank's part of a tensor of optimizer state, as the script reads it; shares the optimizer's memory.

    Element-wise functions return this rank's part of the whole result, and may write in place. ``shape``, ``size()``
    and ``numel()`` give sizes of the whole tensor. Other functions on values raise UsageError.

    Attributes:
        tutti_part: the parameter, with the shapes of the whole and of the part.
        tutti_key: name of the state, such as ``exp_avg``.
    """

    tutti_part: StatePart
    tutti_key: str

    @classmethod
    def of(cls, tensor: Tensor, key: str, part: StatePart) -> StateSlice:
        """Return a ``StateSlice`` that shares the memory of a tensor.

        A ``StateSlice`` is a subclass of ``Tensor`` for this rank's part of optimizer state: it allows element-wise
        functions, and raises UsageError in others, which would need the whole tensor.

        Args:
            tensor: this rank's part of a tensor of optimizer state.
            key: name of the state, such as ``exp_avg``; for errors and the representation.
            part: the parameter: its name, its whole shape and the shape of this rank's part.
        """
        with TorchFunctionDisabled():
            slice_ = tensor.as_subclass(cls)
        slice_.tutti_part, slice_.tutti_key = part, key
        return slice_

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch on parts of state; raise UsageError where the whole would give something else."""
        kwargs = kwargs or {}
        tensors = list(tensors_among(args, kwargs))
        first = next(each for each in tensors if isinstance(each, StateSlice))
        key, part = first.tutti_key, first.tutti_part
        if func in SIZES and _has_place_of(first):
            return size_of_whole(func, part.whole, args, kwargs)
        if func in METADATA:
            with TorchFunctionDisabled():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func == DATA:
            return cls.of(_without(func, args, kwargs), key, part)
        if func == ASSIGN_DATA and not isinstance(args[0], StateSlice):
            return func(args[0], _plain(args[1], key, part))
        if not acts_by_element(func):
            _refuse(f"{key} of {part.name} in optimizer.state", name.strip("_"))
        for each in tensors:
            if not _fits(each, part):
                _refuse(
                    f"{key} of {part.name} in optimizer.state",
                    f"{name.strip('_')} with a tensor of {tuple(each.shape)}",
                )
        result = _without(func, args, kwargs)
        if isinstance(result, tuple | list):
            return type(result)(_wrap(each, tensors, key, part) for each in result)
        return _wrap(result, tensors, key, part)

    def __deepcopy__(self, memo: Any) -> StateSlice:
        """Return a copy of this rank's part."""
        return StateSlice.of(_without(Tensor.clone, (self,), {}), self.tutti_key, self.tutti_part)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        part = self.tutti_part
        return f"StateSlice({self.tutti_key} of {part.name}, {part.whole}, of which this rank has {part.local})"


def _has_place_of(tensor: StateSlice) -> bool:
    with TorchFunctionDisabled():
        return tuple(tensor.shape) == tensor.tutti_part.local


def _fits(tensor: Tensor, part: StatePart) -> bool:
    """Return whether an operand is a part like this one, or the same number for all elements."""
    with TorchFunctionDisabled():
        if isinstance(tensor, StateSlice):
            return tensor.tutti_part.name == part.name
        return tensor.dim() == 0 or tuple(tensor.shape) == part.local


def _without(func: Any, args: Any, kwargs: Any) -> Any:
    with TorchFunctionDisabled():
        return func(*args, **kwargs)


def _wrap(result: Any, given: list[Tensor], key: str, part: StatePart) -> Any:
    """Return a function's result: a new tensor as a ``StateSlice``, a tensor that was written in place unchanged."""
    if not isinstance(result, Tensor) or any(result is each for each in given):
        return result
    return StateSlice.of(result, key, part)


def _plain(value: Any, key: str, part: StatePart) -> Any:
    """Return a value that the script sets as the optimizer's state, as the optimizer needs it."""
    if not isinstance(value, Tensor):
        return value
    if not _fits(value, part):
        _refuse(f"{key} of {part.name} in optimizer.state", f"set to a tensor of {tuple(value.shape)}")
    with TorchFunctionDisabled():
        return value.as_subclass(Tensor) if isinstance(value, StateSlice) else value


def _refuse(what: str, how: str) -> NoReturn:
    raise UsageError(
        f"the script reads or writes {what}, of which each rank has a part ({how})",
        where=script_line(),
        why="a norm, sum or element of a part is not that of the whole tensor, and each rank would get another",
        remedy="call run.optimizer_state() on every rank, which gives whole tensors, for figures; write only element by"
        " element (zero_(), mul_ by a number); or take strategy='mirrored'",
    )


def gathered_state(pieces: Mapping[str, Tensor | TensorSlice], comm: Communicator) -> dict[str, Tensor]:
    """Return whole tensors of optimizer state on every rank, from tensors and slices that are spread over the ranks.

    Collective over the ranks of ``comm``: a broadcast of names and shapes by each rank, then one of each tensor, or
    slice of a tensor, by the rank that has it. Needs memory for the whole state on each rank.

    Args:
        pieces: this rank's part of the optimizer state by name, as it would write the part into a checkpoint: whole
            tensors, and slices with their position (``TensorSlice``).
        comm: all ranks.

    Returns:
        The whole tensors by name, of all names that any rank has: new tensors on the rank's device. On a single rank
        its own tensors, not copied.
    """
    local = {name: piece.tensor if isinstance(piece, TensorSlice) else piece for name, piece in pieces.items()}
    specs = {name: _spec(piece) for name, piece in pieces.items()}
    return GatheredParts(local, specs, (), comm).all()


def _spec(piece: Tensor | TensorSlice) -> ShardSpec:
    if isinstance(piece, TensorSlice):
        return ShardSpec(piece.shape, piece.offset, dim=piece.dim, ranges=piece.ranges)
    return ShardSpec(tuple(piece.shape), (0,) * piece.dim())


class StateGuard:
    """Replaces a script's ``optimizer.state`` by a mapping that refuses reads and writes which need the whole state.

    Used where this rank does not hold all optimizer state. The constructor sets ``optimizer.state`` to this mapping,
    the guard; ``check`` does so again after the script has assigned the attribute.

    Args:
        optimizer: the script's optimizer.
        guard: function from the plain state to the guard, such as a ``PartialState``.
        replaced: called by ``check`` with the mapping that the script has assigned to ``optimizer.state``, before
            ``guard``; raises UsageError if the assignment cannot take effect.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        guard: Callable[[Any], MutableMapping[Tensor, Any]],
        replaced: Callable[[Mapping[Tensor, Any]], None],
    ) -> None:
        self._optimizer: ref[Any] = ref(optimizer)
        self._guard, self._replaced = guard, replaced
        self._current: Any = guard(optimizer.state)
        setattr(optimizer, "state", self._current)  # noqa: B010

    def check(self) -> None:
        """Replace a mapping that the script has assigned to ``optimizer.state`` since the last call by a guarded one.

        The guard is the mapping that takes the place of ``optimizer.state`` where this rank does not hold all optimizer
        state; it refuses reads and writes of the script that would need the whole state. The run calls this before each
        step and in the script's ``optimizer.step()``. Does nothing if ``optimizer.state`` is still the guard. Not
        collective.

        Raises:
            UsageError: the mapping cannot take effect, because other ranks or objects hold the state.
        """
        optimizer: Any = self._optimizer()
        if optimizer is None or optimizer.state is self._current:
            return
        self._replaced(optimizer.state)
        self._current = self._guard(optimizer.state)
        optimizer.state = self._current
