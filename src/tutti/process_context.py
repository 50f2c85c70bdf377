"""Rank, size, local rank and node of this process, read from the launcher's environment. No torch, no network.

Launchers are tried in this order: torchrun (and tutti's own launcher, which sets the same variables), Horovod, Open
MPI, Hydra (the launcher of MPICH and Intel MPI), PALS, Flux, a Slurm step; without any of them the world is this one
process. A Slurm step takes precedence over an MPI launcher with the same rank and size, because its variables name the
nodes. UsageError refuses variables that announce other processes but are incomplete, or belong to a launcher not in
this list: if they were ignored, every process would start a run of its own.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tutti.errors import UsageError, counted

Source = Literal["torchrun", "horovod", "openmpi", "hydra", "pals", "flux", "slurm", "single"]

LAUNCHED = "TUTTI_LAUNCHED"
"""Variable from the command to its ranks: the Unix time at which it was started."""

_HOROVOD = {
    field: f"HOROVOD_{field.upper()}"
    for field in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
}
_OPENMPI = {field: f"OMPI_COMM_WORLD_{field.upper()}" for field in ("rank", "size", "local_rank", "local_size")}
_HYDRA = {"rank": "PMI_RANK", "size": "PMI_SIZE", "local_rank": "MPI_LOCALRANKID", "local_size": "MPI_LOCALNRANKS"}
_HYDRA_PROXIES = ("pmi_proxy", "mpiexec")
# Names of Cray's PMI. PALS (pals.h) itself has no variable for the number of ranks.
_CRAY_PMI = {"local_rank": "PMI_LOCAL_RANK", "local_size": "PMI_LOCAL_SIZE"}
_PALS = {"rank": "PALS_RANKID", "size": "PMI_SIZE", "local_rank": "PALS_LOCAL_RANKID", "local_size": "PALS_LOCAL_SIZE"}
# The task's environment by flux-core's job shell (src/shell/task.c).
_FLUX = {"rank": "FLUX_TASK_RANK", "size": "FLUX_JOB_SIZE", "local_rank": "FLUX_TASK_LOCAL_ID"}
_FLUX_NODES = "FLUX_JOB_NNODES"

_SIZES = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "PMIX_SIZE"),
    *("MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
)
"""Launchers' variables with the number of processes, of the job or of this node."""
_RANKS = ("PMIX_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "ALPS_APP_PE")
"""Rank variables of launchers that are not supported; each shows that this process belongs to a job."""

# Schedulers whose job of one task counts as an interactive shell: ``srun --pty bash``.
_SHELLS = ("slurm", "flux", "pals")
_TORCHRUN = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
_TORCHRUN_GROUP = {"cross_rank": "GROUP_RANK", "cross_size": "GROUP_WORLD_SIZE"}

# First id of Slurm's steps without srun (batch script, extern, interactive shell, pending).
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
# Derived ports stay below 32768, the first of Linux's ephemeral ports.
_FIRST_PORT, _PORTS = 10_000, 20_000

_MPI_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_JOB_IDS: Mapping[str, tuple[str, ...]] = {
    "openmpi": _MPI_JOB_IDS,
    "horovod": _MPI_JOB_IDS,
    "pals": ("PALS_APID", "PMI_JOBID"),
    "flux": ("FLUX_JOB_ID",),
}
_NODES: Mapping[Source, str] = {"flux": _FLUX_NODES}


def launch_time(environ: Mapping[str, str]) -> float | None:
    """Return the time at which the user's command that launched this rank was started; None if it is unknown.

    Args:
        environ: environment variables; tutti's launcher sets ``TUTTI_LAUNCHED`` for each rank.

    Returns:
        Unix time in seconds; None if the variable is missing or no number.
    """
    try:
        return float(environ[LAUNCHED])
    except (KeyError, ValueError):
        return None


@dataclass(frozen=True)
class Identity:
    """Rank, local rank and node of this process in its job.

    Attributes:
        rank: global rank, 0 … size-1 over all nodes.
        size: number of processes on all nodes.
        local_rank: index of this process among those on this node, 0 … local_size-1.
        local_size: number of processes on this node.
        cross_rank: index of this node, 0 … cross_size-1.
        cross_size: number of nodes.
        source: launcher whose variables were read; "single" for none.
        attempt: number of restarts of the job so far.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    source: Source = "single"
    attempt: int = 0


def read_identity(environ: Mapping[str, str]) -> Identity:
    """Read rank, size and node of this process from the environment variables of its launcher.

    Args:
        environ: environment variables. Without those of a launcher the process is the only one of its job.

    Returns:
        An ``Identity``: ``rank`` and ``size`` of the job; ``local_rank`` and ``local_size`` on this node;
        ``cross_rank`` and ``cross_size``, index of this node and number of nodes; ``source``, the launcher whose
        variables were read; and ``attempt``, the number of times that the launcher has restarted the job.

    Raises:
        UsageError: a variable is malformed, missing or inconsistent; the error names it.

    >>> read_identity({})
    Identity(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1, source='single', attempt=0)
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        identity = _torchrun(environ)
        if identity.size == 1 and "TORCHELASTIC_RUN_ID" not in environ:
            _refuse_ignored(environ, identity)
        return identity
    if any(name in environ for name in _HOROVOD.values()):
        return _build(environ, _HOROVOD, "horovod")
    identity = _of_launcher(environ)
    if identity.size == 1:
        _refuse_ignored(environ, identity)
    return identity


def identity_of_group(rank: int, size: int, environ: Mapping[str, str]) -> Identity:
    """Return rank, size and node of this process in a process group that the user's script has made itself.

    Node and local rank are read from the launcher's environment variables if these state the same rank and size as the
    group. Otherwise, as after ``torch.multiprocessing.spawn``, all ranks are assumed to be on this node (a guess).

    Args:
        rank: rank in the group.
        size: number of ranks in the group.
        environ: environment variables.

    Returns:
        An ``Identity``: ``rank`` and ``size``, ``local_rank`` and ``local_size`` on this node, ``cross_rank`` and
        ``cross_size`` (index of this node and number of nodes), ``source`` (the launcher; ``single`` for the guess) and
        ``attempt`` (restarts).

    >>> identity_of_group(1, 2, {})
    Identity(rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1, source='single', attempt=0)
    """
    try:
        identity = read_identity(environ)
    except UsageError:
        # Scripts that make their own group often set RANK and WORLD_SIZE only, which is legitimate.
        identity = Identity()
    if (identity.rank, identity.size) == (rank, size):
        return identity
    return Identity(rank=rank, size=size, local_rank=rank, local_size=size)


def joined(environ: Mapping[str, str]) -> bool:
    """Return whether this process is already a rank that a launcher started, so that tutti must not start ranks.

    A scheduler's job of one task counts as an interactive shell (``srun --pty bash``), and gives False.

    Args:
        environ: environment variables.

    Raises:
        UsageError: a variable is malformed, missing or inconsistent; the error names it.
    """
    identity = read_identity(environ)
    return identity.source != "single" and not (identity.source in _SHELLS and identity.size == 1)


def check_own_processes(command: str, environ: Mapping[str, str]) -> None:
    """Check that a command which starts processes of its own is not itself started as a rank of a job.

    A scheduler's job of one task, such as an interactive shell (``srun --pty bash``), passes the check.

    Args:
        command: the command as the user writes it, such as ``tutti compare``.
        environ: environment variables.

    Raises:
        UsageError: a launcher such as torchrun, srun or mpirun has started this process as a rank; or a launcher's
            environment variables are malformed, missing or inconsistent.
    """
    if joined(environ):
        raise UsageError(f"{command} starts processes of its own", remedy="call it without torchrun, srun or mpirun")


def check_own_restarts(max_restarts: int) -> None:
    """Check that ``--max-restarts`` is 0, in a job whose ranks a launcher other than tutti's has started.

    That launcher alone can restart the ranks. Called in such a job only; the function does not look for the launcher.

    Args:
        max_restarts: value of ``--max-restarts``.

    Raises:
        UsageError: ``max_restarts`` is not 0.
    """
    if max_restarts:
        raise UsageError(
            "--max-restarts needs tutti's own launcher", remedy="use the restarts of torchrun or the scheduler"
        )


def rendezvous(environ: Mapping[str, str], identity: Identity) -> tuple[str, int]:
    """Return where this job's key-value store is, which rank 0 hosts and all ranks connect to.

    ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence, each by itself. Without them the address is the loopback
    address for a job on one node, or the first node of a Slurm step, and the port is derived from the job's id; for
    Hydra, which has no job id, from the process id of its proxy. A single process without ``MASTER_PORT`` gets port 0:
    any free port. Nothing is connected or bound here.

    Args:
        environ: environment variables.
        identity: rank, size and node of this process, from ``read_identity``.

    Returns:
        Host name or IP address of rank 0's node, and TCP port.

    Raises:
        UsageError: neither the variables nor the launcher give an address and a port, ``MASTER_PORT`` is no whole
            number from 1 to 65535, or a Slurm variable is malformed.
    """
    derived = _derived(environ, identity)
    address = environ.get("MASTER_ADDR") or (derived[0] if derived else None)
    if address is None:
        raise _nowhere("MASTER_ADDR", identity)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT")
        if not 1 <= port <= 65535:
            raise UsageError(f"MASTER_PORT is {port}", remedy="give a port from 1 to 65535")
        return address, port
    if derived is None:
        raise _nowhere("MASTER_PORT", identity)
    return address, derived[1]


def first_host(nodelist: str) -> str:
    """Return the name of the first host in a Slurm node list, such as ``node[01-03,7],gpu9``.

    Args:
        nodelist: value of a variable such as ``SLURM_STEP_NODELIST``.

    Raises:
        UsageError: the list cannot be parsed.

    >>> first_host("node[01-03,7],gpu9")
    'node01'
    >>> first_host("gpu9,node[01-03]")
    'gpu9'
    """
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if match is None:
        raise UsageError(f"cannot read '{nodelist}' as a list of hosts", where="SLURM_STEP_NODELIST")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _torchrun(environ: Mapping[str, str]) -> Identity:
    # Launchers that imitate torchrun often omit the group's variables; with equal nodes they follow from the others.
    group = any(name in environ for name in _TORCHRUN_GROUP.values())
    names = _TORCHRUN | _TORCHRUN_GROUP if group else _TORCHRUN
    return _build(environ, names, "torchrun", attempt="TORCHELASTIC_RESTART_COUNT")


def _of_launcher(environ: Mapping[str, str]) -> Identity:
    """Return the identity from the innermost MPI or scheduler launcher; rank 0 of 1 without a launcher."""
    found = _innermost(environ)
    if not _in_slurm_step(environ):
        return Identity() if found is None else _build(environ, *found, nodes=_NODES.get(found[1]))
    if found is None or _says_the_same(environ, found[0]):
        return _slurm(environ)
    # The launcher ran inside a Slurm step, whose tasks are not these ranks.
    return _build(environ, *found, nodes=_NODES.get(found[1]))


def _innermost(environ: Mapping[str, str]) -> tuple[dict[str, str], Source] | None:
    """Return the names of the variables with this process's rank and their launcher, Slurm excluded."""
    if any(name in environ for name in _OPENMPI.values()):
        return _OPENMPI, "openmpi"
    if any(_HYDRA[field] in environ for field in ("local_rank", "local_size")):
        return _HYDRA, "hydra"
    if _PALS["rank"] in environ:
        # Older versions of PALS have no local size; Cray's PMI has.
        local = {} if _PALS["local_size"] in environ else {"local_size": _CRAY_PMI["local_size"]}
        return {**_PALS, **local}, "pals"
    if _FLUX["rank"] in environ:
        return _FLUX, "flux"
    if _HYDRA["rank"] in environ or environ.get(_HYDRA["size"], "1") != "1":
        local = _CRAY_PMI if any(name in environ for name in _CRAY_PMI.values()) else {}
        alone = environ.get(_HYDRA["rank"]) == "0" and environ.get(_HYDRA["size"]) == "1" and not local
        # A single process under a scheduler's PMI, such as an interactive shell.
        return None if alone else ({**_HYDRA, **local}, "hydra")
    return None


def _says_the_same(environ: Mapping[str, str], names: Mapping[str, str]) -> bool:
    """Return whether a launcher's rank and size equal those of the Slurm step."""
    step = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return (environ.get(names["rank"]), environ.get(names["size"])) == (environ["SLURM_PROCID"], environ.get(step))


def _refuse_ignored(environ: Mapping[str, str], identity: Identity) -> None:
    """Raise UsageError if a launcher's variable shows several processes, but this process would run alone."""
    many = [name for name in _SIZES if environ.get(name, "").strip() not in ("", "1")]
    # PMIx gives an interactive shell of Slurm rank 0.
    shell = "SLURM_JOB_ID" in environ
    one_of = [name for name in _RANKS if name in environ and not (shell and environ[name] == "0")]
    if identity.source in ("single", "slurm", "torchrun") and (name := next(iter([*many, *one_of]), None)):
        counted = f", but {identity.source} says that this process is alone" if identity.source != "single" else ""
        raise UsageError(
            f"{name} is '{environ[name]}'{counted}",
            why="a launcher has started several processes and does not say which of them this is, "
            "so that each would start a separate run",
            remedy="start with torchrun, srun, mpirun, mpiexec.hydra or tutti run -H, or set RANK, WORLD_SIZE, "
            f"LOCAL_RANK and LOCAL_WORLD_SIZE; for independent runs unset {name}",
        )


def _slurm(environ: Mapping[str, str]) -> Identity:
    # A step may be smaller than its job: the step's variables take precedence.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    names = {
        "rank": "SLURM_PROCID",
        "size": size_name,
        "local_rank": "SLURM_LOCALID",
        "cross_rank": "SLURM_NODEID",
        "cross_size": nodes_name,
    }
    values = {field: _integer(environ, name) for field, name in names.items()}
    values["local_size"], names["local_size"] = _slurm_local_size(environ, values)
    return _checked(values, names, "slurm", _attempt(environ, "SLURM_RESTART_COUNT"))


