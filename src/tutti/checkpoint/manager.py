"""Save checkpoints while training goes on, and restore a run from one on any number of devices under any strategy.

A save copies this rank's state and returns; a thread writes the files. Where memory has no room for a copy, the save
returns once the files are written. Ranks report through the job's store, so that the thread runs no collective beside
those of training. The whole state is the model, the optimizer, the state that each logical worker has of its own, the
loss scale, the steps taken and the data position. Sample order and RNG streams follow from these and the seed.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.checkpoint import save_snapshot
from tutti.checkpoint.best import Best
from tutti.checkpoint.checkpoint_reader import CheckpointReader, catalogue, check_model, load_adascale, load_checked
from tutti.checkpoint.folder import newest_checkpoint, prune, ranked, scan
from tutti.checkpoint.manifest import REMEDY, FileRecord, Manifest
from tutti.checkpoint.read import load_manifest
from tutti.checkpoint.write import WritableSlice, abandon, begin, commit, step_name, write_part
from tutti.comm.communicator import Communicator
from tutti.errors import CheckpointError, DiskError, PeerError, TuttiError
from tutti.launcher import heartbeat
from tutti.launcher.context import World
from tutti.launcher.heartbeat import Phase
from tutti.train.replicas import check_replicas

if TYPE_CHECKING:
    from tutti.train.run import Run

_POLL = 0.005
# Seconds: a network file system may show a file of another node with a delay.
_APPEARS = 5.0
_NOTHING = json.dumps({"records": []})
_MUST_AGREE = ("global_batch_size", "batch_growth", "training_samples", "seed", "optimizer_class")


class Checkpoints:
    """Save, keep and restore the checkpoints of one run.

    Collective: the constructor broadcasts within each replica and from rank 0 to all ranks.

    Args:
        run: the run to save and to restore.
        folder: the run's ``checkpoints``; all ranks use rank 0's path.
        world: this process's rank, size, store and timeout.
        facts: the run's identity (workers, global batch size and the like), stored in every manifest.
        keep: number of newest checkpoints to keep.
        warn: receives the text of each warning, such as a failed save.
        most_failures: consecutive saves that may fail before the run ends.
        best: criterion of the best checkpoint, which is kept besides; None to keep none.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        world: World,
        facts: Mapping[str, Any],
        keep: int,
        warn: Callable[[str], None],
        most_failures: int = 3,
        best: Best | None = None,
    ) -> None:
        self._run, self._world, self._facts = run, world, dict(facts)
        self._keep, self.warn, self._most_failures = keep, warn, most_failures
        self.best = best
        self._facts["tied"] = {other: name for name, spec in catalogue(run).items() for other in spec.tied}
        self._thread: threading.Thread | None = None
        self._written, self._held = threading.Event(), False
        self._outcome = ""
        self._failures = 0
        self._verified: set[Path] = set()
        self.saved_step = -1
        # The token makes the store's keys unique to this object: a store may outlive several runs.
        comm = run.context.comms.world
        token, place = comm.broadcast_json([secrets.token_hex(8), str(folder.absolute())], 0, "name of the saves")
        self.folder, self._key, self._count = Path(place), f"save/{token}", 0
        self._opened = False

    def open(self) -> None:
        """Create the checkpoint folder and check that all ranks share it, once; the first save calls it too.

        Collective: a broadcast and an all-gather over all ranks.

        Raises:
            CheckpointError: some ranks cannot see rank 0's folder; the text names them.
            DiskError: rank 0 cannot write there.
        """
        if not self._opened:
            share_folder(self._run.context.comms.world, self.folder)
            self._opened = True

    def save(self, extra: Mapping[str, Any], evaluated: Mapping[str, float] | None = None) -> None:
        """Write this rank's state, in the background where memory has room for a copy; waits for the save before.

        Collective; copies of a tensor on several ranks are compared first, by digest.

        Args:
            extra: facts to store in the manifest besides the run's own.
            evaluated: held-out loss and metrics of this very step; None where it was not evaluated.

        Raises:
            DiskError: too many consecutive saves have failed.
            PeerError: the save before did not finish.
            UsageError: ``evaluated`` lacks the metric that decides which checkpoint is the best.
            CheckpointError: as ``open``.
            MismatchError: ranks hold different copies of a parameter; nothing is written.
        """
        if self.best is not None and evaluated is not None:
            self.best.check(evaluated)
        self.open()
        self.wait()
        check_replicas(self._run, "its checkpoint")
        average = self._run.average
        with heartbeat.training.during(Phase.SAVE):
            state = {**self._run.gradient_sync.state(), **({} if average is None else average.state())}
            apart = save_snapshot.has_room(state, self._world.identity.local_size)
            groups = save_snapshot.slices(state, copy=apart)
        self.saved_step = step = self._run.clock
        facts = {
            **self._facts,
            "step": step,
            "updates": self._run.updates,
            "position": self._run.position(),
            **extra,
        }
        if evaluated is not None:
            facts["eval"] = {name: value if math.isfinite(value) else None for name, value in evaluated.items()}
        if average is not None:
            facts["ema_updates"] = average.updates
        if self._run.loss_scale is not None:
            facts["loss_scale"] = self._run.loss_scale.state()
        if self._run.adascale is not None:
            facts["adascale"] = self._run.adascale.state()
        if self._run.noise_probe is not None:
            facts["noise"] = self._run.noise_probe.state()
        self._count += 1
        key = f"{self._key}/{self._count}"
        self._verified.discard(self.folder / step_name(step))
        self._thread = threading.Thread(target=self._write, args=(key, step, groups, facts), daemon=True)
        self._written.clear()
        self._thread.start()
        if not apart:
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
        """Block until the save under way is finished. Raises DiskError and PeerError as ``save``."""
        if self._thread is None:
            return
        # The saving thread has a heartbeat of its own.
        with heartbeat.training.during(Phase.IDLE):
            self._thread.join(3 * self._world.timeout)
        if self._thread.is_alive():
            raise PeerError(
                "a save did not finish",
                where=f"step {self.saved_step}",
                why="rank 0's host does not answer",
                remedy="look at rank 0's log and at the network between the hosts, then --resume",
            )
        self._thread = None
        if not self._outcome:
            self._failures = 0
            return
        self._failures += 1
        if self._most_failures > 1:
            self.warn(f"the save of step {self.saved_step} failed: {self._outcome}")
        if self._failures >= self._most_failures:
            raise DiskError(
                f"{self._failures} saves in a row have failed" if self._failures > 1 else "the save failed",
                where=f"step {self.saved_step}, {self.folder}",
                why=self._outcome,
                remedy="make room or choose another directory; the last good checkpoint is kept",
            )

    def best_kept(self) -> dict[str, Any] | None:
        """Return step and held-out values of the best checkpoint; None where none was evaluated.

        Reads the folder on this rank, without a collective; take rank 0's answer.
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
                except TuttiError as error:
                    store.set(f"{key}/open", json.dumps(["", str(error)]))
            temporary, refused = json.loads(self._await(f"{key}/open"))
            if refused:
                self._outcome = refused
                return
            store.set(f"{key}/{identity.rank}", json.dumps(self._write_parts(Path(temporary), groups)))
            self._written.set()
            if identity.rank == 0:
                store.set(f"{key}/done", self._finish(Path(temporary), key, step, facts))
            self._outcome = self._await(f"{key}/done")
        except Exception as error:
            self._outcome = str(error) or type(error).__name__
        finally:
            self._written.set()
            heartbeat.saving.enter(Phase.IDLE)

    def _write_parts(self, temporary: Path, groups: Mapping[str, list[WritableSlice]]) -> dict[str, Any]:
        try:
            records = [
                record.as_json()
                for group, slices in groups.items()
                for record in write_part(temporary, group, self._world.identity.rank, slices, heartbeat.saving.beat)
            ]
        except TuttiError as error:
            return {"error": str(error)}
        return {"records": records}

    def _finish(self, temporary: Path, key: str, step: int, facts: Mapping[str, Any]) -> str:
        """Commit the checkpoint on rank 0 once all ranks have reported; return the error's text, empty on success."""
        answers = [json.loads(self._await(f"{key}/{rank}", rank)) for rank in range(self._world.identity.size)]
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        try:
            if errors:
                abandon(temporary)
                return "; ".join(errors)
            records = [FileRecord.from_json(record) for answer in answers for record in answer["records"]]
            commit(temporary, records, step=step, config_sha256=facts["config_sha256"], facts=facts)
            self._verified.add(self.folder / step_name(step))
            score = None if self.best is None else self.best.score
            prune(self.folder, keep_last=self._keep, keep_best=int(bool(score)), score=score, verified=self._verified)
        except TuttiError as error:
            return str(error)
        return ""

    def _await(self, key: str, rank: int = 0) -> str:
        """Return the value that another rank's thread stores under ``key``; an empty report where that rank is lost.

        Polls, because a blocking wait would hold the store's connection. An empty report loses nothing: strategies that
        tolerate lost ranks let rank 0 write the whole state. Raises PeerError after the timeout.
        """
        end = time.monotonic() + self._world.timeout
        store, comm = self._world.store, self._run.context.comms.world
        with heartbeat.saving.during(Phase.WAITING):
            while not store.check([key]):
                if rank in comm.lost_ranks():
                    return _NOTHING
                if time.monotonic() > end:
                    raise PeerError(
                        f"a save did not finish within {self._world.timeout:g} s",
                        where=key,
                        remedy="look for a rank whose disk is slow or that has ended, or raise --timeout",
                    )
                heartbeat.saving.beat()
                time.sleep(_POLL)
        return bytes(store.get(key)).decode()

    # --- restore ---------------------------------------------------------------------------------------------------

    def restore(self) -> Mapping[str, Any] | None:
        """Restore the run from the newest checkpoint that verifies, on every rank.

        The number of workers may differ from the checkpoint's only if the user named it; a warning then says which
        state starts afresh. Collective.

        Returns:
            The checkpoint's facts; None where the folder has no checkpoint.

        Raises:
            CheckpointError: no checkpoint in the folder verifies, or the newest is of another run: another model,
                optimizer, global batch size or seed, or another number of workers that the user did not name.
        """
        manifest = self._find()
        if manifest is None:
            return None
        facts = manifest.facts
        wrong = [
            f"{name} {facts.get(name)}, not {self._facts[name]}"
            for name in _MUST_AGREE
            if differs(facts, self._facts, name)
        ]
        wrong += wrong_optimizer(manifest, self._facts)
        rescaled = differs(facts, self._facts, "workers")
        if rescaled and not self._run.named_workers:
            raise _other_workers(manifest, self._facts)
        if wrong:
            raise CheckpointError(
                f"the checkpoint was made with {'; '.join(wrong)}",
                where=str(manifest.path),
                remedy="resume with the same settings, or start a new run in another --out",
            )
        clock, updates, position = saved_progress(manifest)
        shapes = {name: record.shape for name, record in manifest.tensors.get("model", {}).items()}
        check_model(catalogue(self._run), shapes, str(manifest.path))
        if rescaled:
            self.warn(other_workers(manifest, self._run))
        elif trained_alone(manifest) and self._run.gradient_sync.loss_normalisation == "step":
            self.warn("the parameters of the saved workers are averaged; the first worker's optimizer state is used")
        load_scale(manifest, self._run)
        load_adascale(manifest, self._run)
        if self._run.noise_probe is not None and "noise" in manifest.facts:
            load_checked(manifest, self._run.noise_probe.load, manifest.facts["noise"], "noise scale")
        saved = CheckpointReader(manifest)
        self._run.gradient_sync.load(saved)
        self._restore_average(saved, facts)
        self._run.clock = self._run.taken = clock
        self._run.updates = updates
        self._run.seek(position)
        return facts

    def _restore_average(self, saved: CheckpointReader, facts: Mapping[str, Any]) -> None:
        average, has_average = self._run.average, bool(saved.names("ema"))
        updates = facts.get("ema_updates", 0)
        if type(updates) is not int or updates < 0:
            raise CheckpointError(
                "the checkpoint's 'ema_updates' is not a number of updates", why=repr(updates), remedy=REMEDY
            )
        if average is not None:
            average.load(saved, updates)
        if average is not None and not has_average:
            self.warn(f"the checkpoint has no average of the weights: it starts at step {facts['step']}")
        if average is None and has_average:
            self.warn(f"the average of the weights is dropped at step {facts['step']}: the run continues without --ema")

    def _find(self) -> Manifest | None:
        answer: list[str] = []
        if self._world.identity.rank == 0:
            manifest, broken = newest_checkpoint(self.folder)
            for text in broken if manifest else ():
                self.warn(f"ignored: {text}")
            answer = [str(manifest.path) if manifest else "", *broken]
        path, *damaged = self._run.context.comms.world.broadcast_json(answer, 0, "checkpoint to resume from")
        if not path and damaged:
            raise CheckpointError(
                "no checkpoint of the run is valid",
                where=str(self.folder),
                why="; ".join(damaged[:3]),
                remedy="restore one from a copy, or start a new run in another --out",
            )
        return load_manifest(Path(path)) if path else None


