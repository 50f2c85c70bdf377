"""Refusals of what a script cannot do while a model's parameters are sharded, each with its reason and remedy."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tutti.errors import UsageError, script_line
from tutti.torch_compat import TorchFunctionDisabled, tree_leaves

_FUNCTIONAL_CALL: Any = inspect.unwrap(torch.func.functional_call)


def watch_forwards(module: nn.Module) -> None:
    """Register hooks that refuse ``torch.func.functional_call`` and ``create_graph=True`` for a wrapped module.

    The hooks run around every forward of the module. A forward within ``functional_call`` raises UsageError, and so
    does a backward with ``create_graph=True`` through the outputs of a forward. Not collective.

    Args:
        module: a module that FSDP2 has wrapped.
    """
    module.register_forward_pre_hook(_refuse_functional_call, prepend=True)
    module.register_forward_hook(_watch_created_graphs)


def refuse_gathered_write(name: str, written_by: str = "") -> NoReturn:
    """Raise UsageError: the script has written, or is about to write, a parameter that FSDP2 has unsharded.

    FSDP2 all-gathers such a parameter for one forward and frees it, so that the write would be lost. Never returns.

    Args:
        name: the parameter's name in the model.
        written_by: name of the function that is about to write, for the message; "" if the write has happened.
    """
    raise UsageError(
        f"the script writes the parameter {name} within a forward or before its backward"
        + (f" ({written_by})" if written_by else ""),
        where=script_line(),
        why="it has whole tensors there, which FSDP2 gathers for one pass and frees, so that the write would be lost",
        remedy="write between steps, when parameters are DTensors of the rows, or keep an average of the weights by"
        " ema=… of tutti.prepare; or take strategy='sharded:stage=1' or 'mirrored'",
    )


def refuse_assigned_data(name: str) -> NoReturn:
    """Raise UsageError: the script has assigned the ``.data`` of a parameter that FSDP2 shards. Never returns.

    Args:
        name: the parameter's name in the model.
    """
    raise UsageError(
        f"the script has assigned the .data of {name}, whose rows are sharded over devices",
        where=script_line(),
        why="FSDP2 keeps the rows elsewhere, so that the assignment would change nothing",
        remedy="write in place, with torch.no_grad(): parameter.copy_(value), or mul_, add_, clamp_",
    )


def refuse_replaced(name: str) -> NoReturn:
    """Raise UsageError: the script has put another object in the place of a sharded parameter. Never returns.

    Args:
        name: the parameter's name in the model.
    """
    raise UsageError(
        f"the script has replaced or tied the parameter {name} of the model after tutti.prepare",
        where=script_line(),
        why="FSDP2 puts its own parameter back in every forward, so that the change would be lost",
        remedy="make and tie all parameters before tutti.prepare, or write new values into them (copy_)",
    )


def refuse_gradient_of_rows(name: str, rows: Tensor) -> NoReturn:
    """Raise UsageError: the loss reads a parameter object from before ``tutti.prepare``. Never returns.

    Registered as an autograd hook on that object, which since ``tutti.prepare`` holds this rank's rows (shard) of the
    parameter. The model's forward reads the gathered parameter instead, so that a gradient of the rows can only come
    from code outside of the model.

    Args:
        name: the parameter's name in the model.
        rows: unused; autograd passes it to hooks.
    """
    raise UsageError(
        f"the loss reads the object that was the parameter {name} of the model before tutti.prepare",
        where=script_line(),
        why="since tutti.prepare that object holds the rows of this rank alone, so that each rank adds another term",
        remedy="read the parameters from the model each time (model.parameters(), or model.named_parameters()), or take"
        " strategy='mirrored'",
    )


def refuse_rows_written(local_step: int) -> NoReturn:
    """Raise UsageError: the script has written the rows in an optimizer's groups between a step's begin and backward.

    The rows are this rank's part of a parameter; the step's forwards have used their old values. Never returns.

    Args:
        local_step: number of steps that this rank has taken before this one.
    """
    raise UsageError(
        "the script writes the rows of a parameter in an optimizer's groups between the beginning of a step and its"
        " backward",
        where=f"step {local_step + 1}, {script_line()}",
        why="since tutti.prepare the groups hold the rows of this rank, and the forwards of this step have the values"
        " from before",
        remedy="take model.parameters() in place of group['params'], write after optimizer.step(), or take"
        " strategy='mirrored'",
    )


def refuse_offload(what: str, remedy: str) -> NoReturn:
    """Raise UsageError: the option ``offload`` cannot be combined with an optimizer or an option of one.

    Args:
        what: name of the optimizer or option, for the message.
        remedy: advice for the user.
    """
    raise UsageError(
        f"offload cannot be combined with {what}",
        why="the parameters are in host memory during an update",
        remedy=remedy,
    )


def _refuse_functional_call(*_: Any) -> None:
    """Raise UsageError within ``torch.func.functional_call``, which replaces the parameters for one forward."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL.__code__:
            raise UsageError(
                "torch.func.functional_call cannot be combined with sharded parameters",
                why="FSDP2 gathers the model's own parameters, and not the tensors that are passed in their place",
                remedy="take strategy='sharded:stage=1' or 'mirrored'",
            )
        frame = frame.f_back


def _watch_created_graphs(module: nn.Module, args: Any, output: Any) -> None:
    """Let a backward through the module's outputs raise UsageError if it makes a graph of its own."""
    if not torch.is_grad_enabled():
        return
    # Tensors split over tensor ranks refuse hooks of a script, which would get a slice of the gradient.
    with TorchFunctionDisabled():
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(_refuse_created_graph)


def _refuse_created_graph(gradient: Tensor) -> None:
    """Raise UsageError in a backward with ``create_graph=True``.

    Its graph holds gathered parameters, which FSDP2 frees after this backward. The next backward gathers them again or
    not, as autograd orders its nodes, and gradients that arrive after FSDP2's reduction are lost without an error.
    """
    if torch.is_grad_enabled():
        raise UsageError(
            "the loss has a gradient in it (create_graph=True), which cannot be combined with sharded parameters",
            why="FSDP2 frees the gathered parameters after the first backward, and the second needs them again",
            remedy="take strategy='sharded:stage=1' or 'mirrored'",
        )
