"""Whole values of FSDP2's sharded parameters for a script's loss, and the gradient of the loss by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from tutti.comm.communicator import Communicator
from tutti.comm.partition import block
from tutti.device import is_accelerator
from tutti.errors import UsageError, script_line
from tutti.nn.gradient_hooks import has_accumulation_hook, has_gradient_hook
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter
from tutti.torch_compat import local_tensor


class WholeReads:
    """All-gathers FSDP2-sharded parameters that a script reads outside of the model's forward, as in a weight penalty.

    All shard ranks read a parameter in the same line. Each multiplies its loss by the weight of its own micro-batch, so
    that the sum of the ranks' gradients is the gradient of the global batch's loss, as for the model's outputs.

    Args:
        comm: the ranks that share one copy of the parameters.
        rows: this rank's rows of each parameter, by the ``DTensor`` that the model has.
        reached: called with the name of a parameter when a backward has a gradient for it, before it is added.
    """

    def __init__(
        self, comm: Communicator, rows: Mapping[nn.Parameter, ShardedParameter], reached: Callable[[str], None]
    ) -> None:
        self._comm, self._rows, self._reached = comm, rows, reached
        self._nodes = [_guard(p, each.name) for p, each in rows.items() if p.is_floating_point() or p.is_complex()]

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name in the model of a sharded parameter; None for a tensor that is no parameter of the model.

        Args:
            tensor: any tensor; it is compared by identity with the ``DTensor`` parameters of the model.
        """
        each = self._rows.get(tensor) if isinstance(tensor, nn.Parameter) else None
        return None if each is None else each.name

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole values of a parameter, with a graph if it is trained and gradients are enabled.

        Collective over the shard ranks: an all-gather now; a reduce-scatter in the backward, which adds this rank's
        rows of the sum of the ranks' gradients to the parameter's ``.grad``.

        Args:
            parameter: a ``DTensor`` of the model.

        Returns:
            A new plain tensor of the whole shape, on the run's device.

        Raises:
            MismatchError: the shard ranks are in different calls.
            UsageError: in the backward, the parameter has a hook on its gradient.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        each = self._rows[parameter]
        text = f"values of {each.name}, which all ranks must read in {script_line()}"
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            return self._gather(parameter, text)
        anchor = torch.zeros((), device=self._comm.device, requires_grad=True)
        gather, add = partial(self._gather, parameter, text), partial(self._add, parameter, text)
        found: Tensor = _Whole.apply(anchor, gather, add)  # type: ignore[no-untyped-call]
        return found

    def _gather(self, parameter: nn.Parameter, text: str) -> Tensor:
        self._agree(text)
        rows, most = local_tensor(parameter).detach(), self._most(parameter)
        table = torch.zeros(self._comm.size * most, *rows.shape[1:], dtype=rows.dtype, device=self._comm.device)
        send = table[self._comm.rank * most :][:most]
        send[: len(rows)].copy_(rows)
        self._comm.gather_into(table.view(-1), send.view(-1), text)
        return table[: len(parameter)]

    def _add(self, parameter: nn.Parameter, text: str, gradient: Tensor) -> None:
        """Add this rank's rows of the sum of the ranks' gradients to ``.grad``. Collective."""
        name = self._rows[parameter].name
        if has_gradient_hook(parameter) or has_accumulation_hook(parameter):
            _refuse(
                f"the loss reads {name}, which has a hook on its gradient, outside of the model's forward",
                "the hook would be given the gradient of the forward alone",
                "leave out the hook",
            )
        self._agree(f"gradient of the loss by {text}")
        self._reached(name)
        most = self._most(parameter)
        table = gradient.new_zeros(self._comm.size * most, *gradient.shape[1:])
        table[: len(gradient)].copy_(gradient)
        mine = torch.empty_like(table[:most])
        self._comm.scatter_sum(mine.view(-1), table.view(-1), text)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif is_accelerator(self._comm.device):
            # FSDP2 adds to it in a stream of its own.
            torch.accelerator.synchronize(self._comm.device)
        rows = local_tensor(parameter.grad).detach()
        rows.add_(mine[: len(rows)].to(rows.device))

    def _most(self, parameter: nn.Parameter) -> int:
        return len(block(len(parameter), self._comm.size, 0))

    def _agree(self, text: str) -> None:
        self._comm.all_gather(torch.zeros(1), text)


class _Whole(torch.autograd.Function):
    """Gather a parameter's whole values; backward adds the gradient to the rows. The input is an empty tensor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gather: Callable[[], Tensor], add: Callable[[Tensor], None]) -> Tensor:
        ctx.add = add
        return gather()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.add(gradient)
        return None, None, None


def _guard(parameter: nn.Parameter, name: str) -> Any:
    """Refuse gradients that autograd itself computes for a ``DTensor``, and return the node that has to be kept."""
    trained = parameter.requires_grad
    node = get_gradient_edge(parameter.requires_grad_(True)).node
    node.register_prehook(partial(_refuse_gradient, name))
    parameter.requires_grad_(trained)
    return node


def _refuse_gradient(name: str, gradients: Any) -> NoReturn:
    _refuse(
        f"the loss has a gradient by the rows of {name} that this rank has",
        "each rank would add the gradient of its own micro-batch to its rows alone",
        "read model.parameters() in the loss from the first step on (multiply a penalty that begins later by 0 until"
        " then), on all ranks, and without p.full_tensor() or p.to_local()",
    )


def _refuse(what: str, why: str, remedy: str) -> NoReturn:
    raise UsageError(
        what, where=script_line(), why=why, remedy=f"{remedy}; or take strategy='sharded:stage=1' or 'mirrored'"
    )
