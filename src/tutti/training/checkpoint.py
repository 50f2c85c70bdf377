"""Saving a run while it goes on, and becoming what was saved, on any number of devices and under any strategy.

A save takes a private copy of what this rank holds and returns; files are written by a thread. Where a copy has no room
it returns when they are. Ranks report through the job's store, so that no collective runs beside those of training. The
whole state is the model, the optimizer, what is each worker's own, the loss scale, the steps taken and the position in
the data. Order and random draws follow from these and the seed.
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

from tutti.comm.communicator import Communicator
from tutti.errors import CheckpointError, DiskError, PeerError, TuttiError
from tutti.state.folder import newest, prune, ranked, scan
from tutti.state.manifest import REMEDY, FileRecord, Manifest
from tutti.state.read import load_manifest
from tutti.state.write import Slice, abandon, begin, commit, step_name, write_part
from tutti.training import snapshot
from tutti.training.best import Best
from tutti.training.saved import Saved, catalogue, check_model, load_adascale, take
from tutti.world import heartbeat
from tutti.world.context import World
from tutti.world.heartbeat import Phase

if TYPE_CHECKING:
    from tutti.training.run import Run

_POLL = 0.005
# A network file system may show what another host has made a little later.
_APPEARS = 5.0
_NOTHING = json.dumps({"records": []})
_MUST_AGREE = ("workers", "global_batch_size", "batch_growth", "training_samples", "seed", "optimizer_class")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run: what is saved.
        folder: the run's ``checkpoints``, rank 0's for all.
        world: this process's place.
        facts: what identifies the run: workers, global batch and the like.
        keep: how many of the newest to keep.
        best: what makes a checkpoint the best, which is kept besides; None to keep none.
        warn: told of saves that failed.
        most_failures: saves in a row that may fail before the run ends.
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
        # Keys of this object's saves alone: a store may outlive several runs.
        comm = run.setting.comms.world
        token, place = comm.broadcast_json([secrets.token_hex(8), str(folder.absolute())], 0, "name of the saves")
        self.folder, self._key, self._count = Path(place), f"save/{token}", 0
        self._opened = False

    def open(self) -> None:
        """Make the folder and see to it that all ranks share it; the first save does so where nobody has. Collective.

        Raises CheckpointError, naming the ranks that do not see it, and DiskError where rank 0 cannot write there.
        """
        if not self._opened:
            share_folder(self._run.setting.comms.world, self.folder)
            self._opened = True

    def save(self, extra: Mapping[str, Any], evaluated: Mapping[str, float] | None = None) -> None:
        """Write this rank's state, in the background where a copy has room; waits for the save before. Collective.

        Args:
            extra: facts to keep besides the run's own.
            evaluated: held-out values of this very step, where there are any.

        Raises:
            DiskError: too many saves in a row have failed.
            UsageError: what makes a checkpoint the best is not among the values.
            CheckpointError: as ``open``.
        """
        if self.best is not None and evaluated is not None:
            self.best.check(evaluated)
        self.open()
        self.wait()
        average = self._run.average
        with heartbeat.training.during(Phase.SAVE):
            state = {**self._run.exchange.state(), **({} if average is None else average.state())}
            apart = snapshot.has_room(state, self._world.identity.local_size)
            groups = snapshot.slices(state, copy=apart)
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
        self._count += 1
        key = f"{self._key}/{self._count}"
        self._verified.discard(self.folder / step_name(step))
        self._thread = threading.Thread(target=self._write, args=(key, step, groups, facts), daemon=True)
        self._written.clear()
        self._thread.start()
        if not apart:
            self._hold()

    def _hold(self) -> None:
        """Return when this rank's part is written, for there is no copy of it."""
        if not self._held:
            self.warn("training waits while it is saved: there is no memory for a copy of a device's state")
        self._held = True
        # The thread that saves is watched by itself.
        with heartbeat.training.during(Phase.IDLE):
            self._written.wait()

    def wait(self) -> None:
        """Return when nothing is being written. Raises as ``save``."""
        if self._thread is None:
            return
        # The thread that saves is watched by itself.
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
        """Step and values of the best checkpoint; None where none was evaluated. Not collective: rank 0's is right."""
        found = ranked(scan(self.folder), self.best.score) if self.best is not None else []
        return {"step": found[0].step, **found[0].facts["eval"]} if found else None

    def _write(self, key: str, step: int, groups: Mapping[str, list[Slice]], facts: Mapping[str, Any]) -> None:
        """One rank's part of a save. ``_outcome`` is empty on all ranks if it succeeded, else the same on all."""
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

    def _write_parts(self, temporary: Path, groups: Mapping[str, list[Slice]]) -> dict[str, Any]:
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
        """Rank 0: the checkpoint, once all ranks have reported; what went wrong, or nothing."""
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
        """What another rank's thread leaves under ``key``. Polls: a blocking wait would hold the store's connection.

        Where ranks may be lost, rank 0 writes all there is.
        """
        end = time.monotonic() + self._world.timeout
        store, comm = self._world.store, self._run.setting.comms.world
        with heartbeat.saving.during(Phase.WAITING):
            while not store.check([key]):
                if rank in comm.lost():
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

    # --- the way back ----------------------------------------------------------------------------------------------

    def restore(self) -> Mapping[str, Any] | None:
        """Become the newest checkpoint that verifies; its facts, or None where there is none. Collective.

        Raises CheckpointError where there are some and none verifies, and where it is of another run: another model,
        optimizer, batch, seed or number of workers.
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
        if wrong:
            raise CheckpointError(
                f"the checkpoint was made with {'; '.join(wrong)}",
                where=str(manifest.path),
                remedy="resume with the same settings, or start anew in another --out",
            )
        clock, updates, position = progress(manifest)
        shapes = {name: record.shape for name, record in manifest.tensors.get("model", {}).items()}
        check_model(catalogue(self._run), shapes, str(manifest.path))
        if trained_alone(manifest) and self._run.exchange.gradient_over == "step":
            self.warn(
                "the saved workers' own parameters are merged into their average, their optimizers' into the first"
            )
        load_scale(manifest, self._run)
        load_adascale(manifest, self._run)
        saved = Saved(manifest)
        self._run.exchange.load(saved)
        self._restore_average(saved, facts)
        self._run.clock = self._run.taken = clock
        self._run.updates = updates
        self._run.seek(position)
        return facts

    def _restore_average(self, saved: Saved, facts: Mapping[str, Any]) -> None:
        average, there = self._run.average, bool(saved.names("ema"))
        updates = facts.get("ema_updates", 0)
        if type(updates) is not int or updates < 0:
            raise CheckpointError(
                "the checkpoint's 'ema_updates' is no number of updates", why=repr(updates), remedy=REMEDY
            )
        if average is not None:
            average.load(saved, updates)
        if average is not None and not there:
            self.warn(f"the checkpoint has no average of the weights: it begins at step {facts['step']}")
        if average is None and there:
            self.warn(f"the average of the weights ends at step {facts['step']}: the run goes on without --ema")

    def _find(self) -> Manifest | None:
        answer: list[str] = []
        if self._world.identity.rank == 0:
            manifest, broken = newest(self.folder)
            for text in broken if manifest else ():
                self.warn(f"ignored: {text}")
            answer = [str(manifest.path) if manifest else "", *broken]
        path, *damaged = self._run.setting.comms.world.broadcast_json(answer, 0, "checkpoint to resume from")
        if not path and damaged:
            raise CheckpointError(
                "no checkpoint of the run can be trusted",
                where=str(self.folder),
                why="; ".join(damaged[:3]),
                remedy="restore one from a copy, or start anew in another --out",
            )
        return load_manifest(Path(path)) if path else None


def differs(saved: Mapping[str, Any], own: Mapping[str, Any], name: str) -> bool:
    """Whether the checkpoint's fact is another than this run's."""
    return name in own and name in saved and saved[name] != own[name]


def share_folder(comm: Communicator, folder: Path) -> None:
    """Make ``folder``; refuse it where some rank does not see what rank 0 makes there. Collective. See ``open``."""
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
    said = comm.texts("" if seen else socket.gethostname(), "who sees the folder of the checkpoints")
    if comm.rank == 0:
        mark.unlink(missing_ok=True)
    blind = [f"rank {rank} on {host}" for rank, host in enumerate(said) if host]
    if blind:
        raise CheckpointError(
            f"{', '.join(blind)} cannot see rank 0's folder of checkpoints",
            where=str(folder),
            why="every rank writes its part of a checkpoint there",
            remedy="put the run directory on a file system that all hosts share, at the same path",
        )


def wrong_optimizer(manifest: Manifest, own: Mapping[str, Any]) -> list[str]:
    """What to say where the checkpoint has another optimizer's state; its settings, such as ``lr``, may differ."""
    saved, mine = (str(facts.get("optimizer", "")).partition(":")[0] for facts in (manifest.facts, own))
    if not mine or saved == mine:
        return []
    kept = sorted({name.rpartition("/")[2] for name in manifest.tensors.get("optim", {})})
    return [f"optimizer {saved}, which keeps {', '.join(kept) or 'nothing'}, not {mine}"]


