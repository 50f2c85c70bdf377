"""How often each fault is played: once, or ``FAULT_RUNS`` times with other ranks and steps."""

from __future__ import annotations

import os

import pytest

RUNS = int(os.environ.get("FAULT_RUNS", "1"))


@pytest.fixture(autouse=True, params=range(RUNS), ids="seed{}".format)
def seed(request: pytest.FixtureRequest) -> int:
    """What a test draws its rank and step from."""
    number: int = request.param
    return number
