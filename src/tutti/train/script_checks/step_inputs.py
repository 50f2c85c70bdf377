"""Refuse an optimizer whose step reads values of a part of the samples beside gradients, such as K-FAC's moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from tutti.errors import UsageError, script_line
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.gradient_hooks import hook_package
from tutti.nn.written_tensors import METADATA
from tutti.python_compat import calling_frame
from tutti.torch_compat import (
    functorch_level,
    in_backward,
    step_hooks,
    tensor_versions,
    tree_leaves,
)
from tutti.train.script_checks.entered_mode import EnteredMode
from tutti.train.script_checks.loss_watch import batch_tensors, leaves_of_call
from tutti.train.script_checks.storage_records import MemoryRecords, memories_of, memory_of
from tutti.train.script_checks.watch_windows import is_watched_step
from tutti.train.script_checks.watched_calls import (
    EXCHANGING,
    backward_within,
    calling_module,
    own_tensors,
    values_read,
)
from tutti.types.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


_UNWATCHED = nullcontext()


class StepInputs(EnteredMode):
    """Function mode that raises UsageError where an optimizer's step reads values kept of a part of the global batch.

    Hooks of K-FAC keep second moments of activations and of their gradients, and the optimizer's step multiplies
    ``.grad`` by their inverse. A hook, a layer or a loss function sees the samples of one micro-batch; on one device it
    would see all of them. Whether values of the parts add up cannot be known: a moment that is divided by the number of
    samples, or averaged over steps, does not. The mode follows tensors from the micro-batches through the calls of
    PyTorch in forward, loss and backward, and raises where a step reads one that is no gradient.

    Watched are optimizers with code of the script: a class, a function set as ``step``, or step hooks. Their steps 1 to
    5, 2ᵏ and 2ᵏ + 1, and those at the turn of an epoch (``WatchWindows``) are watched on a rank that has several
    micro-batches, or that makes one update together with other data ranks. A rank of one micro-batch may exchange its
    values over ranks (``torch.distributed``, ``tutti.allreduce``); these are not followed further. Compiled models are
    not watched. Not collective.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._steps = 0
        self._is_due = self._several = False
        self._stepping: Optimizer | None = None
        # Memory of the batch; of parameters, gradients and buffers; and the script's line that has computed a tensor
        # from samples, empty for a tensor that does not depend on them.
        self._batch, self._own = set[StorageWeakRef](), set[StorageWeakRef]()
        self._lines = MemoryRecords[str]()

    def begin_batch(self, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> None:
        """Count a global batch as begun, and decide whether its update is watched.

        Args:
            work: pairs (index of a logical worker, a fixed share of the global batch; its micro-batches) of this rank.
        """
        run = self._run
        self._steps += 1
        if not (is_watched_step(self._steps) or run.lifecycle.windows.is_open):
            if self._is_due:
                self._is_due, self._lines, self._batch = False, MemoryRecords(), set()
            return
        micro_batches = [micro_batch for _, micro_batches in work for micro_batch in micro_batches]
        self._several = len(micro_batches) > 1
        together = run.gradient_sync.loss_normalisation == "step" and run.context.comms.replica.size > 1
        # The mode does not see the calls of compiled code.
        parts = [run.model] if run.context.comms.model.size == 1 else run.replica.parts
        own = (self._several or together) and any(map(_has_code_of_script, run.custom.optimizers))
        self._is_due = own and not has_compiled_code(parts, run.context)
        self._lines = MemoryRecords()
        self._batch = set()
        if self._is_due:
            self._batch = memories_of(tensor for each in micro_batches for tensor in batch_tensors(each.batch))

    def watching(self) -> AbstractContextManager[None]:
        """Return a context manager for forwards, backwards and the update of ``run.step``.

        Within it the mode follows tensors from the samples, so that an optimizer's step that reads one raises
        UsageError. Does nothing if ``begin_batch`` has decided that the update is not watched.
        """
        return self._watched() if self._is_due else _UNWATCHED

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Enter this function mode if the update is watched; ``end`` leaves it. Called for each body of a loop."""
        if self._is_due and not self._active:
            self._note_own()
            self.enter()

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context manager for an optimizer's step, which raises UsageError where it reads values of samples.

        Gradients may be read. Does nothing if the update is not watched.

        Args:
            optimizer: the script's optimizer, which an error names.
        """
        return self._reading(optimizer) if self._active else _UNWATCHED

    @contextmanager
    def _reading(self, optimizer: Optimizer) -> Iterator[None]:
        self._note_own()
        self._stepping = optimizer
        try:
            yield
        finally:
            self._stepping = None

    def _note_own(self) -> None:
        groups = [group for optimizer in self._run.custom.optimizers for group in optimizer.param_groups]
        members = (each for group in groups for p in group["params"] for each in (p, p.grad))
        self._own = memories_of(own_tensors(self._run.replica.parts)) | memories_of(members)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self._active or functorch_level() is not None or func in METADATA:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            return backward_within(self, *args, **kwargs)
        caller = calling_module(calling_frame(1))
        exchanges = caller.startswith(EXCHANGING)
        if exchanges and not self._several:
            result = func(*args, **kwargs)
            for memory in memories_of(tree_leaves((args, kwargs, result))):
                self._lines[memory] = ""
            return result
        name = getattr(func, "__name__", "")
        read = [each for each in values_read(func, name, args, kwargs) if isinstance(each, Tensor)]
        is_of_tutti = caller.startswith("tutti.") and not exchanges
        if self._stepping is not None and not is_of_tutti:
            self._check(read, self._stepping)
        line = "" if is_of_tutti else self._line(read)
        given = [leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, Tensor)]
        before = tensor_versions(given)
        result = func(*args, **kwargs)
        written = [leaf for leaf, old, new in zip(given, before, tensor_versions(given), strict=True) if old != new]
        for memory in memories_of((*written, *tree_leaves(result))) - self._own - self._batch:
            self._lines[memory] = line
        self._lines.drop_freed()
        return result

    def _line(self, read: Iterable[Tensor]) -> str:
        """Return the script's present line if one of these tensors depends on samples, else an empty text."""
        return script_line() if any(map(self._is_of_samples, read)) else ""

    def _is_of_samples(self, tensor: Tensor) -> bool:
        memory = memory_of(tensor)
        if memory is None or memory in self._own:
            return False
        if memory in self._batch:
            return True
        if (line := self._lines.get(memory)) is not None:
            return bool(line)
        # Made by code that the mode does not see: custom functions of autograd, and autograd itself.
        return self._stepping is None and (tensor.grad_fn is not None or in_backward())

    def _check(self, read: Iterable[Tensor], optimizer: Optimizer) -> None:
        for tensor in read:
            memory = memory_of(tensor)
            line = "" if memory is None or memory in self._own else self._lines.get(memory, "")
            if line:
                ranks = self._run.context.mesh.data_ranks
                exchange = "average them over ranks before the step reads them (tutti.allreduce)"
                alone = f"take as many workers as data ranks ({ranks}), and no micro_batch"
                remedies = ([alone] if self._several else []) + ([exchange] if ranks > 1 else [])
                raise UsageError(
                    f"{type(optimizer).__name__}.step() reads values that the script has kept of one micro-batch",
                    where=f"step {self._run.global_step + 1}, {script_line()}; kept in {line}",
                    why="a hook, a layer or a loss sees a part of the global batch, and one device would keep values"
                    " of all samples, such as K-FAC's moments; whether those of the parts add up cannot be known",
                    remedy=", and ".join(remedies) or "keep them in .grad",
                )


def _has_code_of_script(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step runs code of the script: its class's, a replaced ``step``, or step hooks."""
    kind: Any = type(optimizer)
    step = getattr(kind.step, "__wrapped__", kind.step)
    hooks = [getattr(hook, "of_script", hook) for table in step_hooks(optimizer) for hook in table.values()]
    return any(hook_package(each) not in ("torch", "tutti") for each in (step, *hooks))
