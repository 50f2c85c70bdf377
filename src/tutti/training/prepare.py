"""``tutti.prepare``: from a plain model, optimizer, data set and loss to a run on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tutti import strategies
from tutti.comm.communicator import Communicators, everybody
from tutti.data.adapt import adapt_training
from tutti.data.batches import placer
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed
from tutti.data.loader import Prefetch
from tutti.data.reading import make_reader
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.data.transfer import make_transfer
from tutti.errors import UsageError
from tutti.laws.averaging import Averaging
from tutti.laws.growth import Growth
from tutti.measure.memory import bytes_of, free
from tutti.nn import ghost, norms, sync
from tutti.nn.config import Ghost as GhostConfig
from tutti.nn.config import Sync as SyncConfig
from tutti.nn.config import check_batch_norm
from tutti.nn.spill import as_built
from tutti.optim.adascale import AdaScale
from tutti.optim.loss_scale import LossScale, chosen
from tutti.optim.noise import by_worker, check_noise
from tutti.optim.scaling import Adaptive, check_rule
from tutti.strategies import Choice
from tutti.training.gate import gate
from tutti.training.growing import growing
from tutti.training.initial import begin_with
from tutti.training.losses import Losses
from tutti.training.optimizers import check_fits, describe, factory, same_kernels
from tutti.training.run import Run
from tutti.training.slow import Slow, slowed
from tutti.types import LossFn, Setting
from tutti.world import context
from tutti.world.allocator import free_at_once
from tutti.world.grid import Grid

_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64}
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    model: nn.Module,
    optimizer: Optimizer | str,
    dataset: Any,
    loss_fn: LossFn | None = None,
    *,
    strategy: str = "mirrored",
    workers: int | None = None,
    batch_size: int = 128,
    batch_growth: Growth | str | None = None,
    micro_batch: int | None = None,
    precision: str | None = None,
    loss_scale: str | None = None,
    channels_last: bool = False,
    lr_scale: str = "none",
    batch_norm: str = "worker",
    identical_batches: bool = False,
    clip: float | None = None,
    gradient_noise: str = "none",
    ema: Averaging | str | float | None = None,
    init_from: str | Path | None = None,
    reproducible: bool = False,
    activation_checkpointing: str | Sequence[str | type[nn.Module]] = "none",
    compile: str | bool = "none",
    seed: int = 0,
    max_nonfinite: int = 10,
    data_workers: int = 0,
    slow: Sequence[Slow] | str = (),
) -> Run:
    """Train ``model`` on every rank of the job as if on one device. Collective; initialises the world if needed.

    Rank 0's initial state becomes everybody's. ``optimizer.step()`` is gated from now on: in an own loop it acts once
    a global batch.

    Args:
        model: a plain model, which never mentions ranks.
        optimizer: of its parameters, or ``name:key=value``.
        dataset: tensors, a ``TensorDataset``, any map-style dataset, a ``tutti.data.Source``, or an iterable (also
            inside ``tutti.data.Sharded``), or a function that returns one.
        loss_fn: ``loss_fn(model, batch)`` → mean over samples, ``(sum, count)`` or ``(sum, count, metric_sums)``; one
            loss a sample in place of mean or sum. May be left out in an own loop.
        strategy: ``name:key=value``.
        workers: logical replicas N; default: the data ranks.
        batch_size: samples of the *global* batch.
        batch_growth: ``milestones=30ep+60ep,factor=5``: there the batch is multiplied by the factor, up to a tenth of
            the data set or ``largest=N``, and from then on the rate divided by it, within the update alone.
        micro_batch: largest number of samples in one forward pass.
        precision: fp32, bf16 or fp16 (autocast) or fp64; default: as the model is, without autocast.
        loss_scale: a number or ``dynamic:key=value``; default: dynamic for fp16, else none.
        channels_last: memory layout of 4-dimensional inputs and weights.
        lr_scale: rule for the learning rate at this batch, such as ``linear:base_batch=256``, or ``adascale``; for an
            optimizer given as text.
        batch_norm: ``worker`` for the model's own, over a worker's micro-batch; ``ghost:size=32`` over so many
            samples; ``sync`` over the whole global batch.
        identical_batches: every worker draws worker 0's samples, as a loader does that is not sharded and has one seed
            on all ranks: to show what that well-known mistake costs.
        clip: largest gradient norm.
        gradient_noise: ``multiplicative:base_batch=512`` makes the gradient as noisy as that of 512 samples; the
            loss must be one number a sample.
        ema: keep an average of the weights with this decay an update, ``0.999`` or ``"0.999:warmup"``;
            ``run.evaluate`` then uses it.
        init_from: begin with the weights and buffers of a run directory (its newest checkpoint), a checkpoint
            directory or a ``.safetensors`` file, on every rank.
        reproducible: bit-identical weights on any number of devices; sets one CPU thread.
        activation_checkpointing: ``blocks``, or names and classes of modules, whose activations are computed again
            in backward; ``selective``: but for expensive ones; ``blocks:every=2``: of every other block.
        compile: mode of ``torch.compile``; True for ``default``.
        seed: of the order of samples and all random draws.
        max_nonfinite: steps in a row that may be skipped.
        data_workers: processes of each rank that fetch samples ahead; the result does not depend on them.
        slow: ranks or workers that take longer than they need, ``rank=1,factor=3`` or ``worker=2,ms=20``.

    Raises:
        UsageError, DataError: what was asked for does not fit together.
        CheckpointError: ``init_from`` is damaged, or of another model.
        MismatchError: ranks brought different models or settings.
    """
    averaging = ema if ema is None or isinstance(ema, Averaging) else Averaging.parse(str(ema), "ema")
    world = context.init()
    identity = world.identity
    adaptive = isinstance(check_rule(lr_scale), Adaptive)
    compiled = compile if isinstance(compile, str) else "default" if compile else "none"
    asked = {"reproducible": reproducible, "adaptive": adaptive, "averaging": averaging is not None}
    asked |= {"compiled": compiled != "none", "cuda": world.device.type == "cuda"}
    choice = strategies.check(strategy, identity.size, workers=workers, **asked)
    grid = Grid(**choice.shape(identity.size), rank=identity.rank)
    data = _data(dataset, choice, data_workers, reproducible, identical_batches)
    _check_trainable(model, optimizer)
    contract = _contract(choice, grid.data_ranks, _count(data), batch_size, workers, micro_batch, identical_batches)
    epochs = growing(contract, batch_growth, model, batch_norm, lr_scale, gradient_noise)
    if reproducible:
        torch.set_num_threads(1)
    scale, noise = _scale(loss_scale, precision, loss_fn), check_noise(gradient_noise, batch_size, adaptive)
    together = _together(batch_norm, choice, epochs, reproducible, by_worker(adaptive, noise))
    # Before any group is made: ranks that believe in different grids would wait for each other in different ones.
    told = [
        f"max_nonfinite {max_nonfinite}, batch norm {batch_norm}, loss_scale {loss_scale}, gradient noise {noise}",
        f"compile {compiled}, activation_checkpointing {_named(activation_checkpointing)}",
        f"ema {averaging}, {'given' if init_from is not None else 'own'} initial weights",
    ]
    told = [*_settings(choice, epochs, precision, clip, reproducible, seed), *told, *describe(optimizer, lr_scale)]
    everybody(world).agree(told, "the configuration", "call tutti.prepare with the same arguments on every rank")
    comms = Communicators(world, grid)
    setting = Setting(
        *(grid, comms, contract.workers, contract.mine(grid.data_rank), reproducible, clip),
        *(averaging, activation_checkpointing, compiled, adaptive),
        rows=choice.exchange.takes_rows(choice.shape(identity.size)),
    )
    model, dtype = _remade(model, batch_norm, setting, precision, channels_last)
    place, loss = placer(world.device, dtype, channels_last), _cast(loss_fn, world.device.type, precision)
    setting = replace(setting, in_step=choice.row.in_step, trial=_trial(data, contract, place, loss))
    layout, exchange = choice.counted(epochs.steps).make(_as_one(setting, together))
    replica = slowed(layout.build(model), slow, world, contract.workers)
    sink = exchange.attach(replica, factory(optimizer, lr_scale, batch_size))
    same_kernels(comms.world, optimizer, exchange.optimizers)
    prefetch = Prefetch(data_workers, identity.rank, world.timeout)
    feed = _feed(data, epochs, grid.data_rank, seed, comms, place, prefetch, together)
    average = strategies.average(replica, exchange, setting)
    run = Run(replica, exchange, sink, feed, loss, setting, max_nonfinite, average, scale)
    run.noise, run.adascale = noise, AdaScale(batch_size, contract.workers) if adaptive else None
    if isinstance(optimizer, Optimizer):
        gate(optimizer, run, choice)
    if init_from is not None:
        begin_with(run, init_from)
    run.losses = _losses(run, choice, data)
    return run


def _feed(
    data: Source | Stream, epochs: Epochs, rank: int, seed: int, comms: Communicators,
    place: Callable[[Any], Any], prefetch: Prefetch, together: bool,
) -> Feed:  # fmt: skip
    """What gives this data rank its part of every global batch, on the device."""
    reader = make_reader(data, epochs, rank, seed, comms, prefetch)
    return Feed(reader, epochs, rank, seed, place, prefetch, together, make_transfer(comms.world.device, data))


def _losses(run: Run, choice: Choice, data: Source | Stream) -> Losses | None:
    """What tells of lost ranks, on rank 0 where the others go on from here without one that is killed. Collective."""
    # Streams are read in step.
    alone = choice.row.outlives and not isinstance(data, Stream) and run.setting.comms.outlive()
    return Losses(run) if alone and run.setting.grid.rank == 0 else None


def _data(dataset: Any, choice: Choice, data_workers: int, reproducible: bool, identical: bool) -> Source | Stream:
    """What the data set is read as. Raises UsageError for what does not go with it."""
    data = adapt_training(dataset)
    if data_workers < 0:
        raise UsageError(f"data_workers is {data_workers}", remedy="give 0 or more")
    if isinstance(data, Stream) and not choice.row.in_step:
        raise UsageError(
            "steps=all does not go with a stream",
            why="ranks read a stream in step, and here each makes as many steps as it can",
            remedy="leave it out, or take a data set with __len__ and __getitem__",
        )
    if identical and isinstance(data, Stream):
        raise UsageError(
            "identical_batches needs a data set with __len__ and __getitem__", remedy="leave one of them out"
        )
    if reproducible and isinstance(data, Stream) and data.sharded:
        raise UsageError(
            "reproducible does not go with a data set that shards itself",
            why="what a global batch holds depends on the number of devices",
            remedy="leave out one of the two",
        )
    return data


def _check_trainable(model: nn.Module, optimizer: Optimizer | str) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model can be trained", remedy="leave some with requires_grad")
    check_fits(optimizer, model)


def _contract(
    choice: Choice, ranks: int, count: int | None, batch: int, workers: int | None, micro: int | None, identical: bool
) -> BatchContract:
    """Who gets which samples; how large micro-batches are may follow from the strategy."""
    number = workers or ranks
    return BatchContract(count, batch, number, ranks, strategies.micro_batch(choice, micro, batch, number), identical)


def _count(data: Source | Stream) -> int | None:
    """Samples in an epoch; None where only the end of a stream will tell."""
    return data.samples if isinstance(data, Stream) else len(data)


def _scale(loss_scale: str | None, precision: str | None, loss_fn: LossFn | None) -> LossScale | None:
    """The run's loss scale. Raises UsageError where it, or the precision, would do nothing."""
    if loss_fn is None and precision in _CAST:
        raise UsageError(
            f"precision={precision} casts inside loss_fn, and there is none",
            remedy="give a loss_fn, or wrap your own forward in torch.autocast"
            + " and set loss_scale='dynamic'" * (precision == "fp16"),
        )
    return chosen(loss_scale, precision)


