"""Durations and specifications: what is read, what is refused, and that the refusal says what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from tutti.config.spec import Duration, Spec, build_options
from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    rate: float = 0.5
    count: int = 1
    flag: bool = False
    kind: Literal["a", "b"] = "a"
    limit: int | None = 3
    choice: bool | None = None
    words: bool | Literal["some"] = False
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count is {self.count}")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1ep", 8),
        ("3ep", 24),
        ("0.5ep", 4),
        ("0ep", 0),
        ("500st", 500),
        ("1e3st", 1000),
        ("1000sa", 8),
        ("1001sa", 9),
        ("128sa", 1),
        ("129sa", 2),
        (" 2ep ", 16),
    ],
)
def test_durations_in_steps_of_1000_samples_by_128(text: str, steps: int) -> None:
    assert Duration.parse(text).steps(dataset=1000, batch=128) == steps


def test_samples_count_steps_that_truly_consume_them() -> None:
    """Brute force: the first step after which at least that many samples were consumed."""
    for dataset, batch in [(10, 3), (7, 7), (5, 8), (12, 4)]:
        for samples in range(1, 40):
            consumed = steps = 0
            while consumed < samples:
                consumed += min(batch, dataset - consumed % dataset)
                steps += 1
            assert Duration(samples, "sa").steps(dataset, batch) == steps


@pytest.mark.parametrize("text", ["", "3", "ep", "3 ep", "-3ep", "3epochs", "1.5st", "0.1sa", "nanep", "3ep,", "+1ep"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Duration.parse(text, "--duration")
    assert "--duration" in str(caught.value)


@pytest.mark.parametrize("text", ["3ep", "0.5ep", "500st", "20000sa", "1234567sa"])
def test_durations_print_as_they_are_written(text: str) -> None:
    assert str(Duration.parse(text)) == text


def test_specifications_are_taken_apart() -> None:
    assert Spec.parse("sgd") == Spec("sgd", {})
    assert Spec.parse("sgd:") == Spec("sgd", {})
    assert Spec.parse(" sgd: lr = 0.1 , weight-decay=1=2") == Spec("sgd", {"lr": "0.1", "weight_decay": "1=2"})


@pytest.mark.parametrize("text", ["", ":lr=1", "sgd:lr", "sgd:=1", "sgd:lr=", "sgd:lr=1,lr=2", "sgd:a-b=1,a_b=2"])
def test_malformed_specifications_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--optimizer"):
        Spec.parse(text, "--optimizer")


def test_options_become_the_fields_types() -> None:
    spec = Spec.parse("x:rate=1e-3,count=7,flag=yes,kind=b,limit=none,names=p+q,sizes=1+2")
    assert spec.build(Options, "--x") == Options(
        rate=1e-3, count=7, flag=True, kind="b", limit=None, names=("p", "q"), sizes=(1, 2)
    )
    assert build_options(Options, {"rate": 0.25, "flag": True, "limit": "5"}, "file") == Options(
        rate=0.25, flag=True, limit=5
    )
    assert [build_options(Options, {"flag": word}, "").flag for word in ("true", "1", "ON", "False", "0", "no")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    found = [build_options(Options, {"choice": word}, "").choice for word in ("none", "on", "off")]
    assert found == [None, True, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cuont": "1"}, ["unknown option 'cuont'", "did you mean 'count'?"]),
        ({"count": "1.5"}, ["'1.5' is not a whole number", "count"]),
        ({"rate": "fast"}, ["'fast' is not a number", "rate"]),
        ({"flag": "maybe"}, ["neither true nor false", "flag"]),
        ({"choice": "maybe"}, ["'maybe' is not possible", "choices: false, none, true"]),
        ({"words": "none"}, ["'none' is not possible", "choices: false, some, true"]),
        ({"kind": "c"}, ["'c' is not possible", "a, b"]),
        ({"sizes": "1+x"}, ["'x' is not a whole number"]),
        ({"count": "-1"}, ["count is -1"]),
    ],
)
def test_bad_options_are_refused_with_place_and_remedy(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Spec("x", options).build(Options, "--x")
    for word in ["--x x", *words]:
        assert word.lower() in str(caught.value).lower()


def test_unknown_names_bring_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown optimizer 'adm'.*'adam'"):
        Spec.parse("adm").choose({"adam": 1, "sgd": 2}, "optimizer")


def test_durations_of_a_stream_of_unknown_length() -> None:
    assert [Duration.parse(text).steps(None, 8) for text in ("500st", "20sa", "24sa")] == [500, 3, 3]
    with pytest.raises(UsageError, match="3ep of a stream of unknown length"):
        Duration.parse("3ep").steps(None, 8)


def test_an_option_without_a_default_is_asked_for_by_name() -> None:
    from tutti.config.logger_config import parse_loggers

    with pytest.raises(UsageError, match=r"the option 'folder' is missing.*[Gg]ive folder=…"):
        parse_loggers("tensorboard")
