"""What glibc is told about freed memory, and that its own variables come first."""

from __future__ import annotations

import platform

import pytest

from tutti.world.allocator import keep_freed_memory

VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is a setting of glibc")
@pytest.mark.parametrize("variable", VARIABLES)
def test_who_sets_the_allocators_own_variables_has_chosen(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_memory()
    monkeypatch.setenv(variable, "1000000")
    assert not keep_freed_memory()
