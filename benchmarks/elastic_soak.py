"""One elastic Horovod script that meets random kills, joins and leaves, and must lose no sample.

    python benchmarks/elastic_soak.py                        # 20 faults, some minutes on two cores
    python benchmarks/elastic_soak.py --faults 5 --seed 7
    python benchmarks/elastic_soak.py --save

A rank is killed (SIGKILL), a slot is added, or a slot is removed, at a random moment of a random step. The recovery of
a fault is the time from the fault to the first step that ranks of the next generation complete; a rank that joins
starts a process first. The run survives if it ends with exit code 0, all ranks hold equal weights, and every sample of
every epoch was given once. A sampler repeats up to N - 1 samples in the last step of an epoch, so that N ranks have
equally many; those count once. Exit code 9 where it did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    from benchmarks.soak import hardware
except ModuleNotFoundError:
    from soak import hardware  # type: ignore[import-not-found, no-redef]

SAMPLES, FEWEST, MOST = 240, 2, 4
LIMIT = 120.0
"""Seconds after which a fault without recovery counts as a hang."""

SCRIPT = """
import json, os, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import horovod.torch as hvd

SAMPLES = int(os.environ["SAMPLES"])
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 4))
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)

@hvd.elastic.run
def train(state):
    while not state.done:
        sampler.set_epoch(state.epoch)
        for batch, (numbers, inputs) in enumerate(loader):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            given = hvd.allgather(numbers, name="given").tolist()
            state.given = [*state.given, [state.epoch, hvd.size(), given]]
            sampler.record_batch(batch, 2)
            state.step += 1
            pids = hvd.allgather_object(os.getpid())
            state.commit()
            if hvd.rank() == 0:
                with open("steps.jsonl", "a") as file:
                    print(json.dumps({"time": time.time(), "step": state.step, "pids": pids}), file=file)
            time.sleep(0.02)
        state.epoch += 1
        state.done = hvd.broadcast_object(Path("stop").exists())
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, given=[], epoch=0, step=0, done=False)
train(state)
told = {"epochs": state.epoch, "given": state.given, "weights": [p.detach().tolist() for p in model.parameters()]}
Path(f"told-{os.getpid()}.json").write_text(json.dumps(told))
"""


def samples_lost(given: Sequence[tuple[int, int, list[int]]], epoch: int) -> int:
    """Return how many samples no step of an epoch had.

    >>> samples_lost([(0, 2, list(range(200))), (0, 2, list(range(150, 239)))], epoch=0)
    1
    """
    return SAMPLES - len({number for at, _, numbers in given if at == epoch for number in numbers})


def samples_twice(given: Sequence[tuple[int, int, list[int]]], epoch: int) -> int:
    """Return how many samples of an epoch were repeated, beyond those that make ranks equal in its last step.

    Args:
        given: epoch, number of ranks and samples of each step.
        epoch: the epoch.

    >>> samples_twice([(0, 2, [1, 2]), (0, 2, [3, 1])], epoch=0), samples_twice([(0, 2, [1, 1]), (0, 2, [3])], epoch=0)
    (0, 1)
    """
    steps = [(ranks, numbers) for at, ranks, numbers in given if at == epoch]
    before = [number for _, numbers in steps[:-1] for number in numbers]
    ranks, last = steps[-1]
    repeated = len(before) + len(last) - len({*before, *last})
    at_the_end = repeated - (len(before) - len({*before}))
    return repeated - min(at_the_end, ranks - 1)


class Soak:
    """A run in a folder, and the faults that it meets.

    Args:
        folder: of the run.
        seed: of the faults.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random, self.slots = folder, random.Random(seed), 3
        self.faults: list[dict[str, Any]] = []
        (folder / "train.py").write_text(SCRIPT)
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\necho localhost:$(cat {folder}/slots)\n")
        script.chmod(0o755)
        self._set_slots()
        words = [sys.executable, "-m", "tutti", "run", "--horovod", "-np", "3", "--min-np", "1", "--max-np", str(MOST)]
        words += ["--host-discovery-script", str(script), "--blacklist-cooldown-range", "0.1", "0.2", "train.py"]
        with (folder / "log").open("wb") as log:
            environ = {**os.environ, "SAMPLES": str(SAMPLES)}
            self.job = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environ)

    def play(self, count: int) -> None:
        """Let the run meet ``count`` faults, each once the run has recovered from the one before."""
        self._await(lambda line: len(line["pids"]) == self.slots)
        for _ in range(count):
            time.sleep(self.random.uniform(0.1, 1.0))
            kinds = ["kill"] * 2 + ["join"] * (self.slots < MOST) + ["leave"] * (self.slots > FEWEST)
            kind, before = self.random.choice(kinds), self._last()["pids"]
            at = time.time()
            if kind == "kill":
                victim = self.random.choice(before)
                os.kill(victim, signal.SIGKILL)
                seconds = self._await(lambda line, victim=victim: victim not in line["pids"]) - at
            else:
                self.slots += 1 if kind == "join" else -1
                self._set_slots()
                seconds = self._await(lambda line: len(line["pids"]) == self.slots) - at
            self.faults.append({"kind": kind, "seconds": round(seconds, 3), "ranks": len(before)})
            print(self.faults[-1], flush=True)
            # The slot of a killed rank is filled again.
            self._await(lambda line: len(line["pids"]) == self.slots)

    def end(self) -> dict[str, Any]:
        """Let the run end after the epoch under way; return what was found."""
        (self.folder / "stop").touch()
        code = self.job.wait(LIMIT)
        told = [json.loads(path.read_text()) for path in sorted(self.folder.glob("told-*.json"))]
        epochs = told[0]["epochs"] if told else 0
        return {
            "exit_code": code,
            "ranks": len(told),
            "epochs": epochs,
            "steps": self._last()["step"],
            "equal_weights": bool(told) and all(rank["weights"] == told[0]["weights"] for rank in told),
            "lost": sum(samples_lost(told[0]["given"], epoch) for epoch in range(epochs)),
            "twice": sum(samples_twice(told[0]["given"], epoch) for epoch in range(epochs)),
        }

    def _set_slots(self) -> None:
        new = self.folder / "slots.new"
        new.write_text(str(self.slots))
        new.rename(self.folder / "slots")

    def _last(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "steps.jsonl").read_text().splitlines()[-1])
        return found

    def _await(self, holds: Any) -> float:
        """Wait until the last step fulfils a condition, and return its time."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.job.poll() is None:
            try:
                line = self._last()
            except (FileNotFoundError, IndexError, json.JSONDecodeError):
                line = None
            if line is not None and holds(line):
                return float(line["time"])
            time.sleep(0.005)
        raise TimeoutError(f"no step followed within {LIMIT:g} s, or the job ended ({self.job.poll()})")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak and returns its exit code."""
    parser = argparse.ArgumentParser(description="One elastic run that meets random kills, joins and leaves.")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="keep results/DATE-elastic-soak.json")
    given = parser.parse_args(argv)
    now, machine = datetime.now(UTC), hardware()
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), given.seed)
        try:
            soak.play(given.faults)
            found = soak.end()
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            problem = str(error)
            print(problem, (Path(folder) / "log").read_text()[-4000:], file=sys.stderr, sep="\n")
            found = {"exit_code": soak.job.poll()}
        finally:
            if soak.job.poll() is None:
                soak.job.terminate()
                soak.job.wait()
    survived = (
        not problem and not found["exit_code"] and found["equal_weights"] and found["lost"] == found["twice"] == 0
    )
    recovery = {
        kind: {"count": len(times), "p50": statistics.median(times), "highest": max(times)}
        for kind in ("kill", "join", "leave")
        if (times := [fault["seconds"] for fault in soak.faults if fault["kind"] == kind])
    }
    report = {"survived": survived, "problem": problem, **found, "recovery_seconds": recovery, "faults": soak.faults}
    print(json.dumps({key: value for key, value in report.items() if key != "faults"}, indent=1))
    if given.save:
        head = {"benchmark": "elastic_soak", "date": now.isoformat(timespec="seconds"), "hardware": machine}
        name = f"{now.date()}-elastic-soak.json"
        result = json.dumps({**head, "seed": given.seed, **report}, indent=1)
        (Path(__file__).parent / "results" / name).write_text(result + "\n")
    return 0 if survived else 9


if __name__ == "__main__":
    sys.exit(main())
