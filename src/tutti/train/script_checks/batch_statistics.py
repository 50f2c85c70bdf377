"""Find means and sums over a micro-batch's samples, such as the sum of a mask, by which a script divides its loss."""

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
VALUES = frozenset((*_READS, "__bool__", "tolist", "numpy", "__array__"))
"""Names of functions that return values of a tensor."""


class BatchStatistics:
    """Records statistics of a micro-batch: means and sums over its samples without gradient, such as a mask's sum.

    A loss that is divided by a statistic is a ratio of two functions of all samples: the mean of the micro-batches'
    ratios is not that of the global batch. A sum of ones, and a mean of ones, are the same in each full micro-batch,
    and count as constants. A scalar that is computed from a statistic, as by ``clamp(min=1)``, is a statistic, too.

    Args:
        samples: number of samples of the micro-batch; 0 records nothing.
        batch: storages of the micro-batch's tensors.

    Attributes:
        reads_values: whether the script has read values of tensors that were computed from the batch.
        reads_others: whether the script has read values of a tensor of another origin, such as a random draw.
    """

    def __init__(self, samples: int = 0, batch: Iterable[StorageWeakRef] = ()) -> None:
        self._samples = samples
        self.reads_values = self.reads_others = False
        # Whether values in memory were divided by a number of samples, or by a sum over them; None: perhaps.
        self._divided = MemoryRecords[bool | None]()
        self._divided |= dict.fromkeys(batch, False)
        # The value that each has where all elements are one, and the memory of the samples it was computed from.
        self._found = MemoryRecords[tuple[float, StorageWeakRef]]()
        self._numbers: dict[float, float] = {}
        self._normalised, self._uneven = set[StorageWeakRef | None](), set[StorageWeakRef | None]()

    def note(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Record what a call of PyTorch has computed from the micro-batch, for ``divisor_of`` and ``may_divide``.

        Recorded are statistics (means and sums over samples without gradient), tensors that are divided by a sum over
        samples, and whether the call reads values. To be called after the call, with no function mode active.

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
        if name in VALUES:
            is_known = self._divided.get(source) is not None
            self.reads_values, self.reads_others = self.reads_values or is_known, self.reads_others or not is_known
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
                self._found.setdefault(made, found)
        else:
            of_samples = name in ("softmax", "softmin") and given.dim() == 1 and len(given) == self._samples
            if of_samples or (name in _DIVISIONS and self._is_of(source, args[1:2])):
                self._normalised.add(made)
                # The share of a single sample is one, whatever its weight.
                if self._samples == 1 and not of_samples and self._divisor_beside_ones(args[1]) is not None:
                    self._uneven.add(made)
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
        # Of a tensor that no call of the script on the batch has made it is not known.
        pairs = [(memory_of(each), False if each.requires_grad else None) for each in tensors]
        before = [other if key is None else self._divided.get(key, other) for key, other in pairs]
        is_divided = (name in _NORMALISING and not _by_row(result)) or by_size or by_sum or True in before
        self._divided[memory] = True if is_divided else None if None in before else False
        self._divided.drop_freed()

    def may_divide(self, weights: Tensor, reads_sizes: bool) -> bool:
        """Return whether weights of the samples' losses may be divided by the number of samples, or a sum over them.

        Args:
            weights: the weights, a tensor of several elements; or a divisor of the loss, a tensor of one element, for
                which the result is whether it is a sum over samples.
            reads_sizes: whether the script has read a size of the micro-batch. Returned as the result for weights of
                several elements that were not computed from the batch, such as class weights.
        """
        if weights.numel() == 1:
            found = self._statistic(weights)
            return found is not None and found[0] != 1.0
        memory = memory_of(weights)
        is_divided = None if memory is None else self._divided.get(memory)
        return reads_sizes if is_divided is None else is_divided

    def is_of_batch(self, value: Tensor) -> bool:
        """Return whether a tensor was computed from the batch and the model alone, and not from draws or constants.

        Args:
            value: the tensor.
        """
        memory = memory_of(value)
        return memory is not None and self._divided.get(memory) is not None

    def _is_of(self, source: StorageWeakRef, divisors: Sequence[Any]) -> bool:
        """Return whether any of these divisors is a statistic that was computed from the tensor with this memory."""
        return any(found is not None and found[1] == source for found in map(self._statistic, divisors))

    def _statistic(self, value: Any) -> tuple[float, StorageWeakRef] | None:
        """Return the record of a value that is a statistic in a tensor; None for any other value."""
        memory = memory_of(value) if isinstance(value, Tensor) else None
        return None if memory is None else self._found.get(memory)

    def divisor_of(self, scaled: Scaled) -> float | None:
        """Return the value of a statistic by which a loss, or a tensor of weights in it, is divided; None without one.

        A statistic is a mean or sum over the micro-batch's samples without gradient, such as a mask's sum.

        Args:
            scaled: a mean or sum over samples in the loss, and the constants that scale it.
        """
        for tensor in scaled.tensors:
            if (divisor := self._divisor_beside_ones(tensor)) is not None:
                return divisor
        for number in scaled.divisors if scaled.is_sum or scaled.weights else ():
            ones = next((self._numbers[each] for each in self._numbers if math.isclose(each, number)), number)
            if not math.isclose(ones, number, rel_tol=1e-5):
                return number
        for weights in scaled.weights:
            memory = memory_of(weights)
            if memory in self._uneven or (memory in self._normalised and float(weights.max() - weights.min()) > 0):
                return float(1 / weights.max())
        return None

    def _divisor_beside_ones(self, value: Any) -> float | None:
        """Return a statistic's value, unless it is the value for samples that are all one; None for other tensors."""
        found = self._statistic(value)
        return None if found is None or math.isclose(float(value), found[0], rel_tol=1e-5) else float(value)


def _by_row(result: Tensor) -> bool:
    """Return whether a function has divided each row by a sum over that row, and no row by a sum over the rows."""
    rows = result.detach().flatten(1) if result.dim() > 1 else result.detach()[None, :0]
    sums = ((each.sum(1), each.sum(1)[:1]) for each in (rows, rows.exp(), rows.square()))
    return rows.numel() > 0 and any(bool(each.isclose(first, rtol=1e-4).all()) for each, first in sums)
