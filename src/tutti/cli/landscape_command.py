"""``tutti landscape``: curvature, sharpness and pictures of the loss around a run's checkpoint. Loads no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tutti import process_context
from tutti.checkpoint.chosen_checkpoint import chosen_checkpoint
from tutti.checkpoint.folder import FOLDER
from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.weights import SavedWeights
from tutti.cli.console_tables import print_table
from tutti.cli.output_checks import make_writable
from tutti.config.bounds import check_least
from tutti.config.settings import OptionalWholeNumber, WholeNumber, resolve_config
from tutti.config.train_config import TrainConfig
from tutti.device import check_device
from tutti.distribution import pip_install
from tutti.errors import ExitCode, UsageError, counted
from tutti.launcher.devices import count_accelerators
from tutti.launcher.encoding import json_text
from tutti.launcher.launch import launch
from tutti.metrics.records import write_json
from tutti.planning.landscape_options import LANDSCAPE_FILE, PARTS, LandscapeOptions
from tutti.planning.task_or_script import TaskOrScript, is_script
from tutti.train.rank_entry import PRELOADED


def landscape(
    run: Annotated[Path, Parameter(show=False)],
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    script: Annotated[str | None, Parameter(show_default=False)] = None,
    to: Annotated[Path | None, Parameter(show_default=False)] = None,
    step: Annotated[str, Parameter(show_default=False)] = "newest",
    ema: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    parts: Annotated[str, Parameter(show_default=False)] = ",".join(PARTS),
    samples: str = "1024",
    micro_batch: WholeNumber = 128,
    batch_norm: Literal["running", "batch"] = "running",
    precision: Annotated[Literal["fp32", "fp64"] | None, Parameter(show_default=False)] = None,
    eigenvalues: WholeNumber = 5,
    tolerance: float = 1e-3,
    probes: WholeNumber = 6,
    lanczos: WholeNumber = 24,
    epsilon: float = 1e-3,
    rho: float = 0.05,
    points: WholeNumber = 31,
    grid: WholeNumber = 15,
    reach: float = 1.0,
    seed: WholeNumber = 0,
    devices: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    device: str = "auto",
    reproducible: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Say how sharp a run's minimum is, and draw it.

    Example: tutti landscape runs/small-batch --to runs/large-batch

    RUN is a run directory of tutti train, or with --script the folder of the
    script's run.save. Writes landscape.json and landscape.svg into it.

    Parameters
    ----------
    script:
        train.py, which gives model, loss and data to tutti.prepare; its own
        arguments follow --
    to:
        a second run of the same model: the loss on the line between both
    step:
        checkpoint: its step, best, best:NAME or newest; default: newest
    ema:
        the average of the weights, of runs with --ema
    parts:
        some of curvature,sharpness,line,plane; default: all
    samples:
        samples drawn from training and held-out data, or all
    micro_batch:
        samples of a forward and backward
    batch_norm:
        statistics of the checkpoint (running) or of each micro-batch (batch)
    precision:
        fp32 or fp64; default: fp64 of fp64 runs, else fp32
    eigenvalues:
        largest eigenvalues of the Hessian
    tolerance:
        their relative accuracy
    probes:
        random vectors of trace and density
    lanczos:
        Lanczos steps of each
    epsilon:
        box of Keskar's sharpness
    rho:
        radius of SAM's sharpness
    points:
        points of a line
    grid:
        points of a side of the plane
    reach:
        half length of line and plane, in filter norms
    seed:
        of samples, directions and probes
    devices:
        processes; default: all accelerators, or 1
    device:
        auto, cpu or an accelerator such as cuda
    reproducible:
        bit-identical for any number of devices
    out:
        folder for both files; default: the run
    as_json:
        print the content of landscape.json

    Returns
    -------
    int
        Exit code. 0: ``landscape.json`` is written and its table printed; otherwise the exit code of the
        processes that measured. A wrong option, or a start by another launcher such as torchrun, raises UsageError,
        which ``tutti`` turns into exit code 2; a checkpoint that is missing or damaged raises CheckpointError (4), and
        a folder ``out`` that cannot be written DiskError (8), before anything is measured.

    Notes
    -----
    Measured at the weights of one checkpoint: the largest eigenvalues, trace and spectral density of the Hessian of the
    training loss (``curvature``), Keskar's and SAM's sharpness (``sharpness``), and the loss along one random
    filter-normalised direction (``line``) and on the plane of two (``plane``). ``arguments`` are those of ``script``.

    Trace and density are estimated from ``probes`` random vectors with ``lanczos`` Lanczos steps each. Keskar's
    sharpness (Keskar et al. 2017, arXiv 1609.04836) is the largest rise of the loss with each parameter x moved by at
    most ``epsilon`` · (|x| + 1); SAM's (Foret et al. 2021, arXiv 2010.01412) is the rise at distance ``rho`` along
    the gradient. Filter-normalised directions are those of Li et al. 2018 (arXiv 1712.09913), and ``reach`` counts
    their lengths.
    """
    if importlib.util.find_spec("scipy") is None:
        raise UsageError("a landscape needs the package scipy", remedy=f"run {pip_install('planning')}")
    process_context.check_own_processes("tutti landscape", os.environ)
    check_device(device)
    count = (count_accelerators(device, os.environ) or 1) if devices is None else devices
    check_least({"--devices": count})
    _check_script(run, script, arguments)
    manifest = chosen_checkpoint(run, step, _warn)
    other = None if to is None else chosen_checkpoint(to, "newest", _warn)
    task, config = _configured(_run_directory(manifest)) if script is None else (script, TrainConfig())
    SavedWeights(manifest, ema)
    if other is not None:
        SavedWeights(other, ema)
        if script is None:
            _check_alike(config, _configured(_run_directory(other))[1])
    options = LandscapeOptions(
        checkpoint=manifest.path,
        to=None if other is None else other.path,
        ema=ema,
        parts=tuple(word.strip() for word in parts.split(",")),
        samples=_samples(samples),
        block=micro_batch,
        statistics=batch_norm,
        eigenvalues=eigenvalues,
        tolerance=tolerance,
        probes=probes,
        lanczos=lanczos,
        epsilon=epsilon,
        rho=rho,
        points=points,
        grid=grid,
        reach=reach,
        seed=seed,
    )
    chosen = dataclasses.replace(
        config,
        device=device,
        threads=None,
        precision=precision or ("fp64" if config.precision == "fp64" else "fp32"),
        reproducible=reproducible,
    )
    if script is None:
        TaskOrScript.of(task).check_options(data=chosen.data, model=chosen.model)
    folder = out or _run_directory(manifest)
    facts = {"format": 1, "run": _run_directory(manifest).name, "task": task, "step": manifest.step}
    facts |= {} if to is None else {"to": to.name}
    make_writable(folder, "the landscape")
    code, found = _measured(task, chosen, options, count, arguments)
    if code:
        return code
    found = {**facts, **_told(options, chosen), **found}
    write_json(folder / LANDSCAPE_FILE, found)
    drawn = _draw(found, folder / "landscape.svg")
    if as_json:
        print(json_text(found, sys.stdout))
        return ExitCode.DONE
    show_landscape(found)
    print(f"written to {folder / LANDSCAPE_FILE}{drawn}")
    return ExitCode.DONE


