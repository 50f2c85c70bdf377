"""Refuse a recurrent state that passes between logical workers, in a loop whose body plays several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.errors import UsageError, script_line
from tutti.torch_compat import functorch_level, tree_leaves, view_base
from tutti.types import MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


class CarriedState:
    """Raises UsageError where an output of the model for one micro-batch becomes an input for another one.

    That can happen in a custom training loop where a rank runs the loop's body for several micro-batches of a batch. A
    script that trains on consecutive parts of sequences (truncated backpropagation through time) gives the model the
    state that the model returned for the part before. This state belongs to the samples of one micro-batch, and the
    next pass of the body would use it for other samples. An input counts as an earlier output if it has the same
    storage, also after ``detach()``.

    Args:
        run: the run, whose model is watched by forward hooks.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._here: tuple[int, int] | None = None
        self._made: dict[StorageWeakRef, tuple[int, int]] = {}
        self._watching = False

    def begin_body(self, micro_batch: MicroBatch, several: bool) -> None:
        """Set the micro-batch that the body of a custom training loop trains next, for the check of the model's inputs.

        The check finds recurrent state that a script carries from one micro-batch to another: a forward pre-hook on the
        model raises UsageError if an input has the storage of an output that the model returned for another
        micro-batch. The first call with ``several`` registers the hooks.

        Args:
            micro_batch: the micro-batch that the body trains next.
            several: whether this rank runs the body several times for a global batch; if not, nothing is checked.
        """
        self._here = (micro_batch.worker, micro_batch.micro) if several else None
        self._made = {storage: made for storage, made in self._made.items() if not storage.expired()}
        if several and not self._watching:
            self._watching = True
            for module in self._modules():
                module.register_forward_pre_hook(_StateHook(self._look), with_kwargs=True)
                module.register_forward_hook(_StateHook(self._note))

    def _modules(self) -> set[nn.Module]:
        """Return the modules that a script calls: models, their parts, and PyTorch's recurrent layers anywhere."""
        found = set[nn.Module]()
        for part in self._run.replica.parts:
            recurrent = {each for each in part.modules() if isinstance(each, nn.RNNBase | nn.RNNCellBase)}
            found |= {part, *part.children(), *recurrent}
        return found

    def _note(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._here is not None:
            self._made.update((storage, self._here) for storage in _storages(output, computed=True))

    def _look(self, module: nn.Module, args: Any, named: Any) -> None:
        if self._here is None or not self._made or not torch.is_grad_enabled():
            return
        if any(self._made.get(storage, self._here) != self._here for storage in _storages((args, named))):
            ranks = self._run.context.grid.data_ranks
            raise UsageError(
                "the loop's body gives the model an output of another micro-batch, with several micro-batches a rank",
                where=f"step {self._run.clock + 1}, {script_line()}",
                why="a recurrent state belongs to the samples of one micro-batch, and this rank's bodies have those of"
                " several in turn",
                remedy="keep the state in a buffer of the model, of which each logical worker has its own, with one"
                f" micro-batch a worker; or take as many workers as data ranks ({ranks}), and no micro_batch",
            )


class _StateHook:
    """A hook that only looks; see ``leave_hooks_out_of_copies``."""

    def __init__(self, look: Callable[[nn.Module, Any, Any], None]) -> None:
        self._look = look

    def __call__(self, module: nn.Module, args: Any, rest: Any) -> None:
        """Look at a module's arguments, or at its arguments and output; but not within ``vmap`` or ``grad``."""
        # Tensors there wrap others and have no storage; the module is a function, and no state leaves its call.
        if functorch_level() is None:
            self._look(module, args, rest)


def _storages(values: Any, computed: bool = False) -> list[StorageWeakRef]:
    """Return the storages of the floating-point tensors in nested values.

    Args:
        values: tensors in tuples, lists and dicts.
        computed: only of tensors that a forward has computed, and not of data, parameters and views of them.
    """
    found = []
    for each in tree_leaves(values):
        if isinstance(each, Tensor) and each.is_floating_point() and each.layout == torch.strided:
            base = view_base(each)
            if not computed or (each.grad_fn is not None and (base is None or base.grad_fn is not None)):
                found.append(StorageWeakRef(each.untyped_storage()))
    return found
