"""Trace a model's forward by ``torch.fx`` into a graph of module calls, without computing anything."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import fx, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import CheckpointFunction

from tutti.errors import UsageError, script_line_of
from tutti.nn.ac_policy import is_sequence
from tutti.nn.swap import training_mode
from tutti.nn.untraced import FUNCTION_MODE, Untraced, has_hooks, surroundings
from tutti.python_compat import calling_frame
from tutti.torch_compat import FUNCTION_MODE_ENTRIES, NormBase, module_buffers, module_parameters, saved_tensor_hooks

_RANDOM = {
    *(getattr(functional, name) for name in dir(functional) if "dropout" in name),
    *(functional.rrelu, functional.gumbel_softmax, functional.multi_head_attention_forward),
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.bernoulli, torch.binomial, torch.multinomial, torch.normal, torch.poisson, torch.rrelu, torch.rrelu_),
    *(getattr(torch, name) for name in dir(torch) if "dropout" in name),
    *(getattr(functional, name) for name in dir(functional) if name.startswith("fractional_max_pool")),
}
_RANDOM_METHODS = {
    *("bernoulli", "bernoulli_", "multinomial", "uniform_", "normal_", "random_", "exponential_"),
    *("cauchy_", "geometric_", "log_normal_"),
}
_KNOWING = {"torch", "tutti"}
"""Packages that ask for the types of traced values and treat them as such."""
_ASKING_FOR_OTHERS = {"abc", "typing"}
"""Modules in whose code ``isinstance`` asks for its caller."""
_DERIVING = {torch.autograd.grad, torch.autograd.backward}


class UntraceableError(UsageError):
    """Raised where ``torch.fx`` cannot trace a model's forward, so that no graph shows where stages may be cut."""


class _Read(NamedTuple):
    """A traced forward, and the names of the functions in it that draw random numbers."""

    graph: fx.Graph
    drawing: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.graph)


class _TracedValue(fx.Proxy):
    """A value of a traced forward, of whose type the forward gets no answer: it is known when a stage runs."""

    @property
    def __class__(self) -> type:
        # ``isinstance`` and ``torch.is_tensor`` ask for it, and would take the branch for what is no tensor.
        depth = 1
        while (asking := calling_frame(depth).f_globals.get("__name__", "")) in _ASKING_FOR_OTHERS:
            depth += 1
        if asking == "torch" or asking.partition(".")[0] not in _KNOWING:
            raise ValueError("it asks for the type of a value, which is known when a stage runs and not before")
        return _TracedValue

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("a traced value stays one")


class _Tracer(fx.Tracer):
    """Records calls of modules as one node each, and traces into the modules in ``opened``.

    With ``opened`` None it traces into every module but PyTorch's layers.
    """

    def __init__(self, opened: Collection[str] | None) -> None:
        super().__init__()
        self._opened = opened
        self._around, self._saving = surroundings(), saved_tensor_hooks()
        self._own: dict[nn.Module, list[Any]] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _TracedValue(node, self)

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._own = {module: _tensors(module) for module in root.modules()}
        with _functions_kept(self), _no_modes_entered():
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if m in self._own and _tensors(m) != self._own[m]:
            raise ValueError(f"it calls its {type(m).__name__} with other weights than its own")
        if saved_tensor_hooks() != self._saving and any(map(_moves_averages, m.modules())):
            raise ValueError("torch.utils.checkpoint moves a norm's averages again in backward, and stages would not")
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._opened is None:
            return _is_layer(m)
        return module_qualified_name not in self._opened

    def create_proxy(self, kind: str, target: Any, args: Any, *rest: Any, **named: Any) -> Any:
        # An argument with a default is traced as a constant: the graph would differ with the value passed.
        if kind == "placeholder" and args:
            return args[0]
        for (name, now), (_, before) in zip(surroundings(), self._around, strict=True):
            # PyTorch takes a function mode off its stack while the mode handles a call: see ``_no_modes_entered``.
            if now != before and name != FUNCTION_MODE:
                raise ValueError(f"it computes within {name}, which the graph of its calls would leave out")
        return super().create_proxy(kind, target, args, *rest, **named)


