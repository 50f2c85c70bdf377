"""The strategies, each a model layout (where a replica lives) and a gradient synchronisation (how replicas agree).

Imports no torch. A new strategy is one new file in a folder here, its class in ``registry``, and a row of
``tutti.config.strategy_table``.
"""

from tutti.parallel.combinations import (
    NoiseBasis,
    check_custom_loop,
    check_noise_scale,
    check_strategy,
    check_sync,
    compares_micro_batches,
    exchanges_sparse,
    noise_basis,
)
from tutti.parallel.registry import make_strategy

__all__ = [
    "NoiseBasis",
    "check_custom_loop",
    "check_noise_scale",
    "check_strategy",
    "check_sync",
    "compares_micro_batches",
    "exchanges_sparse",
    "make_strategy",
    "noise_basis",
]
