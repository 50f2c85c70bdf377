"""What a narrow link costs each way to exchange gradients, as hosts are added.

    sudo python benchmarks/limited_links.py --out links             # about ten minutes
    sudo python benchmarks/limited_links.py --out links --quick     # does it run? its numbers mean nothing

Every host is a network namespace with one worker, and a link of its own to a common switch that lets through ``--mbit``
Mbit/s each way (a token bucket, ``tc … tbf``). All train an MLP of 0.75 M parameters, 3 MB, with 16 samples a worker.
One server has one link, which every worker's gradients and parameters must pass. Servers that go round the hosts, and a
ring, use all links. Linux, root and iproute2. Writes ``links.json``, ``links.md`` and,
with the extra ``plot``, ``links.svg``; a run that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from figure import begin, keep

from tutti.distribution import pip_install
from tutti.errors import ExitCode

STRATEGIES = {
    "one server": "parameter_server:servers=1",
    "two servers": "parameter_server:servers=2",
    "a server on every host": "parameter_server:servers={hosts}",
    "ring (mirrored)": "mirrored:algorithm=native",
    "local SGD, H = 8": "local_sgd:period=8",
}
MODEL, PARAMETERS, SAMPLES = "mlp:hidden=10000", 750_010, 16
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7")
_PORT = 29571


def run(*words: str) -> None:
    """A command that must work."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def cluster(
    hosts: int,
    mbit: float,
    latency: str = "200ms",
    uneven: Mapping[int, float] | None = None,
    settings: Sequence[str] = (),
    segments: int | None = None,
) -> Iterator[list[str]]:
    """Names of ``hosts`` namespaces 10.78.0.1, 2, …, each with a link of so many Mbit/s to a switch.

    A packet that would wait for its turn for longer than ``latency`` is lost; ``uneven`` gives some hosts other Mbit/s.
    ``settings`` are the kernel's (``sysctl``) in each host, such as ``net.ipv4.tcp_congestion_control=reno``; a socket
    hands at most ``segments`` packets at once to the link, so that others need not wait behind 64 KiB.
    """
    names = [f"tutti-{os.getpid()}-{host}" for host in range(hosts)]
    switch = f"tutti-{os.getpid()}-switch"
    try:
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for host, name in enumerate(names):
            run("ip", "netns", "add", name)
            far = f"port{host}"
            run("ip", "link", "add", "uplink", "netns", name, "type", "veth", "peer", "name", far, "netns", switch)
            run("ip", "-n", switch, "link", "set", far, "master", "switch", "up")
            run("ip", "-n", name, "address", "add", f"10.78.0.{host + 1}/24", "dev", "uplink")
            if segments is not None:
                run("ip", "-n", name, "link", "set", "uplink", "gso_max_segs", str(segments))
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "uplink", "up")
            for setting in settings:
                run("ip", "netns", "exec", name, "sysctl", "-w", setting)
            rate = (uneven or {}).get(host, mbit)
            bucket = ("root", "tbf", "rate", f"{rate:g}mbit", "burst", "64kbit", "latency", latency)
            run("tc", "-n", name, "qdisc", "add", "dev", "uplink", *bucket)
            run("tc", "-n", switch, "qdisc", "add", "dev", far, *bucket)
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def train(folder: Path, strategy: str, hosts: Sequence[str], steps: int) -> float:
    """One run over the hosts, a rank each; samples a second of all together."""
    summary = folder / "summary.json"
    if not summary.exists() or json.loads(summary.read_text()).get("exit_code") != 0:
        words = ["train", "digits", "--model", MODEL, "--strategy", strategy, "--workers", str(len(hosts))]
        words += ["--batch-size", str(SAMPLES * len(hosts)), "--steps", str(steps), "--eval-every", "none"]
        words += ["--checkpoint-every", "none", "--threads", "1", "--out", str(folder.resolve()), "--overwrite"]
        ranks = []
        for rank, name in enumerate(hosts):
            place = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            place |= {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": _PORT, "OMP_NUM_THREADS": 1}
            environ = os.environ | {variable: str(value) for variable, value in place.items()}
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "tutti", *words]
            ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        said = [rank.communicate(timeout=900)[1].decode() for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{strategy}: {said}")
    return float(json.loads(summary.read_text())["samples_per_second"])


def table(rows: Mapping[str, Mapping[str, float]], sizes: Sequence[int]) -> str:
    """Markdown: samples a second of all hosts together, by their number."""
    lines = ["| | " + " | ".join(f"{hosts} hosts" for hosts in sizes) + " |", "|---" + "|---:" * len(sizes) + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[str(hosts)]:,.0f}' for hosts in sizes)} |" for name, row in rows.items()]
    return "\n".join(lines) + "\n"


def draw(rows: Mapping[str, Mapping[str, float]], sizes: Sequence[int], caption: str, path: Path) -> None:
    """Samples a second against the number of hosts."""
    figure, panel = begin().subplots(figsize=(7, 4.5))
    for colour, (name, row) in zip(_COLOURS, rows.items(), strict=True):
        panel.plot(sizes, [row[str(hosts)] for hosts in sizes], color=colour, marker="o", label=name)
    panel.set_xlabel("hosts")
    panel.set_xticks(sizes)
    panel.set_ylabel("samples/s of all")
    panel.set_yscale("log")
    panel.set_yticks([5, 10, 20, 50, 100, 200, 500, 1000])
    panel.set_yticks([], minor=True)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize=8)
    keep(figure, caption, path)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="What a narrow link costs each way to exchange gradients.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for runs, table and figure")
    add("--hosts", default="2+4+8", help="how many, with + in between")
    add("--mbit", type=float, default=50.0, help="Mbit/s of a host's link, each way")
    add("--steps", type=int, default=24)
    add("--quick", action="store_true", help="two and three hosts, few steps: does it run?")
    given = parser.parse_args(argv)
    if given.quick:
        given.hosts, given.steps = "2+3", 8
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("making network namespaces needs root and iproute2")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study and returns its exit code."""
    given = arguments(argv)
    sizes = [int(number) for number in given.hosts.split("+")]
    rows: dict[str, dict[str, float]] = {name: {} for name in STRATEGIES}
    for number in sizes:
        with cluster(number, given.mbit) as hosts:
            for name, strategy in STRATEGIES.items():
                said = strategy.format(hosts=number)
                folder = given.out / "runs" / f"{number}-{given.mbit:g}-{given.steps}-{said.replace(':', '-')}"
                rows[name][str(number)] = train(folder, said, hosts, given.steps)
                print(f"{number} hosts, {name}: {rows[name][str(number)]:,.0f} samples/s", flush=True)
    text = table(rows, sizes)
    (given.out / "links.md").write_text(text)
    settings = {"mbit": given.mbit, "steps": given.steps, "parameters": PARAMETERS, "samples": SAMPLES}
    (given.out / "links.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    caption = f"0.75 M parameters, 16 samples a worker, {given.mbit:g} Mbit/s a host each way"
    try:
        draw(rows, sizes, caption, given.out / "links.svg")
    except ImportError:
        print(f"no figure: {pip_install('plot')}", file=sys.stderr)
    print(text)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
