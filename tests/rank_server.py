"""Imported by the process that forks the ranks of ``worlds.py``: what they find imported, and cheap forks."""

from __future__ import annotations

from tests.preloaded import COMPILING, MODULES, preload

# pytest and the contract table, too: what the modules import whose functions ranks are sent, 0.4 s of each rank's time.
preload([*MODULES, *COMPILING, "pytest", "tests.contract.test_accelerator"])
