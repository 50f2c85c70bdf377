"""Detect writes of parameters by the script between updates, where a strategy would lose or repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tutti.checkpoint.fingerprint import is_compared, tensor_digests
from tutti.device import widest_float
from tutti.errors import UsageError
from tutti.torch_compat import foreach_norm, tensor_version
from tutti.types.optimizer_protocols import NamedParameters

_BY_NORM = 2
"""Updates before which norms are compared, too, in a custom training loop."""


class WriteGuard:
    """Detects that the script has written parameters between updates, by comparing their norms with recorded ones.

    A strategy calls ``note`` after each update, and ``check`` later. ``Tensor._version`` would cost less and miss
    ``parameter.data.mul_(…)``, the usual form of such writes. Writes that keep a norm, such as a permutation of rows,
    are found by digests of the values, in the first steps and some later.

    Args:
        why: the reason that the error gives: the effect of such a write under the run's strategy.
    """

    def __init__(self, why: str) -> None:
        self._why = why
        self._norms: list[float] | None = None
        # Devices of the values that ``_norms`` are of: kernels of two devices round differently.
        self._devices: list[torch.device] = []
        self._marks: list[tuple[int, int]] = []
        self._digests: list[int] | None = None
        self._updates = self._notes = self._looks = 0

    def note(self, named: NamedParameters) -> None:
        """Record norm, version counter and address of each parameter, for ``check`` to find later writes by the script.

        The first four calls, and then those of number 8, 16, 32 …, also record a digest of each parameter's values. The
        guard refuses writes by the script that the run's strategy would lose or repeat. Called after the strategy
        itself has written the parameters.

        Args:
            named: (name, parameter) pairs; ``check`` takes the same parameters in the same order.
        """
        self._notes += 1
        self._devices = [p.device for _, p in named]
        self._norms = _norms([p.data for _, p in named])
        self._digests = tensor_digests(p.data for _, p in named) if is_compared(self._notes) else None
        self._marks = _marks(named)

    def check(self, named: NamedParameters, where: str) -> None:
        """Raise UsageError if a parameter's norm, or its digest, differs from ``note``'s record.

        A difference means that the script has written the parameter; the error names the first such parameter.
        Before the first ``note`` nothing is checked. Also records the parameters' version counters and addresses anew,
        for ``check_update``.

        Args:
            named: (name, parameter) pairs, the same as for ``note``.
            where: place in the run for the error message, such as the step.

        Raises:
            UsageError: a parameter has another norm or digest.
        """
        self.refuse_written(self.written(named), named, where)

    def refuse_written(self, written: Sequence[str], named: NamedParameters, where: str) -> None:
        """Raise UsageError if ``written``, an earlier result of the method of this name, is not empty.

        Otherwise record the parameters' version counters and addresses anew, as ``check`` does.

        Args:
            written: names of parameters that the script has written; the error names the first.
            named: (name, parameter) pairs, the same as for ``note``.
            where: place in the run for the error message, such as the step.

        Raises:
            UsageError: ``written`` is not empty.
        """
        if written:
            self._refuse(written[0], where)
        self._marks = _marks(named)

    def written(self, named: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Return the names of parameters whose norm, or else digest, differs from ``note``'s record.

        Empty before the first ``note``. Values that are on another device than in ``note`` are copied there, so that
        the same kernels compute the norms.

        Args:
            named: (name, parameter) pairs, the same as for ``note``.
        """
        if self._norms is None:
            return []
        values = [p.data.to(device) for (_, p), device in zip(named, self._devices, strict=True)]
        pairs = zip(named, self._norms, _norms(values), strict=True)
        found = [name for (name, _), a, b in pairs if a != b and not (a != a and b != b)]
        if not found and self._digests is not None:
            now = tensor_digests(p.data for _, p in named)
            found = [name for (name, _), a, b in zip(named, self._digests, now, strict=True) if a != b]
        return found

    def written_cheaply(self, named: NamedParameters) -> list[str]:
        """Return the names of written parameters, as ``written`` does, but compare values only in some calls.

        Values are compared where a version counter or an address has changed since ``note`` or ``check``, and in the
        calls of number 1 to 4, 8, 16, 32 …, for writes through ``parameter.data``. Other calls return an empty list.

        Args:
            named: (name, parameter) pairs, the same as for ``note``.
        """
        self._looks += 1
        return self.written(named) if _marks(named) != self._marks or is_compared(self._looks) else []

    def check_update(self, named: NamedParameters, where: str) -> None:
        """Raise UsageError if the script has written a parameter since ``check``, between backward and the update.

        A write is found by the parameter's version counter and data address. In the first two updates the norms are
        compared too, which also finds writes through ``parameter.data``.

        Args:
            named: (name, parameter) pairs, the same as for ``check``.
            where: place in the run for the error message, such as the step.

        Raises:
            UsageError: a parameter was written; the error names the first.
        """
        for (name, _), before, now in zip(named, self._marks, _marks(named), strict=False):
            if before != now:
                self._refuse(name, where)
        self._updates += 1
        if self._updates <= _BY_NORM:
            self.check(named, where)

    def _refuse(self, name: str, where: str) -> NoReturn:
        raise UsageError(
            f"the script has written the parameter {name} outside of optimizer.step()",
            where=where,
            why=self._why,
            remedy="put the term into the loss or the optimizer, or take strategy='mirrored'",
        )


def _marks(named: NamedParameters) -> list[tuple[int, int]]:
    """Return version and address of each parameter."""
    return [(tensor_version(p), p.data_ptr()) for _, p in named]


def _norms(tensors: Sequence[Tensor]) -> list[float]:
    if not tensors:
        return []
    wide = widest_float(tensors[0].device)
    floating = [t if t.is_floating_point() or t.is_complex() else t.to(wide) for t in tensors]
    return torch.stack([n.to(wide) for n in foreach_norm(floating)]).tolist()
