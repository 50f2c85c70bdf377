"""The layout of data parallelism: every rank holds the whole model."""

from __future__ import annotations

from torch import nn

from tutti.config.layout_config import WholeConfig
from tutti.nn import ac_policy
from tutti.parallel.ddp.replica_part import ReplicaPart
from tutti.types.run_context import RunContext


class WholeLayout:
    """Places the whole model on every rank, for strategies such as ``single`` and ``mirrored`` (DDP).

    Args:
        config: options of the layout; unused, as there are none.
        run_context: communicators and settings of the run.
    """

    def __init__(self, config: WholeConfig, run_context: RunContext) -> None:
        self._run_context = run_context

    def build(self, plain: nn.Module) -> WholeRunner:
        """Move the whole model to this rank's device and return the object that runs forward and backward.

        Activation checkpointing and ``torch.compile``, as the run asks for them, are applied in place; the compiler
        itself runs in the first forwards. Not collective.

        Args:
            plain: the script's model, changed in place.

        Returns:
            A ``WholeRunner``, whose ``run`` computes forward and backward of micro-batches on this rank.

        Raises:
            UsageError: a module named for activation checkpointing is not in the model, or none of the model's modules
                matches the option; or ``torch.compile`` with the run's options cannot compile for this device or for
                this model.
        """
        ac_policy.check_units(plain, self._run_context.activation_checkpointing)
        return WholeRunner(plain, self._run_context)


class WholeRunner(ReplicaPart):
    """Runs forward and backward of one whole model on this rank's device, as plain data parallelism does."""
