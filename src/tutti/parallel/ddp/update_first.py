"""Updates that the host launches before it has read the step's results; the device skips an update that must not be.

Whether a step's gradient is finite, and whether all ranks are in the same step, decides on its update. A host that
waits for this answer issues the update's kernels, and the next forward's, while the device idles. PyTorch's fused
optimizers skip an update on the device where a flag there says so (``found_inf``, made for loss scaling): the host
launches the update with this flag, behind a copy of flag and results to the host, and reads these afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tutti.device import current_stream, is_accelerator, widest_float
from tutti.optim.several import members_of, stepping
from tutti.parallel.ddp.buckets import ReducedSums
from tutti.parallel.ddp.gradient_arithmetic import norms_of
from tutti.parallel.ddp.optimizer_step import optimizer_step
from tutti.torch_compat import foreach_mul_, step_hooks
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext

LEAST_WAIT = 1e-3
"""Seconds that the host must have waited for the device in the previous step, so that launching first pays (a guess):
the flag takes some ten small kernels, which a host that issues kernels more slowly than the device computes them adds
to the step."""


class PendingSums:
    """Sums of a step over the data ranks, and the norms of its gradients, which are still on the device.

    Args:
        numbers: (n,) sums as the reducer adds them up, such as loss and count.
        gradients: tensors whose elements are those of the whole gradient, on the same device; at least one.
        agrees: 0-dim bool tensor: whether the numbers allow the update, apart from the gradients; None: they do.
        parse: makes ``ReducedSums`` from the n numbers on the host, and the seconds for which the host has waited for
            them; it may raise.

    Attributes:
        norm: 0-dim float64 tensor, the L2 norm of the whole gradient.
        allowed: 0-dim bool tensor, whether the update may be made: the norm is finite, and the numbers agree.
    """

    def __init__(
        self,
        numbers: Tensor,
        gradients: Sequence[Tensor],
        agrees: Tensor | None,
        parse: Callable[[list[float], float], ReducedSums],
    ) -> None:
        norms = norms_of(gradients).double()
        # In the order in which the host adds up.
        square = (norms * norms).cumsum(0)[-1]
        finite = square.isfinite()
        self.norm, self.allowed = square.sqrt(), finite if agrees is None else finite & agrees
        together = torch.cat([numbers.double(), norms, self.allowed.double()[None]])
        # The copy to the host precedes the update's kernels in the stream, for which the host need not wait.
        self._copy = together.to("cpu", non_blocking=True)
        self._event = current_stream(together.device).record_event()
        self._count, self._parse = len(numbers), parse

    def launch_update(
        self, optimizers: Sequence[Optimizer], gradients: Sequence[Tensor], clip: float | None, lr_factor: float | None
    ) -> None:
        """Launch the clipping of gradients and the optimizers' steps on the device; do not wait for them.

        Where ``allowed`` is False on the device, neither gradients nor parameters change.

        Args:
            optimizers: optimizers, or objects that combine several, of which ``can_skip_on_device`` is True.
            gradients: the gradients of the optimizers' parameters, scaled in place.
            clip: largest L2 norm of the whole gradient; None does not clip.
            lr_factor: factor on each parameter group's initial learning rate; None leaves the rates as they are.
        """
        if clip is not None:
            # As ``clip_norm`` on the host.
            factor = torch.where(self.allowed, (clip / (self.norm + 1e-6)).clamp(max=1.0), 1.0)
            for dtype in {gradient.dtype for gradient in gradients}:
                foreach_mul_([gradient for gradient in gradients if gradient.dtype == dtype], factor.to(dtype))
        with skipped_unless(self.allowed, [member for each in optimizers for member in stepping(each)]):
            for optimizer in optimizers:
                optimizer_step(optimizer, lr_factor)

    def read(self) -> tuple[ReducedSums, float, bool]:
        """Wait until the sums and norms have been copied to the host, and return them.

        Returns:
            The sums over the data ranks; the square of the L2 norm of the whole gradient; and whether the device has
            allowed the update.

        Raises:
            MismatchError: ranks are in different steps or hold different parameters.
        """
        began = time.perf_counter()
        self._event.synchronize()
        waited = time.perf_counter() - began
        *values, allowed = self._copy.tolist()
        square = sum(norm * norm for norm in values[self._count :])
        return self._parse(values[: self._count], waited), square, allowed > 0


def can_launch_first(optimizer: Optimizer | None, run_context: RunContext, step_context: StepContext) -> bool:
    """Return whether a step's update can be launched before its results are read, and skipped by the device.

    True on accelerators with float64, in which the norm is computed, without a loss scale, where a rank has the whole
    model and one logical worker (fixed share of the global batch), and ``can_skip_on_device`` is True of the optimizer.

    Args:
        optimizer: the rank's optimizer, or an object that combines several; None where the rank has nothing to train.
        run_context: device, mesh and logical workers of the run.
        step_context: the step under way.
    """
    device = run_context.comms.world.device
    return (
        is_accelerator(device)
        and widest_float(device) == torch.float64
        and step_context.loss_scale == 1.0
        and run_context.comms.model.size == 1
        and len(run_context.mine) == 1
        and all(map(can_skip_on_device, members_of(optimizer)))
    )


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether the device can skip an optimizer's next step, by ``found_inf``, as if it had not been called.

    True for PyTorch's fused Adam, AdamW and SGD on an accelerator once every parameter with a gradient has optimizer
    state, which its first step makes. False for an optimizer with step hooks, and where a gradient scaler has set the
    optimizer's ``found_inf`` or ``grad_scale``.

    Args:
        optimizer: any optimizer.
    """
    if type(optimizer) not in (Adam, AdamW, SGD) or any(step_hooks(optimizer)):
        return False
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        return False
    return all(_has_state(optimizer, group) for group in optimizer.param_groups)


def _has_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not group.get("fused") or any(not is_accelerator(p.device) for p in group["params"]):
        return False
    needed = ("momentum_buffer" if group["momentum"] else None) if isinstance(optimizer, SGD) else "step"
    with_gradient = (p for p in group["params"] if p.grad is not None)
    return needed is None or all(optimizer.state[p].get(needed) is not None for p in with_gradient)


@contextmanager
def skipped_unless(allowed: Tensor, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Return a context in which fused optimizers' steps change nothing if ``allowed`` is False on the device.

    The context sets the optimizers' attribute ``found_inf``, which PyTorch's fused kernels read, and deletes it at the
    end. The host does not wait.

    Args:
        allowed: 0-dim bool tensor on the device of the parameters.
        optimizers: optimizers for which ``can_skip_on_device`` is True.
    """
    found = (~allowed).float()
    holders: list[Any] = list(optimizers)
    for holder in holders:
        holder.found_inf = found
    try:
        yield
    finally:
        for holder in holders:
            del holder.found_inf
