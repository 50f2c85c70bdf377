"""Rules for optimizers whose update of an element depends on others: the trial on all ranks, and what is refused.

``mixing.py`` steps copies of an optimizer on small tensors; the functions here combine the ranks' results, and raise
where an optimizer cannot step on the parts of tensors that a strategy gives each rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.optim.mixing import Mixing, mixing_of
from tutti.types.run_context import RunContext

_DEPTH = 3
"""Containers and attributes of an optimizer in each other that are searched for modules (a guess)."""
_WITH_CLOSURE = "take strategy='mirrored', or an optimizer whose step needs no closure"


def agreed_mixing(optimizer: Optimizer | None, run_context: RunContext, elsewhere: bool = False) -> Mixing:
    """Find out by trial steps whether an optimizer can step on slices of tensors, and combine all ranks' results.

    An update of an element may depend on other rows, columns or elements of the tensor, or on other tensors; a step on
    slices is then wrong. The trial steps a copy of the optimizer on small tensors of its own. Collective: an all-gather
    over all ranks of the run. In a run of one rank there is no trial, and the result is that of an element-wise
    optimizer.

    Args:
        optimizer: this rank's optimizer; None if this rank has no parameters.
        run_context: the run, with its communicators.
        elsewhere: whether other processes make the updates, so that a run of one rank needs the trial too.

    Returns:
        A ``Mixing`` with four flags, True where on all ranks a step on parts gives the result of the step on whole
        tensors: ``rows`` (on blocks of the first dimension), ``columns`` (on slices along other dimensions), ``flat``
        (on pieces of the flattened tensor) and ``tensors`` (on some of the tensors alone). Further ``closure``: whether
        any rank's ``step`` needs a closure; ``exchanges``: whether any rank's ``step`` calls collectives;
        ``untried``: this rank's reason why the trial failed, or None; and ``writes``: names of the entries of parameter
        groups that this rank's optimizer changes in its steps. Where a rank's trial failed, the four flags are False.

    Raises:
        UsageError: on all ranks, if a rank's step draws from a global random generator (PyTorch's, NumPy's, Python's).
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    comm = run_context.comms.world
    if comm.size == 1 and not elsewhere:
        return Mixing()
    found = Mixing() if optimizer is None else mixing_of(optimizer)
    own = [found.rows, found.columns, found.flat, found.tensors, not found.draws, not found.closure]
    flags = torch.tensor([*own, not found.exchanges])
    worst = torch.stack(comm.all_gather(flags.int(), "what the optimizer mixes")).amin(0).bool().tolist()
    rows, columns, flat, tensors, fixed, closed, alone = worst
    if not fixed:
        raise UsageError(
            f"{optimizer_class_name(optimizer)} draws random numbers in its step",
            why="every process would draw different numbers, and the parameters would diverge",
            remedy="let it draw from a torch.Generator of its own, with the same seed on every rank, or take"
            " strategy='single'",
        )
    return Mixing(rows, columns, flat, tensors, False, not closed, found.untried, found.writes, not alone)


def refuse_exchanges(optimizer: Optimizer | None, mixing: Mixing) -> None:
    """Raise UsageError for an optimizer whose step calls collectives. Called if ranks do not make the same steps.

    Distributed versions of Muon divide their work over ranks by collectives, which every rank must call alike.

    Args:
        optimizer: this rank's optimizer, named in the error; None if this rank has no parameters.
        mixing: result of the optimizer's trial, equal on all ranks (``agreed_mixing``), of which ``exchanges`` is read.

    Raises:
        UsageError: ``mixing.exchanges`` is True.
    """
    if mixing.exchanges:
        raise UsageError(
            f"{optimizer_class_name(optimizer)} calls collectives of torch.distributed in its step",
            why="with this strategy each rank, or a server, steps other tensors, or as many times as it has samples:"
            " ranks would not make the same calls, and would wait for each other",
            remedy="take the optimizer's version for one device, whose work strategy='sharded' divides over ranks; or"
            " strategy='mirrored'",
        )


