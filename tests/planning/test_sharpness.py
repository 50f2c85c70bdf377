"""Sharpness of the quadratic f(w) = wᵀ diag(10, 1) w / 2 at w = (0.1, 0.2), against the formulas' worked numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.planning.sharpness import epsilon_sharpness, sam_sharpness

CURVATURE, POINT = np.array([10.0, 1.0]), np.array([0.1, 0.2])


def quadratic(point: np.ndarray) -> tuple[float, np.ndarray]:
    return float(CURVATURE @ point**2) / 2, CURVATURE * point


def test_epsilon_sharpness() -> None:
    assert epsilon_sharpness(quadratic, POINT, 1e-3) == pytest.approx(0.125866355, rel=1e-8)


def test_epsilon_sharpness_at_a_saddle_follows_the_direction_that_rises() -> None:
    def saddle(point: np.ndarray) -> tuple[float, np.ndarray]:
        return float(point[0] ** 2 - point[1] ** 2), np.array([2 * point[0], -2 * point[1]])

    found = epsilon_sharpness(saddle, np.array([1e-6, 0.0]), 0.1)
    assert found == pytest.approx(100 * 0.1**2, rel=1e-3)


def test_sam_sharpness() -> None:
    assert sam_sharpness(quadratic, POINT, 0.05) == pytest.approx(0.063057503, rel=1e-7)
    assert sam_sharpness(quadratic, np.zeros(2), 0.05) == 0
