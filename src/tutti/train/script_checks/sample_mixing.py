"""Find losses that mix the samples of a batch, such as in-batch negatives, by their second derivatives."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.current_session import collectives_refused
from tutti.parallel.ddp.loss_shape import is_gathered, reads_statistic
from tutti.train.script_checks.loss_calls import called_models

_MOST = 1_000_000
"""Largest number of elements of the model's outputs, whose second derivatives take memory."""
_SMALL = 1e-7


class MixingProbe:
    """Tests in one micro-batch whether a loss mixes samples: a sample's gradient then depends on outputs of the others.

    A loss is a mean over samples only if the derivative with respect to the output of one sample is a function of that
    output alone. The probe differentiates the part of the graph between the loss and the model's outputs twice; it
    leaves the graph as it was, calls no hook of the model, and is not collective.

    Args:
        model: the model, or a list or dict of models; until ``mixes`` or ``close`` is called they have a forward hook
            that replaces tensors among their outputs by views.
        samples: number of samples in the micro-batch.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        self._samples = samples
        self._outputs: list[Tensor] = []
        self._handles = [each.register_forward_hook(self._seen) for each in called_models(model)]

    def _seen(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        if type(output) is tuple:
            return tuple(self._view(each) for each in output)
        return self._view(output)

    def _view(self, output: Any) -> Any:
        if type(output) is not Tensor or not output.requires_grad or output.dim() == 0:
            return output
        if len(output) != self._samples or not output.is_floating_point():
            return output
        # Hooks of the model and of FSDP2 on the output itself are not called for its view.
        self._outputs.append(output.view_as(output))
        return self._outputs[-1]

    def close(self) -> None:
        """End the test whether a loss mixes samples: remove the model's forward hook, and drop the recorded outputs."""
        for handle in self._handles:
            handle.remove()
        self._outputs = []

    def mixes(self, loss: Any) -> bool:
        """Return whether a loss mixes samples: whether one sample's gradient depends on the model's outputs for others.

        True also where the model or the loss gives each sample a statistic of all, such as their mean. False where that
        cannot be told, such as for functions without a second derivative, and for a loss that gathers over ranks, whose
        script knows of their samples. Ends the probe.

        Args:
            loss: what the loss function returned, or what ``run.backward`` was given; if it is a tuple or list, its
                first element is tested.
        """
        outputs = self._outputs
        self.close()
        total = loss[0] if isinstance(loss, tuple | list) and loss else loss
        size = sum(output.numel() for output in outputs)
        if not outputs or size > _MOST or not isinstance(total, Tensor) or not total.requires_grad:
            return False
        if is_gathered(total.grad_fn):
            return False
        # Not every function has a second derivative, and a collective in the loss is none of this rank alone.
        with suppress(Exception), collectives_refused(), torch.enable_grad():
            if _depends(total.sum(), outputs):
                return True
        return reads_statistic(total.grad_fn, self._samples)


def _depends(total: Tensor, outputs: list[Tensor]) -> bool:
    """Return whether the gradient of the first sample's outputs depends on the outputs of others."""
    gradients = torch.autograd.grad(total, outputs, create_graph=True, allow_unused=True)
    firsts = [each[0].flatten() for each in gradients if each is not None and each.requires_grad]
    if not firsts:
        return False
    # Other weights for each output: a plain sum may have no derivative where its terms have.
    whole = torch.cat(firsts)
    picked = whole @ torch.linspace(1, 2, len(whole), dtype=whole.dtype, device=whole.device)
    found = torch.autograd.grad(picked, outputs, retain_graph=True, allow_unused=True)
    second = [each.abs() for each in found if each is not None]
    largest = max((float(each.max()) for each in second), default=0.0)
    others = max((float(each[1:].max()) for each in second), default=0.0)
    return others > _SMALL * largest
