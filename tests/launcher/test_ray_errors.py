"""Exceptions as Ray raises them, each with the end of the rank or of the run that it means; without a cluster."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from tutti.config.engine_config import RayEngineConfig
from tutti.errors import AuthenticationError, ExitCode, NotEnoughMemory, PeerError, TuttiError, UsageError
from tutti.launcher.engine import EndedRank, EngineGone

ray = pytest.importorskip("ray", reason="the package ray is not installed")
DIED = (
    "The actor died unexpectedly before finishing this task.\n\tpid: 7\n\tip: 10.0.0.2\nThe actor is dead because its "
    "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. Some common causes include: (1) the process was killed"
)
UNMADE = "The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()\x1b[39m\n  File\n"


def raised(cause: Exception) -> Exception:
    """The exception of a call in whose method the actor has raised ``cause``."""
    error: Exception = ray.exceptions.RayTaskError("poll", "a traceback", cause).as_instanceof_cause()
    return error


def end(error: Exception, alive: bool = True) -> EndedRank | None:
    from tutti.launcher.ray_errors import end_of_rank

    return end_of_rank(error, "10.0.0.2/abcdef", alive)


def failure(error: Exception) -> Exception:
    from tutti.launcher.ray_errors import failure_of

    return failure_of(error, "10.0.0.2/abcdef")


@pytest.mark.parametrize(
    ("name", "words", "kind", "text"),
    [
        ("RpcError", "UNAVAILABLE", EngineGone, "the head of the Ray cluster does not answer any more"),
        ("GetTimeoutError", "late", EngineGone, "the head of the Ray cluster does not answer any more"),
        ("RaySystemError", "a broken pipe", EngineGone, "the Ray cluster has failed: System error: a broken pipe"),
        ("AuthenticationError", "no token", AuthenticationError, "refuses this process: no token"),
        (
            "RuntimeEnvSetupError",
            "no\nspace",
            UsageError,
            "(10.0.0.2/abcdef): Failed to set up runtime env",
        ),
    ],
)
def test_failures_of_ray_are_told_apart(name: str, words: str, kind: type[Exception], text: str) -> None:
    found = failure(getattr(ray.exceptions, name)(words))
    assert type(found) is kind and text in str(found)


def test_only_silence_is_a_lost_head() -> None:
    assert "any more" in str(failure(ConnectionError("gone")))
    refused = failure(ValueError("The precision is too high.\nTraceback"))
    assert type(refused) is UsageError and "asks for: The precision is too high. Change" in str(refused)
    assert failure(error := KeyError("defect")) is error


def test_an_actor_that_cannot_be_made_is_wrong_usage() -> None:
    for reason, text in (
        ("ModuleNotFoundError: No module named 'tutti'", "has no tutti (10.0.0.2/abcdef)"),
        ("TypeError: RankSupervisor() takes no arguments", "cannot hold a rank (10.0.0.2/abcdef): TypeError: RankSup"),
    ):
        error = ray.exceptions.RayActorError(error_msg=UNMADE + reason, actor_init_failed=True)
        assert type(failure(error)) is UsageError and text in str(failure(error))
        with pytest.raises(UsageError):
            end(error)


def test_a_lost_node_is_no_killed_actor() -> None:
    died = ray.exceptions.RayActorError(error_msg=DIED)
    lost = EndedRank(-signal.SIGKILL, "10.0.0.2/abcdef", lost="was lost with its node 10.0.0.2/abcdef")
    assert end(died, alive=False) == lost
    assert end(ray.exceptions.NodeDiedError("drained")) == lost
    killed = end(died)
    assert killed is not None and (killed.code, killed.lost) == (-signal.SIGKILL, "")
    assert killed.why.endswith("held it: Worker unexpectedly exits with a connection error code 2. End of file")
    assert end(ray.exceptions.ActorUnavailableError("Socket closed", None), alive=False) is None


def test_a_node_out_of_memory_is_named() -> None:
    killed = end(ray.exceptions.OutOfMemoryError("Memory on the node was 15 GB / 16 GB (0.95)\nand so on"))
    assert killed is not None and (killed.code, killed.lost) == (-signal.SIGKILL, "")
    assert "ran out of memory: Memory on the node was 15 GB" in killed.why and "cpus=" in str(killed.remedy)


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (KeyError("x"), TuttiError, "the actor that holds a rank has failed (10.0.0.2/abcdef): KeyError: 'x'"),
        (ValueError("x"), TuttiError, "has failed (10.0.0.2/abcdef): ValueError: x"),
        (OSError(errno.EIO, "broken"), TuttiError, "has failed (10.0.0.2/abcdef): OSError"),
        (OSError(errno.ENOMEM, "no memory"), NotEnoughMemory, "cannot start the process of a rank (10.0.0.2/abcdef)"),
        (UsageError("there is no folder"), UsageError, "there is no folder"),
    ],
)
def test_an_error_of_the_actor_itself_ends_the_run(cause: Exception, kind: type[TuttiError], text: str) -> None:
    with pytest.raises(TuttiError) as caught:
        end(raised(cause), alive=False)
    assert type(caught.value) is kind and text in str(caught.value)
    assert caught.value.exit_code == (ExitCode.UNEXPECTED if kind is TuttiError else ExitCode.USAGE)


def test_refusals_to_connect_say_why() -> None:
    from tutti.launcher.ray_errors import refusal_of

    versions = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\nThis process was started:\n    Ray"
    size = "Failed to set up runtime environment.\nFailed: Package size (514.98MiB) exceeds the maximum. To exclude"
    for error, text in (
        (RuntimeError(versions), "this process (there:1): The cluster was started with: Ray: 2.50.0 This process was"),
        (ray.exceptions.RuntimeEnvSetupError(size), "(/code): 514.98MiB exceeds the maximum. Name data and results in"),
        (
            ray.exceptions.RuntimeEnvSetupError("no\nroom"),
            "here (there:1): Failed to set up runtime environment. no room",
        ),
        (ValueError("a bad option\nand more"), "Ray refuses to run here (there:1): a bad option."),
    ):
        assert text in str(refusal_of(error, "there:1", "/code"))


def test_an_address_where_nothing_listens_is_refused_at_once(tmp_path: Path) -> None:
    from tutti.config.engine_config import RayEngineConfig
    from tutti.launcher.ray_engine import RayEngine

    for address in ("127.0.0.1:9", "ray://127.0.0.1:9"):
        with pytest.raises(PeerError, match=f"no Ray cluster to run on .{address}"):
            RayEngine(RayEngineConfig(address=address), tmp_path)


def test_processes_of_ray_that_do_not_start_are_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tutti.launcher.ray_engine import RayEngine

    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because\nof load.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    with pytest.raises(PeerError, match=r"have not started \(local\): The current node timed out"):
        RayEngine(RayEngineConfig(address="local"), tmp_path)
