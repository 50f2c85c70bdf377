"""``tutti.prepare``: from a plain model, optimizer, data set and loss to a run on all ranks."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import nn

from tutti import parallel
from tutti.comm.communicator import world_communicator
from tutti.comm.graph_breaks import end_graphs
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.partition import sharers
from tutti.comm.stall import TellFailures
from tutti.config.averaging import Averaging
from tutti.config.growth import BatchGrowth
from tutti.config.optimizer_config import OptimizerChoice
from tutti.config.slowness import Slowness
from tutti.config.spec import Duration
from tutti.data.batches import placer
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed
from tutti.data.loader import Prefetch
from tutti.data.reading import make_reader
from tutti.data.stream import Stream
from tutti.data.transfer import make_transfer
from tutti.device import use_deterministic_kernels
from tutti.errors import counted
from tutti.launcher import context, failure
from tutti.nn.ac_policy import UNCACHED, turn_off_caches
from tutti.nn.float8 import describe_layers, layers_left_in_bf16
from tutti.nn.script_mode import modes_entered
from tutti.nn.sparse_layers import make_gradients_dense
from tutti.optim.adascale import AdaScale
from tutti.parallel.parameter_average import make_average
from tutti.process_context import read_identity
from tutti.train.accumulating_optimizer import accumulate_steps
from tutti.train.argument_words import argument_words, refuse_unknown_arguments, unread_variables
from tutti.train.conversions import ModelConversions
from tutti.train.meta_model import materialise_model
from tutti.train.model_conversion import cast_loss, convert_model
from tutti.train.noise_probe import NoiseProbe
from tutti.train.optimizers import factory
from tutti.train.partial_reads import PartialReads
from tutti.train.plain_copies import leave_hooks_out_of_copies
from tutti.train.prepare_checks import CheckedRun, check_run
from tutti.train.prepare_interception import prepare_handler
from tutti.train.prepared_before import note_prepared
from tutti.train.run import Run, RunSettings
from tutti.train.run_options import Models, Optimizers, RunOptions
from tutti.train.schedulers import Given
from tutti.train.script_checks.hook_watch import HookWatch
from tutti.train.script_checks.other_optimizers import other_optimizers, refuse_steps
from tutti.train.script_checks.single_sample import note_single_sample
from tutti.train.slow_replica import slow_down
from tutti.train.state_loads import StateLoads
from tutti.train.strategy_spec import StrategySpec
from tutti.train.training_data import call_model, first_micro_batch_trial
from tutti.train.warm_start import load_warm_start
from tutti.types.gradient_sync import GradientSync
from tutti.types.micro_batch import LossFn
from tutti.types.run_context import RunContext
from tutti.types.weight_average import Average

log = logging.getLogger("tutti.prepare")


@refuse_unknown_arguments
def prepare(
    model: Models,
    optimizer: Optimizers | str,
    dataset: Any,
    loss_fn: LossFn | None = None,
    *,
    strategy: str | StrategySpec = "mirrored",
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
    init_map: str | None = None,
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
    """Prepare ``model`` for training on every rank of the job as if on one device. Collective over all ranks.

    Calls ``tutti.init`` if needed. All ranks compare their arguments, make process groups, and split ``model`` as the
    strategy says: it is changed in place, moved to the rank's device, and begins with data rank 0's parameters and
    buffers. Some strategies call model and loss function on the first micro-batch. ``torch.compile`` is applied, and
    compiles in the first step. From now on ``optimizer.step()`` in a custom training loop acts once a global batch.

    Args:
        model: a plain model without any code for ranks; or several in a list or a dict, such as a generator and a
            discriminator, whose parameters are then named ``0.weight`` or by the dict's keys.
        optimizer: an optimizer of the model's parameters, several of disjoint parameters in a list, ``name:key=value``,
            or ``package.module:Class:lr=0.001,key=value``.
        dataset: tensors, a ``TensorDataset``, any map-style dataset, a ``tutti.data.Source``, or an iterable (also
            inside ``tutti.data.Sharded``), or a function that returns one; or a PyTorch ``DataLoader``, whose data set,
            batch size, sampler, ``collate_fn`` and number of processes are taken over.
        loss_fn: ``loss_fn(model, batch)`` → mean over samples, ``(sum, count)`` or ``(sum, count, metric_sums)``; one
            loss a sample in place of mean or sum. Optional for custom training loops.
        strategy: ``name:key=value``, or ``tutti.strategy(name, key=value)``.
        workers: number of logical data-parallel workers, each with its share of the global batch; a rank may compute
            several one after another. Default: the number of data ranks.
        batch_size: samples of the *global* batch; default: that of the ``DataLoader``, or 128.
        collate: makes a batch of the list of one micro-batch's samples; default: as PyTorch's ``DataLoader``.
        shuffle: False for the data set's own order in every epoch; default: another order in each epoch, for a stream
            the stream's own.
        drop_last: end an epoch before a batch that would be smaller than the others.
        batch_growth: ``milestones=30ep+60ep,factor=5``: each milestone multiplies the batch size by the factor, up to a
            tenth of the data set or ``largest=N``. Beyond that the learning rate is divided instead, within the update
            alone.
        micro_batch: largest number of samples in one forward pass.
        precision: fp32, bf16 or fp16 (autocast), fp8 (bf16, with linear layers in 8-bit floats by torchao) or fp64;
            default: the model's dtype, without autocast.
        loss_scale: a number or ``dynamic:key=value``; default: dynamic for fp16, else none.
        channels_last: memory layout of 4-dimensional inputs and weights.
        lr_scale: rule for the learning rate at this batch size, such as ``linear:base_batch=256``, or ``adascale``; for
            an optimizer given as text.
        batch_norm: ``worker``: over a worker's micro-batch, with the model's own layers; ``ghost:size=32``: over this
            many samples; ``sync``: over the global batch.
        identical_batches: every worker draws worker 0's samples, like an unsharded DataLoader with the same seed on all
            ranks; shows the cost of this common mistake.
        clip: largest gradient norm; None for no clipping.
        gradient_noise: ``multiplicative:base_batch=512`` makes the gradient as noisy as that of 512 samples; the loss
            must be one number a sample.
        noise_every: interval in steps at which the gradient noise scale is measured; None for never.
        ema: decay per update of an average of the weights, ``0.999`` or ``"0.999:warmup"``, which ``run.evaluate`` then
            uses; None for no average.
        init_from: warm start from the weights and buffers of a run directory (its newest checkpoint), a checkpoint
            directory, a ``.safetensors`` file or a folder of them, on every rank.
        init_map: other names of the tensors in ``init_from``, and those that may be new, unused or of another shape:
            ``rename=transformer.:model.,new=head.*,unused=lm_head.*``.
        reproducible: bit-identical weights on any number of devices; sets one CPU thread, and on accelerators PyTorch's
            deterministic algorithms (docs/environment.md).
        activation_checkpointing: ``blocks``, or names and classes of modules, whose activations are recomputed in
            backward; ``selective``: except for expensive operators; ``blocks:every=2``: in every other block.
        compile: mode of ``torch.compile``; True for ``default``.
        seed: seed of the order of samples and of all RNG streams.
        max_nonfinite: number of skipped steps in a row that raises NonFiniteError.
        data_workers: loader processes of each rank; the result does not depend on their number, except for a stream
            that divides its samples over them. Default: those of the ``DataLoader``, or none.
        slow: ranks or workers with a delay, to simulate stragglers: ``rank=1,factor=3`` or ``worker=2,ms=20``.
        scheduler: a PyTorch scheduler of ``optimizer``, or several; the run steps, saves and restores it. The script
            itself steps a ``ReduceLROnPlateau``, with the same metric on all ranks, unless evaluations do.
        scheduler_every: ``update``: step the schedulers after every update that is not skipped; ``epoch``: after each
            epoch; ``evaluation`` or ``evaluation:accuracy``: after each ``run.evaluate``, a ``ReduceLROnPlateau`` with
            the held-out loss or metric.
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
        init_map=init_map,
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
    handler = prepare_handler() or prepare_run
    with argument_words():
        unread = unread_variables({**vars(options), "optimizer": optimizer}, os.environ)
        if unread and read_identity(os.environ).rank == 0:
            warnings.warn(unread, stacklevel=3)
        run: Run = handler(model, optimizer, dataset, loss_fn, options)
    return run


