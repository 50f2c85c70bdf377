"""Names of metrics in TensorBoard, Weights & Biases, MLflow and trackio, with slashes and units. No torch.

One table for all of them; ``metrics.jsonl`` keeps its flat keys, which readers of old run directories know.
"""

from __future__ import annotations

from collections.abc import Mapping

LOGGED: Mapping[str, tuple[str, str]] = {
    "loss": ("train/loss", "mean over the global batch"),
    "grad_norm": ("train/grad_norm", "L2 norm of the whole gradient, before clipping"),
    "lr": ("train/lr", "learning rate of the first parameter group"),
    "loss_scale": ("train/loss_scale", "factor on the loss in backward"),
    "noise_scale": ("train/noise_scale_samples", "samples"),
    "seconds": ("time/train_sec", "seconds of training, without evaluations and saves"),
    "data_seconds": ("time/data_sec", "seconds for which the step waited for its batch"),
    "bubble": ("time/bubble_fraction", "idle fraction of a pipeline's schedule, 0 to 1"),
    "samples_per_second": ("throughput/samples_per_sec", "samples/s of all devices together"),
    "throughput/device/samples_per_sec": ("throughput/device/samples_per_sec", "samples/s of a device"),
    "throughput/device/tokens_per_sec": ("throughput/device/tokens_per_sec", "tokens/s of a device"),
    "throughput/device/mfu": ("throughput/device/mfu", "model FLOP/s ÷ peak FLOP/s, 0 to 1"),
    "throughput/device/hfu": ("throughput/device/hfu", "computed FLOP/s ÷ peak FLOP/s, 0 to 1"),
}
"""Name in loggers, and its meaning with the unit, by key in ``metrics.jsonl``."""


def train_names(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values of a training step by their names in loggers; values that are None are left out.

    Keys without a logger's name of their own, such as metrics of the loss function, become ``train/{key}``.

    Args:
        values: values by their keys in ``metrics.jsonl``.

    >>> train_names({"loss": 0.5, "accuracy": 0.9, "seconds": 3.0, "grad_norm": None})
    {'train/loss': 0.5, 'train/accuracy': 0.9, 'time/train_sec': 3.0}
    """
    named = {LOGGED.get(key, (f"train/{key}", ""))[0]: value for key, value in values.items()}
    return {name: float(value) for name, value in named.items() if value is not None}


def eval_names(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of an evaluation by their names in loggers, ``eval/loss`` and ``eval/{metric}``.

    Args:
        values: held-out loss and metrics by name.
    """
    return {f"eval/{name}": float(value) for name, value in values.items()}