def _cast(loss_fn: LossFn | None, device: str, precision: str | None) -> LossFn | None:
    """The loss function with the model's forward in 16 bits where that is safe; weights stay as they are."""
    dtype = _CAST.get(precision or "")
    if loss_fn is None or dtype is None:
        return loss_fn

    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast(device, dtype):
            return loss_fn(model, batch)

    return cast


def _remade(
    model: nn.Module, batch_norm: str, setting: Setting, precision: str | None, channels_last: bool
) -> tuple[nn.Module, torch.dtype]:
    """The model with the batch norms and in the precision asked for; the dtype that floating inputs need."""
    if setting.rows and setting.comms.world.device.type == "cpu" and _is_large(model):
        free_at_once()
    with as_built(model):
        model = _normalised(model, batch_norm, setting)
        return model, _precise(model, precision, channels_last)


def _is_large(model: nn.Module) -> bool:
    """Whether memory kept between gathered layers, some three times what is in use, might be more than there is.

    With Adam a sixteenth of what is free becomes a quarter, which three times leave little of (a guess).
    """
    return bytes_of([*model.parameters(), *model.buffers()]) > free(context.local_size()) // 16


def _normalised(model: nn.Module, batch_norm: str, setting: Setting) -> nn.Module:
    """The model with the batch norms asked for. Collective."""
    norm, model = check_batch_norm(batch_norm), norms.restore(model)
    if isinstance(norm, SyncConfig):
        line = setting.comms.apart("batch norm")
        return sync.convert(model, line, setting.workers, setting.grid.data_ranks)
    return ghost.convert(model, norm.size) if isinstance(norm, GhostConfig) else model


