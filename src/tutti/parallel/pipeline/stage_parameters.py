"""Let a script read and write the parameters of all pipeline stages, of which each rank has those of its own stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tutti.checkpoint.fingerprint import tensor_digest
from tutti.comm.communicator import Communicator
from tutti.errors import UsageError, script_line
from tutti.nn.absent_tensor import is_absent
from tutti.nn.partial_gradient import PartGradient, agree_on_operand
from tutti.nn.script_mode import QuietMode, acts_by_element, is_of_lists, tensors_among, tutti_caller
from tutti.nn.state_copy import WRITE_COPY, SourceValues, StateCopy
from tutti.nn.written_tensors import ASSIGN_DATA, DATA, METADATA, VIEWS, may_write, read_only, share_memory
from tutti.parallel.viewed_part import refuse_shared_data
from tutti.torch_compat import TorchFunctionDisabled, in_backward, tree_map_only

_FORMS = frozenset(
    (
        *("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"),
    )
)
"""Names of functions that read shape, dtype and device of their first argument, and no values."""

_FIGURES = frozenset(
    (
        *("norm", "vector_norm", "matrix_norm", "sum", "mean", "var", "std", "max", "min", "amax", "amin", "median"),
        *("item", "tolist", "numpy", "all", "any", "isfinite", "isnan", "isinf", "equal", "allclose", "dot", "matmul"),
        *("eq", "ne", "gt", "lt", "ge", "le", "stack", "cat", "count_nonzero", "rsub", "rmul", "radd", "rtruediv"),
    )
)
"""Names, beside those of functions that act by element, of functions that a script may call on whole parameters."""

_ADDING = frozenset(("add", "sub", "iadd", "isub"))
"""Names of functions that add a parameter to a gradient without a message."""

_TEXTS = frozenset(("repr", "str", "format"))
"""Names of functions for which a placeholder has a text of its own."""


class StageParameters(QuietMode):
    """Function mode that gives a script the parameters of all stages as if this rank had them.

    A read is collective over the ranks of the stages: the rank that has the parameter broadcasts it, and every rank
    computes with a copy. A write that acts by element takes place on the ranks that have the parameter. All other calls
    are refused on every rank. Where nothing may be collective, calls run unchanged, and a call with a placeholder for
    another stage's parameter raises UsageError.

    A loop over all parameters may write parameters of this rank's stages before a later call is refused. The mode
    therefore keeps a copy of each parameter of this rank that the script writes or takes views of, which ``undo``
    restores.

    Args:
        places: for each parameter of the whole model its name, and the index among the stages' ranks of the rank that
            has it; of a tied weight the first rank.
        comm: communicator over the ranks of the stages; None where reads are not supported.

    Attributes:
        apart: whether the ranks of the stages run different code of the script, so that nothing may be collective.
    """

    def __init__(self, places: Mapping[nn.Parameter, tuple[str, int]], comm: Communicator | None) -> None:
        super().__init__()
        # By identity, and with what the script has got as ``.data`` and ``detach()``.
        self._places: Any = WeakIdKeyDictionary(dict(places))
        self._comm, self.apart = comm, False
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._changes = 0  # numbers the script's writes and the points at which they were accepted

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of PyTorch for the script, with the values of parameters of all stages.

        Collective over the ranks of the stages where the function reads values of parameters (a broadcast of each from
        the rank that has it), or writes a parameter by a tensor (the ranks compare digests of the tensor). Calls are
        made as they are, and send nothing, for functions of other tensors, of metadata and of shapes alone (such as
        ``zeros_like``), for texts (``repr``), for tutti's own code, within a backward, and while the attribute
        ``apart`` is True or the constructor's ``comm`` is None.

        Args:
            func: the function, as ``__torch_function__`` is given it.
            args, kwargs: its arguments.

        Returns:
            The function's result. Of a read a new tensor, equal on all ranks; of a view a ``StateCopy``, a tensor
            subclass that refuses writes, since they would not reach the parameter; of a write the written parameter; of
            ``.data`` and ``detach()`` a tensor that counts as the parameter from then on.

        Raises:
            UsageError: ``func`` takes a parameter, and is neither elementwise nor a view, nor one of the reductions,
                comparisons and products that the mode lets through, such as a norm; ``func`` would write parameters by
                ``out=`` or as a list (``torch._foreach_mul_``); or it assigns a parameter to the ``.data`` of another
                tensor, or of a parameter of another stage. The script's writes since the last ``forget`` are undone
                first.
            MismatchError: ranks read different parameters, or write a parameter by tensors of different values.
        """
        if self.quiet or func in METADATA:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_among(args, kwargs) if tensor in self._places]
        if not given or tutti_caller(__name__) is not None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_").removeprefix("linalg_")
        if name in _FORMS:
            with TorchFunctionDisabled():
                return func(*args, **kwargs)
        if func is Tensor.detach or "out" in kwargs:
            self._keep(given)
        elif may_write(func):
            self._keep([tensor for tensor in tensors_among(args[:1], {}) if tensor in self._places])
        if func in (DATA, Tensor.detach):
            alias = func(*args, **kwargs) if func is Tensor.detach or not is_absent(args[0]) else args[0].detach()
            self._places[alias] = self._places[given[0]]
            return alias
        if func == ASSIGN_DATA and self._comm is not None and not self.apart:
            return self._assign_data(self._comm, *args)
        # To a gradient the ranks that have both add a parameter, without a message.
        adds = bool(args) and isinstance(args[0], PartGradient) and name in _ADDING
        if self._comm is None or self.apart or in_backward() or adds or name in _TEXTS:
            return self._as_it_is(func, args, kwargs, given)
        if "out" in kwargs or not (acts_by_element(func) or name in _FIGURES | VIEWS):
            self._refuse(given[0], name)
        target = args[0] if may_write(func) and args else None
        if isinstance(target, Tensor) and target in self._places:
            return self._write(func, args, kwargs, target)
        if is_of_lists(func) and may_write(func) and any(t in self._places for t in tensors_among(args[:1], {})):
            self._refuse(given[0], name)
        return self._read(func, args, kwargs, given)

    def _read(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Return the result of a function of whole parameters. Collective."""
        wholes = self._wholes(given)
        result = func(*self._with(args, wholes), **self._with(kwargs, wholes))
        first = wholes[id(given[0])]
        if result is first:
            return given[0]  # such as .cpu() on a CPU
        with TorchFunctionDisabled():
            return tree_map_only(Tensor, partial(self._view, given, wholes), read_only(func, result))

    def _view(self, given: Sequence[Tensor], wholes: Mapping[int, Tensor], result: Tensor) -> Tensor:
        """Return a function's result; a view of a parameter's copy becomes a ``StateCopy``, which names its source."""
        source = next((each for each in given if share_memory([wholes[id(each)]], [result])), None)
        if source is None:
            return result
        return StateCopy.of(result, self._places[source][0], _ViewedParameter(self, source))

    def state_of(self, parameter: Tensor) -> tuple[int, int]:
        """Return two numbers by which a caller finds out whether a parameter may have changed between two calls.

        If the numbers are equal, a copy of the parameter from the first call is up to date. Not collective: on a rank
        that does not hold the parameter, only the first number can differ.

        Args:
            parameter: a parameter of the model, on this or another rank's stages.

        Returns:
            The number of the script's writes of any parameter and of calls of ``forget``; and a digest of the
            parameter's values, 0 where another rank holds them.
        """
        with TorchFunctionDisabled(), torch.no_grad():
            return self._changes, 0 if is_absent(parameter) else int(tensor_digest(parameter.detach()))

    def _write(self, func: Any, args: Any, kwargs: Any, target: Tensor) -> Tensor:
        """Write a parameter by element where this rank has it. Collective where another tensor is read."""
        # A gradient of all stages is read on every rank.
        args, kwargs = tree_map_only(PartGradient, Tensor.clone, (args, kwargs))
        others = [*tensors_among(args[1:], kwargs)]
        wholes = self._wholes([each for each in others if each in self._places])
        for each in others:
            if each not in self._places and self._comm is not None:
                agree_on_operand(self._comm, each, "the script writes a parameter by a tensor")
        rest, named = self._with(args[1:], wholes), self._with(kwargs, wholes)
        self._changes += 1
        if not is_absent(target):
            func(target, *rest, **named)
        elif torch.is_grad_enabled() and target.requires_grad:
            # The error of PyTorch on the ranks that have the parameter.
            func(torch.zeros(target.shape, dtype=target.dtype, device=target.device).requires_grad_(), *rest, **named)
        return target

    def _assign_data(self, comm: Communicator, target: Tensor, value: Tensor) -> None:
        """Assign to ``.data`` of a parameter where this rank has it. Collective if the value is a whole tensor."""
        if target not in self._places:
            self.undo()
            refuse_shared_data(self._places[value][0])
        if value not in self._places:
            agree_on_operand(comm, value, "the script writes a parameter by a tensor")
        elif self._places[value][1] != self._places[target][1]:
            self._refuse(value, "an assignment to .data of a parameter of another stage")
        self._changes += 1
        if not is_absent(target):
            ASSIGN_DATA(target, value)

    def _wholes(self, given: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return copies of parameters that are equal on all ranks, by the ``id()`` of the parameter. Collective."""
        found: dict[int, Tensor] = {}
        for tensor in given:
            if id(tensor) in found or self._comm is None:
                continue
            name, rank = self._places[tensor]
            with torch.no_grad(), TorchFunctionDisabled():
                shape, dtype, device = tensor.shape, tensor.dtype, self._comm.device
                value = torch.empty(shape, dtype=dtype, device=device) if is_absent(tensor) else tensor.detach().clone()
                self._comm.broadcast(value, rank, f"{name}, which all ranks must read in {script_line()}")
            if torch.is_grad_enabled() and tensor.requires_grad:
                with TorchFunctionDisabled():
                    # With a graph on every rank; the gradient counts on those that have the parameter.
                    value = value.requires_grad_() if is_absent(tensor) else tensor.clone()
            found[id(tensor)] = value
        return found

    def _with(self, values: Any, wholes: Mapping[int, Tensor]) -> Any:
        return tree_map_only(Tensor, lambda tensor: wholes.get(id(tensor), tensor), values)

    def _as_it_is(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        result = func(*args, **kwargs)
        with TorchFunctionDisabled():
            self._keep([tensor for tensor in given if share_memory([tensor], tensors_among((result,), {}))])
        return result

    def _keep(self, parameters: Sequence[Tensor]) -> None:
        with TorchFunctionDisabled():
            for tensor in parameters:
                if not is_absent(tensor) and all(tensor is not kept for kept, _ in self._kept):
                    self._kept.append((tensor, tensor.detach().clone()))

    def _refuse(self, parameter: Tensor, how: str) -> NoReturn:
        name, _ = self._places[parameter]
        self.undo()
        raise UsageError(
            f"the script calls a function of the model's {name} that cannot be followed ({how})",
            where=script_line(),
            why="some ranks do not have the parameter",
            remedy="compute by element, or take norms and sums; call other functions on a copy, parameter.clone(), or"
            f" take run.state() for the whole model; {WRITE_COPY}; or take strategy='mirrored'",
        )

    def forget(self) -> None:
        """Accept the script's writes to this rank's parameters so far: free the copies kept from before these writes.

        This function mode copies each parameter of this rank's pipeline stages before the script first writes it or
        takes a view of it. After this call ``undo`` no longer reverts the writes so far. Not collective.
        """
        self._kept.clear()
        self._changes += 1

    def undo(self) -> None:
        """Revert the script's writes to parameters of this rank's pipeline stages since the last ``forget``.

        This function mode has copied each parameter before the script first wrote it or took a view of it; the values
        are copied back in place, and the copies freed. Not collective.
        """
        with TorchFunctionDisabled(), torch.no_grad():
            for parameter, before in reversed(self._kept):
                parameter.copy_(before)
        self.forget()


class _ViewedParameter(SourceValues):
    """A parameter of which the script has taken a view.

    Args:
        parameters: the function mode of the parameters; only a weak reference is kept.
        source: the parameter.
    """

    def __init__(self, parameters: StageParameters, source: Tensor) -> None:
        self._parameters, self._source = ref(parameters), source
        self._before = parameters.state_of(source)

    def unchanged(self) -> bool:
        parameters = self._parameters()
        return parameters is not None and parameters.state_of(self._source) == self._before

    def undo(self) -> None:
        if (parameters := self._parameters()) is not None:
            parameters.undo()
