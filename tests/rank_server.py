"""Imported by the process that forks the ranks of ``worlds.py``: what they find imported, and cheap forks."""

from __future__ import annotations

from tests.preloaded import COMPILING, MODULES, preload

# pytest and the contract tables, too: the modules of functions that ranks are sent, half a second of each rank.
preload([*MODULES, *COMPILING, "pytest", "tests.contract.test_accelerator", "tests.contract.test_equivalence"])
