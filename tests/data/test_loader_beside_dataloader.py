"""What ``torch.utils.data.DataLoader`` does where tutti's loader processes promise otherwise: ``docs/decisions/024``.

A case that fails here has come right in PyTorch: the reason to have loader processes of our own is then one less.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = '''
import json, multiprocessing, os, signal, time
import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    """Its first item raises where it is wrong."""

    def __init__(self, wrong=False):
        self.wrong = wrong

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.wrong:
            raise ValueError("a torn picture")
        return torch.tensor(index)


def started():
    batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=1))
    next(batches)
    return batches


def raised():
    try:
        list(DataLoader(Numbers(wrong=True), batch_size=2, num_workers=1))
    except ValueError as error:
        return str(error)


def daemonic():
    here, there = multiprocessing.Pipe()

    def body():
        try:
            there.send(str(len(list(DataLoader(Numbers(), num_workers=1)))))
        except AssertionError as error:
            there.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=body, daemon=True)
    process.start()
    found = here.recv()
    process.join()
    return found


def killed():
    batches = started()
    worker = multiprocessing.active_children()[0].pid
    try:
        os.kill(worker, signal.SIGKILL)
        for _ in range(500):
            time.sleep(0.01)
        list(batches)
    except RuntimeError as error:
        return str(error)


def signalled():
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: None)
    batches = started()
    try:
        os.killpg(0, signal.SIGTERM)
        return str(len(list(batches)))
    except (RuntimeError, OSError, EOFError) as error:
        # The loader notices the dead process, or fails as it asks it for a batch's file descriptor.
        return f"batches are lost: {error}"


print(json.dumps({case.__name__: case() for case in (raised, daemonic, killed, signalled)}), flush=True)
os._exit(0)  # what a DataLoader with a dead process does as it ends takes five seconds
'''

WORDS = {
    "raised": "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback",
    "daemonic": "daemonic processes are not allowed to have children",
    "killed": "DataLoader worker (pid",
    "signalled": "batches are lost",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The errors of all cases, from a process of their own: a DataLoader sets a handler of SIGCHLD for good."""
    path: Path = tmp_path_factory.mktemp("beside") / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("case", WORDS)
def test_a_dataloader_fails_where_our_processes_do_not(case: str, found: dict[str, str]) -> None:
    assert WORDS[case] in found[case]
