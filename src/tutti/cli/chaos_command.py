"""``tutti chaos``: inject faults into a run, and check that it survives as promised. Loads no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import App, Parameter

from tutti.chaos import survival
from tutti.chaos.ballast import MOST, Ballast
from tutti.chaos.damage import corrupt_copies
from tutti.chaos.fault_injection import Rules
from tutti.chaos.fault_outcome import FaultOutcome, Report, summarize
from tutti.chaos.faults import Fault, draw_faults, draw_soak
from tutti.cli.console_tables import print_table
from tutti.cli.fault_arguments import (
    SMALL,
    above,
    read_bytes,
    read_command,
    read_devices,
    read_kinds,
    read_rank,
    read_step,
)
from tutti.cli.help_pages import OneScreen
from tutti.config.settings import WholeNumber
from tutti.errors import ExitCode, UsageError, counted
from tutti.launcher.encoding import json_text

Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]
Seconds = Annotated[float | None, Parameter(name="--for", show_default=False)]

SUMMARY = """Break a run on purpose, and see whether it survives.

Example: tutti chaos kill --verify -- tutti train digits --devices 3

Exit code 0: it did; 9: it did not; others as in tutti train."""
USAGE = "Usage: tutti chaos ACTION [OPTIONS]      (tutti chaos ACTION --help says more)"
HEADS = ("fault", "at step", "noticed", "stood still", "restarts", "resumed", "steps lost", "exit code")
SOAK_HEADS = ("fault", "times", "stood still", "at most", "steps lost", "at most", "restarts", "resumed", "survived")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every fault.

    Attributes:
        run: directory of a running run, in place of a command
        at_step: step after which the fault happens; random; saved: at the first checkpoint
        times: number of faults: at multiples of --at-step, or at random
        seed: seed of steps and ranks
        verify: run without faults first, and compare the weights' bits
        reference: directory of that run, if it exists already
        as_json: print one JSON object
    """

    run: Annotated[Path | None, Parameter(show_default=False)] = None
    at_step: str = "saved"
    times: WholeNumber = 1
    seed: WholeNumber = 0
    verify: Switch = False
    reference: Annotated[Path | None, Parameter(show_default=False)] = None
    as_json: Json = False


Common = Annotated[Options, Parameter(name="*")]
DEFAULT = Options()


def kill(*command: Words, rank: str = "random", options: Common = DEFAULT) -> int:
    """Kill a process of a run (SIGKILL). A run that ends is resumed.

    Example: tutti chaos kill --rank 1 --at-step 9 -- tutti train digits --devices 3

    Parameters
    ----------
    rank:
        a rank, random, or launcher

    Returns
    -------
    int
        Exit code. 0: the run went on, or ended and was resumed, as docs/survival.md promises for its strategy. 9
        (``THRESHOLD``): it did not, and the broken promise is printed. A wrong option raises UsageError, which
        ``tutti`` turns into exit code 2.

    Notes
    -----
    ``command`` holds the words of a ``tutti train`` command, which is started; when the fault ends the run, it is
    started again with ``--resume``. ``options`` are common to all faults: see ``Options``.
    """
    return _play(Fault("kill"), rank, command, options)


def stop(*command: Words, rank: str = "random", seconds: Seconds = None, options: Common = DEFAULT) -> int:
    """Stop a process of a run (SIGSTOP), and continue it (SIGCONT) some time later.

    Example: tutti chaos stop --for 5 --run runs/digits-1

    Parameters
    ----------
    rank:
        a rank, random, or launcher
    seconds:
        seconds to stop it; default: until the run has noticed

    Returns
    -------
    int
        Exit code. 0: the run went on, or ended and was resumed, as docs/survival.md promises for its strategy. 9
        (``THRESHOLD``): it did not, and the broken promise is printed. A wrong option raises UsageError, which
        ``tutti`` turns into exit code 2.

    Notes
    -----
    ``command`` holds the words of a ``tutti train`` command, which is started; when the fault ends the run, it is
    started again with ``--resume``. ``options`` are common to all faults: see ``Options``.
    """
    return _play(Fault("stop", seconds=above("--for", seconds)), rank, command, options)


