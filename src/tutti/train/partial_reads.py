"""``state_dict`` of a model of which each rank holds a part; refuse its copies, pickles and averages."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tutti.errors import UsageError
from tutti.nn.absent_tensor import is_absent
from tutti.nn.state_copy import SourceValues, StateCopy, read_only_copies
from tutti.nn.swap import buffers, parameters
from tutti.parallel.viewed_part import ViewedPart
from tutti.python_compat import LiveObjects
from tutti.torch_compat import local_tensor
from tutti.types.run_context import RunContext

if TYPE_CHECKING:
    from tutti.train.run import Run

_AVERAGES = LiveObjects(AveragedModel)
_PARTIAL: WeakSet[nn.Module] = WeakSet()
"""Modules whose ``state_dict``, copies and pickles a run has replaced."""


class PartialReads:
    """Gathers ``state_dict`` of a model that is sharded, or split over stages or tensor ranks; refuses its copies.

    The constructor gives the model of an earlier run back its own methods.

    Args:
        model: the script's model, before ``tutti.prepare`` splits it.
        run_context: the run's device mesh, which says whether parameters are split.

    Raises:
        UsageError: an ``AveragedModel`` of this model exists, and it will not be able to read all parameters.
    """

    def __init__(self, model: nn.Module, run_context: RunContext) -> None:
        mesh, rows = run_context.mesh, run_context.shards_parameters
        self._partial = rows or mesh.tensor > 1 or mesh.stage > 1
        # An average reads parameters element by element: stages' parameters, rows and slices are gathered for it.
        several = (mesh.stage > 1) + rows + (mesh.tensor > 1)
        buffers = mesh.stage > 1 and next(model.buffers(), None) is not None
        unread = several > 1 or buffers or (several > 0 and mesh.tensor == 1 and run_context.compile is not None)
        self._modules = list(model.modules())
        for module in self._modules:
            _give_back(module)
        if unread and _has_average(model):
            raise UsageError(
                "the strategy cannot be combined with torch.optim.swa_utils.AveragedModel",
                why="it reads all parameters of the model, of which each rank has a part",
                remedy="give tutti.prepare ema=… (run.state(averaged=True) is the average), or update the average from"
                " run.state() on a copy of the model, or take strategy='mirrored'",
            )

    def begin(self, run: Run) -> None:
        """Replace ``state_dict()``, ``copy.deepcopy`` and pickles of the model and its modules for this run.

        If this rank holds only shards, tensor slices or pipeline stages of the model, a copy or pickle, which would
        consist of these alone, raises UsageError. ``state_dict()`` then returns whole tensors, and is collective over
        all ranks, as ``run.state()``. A tensor that it has returned can be read until the run's next step or another
        change of the model; a later read raises UsageError, and so does every write. Does nothing if this rank holds
        the whole model. Not collective itself.

        Args:
            run: the run that trains the model; only weak references to it are kept.
        """
        if not self._partial:
            return
        _PARTIAL.update(self._modules)
        gathered = _GatheredState(run)
        for name, module in run.model.named_modules():
            _PARTIAL.add(module)
            # Instance attributes take precedence over the class's: FSDP2's class raises without naming a way out.
            vars(module).update(
                state_dict=gathered.reader(module, f"{name}." if name else ""),
                __deepcopy__=_refuse_copy,
                __reduce_ex__=_refuse_pickle,
            )


class _GatheredState:
    """Makes ``state_dict`` methods of modules that return whole parameters of the model on every rank.

    Args:
        run: the run that trains the model; only a weak reference is kept.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._reading = ref(run), False

    def reader(self, module: nn.Module, place: str) -> Callable[..., dict[str, Any]]:
        """Return a method in place of the module's ``state_dict``; ``place``: prefix of its names in the model."""
        held, plain = ref(module), type(module).state_dict

        def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            owner, run = held(), self._run()
            if owner is None or run is None:
                _refuse("state_dict() of the model")
            if self._reading:
                return plain(owner, *args, **kwargs)
            self._reading = True
            try:
                state: dict[str, Any] = plain(owner, *args, **kwargs)
            finally:
                self._reading = False
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            if kwargs.get("keep_vars", len(args) > 2 and args[2]):
                _refuse("state_dict(keep_vars=True) of the model")
            _gather(run, state, prefix, place)
            return state

        return state_dict


def _gather(run: Run, state: dict[str, Any], prefix: str, place: str) -> None:
    """Put whole tensors into a module's state dict in place of this rank's parts. Collective over all ranks."""
    whole = run.whole_state()
    trained = dict(run.model.named_parameters(remove_duplicate=False))
    for key, part in state.items():
        # A parent of the model has put tensors of its own into the dict.
        if not key.startswith(prefix) or not isinstance(part, Tensor) or key.endswith("_extra_state"):
            continue
        name = place + key.removeprefix(prefix)
        if name not in whole:
            _refuse(f"state_dict() of the model with {name}, of which run.state() has no values,")
        if name not in trained and run.context.workers > 1:
            if part.shape != whole[name].shape or is_absent(part):
                _refuse(f"state_dict() of a model with {name}, which each logical worker has of its own,")
            continue  # that of the logical worker which the model holds, as if the model were whole
        state[key] = StateCopy.of(whole[name].detach(), name, _Values(run, part))


def read_only_state(run: Run, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole tensors of a model, in which copies are read-only: a write to one would be lost. Not collective.

    Args:
        run: the run that trains the model.
        whole: all tensors by name, as ``run.whole_state`` returns them.

    Returns:
        A dict with the same names: the model's own tensors of this rank as they are, and in place of each copy a tensor
        that raises UsageError when it is written.
    """
    live = [local_tensor(parameter) for _, parameter in parameters(run.replica.parts)]
    return read_only_copies(whole, [*live, *(slot.get() for slot in buffers(run.replica.parts))])


class _Values(SourceValues):
    """A tensor of the model, of which this rank has a part.

    This rank looks at its part of the tensor; every update and step counts as a change.

    Args:
        run: the run that trains the model; only a weak reference is kept.
        part: this rank's part of the tensor.
    """

    def __init__(self, run: Run, part: Tensor) -> None:
        self._run, self._before = ref(run), (run.global_step, run.updates)
        self._part = None if is_absent(part) else ViewedPart(part)

    def unchanged(self) -> bool:
        run = self._run()
        same = run is not None and (run.global_step, run.updates) == self._before
        return same and (self._part is None or self._part.unchanged())

    def undo(self) -> None:
        """Do nothing: writes to the model that ranks have made alike may stay."""


def _give_back(module: nn.Module) -> None:
    if module in _PARTIAL:
        _PARTIAL.discard(module)
        for name in ("state_dict", "__deepcopy__", "__reduce_ex__"):
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
    return any(_shapes(average.module) in wanted for average in _AVERAGES.all())


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


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