def trained_alone(manifest: Manifest) -> bool:
    """Whether every worker of the checkpoint has parameters of its own."""
    return any("/parameter/" in name for name in manifest.tensors.get("workers", {}))


def progress(manifest: Manifest) -> tuple[int, int, Mapping[str, Any]]:
    """Steps, updates and position of a checkpoint. Raises CheckpointError where they are not those of a run."""
    facts, position = manifest.facts, manifest.facts.get("position")
    place = position if isinstance(position, dict) else {}
    numbers = [facts.get("step"), facts.get("updates"), *(place.get(name) for name in ("epoch", "batch", "samples"))]
    if not all(type(number) is int and number >= 0 for number in numbers) or "state" not in place:
        why = f"steps, updates, epoch, batch and samples are {', '.join(map(repr, numbers))}"
        raise CheckpointError("the checkpoint's progress is no run's", where=str(manifest.path), why=why, remedy=REMEDY)
    return facts["step"], facts["updates"], place


def load_scale(manifest: Manifest, run: Run) -> None:
    """Go on with the saved loss scale, where both runs have one. Raises CheckpointError where it is none."""
    saved = manifest.facts.get("loss_scale")
    if run.loss_scale is None or saved is None:
        return
    take(manifest, run.loss_scale.load, saved, "loss scale")
