"""Ctrl-C while a command's own modules, or those of a run, are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import SOURCE

# Interrupts the import of one module, and drops the exception as native modules of torch do. The module is replaced by
# one that trains nothing.
MAIN = """
import importlib.abc, importlib.machinery, signal, sys

class Interrupt(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == {module!r} else None

    def exec_module(self, module):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("an exception was dropped", file=sys.stderr)
        module.main = module.train_rank = lambda *_: 0

from tutti.__main__ import main

sys.meta_path.insert(0, Interrupt())
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["tutti.cli.app", "tutti.train.main"])
def test_an_interrupt_ends_the_command_with_its_exit_code(module: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAIN.format(module=module), "train", "linear", "--devices", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (130, "tutti: interrupted\n")
