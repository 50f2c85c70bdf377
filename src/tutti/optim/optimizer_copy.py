"""Copy an optimizer for other parameters: its attributes, its state, and the optimizers inside of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.optim.several import members_of
from tutti.torch_compat import optimizer_attributes

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_DROPPED = object()


class AbsentState(MutableMapping[Tensor, Any]):
    """Mapping in place of ``optimizer.state`` that raises at every access, by calling ``refuse``.

    For a script's optimizer whose updates other ranks or parameter servers make: they hold the state, and a change of
    the state here would have no effect.

    Args:
        refuse: function that raises ``UsageError``.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse

    def __getitem__(self, key: Tensor) -> Any:
        self._refuse()

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Tensor) -> None:
        self._refuse()

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse()
        return iter(())

    def __len__(self) -> int:
        self._refuse()
        return 0


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the inner optimizers of an optimizer, which are in its attributes, as in a Lookahead wrapper.

    Lists, tuples and dicts in attributes are searched, and so are the attributes of inner optimizers.

    Args:
        optimizer: the outer optimizer.

    Returns:
        The inner optimizers, each once, by the path of attributes and keys, such as ``base_optimizer`` or ``parts.0``.
    """
    found: dict[str, Optimizer] = {}
    seen = {id(optimizer)}

    def look(value: Any, path: str) -> None:
        if isinstance(value, Optimizer):
            if id(value) not in seen:
                seen.add(id(value))
                found[path] = value
                look_into(value, f"{path}.")
        elif isinstance(value, list | tuple | dict):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                look(each, f"{path}.{key}")

    def look_into(holder: Optimizer, prefix: str) -> None:
        for name, value in vars(holder).items():
            if name not in ("state", "param_groups", "defaults"):
                look(value, f"{prefix}{name}")

    look_into(optimizer, "")
    return found


class NestedState:
    """The ``state`` of an optimizer and of the optimizers in its attributes (Lookahead), as one dict for a parameter.

    The class reads and writes the optimizers' own ``state``. The state of an inner optimizer has keys that begin with
    its path, such as ``base_optimizer.momentum_buffer``. A state that the inner optimizer shares with the outer one
    occurs once, without a path.

    Args:
        optimizer: one optimizer, or several combined.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._outer = optimizer.state
        self._inner: list[tuple[str, MutableMapping[Tensor, Any], set[int]]] = []
        for member in members_of(optimizer):
            # Paths of inner optimizers of inner ones are longer, and come first.
            for path, inner in reversed(inner_optimizers(member).items()):
                members = {id(p) for group in inner.param_groups for p in group["params"]}
                self._inner.append((f"{path}.", inner.state, members))

    def of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of one parameter in the optimizer and the optimizers inside of it, as one dict by state key.

        Keys are such as ``exp_avg``, or ``base_optimizer.momentum_buffer`` for the state of an inner optimizer.

        Args:
            parameter: a parameter of the optimizer.

        Returns:
            A new dict, empty without state; its values are not copied, tensors are those that the next step changes.
        """
        outer = self._outer.get(parameter, {})
        found = dict(outer)
        for prefix, state, members in self._inner:
            entry = state.get(parameter, {}) if id(parameter) in members else outer
            if entry is not outer:
                found |= {f"{prefix}{key}": value for key, value in entry.items()}
        return found

    def put(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Replace the state of one parameter in the optimizer and in the optimizers inside of it.

        Args:
            parameter: a parameter of the optimizer.
            values: the new state, with keys as ``of`` returns them; values are not copied. State under other keys is
                removed.
        """
        rest = dict(values)
        self._outer.pop(parameter, None)
        for prefix, state, members in self._inner:
            if id(parameter) in members:
                inside = [key for key in rest if key.startswith(prefix)]
                state.pop(parameter, None)
                if inside:
                    state[parameter] = {key.removeprefix(prefix): rest.pop(key) for key in inside}
        if rest or not self._inner:
            self._outer[parameter] = rest

    def drop(self, parameter: Tensor) -> None:
        """Remove all state of one parameter, in the optimizer and in the optimizers inside of it."""
        for state in (self._outer, *(state for _, state, _ in self._inner)):
            state.pop(parameter, None)

    def clear(self) -> None:
        """Remove the state of all parameters, in the optimizer and in the optimizers inside of it."""
        for state in (self._outer, *(state for _, state, _ in self._inner)):
            state.clear()


