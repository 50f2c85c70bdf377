"""Base of torch-function modes that a check enters in one function and leaves in another, without ``with``."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode

from tutti.torch_compat import leave_function_mode


class EnteredMode(TorchFunctionMode):
    """Torch function mode that ``enter`` puts on PyTorch's stack of modes, and ``end`` takes off again."""

    def __init__(self) -> None:
        super().__init__()
        self._active = False

    def enter(self) -> None:
        """Put this mode on PyTorch's stack of function modes."""
        self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Leave this function mode, and call ``ended``; do nothing if the mode has not been entered."""
        if self._active:
            self._active = False
            # A loop that the script leaves early ends when modes of its run, or of a later one, lie above this mode.
            leave_function_mode(self)
            self.ended()

    def ended(self) -> None:
        """Clean up after the mode is left; ``end`` calls this. The base class does nothing."""
