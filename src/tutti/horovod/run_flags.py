"""Translate the flags of ``horovodrun`` into those of ``tutti run --horovod``. No torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from tutti.device import COLLECTIVE_VARIABLES
from tutti.errors import UsageError

_RENAMED = {
    "--min-num-proc": "--min-np",
    "--max-num-proc": "--max-np",
    # Horovod's documentation writes the abbreviation.
    "--slots": "--slots-per-host",
    "--start-timeout": "--timeout",
    "--output-filename": "--logs",
    "--num-proc": "-np",
    "--host": "-H",
    "-hostfile": "--hostfile",
}
_OF_ELASTIC_JOBS = frozenset(("--min-np", "--max-np", "--host-discovery-script", "--slots-per-host", "--reset-limit"))

_VARIABLES = {
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--fusion-threshold-mb": "HOROVOD_FUSION_THRESHOLD",
    "--autotune-log-file": "HOROVOD_AUTOTUNE_LOG",
    "--autotune-warmup-samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "--autotune-steps-per-sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
}
_TEXTS = frozenset(("--timeline-filename", "--autotune-log-file"))
# Variables of Gloo, and of the library of collectives between accelerators.
_INTERFACES = ("GLOO_SOCKET_IFNAME", f"{COLLECTIVE_VARIABLES[0]}SOCKET_IFNAME")
_SWITCHES = {
    "--timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "--no-timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "0"),
    "--autotune": ("HOROVOD_AUTOTUNE", "1"),
    "--no-autotune": ("HOROVOD_AUTOTUNE", "0"),
    "--tcp": (f"{COLLECTIVE_VARIABLES[0]}IB_DISABLE", "1"),
}
_IDLE = frozenset(
    (
        *("--gloo", "--mpi", "--jsrun", "--verbose", "--disable-cache", "--prefix-output-with-timestamp"),
        *("--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather"),
        *("--no-hierarchical-allgather", "--log-hide-timestamp", "--no-log-hide-timestamp"),
        *("-prefix-timestamp", "--log-with-timestamp", "--log-without-timestamp"),
        *("--mpi-threads-disable", "--no-mpi-threads-disable"),
        *("--no-torus-allreduce", "--torus-allreduce"),
    )
)
_IDLE_WITH_VALUE = frozenset(
    (
        *("--mpi-args", "--binding-args", "--num-nccl-streams", "--thread-affinity", "--cycle-time-ms", "--log-level"),
        *("--gloo-timeout-seconds", "--ccl-bgt-affinity"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
    )
)
_REFUSED = {
    **dict.fromkeys(
        ("-p", "--ssh-port", "-i", "--ssh-identity-file"), "ssh reads the port and the key of a host in ~/.ssh/config"
    ),
    "-cb": "write tutti doctor",
    "--check-build": "write tutti doctor",
}
# Sections of a configuration file, and the beginning of the flags for their keys.
_SECTIONS = {
    "params": "--",
    "autotune": "--autotune-",
    "timeline": "--timeline-",
    "stall_check": "--stall-check-",
    "library_options": "--",
    "logging": "--log-",
}

_CONFIG_LINE = re.compile(
    r"""(?P<indent>\s*)(?P<key>[\w-]+)\s*:(\s+(?P<value>'[^']*'|"[^"]*"|[^\s'"#\[{|>&*].*?))?\s*(\s\#.*)?"""
)

_BOOLEANS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_NULL = ("", "~", "null")

_PYTHON = re.compile(r"python(3(\.\d+)?)?")


