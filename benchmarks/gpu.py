"""Whether tutti is right on this machine's GPUs, and how fast: one dated result.

    python benchmarks/gpu.py --save                        # all GPUs here
    python benchmarks/gpu.py --device simgpu --quick       # the simulated accelerator: does the script run?

Four parts, each in processes of its own: *tests* that need a GPU (``tests/gpu``); the *contract*: every strategy
against the CPU, and ``--part`` of the equivalence table on the devices; the *step tax* (``step_tax.py``) on one device
and on all; *MFU*, model FLOPs utilisation of a GPT of 85 million parameters, where the peak of the device is published.
On a machine with one GPU the ranks of the contract share it: kernels, streams and memory are the GPU's, and collectives
send copies in the host's memory, because NCCL refuses two ranks on a device (``tests/gpu/sharing.py``). Elsewhere cases
that need more devices than there are count as skipped, with the reason. Exit codes: 0, 2 usage, 9 where a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from result_file import report_failures, write_result
from step_tax import hardware, table

from tutti.errors import ExitCode
from tutti.metrics.throughput import MFU

ROOT = Path(__file__).resolve().parents[1]
SIMULATED = "simgpu"
PARTS = ("tests", "contract", "step_tax", "mfu")
MODELS = {False: "gpt:layers=12,width=768,heads=12,block=1024", True: "gpt:layers=2,width=32,heads=2,block=16"}
"""Of the MFU, by ``--quick``."""
FACTS = """
import json, os, torch
from tutti.device import accelerator_facts, accelerator_type, collective_backend, multiplies_in_tf32, convolves_in_tf32
kind = accelerator_type()
device = torch.device(kind or "cpu")
print(json.dumps({"type": kind, "backend": collective_backend(device), **accelerator_facts(),
    "tf32": {"products": multiplies_in_tf32(device), "convolutions": convolves_in_tf32(device)}}))
"""


class PartFailed(Exception):
    """A part of the benchmark could not run to its end."""


def surroundings(device: str, devices: int) -> dict[str, str]:
    """Environment variables of a part: the source tree, and the simulated accelerator where that is the device."""
    path, found = [str(ROOT / "src"), str(ROOT)], dict(os.environ)
    if device == SIMULATED:
        sys.path.insert(0, str(ROOT))
        from tests.simulated_accelerator import build

        path.insert(0, str(build.folder()))
        found["SIMGPU_DEVICES"] = str(devices)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (*path, os.environ.get("PYTHONPATH"))))
    return found


def run(words: Sequence[str], environ: Mapping[str, str], allowed: Sequence[int] = (0,)) -> str:
    """Run Python with these arguments from the root of the tree; return its stdout.

    Raises PartFailed with the end of its output for any other exit code.
    """
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=dict(environ), capture_output=True, text=True)
    if done.returncode not in allowed:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise PartFailed(f"{' '.join(words)} ended with {done.returncode}:\n{tail}")
    return done.stdout


def outcomes(given: argparse.Namespace, *words: str, share: bool = False) -> dict[str, Any]:
    """Run tests on the devices: how many passed, names of the failed, and how many were skipped for which reason.

    ``share``: whether all ranks compute on the first device.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ("-q", "-n", str(given.workers), "-p", "no:cacheprovider", f"--junitxml={report}")
        # The tests load the simulated accelerator by themselves, where they need it.
        environ = {**surroundings("cpu", 0), "TEST_DEVICE": given.device, "CONTRACT_PART": given.part}
        environ["TEST_SHARE_GPU"] = str(int(share))
        run(("-m", "pytest", *options, *words), environ, (0, 1, 5))
        cases = ElementTree.parse(report).getroot().iter("testcase")
        failed, skipped, passed = list[str](), Counter[str](), 0
        for case in cases:
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif (why := case.find("skipped")) is not None:
                skipped[str(why.get("message"))] += 1
            else:
                passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(skipped)}


