"""Refuse what a script computes wrongly from sharded parameters, and explain PyTorch's errors about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NoReturn, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from tutti.errors import TuttiError, UsageError, script_line
from tutti.nn.script_edits import EditWatch
from tutti.nn.script_mode import (
    DRAWS,
    SIZES,
    QuietMode,
    ScriptMode,
    acts_by_element,
    asked_by_script,
    by_place,
    is_of_lists,
    size_of_whole,
    tensors_among,
    tutti_caller,
)
from tutti.nn.state_copy import WRITE_COPY, StateCopy
from tutti.nn.written_tensors import ASSIGN_DATA, DATA, METADATA, VIEWS, may_write, read_only, share_memory
from tutti.parallel.fsdp.fsdp_refusals import refuse_assigned_data, refuse_gathered_write
from tutti.parallel.fsdp.fully_sharded import FullySharded
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter
from tutti.parallel.viewed_part import as_views, refuse_shared_data
from tutti.torch_compat import (
    TorchFunctionDisabled,
    in_backward,
    is_compiled,
    local_tensor,
    replace_call,
    traced_function_modes,
    tree_map_only,
    uncompiled_call,
)

_WORDS = ("DTensor", "placement", "tensor subclasses", "sharded dimension", "Sharding propagation")
"""Words of PyTorch's errors about a ``DTensor`` that an operation cannot take."""
_FIGURES = frozenset(("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__"))
_EXTREMES = frozenset(("max", "min", "amax", "amin", "argmax", "argmin"))
"""Functions that PyTorch does not compute of a shard without elements."""
_DESCRIBED = frozenset(("__repr__", "__deepcopy__", "__reduce_ex__"))
_ON_ROWS = (
    DRAWS
    | _FIGURES
    | _DESCRIBED
    | {"detach", "grad", "backward", "empty_like", "full_like", "ones_like", "zeros_like", "new_empty", "new_full"}
    | {"new_ones", "new_tensor", "new_zeros", "data_ptr", "storage", "untyped_storage"}
)
"""Names of functions that are called with rows of a parameter even where gradients are enabled."""
_REPEATABLE = frozenset(("clamp", "clamp_min", "clamp_max", "clip", "fill", "zero", "relu", "abs", "nan_to_num"))
"""Functions by element, named without underscores, that change nothing when they are repeated with the same numbers."""
_SIMPLE = frozenset(
    (
        *(Tensor, nn.Parameter, type(None), bool, int, float, str, slice, type(...)),
        *(torch.Size, torch.dtype, torch.device, torch.memory_format, torch.layout),
    )
)
"""Types of arguments that are no ``DTensor`` and hold no tensors."""
_REMEDY = f"{WRITE_COPY}, or take strategy='sharded:stage=1' or 'mirrored'"


