"""Apply ``torch.compile`` and activation checkpointing (AC) to the modules of a model, without wrapping them.

A module's class becomes a subclass with another ``forward``; parameter names, hooks and copies of the model stay as
they were. Compiled regions lie inside checkpointed ones. Module hooks, such as those that key RNG streams, run outside
of both.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tutti.config.module_config import GRAPH_MODES, Checkpointing, CompileChoice, check_checkpointing, check_compiler
from tutti.device import is_accelerator
from tutti.errors import UsageError, counted
from tutti.nn.ac_policy import CheckpointUnits, find_units, is_sequence, turn_off_caches
from tutti.nn.eager_layer import EagerLayer
from tutti.nn.recompute import Forward, recomputed
from tutti.nn.rng_streams import RngStreams
from tutti.nn.rng_streams import module_draws as draws_by_itself
from tutti.nn.swap import buffers, describe_tensors, registered_children
from tutti.nn.sync import SyncBatchNorm
from tutti.torch_compat import has_forward_hook, inductor_lacks, inductor_mode_options, is_compiled, tree_map
from tutti.types.run_context import RunContext


def has_compiled_code(parts: Iterable[nn.Module], run_context: RunContext) -> bool:
    """Return whether tutti compiles the model of a run, or the script has compiled a module of it.

    Callers ask before they rely on a torch function mode, which does not see the calls of PyTorch in compiled code.

    Args:
        parts: the model, or this rank's parts of it; submodules are included.
        run_context: settings of the run; with the option ``compile`` the result is True.
    """
    return run_context.compile is not None or any(is_compiled(module) for part in parts for module in part.modules())


def restore_forwards(part: nn.Module) -> None:
    """Give every module of a model its original class and forward back, without checkpointing and compilation.

    Undoes ``apply_ac_and_compile`` and ``recompute``, in place.

    Args:
        part: the model, or a part of it; modules that were not changed stay as they are.
    """
    for module in part.modules():
        module.__class__ = getattr(type(module), "_plain", type(module))


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the bound forward that a module has without activation checkpointing and compilation.

    Args:
        module: the module, changed by ``recompute`` or ``apply_ac_and_compile``, or as the script made it.
    """
    own = getattr(type(module), "_plain", None)
    return module.forward if own is None else types.MethodType(own.forward, module)


def apply_ac_and_compile(part: nn.Module, draws: RngStreams, run_context: RunContext) -> None:
    """Apply activation checkpointing and ``torch.compile`` to the modules on this rank, in place.

    A module's class becomes a subclass with another forward; ``restore_forwards`` undoes it. Without either option
    nothing is done. Nothing is compiled yet: ``torch.compile`` compiles in the first forward. No communication.

    Args:
        part: the modules on this rank.
        draws: RNG streams of the model, which recomputation replays.
        run_context: holds the options ``activation_checkpointing`` and ``compile``.

    Raises:
        UsageError: with ``compile``, in one of three cases: activation checkpointing is selective; the backend is
            inductor, and inductor cannot compile for the device; or the compile mode records CUDA graphs, which need
            buffers at fixed addresses, and the model either has a ``SyncBatchNorm``, or has buffers in a run whose
            number of logical workers (shares of the global batch with buffers of their own) differs from the number of
            data ranks.
    """
    units = find_units(part, run_context.activation_checkpointing)
    compiler = None
    if run_context.compile is not None:
        check_checkpointing(run_context.activation_checkpointing, compiled=True)
        device = run_context.comms.world.device
        if is_accelerator(device):
            _check_inductor(run_context.compile, device)
        else:
            check_compiler(run_context.compile.options)
        if run_context.compile.records_graphs:
            _check_fixed_buffers(part, run_context, run_context.compile.mode)
        compiler = _Compiler(run_context.compile)
    if compiler is not None or units:
        _Transformation(compiler, units, draws).of(part, root=True)


