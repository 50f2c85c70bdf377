"""Save a run's checkpoints, and restore a run from one on any number of devices under any strategy.

The whole state is the model, the optimizer, the state that each logical worker has of its own, the loss scale, the
steps taken and the data position. Sample order and RNG streams follow from these and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.checkpoint.checkpoint_reader import CheckpointReader, catalogue, check_model, load_checked
from tutti.checkpoint.manager import CheckpointManager
from tutti.checkpoint.manifest import REMEDY, Manifest
from tutti.config.best import BestMetric
from tutti.config.named_changes import NamedChanges
from tutti.errors import CheckpointError, counted
from tutti.launcher import heartbeat
from tutti.launcher.context import World
from tutti.launcher.heartbeat import Phase
from tutti.metrics.metrics_file import to_json_number
from tutti.train.replicas import check_replicas
from tutti.train.resume_changes import apply_changes, change_facts, check_changes, find_differences, refuse_unnamed

if TYPE_CHECKING:
    from tutti.train.run import Run

NOTHING_NAMED = NamedChanges()


class Checkpoints(CheckpointManager):
    """Saves and restores the checkpoints of one run, and deletes old ones.

    The constructor is collective over all ranks: rank 0 broadcasts the folder, and the ranks of each replica broadcast
    the names and shapes of their tensors to one another. Nothing is written yet.

    Args:
        run: the run to save and to restore.
        folder: the run's ``checkpoints``; all ranks use rank 0's path.
        world: this process's rank, size, store and timeout.
        facts: the run's identity (number of logical workers, global batch size and so on), stored in every manifest.
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
        best: BestMetric | None = None,
    ) -> None:
        super().__init__(run.context.comms.world, folder, world, keep, warn, most_failures, best)
        self._run, self._facts = run, dict(facts)
        model = catalogue(run.replica, run.context.comms.model)
        self._facts["tied"] = {other: name for name, spec in model.items() for other in spec.tied}

    def save(self, extra: Mapping[str, Any], evaluated: Mapping[str, float] | None = None) -> None:
        """Write a checkpoint of the run, in the background if memory has room for a copy of this rank's state.

        Every rank writes its own tensors. Collective over all ranks: all-gathers of digests of their copies of tensors,
        which are compared first; then over the data ranks all-gathers of the buffers of all logical workers (fixed
        shares of the global batch), and of parameters where workers have their own. Blocks until the previous save is
        complete; call ``wait`` to learn whether this one has succeeded.

        Args:
            extra: further JSON values by key to store in the manifest, besides the run's own.
            evaluated: held-out loss and metrics of this very step; None where this step was not evaluated.

        Raises:
            DiskError: the number of consecutive failed saves has reached its limit; up to then a failure is a warning.
            PeerError: the previous save did not finish.
            UsageError: ``evaluated`` lacks the metric that decides which checkpoint is the best.
            CheckpointError: the ranks do not share the folder.
            MismatchError: ranks hold different copies of a parameter; nothing is written.
        """
        run = self._run
        self.begin_save(evaluated)
        check_replicas(run, "its checkpoint")
        with heartbeat.training.during(Phase.SAVE):
            state = {**run.gradient_sync.state(), **({} if run.average is None else run.average.state())}
        facts = {**self._facts, "step": run.global_step, "updates": run.updates, "position": run.position(), **extra}
        facts |= change_facts(run)
        if evaluated is not None:
            facts["eval"] = {name: to_json_number(value) for name, value in evaluated.items()}
        if run.average is not None:
            facts["ema_updates"] = run.average.updates
        if run.loss_scale is not None:
            facts["loss_scale"] = run.loss_scale.state()
        if run.adascale is not None:
            facts["adascale"] = run.adascale.state()
        if run.noise_probe is not None:
            facts["noise"] = run.noise_probe.state()
        self.write(run.global_step, state, facts)

    def restore(self, named: NamedChanges = NOTHING_NAMED) -> Mapping[str, Any] | None:
        """Restore the run from the newest checkpoint in the run's folder whose files are intact.

        Collective over all ranks: a broadcast of the checkpoint's path, after which each rank reads for itself. ZeRO
        stage 1 then all-gathers parameters over the shard ranks, and ranks meet at a barrier with ``central_storage``
        and parameter servers. Parameters, optimizer state and counters are overwritten in place; epoch, optimizer
        settings and callbacks of a script are not (``restore_run``).

        The number of logical workers (fixed shares of the global batch) may differ from the checkpoint's only if the
        user named this setting; a warning then says which state starts afresh.

        Args:
            named: settings that may differ from the checkpoint's; a warning says what changes.

        Returns:
            The checkpoint's facts by key, such as ``step`` and ``position``; None where the folder has no checkpoint.

        Raises:
            CheckpointError: no checkpoint in the folder is intact, or the newest is of another run: its model differs,
                or its optimizer, global batch size, seed or number of workers differs and the user has not named this
                setting; or a named setting cannot change at this position.
        """
        manifest = self.newest()
        if manifest is None:
            return None
        facts = manifest.facts
        wrong = wrong_optimizer(manifest, self._facts)
        changed = find_differences(facts, self._facts, self._run)
        rescaled = differs(facts, self._facts, "workers")
        if rescaled and not self._run.settings.named_workers:
            raise _other_workers(manifest, self._facts)
        if wrong:
            raise CheckpointError(
                f"the checkpoint was made with {'; '.join(wrong)}",
                where=str(manifest.path),
                remedy="resume with the same settings, or start a new run in another folder",
            )
        refuse_unnamed(changed, named, str(manifest.path))
        global_step, updates, position = saved_progress(manifest)
        check_changes(manifest, changed, self._run)
        shapes = {name: record.shape for name, record in manifest.tensors.get("model", {}).items()}
        check_model(catalogue(self._run.replica, self._run.context.comms.model), shapes, str(manifest.path))
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
        self._run.global_step = self._run.local_step = global_step
        self._run.updates = updates
        self._run.seek(position)
        apply_changes(manifest, changed, self._run)
        if changed:
            told = "; ".join(f"{each.name} {each.saved} → {each.now}" for each in changed)
            self.warn(f"{told} from step {global_step} on")
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


