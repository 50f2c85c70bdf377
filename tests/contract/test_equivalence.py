"""P devices equal one device with the same workers and micro-batches (docs/architecture.md, contract 1)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests import worlds
from tests.contract.table import (
    DEVICES,
    HOST_ONLY,
    KINDS,
    OPTIMIZERS,
    STRATEGIES,
    Case,
    in_another_order,
    largest_difference,
    pairwise,
    part,
    train,
    updates_on_host,
    whole,
)
from tests.covering import in_turn
from tests.simulated_accelerator import build

TOLERANCE = 1e-10
PART = os.environ.get("CONTRACT_PART")
OTHER_ROUNDING: dict[str, Callable[[Case], bool]] = defaultdict(lambda: updates_on_host)
"""By device: cases whose update rounds otherwise than that of one device. The simulated one has the CPU's kernels."""
OTHER_ROUNDING |= {"cpu": lambda case: False, build.DEVICE: in_another_order}


def reference(strategy: str, optimizer: str, case: Case, exact: bool) -> Any:
    return worlds.alone(
        train,
        strategy=strategy,
        optimizer=optimizer,
        trained=case.model,
        workers=case.workers,
        micro_batch=case.micro_batch,
        clip=case.clip,
        channels_last=case.channels_last,
        batch_norm=case.batch_norm,
        reproducible=exact,
    )


def check(case: Case) -> None:
    if worlds.DEVICE != "cpu" and case.strategy == HOST_ONLY:
        pytest.skip("refused on accelerators")
    specification, single, _ = STRATEGIES[case.strategy]
    optimizer = OPTIMIZERS[case.optimizer]
    for reproducible in case.modes:
        alone = replace(case, strategy="", devices=1, reproducible=None)
        want, losses, digest = reference(single, optimizer, alone, reproducible)
        for got, own_losses, own_digest in worlds.run(
            case.devices,
            train,
            strategy=specification,
            optimizer=optimizer,
            trained=case.model,
            workers=case.workers,
            micro_batch=case.micro_batch,
            clip=case.clip,
            channels_last=case.channels_last,
            batch_norm=case.batch_norm,
            reproducible=reproducible,
        ):
            exact = reproducible and not OTHER_ROUNDING[worlds.DEVICE](case)
            assert largest_difference(got, want) <= (0 if exact else TOLERANCE)
            assert own_losses == (pytest.approx(losses, rel=0 if exact else 1e-9, abs=0))
            if exact:
                assert own_digest == digest


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_equals_one_device(case: Case) -> None:
    check(case)


def test_ordinary_runs_hold_every_pair() -> None:
    """Every strategy with each kind of optimizer, on 1, 2 and 3 or 4 devices, in each of its modes, where it runs."""
    chosen = pairwise()
    kinds = {(case.strategy, KINDS[case.optimizer]) for case in whole()}
    assert kinds == {(case.strategy, KINDS[case.optimizer]) for case in chosen}
    assert {case.optimizer for case in chosen} == set(OPTIMIZERS)
    devices = {(case.strategy, case.devices) for case in whole() if case.devices < 4}
    devices |= {(case.strategy, 4) for case in whole() if (case.strategy, 3) not in devices}
    assert devices <= {(case.strategy, case.devices) for case in chosen}
    assert {case.devices for case in chosen} == set(DEVICES)
    modes = {(case.strategy, mode) for case in chosen for mode in case.modes}
    assert modes == {(case.strategy, mode) for case in whole() for mode in case.modes}


