"""Exceptions of Ray in tutti's terms: a lost node, a killed actor, too little memory, wrong usage or a defect."""

from __future__ import annotations

import errno
import re
import signal

import ray

from tutti.errors import AuthenticationError, NotEnoughMemory, TuttiError, UsageError
from tutti.launcher.engine import EndedRank, EngineGone

SILENT = "the head of the Ray cluster does not answer any more"
"""Message about a cluster whose head was lost."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST = 500
_NO_PROCESS = frozenset({errno.ENOMEM, errno.EAGAIN})
_SMALLER = "start fewer ranks on a node (a larger cpus=), or give the ranks a smaller batch"
_OPTIONS = "change the cause that Ray names; docs/ray.md lists the options of --on ray"
_OF_LOST_NODES = (
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.ActorUnschedulableError,
)


def failure_of(error: Exception, node: str | None = None) -> Exception:
    """Return the exception to raise in place of an exception that a call to Ray has raised.

    Args:
        error: the exception of the call.
        node: name of the node on which the actor of the call lives; None for a call to the head.

    Returns:
        ``EngineGone`` if the head does not answer (also for an OSError), or Ray itself fails (with Ray's words);
        ``AuthenticationError`` if the cluster refuses this process; ``UsageError`` if Ray refuses the arguments (a
        ValueError or TypeError), cannot prepare the runtime environment, or a node has no tutti; ``NotEnoughMemory`` if
        a node has no memory for a process; ``TuttiError`` for a defect of the actor's own code. A ``TuttiError`` that
        the actor has raised, and every other exception that is not Ray's, is returned as it is.
    """
    if isinstance(error, ray.exceptions.AuthenticationError):
        return AuthenticationError(
            "the Ray cluster refuses this process", why=first_line(error), remedy="give it the cluster's token"
        )
    # Also an instance of the class of its cause, such as OSError.
    if isinstance(error, ray.exceptions.RayTaskError):
        return _failure_of_actor(error, node)
    if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
        return UsageError(
            "Ray cannot prepare a node for the ranks",
            where=node,
            why=all_lines(error),
            remedy="mend the node; ray:code=shared uploads nothing",
        )
    if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
        return _failure_of_class(error, node)
    # Timeouts and lost connections are OSErrors.
    if isinstance(error, OSError | ray.exceptions.RpcError):
        return EngineGone(SILENT)
    if isinstance(error, ValueError | TypeError):
        return UsageError("Ray refuses what --on ray asks for", why=first_line(error), remedy=_OPTIONS)
    if isinstance(error, ray.exceptions.RayError):
        return EngineGone(f"the Ray cluster has failed: {first_line(error)}")
    return error


def refusal_of(error: Exception, address: str | None, folder: str) -> UsageError:
    """Return the UsageError to raise in place of an exception with which Ray refuses to connect this process.

    Args:
        error: the exception of ``ray.init``.
        address: address of the cluster, if one was given.
        folder: the working directory, which Ray uploads.

    Returns:
        The error, with a reason and a remedy for the user. Reasons are that the cluster has another version of Ray or
        Python, that the working directory is too large to be uploaded, or Ray's own words.
    """
    if "Version mismatch" in str(error):
        return UsageError(
            "the Ray cluster has another version of Ray or Python than this process",
            where=address,
            why=all_lines(error).removeprefix("Version mismatch: "),
            remedy="start tutti with the versions of the cluster",
        )
    _, found, size = str(error).partition("Package size ")
    if found:
        return UsageError(
            "the working directory is too large for Ray to upload",
            where=folder,
            why=size.split(". ")[0].replace("(", "").replace(")", ""),
            remedy="name data and results in .gitignore or .rayignore, or write ray:code=shared, which uploads nothing",
        )
    why = all_lines(error) if isinstance(error, ray.exceptions.RuntimeEnvSetupError) else first_line(error)
    return UsageError("Ray refuses to run here", where=address, why=why, remedy=_OPTIONS)


def end_of_rank(error: Exception, node: str, alive: bool) -> EndedRank | None:
    """Turn an exception with which Ray answers a call of a rank's actor into the record of the rank's end.

    Args:
        error: the exception with which Ray answers the call.
        node: name of the actor's node.
        alive: whether the head of the cluster counts the node as alive.

    Returns:
        The rank's end, with ``code`` -9 (SIGKILL) and ``node``. If the node was lost, ``lost`` says so in words, and
        the rank's slot (place for a rank) is lost too. If the actor's process was killed, such as for lack of memory,
        ``why`` has Ray's reason and ``remedy`` advice. None if the actor may answer a later call.

    Raises:
        Exception: the exception says nothing about the rank's end, and the whole run must end: a defect of tutti, or a
            failure of Ray itself. ``failure_of`` gives the exception that is raised, such as ``EngineGone``.
    """
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return None
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return EndedRank(
            -signal.SIGKILL,
            node,
            why=f"was killed by Ray because its node ran out of memory: {all_lines(error)}",
            remedy=f"{_SMALLER[0].upper()}{_SMALLER[1:]}; the node's RAY_memory_usage_threshold is Ray's limit.",
        )
    defect = isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed
    died = isinstance(error, ray.exceptions.RayActorError | ray.exceptions.WorkerCrashedError) and not defect
    if isinstance(error, _OF_LOST_NODES) or (died and not alive):
        return lost_rank(node)
    if died:
        return EndedRank(
            -signal.SIGKILL,
            node,
            why=f"was killed with the Ray actor that held it: {_detail(error)}",
            remedy="Look for the end of the worker in the logs of Ray on the node, and for 'out of memory' in those of "
            "its system.",
        )
    raise failure_of(error, node) from error


def lost_rank(node: str) -> EndedRank:
    """Return the record of a rank's end which says that the rank was lost with its node and its slot (room for a rank).

    Args:
        node: name of the node.

    Returns:
        An ``EndedRank``: ``code`` -9 (SIGKILL), ``node``, and ``lost``, a text for messages.
    """
    return EndedRank(-signal.SIGKILL, node, lost=f"was lost with its node {node}")


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, without colours; the name of its class if there is no text."""
    return next(iter(_plain(error).splitlines()), type(error).__name__)


def all_lines(error: Exception) -> str:
    """Return the text of an exception in one line, without colours, of at most 500 characters.

    Line ends and other white space become single spaces. If there is no text, the name of the class is returned.
    """
    return " ".join(_plain(error).split())[:_MOST] or type(error).__name__


def _failure_of_actor(error: Exception, node: str | None) -> Exception:
    """Return the exception for one that a method of the actor has raised."""
    cause = error.cause  # type: ignore[attr-defined]
    if isinstance(cause, TuttiError):
        return cause
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _NO_PROCESS):
        return NotEnoughMemory(
            "a node of the Ray cluster cannot start the process of a rank",
            where=node,
            why=str(cause),
            remedy=_SMALLER,
        )
    return TuttiError(
        "the actor that holds a rank has failed",
        where=node,
        why=f"{type(cause).__name__}: {cause}",
        remedy="install one version of tutti on all nodes; otherwise this is a defect of tutti: report it",
    )


def _failure_of_class(error: Exception, node: str | None) -> Exception:
    """Return the exception for an actor that cannot be made, such as on a node where its class cannot be imported."""
    words = _plain(error).strip().splitlines()
    reason = next((line for line in reversed(words) if line and not line[0].isspace()), type(error).__name__)
    if "No module named 'tutti" in reason:
        return UsageError(
            "a node of the Ray cluster has no tutti", where=node, why=reason, remedy="install it on every node"
        )
    return UsageError(
        "a node of the Ray cluster cannot hold a rank",
        where=node,
        why=reason,
        remedy="install the same versions of Python, Ray and tutti on every node",
    )


def _detail(error: Exception) -> str:
    """Return Ray's own reason for the end of an actor's process, without the ids and hints around it."""
    text = all_lines(error)
    for heading in ("Worker exit detail: ", "The actor is dead because "):
        _, found, rest = text.partition(heading)
        if found:
            return rest.split(" Some common causes include")[0].rstrip(".")
    return text


def _plain(error: Exception) -> str:
    return _COLOUR.sub("", str(error))
