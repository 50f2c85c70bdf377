"""``python -m tutti`` and the command ``tutti``: Ctrl-C ends the process quietly also while the command is loaded."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from tutti.errors import ExitCode


def main() -> int:
    """Load the command line, run the command that ``sys.argv`` states, and return its exit code.

    Ctrl-C while the modules are loaded ends the process at once with exit code 130 and one line on standard error. A
    process that ignores SIGINT goes on doing so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from tutti.cli import app

    signal.signal(signal.SIGINT, before)
    return app.main()


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """End this process, which has nothing to tidy up yet; an exception may be lost in a module that is half loaded."""
    os.write(2, b"tutti: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