class UncopiedError(Exception):
    """Raised by ``copied_for`` where an optimizer cannot be copied for other parameters; the text is the reason."""


def defaults_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's default options; empty for a wrapper that has not called the constructor of ``Optimizer``.

    Args:
        optimizer: the optimizer.
    """
    found: dict[str, Any] = vars(optimizer).get("defaults", {})
    return found


def copied_for(optimizer: Optimizer, groups: Mapping[int, Mapping[str, Any]], changes: Mapping[str, Any]) -> Optimizer:
    """Copy an optimizer, with the optimizers inside of it, for other parameters; no constructor is called.

    Attributes are copied, and so is the state of each parameter that the original has, too. A new parameter gets the
    state that a constructor has made for the first parameter of its group, if that state consists of numbers, constant
    tensors and copies of the parameter. Step hooks, and methods that were replaced on the instance, are left out.

    Args:
        optimizer: the original, which is not changed.
        groups: index of a parameter group of the original → group of the copy in its place. Missing settings are taken
            from the original's group; groups of the original without an entry are left out.
        changes: new values of options by name, for the options that the original's ``defaults`` have.

    Returns:
        A new optimizer of the same class, with ``groups`` as its ``param_groups``; it shares no state with the
        original.

    Raises:
        UncopiedError: an attribute holds tensors outside of ``state``, a function that refers to other objects, or an
            object of an unknown class; an inner optimizer has parameter groups of its own, or step hooks; or a state
            has another shape than its parameter.
    """
    return _Copier(optimizer, groups, changes).optimizer(optimizer, type(optimizer).__name__)


class _Copier:
    def __init__(self, outer: Optimizer, groups: Mapping[int, Mapping[str, Any]], changes: Mapping[str, Any]) -> None:
        self._outer, self._changes, self._memo = outer, changes, dict[int, Any]()
        # For each parameter of the copy the original's parameter whose state it gets.
        self._sources: dict[Tensor, Tensor] = {}
        # The copy's parameters in place of each of the original's, by its id: itself, none, or the group's new ones.
        self._members: dict[int, list[Tensor]] = {id(p): [] for group in outer.param_groups for p in group["params"]}
        self._counts = {len(self._members), *(len(group["params"]) for group in outer.param_groups)} - {1}
        for number, group in enumerate(outer.param_groups):
            # A group that the copy does not have is left out of the lists and dicts that hold it.
            self._memo[id(group)] = _DROPPED
            if number in groups:
                given = {key: value for key, value in group.items() if key != "param_names"} | dict(groups[number])
                params = given.pop("params")
                made = {key: self.value(value, f"parameter group's {key}") for key, value in given.items()}
                self._memo[id(group)] = {"params": list(params), **made}
                own = {id(p) for p in group["params"]}
                first = next(iter(group["params"]), None)
                for p in params:
                    source = p if id(p) in own else first
                    if source is not None:
                        self._sources[p] = source
                        self._members[id(source)].append(p)

    def optimizer(self, original: Optimizer, where: str) -> Optimizer:
        """Copy one optimizer; ``where`` names it in errors."""
        if any(id(group) not in self._memo for group in original.param_groups):
            raise UncopiedError(f"{where} has parameter groups of its own, and not those of the outer optimizer")
        made = self._memo[id(original)] = type(original).__new__(type(original))
        hooks = optimizer_attributes() - {"state", "param_groups", "defaults"}
        for name, value in vars(original).items():
            if callable(getattr(type(original), name, None)):
                # A method that a script, a scheduler or tutti has replaced on the instance.
                continue
            if name == "state":
                vars(made)[name] = self._state(value, where)
            elif name in hooks and isinstance(value, dict):
                if value and original is not self._outer:
                    raise UncopiedError(f"{where} has hooks")
                vars(made)[name] = type(value)()
            else:
                vars(made)[name] = self.value(value, f"attribute {name}")
        defaults = defaults_of(made)
        defaults.update({name: self._changes[name] for name in self._changes.keys() & defaults.keys()})
        return made

    def value(self, value: Any, where: str) -> Any:
        """Copy the value of an attribute; ``where`` names it in errors."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, (*_ATOMS, type)) or _is_free(value):
            return value
        if isinstance(value, Optimizer):
            return self.optimizer(value, f"the optimizer in its {where}")
        if isinstance(value, Tensor) and value.numel() == 1 and not (value.requires_grad or id(value) in self._members):
            made: Any = value.detach().clone()
        elif isinstance(value, Tensor):
            raise UncopiedError(f"its {where} has tensors, which are not in its state")
        elif self._may_have_entries(value) and where != "attribute defaults" and where.startswith("attribute"):
            raise UncopiedError(f"its {where} may have an entry for each parameter, which belongs into its state")
        elif isinstance(value, torch.Generator):
            made = torch.Generator(value.device).set_state(value.get_state())
        elif type(value) in (dict, OrderedDict, defaultdict):
            made = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
            for key, each in value.items():
                if (copy := self.value(each, where)) is not _DROPPED:
                    made[self.value(key, where)] = copy
        elif type(value) in (list, tuple, set, frozenset):
            made = type(value)(each for inside in value for each in self._entries(inside, where))
        else:
            raise UncopiedError(f"its {where} is a {type(value).__name__}, which may refer to its parameters")
        self._memo[id(value)] = made
        return made

    def _entries(self, value: Any, where: str) -> list[Any]:
        """Return the copy's entries for one entry of a list: several for a parameter, none for a group it lacks."""
        if id(value) in self._members:
            return self._members[id(value)]
        made = self.value(value, where)
        return [] if made is _DROPPED else [made]

    def _may_have_entries(self, value: Any) -> bool:
        """Return whether a list or dict of plain values is as long as a list of parameters."""
        if not isinstance(value, list | dict) or len(value) not in self._counts:
            return False
        return all(isinstance(each, _ATOMS) for each in (value.values() if isinstance(value, dict) else value))

    def _state(self, state: Any, where: str) -> Any:
        """Copy a mapping from parameters to their states, for the copy's parameters."""
        if id(state) not in self._memo:
            made: defaultdict[Tensor, Any] = defaultdict(dict)
            if not isinstance(state, AbsentState):
                if any(not isinstance(key, Tensor) for key in state):
                    raise UncopiedError(f"the state of {where} has other keys than parameters")
                for parameter, source in self._sources.items():
                    if source not in state:
                        continue
                    given = dict(state[source])
                    # A state that cannot be made for a new parameter dates from steps; its own first step makes it.
                    with suppress(UncopiedError) if parameter is not source else nullcontext():
                        made[parameter] = {key: _fitted(value, key, parameter, source) for key, value in given.items()}
            self._memo[id(state)] = made
        return self._memo[id(state)]


