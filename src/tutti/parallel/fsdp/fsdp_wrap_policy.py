"""FSDP wrap policy: choose the modules that ``fully_shard`` wraps, whose parameters are all-gathered together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from tutti.errors import UsageError, did_you_mean
from tutti.nn.ac_policy import is_composite, is_sequence, parameter_elements
from tutti.torch_compat import module_parameters

_LARGE = 1 << 18
"""Least number of parameters of a wrapped module in a model without repeated blocks: a guess; a message of 1 MB."""

HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers that have no forward."""


def wrapped_modules(
    model: nn.Module, choice: Sequence[str] = ("auto",), closed: Collection[nn.Module] = ()
) -> list[nn.Module]:
    """Return the modules below ``model`` that ``fully_shard`` is to wrap, inner ones before the modules around them.

    FSDP2 all-gathers the parameters of a wrapped module together. ``model`` itself is never in the list; FSDP's root
    wrap covers all remaining parameters. Left out are modules without parameters, and modules that share parameters
    with the rest of the model (tied weights), because tied parameters must stay all-gathered while either module
    computes.

    Args:
        model: the model, not yet sharded.
        choice: names of modules or of their classes. ``("auto",)`` takes repeated blocks, which are children of one
            class in a ``ModuleList`` or ``Sequential``; in a model without such blocks the smallest modules with 2^18
            parameters or more.
        closed: modules inside which ``("auto",)`` chooses nothing, such as a mixture of experts, whose inner blocks not
            every rank calls; ``closed`` modules themselves may be chosen.

    Returns:
        The modules, in the reverse order of ``model.modules()``; an empty list if nothing fits.

    Raises:
        UsageError: ``choice`` has a name that is neither a module's nor a class's in the model, or ``choice`` selects
            an ``nn.ModuleList``, ``ModuleDict``, ``ParameterList`` or ``ParameterDict``, which has no forward.
    """
    found = _named(model, choice) if tuple(choice) != ("auto",) else _stacked(model, closed) or _large(model, closed)
    chosen = {id(module) for module in found if _apart(model, module)}
    return [module for module in reversed(list(model.modules())) if id(module) in chosen]


def wrapped_around(model: nn.Module, routed: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the names of the modules that ``fully_shard`` wraps in a model with data-dependent routing.

    A routed module chooses by the data which of its blocks compute; an example is a mixture of experts. Different
    ranks may choose different blocks, and then their all-gathers would not match. The blocks are therefore not wrapped
    one by one. The routed module is wrapped as a whole, unless it lies inside a wrapped module, shares parameters with
    the rest of the model, or is a root: the model itself, or a model in the outermost ``ModuleList`` or ``ModuleDict``.
    Other modules are wrapped as ``wrapped_modules`` chooses by default (repeated blocks, or large modules).

    Args:
        model: the model, not yet sharded.
        routed: the routed modules in ``model``; every rank calls their forward.

    Returns:
        Names of the modules to wrap, as ``model.named_modules()`` gives and orders them.
    """
    chosen = wrapped_modules(model, closed=routed)
    inside = {below for unit in chosen for below in unit.modules()}
    tops = root_modules(model)
    alone = [module for module in routed if module not in inside and module not in tops and _apart(model, module)]
    return tuple(name for name, module in model.named_modules() if module in chosen or module in alone)


def root_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a script calls: the model itself, or each model in a ``ModuleList`` or ``ModuleDict``.

    Nested lists and dicts are searched. The caller applies FSDP's root wrap (``fully_shard``) to each returned module.

    Args:
        model: the model, or a container of several models.

    Returns:
        ``[model]``, or the models in the container, in the order of its children.
    """
    if not isinstance(model, nn.ModuleList | nn.ModuleDict):
        return [model]
    return [root for child in model.children() for root in root_modules(child)]


def _named(model: nn.Module, choice: Collection[str]) -> list[nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    classes = {_kind(module).__name__ for module in modules.values()}
    for entry in choice:
        if entry not in modules and entry not in classes:
            raise UsageError(
                f"the model has no module or class '{entry}' to gather as one",
                where="units",
                remedy=did_you_mean(entry, sorted({*modules, *classes})),
            )
    found = [module for name, module in modules.items() if name in choice or _kind(module).__name__ in choice]
    for module in found:
        if isinstance(module, HOLDERS):
            raise UsageError(
                f"a {type(module).__name__} is never called, so that FSDP2 cannot know when its parameters are needed",
                where="units",
                remedy="name the modules in it",
            )
    return found


def _kind(module: nn.Module) -> type:
    """Return the module's original class, also where tutti has replaced it by a subclass."""
    kind = type(module)
    while under := kind.__dict__.get("_plain") or kind.__dict__.get("_whole"):
        kind = under
    return kind


def _stacked(module: nn.Module, closed: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return repeated blocks: children of one class in a stack; for nested stacks the blocks of the inner ones."""
    if module in closed:
        return []
    blocks = [child for child in module.children() if is_composite(child)]
    kinds = [_kind(block) for block in blocks]
    found: list[nn.Module] = []
    for child in module.children():
        inner: list[nn.Module] = []
        repeated = _holds(module) and child in blocks and kinds.count(_kind(child)) > 1
        if _holds(child) or not repeated:
            inner = _stacked(child, closed)
        found += inner or ([child] if repeated and not isinstance(child, HOLDERS) else [])
    return found


def _holds(module: nn.Module) -> bool:
    """Return whether the module is a ``ModuleList`` or a sequence, with no computation of its own."""
    return isinstance(module, nn.ModuleList) or is_sequence(module)


def _large(module: nn.Module, closed: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return the smallest modules below ``module`` with ``_LARGE`` parameters; single layers only within a sequence."""
    found: list[nn.Module] = []
    for child in () if module in closed else module.children():
        if parameter_elements(child) < _LARGE:
            continue
        inner = _large(child, closed)
        called = not isinstance(child, HOLDERS) and (is_composite(child) or is_sequence(module))
        found += inner or ([child] if called else [])
    return found


def _apart(model: nn.Module, module: nn.Module) -> bool:
    """Return whether the module has parameters and shares none of them with the rest of the model."""
    inside = {id(m) for m in module.modules()}
    own = {id(p) for p in module.parameters()}
    outside = [m for m in model.modules() if id(m) not in inside]
    others = {id(p) for m in outside for p in module_parameters(m).values() if p is not None}
    return bool(own) and not own & others
