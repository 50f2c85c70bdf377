"""``python -m tutti.horovod script.py``: run a script with ``import horovod`` served by tutti."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tutti.horovod.installing import export_rank, install


def main() -> None:
    """Run ``python -m tutti.horovod SCRIPT ARGUMENTS…``: a Horovod script, with ``import horovod`` served by tutti.

    Takes the words from ``sys.argv`` and runs the script as ``__main__`` in this process, with ``sys.argv`` and
    ``sys.path[0]`` as ``python SCRIPT`` sets them. Where the package horovod itself is installed, it is imported
    instead of tutti's. Exceptions of the script propagate.

    Raises:
        SystemExit: the first word is missing or an option.
        UsageError: the launcher's environment variables contradict each other.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m tutti.horovod script.py [arguments]")
    install()
    export_rank(os.environ)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
