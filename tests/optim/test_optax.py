"""100 random steps in float64 equal optax's. Its results are kept here; where optax is installed it runs again.

``python -m tests.optim.test_optax`` (with ``pip install 'tutti-train[parity]'``) writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.optim.problems import recorded_inputs, recorded_run
from tutti.optim import LAMB, LARS, NovoGrad

KEPT = Path(__file__).with_name("optax.json")
EVERYTHING = {"adapt_1d": True, "decay_1d": True}

# name: ours with optax's conventions, optax's function and arguments
ROWS: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "lars": (
        lambda p: LARS(p, lr=0.3, weight_decay=0.02, trust=0.1, denominator="norm_of_sum", **EVERYTHING),
        "lars",
        {"learning_rate": 0.3, "weight_decay": 0.02, "trust_coefficient": 0.1},
    ),
    "lars, nesterov": (
        lambda p: LARS(p, lr=0.3, nesterov=True, eps=1e-3, denominator="norm_of_sum", **EVERYTHING),
        "lars",
        {"learning_rate": 0.3, "nesterov": True, "eps": 1e-3},
    ),
    "lamb": (
        lambda p: LAMB(p, lr=0.01, weight_decay=0.05, **EVERYTHING),
        "lamb",
        {"learning_rate": 0.01, "weight_decay": 0.05},
    ),
    "novograd": (
        lambda p: NovoGrad(p, lr=0.01, betas=(0.9, 0.25), eps=1e-6, weight_decay=0.05, **EVERYTHING),
        "novograd",
        {"learning_rate": 0.01, "weight_decay": 0.05},
    ),
}


def theirs(name: str) -> list[list[float]]:
    import jax

    jax.config.update("jax_enable_x64", True)
    import optax

    _, function, arguments = ROWS[name]
    transform = getattr(optax, function)(**arguments)
    weights, steps = recorded_inputs()
    state = transform.init(weights)
    for grads in steps:
        updates, state = transform.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    return [[float(x) for x in weight.ravel()] for weight in weights]


@pytest.mark.parametrize("name", ROWS)
def test_equals_what_optax_gave(name: str) -> None:
    want = json.loads(KEPT.read_text(encoding="utf-8"))["weights"][name]
    for ours, other in zip(recorded_run(ROWS[name][0]), want, strict=True):
        assert ours == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_optax_still_gives_it(name: str) -> None:
    pytest.importorskip("optax", reason="pip install 'tutti-train[parity]' to run optax itself")
    want = json.loads(KEPT.read_text(encoding="utf-8"))["weights"][name]
    for now, other in zip(theirs(name), want, strict=True):
        assert now == pytest.approx(other, rel=1e-9, abs=1e-12)


if __name__ == "__main__":
    import optax

    text = json.dumps({"optax": optax.__version__, "weights": {name: theirs(name) for name in ROWS}}, indent=1)
    KEPT.write_text(text + "\n", encoding="utf-8")
