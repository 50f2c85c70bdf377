"""Training scripts as people write them, each in plain PyTorch with its tutti version beside it.

A script is a module ``script_NAME`` with ``BATCH``, ``dataset()``, ``plain(batches)`` and ``script(prepare)``. Flags
say what its cases may be: ``RANDOM`` where training draws random numbers, so that plain PyTorch is not its oracle;
``ONE_EACH`` where its body counts batches by itself, and therefore needs as many logical workers as data ranks;
``MICRO`` where it says how large its micro-batches are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

State = dict[str, Tensor]
Batches = Callable[..., Iterator[Any]]
"""``batches(epoch)``: the global batches of an epoch, in tutti's order; ``batches(epoch, data)`` of other data."""
Prepare = Callable[..., Any]
"""``tutti.prepare`` with strategy, workers and seed."""
