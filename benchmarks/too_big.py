"""A GPT whose training does not fit into one process's memory, and does when it is split.

    python benchmarks/too_big.py                # about twenty minutes
    python benchmarks/too_big.py --part bare    # or training, saving, heap: one part alone
    python benchmarks/too_big.py --quick        # does it run? a smaller model, of which every way takes much the same
    python benchmarks/too_big.py --save         # keeps results/DATE-too-big[-PART].json

*training*: first every way trains without a limit, and the largest private memory of any of its processes (``VmData``)
is noted. Then all get the same limit (``RLIMIT_DATA``, which counts just that), half-way between the largest split way
and one device: one device must fail, and the split ways must train.

*bare*: eight processes, each of which may have less than a process takes that only makes the model: what Python and
PyTorch take, and 0.9 of the parameters (stacks of threads are of 1 MiB, as after ``ulimit -s 1024``). Making the model
must fail, and the split ways must train, to the loss that they have without a limit.

*saving*: four processes that may have half of their state more than training takes save after each step: the copy that
a save in the background is written from has no room, and training must wait.

*heap*: two processes of ``sharded`` without a limit. The model is large for what this host has free, so that gathered
layers are given back as they are freed (docs/sharded.md); then with the C library told to keep them. The first must
take less than 0.7 of the second, to the same loss.

Linux alone. Exit codes: 0, 2 usage, 9 where it did not come out so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from step_tax import hardware

from tutti.errors import ExitCode


class Way(NamedTuple):
    """A strategy on so many devices; ``batch``: they share the batch out as well."""

    strategy: str
    devices: int
    batch: bool = False
    split: bool = True


TRAINING = {
    "one device": Way("single", 1, split=False),
    "data parallel": Way("mirrored", 4, batch=True, split=False),
    "sharded": Way("sharded:stage=3", 4, batch=True),
    "pipeline": Way("pipeline:micro_batches=4", 4),
    "tensor": Way("tensor", 4),
    "tensor × pipeline": Way("hybrid:stages=2,tensor=2,micro_batches=2", 4),
    "sharded × tensor": Way("hybrid:shards=2,stage=3,tensor=2", 4, batch=True),
}
BARE = {
    "sharded": Way("sharded:stage=3", 8, batch=True),
    "pipeline": Way("pipeline:micro_batches=8", 8),
    "tensor": Way("tensor", 8),
    "tensor × pipeline": Way("hybrid:stages=2,tensor=4,micro_batches=2", 8),
}
_POLL, _SHARE, _STACK = 0.05, 0.9, 1 << 20
# What is freed leaves holes in the heap: so large blocks are given back when they are freed (docs/sharded.md).
_GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 60)}
# A short text: all of what is held out is evaluated at the end.
_TEXT = string.__file__
_MAKE = """
import sys
from tutti.tasks import task_registry
task = task_registry.load_task("text", data=sys.argv[2], model=sys.argv[1], augment=None)
data = lambda: 1024 * int(open("/proc/self/status").read().partition("VmData:")[2].split()[0])
before = data()
model = task.model()
print(before, sum(p.nbytes for p in model.parameters()), data())
"""


def train(
    way: Way,
    model: str,
    steps: int,
    limit: int | None,
    tight: bool = False,
    save: str = "none",
    told: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train in one way; exit code, loss and the largest memory of a process, in bytes.

    ``tight``: small stacks, and large blocks are given back when they are freed, as they always are where weights are
    gathered. ``save``: how often. ``told``: what the C library is told, in place of that.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [sys.executable, "-m", "tutti", "train", "text", "--model", model, "--strategy", way.strategy]
        words += ["--devices", str(way.devices), "--workers", str(way.devices if way.batch else 1)]
        words += ["--batch-size", "8", "--steps", str(steps), "--threads", "1", "--optimizer", "adam:lr=0.0003"]
        words += ["--data", _TEXT, "--eval-every", "none", "--checkpoint-every", save, "--out", str(out)]
        usual = _GIVEN_BACK if tight or "stage=3" in way.strategy else {}
        environ = {**os.environ, **(usual if told is None else told)}
        process = subprocess.Popen(
            words,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=under(limit, tight),
        )
        most = 0
        while process.poll() is None:
            most = max([most, *map(private, family(process.pid))])
            time.sleep(_POLL)
        said = process.stderr.read() if process.stderr else ""
        summary = json.loads((out / "summary.json").read_text()) if process.returncode == 0 else {}
    said = [line for line in said.splitlines() if "memory" in line.lower()][-1:]
    return {
        "exit_code": process.returncode, "bytes": most, "said": said,
        "loss": summary.get("train", {}).get("loss"), "samples_per_second": summary.get("samples_per_second"),
    }  # fmt: skip


def make(model: str, limit: int | None) -> dict[str, int]:
    """Only make the model: exit code, bytes of its parameters, and of a process without and with them."""
    words = [sys.executable, "-c", _MAKE, model, _TEXT]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, preexec_fn=under(limit, True))
    numbers = map(int, done.stdout.split())
    return {"exit_code": done.returncode, **dict(zip(("without", "parameters", "with"), numbers, strict=False))}


def under(limit: int | None, tight: bool) -> Callable[[], None] | None:
    """What a new process does first, to have at most ``limit`` bytes of private memory; ``tight``: as in ``train``."""

    def obey() -> None:
        if tight:
            # The limit counts the stacks of threads that wait for messages whole, however little of them is used.
            resource.setrlimit(resource.RLIMIT_STACK, (_STACK, _STACK))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return None if limit is None else obey


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, ahead = [], [root]
    while ahead:
        found.append(ahead.pop())
        ahead += parents.get(found[-1], [])
    return found


def private(pid: int) -> int:
    """Bytes of private, writable memory that a process has asked for; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return 1024 * int(line.split()[1])


