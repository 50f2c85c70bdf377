"""Count the accelerator's devices for ``--devices auto``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from functools import cache

from tutti.device import count_by_driver
from tutti.launcher import isolated

_PATIENCE = 120.0


def count_accelerators(choice: str, environ: Mapping[str, str]) -> int:
    """Return the number of accelerators that a process with ``--device choice`` may use; 0 for ``cpu``.

    The driver's files are read first. If they do not tell, a subprocess imports torch and counts the devices; the call
    waits for it, at most two minutes, and returns 0 if it fails. This process itself neither imports torch nor touches
    a driver, because it is to fork the ranks later.

    Args:
        choice: value of ``--device``: ``auto``, ``cpu`` or an accelerator's type; all but ``cpu`` give the same count.
        environ: environment variables, some of which limit the visible devices.
    """
    if choice == "cpu":
        return 0
    count = count_by_driver(environ)
    return _seen_by_torch() if count is None else count


@cache
def _seen_by_torch() -> int:
    try:
        ended = isolated.run_module("tutti.launcher.torch_facts", (), _PATIENCE)
    except subprocess.TimeoutExpired:
        return 0
    return len(json.loads(ended.out.splitlines()[-1])["gpus"]) if ended.code == 0 else 0
