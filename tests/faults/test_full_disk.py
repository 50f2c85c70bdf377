"""Fault 12: the disk is full. Every rank agrees, nothing half-written stays, the old checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.disks import fill, small_disk
from tutti.checkpoint.folder import newest_checkpoint
from tutti.checkpoint.read import verify
from tutti.errors import DiskError
from tutti.launcher import context
from tutti.launcher.failure import read_failure, record_failure
from tutti.train.run_checkpoints import Checkpoints

pytestmark = [pytest.mark.faults, pytest.mark.row(12)]
PLACES = [("single", 1), ("mirrored", 3), ("model_parallel", 3), ("local_sgd:period=2", 3), ("central_storage", 3)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as disk:
        yield disk


class Saving:
    """One rank of a run that saves every step; rank 0 plays the others who use the disk."""

    def __init__(self, strategy: str, disk: str) -> None:
        self.run = tutti.prepare(
            model(), "adam:lr=0.01", samples(), loss, strategy=strategy, workers=3, batch_size=12, reproducible=True
        )
        self.disk, self.folder = Path(disk), Path(disk) / "checkpoints"
        self.warnings: list[str] = []
        facts = {"config_sha256": "0" * 64}
        warn = self.warnings.append
        self.checkpoints = Checkpoints(self.run, self.folder, context.current(), facts, keep=1, warn=warn)

    def step(self, spare: int | None = None) -> str:
        """Train and save while the disk has ``spare`` pages (None: enough); what too many failures said."""
        self.run.step(next(iter(self.run.epoch(*divmod(self.run.global_step, self.run.steps_per_epoch)))))
        first = context.current().identity.rank == 0
        filler = fill(self.disk, spare) if first and spare is not None else None
        try:
            # Nobody writes before rank 0 has opened the save.
            self.checkpoints.save({})
            self.checkpoints.wait()
        except DiskError as error:
            assert error.exit_code == 8
            return str(error)
        finally:
            if filler:
                filler.unlink()
        return ""


def play(strategy: str, disk: str) -> Any:
    """What this rank was told in six saves: good, two failures, good, three failures in a row."""
    saving = Saving(strategy, disk)
    assert saving.step() == ""
    assert [saving.step(spare=0), saving.step(spare=1)] == ["", ""]
    assert saving.step() == ""
    names = [path.name for path in saving.folder.iterdir()]
    ends = [saving.step(spare) for spare in (0, 1, 2)]
    return names, saving.warnings, ends


@pytest.mark.parametrize(("strategy", "ranks"), PLACES)
def test_all_ranks_agree_and_the_old_checkpoint_stays(strategy: str, ranks: int, disk: Path) -> None:
    answers = worlds.run(ranks, play, strategy=strategy, disk=str(disk))
    assert all(answer == answers[0] for answer in answers), "ranks disagree about a save"
    names, warnings, ends = answers[0]
    assert names == ["step-00000004"], "a good save after two bad ones is not the only one"
    assert [warning.split()[4] for warning in warnings] == ["2", "3", "5", "6", "7"]
    assert all("No space left on device" in warning for warning in warnings)
    assert ends[:2] == ["", ""] and ends[2].startswith("3 saves in a row have failed")
    assert [path.name for path in (disk / "checkpoints").iterdir()] == names, "something half-written stays"
    found, broken = newest_checkpoint(disk / "checkpoints")
    assert found is not None and found.step == 4 and not broken and verify(found.path)


def test_why_a_rank_failed_is_told_even_if_its_logs_disk_is_full(disk: Path, tmp_path: Path) -> None:
    filler, failed = fill(disk, spare=0), DiskError("the disk is full")
    record_failure((disk, tmp_path), 2, failed)
    assert list(disk.iterdir()) == [filler], "an empty record stays"
    found = read_failure((disk, tmp_path), 2)
    assert found is not None and (found.message, found.exit_code) == ("the disk is full.", 8)
    filler.unlink()
    record_failure((disk, tmp_path), 2, DiskError("another"))
    found = read_failure((disk, tmp_path), 2)
    assert found is not None and found.message == "another."
