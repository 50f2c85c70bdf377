"""``horovod.run`` calls a function in ranks of this machine; what a call cannot start is refused with the way out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tutti.horovod
from tests.architecture.sources import ROOT
from tutti.errors import UsageError

SCRIPT = """
import os
import horovod
import horovod.torch as hvd
import torch

def main(factor, devices):
    told = [int(os.environ[name]) for name in ("HOROVOD_RANK", "HOROVOD_SIZE")]
    hvd.init()
    assert told == [hvd.rank(), hvd.size()]
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="x")
    return hvd.rank(), hvd.size(), factor * total.item(), devices

print("answers", horovod.run(main, args=(2,), kwargs={"devices": "mine"}, np=3, hosts="localhost:3", use_gloo=True))
"""


def test_a_function_is_called_in_every_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "tutti.horovod", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    want = [(rank, 3, 12.0, "mine") for rank in range(3)]
    assert f"answers {want}" in done.stdout, done.stderr
    assert "without effect: use_gloo" in done.stderr


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"min_np": 1}, "--host-discovery-script"),
        ({"hosts": "localhost:1,far:1"}, "-H localhost:1,far:1"),
        ({"hosts": "localhost:1"}, "hosts='localhost:2'"),
    ],
)
def test_a_call_that_cannot_start_the_ranks_names_the_command(given: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        tutti.horovod.run(print, np=2, **given)  # type: ignore[arg-type]
