"""``tutti.prepare``: from a plain model, optimizer, data set and loss to a run on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tutti import parallel
from tutti.comm.communicator import Communicators, everybody
from tutti.comm.grid import Grid
from tutti.comm.partition import sharers
from tutti.config.averaging import Averaging
from tutti.config.gradient_noise import Multiplicative, check_noise, per_worker_option
from tutti.config.growth import BatchGrowth
from tutti.config.loss_scale_config import LossScaleConfig, choose_loss_scale
from tutti.config.lr_rule import NoRule, check_rule
from tutti.config.module_config import (
    BatchNormConfig,
    Blocks,
    Checkpointing,
    CompileChoice,
    check_batch_norm,
    check_checkpointing,
    check_compile,
)
from tutti.config.module_config import Ghost as GhostConfig
from tutti.config.module_config import Sync as SyncConfig
from tutti.config.optimizer_config import OptimizerChoice
from tutti.config.slowness import Slowness
from tutti.data.adapt import adapt_training
from tutti.data.batches import placer, slice_batch
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed
from tutti.data.loader import Prefetch
from tutti.data.order import SampleOrder
from tutti.data.reading import make_reader
from tutti.data.sampling import Sampling, given_sampling
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.data.transfer import make_transfer
from tutti.device import is_accelerator
from tutti.errors import UsageError
from tutti.host_memory import free_memory
from tutti.launcher import context
from tutti.launcher.malloc_tuning import free_at_once
from tutti.nn import ghost, norms, sync
from tutti.nn.init_on_disk import as_built
from tutti.nn.overlapping import check_memory
from tutti.nn.sparse_layers import sparse_parameters
from tutti.optim.adascale import AdaScale
from tutti.optim.factory import check_fresh
from tutti.optim.loss_scale import LossScale
from tutti.optim.several import check_apart
from tutti.parallel import Choice
from tutti.train.accumulating_optimizer import accumulate_steps
from tutti.train.batch_size_schedule import batch_size_schedule
from tutti.train.callbacks import Callbacks
from tutti.train.hook_watch import HookWatch
from tutti.train.noise_probe import NoiseProbe
from tutti.train.optimizers import check_fits, check_takes_sparse, describe_optimizers, factory, imported_optimizer
from tutti.train.partial_reads import PartialReads
from tutti.train.prepared_before import check_earlier, note
from tutti.train.run import Run, RunSettings
from tutti.train.schedulers import Given, Schedulers
from tutti.train.slow_replica import slow_down
from tutti.train.state_loads import StateLoads
from tutti.train.warm_start import load_warm_start
from tutti.types import GradientSync, LossFn, RunContext
from tutti.workload.tensor_memory import bytes_of

Models: TypeAlias = "nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]"
Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer]"

_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64}
_BATCH = 128
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``tutti.prepare``, which documents them."""

    strategy: str = "mirrored"
    workers: int | None = None
    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    batch_growth: BatchGrowth | str | None = None
    micro_batch: int | None = None
    precision: str | None = None
    loss_scale: LossScaleConfig | str | None = None
    channels_last: bool = False
    lr_scale: NoRule | str = "none"
    batch_norm: BatchNormConfig | str = "worker"
    identical_batches: bool = False
    clip: float | None = None
    gradient_noise: Multiplicative | str | None = "none"
    noise_every: int | None = None
    ema: Averaging | str | float | None = None
    init_from: str | Path | None = None
    reproducible: bool = False
    activation_checkpointing: str | Checkpointing = "none"
    compile: CompileChoice | str | bool | None = "none"
    seed: int = 0
    max_nonfinite: int = 10
    data_workers: int | None = None
    slow: Sequence[Slowness] | str = ()
    scheduler: Given = None
    scheduler_every: str = "update"
    callbacks: Sequence[Any] = ()

    @cached_property
    def lr_rule(self) -> NoRule:
        """The learning-rate rule of ``lr_scale``. Raises UsageError."""
        return check_rule(self.lr_scale) if isinstance(self.lr_scale, str) else self.lr_scale

    @cached_property
    def batch_norm_options(self) -> BatchNormConfig:
        """The options of ``batch_norm``. Raises UsageError."""
        return check_batch_norm(self.batch_norm) if isinstance(self.batch_norm, str) else self.batch_norm

    @cached_property
    def compile_choice(self) -> CompileChoice | None:
        """Mode and options of ``compile``; None without it. Raises UsageError."""
        given = self.compile
        if given is None or isinstance(given, CompileChoice):
            return given
        return check_compile(given if isinstance(given, str) else "default" if given else "none", self.reproducible)

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """The options of ``activation_checkpointing``; None without it. Raises UsageError."""
        return check_checkpointing(self.activation_checkpointing)

    @cached_property
    def averaging(self) -> Averaging | None:
        """The options of the weights' average; None without ``ema``. Raises UsageError."""
        given = self.ema
        return given if given is None or isinstance(given, Averaging) else Averaging.parse(str(given), "ema")

    @cached_property
    def growth(self) -> BatchGrowth | None:
        """The options of ``batch_growth``; None without it. Raises UsageError."""
        text = self.batch_growth
        return BatchGrowth.parse(text, "batch_growth") if isinstance(text, str) else text