@pytest.mark.contract
@pytest.mark.parametrize("case", part(PART) if PART else [], ids=str)
def test_equals_one_device_whole_table(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd", "central_storage", "diloco"])
def test_reproducible_on_eight_data_ranks(strategy: str) -> None:
    specification, single, _ = STRATEGIES[strategy]
    want, losses, digest = reference(single, OPTIMIZERS["adam"], Case("", "adam", 8, 1), True)
    for got, own_losses, own_digest in worlds.run(
        8, train, strategy=specification, optimizer=OPTIMIZERS["adam"], workers=8, reproducible=True
    ):
        assert (largest_difference(got, want), own_losses, own_digest) == (0, losses, digest)


# Stated tolerances of reduced precision, for parameters of order 1 after four steps of SGD.
REDUCED = {
    "fp32": ("mirrored", "fp32", 1e-5),
    "fp32, native": ("mirrored:algorithm=native", "fp32", 1e-5),
    "bf16 wire": ("mirrored:wire=bf16", "fp32", 5e-3),
    "fp16 wire": ("mirrored:wire=fp16", "fp32", 1e-3),
    "bf16 compute": ("mirrored", "bf16", 5e-3),
    "fp16 compute": ("mirrored", "fp16", 1e-3),
    "fp16 compute and wire": ("mirrored:wire=fp16", "fp16", 2e-3),
    "fp16 compute, model_parallel": ("model_parallel", "fp16", 1e-3),
    "fp16 compute, parameter_server": ("parameter_server:servers=2", "fp16", 1e-3),
    "bf16 compute, central_storage": ("central_storage", "bf16", 5e-3),
    "bf16 compute, pipeline": ("pipeline:schedule=1f1b", "bf16", 5e-3),
    "fp16 compute, zero_bubble": ("pipeline:schedule=zero_bubble", "fp16", 1e-3),
    "fp32, tensor": ("tensor:least=1", "fp32", 1e-5),
    "bf16 compute, tensor": ("tensor:least=1", "bf16", 1e-2),
    "fp16 compute, tensor": ("tensor:least=1", "fp16", 2e-3),
    "bf16 compute, sharded": ("sharded:units=Linear", "bf16", 5e-3),
    "fp16 compute, sharded": ("sharded:units=Linear", "fp16", 1e-3),
    "bf16 parameters, sharded": ("sharded:param_dtype=bf16", "fp32", 2e-2),
}


@pytest.mark.parametrize(("row", "devices"), in_turn(list(REDUCED), [3, 4]))
def test_reduced_precision_stays_within_what_is_stated(row: str, devices: int) -> None:
    """Against one device in the same compute precision: the number of devices and the wire add no more than this."""
    specification, precision, tolerance = REDUCED[row]
    arguments = {"optimizer": OPTIMIZERS["sgd momentum"], "workers": 4, "precision": precision}
    want, *_ = worlds.alone(train, strategy="single", **arguments)
    for got, _, _ in worlds.run(devices, train, strategy=specification, **arguments):
        difference = largest_difference(got, want)
        assert difference <= tolerance
        if "wire" in row:
            assert difference > 1e-6, "nothing was compressed"


OVERFLOWING = "dynamic:init=1073741824,max=1073741824,backoff_factor=9.5367431640625e-07,growth_interval=2"


SCALED = ["mirrored", "model_parallel", "local_sgd", "central_storage"]
SCALED += ["local_sgd, post", "diloco", "pipeline zero_bubble"]


@pytest.mark.parametrize(("strategy", "devices"), in_turn(SCALED, [3, 4]))
def test_float16_is_reproducible_with_its_loss_scale(strategy: str, devices: int) -> None:
    """The first step overflows and is skipped, later ones raise the scale: all devices do so in the same steps."""
    specification, single, _ = STRATEGIES[strategy]
    arguments = {"optimizer": OPTIMIZERS["sgd momentum"], "workers": 4, "precision": "fp16", "reproducible": True}
    arguments |= {"loss_scale": OVERFLOWING, "clip": 0.5, "micro_batch": 4}
    want = worlds.alone(train, strategy=single, **arguments)
    for got, losses, digest in worlds.run(devices, train, strategy=specification, **arguments):
        assert (largest_difference(got, want[0]), digest) == (0, want[2])
        assert losses == pytest.approx(want[1], rel=1e-6)


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd", "central_storage", "local_sgd, post"])
def test_a_power_of_two_as_loss_scale_changes_no_bit(strategy: str) -> None:
    """Scaled, clipped and reported as if it were not there."""
    specification, single, _ = STRATEGIES[strategy]
    arguments = {"optimizer": OPTIMIZERS["adamw"], "workers": 4, "clip": 0.1, "reproducible": True, "precision": None}
    want = worlds.alone(train, strategy=single, **arguments)
    for got in worlds.run(3, train, strategy=specification, loss_scale="1024", **arguments):
        assert (largest_difference(got[0], want[0]), got[1:]) == (0, want[1:])


AGAIN, COMPILED = {"activation_checkpointing": "blocks"}, {"compile": "default:backend=eager"}
SELECTIVE = {"activation_checkpointing": "selective"}
FORWARDS: list[Any] = [
    # strategy, what is done, what is promised against one device without it: by default, and in reproducible mode
    *((strategy, AGAIN, (TOLERANCE, 0)) for strategy in ("mirrored", "local_sgd")),
    *((strategy, COMPILED, (TOLERANCE,)) for strategy in ("mirrored", "local_sgd")),
    ("central_storage", AGAIN | COMPILED, (TOLERANCE,)),
    ("sharded", AGAIN, (TOLERANCE,)),
    ("sharded", COMPILED, (TOLERANCE,)),
    ("model_parallel", AGAIN | COMPILED, (TOLERANCE,)),
    *((f"pipeline {schedule}", AGAIN, (TOLERANCE, 0)) for schedule in ("interleaved", "zero_bubble")),
    ("pipeline 1f1b", AGAIN | COMPILED, (TOLERANCE,)),
    *((strategy, SELECTIVE, (TOLERANCE, 0)) for strategy in ("mirrored", "pipeline zero_bubble")),
    ("sharded", SELECTIVE, (TOLERANCE,)),
    # Both at once are above, and with stage 1 forwards are those of mirrored.
    *(
        pytest.param(*row, marks=pytest.mark.full)
        for row in (
            ("model_parallel", AGAIN, (TOLERANCE, 0)),
            ("model_parallel", COMPILED, (TOLERANCE,)),
            ("sharded, stage 1", AGAIN, (TOLERANCE,)),
            ("sharded, stage 1", COMPILED, (TOLERANCE,)),
        )
    ),
]


@pytest.mark.parametrize(("strategy", "options", "promised"), FORWARDS, ids=str)
def test_what_is_done_to_the_forward_changes_nothing(
    strategy: str, options: dict[str, Any], promised: tuple[float, ...]
) -> None:
    """Batch norm is updated once, dropout draws alike, smaller last batches and evaluation go the same way.

    On three devices, of which one has two workers; each process that compiles takes its time, so there are two of them.
    """
    specification, single, _ = STRATEGIES[strategy]
    case = Case("", "adamw", 4, 1, clip=0.5)
    for reproducible, tolerance in zip((False, True), promised, strict=False):
        want, losses, _ = reference(single, OPTIMIZERS["adamw"], case, reproducible)
        arguments = {"optimizer": OPTIMIZERS["adamw"], "workers": 4, "clip": 0.5, "reproducible": reproducible}
        devices = 2 if "compile" in options else 3
        for got, own_losses, _ in worlds.run(devices, train, strategy=specification, **arguments, **options):
            assert largest_difference(got, want) <= tolerance
            assert own_losses == pytest.approx(losses, rel=0 if reproducible else 1e-9, abs=0)
