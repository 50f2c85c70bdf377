"""Find losses that mix a batch's samples by targets, by the model's inputs, or by a selection such as top-k."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tutti.data.global_generators import own_generators
from tutti.parallel.ddp.loss_output import read_loss
from tutti.train.script_checks.loss_calls import LossCalls, alike

MOST_ELEMENTS = 1_000_000
"""Largest number of elements of the model's outputs; they are computed with twice more."""
_FAR = 30.0
"""Distance by which outputs move, more than usual losses of a batch differ by (a guess)."""


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
    outputs = list(record.outputs.values())
    # A loss that the model itself has computed does not come out of the calls, and its graph must stay unread.
    if not outputs or not record.computes(loss) or sum(output.numel() for output in outputs) > MOST_ELEMENTS:
        return ""
    with suppress(Exception), own_generators():
        if _mixes_inputs(record):
            return "inputs of"
    with suppress(Exception), own_generators():
        value, found = record.gradients(loss, record.batch_of(None), record.outputs)
        whole, told = torch.cat(found, 1), read_loss(loss, record.micro_batch)[0]
        if not torch.allclose(value, told.detach(), rtol=1e-6, equal_nan=False) or not whole.isfinite().all():
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

    Examines the samples with the largest and the smallest gradient: a selection has left out the latter.

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