def refuse_parts(optimizer: Optimizer | None, mixing: Mixing, parts: int, what: str) -> None:
    """Raise UsageError for an optimizer that needs all tensors in one step, if they are divided over stages or ranks.

    Args:
        optimizer: this rank's optimizer, named in the error.
        mixing: result of the optimizer's trial steps (``agreed_mixing``), equal on all ranks.
        parts: number of stages or ranks among which the tensors are divided; 1 is never refused.
        what: name of the stages or ranks in the error, such as "stages of the model".

    Raises:
        UsageError: ``parts`` is above 1 and ``mixing.tensors`` is False: in the trial, a step on some of the tensors
            alone gave another result than a step on all, or the trial failed; or steps change parameter groups.
    """
    if parts > 1 and not mixing.tensors:
        raise UsageError(
            f"{optimizer_class_name(optimizer)} needs all tensors together, and {parts} {what} have some each",
            why=mixing.untried or "in a trial a step on half of the tensors was another than among all of them",
            remedy=_WITH_CLOSURE if mixing.closure else "take mirrored or sharded",
        )
    if parts > 1:
        refuse_changed_settings(optimizer, mixing)


def refuse_changed_settings(optimizer: Optimizer | None, mixing: Mixing) -> None:
    """Raise UsageError for an optimizer whose steps change its parameter groups. Called if a copy of it steps instead.

    Args:
        optimizer: this rank's optimizer, named in the error.
        mixing: result of the optimizer's trial, whose ``writes`` are the names of entries of parameter groups that
            steps change.

    Raises:
        UsageError: ``mixing.writes`` is not empty. The copy (on a server, a stage or an owner of tensors) takes its
            settings from the script's optimizer before each step, which would undo the changes of its last step, such
            as of a count or an estimated learning rate.
    """
    if mixing.writes:
        entries = ", ".join(sorted(mixing.writes))
        raise UsageError(
            f"{optimizer_class_name(optimizer)} changes {entries} of its parameter groups in its steps",
            why="optimizers of servers, stages or owners of tensors make the steps, with the settings of the script's"
            " own optimizer, which stay as they are",
            remedy="keep such numbers in optimizer.state, or take mirrored or sharded",
        )


def refuse_closure(optimizer: Optimizer | None, mixing: Mixing) -> None:
    """Raise UsageError for an optimizer whose step needs a closure. Called if the step works on gathered tensors.

    Args:
        optimizer: this rank's optimizer, named in the error; None if this rank has no parameters.
        mixing: result of the optimizer's trial, equal on all ranks (``agreed_mixing``), of which ``closure`` is read.

    Raises:
        UsageError: ``mixing.closure`` is True; while tensors are gathered the closure would run on this rank alone.
    """
    if mixing.closure:
        raise UsageError(
            f"{optimizer_class_name(optimizer)} needs whole tensors and a closure",
            why="the closure would compute the loss on this rank alone, while the tensors are gathered",
            remedy=_WITH_CLOSURE,
        )


def refuse_modules(optimizer: Optimizer, mixing: Mixing) -> None:
    """Raise UsageError for an optimizer whose trial failed and which has an ``nn.Module`` in one of its attributes.

    Its step might read the module's parameters, which are not whole on any rank: the step gets gathered tensors of its
    own.

    Args:
        optimizer: this rank's optimizer.
        mixing: result of the optimizer's trial, equal on all ranks (``agreed_mixing``), of which ``untried`` is read.

    Raises:
        UsageError: ``mixing.untried`` is set, and an attribute of the optimizer is or holds a module.
    """
    attributes = {} if mixing.untried is None else vars(optimizer)
    own = ("state", "param_groups", "defaults")
    modules = [name for name, value in attributes.items() if name not in own and _has_module(value, _DEPTH)]
    if modules:
        raise UsageError(
            f"{type(optimizer).__name__} has modules in its attribute {modules[0]}, whose parameters its step may read",
            why=f"each rank has a part of the parameters, and steps on tensors of its own; {mixing.untried}",
            remedy="read the parameters of param_groups alone, and keep all else in optimizer.state; or take"
            " strategy='mirrored'",
        )


def _has_module(value: object, depth: int) -> bool:
    """Return whether an object is a module, or has one among its elements, keys or attributes."""
    if isinstance(value, nn.Module):
        return True
    held = [*value, *value.values()] if isinstance(value, dict) else list(getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple | set):
        held = list(value)
    return depth > 0 and any(_has_module(each, depth - 1) for each in held if not isinstance(each, type))


def optimizer_class_name(optimizer: Optimizer | None) -> str:
    """Return the class name of an optimizer for a message, or "the optimizer" for None."""
    return "the optimizer" if optimizer is None else type(optimizer).__name__
