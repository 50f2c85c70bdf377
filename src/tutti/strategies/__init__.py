"""The known strategies: a layout (where a replica lives) and an exchange (how replicas agree) each. No torch.

A new strategy is one new file in ``layouts/`` or ``exchanges/`` and one row of ``table``.
"""

from tutti.strategies.checks import check, check_sync
from tutti.strategies.choice import Choice, ahead, average, micro_batch, parse
from tutti.strategies.table import TABLE, Strategy

__all__ = ["TABLE", "Choice", "Strategy", "ahead", "average", "check", "check_sync", "micro_batch", "parse"]
