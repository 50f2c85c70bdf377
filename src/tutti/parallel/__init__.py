"""The strategies, each a model layout (where a replica lives) and a gradient synchronisation (how replicas agree).

Imports no torch. A new strategy is one new file in a folder here and one row of ``registry``.
"""

from tutti.parallel.choice import Choice, average, micro_batch, parse_strategy
from tutti.parallel.combinations import check_custom_loop, check_noise_scale, check_strategy, check_sync
from tutti.parallel.registry import TABLE, Strategy

__all__ = [
    "TABLE",
    "Choice",
    "Strategy",
    "average",
    "check_custom_loop",
    "check_noise_scale",
    "check_strategy",
    "check_sync",
    "micro_batch",
    "parse_strategy",
]