def prepare(
    model: Models,
    optimizer: Optimizers | str,
    dataset: Any,
    loss_fn: LossFn | None = None,
    *,
    strategy: str = "mirrored",
    workers: int | None = None,
    batch_size: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    shuffle: bool | None = None,
    drop_last: bool = False,
    batch_growth: BatchGrowth | str | None = None,
    micro_batch: int | None = None,
    precision: str | None = None,
    loss_scale: str | None = None,
    channels_last: bool = False,
    lr_scale: str = "none",
    batch_norm: str = "worker",
    identical_batches: bool = False,
    clip: float | None = None,
    gradient_noise: str = "none",
    noise_every: int | None = None,
    ema: Averaging | str | float | None = None,
    init_from: str | Path | None = None,
    reproducible: bool = False,
    activation_checkpointing: str | Sequence[str | type[nn.Module]] = "none",
    compile: str | bool = "none",
    seed: int = 0,
    max_nonfinite: int = 10,
    data_workers: int | None = None,
    slow: Sequence[Slowness] | str = (),
    scheduler: Given = None,
    scheduler_every: str = "update",
    callbacks: Sequence[Any] = (),
) -> Run:
    """Prepare ``model`` for training on every rank of the job as if on one device. Collective.

    Calls ``tutti.init`` if needed. Rank 0's initial parameters and buffers are broadcast. From now on
    ``optimizer.step()`` in a custom training loop acts once a global batch.

    Args:
        model: a plain model without any code for ranks; or several in a list or a dict, such as a generator and a
            discriminator, whose parameters are then named ``0.weight`` or by the dict's keys.
        optimizer: an optimizer of the model's parameters, several of disjoint parameters in a list,
            ``name:key=value``, or ``package.module:Class:lr=0.001,key=value``.
        dataset: tensors, a ``TensorDataset``, any map-style dataset, a ``tutti.data.Source``, or an iterable (also
            inside ``tutti.data.Sharded``), or a function that returns one; or a PyTorch ``DataLoader``, whose data set,
            batch size, sampler, ``collate_fn`` and number of processes are taken over.
        loss_fn: ``loss_fn(model, batch)`` → mean over samples, ``(sum, count)`` or ``(sum, count, metric_sums)``; one
            loss a sample in place of mean or sum. Optional for custom training loops.
        strategy: ``name:key=value``.
        workers: number of logical workers N; default: the number of data ranks.
        batch_size: samples of the *global* batch; default: that of the ``DataLoader``, or 128.
        collate: makes a batch of the list of one micro-batch's samples; default: as PyTorch's ``DataLoader``.
        shuffle: False for the data set's own order in every epoch; default: another in each, for a stream its own.
        drop_last: end an epoch before a batch that would be smaller than the others.
        batch_growth: ``milestones=30ep+60ep,factor=5``: each milestone multiplies the batch size by the factor, up to a
            tenth of the data set or ``largest=N``. Beyond that the learning rate is divided instead, within the update
            alone.
        micro_batch: largest number of samples in one forward pass.
        precision: fp32, bf16 or fp16 (autocast) or fp64; default: the model's dtype, without autocast.
        loss_scale: a number or ``dynamic:key=value``; default: dynamic for fp16, else none.
        channels_last: memory layout of 4-dimensional inputs and weights.
        lr_scale: rule for the learning rate at this batch size, such as ``linear:base_batch=256``, or ``adascale``; for
            an optimizer given as text.
        batch_norm: ``worker``: over a worker's micro-batch, with the model's own layers; ``ghost:size=32``: over this
            many samples; ``sync``: over the global batch.
        identical_batches: every worker draws worker 0's samples, like an unsharded DataLoader with the same seed on all
            ranks; shows the cost of this common mistake.
        clip: largest gradient norm; None for no clipping.
        gradient_noise: ``multiplicative:base_batch=512`` makes the gradient as noisy as that of 512 samples; the
            loss must be one number a sample.
        noise_every: interval in steps at which ``run.step`` measures the gradient noise scale; None for never.
        ema: decay per update of an average of the weights, ``0.999`` or ``"0.999:warmup"``, which ``run.evaluate``
            then uses; None for no average.
        init_from: warm start from the weights and buffers of a run directory (its newest checkpoint), a checkpoint
            directory or a ``.safetensors`` file, on every rank.
        reproducible: bit-identical weights on any number of devices; sets one CPU thread.
        activation_checkpointing: ``blocks``, or names and classes of modules, whose activations are recomputed in
            backward; ``selective``: except for expensive operators; ``blocks:every=2``: in every other block.
        compile: mode of ``torch.compile``; True for ``default``.
        seed: seed of the order of samples and of all RNG streams.
        max_nonfinite: number of skipped steps in a row that raises NonFiniteError.
        data_workers: loader processes of each rank; the result does not depend on their number, except for a stream
            that divides its samples over them. Default: those of the ``DataLoader``, or none.
        slow: ranks or workers with a delay, to simulate stragglers: ``rank=1,factor=3`` or ``worker=2,ms=20``.
        scheduler: a PyTorch scheduler of ``optimizer``, or several; the run steps, saves and restores it.
        scheduler_every: ``update``: step it after every update that is not skipped; ``epoch``: after each epoch.
        callbacks: functions ``function(run)``, called after each step, and objects with methods such as
            ``on_evaluation(run, evaluation)``; see ``docs/python.md``.

    Returns:
        The run, ready to train.

    Raises:
        UsageError, DataError: arguments that do not go together or cannot be trained.
        CheckpointError: ``init_from`` is damaged, or of another model.
        MismatchError: models or arguments differ between ranks.
    """
    options = RunOptions(
        strategy=strategy,
        workers=workers,
        batch_size=batch_size,
        collate=collate,
        shuffle=shuffle,
        drop_last=drop_last,
        batch_growth=batch_growth,
        micro_batch=micro_batch,
        precision=precision,
        loss_scale=loss_scale,
        channels_last=channels_last,
        lr_scale=lr_scale,
        batch_norm=batch_norm,
        identical_batches=identical_batches,
        clip=clip,
        gradient_noise=gradient_noise,
        noise_every=noise_every,
        ema=ema,
        init_from=init_from,
        reproducible=reproducible,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        seed=seed,
        max_nonfinite=max_nonfinite,
        data_workers=data_workers,
        slow=slow,
        scheduler=scheduler,
        scheduler_every=scheduler_every,
        callbacks=callbacks,
    )
    return prepare_run(model, optimizer, dataset, loss_fn, options)


