"""Save the checkpoints of a run in the background, keep the newest and the best, and find the newest that verifies.

A save copies this rank's state and returns; a thread writes the files. Where memory has no room for a copy, the save
returns once the files are written. Ranks report through the job's store, so that the thread runs no collective beside
those of training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutti.checkpoint import save_snapshot
from tutti.checkpoint.folder import newest_checkpoint, other_folder, prune, ranked, scan
from tutti.checkpoint.manifest import FileRecord, Manifest
from tutti.checkpoint.read import load_manifest
from tutti.checkpoint.save_snapshot import State
from tutti.checkpoint.write import WritableSlice, abandon, begin, commit, step_name, write_part
from tutti.comm.communicator import Communicator
from tutti.config.best import BestMetric
from tutti.errors import CheckpointError, DiskError, PeerError, TuttiError, UsageError
from tutti.launcher import heartbeat, watchdog
from tutti.launcher.context import World
from tutti.launcher.failure import is_distributed_error
from tutti.launcher.heartbeat import Phase

log = logging.getLogger("tutti.checkpoints")

_POLL = 0.005
_MOST_BETWEEN_NOTES = 1.0
# Seconds: a network file system may show a file of another node with a delay.
_APPEARS = 5.0
_NOTHING = json.dumps({"records": []})


class CheckpointManager:
    """Writes the checkpoints of a run in the background, deletes old ones, and finds the newest that verifies.

    Collective over the ranks of ``comm``: the constructor broadcasts the folder and a name of the saves from rank 0. It
    creates nothing on disk.

    Args:
        comm: all ranks.
        folder: the run's ``checkpoints``; all ranks use rank 0's path.
        world: this process's rank, size, store and timeout.
        keep: number of newest checkpoints to keep.
        warn: receives the text of each warning, such as a failed save.
        most_failures: number of consecutive failed saves at which ``wait`` and ``begin_save`` raise DiskError.
        best: held-out metric, and whether higher is better, by which the best checkpoint is chosen, which is kept
            besides; None to keep none.

    Attributes:
        folder: folder of the checkpoints.
        warn, best: as the arguments.
        saved_step: step of the last save, -1 before the first.
        failure: why the last save failed, set by ``wait``; empty if it succeeded, and before the first.
    """

    def __init__(
        self,
        comm: Communicator,
        folder: Path,
        world: World,
        keep: int,
        warn: Callable[[str], None],
        most_failures: int = 3,
        best: BestMetric | None = None,
    ) -> None:
        self._comm, self._world = comm, world
        self._keep, self.warn, self._most_failures = keep, warn, most_failures
        self.best = best
        self._thread: threading.Thread | None = None
        self._written, self._held = threading.Event(), False
        self._outcome = self._store_failure = ""
        self._failures = 0
        self._verified: set[Path] = set()
        self.saved_step, self.failure = -1, ""
        # The token makes the store's keys unique to this object: a store may outlive several runs.
        token, place = comm.broadcast_json([secrets.token_hex(8), str(folder.absolute())], 0, "name of the saves")
        self.folder, self._key, self._count = Path(place), f"save/{token}", 0
        self._opened = False

    def open(self) -> None:
        """Create the run's checkpoint folder and check that all ranks share it; later calls do nothing.

        The first save calls this method, too. Collective: a broadcast and an all-gather over all ranks.

        Raises:
            CheckpointError: some ranks cannot see rank 0's folder; the text names them.
            DiskError: rank 0 cannot write there.
            PeerError: a rank has ended, or did not make the call in time.
        """
        if not self._opened:
            share_folder(self._comm, self.folder)
            self._opened = True

    def begin_save(self, evaluated: Mapping[str, float] | None = None) -> None:
        """Block until the previous save has finished on all ranks, and check that the next can begin.

        Every rank must call it before ``write``. Collective in the first call, which opens the folder (``open``): a
        broadcast and an all-gather over all ranks. Later calls have no collective, but wait as ``wait`` does.

        Args:
            evaluated: held-out loss and metrics of the step to save; None where it was not evaluated.

        Raises:
            UsageError: ``evaluated`` lacks the metric that decides which checkpoint is the best.
            DiskError: as many consecutive saves have failed as the constructor's ``most_failures`` says, or rank 0
                cannot write to the folder.
            PeerError: the job's key-value store, on rank 0's host, does not answer; or, in the first call, a rank has
                ended or did not make the call in time.
            CheckpointError: some ranks cannot see rank 0's folder; the text names them.
        """
        if self.best is not None and evaluated is not None:
            self.best.check(evaluated)
        self.open()
        self.wait()

    def write(self, step: int, state: State, facts: Mapping[str, Any]) -> None:
        """Copy this rank's state of ``step`` to host memory, and write its files in a background thread.

        Where memory has no room for the copy, blocks until this rank's files are written. When it returns, the tensors
        of ``state`` may change. Every rank must call it, after ``begin_save``, for a save to complete; no collective.
        Failures are not raised here but by ``wait``.

        Args:
            step: optimizer steps taken.
            state: this rank's tensors and slices by name, in a dict for each group (``model``, ``optim``, …).
            facts: the run's further state for the manifest, as JSON values; only rank 0's are written.
        """
        with heartbeat.training.during(Phase.SAVE):
            copied = save_snapshot.has_room(state, self._world.identity.local_size)
            groups = save_snapshot.slices(state, copy=copied)
        self.saved_step = step
        self._count += 1
        key = f"{self._key}/{self._count}"
        self._verified.discard(self.folder / step_name(step))
        self._thread = threading.Thread(target=self._write, args=(key, step, groups, facts), daemon=True)
        self._written.clear()
        self._thread.start()
        if not copied:
            self._hold()

    def _hold(self) -> None:
        """Block until this rank's part is written, because the thread reads the live tensors and not a copy."""
        if not self._held:
            self.warn(
                "training waits until the checkpoint is written: there is no memory for a copy of a device's state"
            )
        self._held = True
        # The saving thread has a heartbeat of its own.
        with heartbeat.training.during(Phase.IDLE):
            self._written.wait()

    def wait(self) -> None:
        """Block until the save under way is complete on all ranks; return at once if there is none.

        A failed save is only a warning, until ``most_failures`` in a row (an argument of the constructor) have failed.

        Raises:
            DiskError: ``most_failures`` consecutive saves have failed, or the file of the job's key-value store cannot
                be written.
            PeerError: the job's key-value store, on rank 0's host, does not answer within the job's timeout.
        """
        if self._thread is None:
            return
        # The saving thread has a heartbeat of its own, by which the watchdog limits its writes.
        with heartbeat.training.during(Phase.IDLE):
            seen = heartbeat.saving.seen()
            self._thread.join(self._world.timeout)
            while self._thread.is_alive():
                before, seen = seen, heartbeat.saving.seen()
                if seen == before and seen.phase == Phase.WAITING:
                    raise PeerError(
                        "a save did not finish",
                        where=f"step {self.saved_step}",
                        why="rank 0's host does not answer",
                        remedy="look at rank 0's log and at the network between the hosts, then --resume",
                    )
                self._thread.join(self._world.timeout)
        self._thread, self.failure = None, self._outcome
        if self._store_failure:
            # The other ranks wait for what this one could not tell them.
            raise DiskError(
                "the job's key-value store cannot be written",
                where=os.environ.get("TUTTI_STORE"),
                why=self._store_failure,
                remedy="free space there, or set TMPDIR to a folder on another disk, then --resume",
            )
        if not self.failure:
            self._failures = 0
            log.debug("the checkpoint of step %s is on disk in %s", self.saved_step, self.folder)
            return
        self._failures += 1
        if self._most_failures > 1:
            self.warn(f"the save of step {self.saved_step} failed: {self.failure}")
        if self._failures >= self._most_failures:
            raise self._error(
                f"{self._failures} saves in a row have failed" if self._failures > 1 else "the save failed"
            )

    def end(self) -> None:
        """Block until the last save of a run is complete on all ranks, and raise DiskError if that save has failed.

        Raises:
            DiskError: the last save has failed: no later one can make up for it.
            PeerError: the job's key-value store, on rank 0's host, does not answer within the job's timeout.
        """
        self.wait()
        if self.failure:
            raise self._error("the last save failed")

    def _error(self, what: str) -> DiskError:
        return DiskError(
            what,
            where=f"step {self.saved_step}, {self.folder}",
            why=self.failure,
            remedy="make room or choose another directory; the last good checkpoint is kept",
        )

    def best_kept(self) -> dict[str, Any] | None:
        """Return step and held-out values of the best checkpoint in the run's folder.

        Reads the folder on this rank, without a collective; take rank 0's answer.

        Returns:
            ``{"step": N, "loss": …}`` with the held-out loss and each metric by name; None if no criterion (``best``)
            is set or no checkpoint was evaluated.
        """
        found = ranked(scan(self.folder), self.best.score) if self.best is not None else []
        return {"step": found[0].step, **found[0].facts["eval"]} if found else None

    def _write(self, key: str, step: int, groups: Mapping[str, list[WritableSlice]], facts: Mapping[str, Any]) -> None:
        """Write this rank's part in the saving thread; rank 0 also begins and commits the checkpoint.

        ``_outcome`` is empty after success. After a failure that rank 0 reports, it is the same text on every rank.
        """
        identity, store = self._world.identity, self._world.store
        heartbeat.saving.enter(Phase.SAVE, step)
        try:
            if identity.rank == 0:
                try:
                    opened = begin(self.folder, step, identity.attempt)
                    store.set(f"{key}/open", json.dumps([str(opened), ""]))
                except Exception as error:
                    store.set(f"{key}/open", json.dumps(["", _reason(error)]))
            temporary, refused = json.loads(self._await(key, "open"))
            if refused:
                self._outcome = refused
                return
            store.set(f"{key}/{identity.rank}", json.dumps(self._write_parts(Path(temporary), key, groups)))
            self._written.set()
            if identity.rank == 0:
                store.set(f"{key}/done", self._finish(Path(temporary), key, step, facts))
            self._outcome = self._await(key, "done")
        except Exception as error:
            self._outcome = _reason(error)
            self._store_failure = str(error) if is_distributed_error(error, "DistStoreError") else ""
        finally:
            self._written.set()
            heartbeat.saving.enter(Phase.IDLE)

    def _write_parts(self, temporary: Path, key: str, groups: Mapping[str, list[WritableSlice]]) -> dict[str, Any]:
        progress = self._progress(key)
        try:
            records = [
                record.as_json()
                for group, slices in groups.items()
                for record in write_part(temporary, group, self._world.identity.rank, slices, progress)
            ]
        except Exception as error:
            return {"error": _reason(error)}
        return {"records": records}

    def _finish(self, temporary: Path, key: str, step: int, facts: Mapping[str, Any]) -> str:
        """Commit the checkpoint on rank 0 once all ranks have reported; return the error's text, empty on success."""
        try:
            answers = [json.loads(self._await(key, f"{rank}", rank)) for rank in range(self._world.identity.size)]
            errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
            if errors:
                abandon(temporary)
                return "; ".join(errors)
            records = [FileRecord.from_json(record) for answer in answers for record in answer["records"]]
            commit(temporary, records, step=step, config_sha256=facts["config_sha256"], facts=facts)
            self._verified.add(self.folder / step_name(step))
            score = None if self.best is None else self.best.score
            prune(
                self.folder,
                keep_last=self._keep,
                keep_best=int(bool(score)),
                score=score,
                verified=self._verified,
                progress=self._progress(key),
            )
        except Exception as error:
            return _reason(error)
        return ""

    def _limit(self) -> float:
        """Return the seconds without progress of any rank after which a save fails: those that the watchdog grants."""
        return max(self._world.timeout, watchdog.save_limit())

    def _progress(self, key: str) -> Callable[[], None]:
        """Return a function that records progress of a save for the watchdog, and now and then in the store for all."""
        pause, last = min(_MOST_BETWEEN_NOTES, self._limit() / 4), -math.inf

        def record() -> None:
            nonlocal last
            heartbeat.saving.beat()
            if time.monotonic() - last >= pause:
                with heartbeat.saving.during(Phase.WAITING):
                    self._world.store.add(f"{key}/progress", 1)
                last = time.monotonic()

        return record

    def _await(self, key: str, part: str, rank: int = 0) -> str:
        """Return the value that another rank's thread stores under ``key/part``; an empty report of a lost rank.

        Polls, because a blocking wait would hold the store's connection. An empty report loses nothing: strategies that
        tolerate lost ranks let rank 0 write the whole state. Raises PeerError once no rank has made progress for the
        limit.
        """
        end, noted = -math.inf, -1
        store, comm, limit = self._world.store, self._comm, self._limit()
        with heartbeat.saving.during(Phase.WAITING):
            while not store.check([f"{key}/{part}"]):
                if rank in comm.lost_ranks():
                    return _NOTHING
                if time.monotonic() > end:
                    before, noted = noted, store.add(f"{key}/progress", 0)
                    if noted == before:
                        raise PeerError(
                            f"a save made no progress for {limit:g} s",
                            where=f"rank {self._world.identity.rank}, which waits for rank {rank}",
                            remedy="look for a rank whose disk is slow or that has ended, or raise --save-timeout",
                        )
                    end = time.monotonic() + limit
                heartbeat.saving.beat()
                time.sleep(_POLL)
        return bytes(store.get(f"{key}/{part}")).decode()

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest intact checkpoint of the run, on every rank; None where there is none.

        A checkpoint is intact if its manifest is valid and all files have the hashes in it. Rank 0 reads every byte of
        the checkpoint, and warns of damaged checkpoints. Collective: a broadcast over all ranks of its path.

        Returns:
            A ``Manifest``: ``path``, ``step``, ``facts`` (the run's other state as JSON), and records of files and
            tensors.

        Raises:
            CheckpointError: on all ranks if all checkpoints are damaged; on this rank if it cannot read the manifest
                that rank 0 has found.
            UsageError: on all ranks if the folder is a file, a checkpoint, or a run directory with its checkpoints in
                another folder.
            MismatchError: the ranks are in different calls.
            PeerError: a rank has ended, or did not make the call in time.
        """
        answer: list[Any] = []
        if self._world.identity.rank == 0:
            manifest, broken = newest_checkpoint(self.folder)
            for text in broken if manifest else ():
                self.warn(f"ignored: {text}")
            found = str(manifest.path) if manifest else ""
            answer = [found, broken, None if found or broken else other_folder(self.folder)]
        path, damaged, other = self._comm.broadcast_json(answer, 0, "checkpoint to resume from")
        if other is not None:
            why, remedy = other
            raise UsageError("there is no folder of checkpoints", where=str(self.folder), why=why, remedy=remedy)
        if not path and damaged:
            raise CheckpointError(
                "no checkpoint of the run is valid",
                where=str(self.folder),
                why="; ".join(damaged[:3]),
                remedy="restore one from a copy, or start a new run in another --out",
            )
        log.info(
            "%s in %s", f"{Path(path).name} is the newest valid checkpoint" if path else "no checkpoint", self.folder
        )
        return load_manifest(Path(path)) if path else None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, TuttiError) else f"{type(error).__name__}: {error}"


def share_folder(comm: Communicator, folder: Path) -> None:
    """Create ``folder`` on rank 0 and check that every rank sees a file that rank 0 creates there.

    Collective: a broadcast and an all-gather over ``comm``; blocks, and waits up to five seconds until a network file
    system shows the file on this rank. The file is deleted at the end.

    Args:
        comm: the ranks that share the folder, such as all ranks of the job.
        folder: folder of the run's checkpoints; the same path on all ranks.

    Raises:
        CheckpointError: on every rank, if some ranks cannot see rank 0's folder; the text names them.
        DiskError: on every rank, if rank 0 cannot write there.
        PeerError: a rank has ended, or did not make the call in time.
    """
    mark, failed = folder / f".seen-{secrets.token_hex(8)}", ""
    if comm.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            failed = error.strerror or str(error)
    name, failed = comm.broadcast_json([mark.name, failed], 0, "folder of the checkpoints")
    if failed:
        raise DiskError("cannot make the folder of the checkpoints", where=str(folder), why=failed)
    end = time.monotonic() + _APPEARS
    while not (seen := (folder / name).exists()) and time.monotonic() < end:
        time.sleep(_POLL)
    hosts = comm.all_gather_strings("" if seen else socket.gethostname(), "who sees the folder of the checkpoints")
    if comm.rank == 0:
        mark.unlink(missing_ok=True)
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host]
    if blind:
        raise CheckpointError(
            f"{', '.join(blind)} cannot see rank 0's folder of checkpoints",
            where=str(folder),
            why="every rank writes its part of a checkpoint there",
            remedy="put the run directory on a file system that all hosts share, at the same path",
        )
