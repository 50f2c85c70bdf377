"""Compare the bodies of one global batch in a custom training loop, where a rank has several micro-batches.

The rank runs the script's body once for each micro-batch. Their gradients belong to one update, so every body must make
the same backward and optimizer calls in the same order, see the same parameters, and train the same parameters.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from tutti.device import widest_float
from tutti.errors import UsageError, script_line
from tutti.nn.owned_hooks import OwnedHook
from tutti.nn.swap import parameters
from tutti.python_compat import LiveObjects
from tutti.torch_compat import GRADIENT_HOOK_ATTRIBUTES, has_scaled, tensor_version, tree_leaves
from tutti.train.script_checks.body_counters import (
    counted_loss,
    counting_condition,
    counting_loop,
    edit_condition,
    setting_condition,
)
from tutti.train.script_checks.second_updates import SecondUpdates

if TYPE_CHECKING:
    from tutti.train.run import Run

_SCALERS = LiveObjects(torch.amp.GradScaler)
_LOOKS = 4
"""Number of updates whose lines are looked at in the source (a guess)."""
_COMPARED = 2
"""Number of first global batches in which parameters are also compared by value; in all by version counter."""


class BodyComparison:
    """Checks that a custom training loop does the same for each micro-batch of a global batch on this rank.

    A rank with several micro-batches runs the body of the script's loop once for each. This class records the backward
    passes and optimizer steps of each run of the body. It raises UsageError where they differ from those of the first
    micro-batch, or where the body does something undefined with several micro-batches, such as writing parameters. No
    method is collective: a rank compares its own bodies.

    Args:
        run: the training run, whose model, gradient synchronisation and step number are read.

    Attributes:
        second_updates: what the body reads after it has updated parameters.
        several: whether some data rank has several micro-batches in the current global batch; set by the caller. If
            not, no check is made.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._sync = run, run.gradient_sync
        self.several = self._final = False
        self._batches = 0
        self.second_updates = SecondUpdates(run)
        self._events: list[tuple[str, int]] = []
        self._first: list[tuple[str, int]] | None = None
        self._settings: dict[int, str] = {}
        # Settings and trained parameters of the last global batch, and whether two batches in a row had the same.
        self._kept: tuple[str, list[bool]] | None = None
        self._steady = False
        self._written: tuple[list[int], list[float] | None] = ([], None)
        self._states: list[int] = []
        self._at_forward: list[bool] | None = None
        self._hooks_at_forward: list[int] | None = None
        self._hooked = False
        # Whether bodies have made no update, and how many updates after such ones were looked at in the source.
        self._passes_over, self._looked = False, 0
        self._schedulers: list[tuple[LRScheduler, int]] = []
        # By place of an optimizer's step in the body: whether bodies of this batch have edited gradients before it, and
        # whether others have not.
        self._edited: dict[int, set[bool]] = {}

    def begin_batch(self) -> None:
        """Begin a global batch of a custom training loop: clear the calls recorded for the batch before.

        This object compares the backward passes and optimizer steps that the loop's body makes for each micro-batch of
        this rank with those for its first micro-batch of the global batch.
        """
        self._first, self._settings = None, {}
        self._edited.clear()

    def begin_body(self, final: bool) -> None:
        """Clear the record of backward passes and optimizer steps before the script's loop body runs for a micro-batch.

        This object checks that the body does the same for each micro-batch of a global batch. If the rank has several,
        this method also records the parameters' version counters, so that ``end_body`` finds parameters that the body
        has written. In the first two global batches of a run, and at the turn of an epoch, it records the sums of their
        values, too.

        Args:
            final: whether this is the rank's last micro-batch in the global batch, whose body may write parameters.

        Raises:
            UsageError: the rank has several micro-batches, and the script's loop ends after a number of micro-batches,
                such as ``for _ in range(1000)``, or computes the loss by a number that counts runs of the loop's body,
                such as ``if number % 8 == 0``.
        """
        self._final, self._events, self._at_forward, self._hooks_at_forward = final, [], None, None
        if self.several:
            self._written, self._states = self._values(), self._versions_of_states()
            self._watch_forward()
            self.second_updates.begin_body()
            if self._first is None:
                if not self._batches and (line := counting_loop()):
                    self._refuse(
                        "the loop takes a number of micro-batches",
                        line,
                        why="this rank has several for each global batch, so that the loop would make fewer updates"
                        " than on more devices",
                        remedy="loop over run.microbatches(epoch), or while run.global_step is below the number of"
                        " updates",
                    )
                if self._compares_values() and (line := counted_loss(self._shares_generators())):
                    self._refuse(
                        "the loop computes a different loss in every n-th body",
                        line,
                        why="this rank runs the body several times a global batch, so that on another number of devices"
                        " another part of the samples would get that loss",
                        remedy="count global batches (run.global_step), not bodies; draw by the global generators, or"
                        " seed your own by run.global_step in each body",
                    )
                own = self._run.shared_settings.schedulers() if self._compares_values() else []
                self._schedulers = [(each, _steps_of(each)) for each in own]

    def _shares_generators(self) -> bool:
        """Return whether this rank computes several workers, or shares a worker, so that workers share generators."""
        return len(self._run.feed.workers) > 1 or self._run.feed.contract.shared

    def end_body(self) -> None:
        """Check that the loop body has made as many backward passes and optimizer steps as for the first micro-batch.

        Called after each micro-batch in a custom training loop. The calls are compared with those for the rank's first
        micro-batch of this global batch; nothing is checked if the rank has only one.

        Raises:
            UsageError: the numbers differ; two runs of the body have each stepped a learning-rate scheduler; or, before
                the rank's last micro-batch, the body has written parameters or the state of an optimizer, or registered
                a gradient hook after its forward.
        """
        if not self.several:
            return
        self._check_writes()
        self._check_schedulers()
        if not self._final and self._hooks_at_forward not in (None, self._gradient_hooks()):
            self._refuse(
                "the loop's body registers a hook on a gradient after its forward",
                why="the hook would act on the later micro-batches of this global batch and not on the first",
                remedy="register it before the loop, or where run.stepped is true",
            )
        self._passes_over = self._passes_over or all(event != "step" for event, _ in self._events)
        if self._first is None:
            self._first = self._events
        elif len(self._events) != len(self._first):
            self.refuse_different()

    def end_batch(self) -> None:
        """Count a global batch of the custom training loop as done, after the last of its micro-batches.

        In the first two global batches the check that the loop's body writes no parameters compares the sums of their
        values, too; later only their version counters.
        """
        self._batches += 1
        self.second_updates.end_batch()

    def note(self, kind: str, index: int) -> None:
        """Record that the body of a custom training loop has computed gradients or made an optimizer step.

        The record is compared with that of the rank's first micro-batch of the global batch. Nothing is checked if the
        rank has only one micro-batch in a global batch.

        Args:
            kind: "backward", "gradients" (computed without ``run.backward``) or "step".
            index: for "step", the optimizer's position among those passed to ``tutti.prepare``, or -1 for all
                optimizers; 0 for the other kinds.

        Raises:
            UsageError: this rank has several micro-batches, and the loop body steps through an enabled
                ``torch.amp.GradScaler``, computes gradients after it has read parameters that an optimizer step of it
                has updated, writes parameters or the state of an optimizer before the last micro-batch, or differs in
                this call, or at an optimizer step in a setting such as ``lr``, from the first micro-batch of the
                global batch; or the step is in every n-th body alone (``counting_condition``).
        """
        if self.several:
            if kind == "step" and _is_called_by_scaler():
                self._refuse_scaler()
            rows = self._sync.gradient_at in ("rows", "shards") and self._first is None and not self._batches
            # The optimizer's rows have no gradient yet, without which a scaler ends in an error of its own.
            if rows and any(map(has_scaled, _SCALERS.all())):
                self._refuse_scaler()
            if kind != "step":
                self.second_updates.check()
            if self._first is not None:
                place = len(self._events)
                if place >= len(self._first) or self._first[place] != (kind, index):
                    self.refuse_different()
            self._check_writes()
            if kind == "step":
                self._check_settings(index)
                self._check_counted_step()
                if self._first is None and index <= 0:
                    self._check_counted_settings()
        self._events.append((kind, index))
        self._at_forward = None

    def _check_counted_step(self) -> None:
        """Raise UsageError if the script makes its updates in every n-th run of the loop's body only.

        Ranks run the body unequally often, so that the n-th run of one rank is not in the global batch of another's.
        """
        if self._passes_over and self._looked < _LOOKS:
            self._looked += 1
            if line := counting_condition():
                self._refuse(
                    "the loop updates in every n-th of its bodies",
                    line,
                    why="ranks run the body several times a global batch, not all of them equally often",
                    remedy="count global batches (run.global_step), not runs of the body",
                )

    def check_scaler(self) -> None:
        """Check, before a plain ``loss.backward()`` with a sharding strategy, that no ``GradScaler`` has scaled a loss.

        An optimizer's shards get their gradients later, and the scaler would find none.

        Raises:
            UsageError: the optimizer updates shards, and a scaler has scaled a loss.
        """
        if self._sync.gradient_at in ("rows", "shards") and any(map(has_scaled, _SCALERS.all())):
            raise UsageError(
                "torch.amp.GradScaler and loss.backward() cannot be combined with parameters that are split over ranks",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="the scaler looks for gradients of the optimizer's parameters, which are not reduced yet",
                remedy="call run.backward(scaler.scale(loss)), or give tutti.prepare loss_scale='dynamic' in the"
                " scaler's place",
            )

    def _refuse_scaler(self) -> NoReturn:
        raise UsageError(
            "torch.amp.GradScaler cannot be combined with several micro-batches a rank",
            where=f"step {self._run.global_step + 1}, {script_line()}",
            why="it counts every run of the loop's body as an update, and changes its scale between micro-batches of"
            " one global batch",
            remedy="give tutti.prepare loss_scale='dynamic' in its place, or take as many workers as data ranks"
            f" ({self._run.context.mesh.data_ranks})",
        )

    def _check_settings(self, index: int) -> None:
        """Raise UsageError if an optimizer's settings differ from those at the same call of the first body.

        Settings are, for example, learning rates. Those of other optimizers are not compared: a body may have stepped
        these already, and set them for their next update.

        Args:
            index: the optimizer's position among those passed to ``tutti.prepare``; -1 for all optimizers.
        """
        now, place = self._run.shared_settings.text(index), len(self._events)
        before = self._settings.setdefault(place, now)
        if before != now:
            first, later = self._run.shared_settings.differences(before, now)
            self._refuse(
                "the loop's body changes the optimizer's settings",
                script_line(),
                why=f"this rank runs the body several times a global batch: {first} in the first, {later} now",
                remedy="write 'if run.stepped:' around the change, such as scheduler.step(), compute it from"
                " run.global_step, or give tutti.prepare the scheduler (scheduler=)",
            )

    def _check_counted_settings(self) -> None:
        """Raise UsageError if settings or trained parameters change between batches by a count of bodies.

        The script's source is searched for such a count only when settings change after global batches without a
        change.
        """
        now, before = (self._run.shared_settings.text(), self._trained()), self._kept
        self._kept = now
        if before is None or now == before:
            self._steady = self._steady or before is not None
        elif self._steady and (line := setting_condition(self._run.updates)):
            self._refuse(
                "the loop changes learning rates, or freezes parameters, by a count of its bodies",
                line,
                why="this rank runs the body several times a global batch, so that the change comes too early, and at"
                " another step on another number of devices",
                remedy="count global batches (run.global_step), not bodies, under 'if run.stepped:'",
            )

    def _check_schedulers(self) -> None:
        """Raise UsageError if two bodies of one of the first global batches have each stepped a scheduler.

        Steps to a given position, such as ``scheduler.step(run.global_step / n)``, are allowed: they set the same
        position in every body.
        """
        moved = [(each, count) for each, before in self._schedulers if (count := _steps_of(each)) != before]
        if self._first is None:
            self._schedulers = moved
        elif moved:
            self._refuse(
                f"the loop's body steps a scheduler ({type(moved[0][0]).__name__})",
                script_line(),
                why="this rank runs the body several times a global batch, so that the rate would run ahead of the"
                " training, and by another factor on another number of devices",
                remedy="write scheduler.step() under 'if run.stepped:', or give tutti.prepare scheduler=",
            )

    def note_edited(self, edited: bool) -> None:
        """Record, right before an optimizer's step, whether the loop's body has edited gradients for this micro-batch.

        Only edits for the rank's last micro-batch change the update. A script may edit gradients for some micro-batches
        alone because of their values, as where it clips large ones, but not because of a count of runs of the body.

        Args:
            edited: whether the script has written or replaced a gradient since it was computed.

        Raises:
            UsageError: only some runs of the body for this global batch have edited gradients, and the loop does so
                under an ``if`` that counts runs (``edit_condition``).
        """
        found = self._edited.setdefault(len(self._events), set())
        found.add(edited)
        if len(found) > 1 and (line := edit_condition()):
            self._refuse(
                "the loop edits gradients in every n-th of its bodies",
                line,
                why="this rank runs the body several times a global batch, and edits in its last body alone act on the"
                " update",
                remedy="count global batches (run.global_step), not runs of the body",
            )

    def _refuse(self, what: str, line: str = "", *, why: str, remedy: str) -> NoReturn:
        """Raise UsageError for what a body does that is right where each rank has one micro-batch a global batch.

        Args:
            what: what the loop or its body does.
            line: the script's line, as ``FILE:LINE``; empty if it is not known.
            why: why it is wrong with several.
            remedy: the way out with several.
        """
        raise UsageError(
            f"{what}, with several micro-batches a rank",
            where=", ".join(filter(None, (f"step {self._run.global_step + 1}", line))),
            why=why,
            remedy=f"{remedy}; or take as many workers as data ranks ({self._run.context.mesh.data_ranks}), and no"
            " micro_batch",
        )

    def refuse_different(self) -> NoReturn:
        """Raise the error that the script's loop body did different things for the micro-batches of one global batch.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "the loop's body did not do the same for each micro-batch of one global batch",
            where=f"step {self._run.global_step + 1}, {script_line()}",
            why="this rank runs the body several times a global batch, and the gradients belong together",
            remedy="count global batches (run.global_step), not runs of the body; change requires_grad where"
            " run.stepped is true; or take as many workers as data ranks",
        )

    # --- trained parameters ----------------------------------------------------------------------------------------

    def _watch_forward(self) -> None:
        """Hook the model to record every ``requires_grad`` at the first forward after a backward or optimizer step."""
        if not self._hooked:
            self._hooked = True
            for part in self._run.replica.parts:
                part.register_forward_pre_hook(OwnedHook(self._before_forward), prepend=True)

    def _before_forward(self, *_: Any) -> None:
        if self.several and self._at_forward is None and torch.is_grad_enabled():
            self._at_forward = self._trained()
            self._hooks_at_forward = self._hooks_at_forward or self._gradient_hooks()

    def _trained(self) -> list[bool]:
        return [p.requires_grad for _, p in parameters(self._run.replica.parts)]

    def _gradient_hooks(self) -> list[int]:
        """Return the number of hooks that ``Tensor.register_hook`` has put on each parameter."""
        return [len(getattr(p, GRADIENT_HOOK_ATTRIBUTES[0]) or ()) for _, p in parameters(self._run.replica.parts)]

    def retrained(self) -> None:
        """Accept that the script's loop body has changed ``requires_grad`` of parameters during a micro-batch.

        The parameters' version counters (in the first two global batches also the sums of their values) are recorded
        anew; ``end_body`` compares with these to find parameters that the loop body has written.

        Raises:
            UsageError: ``requires_grad`` changed after the micro-batch's forward had begun, and the rank has several
                micro-batches.
        """
        if self.several and self._at_forward is not None and self._at_forward != self._trained():
            self.refuse_different()
        self._written = self._values()

    # --- writes of parameters --------------------------------------------------------------------------------------

    def _values(self) -> tuple[list[int], list[float] | None]:
        """Return versions of the parameters, and in the first global batches the sum of each parameter's values.

        Without sums where other ranks write into the same memory: a change need not be this script's.
        """
        values = self._sync.trained_tensors()
        trained = self._sync.script_parameters()
        versions = [tensor_version(p) for p in trained]
        if not self._run.replica.sharded:
            # Frozen ones, such as a teacher that the forward averages.
            own = set(trained)
            rest = [p for _, p in parameters(self._run.replica.parts) if p not in own]
            versions += [tensor_version(p) for p in rest]
            values = [*values, *(p.data for p in rest)]
        if not self._compares_values() or self._sync.shares_parameters:
            return versions, None
        return versions, [float(value.sum(dtype=widest_float(value.device))) for value in values]

    def _versions_of_states(self) -> list[int]:
        """Return versions of the tensors in the optimizers' states, in the global batches whose values are compared.

        The list is empty where the state is on parameter servers or split, and its reads are refused.
        """
        found: list[int] = []
        with suppress(UsageError):
            for optimizer in self._sync.optimizers if self._compares_values() else ():
                leaves = (leaf for state in optimizer.state.values() for leaf in tree_leaves(state))
                found += [tensor_version(each) for each in leaves if isinstance(each, Tensor)]
        return found

    def _compares_values(self) -> bool:
        """Return whether parameters are compared by value, and schedulers by their number of steps."""
        return self._batches < _COMPARED or self._run.lifecycle.windows.is_open

    def _check_writes(self) -> None:
        """Raise UsageError if the script wrote parameters in a body that is not the rank's last."""
        if self._final:
            return
        versions, sums = self._values()
        if versions != self._written[0] or (sums != self._written[1] and self._written[1] is not None):
            self._refuse(
                "the loop's body writes parameters",
                why="micro-batches of one global batch must see the same parameters",
                remedy="write them where run.stepped is true",
            )
        if self._versions_of_states() != self._states:
            self._refuse(
                "the loop's body writes the state of an optimizer",
                why="this rank runs the body several times a global batch, and would write it once for each",
                remedy="write it where run.stepped is true",
            )


def _steps_of(scheduler: LRScheduler) -> int:
    """Return how often a scheduler has stepped; 0 for one that only calls others, which count by themselves."""
    return int(getattr(scheduler, "last_epoch", 0))


def _is_called_by_scaler() -> bool:
    """Return whether ``GradScaler.step`` of an enabled scaler is on the call stack."""
    frame = inspect.currentframe()
    code = inspect.unwrap(torch.amp.GradScaler.step).__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())
