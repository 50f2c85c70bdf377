"""Optimizers whose ``step()`` acts once a global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.strategies import Choice, check

if TYPE_CHECKING:
    from tutti.training.run import Run


def gate(optimizer: Optimizer, run: Run, choice: Choice) -> None:
    """Let ``optimizer``, the run's from now on, act once a global batch: a subclass, so that schedulers still fit."""
    # Of an optimizer that was prepared before, the new run takes over.
    kind: type[Optimizer] = getattr(type(optimizer), "_ungated", type(optimizer))
    if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        # A scheduler made before has wrapped the class's own step, which would pass by the gate.
        del optimizer.step

    def step(self: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
        # What a scheduler looks at to warn of calls in the wrong order.
        self._opt_called = True  # type: ignore[attr-defined]
        if run.stepping:
            result: float | None = kind.step(self)
            return result
        if closure is not None:
            raise UsageError("optimizer.step(closure) cannot be exchanged", remedy="call run.backward(loss) yourself")
        if not choice.row.own_loop:
            check(choice.name, run.setting.grid.size, own_loop=True)
        run.gated_step()
        return None

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        """Nothing: the exchange clears gradients after each update, and in between they must accumulate."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    run.optimizer = optimizer
    body = {"step": step, "zero_grad": zero_grad, "_ungated": kind}
    optimizer.__class__ = type(f"Gated{kind.__name__}", (kind,), body)
