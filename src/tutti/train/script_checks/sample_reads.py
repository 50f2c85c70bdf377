"""Tell whether values that a script reads are of single samples, or of all of a micro-batch's, such as their mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from tutti.errors import UsageError
from tutti.parallel.ddp.loss_count import loss_count
from tutti.parallel.ddp.loss_shape import is_gathered
from tutti.train.script_checks.loss_watch import batch_tensors, leaves_of_call, reads_values
from tutti.train.script_checks.sample_branches import Stack, deciding_condition, script_stack
from tutti.train.script_checks.storage_records import TensorSet
from tutti.types.micro_batch import MicroBatch

_REDUCTIONS = frozenset(
    (
        *("sum", "mean", "nansum", "nanmean", "std", "var", "std_mean", "var_mean", "median", "nanmedian", "mode"),
        *("max", "min", "amax", "amin", "aminmax", "quantile", "nanquantile", "kthvalue", "logsumexp", "prod", "norm"),
        *("bincount", "histc", "count_nonzero"),
    )
)
"""Names of functions whose result may be of all samples, and have elements of its own, such as one for each class."""
_CHOICES = frozenset(("select", "unbind", "split", "chunk", "tensor_split", "narrow"))
"""Names of functions that take a part of a tensor by its place along a dimension."""
_MOST = 8
"""Most reads of values whose lines are recorded in a micro-batch (a guess)."""
_DISTINCT = frozenset(("unique", "unique_dim", "unique_consecutive"))


class SampleReads:
    """Tells of which samples the values are that a script has read of the tensors of a micro-batch.

    A number that all samples of a micro-batch decide, such as the share of a class, would on one device be one of the
    global batch. A number of one sample, such as its weight, is the same there. A function mode calls ``note`` after
    each call of PyTorch.

    Args:
        micro_batch: the micro-batch; None, or one without samples, records nothing.

    Attributes:
        micro_batch: as given.
        of_all: whether the script has read a value of all samples of the micro-batch.
        of_others: whether the script has read a value of single samples, or of a tensor of another origin.
        last_of_all: whether the last value that it has read is of all samples.
    """

    def __init__(self, micro_batch: MicroBatch | None = None) -> None:
        self.micro_batch, self._samples = micro_batch, 0 if micro_batch is None else micro_batch.samples
        self.of_all = self.of_others = self.last_of_all = False
        # Tensors of samples that were chosen by their places, and those without a row for each sample.
        self._chosen, self._reduced = TensorSet(), TensorSet()
        # Tensors that the code itself has computed from the micro-batch's, which a collective's result is not.
        self._own = TensorSet()
        self._own.update(() if micro_batch is None else batch_tensors(micro_batch.batch))
        # Where values of all samples were read, and whether as a condition.
        self._places: list[tuple[Stack, bool]] = []

    @property
    def are_of_all(self) -> bool:
        """Whether all values that the script has read, one at least, are of all samples of the micro-batch."""
        return self.of_all and not self.of_others

    def is_mean(self, loss: Any) -> bool:
        """Return whether a loss is taken for the mean over samples, so that no number of the micro-batch may scale it.

        False for tuples, with which a script declares what its loss counts; for losses that are divided by a count,
        such as that of tokens; and for losses of tensors that ranks have gathered.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.
        """
        if self.micro_batch is None or not isinstance(loss, Tensor) or is_gathered(loss.grad_fn):
            return False
        try:
            count = loss_count(loss, self.micro_batch)
        except UsageError:
            # Raised again where the loss is read.
            return False
        return count is None or float(count) == self._samples

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, of_samples: bool) -> None:
        """Record, after a call of PyTorch, whether it reads values of all samples, or of single samples.

        To be called for calls by the script or the model, not for those in tutti's own code.

        Args:
            name: the function's name; functions that read metadata alone, such as ``size``, must not be passed.
            args, kwargs: its arguments.
            result: what it has returned.
            of_samples: whether an argument is computed from samples.
        """
        if not self._samples:
            return
        given = [leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, Tensor)]
        # Without generators, whose steps would count as calls in watched steps.
        chosen, reduced, own = False, bool(given), False
        for each in given:
            chosen = chosen or each in self._chosen
            reduced = reduced and (each.dim() == 0 or each in self._reduced)
            own = own or each in self._own
        made = [leaf for leaf in leaves_of_call((result,)) if isinstance(leaf, Tensor)]
        if not made:
            if reads_values(name, args, kwargs, result):
                self.last_of_all = of_samples and reduced and not chosen
                self.of_others |= not self.last_of_all
                self.of_all |= not self.of_others
                if self.last_of_all and own and len(self._places) < _MOST:
                    self._places.append((script_stack(), type(result) is bool))
            return
        if own:
            self._own.update(made)
        if not of_samples:
            return
        if chosen or name in _DISTINCT or (not reduced and _chooses(name, args, kwargs)):
            self._chosen.update(made)
        elif reduced or (name in _REDUCTIONS and not any(self._samples in each.shape for each in made)):
            self._reduced.update(made)

    def follow(self, given: Iterable[Tensor], result: Any) -> None:
        """Record whether the tensors in a call's result come from the micro-batch, as they do if an argument does.

        ``check_branches`` refuses conditions on numbers of such tensors only.

        Args:
            given: the tensors among the call's arguments.
            result: what the call has returned.
        """
        if any(each in self._own for each in given):
            self._own.update(each for each in leaves_of_call((result,)) if isinstance(each, Tensor))

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Record that tensors hold values of all ranks from now on, so that conditions on them are allowed.

        Called for a collective of the script. Tensors of this micro-batch alone are those whose conditions
        ``check_branches`` refuses.

        Args:
            tensors: arguments of the collective, which may write into them; values that are no tensors are ignored.
        """
        self._own.discard(tensors)

    def check_branches(self, loss: Any, step: int) -> None:
        """Check that no condition of the script on a number of all samples of the micro-batch decides on its loss.

        An example is ``if loss.item() > 2``: on one device the number would be one of the global batch.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.
            step: the step, from 1.

        Raises:
            UsageError: such a condition decides on the loss (``deciding_condition``), the loss is a mean over samples,
                and the micro-batch is only a part of the global batch.
        """
        if self.micro_batch is None or self.micro_batch.whole or not self._places or not self.is_mean(loss):
            return
        if line := next(filter(None, (deciding_condition(*place) for place in self._places)), ""):
            raise UsageError(
                "a condition on a number of all samples of one micro-batch decides on the loss",
                where=f"step {step}, {line}",
                why="a micro-batch is a part of the global batch: the condition would hold for some parts, and not for"
                " the whole",
                remedy="decide for each sample by itself (torch.where), by values of earlier steps that are the same"
                " for all (run.stats), or by run.global_step; or take one worker without micro_batch; or, with as many"
                " workers as devices and one micro-batch each, exchange the values over ranks first (tutti.allreduce);"
                " for a decision in each micro-batch, as gradient accumulation by hand makes it, return (loss * n, n)"
                " of n samples",
            )


