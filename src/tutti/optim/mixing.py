"""Find out by trial which elements an optimizer's update mixes, and so whether it can step on tensor slices.

AdamW updates each element by itself: a step on a slice of a tensor is that slice of the step on the whole tensor. Muon
and Adafactor need whole tensors, D-Adaptation all tensors. A copy of the optimizer, with the same class and settings,
steps in float64 on small whole tensors, on their rows, on slices of their columns, on flat pieces, and on half of the
tensors, and the results are compared. PyTorch's element-wise classes alone are listed: tests try each of them.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.partition import block
from tutti.optim.factory import built_alike, is_known, is_plain, settings_of
from tutti.optim.layerwise import LayerWise
from tutti.optim.muon import Muon
from tutti.optim.optimizer_copy import NestedState, defaults_of, inner_optimizers
from tutti.torch_compat import FunctionModesDisabled, TorchDispatchMode, step_hooks

_SCALES = (1.0, 30.0, 0.03, 1e3, 1e-3, 1.0)
"""Scale of the gradients in each step: large steps after small ones, so that limits on an update take effect."""
_COMPARED = (0, len(_SCALES) - 1)
_LATER = (11, 24, 49, 99, 199)
"""Steps after which small tensors are compared again: an optimizer may start to mix after a warm-up."""
_TOLERANCE = 1e-11
_LARGEST, _LARGE = 160, 8
IMPLEMENTATION_OPTIONS = ("fused", "foreach", "capturable")
"""Options of PyTorch's optimizers that choose a kernel and not the update."""


_ELEMENT_WISE = frozenset(
    {
        *(torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop, torch.optim.Adagrad),
        *(torch.optim.Adadelta, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam),
        torch.optim.RAdam,
    }
)
"""Classes of PyTorch of which a trial finds ``Mixing()`` with any settings; each rank would try each choice of them."""


@dataclass(frozen=True)
class Mixing:
    """Slices of tensors on which an optimizer may step without a change of the result, as found by a trial.

    A step on slices is right if it gives the slices of the step on whole tensors. The defaults describe an element-wise
    optimizer such as AdamW, for which all slices are right.

    Attributes:
        rows: whether a step on rows of a tensor, with the optimizer state of these rows, gives the rows of the step on
            the whole tensor.
        columns: whether this also holds for slices along all dimensions but the first.
        flat: whether this also holds for pieces of the flattened tensor.
        tensors: whether a step on a subset of the tensors equals their step among all tensors.
        draws: whether a step draws from a global random generator: PyTorch's of the CPU, NumPy's or Python's.
        closure: whether ``step`` cannot be called without a closure.
        untried: reason why the trial failed; None if it succeeded.
        writes: names of the entries of parameter groups that steps change, such as an estimated learning rate.
        exchanges: whether ``step`` calls collectives of ``torch.distributed`` itself; then nothing else was tried.
    """

    rows: bool = True
    columns: bool = True
    flat: bool = True
    tensors: bool = True
    draws: bool = False
    closure: bool = False
    untried: str | None = None
    writes: frozenset[str] = frozenset()
    exchanges: bool = False


def mixing_of(optimizer: Optimizer) -> Mixing:
    """Find out by trial on which slices of tensors a step of ``optimizer`` gives the result of a step on whole tensors.

    An update that combines elements, such as Muon's, cannot step on slices. A copy of the optimizer is tried on small
    tensors; results are cached by class and settings. The optimizer's parameters and the states of the global
    generators stay as they are. Not collective.

    tutti's own optimizers LARS, LARC, LAMB and NovoGrad (which complete the norms of sliced tensors over ranks) and
    ``Muon`` (which gathers sliced matrices) support slices along a dimension themselves and are not tried; neither are
    ``SparseAdam`` and PyTorch's element-wise classes.

    Args:
        optimizer: the optimizer, which is not changed.

    Returns:
        A ``Mixing``. Its flags ``rows``, ``columns``, ``flat`` and ``tensors`` say whether a step on rows, on slices
        along other dimensions, on pieces of the flattened tensors, or on some of the tensors alone equals the step on
        all whole tensors. ``draws``: whether a step draws from a global random generator; ``closure``: whether it needs
        a closure; ``untried``: why the trial failed, or None; ``writes``: names of the entries of parameter groups that
        steps change; ``exchanges``: whether a step calls collectives of ``torch.distributed``. After a failed trial,
        and with ``exchanges``, the first four flags are False.
    """
    if isinstance(optimizer, LayerWise | Muon):
        return Mixing(flat=False)
    if type(optimizer) is torch.optim.SparseAdam:
        # It refuses the dense gradients of a trial. It updates each row of a sparse gradient by itself, and strategies
        # that slice tensors take no sparse gradients.
        return Mixing()
    if _is_element_wise(optimizer):
        return Mixing()
    groups = _groups(optimizer)
    shapes = repr([(sorted(group.settings.items()), group.shapes) for group in groups])
    key = type(optimizer), _attributes(optimizer), shapes
    if key not in _found:
        threads = torch.get_num_threads()
        # With several threads, waiting for cores that other ranks use takes a hundred times as long as computing.
        torch.set_num_threads(1)
        try:
            # Function modes, such as those of tutti that check what a script reads, need not see the trial's calls.
            with FunctionModesDisabled():
                _found[key] = _tried(optimizer, groups)
        finally:
            torch.set_num_threads(threads)
    return _found[key]


