"""Optimizer factories from options, or from the user's optimizer. Fused kernels where available."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti import optim
from tutti.config import optimizer_config as options
from tutti.device import has_fused_optimizers
from tutti.errors import UsageError
from tutti.optim.layerwise import LayerWise
from tutti.optim.optimizer_copy import AbsentState, NestedState, UncopiedError, copied_for, inner_optimizers
from tutti.torch_compat import optimizer_attributes
from tutti.types.optimizer_protocols import NamedParameters, OptimizerFactory

_FOLLOWERS: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[Optimizer]] = weakref.WeakKeyDictionary()
"""Optimizers rebuilt in place of a script's optimizer that have state of their own steps, by that optimizer."""


def from_config(config: Any, sparse: bool = False) -> OptimizerFactory:
    """Return a function that builds the optimizer that ``config`` describes.

    Args:
        config: options of a built-in optimizer, a dataclass of ``tutti.config.optimizer_config`` such as
            ``AdamWConfig``; not an ``ImportedOptimizerConfig``.
        sparse: whether some parameters may get sparse gradients; PyTorch's fused kernels take none, and are then off.

    Returns:
        A function from a sequence of (name, parameter) pairs to an optimizer over the parameters that require a
        gradient, or to None if no parameter does.
    """

    def make(named: NamedParameters) -> Optimizer | None:
        trainable = [(name, p) for name, p in named if p.requires_grad]
        return _make(config, trainable, sparse) if trainable else None

    return make


def _make(config: Any, named: NamedParameters, sparse: bool) -> Optimizer:
    arguments = asdict(config)
    for prefix in ("", "adam_"):
        if f"{prefix}beta1" in arguments:
            arguments[f"{prefix}betas"] = arguments.pop(f"{prefix}beta1"), arguments.pop(f"{prefix}beta2")
    if isinstance(config, options.MuonConfig):
        return optim.Muon(named, adam_names=arguments.pop("adam"), **arguments)
    if isinstance(config, options.LayerWiseConfig):
        layer_wise: dict[type, Callable[..., Optimizer]] = {
            options.LARSConfig: optim.LARS,
            options.LARCConfig: optim.LARC,
            options.LAMBConfig: optim.LAMB,
            options.NovoGradConfig: optim.NovoGrad,
        }
        return layer_wise[type(config)](optim.split_groups(named, arguments.pop("exclude")), **arguments)
    fused = not sparse and all(_is_fusible(p) for _, p in named)
    plain: dict[type, Callable[..., Optimizer]] = {
        options.SGDConfig: torch.optim.SGD,
        options.AdamConfig: torch.optim.Adam,
        options.AdamWConfig: torch.optim.AdamW,
    }
    return plain[type(config)]([p for _, p in named], **arguments, fused=fused)


def _is_fusible(parameter: nn.Parameter) -> bool:
    """Whether fused kernels take the parameter: a floating-point tensor without gaps in memory."""
    elements = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != elements:
            return False
        elements *= size
    return parameter.is_floating_point() and has_fused_optimizers(parameter.device)


def from_instance(optimizer: Optimizer) -> OptimizerFactory:
    """Return a function that maps (name, parameter) pairs to the user's optimizer, or to a rebuilt copy of it.

    The first call whose parameters include all of the optimizer's returns the optimizer itself, with state tensors
    moved to the devices of their parameters. Any other call (a stage that holds only some of them; one optimizer for
    each logical worker, a share of the global batch) builds an optimizer of the same class with the same groups and
    settings, which copies changed settings of the original before each step. The returned function gives None if none
    of the optimizer's parameters are among the pairs, and raises UsageError if it would have to build a copy of an
    optimizer that has already stepped or cannot be rebuilt (``built_alike``).

    Args:
        optimizer: the user's optimizer.
    """
    handed_out = False

    def make(named: NamedParameters) -> Optimizer | None:
        nonlocal handed_out
        groups = [(settings_of(g), list(g["params"])) for g in optimizer.param_groups]
        given = {id(p) for _, members in groups for p in members}
        here = {id(p) for _, p in named}
        if not handed_out and given <= here:
            handed_out = True
            _bring_state(optimizer)
            return optimizer
        cut = [{**settings, "params": [p for p in members if id(p) in here]} for settings, members in groups]
        subset = {number: group for number, group in enumerate(cut) if group["params"]}
        if not subset:
            return None
        built = built_alike(optimizer, subset)
        if _has_stepped(optimizer, built) or any(other.state for other in _FOLLOWERS.get(optimizer, ())):
            _refuse_stepped()
        if not built.state:
            _note_follower(optimizer, built)
        return _following(optimizer, built, here)

    return make


