"""Record the calls of PyTorch that compute the loss of a micro-batch, to compute it again for other samples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.comm.current_session import collectives_refused
from tutti.errors import script_line
from tutti.nn.global_draws import draws_marker
from tutti.nn.script_mode import SIZES, asked_by_script
from tutti.nn.written_tensors import METADATA
from tutti.parallel.ddp.loss_output import read_loss
from tutti.parallel.ddp.loss_shape import averages_samples, scaled_reductions
from tutti.torch_compat import (
    FunctionModesDisabled,
    functorch_level,
    leave_function_mode,
    tensor_versions,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from tutti.train.script_checks.loss_watch import SCALING, leaves_of_call
from tutti.train.script_checks.script_source import script_constants, script_values
from tutti.train.script_checks.storage_records import TensorSet
from tutti.train.script_checks.watched_calls import number_of_gradients
from tutti.train.script_checks.written_numbers import written_numbers
from tutti.types.micro_batch import MicroBatch

MOST_ELEMENTS = 1_000_000
"""Largest number of elements of the model's outputs; they are computed with a few times more."""
_CALLS = 2_000
"""Largest number of calls between the model and the loss that are computed again."""
_CONSTANTS = 64
"""Largest number of calls that make constants, whose results the record keeps (a guess)."""
_SMALL = 1e-4
"""Relative difference of gradients that counts as rounding."""
_PARTS = frozenset(("split", "split_with_sizes", "tensor_split", "chunk", "unsafe_split", "unsafe_chunk", "unbind"))
"""Names of functions that divide a tensor along a dimension."""
_TURNING = frozenset(
    (
        *("__get__", "t", "transpose", "transpose_", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("adjoint", "rot90", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum", "tensordot"),
    )
)
"""Names of functions after which the first dimension may not be that of the samples, such as an attribute ``T``."""
_CHOOSING = frozenset(("index_select", "gather", "take", "take_along_dim", "index_fill", "index_fill_"))
"""Names of functions that choose rows or elements of their first argument by an index."""
_ARITHMETIC = frozenset(
    (
        *("add", "add_", "sub", "sub_", "subtract", "subtract_", "rsub", "mul", "mul_", "div", "div_", "true_divide"),
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__"),
        *("__mul__", "__rmul__", "__imul__", "__truediv__", "__rtruediv__", "__itruediv__", "__rdiv__", "__idiv__"),
    )
)
"""Names of functions that compute a smooth function of a number and of tensors."""
_FROM_OUTSIDE = frozenset(("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "load", "as_strided"))
"""Names of functions whose result may have a row for each sample, of values that the script has brought."""
_DRAWING = re.compile(
    r"rand|normal(?!ize)|log_normal_|bernoulli|multinomial|(feature_)?(alpha_)?dropout|gumbel_softmax|poisson$|rrelu|"
    "uniform_|exponential_|cauchy_|geometric_"
)
"""Beginnings of names of functions that draw random numbers."""


class Places(Enum):
    """How a call takes samples by their places in the micro-batch."""

    NONE = "not"
    ROWS = "some rows, as by a slice"
    BEYOND = "a slice as long as the micro-batch or longer, and shorter than the global batch"
    LISTED = "some rows, by a list of places"
    INDEX = "some rows, by a constant such as a mask by arange"
    CONSTANT = "a constant with a row for each sample beside them, such as weights by arange"


class RecordedCall(NamedTuple):
    """A call of PyTorch by a loss function or the body of a loop.

    Attributes:
        func, args, kwargs, result: the function, its arguments and what it has returned.
        gradients: whether gradients were enabled.
        places: how the call takes samples by their places in the micro-batch.
        line: the script's line of a call that takes samples by their places; else empty.
        written: the numbers among the arguments that stand in the script's source (``written_numbers``), of calls that
            make constants, or scale; None of others.
        draws: whether the function draws random numbers.
    """

    func: Any
    args: Any
    kwargs: Any
    result: Any
    gradients: bool
    places: Places = Places.NONE
    line: str = ""
    written: frozenset[float] | None = None
    draws: bool = False

    @property
    def scales_by_computed(self) -> bool:
        """Whether the call multiplies or divides by a number that the script has computed, such as one of samples."""
        numbers = [each for each in self.args if type(each) in (int, float)]
        return self.written is not None and not self.written.issuperset(numbers)


class RecordedForward(NamedTuple):
    """A call of the model: the first of its arguments that is a tensor computed from the batch, and one output."""

    given: Tensor
    output: Tensor


class InnerGradient(NamedTuple):
    """A gradient that the script has computed within its loss, by ``torch.autograd.grad`` of a number.

    Attributes:
        tensor: the gradient.
        of_parameter: whether it is one of a parameter of the model, by a number that is reduced over the samples.
        of_mean: whether the number is a mean over the samples.
        line: the script's line that has computed it.
        norm: its norm () when it was computed; collectives that write into it are no calls of the record.
    """

    tensor: Tensor
    of_parameter: bool
    of_mean: bool
    line: str
    norm: Tensor


class GivenNumber(NamedTuple):
    """A Python number that the script has given to PyTorch after it had read values of the samples.

    Attributes:
        value: the number.
        lines: the lines of the script that have given it, as ``FILE:LINE``.
    """

    value: float | np.floating[Any]
    lines: set[str]


class _UnknownNumber(Exception):
    """Raised for a number that may depend on the micro-batch's samples, and is not the number of the samples itself."""


class LossCalls(TorchFunctionMode):
    """Records what a loss function, or the body of a custom loop, computes from its batch and the model's outputs.

    The loss can then be computed again from other samples and outputs, as ``mixed_data`` and ``check_places`` do.
    The record changes nothing: calls that write to tensors of the script end it, and it is empty from then on. After a
    random draw it computes no loss again. Not collective. Call ``close`` at the end of the loss function or loop body.

    Args:
        model: the model, or a list or dict of models; they get hooks that only read, until ``finish`` or ``close`` is
            called.
        micro_batch: the micro-batch of the loss function or loop body.
        batch_size: samples of the global batch.

    Attributes:
        micro_batch, samples: the micro-batch, and its number of samples.
        outputs: the model's outputs with a row for each sample, by their ids.
        parts: outputs with other numbers of rows, as for a part of the samples, by their ids.
        forwards: calls of the model.
        inner_gradients: gradients that the script has computed by ``torch.autograd.grad`` of numbers.
        turned: ids of tensors whose first dimension may not be that of the samples.
        reads_rows: whether the script has read values of single samples.
        reads_values: whether the script has read values of samples, also of all together, such as a mean.
        reads_sizes: whether the script has read a size of a tensor.
        numbers: floats that the script has given to sums, differences, products and quotients of recorded tensors after
            it had read values of samples, by their ids. Left out are floats that stand in the script's code, or that a
            variable held before the read.
        lines_of_others: lines that have given such floats to other functions.
    """

    def __init__(self, model: nn.Module, micro_batch: MicroBatch, batch_size: int) -> None:
        super().__init__()
        self.micro_batch, self.samples, self._batch_size = micro_batch, micro_batch.samples, batch_size
        self._model = model
        self._within, self._open, self._recording = 0, True, True
        self.outputs, self.parts = dict[int, Tensor](), dict[int, Tensor]()
        self.forwards: list[RecordedForward] = []
        self.inner_gradients: list[InnerGradient] = []
        self._inputs: list[Tensor] = []
        self._calls: list[RecordedCall] = []
        batch = [leaf for leaf in tree_leaves(micro_batch.batch) if self.has_rows(leaf)]
        # The script may write into its batch.
        self._before = {id(leaf): leaf.clone() for leaf in batch}
        self._known = {id(leaf) for leaf in batch}
        # Tensors that the script has made of sizes and numbers alone.
        self._constants, self._constant_calls = TensorSet(), list[RecordedCall]()
        # Tensors that were computed from single rows.
        self._single, self.turned = set[int](), set[int]()
        # These, and what the model computes from them or from tensors that the record does not know.
        self._apart = set[int]()
        self.reads_rows = self.reads_values = self.reads_sizes = False
        self.numbers, self.lines_of_others = dict[int, GivenNumber](), set[str]()
        self._constant_numbers = {id(each): each for each in script_values() if isinstance(each, float | np.floating)}
        self._drawn, self._draws = draws_marker(), False
        self._handles = [
            handle
            for each in called_models(model)
            for handle in (
                each.register_forward_pre_hook(self._begin_forward),
                each.register_forward_hook(self._end_forward, always_call=True),
            )
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    # --- the record ------------------------------------------------------------------------------------------------

    def has_rows(self, leaf: Any) -> bool:
        """Return whether a value is a tensor with a row for each sample of the micro-batch.

        Args:
            leaf: any value.
        """
        return type(leaf) is Tensor and leaf.dim() > 0 and len(leaf) == self.samples

    def is_known(self, leaf: Any) -> bool:
        """Return whether a value is a tensor of the batch or of the model's outputs, or is computed from such tensors.

        Args:
            leaf: any value.
        """
        return id(leaf) in self._known

    def is_constant(self, leaf: Any) -> bool:
        """Return whether a value is a tensor that the script has made of sizes and numbers alone, as by ``arange``.

        Args:
            leaf: any value.
        """
        return leaf in self._constants

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._within += 1
        if self._within == 1:
            self._inputs = [leaf for leaf in tree_leaves(args) if id(leaf) in self._known][:1]

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._within -= 1
        for leaf in tree_leaves(output) if self._recording and not self._within else ():
            # Not a loss that the model itself has computed, whose graph must stay unread.
            if not (isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim()):
                continue
            outputs = self.outputs if self.has_rows(leaf) else self.parts
            outputs[id(leaf)] = leaf
            self._known.add(id(leaf))
            self.forwards += [RecordedForward(given, leaf) for given in self._inputs]
            if any(id(given) in self._apart for given in self._inputs) or not (self._inputs or self.has_rows(leaf)):
                self._apart.add(id(leaf))
            if any(id(given) in self.turned for given in self._inputs):
                self.turned.add(id(leaf))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Dynamo traces this mode with the code that it compiles.
        if torch.compiler.is_compiling() or not self._recording or self._within:
            return func(*args, **kwargs)
        if func in METADATA and not isinstance(result := func(*args, **kwargs), Tensor):
            self.reads_sizes |= func in SIZES and asked_by_script(__name__)
            return result
        given = [leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        if self.reads_values:
            self._note_numbers(name, args, kwargs, given)
        draws = _DRAWING.match(name) is not None
        self._draws |= draws
        if not any(id(leaf) in self._known for leaf in given):
            result = func(*args, **kwargs)
            if not draws and name not in _FROM_OUTSIDE and all(map(self.is_constant, given)):
                self._constants.update(each for each in leaves_of_call((result,)) if isinstance(each, Tensor))
                if len(self._constant_calls) < _CONSTANTS:
                    call = RecordedCall(func, args, kwargs, result, False, written=written_numbers())
                    self._constant_calls.append(call)
            return result
        before = tensor_versions(given)
        # The call may free the graph.
        root = number_of_gradients(func, args, kwargs)
        whole, of_mean = (False, False) if root is None else self._reduces(root)
        result = func(*args, **kwargs)
        if root is not None:
            self._add_gradients(args[1], result, whole, of_mean)
        written = {id(leaf) for leaf, old, new in zip(given, before, tensor_versions(given), strict=True) if old != new}
        leaves = leaves_of_call((result,))
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._recording and (made or written):
            if len(self._calls) == _CALLS or not written <= self._known:
                self._end_record()
            else:
                call = RecordedCall(func, args, kwargs, result, torch.is_grad_enabled(), draws=draws)
                self._record(call, name, given, made)
        if len(made) < len(leaves) and any(isinstance(leaf, int | float | complex | np.ndarray) for leaf in leaves):
            self.reads_values = True
            self.reads_rows |= any(leaf.dim() > 0 or id(leaf) in self._single for leaf in given)
        return result

    def _reduces(self, root: Tensor) -> tuple[bool, bool]:
        """Return whether a number is reduced over the samples, and whether by a mean; False of a freed graph."""
        with suppress(RuntimeError):
            reduced = id(root) not in self._apart and any(True for _ in scaled_reductions(root.grad_fn, self.samples))
            return reduced, averages_samples(root.grad_fn, self.samples)
        return False, False

    def _add_gradients(self, inputs: Any, result: Sequence[Any], whole: bool, of_mean: bool) -> None:
        if functorch_level() is not None:
            # Tensors of a torch.func transform have no values outside of it.
            return
        line, own = script_line(), set(map(id, self._model.parameters()))
        for given, made in zip((inputs,) if isinstance(inputs, Tensor) else inputs, result, strict=False):
            if type(made) is Tensor and made.layout is torch.strided and made.is_floating_point():
                with torch.no_grad(), FunctionModesDisabled():
                    norm = torch.linalg.vector_norm(made)
                of_parameter = isinstance(given, nn.Parameter) and id(given) in own
                if whole or not of_parameter:
                    self.inner_gradients.append(InnerGradient(made, of_parameter, of_mean, line, norm))

    def _note_numbers(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        """Record the floats among the arguments of a call that may be computed from values of the samples."""
        literals = script_constants()
        for leaf in leaves_of_call(args, kwargs):
            if not isinstance(leaf, float | np.floating) or id(leaf) in self._constant_numbers:
                continue
            if any(leaf is each for each in literals):
                continue
            if name in _ARITHMETIC and any(self.is_known(each) for each in tensors):
                self.numbers.setdefault(id(leaf), GivenNumber(leaf, set())).lines.add(script_line())
            else:
                self.lines_of_others.add(script_line())

    def _end_record(self) -> None:
        self._recording, self._calls, self._constant_calls = False, [], []

    def _record(self, call: RecordedCall, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        places = self._places(name, call.args, call.kwargs, given)
        line = "" if places is Places.NONE else script_line()
        written = written_numbers() if name in SCALING else None
        self._calls.append(call._replace(places=places, line=line, written=written))
        self._known.update(map(id, made))
        if name in _TURNING or any(id(leaf) in self.turned for leaf in given):
            self.turned.update(map(id, made))
        if any(id(leaf) in self._single for leaf in given):
            self._single.update(map(id, made))
        elif places is Places.ROWS:
            self._single.update(id(each) for each in made if each.dim() < call.args[0].dim() or len(each) == 1)
        if any(id(leaf) in self._apart for leaf in given):
            self._apart.update(map(id, made))
        self._apart.update(id(each) for each in made if id(each) in self._single)

    def _places(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Places:
        """Return how a call takes some rows of a tensor with a row for each sample by their places."""
        constant = any(self.is_constant(leaf) and self.has_rows(leaf) for leaf in tensors)
        given, samples = args[0] if args else None, self.samples
        if not isinstance(given, Tensor) or given.shape[:1] != (samples,) or id(given) in self.turned:
            return Places.CONSTANT if constant else Places.NONE
        if name in _PARTS:
            by_rows = kwargs.get("dim", args[-1] if len(args) > (1 if name == "unbind" else 2) else 0) == 0
            return Places.ROWS if by_rows else Places.NONE
        if name in ("narrow", "select"):
            return Places.ROWS if kwargs.get("dim", (*args, None)[1]) == 0 else Places.NONE
        if name in _CHOOSING:
            places = [leaf for leaf in tensors if not self.is_known(leaf)]
            return self._places_of(places[0]) if places else Places.NONE
        key = args[1] if name in ("__getitem__", "__setitem__") else None
        first = key[0] if isinstance(key, tuple) and key else key
        if isinstance(first, slice) and first.step in (None, 1):
            rows = len(range(*slice(first.start, first.stop).indices(samples)))
            return Places.ROWS if rows < samples else Places.BEYOND if self._is_beyond(first) else Places.NONE
        if isinstance(first, list | range | np.ndarray) or (isinstance(first, Tensor) and not self.is_known(first)):
            return self._places_of(first)
        if type(first) is int:
            return Places.ROWS
        return Places.CONSTANT if constant else Places.NONE

    def _places_of(self, index: Any) -> Places:
        """Return how an index takes rows: places of a script's list, or what follows from the number of samples."""
        return Places.INDEX if self.is_constant(index) and self.has_rows(index) else Places.LISTED

    def _is_beyond(self, taken: slice) -> bool:
        """Return whether a slice with all samples of the micro-batch would not have all of the global batch."""
        if taken.start in (None, 0) and taken.stop is not None:
            rows = taken.stop
        elif taken.stop is None and taken.start is not None:
            rows = -taken.start
        else:
            return False
        if rows == self.samples and self.reads_sizes:
            # It may be the number of samples.
            return rows < self._batch_size and not written_numbers().isdisjoint((rows, -rows))
        return bool(self.samples <= rows < self._batch_size)

    def finish(self) -> None:
        """End the record of calls that compute a loss: remove the hooks from the model, and leave the function mode.

        The calls recorded so far stay, for ``replay`` and ``gradients``; ``close`` deletes them, and must be called
        afterwards. It also leaves the function mode if this call cannot, because the mode is handling a call such as
        the script's ``loss.backward()``. Other function modes may lie above this one on PyTorch's stack.
        """
        self._recording = False
        for handle in self._handles:
            handle.remove()
        if self._open:
            # PyTorch puts a mode that handles a call back afterwards.
            self._open = leave_function_mode(self) is None

    def close(self) -> None:
        """End the record of calls that compute a loss, and delete the recorded calls. A second call does nothing.

        Removes the hooks from the model, and leaves the function mode.
        """
        self.finish()
        self._calls, self._constant_calls = [], []
        self.outputs, self.parts, self.forwards, self._inputs, self.inner_gradients = {}, {}, [], [], []

    def is_part_of_constant(self, constant: Tensor) -> bool:
        """Return whether a constant has equal rows for the micro-batch, and would have unequal ones for the batch.

        An example is ``torch.arange(len(x)) < 8`` where the micro-batch has eight samples and the global batch more.
        The recorded calls that have made the constant are made again for the number of samples of the global batch.
        False where one of their arguments is a number whose value for the global batch is not known.

        Args:
            constant: a tensor with a row for each sample, as ``is_constant`` says.
        """
        values: dict[int, Tensor] = {}
        with torch.no_grad(), collectives_refused():
            if not bool((constant == constant[:1]).all()):
                return False
            for call in self._constant_calls:
                whole = partial(self._of_batch, values, call.written or frozenset())
                try:
                    args, kwargs = list(map(whole, call.args)), {key: whole(each) for key, each in call.kwargs.items()}
                    result = call.func(*args, **kwargs)
                except _UnknownNumber:
                    continue
                (olds, _), (news, _) = tree_flatten(call.result), tree_flatten(result)
                values.update((id(old), new) for old, new in zip(olds, news, strict=True) if isinstance(old, Tensor))
            made = values.get(id(constant))
            return made is not None and len(made) == self._batch_size and not bool((made == made[:1]).all())

    def _of_batch(self, values: dict[int, Tensor], written: frozenset[float], value: Any) -> Any:
        """Return an argument of a call that makes a constant, for the samples of the global batch."""
        if isinstance(value, Tensor):
            if id(value) not in values:
                raise _UnknownNumber
            return values[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(self._of_batch(values, written, each) for each in value)
        if isinstance(value, slice):
            return slice(*(self._of_batch(values, written, each) for each in (value.start, value.stop, value.step)))
        if type(value) not in (int, float) or value in written:
            return value
        if value == self.samples:
            return self._batch_size
        if abs(value) > 1 or type(value) is float:
            raise _UnknownNumber
        return value

    # --- the loss for other values ---------------------------------------------------------------------------------

    def computes(self, loss: Any) -> bool:
        """Return whether the recorded calls of PyTorch have computed a loss, and no random number was drawn meanwhile.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``; of a tuple the first
                element is looked for among the recorded results.
        """
        first = next(iter(tree_leaves(loss)), None)
        drawn = self._draws or draws_marker() != self._drawn
        return bool(self._calls) and id(first) in self._known and not drawn

    def can_repeat(self, loss: Any) -> bool:
        """Return whether a loss can be computed again from the model's outputs, by ``computed_again``.

        That is so if the recorded calls have computed the loss without a draw, and the outputs have at most
        ``MOST_ELEMENTS`` elements together.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.
        """
        size = sum(output.numel() for output in self.outputs.values())
        return 0 < size <= MOST_ELEMENTS and self.computes(loss)

    def computed_again(self, loss: Any) -> tuple[Tensor, Tensor] | None:
        """Return a loss, and the gradients of the model's outputs, computed again from the same batch and outputs.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.

        Returns:
            The loss (), and a tensor (samples, elements of all outputs) of gradients. None if the loss has another
            value than ``loss``, because it depends on values that were not recorded.
        """
        value, found = self.gradients(loss, self.batch_of(None), self.outputs)
        before = read_loss(loss, self.micro_batch)[0].detach()
        same = torch.allclose(value, before, rtol=1e-6, equal_nan=False)
        return (value, torch.cat(found, 1)) if same else None

    def batch_of(self, row: int | None) -> dict[int, Tensor]:
        """Return copies of the micro-batch's tensors by id, as they were before the loss was computed.

        Args:
            row: index of a sample that replaces every other sample in the copies; None leaves the samples as they are.
        """
        return {
            key: (leaf if row is None else leaf[row : row + 1].expand_as(leaf)).clone()
            for key, leaf in self._before.items()
        }

    def replay(
        self,
        values: dict[int, Tensor],
        calls: Sequence[RecordedCall] | None = None,
        numbers: Mapping[int, float] = MappingProxyType({}),
        moved: RecordedCall | None = None,
    ) -> None:
        """Make the recorded calls of PyTorch again with other values of tensors, and put their results into ``values``.

        Args:
            values: by the id of a recorded tensor, the tensor that takes its place, such as other samples or other
                outputs of the model; recorded tensors without an entry are used as they are. A result is added under
                the id of the recorded result.
            calls: those of the recorded calls that are made, in their order; None makes all.
            numbers: other values of floats that the script has given to PyTorch, by their ids.
            moved: one of the recorded calls, to whose result unequal positive numbers are added, as large as its
                largest element, to see whether the loss depends on it; None for no such call.
        """
        for call in self._calls if calls is None else calls:
            args, kwargs = tree_map(partial(_newest, values, numbers), (call.args, call.kwargs))
            with torch.set_grad_enabled(call.gradients), collectives_refused():
                result = call.func(*args, **kwargs)
            (olds, _), (news, _) = (
                tree_flatten(call.result),
                tree_flatten(tree_map(_with_other_values, result) if call is moved else result),
            )
            values.update((id(old), value) for old, value in zip(olds, news, strict=True) if isinstance(old, Tensor))

    def gradients(
        self,
        loss: Any,
        values: dict[int, Tensor],
        outputs: dict[int, Tensor],
        numbers: Mapping[int, float] = MappingProxyType({}),
        moved: RecordedCall | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss again by the recorded calls for other samples and outputs; return it with its gradients.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.
            values: the tensors of the batch to use, by the ids of the recorded ones.
            outputs: the model's outputs to use, by the ids of the recorded ones; gradients are with respect to these.
            numbers: other values of floats that the script has given to PyTorch, by their ids (the attribute
                ``numbers``).
            moved: one of the recorded calls, to whose result other values are added, as by ``replay``; None for none.

        Returns:
            The loss (), and a tensor (rows, elements of a row) for each output that the loss depends on.
        """
        leaves = {key: output.detach().clone().requires_grad_() for key, output in outputs.items()}
        # A view: the script may have written into the outputs in place.
        values = values | {key: leaf.view_as(leaf) for key, leaf in leaves.items()}
        self.replay(values, numbers=numbers, moved=moved)
        flat, tree = tree_flatten(loss)
        with torch.enable_grad():
            outcome = tree_unflatten([_newest(values, {}, value) for value in flat], tree)
            objective, start, _ = read_loss(outcome, self.micro_batch)
            # Not around read_loss: its graph's constants cannot be read within a dispatch mode.
            with collectives_refused():
                found = torch.autograd.grad(objective, list(leaves.values()), start, allow_unused=True)
        return objective.detach(), [each.reshape(len(each), -1) for each in found if each is not None]

    def calls_with(self, number: int) -> list[RecordedCall]:
        """Return the recorded calls of PyTorch that had a given float among their arguments.

        Args:
            number: the ``id`` of the float, a key of the attribute ``numbers``.
        """
        return [
            call for call in self._calls if any(id(leaf) == number for leaf in leaves_of_call(call.args, call.kwargs))
        ]

    def following(self, tensor: Tensor) -> list[RecordedCall]:
        """Return the recorded calls whose results depend on a tensor, in the order in which the script made them.

        Calls of ``torch.autograd.grad``, and calls that depend on the tensor by these alone, are left out.

        Args:
            tensor: a result of a recorded call.
        """
        found, ids = list[RecordedCall](), {id(tensor)}
        for call in self._calls:
            given = {id(leaf) for leaf in leaves_of_call(call.args, call.kwargs) if isinstance(leaf, Tensor)}
            if not ids.isdisjoint(given) and call.func is not torch.autograd.grad:
                found.append(call)
                ids.update(id(leaf) for leaf in leaves_of_call((call.result,)) if isinstance(leaf, Tensor))
        return found

    def leading_to(self, wanted: Sequence[Tensor]) -> list[RecordedCall]:
        """Return the recorded calls of PyTorch on whose results some tensors depend, the last call first.

        Args:
            wanted: the tensors, results of recorded calls.
        """
        found, ids = list[RecordedCall](), set(map(id, wanted))
        for call in reversed(self._calls):
            if any(id(leaf) in ids for leaf in leaves_of_call((call.result,))):
                found.append(call)
                ids.update(id(leaf) for leaf in leaves_of_call(call.args, call.kwargs) if isinstance(leaf, Tensor))
        return found


def called_models(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forward a script calls: the model, or several that ``tutti.prepare`` got together."""
    return list(model.children()) if type(model) in (nn.ModuleList, nn.ModuleDict) else [model]


def alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two gradients are equal but for rounding; False where one of them has a NaN.

    Args:
        one, other: tensors of the same shape.
    """
    most = _SMALL * torch.maximum(one.abs().max(), other.abs().max())
    return bool((one - other).abs().max() <= most)


def _with_other_values(value: Any) -> Any:
    """Add unequal positive values, of the size of its largest element, to a tensor of floats."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return value
    size = value.detach().abs().max().clamp(min=1.0)
    return value + size * torch.linspace(0.1, 1.0, value.numel(), dtype=value.dtype, device=value.device).view(
        value.shape
    )


def _newest(values: Mapping[int, Tensor], numbers: Mapping[int, float], value: Any) -> Any:
    if isinstance(value, Tensor):
        return values.get(id(value), value)
    return numbers.get(id(value), value) if numbers and isinstance(value, float | np.floating) else value
