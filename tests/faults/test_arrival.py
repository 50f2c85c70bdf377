"""Fault 22: a rank that is not started, a wrong address, a port that is taken. Ends in time, address named."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.faults.commands import complaint, starting, write_task
from tests.launching import Result, free_port

pytestmark = [pytest.mark.faults, pytest.mark.row(22)]

SCRIPT = "import tutti\ntutti.init('cpu', timeout=5)\nprint('arrived', tutti.rank())\n"


@contextmanager
def listening() -> Iterator[int]:
    """A port that somebody else listens on, and never answers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def start(
    folder: Path, ranks: list[int], size: int, verb: str, address: str = "127.0.0.1", port: int = 0
) -> list[Result]:
    """Start these of ``size`` ranks by hand, as a script of one's own or as ``tutti train``; how each ended."""
    if verb == "run":
        (folder / "script.py").write_text(SCRIPT)
        words: tuple[str, ...] = ("run", "script.py")
    else:
        words = ("train", write_task(folder), "--steps", "1", "--batch-size", "12", "--timeout", "5", "--out", "out")
    with ExitStack() as stack:
        running = []
        for rank in ranks:
            environ = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            named = {name: str(value) for name, value in environ.items()}
            running.append(
                stack.enter_context(starting(folder, *words, **named, MASTER_ADDR=address, MASTER_PORT=str(port)))
            )
        return [one.finish() for one in running]


def check(result: Result, *shown: str) -> None:
    """Exit code 5, and one last message that says what is shown."""
    assert result.code == 5, result.err
    [said] = complaint(result)
    assert all(part in said for part in shown), said
    assert "Traceback" not in result.err


@pytest.mark.parametrize("size", [3, 4])
def test_a_rank_that_was_never_started_is_named(size: int, tmp_path: Path, seed: int) -> None:
    port, absent = free_port(), 1 + seed % (size - 1)
    present = [rank for rank in range(size) if rank != absent]
    for rank, result in zip(present, start(tmp_path, present, size, "run", port=port), strict=True):
        check(result, f"rank {absent} of {size} did not arrive within 5 s", f"rank {rank}", f"127.0.0.1:{port}")


def test_the_first_rank_was_never_started(tmp_path: Path) -> None:
    port = free_port()
    for result in start(tmp_path, [1, 2], 3, "run", port=port):
        check(result, f"127.0.0.1:{port}", "rank 0", "within 5 s")


def test_train_without_a_rank(tmp_path: Path) -> None:
    port = free_port()
    for result in start(tmp_path, [0, 2], 3, "train", port=port):
        check(result, "rank 1 of 3 did not arrive within 5 s", f"127.0.0.1:{port}")


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with listening() as port:
        [first] = start(tmp_path, [0], 2, "run", port=port)
    check(first, f"127.0.0.1:{port}", "in use", "rank 0 of 2")


@pytest.mark.parametrize("address", ["127.0.0.2", "no-such-host.invalid"])
def test_a_wrong_address(address: str, tmp_path: Path) -> None:
    port = free_port()
    [result] = start(tmp_path, [1], 3, "run", address=address, port=port)
    # A name that does not resolve has no port to be reached.
    check(result, address if address.endswith("invalid") else f"{address}:{port}", "rank 1 of 3")


@pytest.mark.parametrize(
    ("port", "said"), [("0", "MASTER_PORT is 0"), ("65536", "MASTER_PORT is 65536"), ("x", "MASTER_PORT is 'x'")]
)
def test_a_port_that_is_none(port: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    with starting(tmp_path, "run", "script.py", **environ, MASTER_PORT=port) as running:
        result = running.finish()
    assert result.code == 2
    assert said in complaint(result)[-1]
    assert "Traceback" not in result.err
