"""A job of Slurm from outside: its batch file, its submission, and its output until it ends. No torch."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tutti.config.engine_config import SlurmEngineConfig
from tutti.errors import ExitCode, PeerError, UsageError
from tutti.launcher.cluster_files import devices_per_node

_PACE = 1.0
_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
)
_UNANSWERED = 120.0
_COMPLAINT = re.compile(r"^sbatch: (error|fatal): ")
_SILENT = re.compile(r"(?i)configuration source|contact slurm controller|communication connection failure")


def batch_file(
    config: SlurmEngineConfig, name: str, sizes: tuple[int, int], words: Sequence[str], folder: str | None
) -> str:
    """Return the text of a batch file for ``sbatch`` that runs a command of tutti in a Slurm job.

    Args:
        config: options of ``--on slurm``, most of which become ``#SBATCH`` lines.
        name: name of the job.
        sizes: smallest and largest number of devices, one rank each. The job asks for the largest; if the smallest is
            less, ``--no-kill`` keeps the job alive after the loss of a node.
        words: the command line, without the leading ``tutti``; it runs on the job's first node and starts all ranks.
        folder: prefix of the run directory; ``--out FOLDER-JOBID`` is appended to the command. None: no ``--out``.

    Raises:
        UsageError: the number of nodes in ``config`` does not divide the largest number of devices, or the option
            ``time`` of ``config`` is malformed.
    """
    least, most = sizes
    tasks = devices_per_node(most, config.nodes)
    options = {
        "job-name": name,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "constraint": config.constraint,
        "nodes": config.nodes,
        "ntasks-per-node": tasks,
        "cpus-per-task": config.cpus,
        "gpus-per-node": config.gpus * tasks if config.gpus else None,
        "mem": config.memory,
        "time": config.limit,
        "signal": f"B:USR1@{config.notice}" if config.notice else None,
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if config.requeue else "#SBATCH --no-requeue")
    if least < most:
        lines.append("#SBATCH --no-kill")
    command = shlex.join([sys.executable, "-m", "tutti", *words])
    if folder is not None:
        command += f' --out {shlex.quote(folder)}-"$SLURM_JOB_ID"'
    return "\n".join(["#!/bin/bash", *lines, "", f"exec {command}", ""])


def check_slurm() -> None:
    """Raise UsageError if ``sbatch`` or ``scontrol``, which submit and follow a Slurm job, is not on this machine."""
    for program in ("sbatch", "scontrol"):
        if shutil.which(program) is None:
            raise UsageError(
                f"there is no {program} on this machine",
                remedy="call it where Slurm is installed, or print the file by tutti submit slurm, and submit that",
            )


def submit_file(path: Path) -> str:
    """Submit a batch file by ``sbatch`` and return the number of the job, as text.

    Args:
        path: the batch file.

    Raises:
        UsageError: Slurm refuses the job.
        PeerError: Slurm does not answer.
        FileNotFoundError: there is no ``sbatch`` on this machine.
    """
    done = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (_COMPLAINT.sub("", line).rstrip(".") for line in done.stderr.splitlines())
        why = "; ".join(filter(None, lines))
        if _SILENT.search(why):
            raise PeerError(
                "Slurm does not answer",
                why=why,
                remedy=f"submit it where squeue works: sbatch {shlex.quote(str(path))}",
            )
        raise UsageError("Slurm refuses the job", where=str(path), why=why, remedy="change the options of --on slurm")
    return done.stdout.strip().partition(";")[0]


def follow_job(job: str, output: Path) -> int:
    """Print a Slurm job's output until the job ends, through requeues, and return the job's exit code. Blocks.

    Changes of the job's state are printed on standard error. Ctrl-C ends the printing and not the job, and returns
    ``ExitCode.INTERRUPTED``. A job that a signal ended gives 128 + the number of the signal, a cancelled one 128 +
    SIGTERM; a job that Slurm ended without an exit code, such as at its time limit, gives ``ExitCode.PEER``.

    Args:
        job: number of the job.
        output: file that Slurm writes the job's output to.

    Raises:
        PeerError: Slurm does not answer for two minutes.
        FileNotFoundError: there is no ``scontrol`` on this machine.
    """
    read, shown, since = 0, "", time.monotonic()
    try:
        while True:
            found = _state(job)
            read = _print_from(output, read)
            if found is None:
                if time.monotonic() - since > _UNANSWERED:
                    raise PeerError(
                        f"Slurm does not answer about job {job}", remedy=f"look with squeue --jobs {job}, later"
                    )
            else:
                since = time.monotonic()
                state, text, code = found
                if text != shown:
                    print(f"tutti: job {job} is {text}", file=sys.stderr, flush=True)
                    shown = text
                if state in _ENDED:
                    return code
            time.sleep(_PACE)
    except KeyboardInterrupt:
        print(
            f"\ntutti: job {job} goes on: scancel {job} ends it, tail -f {output} shows its output",
            file=sys.stderr,
            flush=True,
        )
        return int(ExitCode.INTERRUPTED)


def _state(job: str) -> tuple[str, str, int] | None:
    """Return a job's state, the state in words, and its exit code; None if Slurm does not answer."""
    asked = ["scontrol", "--oneliner", "show", "job", job]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    facts = dict(re.findall(r"(\S+?)=(\S*)", shown))
    if "JobState" not in facts:
        return None
    state = facts["JobState"]
    reason = facts.get("Reason", "None")
    more = f" on {facts['NodeList']}" if state == "RUNNING" else f" ({reason})" if reason != "None" else ""
    exited, _, number = facts.get("ExitCode", "0:0").partition(":")
    code = 128 + int(number) if int(number) else int(exited)
    if state != "COMPLETED" and not code:
        code = 128 + signal.SIGTERM if state == "CANCELLED" else int(ExitCode.PEER)
    return state, state.lower() + more, code


def _print_from(output: Path, read: int) -> int:
    """Print what was written behind the first ``read`` bytes; return the number of bytes printed by now."""
    try:
        with output.open("rb") as file:
            file.seek(read)
            data = file.read()
    except OSError:
        return read
    sys.stdout.write(data.decode("utf-8", "replace"))
    sys.stdout.flush()
    return read + len(data)