def _slurm_local_size(environ: Mapping[str, str], values: Mapping[str, int]) -> tuple[int, str]:
    """Return the number of tasks on this node, and the name of the variable it was read from."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environ:
            continue
        counts = tasks_per_node(environ[name], name)
        if len(counts) == values["cross_size"] and sum(counts) == values["size"]:
            return (counts[values["cross_rank"]] if values["cross_rank"] < len(counts) else 0), name
        if name == "SLURM_STEP_TASKS_PER_NODE":
            raise UsageError(
                f"{name} is '{environ[name]}', which is not "
                f"{counted(values['size'], 'task')} on {counted(values['cross_size'], 'host')}",
                remedy="start the program with srun",
            )
    if "SLURM_NTASKS_PER_NODE" in environ:
        return min(_integer(environ, "SLURM_NTASKS_PER_NODE"), values["size"]), "SLURM_NTASKS_PER_NODE"
    if values["cross_size"] == 1:
        return values["size"], "SLURM_NTASKS"
    raise UsageError("SLURM_STEP_TASKS_PER_NODE is missing", remedy="start the program with srun")


def tasks_per_node(text: str, name: str) -> list[int]:
    """Parse Slurm's number of tasks on each node: ``2(x3),1`` means three nodes with 2 tasks and one with 1.

    Args:
        text: value of the variable.
        name: name of the variable, for the error message.

    Returns:
        Number of tasks of each node, in the order of the node list.

    Raises:
        UsageError: the text is malformed.

    >>> tasks_per_node("2(x3),1", "SLURM_TASKS_PER_NODE")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"{name} is '{text}'", remedy="it must read like 2(x3),1; start the program with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return False
    return _integer(environ, "SLURM_STEP_ID") < _SLURM_SPECIAL_STEPS


