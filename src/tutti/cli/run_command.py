"""``tutti run``: start a user's script as one process a device. Loads no torch."""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tutti import process_context
from tutti.cli.other_names import name_here
from tutti.config.bounds import check_least
from tutti.config.engine_config import (
    SlurmEngineConfig,
    SshEngineConfig,
    check_devices,
    parse_device_range,
    parse_engine,
)
from tutti.config.settings import OptionalWholeNumber, WholeNumber
from tutti.config.watchdog_limits import ELASTIC_TIMEOUT, TIMEOUT, WatchdogLimits, check_timeout
from tutti.errors import UsageError
from tutti.horovod.installing import run_horovod_script
from tutti.launcher import slurm_engine, stdin_control, watchdog
from tutti.launcher.devices import count_accelerators
from tutti.launcher.elastic_driver import ElasticOptions
from tutti.launcher.engines import make_engine
from tutti.launcher.launch import OPTIMIZER_MODULES, check_script, launch, run_script
from tutti.launcher.script_rank import run_as_rank
from tutti.launcher.supervisor import ELASTIC_RESTARTS, EngineJob, supervise

_NUMBER = ("-np", "--num-proc")

OF_NODE = ("--nnodes", "--node-rank", "--nproc-per-node", "--rdzv-endpoint", "--master-addr", "--master-port")
"""torchrun's flags of a job on several nodes."""


@cache
def run_options() -> Mapping[str, int]:
    """Return how many values follow each option of ``tutti run`` on the command line.

    Cached: do not change the result.

    Returns:
        Name of the option, such as ``-np`` → number of words that follow the name: 0 for a switch. The flags
        ``--hostfile``, ``--nnodes`` and further ones of torchrun, with 1 value each, are included, although they are
        translated or taken out before ``run`` is called.
    """
    options = App(default_command=run).assemble_argument_collection()
    counts = {name: option.token_count()[0] for option in options for name in option.names}
    return {**counts, **dict.fromkeys(("--hostfile", *OF_NODE), 1)}


def end_options(words: list[str]) -> list[str]:
    """Insert ``--`` before the script in a command line of ``tutti run``, so that words after it go to the script.

    Args:
        words: the command line without ``tutti``.

    Returns:
        The words with ``--`` inserted; ``words`` unchanged for other commands, without a script, and where ``--``
        stands there already.

    >>> end_options(["run", "-np", "4", "train.py", "--epochs", "3"])
    ['run', '-np', '4', '--', 'train.py', '--epochs', '3']
    """
    if words[:1] != ["run"]:
        return words
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "--":
            return words
        at += 1 + run_options().get(words[at].replace("_", "-"), 0)
    return [*words[:at], "--", *words[at:]] if at < len(words) else words


@dataclass(frozen=True, kw_only=True)
class ElasticFlags:
    """Options of ``tutti run`` for elastic jobs, in which ranks join and leave; a slot is room for one rank on a host.

    Attributes
    ----------
    min_np:
        with --horovod: fewest ranks of an elastic job
    max_np:
        with --horovod: most ranks of an elastic job;
        default: -np, with a discovery script all slots
    host_discovery_script:
        prints the slots of this machine, localhost:SLOTS; run again and again
    slots_per_host:
        slots of hosts that the script prints without a number
    reset_limit:
        changes of members that end an elastic job
    elastic_timeout:
        seconds to wait for min-np slots; default: 600
    blacklist_cooldown_range:
        seconds for which a failed rank's slot stays empty, first and at most;
        default: for good
    """

    min_np: OptionalWholeNumber = None
    max_np: OptionalWholeNumber = None
    host_discovery_script: Path | None = None
    slots_per_host: OptionalWholeNumber = None
    reset_limit: OptionalWholeNumber = None
    elastic_timeout: float | None = None
    blacklist_cooldown_range: tuple[float, float] | None = None

    @property
    def given(self) -> bool:
        """Whether the job is elastic: an option other than ``elastic_timeout`` is given.

        Raises UsageError if ``elastic_timeout`` is below 0, or is given and the job is not elastic.
        """
        elastic = replace(self, elastic_timeout=None) != ElasticFlags()
        if self.elastic_timeout is not None:
            if not elastic:
                raise UsageError(
                    "--elastic-timeout is for elastic jobs, and this job waits for no slots",
                    remedy="add --min-np or --host-discovery-script, or leave it out",
                )
            if not self.elastic_timeout >= 0:
                raise UsageError(f"--elastic-timeout is {self.elastic_timeout:g}", remedy="give seconds, at least 0")
        return elastic

    def options(self, devices: str) -> ElasticOptions:
        """Return the limits of the elastic job, with defaults in place of None.

        Args:
            devices: value of ``-np``, the number of slots with which the job begins.

        Returns:
            An ``ElasticOptions``: ``np``, ``min_np`` and ``max_np`` (ranks to begin with, fewest and most), ``script``
            (host discovery script as an absolute path, or None), ``slots_per_host``, ``reset_limit``, ``cooldown`` (a
            pair of seconds, or None) and ``timeout`` (seconds to wait for ``min_np`` ranks).

        Raises:
            UsageError: ``-np`` is not given, or contradicts ``min_np`` or ``max_np``.
        """
        if devices == "auto":
            raise UsageError("an elastic job needs -np", remedy="write -np 2 --min-np 1 --max-np 4")
        np, script = int(devices), self.host_discovery_script
        return ElasticOptions(
            np=np,
            min_np=np if self.min_np is None else self.min_np,
            max_np=self.max_np if self.max_np is not None else np if script is None else sys.maxsize,
            script=None if script is None else script.absolute(),
            slots_per_host=self.slots_per_host,
            reset_limit=self.reset_limit,
            cooldown=self.blacklist_cooldown_range,
            timeout=ElasticOptions.timeout if self.elastic_timeout is None else self.elastic_timeout,
        )


