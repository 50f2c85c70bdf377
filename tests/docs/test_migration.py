"""The scripts of docs/migrating-from-*.md: given the same order, before and after end alike.

Ordinary runs take two ranks, where the padding shows of which the pages speak, and of Accelerate and FSDP what comes
after; ``make full`` takes three, too, and what comes before.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.forkserver import run
from tutti.config.strategy_choice import parse_strategy
from tutti.data.order import permutation

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "migration"
SAFETY_NET = 200
TRAINING, EPOCHS, TOLERANCE = 1536, 5, 1e-5
FRAMEWORKS = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning", "deepspeed": "deepspeed"}
LAUNCHERS = {
    "tutti run": ["-m", "tutti", "run", "-np"],
    "tutti run --horovod": ["-m", "tutti", "run", "--horovod", "-np"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
}
STOPPED = """
import os, runpy, signal, sys
import tutti

save = tutti.Run.save

def save_and_be_stopped(run, *arguments):
    path = save(run, *arguments)
    if run.global_step == 16 and tutti.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return path

tutti.Run.save = save_and_be_stopped
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Epoch(NamedTuple):
    """What a script prints of an epoch."""

    number: int
    loss: float
    held_out: float
    accuracy: float
    samples: int


def start(folder: Path, launcher: str, ranks: int, *words: str) -> tuple[int, list[Epoch], str]:
    """Exit code, epochs told, and what was said on stderr."""
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environ = outside | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), outside.get("PYTHONPATH", "")])}
    done = run([*LAUNCHERS[launcher], str(ranks), *words], folder, environ, SAFETY_NET)
    line = r"epoch (\d+): loss ([\d.]+), held out ([\d.]+), accuracy ([\d.]+) of (\d+)"
    found = [Epoch(int(n), *map(float, numbers), int(s)) for n, *numbers, s in re.findall(line, done.stdout)]
    return done.returncode, found, done.stderr


def told(folder: Path, launcher: str, ranks: int, *words: str) -> list[Epoch]:
    code, found, said = start(folder, launcher, ranks, *words)
    assert code == 0, said
    return found


def orders(folder: Path) -> str:
    """A file with the order that tutti takes the samples in."""
    np.save(folder / "orders.npy", np.stack([permutation(0, epoch, TRAINING) for epoch in range(EPOCHS)]))
    return "orders.npy"


def page(kind: str) -> str:
    return (ROOT / "docs" / f"migrating-from-{kind}.md").read_text(encoding="utf-8")


def stated(kind: str) -> float:
    """The training loss of the last epoch, as the page gives it."""
    [loss] = re.findall(r"training loss of\s+(0\.\d+)", page(kind))
    return float(loss)


def losses(epochs: list[Epoch]) -> list[float]:
    return [epoch.loss for epoch in epochs]


def test_ddp_before_and_after_end_alike(tmp_path: Path) -> None:
    before = told(tmp_path, "tutti run", 2, str(SCRIPTS / "ddp_before.py"), "--order", orders(tmp_path))
    after = told(tmp_path, "tutti run", 2, str(SCRIPTS / "ddp_after.py"))
    assert after[-1].loss == pytest.approx(stated("ddp"), abs=TOLERANCE)
    assert losses(before) == pytest.approx(losses(after), abs=TOLERANCE)
    # The padding that the page speaks of: one sample too many on two ranks, and its loss.
    assert [epochs[-1].samples for epochs in (after, before)] == [261, 262]
    assert abs(before[-1].held_out - after[-1].held_out) > 100 * TOLERANCE


@pytest.mark.full
def test_ddp_before_and_after_end_alike_on_three_ranks(tmp_path: Path) -> None:
    before = told(tmp_path, "torchrun", 3, str(SCRIPTS / "ddp_before.py"), "--order", orders(tmp_path))
    after = told(tmp_path, "tutti run", 3, str(SCRIPTS / "ddp_after.py"))
    assert losses(before) == pytest.approx(losses(after), abs=TOLERANCE)
    assert before[-1].samples == after[-1].samples == 261
    assert before[-1].held_out == pytest.approx(after[-1].held_out, abs=TOLERANCE)


@pytest.mark.full
def test_after_it_may_be_stopped_and_continued_on_other_devices(tmp_path: Path) -> None:
    script = str(SCRIPTS / "ddp_after.py")
    (tmp_path / "stopped.py").write_text(STOPPED)
    code, first, said = start(tmp_path, "tutti run", 3, "stopped.py", script)
    assert (code, len(first)) == (75, 1), said
    assert (tmp_path / "checkpoints" / "step-00000017").is_dir(), "it was not saved where it stopped"
    rest = told(tmp_path, "tutti run", 2, script)
    assert [epoch.number for epoch in rest] == [1, 2, 3, 4]
    assert rest[-1].loss == pytest.approx(stated("ddp"), abs=TOLERANCE)