def translate_flags(words: list[str], environ: MutableMapping[str, str], options: Mapping[str, int]) -> list[str]:
    """Translate a command line with the flags of ``horovodrun`` into a command line of ``tutti run``, and return it.

    Flags that stand for environment variables, such as ``--fusion-threshold-mb``, set these in ``environ``; so do the
    keys of the file of ``--config-file`` for which no flag is given. Flags without effect are named once on standard
    error. Unknown flags stay as they are. The words ``python`` and ``python -u`` before the script are dropped; ranks
    write whole lines at once. For an elastic job without ``--elastic-timeout`` this flag is added with the value of
    ``HOROVOD_ELASTIC_TIMEOUT``, if it is set. Words that do not begin with ``run``, or have no ``--horovod`` before the
    script, are returned unchanged.

    Args:
        words: the command line, without the name of the program.
        environ: environment variables; variables for which flags stand are added to it.
        options: number of values of each option of ``tutti run``, by name.

    Returns:
        The words of the new command line; ``words`` itself where nothing is translated.

    Raises:
        UsageError: a flag that would matter, such as ``--ssh-port``, or an option of ``python``, such as ``-O``, is not
            served; a flag lacks its value or takes none, or a value is not a whole number; or the file of
            ``--config-file`` cannot be read or has other YAML than lines ``key: value`` in sections.

    >>> words = ["run", "--horovod", "-np", "2", "--start-timeout", "9", "python", "train.py", "--mpi"]
    >>> translate_flags(words, {}, {"-np": 1, "--timeout": 1})
    ['run', '--horovod', '-np', '2', '--timeout', '9', 'train.py', '--mpi']
    """
    if words[:1] != ["run"] or "--horovod" not in words:
        return words
    line = _Translation(words[1:], options)
    while line.rest and line.rest[0].startswith("-") and line.rest[0] != "--":
        line.translate_flag()
    made, rest, variables = line.made, line.rest, line.variables
    if "--horovod" not in made:
        return words
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if rest and _PYTHON.fullmatch(Path(rest[0]).name):
        rest = _behind_python(rest[1:])
    elastic = not {*_OF_ELASTIC_JOBS, "--blacklist-cooldown-range"}.isdisjoint(made)
    if (seconds := environ.get("HOROVOD_ELASTIC_TIMEOUT")) and elastic and "--elastic-timeout" not in made:
        made += ["--elastic-timeout", seconds]
    environ.update(variables)
    if line.idle:
        print(f"tutti: without effect: {', '.join(dict.fromkeys(line.idle))}", file=sys.stderr)
    return [*made, *rest]


class _Translation:
    """A command line of ``horovodrun`` while its flags are translated.

    Args:
        rest: the words behind ``run``.
        options: number of values of each option of ``tutti run``, by name.

    Attributes:
        rest: words that are not translated yet.
        made: words of the command line of ``tutti run``.
        variables: environment variables for which flags stand, by name.
        idle: flags without effect.
    """

    def __init__(self, rest: list[str], options: Mapping[str, int]) -> None:
        self.rest, self._options = rest, options
        self.made = ["run"]
        self.variables: dict[str, str] = {}
        self.idle: list[str] = []

    def translate_flag(self) -> None:
        """Translate the next word, a flag, with its values.

        Raises:
            UsageError: the flag is not served, or lacks its value.
        """
        word, *self.rest = self.rest
        flag, equals, value = word.partition("=")
        flag = flag if flag.startswith("--no_") or "_" not in flag else flag.replace("_", "-")
        given = value if equals else None
        if flag in _REFUSED:
            raise UsageError(f"{flag} is not served", why=_REFUSED[flag], remedy="leave it out")
        if flag in _RENAMED:
            self.made += [_RENAMED[flag], self._value(flag, given)]
        elif count := self._options.get(flag):
            self.made += [flag, self._value(flag, given), *self.rest[: count - 1]]
            del self.rest[: count - 1]
        elif flag in _VARIABLES:
            value = self._value(flag, given)
            self.variables[_VARIABLES[flag]] = value if flag in _TEXTS else _whole_number(flag, value)
        elif flag in ("--network-interface", "--network-interfaces"):
            value = self._value(flag, given)
            for variable in _INTERFACES:
                self.variables[variable] = ",".join(filter(None, (self.variables.get(variable), value)))
        elif equals and flag in {*_SWITCHES, *_IDLE}:
            raise UsageError(f"{flag} takes no value, and was given '{value}'")
        elif flag in _SWITCHES:
            self.variables.update([_SWITCHES[flag]])
        elif flag == "--config-file":
            self._take_file(Path(self._value(flag, given)))
        elif flag in _IDLE_WITH_VALUE:
            self._value(flag, given)
            self.idle.append(flag)
        elif flag in _IDLE:
            self.idle.append(flag)
        else:
            self.made.append(word)

    def _take_file(self, path: Path) -> None:
        """Translate the keys of a configuration file; flags of the command line count, wherever they stand."""
        file = _Translation([], self._options)
        for key, flag in _read_config(path):
            if flag.partition("=")[0] in {*_VARIABLES, *_SWITCHES, *_IDLE, *_IDLE_WITH_VALUE}:
                file.rest = [flag]
                try:
                    file.translate_flag()
                except UsageError as error:
                    where = f"{key} of {path}"
                    raise UsageError(error.what, where=where, why=error.why, remedy=error.remedy) from error
            else:
                file.idle.append(f"{key} of {path}")
        self.variables = file.variables | self.variables
        self.idle += file.idle

    def _value(self, flag: str, given: str | None) -> str:
        """Return a flag's value: ``given`` behind an equals sign, or the next word, which is removed."""
        if given is not None:
            return given
        if not self.rest:
            raise UsageError(f"{flag} needs a value", remedy="see tutti run --help")
        return self.rest.pop(0)