class ShardedReads(ScriptMode):
    """Function mode that raises UsageError for wrong uses of FSDP2's sharded parameters in the script.

    Random draws into a ``DTensor`` raise ``UsageError``, and so do errors of PyTorch about a ``DTensor`` that meets
    plain tensors. Three kinds of calls are collective over the shard ranks, which check that all of them make the same
    call. Reading a number from a ``DTensor``, such as a norm of gradients, all-gathers the shards and gives the number
    of the whole tensor. A parameter that is read with gradients enabled, as in a penalty on the weights, or by a
    function that combines elements is all-gathered; see ``WholeReads``. A whole tensor that meets a ``DTensor`` in an
    elementwise function is cut to this rank's shard; where the function writes the whole tensor, the ``DTensor`` is
    all-gathered.

    An optimizer's groups hold this rank's rows of a parameter as a plain tensor, whose ``shape`` and ``size()`` in the
    script are those of the whole parameter. Norms, draws and other functions of rows that mix elements raise
    ``UsageError``, too; elementwise writes to rows are recorded.

    The mode is active in the script's code between steps. In the loss function and the body of a custom training loop
    it is active up to the first update, and later only if the script has asked for sizes or values of rows.

    Args:
        distributed: whether the model has ``DTensor`` parameters (FSDP2), about which PyTorch's errors are explained.

    Attributes:
        edits: records of the script's edits of rows, by which ranks compare them.
    """

    def __init__(self, distributed: bool) -> None:
        self._shards = _ShardMode(distributed)
        self.edits = self._shards.edits
        super().__init__(self._shards)
        self._over = self._stays = False

    def guard(self, engine: FullySharded) -> None:
        """Let this function mode raise UsageError where the script writes a parameter that FSDP2 has unsharded.

        The mode (a ``TorchFunctionMode``) sees the script's calls of PyTorch. FSDP2 frees such a parameter after the
        forward or backward, so that the write would be lost. The check applies from now on, inside contexts of
        ``script_code``.

        Args:
            engine: the object that has applied ``fully_shard`` to the model; only a weak reference is kept.
        """
        self._shards.engine = ref(engine)
        engine.edits = self.edits
        for seen, rows in engine.owners().items():
            if seen is not rows:
                self.edits.alias(seen, rows)

    def leave_compiled(self, parts: Iterable[nn.Module], blocks: bool) -> None:
        """Turn this function mode off during calls of compiled modules, which cannot run while it is active.

        The mode (a ``TorchFunctionMode``) checks the script's reads and writes of sharded parameters. Not collective.

        Args:
            parts: the model on this rank, or its pipeline stages; the calls of modules in them are replaced.
            blocks: True if tutti compiles blocks inside of ``parts``: the mode is then off in every whole forward of
                each of ``parts``. False: it is off only in those modules of ``parts`` that the script has compiled.
        """
        for part in parts:
            compiled = [module for module in part.modules() if is_compiled(module)]
            for module in [part] if blocks else compiled:
                call = replace_call(module, None) or uncompiled_call(module)
                replace_call(module, partial(self._called, call))

    def _called(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.model_code(), self._uncompiled():
            return call(*args, **kwargs)

    @staticmethod
    def _uncompiled() -> AbstractContextManager[None]:
        """Return a context in which compiled code runs eagerly if a function mode that Dynamo traces is active.

        Dynamo would trace the mode in FSDP2's hooks, and parameters would be left without gradients.
        """
        if torch.compiler.is_compiling() or all(isinstance(mode, QuietMode) for mode in traced_function_modes()):
            return nullcontext()
        return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))

    def cover(self, rows: Iterable[ShardedParameter], full: Iterable[Tensor]) -> None:
        """Register sharded parameters with this function mode, which from now on checks the script's use of them.

        The mode (a ``TorchFunctionMode``) sees the script's calls of PyTorch. Where the script asks for the size or
        shape of this rank's rows, it gets those of the whole parameter. Functions of the rows that are not elementwise
        raise UsageError. After the script has written rows, its reads of the parameters in ``full`` raise UsageError
        until ``written`` is set to False, because other ranks' rows have not been all-gathered yet. Not collective.

        Args:
            rows: this rank's rows of each parameter, as the optimizer's groups have them.
            full: parameters of the model that hold all rows, also those of other ranks (ZeRO stage 1).
        """
        rows = list(rows)
        for each in rows:
            self._shards.wholes[each.parameter] = each.local
        self.edits.cover({each.name: each.parameter for each in rows})
        for parameter in full:
            self._shards.full[parameter] = True

    @property
    def written(self) -> bool:
        """Whether the script has written this rank's rows of sharded parameters, which are in the optimizer's groups.

        True from such a write until the caller sets the property to False; while it is True, the script's reads of
        parameters that hold all ranks' rows (ZeRO stage 1) raise UsageError.
        """
        return self._shards.written

    @written.setter
    def written(self, value: bool) -> None:
        """Set whether rows count as written: False after all ranks' rows have been all-gathered, which ends the checks.

        Args:
            value: the new value; True makes reads of parameters that hold all ranks' rows raise UsageError.
        """
        self._shards.written = value

    def end(self) -> None:
        """Stop checking the script's reads and writes of sharded parameters. Called before each update; not collective.

        Contexts of ``script_code`` that are entered later do nothing, unless the script has asked for sizes of this
        rank's rows or used their values, or it has a custom training loop (``stay``). Later calls change nothing.
        """
        self._over = True
        self._shards.gathered_writes.clear()

    def stay(self, roots: Iterable[nn.Module]) -> None:
        """Go on checking the script's use of sharded parameters after the first update, in a custom training loop.

        Not collective. The body of such a loop may write parameters at any time, for example when it initialises a
        layer again. After the first update, the forwards of ``roots`` are left out of the checks.

        Args:
            roots: the models that the script calls. A second call of this method does nothing.
        """
        if self._stays:
            return
        self._stays = True
        # Hooks of compiled ones are compiled, too; see ``leave_compiled``.
        self.leave_forwards(root for root in roots if not is_compiled(root))

    def _begin_forward(self, *_: Any) -> None:
        if self._over and not self._shards.asked:
            super()._begin_forward()

    @contextmanager
    def script_code(self) -> Iterator[None]:
        """Return a context in which the script's reads and writes of FSDP2-sharded parameters are checked.

        The context is a PyTorch function mode around the script's own code, such as its loss function. Reads of numbers
        of a ``DTensor``, and functions that combine one with a whole tensor, are collective over the shard ranks. After
        ``end`` has been called (at the first update) the context does nothing, unless the script has asked for sizes of
        this rank's rows or used their values, or has a custom training loop (``stay``).

        Raises:
            UsageError: within the context, an operation cannot take the parameters as they are outside of the model's
                forward (a ``DTensor``), would give each rank another result (a random draw, a norm of this rank's
                rows), or writes a parameter that FSDP2 has unsharded for one forward.
            MismatchError: within the context, shard ranks make different collective reads of these kinds, or combine a
                ``DTensor`` with tensors that differ between them.
            PeerError: within the context, in such a call, a rank is lost or does not take part within the timeout.
        """
        # The script may ask after the first update in the same body.
        if self._over and not self._stays and not self._shards.asked:
            yield
            return
        with super().script_code():
            yield


