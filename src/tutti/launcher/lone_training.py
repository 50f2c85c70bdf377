"""A warning of scripts that train under ``tutti run`` without tutti: each process would train the whole model alone."""

from __future__ import annotations

import os
import sys
from typing import Any


def warn_of_lone_training(script: str) -> None:
    """Let rank 0 print a warning at its first optimizer step if the script has not joined the ranks by then.

    Each of several ranks then trains the whole model alone. A script joins them by ``tutti.init`` (which
    ``tutti.prepare`` calls) or ``torch.distributed``. To be called in every rank before the script runs; registers a
    hook in rank 0. Does nothing with one rank, or in a process without torch: ``tutti run`` imports torch before it
    forks the ranks, other launchers do not. Not collective.

    Args:
        script: name of the script, for the message.
    """
    if os.environ.get("RANK") != "0" or os.environ.get("WORLD_SIZE", "1") == "1" or "torch" not in sys.modules:
        return
    from torch import distributed
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tutti.launcher import context

    def warn(optimizer: Any, args: Any, kwargs: Any) -> None:
        first.remove()
        if not context.is_initialized() and not distributed.is_initialized():
            print(
                f"tutti: warning: {script} trains without tutti and without torch.distributed, so that each of"
                f" {os.environ['WORLD_SIZE']} processes trains the whole model by itself. Give tutti.prepare the model,"
                " optimizer and data set, or start one process.",
                file=sys.stderr,
                flush=True,
            )

    first = register_optimizer_step_pre_hook(warn)