def recompute(part: nn.Module, choice: Checkpointing) -> None:
    """Apply activation checkpointing to a model in place, to estimate memory without training it.

    The chosen modules then run their forward again in backward, with the same random numbers from the CPU's generator.
    ``restore_forwards`` undoes the call, except that ``config.use_cache`` of modules stays False.

    Args:
        part: the model, or a part of it.
        choice: the modules to recompute: a rule (``Blocks``), or a sequence of names and classes of modules; None for
            none.
    """
    if units := find_units(part, choice):
        turn_off_caches(part)
        _Transformation(None, units, RngStreams(part, torch.device("cpu"))).of(part, root=True)


def _check_inductor(choice: CompileChoice, device: torch.device) -> None:
    """Raise UsageError where the compiler backend is inductor, and it cannot compile for an accelerator."""
    if choice.options.backend == "inductor" and (why := inductor_lacks(device)) is not None:
        raise UsageError(
            f"--compile {choice.mode} needs inductor, the compiler of torch.compile, which cannot compile here",
            why=why,
            remedy=f"leave out --compile, or name another backend: --compile {choice.mode}:backend=NAME",
        )


def _check_fixed_buffers(part: nn.Module, run_context: RunContext, mode: str) -> None:
    """Raise UsageError where buffers would be other tensors in each step, for which PyTorch records new CUDA graphs."""
    if found := next((name for name, each in part.named_modules() if isinstance(each, SyncBatchNorm)), None):
        raise UsageError(
            f"--compile {mode} cannot be combined with --batch-norm sync",
            where=found,
            why="a device without samples computes with copies of the buffers, for which CUDA graphs would be recorded"
            " again",
            remedy=f"take --compile {GRAPH_MODES[mode]}, or --batch-norm worker",
        )
    own, ranks = buffers([part]), run_context.comms.replica.size
    if own and run_context.workers != ranks:
        raise UsageError(
            f"--compile {mode} cannot be combined with {run_context.workers} logical workers on "
            f"{counted(ranks, 'data rank')} for"
            " this model",
            why=f"each worker has a buffer {own[0].name} of its own, at addresses that change, and CUDA graphs would be"
            " recorded again in every step",
            remedy=f"take --workers {ranks}, or --compile {GRAPH_MODES[mode]}",
        )


class _Compiler:
    """``torch.compile`` of forwards; modules of the same code, structure and shapes share one compiled function."""

    def __init__(self, choice: CompileChoice) -> None:
        self._mode, self._backend = choice.mode, choice.options.backend
        self._without_graphs = GRAPH_MODES.get(choice.mode)
        self._kept: dict[Any, Forward] = {}
        # An eager module call, with the hook that keys its draws or its messages: the graph breaks there.
        self.never: Forward = torch.compiler.disable(nn.Module.__call__)

    def module(self, module: nn.Module) -> Forward:
        """Return the compiled forward of a module, which is called as ``forward(module, …)``.

        Modules of the same class, structure and shapes get the same compiled function.
        """
        forward = type(module).forward
        key = (forward, repr(module), *describe_tensors([module]))
        if key not in self._kept:
            self._kept[key] = self.function(forward)
        return self._kept[key]

    def function(self, function: Forward) -> Forward:
        """Return ``function``, called as ``function(module, …)``, compiled by ``torch.compile``."""
        compiled = self._compiled(function, self._mode)
        if self._without_graphs is None:
            return compiled
        return _graphed(compiled, self._compiled(function, self._without_graphs))

    def _compiled(self, function: Forward, mode: str) -> Forward:
        settings: dict[str, Any] | None = None
        if self._backend == "inductor":
            # Draw random numbers as in eager mode, from the generator that the micro-batch's key has seeded.
            settings = {**(inductor_mode_options(mode) if mode != "default" else {}), "fallback_random": True}

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(module, *args, **kwargs)

        # A code object of its own, because Dynamo caches recompilations, and limits their number, by code object.
        own = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
        compiled: Forward = torch.compile(own, backend=self._backend, options=settings)
        return compiled


