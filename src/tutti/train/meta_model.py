"""Give values to a model that was built on the meta device: weights from files, or its modules' own initialisation.

Parameters become views of the files of weights, or tensors in temporary files, whose pages the kernel evicts. Each rank
copies its part into memory later, as it does with a model built in ``tutti.spilling()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.dtypes import DTYPES, tensor_from_bytes
from tutti.checkpoint.weights import Weights, whole_tensor
from tutti.comm.communicator import Communicator
from tutti.config.init_map import InitMap
from tutti.device import forked_generators
from tutti.errors import UsageError, counted
from tutti.nn.init_on_disk import map_weights, spilling
from tutti.nn.swap import BufferRef, buffers, other_names, parameters
from tutti.torch_compat import RESET_METHODS, module_buffers, module_parameters, tensor_version
from tutti.train.warm_start import WarmStart, find_warm_start, open_warm_start
from tutti.types.shard_spec import ShardSpec

_REMEDY = (
    "build the model inside tutti.spilling() in place of torch.device('meta'), start from weights by init_from=, or"
    " initialise in the modules' reset_parameters()"
)
_ARGUMENTS_OF_FACTORIES = ("device", "dtype")
_CPU = torch.device("cpu")


def on_meta(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of a model is on the meta device, which stores only shapes.

    Args:
        model: the model.
    """
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_state_on_meta(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError if an optimizer has made state on the meta device, such as Adagrad in its constructor.

    Args:
        optimizers: the script's optimizers.
    """
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
                raise UsageError(
                    f"the state of {type(optimizer).__name__} has no numbers",
                    why="the optimizer has made it in its constructor, of parameters on the meta device",
                    remedy="give the optimizer as text, such as 'adagrad:lr=0.01', which tutti.prepare makes later",
                )


def materialise_model(
    model: nn.Module, comm: Communicator, init_from: str | Path | None, init_map: InitMap | None
) -> WarmStart | None:
    """Give values to the parameters and buffers of a model that are on the meta device, in place.

    Parameters stay the same objects, which optimizers may hold. With ``init_from`` parameters and persistent buffers
    get the values of the files: a parameter of the file's dtype becomes a read-only view of the file, any other one a
    converted copy in a temporary file. All other parameters and buffers are initialised by ``reset_parameters`` of
    their modules, children first, and ``init_weights`` of the model, if it has one, with draws of the global random
    generator. Buffers that are still without values are computed by another call of their module's constructor.
    Collective over the ranks of ``comm`` with ``init_from``: one of them compares names and shapes and broadcasts the
    outcome. Nothing is done for a model that has all its values.

    Args:
        model: the model.
        comm: all ranks of the job.
        init_from: a run directory, a checkpoint directory, a safetensors file or a folder of such files; None for none.
        init_map: renames of the saved tensors, and differences that are allowed; default: none.

    Returns:
        With ``init_from`` the ``WarmStart`` that was found, for ``load_warm_start``; None otherwise, and for a model
        that has all its values.

    Raises:
        UsageError: the initialisation of a tensor cannot be repeated, as that in a constructor; or ``init_from`` holds
            no weights.
        CheckpointError: the weights are damaged or of another model; the error names the tensors that differ.
    """
    if not on_meta(model):
        return None
    begun, weights = None, None
    if init_from is not None:
        begun = find_warm_start(comm, Path(init_from), _whole_specs(model), init_map)
        weights = open_warm_start(begun, init_map)
    kept = set() if begun is None else set(begun.fitted.kept)
    found = {} if weights is None else _saved_names(model, weights, kept)
    with spilling(), torch.no_grad(), _CPU:
        _initialise(model, found)
        if weights is not None:
            _put_saved(model, weights, found)
        _rebuild_buffers(model)
    return begun


def _whole_specs(model: nn.Module) -> dict[str, ShardSpec]:
    """Return the shape and the tied names of each parameter and persistent buffer, by its first name."""
    tied = other_names([model])
    tensors: dict[str, Tensor] = {**dict(parameters([model])), **{slot.name: slot.get() for slot in buffers([model])}}
    return {n: ShardSpec(tuple(t.shape), (0,) * t.dim(), tied.get(n, ())) for n, t in tensors.items()}


def _saved_names(model: nn.Module, weights: Weights, kept: set[str]) -> dict[str, str]:
    """Return the name in the weights of each tensor of the model that starts from them."""
    specs = {name: spec for name, spec in _whole_specs(model).items() if name not in kept}
    names = {name: next((n for n in (name, *spec.tied) if n in weights.records), None) for name, spec in specs.items()}
    return {name: there for name, there in names.items() if there is not None}


# --- initialisation by the modules ---------------------------------------------------------------------------------


def _initialise(model: nn.Module, found: Mapping[str, str]) -> None:
    """Initialise the parameters that no file has, and the buffers that the modules' own methods write.

    ``reset_parameters`` of the modules is followed by ``init_weights`` of the models, where they have one, as those of
    transformers and torchtitan. Parameters of files are still on the meta device, where a write has no effect.

    Raises UsageError where a parameter was written more or less often in the constructor: it then was not initialised
    by these methods alone.
    """
    missing = {name: p for name, p in parameters([model]) if p.is_meta and name not in found}
    slots = {s.name: s for s in buffers([model], persistent=False) if s.get().is_meta and s.name not in found}
    former = {name: slot.get() for name, slot in slots.items()}
    expected = {name: tensor_version(tensor) for name, tensor in {**missing, **former}.items()}
    for name, parameter in missing.items():
        _put_parameter(name, parameter, _empty_like(parameter))
    for tensor in former.values():
        _put_buffer(model, tensor, _empty_like(tensor))
    resets, inits = _Writes({**missing, **slots}), _Writes({**missing, **slots})
    for module, reset in _resets(model, {id(p) for p in missing.values()}):
        if not (_has_written(module, missing, expected, resets) and _only_delegates(module, reset)):
            resets.count(reset)
    for init in _own_inits(model) if missing or former else ():
        try:
            inits.count(init)
        except Exception as error:
            if missing:
                what = "init_weights() of the model, which is on the meta device, has failed"
                raise UsageError(what, why=repr(error), remedy=_REMEDY) from error
    for name, tensor in former.items():
        count = resets.total(name) + inits.total(name)
        # A buffer that was converted to another dtype is another tensor, without the counter of the first.
        if not count or expected[name] not in (0, count):
            _put_buffer(model, slots[name].get(), tensor)
    # The constructor has called init_weights for all parameters, or, as transformers on the meta device, for none.
    left_out = [n for n in missing if not inits.total(n) or expected[n] not in _by_resets(n, resets, inits)]
    called = [n for n in missing if not expected[n] or expected[n] - inits.total(n) not in _by_resets(n, resets, inits)]
    wrong = min(left_out, called, key=len)
    if wrong:
        raise UsageError(
            f"the initial values of {counted(len(wrong), 'parameter')} cannot be computed",
            where=", ".join(wrong[:3]),
            why="the model is on the meta device, which stores only shapes, and its constructor gave them values by"
            " other means than one reset_parameters() of their module, or init_weights() of the model",
            remedy=_REMEDY,
        )


def _by_resets(name: str, resets: _Writes, inits: _Writes) -> set[int]:
    """Return how often constructors of layers may have written a parameter: of a tied one, that of one layer counts.

    Which layer's values a tied parameter has is only known not to matter where ``init_weights`` replaces them.
    """
    return {resets.total(name), *(resets.counts[name] if inits.total(name) else ())}


class _Writes:
    """Counts writes of tensors by their version counters.

    Args:
        tensors: the tensors, or slots of buffers, by name.

    Attributes:
        counts: for each tensor the numbers of writes by the functions that wrote it.
    """

    def __init__(self, tensors: Mapping[str, Tensor | BufferRef]) -> None:
        self._tensors = tensors
        self.counts: dict[str, list[int]] = {name: [] for name in tensors}

    def count(self, function: Callable[[], Any]) -> None:
        """Call a function, and count its writes."""
        before = self._versions()
        function()
        for name, now in self._versions().items():
            if now != before[name]:
                self.counts[name].append(now - before[name])

    def total(self, name: str) -> int:
        """Return the number of all writes of a tensor."""
        return sum(self.counts[name])

    def _versions(self) -> dict[str, int]:
        tensors = {n: each.get() if isinstance(each, BufferRef) else each for n, each in self._tensors.items()}
        return {name: tensor_version(tensor) for name, tensor in tensors.items()}


def _resets(model: nn.Module, wanted: set[int]) -> list[tuple[nn.Module, Callable[[], Any]]]:
    """Return the modules with one of the parameters whose ``id()`` is ``wanted``, each with its initialising method.

    The order is that of ``nn.Module.apply``, and of most constructors: children first.
    """
    pairs = [(module, _method(module, RESET_METHODS)) for module in _children_first(model, set())]
    wanting = [(module, reset) for module, reset in pairs if any(id(p) in wanted for p in module.parameters())]
    return [(module, reset) for module, reset in wanting if reset]


def _has_written(
    module: nn.Module, missing: Mapping[str, Tensor], expected: Mapping[str, int], resets: _Writes
) -> bool:
    """Return whether the parameters of a module have been written as often as by the constructor of the model."""
    ids = {id(parameter) for parameter in module.parameters()}
    names = [name for name, parameter in missing.items() if id(parameter) in ids]
    return all(0 < expected[name] <= resets.total(name) for name in names)


def _only_delegates(module: nn.Module, reset: Callable[[], Any]) -> bool:
    """Return whether a module's method that initialises it calls those of the modules within it, and writes nothing.

    The method is called without effect where that is so; else with that of the modules' methods left out.
    """
    inner = [each for each in module.modules() if each is not module]
    kept = [{name: vars(each)[name] for name in RESET_METHODS if name in vars(each)} for each in inner]
    writes = _Writes(dict(module.named_parameters()))
    for each in inner:
        vars(each).update(dict.fromkeys(RESET_METHODS, lambda *args, **named: None))
    try:
        with torch.random.fork_rng(devices=[]):
            writes.count(reset)
    finally:
        for each, former in zip(inner, kept, strict=True):
            for name in RESET_METHODS:
                del vars(each)[name]
            vars(each).update(former)
    return not any(writes.counts.values())


def _own_inits(module: nn.Module) -> list[Callable[[], Any]]:
    """Return ``init_weights`` of the outermost modules that have it."""
    own = _method(module, ("init_weights",))
    return [own] if own else [init for child in module.children() for init in _own_inits(child)]


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and all within it, each once and after its children."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


def _method(module: nn.Module, names: Sequence[str]) -> Callable[[], Any] | None:
    """Return the first of these methods that a module has and that can be called without arguments."""
    for name in names:
        method = getattr(module, name, None)
        if callable(method):
            with suppress(TypeError, ValueError):
                inspect.signature(method).bind()
                return method  # type: ignore[no-any-return]
    return None


# --- values of files -----------------------------------------------------------------------------------------------


def _put_saved(model: nn.Module, weights: Weights, found: Mapping[str, str]) -> None:
    for name, parameter in parameters([model]):
        if parameter.is_meta and name in found:
            _put_parameter(name, parameter, _saved_parameter(weights, found[name], parameter))
    for slot in buffers([model]):
        if slot.get().is_meta and slot.name in found:
            there = found[slot.name]
            value = tensor_from_bytes(whole_tensor(weights, there), weights.records[there].dtype)
            _put_buffer(model, slot.get(), _empty_like(slot.get()).copy_(value))


def _saved_parameter(weights: Weights, name: str, like: Tensor) -> Tensor:
    """Return the saved tensor as a view of its file, or else a converted copy, with the strides of ``like``."""
    record = weights.records[name]
    numbers = weights.region(name, (0,) * len(record.shape), record.shape)
    view = not numbers.flags.writeable and numbers.flags.aligned and numbers.size > 0
    if view and DTYPES[record.dtype] == like.dtype and like.is_contiguous():
        return map_weights(numbers, like.dtype)
    value = map_weights(numbers, DTYPES[record.dtype]) if view else tensor_from_bytes(numbers.copy(), record.dtype)
    return _empty_like(like).copy_(value)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=_CPU, requires_grad=False)


def _put_parameter(name: str, parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a tensor on another device; the object, which optimizers may hold, stays."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    vars(new).update(vars(parameter))
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise UsageError(
            f"the parameter {name} on the meta device cannot be given values",
            why=f"the script holds it by a reference or hook that PyTorch cannot move: {error}".splitlines()[0],
            remedy="register hooks on gradients after tutti.prepare; or build the model inside tutti.spilling() in"
            " place of torch.device('meta')",
        ) from error


def _put_buffer(model: nn.Module, tensor: Tensor, value: Tensor) -> None:
    """Replace a buffer in every module that has it."""
    for slot in buffers([model], persistent=False):
        if slot.get() is tensor:
            slot.put(value)


# --- buffers and attributes that constructors compute ----------------------------------------------------------------


def _rebuild_buffers(model: nn.Module) -> None:
    """Compute the tensors that are left on the meta device, buffers and attributes, by their modules' constructors.

    Raises UsageError for a module whose constructor cannot be called again with proof that it computes the same.
    """
    done: dict[Tensor, Tensor] = {}
    for name, module in model.named_modules():
        left = [key for key, tensor in module_buffers(module).items() if tensor is not None and tensor.is_meta]
        apart = [key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        if not left and not apart:
            continue
        twin = _twin(model, name, module)
        if twin is None:
            raise UsageError(
                f"the values of {counted(len(left + apart), 'tensor')} of {name or 'the model'} cannot be computed",
                where=", ".join(f"{name}.{key}".lstrip(".") for key in (left + apart)[:3]),
                why=f"the model is on the meta device, which stores only shapes, and the constructor of"
                f" {type(module).__name__} cannot be called again: the module does not hold all of its arguments as"
                " attributes of the same names, or would differ in another attribute",
                remedy="compute them under torch.device('cpu') in the constructor, or build the model inside"
                " tutti.spilling() in place of torch.device('meta')",
            )
        for key in left:
            own = BufferRef(key, module, key)
            former = own.get()
            value = done.setdefault(former, BufferRef(key, twin, key).get().to(former.dtype))
            _put_buffer(model, former, value)
        for key in apart:
            former = vars(module)[key]
            setattr(module, key, done.setdefault(former, vars(twin)[key].to(former.dtype)))


def _twin(model: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """Return a new module of the same class, made with the arguments that ``module`` holds as attributes.

    None where the constructor has another argument or fails, or where the new module has other buffers or another
    attribute than ``module``, which shows that its arguments were other ones.
    """
    arguments: dict[str, Any] = {}
    for key, parameter in inspect.signature(type(module)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return None
        holder = module if key in vars(module) else _ancestor_with(model, name, key) if key == "config" else None
        if key in _ARGUMENTS_OF_FACTORIES and parameter.default is None:
            continue
        if holder is None:
            return None
        arguments[key] = vars(holder)[key]
    try:
        with forked_generators(_CPU):
            twin = type(module)(**arguments)
    except Exception:
        return None
    return twin if _same_attributes(module, twin) else None


def _ancestor_with(model: nn.Module, name: str, key: str) -> nn.Module | None:
    """Return the nearest module around the module ``name`` that has an attribute."""
    while name:
        name = name.rpartition(".")[0]
        if key in vars(outer := model.get_submodule(name)):
            return outer
    return None


def _same_attributes(module: nn.Module, twin: nn.Module) -> bool:
    usual = vars(nn.Module()).keys()
    own, other = ({k: v for k, v in vars(each).items() if k not in usual} for each in (module, twin))
    tables = ((module_buffers(module), module_buffers(twin)), (module_parameters(module), module_parameters(twin)))
    if own.keys() != other.keys() or any(mine.keys() != theirs.keys() for mine, theirs in tables):
        return False
    shapes = [tuple(None if t is None else t.shape for t in table.values()) for pair in tables for table in pair]
    return shapes[::2] == shapes[1::2] and all(_same(own[key], other[key]) for key in own)


def _same(mine: Any, theirs: Any) -> bool:
    if mine is theirs:
        return True
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.shape == theirs.shape and (mine.is_meta or torch.equal(mine, theirs))
    if type(mine) is not type(theirs):
        return False
    try:
        return bool(mine == theirs)
    except Exception:
        return False