def _build(
    environ: Mapping[str, str],
    names: Mapping[str, str],
    source: Source,
    attempt: str | None = None,
    nodes: str | None = None,
) -> Identity:
    """Return the identity from the variables ``names``.

    A missing node index and number of nodes are derived, for equal nodes whose ranks are consecutive.

    Args:
        environ: environment variables.
        names: variable by field of ``Identity``.
        source: the launcher.
        attempt: variable with the number of restarts.
        nodes: variable with the number of nodes, for a launcher without a variable for the local size.

    Raises:
        UsageError: a variable is missing or malformed, or they are inconsistent.
    """
    values = {field: _integer(environ, name) for field, name in names.items()}
    if nodes is not None:
        hosts = _integer(environ, nodes)
        if hosts < 1 or values["size"] % hosts:
            raise _uneven(f"{names['size']} is {values['size']} and {nodes} is {hosts}")
        values["local_size"] = values["size"] // hosts
    if "cross_size" not in values:
        size, local_size = values["size"], values["local_size"]
        if local_size < 1 or size % local_size:
            raise _uneven(f"{names['size']} is {size} and {names['local_size']} is {local_size}")
        values["cross_rank"], values["cross_size"] = values["rank"] // local_size, size // local_size
        if values["rank"] < size and values["rank"] % local_size != values["local_rank"] < local_size:
            raise _uneven(
                f"{names['rank']} is {values['rank']} of {size} and {names['local_rank']} is {values['local_rank']} "
                f"of {local_size}"
            )
    return _checked(values, names, source, _attempt(environ, attempt))


