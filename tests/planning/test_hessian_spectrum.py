"""Eigenvalues, trace and density of operators whose spectrum is known."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.planning.hessian_spectrum import lanczos, largest_eigenvalues, smooth_density, spectral_density

DRAWS = np.random.default_rng(3)


def symmetric(values: np.ndarray) -> np.ndarray:
    basis, _ = np.linalg.qr(DRAWS.standard_normal((len(values), len(values))))
    return np.asarray(basis @ np.diag(values) @ basis.T)


def test_lanczos_gives_the_published_tridiagonal_example() -> None:
    diagonal, beside = lanczos(lambda v: np.array([10.0, 5.0, 1.0]) * v, np.ones(3), 2)
    values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    assert values == pytest.approx([1.891795, 9.272140], abs=1e-6)


def test_lanczos_ends_where_the_space_of_its_start_is_exhausted() -> None:
    diagonal, beside = lanczos(lambda v: np.array([2.0, 2.0, 7.0, 7.0]) * v, np.ones(4), 4)
    assert (len(diagonal), len(beside)) == (2, 1)
    assert lanczos(lambda v: 0 * v, np.ones(4), 4)[0].tolist() == [0.0]


@pytest.mark.parametrize("size", [6, 80])
def test_largest_eigenvalues_are_those_of_the_matrix(size: int) -> None:
    values = np.linspace(-9.0, 5.0, size)
    matrix = symmetric(values)
    found = largest_eigenvalues(lambda v: matrix @ v, size, 3, 1e-9, 0)
    assert [each.value for each in found] == pytest.approx(values[::-1][:3], rel=1e-8)
    assert all(each.residual < 1e-6 for each in found)


def test_the_residual_bounds_the_error_of_an_eigenvalue_that_was_not_computed_to_the_end() -> None:
    values = np.sort(DRAWS.standard_normal(400))
    matrix = symmetric(values)
    for each in largest_eigenvalues(lambda v: matrix @ v, 400, 2, 0.3, 0):
        assert 1e-12 < np.abs(values - each.value).min() <= each.residual


def test_trace_and_density_of_a_full_run_are_exact() -> None:
    # A vector of ±1 and a diagonal operator: vᵀHv is the trace, and n steps give every eigenvalue weight 1/n.
    values = np.arange(1.0, 9.0)
    found = spectral_density(lambda v: values * v, 8, 3, 8, 0)
    assert found.trace == pytest.approx(36)
    assert (found.trace_low, found.trace_high) == pytest.approx((36, 36))
    assert found.nodes == pytest.approx(np.repeat(values, 3))
    assert found.weights == pytest.approx(np.full(24, 1 / 24))
    grid, heights = smooth_density(found, 2000)
    assert float(np.sum(heights) * (grid[1] - grid[0])) == pytest.approx(1, abs=1e-3)


def test_band_of_the_trace_holds_the_truth_nine_times_of_ten() -> None:
    matrix = DRAWS.standard_normal((30, 30))
    matrix = matrix + matrix.T
    held = 0
    for seed in range(300):
        found = spectral_density(lambda v: matrix @ v, 30, 5, 2, seed)
        held += found.trace_low <= np.trace(matrix) <= found.trace_high
    # Within 4 standard deviations of 0.9 · 300.
    assert 249 <= held <= 291


def test_a_single_probe_has_no_band() -> None:
    found = spectral_density(lambda v: v, 4, 1, 2, 0)
    assert (found.trace_low, found.trace_high) == (-np.inf, np.inf)
