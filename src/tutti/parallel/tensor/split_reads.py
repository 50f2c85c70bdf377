"""Refuse code of the script that reads or writes a split parameter as if it were whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError, script_line
from tutti.nn.partial_gradient import PartGradient, agree_on_operand
from tutti.nn.script_edits import EditWatch
from tutti.nn.script_mode import (
    DRAWS,
    SIZES,
    acts_by_element,
    asked_by_script,
    by_place,
    is_function_mode,
    is_of_lists,
    self_of,
    size_of_whole,
    tensors_among,
    tutti_caller,
)
from tutti.nn.state_copy import WRITE_COPY, StateCopy
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.nn.written_tensors import ASSIGN_DATA, DATA, METADATA, may_write, share_memory
from tutti.parallel.split_optimizer import SliceRegions, SplitMatrixGatherer
from tutti.parallel.tensor.split_tensor import SplitTensor
from tutti.parallel.tensor.tensor_slice import SLICE_NAMES
from tutti.parallel.tensor.tp_layers import ColumnParallelLinear, TensorParallelLayer
from tutti.parallel.viewed_part import as_views, refuse_shared_data
from tutti.python_compat import calling_frame
from tutti.torch_compat import (
    TorchFunctionDisabled,
    current_autograd_node,
    has_forward_hook,
    in_backward,
    module_parameters,
    replace_call,
    tree_map_only,
    uncompiled_call,
)
from tutti.types.shard_spec import ShardSpec

_SAMPLES = 2
"""Samples of the trial of the forward."""

_ON_SLICES = DRAWS | {"__repr__", "__deepcopy__", "__reduce_ex__", "backward", "data_ptr", "storage", "untyped_storage"}
"""Names of functions that are not called with a gathered copy of a parameter."""

_DATA = {DATA, ASSIGN_DATA}

_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_ASSIGN_GRADIENT: Any = Tensor.grad.__set__  # type: ignore[union-attr]


class SplitReads(EditWatch):
    """Function mode that checks the script's use of split parameters, of which this rank has only a slice.

    With tensor parallelism, elementwise functions (an average of weights, weights clamped in place) and reads of
    metadata are allowed: on the slice they give the slice of the whole result, which counts as split, too. A whole
    operand of such a function is cut to the slice, after all ranks that hold slices of the model have compared it; a
    whole tensor that the function writes gets the whole parameter, by an all-reduce over the tensor ranks. Shape and
    number of elements are those of the whole parameter where the script asks. A norm, a sum, a product with a matrix
    and other reads outside of the model's forward get the whole tensor, which the tensor ranks gather; such a read in
    the forward, a write of some rows or a random draw raises ``UsageError``. A column-parallel layer that the script
    calls by itself, not through the block around it, returns its slice of the outputs as a ``SplitTensor``.

    Args:
        split: parameters of which this rank has a slice, by name.
        specs: position of each parameter's slice in the whole tensor, by name.
        blocks: for each column-parallel layer the block around it, in whose forward the layer returns plain slices.
        comm: the tensor ranks of this replica, which hold the other slices.
        holders: the ranks that hold slices of the same model, also those of other replicas.

    Attributes:
        edits: records of the script's edits of the parameters that ``edits.cover`` is given, for ranks to compare.
        gathers: whether reads get gathered tensors; False where the slices are also sharded by rows, or the model is
            cut into stages.
        sizes_in_forward: whether a forward of the model has asked for the size of a split parameter.
    """

    def __init__(
        self,
        split: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        blocks: Mapping[nn.Module, nn.Module],
        comm: Communicator,
        holders: Communicator,
    ) -> None:
        super().__init__()
        self._comm, self._holders, self.gathers = comm, holders, True
        self.sizes_in_forward = False
        regions = {name: SliceRegions.of(specs[name], p.shape) for name, p in split.items()}
        self._regions = {name: each for name, each in regions.items() if each is not None}
        self._names: Any = WeakIdKeyDictionary({parameter: name for name, parameter in split.items()})
        self._ids = {id(parameter) for parameter in split.values()}  # of these tensors, and of some that are gone
        SLICE_NAMES.add(self)
        self._distributed = False  # whether parameters are DTensors, which FSDP2 has made of slices and others
        self._gradients: Any = WeakIdKeyDictionary()  # of split parameters, as the script has read them; by name
        self._shapes = {name: (tuple(p.shape), specs[name].shape) for name, p in split.items()}
        # PyTorch's stack of modes holds this object, which must not keep the model, and so the run, in memory.
        self._blocks = WeakKeyDictionary({layer: ref(block) for layer, block in blocks.items()})

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch on parameters of which this rank has only a slice, or refuse the call.

        The mode calls this method for each function of PyTorch that the script calls on tensors. Allowed are
        elementwise functions, whose result on the slice is the slice of their result on the whole parameter; the result
        counts as a slice, too. Other reads, such as a norm or a matrix product, get the gathered tensor; other writes
        are refused. What the script assigns to ``.grad`` is written into its placeholder. For the size of such a
        parameter, or of its gradient, the script gets that of the whole one. Calls by layers and optimizers, and calls
        without such parameters, pass unchanged.

        Collective only in reads that gather the whole tensor (an all-reduce over the tensor ranks), and where a whole
        tensor meets a slice: all ranks that hold slices of the model compare the tensor (the tensor ranks alone in a
        hook on a gradient, and in a read with gradients enabled), and a whole tensor that the function writes gets the
        whole parameter by an all-reduce over the tensor ranks.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.

        Returns:
            The function's result; a ``SplitTensor`` where the script itself calls a column-parallel layer.

        Raises:
            UsageError: the function is not elementwise, and it writes to a slice, draws random numbers, is called in
                the model's forward or in a backward, or the attribute ``gathers`` is False; the shape of an operand
                does not allow to cut it like the parameter; a method of an optimizer reads the gradient of a slice,
                other than in a step that tutti makes; or the script itself calls a layer that is split by heads.
            MismatchError: a whole tensor that meets a slice differs between ranks, or ranks read different parameters.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        return super().see(func, args, kwargs)

    def _checked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call that gives what it gives with whole parameters; see ``see``."""
        if func in SIZES and (whole := self._whole_for_script(args, kwargs)) is not None:
            self.sizes_in_forward = self.sizes_in_forward or self._in_forward()
            return size_of_whole(func, whole, args, kwargs)
        if func == _GRADIENT:
            gradient = func(*args)
            if gradient is not None and (name := self._names.get(args[0])) is not None:
                if isinstance(gradient, PartGradient) and (method := _method_of_optimizer()):
                    _refuse_in_optimizer(name, method)
                self._gradients[gradient] = name
                self._ids.add(id(gradient))
            return gradient
        if func == _ASSIGN_GRADIENT and self._assign_gradient(*args):
            return None
        name = None if func in METADATA else self._name_in(func, args, kwargs)
        if name is None:
            if self._distributed and func not in METADATA:
                args, kwargs = self._without_shards(func, args, kwargs)
            return func(*args, **kwargs)
        caller = tutti_caller(__name__)
        if caller is not None:
            result = func(*args, **kwargs)
            return self._split_output(self_of(caller), result) if func is functional.linear else result
        if func is torch.autograd.grad:
            return self._gradients_of(args, kwargs)
        elementwise, allowed = func in _DATA or acts_by_element(func), _in_layer_or_optimizer()
        if not elementwise and allowed:
            return func(*args, **kwargs)
        if not elementwise:
            return self._of_wholes(name, func, args, kwargs)
        if not allowed:
            if is_of_lists(func):
                return self._of_lists(func, args, kwargs)
            args, kwargs = self._made_alike(name, func, args, kwargs)
            if self._name_in(func, args, kwargs) is None:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self._note(tensor, name)
        return result

    def _in_forward(self) -> bool:
        """Return whether the call is within the forward of a module with split parameters.

        There each tensor rank computes with its own slice, and has other activations than the others.
        """
        modules = (self_of(each) for each in _frames() if each.f_code.co_name == "forward")
        return any(isinstance(each, nn.Module) and any(p in self._names for p in each.parameters()) for each in modules)

    def _of_wholes(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a read of whole parameters, which are gathered. Collective over the tensor ranks.

        All tensor ranks compute the same term of the loss; the backward, which is not collective, cuts its gradient to
        this rank's slice. Raises UsageError for functions that write, and for reads in the model's forward.
        """
        called = getattr(func, "__name__", "")
        writes = may_write(func) or kwargs.get("out") is not None
        if writes or called in _ON_SLICES or in_backward() or not self.gathers or self._in_forward():
            _refuse(name, func)
        wholes: dict[Tensor, tuple[str, Tensor]] = {}

        def whole(tensor: Tensor) -> Tensor:
            if (own := self._names.get(tensor)) is None:
                return tensor
            if tuple(tensor.shape) != self._shapes[own][0]:
                _refuse(own, func)
            if tensor not in wholes:
                self._comm.all_gather(torch.zeros(1), f"values of {own}, which all ranks must read in {script_line()}")
                wholes[tensor] = own, _Whole.apply(tensor, self.gatherer(own, tensor))  # type: ignore[no-untyped-call]
            return wholes[tensor][1]

        given, named = tree_map_only(Tensor, whole, (args, kwargs))
        return as_views(func, func(*given, **named), wholes)

    def _gradients_of(self, args: Any, kwargs: Any) -> tuple[Tensor | None, ...]:
        """Call ``torch.autograd.grad``: the gradient of a slice is a slice like it."""
        found: tuple[Tensor | None, ...] = torch.autograd.grad(*args, **kwargs)
        inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
        for gradient, given in zip(found, (inputs,) if isinstance(inputs, Tensor) else inputs, strict=True):
            if (name := self._names.get(given)) is not None:
                self._note(gradient, name)
        return found

    def _of_lists(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an elementwise function of lists of tensors, of which some are slices."""
        names: list[str | None] = []

        def made_alike(place: tuple[Any, ...]) -> Sequence[Any]:
            name = self._name_in(func, place, {})
            made: Sequence[Any] = place if name is None else self._made_alike(name, func, place, {})[0]
            names.append(None if name is None else self._name_in(func, made, {}))
            return made

        result = func(*by_place(args, made_alike), **kwargs)
        for tensor, name in zip(result or (), names, strict=False):
            if name is not None:
                self._note(tensor, name)
        return result

    def _note(self, tensor: Any, name: str) -> None:
        """Record that a tensor is made of a slice of the parameter ``name``, element by element."""
        if isinstance(tensor, Tensor) and self._gradients.get(tensor) is None:
            self._names.setdefault(tensor, name)
            self._ids.add(id(tensor))

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a slice, or the gradient of one."""
        return self._names.get(tensor) is not None or self._gradients.get(tensor) is not None

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the split parameter from which a tensor was computed by elementwise functions, or None.

        Args:
            tensor: any tensor, such as a copy or an average of this rank's slice, or the parameter itself; None is
                returned for a tensor that was made while this function mode was not active.
        """
        name: str | None = self._names.get(tensor) if id(tensor) in self._ids else None
        return name

    def also_seen(self, objects: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Register further tensors that stand for split parameters, so that the script's use of them is checked, too.

        Not collective. The parameters are split over tensor ranks. From now on no read of theirs is gathered any more
        (``gathers`` becomes False), as other ranks may have other rows of the slices: a read that needs a whole
        parameter, such as a norm, raises UsageError.

        Args:
            objects: the tensors, such as those that FSDP2 puts into the model, and for each the parameter that it
                stands for; parameters that are not split are left out.
        """
        self._distributed = self._distributed or any(isinstance(tensor, DTensor) for tensor in objects)
        self.gathers = False
        for tensor, parameter in objects.items():
            if (name := self.name_of(parameter)) is not None:
                self._note(tensor, name)

    def _whole_for_script(self, args: Any, kwargs: Any) -> Sequence[int] | None:
        """Return the whole parameter's shape if the script asks for the sizes of a slice or of its gradient, else None.

        PyTorch and tutti compute with slices and get the sizes of the slice; ``torch.nn.init`` computes fans.
        """
        tensor = args[0] if args else kwargs["input"]
        name = self._names.get(tensor) or self._gradients.get(tensor)
        if name is None:
            return None
        here, whole = self._shapes[name]
        with TorchFunctionDisabled():
            local = tuple(tensor.shape) == here
        return whole if local and asked_by_script(__name__) and not _in_layer_or_optimizer() else None

    def _name_in(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """Return the name of the first split parameter among the arguments, or None.

        The gradient of a rank's earlier micro-batch counts where a function acts on it by element: it is a plain slice.
        """
        for tensor in tensors_among(args, kwargs):
            # Nearly all tensors are activations, and a look into a dictionary of weak references takes microseconds.
            if id(tensor) not in self._ids:
                continue
            if (name := self._names.get(tensor)) is not None:
                return str(name)
            name = None if isinstance(tensor, PartGradient) else self._gradients.get(tensor)
            if name is not None and acts_by_element(func):
                return str(name)
        return None

    def _assign_gradient(self, parameter: Tensor, value: Any) -> bool:
        """Write what the script assigns to ``.grad`` of a split parameter into the placeholder that is there.

        Returns False where the assignment needs no such write.
        """
        name = self._names.get(parameter)
        shown = parameter.grad
        if name is None or value is None or value is shown or tutti_caller(__name__) is not None:
            return False
        if not isinstance(shown, PartGradient):
            if tuple(value.shape) == self._shapes[name][1]:
                _refuse(name, _ASSIGN_GRADIENT)
            return False
        args, _ = self._made_alike(name, Tensor.copy_, (shown, value), {})
        with torch.no_grad():
            shown.assign(args[1], value)
        return True

    def _made_alike(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the arguments of an elementwise function with this rank's slices in place of whole operands.

        Where the function writes a whole tensor of the script, slices are gathered instead. Collective where whole
        tensors and slices meet. Raises UsageError for an operand that is no tensor of the parameter's shape, nor one of
        which all slices are the same, and MismatchError for one that differs over ranks.
        """
        if "out" in kwargs:
            _refuse(name, func, ", out=")
        if not may_write(func) or not isinstance(args[0], Tensor) or self._is_known(args[0]):
            given = [tensor for tensor in tensors_among(args, kwargs) if tensor.dim()]
            if len({isinstance(tensor, DTensor) for tensor in given}) > 1:
                _refuse(name, func, ", sharded over further ranks, together with a plain tensor")
            return tree_map_only(Tensor, partial(self._cut, name, func), (args, kwargs))
        assigns = func == ASSIGN_DATA
        graph = torch.is_grad_enabled() and any(each.requires_grad for each in tensors_among(args, kwargs))
        if tuple(args[0].shape) != self._shapes[name][1] or (graph and not assigns):
            _refuse(name, func, f" together with a tensor of {tuple(args[0].shape)}")
        same = (each for each, own in self._names.items() if own == name and isinstance(each, nn.Parameter))
        if assigns and share_memory([args[1]], same):
            refuse_shared_data(name)
        return tree_map_only(Tensor, partial(self._gather, name, func), (args, kwargs))

    def _without_shards(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the arguments with whole tensors for sharded ones that meet plain tensors, where the function writes
        a plain one; collective over the shard ranks there. Raise UsageError elsewhere.
        """
        given = [tensor for tensor in tensors_among(args, kwargs) if tensor.dim()]
        if len({isinstance(tensor, DTensor) for tensor in given}) < 2 or tutti_caller(__name__) is not None:
            return args, kwargs
        if not may_write(func) or isinstance(args[0], DTensor) or "out" in kwargs or torch.is_grad_enabled():
            raise UsageError(
                "the script computes with rows of a parameter together with plain tensors",
                where=script_line(),
                why="other ranks have the other rows",
                remedy=f"{WRITE_COPY}; or take strategy='mirrored' or 'sharded:stage=2'",
            )
        return tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))

    def _cut(self, name: str, func: Callable[..., Any], tensor: Tensor) -> Tensor:
        if isinstance(tensor, StateCopy):
            tensor = tensor.clone()
        here, whole = self._shapes[name]
        other = self._names.get(tensor) or self._gradients.get(tensor)
        if other is not None or type(tensor) not in (Tensor, nn.Parameter):
            if other is not None and self._shapes[other] != (here, whole):
                _refuse(name, func, f" together with {other}")
            return tensor
        sizes = tensor.shape[::-1]
        if not any(size != 1 for size, a, b in zip(sizes, here[::-1], whole[::-1], strict=False) if a != b):
            return tensor
        alike = len(sizes) <= len(whole) and all(n in (1, m) for n, m in zip(sizes, whole[::-1], strict=False))
        if not alike or func in _DATA or (tensor.requires_grad and torch.is_grad_enabled()):
            _refuse(name, func, f" together with a tensor of {tuple(tensor.shape)}")
        what = f"the script computes with {name} and a tensor"
        if torch.is_grad_enabled() and not may_write(func):
            # In a loss other replicas have other samples, and may have fewer micro-batches.
            agree_on_operand(self._comm, tensor, what)
        else:
            self.compare(tensor, what)
        part = self.gatherer(name, tensor).mine(tensor, tensor.detach().expand(whole))
        self._note(part, name)
        return part

    def _gather(self, name: str, func: Callable[..., Any], tensor: Tensor) -> Tensor:
        if (other := self._names.get(tensor)) is None:
            return tensor
        if self._shapes[other] != self._shapes[name] or tuple(tensor.shape) != self._shapes[name][0]:
            _refuse(name, func, f" together with {other}")
        values = tensor.detach()
        if isinstance(values, DTensor):
            values = values.full_tensor()
        [whole] = self.gatherer(other, tensor).gather(tensor, [values])
        return whole

    def gatherer(self, name: str, tensor: Tensor) -> SplitMatrixGatherer:
        """Return an object that gathers a whole tensor from the ranks' slices, which are cut like a parameter.

        Such tensors are the parameter itself, its gradient or optimizer state of its shape. The result's ``gather`` is
        collective over the tensor ranks; its ``mine`` cuts a whole tensor to this rank's slice, and is not, nor is this
        method.

        Args:
            name: name of a split parameter, whose slices' positions are used; KeyError for any other name.
            tensor: this rank's slice, by which the result finds these positions: the argument ``parameter`` of the
                result's methods must be this same object.
        """
        return SplitMatrixGatherer({tensor: self._regions[name]}, self._comm, None)

    def compare(self, tensor: Tensor, what: str) -> None:
        """Check that a whole tensor of the script, of which each rank takes its slice, is the same on all ranks.

        Collective over all ranks that hold slices of the model, those of other replicas included; in a hook on a
        gradient over the tensor ranks of one replica, as the other replicas have gradients of other micro-batches.

        Args:
            tensor: the tensor.
            what: words for it in the error, such as "the script computes with a tensor".

        Raises:
            MismatchError: the tensor differs over these ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        agree_on_operand(self._comm if in_backward() else self._holders, tensor, what)

    def _split_output(self, layer: Any, result: Any) -> Any:
        """Return the outputs of a layer, as a ``SplitTensor`` if the script calls a column-parallel layer by itself."""
        found = self._blocks.get(layer) if isinstance(layer, ColumnParallelLinear) else None
        block = None if found is None else found()
        if block is None or current_autograd_node() is not None:
            return result
        if any(self_of(frame) is block for frame in _frames()):
            return result
        place = layer.tutti_slice
        if result.shape[-1] != len(place.mine):
            raise UsageError(
                f"the script calls {place.name} by itself, which is split over tensor ranks",
                where=script_line(),
                why="its outputs are those of this rank's heads, of which the code around it may need all",
                remedy=f"call the module around it, or leave the layer whole: strategy='tensor:whole={place.name}'",
            )
        return SplitTensor.of(result, -1, place)


class _Whole(torch.autograd.Function):
    """The whole tensor of which each tensor rank has a slice."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gatherer: SplitMatrixGatherer) -> Tensor:
        ctx.gatherer, ctx.part = gatherer, part
        [whole] = gatherer.gather(part, [part])
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gatherer.mine(ctx.part, gradient), None


class _ForwardReads(TorchFunctionMode):
    """Finds modules of a model whose parameters another module's forward reads.

    Writes of parameters, as of a momentum encoder that the forward averages, are left out: the trial goes on, and finds
    what the forward reads besides.

    Args:
        plain: the whole model.

    Attributes:
        names: of the modules found.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._data: Any = WeakIdKeyDictionary()  # tensors that share the memory of a parameter
        self._modules = {id(module) for module in plain.modules()}
        self._owners: dict[int, dict[int, str]] = {}
        for name, module in plain.named_modules():
            for parameter in module_parameters(module).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), {})[id(module)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for tensor in tensors_among(args, kwargs):
                if (owners := self._owners.get(id(tensor))) is not None and self._is_outside(owners):
                    self.names |= set(owners.values())
            first = next(iter(args), None)
            if isinstance(first, Tensor) and (id(first) in self._owners or first in self._data) and may_write(func):
                if func != DATA:
                    return first
                data = func(first)
                self._data[data] = True
                return data
        return func(*args, **kwargs)

    def _is_outside(self, owners: Mapping[int, str]) -> bool:
        """Return whether the present call comes from the forward of a module that does not own the parameter.

        A layer of ``torch.nn`` around the owner, such as multi-head attention around its output layer, counts as owner.
        """
        callers = [self_of(frame) for frame in _frames()]
        modules = [caller for caller in callers if id(caller) in self._modules]
        if not modules or any(id(reader) in owners for reader in modules):
            return False
        layer = modules[0]
        around = any(id(inner) in owners for inner in layer.modules())
        return not (around and type(layer).__module__.startswith("torch.nn."))


def watch_trial(
    plain: nn.Module, trial: Callable[..., Any] | None, device: torch.device
) -> tuple[list[str], frozenset[str]]:
    """Run the loss function once, and find modules that must stay whole because of reads of parameters or hooks.

    A module stays whole if the forward of another module reads its parameters. A block stays whole if the forward
    registers forward hooks on modules in it, as models of transformers do that collect hidden states: the hooks would
    get slices. If the loss function raises an error, the modules found until then are returned; the first step will
    raise the error again.

    Args:
        plain: the whole model; it stays as it was.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data, here
            two; None where no data is at hand.
        device: device on which the loss function runs.

    Returns:
        Sorted names of the modules whose parameters are read, and names of the modules that have got forward hooks
        within the trial; both empty without ``trial``, and if the model has ``SyncBatchNorm``.
    """
    if trial is None or peers_of(plain) is not None:
        return [], frozenset()
    mode, hooked = _ForwardReads(plain), _NewHooks(plain)
    before = replace_call(plain, hooked.call)
    try:
        # The first step reports any error.
        with suppress(Exception), untouched(plain, device), mode:
            trial(plain, _SAMPLES)
    finally:
        replace_call(plain, before)
    return sorted(mode.names), frozenset(hooked.names)


class _NewHooks:
    """Calls a model in a trial, and notes the names of modules that get forward hooks meanwhile."""

    def __init__(self, plain: nn.Module) -> None:
        self._plain, self.names = plain, set[str]()
        self._before = {module for module in plain.modules() if has_forward_hook(module)}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. The trial removes the hooks when it ends."""
        try:
            return uncompiled_call(self._plain)(*args, **kwargs)
        finally:
            now = ((name, module) for name, module in self._plain.named_modules() if has_forward_hook(module))
            self.names.update(name for name, module in now if module not in self._before)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call, without those of this module, from the innermost."""
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        if frame.f_globals.get("__name__") != __name__:
            yield frame
        frame = frame.f_back


def _in_layer_or_optimizer() -> bool:
    """Return whether a split layer's forward computes, or an optimizer, whose update tutti has tried on slices."""
    by_tutti = False
    for frame in _frames():
        caller = self_of(frame)
        if isinstance(caller, torch.optim.Optimizer) and not by_tutti:
            return True
        # Its other methods, such as reset_parameters, take the slice for the whole.
        if isinstance(caller, TensorParallelLayer) and frame.f_code.co_name == "forward":
            return True
        by_tutti = by_tutti or _is_of_tutti(frame)
    return False


def _is_of_tutti(frame: FrameType) -> bool:
    """Return whether a frame runs tutti's code, such as that which calls a closure in an optimizer's step."""
    return str(frame.f_globals.get("__name__", "")).startswith("tutti.") and not is_function_mode(frame)


def _method_of_optimizer() -> str:
    """Return the name of an optimizer's method that reads a gradient outside of an update by tutti; "" if none does."""
    if tutti_caller(__name__) is not None:
        return ""
    for frame in _frames():
        caller = self_of(frame)
        if isinstance(caller, torch.optim.Optimizer):
            return "" if frame.f_code.co_name == "zero_grad" else f"{type(caller).__name__}.{frame.f_code.co_name}"
        if _is_of_tutti(frame):
            return ""
    return ""


def _refuse_in_optimizer(name: str, method: str) -> NoReturn:
    raise UsageError(
        f"{method} reads the gradient of {name}, of which each tensor rank has a slice",
        where=script_line(),
        why="only the step() of an optimizer that tutti.prepare was given gets slices of parameters and of gradients",
        remedy="give the optimizer to tutti.prepare, write other methods' code into the loop over model.parameters(),"
        " or take strategy='mirrored'",
    )


def _refuse(name: str, func: Callable[..., Any], operand: str = "") -> NoReturn:
    called: str = getattr(func, "__name__", "")
    written = called in ("__setitem__", "__set__") or (called.endswith("_") and not called.startswith("__"))
    verb = "writes" if written else "reads"
    raise UsageError(
        f"the script {verb} {name}, of which each tensor rank has a slice{operand}",
        where=script_line(),
        why="positions, norms and draws of a slice are not those of the whole parameter",
        remedy=f"{WRITE_COPY}; take"
        f" run.state() for figures of whole weights, leave the layer whole by tensor:whole={name.rpartition('.')[0]},"
        " or take strategy='mirrored' or 'sharded:stage=2'",
    )
