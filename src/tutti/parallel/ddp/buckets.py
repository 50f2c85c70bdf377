"""Gradient buckets: flat vectors over the gradients of several parameters, with a fixed layout.

Stock DDP rebuilds its buckets after the first step, in the order in which gradients arrived; the order of summation
then depends on history, and a resumed run differs. Here the layout is a function of names and shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.device import numbers_for
from tutti.errors import UsageError
from tutti.parallel.ddp.step_agreement import DIGESTS, digests, digests_agree
from tutti.torch_compat import foreach_copy_, storage_uses
from tutti.types.step_records import StepContext

METRICS = 6
"""Most metrics of a loss function: messages have room for so many sums."""
_TOTALS = 3 + METRICS
FIRST_BYTES = 1 << 20
"""Bytes of the first bucket, 1 MiB as in PyTorch's DDP: its all-reduce starts early in backward."""


class ReducedSums(NamedTuple):
    """Numbers of one training step that data ranks sum together with the gradients, over the global batch.

    Attributes:
        loss: sum of the losses.
        samples: number of units (samples or tokens) that the loss is a sum over.
        metrics: sums of the metrics: six numbers, zero where there are fewer metrics; on a single data rank as many as
            there are metrics.
        stop: whether any rank asks to stop after the step.
        used: for each parameter whether any rank had a gradient of it.
        own: for each parameter Σ ‖G‖²/c over the logical workers (shares of the global batch), where G is a worker's
            gradient without loss scale and c its number of units; after these the number of workers with c > 0. Empty
            where the gradient variance is not measured.
    """

    loss: float
    samples: float
    metrics: list[float]
    stop: bool
    used: list[bool]
    own: Sequence[float] = ()


def plan_buckets(sizes: Sequence[tuple[int, str]], largest: int, first: int = FIRST_BYTES) -> list[list[int]]:
    """Group parameters into gradient buckets of one dtype each, the model's last parameter first.

    Backward produces the gradients of the last parameters first.

    Args:
        sizes: (bytes, dtype) of each parameter, in the model's order.
        largest: most bytes of a bucket; a larger parameter has a bucket to itself.
        first: most bytes of the first bucket, small so that its all-reduce starts early.

    Returns:
        For each bucket a list of indices into ``sizes``, in the order of the bucket's flat vector.

    >>> plan_buckets([(40, "f"), (40, "f"), (40, "f"), (8, "f")], largest=80, first=16)
    [[3], [2, 1], [0]]
    """
    buckets: list[list[int]] = []
    filled, dtype = 0, ""
    for index in reversed(range(len(sizes))):
        size, kind = sizes[index]
        limit = first if len(buckets) <= 1 else largest
        if not buckets or kind != dtype or filled + size > limit:
            buckets.append([])
            filled, dtype = 0, kind
        buckets[-1].append(index)
        filled += size
    return buckets


