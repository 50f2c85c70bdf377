"""One step, and nothing else. Every strategy goes this way.

data.next → place → for each worker here: enter · run · leave → finish → update
global      local                 swap in · forward+backward · push  agree    parameters
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tutti.types import Agreed, Cell, Exchange, GradSink, LossFn, Replica, Tick, Update


def step(
    replica: Replica,
    exchange: Exchange,
    sink: GradSink,
    work: Sequence[tuple[int, Sequence[Cell]]],
    loss: LossFn,
    tick: Tick,
    adapt: Callable[[Agreed, Tick], Tick] | None = None,
) -> tuple[Agreed, Update]:
    """Train on one global batch.

    Args:
        replica: the model as it lives here.
        exchange: how replicas agree.
        sink: receives the gradients.
        work: for each worker of this rank, in order, its micro-batches (none where its share is empty).
        loss: the loss function.
        tick: what is the same for all workers.
        adapt: the tick to update with, from what all ranks agreed on.

    Returns:
        What all ranks agreed on, and what the update did.
    """
    for worker, cells in work:
        exchange.enter(worker, tick)
        part = replica.run(cells, loss, sink) if cells else None
        exchange.leave(worker, part)
    agreed = exchange.finish(tick)
    return agreed, exchange.update(agreed, tick if adapt is None else adapt(agreed, tick))
