"""The collectives of FSDP2: an all-gather of a wrapped module's rows, a reduce-scatter of its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tutti.comm.communicator import Communicator
from tutti.errors import MismatchError, UsageError, script_line
from tutti.parallel.ddp.gradient_arithmetic import squares_of
from tutti.torch_compat import reduce_scatter_single, set_fsdp_collectives

_COMPARISON = "which unit's parameters or gradients come next"
"""Name of the collective by which ranks compare their next one in the first step."""


def set_collectives(
    unit: FSDPModule, place: str, comm: Communicator, check: FirstStepCheck, meter: GradientMeter
) -> None:
    """Set the collectives with which FSDP2 all-gathers a wrapped module and reduce-scatters its gradients.

    On CPUs they go through ``comm``, which names missing ranks; on accelerators only the reduce-scatter is replaced, by
    PyTorch's own with the meter before it. Not collective.

    Args:
        unit: the wrapped module.
        place: the wrapped module's name in the model, for errors.
        comm: the shard ranks.
        check: compares the collectives of the first step over the shard ranks; used on CPUs only.
        meter: adds up the squares of the gradients before they are reduced.
    """
    if comm.device.type == "cpu":
        set_fsdp_collectives(unit, _Gather(comm, place, check), _ScatterSum(comm, place, check, meter))
    else:
        set_fsdp_collectives(unit, None, _MeteredScatter(meter))


class FirstStepCheck:
    """Compares the next FSDP2 collective over the shard ranks before it runs, until the first step is over.

    Ranks whose forwards use different wrapped modules would otherwise all-gather one rank's module into another's.

    Args:
        comm: the shard ranks.

    Attributes:
        over: whether the first step is over; True turns the comparison off.
    """

    over = False

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def compare(self, call: str) -> None:
        """Compare the FSDP2 collective that this rank is about to run with those of the other shard ranks.

        Collective over the shard ranks: an all-gather of digests; blocks. Does nothing after the first step (attribute
        ``over``).

        Args:
            call: text that names the kind of the collective and the wrapped module that it is for, such as ``all_gather
                of layers.0``.

        Raises:
            MismatchError: on every shard rank, they are about to run different collectives.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if not self.over:
            self._comm.agree(
                [call],
                _COMPARISON,
                "let every batch use the same units of the model, or take sharded:stage=1",
            )


class GradientMeter:
    """Adds up the squares of this rank's gradients, as they are before FSDP2's backward reduces them over shard ranks.

    Measures only between the first ``take`` in a step and the reduction at the step's end.

    Attributes:
        on: whether gradients count now; the reduction at the end of a step sets it to False.
    """

    on = False

    def __init__(self) -> None:
        self._square = 0.0

    def add(self, gradients: Tensor) -> None:
        """Add the squares of the elements of a message of gradients, before it is reduced over the shard ranks.

        Does nothing until ``take`` is called for the first time in a step. Not collective.

        Args:
            gradients: this rank's flat message of gradients, not changed; its padding is zero.
        """
        if self.on:
            self._square += squares_of([gradients])[0]

    def leave_out(self, gradient: Tensor | None) -> None:
        """Subtract a gradient's squares from this rank's sum, as another rank of the replica counts the gradient, too.

        ``add`` counts every gradient of a message on this rank, before or after this call. Does nothing before the
        step's first ``take``, which returns the sum and begins a new one. Not collective.

        Args:
            gradient: this rank's gradient of a whole parameter, before it is reduced; None for no gradient.
        """
        if self.on and gradient is not None:
            self._square -= squares_of([gradient])[0]

    def take(self) -> float:
        """Return the sum of squares of the gradients that ``add`` got since the previous call, and reset it to 0.

        ``add`` counts gradients from now on, until the reduction at the end of the step sets ``on`` to False. Not
        collective.
        """
        square, self._square, self.on = self._square, 0.0, True
        return square


class _Message:
    """A custom collective for FSDP2 that runs over ``Communicator``."""

    def __init__(self, comm: Communicator, place: str, check: FirstStepCheck) -> None:
        self._comm, self._place, self._check = comm, place, check

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Message):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        with same_modules(text := f"all_gather of {self._place}"):
            self._check.compare(text)
            self._comm.gather_into(output_tensor, input_tensor, text)


class _ScatterSum(_Message):
    def __init__(self, comm: Communicator, place: str, check: FirstStepCheck, meter: GradientMeter) -> None:
        super().__init__(comm, place, check)
        self._meter = meter

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        with same_modules(text := f"reduce_scatter of gradients of {self._place}"):
            self._check.compare(text)
            self._meter.add(input_tensor)
            self._comm.scatter_sum(output_tensor, input_tensor, text)


@contextmanager
def same_modules(call: str) -> Iterator[None]:
    """Return a context that turns a mismatch of FSDP2's collectives into an error about the model's modules.

    Ranks whose forwards use different wrapped modules, or use one not equally often, wait in different collectives.
    Other errors pass.

    Args:
        call: text that names the collective within the context, for the error.

    Raises:
        UsageError: within the context, the ranks wait in collectives of different modules.
        MismatchError: within the context, the ranks wait in different calls for another reason.
    """
    try:
        yield
    except MismatchError as error:
        modules = sum(error.what.count(kind) for kind in ("all_gather of", "reduce_scatter of gradients of"))
        # Another rank may have no module left in this step, and reduce its loss.
        left = "loss sums" in error.what and (modules or _COMPARISON in error.what)
        if not left and (modules < 2 or _COMPARISON in error.what):
            raise
        raise UsageError(
            f"ranks use different modules of the model in one step: {error.what}",
            where=f"{call}, {script_line()}",
            why="a module is gathered when the forward calls it, on all ranks at once, and here the data or a random"
            " number choose which modules compute, or how often",
            remedy="name the modules around them, which every forward calls once (strategy='sharded:units=Name'), or"
            " take sharded:stage=1 or mirrored",
        ) from error


class _MeteredScatter:
    """FSDP2's own reduce-scatter over the device's process group, with the gradient meter before it."""

    def __init__(self, meter: GradientMeter) -> None:
        self._meter = meter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._meter.add(input_tensor)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
