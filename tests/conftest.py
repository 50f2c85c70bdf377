"""Settings of all tests, made before torch is loaded."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Threads of OpenMP that wait for work spin, and with several pytest workers they take the cores from all that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Beside other tests an example may take any time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
