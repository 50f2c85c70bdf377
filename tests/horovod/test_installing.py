"""Unedited scripts: ``import horovod`` is served by command, module and call; frameworks that are not get a reason."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.forkserver import run

SCRIPT = """
import os
import socket
import sys
rank = os.environ.get("HOROVOD_RANK", "0")
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import synchronize
from horovod.common.exceptions import HorovodInternalError
from horovod.common.elastic import ObjectState
from horovod.common.util import env, extension_available, gloo_built, mpi_built, nccl_built
from horovod.common.util import num_rank_is_power_2, split_list
from horovod.runner import run as run_function
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic import TorchState, run
from horovod.torch.optimizer import _DistributedOptimizer
import torch
assert hvd.elastic.run is run and hvd.elastic.ElasticSampler is ElasticSampler and issubclass(TorchState, ObjectState)
assert horovod.run is run_function and (gloo_built(), mpi_built()) == (True, False)
assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]] and split_list([1], 2) == [[1], []]
assert num_rank_is_power_2(4) and not num_rank_is_power_2(6)
with env(HOROVOD_TIMELINE="", HOROVOD_OTHER="1", HOROVOD_NONE=None):
    assert os.environ["HOROVOD_OTHER"] == "1" and "HOROVOD_NONE" not in os.environ
assert "HOROVOD_OTHER" not in os.environ
assert nccl_built() == hvd.nccl_built() and extension_available("torch") and not extension_available("tensorflow")
hvd.init()
assert int(rank) == hvd.rank()
assert hvd.mpi_ops._basics.size() == hvd.size() and not hasattr(hvd.mpi_ops._basics, "missing")
assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(hvd.size()))}
for field in ("size", "local_rank", "local_size", "cross_rank", "cross_size") if hvd.size() > 1 else ():
    assert int(os.environ[f"HOROVOD_{field.upper()}"]) == getattr(hvd, field)()
assert hvd.size() == 1 or os.environ["HOROVOD_HOSTNAME"] == socket.gethostname()
total = synchronize(hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="x"))
if hvd.rank() == 0:
    print("total", total.item(), sys.argv[1:], issubclass(HorovodInternalError, RuntimeError), flush=True)
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(words, folder, {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}, 200)


def printed(folder: Path, code: str) -> str:
    """What a script with this code prints; its error, where it fails."""
    (folder / "script.py").write_text(textwrap.dedent(code))
    # multiprocessing takes a relative path for one of the folder in which the forkserver of the tests was started.
    done = python(folder, str(folder / "script.py"))
    return done.stdout or done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "tutti.horovod", "script.py", "--epochs", "3"),
        ("-m", "tutti", "run", "--horovod", "-np", "2", "script.py", "--epochs", "3"),
    ],
    ids=["module", "command"],
)
def test_a_script_runs_as_it_is(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(tmp_path, *words)
    ranks = 2.0 if "run" in words else 1.0
    assert f"total {ranks} ['--epochs', '3'] True" in done.stdout, done.stderr


SPAWNING = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from horovod.common.util import split_list
import horovod.torch as hvd
import tutti.horovod

def work():
    return str(hvd.Sum), tutti.horovod.install()

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        print("spawned", *pool.submit(work).result(), flush=True)
"""


def test_processes_that_a_script_spawns_import_it_too(tmp_path: Path) -> None:
    """As loader processes of the contexts ``spawn`` and ``forkserver`` do."""
    (tmp_path / "script.py").write_text(SPAWNING)
    done = python(tmp_path, "-m", "tutti.horovod", str(tmp_path / "script.py"))
    assert done.stdout == "spawned sum True\n", done.stderr


def test_the_timeline_of_a_script_that_ends_without_shutdown_is_whole(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("-np", "2", "-H", "localhost:2", "--timeline-filename", "trace.json", "python", "script.py")
    done = python(tmp_path, "-m", "tutti", "run", "--horovod", *words)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "ALLREDUCE" in {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())}


def test_other_frameworks_get_a_reason_and_a_real_horovod_wins(tmp_path: Path) -> None:
    code = """
        import tutti.horovod
        assert tutti.horovod.install()
        for name in ("horovod.tensorflow.keras", "horovod.keras"):
            try:
                __import__(name)
            except ImportError as error:
                assert "horovod.torch" in str(error) and "DistributedOptimizer" in str(error)
            else:
                raise AssertionError(name)
        print("refused")
    """
    assert printed(tmp_path, code) == "refused\n"
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True")
    code = "import tutti.horovod; print(tutti.horovod.install()); import horovod; print(horovod.real)"
    assert printed(tmp_path, code) == "False\nTrue\n"
    code = "import tutti.horovod; assert tutti.horovod.install(replace=True)" + SPAWNING
    assert printed(tmp_path, code) == "spawned sum True\n"