def _warn(text: str) -> None:
    print(f"tutti: {text}", file=sys.stderr)


def _run_directory(manifest: Manifest) -> Path:
    """Return the directory of a checkpoint's run; of a script's checkpoints, the folder that they are in."""
    folder = manifest.path.parent
    return folder.parent if folder.name == FOLDER and (folder.parent / "config.toml").is_file() else folder


def _check_script(run: Path, script: str | None, arguments: Sequence[str]) -> None:
    """Raise UsageError where a script is given as the run, does not exist, or has arguments and is not given."""
    if is_script(run.name):
        raise UsageError(
            f"{run} is a script and has no trained weights",
            remedy=f"give the folder of its run.save: tutti landscape FOLDER --script {run}",
        )
    if script is not None:
        if not is_script(script):
            raise UsageError(f"'{script}' is no script", where="--script", remedy="give a path that ends in .py")
        TaskOrScript.of(script, tuple(arguments))
    elif arguments:
        raise UsageError(
            f"there is no argument '{arguments[0]}'", remedy="give options as --NAME VALUE, a second run by --to"
        )


def _configured(run: Path) -> tuple[str, TrainConfig]:
    """Return task and configuration of a run. Raises UsageError if ``run`` has none, as a script's has not."""
    path = run / "config.toml"
    if not path.is_file():
        raise UsageError(
            "the run has no config.toml",
            where=str(run),
            why="it is not of tutti train, so that its model and data are not known",
            remedy="name the script that gives them to tutti.prepare: --script train.py",
        )
    return resolve_config({}, (path,), None)


