"""Refuse ``state_dict``, copies, pickles and averages of a model of which each rank holds a part."""

from __future__ import annotations

import gc
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim.swa_utils import AveragedModel

from tutti.errors import UsageError
from tutti.python_compat import live_objects
from tutti.types.run_context import RunContext

_REFUSED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Handle of the state-dict hook of each refused module."""


class PartialReads:
    """Refuses ``state_dict``, copies and pickles of a model that is sharded, or split over stages or tensor ranks.

    The constructor lifts the refusals of an earlier run of the model.

    Args:
        model: the script's model, before ``tutti.prepare`` splits it.
        run_context: the run's device mesh, which says whether parameters are split.

    Raises:
        UsageError: an ``AveragedModel`` of this model exists, and it will not be able to read all parameters.
    """

    def __init__(self, model: nn.Module, run_context: RunContext) -> None:
        grid, rows = run_context.grid, run_context.rows
        self._partial = rows or grid.tensor > 1 or grid.stage > 1
        # An average reads parameters element by element: stages' parameters, rows and slices are gathered for it.
        several = (grid.stage > 1) + rows + (grid.tensor > 1)
        buffers = grid.stage > 1 and next(model.buffers(), None) is not None
        unread = several > 1 or buffers or (several > 0 and grid.tensor == 1 and run_context.compile is not None)
        self._modules = list(model.modules())
        for module in self._modules:
            _allow(module)
        if unread and _has_average(model):
            raise UsageError(
                "the strategy cannot be combined with torch.optim.swa_utils.AveragedModel",
                why="it reads all parameters of the model, of which each rank has a part",
                remedy="give tutti.prepare ema=… (run.state(averaged=True) is the average), or update the average from"
                " run.state() on a copy of the model, or take strategy='mirrored'",
            )

    def refuse(self) -> None:
        """Make ``state_dict()``, ``copy.deepcopy`` and pickles of the model and its modules raise UsageError.

        The methods are replaced if this rank holds only shards, tensor slices or pipeline stages of the model, of which
        alone a copy would consist. Does nothing if this rank holds the whole model.
        """
        for module in self._modules if self._partial else ():
            handle = module.register_state_dict_pre_hook(_refuse_state)
            _REFUSED[module] = handle
            # Instance attributes take precedence over the class's: FSDP2's class raises without naming a way out.
            vars(module).update(__deepcopy__=_refuse_copy, __reduce_ex__=_refuse_pickle)


def _allow(module: nn.Module) -> None:
    handle = _REFUSED.pop(module, None)
    if handle is not None:
        handle.remove()
        for name in ("__deepcopy__", "__reduce_ex__"):
            vars(module).pop(name, None)


def _has_average(model: nn.Module) -> bool:
    """Return whether an ``AveragedModel`` exists with the names and shapes of this model or one of its children."""
    wanted = [shapes for shapes in map(_shapes, (model, *model.children())) if shapes]
    if not _averages(wanted):
        return False
    # An unreachable one may be in a reference cycle that has not been collected yet.
    gc.collect()
    return _averages(wanted)


def _averages(wanted: list[dict[str, Any]]) -> bool:
    return any(_shapes(average.module) in wanted for average in live_objects(AveragedModel))


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> NoReturn:
    _refuse("state_dict() of the model")


def _refuse_copy(memo: Any) -> NoReturn:
    _refuse("a copy of the model (copy.deepcopy, AveragedModel)")


def _refuse_pickle(protocol: int) -> NoReturn:
    _refuse("a pickle of the model (torch.save, pickle)")


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"{what} after tutti.prepare cannot be combined with this strategy",
        why="each rank has a part of the parameters",
        remedy="call run.state() on every rank, which gives the whole plain model's state, and save it on rank 0; for"
        " an average of the weights give tutti.prepare ema=…; make copies before tutti.prepare",
    )
