"""Refuse code of the script that reads or writes a split parameter as if it were whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from tutti.errors import UsageError, script_line
from tutti.nn.absent_tensor import METADATA
from tutti.nn.script_mode import (
    SIZES,
    QuietMode,
    acts_by_element,
    asked_by_script,
    size_of_whole,
    tensors_among,
    tutti_caller,
)
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.nn.written_tensors import DATA, may_write
from tutti.parallel.tensor.split_tensor import SplitTensor
from tutti.parallel.tensor.tp_layers import ColumnParallelLinear, TensorParallelLayer
from tutti.python_compat import calling_frame
from tutti.torch_compat import TorchFunctionDisabled, current_autograd_node, module_parameters
from tutti.types import ShardSpec

_SAMPLES = 2
"""Samples of the trial of the forward."""

_DATA = {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]

_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]


_MODES: WeakSet[SplitReads] = WeakSet()


def slice_of(tensor: Tensor) -> str | None:
    """Return the name of the parameter from whose tensor-parallel slice the script has made a tensor, or None.

    Results of elementwise functions count, such as a moving average of the slice's values or a copy of them, and so
    does the parameter itself.

    Args:
        tensor: any tensor.
    """
    return next((name for mode in _MODES if (name := mode.name_of(tensor)) is not None), None)


class SplitReads(QuietMode):
    """Function mode that refuses what the script computes from parameters of which this rank has only a slice.

    With tensor parallelism, functions whose result on a slice is the slice of their result are allowed: elementwise
    ones (an average of weights, weights clamped in place) and reads of metadata. Their results count as split, too.
    Shape and number of elements are those of the whole parameter where the script asks. A norm, a sum, a product with a
    matrix or a write of some rows raises ``UsageError``. A column-parallel layer that the script calls by itself, not
    through the block around it, returns its slice of the outputs as a ``SplitTensor``.

    Args:
        split: parameters of which this rank has a slice, by name.
        specs: position of each parameter's slice in the whole tensor, by name.
        blocks: for each column-parallel layer the module within whose forward its outputs may be plain slices.
    """

    def __init__(
        self,
        split: Mapping[str, nn.Parameter],
        specs: Mapping[str, ShardSpec],
        blocks: Mapping[nn.Module, nn.Module],
    ) -> None:
        super().__init__()
        self._names: Any = WeakIdKeyDictionary({parameter: name for name, parameter in split.items()})
        self._ids = {id(parameter) for parameter in split.values()}  # of these tensors, and of some that are gone
        _MODES.add(self)
        self._gradients: Any = WeakIdKeyDictionary()  # of split parameters, as the script has read them; by name
        self._shapes = {name: (tuple(p.shape), specs[name].shape) for name, p in split.items()}
        # PyTorch's stack of modes holds this object, which must not keep the model, and so the run, in memory.
        self._blocks = WeakKeyDictionary({layer: ref(block) for layer, block in blocks.items()})

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch on parameters of which this rank has only a slice, or refuse the call.

        The mode calls this method for each function of PyTorch that the script calls on tensors. Allowed are
        elementwise functions, whose result on the slice is the slice of their result on the whole parameter; the result
        counts as a slice, too. Others, such as a norm or a matrix product, would give a wrong number and are refused.
        For the size of such a parameter, or of its gradient, the script gets that of the whole one. Calls by layers and
        optimizers, and calls without such parameters, pass unchanged.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.

        Returns:
            The function's result; a ``SplitTensor`` where the script itself calls a column-parallel layer.

        Raises:
            UsageError: the function is not elementwise, an operand would differ between slices, or the script itself
                calls a layer that is split by heads.
        """
        if not self.quiet and func in SIZES and (whole := self._whole_for_script(args, kwargs)) is not None:
            return size_of_whole(func, whole, args, kwargs)
        if not self.quiet and func == _GRADIENT:
            gradient = func(*args)
            if gradient is not None and (name := self._names.get(args[0])) is not None:
                self._gradients[gradient] = name
            return gradient
        name = None if self.quiet or func in METADATA else self._name_in(args, kwargs)
        if name is None:
            return func(*args, **kwargs)
        caller = tutti_caller(__name__)
        if caller is not None:
            result = func(*args, **kwargs)
            return self._split_output(caller.f_locals.get("self"), result) if func is functional.linear else result
        if func is not torch.autograd.grad:
            elementwise, allowed = func in _DATA or acts_by_element(func), _in_layer_or_optimizer()
            if not elementwise and allowed:
                return func(*args, **kwargs)
            if not elementwise:
                _refuse(name, func)
            if not allowed:
                self._check_operands(name, func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._names.setdefault(tensor, name)
                self._ids.add(id(tensor))
        return result

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the split parameter from which the script has made a tensor, element by element, or None.

        Args:
            tensor: any tensor; this mode sees the script's calls of PyTorch that make it.
        """
        name: str | None = self._names.get(tensor)
        return name

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

    def _name_in(self, args: Any, kwargs: Any) -> str | None:
        """Return the name of the first split parameter among the arguments, or None."""
        for tensor in tensors_among(args, kwargs):
            # Nearly all tensors are activations, and a look into a dictionary of weak references takes microseconds.
            if id(tensor) in self._ids and (name := self._names.get(tensor)) is not None:
                return str(name)
        return None

    def _check_operands(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Raise UsageError if an operand of an elementwise function is another one for each slice of a parameter."""
        here, whole = self._shapes[name]
        for tensor in tensors_among(args, kwargs):
            if self._names.get(tensor) is not None or type(tensor) not in (Tensor, nn.Parameter):
                continue
            sizes = tensor.shape[::-1]
            if any(size != 1 for size, a, b in zip(sizes, here[::-1], whole[::-1], strict=False) if a != b):
                _refuse(name, func, f" together with a tensor of {tuple(tensor.shape)}")

    def _split_output(self, layer: Any, result: Any) -> Any:
        """Return the outputs of a layer, as a ``SplitTensor`` if the script calls a column-parallel layer by itself."""
        found = self._blocks.get(layer) if isinstance(layer, ColumnParallelLinear) else None
        block = None if found is None else found()
        if block is None or current_autograd_node() is not None:
            return result
        if any(frame.f_locals.get("self") is block for frame in _frames()):
            return result
        place = layer.tutti_slice
        if result.shape[-1] != len(place.mine):
            raise UsageError(
                f"the script calls {place.name} by itself, which is split over tensor ranks",
                where=script_line(),
                why="its outputs are those of this rank's heads, of which the code around it may need all",
                remedy=f"call the module around it, or leave the layer whole: --strategy tensor:whole={place.name}",
            )
        return SplitTensor.of(result, -1, place)


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
        """Return whether a forward of the model calls that is neither an owner's nor one of ``torch.nn``."""
        callers = [frame.f_locals.get("self") for frame in _frames()]
        modules = [caller for caller in callers if id(caller) in self._modules]
        if not modules or any(id(reader) in owners for reader in modules):
            return False
        return not type(modules[0]).__module__.startswith("torch.nn.")


def read_elsewhere(plain: nn.Module, trial: Callable[..., Any] | None, device: torch.device) -> list[str]:
    """Return the names of modules whose parameters another module's forward reads.

    Tensor parallelism leaves these modules whole. The loss function runs once on two samples to find them. If it raises
    an error, the modules found until then are returned; the first step will raise the error again.

    Args:
        plain: the whole model; it stays as it was.
        trial: ``trial(model, most)`` calls the loss function on a model with at most ``most`` samples of the data; None
            where no data is at hand.
        device: device on which the loss function runs.

    Returns:
        Sorted module names; empty without ``trial``, and if the model has ``SyncBatchNorm``.
    """
    if trial is None or peers_of(plain) is not None:
        return []
    mode = _ForwardReads(plain)
    # The first step reports any error.
    with suppress(Exception), untouched(plain, device), mode:
        trial(plain, _SAMPLES)
    return sorted(mode.names)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the call, without those of this module, from the innermost."""
    frame: FrameType | None = calling_frame(1)
    while frame is not None:
        if frame.f_globals.get("__name__") != __name__:
            yield frame
        frame = frame.f_back


def _in_layer_or_optimizer() -> bool:
    """Return whether a split layer's forward computes, or an optimizer, whose update tutti has tried on slices."""
    for frame in _frames():
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer):
            return True
        # Its other methods, such as reset_parameters, take the slice for the whole.
        if isinstance(caller, TensorParallelLayer) and frame.f_code.co_name == "forward":
            return True
    return False


def _refuse(name: str, func: Callable[..., Any], operand: str = "") -> NoReturn:
    called: str = getattr(func, "__name__", "")
    written = called in ("__setitem__", "__set__") or (called.endswith("_") and not called.startswith("__"))
    verb, why = "reads", "outside of its layer a penalty, norm or product of a slice is not that of the whole parameter"
    if written or operand:
        verb = "writes" if written else "reads"
        why = "positions, norms and draws of a slice are not those of the whole parameter"
    raise UsageError(
        f"the script {verb} {name}, of which each tensor rank has a slice{operand}",
        where=script_line(),
        why=why,
        remedy="write into run.state(), whole tensors, and give it to model.load_state_dict, both on every rank; take"
        " weight_decay of the optimizer for a penalty on weights and run.state() for figures of whole"
        f" weights, leave the layer whole by tensor:whole={name.rpartition('.')[0]}, or take --strategy mirrored or"
        " sharded:stage=2",
    )
