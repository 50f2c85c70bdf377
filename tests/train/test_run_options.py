"""Numbers that ``tutti.prepare`` refuses: each would train something else than it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tutti.errors import UsageError
from tutti.train.run_options import RunOptions


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("workers", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("micro_batch", -1, "at least 1"),
        ("noise_every", 0, "at least 1"),
        ("max_nonfinite", 0, "at least 1"),
        # A negative norm would turn the gradient round.
        ("clip", -1.0, "above 0, or None"),
        ("clip", 0.0, "above 0, or None"),
        ("clip", float("nan"), "above 0, or None"),
    ],
)
def test_numbers_out_of_bounds_are_refused(option: str, value: float, bound: str) -> None:
    with pytest.raises(UsageError, match=rf"^{option} is {value:g}\. Give a .*{bound}"):
        RunOptions(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("batch_size", "64"),
        ("micro_batch", 8.0),
        ("workers", "2"),
        ("data_workers", -1),
        ("seed", "0"),
        ("clip", "1"),
        ("clip", True),
        ("reproducible", "no"),
        ("channels_last", "nhwc"),
        ("shuffle", "false"),
        ("batch_norm", True),
        ("activation_checkpointing", True),
        ("gradient_noise", 1),
        ("lr_scale", 2.0),
    ],
)
def test_values_of_other_types_are_refused(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{option} is {value!r}\. Give (a |True|text)"):
        RunOptions(**{option: value})


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": float("inf"), "workers": 1, "micro_batch": np.int64(2), "seed": -1}, {"shuffle": np.bool_(False)}],
)
def test_numbers_within_bounds_are_taken(options: dict[str, Any]) -> None:
    RunOptions(**options)