def _graphed(recording: Forward, plain: Forward) -> Forward:
    """Return a forward that replays CUDA graphs in training, and compiled code without graphs where autograd is off.

    The next step's replay overwrites the results of a graph (torch/_inductor/cudagraph_trees.py). So the script, which
    may keep them, gets copies. Evaluation and predictions put averaged weights and merged buffers into the model, at
    other addresses, for which graphs would be recorded again.

    Args:
        recording: the forward, compiled with graphs.
        plain: the same forward, compiled without.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(module, *args, **kwargs)
        return tree_map(_copied, recording(module, *args, **kwargs))

    return forward


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, and other values as they are; raise UsageError for an object that may hold tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    raise UsageError(
        f"a forward returns a {type(value).__name__}, and torch.compile records CUDA graphs",
        why="the next step overwrites tensors in it, which tutti cannot find and copy",
        remedy="return tensors in tuples, lists and dicts, or take compile='default'",
    )


class _Transformation:
    """Replaces the forwards in one part of a model: compiled, checkpointed, or both."""

    def __init__(self, compiler: _Compiler | None, units: CheckpointUnits, draws: RngStreams) -> None:
        self._compiler, self._units, self._draws = compiler, units, draws
        self._recomputed: dict[Forward, Forward] = {}
        self._classes: dict[tuple[type[nn.Module], Forward], type[nn.Module]] = {}

    def of(self, module: nn.Module, root: bool = False) -> None:
        """Replace the forwards of a module and, where necessary, of its submodules by compiled or checkpointed ones.

        Args:
            module: the module, changed in place.
            root: whether the module is the whole part of the model on this rank, which is compiled even if it is one of
                PyTorch's layers.
        """
        forward = self._forward(module, root)
        if module in self._units.whole:
            own = forward or type(module).forward
            # Blocks with the same forward keep one class, so that they share one compiled forward.
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
                return _chain(self._pieces(module, [name for name, _ in registered_children(module)]))
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
        """Return a forward of the children ``names`` of a sequence, checkpointed as one unit if ``again``."""
        whole = _chain(self._pieces(sequence, names))
        return self._again(whole, lambda module: [getattr(module, name) for name in names]) if again else whole

    def _pieces(self, sequence: nn.Module, names: Sequence[str]) -> list[Forward]:
        """Return forwards of the children of a sequence; compilable neighbours are compiled as one."""
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
        """Replace a method of a module by a subclass of its class; modules of one class and method share it."""
        kind = type(module)
        if (kind, method) not in self._classes:
            body = {name: method, "_plain": getattr(kind, "_plain", kind), "__module__": kind.__module__}
            self._classes[kind, method] = type(kind.__name__, (kind,), body)
        module.__class__ = self._classes[kind, method]

    def _is_fence(self, module: nn.Module) -> bool:
        """Whether this module cannot be compiled with its parent: it has hooks, is checkpointed, or stays out."""
        stays_out = has_forward_hook(module) or _stays_out(module)
        return stays_out or module in self._units.whole or module in self._units.runs


def _chain(pieces: Sequence[Forward]) -> Forward:
    """Return a forward that calls ``pieces`` in order."""

    def forward(module: nn.Module, value: Any) -> Any:
        for piece in pieces:
            value = piece(module, value)
        return value

    return forward


def _walk(names: tuple[str, ...]) -> Forward:
    """Return a forward that calls the children ``names`` of its module in order."""

    def forward(module: nn.Module, value: Any) -> Any:
        for name in names:
            value = getattr(module, name)(value)
        return value

    return forward


def _stays_out(module: nn.Module) -> bool:
    """Whether this layer cannot be compiled: it draws from a keyed RNG stream, or performs collectives."""
    return draws_by_itself(module) or isinstance(module, SyncBatchNorm | EagerLayer)


def _is_layer(module: nn.Module) -> bool:
    """Whether this is one of PyTorch's own layers; compiling a single one gains nothing."""
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None


def _holds(module: nn.Module, inner: Sequence[nn.Module]) -> bool:
    """Whether ``module`` is a container that a forward iterates over, with any of ``inner`` below it."""
    lists = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return isinstance(module, lists) and any(m in inner for m in module.modules())
