"""Copies and pickles of a prepared model are those of the plain model: without tutti's hooks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import ref

from torch import nn

from tutti.nn.gradient_hooks import hook_package
from tutti.torch_compat import CONVERSION, MODULE_HOOK_TABLES

_ATTRIBUTE = "__reduce_ex__"


def leave_hooks_out_of_copies(model: nn.Module) -> None:
    """Make ``copy.deepcopy`` and pickles (``torch.save``) of a model and its modules leave tutti's hooks out.

    The hooks refer to the run and its communicators, which cannot be copied or stored. A file without them loads in a
    program without tutti, and with ``torch.load(weights_only=True)``. The script's own hooks stay. Sets
    ``__reduce_ex__`` on each module instance.

    Args:
        model: the script's model.
    """
    for module in model.modules():
        # Instance attributes take precedence over the class's, and PyTorch has no hook for pickles.
        vars(module)[_ATTRIBUTE] = _PlainReduce(module)


class _PlainReduce:
    """The ``__reduce_ex__`` of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)

    def __call__(self, protocol: Any) -> Any:
        """Reduce the module as its class does, without tutti's hooks in its state."""
        module = self._module()
        if module is None:
            raise TypeError("the module of this method has been deleted")
        reduced = type(module).__reduce_ex__(module, protocol)
        if isinstance(reduced, str) or len(reduced) < 3:
            return reduced
        function, arguments, state, *rest = reduced
        if isinstance(state, dict):
            state = _plain(state)
        return (function, arguments, state, *rest)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without tutti's hooks and without its own methods of an instance."""
    kept = {name: value for name, value in state.items() if name not in (_ATTRIBUTE, CONVERSION)}
    own = {
        key
        for name in MODULE_HOOK_TABLES
        for key, hook in (kept.get(name) or {}).items()
        if hook_package(hook) == "tutti"
    }
    for name in MODULE_HOOK_TABLES:
        table = kept.get(name)
        if table and own & table.keys():
            kept[name] = OrderedDict((key, value) for key, value in table.items() if key not in own)
    return kept