def slow(
    *command: Words, rank: str = "random", factor: float = 5.0, seconds: Seconds = None, options: Common = DEFAULT
) -> int:
    """Slow down a process of a run; the run must go on without error.

    Example: tutti chaos slow --rank 1 --factor 5 -- tutti train digits --devices 3

    Parameters
    ----------
    rank:
        a rank, random, or launcher
    factor:
        how many times slower
    seconds:
        seconds to slow it; default: to the end of the run

    Returns
    -------
    int
        Exit code. 0: the run went on without error and lost no step, as docs/survival.md promises. 9 (``THRESHOLD``):
        it did not, and the broken promise is printed. A wrong option raises UsageError, which ``tutti`` turns into exit
        code 2.

    Notes
    -----
    The process is stopped (SIGSTOP) for 1 - 1/``factor`` of every tenth of a second, and runs for the rest. ``command``
    holds the words of a ``tutti train`` command, which is started; if the run ends all the same, it is started again
    with ``--resume``. ``options`` are common to all faults: see ``Options``.
    """
    above("--factor", factor, 1)
    return _play(Fault("slow", seconds=above("--for", seconds), factor=factor), rank, command, options)


def fill(
    *words: Words, leave: str = "0", yes: Switch = False, seconds: Seconds = None, options: Common = DEFAULT
) -> int:
    """Fill the disk of DIR (default: the run's), while a command runs or until Ctrl-C.

    Example: tutti chaos fill --verify -- tutti train digits --out disk/run

    Promised: the old checkpoint stays, no half-written file does, and after
    three failed saves in a row the run ends with exit code 8.

    Parameters
    ----------
    leave:
        space to leave free, such as 1MiB
    yes:
        allow more than 1 GiB
    seconds:
        seconds to fill it, a run's at least until a save has failed; default: to the end

    Returns
    -------
    int
        Exit code. 0: the run survived the full disk as docs/survival.md promises for its strategy; without a
        command, the disk was kept full for ``seconds``. 9 (``THRESHOLD``): the run broke a promise, which is
        printed. A wrong option raises UsageError, which ``tutti`` turns into exit code 2.

    Notes
    -----
    ``words`` may begin with DIR, a folder on the disk to fill; the rest holds the words of a ``tutti train`` command,
    which is started; when the fault ends the run, it is started again with ``--resume``. ``options`` are common to all
    faults: see ``Options``.
    """
    folder = Path(words[0]) if words and words[0] not in ("tutti", "train") else None
    command, most = words[1:] if folder else words, sys.maxsize if yes else MOST
    above("--for", seconds)
    if command or options.run is not None:
        rules = Rules(disk=folder, leave=read_bytes(leave), most_filled=most)
        return _play(Fault("fill", seconds=seconds), "launcher", command, options, rules)
    if folder is None:
        raise UsageError("nothing is given to fill", remedy="write tutti chaos fill DIR, or a command after --")
    return _hold(folder, read_bytes(leave), most, seconds)


