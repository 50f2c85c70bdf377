"""Which combinations run: every other is refused before any process starts, with the nearest one that does."""

from __future__ import annotations

import importlib.util

from tutti.errors import UsageError
from tutti.exchanges.config import AllReduceConfig
from tutti.strategies.choice import Choice, parse
from tutti.strategies.table import TABLE


def check(
    text: str,
    devices: int,
    *,
    workers: int | None = None,
    reproducible: bool = False,
    own_loop: bool = False,
    adaptive: bool = False,
    averaging: bool = False,
    compiled: bool = False,
    cuda: bool = False,
) -> Choice:
    """The strategy, if this many devices and workers can run it.

    ``adaptive``: with ``--lr-scale adascale``; ``averaging``: with ``--ema``; ``compiled``: with ``--compile``;
    ``cuda``: devices are GPUs.

    Raises:
        UsageError: with the nearest combination that can.
    """
    choice = parse(text)
    row = choice.row
    _check_package(choice)
    if row.most_devices is not None and devices > row.most_devices:
        raise UsageError(
            f"strategy '{choice.name}' runs on {row.most_devices} device, not {devices}",
            remedy="take --strategy mirrored, or --devices 1",
        )
    for config in (choice.layout, choice.exchange):
        config.check(choice.shape(devices), cuda, compiled)
    ranks = choice.data_ranks(devices)
    if workers is not None and workers < ranks:
        raise UsageError(
            f"{workers} workers cannot be spread over {ranks} data ranks",
            why="a worker's share is never split over devices",
            remedy=f"take --workers {ranks} or more, or --devices {workers * (devices // ranks)} or fewer",
        )
    if reproducible and not row.reproducible:
        raise UsageError(
            f"strategy '{choice.name}' is not reproducible on any number of devices",
            remedy="leave out --reproducible, or take --strategy mirrored",
        )
    if averaging and not row.averages:
        raise UsageError(
            f"--ema does not go with these options of strategy '{choice.name}'",
            why="no two devices see the same parameters after an update",
            remedy="leave out --ema, or let all workers be waited for (mode=sync, no backup)",
        )
    if adaptive:
        _check_adaptive(choice, workers or ranks)
    if reproducible or adaptive:
        _check_tree(choice, "--reproducible" if reproducible else "--lr-scale adascale")
    if own_loop and not row.own_loop:
        able = ", ".join(name for name, other in TABLE.items() if other.own_loop)
        raise UsageError(f"strategy '{choice.name}' needs run.step(batch)", remedy=f"own loops work with: {able}")
    return choice


def _check_package(choice: Choice) -> None:
    """Raise UsageError where the strategy needs a package that is not there."""
    if choice.row.needs is None:
        return
    module, package, extra = choice.row.needs
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"strategy '{choice.name}' needs the package {package}",
            remedy=f"run pip install 'tutti[{extra}]', or take --strategy mirrored",
        )


def _check_adaptive(choice: Choice, workers: int) -> None:
    """Raise UsageError where a step's gain cannot be known from the gradients of all workers."""
    alone = "its workers make updates of their own, and the gain belongs to one of all workers"
    summed = "the gain compares workers' gradients, which are never whole on one device"
    if not (choice.row.workers_together and choice.row.worker_gradients):
        raise UsageError(
            f"--lr-scale adascale does not go with strategy '{choice.name}'",
            why=summed if choice.row.workers_together else alone,
            remedy="take --strategy mirrored, or another --lr-scale",
        )
    if workers < 2:
        raise UsageError(
            "--lr-scale adascale needs at least 2 workers",
            why="the gain compares workers' gradients, and one alone says nothing about their variance",
            remedy="take --workers 2 or more",
        )


def _check_tree(choice: Choice, option: str) -> None:
    """Raise UsageError where gradients are not summed worker by worker, as ``option`` needs."""
    if not isinstance(choice.exchange, AllReduceConfig):
        return
    if choice.exchange.wire != "fp32":
        raise UsageError(
            f"{option} does not go with a compressed wire",
            why="compression acts once a device, so the result would depend on how many there are",
            remedy="leave out one of the two",
        )
    if choice.exchange.algorithm == "shared_memory":
        raise UsageError(
            f"{option} does not go with algorithm=shared_memory",
            why="its sums go through one fixed tree over messages",
            remedy="leave out the algorithm",
        )


def check_sync(choice: Choice, devices: int, reproducible: bool, by_worker: str | None = None) -> None:
    """Raise UsageError where batch norm over the whole global batch does not go with the strategy.

    ``by_worker``: an option that needs each worker computed by itself.
    """
    if by_worker is not None:
        raise UsageError(
            f"--batch-norm sync does not go with {by_worker}",
            why="a device's workers compute as one, and it needs each by itself",
            remedy="leave out one of the two, or take --batch-norm ghost:size=32",
        )
    if not choice.row.one_model:
        raise UsageError(
            f"--batch-norm sync does not go with strategy '{choice.name}'",
            why="its workers hold different weights, so that their activations have no statistics in common",
            remedy="take --strategy mirrored, or --batch-norm ghost:size=32",
        )
    if reproducible and choice.data_ranks(devices) > 1:
        raise UsageError(
            "--batch-norm sync is not reproducible on several devices",
            why="each sums over its own samples first, so that the last bits depend on how many there are",
            remedy="leave out --reproducible, or take --devices 1 or --batch-norm ghost:size=32",
        )
