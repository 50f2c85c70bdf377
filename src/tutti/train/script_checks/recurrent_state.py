"""Refuse a recurrent state that a model returns for one micro-batch and a custom loop gives it for another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.errors import UsageError, script_line
from tutti.torch_compat import tree_leaves
from tutti.train.script_checks.loss_watch import WatchHook
from tutti.train.script_checks.storage_records import is_computed
from tutti.types.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


class RecurrentStateCheck:
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
        micro-batch. Hooks are registered in the first call in which ``several`` is True.

        Args:
            micro_batch: the micro-batch that the body trains next.
            several: whether some data rank runs the body several times for a global batch; if False, nothing is checked
                until the next call.
        """
        self._here = (micro_batch.worker, micro_batch.micro) if several else None
        self._made = {storage: made for storage, made in self._made.items() if not storage.expired()}
        if several and not self._watching:
            self._watching = True
            for module in self._modules():
                module.register_forward_pre_hook(WatchHook(self._look), with_kwargs=True)
                module.register_forward_hook(WatchHook(self._note))

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
            ranks = self._run.context.mesh.data_ranks
            raise UsageError(
                "the loop's body gives the model an output of another micro-batch, with several micro-batches a rank",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="a recurrent state belongs to the samples of one micro-batch, and this rank's bodies have those of"
                " several in turn",
                remedy="keep the state in a buffer of the model, of which each logical worker has its own, with one"
                f" micro-batch a worker; or take as many workers as data ranks ({ranks}), and no micro_batch",
            )


def _storages(values: Any, computed: bool = False) -> list[StorageWeakRef]:
    """Return the storages of the floating-point tensors in nested values.

    Args:
        values: tensors in tuples, lists and dicts.
        computed: only of tensors that a forward has computed, and not of data, parameters and views of them.
    """
    found = []
    for each in tree_leaves(values):
        if not isinstance(each, Tensor) or not each.is_floating_point() or each.layout != torch.strided:
            continue
        if not computed or is_computed(each):
            found.append(StorageWeakRef(each.untyped_storage()))
    return found
