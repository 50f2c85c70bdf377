"""A training script before and after its move to tutti: changed lines, and equality on one and on two devices.

    python benchmarks/moved_scripts.py before.py after.py --in DATA -- --epochs 1
    python benchmarks/moved_scripts.py before.py after.py --in DATA --dtype float64 --name mine --save results.json
    python benchmarks/moved_scripts.py --table results.json

*Changed lines* are the lines of AFTER that BEFORE does not have, as ``diff`` counts them: added and altered lines.
Removed lines are counted apart.

AFTER is played as it is on one and on two devices, each time in a fresh copy of DATA, with one thread a process. The
last run that ``tutti.prepare`` returned is asked for its ``run.state()`` when the script has ended, and the largest
difference of a parameter or buffer is reported. AFTER should therefore name its number of workers, and enough samples
for a few updates. With ``--unchanged ARGUMENTS`` BEFORE runs without an edit under ``tutti run -np 2``.

``--dtype float64`` makes that PyTorch's default dtype before the script starts; the script's own dtypes count all the
same. ``--path`` is a folder with modules that stand in for packages that are not there. ``--save`` adds the entry to a
JSON file. Exit codes: 0, 2 usage, 9 where the difference is larger than ``--limit`` or a play failed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step_tax import hardware

import tutti
from tutti.errors import ExitCode

DEVICES = (1, 2)


class Played(NamedTuple):
    """What the last run of a script came to: its state by name, and the number of its updates."""

    state: Mapping[str, Any]
    updates: int


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """Number of lines that ``after`` adds or alters, and of those of ``before`` that it removes without a successor."""
    added = removed = 0
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind != "equal":
            added += new_end - new_start
            removed += max(0, (end - start) - (new_end - new_start))
    return added, removed


def play(script: Path, arguments: Sequence[str], dtype: str, modules: Path | None, folder: Path) -> Played:
    """Run a moved script on this rank, and read the state of the last run that it prepared. Collective.

    Args:
        script: the script.
        arguments: its arguments.
        dtype: PyTorch's default dtype.
        modules: folder of modules that stand in for packages; None for none.
        folder: working directory.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    os.chdir(folder)
    runs, prepare = [], tutti.prepare

    def prepare_and_note(*positional: Any, **named: Any) -> tutti.Run:
        runs.append(prepare(*positional, **named))
        return runs[-1]

    tutti.prepare = prepare_and_note
    # The script's own modules may have the names of modules of this folder.
    here = Path(__file__).resolve().parent
    for name in [name for name, module in sys.modules.items() if _folder_of(module) == here and name != __name__]:
        del sys.modules[name]
    sys.argv[:] = [str(script), *arguments]
    sys.path[:1] = [str(script.parent), *([str(modules)] if modules else [])]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not runs:
        raise RuntimeError(f"{script} does not call tutti.prepare")
    state = {name: tensor.detach().cpu().numpy() for name, tensor in runs[-1].state().items()}
    return Played(state, runs[-1].global_step)


def _folder_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve().parent if file else None


def played(o: argparse.Namespace, devices: int) -> Played:
    """Play a moved script on so many devices, in a copy of its data."""
    modules = o.path.resolve() if o.path else None
    with copied(o.data) as folder:
        return tutti.launch(play, o.after.resolve(), o.arguments, o.dtype, modules, folder, devices=devices)[0]


def unchanged(o: argparse.Namespace) -> str:
    """Run the script as it was under ``tutti run -np 2``; how it ended."""
    paths = [str(o.path.resolve())] if o.path else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "tutti", "run", "-np", "2", str(o.before.resolve()), *o.unchanged.split()]
    with copied(o.data) as folder:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:] + done.stderr[-4000:], file=sys.stderr)
    return "runs" if done.returncode == 0 else f"exit code {done.returncode}"


@contextmanager
def copied(data: Path | None) -> Iterator[Path]:
    """A copy of a folder, or an empty folder, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        if data is None:
            folder.mkdir()
        else:
            shutil.copytree(data, folder)
        yield folder


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Largest difference between two states, which must have the same names and shapes."""
    if one.keys() != other.keys():
        raise ValueError(f"different names: {sorted(one.keys() ^ other.keys())}")
    return max(float(abs(one[name].astype(float) - other[name]).max()) for name in one if one[name].size)


def entry(o: argparse.Namespace) -> dict[str, Any]:
    """Compare a script before and after its move."""
    added, removed = changed_lines(o.before.read_text(encoding="utf-8"), o.after.read_text(encoding="utf-8"))
    found: dict[str, Any] = {
        "name": o.name or o.before.stem,
        "repository": o.repository,
        "commit": o.commit,
        "changed_lines": added,
        "removed_lines": removed,
        "dtype": None,
        "difference": None,
        "updates": None,
        "unchanged": "-",
        "remark": o.remark,
    }
    if o.unchanged is not None:
        found["unchanged"] = unchanged(o)
    one, other = (played(o, devices) for devices in DEVICES)
    if one.updates != other.updates:
        raise RuntimeError(f"{one.updates} updates on one device, {other.updates} on two: the loop counts its bodies")
    found["updates"], found["difference"] = one.updates, difference(one.state, other.state)
    found["dtype"] = max((str(value.dtype) for value in one.state.values()), key=["int64", "float32", "float64"].index)
    return found


def save(found: Mapping[str, Any], file: Path) -> None:
    """Put an entry into a result file, in place of one of the same name."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"scripts": []}
    scripts = [each for each in kept["scripts"] if each["name"] != found["name"]] + [dict(found)]
    kept = {"date": f"{datetime.now(UTC):%F}", "hardware": hardware(), "scripts": scripts}
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table(scripts: Sequence[Mapping[str, Any]]) -> str:
    """The entries as a table in Markdown, those with the fewest changed lines first."""
    lines = [
        "| script | changed lines | dtype | updates | difference between one and two devices | unchanged | remark |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in sorted(scripts, key=lambda each: (each["changed_lines"], each["name"].lower())):
        updates = "" if each["updates"] is None else each["updates"]
        apart = "not comparable" if each["difference"] is None else f"{each['difference']:.1g}"
        cells = (each["name"], each["changed_lines"], each["dtype"], updates, apart, each["unchanged"], each["remark"])
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; words after ``--`` are the script's."""
    cut = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="the script as it was")
    parser.add_argument("after", type=Path, help="the script moved to tutti")
    parser.add_argument("--in", dest="data", type=Path, help="folder that is copied and becomes the working directory")
    parser.add_argument("--path", type=Path, help="folder of modules that stand in for packages")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"], help="PyTorch's default dtype")
    parser.add_argument("--unchanged", metavar="ARGUMENTS", help="also run BEFORE on two ranks, with these arguments")
    parser.add_argument("--limit", type=float, default=1e-10, help="largest difference")
    parser.add_argument("--save", type=Path, metavar="FILE", help="add the entry to a JSON file")
    for word in ("name", "repository", "commit", "remark"):
        parser.add_argument(f"--{word}", default="", help="stands in the entry")
    o = parser.parse_args(list(words[:cut]))
    o.arguments = list(words[cut + 1 :])
    return o


def main(words: Sequence[str]) -> int:
    """Compare one script, or print the table of a result file; returns an exit code."""
    if words[:1] == ["--table"]:
        print(table(json.loads(Path(words[1]).read_text(encoding="utf-8"))["scripts"]))
        return ExitCode.DONE
    o = parse(words)
    found = entry(o)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    if o.save:
        save(found, o.save)
    equal = found["difference"] is not None and found["difference"] <= o.limit
    return ExitCode.DONE if equal else ExitCode.THRESHOLD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