def corrupt(
    checkpoint: Path,
    /,
    *,
    flips: WholeNumber = 1000,
    truncate: WholeNumber = 16,
    drop: bool = True,
    seed: WholeNumber = 0,
    as_json: Json = False,
) -> int:
    """Damage copies of a checkpoint, and count how many the loader refuses.

    Example: tutti chaos corrupt runs/digits-1

    Parameters
    ----------
    flips:
        bits to flip, one at a time, in any of its files
    truncate:
        number of lengths to truncate each file to
    drop:
        remove each file in turn
    seed:
        seed of the bits
    as_json:
        print one JSON object

    Returns
    -------
    int
        Exit code. 0: the loader refused every damaged copy. 9 (``THRESHOLD``): it accepted at least one, which
        is printed. A wrong option raises UsageError, which ``tutti`` turns into exit code 2.

    Notes
    -----
    ``checkpoint`` is the directory of a checkpoint, or a run directory, whose newest checkpoint is taken; it is never
    written to. Each copy is damaged in one place: a flipped bit, a file cut to a shorter length, a missing file, or a
    file of another checkpoint of the run in place of its own. Then the copy is verified as a resuming run would. The
    table, or JSON, has for each kind of damage the number of copies tried and of copies refused; accepted copies are
    listed.
    """
    with _ending():
        damages = corrupt_copies(checkpoint, flips=flips, truncate=truncate, drop=drop, seed=seed)
    missed = [where for each in damages for where in each.missed]
    if as_json:
        report = {"survived": not missed, "damages": [dataclasses.asdict(each) for each in damages]}
        print(json_text(report, sys.stdout))
    else:
        print_table(
            ("damage", "tried", "detected"), [(each.name, str(each.tried), str(each.detected)) for each in damages]
        )
        print("\n".join(f"not detected: {where}" for where in missed[:10]) or "everything was detected")
    return ExitCode.THRESHOLD if missed else ExitCode.DONE


def soak(
    *command: Words,
    faults: WholeNumber = 100,
    kinds: Annotated[str | None, Parameter(show_default=False)] = None,
    devices: Annotated[str | None, Parameter(show_default=False)] = None,
    seed: WholeNumber = 0,
    reference: Annotated[Path | None, Parameter(show_default=False)] = None,
    as_json: Json = False,
) -> int:
    """Inject many random faults into a run; its weights must equal those without.

    Example: tutti chaos soak --faults 20 -- tutti train digits --devices 3

    Parameters
    ----------
    faults:
        number of faults
    kinds:
        of kill,launcher,stop,slow,terminate,corrupt,fill [all; fill on a small disk alone]
    devices:
        numbers of devices to resume on, such as 2,3,4; needs --reproducible [the same]
    seed:
        seed of kinds, steps and ranks
    reference:
        directory of the run without faults [it is trained first]
    as_json:
        print one JSON object

    Returns
    -------
    int
        Exit code. 0: the run survived all faults. 9 (``THRESHOLD``): it broke a promise, which is printed: final
        weights other than those of the run without faults, an unexpected exit code, more repeated steps than
        ``Rules.most_lost`` permits after a fault (two checkpoint intervals for most kinds), a fault that came after the
        end, or files of an unfinished save left behind. A wrong option raises UsageError, which ``tutti`` turns into
        exit code 2.

    Notes
    -----
    ``command`` holds the words of a ``tutti train`` command, which is started; when a fault ends the run, it is started
    again with ``--resume``. Kinds of faults: ``kill`` ends a rank by SIGKILL, ``launcher`` the process that started the
    ranks; ``stop`` stops a rank for a while (SIGSTOP), ``slow`` stops it again and again; ``terminate`` sends SIGTERM
    to the launcher, which saves the run; ``corrupt`` flips a bit of the newest checkpoint, and kills; ``fill`` fills
    the disk.
    """
    above("--faults", faults)
    chosen = read_command(command)
    names = read_kinds(kinds, chosen.directory)
    rules = Rules(every=chosen.every(), devices=read_devices(devices, chosen), most_filled=SMALL, seed=seed)

    def plan(ranks: int, total: int | None) -> Sequence[Fault]:
        return draw_soak(names, count=faults, ranks=ranks, total=total, seed=seed)

    with _ending(), tempfile.NamedTemporaryFile("w", prefix="tutti-soak-", suffix=".log", delete=False) as log:
        known = reference or survival.uninterrupted(chosen, log)
        report = survival.survive(chosen, plan, rules, log, known, partial(_tell, faults))
    if report.problems():
        print(f"what the run printed is in {log.name}", file=sys.stderr)
    else:
        Path(log.name).unlink()
    return _conclude(report, as_json, SOAK_HEADS, summarize(report.outcomes))


