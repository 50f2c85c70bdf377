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
from tutti.parallel.pipeline.block_dispatch import (
    BlockCall,
    BlockDispatch,
    BlockOutput,
    ReadsValuesError,
    cannot_be_cut,
)
from tutti.parallel.pipeline.made_values import PLAIN, ValuesAfterBlocks, tensors_within
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
    """Raised where a model's forward reads a parameter of a module outside of that module's call.

    The module lies within a block, a module that one pipeline stage calls as a unit. The caller then treats the block's
    submodules as blocks of their own, so that the model can be cut beside the module that is read.

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
        last: names of parameters that are read outside of blocks for the output, such as the scale of logits, which the
            last stage holds. Those that are read for a block's arguments are in its ``BlockCall``.
        outside: names of all parameters that are read outside of blocks.
        everywhere: names of the parameters in ``outside`` whose values the code outside of blocks reads on the host, as
            by ``item``; every stage holds them.
        open_ended: whether the recording ended after the last block with parameters, at code that reads values of
            tensors. The last stage then calls all later modules, which have no parameters.
        written: the blocks' tensors that the code outside of blocks writes in place. Every stage writes a copy.
        writes_inputs: whether the code outside of blocks writes tensors in place that it has not computed, such as the
            model's inputs.

    Raises:
        UsageError: the code outside of blocks writes parameters from which a block's arguments are computed, draws
            random numbers or writes attributes, calls blocks in evaluation that it does not call in training, reads
            what hooks on blocks keep, or writes a block's tensor in place and then reads a tensor that shares its
            memory through a block; or a block returns tensors whose shapes depend on values.
        ReadOutsideError: the code outside of blocks reads a parameter of a module inside of a block.
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
        self.outside: set[str] = set()
        self.everywhere: set[str] = set()
        self.open_ended = False
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
            read = one.parameters | other.parameters
            self.calls[number] = BlockCall(one.name, reads, max(one.tensors, other.tensors), read)
        self.reads = frozenset(with_gradient.reads) | in_training(without.reads)
        self.written = frozenset(with_gradient.written) | in_training(without.written)
        self.writes_inputs = with_gradient.writes_inputs or without.writes_inputs

    def _record(self, trial: Callable[[Any], Any], training: bool) -> _Recording:
        recording, result, changed, values = self._run(trial, training, {})
        if moved := self._moved(trial, training, changed, values) if changed else None:
            raise cannot_be_cut(self.plain, f"its forward writes {moved}, which every stage would write")
        # First of all what opening a block can mend: its parts are then blocks, and draw by themselves.
        if recording.read:
            name = recording.read[0]
            error = cannot_be_cut(self.plain, f"its own forward reads {name} outside of its blocks")
            raise ReadOutsideError(error.what, why=error.why, remedy=error.remedy, name=name)
        shared = {name for call in recording.calls for name in call.parameters}
        if overwritten := shared & recording.overwritten:
            why = f"its own forward writes {min(overwritten)}, of which several stages may have a copy"
            raise cannot_be_cut(self.plain, why)
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
        self.outside |= recording.outside
        self.everywhere |= recording.everywhere
        recording.reads |= recording.sources(result)
        return recording

    def read_for_blocks(self, nodes: Iterable[fx.Node]) -> set[str]:
        """Return the names of parameters that a stage's code outside of blocks reads for the calls of its blocks.

        Args:
            nodes: the nodes of ``graph()`` that the stage computes.
        """
        calls = [self.calls[node.meta["call"]] for node in nodes if "call" in node.meta]
        return set().union(*(call.parameters for call in calls))

    def _run(
        self, trial: Callable[[Any], Any], training: bool, attributes: Mapping[str, Any]
    ) -> tuple[_Recording, Any, list[str], dict[str, Any]]:
        """Run the trial on fake tensors, beginning with these attributes of opened modules.

        Returns:
            The recording, the result of ``trial``, and of opened modules the names of all that has changed, and the new
            values of attributes among it.
        """
        with forked_generators(self._device), _buffers_on(self.dispatch.opened, self._device):
            untraced = Untraced(self.plain)
            for name, value in attributes.items():
                path, _, key = name.rpartition(".")
                vars(self.plain.get_submodule(path))[key] = value
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
                self.open_ended = True
            finally:
                recording.undo()
                found = {name: self._attribute(name) for name in self._own(untraced.written_attributes())}
                changed = self._own(untraced.undo())
        return recording, result, changed, found

    def _own(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.rpartition(".")[0] in self.opened]

    def _attribute(self, name: str) -> Any:
        path, _, key = name.rpartition(".")
        return vars(self.plain.get_submodule(path)).get(key)

    def _moved(
        self, trial: Callable[[Any], Any], training: bool, changed: Sequence[str], values: Mapping[str, Any]
    ) -> str | None:
        """Return the name of a thing that the forward changes anew if it is repeated, as a counter; None for none.

        All others are attributes that follow from the inputs: every stage writes them as one device does, though
        it runs the code more often.
        """
        others = [name for name in changed if name not in values or not _is_constant(values[name])]
        if others:
            return others[0]
        again = self._run(trial, training, values)[3]
        return next((name for name, value in values.items() if not _are_equal(value, again.get(name, value))), None)

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
        read: names of parameters of modules inside of blocks that are read outside of blocks.
        outside: names of all other parameters that are read outside of blocks.
        last: names of those of them that are read behind the last block, or from which the output is computed.
        everywhere: names of those of them of which the code reads numbers.
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
        self.outside: set[str] = set()
        self.everywhere: set[str] = set()
        self.last: set[str] = set()
        self.buffers: set[str] = set()
        self.written: set[BlockOutput] = set()
        self.writes_inputs = False
        self.outdated: list[str] = []
        self.leaked = False
        self._behind: set[BlockOutput] = set()
        self._read_behind: set[str] = set()
        self._within: str | None = None
        self._sources: dict[int, set[BlockOutput]] = {}
        self._from: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []
        self._computed: set[int] = set()
        self._returned: dict[int, BlockOutput] = {}
        self._partners: dict[int, dict[int, str]] = {}
        self._stale: dict[int, str] = {}
        named = list(dispatch.plain.named_parameters())
        self._parameters = {id(p): name for name, p in named}
        self._stored = {storage_key(p): (name, p) for name, p in named}
        self._before: dict[str, tuple[nn.Parameter, Tensor]] = {}
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
        if self.inside:
            return func(*args, **(kwargs or {}))
        written = {storage_key(leaf) for leaf in _written(func, args, kwargs)}
        for name, parameter in [self._stored[key] for key in written if key in self._stored]:
            self._before.setdefault(name, (parameter, parameter.detach().clone()))
        result = func(*args, **(kwargs or {}))
        entering = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._look(entering)
        for key in written:
            self._write(key)
        self._keep(result, entering)
        if torch.Tag.nondeterministic_seeded in func.tags and _dropout_rate(func, args, kwargs) != 0.0:
            self.drawn.append(func.overloadpacket.__name__)
        sources, parameters = self.sources(entering), self._parameters_of(entering)
        self._behind |= sources
        self._read_behind |= parameters
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            # Every stage decides by this number.
            self.everywhere |= parameters
        if self._values.error is not None:
            # By other values the code may take another branch, and read any of these tensors.
            self.reads |= sources
        for leaf in tree_leaves(result) if sources or parameters else ():
            if isinstance(leaf, Tensor):
                self._mark(leaf, sources)
                self._from.setdefault(storage_key(leaf), set()).update(parameters)
        return result

    @property
    def overwritten(self) -> set[str]:
        """Names of parameters that the code outside of blocks has written."""
        return set(self._before)

    def undo(self) -> None:
        """Give parameters that the code outside of blocks has written their values of before."""
        with torch.no_grad():
            for parameter, value in self._before.values():
                parameter.copy_(value)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that a tensor is, or whose memory it has, as ``.data``; None for none."""
        name = self._parameters.get(id(tensor))
        return name or self._stored.get(storage_key(tensor), (None, None))[0]

    def _parameters_of(self, leaves: Iterable[Any]) -> set[str]:
        """Return the names of parameters that are among tensors, or from which these are computed."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = {name for leaf in tensors if (name := self._name_of(leaf)) in self.outside}
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
            if (name := self._name_of(leaf)) is not None:
                owner = name.rpartition(".")[0]
                if owner in self.dispatch.opened_names or owner in self.dispatch.blocks:
                    self.outside.add(name)
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
        leaves = tree_leaves((args, kwargs))
        # A module that a block is given, such as the embedding to which a head is tied.
        lent = [p for leaf in leaves if isinstance(leaf, nn.Module) for p in leaf.parameters()]
        self._look([*leaves, *lent])
        # Objects, such as a cache, may hold what other blocks have computed.
        given = [*leaves, *lent, *(t for leaf in leaves if not isinstance(leaf, Tensor) for t in tensors_within(leaf))]
        reads, read = frozenset(self.sources(given)), frozenset(self._parameters_of(given))
        last = next(block.parameters(), None) is None and self._is_behind_all_blocks()
        self._within = name
        try:
            if self._values.error is not None:
                raise self._values.error
            with self._values.within_block():
                result, memory = self.dispatch.shape_and_memory(name, block, args, kwargs)
        except ReadsValuesError:
            raise
        except Exception:
            if last:
                # The last stage runs it, and the code behind it, on real values.
                self._within = None
                self.calls.append(BlockCall(name, reads, 0, read))
            raise
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for number, (tensor, same) in enumerate(zip(tensors, memory, strict=True)):
            self._mark(tensor, {BlockOutput(len(self.calls), number)})
            self._returned[storage_key(tensor)] = BlockOutput(len(self.calls), number)
            self._pair(storage_key(tensor), {storage_key([*leaves, *tensors][index]) for index in same}, name)
        self._behind = {BlockOutput(len(self.calls), number) for number in range(len(tensors))}
        self._read_behind = set()
        self.calls.append(BlockCall(name, reads, len(tensors), read))
        self._within = None
        return result

    def read_behind_all_blocks(self) -> bool:
        """Add the tensors that were read since the last block to ``reads``, if the forward was behind all blocks.

        Returns:
            Whether each block with parameters has been called, and no block was running.
        """
        if self._within or not self._is_behind_all_blocks():
            return False
        self.reads |= self._behind
        self.last |= self._read_behind
        return True

    def _is_behind_all_blocks(self) -> bool:
        """Return whether each block with parameters has been called."""
        called = {call.name for call in self.calls}
        left = (block for name, block in self.dispatch.blocks.items() if name not in called)
        return bool(called) and all(next(block.parameters(), None) is None for block in left)

    def end(self, output: Any) -> Any:
        """Add the block outputs from which the model's output is computed to ``reads``, and return the output.

        Args:
            output: what the recorded forward has returned, with fake tensors.
        """
        self.reads |= self.sources(output)
        self._look(tree_leaves(output))
        self.last |= self._read_behind | self._parameters_of(tree_leaves(output))
        return output

    def _pair(self, key: int, others: set[int], name: str) -> None:
        """Note that a block's result has the memory of its arguments, and of what had that memory before."""
        for other in others | {known for one in others for known in self._partners.get(one, {})}:
            self._partners.setdefault(key, {})[other] = name
            self._partners.setdefault(other, {})[key] = name


def _is_constant(value: Any) -> bool:
    """Return whether an attribute's value holds no tensor of a block, and cannot be changed but for a tensor."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return not is_fake(value) if isinstance(value, Tensor) else isinstance(value, PLAIN)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not is_fake(other) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


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
