"""The state of an optimizer whose updates another one makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor


class AbsentState(MutableMapping[Tensor, Any]):
    """Mapping in place of ``optimizer.state`` that raises at every access, by calling ``refuse``.

    For a script's optimizer whose updates other ranks or parameter servers make: they hold the state, and a change of
    the state here would have no effect.

    Args:
        refuse: function that raises ``UsageError``.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse

    def __getitem__(self, key: Tensor) -> Any:
        self._refuse()

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._refuse()

    def __delitem__(self, key: Tensor) -> None:
        self._refuse()

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse()
        return iter(())

    def __len__(self) -> int:
        self._refuse()
        return 0