def verb() -> App:
    """Build the ``cyclopts`` application of ``tutti chaos`` with its actions, such as ``kill`` and ``soak``."""
    app = App(name="chaos", help=SUMMARY, usage=USAGE, help_formatter=OneScreen(), help_format="plaintext")
    actions: tuple[Callable[..., int], ...] = (kill, stop, slow, fill, soak)
    for action in actions:
        disk = "[DIR] " if action is fill else ""
        app.command(action, usage=f"Usage: tutti chaos {action.__name__} [OPTIONS] {disk}-- tutti train …")
    app.command(corrupt, usage="Usage: tutti chaos corrupt [OPTIONS] CHECKPOINT")
    return app


def _play(fault: Fault, rank: str, words: Sequence[str], options: Options, rules: Rules | None = None) -> int:
    """Inject one kind of fault into a new run (``words``) or a running one (``options.run``); return the exit code."""
    step, whose = read_step(options.at_step), read_rank(rank)
    above("--times", options.times)

    def plan(ranks: int, total: int | None) -> Sequence[Fault]:
        return draw_faults(
            fault, step=step, rank=whose, times=options.times, ranks=ranks, total=total, seed=options.seed
        )

    rules = dataclasses.replace(rules or Rules(), seed=options.seed)
    with _ending():
        if options.run is not None:
            if words or options.verify or options.reference:
                remedy = "leave out the command, --verify and --reference"
                raise UsageError("--run names a run that is running already", remedy=remedy)
            report = survival.disturb(options.run, plan, rules)
        else:
            command, known = read_command(words), options.reference
            # The uninterrupted run reveals the number of steps; all other mistakes are refused before it.
            plan(command.devices, sys.maxsize if options.verify or known else command.total())
            if options.verify and known is None:
                known = survival.uninterrupted(command, sys.stderr)
            rules = dataclasses.replace(rules, every=command.every())
            report = survival.survive(command, plan, rules, sys.stderr, known)
    return _conclude(report, options.as_json, HEADS, [_row(outcome) for outcome in report.outcomes])


def _tell(planned: int, number: int, outcome: FaultOutcome) -> None:
    result = "; ".join(outcome.problems()) or f"{counted(outcome.lost_steps, 'step')} lost"
    print(f"{number}/{planned} step {outcome.step}: {outcome.fault}: {result}", file=sys.stderr, flush=True)


def _row(outcome: FaultOutcome) -> list[str]:
    return [
        outcome.fault,
        str(outcome.step),
        "no" if outcome.noticed_seconds is None else f"{outcome.noticed_seconds:.2f} s",
        f"{outcome.stood_still_seconds:.2f} s",
        str(outcome.restarts),
        "yes" if outcome.resumed else "no",
        str(outcome.lost_steps),
        "–" if outcome.exit_code is None else str(outcome.exit_code),
    ]


def _conclude(report: Report, as_json: bool, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    problems = report.problems()
    if as_json:
        print(json_text(report.as_json(), sys.stdout))
    else:
        print_table(heads, rows)
        weights = f"; weights: {report.verdict}" if report.finished else ""
        print(f"{counted(report.steps, 'step')}, {report.executed} made: goodput {report.goodput:.3f}{weights}")
        print("\n".join(f"not as promised: {problem}" for problem in problems) or "survived as promised")
    return ExitCode.THRESHOLD if problems else ExitCode.DONE


def _hold(folder: Path, leave: int, most: int, seconds: float | None) -> int:
    """Keep a disk full until a signal arrives, or for ``seconds``."""
    with _ending():
        ballast = Ballast(folder, leave, most)
        print(f"{ballast.size} bytes of {folder} filled; they are freed when this command ends", flush=True)
        try:
            time.sleep(seconds) if seconds else signal.pause()
        finally:
            ballast.release()
    return ExitCode.DONE


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit within the block, so that disks are freed and started runs end."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
