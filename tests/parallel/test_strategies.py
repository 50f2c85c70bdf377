"""The table of strategies: every row can be made, and what cannot run is refused with what can."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from types import FunctionType

import pytest

from tutti import parallel
from tutti.config.strategy_choice import parse_strategy
from tutti.config.strategy_table import TABLE
from tutti.errors import UsageError
from tutti.parallel.registry import LAYOUTS, SYNCS
from tutti.types.custom_loop_sync import CustomLoopSync, LocalStepSync
from tutti.types.replica_runner import ModelLayout


def methods(protocol: type) -> list[str]:
    """Names of a protocol's public methods, its bases' included."""
    return [
        name
        for each in protocol.__mro__
        for name, value in vars(each).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    ]


def check_class(text: str, protocol: type) -> None:
    """A class that the registry names as text is there, and has the methods of its protocol."""
    module, _, name = text.partition(":")
    made = getattr(import_module(f"tutti.parallel.{module}"), name)
    assert isinstance(made, type)
    assert [method for method in methods(protocol) if not callable(getattr(made, method, None))] == []


@pytest.mark.parametrize("name", TABLE)
def test_every_row_is_whole(name: str) -> None:
    row = TABLE[name]
    check_class(LAYOUTS[row.layout], ModelLayout)
    check_class(SYNCS[row.sync, None], LocalStepSync if row.local_steps else CustomLoopSync)
    fields = [{f.name for f in dataclasses.fields(c)} for c in (row.layout, row.sync)]
    assert not fields[0] & fields[1]
    assert row.summary
    choice = parse_strategy(name)
    assert (choice.layout, choice.sync) == (row.layout(), row.sync())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hybrid", {"sharded": "shards=2"}),
        ("parameter_server", {"backup": "backup=1", "asynchronous": "mode=async"}),
        ("parameter_server", {"backup": "backup=2", "asynchronous": "mode=bounded,staleness=1"}),
    ],
)
def test_options_choose_a_variant_of_the_row(name: str, options: dict[str, str]) -> None:
    assert options.keys() == {variant for kind, variant in SYNCS if kind is TABLE[name].sync} - {None}
    for variant, text in options.items():
        assert parse_strategy(f"{name}:{text}").sync.variant == variant
        check_class(SYNCS[TABLE[name].sync, variant], CustomLoopSync)
    assert parse_strategy(name).sync.variant is None


def test_every_class_of_the_registry_is_of_a_row() -> None:
    assert LAYOUTS.keys() == {row.layout for row in TABLE.values()}
    assert {kind for kind, _ in SYNCS} == {row.sync for row in TABLE.values()}


def test_options_reach_their_owner() -> None:
    assert parse_strategy("mirrored:wire=bf16,bucket_mb=2").sync.bucket_mb == 2
    assert parse_strategy("local_sgd:period=3").sync.period == 3
    choice = parse_strategy("model_parallel:stages=2,algorithm=native")
    assert (choice.layout.stages, choice.sync.algorithm) == (2, "native")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("miror", "did you mean 'mirrored'"),
        ("mirrored:bucket=3", "did you mean 'bucket_mb'"),
        ("mirrored:stages=2", "unknown option 'stages'"),
        ("mirrored:bucket_mb=0", "bucket_mb is 0"),
        ("mirrored:wire=int8", "'int8' is not possible"),
        ("mirrored:algorithm=shared_memory,wire=bf16", "shared_memory has no wire"),
        ("local_sgd:period=0", "period is 0"),
        ("model_parallel:stages=0", "stages is 0"),
        ("tensor:tensor=0", "tensor is 0"),
        ("tensor:least=-1", "least is -1"),
        ("hybrid:replicas=0", "replicas is 0"),
        ("hybrid:stages=2,tensor=0", "tensor is 0"),
        ("hybrid:sequence=true", "sequence does nothing with tensor=1"),
        ("tensor:sequence=perhaps", "sequence"),
        ("hybrid:shards=0", "shards is 0"),
        ("hybrid:tensor=2,stage=3", "stage=3 shards nothing without shards=2"),
        ("hybrid:shards=2,tensor=2,stage=4", "stage is 4"),
        ("hybrid:shards=2,tensor=2,units=block", "units is for stages 2 and 3"),
        ("hybrid:shards=2,wire=bf16", "wire does nothing with shards=2"),
        ("tensor:shards=2", "unknown option 'shards'"),
        ("local_sgd:post=-1", "cannot read '-1' as a duration"),
        ("diloco:outer_lr=0", "outer_lr is 0"),
        ("diloco:outer_momentum=1", "must be at least 0 and below 1"),
        ("sharded:stage=4", "stage is 4"),
        ("sharded:shards=0", "shards is 0"),
        ("sharded:stage=1,param_dtype=bf16", "param_dtype is for stages 2 and 3"),
        ("sharded:stage=1,units=block", "units is for stages 2 and 3"),
    ],
)
def test_bad_specifications_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategy(text)
    assert words in str(caught.value).lower()


@pytest.mark.parametrize(
    ("text", "devices", "shape"),
    [
        ("single", 1, (1, 1)),
        ("mirrored", 4, (4, 1)),
        ("local_sgd", 3, (3, 1)),
        ("model_parallel", 3, (1, 3)),
        ("model_parallel:stages=2", 4, (2, 2)),
        ("model_parallel:stages=1", 4, (4, 1)),
        ("tensor", 3, (1, 1)),
        ("tensor:tensor=2", 4, (2, 1)),
        ("hybrid:stages=2,tensor=2", 8, (2, 2)),
        ("hybrid", 3, (3, 1)),
        ("hybrid:shards=2,stages=2", 8, (2, 2)),
    ],
)
def test_shape_of_the_grid(text: str, devices: int, shape: tuple[int, int]) -> None:
    choice = parse_strategy(text)
    parallel.check_strategy(choice, devices)
    got = choice.shape(devices)
    assert (got["replica"], got["stage"]) == shape


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ddp", "mirrored"),
        ("fsdp", "sharded"),
        ("zero:stage=2", "sharded:stage=2"),
        ("tp", "tensor"),
        ("pp", "pipeline"),
    ],
)
def test_the_names_of_the_field_are_accepted(alias: str, name: str) -> None:
    assert parse_strategy(alias) == parse_strategy(name)


@pytest.mark.parametrize(
    ("text", "devices", "options", "words"),
    [
        ("single", 2, {}, ["runs on 1 device, not 2", "take --strategy mirrored"]),
        ("model_parallel:stages=2", 3, {}, ["3 devices cannot hold 2 stages", "stages=1"]),
        ("model_parallel:stages=4", 6, {}, ["multiple of 4 devices, or stages=3"]),
        ("tensor:tensor=2", 3, {}, ["3 devices cannot hold 2 tensor", "multiple of 2 devices, or tensor=1"]),
        ("tensor", 2, {"reproducible": True}, ["'tensor' is not reproducible"]),
        ("hybrid:stages=2,tensor=2", 6, {}, ["6 devices cannot hold 2 stages × 2 tensor", "a multiple of 4 devices"]),
        ("hybrid:replicas=2,stages=2,tensor=2", 6, {}, ["2 replicas × 2 stages × 2 tensor", "take 8 devices"]),
        (
            "hybrid:shards=3,tensor=2",
            8,
            {},
            ["8 devices cannot hold 3 shards × 2 tensor ranks", "a multiple of 6 devices"],
        ),
        ("hybrid:shards=2,tensor=2", 4, {"adaptive": True}, ["adascale cannot be combined with strategy 'hybrid'"]),
        ("local_sgd", 4, {"workers": 3}, ["3 workers cannot be distributed over 4 data ranks", "--devices 3"]),
        (
            "mirrored",
            4,
            {"workers": 3, "adaptive": True},
            ["over 4 data ranks with --lr-scale adascale", "--workers 4", "--devices 3"],
        ),
        ("sharded:shards=3", 4, {}, ["4 devices cannot hold 3 shards", "shards=2"]),
        ("parameter_server", 4, {"workers": 3}, ["3 workers cannot be distributed over 4 data ranks"]),
        ("sharded", 2, {"reproducible": True}, ["'sharded' is not reproducible"]),
        ("sharded", 2, {"adaptive": True}, ["--lr-scale adascale cannot be combined with strategy 'sharded'"]),
        ("mirrored:wire=fp16", 2, {"reproducible": True}, ["--reproducible cannot be combined with a compressed wire"]),
        ("hybrid:stages=2,tensor=2", 4, {"custom_loop": True}, ["stages=2 with tensor", "needs run.step(batch)"]),
        ("hybrid:stages=2,shards=2", 4, {"custom_loop": True}, ["stages=2 with shards", "needs run.step(batch)"]),
        (
            "local_sgd",
            2,
            {"custom_loop": True, "workers": 3},
            ["loop of 3 workers on 2 data ranks", "strategy 'local_sgd'", "as many workers as data ranks (2)"],
        ),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(
    text: str, devices: int, options: dict[str, bool], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        parallel.check_strategy(parse_strategy(text), devices, **options)
    for word in words:
        assert word.lower() in str(caught.value).lower()


def test_what_can_run_is_let_through() -> None:
    parallel.check_strategy(parse_strategy("single"), 1, workers=8, reproducible=True, custom_loop=True)
    parallel.check_strategy(parse_strategy("mirrored"), 4, workers=4, reproducible=True, custom_loop=True)
    parallel.check_strategy(parse_strategy("diloco"), 4, workers=4, reproducible=True, custom_loop=True)
    parallel.check_strategy(parse_strategy("model_parallel"), 4, workers=1, reproducible=True)