def _uneven(what: str) -> UsageError:
    return UsageError(
        what,
        why="nodes with different numbers of processes, or with ranks that are not consecutive, cannot be"
        " distinguished",
        remedy="start with torchrun, or with the same number of processes on every node, one node after the other",
    )


def _checked(values: Mapping[str, int], names: Mapping[str, str], source: Source, attempt: int) -> Identity:
    for rank, size in (("rank", "size"), ("cross_rank", "cross_size"), ("local_rank", "local_size")):
        if values[rank] >= values[size]:
            rank_name, size_name = names.get(rank, rank), names.get(size, size)
            raise UsageError(
                f"{rank_name} is {values[rank]}, but {size_name} is {values[size]}",
                remedy=f"a rank lies between 0 and {size_name} - 1",
            )
    for part in ("local_size", "cross_size"):
        if values[part] > values["size"]:
            raise UsageError(
                f"{names.get(part, part)} is {values[part]}, but {names['size']} is {values['size']}",
                remedy="start all processes with the same launcher",
            )
    return Identity(**values, source=source, attempt=attempt)


def _attempt(environ: Mapping[str, str], name: str | None) -> int:
    return _integer(environ, name) if name is not None and name in environ else 0


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise UsageError(
            f"{name} is missing",
            why="other variables of the same launcher are set",
            remedy="start with torchrun, srun, mpirun, mpiexec.hydra or tutti run, which set all of them, "
            "or unset the others",
        )
    if not text.strip().isdecimal():
        raise UsageError(f"{name} is '{text}'", remedy="it must be a whole number of at least 0")
    return int(text)


