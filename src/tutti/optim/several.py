"""Combine several optimizers of one model into one: of generator and discriminator, or Muon beside AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.types.optimizer_protocols import OptimizerFactory


class SeveralOptimizers(Optimizer):
    """Several optimizers combined into one object, whose ``step`` steps all of them in order.

    ``param_groups`` and ``state`` combine the groups and states of all members.

    Args:
        members: optimizers over disjoint parameters; None for an optimizer without a parameter on this rank.

    Attributes:
        active: index in ``members`` of the only optimizer that ``step`` steps; None for all.
    """

    def __init__(self, members: Sequence[Optimizer | None]) -> None:
        # Not the base class's constructor, which would register groups of its own.
        self.members = tuple(members)
        self.active: int | None = None
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all combined optimizers, in order: a new list of the optimizers' own dictionaries.

        Changes of a group, such as of its learning rate, therefore take effect.
        """
        return [group for member in self.present for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """The optimizer state of each parameter: a live, mutable view of the states of all combined optimizers.

        Keys are parameters. Optimizers without parameters on this rank add none.
        """
        return _States(self.present)

    @property
    def present(self) -> list[Optimizer]:
        """A list of the combined optimizers that have parameters on this rank: ``members`` without None, in order."""
        return [member for member in self.members if member is not None]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all optimizers that this object combines, in order, or only one of them if ``active`` is not None.

        ``active`` is the index of the only optimizer to step in the list ``members`` of the combined optimizers.
        Optimizers without parameters on this rank are passed over.

        Args:
            closure: ignored.
        """
        for member in stepping(self):
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the parameters of all optimizers that are combined here, also with ``active`` set.

        Args:
            set_to_none: set each ``.grad`` to None, and not to zeros.
        """
        for member in self.present:
            member.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"SeveralOptimizers({', '.join(map(repr, self.present))})"


class _States(MutableMapping[Tensor, Any]):
    """Mapping from a parameter to its state in the member that holds it."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._of = {p: member for member in members for group in member.param_groups for p in group["params"]}

    def __getitem__(self, parameter: Tensor) -> Any:
        member = self._of[parameter]
        if parameter not in member.state:
            raise KeyError(parameter)
        return member.state[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        if parameter in self._of:
            self._of[parameter].state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter, member in self._of.items() if parameter in member.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def several(makers: Sequence[OptimizerFactory]) -> OptimizerFactory:
    """Combine optimizer factories into one factory, whose optimizer is a ``SeveralOptimizers`` of theirs.

    Args:
        makers: functions from (name, parameter) pairs to an optimizer, or to None if none of the parameters belong to
            this optimizer.

    Returns:
        A function from (name, parameter) pairs to a ``SeveralOptimizers``, whose ``members`` has one entry for each of
        ``makers`` on every rank: None for an optimizer without parameters on this rank. For a single maker, that maker
        itself.
    """
    if len(makers) == 1:
        return makers[0]

    def make(named: Sequence[tuple[str, Any]]) -> Optimizer | None:
        # Even without parameters on this rank: all ranks must have the same number of optimizers.
        return SeveralOptimizers([maker(named) for maker in makers])

    return make


def members_of(optimizer: Optimizer | None) -> list[Optimizer]:
    """Return the optimizers that have parameters on this rank: those of a ``SeveralOptimizers``, or the only one.

    Args:
        optimizer: one optimizer or several combined; None gives an empty list.
    """
    if optimizer is None:
        return []
    return optimizer.present if isinstance(optimizer, SeveralOptimizers) else [optimizer]


def slots(optimizer: Optimizer | None) -> tuple[Optimizer | None, ...]:
    """Return every optimizer of the run as a tuple, of equal length and order on all ranks.

    It has one entry for a single optimizer, and for a ``SeveralOptimizers`` one for each optimizer that it combines. An
    entry is None for an optimizer without parameters on this rank.

    Args:
        optimizer: one optimizer or several combined; None if the single one has no parameters on this rank.
    """
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def stepping(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that the next ``step`` of a ``SeveralOptimizers`` steps: all, or ``members[active]`` alone.

    The attribute ``active`` is an index in ``members``, or None for all (see ``acting``). Optimizers without parameters
    on this rank are left out.

    Args:
        optimizer: optimizers combined in a ``SeveralOptimizers``; any other optimizer is returned as a list of one.
    """
    if not isinstance(optimizer, SeveralOptimizers):
        return [optimizer]
    pairs = enumerate(optimizer.members)
    return [member for index, member in pairs if member is not None and optimizer.active in (None, index)]


def acting(optimizer: Optimizer | None, index: int | None) -> AbstractContextManager[None]:
    """Return a context within which ``step`` of a ``SeveralOptimizers`` steps only one of its optimizers.

    Args:
        optimizer: the ``SeveralOptimizers``; with any other optimizer, or None, the context does nothing.
        index: index in ``members`` of the optimizer that ``step`` steps within the context; None for all. After the
            context ``step`` steps all members.
    """
    return _acting(optimizer, index) if isinstance(optimizer, SeveralOptimizers) else nullcontext()


@contextmanager
def _acting(optimizer: SeveralOptimizers, index: int | None) -> Iterator[None]:
    optimizer.active = index
    try:
        yield
    finally:
        optimizer.active = None


def check_apart(optimizers: Sequence[Optimizer]) -> None:
    """Check that no parameter belongs to two of the optimizers: a checkpoint keeps one state for each parameter.

    Args:
        optimizers: the optimizers to compare.

    Raises:
        UsageError: two optimizers have a parameter in common.
    """
    seen: set[int] = set()
    for optimizer in optimizers:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own & seen:
            raise UsageError(
                "two optimizers have a parameter in common",
                why="a checkpoint keeps one optimizer state a parameter",
                remedy="give each parameter to one optimizer",
            )
        seen |= own


def trained_by(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return a list of the members of ``parameters`` that are in the optimizer's ``param_groups``, in the given order.

    Frozen parameters (``requires_grad`` False) are included.

    Args:
        optimizer: the optimizer.
        parameters: any parameters; they are compared by identity.
    """
    members = {p for group in optimizer.param_groups for p in group["params"]}
    return [p for p in parameters if p in members]
