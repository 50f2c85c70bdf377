"""Means and sums over the samples of a micro-batch by which a script divides its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.parallel.ddp.loss_shape import Scaled
from tutti.train.script_checks.storage_records import MemoryRecords, memory_of

_REDUCTIONS = frozenset(("sum", "mean", "nansum", "nanmean", "count_nonzero"))
"""Names of functions that add up elements."""
_DIVISIONS = frozenset(("div", "divide", "true_divide", "__truediv__"))
_MULTIPLICATIONS = frozenset(("mul", "multiply", "__mul__", "__rmul__", "mul_", "multiply_", "__imul__"))
_IN_PLACE = frozenset(("div_", "divide_", "true_divide_", "__itruediv__", "__idiv__"))
_NORMALISING = frozenset(("softmax", "log_softmax", "softmin", "normalize"))
"""Names of functions that may divide elements by a sum of all samples."""
_READS = frozenset(("item", "__int__", "__float__"))
"""Names of functions that return the number of a tensor of one element."""


class BatchStatistics:
    """Records means and sums over samples that need no gradient, such as the sum of a mask or of weights.

    A loss that is divided by such a number is a ratio of two functions of all samples: the mean of the micro-batches'
    ratios is not that of the global batch. A sum of ones, and a mean of ones, are the same in each full micro-batch,
    and count as constants. Numbers that are computed from a statistic alone, such as with a smallest value, are
    statistics, too.

    Args:
        samples: number of samples of the micro-batch; 0 records nothing.
        batch: memory of the micro-batch's tensors.
    """

    def __init__(self, samples: int = 0, batch: Iterable[StorageWeakRef] = ()) -> None:
        self._samples = samples
        # Whether values in memory may have been divided by a number of samples, or by a sum over them.
        self._divided = MemoryRecords[bool]()
        self._divided |= dict.fromkeys(batch, False)
        # The value that each has where all elements are one, and the memory of what it was computed from.
        self._found = MemoryRecords[tuple[float, StorageWeakRef | None]]()
        self._numbers: dict[float, float] = {}
        self._normalised = set[StorageWeakRef | None]()

    def note(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record the result of a call of PyTorch if it is a statistic, or weights that were divided by their own sum.

        To be called with no function mode active.

        Args:
            name: the function's name.
            args: its positional arguments.
            result: what it has returned.
        """
        given = args[0] if args and isinstance(args[0], Tensor) else None
        source = None if given is None or not self._samples else memory_of(given)
        if given is None or source is None:
            return
        self._note_division(name, args, result)
        if name in _READS:
            if (found := self._found.get(source)) is not None:
                self._numbers[float(result)] = found[0]
            return
        made = memory_of(result) if isinstance(result, Tensor) and not result.requires_grad else None
        if made is None:
            return
        if name in _REDUCTIONS:
            if result.dim() == 0 and given.dim() and not len(given) % self._samples:
                self._found[made] = (1.0 if "mean" in name else float(given.numel())), source
        elif result.dim() == 0:
            known = (self._statistic(each) for each in args if isinstance(each, Tensor))
            if (found := next(filter(None, known), None)) is not None:
                self._found.setdefault(made, (found[0], None))
        elif name in _DIVISIONS and self._is_of(source, args[1:2]):
            self._normalised.add(made)
        self._found.drop_freed()

    def _note_division(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record whether the result of a call may have been divided by a number of samples, or by a sum over them."""
        memory = memory_of(result) if isinstance(result, Tensor) else None
        if memory is None:
            return
        scales = name in _DIVISIONS | _IN_PLACE | _MULTIPLICATIONS
        numbers = [abs(each) for each in args if type(each) in (int, float) and each] if scales else []
        by_size = any(
            each >= 1 and not each % self._samples for number in numbers for each in (number, round(1 / number, 6))
        )
        tensors = [each for each in args if isinstance(each, Tensor)]
        found = [self._statistic(each) for each in tensors[1:]] if scales else []
        by_sum = any(each is not None and each[0] != 1.0 for each in found)
        # Tensors that no call of the script has made, such as class weights, may be anything.
        pairs = [(memory_of(each), not each.requires_grad) for each in tensors]
        of_divided = any(other if key is None else self._divided.get(key, other) for key, other in pairs)
        self._divided[memory] = name in _NORMALISING or by_size or by_sum or of_divided
        self._divided.drop_freed()

    def may_divide(self, weights: Tensor, reads_sizes: bool) -> bool:
        """Return whether a constant tensor of several elements, such as weights, may already include 1 / samples.

        Args:
            weights: the tensor, a factor of the losses.
            reads_sizes: the result for a tensor that no call on a tensor of the batch has made: whether the script has
                read the number of samples of the micro-batch.
        """
        memory = memory_of(weights)
        return self._divided.get(memory, reads_sizes) if memory is not None else reads_sizes

    def _is_of(self, source: StorageWeakRef, divisors: Sequence[Any]) -> bool:
        """Return whether a divisor is a statistic that was computed from the tensor with this memory."""
        return any(found is not None and found[1] == source for found in map(self._statistic, divisors))

    def _statistic(self, value: Any) -> tuple[float, StorageWeakRef | None] | None:
        """Return the record of a value that is a statistic in a tensor; None for any other value."""
        memory = memory_of(value) if isinstance(value, Tensor) else None
        return None if memory is None else self._found.get(memory)

    def divisor_of(self, scaled: Scaled) -> float | None:
        """Return the statistic by which a mean or a sum over samples is divided within a loss; None for no statistic.

        Args:
            scaled: the mean or sum, with its divisors.
        """
        for tensor in scaled.tensors:
            found = self._statistic(tensor)
            if found is not None and not math.isclose(float(tensor), found[0], rel_tol=1e-5):
                return float(tensor)
        for number in scaled.divisors if scaled.is_sum or scaled.weights else ():
            ones = next((self._numbers[each] for each in self._numbers if math.isclose(each, number)), number)
            if not math.isclose(ones, number, rel_tol=1e-5):
                return number
        for weights in scaled.weights:
            if memory_of(weights) in self._normalised and float(weights.max() - weights.min()) > 0:
                return float(1 / weights.max())
        return None
