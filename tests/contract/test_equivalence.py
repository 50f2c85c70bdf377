"""P devices equal one device with the same workers and micro-batches (docs/architecture.md, contract 1)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests import worlds
from tests.contract.table import OPTIMIZERS, STRATEGIES, Case, largest_difference, pairwise, train, whole

TOLERANCE = 1e-10


@cache
def reference(strategy: str, optimizer: str, case: Case, exact: bool) -> Any:
    return worlds.run(
        1,
        train,
        strategy=strategy,
        optimizer=optimizer,
        workers=case.workers,
        micro_batch=case.micro_batch,
        clip=case.clip,
        channels_last=case.channels_last,
        batch_norm=case.batch_norm,
        reproducible=exact,
    )[0]


def check(case: Case) -> None:
    specification, single, exact = STRATEGIES[case.strategy]
    optimizer = OPTIMIZERS[case.optimizer]
    for reproducible in (False, True) if exact else (False,):
        want, losses, digest = reference(single, optimizer, replace(case, strategy="", devices=1), reproducible)
        for got, own_losses, own_digest in worlds.run(
            case.devices,
            train,
            strategy=specification,
            optimizer=optimizer,
            workers=case.workers,
            micro_batch=case.micro_batch,
            clip=case.clip,
            channels_last=case.channels_last,
            batch_norm=case.batch_norm,
            reproducible=reproducible,
        ):
            assert largest_difference(got, want) <= (0 if reproducible else TOLERANCE)
            assert own_losses == (pytest.approx(losses, rel=0 if reproducible else 1e-9, abs=0))
            if reproducible:
                assert own_digest == digest


@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_equals_one_device(case: Case) -> None:
    check(case)


@pytest.mark.contract
@pytest.mark.parametrize("case", whole(), ids=str)
def test_equals_one_device_whole_table(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd"])
def test_reproducible_on_eight_data_ranks(strategy: str) -> None:
    specification, single, _ = STRATEGIES[strategy]
    want, losses, digest = reference(single, OPTIMIZERS["adam"], Case("", "adam", 8, 1), True)
    for got, own_losses, own_digest in worlds.run(
        8, train, strategy=specification, optimizer=OPTIMIZERS["adam"], workers=8, reproducible=True
    ):
        assert (largest_difference(got, want), own_losses, own_digest) == (0, losses, digest)


# Stated tolerances of reduced precision, for parameters of order 1 after five steps of SGD.
REDUCED = {
    "fp32": ("mirrored", "fp32", 1e-5),
    "fp32, native": ("mirrored:algorithm=native", "fp32", 1e-5),
    "bf16 wire": ("mirrored:wire=bf16", "fp32", 5e-3),
    "fp16 wire": ("mirrored:wire=fp16", "fp32", 1e-3),
    "bf16 compute": ("mirrored", "bf16", 5e-3),
}


@pytest.mark.parametrize("row", REDUCED)
def test_reduced_precision_stays_within_what_is_stated(row: str) -> None:
    """Against one device in the same compute precision: the number of devices and the wire add no more than this."""
    specification, precision, tolerance = REDUCED[row]
    arguments = {"optimizer": OPTIMIZERS["sgd momentum"], "workers": 4, "precision": precision}
    want = worlds.run(1, train, strategy="single", **arguments)[0][0]
    for devices in (3, 4):
        for got, _, _ in worlds.run(devices, train, strategy=specification, **arguments):
            difference = largest_difference(got, want)
            assert difference <= tolerance
            if "wire" in row:
                assert difference > 1e-6, "nothing was compressed"
