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
        """Return an empty list: unsharded parameters need no record of which have received a gradient.

        A custom training loop calls this between micro-batches. With FSDP2, whose backward itself reduces gradients,
        the method returns for each parameter whether a backward has reached it; here the parameter's ``.grad`` shows
        that.
        """
        return []

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Do nothing: unsharded parameters need no record of which have received a gradient.

        With FSDP2, a custom training loop marks the parameters that earlier micro-batches have reached; here ``.grad``
        shows that.

        Args:
            used: unused; for each trained parameter whether backward has given it a gradient.
        """

    def apply_clearing(self) -> None:
        """Do nothing: the script clears ``.grad`` of the same parameter objects that backward and the optimizer use.

        With FSDP2 the script clears ``.grad`` of unsharded parameters, and this method clears the sharded gradients
        likewise.
        """

    def show_gradients(self) -> None:
        """Do nothing: the script sees the ``.grad`` of the same parameter objects that backward and the optimizer use.

        With FSDP2 the model has unsharded parameters between a forward and its backward; there this method puts
        placeholders into their ``.grad``, to notice whether the script clears them.
        """

    def on_zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Do nothing: ``optimizer.zero_grad()`` has already cleared the ``.grad`` of the model's parameters.

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
        """Give the script's writes to buffers in its own training loop to this rank's last logical worker alone.

        Called before the first step of each of the script's own training loops. Each logical worker, one of N fixed
        shares of the global batch, has its own copy of buffers such as batch-norm statistics. The rule holds on a rank
        that computes several workers, for a buffer that forwards write, too, and that the script writes between an
        update and the next step. Until ``leave_custom_loop`` such a write goes to the copy of the rank's last worker;
        outside of custom loops it raises UsageError in the next step, unless it is a reset to zeros, or to ones for a
        variance. Not collective.
        """
        self._buffers.begin_custom_loop()

    def leave_custom_loop(self) -> None:
        """Refuse the script's writes to module buffers again, by the rule of ``CustomLoopSync``. Not collective."""
        self._buffers.leave_custom_loop()

    def named_trained(self) -> NamedParameters:
        """Return a list of (name, parameter) of the parameters that are or were trainable, in the model's order."""
        return self._trained

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return a list of the parameters that are or were trainable in this run, in the model's order."""
        return [parameter for _, parameter in self._trained]

    def trained_tensors(self) -> list[Tensor]:
        """Return a list of the ``.data`` of the trained parameters, in the model's order.

        The tensors are detached from autograd and share memory with the model's parameters on this rank.
        """
        return [p.data for p in self.script_parameters()]
