"""The checks of ``tutti.prepare`` before any process group is made, and the agreement of all ranks on its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from tutti import parallel
from tutti.comm.rank_mesh import RankMesh
from tutti.config.gradient_noise import MultiplicativeNoise, check_noise, per_worker_option
from tutti.config.lr_rule import NoRule
from tutti.config.module_config import BatchNormConfig, Blocks, Checkpointing, SyncBatchNormConfig
from tutti.config.optimizer_config import OptimizerChoice
from tutti.config.strategy_choice import StrategyChoice
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.sampling import Sampling
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.device import is_accelerator
from tutti.errors import UsageError, kind_of
from tutti.launcher import context
from tutti.nn.overlapping import check_memory
from tutti.nn.sparse_layers import sparse_parameters
from tutti.optim.factory import check_fresh
from tutti.optim.loss_scale import LossScale
from tutti.optim.several import check_apart
from tutti.train.batch_size_schedule import batch_size_schedule
from tutti.train.callbacks import Callbacks
from tutti.train.meta_model import check_state_on_meta, on_meta
from tutti.train.model_conversion import make_loss_scale
from tutti.train.optimizers import (
    check_fits,
    check_takes_sparse,
    describe_optimizers,
    imported_optimizer,
    steps_alike,
)
from tutti.train.prepared_before import check_earlier
from tutti.train.resume_changes import optimizer_settings
from tutti.train.run_options import DEFAULT_BATCH_SIZE, Models, Optimizers, RunOptions
from tutti.train.schedulers import Schedulers
from tutti.train.strategy_spec import choose_strategy
from tutti.train.training_data import choose_sampling, samples_per_epoch, wrap_training_data
from tutti.types.micro_batch import LossFn


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The arguments of ``tutti.prepare`` after all checks, parsed, and the plan of batches that follows from them.

    Attributes:
        model: the script's model; several models as children of one module.
        trainer: the script's optimizers, or the options of the optimizer that the run makes.
        rule: the rule that scales the learning rate with the batch size, for an optimizer that the run makes.
        sparse: names of trainable parameters with sparse gradients.
        made_dense: names of those trainable parameters with sparse gradients whose gradients the run makes dense,
            because the strategy cannot reduce sparse gradients, and the optimizer's update is the same.
        choice: the strategy.
        mesh: the device mesh, with this rank's place in it.
        sampling: the data set with its global batches.
        data: the data set as a ``Source``, which is read by index, or a ``Stream``, which is read in order.
        contract: division of the first global batches into workers' shares and micro-batches.
        epochs: the global batches of all epochs, with the growth of the batch.
        noise: gradient noise that is added; None for none.
        schedulers: the script's schedulers.
        callbacks: the script's callbacks.
        loss_scale: the loss scale; None for none.
        workers_as_one: whether the logical data-parallel workers of a rank (fixed shares of the global batch) compute
            as one, for synchronised batch norm.
        optimizer_settings: options of each parameter group as they were given.
        from_loader: whether the data set was given as a ``DataLoader``.
    """

    model: nn.Module
    trainer: Sequence[Optimizer] | OptimizerChoice
    rule: NoRule
    sparse: Sequence[str]
    made_dense: Sequence[str]
    choice: StrategyChoice
    mesh: RankMesh
    sampling: Sampling
    data: Source | Stream
    contract: BatchContract
    epochs: Epochs
    noise: MultiplicativeNoise | None
    schedulers: Schedulers
    callbacks: Callbacks
    loss_scale: LossScale | None
    workers_as_one: bool
    optimizer_settings: list[dict[str, Any]]
    from_loader: bool

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The script's optimizers; empty where the run makes one from options."""
        return _script_optimizers(self.trainer)

    def settings(self, options: RunOptions) -> list[str]:
        """Return lines of text that state the settings that must be equal on all ranks, such as the strategy.

        ``tutti.prepare`` compares the list over ranks, before it makes any process group, and raises MismatchError
        where ranks differ. The list itself is made without other ranks.

        Args:
            options: the other options of ``tutti.prepare``, such as precision, clipping and seed.
        """
        contract, sampling = self.epochs.first, self.sampling
        collate = "default" if sampling.collate is None else "own"
        processes = max(sampling.processes, 1) if isinstance(self.data, Stream) else "any"
        return [
            f"strategy {self.choice.name} {self.choice.layout} {self.choice.sync}",
            f"{contract.workers} workers",
            f"a global batch of {contract.batch}, micro-batches of {contract.micro}, identical {contract.identical}",
            f"batch growth {self.epochs.growth}",
            f"{contract.dataset} training samples",
            f"precision {options.precision}, clip {options.clip}, reproducible {options.reproducible},"
            f" seed {options.seed}",
            f"shuffle {sampling.shuffle}, sampler {type(sampling.sampler).__name__}, {collate} collate,"
            f" drop_last {sampling.drop_last}",
            f"{processes} loader processes",
            f"max_nonfinite {options.max_nonfinite}, batch norm {options.batch_norm}, loss_scale {options.loss_scale},"
            f" gradient noise {self.noise}, noise scale every {options.noise_every}",
            f"callbacks {self.callbacks.names()}",
            f"compile {options.compile_choice}, activation_checkpointing {_named(options.checkpointing)}",
            f"ema {options.averaging}, {'given' if options.init_from is not None else 'own'} initial weights,"
            f" {options.initial_map}, model {'on the meta device' if on_meta(self.model) else 'with values'}",
            *describe_optimizers(self.trainer, options.lr_scale),
        ]


