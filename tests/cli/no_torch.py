"""``tutti`` where torch cannot be imported, for ``test_refusals.py``."""

from __future__ import annotations

import sys
from typing import Any


class Absent:
    """An import of torch ends the process with its name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raises SystemExit for torch; None, for the finders behind it, else."""
        if name.partition(".")[0] == "torch":
            sys.exit(f"{name} was imported")


if __name__ == "__main__":
    if "torch" in sys.modules:
        sys.exit("torch was imported")
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]
    from tutti.cli.app import main

    sys.exit(main())
