"""The Ray engine: a placement group with one bundle a device, and on each an actor that holds a rank's process.

Ray Core alone: it places, uploads the working directory and tells of lost nodes; the ranks' own rendezvous, process
groups and checkpoints are tutti's. Values go through Ray as it serialises them: words, variables, bytes of output.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.state import available_resources_per_node
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tutti.config.engine_config import RayEngineConfig
from tutti.errors import DiskError, ExitCode, PeerError, TuttiError, UsageError
from tutti.launcher import failure
from tutti.launcher.engine import EndedRank, EngineGone, SlotsGone
from tutti.launcher.hosts import Host, passed_variables, plan_processes
from tutti.launcher.ray_errors import SILENT, end_of_rank, failure_of, first_line, lost_rank, refusal_of
from tutti.launcher.ray_supervisor import RankSupervisor
from tutti.launcher.special_files import special_files

T = TypeVar("T")

_PLACE = 30.0
_ANSWER = 30.0
# Ray itself aborts this process, with exit code 1, 60 seconds after the head's last answer.
_HEAD = 30.0
_RELEASE = 30.0
_PACE = 0.25
# How long an actor keeps a call while its rank is silent, and a signal may wait: each call takes processor time from
# the ranks of a full node.
_QUIET = 2.0
_AWAY = 5.0
_REACH = 10.0
_TRIES = "2"
_PATIENCE = 2.0
_SERIALISERS = ("numpy", "pyarrow", "pydantic.main")
_EXCLUDED = ["/runs", ".git", ".venv", "__pycache__"]
# Ray's public names know the sum over all nodes alone. By way of ray:// the function runs on the cluster.
_free_per_node = client_mode_wrap(available_resources_per_node)


@dataclass
class _Rank:
    """A rank: its actor, its node, the call that has not been answered yet, since when none was, and its end."""

    actor: Any
    node: str
    node_id: str
    asked: Any = None
    since: float | None = None
    end: EndedRank | None = None


class RayEngine:
    """``Engine`` that starts the ranks of a job on a Ray cluster: for each rank an actor, which holds its process.

    A slot is room for one rank: the CPUs and GPUs that ``config`` demands for each. Connects to the cluster, or makes
    one on this node if ``config.address`` is ``local``.

    Args:
        config: options of ``--on ray``, such as the cluster's address and the resources of each rank.
        logs: folder for the output of all ranks but rank 0.

    Raises:
        UsageError: Ray refuses the working directory or the options, or the address is an HTTP address.
        PeerError: there is no cluster at the address, or Ray's own processes do not start.
        AuthenticationError: the cluster refuses this process.
    """

    def __init__(self, config: RayEngineConfig, logs: Path) -> None:
        self._config, self._logs = config, logs
        self._needs = {name: n for name, n in (("CPU", config.cpus), ("GPU", config.gpus)) if n}
        self._ranks: list[_Rank] = []
        self._group: Any = None
        self._polled = 0.0
        # A cluster that is made here has no other nodes than this one.
        own = config.address == "local"
        self._upload = config.code == "upload" and not own
        self._connect(own)
        self._answered = time.monotonic()
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._listen, name="ray-head", daemon=True)]
        self._threads[0].start()
        # Called before Ray's own handler, which Ray has registered earlier.
        atexit.register(self._close)

    def slots(self) -> Mapping[str, int]:
        """Return the free slots of each live node of the Ray cluster.

        A slot is room for one rank, with the CPUs and GPUs that it needs.

        Returns:
            ``ADDRESS/ID`` of the node → number of free slots; ``ID`` is the beginning of Ray's node id.

        Raises:
            EngineGone: the head of the cluster does not answer, or the cluster fails.
            AuthenticationError: the cluster refuses this process.
        """
        nodes = [node for node in self._ask(ray.nodes) if node["Alive"]]
        free = self._ask(_free_per_node)
        return {_name(node): self._room(free.get(node["NodeID"], {})) for node in nodes}

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start all ranks on the Ray cluster: reserve resources for each, on which an actor starts the rank's process.

        Blocks until the processes have been started. Consecutive ranks fill one node before the next. Standard output
        and log files get the ranks' output only in ``poll``.

        Args:
            size: number of ranks.
            words: arguments of the Python interpreter, the same for every rank.
            environment: additional environment variables of every rank, which override those of the engine.

        Raises:
            SlotsGone: the resources are not free in time, or an actor has ended.
            EngineGone: the head of the cluster does not answer, or the cluster fails.
            UsageError: a node cannot run tutti or has no memory for the process of a rank, or Ray refuses the resources
                of a rank.
            AuthenticationError: the cluster refuses this process.
            TuttiError: the actor's own code has failed.
        """
        self._group = self._ask(lambda: placement_group([self._needs] * size, strategy="PACK"))
        if not self._ask(lambda: self._group.wait(_PLACE), _PLACE + 10):
            self.stop(signal.SIGKILL)
            raise SlotsGone
        nodes = {node["NodeID"]: node for node in self._ask(ray.nodes)}
        bundles = self._ask(lambda: placement_group_table(self._group))["bundles_to_node_id"]
        order = sorted(bundles, key=lambda bundle: (list(bundles.values()).index(bundles[bundle]), bundle))
        made = self._ask(lambda: [self._make_actor(int(bundle)) for bundle in order])
        self._ranks = [
            _Rank(actor, _name(nodes[bundles[bundle]]), bundles[bundle])
            for bundle, actor in zip(order, made, strict=True)
        ]
        visible = self._get([rank.actor.visible.remote() for rank in self._ranks])
        held = [rank.node for rank in self._ranks]
        hosts = [Host(name, held.count(name)) for name in dict.fromkeys(held)]
        address = nodes[bundles[order[0]]]["NodeManagerAddress"] if len(hosts) > 1 else "127.0.0.1"
        port = self._get([self._ranks[0].actor.free_port.remote()])[0]
        common = {**passed_variables(os.environ), **environment}
        if len(hosts) == 1:
            common.setdefault("GLOO_SOCKET_IFNAME", "lo")
        started = []
        for rank, planned in zip(self._ranks, plan_processes(hosts, size, address, port), strict=True):
            shown = [one for one, name in zip(visible, held, strict=True) if name == rank.node]
            joint = {name: ",".join(one[name] for one in shown if name in one) for name in shown[0]}
            told = {**common, **planned.environment, **joint, **environment}
            started.append(rank.actor.start.remote(words, told, None if self._upload else os.getcwd()))
        self._get(started)

    def poll(self) -> Sequence[EndedRank | None]:
        """Return how the process of each rank on the Ray cluster has ended, and pass on the ranks' output.

        New output goes to the terminal (rank 0) and the log files (other ranks). Waits a fraction of a second for
        answers. A rank whose actor does not answer for 30 seconds counts as killed, with its slot (place for a rank)
        lost; the 30 seconds begin anew if this process has not polled for five seconds, for example because it was
        stopped.

        Returns:
            One entry for each rank, in rank order: None for a rank that still runs; else ``code`` (exit code, -N if
            signal N killed the process), ``node``, ``lost`` (that the node was lost, in words; else empty), and, if the
            rank was killed with its actor, ``why`` (Ray's reason, in words) and ``remedy`` (advice for the user).

        Raises:
            EngineGone: the head of the cluster does not answer, or the cluster fails.
            DiskError: a log cannot be written.
            AuthenticationError: the cluster refuses this process.
            TuttiError: the actor's own code has failed.
        """
        time.sleep(max(0.0, self._polled + _PACE - time.monotonic()))
        before, self._polled = self._polled, time.monotonic()
        running = [rank for rank in self._ranks if rank.end is None]
        if self._polled - before > _AWAY:
            self._answered = self._polled
            for rank in running:
                rank.since = None
        if self._polled - self._answered > _HEAD:
            raise EngineGone(SILENT)
        for rank in running:
            rank.asked = rank.asked or rank.actor.poll.remote(_QUIET)
            rank.since = rank.since or self._polled
        asked = [rank.asked for rank in running]
        ready = ray.wait(asked, num_returns=len(asked), timeout=_PACE)[0] if asked else []
        for number, rank in enumerate(self._ranks):
            if rank.end is None and rank.asked in ready:
                self._take(number, rank)
            if rank.end is None and rank.since is not None and self._polled - rank.since > _ANSWER:
                rank.end = lost_rank(rank.node)
        return [rank.end for rank in self._ranks]

    def stop(self, number: int) -> None:
        """Send a signal to every rank that still runs on the Ray cluster, through the actor that holds its process.

        Blocks until all actors have passed the signal on, for at most five seconds; an actor that waits for output of
        its rank takes up to two seconds. A cluster that does not answer raises nothing.

        Args:
            number: number of the signal. For SIGKILL the actors are ended too, and the call then waits, for at most
                half a minute, until Ray reports their resources as free.
        """
        running = [rank for rank in self._ranks if rank.end is None]
        with suppress(Exception):
            # A node that is gone does not answer; its processes end with it.
            asked = [rank.actor.signal.remote(int(number)) for rank in running]
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=5)
        if number != signal.SIGKILL:
            return
        for end in running:
            end.end = end.end or EndedRank(-signal.SIGKILL, end.node)
        with suppress(EngineGone, TuttiError):
            self._ask(self._release)
            self._await_release()

    def _make_actor(self, bundle: int) -> Any:
        """Return a new actor on one bundle of the placement group.

        It runs one call at a time, in its main thread: with calls in other threads an actor woke twice as often and
        took twice the processor time from the ranks.
        """
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        options = ray.remote(RankSupervisor).options(
            num_cpus=self._config.cpus,
            num_gpus=self._config.gpus,
            max_restarts=0,
            scheduling_strategy=where,
        )
        return options.remote()

    def _release(self) -> None:
        for rank in self._ranks:
            with suppress(Exception):
                ray.kill(rank.actor)
        if self._group is not None:
            remove_placement_group(self._group)

    def _await_release(self) -> None:
        """Wait until the placement group's slots are free, or its lost node is known to be lost.

        Ray removes a group at once and frees its resources later: until then free nodes look taken. A lost node looks
        alive, and its slots free, until the head notices the loss. As long as either holds, the group's own resources
        are reported.
        """
        if self._group is None:
            return
        group, end = self._group.id.hex(), time.monotonic() + _RELEASE
        self._group = None
        while any(group in name for name in self._ask(ray.available_resources)) and time.monotonic() < end:
            time.sleep(0.1)

    def _connect(self, own: bool) -> None:
        """Connect to the cluster, or make one."""
        address = self._config.address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            _check_address(address)
            if not own:
                # Where another server listens, or a token is missing, Ray would try twenty times, 40 seconds each.
                os.environ.setdefault("RAY_gcs_server_port_wait_time_s", _TRIES)
        environment: dict[str, Any] = {}
        if path := os.environ.get("PYTHONPATH"):
            environment["env_vars"] = {"PYTHONPATH": path}
        if self._upload:
            folder = os.getcwd()
            excludes = [*_EXCLUDED, *special_files(folder, _EXCLUDED)]
            environment |= {"working_dir": folder, "excludes": excludes}
        # In a job of ray job submit, Ray refuses fields that the job's own runtime environment has too.
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        options: dict[str, Any] = {"include_dashboard": False} if own else {}
        threading.Thread(target=_import_early, name="ray-imports", daemon=True).start()
        try:
            with _interruptible():
                ray.init(
                    self._config.address,
                    runtime_env=environment,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **options,
                )
        except (ConnectionError, TimeoutError, ray.exceptions.RpcError) as error:
            raise _no_cluster(address, first_line(error)) from error
        except ray.exceptions.AuthenticationError as error:
            raise failure_of(error) from error
        except (ValueError, RuntimeError, OSError, ray.exceptions.RuntimeEnvSetupError) as error:
            raise refusal_of(error, address, os.getcwd()) from error
        except Exception as error:
            # Where its own processes take too long to start, Ray raises no class of its own.
            if type(error) is not Exception:
                raise
            raise PeerError(
                "Ray's own processes have not started",
                where=address,
                why=first_line(error),
                remedy="try again when this machine is less busy; their logs are in session_latest/logs of Ray's"
                " temporary folder",
            ) from error

    def _room(self, resources: Mapping[str, float]) -> int:
        return min(int(resources.get(name, 0) / needed + 1e-9) for name, needed in self._needs.items())

    def _listen(self) -> None:
        """Note when the head has answered last; without it Ray itself would abort this process after a minute."""
        while not self._closed.is_set():
            with suppress(Exception):
                ray.nodes()
                self._answered = time.monotonic()
            self._closed.wait(2)

    def _close(self) -> None:
        """Let the threads end before Ray shuts down: Ray ends a process that calls it later, with exit code 1."""
        # An interrupted shutdown has the same effect.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._closed.set()
        end = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _ask(self, question: Callable[[], T], seconds: float = _HEAD) -> T:
        """Return the head's answer, from a thread, because Ray waits for a lost head without a limit.

        Args:
            question: called in the thread.
            seconds: how long the answer may take while the head answers to ``_listen``.

        Raises:
            EngineGone: no answer in time, or the head has answered nobody for a while; a second question to a lost head
                costs no second wait.
            Exception: the question raised an error: that of ``failure_of``.
        """
        answers: list[T] = []
        errors: list[Exception] = []

        def call() -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call, daemon=True)
        self._threads = [each for each in (*self._threads, thread) if each is thread or each.is_alive()]
        thread.start()
        end = time.monotonic() + seconds
        while thread.is_alive() and time.monotonic() < min(end, self._answered + _HEAD):
            thread.join(_PACE)
        if answers:
            return answers[0]
        if errors:
            raise failure_of(errors[0]) from errors[0]
        if time.monotonic() < self._answered + _HEAD:
            raise EngineGone(f"the Ray cluster has not answered for {seconds:g} s")
        raise EngineGone(SILENT)

    def _get(self, asked: Sequence[Any]) -> list[Any]:
        """Return the answers of the ranks' actors, from rank 0 on; waits for all.

        Raises:
            SlotsGone: an actor is gone, or does not answer in time.
            Exception: an actor could not be made or has failed: that of ``failure_of``.
        """
        try:
            return list(ray.get(asked, timeout=_PLACE + _ANSWER))
        except ray.exceptions.RayError as error:
            failed, rank = next(self._failed(asked), (error, None))
        if isinstance(failed, ray.exceptions.GetTimeoutError):
            raise SlotsGone("a node does not answer") from failed
        if rank is None:
            raise failure_of(failed) from failed
        ended = end_of_rank(failed, rank.node, self._is_alive(rank))
        raise SlotsGone(f"the actor on {rank.node} " + ((ended.lost or ended.why) if ended else "does not answer"))

    def _failed(self, asked: Sequence[Any]) -> Iterator[tuple[Exception, _Rank]]:
        """Yield the exceptions among the answers that are there already, with their ranks."""
        for rank, call in zip(self._ranks, asked, strict=False):
            try:
                ray.get(call, timeout=0)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayError as error:
                yield error, rank

    def _is_alive(self, rank: _Rank) -> bool:
        """Ask the head of the cluster whether the node of a rank is there."""
        return any(node["NodeID"] == rank.node_id and node["Alive"] for node in self._ask(ray.nodes))

    def _take(self, number: int, rank: _Rank) -> None:
        """Take one rank's answer: pass its output on and note its end."""
        asked, rank.asked = rank.asked, None
        try:
            code, out, err = ray.get(asked)
        except ray.exceptions.RayError as error:
            rank.end = end_of_rank(error, rank.node, self._is_alive(rank))
            return
        rank.since = None
        if number == 0:
            for stream, data in ((sys.stdout, out), (sys.stderr, err)):
                if data:
                    stream.write(data.decode("utf-8", "replace"))
                    stream.flush()
        elif out or err:
            self._append(number, out + err)
        if code is not None:
            rank.end = EndedRank(code, rank.node)

    def _append(self, number: int, data: bytes) -> None:
        path = failure.log_path(self._logs, number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as log:
                log.write(data)
        except OSError as error:
            raise DiskError("cannot write a log", where=str(path), why=error.strerror) from error


def _import_early() -> None:
    """Import what Ray imports when it first serialises a value, while this process waits for the cluster."""
    for name in _SERIALISERS:
        with suppress(ImportError):
            importlib.import_module(name)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within the block, Ctrl-C ends this process although Ray waits in native code, which Python does not interrupt.

    No rank has been started by then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    left = threading.Event()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        with os.fdopen(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == signal.SIGINT and not left.wait(_PATIENCE):
                    os.write(2, b"tutti: interrupted\n")
                    os._exit(ExitCode.INTERRUPTED)

    threading.Thread(target=watch, name="ray-interrupt", daemon=True).start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)


def _check_address(address: str) -> None:
    """Raise PeerError if nothing listens at ``HOST:PORT`` or ``ray://HOST:PORT``: Ray would try for minutes.

    Raises UsageError for an HTTP address, which ``ray job submit`` reads from ``RAY_ADDRESS``.
    """
    if address.startswith(("http://", "https://")):
        raise UsageError(
            "an HTTP address is that of Ray's dashboard, at which no ranks can be started",
            where=address,
            remedy="give the head's address, ray:address=HOST:6379 or ray://HOST:10001, or unset RAY_ADDRESS",
        )
    host, colon, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str | None, why: str) -> PeerError:
    return PeerError(
        "there is no Ray cluster to run on",
        where=address,
        why=why,
        remedy="start one with ray start --head, or write --on ray:address=local for one on this node; a cluster that "
        "demands a token needs RAY_AUTH_MODE=token here",
    )


def _name(node: Mapping[str, Any]) -> str:
    """Return a node's address and the beginning of its id: several nodes of a test share an address."""
    return f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
