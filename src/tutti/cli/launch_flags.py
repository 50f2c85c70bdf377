"""Other launchers' flags on ``tutti train`` and ``tutti run``: hosts, and this node's part of a job. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tutti.cli.run_command import OF_NODE
from tutti.errors import DiskError, UsageError, counted
from tutti.launcher.devices import count_accelerators
from tutti.launcher.hosts import parse_host_file, parse_hosts
from tutti.launcher.node_engine import NodeEngine, NodePart, read_node_part
from tutti.launcher.supervisor import EngineJob, supervise
from tutti.process_context import joined

_HOSTS = ("-H", "--hosts")
_FILE = "--hostfile"
_HELP = ("--help", "-h")
_DEVICES = ("--devices", "-np", "--num-proc")


def take_flags(words: list[str], names: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Take flags and their values out of a command line.

    Args:
        words: the command line; words after ``--`` stay.
        names: the flags, such as ``--node-rank``; ``_`` in a word counts as ``-``. A value follows its flag as the next
            word or behind ``=``.

    Returns:
        Flag → value for the flags that are given (of a repeated flag the last value), and the words left over, in
        order.

    Raises:
        UsageError: a flag has no value.

    >>> take_flags(["train", "digits", "--node_rank=1", "--nnodes", "2"], ("--nnodes", "--node-rank"))
    ({'--node-rank': '1', '--nnodes': '2'}, ['train', 'digits'])
    """
    end = words.index("--") if "--" in words else len(words)
    found: dict[str, str] = {}
    kept: list[str] = []
    given = iter(words[:end])
    for word in given:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in names:
            kept.append(word)
            continue
        after = value if equals else next(given, None)
        if after is None:
            raise UsageError(f"{name} needs a value", remedy="write it behind the flag")
        found[name] = after
    return found, kept + words[end:]


def only_asks(words: list[str]) -> bool:
    """Return whether a command line trains nothing: it has ``--help``, ``-h``, ``--print-config`` or ``--dry-run``.

    Args:
        words: the words of the command line; words after ``--`` are the script's and do not count.
    """
    return _has(words, *_HELP, "--print-config", "--dry-run")


def _has(words: list[str], *flags: str) -> bool:
    """Return whether one of the flags stands before ``--``."""
    return not {*flags}.isdisjoint(words[: words.index("--")] if "--" in words else words)


def hosts_as_engine(words: list[str]) -> list[str]:
    """Replace the flags of hosts in a command line of ``train`` or ``run`` by options that these commands have.

    ``train -H a:2,b:2`` and ``train --hostfile FILE`` become ``train --on ssh:hosts=…``; without ``--devices`` they
    also get as many devices as the hosts state together. ``run --hostfile FILE`` becomes ``run -H …``.

    Args:
        words: the command line without ``tutti``.

    Returns:
        The rewritten words; ``words`` unchanged for other commands, and without such flags.

    Raises:
        UsageError: hosts are malformed, the host file cannot be read, a flag has no value, or of ``-H``, ``--hostfile``
            and ``--on`` two are given (but ``run -H … --on …`` is not refused here).

    >>> hosts_as_engine(["train", "digits", "-H", "a:2,b:2"])
    ['train', 'digits', '--on', 'ssh:hosts=a:2+b:2', '--devices', '4']
    """
    if words[:1] not in (["train"], ["run"]):
        return words
    taken, rest = take_flags(words, (_FILE,) if words[0] == "run" else (*_HOSTS, _FILE))
    if not taken:
        return words
    if len(taken) > 1 or take_flags(rest, (*_HOSTS, "--on"))[0]:
        raise UsageError("-H, --hostfile and --on contradict each other", remedy="give one of them")
    name, value = next(iter(taken.items()))
    text = parse_host_file(Path(value)) if name == _FILE else value
    if words[0] == "run":
        return ["run", "-H", text, *rest[1:]]
    slots = sum(host.slots for host in parse_hosts(text))
    counted = [] if take_flags(rest, _DEVICES)[0] else ["--devices", str(slots)]
    return [*rest, "--on", f"ssh:hosts={text.replace(',', '+')}", *counted]


