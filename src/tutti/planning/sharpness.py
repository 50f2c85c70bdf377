"""How much the loss rises near a minimum: Keskar's ε-sharpness, and the rise along the gradient that SAM descends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
ValueAndGradient = Callable[[Vector], tuple[float, Vector]]

_ITERATIONS = 10


def epsilon_sharpness(function: ValueAndGradient, point: Vector, epsilon: float) -> float:
    """Return the largest rise of the loss f in a box around a point: 100 · (max f(x + y) − f(x)) / (1 + f(x)) %.

    The box is |y_i| ≤ ε(|x_i| + 1). The maximum is sought by 10 iterations of L-BFGS-B from x, and at the corner of the
    box to which the gradient's signs point, so that the result is a lower bound. The result depends on the scale of the
    parameters (Dinh et al. 2017, arXiv 1703.04933): compare models of one architecture only.

    Args:
        function: f; returns loss and gradient (n,) at a point (n,).
        point: x (n,), the parameters as one vector.
        epsilon: ε; the source takes 1e-3 and 5e-4.

    Returns:
        The rise in per cent, 0 or more.

    Source: Keskar et al. 2017, arXiv 1609.04836, metric 2.1 with A = I.
    """
    from scipy.optimize import minimize

    here, slope = function(point)
    reach = epsilon * (np.abs(point) + 1)
    # The maximiser is often a corner of the box, and L-BFGS-B finds corners in one step of sufficient length.
    highest = max(here, function(point + np.sign(slope) * reach)[0])

    def below(step: Vector) -> tuple[float, Vector]:
        nonlocal highest
        value, gradient = function(point + step)
        if np.isfinite(value):
            highest = max(highest, value)
        return -value, -gradient

    bounds = np.stack([-reach, reach], axis=1)
    options = {"maxiter": _ITERATIONS, "maxfun": 3 * _ITERATIONS}
    minimize(below, np.zeros_like(point), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return 100 * (highest - here) / (1 + here)


def sam_sharpness(function: ValueAndGradient, point: Vector, radius: float) -> float:
    """Return the rise of the loss f after a step of length ρ along its gradient g: f(x + ρ·g/‖g‖) − f(x).

    0 where the gradient is zero.

    Args:
        function: f; returns loss and gradient (n,), both over all samples, at a point (n,).
        point: x (n,), the parameters as one vector.
        radius: ρ, length of the step.

    Source: Foret et al. 2021, arXiv 2010.01412, eq. 2, with the gradient over all samples instead of a micro-batch.
    """
    here, slope = function(point)
    length = float(np.linalg.norm(slope))
    return function(point + radius / length * slope)[0] - here if length else 0.0
