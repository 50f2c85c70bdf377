"""Settings of all tests, made before torch is loaded."""

from __future__ import annotations

import os

# Threads of OpenMP that wait for work spin, and with several pytest workers they take the cores from all that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
