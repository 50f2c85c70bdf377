"""A real run that loses a slot and gets it back, on an engine whose slots a test takes and gives."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forkserver import Process, run
from tests.launching import SAFETY_NET, SOURCE
from tutti.checkpoint.folder import last_step
from tutti.config.train_config import TrainConfig
from tutti.launcher.engine import EndedRank
from tutti.launcher.hosts import Host, HostsEngine, TetheredRanks
from tutti.launcher.supervisor import EngineAttempt, EngineJob, supervise
from tutti.metrics.records import config_toml, make_run_directory
from tutti.train.engine_rank import CONFIGURATION

CONFIG = TrainConfig(
    workers=3,
    batch_size=12,
    steps=120,
    checkpoint_every="10st",
    eval_every="none",
    reproducible=True,
    optimizer="adam:lr=0.01",
    slow="rank=0,ms=40",
)


class Forked(TetheredRanks):
    """Ranks of this node that are forked with torch loaded."""

    def start(self, ranks: Sequence[tuple[Host, Sequence[str]]]) -> None:
        self.started = []
        for host, words in ranks:
            at = words.index(sys.executable)
            environ = os.environ | dict(pair.split("=", 1) for pair in words[1:at])
            self.started.append((host, Process(words[at + 1 :], Path.cwd(), environ, piped=True)))  # type: ignore[arg-type]


class Elastic(HostsEngine):
    """Two slots of this node; the second is lost with its rank once ``steps[0]`` is saved, and back at ``steps[1]``."""

    def __init__(self, run: Path, steps: Sequence[int]) -> None:
        super().__init__([Host("localhost", 2)], run / "logs")
        self.run, self.steps, self.lost = run, list(steps), False
        self._ranks = Forked(run / "logs")

    def slots(self) -> Mapping[str, int]:
        return {"localhost": super().slots()["localhost"] - self.lost}

    def poll(self) -> Sequence[EndedRank | None]:
        ended = list(super().poll())
        if self.steps and last_step(self.run / "checkpoints") >= self.steps[0]:
            self.steps.pop(0)
            self.lost = not self.lost
            if self.lost:
                self._ranks.started[1][1].kill()
        if self.lost and len(ended) == 2 and ended[1] is not None:
            ended[1] = EndedRank(-9, "localhost", lost="was lost with its slot")
        return ended


def trained(folder: Path, sizes: Sequence[int], *steps: int) -> tuple[str, list[EngineAttempt]]:
    """Train on an engine; the hash of the weights, and the attempts."""
    config = replace(CONFIG, out=str(folder), devices=str(sizes[-1]))
    here = make_run_directory(config, "linear").absolute()
    (here / "logs").mkdir()
    (here / "logs" / CONFIGURATION).write_text(config_toml(config, "linear"))
    attempts: list[EngineAttempt] = []
    job = EngineJob(
        ["-m", "tutti.train.engine_rank", str(here)],
        sizes,
        here / "logs",
        restarts=1,
        progress=lambda: last_step(here / "checkpoints"),
        wait=0,
        environment={"PYTHONPATH": str(SOURCE)},
        attempted=attempts.append,
    )
    assert supervise(Elastic(here, steps), job) == 0
    return json.loads((here / "summary.json").read_text())["weights_sha256"], attempts


def test_a_run_that_shrinks_and_grows_has_the_weights_of_a_run_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.launcher.supervisor._LOOK", 0.1)
    weights, attempts = trained(tmp_path / "elastic", [1, 2], 20, 50)
    assert [attempt.devices for attempt in attempts] == [2, 1, 2]
    assert [attempt.ending for attempt in attempts] == ["rank 1 was lost with its slot", "more devices", "done"]
    assert 0 < attempts[1].first_step < attempts[2].first_step < 120
    (tmp_path / "alone.toml").write_text(config_toml(replace(CONFIG, out="alone", devices="1", slow=None), "linear"))
    done = run(["-m", "tutti", "train", "--config", "alone.toml"], tmp_path, os.environ, SAFETY_NET)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "alone" / "summary.json").read_text())["weights_sha256"] == weights