def run(
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    devices: Annotated[str, Parameter(name=(*_NUMBER, "--devices"))] = "auto",
    hosts: Annotated[str | None, Parameter(name=("-H", "--hosts"))] = None,
    on: str | None = None,
    module: Annotated[bool, Parameter(name="-m", negative="", show_default=False)] = False,
    logs: Path = Path("runs/logs"),
    timeout: Annotated[float | None, Parameter(env_var="TUTTI_TIMEOUT")] = None,
    start_timeout: Annotated[float | None, Parameter(env_var="TUTTI_START_TIMEOUT")] = None,
    step_timeout: Annotated[float | None, Parameter(env_var="TUTTI_STEP_TIMEOUT")] = None,
    max_restarts: WholeNumber = 0,
    show_all: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    horovod: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    elastic_flags: Annotated[ElasticFlags, Parameter(name="*")] = ElasticFlags(),
) -> int:
    """Start a script that calls tutti.prepare on many devices.

    Example: tutti run -np 4 train.py --epochs 3

    Parameters
    ----------
    devices:
        number of processes, or a range 2:8; auto: one for each GPU, or one
    hosts:
        HOST:PROCESSES,… to start on over ssh, in this directory of each; or
        --hostfile FILE; on each node itself: --nnodes, --node-rank, --rdzv-endpoint
    on:
        engine that starts them: local, ssh:hosts=a:2+b:2, ray, slurm:nodes=2
    module:
        SCRIPT is a module's name, as in python -m
    logs:
        folder for the output of each process
    timeout:
        seconds that processes may take to find each other;
        default: 300, in an elastic job 20
    start_timeout:
        seconds without progress that end a process at the start, in an evaluation
        or at the end; 0: never; default: 1800
    step_timeout:
        seconds without progress that end a process in a step;
        0: never; default: timeout of tutti.init
    max_restarts:
        times to restart the script after a failure
    show_all:
        show every process's output, not only that of rank 0
    horovod:
        serve import horovod.torch in the script by tutti

    Returns
    -------
    int
        Exit code. 0: all processes ended with 0; otherwise, after the last restart that ``max_restarts``
        allows, the exit code of the process whose failure caused the others to fail. A wrong option raises
        UsageError, which ``tutti`` turns into exit code 2.

    Notes
    -----
    ``command`` holds the script, or with ``module`` the module's name, and its arguments. A rank is one of the
    processes. ``elastic_flags`` holds the options of elastic jobs.

    ``start_timeout`` holds for the start, evaluations and the end of a run, ``step_timeout`` for its steps.
    """
    if not command:
        raise UsageError("no script is given", remedy="write tutti run -np 4 script.py")
    _check_devices(devices, hosts, on)
    check_least({"--max-restarts": max_restarts}, least=0)
    if timeout is not None:
        check_timeout(timeout, "--timeout")
    limits = WatchdogLimits.make(start_timeout, step_timeout, WatchdogLimits.read(os.environ).save)
    script, *arguments = command
    if script.startswith("-"):
        here = name_here("run", script)
        near = [here] if here else difflib.get_close_matches(script, [*run_options(), *OF_NODE], n=1, cutoff=0.7)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"unknown option {script}",
            remedy=f"{meant}See tutti run --help; write the script's own options after its name",
        )
    if devices == "auto" and (misplaced := next((word for word in arguments if word in _NUMBER), None)):
        text = f"{misplaced} after {script} is an argument of the script: write tutti run {misplaced} N {script}"
        print(f"warning: {text} to start N processes", file=sys.stderr)
    elastic = None
    if elastic_flags.given:
        if not horovod or hosts is not None or on is not None or max_restarts or process_context.joined(os.environ):
            raise UsageError(
                "--min-np, --max-np and the other options of elastic jobs need --horovod and tutti's own launcher",
                remedy="leave out -H, --on and --max-restarts",
            )
        elastic = elastic_flags.options(devices)
        os.environ["HOROVOD_ELASTIC"] = "1"
        timeout = ELASTIC_TIMEOUT if timeout is None else timeout
    if timeout is not None:
        os.environ["TUTTI_TIMEOUT"] = f"{timeout:g}"
    joined = process_context.joined(os.environ)
    _check_script_here(script, module, joined)
    stdin_control.control_by_stdin(os.environ)
    entry = run_horovod_script if horovod else run_script
    if joined:
        process_context.check_own_restarts(max_restarts)
        rank = process_context.read_identity(os.environ).rank
        watchdog.start_watchdog(rank, limits)
        return run_as_rank(partial(entry, script, arguments, module), rank, logs)
    if hosts is not None or on is not None:
        engine = _engine(hosts, on, show_all)
        words = ["-m", "tutti", "run", *_again(logs, start_timeout, step_timeout, module, horovod), script, *arguments]
        return _on(engine, devices, words, logs, max_restarts)
    processes = count_accelerators("auto", os.environ) or 1 if devices == "auto" else int(devices)
    return launch(
        entry,
        (script, arguments, module),
        processes=processes,
        logs=logs,
        timeout=TIMEOUT if timeout is None else timeout,
        show_all=show_all,
        restarts=max_restarts,
        preload=(*OPTIMIZER_MODULES, *(("tutti.horovod.torch",) if elastic else ())),
        limits=limits,
        elastic=elastic,
    )