@TellFailures()
def prepare_run(
    model: Models,
    optimizer: Optimizers | OptimizerChoice | str,
    dataset: Any,
    loss_fn: LossFn | None,
    options: RunOptions,
    lr_schedule: Callable[[Epochs], Callable[[int], float]] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Run:
    """Prepare a model for training, as ``tutti.prepare`` does, with all further options in one object.

    Collective over all ranks, which call it with equal arguments; the model is changed in place.

    The order: checks → device mesh → values of a model on the meta device → model surgery (batch norm, dtype) → layout
    (tensor slices, stages, activation checkpointing, compilation) → gradient synchronisation and optimizer (shards) →
    data → run.

    Args:
        model: a module, or several in a list or dict.
        optimizer: an optimizer, several in a list, or options of an optimizer that the run makes, also as text.
        dataset: the training samples: tensors, a map-style or iterable data set, a ``tutti.data.Source``, a function
            that returns one, or a ``DataLoader``.
        loss_fn: ``loss_fn(model, batch)``; None for custom training loops.
        options: all other arguments of ``tutti.prepare``.
        lr_schedule: from the run's epochs, makes the function that maps a step to a factor on the learning rate; None
            leaves the rate to the caller.
        warn: receives warnings about the run's mistakes and lost ranks; None for Python's ``warnings`` and stderr.

    Returns:
        The ``Run``, ready to train.

    Raises:
        UsageError, DataError: arguments that do not go together or cannot be trained.
        CheckpointError: ``init_from`` is damaged, or of another model.
        MismatchError: models or arguments differ between ranks.
    """
    checked = check_run(model, optimizer, dataset, loss_fn, options)
    choice, contract, world = checked.choice, checked.contract, context.current()
    if options.reproducible:
        torch.set_num_threads(1)
        use_deterministic_kernels(world.device)
    # Before any process group is made: with different device meshes ranks would wait for each other forever.
    remedy = "call tutti.prepare with the same arguments on every rank"
    world_communicator(world).agree(checked.settings(options), "the configuration", remedy)
    if modes_entered():
        # The function mode of an earlier run that the script has dropped would see each call of PyTorch until the run,
        # which refers to itself, is collected. No rank is in a step of it any more.
        gc.collect()

    # The device mesh.
    run_context = _mesh_context(checked, options)
    mesh = run_context.mesh

    # Values of a model on the meta device.
    begun = materialise_model(checked.model, run_context.comms.world, options.init_from, options.initial_map)

    # Model surgery.
    if checked.made_dense:
        make_gradients_dense(checked.model)
    in_bf16 = layers_left_in_bf16(checked.model) if options.precision == "fp8" else {}
    converted, dtype = convert_model(
        checked.model, options.batch_norm_options, run_context, options.precision, options.channels_last
    )
    uncached = options.checkpointing is not None and turn_off_caches(converted)
    place = placer(world.device, dtype, options.channels_last)
    loss = cast_loss(loss_fn, world.device.type, options.precision)
    run_context = _with_trials(run_context, checked, place, loss, options.seed)

    # Layout: tensor slices, stages, activation checkpointing, compilation.
    strategy_context = _with_one_worker(run_context) if checked.workers_as_one else run_context
    layout, sync = parallel.make_strategy(choice.counted(checked.epochs.steps), strategy_context)
    # Hooks, reads of parameters and other optimizers of the script, found before objects are replaced.
    sharded = mesh.shard > 1 and bool(checked.optimizers)
    others = other_optimizers(checked.optimizers, converted.parameters()) if sharded else []
    hooks = HookWatch(converted, run_context, _has_single_micro_batch(contract, sync))
    reads = PartialReads(converted, run_context)
    replica = slow_down(layout.build(converted), options.slowness, world, contract.workers)

    # Gradient synchronisation, which shards parameters and makes the optimizer.
    grad_hook = sync.attach(replica, factory(checked.trainer, checked.rule, contract.batch, checked.sparse))
    hooks.watch(replica)
    leave_hooks_out_of_copies(checked.model)

    # Data.
    feed = _feed(checked, run_context.comms, place, options)

    # The run, and the script's objects, which act on it from now on.
    average = make_average(replica, sync, run_context)
    noise_probe = _noise_probe(checked, sync, run_context, options.noise_every)
    rates = None if lr_schedule is None else lr_schedule(checked.epochs)
    settings = _run_settings(checked, options, average, noise_probe, rates, in_bf16, uncached, warn)
    conversions = ModelConversions(checked.model, replica, run_context)
    run = Run(
        replica, sync, grad_hook, feed, loss, run_context, choice, checked.optimizers, hooks, conversions, settings
    )
    state_loads = _wrap_script_objects(run, checked)
    reads.begin(run)
    refuse_steps(others)
    if options.init_from is not None:
        load_warm_start(run, options.init_from, options.initial_map, begun)
    if settings.fault_tolerant:
        run.context.comms.tolerate_loss()
    if log.isEnabledFor(logging.INFO):
        _log_decisions(run, checked, options)
    failure.before_report(partial(_explain, contract=contract, hooks=ref(hooks)))
    end_graphs()
    run.begin_script(state_loads)
    return run


def _explain(error: BaseException, contract: BatchContract, hooks: ref[HookWatch]) -> None:
    """Add a note to an uncaught exception of the script whose reason is the division of batches or of the model."""
    note_single_sample(error, contract)
    if (watch := hooks()) is not None:
        watch.explain(error)


def _mesh_context(checked: CheckedRun, options: RunOptions) -> RunContext:
    """Return the device mesh with its communicators, and the workers of this rank. Collective: makes process groups."""
    choice, mesh, contract = checked.choice, checked.mesh, checked.contract
    return RunContext(
        mesh=mesh,
        comms=Communicators(context.current(), mesh),
        workers=contract.workers,
        mine=contract.mine(mesh.data_rank),
        sharers=sharers(contract.workers, mesh.data_ranks, mesh.data_rank) if contract.shared else None,
        reproducible=options.reproducible,
        clip=options.clip,
        averaging=options.averaging,
        activation_checkpointing=options.checkpointing,
        compile=options.compile_choice,
        gradient_variance=options.lr_rule.adaptive,
        shards_parameters=choice.sync.shards_parameters(choice.shape(mesh.size)),
    )


def _with_trials(
    run_context: RunContext, checked: CheckedRun, place: Callable[[Any], Any], loss: LossFn | None, seed: int
) -> RunContext:
    """Return the context with the functions by which strategies try the loss, or the model alone, on first samples."""
    first = partial(first_micro_batch_trial, checked.data, checked.contract, place)
    trial = first(loss, seed, run_context.mesh.data_rank)
    forward = trial or first(call_model, seed, run_context.mesh.data_rank)
    return replace(run_context, synchronous=checked.choice.row.synchronous, trial=trial, forward_trial=forward)


def _noise_probe(
    checked: CheckedRun, sync: GradientSync, run_context: RunContext, every: int | None
) -> NoiseProbe | None:
    """Return the object that measures the gradient noise scale every so many steps; None for never."""
    if every is None:
        return None
    basis = parallel.noise_basis(checked.choice, checked.contract)
    return NoiseProbe(sync, run_context, checked.choice, basis, every)


def _wrap_script_objects(run: Run, checked: CheckedRun) -> StateLoads:
    """Make steps of the script's optimizers, and loads of its model, act on every rank's part; return the latter."""
    for index, each in enumerate(checked.optimizers):
        accumulate_steps(each, run, checked.choice, index)
    note_prepared(checked.model, checked.optimizers, checked.choice, run.context)
    return StateLoads(checked.model, run, checked.choice)


def _log_decisions(run: Run, checked: CheckedRun, options: RunOptions) -> None:
    """Log what the preparation has decided, and the option or fact from which each decision follows."""
    mesh, choice, given = run.context.mesh, checked.choice, "given"
    axes = {"data": mesh.data_ranks, "stages": mesh.stage, "tensor": mesh.tensor}
    log.info("strategy %s: %s", choice.name, choice.row.summary)
    shape = " × ".join(f"{n} {name}" for name, n in axes.items() if n > 1 or name == "data")
    log.info("device mesh: %s = %s", counted(mesh.size, "rank"), shape)
    workers = given if options.workers is not None else "as many as data ranks, because workers is not given"
    log.info("logical workers: %d, %s", run.context.workers, workers)
    if options.batch_size is None:
        origin = "the loader's" if checked.from_loader else "the default"
        log.info("global batch: %s, %s", counted(run.feed.contract.batch, "sample"), origin)
    for label, text in {**run.replica.summary, **run.feed.describe()}.items():
        log.info("%s: %s", label, text)
    if run.loss_scale is not None:
        log.info(
            "loss scale: %g, %s", run.loss_scale.value, given if options.loss_scale else "because precision is fp16"
        )
    if run.settings.in_bf16:
        log.info("layers that precision=fp8 leaves in bfloat16: %s", describe_layers(run.settings.in_bf16))
    if run.settings.uncached:
        log.info("config.use_cache: %s", UNCACHED)
    if options.reproducible:
        log.info("one CPU thread: reproducible sums have one order")
    if checked.sparse:
        log.info("gradients of %s are sparse", ", ".join(checked.sparse))
    if checked.made_dense:
        log.info("gradients of %s: dense, because the strategy exchanges no sparse ones", ", ".join(checked.made_dense))
    for name, tensor in checked.model.named_parameters():
        log.debug(
            "parameter %s: %s %s%s", name, tuple(tensor.shape), tensor.dtype, "" if tensor.requires_grad else ", frozen"
        )


def _run_settings(
    checked: CheckedRun,
    options: RunOptions,
    average: Average | None,
    noise_probe: NoiseProbe | None,
    lr_schedule: Callable[[int], float] | None,
    in_bf16: Mapping[str, str],
    uncached: bool,
    warn: Callable[[str], None] | None,
) -> RunSettings:
    """Return the settings of the run's steps, from the checked arguments and the objects made of them."""
    choice, contract = checked.choice, checked.contract
    return RunSettings(
        max_nonfinite=options.max_nonfinite,
        average=average,
        loss_scale=checked.loss_scale,
        noise=checked.noise,
        adascale=AdaScale(contract.batch, contract.workers) if options.lr_rule.adaptive else None,
        noise_probe=noise_probe,
        lr_schedule=lr_schedule,
        named_workers=options.workers is not None,
        # Ranks read a stream in step, and so cannot continue without one of them.
        fault_tolerant=choice.row.fault_tolerant and not isinstance(checked.data, Stream),
        warn=warn,
        schedulers=checked.schedulers,
        callbacks=checked.callbacks,
        optimizer_settings=checked.optimizer_settings,
        # Two lengths of an epoch show whether an option of the strategy follows from it.
        epochs_as_steps=choice.counted(_unlike_steps(1)) != choice.counted(_unlike_steps(2)),
        in_bf16=in_bf16,
        uncached=uncached,
    )


def _unlike_steps(length: int) -> Callable[[Duration], int]:
    """Return a conversion of durations to steps that depends on ``length`` unless they are in steps."""
    return lambda duration: int(duration.value) if duration.unit == "st" else length


def _feed(checked: CheckedRun, comms: Communicators, place: Callable[[Any], Any], options: RunOptions) -> Feed:
    """Return the feed of this data rank's part of every global batch, on the device."""
    sampling, data, epochs = checked.sampling, checked.data, checked.epochs
    world, rank = context.current(), checked.mesh.data_rank
    timeout = sampling.timeout or world.timeout
    prefetch = Prefetch(sampling.processes, world.identity.rank, timeout, sampling.begin, sampling.persistent)
    order = None if isinstance(data, Stream) else sampling.order(options.seed, len(data))
    reader = make_reader(data, epochs, rank, options.seed, comms, prefetch, order)
    transfer = make_transfer(world.device, data)
    return Feed(
        reader, epochs, rank, options.seed, place, prefetch, checked.workers_as_one, transfer, options.reproducible
    )


def _has_single_micro_batch(contract: BatchContract, sync: GradientSync) -> bool:
    """Return whether every gradient is that of a single micro-batch."""
    single = contract.workers == 1 or sync.loss_normalisation == "worker"
    return single and len(contract.micro_batches(len(contract.worker(contract.batch, 0)))) == 1


def _with_one_worker(run_context: RunContext) -> RunContext:
    """Return a context with a single worker that spans all data ranks, for workers that run as one."""
    alone = run_context.workers == run_context.mesh.data_ranks
    return replace(run_context, workers=1, mine=run_context.mine[:1], sharers=None, draws=alone)
