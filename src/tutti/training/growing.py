"""A batch that grows, seen from the model and from the plan of a run: what deserves a word before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.laws.growth import Growth
from tutti.nn.config import Ghost, Sync, check_batch_norm
from tutti.optim.config import Cosine, Linear, check_schedule
from tutti.optim.scaling import check_growth
from tutti.spec import Duration
from tutti.training.config import TrainConfig
from tutti.world import context

_SEEN = "as the batch grows"


def growing(
    contract: BatchContract,
    growth: Growth | str | None,
    model: nn.Module,
    batch_norm: str,
    lr_scale: str,
    gradient_noise: str,
) -> Epochs:
    """The contracts of all epochs; rank 0 warns where batch norm would see larger batches. Raises UsageError."""
    if isinstance(growth, str):
        growth = Growth.parse(growth, "batch_growth")
    if growth is not None:
        check_growth(lr_scale, gradient_noise)
    epochs = Epochs(contract, growth)
    if context.current().identity.rank == 0:
        for text in of_model(epochs, model, batch_norm):
            warnings.warn(text, stacklevel=3)
    return epochs


@contextmanager
def said_elsewhere() -> Iterator[None]:
    """Within the block ``growing`` does not warn: listeners are told."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _SEEN)
        yield


def of_model(epochs: Epochs, model: nn.Module, batch_norm: str) -> Iterator[str]:
    """What changes in the model's arithmetic as the batch grows."""
    norm = check_batch_norm(batch_norm)
    contracts = (epochs.phases[0].contract, epochs.phases[-1].contract)
    first, last = (c.batch if isinstance(norm, Sync) else len(c.first_cell(c.batch)) for c in contracts)
    if first == last or isinstance(norm, Ghost):
        return
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        other = "" if isinstance(norm, Sync) else f" or a micro-batch of {first}"
        yield (
            f"{_SEEN}, batch norm sees more samples together: {first} at first, {last} in the end. "
            f"That is another model; batch norm ghost:size={first}{other} keeps what it sees"
        )


def of_plan(epochs: Epochs, config: TrainConfig, total: int | None) -> Iterator[str]:
    """What the length of the run and its schedule do to the growth."""
    if epochs.growth is None:
        return
    first = Duration(epochs.growth.epochs[0], "ep")
    if total is not None and total <= epochs.steps(first):
        yield f"the run ends before the batch grows, which is after {first}"
    schedule = check_schedule(config.schedule)
    if isinstance(schedule, Cosine | Linear) and schedule.final < 1:
        yield (
            f"the schedule {config.schedule} lowers the learning rate while the batch grows: the noise of the gradient "
            "falls by both; to grow the batch instead, take --schedule constant"
        )