def training(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """What training takes: the results, and whether they are as they should be."""
    free = {name: train(way, given.model, given.steps, None) for name, way in TRAINING.items()}
    largest = max(free[name]["bytes"] for name, way in TRAINING.items() if way.split)
    limit = (largest + free["one device"]["bytes"]) // 2
    limited = {name: train(way, given.model, given.steps, limit) for name, way in TRAINING.items()}
    print(table(free, limited, limit))
    fits = all(limited[name]["exit_code"] == 0 for name, way in TRAINING.items() if way.split)
    good = fits and bool(limited["one device"]["exit_code"])
    return {"model": given.model, "limit": limit, "free": free, "limited": limited}, good


def bare(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """What the model itself takes: the results, and whether they are as they should be."""
    alone = make(given.larger, None)
    free = {name: train(way, given.larger, given.steps, None, tight=True) for name, way in BARE.items()}
    limit = alone["without"] + int(_SHARE * alone["parameters"])
    limited = {name: train(way, given.larger, given.steps, limit, tight=True) for name, way in BARE.items()}
    print(f"a process without the model {alone['without'] >> 20} MiB, with it {alone['with'] >> 20} MiB")
    print(table(free, limited, limit))
    refused = make(given.larger, limit)["exit_code"]
    fits = all(limited[name]["exit_code"] == 0 for name in BARE)
    same = all(free[name]["loss"] == limited[name]["loss"] for name in BARE)
    found = {"model": given.larger, "alone": alone, "limit": limit, "made": refused, "free": free, "limited": limited}
    return found, bool(refused) and fits and same


def saving(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """What a save takes: the results, and whether they are as they should be."""
    way, parameters = TRAINING["sharded"], make(given.model, None)["parameters"]
    free = train(way, given.model, given.steps, None)
    # Parameters and Adam's two moments.
    limit = free["bytes"] + 3 * parameters // way.devices // 2
    limited = train(way, given.model, given.steps, limit, save="1st")
    print(table({"sharded": free}, {"sharded": limited}, limit), *limited["said"], sep="\n")
    waited = any("training waits until the checkpoint is written" in line for line in limited["said"])
    good = waited and limited["exit_code"] == 0 and free["loss"] == limited["loss"]
    return {"model": given.model, "limit": limit, "free": free, "limited": limited}, good


def heap(given: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """What the C library's heap holds: the results, and whether they are as they should be."""
    way = Way("sharded:stage=3", 2, batch=True)
    own, kept = (train(way, given.larger, given.steps, None, told=told) for told in ({}, _KEPT))
    for name, one in (("given back", own), ("kept", kept)):
        print(
            f"{name:<12}{one['bytes'] >> 20:>8} MiB  loss {one['loss']:.4f}  {one['samples_per_second']:.2f} samples/s"
        )
    good = own["bytes"] < 0.7 * kept["bytes"] and own["loss"] == kept["loss"]
    return {"model": given.larger, "given back": own, "kept": kept}, good


PARTS = {"training": training, "bare": bare, "saving": saving, "heap": heap}


def table(free: Mapping[str, Any], limited: Mapping[str, Any], limit: int) -> str:
    """Largest process without and with the limit, and what became of it."""
    lines = [f"{'':<20}{'MiB':>8}{'loss':>10}   with at most {limit >> 20} MiB"]
    for name, one in limited.items():
        said = f"{one['bytes'] >> 20} MiB, loss {one['loss']:.4f}" if one["exit_code"] == 0 else str(one["said"])
        said = f"exit code {one['exit_code']}, {said}" if one["exit_code"] else said
        lines.append(f"{name:<20}{free[name]['bytes'] >> 20:>8}{free[name]['loss'] or float('nan'):>10.4f}   {said}")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="A GPT that trains only when it is split.")
    add = parser.add_argument
    add("--part", choices=list(PARTS), help="one part alone (default: all)")
    add("--model", default="gpt:layers=8,width=1024,heads=16,block=32", help="of training: 101 million parameters")
    add("--larger", default="gpt:layers=24,width=1024,heads=16,block=32", help="of bare: 303 million parameters")
    add("--steps", type=int, default=2)
    add("--quick", action="store_true", help="a smaller model")
    add("--save", action="store_true", help="write benchmarks/results/DATE-too-big[-PART].json")
    given = parser.parse_args(argv)
    if given.quick:
        given.model = given.larger = "gpt:layers=8,width=256,heads=8,block=32"
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit code."""
    given, now, good = arguments(argv), datetime.now(UTC), True
    for part in [given.part] if given.part else PARTS:
        found, as_expected = PARTS[part](given)
        good &= as_expected
        if given.save:
            head = {"benchmark": "too-big", "part": part, "date": now.isoformat(timespec="seconds")}
            of = "" if part == "training" else f"-{part}"
            path = Path(__file__).parent / "results" / f"{now.date()}-too-big{of}.json"
            text = json.dumps({**head, "hardware": hardware(), **found}, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
    return int(ExitCode.DONE if good else ExitCode.THRESHOLD)


if __name__ == "__main__":
    sys.exit(main())