def node_of_job(words: list[str], environ: Mapping[str, str]) -> tuple[NodePart, list[str]] | None:
    """Parse torchrun's flags (``--nnodes``, ``--node-rank``, …), with which each node starts its own part of a job.

    Args:
        words: the command line without ``tutti``.
        environ: environment variables; torchrun's ``PET_*`` stand for flags that are not given.

    Returns:
        This node's part of the job (number of nodes, this node's number, ranks on it, address and port of node 0), and
        the command of each of its ranks: ``words`` without torchrun's flags and the number of devices. None if neither
        flags nor variables name nodes, if the command starts no ranks, or if this process is a rank already.

    Raises:
        UsageError: flags are missing or malformed, contradict ``--devices``, or stand beside flags of hosts or engines,
            or beside ``--dry-run`` or ``--print-config``, which start no ranks.
    """
    if words[:1] not in (["train"], ["run"]) or joined(environ):
        return None
    flags, rest = take_flags(words, OF_NODE)
    if only_asks(words):
        if flags and not _has(words, *_HELP):
            raise UsageError(
                f"{next(iter(flags))} cannot be combined with --dry-run and --print-config",
                why="they start no ranks on any node",
                remedy="leave the flags of nodes out, and give the devices of all nodes as --devices",
            )
        return None
    devices, without = take_flags(rest, _DEVICES)
    part = read_node_part(flags, environ, count_accelerators("auto", environ) or 1)
    if part is None:
        return None
    if take_flags(rest, (*_HOSTS, "--on"))[0]:
        raise UsageError(
            f"this is node {part.number} of {part.nodes} that run this command, with -H, --hostfile or --on",
            why="each node starts ranks of its own only",
            remedy="leave out -H, --hostfile and --on, or --nnodes (PET_NNODES) and the other flags of nodes",
        )
    wanted = next(iter(devices.values()), "auto")
    if wanted == "auto":
        return part, without
    if not wanted.isdecimal() or int(wanted) % part.nodes:
        raise UsageError(
            f"--devices {wanted} cannot be shared out equally over {counted(part.nodes, 'node')}",
            remedy="give the devices of all nodes together, or --nproc-per-node",
        )
    return NodePart(part.nodes, part.number, int(wanted) // part.nodes, part.address, part.port), without


def start_node(part: NodePart, words: list[str]) -> int:
    """Start this node's ranks of a job on several nodes, and block until all of them have ended.

    Every node of the job makes this call for its own ranks. The output of this node's first rank is that of this
    process; that of each other rank goes into a file ``rankN.log`` in the subfolder ``nodeK``, K being this node's
    number, of ``runs/logs``, or of the folder that the flag ``--logs`` of a ``run`` command names. Logs of an earlier
    job there are deleted. When a rank fails, this node's other ranks are ended; nothing is restarted. A signal is
    passed on to the ranks once. To be called in the main thread.

    Args:
        part: number of nodes, this node's number, ranks on it, address and port of node 0.
        words: the command of each rank, behind ``tutti``, without the flags of nodes and devices.

    Returns:
        0 if all ranks of this node have ended with 0; the exit code of the rank whose failure caused those of the
        others; ``ExitCode.PREEMPTED`` (75) if the ranks saved and ended on a signal; or 128 + the number of a signal.

    Raises:
        DiskError: the folder of logs cannot be made, or a log cannot be written.
        UsageError: ``--logs`` of ``run`` has no value.
        SystemExit: a second signal came; the code is 128 + its number.
    """
    logs = Path("runs/logs")
    if words[0] == "run":
        taken, words = take_flags(words, ("--logs",))
        logs = Path(taken.get("--logs", logs))
    logs /= f"node{part.number}"
    if words[0] == "run":
        # The ranks record there why they fail.
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError("cannot write a log", where=str(logs), why=error.strerror) from error
        words = ["run", f"--logs={logs.absolute()}", *words[1:]]
    job = EngineJob(["-m", "tutti", *words], [part.processes], logs, first_rank=part.first_rank)
    return supervise(NodeEngine(part, logs), job)
