"""An accelerator gives what the CPU gives: equivalence, samples, state and scripts, a part of each.

The simulated one gives the CPU's bits where both use PyTorch's kernels, a real one (``TEST_DEVICE=cuda``) the CPU's
numbers to rounding. ``make contract DEVICE=simgpu`` and ``make scripts DEVICE=simgpu`` run the whole tables on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests import worlds
from tests.contract import test_samples, test_state
from tests.contract.table import HOST_ONLY, OPTIMIZERS, STRATEGIES, Case, largest_difference, running, train
from tests.contract.test_state import PLACES
from tests.covering import in_turn
from tests.scripts import table as scripts
from tests.scripts import test_scripts
from tests.simulated_accelerator import build
from tests.worlds import ACCELERATOR as DEVICE

pytestmark = pytest.mark.timeout(600)

SIMULATED = DEVICE == build.DEVICE

SERVED = {"parameter_server", "parameter_server × 2"}
"""Strategies whose servers add up in another order than with the CPU's shared memory."""

NATIVE = {"lars", "larc", "lamb", "novograd"}
"""Optimizers with compiled loops on CPUs, whose sums are added in another order than on devices."""

TOLERANCE = 1e-10

NARROW = {"muon": 1e-2, "torch muon": 1e-2}
"""Optimizers that multiply in bfloat16, which another device's kernels round otherwise."""


REPEATED = {
    *(f"mirrored, {algorithm}" for algorithm in ("small buckets", "tree", "halving", "central")),
    *("pipeline gpipe", "pipeline 1f1b × 2", "pipeline interleaved × 2", "local_sgd, post"),
    *("hybrid, shards", "hybrid, shards of stages", "hybrid, sequence", "hybrid zero_bubble"),
    *("tensor × 2", "sharded × 2", "model_parallel × 2"),
}
"""Strategies of which others in the table have every part: ``full``, and in ``make contract DEVICE=simgpu``."""


def cases() -> list[Any]:
    """Every strategy once, on two devices where it can; those of ``REPEATED`` marked ``full``."""
    return [pytest.param(case, marks=pytest.mark.full) if case.strategy in REPEATED else case for case in drawn()]


def drawn() -> list[Case]:
    """Every strategy once, on two devices where it can, with another optimizer than those before where it can."""
    chosen: list[Case] = []
    mixed = running("odd", {3, 4}, {2, 4})
    random.Random(1).shuffle(mixed)
    for name in (name for name in STRATEGIES if name != HOST_ONLY):
        own = [case for case in mixed if case.strategy == name]
        few = [case for case in own if case.devices == 2] or [case for case in own if not case.micro_batch]
        used = {case.optimizer for case in chosen}
        chosen.append(next((case for case in few if case.optimizer not in used), few[0]))
    return sorted(chosen, key=lambda case: case.devices)


def arguments(case: Case) -> dict[str, Any]:
    return {
        "steps": 3,  # a whole epoch
        "strategy": STRATEGIES[case.strategy][0],
        "optimizer": OPTIMIZERS[case.optimizer],
        "trained": case.model,
        "workers": case.workers,
        "micro_batch": case.micro_batch,
        "clip": case.clip,
        "channels_last": case.channels_last,
        "batch_norm": case.batch_norm,
    }


def comparable(called: Callable[..., Any], **given: Any) -> Any:
    """``called`` without dropout where the accelerator draws other numbers than the CPU."""
    with nullcontext() if SIMULATED else patch("torch.nn.functional.dropout", lambda inputs, *_, **__: inputs):
        return called(**given)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_cpu(case: Case) -> None:
    same = case.optimizer not in NATIVE and case.strategy not in SERVED and not case.batch_norm.startswith("ghost")
    exact, tolerance = SIMULATED and same, TOLERANCE if SIMULATED else NARROW.get(case.optimizer, TOLERANCE)
    given = arguments(case)
    there = worlds.run_on(DEVICE, case.devices, comparable, called=train, **given)
    here = worlds.run_on("cpu", case.devices, comparable, called=train, **given)
    for (got, losses, _), (want, own, _) in zip(there, here, strict=True):
        assert not exact or losses == own
        assert largest_difference(got, want) <= (0 if exact else tolerance)
        assert losses == pytest.approx(own, rel=max(1e-9, 10 * tolerance if tolerance > TOLERANCE else 0))