_found: dict[Any, Mixing] = {}


def _is_element_wise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is of an element-wise class of PyTorch, whose ``step`` a script has not replaced."""
    kind = type(optimizer)
    if kind not in _ELEMENT_WISE or any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    step: Any = kind.step
    while step is not None:
        if not step.__code__.co_filename.startswith(_TORCH):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


_TORCH = str(Path(torch.__file__).parent)


def _attributes(optimizer: Optimizer) -> tuple[tuple[str, type[Optimizer], str, Any], ...]:
    """Return an optimizer's plain attributes, which distinguish it from others of its class, and its inner ones'.

    Values are texts, but weak references to classes and functions: others may have the same name, and a function may
    refer to a run.
    """
    return tuple(
        (path, type(each), name, ref(value) if isinstance(value, type | FunctionType) else repr(value))
        for path, each in {"": optimizer, **inner_optimizers(optimizer)}.items()
        for name, value in sorted(vars(each).items())
        if _is_plain_data(value) or isinstance(value, type | FunctionType)
    )


def _is_plain_data(value: Any) -> bool:
    """Return whether a value is plain, or a list, set or dict of such values."""
    if isinstance(value, dict):
        return all(map(_is_plain_data, (*value, *value.values())))
    return all(map(_is_plain_data, value)) if isinstance(value, list | set) else is_plain(value)


class _Group(NamedTuple):
    """Settings and shapes of the trial's tensors; ``of``: index of the first of the optimizer's groups like it."""

    settings: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    of: int = 0


class _Cut(NamedTuple):
    """A slice of the tensor with index ``of``; ``take`` returns it from the whole tensor."""

    of: int
    take: Callable[[Tensor], Tensor]


class _Trial(NamedTuple):
    """The trial's whole tensors: group index and value of each, gradients (steps, *shape), and the steps to compare."""

    groups: list[int]
    values: list[Tensor]
    gradients: list[Tensor]
    compared: tuple[int, ...]


_State = dict[str, Any]
_Seen = list[tuple[Tensor, _State]]
"""Value and state of each tensor after a step."""


def _tried(optimizer: Optimizer, groups: Sequence[_Group]) -> Mixing:
    """Try a few steps; for classes outside PyTorch and tutti, many steps on small tensors as well.

    A rank whose slices are all empty has nothing to try.
    """
    if not groups:
        return Mixing()
    if not is_known(type(optimizer)) and _exchanges(optimizer, groups):
        return Mixing(False, False, False, False, exchanges=True)
    found = _in(_trial(groups, len(_SCALES), _COMPARED), optimizer, groups)
    if is_known(type(optimizer)) or found.untried is not None or not (found.tensors or found.rows):
        return found
    small = [
        g._replace(shapes=tuple(sorted({(5, 4, 3, 2, *[2] * len(s))[: len(s)] for s in g.shapes}))) for g in groups
    ]
    later = _in(_trial(small, _LATER[-1] + 1, _LATER), optimizer, small)
    if later.untried is not None:
        return later
    return Mixing(
        found.rows and later.rows,
        found.columns and later.columns,
        found.flat and later.flat,
        found.tensors and later.tensors,
        found.draws or later.draws,
        found.closure,
        writes=found.writes | later.writes,
    )


class _Exchange(Exception):
    """A step has called a collective."""