def _check_unwrapped(model: nn.Module, device: torch.device) -> None:
    """Raise UsageError if a part of the model reduces gradients over ranks, or divides batches over devices, itself."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{name or 'the model'} is wrapped in DistributedDataParallel",
                why="it sums gradients over ranks in every backward, and ranks may have unequal numbers of"
                " micro-batches: a sum would mix different ones, or wait forever",
                remedy="give tutti.prepare the model itself (.module), and leave DistributedDataParallel and"
                " accelerator.prepare out",
            )
        used = module.device_ids if isinstance(module, nn.DataParallel) else []
        if used and list(used) != [device.index]:
            raise UsageError(
                f"{name or 'the model'} is wrapped in DataParallel over devices {', '.join(map(str, used))}",
                why="it divides each batch over these devices in one process, and every rank would use all of them",
                remedy="give tutti.prepare the model itself (.module), and leave DataParallel out: tutti run starts a"
                " process for each device",
            )


def check_run(
    model: Models,
    optimizer: Optimizers | OptimizerChoice | str,
    dataset: Any,
    loss_fn: LossFn | None,
    options: RunOptions,
) -> CheckedRun:
    """Check all arguments of ``tutti.prepare`` on this rank.

    Not collective, except that ``tutti.init`` is called if the script has not done so. Nothing of the model is changed;
    methods that an earlier run has set on the optimizers are removed.

    Args:
        model: a module, or several in a list or dict.
        optimizer: an optimizer; several in a list; or a choice such as ``adam:lr=0.01``, as text or parsed.
        dataset: the training samples: a map-style or iterable data set, tensors, or a ``DataLoader``.
        loss_fn: the loss function; None for custom training loops.
        options: all other arguments of ``tutti.prepare``.

    Returns:
        A ``CheckedRun``, the arguments in the forms that the next stages of the preparation take: model as one module,
        list of optimizers, parsed strategy, device mesh, data set, schedulers and callbacks, and the global batch's
        division into the shares of logical workers and micro-batches.

    Raises:
        UsageError, DataError: arguments that do not go together or cannot be trained.
    """
    whole, given = one_module(model), given_optimizers(optimizer)
    sampling = choose_sampling(dataset, options)
    batch_size = sampling.batch_size or DEFAULT_BATCH_SIZE
    options = replace(options, batch_size=batch_size, data_workers=sampling.processes)
    imported = (
        imported_optimizer(given, whole, options.lr_rule, batch_size) if isinstance(given, OptimizerChoice) else []
    )
    trainer: Sequence[Optimizer] | OptimizerChoice = imported or given
    # The rate of an imported optimizer is scaled as it is made.
    rule = NoRule() if imported else options.lr_rule
    optimizers = _script_optimizers(trainer)
    _check_loss(loss_fn)
    check_earlier(whole, optimizers)
    world = context.init()
    _check_unwrapped(whole, world.device)
    sparse = [name for name, p in sparse_parameters([whole]).items() if p.requires_grad]
    _check_trainable(whole, trainer, sparse)
    choice = choose_strategy(options.strategy, whole)
    needed = bool(sparse) and not steps_alike(trainer, whole, sparse)
    _check_strategy(choice, options, world, needed)
    mesh = RankMesh(**choice.shape(world.identity.size), rank=world.identity.rank)
    data = wrap_training_data(sampling, choice, options)
    made_dense = [] if parallel.exchanges_sparse(choice, mesh.size, is_accelerator(world.device), needed) else sparse
    sparse = [] if made_dense else sparse
    contract = _contract(choice, mesh.data_ranks, samples_per_epoch(data, sampling), batch_size, options)
    if choice.row.shared_weights and mesh.data_ranks > 1:
        _check_tables(whole)
    noise, adaptive = options.gradient_noise, options.lr_rule.adaptive
    if isinstance(noise, str):
        noise = check_noise(noise, batch_size, adaptive)
    epochs = batch_size_schedule(contract, options.growth, whole, options.batch_norm_options, options.lr_rule, noise)
    excluded = "lr_scale='adascale'" if adaptive else "" if choice.row.synchronous else "steps=all"
    schedulers = Schedulers(options.scheduler, options.scheduler_every, optimizers, excluded)
    callbacks = _check_callbacks(Callbacks(options.callbacks), choice)
    for each in optimizers if not choice.row.optimizer_here else ():
        check_fresh(each)
    loss_scale = make_loss_scale(options.loss_scale, options.precision, loss_fn)
    if options.noise_every is not None:
        parallel.check_noise_scale(choice, mesh.size, contract, noise is not None)
    option = per_worker_option(adaptive, noise, options.noise_every)
    workers_as_one = _compute_as_one(options.batch_norm_options, choice, epochs, options.reproducible, option)
    return CheckedRun(
        model=whole,
        trainer=trainer,
        rule=rule,
        sparse=sparse,
        made_dense=made_dense,
        choice=choice,
        mesh=mesh,
        sampling=sampling,
        data=data,
        contract=contract,
        epochs=epochs,
        noise=noise,
        schedulers=schedulers,
        callbacks=callbacks,
        loss_scale=loss_scale,
        workers_as_one=workers_as_one,
        optimizer_settings=optimizer_settings(given),
        from_loader=isinstance(dataset, DataLoader),
    )


def _check_strategy(choice: StrategyChoice, options: RunOptions, world: context.World, sparse: bool) -> None:
    """Raise UsageError where another option excludes the strategy."""
    parallel.check_strategy(
        choice,
        world.identity.size,
        workers=options.workers,
        reproducible=options.reproducible,
        adaptive=options.lr_rule.adaptive,
        averaging=options.averaging is not None,
        compiled=options.compile_choice is not None,
        graphs=options.compile_choice is not None and options.compile_choice.records_graphs,
        accelerated=is_accelerator(world.device),
        sparse=sparse,
    )


def _check_callbacks(callbacks: Callbacks, choice: StrategyChoice) -> Callbacks:
    """Return the callbacks. Raises UsageError where ranks cannot agree on a stop after each event."""
    if callbacks.own and not choice.row.synchronous:
        raise UsageError(
            "callbacks cannot be combined with steps=all",
            why="ranks agree after each event whether to stop, and here each makes as many steps as it can",
            remedy="leave out one of the two",
        )
    return callbacks


def one_module(model: Models) -> nn.Module:
    """Return the model as one module: a module as it is, a list as ``nn.ModuleList``, a dict as ``nn.ModuleDict``.

    Args:
        model: a module, or a list or dict of modules.

    Raises:
        UsageError: another type.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and all(isinstance(each, nn.Module) for each in model.values()):
        return nn.ModuleDict(model)
    if isinstance(model, Sequence) and all(isinstance(each, nn.Module) for each in model):
        return nn.ModuleList(model)
    raise UsageError(
        f"the model is {kind_of(model)}",
        remedy=f"give a torch.nn.Module, or several in a list or a dict{_order_of_arguments(model)}",
    )