def differs(saved: Mapping[str, Any], current: Mapping[str, Any], name: str) -> bool:
    """Return whether both have the fact ``name`` and its values differ."""
    return name in current and name in saved and saved[name] != current[name]


def share_folder(comm: Communicator, folder: Path) -> None:
    """Create ``folder`` on rank 0 and check that every rank sees a file that rank 0 creates there.

    Collective: a broadcast and an all-gather over ``comm``. Raises as ``Checkpoints.open``.
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


def wrong_optimizer(manifest: Manifest, run_facts: Mapping[str, Any]) -> list[str]:
    """Return a text if the checkpoint has another optimizer's state, else an empty list.

    Only the optimizers' names are compared; settings, such as ``lr``, may differ.
    """
    saved, chosen = (str(facts.get("optimizer", "")).partition(":")[0] for facts in (manifest.facts, run_facts))
    if not chosen or saved == chosen:
        return []
    state_keys = sorted({name.rpartition("/")[2] for name in manifest.tensors.get("optim", {})})
    return [f"optimizer {saved}, which keeps {', '.join(state_keys) or 'nothing'}, not {chosen}"]


def _other_workers(manifest: Manifest, run_facts: Mapping[str, Any]) -> CheckpointError:
    """Make the error for another number of workers that follows from the number of devices alone."""
    saved, number = manifest.facts["workers"], run_facts["workers"]
    return CheckpointError(
        f"the checkpoint was made with workers {saved}, not {number}",
        where=str(manifest.path),
        why="the number of workers is part of the algorithm, and here it would follow from the number of devices",
        remedy=f"name them: --workers {saved} goes on as before on at most as many data ranks, --workers {number} with "
        f"{number} from here on (in a script workers={saved} or workers={number})",
    )


def other_workers(manifest: Manifest, run: Run) -> str:
    """Return the warning that says which state starts afresh with another number of workers.

    Raises CheckpointError with AdaScale, whose step count depends on the number of workers.
    """
    saved, mine = manifest.facts["workers"], run.feed.contract.workers
    if run.adascale is not None:
        raise CheckpointError(
            f"the checkpoint was made with workers {saved}, not {mine}",
            where=str(manifest.path),
            why="--lr-scale adascale counts steps of one worker's share of the batch, which would change",
            remedy=f"resume with --workers {saved}, or start a new run with --init-from",
        )
    kept = {name.partition("/")[2].partition("/")[0] for name in manifest.tensors.get("workers", {})}
    begins = []
    if kept - {"parameter", "optimizer", "momentum"}:
        begins.append("every worker begins with the merged batch-norm statistics")
    if trained_alone(manifest):
        begins.append(
            "every worker begins with the average of the saved workers' parameters and the first worker's optimizer"
        )
    begins.append(f"shares of the batch and random draws are those of {mine} workers")
    return f"workers {saved} → {mine} from step {manifest.facts['step']} on: {'; '.join(begins)}"


def trained_alone(manifest: Manifest) -> bool:
    """Return whether every worker of the checkpoint has parameters of its own, as in local SGD."""
    return any("/parameter/" in name for name in manifest.tensors.get("workers", {}))


def saved_progress(manifest: Manifest) -> tuple[int, int, Mapping[str, Any]]:
    """Return steps, updates and data position of a checkpoint. Raises CheckpointError where one is no valid number."""
    facts, position = manifest.facts, manifest.facts.get("position")
    place = position if isinstance(position, dict) else {}
    numbers = [facts.get("step"), facts.get("updates"), *(place.get(name) for name in ("epoch", "batch", "samples"))]
    if not all(type(number) is int and number >= 0 for number in numbers) or "state" not in place:
        why = f"steps, updates, epoch, batch and samples are {', '.join(map(repr, numbers))}"
        raise CheckpointError("the checkpoint's progress is invalid", where=str(manifest.path), why=why, remedy=REMEDY)
    return facts["step"], facts["updates"], place


def load_scale(manifest: Manifest, run: Run) -> None:
    """Restore the loss scale if the run and the checkpoint have one. Raises CheckpointError where it is invalid."""
    saved = manifest.facts.get("loss_scale")
    if run.loss_scale is None or saved is None:
        return
    load_checked(manifest, run.loss_scale.load, saved, "loss scale")