class _ExchangesRefused(TorchDispatchMode):
    """Raises ``_Exchange`` in place of each collective of ``torch.distributed``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _Exchange
        return func(*args, **(kwargs or {}))


def _exchanges(optimizer: Optimizer, groups: Sequence[_Group]) -> bool:
    """Return whether a step calls a collective, as distributed versions of Muon do: found without sending anything."""
    trial = _trial(groups, 1, (0,))
    with _without_effects(optimizer), ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # Nothing is compiled for, or left uncompiled because of, the mode.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_ExchangesRefused())  # type: ignore[no-untyped-call]
        try:
            wholes = [_Cut(i, _itself) for i in range(len(trial.values))]
            list(_run(optimizer, groups, trial, wholes, needs_closure(optimizer)))
        except _Exchange:
            return True
        except Exception:
            # The trial tells of it.
            return False
    return False


def _in(trial: _Trial, optimizer: Optimizer, groups: Sequence[_Group]) -> Mixing:
    closure = needs_closure(optimizer)
    wholes = [_Cut(i, _itself) for i in range(len(trial.values))]
    with _without_effects(optimizer):
        before = random.getstate(), _numpy_state()
        written = set[str]()
        try:
            reference = list(_run(optimizer, groups, trial, wholes, closure, written))
        except Exception as error:
            why = f"a trial of {type(optimizer).__name__} ended with {type(error).__name__}: {error}"
            return Mixing(False, False, False, False, closure=closure, untried=why)
        drawn = torch.random.get_rng_state()
        draws = not torch.equal(drawn, torch.default_generator.manual_seed(0).get_state())
        draws = draws or before != (random.getstate(), _numpy_state())

        def equal(*parts: Sequence[_Cut]) -> bool:
            return all(_same(optimizer, groups, trial, cuts, closure, reference) for cuts in parts)

        # Each tensor occurs twice: neither half holds all tensors that may be mixed, however the optimizer pairs them.
        tensors = equal(wholes[::2], wholes[1::2])
        rows = tensors and equal([cut for whole in wholes for cut in _rows(whole.of, trial)])
        return Mixing(
            rows,
            rows and equal([cut for whole in wholes for cut in _columns(whole.of, trial)]),
            rows and equal([cut for whole in wholes for cut in _flat(whole.of, trial)]),
            tensors,
            draws,
            closure,
            writes=frozenset(written),
        )


@contextmanager
def _without_effects(optimizer: Optimizer) -> Iterator[None]:
    """Within the block steps call no hook for all optimizers, and draw from the global generators without an effect."""
    states = random.getstate(), np.random.get_state()
    _, _, *everywhere = step_hooks(optimizer)
    hooks = [dict(table) for table in everywhere]
    with torch.random.fork_rng(devices=[]):
        try:
            for table in everywhere:
                table.clear()
            yield
        finally:
            for table, before in zip(everywhere, hooks, strict=True):
                table.update(before)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _numpy_state() -> str:
    state: dict[str, Any] = np.random.get_state(legacy=False)["state"]
    return f"{state['pos']} {state['key'].tolist()}"


def _groups(optimizer: Optimizer) -> list[_Group]:
    """Return groups that differ in more than the values of their numbers, each with a few of its parameters' shapes."""
    found: dict[str, tuple[dict[str, Any], int, set[tuple[int, ...]]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        settings = {k: (float(v) if _is_number_tensor(v) else v) for k, v in settings_of(group).items()}
        for name in IMPLEMENTATION_OPTIONS:
            # Implementations of the same update that do not suit small CPU tensors.
            if settings.get(name):
                settings[name] = False
        trained = [p for p in group["params"] if p.requires_grad] or group["params"]
        alike = repr([(k, v > 0 if isinstance(v, float) else v) for k, v in sorted(settings.items())])
        found.setdefault(alike, (settings, number, set()))[2].update(_small(p.shape) for p in trained)
    groups = [_Group(settings, _chosen(shapes), of) for settings, of, shapes in found.values()]
    return [group for group in groups if group.shapes]


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """Shrink a shape: every dimension to at most ``_LARGE``, the longest to ``_LARGEST``.

    The long dimension is for optimizers that treat large tensors differently.
    """
    longest = max(range(len(shape)), key=lambda i: shape[i], default=0)
    return tuple(min(size, _LARGEST if i == longest else _LARGE) for i, size in enumerate(shape))


def _chosen(shapes: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the smallest and the largest shape, and one of prime sizes for each number of dimensions."""
    ordered = sorted((s for s in shapes if torch.Size(s).numel()), key=lambda s: (torch.Size(s).numel(), s))
    some = ordered if len(ordered) <= 2 else [ordered[0], ordered[-1]]
    odd = [(7, 5, 3, 2, *[2] * len(s))[: len(s)] for s in ordered]
    return tuple(sorted({*some, *odd}))


def _trial(groups: Sequence[_Group], steps: int, compared: tuple[int, ...]) -> _Trial:
    """Make two tensors of every shape of every group, with gradients of very different magnitude."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, shape: Sequence[int]) -> Tensor:
        """Return ``count`` tensors of a shape, (count, *shape), whose rows and columns differ in magnitude."""
        tensors = torch.randn((count, *shape), generator=generator, dtype=torch.float64, device="cpu")
        for dim, size in enumerate(shape):
            sizes = torch.rand((count, size), generator=generator, dtype=torch.float64, device="cpu")
            sizes = 10 ** (2 * sizes - 1)
            tensors *= sizes.view(count, *[1] * dim, size, *[1] * (len(shape) - dim - 1))
        return tensors

    places = [(g, shape) for g, group in enumerate(groups) for shape in group.shapes for _ in range(2)]
    values = [drawn(1, shape)[0] for _, shape in places]
    scales = torch.tensor([_SCALES[step % len(_SCALES)] for step in range(steps)], dtype=torch.float64, device="cpu")
    gradients = [drawn(steps, shape) * scales.view(-1, *[1] * len(shape)) for _, shape in places]
    return _Trial([g for g, _ in places], values, gradients, compared)


def _run(
    optimizer: Optimizer,
    groups: Sequence[_Group],
    trial: _Trial,
    cuts: Sequence[_Cut],
    closure: bool,
    written: set[str] | None = None,
) -> Iterator[_Seen]:
    """Step a copy of ``optimizer`` on the slices ``cuts``; yield values and states after the steps to compare.

    The names of the entries of parameter groups that the steps change are added to ``written``.
    """
    # Not torch.manual_seed, which seeds accelerators too.
    torch.default_generator.manual_seed(0)
    params = [nn.Parameter(cut.take(trial.values[cut.of]).clone()) for cut in cuts]
    copy = _copied(optimizer, groups, params, [trial.groups[cut.of] for cut in cuts])
    copy_step = type(copy).step
    settings = [dict(group) for group in copy.param_groups]
    for number in range(trial.compared[-1] + 1):
        for cut, param in zip(cuts, params, strict=True):
            param.grad = cut.take(trial.gradients[cut.of][number]).clone()
        if isinstance(copy, LayerWise):
            copy.grad_norm = 1.0
        copy_step(copy, _loss) if closure else copy_step(copy)
        if number in trial.compared:
            state = NestedState(copy)
            yield [(p.detach().clone(), {k: _kept(v) for k, v in state.of(p).items()}) for p in params]
    if written is not None:
        for before, group in zip(settings, copy.param_groups, strict=True):
            written |= {name for name, value in settings_of(group).items() if repr(value) != repr(before.get(name))}


def _copied(
    optimizer: Optimizer, groups: Sequence[_Group], params: Sequence[nn.Parameter], places: Sequence[int]
) -> Optimizer:
    """Build an optimizer alike for ``params``; ``places`` has the index in ``groups`` of each."""
    members: dict[int, list[nn.Parameter]] = {}
    for place, param in zip(places, params, strict=True):
        members.setdefault(place, []).append(param)
    settings = {
        groups[place].of: {**deepcopy(groups[place].settings), "params": inside} for place, inside in members.items()
    }
    return built_alike(optimizer, settings, _off(optimizer))


def _loss() -> Any:
    return torch.ones((), dtype=torch.float64)


def _off(optimizer: Optimizer) -> dict[str, Any]:
    return {name: False for name in IMPLEMENTATION_OPTIONS if defaults_of(optimizer).get(name)}


def _same(
    optimizer: Optimizer,
    groups: Sequence[_Group],
    trial: _Trial,
    cuts: Sequence[_Cut],
    closure: bool,
    reference: Sequence[_Seen],
) -> bool:
    """Whether steps on the slices equal the slices of steps on whole tensors, in values and state."""
    try:
        for seen, whole in zip(_run(optimizer, groups, trial, cuts, closure), reference, strict=True):
            for cut, (value, state) in zip(cuts, seen, strict=True):
                want, states = whole[cut.of]
                if not _close(value, cut.take(want)):
                    return False
                if value.numel() and not _same_state(cut, state, states, want):
                    return False
    except Exception:
        # An optimizer that cannot step on slices needs whole tensors.
        return False
    return True


def _same_state(cut: _Cut, part: _State, whole: _State, of: Tensor) -> bool:
    """Whether the slice's state is the whole state's slice, or, for scalars and other values, equals it."""
    if part.keys() != whole.keys():
        return False
    for key, want in whole.items():
        got = part[key]
        if isinstance(want, Tensor) and isinstance(got, Tensor):
            if cut.take is _itself or got.dim() == want.dim() == 0:
                alike = _close(got, want)
            else:
                alike = want.shape == of.shape and _close(got, cut.take(want))
            if not alike:
                return False
        elif isinstance(want, Tensor) or isinstance(got, Tensor) or repr(got) != repr(want):
            return False
    return True


def _close(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape:
        return False
    if torch.equal(got, want) or not got.numel():
        return True
    difference = (got.double() - want.double()).abs().max()
    # NaN does not compare as close.
    return bool(difference <= _TOLERANCE * max(1.0, float(want.double().abs().max())))


def _rows(index: int, trial: _Trial) -> list[_Cut]:
    """Return the row slices of three ranks; a 0-d tensor is one row."""
    count = len(_as_rows(trial.values[index]))
    places = [block(count, 3, part) for part in range(3)]
    return [_Cut(index, lambda t, p=p: _as_rows(t)[p.start : p.stop]) for p in places]  # type: ignore[misc]


def _columns(index: int, trial: _Trial) -> list[_Cut]:
    """Return halves along every dimension but the first; the whole tensor if it has no other."""
    whole = trial.values[index]
    places = [(dim, block(whole.shape[dim], 2, part)) for dim in range(1, whole.dim()) for part in range(2)]
    cuts = [_Cut(index, lambda t, d=dim, p=place: t.narrow(d, p.start, len(p))) for dim, place in places]  # type: ignore[misc]
    return cuts or [_Cut(index, _itself)]


def _flat(index: int, trial: _Trial) -> list[_Cut]:
    places = [block(trial.values[index].numel(), 2, part) for part in range(2)]
    return [_Cut(index, lambda t, p=p: t.reshape(-1)[p.start : p.stop]) for p in places]  # type: ignore[misc]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_number_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's ``step`` has a required positional argument, taken for a closure, as LBFGS has.

    False where the signature cannot be read. Nothing is run.

    Args:
        optimizer: the optimizer; its class's ``step`` is inspected.
    """
    try:
        arguments = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    return any(a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) for a in arguments)


def calls_closure_once(optimizer: Optimizer) -> bool:
    """Return whether ``step(closure)`` is known to call the closure once, before the update.

    True for all classes of ``torch.optim`` and ``tutti.optim`` but LBFGS; False for classes that a script or another
    package defines. Nothing is run.

    Args:
        optimizer: the optimizer.
    """
    return is_known(type(optimizer)) and not needs_closure(optimizer)


def unlike_one_closure(optimizer: Optimizer) -> str | None:
    """Find out whether ``step(closure)`` does anything but call ``closure`` once and then update as ``step()`` does.

    Called when a script first calls ``step(closure)`` of the optimizer: the run then calls the closure itself, reduces
    the gradients, and calls ``step()`` without it. A copy of the optimizer is tried both ways on small tensors.
    PyTorch's optimizers but LBFGS call the closure once, before the update; sharpness-aware minimisation (SAM) calls it
    again at other parameters. Not collective.

    Args:
        optimizer: the optimizer, which is not changed.

    Returns:
        None if both ways give the same result; else a sentence that names the difference, for an error's text.
    """
    name = type(optimizer).__name__
    if calls_closure_once(optimizer):
        return None
    if needs_closure(optimizer):
        return f"{name} asks for the loss as often as it needs it"
    # A rank whose rows are all empty tries the class with its defaults.
    groups = _groups(optimizer) or [_Group({}, ((7, 5),))]
    trial = _trial(groups, 1, (0,))
    calls: list[bool] = []

    def stepped(with_closure: bool) -> list[Tensor]:
        torch.default_generator.manual_seed(0)
        params = [nn.Parameter(value.clone()) for value in trial.values]
        copy = _copied(optimizer, groups, params, trial.groups)

        def closure() -> Tensor:
            calls.append(all(torch.equal(p, value) for p, value in zip(params, trial.values, strict=True)))
            for param, (gradient, *_) in zip(params, trial.gradients, strict=True):
                param.grad = gradient.clone()
            loss: Tensor = _loss()
            return loss

        if with_closure:
            type(copy).step(copy, closure)  # type: ignore[arg-type]
        else:
            closure()
            type(copy).step(copy)
        return [param.detach() for param in params]

    with _without_effects(optimizer), FunctionModesDisabled():
        try:
            got = stepped(with_closure=True)
            if len(calls) != 1:
                return f"{name} calls it {len(calls)} times in one step"
            if not calls[0]:
                return f"{name} calls it at other parameters than those of the model"
            if not all(map(_close, got, stepped(with_closure=False))):
                return f"{name} makes another update with it than without"
        except Exception as error:
            return f"{name} cannot step without it: a trial ended with {type(error).__name__}: {error}"
    return None