def _note_follower(original: Optimizer, built: Optimizer) -> None:
    _FOLLOWERS.setdefault(original, weakref.WeakSet()).add(built)


def _bring_state(optimizer: Optimizer) -> None:
    """Move state that the constructor has made (Adagrad) to where ``tutti.prepare`` has moved the parameters."""
    for each in (optimizer, *inner_optimizers(optimizer).values()):
        given = {} if isinstance(each.state, AbsentState) else each.state
        for parameter, state in given.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                    state[key] = value.to(parameter.device)


def check_fresh(optimizer: Optimizer) -> None:
    """Check that an optimizer has not stepped yet, because a copy that another process builds would lack its state.

    The function builds a new optimizer of the same class and options, and compares the states of both. An optimizer
    that ``built_alike`` can only copy, such as a Lookahead wrapper, always passes, because the copy has a copy of the
    state. Called by ``tutti.prepare``.

    Args:
        optimizer: the optimizer, which is not changed.

    Raises:
        UsageError: the state of a parameter differs from that in the new optimizer; or no equal optimizer can be built
            (``built_alike``).
    """
    groups = {
        number: {**settings_of(group), "params": list(group["params"])}
        for number, group in enumerate(optimizer.param_groups)
    }
    if _has_stepped(optimizer, built_alike(optimizer, groups)):
        _refuse_stepped()


def _refuse_stepped() -> NoReturn:
    raise UsageError(
        "an optimizer that has already stepped cannot be rebuilt for this strategy",
        remedy="call tutti.prepare before the first optimizer step, or take strategy='mirrored'",
    )


def built_alike(
    optimizer: Optimizer, groups: Mapping[int, dict[str, Any]], changes: Mapping[str, Any] | None = None
) -> Optimizer:
    """Build a new optimizer of the same class and options as ``optimizer`` over other parameter groups.

    The constructor is called with the new groups and the original's options: its ``defaults``, and its attributes named
    like the constructor's arguments. Where that makes no equal optimizer, as with a Lookahead wrapper around another
    optimizer, the original is copied without a constructor (``tutti.optim.optimizer_copy``).

    Args:
        optimizer: the original, which is not changed.
        groups: index of a parameter group of the original → new group with the settings of this group.
        changes: constructor options to set to other values than the original's, by name; None for none.

    Returns:
        The new optimizer. Its constructor leaves it without state, as before the first step; a copy has a copy of the
        state of those parameters that the original has, too.

    Raises:
        UsageError: the optimizer can be neither constructed nor copied. It cannot be constructed if it holds another
            optimizer, if its constructor raises, or if an attribute (None, a number, a text, a dtype or a tuple of
            these) would differ from the original's, which would be another algorithm. A UsageError of the constructor
            propagates, and no copy is tried.
    """
    if not inner_optimizers(optimizer):
        built, why = _constructed(optimizer, list(groups.values()), changes or {})
        if built is not None:
            return built
    else:
        why = "it holds another optimizer, which its constructor would have to make"
    try:
        return copied_for(optimizer, groups, changes or {})
    except UncopiedError as error:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be constructed again for other parameters",
            why=f"{why}; and no copy of it can be made: {error}",
            remedy="let its constructor take the parameters first, and hand all options on to"
            " super().__init__(params, {…}); keep tensors in optimizer.state",
        ) from error


