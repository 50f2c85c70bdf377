"""Random draws inside a model, keyed so that they do not depend on who computes them.

A cell's draws come from a stream of its own, keyed by (seed, step, worker, micro-batch). A module that draws (dropout
and its like) draws from a stream keyed by the cell *and its name*, so that a stage or a tensor rank that holds only a
part of the model draws what one device would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tutti.laws.keys import mix, name_key

_MASK = (1 << 63) - 1


class Draws:
    """The random streams of one model on one device.

    Args:
        model: the part of the model that lives here; module names are those of the whole model.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        self._cell = 0
        self._calls: dict[str, int] = {}
        keyed = [name for name, module in model.named_modules() if _draws(module)]
        if isinstance(model, nn.Sequential):
            # A block of the user's own may draw by functions; keyed by its name it does so alike on any stage.
            keyed += [name for name, block in model.named_children() if not _is_of_pytorch(block)]
        self._keyed = sorted(set(keyed))
        for name in self._keyed:
            model.get_submodule(name).register_forward_pre_hook(self._hook(name))

    def enter(self, key: int) -> None:
        """Start the stream of the cell ``key``."""
        self._cell = key
        if self._keyed:
            self._calls.clear()
        self._generator.manual_seed(key & _MASK)

    def _hook(self, name: str) -> Any:
        base = name_key(name)

        def before(module: nn.Module, args: Any) -> None:
            if module.training:
                call = self._calls.get(name, 0)
                self._calls[name] = call + 1
                self._generator.manual_seed(mix(self._cell, base, call) & _MASK)

        return before


def _is_of_pytorch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _draws(module: nn.Module) -> bool:
    """Whether a module of PyTorch draws random numbers by itself in training."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RReLU)
