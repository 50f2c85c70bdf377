"""``refused.toml`` lists what tutti refuses of the table: no more, no less, and with these reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.contract.models import MODELS
from tests.contract.table import (
    BATCH,
    MADE,
    OPTIMIZERS,
    REFUSED,
    STRATEGIES,
    Case,
    Refusal,
    every,
    named,
    optimizer_of,
    refusals,
)
from tutti import parallel
from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.config.strategy_choice import StrategyChoice, parse_strategy
from tutti.data.contract import BatchContract
from tutti.errors import UsageError
from tutti.nn import ghost
from tutti.parallel.pipeline import stage_partition


@cache
def uncuttable(model: str, stages: int) -> str:
    """Why a model cannot be cut into so many stages; empty where it can."""
    try:
        stage_partition.find_stage_partition(MODELS[model].build(), stages, "")
    except UsageError as error:
        return str(error)
    return ""


@cache
def without_norms(model: str) -> str:
    """Why a model cannot have ghost batch norms; empty where it can."""
    try:
        ghost.convert_ghost_batch_norm(MODELS[model].build(), 2)
    except UsageError as error:
        return str(error)
    return ""


@cache
def refused(specification: str, model: str, workers: int, devices: int, micro_batch: int | None) -> tuple[str, ...]:
    """Everything that tutti says against a combination; nothing where it runs."""
    try:
        choice = parse_strategy(named(specification, model))
        parallel.check_strategy(choice, devices, workers=workers)
        micro = choice.micro_batch(micro_batch, BATCH, workers)
        BatchContract(None, BATCH, workers, choice.data_ranks(devices), micro)
    except UsageError as error:
        return (str(error),)
    stages, layout = choice.shape(devices)["stage"], choice.layout
    if stages == 1:
        return ()
    chunks = layout.chunks if isinstance(layout, LayersConfig | PipelineConfig) else 1
    said = uncuttable(model, stages * chunks)
    return (said,) if said else ()


@cache
def unbuildable(model: str, optimizer: str) -> str:
    """Why an optimizer cannot be made for a model; empty where it can."""
    try:
        optimizer_of(OPTIMIZERS[optimizer], model, MODELS[model].build())
    except ValueError as error:
        return str(error)
    return ""


def against(case: Case) -> tuple[str, ...]:
    """Everything that tutti, or PyTorch, says against a case."""
    said = refused(STRATEGIES[case.strategy][0], case.model, case.workers, case.devices, case.micro_batch)
    made = unbuildable(case.model, case.optimizer)
    said = (*said, made) if made else said
    norms = without_norms(case.model) if case.batch_norm != "worker" else ""
    return (*said, norms) if norms else said


def wrong(cases: Sequence[Case], listed: Sequence[Refusal]) -> list[str]:
    """A line for each case of which the list says something else than tutti, or another reason."""
    lines = []
    for case in cases:
        said, entries = against(case), [refusal for refusal in listed if refusal.covers(case)]
        if said and not entries:
            lines.append(f"{case} is refused and not listed: {said[0]}")
        elif entries and not said:
            lines.append(f"{case} runs and is listed: {entries[0].why}")
        else:
            texts = "\n".join(said)
            # Of two reasons a run names one, whichever it meets first.
            known = any(refusal.says in texts for refusal in entries)
            lines += [f"{case} is refused for another reason: {texts}"] if entries and not known else []
    return lines


def test_the_list_is_what_is_refused() -> None:
    cases = [case for case in every() if case.optimizer in ("sgd", *(n for n, o in OPTIMIZERS.items() if o in MADE))]
    found = wrong(cases, REFUSED)
    assert not found, "\n".join([f"{len(found)} cases; see tests/contract/refused.toml", *found[:10]])


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.when)
def test_every_entry_is_needed_and_names_what_there_is(refusal: Refusal) -> None:
    assert set(refusal.strategies) <= STRATEGIES.keys()
    assert set(refusal.models) <= MODELS.keys()
    for strategy in refusal.strategies:
        alone = [case for case in every() if case.strategy == strategy and refusal.covers(case)]
        assert any(refusal.says in "\n".join(against(case)) for case in alone), strategy


def test_a_refusal_that_is_not_listed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in every() if case.optimizer == "sgd" and case.model == "odd"]
    shorter = [refusal for refusal in REFUSED if refusal.when != "devices == 8"]
    assert len(wrong(cases, shorter)) == len(
        [c for c in cases if c.strategy == "pipeline interleaved" and c.devices == 8]
    )
    original = parallel.check_strategy

    def check(choice: StrategyChoice, devices: int, **options: object) -> None:
        if choice.text == "diloco:period=2" and devices == 3:
            raise UsageError("diloco does not like three")
        original(choice, devices, **options)  # type: ignore[arg-type]

    refused.cache_clear()
    monkeypatch.setattr(parallel, "check_strategy", check)
    found = wrong(cases, REFUSED)
    refused.cache_clear()
    assert found
    assert all("diloco" in line and "P=3" in line and "does not like three" in line for line in found)


def test_an_entry_for_what_runs_or_with_another_reason_is_found() -> None:
    case = Case("mirrored", "sgd", 4, 2)
    [entry] = refusals('refused = [{when = "devices == 2", says = "nothing", why = "it was once so"}]')
    assert wrong([case], [entry]) == [f"{case} runs and is listed: it was once so"]
    [found] = wrong([replace(case, workers=1)], [entry])
    assert "is refused for another reason: 1 worker cannot be distributed" in found