class Bucket:
    """Gradients of several parameters as views of one flat vector, followed by a tail of other numbers.

    In the shapes below, ``elements`` is the number of elements of all ``parameters`` together.

    Args:
        parameters: the parameters, in the order of the vector.
        dtype: of the vector.
        device: of the vector.
        tail: how many numbers there are behind the gradients; 0 for none.
        flat: memory of the vector (elements + tail,), which ``renew`` then keeps; None allocates the memory.

    Attributes:
        parameters: the parameters, in the order of the vector.
        flat: (elements + tail,), the tensor that the collective sends.
        gradients: (elements,), the view of the gradients.
        tail: (tail,), the view of the other numbers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        tail: int,
        flat: Tensor | None = None,
    ) -> None:
        self.parameters = list(parameters)
        elements = sum(p.numel() for p in parameters)
        self._elements, self._tail, self._placed = elements, tail, flat is not None
        self.use(torch.zeros(elements + tail, dtype=dtype, device=device) if flat is None else flat)

    def use(self, flat: Tensor) -> None:
        """Make ``flat`` the memory of this bucket of several parameters' gradients. Nothing is copied.

        The attributes ``flat``, ``gradients`` and ``tail`` (numbers behind the gradients), and the views of single
        gradients, then refer to ``flat``. Called where a reducer packs gradients into new memory, or receives their sum
        in a tensor of its own.

        Args:
            flat: 1-d tensor of the bucket's dtype, as long as the present attribute ``flat``.
        """
        self.flat = flat
        self.gradients, self.tail = flat.split([self._elements, self._tail])
        self._views = []
        start = 0
        for parameter in self.parameters:
            piece = flat[start : start + parameter.numel()]
            start += parameter.numel()
            # Same strides as the parameter, as fused optimizers need (channels-last weights).
            dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
            self._views.append(
                piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view_as(parameter)
            )
            del piece  # the views alone are counted
        self._addresses = [view.data_ptr() for view in self._views]
        self._uses = storage_uses(flat)

    def renew(self) -> None:
        """Allocate a new flat vector for the bucket if the script keeps views of the present one.

        Such a view is ``p.grad.view(-1)``. Called before gradients are written into the vector, so that the script's
        views keep their values. The new vector is not initialised, and no ``.grad`` is changed. A vector that was given
        to the constructor is kept.
        """
        if not self._placed and storage_uses(self.flat) > self._uses:
            self.use(torch.empty_like(self.flat))

    def pack(self) -> list[bool]:
        """Copy the ``.grad`` of the bucket's parameters into its flat vector, zeros where ``.grad`` is None.

        A bucket holds the gradients of several parameters one after the other in the vector that a collective sends.

        Returns:
            For each parameter of the bucket whether it had a gradient.

        Raises:
            UsageError: a gradient is sparse.
        """
        if [view.data_ptr() for view in self._views] != self._addresses:
            # ``Module.to`` has moved a gradient, and so a view, to other memory: ``model.cpu()`` to save, and back.
            self.use(self.flat)
        self.renew()
        present = [p.grad for p in self.parameters]
        used = [gradient is not None for gradient in present]
        gradients = [gradient for gradient in present if gradient is not None]
        _check_dense(gradients)
        if len(gradients) == len(used):
            if gradients:
                foreach_copy_(self._views, gradients)
        else:
            for view, parameter in zip(self._views, self.parameters, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
        return used

    def add(self, parameter: nn.Parameter) -> int:
        """Add the ``.grad`` of a parameter to the flat vector of this bucket of gradients, after ``pack``.

        Args:
            parameter: a parameter of the bucket, into whose gradient backward has accumulated once more.

        Returns:
            The index of the parameter in ``parameters``.

        Raises:
            UsageError: the gradient is sparse.
        """
        index = next(i for i, own in enumerate(self.parameters) if own is parameter)
        if parameter.grad is not None:
            _check_dense([parameter.grad])
            self._views[index].add_(parameter.grad.to(self.flat.device))
        return index

    def expose(self, used: Sequence[bool]) -> None:
        """Set the ``.grad`` of the bucket's parameters to views of its flat vector, which holds the summed gradients.

        The next ``pack`` overwrites the vector, and with it these views, unless the script keeps other views of the
        vector then (``renew``).

        Args:
            used: for each parameter of the bucket whether any rank had a gradient; where False, ``.grad`` becomes None,
                as on one device.
        """
        for view, parameter, flag in zip(self._views, self.parameters, used, strict=True):
            parameter.grad = view if flag else None


class Tail:
    """Layout of the numbers that are summed over ranks behind the gradients of the last bucket.

    In order: digests of the step (small hashes by which ranks find that they are in different steps), loss sums, a stop
    flag, and for each parameter a flag that says whether it had a gradient. A digest d is sent as d and d²: the sums
    over n contributions show whether all n were equal, since n · Σd² = (Σd)² only then (Cauchy-Schwarz).

    Args:
        flags: number of parameters.
        layout_key: hash of the parameters' names, shapes and dtypes.

    Attributes:
        size: length of the tail, 13 + ``flags``.
    """

    def __init__(self, flags: int, layout_key: int) -> None:
        self.size = DIGESTS + _TOTALS + flags
        self._key = layout_key
        self._own: Tensor | None = None

    def fill(
        self,
        tail: Tensor,
        step_context: StepContext,
        loss_sums: Tensor | None,
        used: Sequence[bool],
        *,
        late: bool = False,
    ) -> None:
        """Write this rank's numbers that are summed behind the gradients: loss sums, flags and digests of the step.

        In order: four digests (small hashes by which ranks find that they are in different steps), loss, count, six
        metrics, a stop flag, and for each parameter a flag that says whether it had a gradient. In reproducible mode
        each logical worker (one of N fixed shares of the global batch) contributes such numbers in place of the rank.
        Does not wait for the device.

        Args:
            tail: (13 + number of parameters,), the end of the last bucket's flat vector, written in place.
            step_context: the step under way; the digests are hashes of its number, batch size and settings, and its
                ``stop`` is the stop flag.
            loss_sums: ``[loss, count, *metrics]``; None for no samples.
            used: for each parameter whether it had a gradient.
            late: whether a gradient has come after this rank had sent it. The digests are then wrong on purpose, so
                that every rank finds that the sums do not agree.
        """
        # A copy that waits for the device would hold back its next kernels.
        mine = [number + late for number in digests(step_context, self._key)]
        own = numbers_for(tail.device, mine, tail.dtype)
        tail[:DIGESTS].copy_(own, non_blocking=True)
        self._own = own
        totals = tail[DIGESTS : DIGESTS + _TOTALS]
        totals.zero_()
        if loss_sums is not None:
            totals[: len(loss_sums)].copy_(loss_sums)
        if step_context.stop:
            totals[-1] = 1
        flags = tail[DIGESTS + _TOTALS :]
        if all(used):
            flags.fill_(1)
        else:
            flags.copy_(numbers_for(tail.device, used, tail.dtype), non_blocking=True)

    def agrees(self, tail: Tensor, contributions: int) -> Tensor:
        """Return on the device whether all ranks were in this step with the same layout of parameters (see ``same``).

        Args:
            tail: the sums over ranks behind the gradients of the last bucket, which this rank has filled before.
            contributions: number of ranks in the sums.

        Returns:
            A 0-dim bool tensor; False too where the sums are too large for their dtype to be exact.
        """
        assert self._own is not None
        return (tail[:DIGESTS] == (contributions * self._own).to(tail.device, non_blocking=True)).all()

    def read(self, tail: Sequence[float]) -> ReducedSums:
        """Parse the numbers that were summed over ranks behind the gradients of the last bucket.

        Args:
            tail: the sums over all ranks, on the host, in the order in which ``fill`` writes: four digests of the step,
                loss, count, six metrics, stop flag, and a flag for each parameter; 13 + number of parameters.

        Returns:
            A ``ReducedSums`` (named tuple): sums of loss (``loss``), count of samples or tokens (``samples``) and
            metrics (``metrics``, a list of six floats); whether a rank asks to stop (``stop``); for each parameter
            whether any rank had a gradient (the list ``used``).
        """
        return read_sums(tail[DIGESTS:])

    def same(self, tail: Sequence[float], step_context: StepContext, contributions: int) -> bool:
        """Return whether all ranks whose numbers were summed were in this step and had the same layout of parameters.

        The layout is the parameters' names, shapes and dtypes. Each rank sends four digests (small hashes of step and
        layout) behind the gradients of the last bucket; their sums must be ``contributions`` times this rank's own.

        Args:
            tail: the sums over ranks of the numbers behind the gradients of the last bucket, ``size`` numbers on the
                host.
            step_context: the step under way on this rank.
            contributions: number of ranks, or of logical workers (fixed shares of the global batch), in the sums.
        """
        return digests_agree(tail, digests(step_context, self._key), contributions)


def largest_vector(parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> int:
    """Return an upper bound, in bytes, of one gradient bucket's flat vector, for any partition into buckets.

    Tutti's own all-reduce schedules, such as a ring, allocate memory of this size. The bound includes the loss sums,
    flags and digests that are all-reduced behind the gradients.

    Args:
        parameters: named parameters; those with ``requires_grad`` are in buckets.
        bucket_bytes: largest bytes of a bucket; a larger parameter has a bucket to itself.
    """
    sizes = [p.nbytes for _, p in parameters if p.requires_grad]
    fullest = min(sum(sizes), max(bucket_bytes, FIRST_BYTES, *sizes)) if sizes else 0
    return fullest + 8 * (DIGESTS + _TOTALS + len(sizes))


def values_of(gradient: Tensor) -> Tensor:
    """Return the stored elements of a gradient, without a copy of a dense one.

    Args:
        gradient: dense of any shape, or sparse COO with duplicate indices, which are added up.

    Returns:
        A dense gradient itself; of a sparse one the values after ``coalesce()``.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _check_dense(gradients: Sequence[Tensor]) -> None:
    """Raise UsageError for a sparse gradient of a parameter that the bucket layout took for dense."""
    for gradient in gradients:
        if gradient.is_sparse:
            raise UsageError(
                f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, and its module does not say so",
                why="ranks must know before the first step which gradients may be sparse",
                remedy="give the module that owns it an attribute sparse = True, as nn.Embedding(sparse=True) has; or "
                "leave sparse=True out of the call",
            )


def read_sums(numbers: Sequence[float]) -> ReducedSums:
    """Parse numbers that were summed over ranks, ``[loss, count, *metrics, stop, *flags]``.

    There are ``METRICS`` (6) metrics, and for each parameter one flag that says whether it had a gradient.

    Args:
        numbers: the sums, on the host.

    Returns:
        A ``ReducedSums`` (named tuple): sums of loss (``loss``), count of samples or tokens (``samples``) and metrics
        (``metrics``, a list of six floats); whether a rank asks to stop (``stop``); for each parameter whether any rank
        had a gradient (the list ``used``). A flag above zero counts as true, since flags are summed.
    """
    loss, samples, *metrics = numbers[: _TOTALS - 1]
    return ReducedSums(loss, samples, metrics, numbers[_TOTALS - 1] > 0, [flag > 0 for flag in numbers[_TOTALS:]])