def _check_loss(loss_fn: LossFn | None) -> None:
    """Raise UsageError for a loss of PyTorch, which takes outputs and targets in place of model and batch."""
    if loss_fn is None:
        return
    if not callable(loss_fn):
        raise UsageError(
            f"loss_fn is {kind_of(loss_fn)}",
            remedy=f"give a function loss_fn(model, batch){_order_of_arguments(loss_fn)}",
        )
    kind = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    if getattr(kind, "__module__", "") in ("torch.nn.modules.loss", "torch.nn.functional", "torch._C._nn"):
        name = getattr(kind, "__name__", "loss")
        called = f"{name}()" if name[:1].isupper() else name
        raise UsageError(
            f"loss_fn is {name}, which takes outputs and targets",
            why="tutti calls loss_fn(model, batch)",
            remedy=f"give a function, such as lambda model, batch: {called}(model(batch[0]), batch[1])",
        )


def given_optimizers(optimizer: Optimizers | OptimizerChoice | str) -> Sequence[Optimizer] | OptimizerChoice:
    """Return the script's optimizers as a list, or else the options of the optimizer that tutti is to make.

    Args:
        optimizer: a ``torch.optim.Optimizer``, a sequence of them, or options, also as text.

    Raises:
        UsageError: an object of another type, an empty sequence, optimizers that share parameters, or wrong options.
    """
    if isinstance(optimizer, str | OptimizerChoice):
        return OptimizerChoice.parse(optimizer) if isinstance(optimizer, str) else optimizer
    several = isinstance(optimizer, Sequence)
    found = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer) if several else []
    if not found or not all(isinstance(each, Optimizer) for each in found):
        raise UsageError(
            f"the optimizer is {kind_of(optimizer)}",
            remedy="give a torch.optim.Optimizer, several in a list, or options such as 'adamw:lr=1e-3'"
            f"{_order_of_arguments(optimizer)}",
        )
    check_apart(found)
    return found