def test_sums_in_the_hosts_memory_are_refused() -> None:
    case = next(case for case in running("odd", {4}, {2}) if case.strategy == HOST_ONLY)
    with pytest.raises(worlds.RankError, match="ranks compute on accelerators"):
        worlds.run_on(DEVICE, 2, train, **arguments(case))


@pytest.fixture
def _on_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "DEVICE", DEVICE)


def worlds_of_samples() -> list[Any]:
    """Every kind of strategy once; on other devices and with other options marked ``full``."""
    kinds = [strategy.partition(":")[0] for _, strategy in test_samples.WORLDS]
    given = zip(test_samples.WORLDS, cycle(test_samples.GIVEN), strict=False)
    return [
        row if kinds.index(kinds[number]) == number else pytest.param(*row, marks=pytest.mark.full)
        for number, row in enumerate(given)
    ]


@pytest.mark.usefixtures("_on_the_accelerator")
@pytest.mark.parametrize(("world", "given"), worlds_of_samples(), ids=str)
def test_every_sample_once_in_the_global_order(world: tuple[int, str], given: tuple[str, int]) -> None:
    """With micro-batches, and with fewer samples than workers; the other cases are the CPU's."""
    test_samples.check(world, given, [(23, 8, 2), (5, 9, None)])


@pytest.mark.parametrize(
    ("number", "back"),
    in_turn(range(len(PLACES)), [False, True]),
    ids=lambda given: ("there", "back")[given] if isinstance(given, bool) else " on ".join(map(str, PLACES[given])),
)
def test_a_checkpoint_goes_to_the_accelerator_and_back(number: int, back: bool, tmp_path: Path) -> None:
    """The other device and another place go on bit for bit, as one CPU would have; each optimizer there and back."""
    first, second = (DEVICE, "cpu") if back else ("cpu", DEVICE)
    optimizer = ("adamw", "muon", "torch adafactor", "sgd momentum")[(number + number // 4) % 4]
    want, digest = alone(optimizer)
    (strategy, ranks), (other, others) = PLACES[number], PLACES[number - 3]
    arguments = {"optimizer": OPTIMIZERS[optimizer], "workers": 4, "folder": str(tmp_path)}
    worlds.run_on(first, ranks, comparable, called=test_state.save, strategy=strategy, **arguments)
    for got, own in worlds.run_on(second, others, comparable, called=test_state.resume, strategy=other, **arguments):
        if SIMULATED:
            assert own == digest
        assert largest_difference(got, want) <= (0 if SIMULATED else NARROW.get(optimizer, TOLERANCE))


@cache
def alone(optimizer: str) -> Any:
    arguments = {"strategy": "single", "optimizer": OPTIMIZERS[optimizer], "workers": 4}
    return worlds.run_on("cpu", 1, comparable, called=test_state.whole, **arguments)[0]


def few_scripts() -> list[scripts.Case]:
    """Every strategy with the first scripts of ``make test``'s part that have it, on different numbers of devices."""
    chosen: dict[str, scripts.Case] = {}
    for case in scripts.pairwise():
        chosen.setdefault(case.strategy, case)
    # Autograd's threads of a device order the second backward otherwise than a CPU's one thread.
    cases = [*chosen.values(), scripts.Case("script_wgan_gp", "sharded", 2, 2)]
    return sorted(cases, key=lambda case: case.devices)


@pytest.mark.skipif(not SIMULATED, reason="the scripts' oracle draws the random numbers of a CPU")
@pytest.mark.usefixtures("_on_the_accelerator")
@pytest.mark.parametrize("case", few_scripts(), ids=str)
def test_a_script_equals_its_oracle_or_is_refused(case: scripts.Case) -> None:
    test_scripts.check(case)
