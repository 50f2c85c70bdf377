"""The loop's body of a logical worker without samples, where workers make updates of their own: it has no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tutti.errors import UsageError
from tutti.nn.swap import parameters

if TYPE_CHECKING:
    from tutti.train.run import Run

_ROUNDING = 1e-6
"""Relative change of a parameter by a script that moves it and moves it back, in float32."""


class VoidBody:
    """Undoes the effects of a custom loop's body on parameters and gradients, for a logical worker without samples.

    A logical worker (fixed share of the global batch) that makes updates of its own takes no part in a step in which it
    has no samples. Its rank still runs the loop's body, on samples of another worker, so that ranks make the same
    collective calls, and the body finds gradients as in any other step.

    Args:
        run: the run, whose trained parameters are copied and whose ``.grad`` are set aside, and become None, until
            ``undo``.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._named = run, parameters(run.replica.parts)
        self._values = {name: p.detach().clone() for name, p in self._named if p.requires_grad}
        self._gradients = [p.grad for _, p in self._named]
        for _, parameter in self._named:
            parameter.grad = None

    @staticmethod
    def backward(loss: Any, retain_graph: bool) -> None:
        """Run a plain backward into ``.grad``, in place of ``run.backward``. Not collective.

        The loss is of another logical worker's samples. The loop's body may read the gradients as in any other step;
        ``undo`` removes them. A loss without gradient is left alone.

        Args:
            loss: the script's argument of ``run.backward``; of a tuple or list the first element is the loss.
            retain_graph: keep the graph for another backward.
        """
        losses = loss[0] if isinstance(loss, tuple | list) else loss
        if isinstance(losses, Tensor) and losses.requires_grad:
            losses.sum().backward(retain_graph=retain_graph)

    def undo(self) -> None:
        """Restore the values and gradients that the trained parameters had before the loop's body ran. Not collective.

        Raises:
            UsageError: the script has written a parameter, which has another value after the body.
        """
        for (name, parameter), gradient in zip(self._named, self._gradients, strict=True):
            parameter.grad = gradient
            if (before := self._values.get(name)) is None:
                continue
            now = parameter.data
            if now.numel() and float((now - before).abs().max()) > _ROUNDING * max(float(before.abs().max()), 1.0):
                raise UsageError(
                    f"the loop's body writes the parameter {name} in a step in which this rank's worker has no samples",
                    where=f"step {self._run.global_step}",
                    why="the worker takes no part in the step, and its body runs on samples of another worker",
                    remedy="give tutti.prepare drop_last=True or another batch_size, so that every worker has samples"
                    " in every step; or write parameters after run.microbatches() has ended",
                )
            now.copy_(before)