def _order_of_arguments(given: object) -> str:
    """Return the order of the arguments, for a remedy, where an object is one that another argument takes."""
    if isinstance(given, nn.Module | Optimizer | Dataset | DataLoader | Tensor):
        return "; the order is tutti.prepare(model, optimizer, dataset, loss_fn)"
    return ""


def _script_optimizers(trainer: Sequence[Optimizer] | OptimizerChoice) -> Sequence[Optimizer]:
    """Return the optimizers if these are given, and an empty list for the options of an optimizer."""
    return [] if isinstance(trainer, OptimizerChoice) else trainer


def _check_trainable(model: nn.Module, optimizer: Sequence[Optimizer] | OptimizerChoice, sparse: Sequence[str]) -> None:
    """Raise UsageError if no parameter is trainable, or the optimizer cannot train the model."""
    check_state_on_meta(_script_optimizers(optimizer))
    check_memory(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("no parameter of the model is trainable", remedy="set requires_grad on some")
    check_fits(optimizer, model)
    if sparse:
        check_takes_sparse(optimizer, model, sparse)


def _check_tables(model: nn.Module) -> None:
    """Raise UsageError if a forward of the model writes rows of an embedding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UsageError(
                f"the embedding {name or 'that is the model'} has max_norm={module.max_norm:g}, whose forward writes"
                " the rows that it looks up",
                why="each data rank looks up other rows, so that the ranks' copies of the table would differ",
                remedy="leave max_norm out and divide the looked-up vectors in the forward, take strategy='tensor' or"
                " 'pipeline', or take one device",
            )


def _contract(choice: StrategyChoice, ranks: int, count: int | None, batch: int, options: RunOptions) -> BatchContract:
    """Return the batch contract; the strategy may determine the size of micro-batches."""
    number = options.workers or ranks
    micro = choice.micro_batch(options.micro_batch, batch, number)
    return BatchContract(count, batch, number, ranks, micro, options.identical_batches)


def _compute_as_one(
    batch_norm: BatchNormConfig, choice: StrategyChoice, epochs: Epochs, reproducible: bool, needs: str | None
) -> bool:
    """Return whether a rank's workers run as one (synchronised batch norm). Raises UsageError if they cannot."""
    if not isinstance(batch_norm, SyncBatchNormConfig):
        return False
    parallel.check_sync(choice, context.current().identity.size, reproducible, needs)
    for phase in epochs.phases:
        phase.contract.check_whole()
    return True


def _named(units: Checkpointing) -> str | list[str]:
    """Return the options of activation checkpointing, modules as names: the same text on every rank."""
    if units is None or isinstance(units, Blocks):
        return str(units)
    return [unit if isinstance(unit, str) else unit.__qualname__ for unit in units]
