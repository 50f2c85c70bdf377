"""Random draws inside a model, keyed so that they do not depend on who computes them.

A cell's draws come from a stream of its own, keyed by (seed, step, worker, micro-batch). A module that draws (dropout
and its like) draws from a stream keyed by the cell *and its name*, so that a stage or a tensor rank that holds only a
part of the model draws what one device would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from tutti.errors import UsageError
from tutti.laws.keys import mix, name_key
from tutti.nn.units import is_sequence

_MASK = (1 << 63) - 1


class Moment(NamedTuple):
    """How often each keyed module has been called in which cell, and whether that is computed again."""

    cell: int
    calls: dict[str, int]
    replaying: bool


class Draws:
    """The random streams of one model on one device.

    Args:
        model: the part of the model that lives here; module names are those of the whole model.
        device: where it computes.
        allowed: whether the model may draw; see ``check``.
        chosen: its modules that get a stream of their own, by name; default: those of ``keyed``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        allowed: bool = True,
        chosen: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._allowed, self._before = allowed, torch.empty(0)
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        self._cell = 0
        self._calls: dict[str, int] = {}
        self._replaying = False
        found = keyed(model) if chosen is None else chosen
        self._keyed = sorted(found) if allowed else []
        for name in self._keyed:
            found[name].register_forward_pre_hook(self._hook(name))

    def enter(self, key: int, before: Mapping[str, int] | None = None) -> None:
        """Start the stream of the cell ``key``; ``before``: how often modules were called in it elsewhere."""
        self._cell = key
        if self._keyed:
            self._calls.clear()
            self._calls.update(before or {})
        self._generator.manual_seed(key & _MASK)
        if not self._allowed:
            self._before = self._generator.get_state()

    def check(self) -> None:
        """Raise UsageError where something was drawn since ``enter`` that may not be."""
        if not self._allowed and not torch.equal(self._generator.get_state(), self._before):
            refuse("a model or a loop that draws random numbers, by a function such as dropout")

    @property
    def moment(self) -> Moment:
        """Where the streams are; what is computed again in backward goes back to where they were."""
        return Moment(self._cell, dict(self._calls), self._replaying)

    @moment.setter
    def moment(self, then: Moment) -> None:
        self._cell, self._calls, self._replaying = then.cell, dict(then.calls), then.replaying

    @property
    def state(self) -> Tensor:
        """Of the stream from which functions draw; (bytes,) on the CPU."""
        return self._generator.get_state()

    @state.setter
    def state(self, then: Tensor) -> None:
        self._generator.set_state(then)

    def _hook(self, name: str) -> Any:
        base = name_key(name)

        def before(module: nn.Module, args: Any) -> None:
            if module.training:
                call = self._calls.get(name, 0)
                if torch._C._current_graph_task_id() != -1 and not self._replaying:
                    call = _first(name, call)
                else:
                    self._calls[name] = call + 1
                self._generator.manual_seed(mix(self._cell, base, call) & _MASK)

        return before


def keyed(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a whole model that get a random stream of their own, by name."""
    found = {name: module for name, module in model.named_modules() if draws(module)}
    if isinstance(model, nn.Sequential):
        # A block of the user's own may draw by functions; keyed by its name it does so alike on any stage.
        found |= dict(_blocks(model))
    return found


def _blocks(sequence: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The user's own among the children of a sequence and of sequences in it."""
    for name, block in sequence.named_children():
        if is_sequence(block):
            yield from ((f"{name}.{inner}", found) for inner, found in _blocks(block))
        elif not _is_known(block):
            yield name, block


def refuse(what: str) -> NoReturn:
    """Raise UsageError for draws where a device's workers are computed as one."""
    raise UsageError(
        f"batch_norm='sync' with several workers a device does not go with {what}",
        why="a device's workers are computed as one batch, so that draws would depend on the number of devices",
        remedy="take as many workers as devices, leave dropout and the like out, or take another batch norm",
    )


def _first(name: str, calls: int) -> int:
    """The call that a checkpoint of the user's own computes again: known where there was but one."""
    if calls != 1:
        raise UsageError(
            f"the model computes {name} again in backward, which draws and was called {calls} times",
            why="which of the calls it is cannot be known",
            remedy="leave checkpointing to tutti.prepare(activation_checkpointing=…)",
        )
    return 0


def _is_known(module: nn.Module) -> bool:
    """Whether it is one of PyTorch's layers, or stands for one."""
    return type(module).__module__.startswith(("torch.nn.", "tutti.nn."))


def draws(module: nn.Module) -> bool:
    """Whether a module of PyTorch draws random numbers by itself in training."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return module._random_samples is None
    return isinstance(module, nn.RReLU)
