"""Find modules whose forward chooses, by the data, which of its blocks compute, such as a mixture of experts.

A rank without a sample for an expert does not call it. FSDP2 gathers a wrapped module's parameters when it is called,
which all ranks must do alike; so such blocks are wrapped together, as the module that chooses among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.nn.ac_policy import is_sequence
from tutti.nn.global_draws import draws_marker
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.parallel.fsdp.fsdp_wrap_policy import HOLDERS

_CHOICES = (
    *("where(", "nonzero", "topk", "argmax", "argsort", "max(", "sort(", "bincount", "multinomial", "one_hot"),
    *("unique", "tolist", ".item()", "masked_select", "rand(", "bernoulli", "random"),
)
"""Text in the source of a forward that may choose by data or at random: a guess, which the trial then proves."""

_VALUES = frozenset(
    (
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "item", "tolist", "numpy"),
        *("__bool__", "__int__", "__index__", "__float__"),
    )
)
"""Functions that read values on the host, or whose result has a shape that depends on values."""

Shapes = tuple[tuple[int, ...], ...]


def suspected_routers(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return the modules whose source code suggests that they choose, by the data, which of their ``blocks`` run.

    An example is a mixture of experts. For each block the function takes the nearest module around it that has a
    forward of its own (no ``ModuleList``, ``Sequential`` or similar container), and searches the source of that
    module's class for words such as ``topk``, ``nonzero`` or ``rand(``. A class without readable source counts as
    found. Nothing is run; ``routed_modules`` confirms the guess by a trial forward.

    Args:
        model: the model.
        blocks: modules below ``model`` that FSDP2 is to wrap.

    Returns:
        A dict from each suspected module to the list of its ``blocks``; modules with one block only are left out.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, list[nn.Module]] = {}
    for block in blocks:
        place = names[block]
        caller = model
        while place:
            place = place.rpartition(".")[0]
            caller = model.get_submodule(place)
            if not isinstance(caller, HOLDERS) and not is_sequence(caller):
                break
        if _may_choose(type(caller)):
            found.setdefault(caller, []).append(block)
    return {caller: inner for caller, inner in found.items() if len(inner) > 1}


def routed_modules(
    model: nn.Module,
    suspects: Mapping[nn.Module, list[nn.Module]],
    trial: Callable[..., Any],
    device: torch.device,
) -> list[str]:
    """Run the model once, and return the names of modules that have chosen by the data which of their blocks compute.

    An example is a mixture of experts. A suspected module counts as having chosen if two conditions hold. First, its
    own forward has read values of a tensor on the host (``item``, a boolean), has called a function whose output shape
    depends on values (``nonzero``, a mask as index), or has drawn from Python's or NumPy's global generator. Second,
    either its blocks differ in their calls (number of calls, or shapes of the inputs), or these blocks got other
    numbers of rows (first dimension of the first tensor argument) than the suspected module itself. Not collective.
    An error of the trial ends the trial and is not raised; the names then follow from the calls before the error.

    Args:
        model: the whole model, not yet sharded; the trial leaves its state as it was.
        suspects: modules that may choose, each with the list of its blocks, as ``suspected_routers`` returns them.
        trial: ``trial(model)`` runs the model on the first micro-batch.
        device: device on which the trial runs.

    Returns:
        Names as in ``model.named_modules()``, sorted; an empty list for a model with synchronised batch norm, which is
        not run.
    """
    if peers_of(model) is not None:
        return []
    calls: dict[nn.Module, list[Shapes]] = {block: [] for blocks in suspects.values() for block in blocks}
    rows: dict[nn.Module, set[int]] = {suspect: set() for suspect in suspects}
    reads = _ValueReads()
    drawn: dict[nn.Module, int] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        reads.inside.append(module)
        shapes = tuple(tuple(v.shape) for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if module in calls:
            calls[module].append(shapes)
        if module in rows:
            drawn[module] = draws_marker()
            rows[module] |= {shape[0] for shape in shapes[:1] if shape}

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        reads.inside.pop()
        if module in drawn and drawn[module] != draws_marker():
            reads.readers.add(module)

    with ExitStack() as hooks:
        for module in dict.fromkeys((*suspects, *calls)):
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        with suppress(Exception), untouched(model, device), reads:
            trial(model)

    def chosen(suspect: nn.Module, blocks: list[nn.Module]) -> bool:
        given = {shape[0] for block in blocks for shapes in calls[block] for shape in shapes[:1] if shape}
        return len({repr(calls[block]) for block in blocks}) > 1 or given != rows[suspect]

    names = {module: name for name, module in model.named_modules()}
    return sorted(names[s] for s, blocks in suspects.items() if s in reads.readers and chosen(s, blocks))


class _ValueReads(TorchFunctionMode):
    """Finds modules whose own forward reads values of tensors, or makes tensors whose shape depends on values.

    Attributes:
        inside: modules whose forwards run, from the outermost; kept by hooks.
        readers: the modules found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[nn.Module] = []
        self.readers: set[nn.Module] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        index = args[1] if name == "__getitem__" else ()
        masked = any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (index if type(index) is tuple else (index,))
        )
        if self.inside and (name in _VALUES or masked or (name == "where" and len(args) == 1 and not kwargs)):
            self.readers.add(self.inside[-1])
        return func(*args, **(kwargs or {}))


def _may_choose(kind: type) -> bool:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return True
    return any(word in source for word in _CHOICES)
