"""Gradients on parameter servers as seen by a custom training loop: it cannot read them after the push."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.nn.incomplete_gradient import conceal, is_cleared
from tutti.types import GradientPlace, StepContext


class RemoteGradients:
    """Part of ``CustomLoopSync`` shared by ``SynchronousServerSync`` and ``AsynchronousServerSync``."""

    gradient_at: GradientPlace = "servers"
    accumulated = False
    _trained: Sequence[tuple[str, nn.Parameter]]
    _pushed = False

    def begin_custom_loop(self) -> None:
        """Do nothing: the complete gradient is on the servers alone."""

    def named_trained(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the trained parameters by name."""
        return self._trained

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters of ``named_trained``."""
        return [parameter for _, parameter in self._trained]

    def script_parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of ``script_parameters`` that ``optimizer`` updates."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        return [p for p in self.script_parameters() if p in own]

    def trained_tensors(self) -> list[Tensor]:
        """Return this rank's values of the trained parameters."""
        return [p.data for p in self.script_parameters()]

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Set ``.grad`` to None and return nothing: pushed gradients cannot be taken back."""
        for parameter in self.script_parameters():
            parameter.grad = None
        return {}

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Make ``.grad`` refuse to be read: the gradients have been pushed."""
        conceal(self.script_parameters(), "on the parameter servers, which add it up and apply it")
        self._pushed = True

    def pop_reached(self) -> list[bool]:
        """Return an empty list: a parameter was used if it has a gradient."""
        return []

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Do nothing."""

    def apply_clearing(self) -> None:
        """Do nothing: the script sees the ``.grad`` that are pushed."""

    def show_gradients(self) -> None:
        """Do nothing: as ``apply_clearing``."""

    def apply_edits(self) -> None:
        """Raise UsageError if the script has cleared a gradient after its push."""
        cleared = [name for name, p in self._trained if is_cleared(p.grad)] if self._pushed else []
        self._pushed = False
        if cleared:
            raise UsageError(
                f"the script clears the gradient of {cleared[0]} between run.backward and optimizer.step()",
                why="the parameter servers have added it up already",
                remedy="freeze the parameter before the forward (requires_grad_(False)), or take --strategy mirrored",
            )

    def on_zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Do nothing: ``optimizer.zero_grad()`` clears the same ``.grad`` that the script sees."""

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> NoReturn:
        """Raise ValueError: the norm is known on the servers alone."""
        raise ValueError("gradients on parameter servers have no norm here")

    @contextmanager
    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> Iterator[None]:
        """Do nothing: the servers have one optimizer."""
        yield

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return False: the servers step the optimizer."""
        return False

    def adopt(self, optimizer: Optimizer) -> None:
        """Raise UsageError: the servers do not have the parameters that the script has added."""
        _refuse("the script has added parameters to the optimizer")

    def reattach(self, names: Sequence[str], late: bool = False) -> None:
        """Raise UsageError: the servers do not have parameters that were frozen in ``tutti.prepare``."""
        _refuse(f"the script trains {names[0]} from here on, which was frozen in tutti.prepare")


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        what,
        why="parameter servers are started with the parameters and the optimizer groups that they keep",
        remedy="freeze after tutti.prepare what is to be trained later, and give the optimizer all groups before; or"
        " take --strategy mirrored",
    )
