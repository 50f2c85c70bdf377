"""Find losses that mix the samples of a batch, and so are no mean over samples.

``MixingProbe`` finds losses that mix the model's outputs, such as in-batch negatives, by their second derivatives.
``mixed_data`` finds losses that mix targets or the model's inputs, or select samples (top-k), by computing them again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.current_session import collectives_refused
from tutti.data.global_generators import own_generators
from tutti.parallel.ddp.loss_shape import is_gathered, reads_statistic
from tutti.train.script_checks.loss_calls import MOST_ELEMENTS, LossCalls, alike, called_models

_SMALL = 1e-7
"""Ratio of two second derivatives of which the smaller one counts as 0."""
_FAR = 30.0
"""Distance by which outputs move, more than usual losses of a batch differ by (a guess)."""


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
        if not outputs or size > MOST_ELEMENTS or not isinstance(total, Tensor) or not total.requires_grad:
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


def mixed_data(record: LossCalls, loss: Any) -> str:
    """Return which data of the other samples in the micro-batch a sample's gradient depends on.

    The loss is computed twice more from the same outputs: for the batch, and for a batch in which all other samples
    equal the first. A mean over samples gives the first sample's outputs the same gradient both times, and the model's
    input has the same first row. To find a selection of samples (top-k, quantile, hard negatives), the outputs of all
    samples but one are moved far up, far down, or to that sample's: with a selection the sample's gradient changes.

    Args:
        record: the calls that have computed the loss, after ``finish``.
        loss: what the loss function returned, or what the script passed to ``run.backward``.

    Returns:
        A phrase for messages: ``"targets of"`` if the gradient depends on targets or other data of other samples,
        ``"inputs of"`` if the model's input for a sample does, ``"model's outputs for"`` if the loss selects samples by
        the model's outputs. Empty if the gradient depends on none, or if that cannot be told, such as after a random
        draw.
    """
    # A loss that the model itself has computed does not come out of the calls, and its graph must stay unread.
    if not record.can_repeat(loss):
        return ""
    with suppress(Exception), own_generators():
        if _mixes_inputs(record):
            return "inputs of"
    with suppress(Exception), own_generators():
        _, whole = record.computed_again(loss) or (None, None)
        if whole is None or not whole.isfinite().all():
            return ""
        _, found = record.gradients(loss, record.batch_of(0), record.outputs)
        # A deviation of equal targets is 0, and may have made the second gradient one that is not finite.
        if not alike(whole[0], torch.cat(found, 1)[0]):
            return "targets of"
        if _selects(record, loss, whole):
            return "model's outputs for"
    return ""


def _mixes_inputs(record: LossCalls) -> bool:
    """Return whether the model's input for the first sample is computed from several samples of the batch."""
    leaves = [(key, leaf) for key, leaf in record.batch_of(None).items() if leaf.is_floating_point()]
    # A view: the script may have written into the batch in place.
    views = {key: leaf.requires_grad_().view_as(leaf) for key, leaf in leaves}
    values = record.batch_of(None) | views
    record.replay(values, record.leading_to([given for given, _ in record.forwards])[::-1])
    for given, _ in record.forwards:
        new = values.get(id(given))
        if new is None or not new.requires_grad or not record.has_rows(given) or id(given) in record.turned:
            continue
        first = new[0].flatten()
        # Other weights for each element: a plain sum may not depend on what its elements depend on.
        picked = first @ torch.linspace(1, 2, len(first), dtype=first.dtype, device=first.device)
        found = torch.autograd.grad(picked, [leaf for _, leaf in leaves], retain_graph=True, allow_unused=True)
        rows = [each.reshape(record.samples, -1).ne(0).any(1) for each in found if each is not None]
        if rows and int(torch.stack(rows).any(0).sum()) > 1:
            return True
    return False


def _selects(record: LossCalls, loss: Any, whole: Tensor) -> bool:
    """Return whether a sample's gradient changes where other samples' outputs move.

    Examines the samples with the largest and the smallest gradient: a selection leaves out the latter sample.

    Args:
        record: the calls that have computed the loss.
        loss: what the loss function returned, or what ``run.backward`` was given.
        whole: gradient of the outputs, a row a sample.
    """
    sizes = whole.abs().sum(1)
    for row in {int(sizes.argmax()), int(sizes.argmin())}:
        for distance in (0.0, _FAR, -_FAR):
            batch = record.batch_of(None if distance else row)
            with suppress(Exception):
                _, found = record.gradients(loss, batch, _moved(record.outputs, row, distance))
                other = torch.cat(found, 1)[row]
                if other.isfinite().all() and not alike(whole[row], other):
                    return True
    return False


def _moved(outputs: dict[int, Tensor], row: int, distance: float) -> dict[int, Tensor]:
    """Return the outputs with those of all samples but ``row`` moved by ``distance``; 0: equal to that sample's."""
    found = {}
    for key, output in outputs.items():
        own = output.detach()[row : row + 1]
        moved = output.detach() + distance if distance else own.expand_as(output).clone()
        moved[row] = own[0]
        found[key] = moved
    return found
