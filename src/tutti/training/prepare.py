"""``tutti.prepare``: from a plain model, optimizer, data set and loss to a run on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti import strategies
from tutti.comm.communicator import Communicators
from tutti.data.adapt import adapt
from tutti.data.contract import BatchContract
from tutti.data.feed import Feed, placer
from tutti.errors import UsageError
from tutti.nn.config import Ghost as GhostConfig
from tutti.nn.config import check_batch_norm
from tutti.nn.ghost import convert
from tutti.optim.config import check_optimizer
from tutti.optim.factory import from_config, from_instance
from tutti.optim.scaling import check_rule, scaled
from tutti.strategies import Choice
from tutti.training.gate import gate
from tutti.training.run import Run
from tutti.types import LossFn, OptimizerFactory, Setting
from tutti.world import context
from tutti.world.grid import Grid

_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def prepare(
    model: nn.Module,
    optimizer: Optimizer | str,
    dataset: Any,
    loss_fn: LossFn | None = None,
    *,
    strategy: str = "mirrored",
    workers: int | None = None,
    batch_size: int = 128,
    micro_batch: int | None = None,
    precision: str | None = None,
    channels_last: bool = False,
    lr_scale: str = "none",
    batch_norm: str = "worker",
    clip: float | None = None,
    reproducible: bool = False,
    seed: int = 0,
    max_nonfinite: int = 10,
) -> Run:
    """Train ``model`` on every rank of the job as if on one device. Collective; initialises the world if needed.

    Rank 0's initial state becomes everybody's. ``optimizer.step()`` is gated from now on: in an own loop it acts once
    a global batch.

    Args:
        model: a plain model, which never mentions ranks.
        optimizer: of its parameters, or ``name:key=value``.
        dataset: tensors, a ``TensorDataset``, any map-style dataset, or a ``tutti.data.Source``.
        loss_fn: ``loss_fn(model, batch)`` → mean over samples, ``(sum, count)`` or ``(sum, count, metric_sums)``;
            may be left out in an own loop.
        strategy: ``name:key=value``.
        workers: logical replicas N; default: the data ranks.
        batch_size: samples of the *global* batch.
        micro_batch: largest number of samples in one forward pass.
        precision: fp32, bf16 (autocast) or fp64; default: as the model is, without autocast.
        channels_last: memory layout of 4-dimensional inputs and weights.
        lr_scale: rule for the learning rate at this batch, such as ``linear:base_batch=256``; for an optimizer given
            as text.
        batch_norm: ``worker`` for the model's own, over a worker's micro-batch; ``ghost:size=32`` over so many samples.
        clip: largest gradient norm.
        reproducible: bit-identical weights on any number of devices; sets one CPU thread.
        seed: of the order of samples and all random draws.
        max_nonfinite: steps in a row that may be skipped.

    Raises:
        UsageError, DataError: what was asked for does not fit together.
        MismatchError: ranks brought different models or settings.
    """
    world = context.init()
    identity = world.identity
    choice = strategies.check(strategy, identity.size, workers=workers, reproducible=reproducible)
    grid = Grid(**choice.shape(identity.size), rank=identity.rank)
    source = adapt(dataset)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model can be trained", remedy="leave some with requires_grad")
    contract = BatchContract(len(source), batch_size, workers or grid.data_ranks, grid.data_ranks, micro_batch)
    if reproducible:
        torch.set_num_threads(1)
    if loss_fn is None and precision == "bf16":
        raise UsageError(
            "precision=bf16 casts inside loss_fn, and there is none",
            remedy="give a loss_fn, or wrap your own forward in torch.autocast",
        )
    if isinstance(optimizer, Optimizer):
        _belongs(optimizer, model)
    make_optimizer = _factory(optimizer, lr_scale, batch_size)
    comms = Communicators(world, grid)
    comms.world.agree(
        [
            *_settings(choice, contract, precision, clip, reproducible, seed),
            f"max_nonfinite {max_nonfinite}, batch norm {batch_norm}",
            *_describe(optimizer, lr_scale),
        ],
        "the configuration",
        "call tutti.prepare with the same arguments on every rank",
    )
    setting = Setting(grid, comms, contract.workers, contract.mine(grid.data_rank), reproducible, clip)
    norm = check_batch_norm(batch_norm)
    if isinstance(norm, GhostConfig):
        model = convert(model, norm.size)
    dtype = _precise(model, precision, channels_last)
    layout, exchange = choice.make(setting)
    replica = layout.build(model)
    sink = exchange.attach(replica, make_optimizer)
    feed = Feed(source, contract, grid.data_rank, seed, placer(world.device, dtype, channels_last))
    loss = autocast(loss_fn, world.device.type) if loss_fn is not None and precision == "bf16" else loss_fn
    run = Run(replica, exchange, sink, feed, loss, setting, max_nonfinite)
    if isinstance(optimizer, Optimizer):
        gate(optimizer, run, choice)
    return run


def autocast(loss_fn: LossFn, device: str) -> LossFn:
    """The loss function with the model's forward in bfloat16 where that is safe; weights stay as they are."""

    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return loss_fn(model, batch)

    return cast


def _factory(optimizer: Optimizer | str, lr_scale: str, batch_size: int) -> OptimizerFactory:
    rule = check_rule(lr_scale)
    if isinstance(optimizer, Optimizer):
        if lr_scale != "none":
            raise UsageError(
                "lr_scale is for an optimizer given as text",
                why="a scheduler that you made of yours would put its own rates back",
                remedy="make it with the scaled rate: see tutti.laws.learning_rate",
            )
        return from_instance(optimizer)
    return from_config(scaled(check_optimizer(optimizer), rule, batch_size))


def _describe(optimizer: Optimizer | str, lr_scale: str) -> list[str]:
    """The optimizer's class and every group's settings, a line each."""
    if not isinstance(optimizer, Optimizer):
        return [f"optimizer {optimizer}, lr_scale {lr_scale}"]
    lines = [f"optimizer {type(optimizer).__name__}"]
    for number, group in enumerate(optimizer.param_groups):
        said = {key: value for key, value in sorted(group.items()) if key != "params"}
        lines.append(f"optimizer group {number} of {len(group['params'])} parameters: {said}")
    return lines


def _belongs(optimizer: Optimizer, model: nn.Module) -> None:
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "the optimizer has parameters that the model does not have",
            remedy="make it of model.parameters(), and everything that is trained a part of the model",
        )


def _precise(model: nn.Module, precision: str | None, channels_last: bool) -> torch.dtype:
    """Put the model into the precision asked for; the dtype that floating inputs need."""
    if precision is not None and precision not in _DTYPES:
        raise UsageError(f"unknown precision '{precision}'", remedy="choices: fp32, bf16, fp64")
    if precision is not None:
        model.to(_DTYPES[precision])
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _settings(
    choice: Choice, contract: BatchContract, precision: str | None, clip: float | None, reproducible: bool, seed: int
) -> list[str]:
    return [
        f"strategy {choice.name} {choice.layout} {choice.exchange}",
        f"{contract.workers} workers",
        f"a global batch of {contract.batch}, micro-batches of {contract.micro}",
        f"{contract.dataset} training samples",
        f"precision {precision}, clip {clip}, reproducible {reproducible}, seed {seed}",
    ]
