"""Saves that are cut short, for ``test_checkpoint_files.py``: ``python -m tests.faults.saving WHAT WHEN FOLDER``.

``next``, ``again`` and ``first`` play one save over and over, each time killed ``before`` or ``after`` a later
system call, and print as JSON what could be loaded afterwards. ``limited`` saves
where a file may have no more than 100 bytes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.checkpoints import same, save
from tests.preloaded import preload
from tutti.checkpoint.folder import newest_checkpoint, prune
from tutti.errors import TuttiError

POINTS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "close")
"""Every call by which a save changes the disk, and those between them."""


def arm(deadly: int, afterwards: bool, others: Collection[int] = ()) -> Callable[[], int]:
    """Die before the ``deadly``-th of these calls; ``afterwards``: right after it, or halfway through a write.

    Args:
        others: processes that are killed just before.

    Returns:
        Tells how many calls there were so far.
    """
    count = 0

    def wrapping(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*words: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == deadly:
                try:
                    if afterwards:
                        call(
                            *(word[: len(word) // 2] if isinstance(word, memoryview) else word for word in words),
                            **options,
                        )
                finally:
                    for process in (*others, os.getpid()):
                        os.kill(process, signal.SIGKILL)
            return call(*words, **options)

        return wrapped

    for name in POINTS:
        setattr(os, name, wrapping(name, getattr(os, name)))
    return lambda: count


def killed(folder: Path, deadly: int, afterwards: bool) -> bool:
    """Save step 20 and prune in a process that dies at its ``deadly``-th call; False where it came to its end."""
    child = os.fork()
    if not child:
        arm(deadly, afterwards)
        save(folder, 20, {"again": True})
        prune(folder, keep_last=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the save failed at call {deadly} without being killed")
    return os.WIFSIGNALED(status)


def play(folder: Path, before: int | None, afterwards: bool) -> dict[str, Any]:
    """Kill at every call in turn. ``before``: the step that has a checkpoint already, None for no step."""
    report: dict[str, Any] = {"points": 0, "unusable": [], "left": [], "loaded": []}
    fresh = folder.with_name("fresh")
    fresh.mkdir()
    if before is not None:
        save(fresh, before)
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(fresh, folder, copy_function=os.link)
        if not killed(folder, report["points"] + 1, afterwards):
            return report
        report["points"] += 1
        found, broken = newest_checkpoint(folder)
        usable = before is None if found is None else same(found)
        if not usable or broken:
            report["unusable"].append([report["points"], broken])
        report["loaded"].append([found.step, found.facts.get("again", False)] if found else None)
        # What a restarted run does.
        save(folder, 20)
        prune(folder, keep_last=1)
        report["left"] += [path.name for path in folder.iterdir() if path.name != "step-00000020"]


def main(what: str, when: str, folder: Path) -> int:
    torch.set_num_threads(1)
    if what == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            save(folder, 20)
        except TuttiError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        return 0
    # What a killed process has written stays, fsynced or not; waiting for the disk would only make this slow.
    os.fsync = lambda descriptor: None
    preload(())
    before = {"next": 10, "again": 20, "first": None}[what]
    print(json.dumps(play(folder, before, when == "after")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