def prepare_run(
    model: Models,
    optimizer: Optimizers | OptimizerChoice | str,
    dataset: Any,
    loss_fn: LossFn | None,
    options: RunOptions,
    lr_schedule: Callable[[Epochs], Callable[[int], float]] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Run:
    """``tutti.prepare`` with its options in one object. Collective; raises as ``tutti.prepare``.

    The order: checks → device mesh → model surgery (batch norm, dtype) → layout (tensor slices, stages, activation
    checkpointing, compilation) → gradient synchronisation and optimizer (shards) → data → run.

    Args:
        model: see ``tutti.prepare``, as for the next three.
        optimizer: an optimizer, several, or options.
        dataset: the training samples.
        loss_fn: the loss function.
        options: all other arguments of ``tutti.prepare``.
        lr_schedule: makes the schedule of the learning rate, a factor by step, from the run's epochs; None leaves the
            rate to the caller.
        warn: receives warnings about the run's mistakes and lost ranks; None for Python's ``warnings`` and stderr.
    """
    whole, optimizers = one_module(model), given_optimizers(optimizer)
    sampling = _sampling(dataset, options)
    batch_size = sampling.batch_size or _BATCH
    o = replace(options, batch_size=batch_size, data_workers=sampling.processes)
    rule = o.lr_rule
    if isinstance(optimizer, str):
        optimizer = OptimizerChoice.parse(optimizer)
    if isinstance(optimizer, OptimizerChoice):
        imported = imported_optimizer(optimizer, whole, rule, batch_size)
        if imported:
            # Its rate is scaled as it is made.
            optimizer, optimizers, rule = imported, imported, NoRule()
    check_earlier(whole, optimizers)
    averaging = o.averaging
    world = context.init()
    identity = world.identity
    adaptive = o.lr_rule.adaptive
    asked = {"reproducible": o.reproducible, "adaptive": adaptive, "averaging": averaging is not None}
    sparse = [name for name, p in sparse_parameters([whole]).items() if p.requires_grad]
    asked |= {
        "compiled": o.compile_choice is not None,
        "accelerated": is_accelerator(world.device),
        "sparse": bool(sparse),
    }
    choice = parallel.check_strategy(o.strategy, identity.size, workers=o.workers, **asked)
    grid = Grid(**choice.shape(identity.size), rank=identity.rank)
    data = _data(sampling, choice, o)
    trainer = optimizer if isinstance(optimizer, OptimizerChoice) else optimizers
    _check_trainable(whole, trainer, sparse)
    contract = _contract(choice, grid.data_ranks, _count(data, sampling), o)
    given = o.gradient_noise
    noise = check_noise(given, batch_size, adaptive) if isinstance(given, str) else given
    epochs = batch_size_schedule(contract, o.growth, whole, o.batch_norm_options, o.lr_rule, noise)
    excluded = "lr_scale='adascale'" if adaptive else "" if choice.row.synchronous else "steps=all"
    schedulers = Schedulers(o.scheduler, o.scheduler_every, optimizers, excluded)
    callbacks = Callbacks(o.callbacks)
    if callbacks.own and not choice.row.synchronous:
        raise UsageError(
            "callbacks cannot be combined with steps=all",
            why="ranks agree after each event whether to stop, and here each makes as many steps as it can",
            remedy="leave out one of the two",
        )
    for each in optimizers if not choice.row.optimizer_here else ():
        check_fresh(each)
    if o.reproducible:
        torch.set_num_threads(1)
    scale = _scale(o.loss_scale, o.precision, loss_fn)
    if o.noise_every is not None:
        if o.noise_every < 1:
            raise UsageError(f"noise_every is {o.noise_every}", remedy="give a whole number of at least 1, or None")
        accelerated = is_accelerator(world.device)
        parallel.check_noise_scale(choice, identity.size, contract, noise is not None, accelerated, bool(sparse))
    option = per_worker_option(adaptive, noise, o.noise_every)
    together = _together(o.batch_norm_options, choice, epochs, o.reproducible, option)
    # Before any process group is made: with different device meshes ranks would wait for each other forever.
    settings = [
        *_settings(choice, epochs, o.precision, o.clip, o.reproducible, o.seed),
        f"shuffle {sampling.shuffle}, sampler {type(sampling.sampler).__name__}, {_collates(sampling)}",
        f"{max(sampling.processes, 1) if isinstance(data, Stream) else 'any'} loader processes",
        f"max_nonfinite {o.max_nonfinite}, batch norm {o.batch_norm}, loss_scale {o.loss_scale},"
        f" gradient noise {noise}, noise scale every {o.noise_every}",
        f"callbacks {callbacks.names()}",
        f"compile {o.compile_choice}, activation_checkpointing {_named(o.checkpointing)}",
        f"ema {averaging}, {'given' if o.init_from is not None else 'own'} initial weights",
        *describe_optimizers(trainer, o.lr_scale),
    ]
    everybody(world).agree(settings, "the configuration", "call tutti.prepare with the same arguments on every rank")

    # The device mesh.
    comms = Communicators(world, grid)
    run_context = RunContext(
        grid=grid,
        comms=comms,
        workers=contract.workers,
        mine=contract.mine(grid.data_rank),
        sharers=sharers(contract.workers, grid.data_ranks, grid.data_rank) if contract.shared else None,
        reproducible=o.reproducible,
        clip=o.clip,
        averaging=averaging,
        activation_checkpointing=o.checkpointing,
        compile=o.compile_choice,
        gradient_variance=adaptive,
        rows=choice.exchange.shards_parameters(choice.shape(identity.size)),
    )

    # Model surgery.
    converted, dtype = _remade(whole, o.batch_norm_options, run_context, o.precision, o.channels_last)
    place, loss = placer(world.device, dtype, o.channels_last), _cast(loss_fn, world.device.type, o.precision)
    run_context = replace(
        run_context, in_step=choice.row.synchronous, trial=_trial(data, contract, place, loss, o.seed, grid.data_rank)
    )

    # Layout: tensor slices, stages, activation checkpointing, compilation.
    layout, sync = choice.counted(epochs.steps).make(_as_one(run_context, together))
    hooks, reads = HookWatch(converted, run_context, _alone(contract, sync)), PartialReads(converted, run_context)
    replica = slow_down(layout.build(converted), o.slow, world, contract.workers)

    # Gradient synchronisation, which shards parameters and makes the optimizer.
    grad_hook = sync.attach(replica, factory(trainer, rule, batch_size, sparse))
    hooks.watch(replica.parts)
    reads.refuse()

    # Data.
    prefetch = Prefetch(sampling.processes, identity.rank, sampling.timeout or world.timeout, sampling.begin)
    order = None if isinstance(data, Stream) else sampling.order(o.seed, len(data))
    feed = _feed(data, epochs, grid.data_rank, o.seed, comms, place, prefetch, together, order, o.reproducible)

    # Ranks read a stream in step, and so cannot continue without one of them.
    fault_tolerant = choice.row.fault_tolerant and not isinstance(data, Stream)
    around = RunSettings(
        max_nonfinite=o.max_nonfinite,
        average=parallel.average(replica, sync, run_context),
        loss_scale=scale,
        noise=noise,
        adascale=AdaScale(batch_size, contract.workers) if adaptive else None,
        noise_probe=None if o.noise_every is None else NoiseProbe(sync, run_context, choice, o.noise_every),
        lr_schedule=None if lr_schedule is None else lr_schedule(epochs),
        named_workers=o.workers is not None,
        fault_tolerant=fault_tolerant,
        warn=warn,
        schedulers=schedulers,
        callbacks=callbacks,
    )
    run = Run(replica, sync, grad_hook, feed, loss, run_context, choice, optimizers, hooks, around)
    for index, each in enumerate(optimizers):
        accumulate_steps(each, run, choice, index)
    note(whole, optimizers, choice.name, run_context)
    StateLoads(whole, run, choice)
    if o.init_from is not None:
        load_warm_start(run, o.init_from)
    if fault_tolerant:
        run.context.comms.tolerate_loss()
    return run


def _feed(
    data: Source | Stream, epochs: Epochs, rank: int, seed: int, comms: Communicators,
    place: Callable[[Any], Any], prefetch: Prefetch, together: bool, order: SampleOrder | None, in_order: bool,
) -> Feed:  # fmt: skip
    """Build the feed of this data rank's part of every global batch, on the device."""
    reader = make_reader(data, epochs, rank, seed, comms, prefetch, order)
    transfer = make_transfer(comms.world.device, data)
    return Feed(reader, epochs, rank, seed, place, prefetch, together, transfer, in_order)


def _sampling(dataset: Any, o: RunOptions) -> Sampling:
    """Return the data set with its global batches, from the options or from a ``DataLoader``."""
    found = given_sampling(dataset, o.batch_size, o.collate, o.shuffle, o.drop_last, o.data_workers)
    return replace(found, batch_size=_BATCH) if found.batch_size is None and not found.whole else found.sized(o.seed)


def _collates(sampling: Sampling) -> str:
    return f"{'default' if sampling.collate is None else 'own'} collate, drop_last {sampling.drop_last}"


def _data(sampling: Sampling, choice: Choice, o: RunOptions) -> Source | Stream:
    """Wrap the data set as a ``Source`` or ``Stream``. Raises UsageError if an option excludes it."""
    data = adapt_training(sampling.dataset, sampling.collate, sampling.drop_last, sampling.processes)
    identical, reproducible = o.identical_batches, o.reproducible
    if sampling.processes < 0:
        raise UsageError(f"data_workers is {sampling.processes}", remedy="give 0 or more")
    _check_order(sampling, data, choice, o)
    if isinstance(data, Stream) and not choice.row.synchronous:
        raise UsageError(
            "steps=all cannot be combined with a stream",
            why="ranks read a stream in step, and here each makes as many steps as it can",
            remedy="leave it out, or take a data set with __len__ and __getitem__",
        )
    if identical and isinstance(data, Stream):
        raise UsageError(
            "identical_batches needs a data set with __len__ and __getitem__", remedy="leave one of them out"
        )
    if reproducible and isinstance(data, Stream) and data.sharded:
        raise UsageError(
            "reproducible cannot be combined with a data set that shards itself",
            why="the content of a global batch depends on the number of devices",
            remedy="leave out one of the two",
        )
    return data


def _check_order(sampling: Sampling, data: Source | Stream, choice: Choice, o: RunOptions) -> None:
    """Raise UsageError if the order of samples cannot be kept with the other options."""
    if isinstance(data, Stream) and sampling.shuffle:
        raise UsageError(
            "a stream cannot be shuffled", remedy="shuffle inside the data set, by set_epoch, and leave shuffle out"
        )
    if isinstance(data, Stream) and data.sharded and sampling.drop_last:
        raise UsageError(
            "drop_last cannot be combined with a data set that shards itself",
            why="its ranks end at different samples, and the smaller batches at the end count with their weight",
            remedy="leave drop_last out",
        )
    if sampling.drop_last and o.batch_growth is not None:
        raise UsageError(
            "drop_last cannot be combined with batch_growth",
            why="the number of samples that it leaves would change with the batch",
            remedy="leave out one of the two",
        )
    if sampling.sampler is not None and not choice.row.synchronous:
        raise UsageError(
            f"the sampler {type(sampling.sampler).__name__} cannot be combined with steps=all",
            why="its order is compared over ranks in every epoch, and here each makes as many steps as it can",
            remedy="leave steps=all or the sampler out",
        )
    several = (o.workers or 0) > 1 or o.micro_batch is not None
    if sampling.collate is not None and isinstance(o.batch_norm_options, SyncConfig) and several:
        raise UsageError(
            "batch_norm='sync' cannot be combined with an own collate and several workers a device",
            why="a device computes on all its samples at once, and collate makes one batch for each worker",
            remedy="leave workers and micro_batch out",
        )


def one_module(model: Models) -> nn.Module:
    """Return a module as it is, several as children of one module. Raises UsageError for other types."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and all(isinstance(each, nn.Module) for each in model.values()):
        return nn.ModuleDict(model)
    if isinstance(model, Sequence) and all(isinstance(each, nn.Module) for each in model):
        return nn.ModuleList(model)
    raise UsageError(
        f"the model is a {type(model).__name__}", remedy="give a torch.nn.Module, or several in a list or a dict"
    )


def given_optimizers(optimizer: Optimizers | OptimizerChoice | str) -> list[Optimizer]:
    """Return the script's optimizers as a list; empty for options. Raises UsageError for other types."""
    if isinstance(optimizer, str | OptimizerChoice):
        return []
    several = isinstance(optimizer, Sequence)
    found = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer) if several else []
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}",
            remedy="give a torch.optim.Optimizer, several in a list, or options such as 'adamw:lr=1e-3'",
        )
    check_apart(found)
    return found


