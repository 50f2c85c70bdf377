"""Elastic jobs of real processes: scripted kills and joins, after which every rank ends, with one state."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forkserver import run
from tests.launching import until
from tutti.errors import PeerError

ROOT = Path(__file__).parents[2]
SAFETY_NET = 200
FULL = pytest.mark.full

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import horovod.torch as hvd

faults, until = json.loads(sys.argv[1]), int(sys.argv[2])
if Path("slow").exists() and os.environ["RANK"] == Path("slow").read_text():
    time.sleep(1)

def die(place, step=-1):
    for number, (where, rank, at) in enumerate(faults):
        if (where, at) == (place, step) and rank == int(os.environ["RANK"]):
            try:
                Path(f"fault-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

connect, connected = torch.distributed.init_process_group, []

def dying(*args, **kwargs):
    connected.append(True)
    die("connect", len(connected))
    connect(*args, **kwargs)

torch.distributed.init_process_group = dying
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(96))
state = hvd.elastic.TorchState(model, optimizer, step=0, sampler=sampler, given=[])
restore, sync = state.restore, state.sync

def restored():
    die("restore")
    restore()

def synced():
    die("sync")
    sync()

state.restore, state.sync = restored, synced
sizes = [hvd.size()]

@hvd.elastic.run
def train(state):
    sizes.append(hvd.size())
    assert [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE")] == [hvd.rank(), hvd.size()]
    batch = 0
    while state.step < 8 or (until and hvd.size() < until):
        if until and state.step >= 4 and hvd.rank() == 0:
            Path("slots").write_text(str(until))
        if until and state.step >= 8:
            time.sleep(0.02)
        generator = torch.Generator().manual_seed(1000 * state.step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).pow(2).mean().backward()
        die("step", state.step)
        optimizer.step()
        mine = sampler.get_indices(batch, 2)
        state.given = state.given + sum(hvd.allgather_object(mine), [])
        sampler.record_indices(mine)
        batch += 1
        state.step += 1
        die("before commit", state.step)
        state.commit()
        die("after commit", state.step)

train(state)
told = {"pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "sizes": sizes, "given": sorted(state.given)}
told["host"] = os.environ["HOROVOD_HOSTNAME"]
told["weights"] = [p.detach().flatten().tolist() for p in model.parameters()]
Path(f"told-{os.getpid()}.json").write_text(json.dumps(told))
"""


