"""Refuse a loss that depends on values which each data rank has kept of its own samples in earlier steps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.checkpoint.fingerprint import tensor_digests
from tutti.comm.random_keys import mix, name_key
from tutti.errors import UsageError, script_line
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.written_tensors import METADATA
from tutti.parallel.ddp.output_graph import leaf_of_node, nodes_below
from tutti.python_compat import calling_frame
from tutti.torch_compat import (
    FunctionModesDisabled,
    functorch_level,
    tensor_versions,
    tree_leaves,
    tree_map,
)
from tutti.train.script_checks.followed_numbers import FollowedFloat, FollowedInt
from tutti.train.script_checks.loss_watch import (
    WITH_INTS,
    LossWatch,
    WatchHook,
    batch_tensors,
    leaves_of_call,
    tensor_of_loss,
)
from tutti.train.script_checks.other_optimizers import PREPARE, OtherSteps
from tutti.train.script_checks.plain_numbers import PlainNumber, PlainNumbers, is_key_of_samples, is_number_key
from tutti.train.script_checks.sample_reads import SampleReads, refuse_number
from tutti.train.script_checks.storage_records import MemoryRecords, memories_of, memory_of
from tutti.train.script_checks.watch_windows import FIRST, is_watched_step
from tutti.train.script_checks.watched_calls import (
    EXCHANGING,
    NOT_OF_SCRIPT,
    backward_within,
    calling_module,
    own_tensors,
    roots_of_backward,
    values_read,
)
from tutti.types.micro_batch import LossFn, MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


_LARGEST = 2**31
"""Most bytes of a tensor whose values are compared (a guess)."""
_MOST = 4096
"""Most autograd nodes of a loss that are looked at (a guess)."""
_CONSTANT = 3
"""Fewest watched steps with one tensor after which another one at the turn of an epoch counts as kept (a guess)."""
_ALL = "all samples"
"""Origin of a number of all samples of a micro-batch."""
_STEP = ".step() in "
"""Words between the class of an optimizer and the line of its step."""


class _Kept(NamedTuple):
    """A value that the script has kept from an earlier step.

    Attributes:
        line: the script's line that first reads it in a step.
        digest: hash of its values there.
    """

    line: str
    digest: int


class _Origin(NamedTuple):
    """Origin of a tensor of the step under way.

    Attributes:
        kept: the kept values from which it was computed.
        samples: whether it was computed from samples, of this step or an earlier one.
        numbers: the Python numbers from which it was computed, without those of ``FollowedNumbers``.
    """

    kept: frozenset[_Kept] = frozenset()
    samples: bool = False
    numbers: frozenset[PlainNumber] = frozenset()


_NOTHING, _SAMPLES = _Origin(), _Origin(samples=True)


class CrossStepWatch(LossWatch):
    """Function mode that finds values of earlier steps' samples on which a loss depends, to compare them over ranks.

    A memory of losses, a queue of embeddings, a running mean or a tensor that the script trains by itself holds, on
    each data rank, values of this rank's samples; on one device it would hold values of all samples. The mode follows
    tensors that the code for an earlier step has computed from samples, or that have changed since, up to the loss. A
    digest of the values on which the loss depends goes over the data ranks together with the gradients
    (``StepContext.written``), without a message of its own; where it differs, ``compare`` raises UsageError. Watched
    are steps 1 to 5, steps 2ᵏ and 2ᵏ + 1, and those at the turn of an epoch (``WatchWindows``); in the first five steps
    numbers of ``item`` and ``tolist`` are followed, too, through arithmetic (``FollowedFloat``).

    Left out are parameters and buffers of the model, of which each logical worker (share of the global batch) has its
    own; batches; averages of norm layers; and recurrent states, which the model's modules are given with a dimension of
    the micro-batch's samples. Values that pass through ``float()``, ``math``, NumPy or an ``if`` are not followed; the
    numbers of code that has read no value of the present samples are compared (``PlainNumbers``). Compiled models are
    not watched.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = self._samples = 0
        self._due = False
        self._alone = ""
        self._own, self._constants = set[StorageWeakRef](), set[StorageWeakRef]()
        self._batch = set[StorageWeakRef]()
        # Tensors of this step, and digests of those among them that the code for it has only read.
        self._origins = MemoryRecords[_Origin]()
        self._digests: dict[StorageWeakRef, int] = {}
        # Tensors of the watched steps before: digest there, or None where a step has computed them from samples.
        self._before: dict[StorageWeakRef, int | None] = {}
        # Digests of all values from before this step that its lines read, kept from an earlier one or not.
        self._read_here: dict[str, set[int]] = {}
        # Shapes and digests of tensors from before the last watched step, and before each earlier one, by line.
        self._read_last = dict[str, set[tuple[Any, int]]]()
        self._read_before = dict[str, list[set[tuple[Any, int]]]]()
        # Values kept in tensors, those with a dimension of the micro-batch's samples, and recurrent states.
        self._kept: dict[StorageWeakRef, _Kept] = {}
        self._by_sample, self._states = set[_Kept](), set[_Kept]()
        # Digests by line: of values that losses of this step depend on, and of tensors that other optimizers have
        # trained since.
        self._reached: dict[str, set[int]] = {}
        self._trained: dict[str, set[int]] = {}
        # Tensors beside the model whose gradients the losses of stages give.
        self._leaves = dict[int, ref[Tensor]]()
        self._plain, self._reads = PlainNumbers(), SampleReads()
        self._in_backward = False
        # Whether the steps before have left no records.
        self._empty = False
        self._others = OtherSteps(run, self._note_step)
        self._hooks: list[Any] = []
        self._uncompiled = ExitStack()

    def begin_batch(self, watched: bool) -> bool:
        """Count a global batch as begun, and return whether this mode is to check its micro-batches. Not collective.

        To be called once for each global batch. Drops the records of the batch before, except those of the values that
        its code has left: a loss of this batch may read them.

        Args:
            watched: whether ``CrossWorkerWatch`` checks this batch, too; if so, this mode checks it only at the turn of
                an epoch.

        Returns:
            True if all of this holds: the step is at the turn of an epoch (``WatchWindows``), or ``watched`` is False
            and the step, counted from 1, is at most 5, a power of two, or one more than a power of two; there are
            several data ranks, or ``run.step`` runs pipeline stages; neither tutti nor the script has compiled the
            model; and the run is not both reproducible and sharded in a process that uses ``torch.compile``.
        """
        run = self._run
        self._steps += 1
        self._alone = self._why_alone()
        due = self._due = is_watched_step(self._steps) or run.lifecycle.windows.is_open
        self._plain.begin_batch()
        if self._empty and not due:
            return False
        made = {memory: None for memory, origin in self._origins.items() if origin.samples}
        before = {**self._before, **made, **self._digests}
        self._before = {memory: digest for memory, digest in before.items() if not memory.expired()}
        self._origins, self._digests, self._read_here = MemoryRecords(), {}, {}
        self._kept, self._by_sample, self._states = {}, set(), set()
        self._reached, self._trained = self._trained, {}
        self._empty = not due and not self._reached
        several = run.context.comms.replica.size > 1 or bool(self._alone)
        if several and (self._steps == 1 or (self._steps > FIRST and due)):
            self._others.look()
        turn = run.lifecycle.windows.is_open
        for line, read in self._read_last.items():
            self._read_before.setdefault(line, []).append(read)
        self._read_last = {}
        if (watched and not turn) or not several or not due:
            self._before = {}
            self._numbers.make_plain()
            return False
        if run.replica.sharded and run.context.reproducible and "torch._dynamo" in sys.modules:
            # Code that is not compiled rounds otherwise.
            return False
        self._plain.begin_watched(turn)
        parts = [run.model] if run.context.comms.model.size == 1 else run.replica.parts
        return not has_compiled_code(parts, run.context)

    def begin(self, micro_batch: MicroBatch, batch: Any) -> None:
        """Enter this function mode for the code that computes the loss of a micro-batch; ``end`` leaves it.

        From then on the mode follows values of earlier steps' samples through calls of PyTorch. Where it needs them to
        recognise recurrent states, which it leaves out, it adds forward pre-hooks to the model's modules; ``ended``
        removes the hooks. Of a model that FSDP2 shards, code of ``torch.compile`` runs uncompiled until then. Not
        collective.

        Args:
            micro_batch: the micro-batch, of which the number of samples is read.
            batch: its samples, as the code gets them.
        """
        self._samples, self._reads = micro_batch.samples, SampleReads(micro_batch)
        self._plain.begin(micro_batch, batch)
        modules = [module for part in self._run.replica.parts for module in part.modules()]
        self._batch = memories_of(batch_tensors(batch))
        self._constants = memories_of(value for module in modules for value in vars(module).values())
        self._note_own()
        if None in self._before.values() or self._run.replica.sharded:
            hook = WatchHook(self._look)
            self._hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
        if self._run.replica.sharded and "torch._dynamo" in sys.modules:
            # Dynamo would trace this mode in FSDP2's hooks, and parameters would be left without gradients.
            self._uncompiled.enter_context(torch.compiler.set_stance("force_eager"))
        self.enter()

    def ended(self) -> None:
        """Undo what ``begin`` has changed beside the mode, its forward pre-hooks and the stance of ``torch.compile``.

        ``end`` calls this.
        """
        self._uncompiled.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def _inactive(self) -> Iterator[None]:
        with super()._inactive():
            yield
            self._note_own()

    def _note_own(self) -> None:
        """Record the memory of the model's parameters, their gradients, and buffers."""
        with FunctionModesDisabled():
            self._own = memories_of(own_tensors(self._run.replica.parts))

    def check(self, loss: Any) -> None:
        """Record on which values of earlier steps this micro-batch's loss depends, for ``digest`` and ``compare``.

        Does nothing outside of ``begin`` and ``end``. Not collective.

        Args:
            loss: return value of the loss function, of which a tuple's first element is the loss; or the loss that the
                script passed to ``run.backward``.

        Raises:
            UsageError: ranks compare nothing (logical workers, shares of the global batch, make updates of their own,
                as in local SGD; or ``run.step`` runs pipeline stages), and the loss depends on a tensor that the script
                trains and that is not in the model.
        """
        if self._active and (total := tensor_of_loss(loss)) is not None:
            origin = self._joined([total], with_ints=False)
            kept = origin.kept - self._states
            if self._run.gradient_sync.loss_normalisation == "step":
                self._reads.check_branches(loss, self._run.global_step + 1)
            if self._alone:
                for each in kept & self._leaves_among_kept(total):
                    self._refuse_trained(each.line)
                return
            cancelling = self._run.checks.cancelling
            numbers = [number for number in origin.numbers if not (number.of_samples and number.line in cancelling)]
            of_samples = any(number.of_samples for number in numbers) and self._reads.is_mean(loss)
            self._plain.reach(number for number in numbers if of_samples or not number.of_samples)
            for each in kept:
                self._reached.setdefault(each.line, set()).add(each.digest)

    def _leaves_among_kept(self, total: Tensor) -> set[_Kept]:
        """Return the kept values that are leaves of a loss's graph, to which its backward gives a gradient.

        A target network, an average of the weights that may require gradients, is no leaf if it is read without them.
        """
        leaves = memories_of(map(leaf_of_node, nodes_below(total.grad_fn, lambda _: True, _MOST)))
        return {self._kept[memory] for memory in leaves & self._kept.keys()}

    def noting_leaves(self, loss: LossFn) -> LossFn:
        """Return the loss function, with pipeline stages wrapped to record the leaves of its autograd graphs.

        A leaf is, for example, a learned weight beside the model: only the last stage's rank has its gradient. A step
        of an optimizer that ``tutti.prepare`` was not given then raises UsageError if it trains such a tensor. Not
        collective.

        Args:
            loss: the loss function of ``run.step``.

        Returns:
            A function with the arguments and the result of ``loss``; without pipeline stages ``loss`` itself.
        """
        if not self._in_stages():
            return loss

        def noting(model: Any, batch: Any) -> Any:
            result = loss(model, batch)
            if (total := tensor_of_loss(result)) is not None:
                found = map(leaf_of_node, nodes_below(total.grad_fn, lambda _: True, _MOST))
                self._leaves |= {id(leaf): ref(leaf) for leaf in found if leaf is not None}
            return result

        return noting

    def note_state(self, name: str, value: Any, reached: bool) -> None:
        """Record a Python object that has changed since the first step, for ``digest`` and ``compare``.

        Args:
            name: the object, for an error message; equal on all ranks.
            value: its value, of which ``plain_digest`` makes a hash.
            reached: whether the loss depends on it.
        """
        if not self._alone:
            self._plain.note_state(name, value, reached)

    def digest(self) -> int:
        """Return a hash of the values of earlier steps on which the losses of this step depend so far; 0 without any.

        Data ranks compare the hash together with the gradients; where it differs, they call ``compare``. Not collective
        itself.
        """
        found = self._plain.digests().union(*self._reached.values())
        return mix(*sorted(found)) if found else 0

    def compare(self) -> None:
        """Compare values of earlier steps on which losses depend over data ranks; raise UsageError if one differs.

        In each step data ranks exchange a hash of such values (``digest``) and of the parameters that they compare.
        Where the hash differs, all data ranks call this method, which finds out whether such a value differs, and which
        one. Collective over them: two small all-gathers, and a third one if a value differs. If no value differs, but
        parameters do, it returns.

        Raises:
            UsageError: on every data rank, a value differs, and the error names the script's line that reads it; or an
                optimizer that ``tutti.prepare`` was not given has trained by gradients that differ between ranks.
        """
        comm, what = self._run.context.comms.replica, f"values that losses of step {self._run.local_step + 1} depend on"
        kept = self._reached
        seen = {line: kept[line] | self._read_here.get(line, set()) for line in kept}
        rows = [(_line_key(line), digest, digest in kept[line]) for line in seen for digest in seen[line]]
        rows += self._plain.rows()
        most = max(int(count) for count in comm.all_gather(torch.tensor([len(rows)]), what))
        table = torch.zeros(most, 3, dtype=torch.int64)
        table[: len(rows)] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        ranks = [_by_line(each.tolist()) for each in comm.all_gather(table, what)]
        keys = sorted(set().union(*ranks))
        wrong = next((key for key in keys if _differ(key, [rank.get(key) for rank in ranks])), None)
        if wrong is None:
            return
        line = next((line for line in kept if _line_key(line) == wrong), self._plain.line(wrong))
        texts = comm.all_gather_strings(line, what)
        line = next(filter(None, texts))
        if is_key_of_samples(wrong):
            refuse_number(self._run.global_step + 1, line)
        place = f"step {self._run.global_step + 1}, {line}"
        if _STEP in place:
            raise UsageError(
                "an optimizer that tutti.prepare was not given trains tensors with each rank's own gradients",
                where=place,
                why="their gradients are of the rank's own samples, and one device would have those of all samples",
                remedy=f"{PREPARE}; or reduce their gradients over ranks before (tutti.allreduce)",
            )
        raise UsageError(
            "the loss depends on values that each rank has kept from its own samples of earlier steps",
            where=place,
            why="ranks have other values there, and one device would have those of all samples",
            remedy="give tutti.prepare tensors that are trained, in a module beside the model (tutti.prepare([model,"
            " loss], …)) and in an optimizer; exchange other values over ranks before they are kept (tutti.allreduce,"
            " tutti.allgather), or keep them in a buffer of the model, of which each logical worker has its own",
        )

    def _why_alone(self) -> str:
        """Return why ranks do not compare tensors that the script trains beside the model; an empty text if they do."""
        run = self._run
        if self._in_stages():
            return "the last stage's rank computes the loss, and other ranks' copies would stay as they are"
        together = run.context.synchronous and run.gradient_sync.loss_normalisation == "step"
        if together or run.context.comms.replica.size == 1:
            return ""
        return "each rank would train its own with its samples, and none exchanges them"

    def _is_leaf(self, tensor: Tensor) -> bool:
        """Return whether a loss of a watched step gives a tensor its gradient."""
        return id(tensor) in self._leaves and self._leaves[id(tensor)]() is tensor

    def _in_stages(self) -> bool:
        """Return whether the loss function of ``run.step`` is called on the ranks of one pipeline stage alone."""
        return self._run.context.mesh.stage > 1 and not self._run.custom.within_batch

    def _refuse_trained(self, where: str) -> NoReturn:
        raise UsageError(
            "the script trains tensors that are not in the model",
            where=f"step {self._run.global_step + 1}, {where}",
            why=self._alone,
            remedy=PREPARE,
        )

    def _look(self, module: nn.Module, args: Any, named: Any) -> None:
        """Record recurrent states among a module's arguments, and parameters that FSDP2 has gathered for it."""
        # A loop's body that the script compiles traces this hook, too.
        if torch.compiler.is_compiling() or not self._active:
            return
        if self._run.replica.sharded:
            with FunctionModesDisabled():
                self._own |= memories_of(module.parameters())
        for each in tree_leaves((args, named)):
            if isinstance(each, Tensor) and each.is_floating_point():
                self._states |= self._origin_of(each).kept & self._by_sample

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or functorch_level() is not None:
            return func(*args, **kwargs)
        if not self._active:
            return self._note_in_backward(func, args, kwargs) if self._in_backward else func(*args, **kwargs)
        self.note_call(func, args)
        # Buffers of code that exchanges tensors over ranks differ between ranks.
        if func in METADATA:
            return func(*args, **kwargs)
        if (caller := calling_module(calling_frame(1))).startswith(EXCHANGING):
            self._reads.leave_out(leaves_of_call(args, kwargs))
            return func(*args, **kwargs)
        if roots := roots_of_backward(func, args, kwargs):
            for loss, _ in roots:
                self.check(loss)
            with self._run.custom.plain_backward(roots), self.backward():
                return backward_within(self, *args, **kwargs) if func is Tensor.backward else func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, Tensor)]
        of_script, read = not caller.startswith("tutti."), values_read(func, name, args, kwargs)
        # Numbers of tutti's own are, for example, weights of micro-batches.
        origin = self._joined([each for each in read if of_script or isinstance(each, Tensor)], name in WITH_INTS)
        before = tensor_versions(given)
        unfit = self.unfit_gradients(func, args, kwargs)
        result = func(*args, **kwargs)
        if unfit is not None:
            self._run.custom.mark_gradients(result, unfit)
        self.note_result(name, args, result)
        if of_script:
            self._plain.note(name, args, kwargs, result, origin.samples)
            self._reads.note(name, args, kwargs, result, origin.samples)
        else:
            self._reads.follow(given, result)
        if func in (Tensor.item, Tensor.tolist):
            if self._steps > FIRST:
                # To make them plain takes tenths of a second.
                return result
            origins: dict[Any, str] = {each: "" for each in origin.kept}
            if origin.samples:
                origins |= {self._steps: ""}
                origins |= {_ALL: ""} if of_script and self._reads.last_of_all else {}
            return tree_map(lambda value: self._numbers.follow(value, origins), result) if origins else result
        written = [leaf for leaf, old, new in zip(given, before, tensor_versions(given), strict=True) if old != new]
        for memory in memories_of(written) - self._own - self._batch:
            self._origins[memory] = origin
            self._digests.pop(memory, None)
        tensors = [each for each in read if isinstance(each, Tensor)]
        if len(tensors) == 1 and isinstance(result, Tensor):
            self._note_conversion(tensors[0], result)
        for memory in memories_of(tree_leaves(result)) - self._own - self._batch:
            self._origins.setdefault(memory, origin)
        self._origins.drop_freed()
        return result

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context manager for ``run.backward``, in which numbers that the script's hooks use are recorded.

        They are the Python numbers that hooks give to PyTorch. Data ranks compare them with the gradients, as each rank
        may have kept them of its own samples in earlier steps. With a sharded model, whose own hooks run in backward,
        nothing is recorded.
        """
        is_due = self._active and not self._run.replica.sharded
        with self.updating():
            self._in_backward = is_due
            try:
                yield
            finally:
                self._in_backward = False

    def _note_in_backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch, and record the numbers that a hook of the script gives to it in a backward."""
        if func is Tensor.backward:
            return backward_within(self, *args, **kwargs)
        result = func(*args, **kwargs)
        if func in METADATA or calling_module(calling_frame(1)).startswith(NOT_OF_SCRIPT):
            return result
        name = getattr(func, "__name__", "")
        origin = self._joined([each for each in leaves_of_call(args, kwargs) if not isinstance(each, Tensor)], False)
        self._plain.note(name, args, kwargs, result, samples=True)
        self._reads.note(name, args, kwargs, result, of_samples=True)
        # A number for a log changes no gradient.
        if isinstance(result, Tensor) and result.dim():
            self._plain.reach(origin.numbers)
            for each in origin.kept:
                self._reached.setdefault(each.line, set()).add(each.digest)
        return result

    def _note_conversion(self, source: Tensor, result: Tensor) -> None:
        """Record the result of a call as a tensor that the code has only read, if the call has converted such a tensor.

        A conversion is to another device or dtype, such as a frozen teacher's move to the samples' device in the loss
        function's first call. The copy has the values of before this step, and counts as kept once they change.

        Args:
            source: the only tensor of whose values the result is computed.
            result: the result.
        """
        memory = memory_of(source)
        if memory is None or memory not in self._digests or self._origins[memory].kept:
            return
        with FunctionModesDisabled():
            converted = source.shape == result.shape and (source.dtype, source.device) != (result.dtype, result.device)
        if converted:
            self._origin_of(result)

    def _joined(self, values: Iterable[Any], with_ints: bool) -> _Origin:
        """Return the origin of a result that is computed from tensors and numbers.

        Args:
            values: the arguments of the call; those that are no tensors or numbers are passed over.
            with_ints: whether the call takes ints as values, and not as sizes or indices.
        """
        kept, samples, numbers = frozenset[_Kept](), False, frozenset[PlainNumber]()
        for each in values:
            if isinstance(each, Tensor):
                origin = self._origin_of(each)
            elif isinstance(each, FollowedFloat) or (with_ints and isinstance(each, FollowedInt)):
                origin = self._origin_of_number(each)
            elif (number := self._plain.number(each, with_ints, self._reads.are_of_all)) is not None:
                origin = _Origin(numbers=frozenset((number,)))
            else:
                continue
            kept, samples, numbers = kept | origin.kept, samples or origin.samples, numbers | origin.numbers
        return _Origin(kept, samples, numbers)

    def _origin_of_number(self, number: FollowedFloat | FollowedInt) -> _Origin:
        if any(isinstance(each, int) and each < self._steps for each in number.origins):
            return _Origin(frozenset((_Kept(script_line(), name_key(repr(float(number)))),)), samples=True)
        kept = frozenset(each for each in number.origins if isinstance(each, _Kept))
        of_all = self._reads.are_of_all or _ALL in number.origins
        numbers = [self._plain.number_of_samples(number)] if of_all else []
        return _Origin(kept, samples=True, numbers=frozenset(numbers))

    def _origin_of(self, tensor: Tensor) -> _Origin:
        memory = memory_of(tensor)
        if memory is None or memory in self._own:
            return _NOTHING
        if memory in self._batch:
            return _SAMPLES
        origin = self._origins.get(memory)
        if origin is None:
            origin = self._origins[memory] = self._first_read(tensor, memory)
        if memory in self._kept and self._samples in tensor.shape:
            self._by_sample.add(self._kept[memory])
        return origin

    def _first_read(self, tensor: Tensor, memory: StorageWeakRef) -> _Origin:
        """Return the origin of a tensor that the code for this step has not made."""
        storage = tensor.untyped_storage()
        # A custom function of autograd, which the mode does not see, may have made it; FSDP2 frees memory in place.
        if tensor.grad_fn is not None or not 0 < storage.nbytes() <= _LARGEST:
            return _SAMPLES
        with FunctionModesDisabled():
            # The whole memory: another view of it is no change.
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            # What else is in the memory may be a rank's own.
            digest, values = tensor_digests([whole, tensor.detach()])
        self._digests[memory] = digest
        line = script_line()
        self._read_here.setdefault(line, set()).add(values)
        self._read_last.setdefault(line, set()).add((tensor.shape, values))
        if memory not in self._before and (memory in self._constants or not self._was_constant(line, tensor, values)):
            return _NOTHING if memory in self._constants else _SAMPLES
        if self._before.get(memory) == digest:
            return _NOTHING
        self._kept[memory] = kept = _Kept(line, values)
        return _Origin(frozenset((kept,)), samples=True)

    def _was_constant(self, line: str, tensor: Tensor, digest: int) -> bool:
        """Return whether a line, at the turn of an epoch, reads another tensor than the same one of all steps before.

        There scripts compute constants such as class weights and thresholds anew. A line that reads samples, which a
        script may bring from elsewhere, has read other values in each step.
        """
        before = self._read_before.get(line, [])
        one = len(before) >= _CONSTANT and all(each == before[0] for each in before)
        former = {values for shape, values in before[0] if shape == tensor.shape} if one else set()
        return self._run.lifecycle.windows.is_open and len(former) == 1 and digest not in former

    def _note_step(self, name: str, parameters: Sequence[Tensor]) -> None:
        """Record a step of an optimizer that ``tutti.prepare`` was not given, on tensors outside of the model.

        Raises UsageError if ranks cannot compare these tensors. With pipeline stages only tensors on which a loss
        depends count: a rank may train others, such as another model beside the run, by gradients of its own.

        Args:
            name: the optimizer's class.
            parameters: its parameters that are not in the model and have gradients.
        """
        if self._alone and (not self._in_stages() or any(map(self._is_leaf, parameters))):
            self._refuse_trained(f"{name}{_STEP}{script_line()}")
        if self._due and self._run.context.comms.replica.size > 1:
            values = [part for p in parameters for each in (p, p.grad) if each is not None for part in _dense(each)]
            digest = mix(*tensor_digests(values)) >> 1
            self._trained.setdefault(f"{name}{_STEP}{script_line()}", set()).add(digest)