def test_accelerate_after_ends_as_the_page_says(tmp_path: Path) -> None:
    after = told(tmp_path, "tutti run", 3, str(SCRIPTS / "accelerate_after.py"))
    assert after[-1].loss == pytest.approx(stated("accelerate"), abs=TOLERANCE)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert (after[-1].samples, kept) == (261, ["step-00000070", "step-00000080"])


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is in the extra 'bench'")
@pytest.mark.full  # test_framework_scripts_run_unchanged_under_tutti_run compares the same numbers.
@pytest.mark.parametrize("ranks", [2, 3])
def test_accelerate_before_ends_alike(ranks: int, tmp_path: Path) -> None:
    words = (str(SCRIPTS / "accelerate_before.py"), "--order", orders(tmp_path))
    # A process of Gloo may abort as it ends, all work done ("terminate called without an active exception").
    _, before, said = start(tmp_path, "torchrun", ranks, *words)
    assert len(before) == EPOCHS, said
    assert (before[-1].loss, before[-1].samples) == (pytest.approx(stated("accelerate"), abs=TOLERANCE), 261)


def test_horovod_before_and_after_end_alike(tmp_path: Path) -> None:
    before = told(tmp_path, "tutti run --horovod", 2, str(SCRIPTS / "horovod_before.py"), "--order", orders(tmp_path))
    after = told(tmp_path, "tutti run", 2, str(SCRIPTS / "horovod_after.py"))
    assert after[-1].loss == pytest.approx(stated("horovod"), abs=TOLERANCE)
    assert losses(before) == pytest.approx(losses(after), abs=TOLERANCE)


@pytest.mark.full
def test_horovod_before_continued_on_three_ranks_ends_alike(tmp_path: Path) -> None:
    """From its checkpoint by Horovod's idiom: rank 0 loads it and broadcasts the state."""
    words = str(SCRIPTS / "horovod_before.py"), "--order", orders(tmp_path), "--checkpoint", "3.pt"
    before = told(tmp_path, "tutti run --horovod", 3, *words, "--epochs", "2")
    before += told(tmp_path, "tutti run --horovod", 3, *words)
    after = told(tmp_path, "tutti run", 3, str(SCRIPTS / "horovod_after.py"))
    assert losses(before) == pytest.approx(losses(after), abs=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp_before_and_after_end_alike(ranks: int, tmp_path: Path) -> None:
    before = told(tmp_path, "tutti run", ranks, str(SCRIPTS / "fsdp_before.py"), "--order", orders(tmp_path))
    after = told(tmp_path, "tutti run", ranks, str(SCRIPTS / "fsdp_after.py"))
    assert after[-1].loss == pytest.approx(stated("fsdp"), abs=TOLERANCE)
    assert losses(before) == pytest.approx(losses(after), abs=TOLERANCE)
    assert [epochs[-1].samples for epochs in (after, before)] == [261, 262 if ranks == 2 else 261]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("kind", ["fsdp", "trainer", "lightning", "deepspeed"])
def test_framework_scripts_moved_end_as_their_page_says(kind: str, ranks: int, tmp_path: Path) -> None:
    after = told(tmp_path, "tutti run", ranks, str(SCRIPTS / f"{kind}_after.py"))
    assert (after[-1].loss, after[-1].samples) == (pytest.approx(stated(kind), abs=TOLERANCE), 261)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_framework_scripts_run_unchanged_under_tutti_run(kind: str, ranks: int, tmp_path: Path) -> None:
    """With the loss of one device, which a script that trains each rank alone would not have."""
    package = FRAMEWORKS[kind]
    if any(importlib.util.find_spec(name) is None for name in (package, "accelerate")[: 1 + (kind == "trainer")]):
        pytest.skip(f"{package} is not installed")
    before = told(tmp_path, "tutti run", ranks, str(SCRIPTS / f"{kind}_before.py"), "--order", orders(tmp_path))
    assert len(before) == EPOCHS
    assert before[-1].loss == pytest.approx(stated(kind), abs=TOLERANCE)
    assert before[-1].samples == (262 if kind in ("lightning", "deepspeed") and ranks == 2 else 261)


@pytest.mark.parametrize("kind", ["ddp", "accelerate", "horovod", "fsdp", "trainer", "lightning", "deepspeed"])
def test_the_page_shows_the_difference_as_it_is(kind: str) -> None:
    names = f"{kind}_before.py", f"{kind}_after.py"
    texts = [(SCRIPTS / name).read_text(encoding="utf-8").splitlines() for name in names]
    lines = "\n".join(difflib.unified_diff(*texts, *names, lineterm="", n=1))
    assert f"```diff\n{lines}\n```\n" in page(kind)


def test_the_deepspeed_script_states_its_configuration() -> None:
    text = (SCRIPTS / "ds_config.json").read_text(encoding="utf-8")
    assert f"```json\n{text}```\n" in page("deepspeed")
    config, after = json.loads(text), (SCRIPTS / "deepspeed_after.py").read_text(encoding="utf-8")
    rates = config["optimizer"]["params"]
    for line in (
        f"BATCH = {config['train_batch_size']}\n",
        f"clip={config['gradient_clipping']},\n",
        f"lr={rates['lr']}, weight_decay={rates['weight_decay']})\n",
        f'strategy="sharded:stage={config["zero_optimization"]["stage"]}",\n',
    ):
        assert line in after


@pytest.mark.parametrize("kind", ["fsdp", "trainer", "lightning", "deepspeed"])
def test_strategies_named_by_a_page_exist(kind: str) -> None:
    named = re.findall(r"[`\"]((?:sharded|hybrid|pipeline|mirrored|central_storage):[a-z_=0-9,+A-Z]+)[`\"]", page(kind))
    assert named or kind in ("trainer", "lightning")
    for text in named:
        parse_strategy(text)
