"""Record which blocks a model's forward calls, and run that forward on a stage that holds some of the blocks.

``torch.fx`` cannot follow a forward that decides by its inputs, builds masks from shapes or returns types of its own.
A stage then runs the model's own Python code. The call of a block that another stage holds returns the activations
that this stage has received, or fake tensors, which have shapes and no values. What is computed from a fake tensor is
fake again: a stage that would need a value that it does not have ends with UsageError, never with another value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from tutti.device import forked_generators
from tutti.errors import UsageError
from tutti.nn.absent_tensor import is_absent
from tutti.nn.forward_hooks import find_script_hook
from tutti.nn.swap import buffers, training_mode
from tutti.nn.untraced import Untraced, has_hooks
from tutti.nn.written_tensors import share_memory
from tutti.torch_compat import (
    FakeTensorMode,
    TorchDispatchMode,
    is_fake,
    module_buffers,
    non_persistent_buffers,
    operator_arguments,
    replace_call,
    storage_key,
    tensor_version,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    uncompiled_call,
    without_dispatch_modes,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_INPUTS = "inputs"


class ReadOutsideError(UsageError):
    """The model cannot be cut into pipeline stages, since its own forward reads a parameter outside of its submodules.

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


class ReadsValuesError(Exception):
    """A block (module called as a unit) cannot run on fake tensors, which have no values, in a recorded forward.

    Args:
        name: name of the block in the whole model.
        error: error of the block on fake tensors.

    Attributes:
        name, error: as given.
    """

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(str(error))
        self.name, self.error = name, error