def _check_trainable(model: nn.Module, optimizer: Sequence[Optimizer] | OptimizerChoice, sparse: Sequence[str]) -> None:
    """Raise UsageError if no parameter is trainable, or the optimizer cannot train the model."""
    _check_not_on_meta(model)
    check_memory(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model is trainable", remedy="set requires_grad on some")
    check_fits(optimizer, model)
    if sparse:
        check_takes_sparse(optimizer, model, sparse)


def _check_not_on_meta(model: nn.Module) -> None:
    """Raise UsageError if parameters or buffers are on the meta device."""
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise UsageError(
            f"{len(empty)} parameters or buffers of the model have no numbers",
            where=", ".join(empty[:3]),
            why="they are on the meta device, which stores only shapes",
            remedy="build the model without torch.device('meta'), inside tutti.spilling() if it is too large; or "
            "call model.to_empty(device='cpu') and initialise it before tutti.prepare",
        )


def _alone(contract: BatchContract, sync: GradientSync) -> bool:
    """Return whether every gradient is that of a single micro-batch."""
    single = contract.workers == 1 or sync.loss_normalisation == "worker"
    return single and len(contract.micro_batches(len(contract.worker(contract.batch, 0)))) == 1


def _contract(choice: Choice, ranks: int, count: int | None, o: RunOptions) -> BatchContract:
    """Return the batch contract; the strategy may determine the size of micro-batches."""
    number, batch = o.workers or ranks, o.batch_size or _BATCH
    micro = parallel.micro_batch(choice, o.micro_batch, batch, number)
    return BatchContract(count, batch, number, ranks, micro, o.identical_batches)


def _count(data: Source | Stream, sampling: Sampling) -> int | None:
    """Return the number of samples in an epoch; None for a stream of unknown length and a batch sampler."""
    if not isinstance(data, Stream):
        return sampling.in_an_epoch(len(data))
    if data.samples is None or not sampling.drop_last:
        return data.samples
    return data.samples // (sampling.batch_size or 1) * (sampling.batch_size or 1)


def _scale(given: LossScaleConfig | str | None, precision: str | None, loss_fn: LossFn | None) -> LossScale | None:
    """Return the run's loss scale, None for none. Raises UsageError if it or the precision has no effect."""
    if loss_fn is None and precision in _CAST:
        raise UsageError(
            f"precision={precision} casts inside loss_fn, and there is none",
            remedy="give a loss_fn, or wrap your own forward in torch.autocast"
            + " and set loss_scale='dynamic'" * (precision == "fp16"),
        )
    config = given if isinstance(given, LossScaleConfig) else choose_loss_scale(given, precision)
    return None if config is None else LossScale(config)


def _cast(loss_fn: LossFn | None, device: str, precision: str | None) -> LossFn | None:
    """Return the loss function under autocast to the precision's 16-bit dtype; as it is for other precisions."""
    dtype = _CAST.get(precision or "")
    if loss_fn is None or dtype is None:
        return loss_fn

    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast(device, dtype):
            return loss_fn(model, batch)

    return cast


def _remade(
    model: nn.Module, batch_norm: BatchNormConfig, run_context: RunContext, precision: str | None, channels_last: bool
) -> tuple[nn.Module, torch.dtype]:
    """Convert the model's batch norm, dtype and memory layout; return it, and the dtype for floating-point inputs."""
    if run_context.rows and run_context.comms.world.device.type == "cpu" and _is_large(model):
        free_at_once()
    with as_built(model):
        model = _normalised(model, batch_norm, run_context)
        return model, _precise(model, precision, channels_last)


def _is_large(model: nn.Module) -> bool:
    """Return whether the model is so large that malloc should return freed memory of gathered layers to the system.

    Kept memory is about three times the memory in use. With Adam a model of a sixteenth of the free memory needs a
    quarter of it, and three times that leaves little (the threshold is a guess).
    """
    return bytes_of([*model.parameters(), *model.buffers()]) > free_memory(context.local_size()) // 16


def _normalised(model: nn.Module, batch_norm: BatchNormConfig, run_context: RunContext) -> nn.Module:
    """Convert the model's batch norm as ``batch_norm`` says. Collective for ``sync``: makes a process group."""
    model = norms.restore_norms(model)
    if isinstance(batch_norm, SyncConfig):
        line = run_context.comms.new_group("batch norm")
        return sync.convert_sync_batch_norm(model, line, run_context.workers, run_context.grid.data_ranks)
    return ghost.convert_ghost_batch_norm(model, batch_norm.size) if isinstance(batch_norm, GhostConfig) else model


def _together(
    batch_norm: BatchNormConfig, choice: Choice, epochs: Epochs, reproducible: bool, needs: str | None
) -> bool:
    """Return whether a rank's workers run as one (synchronised batch norm). Raises UsageError if they cannot."""
    if not isinstance(batch_norm, SyncConfig):
        return False
    parallel.check_sync(choice, context.current().identity.size, reproducible, needs)
    for phase in epochs.phases:
        phase.contract.check_whole()
    return True


def _as_one(run_context: RunContext, together: bool) -> RunContext:
    """Return a context with a single worker that spans all data ranks, for workers that run as one."""
    if not together:
        return run_context
    alone = run_context.workers == run_context.grid.data_ranks
    return replace(run_context, workers=1, mine=run_context.mine[:1], sharers=None, draws=alone)


def _trial(
    data: Source | Stream,
    contract: BatchContract,
    place: Callable[[Any], Any],
    loss: LossFn | None,
    seed: int,
    data_rank: int,
) -> Callable[..., Any] | None:
    """Return ``RunContext.trial``: a call of the loss function on the data's first micro-batch, or None."""
    if loss is None:
        return None
    if isinstance(data, Stream):
        return partial(_try_stream, data, len(contract.first_micro_batch(contract.batch)), seed, data_rank, place, loss)
    first = np.arange(len(contract.first_micro_batch(min(contract.batch, len(data)))))
    return lambda model, most=None: loss(model, place(data.fetch(first[:most], None)))


def _try_stream(
    data: Stream,
    count: int,
    seed: int,
    data_rank: int,
    place: Callable[[Any], Any],
    loss: LossFn,
    model: nn.Module,
    most: int | None = None,
) -> Any:
    """Return the loss of ``model`` on the stream's first samples, which the first epoch reads again."""
    batch = data.first_batch(count, data.key(seed, data_rank))
    return loss(model, place(batch if most is None else slice_batch(batch, 0, most)))


def _precise(model: nn.Module, precision: str | None, channels_last: bool) -> torch.dtype:
    """Convert the model's dtype and memory layout in place; return the dtype for floating-point inputs."""
    if precision == "fp8":
        raise UsageError(
            "precision=fp8 cannot run here",
            why="tutti has no matrix products of 8-bit floats with their scales",
            remedy="take precision=bf16",
        )
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


def _named(units: Checkpointing) -> str | list[str]:
    """Return the options of activation checkpointing, modules as names: the same text on every rank."""
    if units is None or isinstance(units, Blocks):
        return str(units)
    return [unit if isinstance(unit, str) else unit.__qualname__ for unit in units]
