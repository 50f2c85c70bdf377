"""Figures of a device: PaLM's worked example, every reader of them, and what is left out where it is unknown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.faults.commands import tutti
from tutti.config.train_config import TrainConfig
from tutti.device import cpu_model
from tutti.metrics.listener import Pace, RunHeader
from tutti.metrics.progress import PlainLines
from tutti.metrics.records import RunDirectory
from tutti.metrics.throughput import MFU, DeviceThroughput, device_rates
from tutti.types.step_records import StepRecord
from tutti.workload.device_peaks import published_peak
from tutti.workload.flop_formulas import decoder_flop_per_token
from tutti.workload.machine_file import Figure, Machine, machine_json, peak_name, read_machine, write_machine

LENGTH = 2048


def test_palm_worked_example() -> None:
    """ALGORITHMS: 1.3e9 parameters, 24 layers of width 2048, 10,000 tokens a second on one A100."""
    model = decoder_flop_per_token(1.3e9, 24, 2048, LENGTH) * LENGTH
    peak = published_peak("NVIDIA A100-SXM4-80GB", "bf16")
    assert peak is not None
    found = device_rates(DeviceThroughput(1, LENGTH, model, model * 4 / 3, peak[0]).factors(), 1e4 / LENGTH)
    assert found["throughput/device/tokens_per_sec"] == pytest.approx(1e4)
    assert found[MFU] == pytest.approx(0.288717, abs=1e-6)
    assert found["throughput/device/hfu"] == pytest.approx(0.384955, abs=2e-6)


def test_devices_share_the_samples() -> None:
    one, four = (device_rates(DeviceThroughput(n, 8, 6e9, 8e9, 1e12).factors(), 100.0) for n in (1, 4))
    assert one == {name: pytest.approx(4 * value) for name, value in four.items()}


def test_what_is_unknown_is_left_out() -> None:
    assert DeviceThroughput(2).factors() == {"throughput/device/samples_per_sec": 0.5}
    assert MFU not in DeviceThroughput(2, None, 1e9, 1e9, None).factors()


def test_records_and_lines_have_the_figures(tmp_path: Path) -> None:
    record, pace = StepRecord(1, 1, 8, 1, 0.5), Pace(8.0, 1.0, 1.0, {MFU: 0.4321})
    run = RunDirectory(tmp_path, TrainConfig(), "digits")
    run.stepped(record, pace)
    run.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())[MFU] == 0.4321
    stream = io.StringIO()
    lines = PlainLines(stream, 1)
    lines.started(RunHeader("", {}, 1, 1))
    lines.stepped(record, pace)
    heads, values = stream.getvalue().splitlines()[-2:]
    assert heads.endswith("     MFU") and values.endswith("   43.2%")


def machine(name: str, folder: Path) -> Path:
    figures = {peak_name("fp32", 1): Figure(1e12, "FLOP/s", 5, 1e9)}
    write_machine(
        Machine({"name": "lab"}, {"type": "cpu", "name": name}, ("device",), figures), folder / "machine.json"
    )
    return folder / "machine.json"


def test_a_run_reports_the_mfu_of_a_measured_machine(tmp_path: Path) -> None:
    machine(cpu_model(), tmp_path)
    words = (
        "--model",
        "gpt:layers=1,width=32",
        "--steps",
        "3",
        "--threads",
        "1",
        "--machine",
        "machine.json",
        "--json",
    )
    done = tutti(tmp_path, "train", "text", *words, "--activation-checkpointing", "blocks", "--out", "run")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    rate = summary["samples_per_second"]
    # Products of the block alone, without the head and attention: three times the forward's.
    flop = 3 * 64 * 2 * 12 * 32**2
    assert summary["throughput/device/samples_per_sec"] == pytest.approx(rate, rel=1e-5)
    assert summary["throughput/device/tokens_per_sec"] == pytest.approx(64 * rate, rel=1e-5)
    assert flop < summary[MFU] / rate * 1e12 < 2 * flop
    assert 1.1 < summary["throughput/device/hfu"] / summary[MFU] < 4 / 3
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(MFU in step for step in steps if step["group"] == "train")


def test_a_machine_file_of_another_device_is_told(tmp_path: Path) -> None:
    machine("Z80", tmp_path)
    done = tutti(tmp_path, "train", "linear", "--steps", "2", "--machine", "machine.json", "--out", "run")
    assert done.code == 0 and "no MFU is reported: machine.json is of a Z80" in done.err
    assert MFU not in (tmp_path / "run" / "summary.json").read_text()


def test_a_machine_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = machine("Z80", tmp_path)
    assert read_machine(path).device["name"] == "Z80"
    path.write_text(json.dumps({**machine_json(read_machine(path)), "version": 2}))
    done = tutti(tmp_path, "train", "linear", "--machine", "machine.json")
    assert done.code == 2 and "version 2, and this tutti reads version 1" in done.err