def ended(
    folder: Path, np: int, *options: str, faults: Sequence[Any] = (), until: int = 0
) -> subprocess.CompletedProcess[str]:
    """The end of an elastic job, whatever it was."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    words = ["-m", "tutti", "run", "--horovod", "-np", str(np), *options, "train.py", json.dumps(faults), str(until)]
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return run(words, folder, outside | {"PYTHONPATH": str(ROOT / "src")}, SAFETY_NET)


def told(folder: Path, np: int, *options: str, faults: Sequence[Any] = (), until: int = 0) -> list[dict[str, Any]]:
    """What the ranks of the last generation wrote, by rank. Every one of them has ended with code 0."""
    done = ended(folder, np, *options, faults=faults, until=until)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("fault-*"))) == len(faults) == done.stderr.count("tutti: rank"), done.stderr
    found = [json.loads(path.read_text()) for path in folder.glob("told-*.json")]
    found.sort(key=lambda rank: int(rank["rank"]))
    assert [rank["rank"] for rank in found] == list(range(found[0]["size"])), done.stderr
    assert all(rank["weights"] == found[0]["weights"] for rank in found)
    return found


REPLACED = ("--min-np", "3", "--blacklist-cooldown-range", "0.1", "0.2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return told(tmp_path_factory.mktemp("undisturbed"), 3, *REPLACED)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([["step", 1, 3]], id="rank 1"),
        pytest.param([["step", 0, 3]], id="rank 0", marks=FULL),
        pytest.param([["before commit", 2, 5]], id="before a commit", marks=FULL),
        pytest.param([["after commit", 1, 5]], id="after a commit", marks=FULL),
        pytest.param([["step", 1, 3], ["restore", 0, -1]], id="between commit and restore", marks=FULL),
        pytest.param([["step", 1, 3], ["step", 0, 4], ["step", 2, 6]], id="three in turn", marks=FULL),
        pytest.param([["step", 1, 3], ["connect", 0, 2]], id="while connecting", marks=FULL),
    ],
)
def test_ranks_that_are_replaced_change_nothing(
    tmp_path: Path, undisturbed: list[dict[str, Any]], faults: list[Any]
) -> None:
    ranks = told(tmp_path, 3, *REPLACED, faults=faults)
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in undisturbed]
    assert ranks[0]["given"] == undisturbed[0]["given"] == sorted(set(ranks[0]["given"])), "a sample lost or twice"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([], id="alone"),
        pytest.param([["step", 1, 2]], id="after a kill", marks=FULL),
    ],
)
def test_a_rank_joins_in_a_new_slot(tmp_path: Path, faults: list[Any]) -> None:
    (tmp_path / "slots").write_text("2")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\necho localhost:$(cat {tmp_path}/slots)\n")
    script.chmod(0o755)
    limits = ("--min-np", "1", "--max-np", "3", "--host-discovery-script", str(script))
    ranks = told(tmp_path, 2, *limits, "--blacklist-cooldown-range", "0.1", "0.2", faults=faults, until=3)
    assert len(ranks) == 3 and ranks[0]["sizes"][0] == 2, "rank 0 kept its process"


def test_ranks_that_start_together_join_in_one_reset(tmp_path: Path) -> None:
    """The second of two new ranks starts slowly, and the first waits for it; without a maximum all slots count."""
    (tmp_path / "slots").write_text("1")
    (tmp_path / "slow").write_text("2")
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\necho localhost:1\n[ $(cat {tmp_path}/slots) = 1 ] || echo 127.0.0.1:2\n")
    script.chmod(0o755)
    limits = ("--min-np", "1", "--host-discovery-script", str(script), "--reset-limit", "1")
    ranks = told(tmp_path, 1, *limits, until=3)
    assert ranks[0]["sizes"] == [1, 1, 3]
    assert [rank["host"] for rank in ranks] == ["localhost", "127.0.0.1", "127.0.0.1"]


def test_slots_that_come_back_keep_the_ranks(tmp_path: Path) -> None:
    """The script names no slot for a moment: all ranks wait without a place, and none may end with the state."""
    script = tmp_path / "discover.sh"
    script.write_text(
        f"#!/bin/sh\ncd {tmp_path}\n"
        "if [ ! -e slots ]; then echo localhost:2; elif [ ! -e silent ]; then : > silent; else echo localhost:3; fi\n"
    )
    script.chmod(0o755)
    ranks = told(tmp_path, 2, "--min-np", "2", "--max-np", "3", "--host-discovery-script", str(script), until=3)
    assert [rank["sizes"][0] for rank in ranks] == [2, 2, 3] and (tmp_path / "silent").exists()


def test_without_a_cooldown_the_slot_of_a_failed_rank_stays_empty(tmp_path: Path) -> None:
    ranks = told(tmp_path, 3, "--min-np", "2", faults=[["step", 1, 3]])
    assert len(ranks) == 2
    assert ranks[0]["given"] == sorted(set(ranks[0]["given"])), "a sample twice"


def test_a_job_ends_at_its_limit_of_resets(tmp_path: Path) -> None:
    """One reset is allowed and made; the second failure ends the job, and its other ranks with it."""
    faults = [["step", 1, 3], ["step", 0, 5]]
    done = ended(tmp_path, 3, *REPLACED, "--reset-limit", "1", faults=faults)
    assert done.returncode == PeerError.exit_code, done.stderr
    assert "the job was ended because its resets exceeded --reset-limit 1" in done.stderr
    assert not list(tmp_path.glob("told-*.json"))
    until(lambda: str(tmp_path) not in [process.info["cwd"] for process in psutil.process_iter(["cwd"])])


def test_a_job_with_fewer_slots_than_it_needs_ends(tmp_path: Path) -> None:
    done = ended(tmp_path, 2, "--min-np", "2", "--elastic-timeout", "1", faults=[["step", 1, 3]])
    assert done.returncode == PeerError.exit_code, done.stderr
    assert "1 of the 2 ranks that --min-np needs are left" in done.stderr, done.stderr
