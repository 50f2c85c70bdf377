"""Share of a model's computation that tensor parallelism does not split, for a run's header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tutti.nn.untouched import untouched
from tutti.parallel.tensor.tp_plan import SPLIT, PlanEntry, splittable
from tutti.torch_compat import TorchDispatchMode
from tutti.workload.flop_formulas import count_flop

_SAMPLES = 2
"""Samples of the trial of the forward."""


def whole_flop_share(
    plain: nn.Module, plan: Sequence[PlanEntry], trial: Callable[..., Any] | None, device: torch.device
) -> float | None:
    """Return the share of the forward's floating-point operations that every tensor-parallel rank computes.

    The loss function runs once on two samples; matrix products, convolutions and attention count. The ranks divide the
    operations of a layer that the plan splits, and of a block that computes on this rank's heads; every rank computes
    all other operations.

    Args:
        plain: the whole model; it stays as it was.
        plan: the plan of the model, one entry for each module that does not stay whole.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data; None
            where no data is at hand.
        device: device on which the loss function runs.

    Returns:
        The share, from 0 to 1; None without ``trial``, where the loss function raises an error, and where the model
        computes none of these operations.
    """
    if trial is None:
        return None
    counter = _FlopByModule()
    try:
        with untouched(plain, device), ExitStack() as stack:
            for name, module in plain.named_modules():
                stack.callback(module.register_forward_pre_hook(counter.enter(name)).remove)
                stack.callback(module.register_forward_hook(counter.leave, always_call=True).remove)
            stack.enter_context(counter)
            trial(plain, _SAMPLES)
    except Exception:
        # The first step reports the error.
        return None
    split = {entry.name for entry in plan if entry.role in (*SPLIT, "scores", "experts")}
    blocks = tuple(f"{entry.name}." if entry.name else "" for entry in plan if entry.role in ("within", "heads"))

    def is_divided(name: str) -> bool:
        return name in split or (f"{name}.".startswith(blocks) and not splittable(plain.get_submodule(name)))

    flop = counter.flop
    total = sum(flop.values())
    return sum(n for name, n in flop.items() if not is_divided(name)) / total if total else None


class _FlopByModule(TorchDispatchMode):
    """Counts floating-point operations by the innermost module whose forward asks for them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop: Counter[str] = Counter()
        self._within = [""]

    def enter(self, name: str) -> Callable[..., None]:
        """Return a forward pre-hook for the module of a name."""
        return lambda module, args: self._within.append(name)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the innermost module's forward; a forward hook."""
        self._within.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        counted = count_flop(func, args, kwargs or {}, result)
        if counted is not None:
            self.flop[self._within[-1]] += int(counted.flop)
        return result