def run_tests(given: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """The tests of ``tests/gpu``."""
    return outcomes(given, "-m", "gpu", "tests/gpu")


def run_contract(given: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Every strategy against the CPU, and a part of the equivalence table on the devices."""
    few = ("-k", "equals_the_cpu and (mirrored or sharded)") if given.quick else ()
    share = given.devices == 1 and given.device != SIMULATED
    return {
        "ranks share one device": share,
        "against the CPU": outcomes(given, "tests/contract/test_accelerator.py", *few, share=share),
        f"part {given.part} of the table": outcomes(given, "-m", "contract", "tests/contract", share=share),
    }


def run_step_tax(given: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """``step_tax.py`` on one device and on all."""
    found = {}
    for processes in sorted({1, given.devices}):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            words = ["benchmarks/step_tax.py", "--device", given.device, "--processes", str(processes)]
            words += ["--launches", str(given.launches)] * bool(given.launches)
            words += ["--workloads", given.workloads] * bool(given.workloads)
            words += ["--json", str(report), *["--quick"] * given.quick]
            run(words, environ, (0, ExitCode.THRESHOLD))
            found[str(processes)] = json.loads(report.read_text("utf-8"))
        for name, part in found[str(processes)]["workloads"].items():
            print(table(f"{processes} x {given.device}, {name}", part), flush=True)
    return found


def run_mfu(given: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Samples a second, predicted and measured, and MFU of a GPT, by devices, strategy, precision and compilation.

    The prediction is that of ``tutti simulate`` with a machine file that ``tutti bench`` has just measured.
    """
    rows = [(1, "mirrored", "fp32", "none"), (1, "mirrored", "bf16", "none"), (1, "mirrored", "bf16", "default")]
    if given.devices > 1:
        rows += [(given.devices, name, "bf16", "none") for name in ("mirrored", "sharded", "tensor")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder, "machine.json")
        if given.device != SIMULATED:
            parts = ["device", "optimizer", *["links", "collectives"] * (given.devices > 1)]
            run(["-m", "tutti", "bench", *parts, "--device", given.device, "-o", str(machine)], environ)
            found["machine"] = json.loads(machine.read_text("utf-8"))
        for devices, strategy, precision, mode in rows:
            name = f"{devices} x {strategy} {precision}" + " compiled" * (mode != "none")
            if mode != "none" and given.device == SIMULATED:
                found[name] = {"skipped": "torch.compile has no backend for the simulated accelerator"}
                continue
            words = ["text", "--model", MODELS[given.quick], "--devices", str(devices), "--strategy", strategy]
            words += ["--precision", precision, "--batch-size", str(8 * devices), "--optimizer", "adamw:lr=0.0003"]
            words += ["--workers", str(1 if strategy == "tensor" else devices)]
            own = ["--device", given.device, "--compile", mode, "--steps", "12" if given.quick else "60"]
            own += ["--eval-every", "none", "--out", f"{folder}/{name}"]
            run(["-m", "tutti", "train", *words, *own], environ)
            found[name] = row = speed(Path(folder, name), 8 * devices)
            if machine.exists() and mode == "none":
                said = json.loads(
                    run(["-m", "tutti", "simulate", *words, "--machine", str(machine), "--json"], environ)
                )
                row["predicted_samples_per_second"] = said["steps"][0]["samples_per_second"]
            print(f"{name:32} {json.dumps(row)}", flush=True)
    return found


def speed(folder: Path, batch: int) -> dict[str, Any]:
    """Samples a second and MFU of a run's later steps: the first ones compile code and allocate memory."""
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    clock = [line["seconds"] for line in lines if line["group"] == "train"]
    late = clock[len(clock) // 3 :]
    samples = batch * (len(late) - 1) / (late[-1] - late[0])
    whole, mfu = summary["samples_per_second"], summary.get(MFU)
    return {"samples_per_second": samples, "mfu": None if mfu is None else mfu * samples / whole}


RUN = {"tests": run_tests, "contract": run_contract, "step_tax": run_step_tax, "mfu": run_mfu}


def failures(parts: Mapping[str, Any], judged: bool) -> list[str]:
    """What is wrong with the results: one sentence each. ``judged``: whether times count."""
    found = [f"{name}: {part['error']}" for name, part in parts.items() if "error" in part]
    counted = [parts.get("tests", {}), *(part for part in parts.get("contract", {}).values() if isinstance(part, dict))]
    found += [f"failed: {name}" for part in counted for name in part.get("failed", ())]
    for processes, report in parts.get("step_tax", {}).items() if judged else ():
        if isinstance(report, dict):
            found += [f"step tax on {processes}: {line}" for line in report["failures"]]
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="Tests, contract, step tax and MFU on this machine's GPUs.")
    add = parser.add_argument
    add("--device", default="cuda", help="type of the devices: cuda, or simgpu for the simulated accelerator")
    add("--devices", type=int, help="how many (default: all; simgpu 2)")
    add("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    add("--part", help="part of the equivalence table (default: 1/100; 1/2000 with --quick)")
    add(
        "--workers",
        type=int,
        default=0,
        help="processes that run tests beside each other (default: 0, one after the other)",
    )
    add("--launches", type=int, help="launches of the step tax for each workload (default: those of step_tax.py)")
    add("--workloads", help="workloads of the step tax (default: all)")
    add("--quick", action="store_true", help="few steps, small models, times mean nothing: does it run?")
    add("--json", type=Path, help="write the report there")
    add("--save", action="store_true", help="write it to benchmarks/results/DATE-gpu-DEVICE.json as well")
    given = parser.parse_args(argv)
    given.parts = given.parts.split(",")
    given.workloads = given.workloads or ("mlp,gpt" if given.quick else None)
    given.part = given.part or ("1/2000" if given.quick else "1/100")
    if given.devices is not None and given.devices < 1:
        parser.error("--devices is below 1")
    if wrong := [name for name in given.parts if name not in PARTS]:
        parser.error(f"--parts {wrong[0]}: choices are {', '.join(PARTS)}")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    return given


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    given = arguments(argv)
    environ = surroundings(given.device, given.devices or 2)
    facts = json.loads(run(("-c", FACTS), environ))
    here = len(facts["gpus"]) if facts["type"] == given.device else 0
    given.devices = given.devices or here
    if not 0 < given.devices <= here:
        wanted = f"{given.devices or 1} of type {given.device}"
        print(f"gpu.py: {wanted} needed, and PyTorch sees {here}. {facts['complaint'] or ''}".strip(), file=sys.stderr)
        return ExitCode.USAGE
    now = datetime.now(UTC)
    report: dict[str, Any] = {
        "benchmark": "gpu", "date": now.isoformat(timespec="seconds"), "quick": given.quick, "device": given.device,
        "devices": given.devices, "facts": facts, "hardware": hardware(), "parts": {},
    }  # fmt: skip
    kept = ROOT / "benchmarks" / "results" / f"{now.date()}-gpu-{given.device}.json"
    for name in given.parts:
        print(f"--- {name}", flush=True)
        try:
            report["parts"][name] = RUN[name](given, environ)
        except PartFailed as error:
            report["parts"][name] = {"error": str(error)}
        if name in ("tests", "contract"):
            print(json.dumps(report["parts"][name], indent=1), flush=True)
        report["failures"] = failures(report["parts"], not given.quick)
        # After every part, so that nothing is lost when the machine goes.
        write_result(report, given.json, kept if given.save else None, indent=2)
    return report_failures(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
