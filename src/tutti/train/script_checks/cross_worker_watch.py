"""Refuse a loss that depends on values of another logical worker's samples, on a rank that computes several workers.

``CrossWorkerWatch`` follows values from batches to losses: tensors, also those that the code for a micro-batch changes
in place (``InPlaceUpdates``), and Python numbers (``FollowedNumbers``). For other Python objects ``WorkerTrials``
computes losses twice; ``RecurrentStateCheck`` looks for outputs of the model among its inputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from tutti.errors import UsageError, script_line
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.script_mode import tutti_caller, within_call_of
from tutti.nn.swap import buffers
from tutti.nn.written_tensors import METADATA
from tutti.parallel.ddp.loss_count import loss_count
from tutti.parallel.ddp.loss_shape import Scaled
from tutti.python_compat import calling_frame
from tutti.torch_compat import (
    functorch_level,
    tensor_versions,
    tree_leaves,
    tree_map,
)
from tutti.train.script_checks.body_counters import counting_condition
from tutti.train.script_checks.body_loss_comparison import BodyLossComparison
from tutti.train.script_checks.followed_numbers import FollowedFloat, FollowedInt
from tutti.train.script_checks.in_place_updates import InPlaceUpdates, MicroBatchKey
from tutti.train.script_checks.loss_watch import (
    WITH_INTS,
    LossWatch,
    batch_tensors,
    leaves_of_call,
    tensor_of_loss,
)
from tutti.train.script_checks.module_trials import ModuleTrials
from tutti.train.script_checks.plain_numbers import generator_states
from tutti.train.script_checks.python_state import numbers, numbers_of
from tutti.train.script_checks.sample_reads import SampleReads, refuse_number
from tutti.train.script_checks.storage_records import MemoryRecords, fills_memory, is_computed, memories_of, memory_of
from tutti.train.script_checks.watched_calls import NOT_OF_SCRIPT, backward_within, calling_module, roots_of_backward
from tutti.types.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run

_WATCHED = 2
"""Global batches in which values that pass between workers are looked for."""
_OF_FIRST = frozenset(("expand_as", "reshape_as", "to", "type_as", "view_as"))
"""Functions of a tensor that take nothing but shape, dtype and device of another one."""
_Origins: TypeAlias = dict[MicroBatchKey, str]
"""Micro-batches on which a tensor depends, each with the line where its values met those of another one."""


def micro_batch_key(micro_batch: MicroBatch, run: Run) -> MicroBatchKey:
    """Return the key of a micro-batch; a script may keep values only between micro-batches with equal keys.

    A logical worker (fixed share of the global batch) computes its micro-batches in order, so that a value may pass
    from one to the next: all of them have the same key. Where there are more data ranks than workers, the ranks compute
    the micro-batches of a worker at the same time, and each micro-batch has a key of its own.

    Args:
        micro_batch: a micro-batch of this rank.
        run: the run, whose division of the batch over ranks is read.

    Returns:
        A ``MicroBatchKey``: ``worker``, the index of the logical worker, and ``micro``, the micro-batch's index in the
        worker if ranks share workers, else 0.
    """
    return MicroBatchKey(micro_batch.worker, micro_batch.micro if run.feed.contract.shared else 0)


def refuse_cross_worker(run: Run, what: str, where: str) -> NoReturn:
    """Raise UsageError for a loss that depends on values kept from another logical worker's samples.

    A logical worker is a fixed share of the global batch. Never returns.

    Args:
        run: the run.
        what: the error message's first sentence.
        where: the script's line, or the function, that has kept the values.
    """
    raise UsageError(
        what,
        where=f"step {run.global_step + 1}, {where}",
        why="this rank computes several logical workers in turn, and each would get the values of the worker before",
        remedy="keep the values in a buffer that the model has before tutti.prepare, of which each worker has its own"
        " (of a loss module, too, by tutti.prepare([model, loss], …)); or take as many workers as data ranks"
        f" ({run.context.mesh.data_ranks}), no micro_batch"
        + ", and exchange them over ranks (tutti.allreduce)"
        * (run.context.mesh.data_ranks > 1),
    )


class CrossWorkerWatch(LossWatch):
    """Torch-function mode that raises UsageError if a micro-batch's loss depends on another logical worker's samples.

    A memory bank of embeddings in a variable, a centre in a loss module that ``tutti.prepare`` was not given, or a
    running mean in an attribute that is no buffer belongs to the samples of one logical worker, a fixed share of the
    global batch. On a rank that computes several workers in turn, each would get its predecessor's values. The mode
    follows tensors from the micro-batches of the first two global batches, and of those at the turn of an epoch
    (``WatchWindows``), through the script's and the model's calls of PyTorch, and numbers of ``item`` and ``tolist``
    through arithmetic (``FollowedFloat``). It changes no call and is not collective. The forward of a model in pipeline
    stages counts as one call, and so does a collective of tensor-parallel layers: the results depend on the samples of
    the arguments. ``stage`` follows the calls within a stage. Values that pass through ``float()``, ``math`` or NumPy
    are not followed, except numbers of modules (``ModuleTrials``).

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._batches = self._left = 0
        self._due = False
        # The present micro-batch: its key, equal for all of a worker, and its own, by which it may move a value.
        self._here = self._body = MicroBatchKey(-1, 0)
        self._leaves: dict[int, tuple[ref[Tensor], MicroBatchKey]] = {}
        self._given = set[StorageWeakRef]()  # memory of batches, of which workers have rows
        self._found = MemoryRecords[_Origins]()
        self._moved = InPlaceUpdates(memory_of)
        # Generators of the script that have drawn in this global batch: for which micro-batch, and the state left.
        self._drawn = dict[int, tuple[torch.Generator, MicroBatchKey, Tensor]]()
        # Memory of parameters and buffers.
        self._own = set[StorageWeakRef]()
        self._eager, self._uncompiled, self._in_backward = False, ExitStack(), False
        self._counted: dict[str, float] = {}  # the model's numbers before the micro-batch
        # Constants that scale each loss of the worker's first micro-batch, by the loss's index in the body: the worker,
        # the constants, and the generators' states since.
        self._scaled = dict[int, tuple[int, Sequence[float], list[Any]]]()
        self._losses = 0  # of the present body, whose constants were compared
        refuse = partial(refuse_cross_worker, run, where="in the module's forward")
        self._trials = ModuleTrials(run, self.updating, refuse)
        self._trace = BodyLossComparison(run.replica.draws)
        # Whether code is compared that may count: ``WorkerTrials`` computes the loss functions of ``run.step`` again.
        self._in_body = self._finds_counters = False
        self._reads = SampleReads()

    def begin_batch(self, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> bool:
        """Count a global batch as begun, and return whether the losses of its micro-batches are to be checked.

        To be called once for each global batch, before its first forward. Not collective. If the result is True, the
        caller makes three calls for each micro-batch of this rank: ``begin`` before the code that computes the loss
        (``begin_body`` before the body of a custom loop), ``check`` with the loss, and ``end`` after the code. For a
        loss function the caller also enters the context ``uncompiled`` around forward and backward; ``begin_body`` does
        so by itself. If the result is False, it makes none of these calls.

        Args:
            work: pairs (index of a logical worker, its micro-batches), one for each worker of this rank. A logical
                worker is a fixed share of the global batch.

        Returns:
            True if all of this holds: it is one of the first two global batches, or one at the turn of an epoch
            (``WatchWindows``); this rank has several micro-batches in it; and the model is not compiled, or may run
            uncompiled: in the first two global batches of a run that is not reproducible and records no CUDA graphs,
            because uncompiled code rounds differently.
        """
        run = self._run
        self._batches += 1
        before, self._due = self._due, self._batches <= _WATCHED or run.lifecycle.windows.is_open
        if not (before or self._due):
            # A batch before has dropped all records.
            return False
        self._moved.begin_batch()
        self._drawn.clear()
        self._scaled.clear()
        self._trace.begin_batch()
        self._eager = False
        self._left = sum(len(micro_batches) for _, micro_batches in work)
        # The script's object of a split model has a call of tutti's own, which counts as compiled.
        parts = [run.model] if run.context.comms.model.size == 1 else run.replica.parts
        compiled = has_compiled_code(parts, run.context)
        if not self._due or self._left < 2 or (compiled and self._batches > _WATCHED):
            self._leaves, self._given, self._found, self._counted = {}, set(), MemoryRecords(), {}
            self._numbers.make_plain()
            self._trials.forget()
            return False
        self._trials.begin_batch()
        # Code that is not compiled rounds otherwise.
        may = not (run.context.reproducible or (run.context.compile and run.context.compile.records_graphs))
        self._eager = may and (compiled or "torch._dynamo" in sys.modules)
        return may or not compiled

    def begin(self, micro_batch: MicroBatch, batch: Any) -> None:
        """Enter this function mode for the code that computes the loss of a micro-batch; ``end`` leaves it.

        From then on the mode follows the batch's tensors through calls of PyTorch, to find out on which logical
        workers' samples (fixed shares of the global batch) a loss depends. To be called only in global batches for
        which ``begin_batch`` has returned True. Not collective.

        Args:
            micro_batch: the micro-batch, whose logical worker is read.
            batch: its samples, as the code gets them.
        """
        self._here = micro_batch_key(micro_batch, self._run)
        self._body = MicroBatchKey(micro_batch.worker, micro_batch.micro)
        self._reads, self._losses = SampleReads(micro_batch), 0
        self._leaves = {id_: (leaf, key) for id_, (leaf, key) in self._leaves.items() if leaf() is not None}
        self._found.drop_freed()
        given = list(batch_tensors(batch))
        self._leaves.update((id(each), (ref(each), self._here)) for each in given)
        self._given |= memories_of(given)
        # Each worker has its own persistent buffers, but for those that a forward has made since tutti.prepare, and
        # parameters are those of all samples.
        parts, kept = self._run.replica.parts, self._run.replica.specs
        weights = memories_of(parameter for part in parts for parameter in part.parameters())
        own = weights | memories_of(slot.get() for slot in buffers(parts) if slot.name in kept)
        for memory in own:
            self._found.pop(memory, None)
        self._moved.begin(own | self._given, weights)
        self._own = own
        self._counted = numbers(self._run.replica.parts)
        if micro_batch.samples:
            self._trials.begin(self._here)
        # No loss is computed again where forwards are collective.
        self._finds_counters = self._in_body or bool(self._run.replica.sharded)
        self._trace.begin(self._here, micro_batch.batch, self._own)
        self.enter()

    def uncompiled(self) -> AbstractContextManager[None]:
        """Return a context manager within which code of ``torch.compile`` runs uncompiled, in a checked global batch.

        A function mode does not see the calls of compiled code. Around a loss function's micro-batches the caller
        enters the context for both forward and backward, because backward computes checkpointed modules again, and must
        do so as the forward did. In a global batch for which ``begin_batch`` has returned False the context does
        nothing.
        """
        return torch.compiler.set_stance("force_eager") if self._eager else nullcontext()

    def begin_body(self, micro_batch: MicroBatch) -> None:
        """Enter this function mode for the body of a custom loop, as ``begin`` does; ``end`` leaves it.

        Within the mode compiled code runs uncompiled. The body is also compared with an earlier one of this global
        batch (``BodyLossComparison``), that of the first micro-batch with equal shapes. If it gives other numbers to
        PyTorch, or computes its loss by other functions, although neither body has read values of its samples, the loss
        counts as dependent on the earlier micro-batch, and ``check`` raises UsageError.

        Args:
            micro_batch: the micro-batch whose body follows.
        """
        self._in_body = True
        super().begin_body(micro_batch)
        self._uncompiled.enter_context(self.uncompiled())

    def _compared(self, func: Any, args: Any, kwargs: Any, result: Any, of_samples: bool) -> MicroBatchKey | None:
        """Return the micro-batch whose code has given other numbers to the same call of PyTorch; None for none."""
        if tutti_caller(__name__) is not None:
            given = (each for each in leaves_of_call(args, kwargs) if isinstance(each, Tensor))
            self._reads.follow(given, result)
            return None
        name = getattr(func, "__name__", "")
        self._reads.note(name, args, kwargs, result, of_samples)
        models = (self._run.model, *self._run.replica.parts)
        if self._run.replica.sharded and within_call_of(models):
            # FSDP2's first forward makes other calls than the later ones.
            return None
        first = self._trace.note(func, name, args, kwargs, result, self._reads)
        if first is None or not (first.by_number or self._finds_counters):
            return None
        # Workers that update by themselves have numbers of their own.
        own = self._run.gradient_sync.loss_normalisation != "step" and first.worker != self._here.worker
        cancels = first.by_number and script_line() in self._run.checks.cancelling
        return None if cancels or (first.by_number and own) else first

    def ended(self) -> None:
        """End the check of a micro-batch; ``end`` calls this. Compiled code runs compiled again.

        Records the Python numbers that the code for the micro-batch has left in attributes of modules, for the trials
        of later micro-batches. After the last micro-batch that is checked in the run, numbers that remember from which
        samples they were computed (``FollowedFloat``), and that the script may keep, become plain floats and ints.
        """
        self._uncompiled.close()
        self._in_body = False
        self._left -= 1
        if self._left > 0:
            self._follow_counts()
        self._trials.end()
        if self._batches == _WATCHED and self._left <= 0:
            self._numbers.make_plain()

    @contextmanager
    def stage(self, given: Any) -> Iterator[Callable[[Any], None]]:
        """Return a context manager that follows which samples the values in a pipeline stage's forward depend on.

        Outside of ``begin`` and ``end``, and while gradients are disabled, it follows nothing, and the function that it
        yields does nothing.

        Args:
            given: the stage's inputs, whose tensors count as dependent on the present micro-batch.

        Yields:
            A function to call with the stage's results. It raises UsageError if the results depend on samples of
            another logical worker (a fixed share of the global batch), or on a tensor that the code for another
            micro-batch has changed as a function of the tensor's former values.
        """
        if not self._active or not torch.is_grad_enabled():
            yield lambda result: None
            return
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                self._leaves[id(leaf)] = ref(leaf), self._here
                # Messages of later micro-batches may come in the same memory.
                if (memory := memory_of(leaf)) is not None:
                    self._found.pop(memory, None)
        with self:
            yield self._check_stage

    def _check_stage(self, result: Any) -> None:
        for leaf in tree_leaves(result):
            self.check(leaf)

    def check(self, loss: Any) -> None:
        """Check that the loss of the present micro-batch depends on no other logical worker's samples. Not collective.

        A logical worker is a fixed share of the global batch. Does nothing outside of ``begin`` and ``end``.

        Args:
            loss: return value of the loss function, of which a tuple's first element is the loss; or the loss that the
                script passed to ``run.backward``.

        Raises:
            UsageError: the loss depends on samples of another logical worker, or on a tensor that the code for another
                micro-batch has moved (changed as a function of its former values), such as a teacher's average; the
                error names the script's line.
        """
        if not self._active:
            return
        self._follow_counts()
        if (total := tensor_of_loss(loss)) is None:
            return
        if self._run.gradient_sync.loss_normalisation == "step":
            self._reads.check_branches(loss, self._run.global_step + 1)
        origins = self._origins([total])
        whole = self._run.context.comms.model.size == 1 and not self._run.replica.sharded
        if whole and self._finds_counters and (first := self._trace.other_graph(total)) is not None:
            origins[first._replace(moved=True)] = script_line()
        if any(key.by_number for key in origins) and not self._reads.is_mean(loss):
            origins = {key: line for key, line in origins.items() if not key.by_number}
        others = [(key, line) for key, line in origins.items() if key.moved or key != self._here]
        if not others:
            return
        key, line = min(others, key=lambda other: (other[0].by_number, other[0].moved))
        if key.by_number and (micro_batch := self._reads.micro_batch) is not None:
            # Says more of a number that scales the loss.
            self.check_divisor(loss, micro_batch)
            refuse_number(self._run.global_step + 1, line)
        if key.moved:
            what = "the loss of a micro-batch depends on values that the code for another one has moved"
            self._refuse_moved(what, line)
        what = "the loss of a micro-batch depends on samples of another one, from which the script has kept values"
        refuse_cross_worker(self._run, what, line)

    def compare_scales(self, loss: Tensor, micro_batch: MicroBatch, scaled: Sequence[Scaled]) -> None:
        """Check that the losses of a worker's micro-batches are scaled by the same constants. Not collective.

        The n-th loss of a body (of a ``run.backward``, ``loss.backward()`` or ``torch.autograd.grad``) is compared with
        the n-th one of the worker's first micro-batch. Losses of different logical workers (fixed shares of the global
        batch) may have different constants. Nothing is checked if the script has read values of a tensor that may not
        come from the batch, such as a random one, or if a generator of Python or NumPy has drawn since the micro-batch
        before.

        Args:
            loss: the loss of the micro-batch.
            micro_batch: the micro-batch.
            scaled: the means and sums over samples in the loss, with the constants that multiply or divide them.

        Raises:
            UsageError: the constants differ from those of the worker's first micro-batch in this global batch.
        """
        if self._run.gradient_sync.loss_normalisation != "step" or self._statistics.reads_others:
            return
        index, self._losses = self._losses, self._losses + 1
        if not (scales := self._scales(loss, micro_batch, scaled)):
            return
        known, first, states = self._scaled.get(index, (None, scales, []))
        if known != micro_batch.worker:
            first, states = scales, []
        differ = len(first) == len(scales) and not all(map(partial(math.isclose, rel_tol=1e-5), first, scales))
        now = generator_states()
        if differ and states == now:
            raise UsageError(
                "the loss is scaled by a number that is another one for each micro-batch",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="a micro-batch is a part of its worker's samples, whose loss would be scaled by one number of all"
                " of them",
                remedy="return (sum, count), with the divisor of the sum as the count; compute the number from values"
                " that all micro-batches share, such as run.stats of the step before; or take one worker without"
                " micro_batch",
            )
        self._scaled[index] = micro_batch.worker, first, now

    def _scales(self, loss: Tensor, micro_batch: MicroBatch, scaled: Sequence[Scaled]) -> list[float]:
        """Return the constant that scales each term of a loss; an empty list if one comes from a tensor of elsewhere.

        The constant is the product of a term's divisors; for a sum it is divided by the number of samples or targets.
        """
        # Without a read of the samples a number is no number of theirs.
        numbers = self._factors if self._statistics.reads_values else ()
        constants = [each for term in scaled for each in (*term.tensors, *term.factors)]
        if not constants or not all(
            any(math.isclose(float(each), number, rel_tol=1e-6) for number in numbers)
            or self._statistics.is_of_batch(each)
            for each in constants
        ):
            return []
        count = loss_count(loss, micro_batch)
        weighs = self._run.lifecycle.step_context.samples % micro_batch.samples > 0
        if weighs and any(each.weights for each in scaled):
            # The weights may have been divided by the samples.
            return []
        scales = []
        for each in scaled:
            is_sum = each.is_sum or (not each.is_mean and (each.weights or count is not None))
            unit = 1.0 if not is_sum else float(micro_batch.samples if count is None else count)
            scales.append(math.prod(each.divisors) / unit)
        return scales

    def note_gradients(self, gradients: Iterable[Tensor], complete: bool) -> None:
        """Record the gradients that ``run.backward`` has left in ``.grad``, to follow tensors computed from them.

        Complete gradients depend on no single micro-batch; those of an earlier body depend on its micro-batch. Not
        collective.

        Args:
            gradients: the tensors.
            complete: whether they are gradients of the global batch.
        """
        noted = list(gradients)
        if complete:
            self._moved.forget(noted)
        for memory in memories_of(noted):
            self._found.pop(memory, None)
            if not complete:
                self._found[memory] = {self._here: ""}

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context manager for ``run.backward``, in which tensors that the script's hooks keep are followed.

        A tensor that the script's hooks compute or write in backward counts as dependent on the present micro-batch.
        """
        with self._inactive() if self._active else nullcontext():
            self._in_backward = self._due
            try:
                yield
            finally:
                self._in_backward = False

    def check_edits(self, gradients: Mapping[str, Tensor]) -> None:
        """Check that the script's edits of complete gradients depend on no single micro-batch. Not collective.

        Args:
            gradients: the edited gradients of the rank's last body in a global batch, by the parameters' names.

        Raises:
            UsageError: an edit depends on samples of one of this rank's micro-batches, as by the body's loss, or on
                values that each body keeps of its part of the gradient, such as a momentum.
        """
        for name, gradient in gradients.items():
            if origins := self._origins([gradient]):
                ranks = self._run.context.mesh.data_ranks
                raise UsageError(
                    f"the script's edit of the gradient of {name} depends on one of several micro-batches of this rank",
                    where=f"step {self._run.global_step + 1}, {next(filter(None, origins.values()), script_line())}",
                    why="the body runs once for each of them, and before the rank's last one .grad has the part of one"
                    " micro-batch",
                    remedy="edit it by values that are the same for all of them, such as run.stats; store what is kept"
                    " of gradients, such as a momentum, where run.stepped is true; put terms of the samples into the"
                    f" loss; or take as many workers as data ranks ({ranks}), and no micro_batch",
                )

    def _follow_counts(self) -> None:
        """Follow the Python numbers of the model's modules that the code for this micro-batch has changed.

        Numbers that a loop's body writes after its backward are not followed if the body may be the rank's last one:
        they count as written between two batches, for all workers.
        """
        for part in self._run.replica.parts:
            for name, module in part.named_modules():
                for key, value in numbers_of(module).items():
                    before = self._counted.get(f"{name}.{key}".removeprefix("."))
                    if before is not None and value != before:
                        setattr(module, key, self._numbers.follow(value, {self._here: ""}))
        self._counted = numbers(self._run.replica.parts)
        self._trials.note()

    def _refuse_moved(self, what: str, line: str) -> NoReturn:
        raise UsageError(
            what,
            where=f"step {self._run.global_step + 1}, {line}",
            why="this rank runs the code for several micro-batches in turn, and would move them once for each, not once"
            " a step",
            remedy="count global batches by run.global_step; draw by PyTorch's own generator; move values, such as a"
            " teacher's averages, where run.stepped is true or after run.step; give tutti.prepare the parameters that"
            f" an optimizer trains; or take as many workers as data ranks ({self._run.context.mesh.data_ranks}), and no"
            " micro_batch",
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if torch.compiler.is_compiling() or functorch_level() is not None:
            return func(*args, **kwargs)
        if not self._active:
            return self._note_in_backward(func, args, kwargs) if self._in_backward else func(*args, **kwargs)
        self.note_call(func, args)
        if func in METADATA and not isinstance(result := func(*args, **kwargs), Tensor):
            return result
        if roots := roots_of_backward(func, args, kwargs):
            for loss, _ in roots:
                self.check(loss)
            with self._run.custom.plain_backward(roots), self.backward():
                return backward_within(self, *args, **kwargs) if func is Tensor.backward else func(*args, **kwargs)
        if name.endswith("_like") or name.startswith("new_"):
            return func(*args, **kwargs)
        leaves = leaves_of_call(args, kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # In training, instance norm writes its averages and does not read them. Of batch norm no write is seen.
        is_norm = func is functional.instance_norm
        trains = is_norm and (args[5] if len(args) > 5 else kwargs.get("use_input_stats", True))
        seen = given[:1] if trains or name in _OF_FIRST else given
        overwrites = name in ("copy_", "fill_", "zero_")
        origins = self._origins(seen[1:] if overwrites else seen)
        for leaf in leaves:
            if isinstance(leaf, FollowedFloat) or (isinstance(leaf, FollowedInt) and name in WITH_INTS):
                # Other numbers are those of ``CrossStepWatch``.
                own = {key: line for key, line in leaf.origins.items() if isinstance(key, MicroBatchKey)}
                origins |= self._with_line(own)
        before = tensor_versions(given)
        # FSDP2 gathers weights into memory that the forwards of all micro-batches use.
        gathered = self._gathered(given)
        former = [] if self._run.replica.sharded else self._moved.former(func, args)
        drawn = kwargs.get("generator")
        origins |= self._goes_on(drawn)
        unfit = self.unfit_gradients(func, args, kwargs)
        result = func(*args, **kwargs)
        if unfit is not None:
            self._run.custom.mark_gradients(result, unfit)
        if isinstance(drawn, torch.Generator):
            self._drawn[id(drawn)] = drawn, self._here, drawn.get_state()
        self.note_result(name, args, result)
        if (first := self._compared(func, args, kwargs, result, bool(origins))) is not None:
            origins[first] = script_line()
        written = [leaf for leaf, old, new in zip(given, before, tensor_versions(given), strict=True) if old != new]
        if func in (Tensor.item, Tensor.tolist) and origins:
            return tree_map(lambda value: self._numbers.follow(value, origins), result)
        made = [leaf for leaf in leaves_of_call((result,)) if isinstance(leaf, Tensor)]
        again = self._moved.note(self._body, func, name, (*args, *kwargs.values()), made, former)
        if again and self._finds_counters and all(key.moved for key in origins):
            what = "the code for a micro-batch moves an average of the weights that the code for another one has moved"
            self._refuse_moved(what, script_line())
        if self._moved.follows and self._finds_counters and (line := counting_condition()):
            self._refuse_moved("the loop averages or copies the weights in every n-th of its bodies", line)
        if overwrites and (memory := memory_of(args[0])) is not None and fills_memory(args[0]):
            self._found.pop(memory, None)
        for tensor in (*made, *written) if origins else ():
            if memory_of(tensor) not in gathered:
                self._note(tensor, origins)
        self._found.drop_freed()
        return result

    def _goes_on(self, generator: Any) -> _Origins:
        """Return the other micro-batch after whose draws a generator goes on, with the script's line.

        An empty dict for a generator from which no other micro-batch has drawn, or that was seeded since.
        """
        _, key, state = self._drawn.get(id(generator), (None, self._here, None))
        if state is None or key == self._here or not torch.equal(state, generator.get_state()):
            return {}
        return {key._replace(moved=True): script_line()}

    def _note_in_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch, and note what a hook of the script has computed with it in a backward."""
        if func is Tensor.backward:
            return backward_within(self, *args, **kwargs)
        if func in METADATA or calling_module(calling_frame(1)).startswith(NOT_OF_SCRIPT):
            return func(*args, **kwargs)
        given = [leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, Tensor)]
        before = tensor_versions(given)
        result = func(*args, **kwargs)
        self._check_hook(func, args, kwargs, result)
        written = [leaf for leaf, old, new in zip(given, before, tensor_versions(given), strict=True) if old != new]
        # Not views, such as the transpose of a weight in the backward of the script's own function.
        made = memories_of(tree_leaves(result)) - memories_of(given)
        for memory in made | memories_of(written):
            self._found[memory] = {self._here: ""}
        return result

    def _check_hook(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Raise UsageError if a hook gives PyTorch other numbers in the backward of another micro-batch."""
        first = self._compared(func, args, kwargs, result, of_samples=True)
        # A number for a log changes no gradient.
        if first is None or not (isinstance(result, Tensor) and result.dim()):
            return
        if first.by_number:
            refuse_number(self._run.global_step + 1, script_line())
        what = "a hook on a gradient depends on values that the backward of another micro-batch has moved"
        self._refuse_moved(what, script_line())

    def _gathered(self, tensors: Iterable[Tensor]) -> set[StorageWeakRef | None]:
        """Return the memory of tensors that may be gathered weights of a sharded model, as no call has made them."""
        computed = (tensor for tensor in tensors if self._run.replica.sharded and tensor.grad_fn is not None)
        return {memory for tensor in computed if (memory := memory_of(tensor)) not in self._found}

    def _origins(self, tensors: Iterable[Tensor]) -> _Origins:
        """Return the micro-batches on which tensors depend, each with the script's line that has mixed it with another.

        The line of the present micro-batch may be empty.
        """
        found: _Origins = {}
        for tensor in tensors:
            leaf, key = self._leaves.get(id(tensor), (None, None))
            if leaf is not None and key is not None and leaf() is tensor:
                found.setdefault(key, "")
            elif (memory := memory_of(tensor)) is not None:
                own: _Origins = {self._here: ""} if is_computed(tensor) else {}
                # A custom function of autograd, which the mode does not see, may have made it from the batch.
                found |= self._found.get(memory, own)
                if (writer := self._moved.last_writer(tensor)) is not None and writer[0] != self._body:
                    found[writer[0]._replace(moved=True)] = writer[1]
        return self._with_line(found)

    def _with_line(self, found: Mapping[MicroBatchKey, str]) -> _Origins:
        """Return origins with the script's present line for each other micro-batch that has no line yet."""
        if all(key == self._here or line for key, line in found.items()):
            return dict(found)
        line = script_line()
        return {key: each or ("" if key == self._here else line) for key, each in found.items()}

    def _note(self, tensor: Tensor, origins: _Origins) -> None:
        memory = memory_of(tensor)
        if memory is None:
            return
        if memory in self._given:
            # A view of samples, which a number that bodies move may have chosen.
            place = next((each for each in origins if each.moved), self._here)
            self._leaves[id(tensor)] = ref(tensor), place
        else:
            self._found[memory] = self._found.get(memory, {}) | origins
