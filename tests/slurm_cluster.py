"""A cluster of Slurm in a folder: munge, the controller and nodes of one CPU, all on this machine, without systemd."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launching import free_port, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo", "srun")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
REASON = f"Slurm is not installed: there is no {', '.join(MISSING)}"

CREDENTIAL_SECONDS = 5
"""How long a node refuses to start a job again."""

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire={credential}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
MailProg=/bin/true
SlurmdParameters=config_overrides
"""


class SlurmCluster:
    """Nodes ``n1`` and ``n2``, whose names do not resolve; its commands obey ``environment``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        host, user = socket.gethostname(), subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        key = self.folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        nodes = ["n1", "n2"]
        text = _CONFIGURATION.format(
            host=host, port=free_port(), user=user, folder=self.folder, credential=CREDENTIAL_SECONDS
        )
        for name in nodes:
            (self.folder / name).mkdir()
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 RealMemory=512 "
            text += "Feature=fast State=UNKNOWN\n"
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
        self.run("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge", *files)
        until((self.folder / "munge").exists)
        self.run("slurmctld", "-D", "-c")
        for name in nodes:
            self.run("slurmd", "-D", "-N", name, as_name=name)
        until(lambda: self.ask("sinfo", "--noheader", "--format=%T %D") == "idle 2")

    def run(self, *words: str, as_name: str = "") -> None:
        name = as_name or words[0]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def ask(self, *words: str) -> str:
        return subprocess.run(words, env=self.environment, capture_output=True, text=True).stdout.strip()

    def lose(self, node: str) -> None:
        """Kill a node's daemon and tell the controller, which would notice only after minutes."""
        self.processes[node].kill()
        self.processes[node].wait()
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def end(self) -> None:
        self.ask("scancel", "--user", str(os.getuid()))
        self.ask("scancel", "--signal=KILL", "--full", "--user", str(os.getuid()))
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    # A socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = SlurmCluster(folder)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)
