"""What a copy of a folder leaves out."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tutti.launcher.special_files import special_files


def test_pipes_and_sockets_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep/er", ".git"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("pipe", "deep/er/a pipe*", ".git/pipe"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "deep" / "file").write_text("text")
    (tmp_path / "deep" / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "absent")
    (tmp_path / "folder").symlink_to(tmp_path / "deep")
    # The path of a socket may be too long.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as there:
        there.bind("socket")
        found = sorted(special_files(str(tmp_path), [".git"]))
    assert found == [r"/deep/er/a\ pipe\*", "/deep/link", "/pipe", "/socket"]