def _together(batch_norm: str, choice: Choice, epochs: Epochs, reproducible: bool, needs: str | None) -> bool:
    """Whether a device's workers compute as one, for batch norm over the global batch. Raises UsageError."""
    if not isinstance(check_batch_norm(batch_norm), SyncConfig):
        return False
    strategies.check_sync(choice, context.current().identity.size, reproducible, needs)
    for phase in epochs.phases:
        phase.contract.check_whole()
    return True


def _as_one(setting: Setting, together: bool) -> Setting:
    """What layout and exchange are told where workers compute as one: it has a part on every data rank."""
    if not together:
        return setting
    alone = setting.workers == setting.grid.data_ranks
    return replace(setting, workers=1, mine=setting.mine[:1], draws=alone)


def _trial(
    data: Source | Stream, contract: BatchContract, place: Callable[[Any], Any], loss: LossFn | None
) -> Callable[..., Any] | None:
    """What calls the loss function on a model with the data set's first samples: a micro-batch, or ``most`` of it."""
    if loss is None or isinstance(data, Stream):
        return None
    first = np.arange(len(contract.first_cell(contract.samples(0))))
    return lambda model, most=None: loss(model, place(data.fetch(first[:most], None)))


def _precise(model: nn.Module, precision: str | None, channels_last: bool) -> torch.dtype:
    """Put the model into the precision asked for; the dtype that floating inputs need."""
    if precision is not None and precision not in _DTYPES:
        raise UsageError(f"unknown precision '{precision}'", remedy=f"choices: {', '.join(_DTYPES)}")
    if precision is not None:
        model.to(_DTYPES[precision])
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _settings(
    choice: Choice, epochs: Epochs, precision: str | None, clip: float | None, reproducible: bool, seed: int
) -> list[str]:
    contract = epochs.first
    return [
        f"strategy {choice.name} {choice.layout} {choice.exchange}",
        f"{contract.workers} workers",
        f"a global batch of {contract.batch}, micro-batches of {contract.micro}, identical {contract.identical}",
        f"batch growth {epochs.growth}",
        f"{contract.dataset} training samples",
        f"precision {precision}, clip {clip}, reproducible {reproducible}, seed {seed}",
    ]


def _named(units: str | Sequence[str | type[nn.Module]]) -> str | list[str]:
    """What is computed again, as every rank would write it."""
    return units if isinstance(units, str) else [u if isinstance(u, str) else u.__qualname__ for u in units]
