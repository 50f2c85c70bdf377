"""Name of the distribution on PyPI, and version.

The name ``tutti`` on PyPI belongs to another project, which also has a module ``tutti``. Hence the version is a
constant of these files and is not read from installed metadata.
"""

from __future__ import annotations

DISTRIBUTION = "tutti-train"
"""Name for ``pip install``; the module is ``tutti``."""

VERSION = "0.1.0.dev0"


def pip_install(*extras: str) -> str:
    """Return the ``pip`` command that installs optional dependencies (extras) of this package, for an error's remedy.

    Args:
        extras: names of the extras, at least one, as pyproject.toml declares them.

    >>> pip_install("data", "plot")
    "pip install 'tutti-train[data,plot]'"
    """
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