class BlockOutput(NamedTuple):
    """Address of a tensor that a block, a module that one pipeline stage calls as a unit, returns in a forward.

    Attributes:
        call: index, from 0, of the block's call among all calls of blocks in the forward.
        tensor: index, from 0, of the tensor among the tensors that this call returns.
    """

    call: int
    tensor: int


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, a module that one pipeline stage calls as a unit, in a model's forward.

    Attributes:
        name: the block's name in the whole model.
        reads: tensors returned by earlier calls from which this call's arguments are computed.
        tensors: number of tensors that the call returns.
    """

    name: str
    reads: frozenset[BlockOutput]
    tensors: int


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
        numbered: blocks that run on made numbers in place of fake tensors, by name, each with its error on these.

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
        self.dispatch = _BlockDispatch(plain, self.opened, self._device, numbered or {})
        self.buffers: set[str] = set()
        self.last: set[str] = set()
        with_gradient, without = (self._record(trial, training) for training in (True, False))
        found = _places([call.name for call in without.calls], [call.name for call in with_gradient.calls])
        if found is None:
            raise _uncut(plain, "its forward calls blocks in evaluation that it does not call in training")
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
            recording = _Recording(self.dispatch)
            try:
                with training_mode([self.plain], training=training), torch.set_grad_enabled(training):
                    result = trial(_TrialModel(self.plain, recording))
            finally:
                changed = untraced.undo()
        changed = [name for name in changed if name.rpartition(".")[0] in self.opened]
        if changed:
            raise _uncut(self.plain, f"its forward writes {changed[0]}, which every stage would write")
        # First of all what opening a block can mend: its parts are then blocks, and draw by themselves.
        if recording.read:
            name = recording.read[0]
            error = _uncut(self.plain, f"its own forward reads {name} outside of its blocks")
            raise ReadOutsideError(error.what, why=error.why, remedy=error.remedy, name=name)
        if recording.drawn:
            why = f"its own forward draws random numbers by {recording.drawn[0]}, which would depend on the stages"
            raise _uncut(self.plain, why)
        if recording.outdated:
            why = f"its forward writes in place what {recording.outdated[0]} returns or was given, and then reads"
            raise _uncut(self.plain, f"{why} a tensor that shares its memory through this block")
        hook = find_script_hook(self.plain.named_modules()) if recording.leaked else None
        if hook is not None:
            why = f"its forward reads what the forward hook on {hook[0]} ({hook[1]}) keeps, on this block's stage alone"
            raise _uncut(self.plain, why)
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


def hold_tensors(stage: nn.Module, names: Iterable[str], plain: nn.Module) -> None:
    """Register parameters and buffers of the whole model on a pipeline stage's module, under their names there.

    Args:
        stage: the module, changed in place; containers are added to it where they are missing.
        names: names of the tensors in the whole model.
        plain: the whole model; the tensors are shared with it, not copied.
    """
    for name in sorted(names):
        path, _, key = name.rpartition(".")
        tensor = getattr(plain.get_submodule(path), key)
        if isinstance(tensor, nn.Parameter):
            _container(stage, path).register_parameter(key, tensor)
        else:
            persistent = key not in non_persistent_buffers(plain.get_submodule(path))
            _container(stage, path).register_buffer(key, tensor, persistent=persistent)


def _container(stage: nn.Module, path: str) -> nn.Module:
    at = stage
    for key in filter(None, path.split(".")):
        if key not in dict(at.named_children()):
            at.add_module(key, nn.Module())
        at = at.get_submodule(key)
    return at


class RecordedStage(nn.Module):
    """Module of one virtual pipeline stage, which runs the whole model's own forward but computes only its own blocks.

    A block is a module that one stage calls as a unit. The stage holds its blocks under their names in the whole model.

    Args:
        record: the calls of blocks in the model's forward.
        own: indices of the calls, in ``record.calls``, that this stage computes.
        received: the tensors of earlier stages' blocks that this stage receives, in order.
        sent: the blocks' tensors that this stage sends, in order; empty for the last stage.

    Attributes:
        own, received, sent: as given.
    """

    def __init__(
        self, record: ForwardRecord, own: range, received: Sequence[BlockOutput], sent: Sequence[BlockOutput]
    ) -> None:
        super().__init__()
        self._record = (record,)  # in a tuple: the whole model is no submodule of its stage
        self.own, self.received, self.sent = own, received, sent
        for name in dict.fromkeys(record.calls[number].name for number in own):
            path, _, key = name.rpartition(".")
            _container(self, path).add_module(key, record.plain.get_submodule(name))

    def hold(self, names: Iterable[str], plain: nn.Module) -> None:
        """Register further parameters and buffers of the whole model on this pipeline stage, under their names there.

        The stage's ``state_dict`` then contains tensors of modules that this stage does not call.

        Args:
            names: names of the tensors in the whole model.
            plain: the whole model; the tensors are shared with it, not copied.
        """
        hold_tensors(self, names, plain)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *values: Tensor) -> Any:
        """Run the model's own forward up to the last block (module called as a unit) of this pipeline stage.

        Blocks of earlier stages are not computed: their calls return the received activations, or fake tensors (shapes
        without values) where no activation was received. Not collective: the caller receives and sends the activations.

        Args:
            args: positional arguments of the model's call.
            kwargs: keyword arguments of the model's call.
            values: the activations that this stage has received, in the order of the attribute ``received``.

        Returns:
            A tuple of the activations to send, in the order of the attribute ``sent``; on the last stage, the model's
            output.

        Raises:
            UsageError: the forward calls other blocks than when it was recorded, or needs a value of another stage.
        """
        [record] = self._record
        for name in record.opened:
            record.plain.get_submodule(name).training = self.training
        if record.writes_inputs:
            args, kwargs = tree_map_only(Tensor, _written_once(bool(self.sent)), (args, kwargs))
        return record.dispatch.run(_StageRun(record, self, values), args, kwargs)


class _BlockDispatch:
    """Passes every call of a block to the recording, or to the run of a stage, that is under way."""

    def __init__(
        self, plain: nn.Module, opened: frozenset[str], device: torch.device, numbered: Mapping[str, Exception]
    ) -> None:
        self._plain, self.fakes = plain, FakeTensorMode(allow_non_fake_inputs=True)
        self.active: _Recording | _StageRun | None = None
        self.blocks = {
            name: module
            for name, module in plain.named_modules(remove_duplicate=True)
            if name not in opened
            and name.rpartition(".")[0] in opened | _containers(plain, opened)
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        }
        self.opened_names, self.opened = opened, [plain.get_submodule(name) for name in opened]
        if any(has_hooks(module) for module in self.opened):
            raise _uncut(plain, "it has hooks of its own")
        with self.fakes:
            self._values = {
                name: {
                    key: torch.empty_like(tensor, requires_grad=False, device=device)
                    for key, tensor in (*module.named_parameters(), *module.named_buffers())
                }
                for name, module in self.blocks.items()
            }
        self._forms: dict[Any, tuple[Any, list[Any], list[set[int]]]] = {}
        self._numbered, self._device = numbered, device
        self._first = {inner: dict(vars(inner)) for block in self.blocks.values() for inner in block.modules()}

    def run(self, run: _Recording | _StageRun, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the whole model's forward, with each call of a block (module called as a unit) handed to ``run``.

        Args:
            run: records the calls, or computes the blocks of one pipeline stage.
            args: positional arguments of the model's call.
            kwargs: keyword arguments of the model's call.

        Returns:
            The model's output; on a stage that is not the last one, the tuple of the activations to send.
        """
        before = {name: replace_call(block, partial(self._call, name, block)) for name, block in self.blocks.items()}
        self.active = run
        try:
            with run.watching():
                return run.end(uncompiled_call(self._plain)(*args, **kwargs))
        except _StageEnd as end:
            return end.values
        finally:
            self.active = None
            for name, call in before.items():
                replace_call(self.blocks[name], call)

    def _call(self, name: str, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self.active
        if run is None or run.inside:
            return uncompiled_call(block)(*args, **kwargs)
        run.inside = True
        try:
            return run.block(name, block, args, kwargs)
        finally:
            run.inside = False

    def shape(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what a block (module called as a unit) would return for these arguments, with fake tensors in it.

        The block runs on fake tensors, which have shapes and no values. The form of the result is cached for later
        arguments of equal shapes and dtypes.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Raises:
            UsageError: the block writes its arguments in place.
        """
        return self.shape_and_memory(name, block, args, kwargs)[0]

    def shape_and_memory(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[set[int]]]:
        """Return what ``shape`` returns, and for each tensor in it the tensors with which it shares memory.

        These are given by indices among the leaves of ``(args, kwargs)``, continued by the result's own tensors.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Raises:
            UsageError: the block writes its arguments in place.
        """
        leaves, spec = tree_flatten((args, kwargs))
        form, run = (_type, self._on_numbers) if name in self._numbered else (_form, self._on_fakes)
        key = (name, block.training, torch.is_grad_enabled(), str(spec), *map(form, leaves))
        simple = name in self._numbered or all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
        if not simple or key not in self._forms:
            entering, result = run(name, block, leaves, spec)
            found, returned = tree_flatten(result)
            tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
            memory = [_same_memory(leaf, [*entering, *tensors[:at]]) for at, leaf in enumerate(tensors)]
            if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in found):
                if name in self._numbered:
                    raise _uncut(self._plain, f"its block {name} reads values of tensors and returns an object")
                return result, memory
            self._forms[key] = returned, found, memory
        returned, found, memory = self._forms[key]
        with self.fakes, torch.no_grad():
            made = [torch.empty_like(f) if isinstance(f, Tensor) else f for f in found]
        return tree_unflatten(made, returned), memory

    def _on_fakes(self, name: str, block: nn.Module, leaves: Sequence[Any], spec: Any) -> tuple[list[Any], Any]:
        """Return fake arguments, and what a block returns for them. Raises ReadsValuesError."""
        try:
            with self._attributes(block), self.fakes, torch.no_grad():
                entering = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return entering, self._returned(name, block, entering, spec, self._values[name])
        except UsageError:
            raise
        except Exception as error:
            raise ReadsValuesError(name, error) from error

    def _on_numbers(self, name: str, block: nn.Module, leaves: Sequence[Any], spec: Any) -> tuple[list[Any], Any]:
        """Return made arguments, and what a block that reads values, such as a mixture of experts, returns for them.

        The block must return tensors of the same shapes for other numbers.
        """
        made = []
        with self._attributes(block), without_dispatch_modes(), forked_generators(self._device), torch.no_grad():
            for low in (0.0, 0.5):
                made_like = partial(_made, low=low, device=self._device, generator=torch.Generator().manual_seed(0))
                try:
                    values = {key: made_like(value) for key, value in self._values[name].items()}
                    entering = [made_like(leaf) for leaf in leaves]
                    made.append((entering, self._returned(name, block, entering, spec, values)))
                except UsageError:
                    raise
                except Exception:
                    # The block fails on any numbers: the error on fake tensors says why it has got them.
                    raise self._numbered[name] from None
        one, other = ([_type(leaf) for leaf in tree_leaves(result)] for _, result in made)
        if one != other:
            raise _uncut(self._plain, f"its block {name} returns tensors whose shapes depend on values")
        return made[0]

    def _returned(
        self, name: str, block: nn.Module, entering: Sequence[Any], spec: Any, values: Mapping[str, Tensor]
    ) -> Any:
        """Return what a block returns for arguments that it must not write, with other parameters and buffers."""
        versions = [tensor_version(leaf) for leaf in entering if isinstance(leaf, Tensor)]
        args, kwargs = tree_unflatten(entering, spec)
        result = functional_call(block, dict(values), args, kwargs)
        if versions != [tensor_version(leaf) for leaf in entering if isinstance(leaf, Tensor)]:
            raise _uncut(self._plain, f"its block {name} writes its arguments in place")
        return result

    def foreseen(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> list[Any] | None:
        """Return shapes and dtypes that other stages take for those of a call's result, before the block is called.

        Other stages know them from made numbers, if the block reads values of its tensors. The call may change objects
        among its arguments, such as a cache.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Returns:
            A key for each leaf of the result, as ``check_shapes`` takes them; None for a block that reads no values.
        """
        if name not in self._numbered:
            return None
        return [_type(leaf) for leaf in tree_leaves(self.shape(name, block, args, kwargs))]

    def check_shapes(self, name: str, foreseen: list[Any] | None, result: Any) -> None:
        """Check that a block has returned tensors of the shapes that all other stages take for its.

        Args:
            name: name of the block in the whole model.
            foreseen: what ``foreseen`` has returned before the call.
            result: what the block has returned.

        Raises:
            UsageError: the shapes differ.
        """
        if foreseen is not None and [_type(leaf) for leaf in tree_leaves(result)] != foreseen:
            raise _uncut(self._plain, f"its block {name} returns tensors whose shapes depend on values")

    @contextmanager
    def _attributes(self, block: nn.Module) -> Iterator[None]:
        """Within the block a module has the attributes of before the cut in place of placeholders."""
        away = [
            (inner, name, value)
            for inner in block.modules()
            for name, value in vars(inner).items()
            if isinstance(value, Tensor) and is_absent(value)
        ]
        try:
            for inner, name, _ in away:
                vars(inner)[name] = self._first[inner].get(name)
            yield
        finally:
            for inner, name, value in away:
                vars(inner)[name] = value


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


class _Recording(TorchDispatchMode):
    """A forward on fake tensors: which tensors of which blocks every block's arguments are computed from.

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

    def __init__(self, dispatch: _BlockDispatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dispatch, self.inside = dispatch, False
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
        self._sources: dict[int, set[BlockOutput]] = {}
        self._from: dict[int, set[str]] = {}
        self._alive: list[Tensor] = []
        self._computed: set[int] = set()
        self._returned: dict[int, BlockOutput] = {}
        self._partners: dict[int, dict[int, str]] = {}
        self._stale: dict[int, str] = {}
        self._parameters = {id(p): name for name, p in dispatch._plain.named_parameters()}
        self._buffers = {
            id(slot.get()): slot.name for slot in buffers([dispatch._plain]) if slot.owner in dispatch.opened
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
        """
        reads, leaves = self.sources((args, kwargs)), tree_leaves((args, kwargs))
        self._look(leaves)
        self.read += sorted(self._parameters_of(leaves))
        result, memory = self.dispatch.shape_and_memory(name, block, args, kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for number, (tensor, same) in enumerate(zip(tensors, memory, strict=True)):
            self._mark(tensor, {BlockOutput(len(self.calls), number)})
            self._returned[storage_key(tensor)] = BlockOutput(len(self.calls), number)
            self._pair(storage_key(tensor), {storage_key([*leaves, *tensors][index]) for index in same}, name)
        self.calls.append(BlockCall(name, frozenset(reads), len(tensors)))
        return result

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


class _StageRun:
    """A forward on one stage."""

    def __init__(self, record: ForwardRecord, stage: RecordedStage, values: Sequence[Tensor]) -> None:
        self._record, self._stage, self.inside, self._count = record, stage, False, 0
        self._numbers = range(len(record.calls)) if stage.training else record.evaluated
        self._known = dict(zip(stage.received, values, strict=True))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context that does nothing, for the forward of the model on a pipeline stage.

        A recording of the forward has a context of the same name, which records the operations in it.
        """
        yield

    def block(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute a block (module called as a unit) of this pipeline stage, or stand in for a block of another stage.

        After the stage's last block, an exception leaves the forward with the activations to send.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Returns:
            The block's result. For another stage's block its received tensors, and fake tensors for all others.

        Raises:
            UsageError: the forward calls its blocks in another order than when it was recorded, or a block of this
                stage needs a value that the stage has not received.
        """
        count, calls, own = self._count, self._record.calls, self._stage.own
        self._count += 1
        if count >= len(self._numbers) or calls[number := self._numbers[count]].name != name:
            raise UsageError(
                "the model's forward calls its blocks in another order than when it was cut into stages",
                where=f"call {count}, of {name}",
                why="the stages hold the blocks that the forward called with the first micro-batch",
                remedy="take strategy='mirrored' or 'sharded', which run the whole forward on every rank",
            )
        if self._stage.sent and number >= own.stop:
            # Evaluation leaves out the stage's last block.
            raise _StageEnd(self._to_send())
        if number not in own:
            leaves, spec = tree_flatten(self._record.dispatch.shape(name, block, args, kwargs))
            places = iter(BlockOutput(number, tensor) for tensor in range(len(leaves)))
            return tree_unflatten(
                [self._received(next(places), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            )
        self._check((args, kwargs), f"the arguments of {name}")
        foreseen = self._record.dispatch.foreseen(name, block, args, kwargs)
        result = uncompiled_call(block)(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._check(tensors, f"the output of {name}")
        self._record.dispatch.check_shapes(name, foreseen, result)
        self._known |= {BlockOutput(number, tensor): value for tensor, value in enumerate(tensors)}
        if number == own[-1] and self._stage.sent:
            raise _StageEnd(self._to_send())
        return self._unwritten(number, result, tree_leaves((args, kwargs)))

    def _to_send(self) -> tuple[Tensor, ...]:
        """Return the activations to send; tensors without elements for blocks that evaluation leaves out."""
        device = next(self._record.plain.parameters()).device
        return tuple(
            self._known[place] if place.call in self._numbers else torch.zeros(0, device=device)
            for place in self._stage.sent
        )

    def _received(self, place: BlockOutput, fake: Tensor) -> Tensor:
        """Return the received tensor of another stage's block, a copy where the forward writes it, or ``fake``."""
        value = self._known.get(place, fake)
        return value.clone() if place in self._record.written and not is_fake(value) else value

    def _unwritten(self, number: int, result: Any, given: Sequence[Any]) -> Any:
        """Return a block's result, with copies of tensors that the forward writes and the stage sends as they were.

        A tensor that has the memory of an argument is copied, too: the argument may be sent.
        """
        written = {place.tensor for place in self._record.written if place.call == number}
        if not written:
            return result
        leaves, spec = tree_flatten(result)
        tensors = iter(range(len(leaves)))
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (tensor := next(tensors)) in written:
                sent = BlockOutput(number, tensor) in self._stage.sent
                leaves[at] = leaf.clone() if sent or _same_memory(leaf, given) else leaf
        return tree_unflatten(leaves, spec)

    def _check(self, values: Any, what: str) -> None:
        if any(is_fake(leaf) for leaf in tree_leaves(values)):
            raise UsageError(
                f"{what} depend on a value of another stage that the stages do not send",
                why="with the first micro-batch it did not depend on it",
                remedy="take strategy='mirrored' or 'sharded', which run the whole forward on every rank",
            )

    def end(self, output: Any) -> Any:
        """Return the model's output, after a check that this stage's forward has called all recorded blocks.

        In evaluation a stage may return activations to send, if the forward leaves out all blocks behind them.

        Args:
            output: what the forward has returned.

        Raises:
            UsageError: the forward called fewer blocks than when it was recorded, or in training ended on a stage that
                must send activations.
        """
        if self._count != len(self._numbers) or (self._stage.sent and self._stage.training):
            raise UsageError(
                "the model's forward calls fewer blocks than when it was cut into stages",
                where=f"after {self._count} calls of {len(self._numbers)}",
                remedy="take strategy='mirrored' or 'sharded', which run the whole forward on every rank",
            )
        return self._to_send() if self._stage.sent else output


class _StageEnd(BaseException):
    """Leaves the model's forward behind a stage's last block. No ``Exception``: it is no error to handle."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__("no error: this stage of the pipeline is done, and the forward goes on on the next stage")
        self.values = values


def _places(some: Sequence[str], every: Sequence[str]) -> list[int] | None:
    """Return the places of names in a sequence that has them in the same order, or None where it does not."""
    found, rest = [], iter(enumerate(every))
    for name in some:
        place = next((at for at, other in rest if other == name), None)
        if place is None:
            return None
        found.append(place)
    return found


class _TrialModel:
    """The model that the loss function calls in a trial."""

    def __init__(self, plain: nn.Module, recording: _Recording) -> None:
        self._plain, self._recording = plain, recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._recording.calls:
            raise _uncut(self._plain, "the loss function calls it twice")
        return self._recording.dispatch.run(self._recording, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _written_once(copied: bool) -> Callable[[Tensor], Tensor]:
    """Return a function of the model's inputs: of copies, or of tensors in the same memory with versions of their own.

    Several stages of a rank would write the same inputs; other micro-batches, which have the rest of the batch, must
    not appear as written.
    """
    return lambda tensor: tensor.clone() if copied else tensor.data


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Tensor]:
    """Return the tensors that an operation writes in place."""
    arguments = operator_arguments(func)
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs or {})
    changed = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _same_memory(tensor: Tensor, leaves: Sequence[Any]) -> set[int]:
    """Return the indices of the leaves that are tensors and share memory with a tensor."""
    return {index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and share_memory([tensor], [leaf])}


def _dropout_rate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> float | None:
    """Return the dropout rate with which fused attention is called; None for other operations."""
    arguments = operator_arguments(func)
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs or {})
    return given.get("dropout_p", next((a.default_value for a in arguments if a.name == "dropout_p"), None))


def _containers(plain: nn.Module, opened: frozenset[str]) -> set[str]:
    """Return the names of lists and dictionaries of modules, however deep, in opened modules."""
    found: set[str] = set()
    for name, module in plain.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and name.rpartition(".")[0] in opened | found:
            found.add(name)
    return found


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride() if leaf.layout == torch.strided else None
    return leaf if isinstance(leaf, _PLAIN) else id(leaf)


def _type(leaf: Any) -> Any:
    """Return a key that is equal for tensors of equal shapes, for equal plain values, and for objects of one class."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _made(like: Any, low: float, device: torch.device, generator: torch.Generator) -> Any:
    """Return a tensor of the shape of another one: random numbers from ``low`` to ``low`` + 0.5, zeros, or True.

    Objects that hold tensors are copied, with made tensors in them.
    """
    if not isinstance(like, Tensor):
        return deepcopy(like, {id(held): _made(held, low, device, generator) for held in _tensors_within(like)})
    if like.is_floating_point() or like.is_complex():
        return (torch.rand(like.shape, dtype=like.dtype, generator=generator) * 0.5 + low).to(device)
    return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device=device)


def _tensors_within(value: Any) -> list[Tensor]:
    """Return the tensors in an object's attributes, lists and mappings, such as those of a cache of keys and values."""
    found, seen, left = list[Tensor](), set[int](), [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, nn.Module, *_PLAIN)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, list | tuple | set):
            left += each
        else:
            left += getattr(each, "__dict__", {}).values()
    return found


def _uncut(plain: nn.Module, why: str) -> UsageError:
    return UsageError(
        f"a {type(plain).__name__} cannot be cut into stages",
        why=why,
        remedy="make the model an nn.Sequential of its blocks, or move what its forward decides, draws or keeps into"
        " modules; or take strategy='mirrored'",
    )
