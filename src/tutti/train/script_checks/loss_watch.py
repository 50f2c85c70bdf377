"""Base of the function modes that follow values through a script's calls of PyTorch up to its loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.errors import UsageError, counted, script_line
from tutti.nn.owned_hooks import OwnedHook
from tutti.nn.script_mode import SIZES, asked_by_script, within_call_of
from tutti.parallel.ddp.loss_count import loss_count
from tutti.parallel.ddp.loss_shape import Scaled, check_adds_up, is_gathered, scaled_reductions, undivided_sum
from tutti.torch_compat import FunctionModesDisabled, function_mode_aside, functorch_level, tree_leaves
from tutti.train.script_checks.batch_statistics import VALUES, BatchStatistics
from tutti.train.script_checks.entered_mode import EnteredMode
from tutti.train.script_checks.followed_numbers import FollowedNumbers
from tutti.train.script_checks.storage_records import memories_of
from tutti.train.script_checks.watched_calls import number_of_gradients
from tutti.train.script_checks.written_numbers import written_numbers
from tutti.types.micro_batch import LossFn, MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run

WITH_INTS = frozenset(
    name.format(function)
    for function in ("add", "sub", "mul", "div", "truediv", "true_divide", "pow", "tensor", "full")
    for name in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
)
"""Names of functions whose ints are values; those of other functions are sizes and indices."""
_OF_DATA = frozenset(
    (
        *("nonzero", "argwhere", "masked_select", "unique", "unique_dim", "unique_consecutive", "bincount"),
        *("repeat_interleave", "one_hot", "coalesce", "to_sparse"),
    )
)
"""Names of functions whose result has a size that depends on values."""
_LEAVES = Tensor, int, float, str, type(None), torch.dtype, torch.device
_NO_ARGUMENTS: Mapping[str, Any] = {}
SCALING = frozenset(
    name.format(function)
    for function in ("mul", "multiply", "div", "divide", "true_divide", "truediv")
    for name in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
)
"""Names of functions that multiply or divide."""
_MEANS = (
    "return (sum, n) of n samples for the mean over the global batch; or (sum * batch_size, n) for its sum, as plain"
    " PyTorch gives it; or divide by the number of samples, such as len(targets)"
)
_READS = 8
"""Most reads of sizes in a body that are recorded (a guess)."""


class LossWatch(EnteredMode):
    """Base of torch-function modes that follow values through a script's calls of PyTorch, and check its losses.

    A mode is entered (``begin``) for the code that computes the loss of one micro-batch, the loss function or the body
    of a custom loop; ``check`` is called with the loss, and ``end`` leaves the mode. Subclasses decide which steps are
    checked, and on which values a loss must not depend.

    Args:
        run: the run.

    Attributes:
        size_lines: the script's lines, as ``FILE:LINE``, at most eight, that have read the size of a tensor with a row
            for each sample of the present micro-batch; lines of the model's forward are left out.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._rows, self._by_batch, self._reads_sizes = 0, False, False
        # Numbers of samples, and parts of the global batch, by which the script has scaled in lines that read a size.
        self._by_sizes = set[float]()
        # Numbers by which the script has scaled, and those of them that are not written in its source.
        self._factors, self._computed = set[float](), set[float]()
        self._statistics = BatchStatistics()
        self.size_lines: list[str] = []
        mode = ref(self)  # a script that keeps a number keeps no run
        self._numbers = FollowedNumbers(lambda: (found := mode()) is not None and found._active)

    @abstractmethod
    def begin(self, micro_batch: MicroBatch, batch: Any) -> None:
        """Enter this function mode for the code that computes the loss of a micro-batch; ``end`` leaves it.

        Within the mode PyTorch hands it each call of a function on tensors. The last action of an implementation is a
        call of ``enter``.

        Args:
            micro_batch: the micro-batch; its logical worker (fixed share of the global batch) is read.
            batch: its samples, as the code gets them.
        """

    def begin_body(self, micro_batch: MicroBatch) -> None:
        """Enter this function mode for the body of a custom loop, as ``begin`` does, and empty ``size_lines``.

        Args:
            micro_batch: the micro-batch whose body follows.
        """
        self._follow(micro_batch, micro_batch.batch)

    def _follow(self, micro_batch: MicroBatch, batch: Any) -> None:
        self._rows, self.size_lines = micro_batch.samples, []
        self._by_batch, self._by_sizes = False, set[float]()
        # Other leaves, such as lists, may tell the script how many samples there are.
        self._reads_sizes = not all(isinstance(leaf, Tensor) for leaf in tree_leaves(batch))
        self._factors, self._computed = set(), set()
        self._statistics = BatchStatistics(micro_batch.samples, memories_of(batch_tensors(batch)))
        self.begin(micro_batch, batch)

    def note_call(self, func: Any, args: Sequence[Any]) -> None:
        """Record, before a call of PyTorch, whether it reads a tensor's size, and the numbers by which it scales.

        A read of a size adds the script's line to ``size_lines`` if the tensor has a row for each sample of the present
        micro-batch. Reads in the model's forward, which has hundreds, and in tutti's own code are left out. At most
        eight lines are kept for a micro-batch. Of other calls the mode records whether one had the global batch's
        number of samples, or its reciprocal, as a positional argument, and by which numbers the script has multiplied
        or divided outside of the model's forward. ``check_divisor`` reads these records.

        Args:
            func: the function of PyTorch that is called.
            args: its positional arguments; for a read of a size the first is the tensor.
        """
        self._run.custom.second_updates.note_call(func, args)
        if func is functional.kl_div:
            # It reads a size within PyTorch, by which ``reduction="batchmean"`` divides.
            self._reads_sizes = True
            self._computed.add(float(self._rows))
        models = (self._run.model, *self._run.replica.parts)
        if func not in SIZES:
            batch = self._run.feed.contract.batch
            numbers = [each for each in args if isinstance(each, int | float | np.number) and type(each) is not bool]
            self._by_batch |= any(each in (batch, 1 / batch) for each in numbers)
            if numbers and getattr(func, "__name__", "") in SCALING and not within_call_of(models):
                self._factors.update(map(float, numbers))
                computed = set(map(float, numbers)) - written_numbers()
                self._computed.update(computed)
                sizes = {float(self._rows)}.intersection(map(float, numbers))
                if self._rows < batch:
                    # A part of the batch that the source states, such as 0.5, may be a formula's constant.
                    sizes |= {self._rows / batch} & computed
                if sizes and script_line() in self.size_lines:
                    self._by_sizes |= sizes
            return
        if len(self.size_lines) == _READS or not self._rows:
            return
        if not (args and isinstance(args[0], Tensor) and self._rows in (shape := args[0].shape)):
            return
        by_sample = shape[:1] == (self._rows,)
        if (by_sample or not self._reads_sizes) and asked_by_script(__name__) and not within_call_of(models):
            self._reads_sizes = True
            if by_sample:
                self.size_lines.append(script_line())

    def unfit_gradients(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], UsageError] | None:
        """Return why gradients that a call computes by ``torch.autograd.grad`` cannot be averaged over micro-batches.

        A subclass asks before the call, and gives the answer and the gradients to ``CustomLoop.mark_gradients`` after
        it. It makes the call itself: other modes look for the script above the frame that calls them.

        Args:
            func: the function of PyTorch that is about to be called.
            args, kwargs: its arguments.

        Returns:
            A function that makes the error; None for other calls, and gradients of a mean over samples.
        """
        loss = number_of_gradients(func, args, kwargs)
        if loss is None or not any(isinstance(each, nn.Parameter) for each in tree_leaves(args[1])):
            return None
        return self._run.custom.unfit_loss(loss)

    def note_result(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record, after a call of PyTorch, the means and sums over samples that have no gradient (``BatchStatistics``).

        ``check_divisor`` refuses a loss that is divided by such a statistic.

        Args:
            name: the function's name.
            args: its positional arguments.
            result: what it has returned.
        """
        if self._rows and (name not in VALUES or asked_by_script(__name__)):
            with FunctionModesDisabled():
                self._statistics.note(name, args, result)

    def check_divisor(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raise UsageError if constants or divisors in a loss make it no mean over the micro-batch's samples.

        ``(output - target).square().sum() / 64`` is the mean over a global batch of 64 samples. For a micro-batch it is
        smaller than the micro-batch's mean, for which tutti takes a scalar loss. ``0.5 * output.sum()`` grows with the
        samples, and ``(weights * losses).mean() / weights.mean()`` divides by a statistic of the micro-batch alone.
        Nothing is checked if the micro-batch is the whole global batch. Constants are not judged if the script has read
        the size of a tensor with a dimension of the samples, or if the batch has leaves that are no tensors, because
        the script may then mean to divide by the samples. Does nothing outside of ``begin`` and ``end``. Not
        collective.

        Args:
            loss: the loss of the micro-batch, or another result of a loss function; a result that is no tensor passes.
            micro_batch: the micro-batch.

        Raises:
            UsageError: the loss is such a sum or such a ratio, or a mean times the micro-batch's number of samples;
                ``compare_scales`` finds other constants than in another micro-batch; or the loss is computed from
                tensors that ranks have gathered, and a rank computes several micro-batches of a global batch.
        """
        batch, samples = self._run.feed.contract.batch, micro_batch.samples
        examined = self._active and samples and not micro_batch.whole and isinstance(loss, Tensor)
        if examined and batch != samples:
            # The mode records reads of values by the script alone.
            with FunctionModesDisabled():
                self._check_divisor(loss, micro_batch)

    def _check_divisor(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        batch, samples = self._run.feed.contract.batch, micro_batch.samples
        if is_gathered(loss.grad_fn):
            if self._run.feed.most_micro_batches(batch) > 1:
                self._refuse_part_gathered()
            return
        scaled = list(scaled_reductions(loss.grad_fn, samples))
        for each in scaled:
            what = remedy = ""
            if self._is_divided_by_batch(each, samples):
                what = f"a sum over {counted(samples, 'sample')}, divided by {batch}, the global batch's size"
                remedy = (
                    "divide by the number of samples of the micro-batch, such as len(targets), or give (sum, count)"
                )
            elif (factor := self._times_samples(each, samples)) is not None:
                kind = "number of samples" if factor == samples else "part of the global batch"
                what = f"a mean over {counted(samples, 'sample')} times {factor:g}, the micro-batch's {kind}"
                remedy = (
                    "give the mean, or (loss * len(targets), len(targets)) for it; if plain PyTorch's factor is meant,"
                    f" multiply by {batch * factor / samples:g}, that of the global batch"
                )
            elif (factor := self._constant_factor(each, samples)) is not None:
                what, remedy = f"a sum over {counted(samples, 'sample')} times {factor:g}, and no mean", _MEANS
            elif (number := self._computed_divisor(each)) is not None and not _is_count(loss, micro_batch, number):
                what = f"divided by {number:g}, a mean or a sum over the micro-batch's samples"
                remedy = (
                    "return (sum, count), with what divides the sum as the count, such as ((weights * losses).sum(),"
                    " weights.sum())"
                )
            if what:
                self._refuse_divisor(what, remedy)
        may_divide = partial(self._statistics.may_divide, reads_sizes=self._reads_sizes)
        if undivided_sum(loss.grad_fn, samples, may_divide, self._may_be_size):
            check_adds_up(loss.grad_fn, micro_batch)  # names a ratio of sums, such as a dice loss
            self._refuse_divisor(f"a sum over {counted(samples, 'sample')}, and no mean", _MEANS)
        self.compare_scales(loss, micro_batch, scaled)

    def compare_scales(self, loss: Tensor, micro_batch: MicroBatch, scaled: Sequence[Scaled]) -> None:
        """Compare the constants that scale a loss with those of other micro-batches. The base class compares nothing.

        Called by ``check_divisor``.

        Args:
            loss: the loss of the micro-batch.
            micro_batch: the micro-batch.
            scaled: the means and sums over samples in the loss, with their constants.

        Raises:
            UsageError: the loss of another micro-batch of the same logical worker has other constants.
        """

    def _refuse_part_gathered(self) -> NoReturn:
        raise UsageError(
            "the loss is computed from tensors that ranks have gathered, and a rank computes several micro-batches",
            where=f"step {self._run.global_step + 1}, {script_line()}",
            why="a gather brings one micro-batch of each rank together, which are not all samples of the global batch:"
            " the loss would depend on the number of devices",
            remedy="take as many workers as devices, without micro_batch",
        )

    def _refuse_divisor(self, what: str, remedy: str) -> NoReturn:
        raise UsageError(
            f"the loss is {what}",
            where=f"step {self._run.global_step + 1}, {script_line()}",
            why="this micro-batch is a part of the global batch, and tutti takes a scalar for the mean over the"
            " micro-batch",
            remedy=remedy,
        )

    def _is_divided_by_batch(self, scaled: Scaled, samples: int) -> bool:
        """Return whether a sum is divided by the global batch's size, a constant, and by no multiple of the samples."""
        batch = self._run.feed.contract.batch
        # A factor of the samples may already be divided by their number.
        may_divide = partial(self._statistics.may_divide, reads_sizes=self._reads_sizes)
        is_weighted = bool(scaled.weights) and not scaled.is_mean and not any(map(may_divide, scaled.weights))
        if not self._by_batch or not (scaled.is_sum or is_weighted):
            return False
        if self.size_lines and not self._is_written(batch):
            return False
        others = [each for each in scaled.divisors if not math.isclose(each, batch)]
        return len(others) < len(scaled.divisors) and all(each % samples for each in others)

    def _times_samples(self, scaled: Scaled, samples: int) -> float | None:
        """Return the factor on a mean that is the micro-batch's number of samples, or its part of the global batch.

        Only a number by which a line scales that also reads a size; None for other factors, and where the loss is also
        divided by the number as often.
        """
        for number in self._by_sizes if scaled.is_mean else ():
            as_factor, as_divisor = (
                sum(math.isclose(float(each), number) for each in constants)
                for constants in (scaled.factors, scaled.tensors)
            )
            if as_factor > as_divisor:
                return number
        return None

    def _constant_factor(self, scaled: Scaled, samples: int) -> float | None:
        """Return the factor on a sum over samples if it is a constant of the script and makes no mean; else None."""
        if any(map(self._may_be_size, scaled.divisors)) or not scaled.is_sum or not scaled.divisors:
            return None
        divisor = math.prod(scaled.divisors)
        constants = _with_inverses(self._factors)
        of_script = any(_is_among(each, constants) for each in scaled.divisors)
        # Two samples, or one, are rather a half or a one of the formula than a size.
        means = {samples, scaled.elements} - {1, 2}
        is_mean = any(math.isclose(each, mean, rel_tol=1e-6) for each in (*scaled.divisors, divisor) for mean in means)
        return 1 / divisor if of_script and not is_mean else None

    def _computed_divisor(self, scaled: Scaled) -> float | None:
        """Return the value of a mean or sum over samples that divides a loss; None without one.

        Numbers that stand in the script's source are passed over.
        """
        divisors = tuple(each for each in scaled.divisors if not self._is_written(each))
        return self._statistics.divisor_of(scaled._replace(divisors=divisors))

    def _may_be_size(self, number: float) -> bool:
        """Return whether a divisor may be a number of samples: a size was read, and the source has no such number."""
        return self._reads_sizes and not self._is_written(number)

    def _is_written(self, number: float) -> bool:
        """Return whether the script has scaled by a number, or its inverse, that stands in its source."""
        computed = _with_inverses(self._computed)
        return _is_among(number, _with_inverses(self._factors)) and not _is_among(number, computed)

    @abstractmethod
    def check(self, loss: Any) -> None:
        """Check the values on which the loss of the present micro-batch depends.

        Abstract. Does nothing outside of ``begin`` and ``end``. Not collective. A logical worker, below, is a fixed
        share of the global batch.

        Args:
            loss: return value of the loss function, of which a tuple's first element is the loss; or the loss that the
                script passed to ``run.backward``.

        Raises:
            UsageError: the loss depends on values that this micro-batch's logical worker would not have on a device of
                its own, such as values computed from another worker's samples.
        """

    def note_gradients(self, gradients: Iterable[Tensor], complete: bool) -> None:
        """Record the gradients that ``run.backward`` has left in ``.grad``. The base class does nothing.

        Subclasses follow tensors that the script computes from the gradients.

        Args:
            gradients: the tensors.
            complete: whether they are gradients of the global batch, or the part of the present micro-batch.
        """

    def check_edits(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise UsageError if the script's edits of gradients depend on one micro-batch; the base class checks nothing.

        Called before the update. Not collective.

        Args:
            gradients: the edited gradients of the global batch, by the parameters' names.

        Raises:
            UsageError: an edit depends on values that are not the same for every micro-batch of this rank.
        """

    def watched(self, loss: LossFn, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> LossFn:
        """Return a function that calls the loss function of ``run.step`` within this mode, and checks each result.

        A batch that is not the object ``batch`` of a micro-batch in ``work`` is passed to ``loss`` without a check.

        Args:
            loss: the loss function.
            work: pairs (index of a logical worker, a fixed share of the global batch; its micro-batches) of this rank
                in the step.

        Returns:
            A function with the arguments and the result of ``loss``, which raises UsageError as ``check`` and
            ``check_divisor``.
        """
        # A rank with several stages calls it once for each, in the order of its schedule.
        by_batch = {id(micro_batch.batch): micro_batch for _, micro_batches in work for micro_batch in micro_batches}

        def watch(model: Any, batch: Any) -> Any:
            if (micro_batch := by_batch.get(id(batch))) is None:
                return loss(model, batch)
            self._follow(micro_batch, batch)
            try:
                result = loss(model, batch)
                self.check(result)
                self.check_divisor(result, micro_batch)
            finally:
                self.end()
            return result

        return watch

    def backward(self) -> AbstractContextManager[None]:
        """Return a context manager for ``run.backward``, in which this mode follows no tensors.

        Subclasses may follow them.
        """
        return self.updating()

    def updating(self) -> AbstractContextManager[None]:
        """Return a context manager for a backward or an update of parameters, in which this mode follows no tensors.

        An update depends on the samples of all logical workers (fixed shares of the global batch); without the context
        a parameter would count as computed from the samples of one worker. Outside of ``begin`` and ``end`` it does
        nothing.
        """
        return self._aside() if self._active else nullcontext()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Leave this function mode, which would otherwise pass on each of a thousand calls of PyTorch."""
        with self._inactive(), function_mode_aside(self):
            yield

    @contextmanager
    def _inactive(self) -> Iterator[None]:
        self._active = False
        try:
            yield
        finally:
            self._active = True


def _is_count(loss: Tensor, micro_batch: MicroBatch, number: float) -> bool:
    """Return whether a number is the count of a loss, by which the micro-batch is weighted."""
    count = loss_count(loss, micro_batch)
    return count is not None and math.isclose(float(count), number, rel_tol=1e-6)


def _with_inverses(numbers: Iterable[float]) -> set[float]:
    return {each for number in numbers if number for each in (number, 1 / number)}


def _is_among(number: float, others: Iterable[float]) -> bool:
    return any(math.isclose(number, each, rel_tol=1e-6) for each in others)


class WatchHook(OwnedHook):
    """An ``OwnedHook`` (tutti's hook on a module) that does nothing within ``torch.func`` transforms, such as ``vmap``.

    Tensors within these transforms have no storage, by which the hook of a ``LossWatch`` recognises tensors.
    """

    def __call__(self, *args: Any) -> None:
        """Call the wrapped function, outside of ``torch.func``, with the arguments that PyTorch gives the hook."""
        if functorch_level() is None:
            super().__call__(*args)


def tensor_of_loss(loss: Any) -> Tensor | None:
    """Return the loss tensor in a loss function's result: the result itself, or the first element of a tuple or list.

    Args:
        loss: the result.

    Returns:
        The tensor; None if the loss is no tensor.
    """
    total = loss[0] if isinstance(loss, tuple | list) and loss else loss
    return total if isinstance(total, Tensor) else None


def leaves_of_call(args: Sequence[Any], kwargs: Mapping[str, Any] = _NO_ARGUMENTS) -> list[Any]:
    """Return the arguments of a call of PyTorch, or its result, with the leaves of nested lists, tuples and dicts.

    Args:
        args: the positional arguments; ``(result,)`` for the leaves of a result.
        kwargs: the named arguments.
    """
    found: list[Any] = []
    for each in (*args, *kwargs.values()):
        if isinstance(each, _LEAVES):
            found.append(each)
        else:
            found += tree_leaves(each)
    return found


def reads_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Return whether the result of a call of PyTorch reveals values of its arguments' elements to the script.

    It does if it has Python numbers, texts or a NumPy array, or if its size depends on the values, as that of
    ``nonzero`` and of an index by a mask does.

    Args:
        name: the function's name. Functions that read metadata alone, such as ``size``, must not be passed.
        args, kwargs: its arguments.
        result: what it has returned.
    """
    if name in _OF_DATA or (name == "where" and len(args) + len(kwargs) == 1):
        return True
    if name == "__getitem__" and any(_is_mask(leaf) for leaf in tree_leaves(args[1:])):
        return True
    has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves_of_call(args, kwargs))
    return has_tensors and any(
        isinstance(leaf, int | float | complex | str | np.ndarray) for leaf in leaves_of_call((result,))
    )


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def batch_tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch: those in containers, and in attributes of objects such as graphs."""
    for leaf in tree_leaves(batch):
        for each in (leaf, *vars(leaf).values()) if hasattr(leaf, "__dict__") else (leaf,):
            if isinstance(each, Tensor):
                yield each
