"""Which layers make scores whose loss can be computed while they are split by classes, found by computing the loss.

The user's loss function is run once on two samples, with the layer's output as a ``Parted`` of one share. Where the
cross-entropy was all that had to know of other classes, the layer's outputs need never be gathered. Where anything else
looks at them, the output is gathered as before: nothing here changes what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutti.layouts.measured import untouched
from tutti.layouts.plan import Entry
from tutti.nn.parted import Parted, whole
from tutti.nn.slices import Ranks, Slice
from tutti.nn.sync import peers_of

_SAMPLES = 2
"""In the trial: no more than needed, for in it scores are whole."""


def with_scores(
    plain: nn.Module, plan: Sequence[Entry], trial: Callable[..., Any] | None, device: torch.device
) -> list[Entry]:
    """The plan, in which those of the gathered linear layers are ``scores`` whose outputs a loss alone looks at.

    Args:
        trial: calls the loss function on the model with a micro-batch; None where there is none.
    """
    names = [e.name for e in plan if e.role == "gathered" and isinstance(plain.get_submodule(e.name), nn.Linear)]
    found = _lasting(plain, names, trial, device) if names and trial is not None else ()
    return [replace(entry, role="scores") if entry.name in found else entry for entry in plan]


def hooked(plain: nn.Module) -> bool:
    """Whether a module has a hook on its gradients, which would be given a share of one."""
    return any(m._backward_hooks or m._backward_pre_hooks for m in plain.modules())


def _lasting(
    plain: nn.Module, names: Sequence[str], trial: Callable[..., Any], device: torch.device
) -> Collection[str]:
    if peers_of(plain) is not None or hooked(plain):
        return ()
    alone = {name: _Alone() for name in names}
    try:
        with untouched(plain, device), ExitStack() as stack:
            for name, ranks in alone.items():
                stack.callback(plain.get_submodule(name).register_forward_hook(_hook(name, ranks)).remove)
            trial(plain, _SAMPLES)
    except Exception:
        # Whatever is wrong with it will be said in the first step.
        return ()
    return [name for name, ranks in alone.items() if ranks.joined and not ranks.gathered]


def _hook(name: str, ranks: _Alone) -> Callable[..., Tensor]:
    return lambda layer, args, out: Parted.of(out, -1, Slice(name, cast(Ranks, ranks), out.shape[-1]))


class _Alone:
    """All ranks in one, which notes what they would have to tell each other."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.joined = self.gathered = False

    def join(self, tensor: Tensor, name: str) -> Tensor:
        self.joined = True
        return tensor.unsqueeze(0)

    def gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        self.gathered = True
        return part

    def copies(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        self.gathered = True
        return tensors

    def take(self, tensor: Tensor, dim: int, length: int, name: str) -> Tensor:
        self.gathered = True
        return tensor


class Outputs:
    """Makes what a module returns whole, but for a loss that can do with parts."""

    def __init__(self, module: nn.Module, keep: bool = False) -> None:
        self._keep = keep
        module.register_forward_hook(lambda module, args, out: out if self._keep else whole(out))

    @contextmanager
    def kept(self) -> Any:
        """Within it outputs stay as they are."""
        self._keep = True
        try:
            yield
        finally:
            self._keep = False
