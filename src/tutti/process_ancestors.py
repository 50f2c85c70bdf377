"""Find the process that started all ranks of this node, to identify a job whose launcher gives it no id. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

_PROXIES = ("pmi_proxy", "mpiexec")
_RANK = "PMI_RANK"


def job_of(environ: Mapping[str, str]) -> str | None:
    """Return a text that identifies the job of a rank that Hydra (mpiexec) has started: equal on all ranks of a node.

    The text is the process id of the proxy, the process from which Hydra starts all ranks of a node: the nearest
    ancestor of this process that is named as a proxy, or whose environment lacks the rank's variable ``PMI_RANK``.

    Args:
        environ: the rank's environment; without ``PMI_RANK`` the parent process counts as the proxy.

    Returns:
        The text; None without psutil, if the processes may not be inspected, or if no ancestor is such a process.
    """
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        for ancestor in psutil.Process(os.getpid()).parents():
            named = any(name in ancestor.name() for name in _PROXIES)
            if named or _RANK not in environ or _RANK not in ancestor.environ():
                return str(ancestor.pid)
    except psutil.Error:
        # The process belongs to another user, or has ended.
        return None
    return None
