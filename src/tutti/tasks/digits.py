"""Handwritten digits of scikit-learn: 1,797 grey images 8×8 (Alpaydin & Kaynak 1998, UCI 80)."""

from __future__ import annotations

import gzip
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.config.task_config import CnnConfig, MlpConfig
from tutti.data.arrays import ArraySource
from tutti.distribution import pip_install
from tutti.errors import DataError
from tutti.tasks import losses, models
from tutti.tasks.task import Task

CLASSES = 10
"""Number of classes, the digits."""


def digits_task(config: CnnConfig | MlpConfig) -> Task:
    """Build the task of classifying scikit-learn's handwritten digits, grey 8×8 images with pixels in [0, 1].

    Every fifth image is held out. A batch is images (samples, 1, 8, 8) float32 and labels (samples,) int64; the loss is
    the cross-entropy.

    Args:
        config: options of the model, whose class selects it: a CNN or a multi-layer perceptron.

    Returns:
        A ``Task`` with the attributes ``model`` (a function without arguments that returns a new model), ``loss`` (the
        loss function), ``train`` (training samples) and ``eval`` (held-out samples).

    Raises:
        DataError: scikit-learn is not installed.
    """
    table = _read_table()
    inputs = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    targets = table[:, -1].astype(np.int64)
    held_out = np.arange(len(targets)) % 5 == 4
    model = (
        partial(models.cnn, config, CLASSES) if isinstance(config, CnnConfig) else partial(models.mlp, config, CLASSES)
    )
    return Task(
        name="digits",
        model=model,
        loss=losses.classification,
        train=ArraySource(inputs[~held_out], targets[~held_out]),
        eval=ArraySource(inputs[held_out], targets[held_out]),
        images=True,
        describe=f"{(~held_out).sum():,} + {held_out.sum():,} grey images 8×8, {CLASSES} classes",
    )


def _read_table() -> NDArray[Any]:
    """Return the images' pixels and labels, (1797, 65), as ``sklearn.datasets.load_digits`` reads them.

    The file is read without an import of scikit-learn, which takes longer than a run's first steps; where it is
    elsewhere, scikit-learn reads it.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError("the digits come with scikit-learn", remedy=f"run {pip_install('demo')}")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        with gzip.open(file, "rt", encoding="ascii") as lines:
            return np.loadtxt(lines, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])