def _check_devices(devices: str, hosts: str | None, on: str | None) -> None:
    """Raise UsageError for a number of processes that is malformed, or a range without an engine that can resize."""
    check_devices(devices, "-np")
    if parse_device_range(devices) is not None and hosts is None and on is None:
        raise UsageError(f"-np {devices} needs an engine", remedy="add --on local, --on ray or -H, or give one number")


def _check_script_here(script: str, module: bool, joined: bool) -> None:
    """Raise UsageError if this node lacks the script; ``joined``: a launcher has started this process on the node."""
    try:
        check_script(script, module)
    except UsageError as missing:
        if not joined:
            raise
        raise UsageError(
            f"this node has no {'module' if module else 'script'} '{script}'",
            where=f"{os.getcwd()} on {socket.gethostname()}",
            remedy="put it on every node; --on ray uploads this directory without runs and what .gitignore names",
        ) from missing


def _engine(hosts: str | None, on: str | None, show_all: bool) -> str:
    """Return the value of ``--on`` that ``-H`` or ``--on`` asks for. Raises UsageError for both, or ``--show-all``."""
    if hosts is not None and on is not None:
        raise UsageError("-H cannot be combined with --on", remedy="write --on ssh:hosts=a:2+b:2 for -H a:2,b:2")
    if show_all:
        option = "-H" if hosts is not None else "--on"
        raise UsageError(f"--show-all cannot be combined with {option}", remedy="leave out one of the two")
    return str(on) if hosts is None else f"ssh:hosts={hosts.replace(',', '+')}"


def _again(
    logs: Path, start_timeout: float | None, step_timeout: float | None, module: bool, horovod: bool
) -> list[str]:
    """Return the options that are passed on to every process."""
    timeouts = {"--start-timeout": start_timeout, "--step-timeout": step_timeout}
    words = [f"--logs={logs.absolute()}"]
    words += [f"{name}={value:g}" for name, value in timeouts.items() if value is not None]
    return [*words, *(["-m"] if module else []), *(["--horovod"] if horovod else []), "--"]


def _on(text: str, devices: str, words: list[str], logs: Path, restarts: int) -> int:
    """Run a command line in every rank on an engine.

    Args:
        text: value of ``--on``.
        devices: value of ``--devices``.
        words: the command line, behind the Python interpreter.
        logs: folder for the output of each process.
        restarts: restarts allowed.
    """
    config = parse_engine(text)
    if devices == "auto" and not isinstance(config, SshEngineConfig):
        raise UsageError(f"--on {text} needs -np", remedy="say how many, such as -np 4")
    span = parse_device_range(devices)
    if devices == "auto":
        engine = make_engine(config, 1, logs)
        sizes = range(size := sum(engine.slots().values()), size + 1)
    else:
        least, most = span or (int(devices), int(devices))
        engine, sizes = make_engine(config, most, logs), range(least, most + 1)
    # Of a script no checkpoint is known: it shrinks when it is restarted, and never grows.
    limit = restarts or ELASTIC_RESTARTS * (span is not None)
    if not isinstance(config, SlurmEngineConfig):
        return supervise(engine, EngineJob(words, sizes, logs, limit))
    first = slurm_engine.restarts(os.environ)
    code = supervise(engine, EngineJob(words, sizes, logs, limit, first_attempt=first))
    slurm_engine.requeue(code)
    return code
