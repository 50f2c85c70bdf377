"""What glibc is told about freed memory, and that its own variables come first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tutti.launcher.malloc_tuning import free_at_once, keep_freed_memory

VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
@pytest.mark.parametrize("variable", VARIABLES)
def test_who_sets_the_allocators_own_variables_has_chosen(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert free_at_once() and keep_freed_memory()
    monkeypatch.setenv(variable, "1000000")
    assert not keep_freed_memory() and not free_at_once()


_HELD = """
import psutil, torch
from tutti.launcher.malloc_tuning import free_at_once, keep_freed_memory

def held():
    before = psutil.Process().memory_info().rss
    large, small = torch.ones(16 << 20), torch.ones(1000)
    del large
    return (psutil.Process().memory_info().rss - before) >> 20

keep_freed_memory()
print(held())
free_at_once()
print(held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
def test_large_blocks_are_kept_or_given_back() -> None:
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, env=environ)
    kept, given_back = map(int, done.stdout.split())
    assert kept >= 60 and given_back <= 10, done.stderr
