"""A disk that is full for a while, and never longer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.faults.commands import starting
from tutti.chaos.ballast import Ballast, free_disk
from tutti.cli.app import main
from tutti.errors import UsageError

PAGE = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as disk:
        yield disk


@pytest.mark.parametrize("leave", [0, 3 * PAGE])
def test_all_but_what_is_to_be_left(disk: Path, leave: int) -> None:
    before = free_disk(disk)
    ballast = Ballast(disk, leave)
    assert free_disk(disk) == leave and ballast.size == before - leave
    assert not list(disk.iterdir()), "the file has a name, under which it would stay when this process is killed"
    with pytest.raises(OSError, match="No space left"):
        (disk / "file").write_bytes(b"\0" * (leave + 1))
    (disk / "file").unlink()
    ballast.release()
    assert free_disk(disk) == before


def test_a_large_disk_is_not_filled_by_accident(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--yes"):
        Ballast(disk, 0, most=2**19)
    if free_disk(disk.parent) > 2**30:
        assert main(["chaos", "fill", str(disk.parent)]) == 2
        assert "MiB to fill" in capsys.readouterr().err
    assert main(["chaos", "fill"]) == 2
    assert "nothing is given to fill" in capsys.readouterr().err


def test_a_while_is_over(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = free_disk(disk)
    assert main(["chaos", "fill", str(disk), "--leave", "8KiB", "--for", "0.01"]) == 0
    assert f"{before - 8192} bytes of" in capsys.readouterr().out and free_disk(disk) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_every_signal_frees_the_disk(disk: Path, tmp_path: Path, number: signal.Signals) -> None:
    before = os.statvfs(disk).f_bfree
    with starting(tmp_path, "chaos", "fill", str(disk)) as running:
        assert "filled" in running.launcher.line()
        assert os.statvfs(disk).f_bfree == 0
        running.launcher.send_signal(number)
        code = running.finish().code
    assert code == (143 if number == signal.SIGTERM else -9)
    assert os.statvfs(disk).f_bfree == before
