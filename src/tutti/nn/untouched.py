"""Run a model's forward for a trial, and leave the model and the RNG streams as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tutti.device import forked_generators
from tutti.nn.swap import buffers, swapped
from tutti.nn.untraced import Untraced
from tutti.nn.written_tensors import parameters_unwritten


@contextmanager
def untouched(plain: nn.Module, device: torch.device) -> Iterator[None]:
    """Return a context for a trial forward of the model on ``device``, which undoes the forward's side effects.

    On entry the model moves to ``device``; within the context gradients are disabled. The model's device, its buffers,
    the attributes that its modules write and the RNG states are restored on exit, also after an error, which
    propagates. A forward that would write a parameter in place raises ParameterWriteError before the write.

    Args:
        plain: the whole model.
        device: device of the trial.
    """
    here = next((p.device for p in plain.parameters()), torch.device("cpu"))
    before = Untraced(plain)
    try:
        kept = {slot.name: slot.get().clone() for slot in buffers([plain.to(device)], persistent=False)}
        with forked_generators(device), torch.no_grad(), swapped([plain], kept), parameters_unwritten([plain]):
            yield
    finally:
        before.undo()
        plain.to(here)
