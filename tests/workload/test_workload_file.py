"""``workload.json``: written and read back; other versions, other files and damage are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.errors import UsageError
from tutti.workload.workload_file import (
    Affine,
    GroupWork,
    OperatorWork,
    Workload,
    read_workload,
    workload_json,
    write_workload,
)

WORK = {"matmul": OperatorWork(Affine(0, 8), Affine(4, 2), Affine(1), Affine(0, 2))}
GROUP = GroupWork("a", "Linear", 6, 6, 24, 0, WORK, WORK, {"none": {}, "blocks": WORK}, {"none": Affine()}, Affine(), 0)
WORKLOAD = Workload("t", "fp32", (GROUP,), ("a.weight",), None, (2, 4, 7), "traced on fake tensors")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_workload(WORKLOAD, tmp_path / "workload.json")
    assert read_workload(tmp_path / "workload.json") == WORKLOAD


def test_flop_of_a_micro_batch() -> None:
    assert WORKLOAD.model_flop(3) == 48 and WORKLOAD.model_flop(3, masked=1) == 60
    assert WORKLOAD.hardware_flop(3) == 48 and WORKLOAD.hardware_flop(3, "blocks") == 72
    with pytest.raises(UsageError, match="Choices: none, blocks"):
        WORKLOAD.hardware_flop(3, "selective")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "has version 99, and this tutti reads version 1"),
        ({"format": "tutti machine"}, "no 'tutti workload'"),
        ({"groups": [{"name": "a"}]}, "damaged"),
    ],
)
def test_other_files_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps({**workload_json(WORKLOAD), **change}))
    with pytest.raises(UsageError, match=message) as caught:
        read_workload(path)
    assert caught.value.exit_code == 2


def test_no_json_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    for name in ("x.json", "none.json"):
        with pytest.raises(UsageError, match="Make it with tutti workload"):
            read_workload(tmp_path / name)
