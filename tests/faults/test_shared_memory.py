"""The memory that ranks of one host share: what it does when a rank dies, when it cannot be had, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import worlds
from tests.contract.table import train
from tests.faults.commands import write_task
from tests.forkserver import run
from tests.launching import SAFETY_NET, SOURCE
from tutti.comm import shared_memory as segments
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.comm.shared_memory import attach
from tutti.errors import UsageError
from tutti.launcher import context

pytestmark = [
    pytest.mark.faults,
    pytest.mark.row(28),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this machine"),
]


def comms() -> Communicators:
    world = context.current()
    return Communicators(world, RankMesh(replica=world.identity.size, rank=world.identity.rank))


def meet_and_read(room: int) -> tuple[list[int], list[Path]]:
    """What every rank wrote, and the names that this one's memory still has."""
    comm = comms().world
    segment = attach(comm, room)
    assert segment is not None
    segment.slot(comm.rank).fill_(comm.rank + 1)
    segment.barrier("first")
    seen = [int(segment.slot(r).max()) for r in range(comm.size)]
    segment.barrier("second")
    return seen, list(Path("/dev/shm").glob(f"tutti-{os.getpid()}-*"))


@pytest.mark.parametrize("size", [3, 4])
def test_all_ranks_see_what_each_wrote_and_nothing_keeps_a_name(size: int) -> None:
    assert worlds.run(size, meet_and_read, room=10_000) == [(list(range(1, size + 1)), [])] * size


def one_dies(victim: int) -> str:
    comm = comms().world
    segment = attach(comm, 4096)
    assert segment is not None
    segment.barrier("everybody is here")
    if comm.rank == victim:
        os.write(2, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        segment.barrier("the next step")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("size", [3, 4])
def test_a_killed_rank_is_named_long_before_the_timeout(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    pool = worlds.Pool(size, timeout=600)
    with pytest.raises(worlds.RankError) as raised:
        pool.run(one_dies, victim=1, limit=30)
    failures = raised.value.failures
    assert failures[1] is not None and failures[1].text == "the process was ended by SIGKILL"
    assert capsys.readouterr().err == "standard error of rank 1:\nlast words\n\n"


def survivors(victim: int) -> str:
    said = one_dies(victim)
    raise RuntimeError(said)


def test_survivors_say_who_ended() -> None:
    pool = worlds.Pool(3, timeout=600)
    with pytest.raises(worlds.RankError) as raised:
        pool.run(survivors, victim=2, limit=30)
    for rank in (0, 1):
        failure = raised.value.failures[rank]
        assert failure is not None
        assert "PeerError" in failure.text and "rank 2 has ended" in failure.text


def without_room(monkeypatched: str, algorithm: str) -> Any:
    original = segments._DIRECTORY
    segments._DIRECTORY = Path(monkeypatched)
    try:
        state, losses, _ = train(f"mirrored:algorithm={algorithm}", "sgd:lr=0.1", 4)
        return losses, {name: torch.from_numpy(value).sum().item() for name, value in state.items()}
    except UsageError as error:
        return str(error)
    finally:
        segments._DIRECTORY = original


def test_without_shared_memory_the_run_goes_by_messages_and_gives_the_same(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    there = worlds.run(3, without_room, monkeypatched="/dev/shm", algorithm="auto")
    for losses, sums in worlds.run(3, without_room, monkeypatched=missing, algorithm="auto"):
        assert losses == pytest.approx(there[0][0], rel=1e-9)
        assert sums == pytest.approx(there[0][1], rel=1e-9)
    for said in worlds.run(3, without_room, monkeypatched=missing, algorithm="shared_memory"):
        assert "cannot share memory" in said and "algorithm=native" in said


def test_what_a_dead_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "tutti-4194303999-abcd"
    mine = tmp_path / f"tutti-{os.getpid()}-abcd"
    for path in (gone, mine):
        path.touch()
    monkeypatch.setattr(segments, "_DIRECTORY", tmp_path)
    segments._reclaim()
    assert not gone.exists() and mine.exists()


# A mount namespace of its own, in which /dev/shm has the size of the first word; runs tutti with the other words as
# often as the second word says, and prints what came out of it.
OWN_SHM = """
import ctypes, json, os, runpy, subprocess, sys
size, times, *words = sys.argv[1:]
own = ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
mounts = ["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"]
if not own or any(subprocess.run(["mount", *options]).returncode for options in mounts):
    sys.exit(77)
runs = []
for number in range(int(times)):
    with open(f"said-{number}", "w+") as said:
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            os.environ["NUMBER"], sys.argv[1:] = str(number), words
            sys.exit(runpy.run_module("tutti", run_name="__main__", alter_sys=True))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        runs.append([code, said.read(), os.listdir("/dev/shm")])
print(json.dumps(runs))
"""


def with_own_shm(folder: Path, size: str, times: int, *words: str) -> list[Any]:
    (folder / "own_shm.py").write_text(OWN_SHM, encoding="utf-8")
    environ = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = run(["own_shm.py", size, str(times), *words], folder, environ, SAFETY_NET)
    if done.returncode == 77:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr
    runs: list[Any] = json.loads(done.stdout)
    return runs


TRAIN = ("train", "own.py:task", "--devices", "3", "--batch-size", "12", "--steps", "3", "--out", "out", "--overwrite")


# 0.6 MB of gradients, and room for nothing but semaphores.
LARGE = """
def model():
    return nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 3))
"""


def test_a_small_dev_shm_is_no_hindrance(tmp_path: Path) -> None:
    write_task(tmp_path, LARGE)
    digests = []
    for strategy in ("mirrored", "mirrored:algorithm=native"):
        [[code, said, left]] = with_own_shm(tmp_path, "256k", 1, *TRAIN, "--strategy", strategy)
        assert (code, left) == (0, []), said
        digests.append(json.loads((tmp_path / "out" / "summary.json").read_text())["weights_sha256"])
    assert digests[0] == digests[1]
    [[code, said, left]] = with_own_shm(tmp_path, "256k", 1, *TRAIN, "--strategy", "mirrored:algorithm=shared_memory")
    assert (code, left) == (2, []) and "cannot share memory" in said and "algorithm=native" in said


def test_a_full_dev_shm_is_named(tmp_path: Path) -> None:
    write_task(tmp_path)
    [[code, said, left]] = with_own_shm(tmp_path, "4k", 1, *TRAIN)
    assert (code, left) == (8, []) and "Traceback" not in said
    assert "processes cannot be started" in said and "No space left on device" in said and "/dev/shm" in said


DIES = """
def unlink(path, *words, real=os.unlink, **options):
    if RANK == 0 and os.environ["NUMBER"] == "0" and str(path).startswith("/dev/shm/tutti-"):
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, *words, **options)

os.unlink = unlink
"""


def test_memory_of_a_rank_that_died_as_it_made_it_is_reclaimed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    write_task(tmp_path, DIES)
    (first, said, stale), (second, _, left) = with_own_shm(tmp_path, "1m", 2, *TRAIN)
    assert first == 5 and "rank 0 was killed by SIGKILL" in said
    assert len(stale) == 1 and stale[0].startswith("tutti-")
    record_property("stale segments left", len(left))
    assert (second, left) == (0, [])