def differs(saved: Mapping[str, Any], current: Mapping[str, Any], name: str) -> bool:
    """Return whether a checkpoint and a run both have a value of a setting, such as the seed, and the values differ.

    Args:
        saved: the checkpoint's settings by key.
        current: the run's settings by key.
        name: key of the setting.
    """
    return name in current and name in saved and saved[name] != current[name]


def wrong_optimizer(manifest: Manifest, run_facts: Mapping[str, Any]) -> list[str]:
    """Compare the name of a checkpoint's optimizer with the run's; options such as ``lr`` may differ.

    Args:
        manifest: the checkpoint's manifest.
        run_facts: settings of the run by key; ``optimizer`` is ``name:key=value,…``, of which the name is compared.

    Returns:
        A list of one text that states the difference, for the error; empty if the names are equal or the run has none.
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
        f"{number} from here on",
    )


def other_workers(manifest: Manifest, run: Run) -> str:
    """Return a warning that says which state starts afresh when a run resumes with another number of workers.

    Workers are logical data-parallel workers (fixed shares of the global batch). This function only composes the text,
    without other ranks.

    Args:
        manifest: the checkpoint's manifest.
        run: the run that resumes.

    Raises:
        CheckpointError: the run uses AdaScale, whose step count depends on the number of workers.
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
    begins.append(f"shares of the batch and random draws are those of {counted(mine, 'worker')}")
    return f"workers {saved} → {mine} from step {manifest.facts['step']} on: {'; '.join(begins)}"


def trained_alone(manifest: Manifest) -> bool:
    """Return whether each logical data-parallel worker of the checkpoint has its own parameters, as in local SGD.

    A logical worker is a fixed share of the global batch. True if the checkpoint's group ``workers`` has parameters.

    Args:
        manifest: the checkpoint's manifest.
    """
    return any("/parameter/" in name for name in manifest.tensors.get("workers", {}))


def saved_progress(manifest: Manifest) -> tuple[int, int, Mapping[str, Any]]:
    """Return the progress of the run that saved a checkpoint: steps, updates, and the position in the data.

    Args:
        manifest: the checkpoint's manifest.

    Returns:
        A tuple: number of steps, number of updates, and a dict with ``epoch`` (whole epochs consumed), ``batch``
        (global batches consumed of the next epoch), ``samples`` (consumed in all) and ``state`` (of the data set's
        reader, or None), as of ``Run.position``.

    Raises:
        CheckpointError: a number is missing, or is no whole number of at least 0.
    """
    facts, position = manifest.facts, manifest.facts.get("position")
    place = position if isinstance(position, dict) else {}
    numbers = [facts.get("step"), facts.get("updates"), *(place.get(name) for name in ("epoch", "batch", "samples"))]
    if not all(type(number) is int and number >= 0 for number in numbers) or "state" not in place:
        why = f"steps, updates, epoch, batch and samples are {', '.join(map(repr, numbers))}"
        raise CheckpointError("the checkpoint's progress is invalid", where=str(manifest.path), why=why, remedy=REMEDY)
    return facts["step"], facts["updates"], place


def load_scale(manifest: Manifest, run: Run) -> None:
    """Restore the loss scale of fp16 from a checkpoint; do nothing if the run or the checkpoint has none.

    Args:
        manifest: the checkpoint's manifest.
        run: the run, whose loss scale is set.

    Raises:
        CheckpointError: the saved loss scale is invalid.
    """
    saved = manifest.facts.get("loss_scale")
    if run.loss_scale is None or saved is None:
        return
    load_checked(manifest, run.loss_scale.load, saved, "loss scale")


def load_adascale(manifest: Manifest, run: Run) -> None:
    """Restore AdaScale's scale-invariant step count τ and its averages from a checkpoint, if AdaScale is used.

    Args:
        manifest: the checkpoint's manifest.
        run: the run, whose AdaScale state is set.

    Raises:
        CheckpointError: only one of run and checkpoint uses AdaScale, or the saved state is invalid.
    """
    saved = manifest.facts.get("adascale")
    if run.adascale is None and saved is None:
        return
    if run.adascale is None or saved is None:
        raise CheckpointError(
            f"the checkpoint was made with{'out' * (saved is None)} --lr-scale adascale",
            where=str(manifest.path),
            why="progress on the schedule is counted differently with adascale",
            remedy="resume with the same --lr-scale, or start a new run with --init-from",
        )
    load_checked(manifest, run.adascale.load, saved, "AdaScale")
