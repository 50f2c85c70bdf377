"""Saving a run while it goes on, and becoming what was saved, on any number of devices and under any strategy.

A save takes a private copy of what this rank holds and returns; files are written by a thread. Ranks report through the
job's store, so that no collective runs beside those of training. The whole state is the model, the optimizer, what is
each worker's own, and one number: the steps taken. Order and random draws follow from it and the seed.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tutti.comm.gather import gather_named
from tutti.errors import CheckpointError, DiskError, PeerError, TuttiError
from tutti.state.folder import newest, prune
from tutti.state.manifest import FileRecord, Manifest
from tutti.state.read import Reader, load_manifest
from tutti.state.write import Slice, abandon, begin, commit, step_name, write_part
from tutti.training.run import Run
from tutti.world.context import World

_POLL = 0.005
_MUST_AGREE = ("workers", "global_batch_size", "training_samples", "seed")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run: what is saved.
        folder: the run's ``checkpoints``.
        world: this process's place.
        facts: what identifies the run: workers, global batch and the like.
        keep: how many of the newest to keep.
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
    ) -> None:
        self._run, self.folder, self._world, self._facts = run, folder, world, dict(facts)
        self._keep, self._warn, self._most_failures = keep, warn, most_failures
        self._thread: threading.Thread | None = None
        self._outcome = ""
        self._failures = 0
        self._verified: set[Path] = set()
        self.saved_step = -1
        # Keys of this object's saves alone: a store may outlive several runs.
        token = run.setting.comms.world.broadcast_json(secrets.token_hex(8), 0, "name of the saves")
        self._key, self._count = f"save/{token}", 0

    def save(self, extra: Mapping[str, Any]) -> None:
        """Copy this rank's state and write it in the background; waits for the save before. Collective.

        Raises DiskError where too many saves in a row have failed.
        """
        self.wait()
        groups = {
            group: [Slice.whole(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors.items()]
            for group, tensors in self._run.exchange.state().items()
        }
        self.saved_step = step = self._run.clock
        facts = {**self._facts, "step": step, "updates": self._run.updates, **extra}
        self._count += 1
        key = f"{self._key}/{self._count}"
        self._verified.discard(self.folder / step_name(step))
        self._thread = threading.Thread(target=self._write, args=(key, step, groups, facts), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written. Raises as ``save``."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if not self._outcome:
            self._failures = 0
            return
        self._failures += 1
        self._warn(f"the save of step {self.saved_step} failed: {self._outcome}")
        if self._failures >= self._most_failures:
            raise DiskError(
                f"{self._failures} saves in a row have failed",
                where=f"step {self.saved_step}, {self.folder}",
                why=self._outcome,
                remedy="make room or choose another --out; the last good checkpoint is kept",
            )

    def _write(self, key: str, step: int, groups: Mapping[str, list[Slice]], facts: Mapping[str, Any]) -> None:
        """One rank's part of a save. ``_outcome`` is empty on all ranks if it succeeded, else the same on all."""
        identity, store = self._world.identity, self._world.store
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
            if identity.rank == 0:
                store.set(f"{key}/done", self._finish(Path(temporary), key, step, facts))
            self._outcome = self._await(f"{key}/done")
        except Exception as error:
            self._outcome = str(error) or type(error).__name__

    def _write_parts(self, temporary: Path, groups: Mapping[str, list[Slice]]) -> dict[str, Any]:
        try:
            records = [
                record.as_json()
                for group, slices in groups.items()
                for record in write_part(temporary, group, self._world.identity.rank, slices)
            ]
        except TuttiError as error:
            return {"error": str(error)}
        return {"records": records}

    def _finish(self, temporary: Path, key: str, step: int, facts: Mapping[str, Any]) -> str:
        """Rank 0: the checkpoint, once all ranks have reported; what went wrong, or nothing."""
        answers = [json.loads(self._await(f"{key}/{rank}")) for rank in range(self._world.identity.size)]
        errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        try:
            if errors:
                abandon(temporary)
                return "; ".join(errors)
            records = [FileRecord.from_json(record) for answer in answers for record in answer["records"]]
            commit(temporary, records, step=step, config_sha256=facts["config_sha256"], facts=facts)
            self._verified.add(self.folder / step_name(step))
            prune(self.folder, keep_last=self._keep, verified=self._verified)
        except TuttiError as error:
            return str(error)
        return ""

    def _await(self, key: str) -> str:
        """What another rank's thread leaves under ``key``. Polls: a blocking wait would hold the store's connection."""
        end = time.monotonic() + self._world.timeout
        store = self._world.store
        while not store.check([key]):
            if time.monotonic() > end:
                raise PeerError(f"a save did not finish within {self._world.timeout:g} s", where=key)
            time.sleep(_POLL)
        return bytes(store.get(key)).decode()

    # --- the way back ----------------------------------------------------------------------------------------------

    def restore(self) -> Mapping[str, Any] | None:
        """Become the newest checkpoint that verifies; its facts, or None where there is none. Collective.

        Raises CheckpointError where it is of another run: another model, batch, seed or number of workers.
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
        if wrong:
            raise CheckpointError(
                f"the checkpoint was made with {'; '.join(wrong)}",
                where=str(manifest.path),
                remedy="resume with the same settings, or start anew with --init-from",
            )
        check_model(manifest, self._run)
        self._run.exchange.load(Saved(manifest))
        self._run.clock, self._run.updates = facts["step"], facts["updates"]
        return facts

    def _find(self) -> Manifest | None:
        found: list[str] | None = None
        if self._world.identity.rank == 0:
            manifest, broken = newest(self.folder) if self.folder.is_dir() else (None, [])
            for text in broken:
                self._warn(f"ignored: {text}")
            found = None if manifest is None else [str(manifest.path)]
        path = self._run.setting.comms.world.broadcast_json(found, 0, "checkpoint to resume from")
        return None if path is None else load_manifest(Path(path[0]))


class Saved:
    """A checkpoint as exchanges read it."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._reader = manifest, Reader(manifest)

    def names(self, group: str) -> Collection[str]:
        return self._manifest.tensors.get(group, {}).keys()

    def get(self, group: str, name: str) -> Tensor:
        return next(iter(self._reader.read(group, [name])))[1]


def differs(saved: Mapping[str, Any], own: Mapping[str, Any], name: str) -> bool:
    """Whether the checkpoint's fact is another than this run's."""
    return name in own and saved.get(name) != own[name]


def check_model(manifest: Manifest, run: Run) -> None:
    """Raise CheckpointError, before anything is loaded, where the saved model has other tensors. Collective."""
    saved = {name: tuple(record.shape) for name, record in manifest.tensors.get("model", {}).items()}
    whole = gather_named(run.exchange.merged(), run.setting.comms.model)
    own = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    wrong = [f"{name} is missing" for name in sorted(own.keys() - saved.keys())]
    wrong += [f"{name} is not in this model" for name in sorted(saved.keys() - own.keys())]
    wrong += [
        f"{name} is {list(saved[name])}, not {list(own[name])}"
        for name in sorted(own.keys() & saved.keys())
        if own[name] != saved[name]
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(wrong[:5])}{more}",
            where=str(manifest.path),
            remedy="build the model that was saved",
        )
