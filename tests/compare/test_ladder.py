"""Ladders: what is read, what is refused, and that rungs differ in what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.compare import ladder, runs
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError

VARIABLES = {"workers": 8, "batch_size": 4096, "epochs": 12.0}
OWN = """
naive = "b"
[base]
epochs = "{epochs}"
optimizer = "adam:lr=0.002"
[[rung]]
name = "a"
workers = 1
batch_size = "{worker_batch}"
[[rung]]
name = "b"
workers = "{workers}"
batch-size = "{batch_size}"
[[rung]]
name = "c"
cause = "the rate"
lr_scale = "linear:base_batch={worker_batch}"
[[rung]]
name = "d"
from = "b"
regime_batch = "{worker_batch}"
"""


def read(folder: Path, text: str, **options: object) -> ladder.Ladder:
    (folder / "own.toml").write_text(text)
    return ladder.load_ladder(str(folder / "own.toml"), VARIABLES, options)


def test_a_rung_is_its_parent_and_one_change(tmp_path: Path) -> None:
    found = read(tmp_path, OWN, precision="bf16")
    a, b, c, d = found.rungs
    assert a.config == TrainConfig(epochs=12.0, optimizer="adam:lr=0.002", workers=1, batch_size=512, precision="bf16")
    assert (b.parent, c.parent, d.parent) == ("a", "b", "b")
    assert b.changes == {"workers": 8, "batch_size": 4096}
    assert c.changes == {"lr_scale": "linear:base_batch=512"} and c.cause == "the rate"
    assert d.config.lr_scale == "none" and d.config.regime_batch == 512
    assert found.naive == "b" and found.name == "own"


def test_the_shipped_ladders_differ_in_one_thing_a_rung() -> None:
    """Or say that they do not: the course's own scripts change several at once."""
    for name in ladder.shipped():
        found = ladder.load_ladder(name, VARIABLES, {})
        assert len(found.rungs) <= 8 and found.summary
        for rung in found.rungs[2 if name == "course" else 1 :]:
            alone = set(rung.changes) <= {"workers", "batch_size"} or len(rung.changes) == 1
            assert alone != ("together" in rung.cause), (name, rung.name)


def test_the_shipped_ladders_share_runs(tmp_path: Path) -> None:
    found = {
        name: runs.trials(ladder.load_ladder(name, VARIABLES, {}), "cifar10", 2, tmp_path)
        for name in ("corrected", "updates", "batch-norm")
    }
    shared = [
        {t.directory for t in trials if t.rung in ("one worker", "N workers, naive")} for trials in found.values()
    ]
    assert len(shared[0]) == 4 and shared[0] == shared[1] == shared[2]
    assert len({t.directory for trials in found.values() for t in trials}) == 2 * (8 + 1 + 3)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('naive = "b"', 'nave = "b"', "unknown key 'nave'"),
        ('naive = "b"', 'naive = "z"', "naive is 'z'"),
        ("lr_scale", "lr_scal", "Did you mean 'lr_scale'?"),
        ('from = "b"', 'from = "z"', "comes from 'z'"),
        ('name = "b"', 'name = "a"', "name of its own"),
        ('regime_batch = "{worker_batch}"', 'workers = "{workers}"', "same run as 'b'"),
        ("{worker_batch}", "{worker_bach}", "Placeholders: workers"),
        ("[[rung]]", "[[rung]", "cannot read the ladder"),
        ("workers = 1", "workers = 0", "--workers is 0"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, OWN.replace(old, new))
    assert said in str(caught.value)
    with pytest.raises(UsageError, match="one rung"):
        read(tmp_path, '[[rung]]\nname = "alone"\n')
    with pytest.raises(UsageError, match="Did you mean 'corrected'"):
        ladder.load_ladder("correct", VARIABLES, {})


def test_ladders_that_share_a_rung_share_its_run(tmp_path: Path) -> None:
    first, second = read(tmp_path, OWN), read(tmp_path, OWN.replace('name = "b"', 'name = "x"').replace('"b"', '"x"'))
    places = [[t.directory for t in runs.trials(each, "digits", 2, tmp_path)] for each in (first, second)]
    assert places[0] == places[1] and len(set(places[0])) == 8
