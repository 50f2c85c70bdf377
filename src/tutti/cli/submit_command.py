"""``tutti submit``: write the file by which a cluster runs a command; for Slurm also submit and follow it. No torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tutti.cli.config_checks import possible_sizes, refuse_config, refuse_idle_wait, sets_wait
from tutti.cli.launch_flags import only_asks, take_flags
from tutti.cli.run_command import end_options, run
from tutti.cli.train_command import bare_options, resolved, train
from tutti.config.cluster_config import KubeflowConfig, SkyPilotConfig
from tutti.config.engine_config import SlurmEngineConfig, check_devices, parse_device_range
from tutti.config.spec import Spec
from tutti.errors import DiskError, ExitCode, UsageError
from tutti.launcher.cluster_files import sky_task, train_job
from tutti.launcher.launch import check_script
from tutti.launcher.slurm_engine import JOB
from tutti.launcher.slurm_job import batch_file, check_slurm, follow_job, submit_file

TARGETS: dict[str, type[SlurmEngineConfig | KubeflowConfig | SkyPilotConfig]] = {
    "slurm": SlurmEngineConfig,
    "kubeflow": KubeflowConfig,
    "skypilot": SkyPilotConfig,
}


@dataclasses.dataclass(frozen=True)
class Submission:
    """A command of tutti to run on a cluster.

    Attributes:
        words: the ``train`` or ``run`` command, without ``tutti``.
        name: name of the job.
        sizes: least and most devices.
        runs: folder in which the command makes its run directory; None if it makes none, or names it itself.
        script: of a ``run`` command its script, or name of a module, and whether that is a module; else None.
    """

    words: list[str]
    name: str
    sizes: tuple[int, int]
    runs: str | None
    script: tuple[str, bool] | None = None


def submit(
    target: Annotated[str, Parameter(show=False)],
    /,
    *command: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    start: Annotated[bool, Parameter(negative="", show_default=False)] = False,
) -> int:
    """Print the job file for Slurm, Kubeflow or SkyPilot.

    Example: tutti submit slurm:nodes=2,time=4h -- train digits --devices 8

    Parameters
    ----------
    start:
        submit it to Slurm and show the job's output, as tutti train --on slurm:… does

    Returns
    -------
    int
        Exit code. 0: the file is printed. With ``start``: the exit code of the Slurm job, which is awaited. A
        wrong option or command, a script that is not here, a job that Slurm refuses, or with ``start`` a machine
        without Slurm raises UsageError, which ``tutti`` turns into exit code 2; with ``start``, a Slurm that does not
        answer raises PeerError (5).

    Notes
    -----
    ``target`` is ``slurm``, ``kubeflow`` or ``skypilot``, with options of the job after a colon; ``command`` holds the
    words of a ``tutti train`` or ``tutti run`` command. The file goes to standard output: a batch file of Slurm, or the
    YAML of a Kubeflow TrainJob or SkyPilot task. ``start`` is refused for any other target than ``slurm``.
    """
    if target in ("train", "run"):
        raise UsageError(
            f"tutti submit needs a cluster before '{target}'", remedy=f"write tutti submit slurm:nodes=2 -- {target} …"
        )
    spec = Spec.parse(target, "tutti submit")
    config = spec.build(spec.choose(TARGETS, "cluster"), "tutti submit")
    wanted = read_submission(command)
    _refuse_engine(spec.name, wanted.words)
    # A pod of Kubeflow has the files of its image, and not of this directory.
    if wanted.script is not None and not isinstance(config, KubeflowConfig):
        check_script(*wanted.script)
    if isinstance(config, SlurmEngineConfig):
        folder = None if wanted.runs is None else f"{wanted.runs}/{wanted.name}"
        text = batch_file(config, wanted.name, wanted.sizes, _on_slurm(wanted.words), folder)
        if start:
            return _start(text, wanted)
    else:
        if start:
            raise UsageError(
                "--start is for Slurm", remedy=f"give the printed file to {spec.name}: kubectl create -f, or sky launch"
            )
        words, devices = take_flags(wanted.words, ("--on",))[1], wanted.sizes[-1]
        if wanted.sizes[0] < devices:
            raise UsageError(
                f"a job of {spec.name} cannot change its number of devices", remedy="give --devices one number"
            )
        if isinstance(config, KubeflowConfig):
            text = train_job(config, wanted.name, devices, words)
        else:
            text = sky_task(config, wanted.name, devices, words)
    print(text, end="")
    return ExitCode.DONE


def _refuse_engine(cluster: str, words: list[str]) -> None:
    """Raise UsageError if a command names another engine than the cluster; ``--on local`` is replaced."""
    on = take_flags(words, ("--on",))[0].get("--on", "local")
    if on not in ("local", cluster):
        raise UsageError(
            f"tutti submit {cluster} and --on {on} contradict each other",
            remedy=f"leave out --on, and write options of the job as tutti submit {cluster}:…",
        )


def _start(text: str, wanted: Submission) -> int:
    """Write a batch file, show it, submit it, and follow its job."""
    check_slurm()
    path = Path(wanted.runs or "runs") / f"{wanted.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.sbatch"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the batch file", where=str(path), why=error.strerror) from error
    print(text, file=sys.stderr)
    job = submit_file(path)
    output = Path(f"slurm-{job}.out")
    print(f"tutti: submitted {path} as job {job}, whose output is in {output}", file=sys.stderr, flush=True)
    return follow_job(job, output)


def submitted(words: list[str], environ: Mapping[str, str]) -> list[str]:
    """Rewrite the command line ``train … --on slurm:…`` to ``submit --start slurm:… -- train …``.

    A ``run`` command with ``--on slurm:…`` is rewritten in the same way.

    Args:
        words: the command line without ``tutti``.
        environ: environment variables, which show whether this process runs in an allocation of Slurm.

    Returns:
        The rewritten words; ``words`` unchanged for any other command line, within an allocation of Slurm, and if the
        command only asks (``--help``, ``--print-config`` or ``--dry-run``).

    Raises:
        UsageError: ``--on`` has no value.

    >>> submitted(["train", "digits", "--on", "slurm:nodes=2", "--devices", "4"], {})
    ['submit', '--start', 'slurm:nodes=2', '--', 'train', 'digits', '--devices', '4']
    """
    if words[:1] not in (["train"], ["run"]) or JOB in environ or only_asks(words):
        return words
    taken, rest = take_flags(words, ("--on",))
    target = taken.get("--on", "")
    return ["submit", "--start", target, "--", *rest] if target.partition(":")[0] == "slurm" else words


def read_submission(command: Sequence[str]) -> Submission:
    """Parse a ``train`` or ``run`` command that is to run on a cluster, and check the command before it is submitted.

    A ``train`` command is checked as if it ran here, but without regard to this machine's accelerators; of a ``run``
    command only the options are checked.

    Args:
        command: words of the command, without ``tutti``.

    Returns:
        A ``Submission``: ``words`` of the command, ``name`` of the job (the task's or script's), ``sizes`` (least and
        most devices), ``runs``, the folder in which the command makes its run directory (None if it makes none, or
        names the directory itself), and ``script`` of a ``run`` command, with whether it is a module, not checked (else
        None).

    Raises:
        UsageError: the command is neither ``train`` nor ``run``, a value of an option is malformed, the script of a
            ``run`` command is missing, or ``-np`` or ``--devices`` is.
        CycloptsError: an option is unknown, or its value is of another type.
        TuttiError: the configuration of a ``train`` command is refused.
    """
    words = bare_options(end_options(list(command)))
    if words[:1] not in (["train"], ["run"]):
        raise UsageError(
            "tutti submit needs a command of train or run" + "".join(f", and has '{word}'" for word in words[:1]),
            remedy="write tutti submit slurm:nodes=2 -- train digits --devices 4",
        )
    app = App(name="tutti")
    app.command(train)
    app.command(run)
    _, bound, _ = app.parse_args(_on_slurm(words), print_error=False, exit_on_error=False)
    if words[0] == "run":
        devices = str(bound.arguments.get("devices", "auto"))
        if devices == "auto":
            raise UsageError("tutti submit needs -np", remedy="say how many, such as -np 4")
        check_devices(devices, "-np")
        span = parse_device_range(devices)
        if not bound.arguments.get("command"):
            raise UsageError("no script is given", remedy="write tutti submit … -- run -np 4 script.py")
        script, module = bound.arguments["command"][0], bool(bound.arguments.get("module"))
        return Submission(words, Path(script).stem, span or (int(devices), int(devices)), None, (script, module))
    options = bound.arguments
    flags = {name: value for name, value in options.get("flags", {}).items() if name != "on"}
    name, config = resolved(options.get("task"), flags, options.get("config", ()), options.get("changes", ()))
    if config.devices == "auto":
        raise UsageError("tutti submit needs --devices", remedy="say how many, such as --devices 4")
    there = dataclasses.replace(config, device="auto", on="slurm")
    if sets_wait(flags, options.get("config", ())):
        refuse_idle_wait(there, SlurmEngineConfig())
    sizes = possible_sizes(name, there)
    refuse_config(name, dataclasses.replace(there, devices=str(sizes[-1])))
    runs = None if config.out is not None or config.resume is not None else config.runs
    return Submission(words, name.partition(":")[0].rpartition("/")[2].removesuffix(".py"), (sizes[0], sizes[-1]), runs)


def _on_slurm(words: list[str]) -> list[str]:
    """Return the command with ``--on slurm``, which within the job means its allocation."""
    kept = take_flags(words, ("--on",))[1]
    return [kept[0], "--on", "slurm", *kept[1:]] if kept[0] == "run" else [*kept, "--on", "slurm"]