def _check_alike(one: TrainConfig, other: TrainConfig) -> None:
    """Raise UsageError where two runs have other models or data."""
    for name in ("model", "data"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            raise UsageError(
                f"the runs differ in --{name}: {mine or 'the default'} and {theirs or 'the default'}",
                where="--to",
                remedy="give two runs of one model on the same data",
            )


def _samples(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--samples is '{text}'", remedy="give a whole number of at least 1, or all")
    return int(text)


def _told(options: LandscapeOptions, config: TrainConfig) -> dict[str, Any]:
    """Return the options that decide the numbers, for ``landscape.json``."""
    kept = dataclasses.asdict(options)
    left_out = ("checkpoint", "to", "samples")
    settings = {name: value for name, value in kept.items() if name not in left_out}
    return {"settings": {**settings, "precision": config.precision, "reproducible": config.reproducible}}


def _measured(
    task: str, config: TrainConfig, options: LandscapeOptions, count: int, arguments: Sequence[str]
) -> tuple[int, dict[str, Any]]:
    """Measure in ``count`` processes; return exit code, and the findings if it is 0."""
    with tempfile.TemporaryDirectory(prefix="tutti-landscape-") as scratch:
        folder = Path(scratch)
        code = launch(
            _rank,
            (task, config, options, folder, tuple(arguments)),
            processes=count,
            logs=folder / "logs",
            timeout=config.timeout,
            preload=PRELOADED,
            limits=config.limits,
        )
        if code:
            return code, {}
        found: dict[str, Any] = json.loads((folder / LANDSCAPE_FILE).read_text(encoding="utf-8"))
        return code, found


def _rank(task: str, config: TrainConfig, options: LandscapeOptions, folder: Path, arguments: tuple[str, ...]) -> None:
    from tutti.planning.landscape import landscape_rank

    landscape_rank(task, config, options, folder, arguments)


def _draw(found: Mapping[str, Any], path: Path) -> str:
    """Draw the figure, and return the end of the last line: its path, or why there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"; no figure without matplotlib: {pip_install('plot')}"
    from tutti.planning.landscape_figure import write_landscape_figure

    write_landscape_figure(found, path)
    return f" and {path}"


def show_landscape(found: Mapping[str, Any]) -> None:
    """Print the results of ``tutti landscape`` as a table: losses, curvature and sharpness, with errors where known.

    Args:
        found: the content of ``landscape.json``.
    """
    samples = " and ".join(f"{count:,} {name}" for name, count in found["samples"].items())
    print(f"{found['run']}, step {found['step']}: {counted(found['parameters'], 'parameter')}, {samples} samples")
    rows = [
        (f"{of} {name}", f"{value:.6g}", "")
        for of in found["samples"]
        for name, value in found[of].items()
        if value is not None
    ]
    rows.append(("length of the gradient", f"{found['gradient_norm']:.4g}", ""))
    for number, each in enumerate(found.get("eigenvalues", ()), 1):
        rows.append((f"eigenvalue {number} of the Hessian", f"{each['value']:.6g}", f"± {each['residual']:.2g}"))
    if "trace" in found:
        trace, density = found["trace"], found["density"]
        band = "no band" if trace["low"] is None else f"{trace['low']:.4g} to {trace['high']:.4g}"
        rows.append(("trace of the Hessian", f"{trace['value']:.4g}", band))
        rows.append(("lowest eigenvalue, at most", f"{density['lowest']:.4g}", ""))
    if (sharp := found.get("sharpness")) is not None:
        rows.append((f"ε-sharpness, ε = {sharp['epsilon']:g}", f"{sharp['epsilon_sharpness_percent']:.4g} %", ""))
        rows.append((f"SAM sharpness, ρ = {sharp['rho']:g}", f"{sharp['sam_sharpness']:.4g}", ""))
    print_table(("landscape", "value", "error"), rows)
