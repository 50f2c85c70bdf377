"""Eigenvalues, trace and spectral density of a symmetric operator that is known by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Product = Callable[[Vector], Vector]

_CONFIDENCE = 0.95
_BROKEN_DOWN = 1e-10


@dataclass(frozen=True)
class Eigenvalue:
    """An estimated eigenvalue of an operator H, with its error bound.

    Attributes:
        value: the estimate λ.
        residual: ‖Hv − λv‖ for the unit vector v that belongs to λ; an eigenvalue of H lies within this distance of λ.
    """

    value: float
    residual: float


@dataclass(frozen=True)
class SpectralDensity:
    """Spectral density of an operator H by stochastic Lanczos quadrature, and its trace by Hutchinson's estimator.

    Attributes:
        nodes: eigenvalues at which the density has mass.
        weights: mass at each of the eigenvalues; the weights sum to 1.
        lowest, highest: extreme Ritz values; the spectrum reaches at least as far.
        trace: mean of n·vᵀHv over random unit vectors v of n dimensions.
        trace_low, trace_high: 90 % band of the trace by Student's t over these vectors; both infinite for a single one.
        probes: number of random vectors.
    """

    nodes: Vector
    weights: Vector
    lowest: float
    highest: float
    trace: float
    trace_low: float
    trace_high: float
    probes: int


def largest_eigenvalues(product: Product, size: int, count: int, tolerance: float, seed: int) -> list[Eigenvalue]:
    """Compute the algebraically largest eigenvalues of a symmetric operator by ARPACK's implicitly restarted Lanczos.

    An operator of few dimensions (at most 20, or 2 · ``count`` + 1) is built whole and diagonalised.

    Args:
        product: function that returns the operator, such as a Hessian, times a vector; both NumPy arrays (size,).
        size: dimensions of the operator.
        count: number of eigenvalues; all where the operator has fewer.
        tolerance: relative accuracy at which ARPACK stops.
        seed: seed of the random start vector.

    Returns:
        A list of ``Eigenvalue`` in falling order, each with ``value`` λ and ``residual``, the norm of Hv − λv, within
        which an eigenvalue lies; fewer than ``count`` where ARPACK did not converge, which raises nothing.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    if size <= max(2 * count + 1, 20):
        dense = np.stack([product(row) for row in np.eye(size)])
        values, vectors = np.linalg.eigh((dense + dense.T) / 2)
        products = dense @ vectors
    else:
        operator = LinearOperator((size, size), matvec=lambda v: product(np.ravel(v)), dtype=np.float64)
        start = np.random.default_rng(seed).standard_normal(size)
        try:
            values, vectors = eigsh(operator, count, which="LA", tol=tolerance, v0=start, maxiter=10 * count + 30)
        except ArpackNoConvergence as stopped:
            values, vectors = stopped.eigenvalues, stopped.eigenvectors
        products = np.stack([product(vector) for vector in vectors.T], axis=1) if len(values) else vectors
    residuals = np.linalg.norm(products - values * vectors, axis=0)
    found = [Eigenvalue(float(value), float(rest)) for value, rest in zip(values, residuals, strict=True)]
    return sorted(found, key=lambda each: -each.value)[:count]


def lanczos(product: Product, start: Vector, steps: int) -> tuple[Vector, Vector]:
    """Run the Lanczos iteration on a symmetric operator, and return the tridiagonal matrix that it builds.

    Each Lanczos vector is orthogonalised twice against all earlier ones.

    Args:
        product: multiplies a vector (n,) by the operator.
        start: the start vector (n,); it need not have length 1.
        steps: number of steps.

    Returns:
        The matrix as two vectors: its diagonal, shape (m,), and its off-diagonal, shape (m − 1,). m = min(``steps``,
        n), or less if the Krylov subspace of ``start`` has fewer dimensions.
    """
    basis = [start / np.linalg.norm(start)]
    diagonal, beside = [], []
    for step in range(min(steps, len(start))):
        following = product(basis[-1])
        diagonal.append(float(basis[-1] @ following))
        if step + 1 == min(steps, len(start)):
            break
        for _ in range(2):
            for vector in basis:
                following = following - (vector @ following) * vector
        length = float(np.linalg.norm(following))
        if length <= _BROKEN_DOWN * max(np.abs(diagonal)):
            break
        beside.append(length)
        basis.append(following / length)
    return np.array(diagonal), np.array(beside)


def spectral_density(product: Product, size: int, probes: int, steps: int, seed: int) -> SpectralDensity:
    """Estimate spectral density and trace of a symmetric operator by stochastic Lanczos quadrature.

    One Lanczos iteration starts at each of several random vectors v of ±1 (Rademacher). The first diagonal element of
    its tridiagonal matrix is vᵀHv/n, which gives the trace without further products.

    Args:
        product: multiplies a vector (size,) by the operator H.
        size: dimensions n of the operator.
        probes: number of random vectors.
        steps: number of steps of each Lanczos iteration.
        seed: seed of the random vectors.

    Returns:
        A ``SpectralDensity``: ``nodes``, eigenvalue estimates in rising order, with ``weights`` that sum to 1, (probes
        · steps,) at most; the ``lowest`` and the ``highest`` of these estimates; ``trace`` with its 90 % band
        (``trace_low``, ``trace_high``), which is infinite for one probe.

    Source: Hutchinson 1990; Golub & Welsch 1969; Ghorbani, Krishnan, Xiao 2019, arXiv 1901.10159.
    """
    nodes, weights, traces = [], [], []
    for probe in range(probes):
        start = np.random.default_rng([seed, probe]).choice(np.array([-1.0, 1.0]), size)
        diagonal, beside = lanczos(product, start, steps)
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        nodes.append(values)
        weights.append(vectors[0] ** 2 / probes)
        traces.append(size * diagonal[0])
    mean = float(np.mean(traces))
    half = _student(probes - 1) * float(np.std(traces, ddof=1)) / np.sqrt(probes) if probes > 1 else np.inf
    found = np.concatenate(nodes)
    order = np.argsort(found, kind="stable")
    return SpectralDensity(
        found[order],
        np.concatenate(weights)[order],
        float(found.min()),
        float(found.max()),
        mean,
        mean - half,
        mean + half,
        probes,
    )


def smooth_density(density: SpectralDensity, points: int = 300) -> tuple[Vector, Vector]:
    """Smooth a spectral density into a curve: each eigenvalue estimate becomes a Gaussian with its weight as area.

    The standard deviation is a hundredth of the spectrum's width (a choice for the eye).

    Args:
        density: eigenvalue estimates and weights from ``spectral_density``.
        points: number of points of the curve.

    Returns:
        A pair of vectors of shape (points,): eigenvalues, evenly spaced, and the density at each of them.
    """
    width = max((density.highest - density.lowest) / 100, 1e-12)
    grid = np.linspace(density.lowest - 4 * width, density.highest + 4 * width, points)
    bells = np.exp(-0.5 * ((grid[:, None] - density.nodes[None]) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    return grid, bells @ density.weights


def _student(freedom: int) -> float:
    """Return the quantile 0.95 of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, _CONFIDENCE))
