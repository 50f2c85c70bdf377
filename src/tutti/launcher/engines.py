"""Make the engine that ``--on`` names. No torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tutti.config.engine_config import EngineConfig, LocalEngineConfig, SlurmEngineConfig, SshEngineConfig
from tutti.distribution import pip_install
from tutti.errors import UsageError
from tutti.launcher.engine import Engine
from tutti.launcher.hosts import Host, HostsEngine, parse_hosts
from tutti.launcher.slurm_engine import SlurmEngine


def make_engine(config: EngineConfig, devices: int, logs: Path) -> Engine:
    """Create the engine that starts a job's ranks: on this node, over SSH, in a Slurm allocation or on a Ray cluster.

    Args:
        config: options of ``--on``; the type chooses the engine.
        devices: number of slots of this node, each for one rank; used by the local engine only.
        logs: folder for the output of all ranks but rank 0.

    Returns:
        An object with the methods ``slots`` (free places for ranks on each node), ``start`` (all ranks), ``poll``
        (which ranks have ended) and ``stop`` (send a signal). No rank is started yet.

    Raises:
        UsageError: a host of SSH is malformed or named twice; Slurm is asked for outside of a Slurm job, or inside one
            with options, which only ``sbatch`` takes; the package ``ray`` is missing; or Ray refuses the working
            directory or the options.
        PeerError: there is no Ray cluster at the given address, or Slurm does not say which nodes its job has.
        AuthenticationError: the Ray cluster refuses this process.
    """
    if isinstance(config, LocalEngineConfig):
        return HostsEngine([Host("localhost", devices)], logs)
    if isinstance(config, SshEngineConfig):
        return HostsEngine(parse_hosts(",".join(config.hosts)), logs)
    if isinstance(config, SlurmEngineConfig):
        if config != SlurmEngineConfig():
            raise UsageError(
                "--on slurm has options, and this is an allocation already",
                remedy="write --on slurm, or give the options to sbatch or salloc",
            )
        return SlurmEngine(logs)
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--on ray needs the package ray", remedy=f"run {pip_install('ray')}")
    from tutti.launcher.ray_engine import RayEngine

    return RayEngine(config, logs)
