"""Read settings of the script's optimizers that must be equal on all ranks in a step, and in all bodies of a batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.python_compat import LiveObjects

_SCHEDULERS = LiveObjects(LRScheduler)
SETTINGS = ("lr", "momentum", "betas", "weight_decay")
"""What scripts and schedulers change during training; other entries of a group may be an optimizer's own counts."""


class SharedSettings:
    """Reads learning rates, momenta and weight decays of the script's optimizers as a text, to compare over ranks.

    Args:
        optimizers: the script's optimizers; none where ``tutti.prepare`` was given options.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        # By optimizer the settings that were read last, and their text.
        self._known: dict[int, tuple[list[tuple[str, Any]], str]] = {}

    def text(self, index: int = -1) -> str:
        """Return ``lr``, ``momentum``, ``betas`` and ``weight_decay`` of the script's optimizers as one text.

        The text is ``lr {value} {value} …, momentum …``, with a value for each parameter group that has the setting. A
        tensor on an accelerator is written as None, so that the host does not wait for the device. Settings that no
        group has are left out; the text is empty without optimizers.

        Args:
            index: the optimizer's position among those passed to ``tutti.prepare``; -1 for all optimizers.
        """
        optimizers = self._optimizers if index < 0 else self._optimizers[index : index + 1]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        values = [
            (name, value if type(value := group[name]) in (float, int) else _plain(value))
            for group in groups
            for name in SETTINGS
            if name in group
        ]
        if index not in self._known or self._known[index][0] != values:
            found: dict[str, list[str]] = {}
            for name, value in values:
                found.setdefault(name, []).append(repr(value))
            self._known[index] = values, ", ".join(f"{name} {' '.join(each)}" for name, each in found.items())
        return self._known[index][1]

    @staticmethod
    def differences(before: str, now: str) -> tuple[str, str]:
        """Return the settings of two texts of ``text`` that differ, each as a text of the same form.

        Args:
            before, now: the two texts.

        >>> SharedSettings.differences("lr 0.1, betas (0.9, 0.999)", "lr 0.09, betas (0.9, 0.999)")
        ('lr 0.1', 'lr 0.09')
        """
        parts = [re.split(r", (?=[a-z])", each) for each in (before, now)]
        same = set(parts[0]) & set(parts[1])
        first, second = (", ".join(part for part in each if part not in same) for each in parts)
        return first, second

    def schedulers(self) -> list[LRScheduler]:
        """Return the PyTorch learning-rate schedulers of the script's optimizers that exist in this process.

        Schedulers are all live instances of ``LRScheduler``; the garbage collector's objects are searched for those
        whose attribute ``optimizer`` is one of the script's. Not collective.
        """
        own = {id(optimizer) for optimizer in self._optimizers}
        return [each for each in _SCHEDULERS.all() if id(getattr(each, "optimizer", None)) in own]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Reading it from an accelerator would wait for the device.
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