def _dense(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors of a tensor, such as a gradient: of a sparse one its indices and values."""
    if not tensor.is_sparse:
        return (tensor.detach(),)
    whole = tensor.detach().coalesce()
    return whole.indices(), whole.values()


class _LineValues(NamedTuple):
    """Digests of the values that a line reads on one rank: ``kept`` from an earlier step, and all (``seen``)."""

    kept: set[int]
    seen: set[int]


def _line_key(line: str) -> int:
    """Return a key of a line; optimizers' steps have negative keys, and so come first in an order by keys.

    A difference there explains those of later lines.
    """
    return -name_key(line) if _STEP in line else name_key(line)


def _by_line(rows: Iterable[Sequence[int]]) -> dict[int, _LineValues]:
    """Return a rank's values by the key of the line that reads them; rows of zeros are padding."""
    found: dict[int, _LineValues] = {}
    for key, digest, is_kept in rows:
        if key:
            values = found.setdefault(key, _LineValues(set(), set()))
            values.seen.add(digest)
            if is_kept:
                values.kept.add(digest)
    return found


def _differ(key: int, ranks: Sequence[_LineValues | None]) -> bool:
    """Return whether two ranks have each kept a value that the other rank's line does not read.

    For a Python number it suffices that one rank has kept such a value. For a tensor it does not, as ranks may differ
    in whether it counts as kept: memory that one rank has filled anew may have its former values on another rank.
    """
    there = [each for each in ranks if each is not None]
    pairs = list(itertools.combinations(there, 2))
    if is_number_key(key):
        return any(one.seen != other.seen and (one.kept - other.seen or other.kept - one.seen) for one, other in pairs)
    return any(one.kept - other.seen and other.kept - one.seen for one, other in pairs)