def refuse_number(step: int, line: str) -> NoReturn:
    """Raise UsageError for a loss that depends on a number of all samples of one micro-batch.

    Args:
        step: the step, from 1.
        line: the script's line that gives the number to PyTorch.
    """
    raise UsageError(
        "the loss depends on a Python number that the script has computed from all samples of one micro-batch",
        where=f"step {step}, {line}",
        why="a micro-batch is a part of the global batch: its number is another one than that of all samples, and than"
        " those of other micro-batches",
        remedy="compute it for each sample by itself; or take one worker without micro_batch; or, with as many workers"
        " as devices and one micro-batch each, exchange the values over ranks first (tutti.allreduce, tutti.allgather);"
        " for the number of each micro-batch, as gradient accumulation by hand gives it, return (loss * n, n) of n"
        " samples",
    )


def _chooses(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call takes a part of its first argument by its place along the first dimension."""
    if name in _CHOICES:
        at = 0 if name in ("select", "unbind", "narrow") else 1
        return bool(kwargs.get("dim", (*args[1:], 0, 0)[at]) == 0)
    key = args[1] if name == "__getitem__" and len(args) > 1 else None
    first = key[0] if isinstance(key, tuple) and key else key
    return type(first) is int or (isinstance(first, slice) and first != slice(None))