def _fitted(value: Any, key: str, parameter: Tensor, source: Tensor) -> Any:
    """Return a value of the state of ``source`` for ``parameter``, the same tensor or another one."""
    if isinstance(value, _ATOMS):
        return value
    if not isinstance(value, Tensor):
        raise UncopiedError(f"its state has a {type(value).__name__}, {key}")
    own = value.detach()
    if key == "step" or (own.numel() == 1 and own.shape != source.shape):
        return own.clone()
    if parameter is source and own.shape == parameter.shape:
        return own.to(parameter.device, copy=True)
    if parameter is not source and own.shape == source.shape:
        if torch.equal(own.to(source), source):
            return parameter.detach().clone()
        if bool(own.min() == own.max()):
            return torch.full_like(parameter.detach(), float(own.flatten()[0]))
    raise UncopiedError(f"its state {key} has not the shape {tuple(parameter.shape)} of its parameter")


def _is_free(value: Any, callers: tuple[FunctionType, ...] = ()) -> bool:
    """Return whether a value is a function that refers to no object but plain values, classes and such functions.

    Args:
        value: the value.
        callers: functions that refer to it, whose own check is under way.
    """
    if isinstance(value, BuiltinFunctionType):
        # Methods of built-in objects, such as a list's append, have the object.
        return value.__self__ is None or isinstance(value.__self__, type | ModuleType)
    if not isinstance(value, FunctionType):
        return False
    inside = (*callers, value)
    return value in callers or all(isinstance(v, (*_ATOMS, type)) or _is_free(v, inside) for v in _captured(value))


def _captured(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
