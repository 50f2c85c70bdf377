"""Find and undo the side effects of tracing a forward, which its graph would leave out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tutti.device import autocast_types
from tutti.torch_compat import (
    FX_CONSTANT,
    MODULE_ATTRIBUTES,
    MODULE_HOOK_TABLES,
    dispatch_mode_depth,
    function_mode_depth,
    functorch_level,
    has_backward_hook,
    has_forward_hook,
    module_buffers,
    module_parameters,
    saved_tensor_hooks,
    tensor_version,
)

FUNCTION_MODE = "a torch function mode"
"""Name of the number of active function modes among ``surroundings``."""

_K = TypeVar("_K")
_T = TypeVar("_T")


class Untraced:
    """Snapshot of attributes, hooks and tensors of a model and its submodules, to undo a trace of its forward.

    Tracing runs the forward's Python code once, on proxies of tensors: an attribute that counts calls would count the
    trace, too, and a forward that registers hooks the first time would register them again.

    Args:
        model: the model, which is recorded when this object is made.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._before = [_attributes(module) for _, module in self._modules]
        self._tensors = [(dict(module_parameters(module)), dict(module_buffers(module))) for _, module in self._modules]
        self._hooks = [
            (_joined(path, name), table, dict(table))
            for path, module in self._modules
            for name, table in hook_tables(module).items()
        ]
        self._versions = [(name, b, tensor_version(b), b.clone()) for name, b in model.named_buffers() if not b.is_meta]

    def written_attributes(self) -> list[str]:
        """Return the dotted names of module attributes that were added or changed since this snapshot was made.

        Parameters, buffers and hooks do not count. The modules stay as they are, unlike with ``undo``.
        """
        return [
            _joined(path, name)
            for (path, module), before in zip(self._modules, self._before, strict=True)
            for name, value in vars(module).items()
            if _is_kept(name)
            and name not in MODULE_HOOK_TABLES
            and (name not in before or value is not before[name][0] or not _same(value, before[name][1]))
        ]

    def undo(self) -> list[str]:
        """Restore attributes, hooks and tensors of the modules, in place, as they were when this snapshot was made.

        Called after the model's forward was traced. Attributes and hooks that were added are deleted; lists and dicts
        get their former members back; buffers that were written in place get their former values.

        Returns:
            Dotted names of the attributes, tables of hooks and tensors that had changed.
        """
        found = []
        for (path, module), before in zip(self._modules, self._before, strict=True):
            now = vars(module)
            for name in [name for name in now if name not in before and _is_kept(name)]:
                found.append(_joined(path, name))
                del now[name]
            for name, (value, members) in before.items():
                if now.get(name) is not value or not _same(value, members):
                    found.append(_joined(path, name))
                    now[name] = _put_back(value, members)
        for (path, module), (parameters, buffers) in zip(self._modules, self._tensors, strict=True):
            found += [_joined(path, name) for name in _restore(module_parameters(module), parameters)]
            found += [_joined(path, name) for name in _restore(module_buffers(module), buffers)]
        for name, table, hooks in self._hooks:
            if _restore(table, hooks):
                found.append(name)
        for name, buffer, version, value in self._versions:
            if tensor_version(buffer) != version:
                found.append(name)
                with torch.no_grad():
                    buffer.copy_(value)
        return found


class Constants:
    """Snapshot of attributes of modules whose forwards were traced: their values are constants of the traced graph.

    Args:
        modules: (dotted name, module) pairs; recorded when this object is made.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        self._before = [_attributes(module) for _, module in self._modules]

    def changed(self) -> list[str]:
        """Return a list of the dotted names of the module attributes that have changed since this snapshot was made.

        Called before a traced graph is used again: the graph has the former values as constants. A tensor counts as
        changed if it is another object; a list or dict also if members were added, removed or replaced. Attributes that
        were added are not reported.
        """
        return [
            _joined(path, name)
            for (path, module), before in zip(self._modules, self._before, strict=True)
            for name, (value, members) in before.items()
            if not _equal(vars(module).get(name), value) or not _same(value, members)
        ]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module itself has forward or backward hooks, pre-hooks included.

    Submodules, and hooks on tensors, do not count.

    Args:
        module: the module.
    """
    return has_forward_hook(module) or has_backward_hook(module)


def hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return a module's own tables of hooks, without those of its submodules, for reading or writing.

    Args:
        module: the module.

    Returns:
        A dict from the name of a table's attribute, such as ``_forward_hooks``, to the table: a dict from hook ids to
        hooks, or to flags that tell how the hook is called. The tables are the module's own, not copies.
    """
    return {name: vars(module)[name] for name in MODULE_HOOK_TABLES if name in vars(module)}


def surroundings() -> tuple[Any, ...]:
    """Return the modes that change how PyTorch computes, such as ``torch.no_grad()`` and autocast, with their values.

    A traced graph is valid only while all of them are equal: they are compared with those of the trace before the graph
    is used.

    Returns:
        A tuple of (name, value) pairs, in one process always of the same names in the same order. Function modes,
        dispatch modes and transforms of ``torch.func`` are given by their number.
    """
    kinds = autocast_types()
    hooks = saved_tensor_hooks()
    own = "checkpoint" in getattr(hooks[0], "__qualname__", "") if hooks else False
    return (
        ("torch.no_grad() or torch.enable_grad()", torch.is_grad_enabled()),
        ("torch.inference_mode()", torch.is_inference_mode_enabled()),
        *(("torch.autocast", (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k))) for k in kinds),
        ("torch.set_default_dtype", torch.get_default_dtype()),
        ("saved-tensor hooks", None if own else hooks),
        ("a transform of torch.func", functorch_level()),
        (FUNCTION_MODE, function_mode_depth()),
        ("a torch dispatch mode", dispatch_mode_depth()),
    )


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return the script's attributes of a module, each with a shallow copy where it is a container."""
    return {name: (value, _members(value)) for name, value in vars(module).items() if _is_kept(name)}


def _members(value: Any) -> list[Any] | dict[Any, Any] | set[Any] | None:
    """Return a shallow copy of a container, of a plain type; None for other values."""
    if isinstance(value, list | deque):
        return list(value)
    if isinstance(value, dict):
        return dict(value.items())
    return set(value) if isinstance(value, set) else None


def _is_kept(name: str) -> bool:
    """Return whether an attribute is the script's: not one that every module has, nor one that ``torch.fx`` adds."""
    return name not in MODULE_ATTRIBUTES and not name.startswith(FX_CONSTANT)


def _restore(now: dict[_K, _T], before: dict[_K, _T]) -> list[_K]:
    """Restore a table of tensors or hooks, and return the keys of entries that had changed."""
    changed = [name for name, tensor in before.items() if now.get(name) is not tensor]
    changed += now.keys() - before.keys()
    now.clear()
    now.update(before)
    return changed


def _same(value: Any, members: Any) -> bool:
    if members is None:
        return True
    if len(value) != len(members):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), members.items(), strict=True)
        return all(key == name and now is member for (key, now), (name, member) in pairs)
    if isinstance(value, set):
        return bool(value == members)
    return all(a is b for a, b in zip(value, members, strict=True))


def _put_back(value: Any, members: Any) -> Any:
    if members is not None:
        value.clear()
        # ``update`` of a Counter would add.
        if isinstance(value, dict):
            for key, member in members.items():
                value[key] = member
        elif isinstance(value, set):
            value.update(members)
        else:
            value.extend(members)
    return value


def _equal(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, Tensor) or isinstance(before, Tensor):
        return False
    try:
        return type(now) is type(before) and bool(now == before)
    except Exception:
        return False


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
