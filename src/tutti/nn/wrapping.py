"""Which modules of a model are gathered as one where every device holds only rows of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from tutti.errors import UsageError, did_you_mean
from tutti.nn.units import is_sequence

_LARGE = 1 << 18
"""Parameters from which a part of a model without repeated blocks is a unit: a guess; a message of 1 MB."""

_HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def units(model: nn.Module, choice: Sequence[str] = ("auto",)) -> list[nn.Module]:
    """Modules below ``model`` that are gathered one by one, inner ones first; what they do not hold is one more unit.

    ``auto``: blocks, which are children of one class in a ``ModuleList`` or ``Sequential``; where there are none, large
    parts. Parts that share parameters with others are left out, because these must be there
    while either computes.

    Args:
        choice: ``("auto",)``, or names and classes of modules.

    Raises:
        UsageError: the model has no such module, or one that is never called.
    """
    found = _named(model, choice) if tuple(choice) != ("auto",) else _stacked(model) or _large(model)
    chosen = {id(module) for module in found if _apart(model, module)}
    return [module for module in reversed(list(model.modules())) if id(module) in chosen]


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
        if isinstance(module, _HOLDERS):
            raise UsageError(
                f"a {type(module).__name__} is never called, so that nothing tells when its parameters are needed",
                where="units",
                remedy="name the modules in it",
            )
    return found


def _kind(module: nn.Module) -> type:
    """The class that it was given, of which other layouts may have made one of their own."""
    kind = type(module)
    while under := kind.__dict__.get("_plain") or kind.__dict__.get("_whole"):
        kind = under
    return kind


def _stacked(module: nn.Module) -> list[nn.Module]:
    """Members of stacks of blocks; of a stack of nothing but stacks, those of the inner ones."""
    blocks = [child for child in module.children() if _composite(child)]
    kinds = [_kind(block) for block in blocks]
    found: list[nn.Module] = []
    for child in module.children():
        inner: list[nn.Module] = []
        repeated = _holds(module) and child in blocks and kinds.count(_kind(child)) > 1
        if _holds(child) or not repeated:
            inner = _stacked(child)
        found += inner or ([child] if repeated and not isinstance(child, _HOLDERS) else [])
    return found


def _holds(module: nn.Module) -> bool:
    """Whether it is nothing but its children."""
    return isinstance(module, nn.ModuleList) or is_sequence(module)


def _large(module: nn.Module) -> list[nn.Module]:
    """The smallest parts below ``module`` that are still large; layers only where a sequence calls them."""
    found: list[nn.Module] = []
    for child in module.children():
        if _size(child) < _LARGE:
            continue
        inner = _large(child)
        called = not isinstance(child, _HOLDERS) and (_composite(child) or is_sequence(module))
        found += inner or ([child] if called else [])
    return found


def _apart(model: nn.Module, module: nn.Module) -> bool:
    """Whether it has parameters, and none of them is used elsewhere in the model."""
    inside = {id(m) for m in module.modules()}
    own = {id(p) for p in module.parameters()}
    others = {id(p) for m in model.modules() if id(m) not in inside for p in m._parameters.values() if p is not None}
    return bool(own) and not own & others


def _composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and _size(module) > 0


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