def _moves_averages(module: nn.Module) -> bool:
    """Return whether a forward of a module moves running averages of its inputs, as a batch norm does in training."""
    return isinstance(module, NormBase) and module.training and module.track_running_stats


def _tensors(module: nn.Module) -> list[Any]:
    """Return the ids of all parameters and buffers of a module and its submodules."""
    tables = [table for inner in module.modules() for table in (module_parameters(inner), module_buffers(inner))]
    return [id(tensor) for table in tables for tensor in table.values()]


@contextmanager
def _functions_kept(tracer: fx.Tracer) -> Iterator[None]:
    """Within the block ``apply`` of an autograd function becomes a call in the graph, which keeps its backward."""
    plain = vars(Function)["apply"].__func__

    def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
            if kind is CheckpointFunction:
                raise ValueError("torch.utils.checkpoint with use_reentrant=True hides what it computes")
            return tracer.create_proxy("call_function", _applying(kind), args, kwargs)
        return plain(kind, *args, **kwargs)

    with patch.object(Function, "apply", classmethod(apply)):
        yield


@contextmanager
def _no_modes_entered() -> Iterator[None]:
    """Within the block, entering a function mode raises ValueError; modes that are active already stay."""

    def enter(*args: Any) -> None:
        raise ValueError(f"it computes within {FUNCTION_MODE}, which the graph of its calls would leave out")

    with ExitStack() as patches:
        for kind, method in FUNCTION_MODE_ENTRIES:
            patches.enter_context(patch.object(kind, method, enter))
        yield


@lru_cache(maxsize=256)
def _applying(kind: type[Function]) -> Callable[..., Any]:
    """Return a function that calls ``kind.apply`` and has the names that ``torch.fx`` needs in a graph."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return kind.apply(*args, **kwargs)

    apply.__name__ = f"{kind.__name__}_apply"
    apply.__module__, apply.__qualname__ = kind.__module__, apply.__name__
    apply.applied = kind  # type: ignore[attr-defined]
    return apply


def _draws_within(function: Any) -> bool:
    """Return whether the code of a function's own forward or backward names a function that draws random numbers."""
    names = {getattr(f, "__name__", "") for f in _RANDOM} | _RANDOM_METHODS
    codes = [getattr(getattr(function, key, None), "__code__", None) for key in ("forward", "backward")]
    return any(names & {*code.co_names} for code in codes if code is not None)


def trace(model: nn.Module, opened: Collection[str]) -> fx.Graph:
    """Trace the forward of ``model`` with ``torch.fx``, and return its graph.

    The nodes are calls of modules, functions and methods. The model's attributes and the global RNG states stay as they
    were.

    Args:
        model: the whole model.
        opened: names of modules that are traced into; "" is the model. A call of any other module is a single node of
            the graph.

    Raises:
        UntraceableError: ``torch.fx`` cannot trace the forward in training and in evaluation, or the two graphs differ;
            the model has hooks; its forward takes ``*args``, or draws random numbers that do not depend on its inputs.
    """
    name = type(model).__name__
    remedy = (
        "make the model an nn.Sequential of its blocks, or move what its forward decides, draws or keeps into modules; "
        "or take strategy='mirrored'"
    )

    def untraceable(why: str) -> UntraceableError:
        return UntraceableError(f"a {name} cannot be cut into stages", why=why, remedy=remedy)

    try:
        graph, drawing = read = _read(model, opened)
        with training_mode([model], training=not model.training):
            other = _read(model, opened)
    except Exception as error:
        what = str(error).splitlines()[0] if str(error) else repr(error)
        raise untraceable(f"torch.fx cannot follow its forward ({script_line_of(error)}): {what}") from error
    if has_hooks(model):
        raise untraceable("it has hooks of its own")
    if any(node.op == "placeholder" and str(node.target).startswith("*") for node in graph.nodes):
        raise untraceable("its forward takes *args")
    elsewhere = sorted({*drawing} - {_name(node) for node in graph.nodes if _draws_in_forward(node)})
    if elsewhere:
        raise untraceable(
            f"its own forward draws random numbers by {', '.join(elsewhere)}, which would be constants of the stages"
        )
    if str(other) != str(read):
        raise untraceable("its own forward does something else in training than in evaluation")
    return graph


