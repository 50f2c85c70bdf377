"""Gradients in custom training loops where the model has the script's own parameters in forwards and between steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.types.optimizer_protocols import NamedParameters


class UnshardedGradients:
    """Mixin of gradient synchronisations that do not shard parameters; it implements methods of ``CustomLoopSync``.

    The ``.grad`` that the script reads and clears is the one that the next reduction or update uses. FSDP2 and ZeRO
    have further objects of each parameter, between which these methods carry gradients; here most do nothing.
    """

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters as the user's model has them, in the model's order. Subclasses implement it."""
        raise NotImplementedError

    def script_parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the trained parameters of the model that are in the parameter groups of an optimizer.

        Args:
            optimizer: the script's optimizer, or one of several.

        Returns:
            The model's parameter objects, in the model's order; frozen parameters are left out. With pipeline stages
            they include parameters of other stages.
        """
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [p for p in self.script_parameters() if id(p) in own]

    def pop_reached(self) -> list[bool]:
        """Return an empty list: ``.grad``, None or not, tells which parameters backward has reached.

        Only FSDP2, whose backward itself reduces gradients, keeps a record.
        """
        return []

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Do nothing: ``.grad``, None or not, tells which parameters backward has reached.

        Args:
            used: unused; for each trained parameter whether backward has given it a gradient.
        """

    def apply_clearing(self) -> None:
        """Do nothing: a script that sets ``.grad`` to None or zeros clears the very tensor that is used next.

        With FSDP2 this method carries a clearing of the unsharded parameters' ``.grad`` over to the sharded gradients.
        """

    def show_gradients(self) -> None:
        """Do nothing: the script sees the very gradients that are used next.

        With FSDP2 this method puts placeholders into the ``.grad`` of the unsharded parameters, which the model has
        between a forward and its backward.
        """

    def on_zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Do nothing: ``optimizer.zero_grad()`` has already cleared the model's ``.grad``.

        Strategies that shard parameters clear the model's gradients here, because the optimizer has other parameter
        objects.

        Args:
            optimizer, set_to_none: unused.
        """


class TrainedGradients(UnshardedGradients):
    """Mixin of gradient synchronisations that list their trained parameters by name, and keep the workers' buffers.

    A worker is a logical worker, one of N fixed shares of the global batch, with its own buffers (such as running
    statistics); a rank may compute several.
    """

    _trained: NamedParameters
    _buffers: WorkerBuffers

    def begin_custom_loop(self) -> None:
        """Begin custom training loops: a buffer that the script writes counts for the rank's last worker alone.

        Called once, before the first step; holds for writes after an update. Not collective.
        """
        self._buffers.begin_custom_loop()

    def leave_custom_loop(self) -> None:
        """End a custom loop over an epoch: what the script writes to buffers next counts for all workers of this rank.

        Called also where the script leaves the loop by ``break``. Not collective.
        """
        self._buffers.leave_custom_loop()

    def named_trained(self) -> NamedParameters:
        """Return (name, parameter) pairs of the parameters that are or were trainable in this run, in model order."""
        return self._trained

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return a list of the parameters that are or were trainable, in the model's order."""
        return [parameter for _, parameter in self._trained]

    def trained_tensors(self) -> list[Tensor]:
        """Return a list of the ``.data`` of the trained parameters, in the model's order.

        The tensors are detached from autograd and share memory with the model's parameters on this rank.
        """
        return [p.data for p in self.script_parameters()]
