"""Find Python numbers that a loss does not depend on, such as the largest score that a script subtracts by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tutti.data.global_generators import own_generators
from tutti.train.script_checks.loss_calls import LossCalls, alike

_MOVES = (1.0, -1.0, 0.37, -0.61)
"""By how much a number is moved, as multiples of its size, or of 1 where it is smaller (a guess)."""
_MOST = 16
"""Largest number of numbers that are moved."""


def lines_of_cancelling(record: LossCalls, loss: Any) -> frozenset[str]:
    """Return the lines of the script whose Python numbers cancel in a loss: other numbers give the same gradients.

    An example is the log-sum-exp by hand, ``m + (x - m).exp().sum(1).log()`` with ``m = x.max().item()``: ``m`` is
    another number in each micro-batch, and the loss is the same for any. The loss is computed again from the recorded
    calls with each number moved up and down. Its derivative by the number would not tell: that of a variance by the
    mean that it subtracts is 0. A number does not count as cancelling where the results of the calls that take it have
    no part in the loss either, or next to none, as those of a term whose weight grows from 0 during the run.

    Args:
        record: the calls that have computed the loss, after ``finish``.
        loss: what the loss function returned, or what the script passed to ``run.backward``.

    Returns:
        The lines, as ``FILE:LINE``, that give such numbers to sums, differences, products and quotients, and no other
        number that was computed after a read of the samples' values.
    """
    numbers = record.numbers
    if not numbers or len(numbers) > _MOST or not record.can_repeat(loss):
        return frozenset()
    lines, kept = {line for each in numbers.values() for line in each.lines}, set(record.lines_of_others)
    with suppress(Exception), own_generators():
        if (again := record.computed_again(loss)) is None:
            return frozenset()
        value, whole = again
        for key, number in numbers.items():
            cancels = all(alike(whole, other) for other in _moved(record, loss, key, float(number.value)))
            if not cancels or not _has_part(record, loss, key, value, whole):
                kept |= number.lines
        return frozenset(lines - kept)
    return frozenset()


def _moved(record: LossCalls, loss: Any, key: int, number: float) -> Iterator[Tensor]:
    """Yield the gradient of the outputs for each other value of a number."""
    for move in _MOVES:
        moved = number + move * max(1.0, abs(number))
        yield torch.cat(record.gradients(loss, record.batch_of(None), record.outputs, {key: moved})[1], 1)


def _has_part(record: LossCalls, loss: Any, key: int, value: Tensor, whole: Tensor) -> bool:
    """Return whether each call that takes a number has a part in the loss: with another result of it the loss differs.

    Args:
        record, loss: as for ``lines_of_cancelling``.
        key: the number's id.
        value, whole: the loss (), and the gradient of the outputs.
    """
    others = [record.gradients(loss, record.batch_of(None), record.outputs, moved=c) for c in record.calls_with(key)]
    return all(not (alike(whole, torch.cat(found, 1)) and alike(value, other)) for other, found in others)
