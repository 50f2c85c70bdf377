"""``python -m tutti`` is ``tutti``."""

from __future__ import annotations

import sys

from tutti.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
