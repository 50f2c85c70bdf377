"""Who am I? Rank and size of this process, read from whoever started it. Pure: no torch, no network.

Read in this order: torchrun (and tutti's own launcher, which sets the same variables), Horovod, a Slurm step, Open MPI,
or nothing, which is a world of one process.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tutti.errors import UsageError

Source = Literal["torchrun", "horovod", "slurm", "openmpi", "single"]

_HOROVOD = {
    field: f"HOROVOD_{field.upper()}"
    for field in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
}
_OPENMPI = {field: f"OMPI_COMM_WORLD_{field.upper()}" for field in ("rank", "size", "local_rank", "local_size")}
_TORCHRUN = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
_TORCHRUN_GROUP = {"cross_rank": "GROUP_RANK", "cross_size": "GROUP_WORLD_SIZE"}

# Slurm numbers the steps that are no srun (batch script, extern, interactive shell, pending) from here.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
# Derived ports stay below 32768, where Linux begins to hand out ports to outgoing connections.
_FIRST_PORT, _PORTS = 10_000, 20_000


@dataclass(frozen=True)
class Identity:
    """This process among all.

    Attributes:
        rank: 0 … size-1 over all hosts.
        size: processes over all hosts.
        local_rank: 0 … local_size-1 on this host.
        local_size: processes on this host.
        cross_rank: this host among all hosts.
        cross_size: hosts.
        source: who said so.
        attempt: how many times the job was restarted.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    source: Source = "single"
    attempt: int = 0


def read(environ: Mapping[str, str]) -> Identity:
    """This process's identity. Raises UsageError, naming the variable, where it is malformed, missing or inconsistent.

    >>> read({})
    Identity(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1, source='single', attempt=0)
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if any(name in environ for name in _HOROVOD.values()):
        return _build(environ, _HOROVOD, "horovod")
    if _in_slurm_step(environ):
        return _slurm(environ)
    if any(name in environ for name in _OPENMPI.values()):
        return _build(environ, _OPENMPI, "openmpi")
    return Identity()


def of_group(rank: int, size: int, environ: Mapping[str, str]) -> Identity:
    """Identity within a process group that the user made: the environment's where it agrees about rank and size.

    Where it does not, as after ``torch.multiprocessing.spawn``, all ranks are taken to be on this host: a guess.

    >>> of_group(1, 2, {})
    Identity(rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1, source='single', attempt=0)
    """
    try:
        identity = read(environ)
    except UsageError:
        # Scripts that make their own group often set RANK and WORLD_SIZE only, which is no fault of theirs.
        identity = Identity()
    if (identity.rank, identity.size) == (rank, size):
        return identity
    return Identity(rank=rank, size=size, local_rank=rank, local_size=size)


def joined(environ: Mapping[str, str]) -> bool:
    """Whether this process already belongs to a launched job, so that nothing must be launched.

    A Slurm step of one task counts as a plain shell: ``srun --pty bash`` is where people work by hand.
    """
    identity = read(environ)
    return identity.source != "single" and (identity.source, identity.size) != ("slurm", 1)


def rendezvous(environ: Mapping[str, str], identity: Identity) -> tuple[str, int]:
    """Address and port of the TCP store that the ranks meet at; rank 0 hosts it.

    ``MASTER_ADDR`` and ``MASTER_PORT`` decide. Without them, a Slurm step meets on its first host, and a job of Open
    MPI or Horovod on one host meets on the loopback address, at a port derived from the job's id. A single process
    gets port 0: any free one. Raises UsageError where nothing says where to meet.
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
    """First host of a Slurm node list.

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
    # Launchers that imitate torchrun often leave the group out; it follows from the rest where hosts are alike.
    group = any(name in environ for name in _TORCHRUN_GROUP.values())
    names = _TORCHRUN | _TORCHRUN_GROUP if group else _TORCHRUN
    return _build(environ, names, "torchrun", attempt="TORCHELASTIC_RESTART_COUNT")


def _slurm(environ: Mapping[str, str]) -> Identity:
    # A step may be smaller than its job; the step's own numbers come first.
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
    """Tasks on this host, and the variable that says so."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name not in environ:
            continue
        counts = _tasks_per_node(environ[name], name)
        if len(counts) == values["cross_size"] and sum(counts) == values["size"]:
            return (counts[values["cross_rank"]] if values["cross_rank"] < len(counts) else 0), name
        if name == "SLURM_STEP_TASKS_PER_NODE":
            raise UsageError(
                f"{name} is '{environ[name]}', which is not {values['size']} tasks on {values['cross_size']} hosts",
                remedy="start the program with srun",
            )
    if "SLURM_NTASKS_PER_NODE" in environ:
        return min(_integer(environ, "SLURM_NTASKS_PER_NODE"), values["size"]), "SLURM_NTASKS_PER_NODE"
    if values["cross_size"] == 1:
        return values["size"], "SLURM_NTASKS"
    raise UsageError("SLURM_STEP_TASKS_PER_NODE is missing", remedy="start the program with srun")


def _tasks_per_node(text: str, name: str) -> list[int]:
    """``2(x3),1`` → [2, 2, 2, 1]."""
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
    environ: Mapping[str, str], names: Mapping[str, str], source: Source, attempt: str | None = None
) -> Identity:
    values = {field: _integer(environ, name) for field, name in names.items()}
    if "cross_size" not in values:
        size, local_size = values["size"], values["local_size"]
        if local_size < 1 or size % local_size:
            raise UsageError(
                f"{names['size']} is {size} and {names['local_size']} is {local_size}",
                why="hosts with different numbers of processes cannot be told apart",
                remedy="start with torchrun, or the same number of processes on every host",
            )
        values["cross_rank"], values["cross_size"] = values["rank"] // local_size, size // local_size
    return _checked(values, names, source, _attempt(environ, attempt))


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
            remedy="start with torchrun, srun, mpirun or tutti run, which set all of them, or unset the others",
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
        # Steps of one job may run at the same time on one host, and so may jobs with neighbouring ids.
        job = 16 * _integer(environ, "SLURM_JOB_ID") + _integer(environ, "SLURM_STEP_ID")
        return first_host(nodes), _FIRST_PORT + job % _PORTS
    if identity.source in ("openmpi", "horovod") and identity.local_size == identity.size:
        names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HOROVOD_GLOO_RENDEZVOUS_PORT")
        job_id = next((environ[name] for name in names if name in environ), None)
        return None if job_id is None else ("127.0.0.1", _FIRST_PORT + zlib.crc32(job_id.encode()) % _PORTS)
    return None


def _nowhere(name: str, identity: Identity) -> UsageError:
    return UsageError(
        f"{name} is missing",
        where=f"rank {identity.rank} of {identity.size}, started by {identity.source}",
        why="nothing says where the ranks meet",
        remedy="set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there, the same on every rank",
    )
