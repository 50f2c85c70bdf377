"""Linear regression with two parameters, for first experiments with batch size and gradient noise."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.config.task_config import LineConfig
from tutti.data.arrays import ArraySource
from tutti.data.keyed_random import hash64, uniform
from tutti.tasks import losses, models
from tutti.tasks.task import Task

SLOPE, INTERCEPT, NOISE = 2.0, -1.0, 0.5
"""The line, and the standard deviation of the noise on its targets."""
TRAIN, HELD_OUT = 512, 128
"""Numbers of samples."""


def linear_task(config: LineConfig) -> Task:
    """Build the task of fitting a line: y = 2x - 1 plus noise of standard deviation 0.5, x uniform in [-1, 1).

    The points are the same in every run. A batch is x and y, both (samples, 1) float32; the loss is the squared error.

    Args:
        config: options of the model y = w·x + b; there are none.

    Returns:
        A ``Task`` with the attributes ``model`` (a function without arguments that returns a new model), ``loss`` (the
        loss function), ``train`` (training samples) and ``eval`` (held-out samples).
    """
    inputs, targets = points(TRAIN + HELD_OUT)
    return Task(
        name="linear",
        model=partial(models.line_model, config),
        loss=losses.regression,
        train=ArraySource(inputs[:TRAIN], targets[:TRAIN]),
        eval=ArraySource(inputs[TRAIN:], targets[TRAIN:]),
        describe=f"{TRAIN} + {HELD_OUT} points of y = {SLOPE:g}x - {-INTERCEPT:g} with noise {NOISE:g}",
    )


def points(count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Make the data of the built-in task ``linear``: x, and y = 2x - 1 plus noise of standard deviation 0.5.

    x is uniform in [-1, 1). The noise is half of (a sum of twelve uniform numbers, less 6): close to normal, and
    bit-identical on every machine, which formulas with logarithms (Box-Muller) are not. Every call gives the same
    points.

    Args:
        count: number of points.

    Returns:
        x and y, each float32 (count, 1).
    """
    draws = uniform(hash64(np.arange(13)[:, None], np.arange(count)))
    x = 2 * draws[0] - 1
    noise = draws[1:].sum(axis=0) - 6
    y = SLOPE * x + INTERCEPT + NOISE * noise
    return x.astype(np.float32)[:, None], y.astype(np.float32)[:, None]
