"""Batch contracts of a batch-size schedule, and warnings about its effect on batch norm and the run's length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tutti.config.gradient_noise import MultiplicativeNoise
from tutti.config.growth import BatchGrowth
from tutti.config.lr_rule import NoRule, check_growth
from tutti.config.module_config import BatchNormConfig, GhostBatchNormConfig, SyncBatchNormConfig
from tutti.config.optimizer_config import WHOLE_RUN
from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.launcher import context
from tutti.torch_compat import BatchNormBase

_SEEN = "as the batch grows"


def batch_size_schedule(
    contract: BatchContract,
    growth: BatchGrowth | None,
    model: nn.Module,
    batch_norm: BatchNormConfig,
    lr_rule: NoRule,
    noise: MultiplicativeNoise | None,
) -> Epochs:
    """Return the batch contract of every epoch: the global batch size, and its division over logical workers and ranks.

    Rank 0 warns (``warnings.warn``) if batch norm normalises over more samples in the last epoch than in the first.

    Args:
        contract: batch contract of the first epoch.
        growth: the batch-size schedule; None for one batch size.
        model: the script's model, searched for batch norm.
        batch_norm: samples over which batch norm normalises, for the warning.
        lr_rule: the rule that scales the learning rate with the batch size; AdaScale excludes ``growth``.
        noise: options of noise that is added to the gradient, which exclude ``growth``; None for none.

    Returns:
        An ``Epochs``: ``first``, the contract of the first epoch, ``growth``, and ``phases``, the spans of epochs with
        one batch size.

    Raises:
        UsageError: ``growth`` is given together with AdaScale or ``noise``, or for a data set of unknown length.
    """
    if growth is not None:
        check_growth(lr_rule, noise)
    epochs = Epochs(contract, growth)
    if context.current().identity.rank == 0:
        for text in model_warnings(epochs, model, batch_norm):
            warnings.warn(text, stacklevel=3)
    return epochs


@contextmanager
def without_growth_warnings() -> Iterator[None]:
    """Return a context manager that suppresses the warnings of ``batch_size_schedule`` about batch norm.

    Within the ``with`` block, Python warnings whose text starts with "as the batch grows" are ignored.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _SEEN)
        yield


def model_warnings(epochs: Epochs, model: nn.Module, batch_norm: BatchNormConfig) -> Iterator[str]:
    """Yield the text of a warning if batch norm normalises over more samples in the last epoch than in the first.

    At most one text; none with ghost batch norm, whose groups keep their size, or for a model without batch norm.

    Args:
        epochs: batch contracts (global batch sizes and their division) of all epochs.
        model: the script's model.
        batch_norm: options of batch norm.
    """
    contracts = (epochs.phases[0].contract, epochs.phases[-1].contract)
    first, last = (
        c.batch if isinstance(batch_norm, SyncBatchNormConfig) else len(c.first_micro_batch(c.batch)) for c in contracts
    )
    if first == last or isinstance(batch_norm, GhostBatchNormConfig):
        return
    if any(isinstance(module, BatchNormBase) for module in model.modules()):
        other = "" if isinstance(batch_norm, SyncBatchNormConfig) else f" or a micro-batch of {first}"
        yield (
            f"{_SEEN}, batch norm sees more samples together: {first} at first, {last} in the end. "
            f"That changes the model; batch norm ghost:size={first}{other} keeps the number of samples"
        )


def plan_warnings(epochs: Epochs, config: TrainConfig, total: int | None) -> Iterator[str]:
    """Yield a warning if the run ends before the batch grows, and one if the schedule also lowers the learning rate.

    At most two texts; none where the batch size does not grow.

    Args:
        epochs: batch contract (global batch size and its division over ranks) of every epoch.
        config: the resolved configuration.
        total: steps of the run; None if unknown.
    """
    if epochs.growth is None:
        return
    first = Duration(epochs.growth.epochs[0], "ep")
    if total is not None and total <= epochs.steps(first):
        yield f"the run ends before the batch grows, which is after {first}"
    schedule = config.lr_schedule
    if isinstance(schedule, WHOLE_RUN) and schedule.final < 1:
        yield (
            f"the schedule {config.schedule} lowers the learning rate while the batch grows: the noise of the gradient "
            "falls by both; to grow the batch instead, take --schedule constant"
        )
