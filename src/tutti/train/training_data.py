"""The training data of a run: sampling, checks of its options, and the call that tries a first micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from tutti.config.module_config import SyncBatchNormConfig
from tutti.config.strategy_choice import StrategyChoice
from tutti.data.adapt import adapt_training
from tutti.data.batches import slice_batch
from tutti.data.contract import BatchContract
from tutti.data.sampling import Sampling, given_sampling
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.errors import UsageError
from tutti.train.run_options import DEFAULT_BATCH_SIZE, RunOptions
from tutti.train.script_checks.iterator_watch import iterators_unread
from tutti.train.script_checks.python_state import python_state
from tutti.types.micro_batch import LossFn


def choose_sampling(dataset: Any, options: RunOptions) -> Sampling:
    """Combine the data set, or ``DataLoader``, with the options into one description of its global batches.

    The batch size is ``options.batch_size``, else the loader's batch size, else 128. The data set is not read; a batch
    sampler of the script's own is iterated for epoch 0 where the options give no batch size, which is then its longest
    batch.

    Args:
        dataset: the samples, or a ``DataLoader``.
        options: the options of ``tutti.prepare``, such as ``batch_size``, ``shuffle`` and ``collate``.

    Returns:
        A ``Sampling``: ``dataset``, ``batch_size``, order (``shuffle`` or ``sampler``, ``drop_last``), ``collate`` and
        ``processes`` (number of loader processes of each rank).

    Raises:
        UsageError: an option differs from that of the ``DataLoader``, or the loader cannot be reproduced on several
            ranks, such as one with an ``__iter__`` of its own or a ``DistributedSampler``.
        DataError: the batch sampler yields no list, or anything but lists of indices in the data set.
    """
    found = given_sampling(
        dataset, options.batch_size, options.collate, options.shuffle, options.drop_last, options.data_workers
    )
    return (
        replace(found, batch_size=DEFAULT_BATCH_SIZE)
        if found.batch_size is None and not found.whole
        else found.sized(options.seed)
    )


def wrap_training_data(sampling: Sampling, choice: StrategyChoice, options: RunOptions) -> Source | Stream:
    """Wrap the training data set for reading by index (``Source``) or in order (``Stream``), and check the options.

    Args:
        sampling: the data set, and how its samples become global batches.
        choice: the run's strategy.
        options: the options of ``tutti.prepare``.

    Returns:
        A ``Source`` for a map-style data set, a ``Stream`` for an iterable one.

    Raises:
        UsageError: the data set has an unknown type; a stream (iterable data set) with ``shuffle`` or
            ``identical_batches``; a stream that shards itself with ``drop_last`` or ``reproducible``; a stream or a
            sampler with parameter servers of which each rank makes as many steps as it can (``steps=all``);
            ``drop_last`` with ``batch_growth``; or a ``collate`` of the script with synchronised batch norm and several
            workers or micro-batches.
        DataError: the data set is empty, or its tensors have different numbers of samples.
    """
    data = adapt_training(sampling.dataset, sampling.collate, sampling.drop_last, sampling.processes)
    identical, reproducible = options.identical_batches, options.reproducible
    _check_order(sampling, data, choice, options)
    if isinstance(data, Stream) and not choice.row.synchronous:
        raise UsageError(
            "steps=all cannot be combined with a stream",
            why="ranks read a stream in step, and here each makes as many steps as it can",
            remedy="leave it out, or take a data set with __len__ and __getitem__",
        )
    if identical and isinstance(data, Stream):
        raise UsageError(
            "identical_batches needs a data set with __len__ and __getitem__", remedy="leave identical_batches out"
        )
    if reproducible and isinstance(data, Stream) and data.sharded:
        raise UsageError(
            "reproducible cannot be combined with a data set that shards itself",
            why="the content of a global batch depends on the number of devices",
            remedy="leave out one of the two",
        )
    return data


def _check_order(sampling: Sampling, data: Source | Stream, choice: StrategyChoice, options: RunOptions) -> None:
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
    if sampling.drop_last and options.batch_growth is not None:
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
    several = (options.workers or 0) > 1 or options.micro_batch is not None
    if sampling.collate is not None and isinstance(options.batch_norm_options, SyncBatchNormConfig) and several:
        raise UsageError(
            "batch_norm='sync' cannot be combined with an own collate and several workers a device",
            why="a device computes on all its samples at once, and collate makes one batch for each worker",
            remedy="leave workers and micro_batch out",
        )


def samples_per_epoch(data: Source | Stream, sampling: Sampling) -> int | None:
    """Return the number of samples that an epoch trains on, without an incomplete batch that ``drop_last`` drops.

    Args:
        data: the training data.
        sampling: batch size and order of the global batches, and whether the last incomplete one is dropped.

    Returns:
        Number of samples; None where it is unknown (a stream without a length, a batch sampler).

    Raises:
        DataError: ``drop_last`` leaves no samples.
        UsageError: the sampler draws more than 10⁹ samples an epoch.
    """
    if not isinstance(data, Stream):
        return sampling.in_an_epoch(len(data))
    if data.samples is None or not sampling.drop_last:
        return data.samples
    return data.samples // (sampling.batch_size or 1) * (sampling.batch_size or 1)


def first_micro_batch_trial(
    data: Source | Stream,
    contract: BatchContract,
    place: Callable[[Any], Any],
    loss: LossFn | None,
    seed: int,
    data_rank: int,
) -> Callable[..., Any] | None:
    """Return a function that calls the loss function on the first micro-batch of the training data.

    Layouts and strategies call the returned function (as ``RunContext.trial``) before the first step, to find out how a
    model behaves. This function itself only makes it: no sample is read, and the loss function is not called.

    Args:
        data: the training data. Each call of the returned function reads the samples 0, 1, … by index, whatever the
            order of the epoch; of a stream the first samples, which the first epoch reads again.
        contract: division of the global batch into micro-batches; gives the number of samples, that of logical worker
            0's first micro-batch.
        place: moves a batch to the device.
        loss: the loss function ``loss(model, batch)``; None for none.
        seed: the run's seed, for the order of a stream.
        data_rank: index of this data rank, for a stream that shards itself.

    Returns:
        ``trial(model, most=None)``, which returns the result of ``loss(model, batch)``, with its autograd graph, for
        the micro-batch's first ``most`` samples (None: all of them). It runs a forward alone, in the modes that the
        caller has set, sends nothing by itself, and lets errors of the loss function and of the data set propagate. The
        variables of the loss function, and buffers of modules among them, are restored. None if ``loss`` is None.
    """
    if loss is None:
        return None
    if isinstance(data, Stream):
        return partial(_try_stream, data, len(contract.first_micro_batch(contract.batch)), seed, data_rank, place, loss)
    first = np.arange(len(contract.first_micro_batch(min(contract.batch, len(data)))))

    def trial(model: Any, most: int | None = None) -> Any:
        with python_state(_modules(model), loss), iterators_unread(loss):
            return loss(model, place(data.fetch(first[:most], None)))

    return trial


def call_model(model: Any, batch: Any) -> Any:
    """Call a model on a batch in the usual ways, and return the first result; None if all of them raise.

    A mapping is passed as keyword arguments. Of a tuple or list the model gets, tried in this order, the first element,
    all elements, or all but the last. Any other batch is the only argument.

    Args:
        model: the model.
        batch: a batch as the data set or the collate function gives it.
    """
    ways: list[tuple[tuple[Any, ...], Any]] = [((batch,), {})]
    if isinstance(batch, Mapping):
        ways = [((), batch)]
    elif isinstance(batch, tuple | list) and batch:
        ways = [((batch[0],), {}), (tuple(batch), {}), (tuple(batch[:-1]), {})]
    for args, kwargs in ways:
        with suppress(Exception):
            return model(*args, **kwargs)
    return None


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
    with python_state(_modules(model), loss), iterators_unread(loss):
        return loss(model, place(batch if most is None else slice_batch(batch, 0, most)))


def _modules(model: Any) -> list[nn.Module]:
    """Return the model as a list, whose Python objects a trial restores; an empty one for an object of another kind."""
    return [model] if isinstance(model, nn.Module) else []
