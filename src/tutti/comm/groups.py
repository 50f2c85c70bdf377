"""Process groups, made once a world: they are not free."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tutti.world import context, heartbeat
from tutti.world.heartbeat import Phase

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_cache: dict[tuple[Any, tuple[int, ...], str], tuple[ProcessGroup | None, ProcessGroup | None]] = {}


def groups(ranks: tuple[int, ...], purpose: str = "") -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Control group of ``ranks`` and the fast one for a purpose (gradients)."""
    if len(ranks) == 1:
        return None, None
    key = (dist.group.WORLD, ranks, purpose)
    if key not in _cache:
        # Left alone a group takes half an hour. Later than our own limit, so that our message comes first.
        limit = timedelta(seconds=context.current().timeout + 60)
        with heartbeat.training.during(Phase.MEETING):
            control = groups(ranks)[0] if purpose else dist.new_group(list(ranks), backend="gloo", timeout=limit)
            fast = dist.new_group(list(ranks), timeout=limit)
        _cache[key] = (control, fast)
    return _cache[key]
