"""Ranks that share one device, as tests on a machine with one GPU let them (``tests/gpu/sharing.py``)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launching import SOURCE
from tests.simulated_accelerator import build
from tests.simulated_accelerator.build import DEVICE

CASES = "equals_the_cpu and (mirrored or pipeline-interleaved or sharded or tensor)"


@pytest.mark.full
def test_strategies_whose_ranks_share_a_device_equal_the_cpu() -> None:
    """Their collectives wait for kernels, deliver at ``wait``, and count no version for autograd, as NCCL's."""
    build.require()
    environ = {**os.environ, "TEST_SHARE_GPU": "1", "TEST_DEVICE": DEVICE}
    words = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/contract/test_accelerator.py")
    done = subprocess.run(
        [sys.executable, *words, "-k", CASES], cwd=SOURCE.parent, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
