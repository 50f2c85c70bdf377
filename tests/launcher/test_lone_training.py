"""Scripts that train under ``tutti run`` without tutti are told that each process trains alone; others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import launched

TRAIN = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 2)).mean().backward()
    optimizer.step()
"""
JOINED = "import torch.distributed\ntorch.distributed.init_process_group('gloo')\n"
INITIALISED = "import tutti\ntutti.init()\n"


@pytest.mark.parametrize(
    ("before", "processes", "warned"),
    [("", 3, True), ("", 1, False), (JOINED, 2, False), (INITIALISED, 2, False)],
    ids=["alone", "one process", "torch.distributed", "tutti"],
)
def test_plain_training_on_several_processes(tmp_path: Path, before: str, processes: int, warned: bool) -> None:
    (tmp_path / "train.py").write_text(before + TRAIN)
    options = {"preload": ["torch"]}
    result = launched(tmp_path, "", entry="run_script", args=("train.py", []), processes=processes, **options)
    assert (result.code, result.out) == (0, "")
    assert result.err.count("train.py trains without tutti") == warned
    assert not warned or "each of 3 processes" in result.err
