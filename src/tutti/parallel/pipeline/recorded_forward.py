"""Record which blocks a model's forward calls, where ``torch.fx`` cannot follow the forward.

``torch.fx`` cannot follow a forward that decides by its inputs, builds masks from shapes or returns types of its own.
Each pipeline stage then runs the model's own Python code (``RecordedStage``), and computes the blocks that it holds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from tutti.device import forked_generators
from tutti.errors import UsageError
from tutti.nn.forward_hooks import find_script_hook
from tutti.nn.swap import buffers, training_mode
from tutti.nn.untraced import Untraced
from tutti.parallel.pipeline.block_dispatch import BlockCall, BlockDispatch, BlockOutput, cannot_be_cut
from tutti.parallel.pipeline.made_values import ValuesAfterBlocks
from tutti.parallel.pipeline.recorded_stage import RecordedStage
from tutti.torch_compat import (
    TorchDispatchMode,
    is_fake,
    module_buffers,
    operator_arguments,
    storage_key,
    tree_leaves,
)

_INPUTS = "inputs"


class ReadOutsideError(UsageError):
    """Raised where a model cannot be cut into stages because its own forward reads a parameter of its submodules.

    Every stage runs the model's own forward, and would need this parameter.

    Args:
        what, why, remedy: what happened, the cause and what the user can do, as in ``TuttiError``.
        name: the parameter's name in the model.

    Attributes:
        name: the parameter's name in the model.
    """

    def __init__(self, what: str, *, why: str | None, remedy: str | None, name: str) -> None:
        super().__init__(what, why=why, remedy=remedy)
        self.name = name


class ForwardRecord:
    """Records the calls of blocks in a model's forward, to cut a model into stages that ``torch.fx`` cannot trace.

    A block is a module that one pipeline stage calls as a unit; the Python code around the blocks runs on every stage.
    The constructor runs ``trial`` on fake tensors, once as in training and once as in evaluation.

    Args:
        plain: the whole model.
        opened: names of the modules whose own Python code every stage runs, and whose submodules are the blocks; "" is
            the model.
        trial: calls the loss function on the model it is given, with one micro-batch.
        device: the device of the micro-batch, on which the fake tensors are, too, wherever the model is now; None for
            that of the model.
        numbered: blocks that run on made-up numbers (``made_numbers``) in place of fake tensors, by name, each with its
            error on these.

    Attributes:
        plain: the whole model.
        opened: names of the modules whose own Python code every stage runs.
        dispatch: object through which the model's forward runs; gives each call of a block to the recording or to the
            stage for which the forward runs, which decides what the call returns.
        calls: the calls of blocks in training, in order.
        evaluated: indices of the calls that evaluation makes, too.
        reads: the blocks' tensors from which the model's output or the loss is computed outside of blocks.
        buffers: names of buffers of opened modules that are read outside of blocks, on every stage.
        last: names of parameters of opened modules that are read outside of blocks for the output alone, such as the
            scale of logits, which the last stage holds.
        written: the blocks' tensors that the code outside of blocks writes in place. Every stage writes a copy.
        writes_inputs: whether that code writes tensors in place that it has not computed, such as the model's inputs.

    Raises:
        UsageError: the code outside of blocks reads a block's parameters, or others for a block's arguments, draws
            random numbers or writes attributes, calls blocks in evaluation that it does not call in training, reads
            what hooks on blocks keep, or writes a block's tensor in place and then reads a tensor that shares its
            memory through a block; or a block returns tensors whose shapes depend on values.
        ReadsValuesError: a block that is not ``numbered`` cannot run on fake tensors.
    """

    def __init__(
        self,
        plain: nn.Module,
        opened: Collection[str],
        trial: Callable[[Any], Any],
        device: torch.device | None = None,
        numbered: Mapping[str, Exception] | None = None,
    ) -> None:
        self.plain, self.opened = plain, frozenset(opened)
        self._device = device or next((p.device for p in plain.parameters()), torch.device("cpu"))
        self.dispatch = BlockDispatch(plain, self.opened, self._device, numbered or {})
        self.buffers: set[str] = set()
        self.last: set[str] = set()
        with_gradient, without = (self._record(trial, training) for training in (True, False))
        found = _places([call.name for call in without.calls], [call.name for call in with_gradient.calls])
        if found is None:
            raise cannot_be_cut(plain, "its forward calls blocks in evaluation that it does not call in training")
        self.calls, self.evaluated = list(with_gradient.calls), found

        def in_training(outputs: Iterable[BlockOutput]) -> frozenset[BlockOutput]:
            return frozenset(BlockOutput(found[output.call], output.tensor) for output in outputs)

        for number, other in zip(found, without.calls, strict=True):
            one = self.calls[number]
            reads = one.reads | in_training(other.reads)
            self.calls[number] = BlockCall(one.name, reads, max(one.tensors, other.tensors))
        self.reads = frozenset(with_gradient.reads) | in_training(without.reads)
        self.written = frozenset(with_gradient.written) | in_training(without.written)
        self.writes_inputs = with_gradient.writes_inputs or without.writes_inputs

    def _record(self, trial: Callable[[Any], Any], training: bool) -> _Recording:
        with forked_generators(self._device), _buffers_on(self.dispatch.opened, self._device):
            untraced = Untraced(self.plain)
            values, result = ValuesAfterBlocks(self.dispatch.fakes, self._device), None
            recording = _Recording(self.dispatch, values)
            try:
                with training_mode([self.plain], training=training), torch.set_grad_enabled(training), values:
                    result = trial(_TrialModel(self.plain, recording))
            except UsageError:
                raise
            except Exception:
                # Made numbers may fail the checks of the code that reads them, and NumPy takes no fake tensors. Behind
                # all blocks the last stage alone runs this code, on the tensors that it has read so far.
                if not recording.read_behind_all_blocks():
                    if values.error is not None:
                        raise values.error from None
                    raise
            finally:
                changed = untraced.undo()
        changed = [name for name in changed if name.rpartition(".")[0] in self.opened]
        if changed:
            raise cannot_be_cut(self.plain, f"its forward writes {changed[0]}, which every stage would write")
        # First of all what opening a block can mend: its parts are then blocks, and draw by themselves.
        if recording.read:
            name = recording.read[0]
            error = cannot_be_cut(self.plain, f"its own forward reads {name} outside of its blocks")
            raise ReadOutsideError(error.what, why=error.why, remedy=error.remedy, name=name)
        if recording.drawn:
            why = f"its own forward draws random numbers by {recording.drawn[0]}, which would depend on the stages"
            raise cannot_be_cut(self.plain, why)
        if recording.outdated:
            why = f"its forward writes in place what {recording.outdated[0]} returns or was given, and then reads"
            raise cannot_be_cut(self.plain, f"{why} a tensor that shares its memory through this block")
        hook = find_script_hook(self.plain.named_modules()) if recording.leaked else None
        if hook is not None:
            why = f"its forward reads what the forward hook on {hook[0]} ({hook[1]}) keeps, on this block's stage alone"
            raise cannot_be_cut(self.plain, why)
        self.buffers |= recording.buffers
        self.last |= recording.last
        recording.reads |= recording.sources(result)
        return recording

    def move_buffers(self) -> None:
        """Move the own buffers of opened modules to the device, where the code outside of blocks reads them.

        Every stage runs this code, and reads the whole model's buffers there. To be called before the model is cut,
        because the stages share its tensors.
        """
        _move_buffers(self.dispatch.opened, self._device)

    def graph(self) -> fx.Graph:
        """Return the recorded forward as an ``fx.Graph`` with a ``call_module`` node for each call of a block.

        Blocks are the modules that pipeline stages call as units. A node's arguments are a placeholder for the model's
        inputs, and the outputs of earlier blocks that the call reads; a block that returns several tensors has a
        ``getitem`` node for each. The graph serves to choose cuts; stages run the model's own code.
        """
        graph = fx.Graph()
        inputs = graph.placeholder(_INPUTS)
        values: dict[BlockOutput, fx.Node] = {}

        def read(places: Iterable[BlockOutput]) -> tuple[fx.Node, ...]:
            return tuple(values[place] for place in sorted(places))

        for number, call in enumerate(self.calls):
            node = graph.call_module(call.name, (inputs, *read(call.reads)))
            values[BlockOutput(number, 0)] = node
            if call.tensors > 1:
                for tensor in range(call.tensors):
                    values[BlockOutput(number, tensor)] = graph.call_function(operator.getitem, (node, tensor))
            for place in list(values)[-call.tensors :] if call.tensors else ():
                values[place].meta["output"] = place
            node.meta["call"] = number
        graph.output(read(self.reads))
        return graph

    def stage(
        self, nodes: Sequence[fx.Node], incoming: Sequence[fx.Node], outgoing: Sequence[fx.Node]
    ) -> RecordedStage:
        """Return the module of the virtual pipeline stage that computes consecutive nodes of the recorded graph.

        The module runs the model's own forward, but computes only the blocks (modules that one stage calls as units)
        among these nodes.

        Args:
            nodes: consecutive nodes of ``graph()``.
            incoming: nodes before ``nodes`` whose values the stage receives.
            outgoing: nodes whose values the stage sends; empty for the last stage, which returns the model's output.

        Returns:
            An ``nn.Module`` that holds the stage's blocks under their names in the whole model. Its forward takes
            ``(args, kwargs, *received values)``, with the arguments of the model's call as a tuple and a mapping.
        """
        calls = [node.meta["call"] for node in nodes if "call" in node.meta]
        first, behind = (calls[0], calls[-1] + 1) if calls else (len(self.calls), len(self.calls))
        received, sent = ([node.meta["output"] for node in side] for side in (incoming, outgoing))
        return RecordedStage(self, range(first, behind), received, sent)


class _TrialModel:
    """The model that the loss function calls in a trial."""

    def __init__(self, plain: nn.Module, recording: _Recording) -> None:
        self._plain, self._recording = plain, recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._recording.calls:
            raise cannot_be_cut(self._plain, "the loss function calls it twice")
        return self._recording.dispatch.run(self._recording, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class _Recording(TorchDispatchMode):
    """A run of the forward on fake tensors: notes from which blocks' tensors each block's arguments are computed.

    Args:
        dispatch: through which the model's forward runs.
        values: mode in which operations after the last block get made numbers for the values that they read.

    Attributes:
        drawn: operations outside of blocks that draw random numbers.
        read: names of parameters that are read outside of blocks, and that a block holds, or from which a block's
            arguments are computed.
        last: names of parameters of opened modules that are read outside of blocks.
        buffers: names of buffers of opened modules that are read outside of blocks.
        written: the blocks' tensors that operations outside of blocks write in place.
        writes_inputs: whether such operations write tensors in place that none of them has computed.
        outdated: names of blocks that return memory of their arguments, or the same memory twice, of which one tensor
            is written in place outside of blocks and another one is read later.
        leaked: whether a tensor is read outside of blocks that was made inside of one, which has not returned it.
    """

    def __init__(self, dispatch: BlockDispatch, values: ValuesAfterBlocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dispatch, self.inside, self._values = dispatch, False, values
        self.calls: list[BlockCall] = []
        self.reads: set[BlockOutput] = set()
        self.drawn: list[str] = []
        self.read: list[str] = []
        self.last: set[str] = set()
        self.buffers: set[str] = set()
        self.written: set[BlockOutput] = set()
        self.writes_inputs = False
        self.outdated: list[str] = []
        self.leaked = False
        self._behind: set[BlockOutput] = set()
        self._within: str | None = None
        self._sources: dict[int, set[BlockOutput]] = {}
        self._from: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []
        self._computed: set[int] = set()
        self._returned: dict[int, BlockOutput] = {}
        self._partners: dict[int, dict[int, str]] = {}
        self._stale: dict[int, str] = {}
        self._parameters = {id(p): name for name, p in dispatch.plain.named_parameters()}
        self._buffers = {
            id(slot.get()): slot.name for slot in buffers([dispatch.plain]) if slot.owner in dispatch.opened
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which the operations between the model's blocks (modules called as units) are recorded.

        Each tensor that such an operation returns is traced to the tensors of blocks from which it is computed.
        """
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            return result
        entering = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._look(entering)
        for leaf in _written(func, args, kwargs):
            self._write(storage_key(leaf))
        self._keep(result, entering)
        if torch.Tag.nondeterministic_seeded in func.tags and _dropout_rate(func, args, kwargs) != 0.0:
            self.drawn.append(func.overloadpacket.__name__)
        sources, parameters = self.sources(entering), self._parameters_of(entering)
        self._behind |= sources
        if self._values.error is not None:
            # By other values the code may take another branch, and read any of these tensors.
            self.reads |= sources
        for leaf in tree_leaves(result) if sources or parameters else ():
            if isinstance(leaf, Tensor):
                self._mark(leaf, sources)
                self._from.setdefault(storage_key(leaf), set()).update(parameters)
        return result

    def _parameters_of(self, leaves: Iterable[Any]) -> set[str]:
        """Return the names of the opened modules' parameters that are among tensors or that these are computed from."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = {self._parameters[id(leaf)] for leaf in tensors if id(leaf) in self._parameters} & self.last
        return own.union(*(self._from.get(storage_key(leaf), ()) for leaf in tensors))

    def sources(self, values: Any) -> set[BlockOutput]:
        """Return the set of addresses of the block outputs from which ``values`` are computed in the recorded forward.

        Args:
            values: tensors, or nested lists, tuples and mappings of them; other values are ignored.
        """
        leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return set().union(*(self._sources.get(storage_key(leaf), set()) for leaf in leaves))

    def _look(self, leaves: Iterable[Any]) -> None:
        """Note parameters, buffers, and tensors read after a write to memory that they share through a block."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            if (name := self._parameters.get(id(leaf))) is not None:
                if name.rpartition(".")[0] in self.dispatch.opened_names:
                    self.last.add(name)
                else:
                    self.read.append(name)
            if id(leaf) in self._buffers:
                self.buffers.add(self._buffers[id(leaf)])
            if (key := storage_key(leaf)) in self._stale:
                self.outdated.append(self._stale[key])
            self.leaked |= is_fake(leaf) and key not in self._sources and key not in self._computed

    def _write(self, key: int) -> None:
        """Note a write in place to a storage."""
        self._stale |= self._partners.get(key, {})
        if key in self._returned:
            self.written.add(self._returned[key])
        elif key not in self._computed:
            self.writes_inputs = True

    def _keep(self, result: Any, entering: Iterable[Tensor]) -> None:
        """Note the storages that an operation outside of blocks has made."""
        given = {storage_key(leaf) for leaf in entering}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := storage_key(leaf)) not in given:
                self._alive.append(leaf)
                self._computed.add(key)

    def _mark(self, tensor: Tensor, sources: set[BlockOutput]) -> None:
        self._alive.append(tensor)
        self._sources.setdefault(storage_key(tensor), set()).update(sources)

    def block(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record a call of a block (module called as a unit), and return its result as fake tensors, without values.

        Appends the block's name, the block outputs that the arguments are computed from, and the number of tensors
        returned to ``calls``.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Raises:
            Exception: the error of an operation before this call that needs values of fake tensors.
        """
        if self._values.error is not None:
            raise self._values.error
        self._within = name
        reads, leaves = self.sources((args, kwargs)), tree_leaves((args, kwargs))
        self._look(leaves)
        self.read += sorted(self._parameters_of(leaves))
        with self._values.within_block():
            result, memory = self.dispatch.shape_and_memory(name, block, args, kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for number, (tensor, same) in enumerate(zip(tensors, memory, strict=True)):
            self._mark(tensor, {BlockOutput(len(self.calls), number)})
            self._returned[storage_key(tensor)] = BlockOutput(len(self.calls), number)
            self._pair(storage_key(tensor), {storage_key([*leaves, *tensors][index]) for index in same}, name)
        self._behind = {BlockOutput(len(self.calls), number) for number in range(len(tensors))}
        self.calls.append(BlockCall(name, frozenset(reads), len(tensors)))
        self._within = None
        return result

    def read_behind_all_blocks(self) -> bool:
        """Add the tensors that were read since the last block to ``reads``, if the forward was behind all blocks.

        Returns:
            Whether each block with parameters has been called, and no block was running.
        """
        called = {call.name for call in self.calls}
        left = (block for name, block in self.dispatch.blocks.items() if name not in called)
        if self._within or not called or any(next(block.parameters(), None) is not None for block in left):
            return False
        self.reads |= self._behind
        return True

    def end(self, output: Any) -> Any:
        """Add the block outputs from which the model's output is computed to ``reads``, and return the output.

        Args:
            output: what the recorded forward has returned, with fake tensors.
        """
        self.reads |= self.sources(output)
        self._look(tree_leaves(output))
        return output

    def _pair(self, key: int, others: set[int], name: str) -> None:
        """Note that a block's result has the memory of its arguments, and of what had that memory before."""
        for other in others | {known for one in others for known in self._partners.get(one, {})}:
            self._partners.setdefault(key, {})[other] = name
            self._partners.setdefault(other, {})[key] = name


def _places(some: Sequence[str], every: Sequence[str]) -> list[int] | None:
    """Return the places of names in a sequence that has them in the same order, or None where it does not."""
    found, rest = [], iter(enumerate(every))
    for name in some:
        place = next((at for at, other in rest if other == name), None)
        if place is None:
            return None
        found.append(place)
    return found


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> list[tuple[nn.Module, str, Tensor]]:
    """Move the modules' own buffers to a device. Returns the moved ones: module, name, and the tensor of before."""
    moved = []
    for module in modules:
        for name, buffer in module_buffers(module).items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                moved.append((module, name, buffer))
                module_buffers(module)[name] = buffer.to(device)
    return moved


@contextmanager
def _buffers_on(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Return a context in which the modules' own buffers are copies on ``device``, for the code outside of blocks."""
    moved = _move_buffers(modules, device)
    try:
        yield
    finally:
        for module, name, buffer in moved:
            module_buffers(module)[name] = buffer


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """Return the tensors that an operation writes in place."""
    arguments = operator_arguments(func)
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs or {})
    changed = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _dropout_rate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> float | None:
    """Return the dropout rate with which fused attention is called; None for other operations."""
    arguments = operator_arguments(func)
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs or {})
    return given.get("dropout_p", next((a.default_value for a in arguments if a.name == "dropout_p"), None))
