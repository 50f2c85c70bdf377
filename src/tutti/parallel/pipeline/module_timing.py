"""Measure the time of each module's forward, once before the model is cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tutti.comm.communicator import Communicator
from tutti.device import synchronize
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched

_RUNS = 3


def module_seconds(plain: nn.Module, trial: Callable[[Any], Any] | None, world: Communicator) -> dict[str, float]:
    """Measure the seconds of each module's forward on rank 0, and broadcast them over the ranks of ``world``.

    Collective over these ranks: one broadcast. Rank 0 runs the loss function three times on a real micro-batch; all
    other ranks wait for the result. The model and the RNG streams stay as they were.

    Args:
        plain: the whole model.
        trial: calls the loss function on the model it is given, with one micro-batch; None where no micro-batch is at
            hand.
        world: communicator over all ranks.

    Returns:
        For each module, by its name in the model, the least seconds of the three runs, its submodules' time included.
        Equal on all ranks. Empty where the forward cannot be measured: without ``trial``, where it fails (the model may
        not fit into memory), or where the model has synchronized batch norm.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
        MismatchError: ranks of ``world`` wait in different calls.
    """
    found: dict[str, float] = {}
    if world.rank == 0 and trial is not None and peers_of(plain) is None:
        # The first step reports any error. A model too large for one device is cut without measured seconds.
        with suppress(Exception), untouched(plain, world.device):
            found = _measure(plain, trial, world.device)
    seconds: dict[str, float] = world.broadcast_json(found, 0, "seconds of each module")
    return seconds


def _measure(plain: nn.Module, trial: Callable[[Any], Any], device: torch.device) -> dict[str, float]:
    now: dict[str, float] = {}
    least: dict[str, float] = {}

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: now.__setitem__(name, now.get(name, 0.0) - clock())

    def end(name: str) -> Callable[..., None]:
        return lambda *_: now.__setitem__(name, now[name] + clock())

    handles = []
    for name, module in plain.named_modules():
        handles += [module.register_forward_pre_hook(begin(name)), module.register_forward_hook(end(name))]
    try:
        for _ in range(_RUNS):
            now.clear()
            trial(plain)
            least = {name: min(took, least.get(name, took)) for name, took in now.items()}
    finally:
        for handle in handles:
            handle.remove()
    return least