class _ShardMode(EditWatch):
    """Sees all calls of PyTorch by the script, and by the model up to the first update.

    Args:
        distributed: whether to explain errors about a ``DTensor``.

    Attributes:
        wholes: shape of the whole parameter by rows of it, and by tensors that the script has made of such rows.
        full: the model's parameters that hold all rows, also those of other ranks (ZeRO stage 1), as keys.
        asked: whether the script has asked for sizes of rows, or read or written their values.
        written: whether the script has written rows; who reads it may set it to False.
        gathered_writes: by name of a parameter, the call by which the model's forwards have written it since the last
            update.
        engine: weak reference to the object that gathers parameters for a forward (FSDP2).
    """

    def __init__(self, distributed: bool) -> None:
        super().__init__()
        self._distributed = distributed
        self.wholes: Any = WeakIdKeyDictionary()
        self.full: Any = WeakIdKeyDictionary()
        self.asked = self.written = False
        # Weak: PyTorch's stack of modes holds this object, which must not keep the model in memory.
        self.engine: Callable[[], FullySharded | None] = _no_engine
        self._lost: Any = WeakIdKeyDictionary()  # gathered copies of rows of a DTensor, into which writes would be lost
        self._data: Any = WeakIdKeyDictionary()  # what the script has read as ``.data`` of an unsharded parameter
        self.gathered_writes: dict[str, str] = {}

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See the base class. Calls without a followed tensor, such as those of another run's model, are passed on."""
        if self.quiet:
            return func(*args, **kwargs)
        # Most calls take this comparison alone.
        simple = not kwargs and _SIMPLE.issuperset(map(type, args))
        if self.written or (
            not self.edits.ids.isdisjoint(map(id, args)) if simple else self._concerns((*args, *kwargs.values()))
        ):
            return super().see(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self._explain(func, args, kwargs, error)
            raise

    def _concerns(self, values: Any) -> bool:
        """Return whether a value, or an element of a list or tuple among the values, is a tensor that is followed."""
        ids = self.edits.ids
        return any(
            self._concerns(each) if isinstance(each, tuple | list) else id(each) in ids or isinstance(each, DTensor)
            for each in values
        )

    def _follow(self, table: Any, tensor: Tensor, value: Any) -> None:
        """Set a tensor's entry in one of this mode's tables, and follow the tensor."""
        table[tensor] = value
        self.edits.ids.add(id(tensor))

    def _checked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call, which is that with whole parameters, or refuse the call; see the class."""
        first = next(chain(args, kwargs.values()), None)
        if (written := self._written(func, first)) is not None:
            local = self._rows_for(func, args, kwargs, written)
            if local is not None:
                # Records compare the calls over ranks.
                self.edits.alias(args[0], local)
            if func == DATA:
                data = func(*args)
                self._follow(self._data, data, written)
                return data
            if local is None:
                refuse_gathered_write(written, getattr(func, "__name__", ""))
            return self._write_both(func, args, kwargs, local)
        if func == ASSIGN_DATA and any(isinstance(each, DTensor) for each in args) and _by_script():
            return self._assign_data(*args)
        if func in SIZES and (shape := self.wholes.get(first)) is not None and asked_by_script(__name__):
            self.asked = True
            return size_of_whole(func, shape, args, kwargs)
        if isinstance(out := kwargs.get("out"), DTensor):
            result = self._checked(func, args, {key: value for key, value in kwargs.items() if key != "out"})
            return self._checked(Tensor.copy_, (out, result), {})
        if (
            self._lost
            and may_write(func)
            and func != DATA
            and any(each in self._lost for each in tensors_among((first,), {}))
        ):
            _refuse_part("writes", getattr(func, "__name__", "").strip("_"))
        name = getattr(func, "__name__", "")
        if self._distributed and self._reads_whole(func, name, args, kwargs):
            return self._of_wholes(func, args, kwargs)
        if name == "__setitem__" and self._writes_rows(first):
            return self._write_whole(func, args, kwargs)
        if isinstance(first, DTensor) and name in DRAWS and not _is_whole(first):
            _refuse_draw(name)
        if isinstance(first, DTensor) and name in _FIGURES and not _is_whole(first):
            return self._figure(func, first, args, kwargs)
        if name in _EXTREMES and isinstance(first, DTensor) and _has_empty_shard(first) and _by_script():
            return self._of_wholes(func, args, kwargs)
        if self.wholes and func not in METADATA and (rows := self._rows(args, kwargs)) is not None:
            return self._elementwise(func, args, kwargs, rows)
        if self.written and func not in METADATA and any(each in self.full for each in tensors_among(args, kwargs)):
            self._check_current()
        if self._distributed and acts_by_element(func):
            if is_of_lists(func):
                args = by_place(args, lambda place: self._made_alike(place, {}, writes=may_write(func))[0])
            else:
                args, kwargs = self._made_alike(args, kwargs, writes=may_write(func))
        return self._perform(func, first, args, kwargs)

    def _figure(self, func: Any, tensor: DTensor, args: Any, kwargs: Any) -> Any:
        """Return numbers of a whole sharded tensor, as by ``item()``. Collective: all ranks read it.

        PyTorch does not add up the ``DTensor`` of a norm or a sum over the ranks for these calls.
        """
        self.asked = True
        name = getattr(func, "__name__", "")
        if (engine := self.engine()) is not None:
            engine.agree_on_call(f"a figure of a sharded tensor, which all ranks must read in {script_line()} ({name})")
        return read_only(func, func(tensor.full_tensor(), *args[1:], **kwargs))

    def _perform(self, func: Any, first: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a call that PyTorch performs on shards, or else that of the whole parameters.

        Raises UsageError, with the line of the script, for a call that PyTorch cannot perform on either.
        """
        name = getattr(func, "__name__", "")
        try:
            derived = func is torch.autograd.grad and tutti_caller(__name__) is None
            result = _gradients_of(args, kwargs) if derived else func(*args, **kwargs)
            if self._is_view(name, first) and not _shards_all(result):
                return self._of_wholes(func, args, kwargs)
            if isinstance(first, DTensor):
                self._note_view(func, first, args, result)
            elif isinstance(first, tuple | list) and name.startswith("_foreach") and name.endswith("_"):
                # PyTorch does not increment the version counter of a DTensor here, by which edits are found.
                torch.autograd.graph.increment_version([each for each in first if isinstance(each, DTensor)])
            return result
        except TuttiError:
            raise
        except Exception as error:
            if self._is_view(name, first) or self._reads_shards(func, name, args, kwargs, error):
                return self._of_wholes(func, args, kwargs)
            if may_write(func) and self._writes_rows(first) and _is_about_shards(func, args, kwargs, error):
                return self._write_whole(func, args, kwargs)
            self._explain(func, args, kwargs, error)
            raise

    def _explain(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        """Raise UsageError for an error of PyTorch about a ``DTensor``, or of FSDP2 in a transform; else return."""
        if "being transformed by a functorch transform" in str(error):
            raise UsageError(
                "the model is called within a transform of torch.func (grad, vmap, jacrev) and has sharded parameters",
                where=script_line(),
                why="FSDP2 gathers parameters in the forward, and PyTorch allows that in no transform",
                remedy="take strategy='sharded:stage=1' or 'mirrored'",
            ) from error
        if isinstance(error, TuttiError) or not self._distributed or not _is_about_shards(func, args, kwargs, error):
            return
        raise UsageError(
            "the script computes with sharded parameters as they are outside of the model's forward"
            f" ({getattr(func, '__name__', 'a function')})",
            where=script_line(),
            why="each rank has some rows of them there, in a DTensor, which PyTorch cannot combine with plain"
            f" tensors or views: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            remedy="call the model itself and no layer of it, take gradients by run.backward, shard plain tensors"
            f" alike (torch.distributed.tensor.distribute_tensor), or {_REMEDY}",
        ) from error

    def _writes_rows(self, target: Any) -> bool:
        """Return whether the script may write elements of a tensor of which each rank has some rows."""
        if not isinstance(target, DTensor) or _is_whole(target) or target in self._lost or self.engine() is None:
            return False
        return _by_script() and not (torch.is_grad_enabled() and target.requires_grad)

    def _write_whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write a copy of a whole tensor, and copy this rank's rows of it back. Collective: all ranks write alike."""
        self.asked = True
        engine, target = cast(FullySharded, self.engine()), cast(DTensor, args[0])
        engine.agree_on_call(f"a sharded tensor, which all ranks must write in {script_line()}")
        for each in tensors_among(args[1:], kwargs):
            if not isinstance(each, DTensor):
                engine.agree_on_operand(each)
        with torch.no_grad():
            whole = cast(DTensor, target.detach()).full_tensor()
            rest, named = tree_map_only(DTensor, DTensor.full_tensor, (args[1:], kwargs))
            func(whole, *rest, **named)
            rows = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            local_tensor(target).copy_(local_tensor(rows))
        torch.autograd.graph.increment_version(target)
        return target if func is not Tensor.__setitem__ else None

    def _reads_whole(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether the script reads values of the model's parameters that a result of rows alone cannot have.

        That is a graph, or the result of a function that combines elements.
        """
        by_rows = not torch.is_grad_enabled() and (acts_by_element(func) or name.strip("_") in VIEWS)
        if by_rows or func in METADATA or may_write(func) or name in _ON_ROWS or kwargs.get("out") is not None:
            return False
        return any(self._name_of(each) for each in tensors_among(args, kwargs)) and _by_script()

    def _is_view(self, name: str, source: Any) -> bool:
        """Return whether the script takes a view of a parameter of the model, which PyTorch may have to gather."""
        if name.strip("_") not in VIEWS - {"data", "detach"} or not isinstance(source, DTensor):
            return False
        return self._name_of(source) is not None and _by_script()

    def _reads_shards(self, func: Any, name: str, args: Any, kwargs: Any, error: Exception) -> bool:
        """Return whether the script reads values for which PyTorch needs whole tensors, without a graph."""
        has_graph = torch.is_grad_enabled() and any(each.requires_grad for each in tensors_among(args, kwargs))
        if has_graph or may_write(func) or kwargs.get("out") is not None or name in _ON_ROWS:
            return False
        known = self.engine() is not None and any(isinstance(each, DTensor) for each in tensors_among(args, kwargs))
        return known and _by_script() and _is_about_shards(func, args, kwargs, error)

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter of the model that a ``DTensor`` is; None for other tensors."""
        engine = self.engine()
        return engine.reads.name_of(tensor) if engine is not None and isinstance(tensor, DTensor) else None

    def _assign_data(self, target: Tensor, value: Tensor) -> None:
        """Assign the whole of a ``DTensor`` to ``.data`` of a plain tensor, which cannot hold rows. Collective."""
        engine = self.engine()
        if isinstance(target, DTensor):
            refuse_assigned_data(self._name_of(target) or "a tensor made of a parameter")
        if engine is not None and isinstance(value, DTensor):
            for each in engine.owners():
                if isinstance(each, DTensor) and share_memory([local_tensor(value)], [local_tensor(each)]):
                    refuse_shared_data(str(self._name_of(each)))
            self.asked = True
            engine.agree_on_call(f"a sharded tensor, which all ranks must read in {script_line()}")
            self._follow(self._lost, value, True)
            value = value.full_tensor()
        ASSIGN_DATA(target, value)

    def _of_wholes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of whole parameters. Collective over the shard ranks."""
        self.asked = True
        engine, wholes = self.engine(), dict[Tensor, tuple[str, Tensor]]()

        def whole(tensor: DTensor) -> Tensor:
            name = self._name_of(tensor)
            if engine is None or name is None:
                if engine is not None:
                    engine.agree_on_call(f"a sharded tensor, which all ranks must read in {script_line()}")
                if not tensor.requires_grad:
                    # Such as a gradient; a write into a view of it would be lost.
                    wholes[tensor] = "a sharded tensor", tensor.full_tensor()
                    return wholes[tensor][1]
                return tensor.full_tensor()
            if tensor not in wholes:
                wholes[tensor] = name, engine.reads.whole(cast(nn.Parameter, tensor))
            return wholes[tensor][1]

        given, named = tree_map_only(DTensor, whole, (args, kwargs))
        return as_views(func, func(*given, **named), wholes)

    def _made_alike(self, args: Any, kwargs: Any, *, writes: bool) -> Any:
        """Return the arguments of an elementwise function with whole tensors sharded like the ``DTensor`` they meet.

        Where the function ``writes`` such a whole tensor, the ``DTensor`` is gathered instead. Collective where the two
        meet, and both are the same on all ranks; other arguments are returned as they are.
        """
        tensors = list(tensors_among(args, kwargs))
        sharded = next((each for each in tensors if isinstance(each, DTensor) and not _is_whole(each)), None)
        if sharded is None:
            return args, kwargs
        if writes and isinstance(args[0], StateCopy):
            return args, kwargs  # and the copy refuses the write
        args, kwargs = tree_map_only(StateCopy, StateCopy.clone, (args, kwargs))
        tensors = list(tensors_among(args, kwargs))
        engine, shape = self.engine(), sharded.shape
        numbers = [each for each in tensors if isinstance(each, DTensor)]
        by_script = _by_script()
        if engine and by_script and len(numbers) < len(tensors) and not any(each.dim() for each in numbers):
            # Such as a penalty of shards that is added to the loss in an evaluation.
            self.asked = True
            engine.agree_on_call(f"a figure of a sharded tensor, which all ranks must read in {script_line()}")
            return tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
        plain = [each for each in tensors if type(each) in (Tensor, nn.Parameter) and each.dim()]
        if engine is None or not plain or "out" in kwargs or not by_script:
            return args, kwargs
        if not all(_broadcasts(each.shape, shape) for each in plain):
            return args, kwargs
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            return args, kwargs
        self.asked = True
        for each in plain:
            engine.agree_on_operand(each)
        if writes and args[0] is plain[0]:
            return tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))

        def shard(tensor: Tensor) -> Tensor:
            if not any(tensor is each for each in plain):
                return tensor
            whole = tensor.detach().expand(shape).contiguous()
            return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)

        return tree_map_only(Tensor, shard, (args, kwargs))

    def _note_view(self, func: Any, source: DTensor, args: Any, result: Any) -> None:
        """Record results that would be views of a plain tensor and are copies that all ranks have gathered."""
        name = "data" if func == DATA else getattr(func, "__name__", "").strip("_")
        if name not in VIEWS or (
            name == "getitem" and any(isinstance(each, Tensor | list | bool) for each in _indices(args))
        ):
            return
        sharded = any(placement.is_shard() for placement in source.placements)
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, DTensor) and (
                source in self._lost or (sharded and not any(place.is_shard() for place in each.placements))
            ):
                self._follow(self._lost, each, True)

    def _written(self, func: Any, first: Any) -> str | None:
        """Return the name of the unsharded parameter that a function writes, or whose ``.data`` the script reads."""
        engine = self.engine()
        if engine is None or func in METADATA or not may_write(func):
            return None
        for tensor in first if isinstance(first, tuple | list) else (first,):
            if isinstance(tensor, Tensor):
                written: str | None = self._data.get(tensor) or engine.gathered_name(tensor)
                if written is not None:
                    return written
        return None

    def _rows_for(self, func: Any, args: Any, kwargs: Any, name: str) -> nn.Parameter | None:
        """Return the rows of an unsharded parameter that a call may write, too; None for a call that would be lost.

        Such a call makes each element from the element and from numbers, and changes nothing if another micro-batch
        repeats it, as a clamp of the weights does. Until the update a parameter is written by one such call alone, and
        ranks compare the records of the calls. The read of ``.data`` counts, too.
        """
        engine, base = self.engine(), getattr(func, "__name__", "").strip("_")
        if engine is None or not args or not isinstance(args[0], Tensor):
            return None
        if func != DATA:
            call = f"{base} {args[1:]} {kwargs}"
            others = any(True for _ in tensors_among(args[1:], kwargs))
            if base not in _REPEATABLE or others or self.gathered_writes.setdefault(name, call) != call:
                return None
        return engine.rows_of(name)

    def _write_both(self, func: Any, args: Any, kwargs: Any, rows: nn.Parameter) -> Any:
        """Write an unsharded parameter, from which forward and backward compute, and this rank's rows, which stay."""
        self.asked = True
        engine, result = self.engine(), func(*args, **kwargs)
        with TorchFunctionDisabled(), torch.no_grad():
            func(rows.data, *args[1:], **kwargs)
        if engine is not None:
            engine.accept_write(args[0])
        return result

    def _rows(self, args: Any, kwargs: Any) -> Tensor | None:
        """Return the first rows of an optimizer's groups among the arguments of a call by the script; None for none."""
        rows = next((each for each in tensors_among(args, kwargs) if each in self.wholes), None)
        return None if rows is None or tutti_caller(__name__) is not None else rows

    def _check_current(self) -> None:
        """Raise UsageError if the script reads a parameter whose rows it has written, before they are gathered."""
        if tutti_caller(__name__) is None:
            raise UsageError(
                "the script computes with parameters after it has written their rows in an optimizer's groups",
                where=script_line(),
                why="since tutti.prepare the groups hold the rows of this rank, and other ranks' rows reach the model"
                " only at the beginning of the next step",
                remedy="write model.parameters() in place of group['params'], or take strategy='mirrored'",
            )

    def _elementwise(self, func: Any, args: Any, kwargs: Any, rows: Tensor) -> Any:
        """Call a function of rows that acts element by element, and record a write; raise UsageError for others."""
        name = getattr(func, "__name__", "")
        name = "data" if func in (DATA, ASSIGN_DATA) else name
        if name in _DESCRIBED:
            return func(*args, **kwargs)
        tensors = list(tensors_among(args, kwargs))
        plain = name.removeprefix("_foreach").strip("_")
        single = not name.startswith("_foreach")
        if not (name == "data" or acts_by_element(func)) or (
            single and any(each.dim() and each.shape != rows.shape for each in tensors)
        ):
            raise UsageError(
                "the script reads or writes an object that was a parameter of the model before tutti.prepare, as"
                f" optimizer.param_groups has it ({name.strip('_')})",
                where=script_line(),
                why="since tutti.prepare that object holds the rows of this rank alone, so that each rank computes"
                " another number, or has another shape",
                remedy="read the parameters from the model each time (model.parameters()), write only element by"
                " element (mul_, add_ of a number), or take strategy='mirrored'",
            )
        self.asked = True
        if func == ASSIGN_DATA:
            # The model has the rows at their present place.
            self.written = True
            DATA(rows).copy_(args[1])
            return None
        result = func(*args, **kwargs)
        if name.endswith("_") or plain in ("iadd", "isub", "imul", "itruediv", "ipow"):
            self.written = True
        made = result if isinstance(result, tuple | list) else (result,)
        for old, new in zip(tensors, made, strict=False) if not single else ((rows, each) for each in made):
            if isinstance(new, Tensor) and old in self.wholes:
                self._follow(self.wholes, new, self.wholes[old])
        return result


def _by_script() -> bool:
    """Return whether the script makes a call outside of backward, in whose hooks each rank has another micro-batch."""
    return not in_backward() and tutti_caller(__name__) is None


def _refuse_part(verb: str, how: str) -> NoReturn:
    raise UsageError(
        f"the script {verb} some rows or another shape of a parameter of which each rank has some rows ({how})",
        where=script_line(),
        why="PyTorch gathers such a part of a DTensor into a copy, so that a write to the part would be lost",
        remedy=_REMEDY,
    )


def _broadcasts(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a tensor of these sizes can be expanded to a shape."""
    pairs = zip(reversed(sizes), reversed(shape), strict=False)
    return len(sizes) <= len(shape) and all(size in (1, whole) for size, whole in pairs)


def _indices(args: Any) -> Sequence[Any]:
    """Return the indices of a call of ``__getitem__`` in a sequence."""
    index = args[1] if len(args) > 1 else ()
    return index if isinstance(index, tuple) else (index,)


def _no_engine() -> None:
    """Return None: nothing gathers parameters."""


def _shards_all(result: Any) -> bool:
    """Return whether the views in a function's result are of this rank's rows alone."""
    return all(
        isinstance(each, DTensor) and any(placement.is_shard() for placement in each.placements)
        for each in (result if isinstance(result, tuple | list) else (result,))
    )


def _is_whole(tensor: DTensor) -> bool:
    """Return whether each rank has all of a ``DTensor``'s values, added up over the ranks."""
    return all(placement.is_replicate() for placement in tensor.placements)


def _has_empty_shard(tensor: DTensor) -> bool:
    """Return whether a rank of a ``DTensor`` has no elements of it; the same answer on all of its ranks."""
    shards = [
        (tensor.shape[each.dim], tensor.device_mesh.size(axis))
        for axis, each in enumerate(tensor.placements)
        if isinstance(each, Shard)
    ]
    # PyTorch gives all ranks but the last ones equally many rows.
    return any(size == 0 or math.ceil(size / math.ceil(size / ranks)) < ranks for size, ranks in shards)


def _refuse_draw(name: str) -> NoReturn:
    raise UsageError(
        f"the script draws random numbers for a parameter of which each rank has some rows ({name})",
        where=script_line(),
        why="each rank draws for its rows, which are not the rows of the draw for the whole parameter",
        remedy=_REMEDY,
    )


def _gradients_of(args: Any, kwargs: Any) -> tuple[Tensor | None, ...]:
    """Call ``torch.autograd.grad``, and raise RuntimeError for rows of a parameter that the forward has gathered.

    No path of the graph leads to such rows, so that their gradient would be None or zeros.

    Args:
        args, kwargs: those of ``torch.autograd.grad``, as PyTorch gives them to a function mode: the second argument
            is a tuple.
    """
    zeros = kwargs.get("materialize_grads", False)
    options = kwargs | ({"allow_unused": True, "materialize_grads": False} if zeros else {})
    found: tuple[Tensor | None, ...] = torch.autograd.grad(*args, **options)
    pairs = list(zip(found, args[1], strict=True))
    if any(gradient is None and isinstance(each, DTensor) for gradient, each in pairs):
        raise RuntimeError("a DTensor appears to not have been used in the graph")
    return tuple(torch.zeros_like(each) if gradient is None and zeros else gradient for gradient, each in pairs)


def _is_about_shards(func: Any, args: Any, kwargs: Any, error: Exception) -> bool:
    text = str(error)
    if any(word in text for word in _WORDS):
        return True
    if func is torch.autograd.grad:
        return "not have been used in the graph" in text
    given = chain(args, kwargs.values())
    flat = (item for value in given for item in (value if isinstance(value, tuple | list) else [value]))
    return isinstance(error, NotImplementedError) and any(isinstance(item, DTensor) for item in flat)