def _constructed(
    optimizer: Optimizer, groups: Sequence[dict[str, Any]], changes: Mapping[str, Any]
) -> tuple[Optimizer | None, str]:
    """Call the constructor of the optimizer's class with its options; or return None, and why that is not alike."""
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    # Set by every optimizer's class, or by schedulers, scalers and tutti.
    bookkeeping = optimizer_attributes() | ({"grad_norm"} if isinstance(optimizer, LayerWise) else set())
    kept = {name: value for name, value in vars(optimizer).items() if is_plain(value) and name not in bookkeeping}
    options = {k: v for k, v in {**kept, **optimizer.defaults}.items() if k in known} | dict(changes)
    try:
        built = kind(groups, **options)
    except UsageError:
        raise
    except Exception as error:
        return None, f"its constructor, called with parameter groups and the options in its defaults, says: {error}"
    for name, value in kept.items() if not is_known(kind) else ():
        if repr(vars(built).get(name)) != repr(value):
            return None, f"its attribute {name} is {value!r}, and {vars(built).get(name)!r} in a new one"
    return built, ""


def is_plain(value: object) -> bool:
    """Return whether a value is None, a number, a string, a dtype, or a tuple of these.

    Such values can be compared between two optimizers by their ``repr``.

    Args:
        value: any value, such as an optimizer's option.
    """
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def is_known(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer class is defined in ``torch.optim`` or ``tutti.optim``.

    The classes defined there keep all their options in parameter groups. False for a subclass that a script defines.

    Args:
        kind: the class.
    """
    return kind.__module__.startswith(("torch.optim.", "tutti.optim."))


def _has_stepped(original: Optimizer, built: Optimizer) -> bool:
    """Whether the original's state of the copy's parameters differs from a fresh optimizer's."""
    if isinstance(original.state, AbsentState):
        return False
    given, made = NestedState(original), NestedState(built)
    for group in built.param_groups:
        for p in group["params"]:
            before, fresh = given.of(p), made.of(p)
            if before.keys() != fresh.keys() or not all(_alike(before[key], fresh[key]) for key in before):
                return True
    return False


def _alike(before: Any, fresh: Any) -> bool:
    """Whether state may be a constructor's initial one; tensors, perhaps of a slice, compare by minimum and maximum."""
    if isinstance(before, Tensor) and isinstance(fresh, Tensor):
        return not fresh.numel() or (before.min(), before.max()) == (fresh.min(), fresh.max())
    return repr(before) == repr(fresh)


def _following(original: Optimizer, built: Optimizer, here: set[int]) -> Optimizer:
    """Make ``built`` copy the group settings of ``original`` before each step, as a user or scheduler may change them.

    Groups that are added to ``original`` later are added to ``built`` too. Returns ``built``.

    Args:
        original: the user's optimizer.
        built: its rebuilt copy.
        here: ids of the parameters on this rank.
    """
    pairs = [group for group in original.param_groups if any(id(p) in here for p in group["params"])]
    seen = len(original.param_groups)

    def follow() -> None:
        nonlocal seen
        for group in original.param_groups[seen:]:
            members = [p for p in group["params"] if id(p) in here]
            if members:
                built.add_param_group({**settings_of(group), "params": members})
                pairs.append(group)
        seen = len(original.param_groups)
        for own, theirs in zip(built.param_groups, pairs, strict=True):
            own.update(settings_of(theirs))

    if isinstance(original, LayerWise) and isinstance(built, LayerWise):
        built.norms = original.norms
    plain = built.step

    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        follow()
        _note_follower(original, built)
        return plain(*args, **kwargs)

    # No step hook: PyTorch calls none for a wrapper whose constructor does not call that of ``Optimizer``. A method, as
    # a trial of the optimizer (``mixing_of``) takes a function among its attributes for one of its settings.
    built.step = MethodType(step, built)  # type: ignore[method-assign]
    return built


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's parameter group without the keys ``params`` and ``param_names``.

    What remains are the settings, such as ``lr`` and ``weight_decay``, by name.

    Args:
        group: the parameter group, which is not changed.
    """
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