def _derived(environ: Mapping[str, str], identity: Identity) -> tuple[str, int] | None:
    if identity.source == "single":
        return "127.0.0.1", 0
    if identity.source == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if nodes is None or "SLURM_JOB_ID" not in environ:
            return None
        # Steps of one job, and jobs with neighbouring ids, may run at the same time on one node.
        job = 16 * _integer(environ, "SLURM_JOB_ID") + _integer(environ, "SLURM_STEP_ID")
        # On one node its name need not resolve.
        address = "127.0.0.1" if identity.cross_size == 1 else first_host(nodes)
        return address, _FIRST_PORT + job % _PORTS
    if identity.local_size != identity.size:
        return None
    job_id = next((environ[name] for name in _JOB_IDS.get(identity.source, ()) if name in environ), None)
    if identity.source == "hydra":
        job_id = _job_of_hydra(environ)
    if job_id is None:
        return None
    # Flux's ids are not ASCII, but the environment's encoding may be.
    return "127.0.0.1", _FIRST_PORT + zlib.crc32(job_id.encode(errors="surrogateescape")) % _PORTS


def _nowhere(name: str, identity: Identity) -> UsageError:
    return UsageError(
        f"{name} is missing",
        where=f"rank {identity.rank} of {identity.size}, started by {identity.source}",
        why="no variable gives the address of the rendezvous",
        remedy="set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, the same on every rank",
    )


def _job_of_hydra(environ: Mapping[str, str]) -> str | None:
    """Return a text that identifies the job of a rank that Hydra (mpiexec) has started: equal on all ranks of a node.

    The text is the process id of the proxy, the process from which Hydra starts all ranks of a node: the nearest
    ancestor of this process that is named as a proxy, or whose environment lacks the rank's variable ``PMI_RANK``.

    Args:
        environ: the rank's environment; without ``PMI_RANK`` the parent process counts as the proxy.

    Returns:
        The text; None without psutil, if the processes may not be inspected, or if no ancestor is such a process.
    """
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        for ancestor in psutil.Process(os.getpid()).parents():
            named = any(name in ancestor.name() for name in _HYDRA_PROXIES)
            if named or _HYDRA["rank"] not in environ or _HYDRA["rank"] not in ancestor.environ():
                return str(ancestor.pid)
    except psutil.Error:
        # The process belongs to another user, or has ended.
        return None
    return None