def openable(module: nn.Module) -> bool:
    """Return whether a module may be traced into, so that a model can be cut into stages between its submodules.

    True for a sequence of modules, and for a module whose own forward ``torch.fx`` can trace and which draws random
    numbers in PyTorch's modules only. False for PyTorch's own layers, and for a module without submodules, with hooks,
    or with a forward that computes different things in training and in evaluation.

    Args:
        module: the module.
    """
    if next(module.children(), None) is None or has_hooks(module):
        return False
    if is_sequence(module):
        return True
    if _is_layer(module):
        return False
    try:
        read = _read(module, None)
        with training_mode([module], training=not module.training):
            other = _read(module, None)
    except Exception:
        return False
    return not read.drawing and str(other) == str(read)


def graph_draws(graph: fx.Graph) -> bool:
    """Return whether function or method nodes of a model's graph draw random numbers; module nodes do not count.

    Args:
        graph: graph of the model's forward.
    """
    return any(map(_draws_in_forward, graph.nodes))


def draws_by_functions(module: nn.Module) -> bool:
    """Return whether a module or submodule may draw random numbers by function calls, such as ``functional.dropout``.

    Draws within PyTorch's own layers, such as ``nn.Dropout``, do not count. Also True where ``torch.fx`` cannot trace
    the forward of the module or of a submodule, since nothing is known about its draws then. The module stays as it
    was.

    Args:
        module: the module; its forward is traced in training and in evaluation mode.
    """
    return any(_may_draw(inner) for inner in module.modules() if not (_is_layer(inner) or is_sequence(inner)))


def _may_draw(module: nn.Module) -> bool:
    try:
        for training in (True, False):
            with training_mode([module], training=training):
                if _read(module, ()).drawing:
                    return True
    except Exception:
        return True
    return False


def _read(model: nn.Module, opened: Collection[str] | None) -> _Read:
    before, untraced = (torch.get_rng_state(), random.getstate(), np.random.get_state()), Untraced(model)
    try:
        graph = _Tracer(opened).trace(model)
        # Draws that do not depend on the inputs happen while tracing, and would become constants of the graph.
        drawn = not torch.equal(torch.get_rng_state(), before[0]) or random.getstate() != before[1]
        drawn = drawn or not _same_state(np.random.get_state(), before[2])
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        changed = untraced.undo()
    if any(node.op == "call_function" and node.target in _DERIVING for node in graph.nodes):
        raise ValueError("it computes a gradient, which would have to come from other stages")
    if changed:
        raise ValueError(f"it writes {changed[0]}, which the graph of its calls would leave out")
    names = {_name(node) for node in graph.nodes if _draws(node)}
    return _Read(graph, (*sorted(names), *(["a function such as torch.rand"] if drawn else [])))


def _same_state(state: Any, other: Any) -> bool:
    """Return whether two states of NumPy's global generator, tuples with an array of its words, are equal."""
    return all(np.array_equal(one, two) for one, two in zip(state, other, strict=True))


def _draws(node: fx.Node) -> bool:
    """Return whether a node calls a function that may draw random numbers, in its forward or in its backward."""
    return _draws_in_forward(node) or _draws_within(getattr(node.target, "applied", None))


def _draws_in_forward(node: fx.Node) -> bool:
    """Return whether a node calls a function of PyTorch that draws random numbers in its forward alone."""
    if node.op == "call_function":
        return node.target in _RANDOM or _attends(node)
    return node.op == "call_method" and node.target in _RANDOM_METHODS


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _attends(node: fx.Node) -> bool:
    """Return whether a node is a scaled dot product attention with dropout."""
    if node.target is not functional.scaled_dot_product_attention:
        return False
    return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of PyTorch, or tutti's replacement of one; sequences are traced into."""
    return type(module).__module__.startswith(("torch.nn.", "tutti.nn.")) and not is_sequence(module)