def _read_config(path: Path) -> list[tuple[str, str]]:
    """Read a configuration file of ``horovodrun``: YAML of sections with a line ``key: value`` for each option.

    Other YAML, such as lists, mappings in braces and texts of several lines, is refused.

    Returns:
        Pairs of a key with its section, such as ``timeline.filename``, and its flag, ``--timeline-filename=FILE``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path} cannot be read", why=str(error)) from error
    found, section = [], ""
    for number, line in enumerate(lines, 1):
        if line.partition("#")[0].strip() in ("", "---", "..."):
            continue
        if (match := _CONFIG_LINE.fullmatch(line)) is None:
            raise UsageError(
                f"{path}, line {number}: '{line.strip()}' is no 'key: value'", remedy="give its options as flags"
            )
        key, value = match["key"], (match["value"] or "").strip("'\"")
        if match["indent"]:
            flag = (_SECTIONS.get(section, "--") + key.replace("_", "-")).removesuffix("-enabled")
            if value.lower() in _NULL:
                continue
            switch = _BOOLEANS.get(value.lower())
            if switch is None:
                flag += f"={value}"
            elif not switch:
                flag = f"--no-{flag[2:]}"
            found.append((f"{section}.{key}", flag))
        elif value:
            found.append((key, f"--{value.lower()}" if key == "controller" else key))
        else:
            section = key
    return found


def _behind_python(words: list[str]) -> list[str]:
    """Return the words of a command line ``python …`` from the script, or ``-m``, on.

    Raises UsageError for an option of Python with an effect that forked ranks do not get.
    """
    while words[:1] == ["-u"]:
        words = words[1:]
    if words and words[0].startswith("-") and words[0] != "-m":
        raise UsageError(
            f"the option {words[0]} of python is not served",
            why="ranks are forked from the process of tutti run",
            remedy="write code in a file"
            if words[0] == "-c"
            else f"write python {words[0]} … -m tutti run --horovod …",
        )
    return words


def _whole_number(flag: str, text: str) -> str:
    """Return the value of a variable for that of a flag. Raises UsageError for another text than a whole number."""
    if not text.isdecimal():
        raise UsageError(f"{flag} is '{text}'", remedy="give a whole number, at least 0")
    return str(int(text) << 20) if flag == "--fusion-threshold-mb" else text
