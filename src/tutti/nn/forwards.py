"""The forwards of a model's modules replaced from outside: compiled, or computed again in backward.

Both leave every name, every hook and every copy of the model as it was: a module gets a subclass of its class and
nothing else. What is compiled lies inside what is computed again, and hooks, among them those that key random draws,
lie outside of both.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tutti.nn.config import Compile, check_checkpointing, check_compile, check_compiler
from tutti.nn.draws import Draws
from tutti.nn.draws import draws as draws_by_itself
from tutti.nn.parallel import Divided
from tutti.nn.recompute import Forward, recomputed
from tutti.nn.swap import describe
from tutti.nn.sync import SyncBatchNorm
from tutti.nn.units import Choice, Units, find, is_sequence
from tutti.types import Setting


def restore(part: nn.Module) -> None:
    """Give every module its own class back."""
    for module in part.modules():
        module.__class__ = getattr(type(module), "_plain", type(module))


def transform(part: nn.Module, draws: Draws, setting: Setting) -> None:
    """Compile a part of a model, and have its units computed again, as the setting says. Raises UsageError."""
    units = find(part, setting.activation_checkpointing)
    compiler = None
    if chosen := check_compile(setting.compile, setting.reproducible):
        check_checkpointing(setting.activation_checkpointing, compiled=True)
        if setting.comms.world.device.type == "cpu":
            check_compiler(chosen[1])
        compiler = _Compiler(*chosen)
    if compiler is not None or units:
        _Transformation(compiler, units, draws).of(part, root=True)


def recompute(part: nn.Module, choice: Choice) -> None:
    """Have units of a model computed again, as training would; random draws are not kept apart."""
    if units := find(part, choice):
        _Transformation(None, units, Draws(part, torch.device("cpu"))).of(part, root=True)


class _Compiler:
    """``torch.compile`` of forwards; modules that are built alike share what is compiled."""

    def __init__(self, mode: str, options: Compile) -> None:
        self._backend, self._settings = options.backend, None
        if options.backend == "inductor":
            # Random numbers are drawn as without compiling: from the generator that the cell's key has seeded.
            own = torch._inductor.list_mode_options(mode) if mode != "default" else {}
            self._settings = {**own, "fallback_random": True}
        self._kept: dict[Any, Forward] = {}
        # A module's call as it is, with the hook that keys its draws or its messages: the graph breaks there.
        self.never: Forward = torch.compiler.disable(nn.Module.__call__)

    def module(self, module: nn.Module) -> Forward:
        """The forward of a module."""
        forward = type(module).forward
        key = (forward, repr(module), *describe([module]))
        if key not in self._kept:
            self._kept[key] = self.function(forward)
        return self._kept[key]

    def function(self, function: Forward) -> Forward:
        """A function of a module and what it is given."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(module, *args, **kwargs)

        # With code of its own, because variants for other shapes are kept, and limited in number, by code.
        own = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
        compiled: Forward = torch.compile(own, backend=self._backend, options=self._settings)
        return compiled


class _Transformation:
    """Of one part of a model."""

    def __init__(self, compiler: _Compiler | None, units: Units, draws: Draws) -> None:
        self._compiler, self._units, self._draws = compiler, units, draws
        self._recomputed: dict[Forward, Forward] = {}
        self._classes: dict[tuple[type[nn.Module], Forward], type[nn.Module]] = {}

    def of(self, module: nn.Module, root: bool = False) -> None:
        """Replace the forwards of a module and of those in it, as deep as needed."""
        forward = self._forward(module, root)
        if module in self._units.whole:
            own = forward or type(module).forward
            # Blocks that are built alike keep one class, so that they keep one compiled forward.
            if own not in self._recomputed:
                self._recomputed[own] = self._again(own, lambda module: [module])
            forward = self._recomputed[own]
        if forward is not None:
            self._become(module, "forward", forward)

    def _forward(self, module: nn.Module, root: bool) -> Forward | None:
        if module in self._units.runs:
            runs = enumerate(self._units.runs[module])
            return _chain([self._run(module, run, again=not i % self._units.every) for i, run in runs])
        if self._compiler is not None and not _stays_out(module):
            inner = [m for m in module.modules() if m is not module and self._is_fence(m)]
            if not inner:
                return self._compiler.module(module) if root or not _is_layer(module) else None
            if is_sequence(module):
                return _chain(self._pieces(module, [name for name, _ in module.named_children()]))
            if all(map(_stays_out, inner)) and not any(_holds(m, inner) for m in module.modules()):
                for each in inner:
                    self._become(each, "__call__", self._compiler.never)
                return self._compiler.module(module)
        for child in module.children():
            self.of(child)
        return None

    def _again(self, forward: Forward, members: Callable[[nn.Module], Sequence[nn.Module]]) -> Forward:
        return recomputed(forward, members, self._draws, self._units.selective)

    def _run(self, sequence: nn.Module, names: tuple[str, ...], again: bool) -> Forward:
        """Some children of a sequence, computed again as one or not."""
        whole = _chain(self._pieces(sequence, names))
        return self._again(whole, lambda module: [getattr(module, name) for name in names]) if again else whole

    def _pieces(self, sequence: nn.Module, names: Sequence[str]) -> list[Forward]:
        """Children of a sequence: neighbours that can be are compiled together, others come by themselves."""
        pieces: list[Forward] = []
        together: list[str] = []

        def flush() -> None:
            if len(together) > 1 and self._compiler is not None:
                pieces.append(self._compiler.function(_walk(tuple(together))))
            else:
                for name in together:
                    self.of(getattr(sequence, name))
                    pieces.append(_walk((name,)))
            together.clear()

        for name in names:
            child = getattr(sequence, name)
            if not any(map(self._is_fence, child.modules())):
                together.append(name)
                continue
            flush()
            self.of(child)
            pieces.append(_walk((name,)))
        flush()
        return pieces

    def _become(self, module: nn.Module, name: str, method: Forward) -> None:
        """Give a module another method; modules of one class and method keep one class."""
        kind = type(module)
        if (kind, method) not in self._classes:
            body = {name: method, "_plain": getattr(kind, "_plain", kind), "__module__": kind.__module__}
            self._classes[kind, method] = type(kind.__name__, (kind,), body)
        module.__class__ = self._classes[kind, method]

    def _is_fence(self, module: nn.Module) -> bool:
        """Whether something must happen around this module that cannot be compiled."""
        hooked = module._forward_pre_hooks or module._forward_hooks
        return bool(hooked) or _stays_out(module) or module in self._units.whole or module in self._units.runs


def _chain(pieces: Sequence[Forward]) -> Forward:
    """One piece after the other."""

    def forward(module: nn.Module, value: Any) -> Any:
        for piece in pieces:
            value = piece(module, value)
        return value

    return forward


def _walk(names: tuple[str, ...]) -> Forward:
    """The children ``names`` of the module that it is given, one after the other."""

    def forward(module: nn.Module, value: Any) -> Any:
        for name in names:
            value = getattr(module, name)(value)
        return value

    return forward


def _stays_out(module: nn.Module) -> bool:
    """Whether this layer cannot be part of a graph: it draws from a keyed stream, or waits for other devices."""
    return draws_by_itself(module) or isinstance(module, SyncBatchNorm | Divided)


def _is_layer(module: nn.Module) -> bool:
    """Whether this is one of PyTorch's own layers, which compiling alone does not make faster."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _holds(module: nn.Module, inner: Sequence[nn.Module]) -> bool:
    """Whether it is a list of modules, over which a forward loops, with any of ``inner`` below."""
    lists = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return isinstance(module, lists) and any(m in inner for m in module.modules())
