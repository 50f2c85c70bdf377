"""The state of an optimizer whose updates another one makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor


class AbsentState(MutableMapping[Tensor, Any]):
    """Mapping in place of ``optimizer.state`` that refuses every access.

    The script's optimizer has no state where ranks or servers make its updates: what a script did to its state would
    have no effect.

    Args:
        refuse: raises UsageError.
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
