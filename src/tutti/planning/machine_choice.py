"""The machine that ``--machine`` names: a measured file or a published chip."""

from __future__ import annotations

import re
from pathlib import Path

from tutti.comm.collective_schedules import LinkCost
from tutti.config.bounds import check_least
from tutti.errors import UsageError
from tutti.planning.cluster_network import Network, measured_network
from tutti.planning.hardware_anchor import chip_of
from tutti.planning.measured_costs import MeasuredCosts
from tutti.planning.published_costs import PublishedCosts, published_chips
from tutti.planning.step_costs import StepCosts
from tutti.workload.machine_file import Machine, read_machine

_PUBLISHED = re.compile(r"(.+?)x0*([1-9]\d*)$")


def open_machine(text: str, precision: str, per_node: int | None, between: LinkCost | Path | None) -> StepCosts:
    """Make the object that predicts the seconds of computing, messages and updates on a machine or a published chip.

    Args:
        text: path of a ``machine.json`` of ``tutti bench``; or CHIPxN, such as ``a100x8``: a chip and the devices of a
            node.
        precision: precision of the run, such as ``bf16``.
        per_node: devices of a node; None: as many as were measured together, or as ``text`` says.
        between: cost of a message between nodes (latency and bandwidth), or path of a ``machine.json`` that was
            measured with one rank a node; None: unknown, so that a collective over several nodes of a measured machine
            raises UsageError.

    Returns:
        An object whose methods give the seconds of passes, optimizer steps, collectives and messages:
        ``MeasuredCosts`` for a file, ``PublishedCosts`` for a chip.

    Raises:
        UsageError: there is no such file or chip; the chip's data sheet lacks the precision; a file has
            another format or version; the file ``between`` has no links; or ``per_node`` is below 1.
    """
    check_least({"--devices-per-node": per_node})
    match = _PUBLISHED.fullmatch(text)
    if match is not None and not Path(text).exists() and chip_of(match[1])[0]:
        link = measured_network(between, 1).between if isinstance(between, Path) else between
        published = PublishedCosts(match[1], precision, Network(per_node or int(match[2]), link))
        if link is not None:
            published.rests.append(_stated(link, published.network.per_node))
        return published
    if not Path(text).exists() and not text.endswith(".json"):
        raise UsageError(
            f"there is no machine '{text}'",
            where="--machine",
            why="no speed is taken from a data sheet alone",
            remedy="give machine.json of tutti bench, or a chip with published rows and its devices a node (a100x8): "
            + ", ".join(published_chips()),
        )
    machine = read_machine(Path(text))
    devices = per_node or _ranks_together(machine)
    if isinstance(between, Path):
        network = measured_network(between, devices)
        costs = MeasuredCosts(machine, precision, network)
        kinds = ", ".join(sorted(network.collectives)) or "none: a ring's law"
        costs.rests.append(f"links between nodes as measured in {between}; collectives over nodes: {kinds}")
        return costs
    costs = MeasuredCosts(machine, precision, Network(devices, between))
    if between is not None:
        costs.rests.append(_stated(between, devices))
    return costs


def _stated(link: LinkCost, per_node: int) -> str:
    """Return a line on a stated link, by which bits taken for bytes, or an adapter's rate for a node's, are seen."""
    share = f", {link.beta / per_node / 1e9:.3g} GB/s a device" if per_node > 1 else ""
    return f"stated link of a node: {link.alpha * 1e6:g} µs, {link.beta / 1e9:g} GB/s{share}"


def _ranks_together(machine: Machine) -> int:
    """Return the largest number of ranks of a node between which collectives or links were measured."""
    parts = [name.split("/") for name in machine.curves]
    counts = [int(ranks) for kind, *_, ranks in parts if kind == "collectives"]
    counts += [int(pair.rpartition("-")[2]) + 1 for kind, pair, *_ in parts if kind == "links"]
    return max(counts, default=1)
