"""Callbacks are called at their events on their ranks, stop all ranks together, and leave the weights as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.errors import CheckpointError, UsageError
from tutti.train.callbacks import Callbacks

INPUTS = torch.arange(48.0, dtype=torch.float64).view(24, 2) / 48
TARGETS = INPUTS.sum(dim=1, keepdim=True)


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def prepared(callbacks: Any, strategy: str = "mirrored", **options: Any) -> tutti.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
    options = {"workers": 6, "batch_size": 6, "seed": 1, **options}
    options |= {"workers": 1} if strategy == "pipeline" else {}
    return tutti.prepare(
        model, "sgd:lr=0.1", (INPUTS, TARGETS), loss, strategy=strategy, callbacks=callbacks, **options
    )


class Recording:
    """Notes its events, and draws random numbers at each."""

    def __init__(self, ranks: str) -> None:
        self.ranks, self.events = ranks, []  # type: ignore[var-annotated]

    def note(self, *event: Any) -> None:
        torch.rand(3)
        self.events.append(event)

    def on_train_begin(self, run: Any) -> None:
        self.note("begin", run.global_step)

    def on_epoch_begin(self, run: Any, epoch: int) -> None:
        self.note("epoch", epoch)

    def on_step_end(self, run: Any) -> None:
        self.note("step", run.global_step, run.stats.loss > 0)

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        self.note("evaluation", run.global_step, evaluation.samples)

    def on_checkpoint(self, run: Any, path: Any) -> None:
        self.note("checkpoint", path.name)

    def on_epoch_end(self, run: Any, epoch: int) -> None:
        self.note("over", epoch)

    def on_train_end(self, run: Any) -> None:
        self.note("end", run.global_step)


def trained(strategy: str, attached: bool) -> tuple[dict[str, Any], list[Any], list[Any]]:
    first, everywhere = Recording("first"), Recording("all")
    run = prepared([first, everywhere] if attached else [], strategy)
    for epoch in run.epochs(2):
        for batch in run.epoch(epoch):
            run.step(batch)
        run.evaluate((INPUTS, TARGETS))
    return {name: t.tolist() for name, t in run.state().items()}, first.events, everywhere.events


EVENTS = [
    *[("begin", 0), ("epoch", 0), *[("step", n, True) for n in (1, 2, 3, 4)], ("over", 0), ("evaluation", 4, 24)],
    *[("epoch", 1), *[("step", n, True) for n in (5, 6, 7, 8)], ("over", 1), ("evaluation", 8, 24), ("end", 8)],
]


@pytest.mark.parametrize(
    ("size", "strategy"), [(1, "mirrored"), (2, "mirrored"), (3, "mirrored"), (2, "sharded"), (2, "pipeline")]
)
def test_the_weights_are_those_without_callbacks(size: int, strategy: str) -> None:
    with_them = worlds.run(size, trained, strategy=strategy, attached=True)
    without = worlds.run(size, trained, strategy=strategy, attached=False)
    assert [weights for weights, _, _ in with_them] == [weights for weights, _, _ in without]
    assert [first for _, first, _ in with_them] == [EVENTS] + [[]] * (size - 1)
    assert [everywhere for _, _, everywhere in with_them] == [EVENTS] * size


def stopped_by(kind: str) -> tuple[int, str | None, list[int]]:
    def returning(run: Any) -> bool:
        return bool(run.global_step == 3)

    class Last:
        ranks = "all"

        def on_step_end(self, run: Any) -> None:
            if tutti.rank() == tutti.size() - 1 and run.global_step == 3:
                run.stop("the last rank")

    run = prepared([returning if kind == "returned" else Last()])
    seen = []
    for epoch in range(3):
        seen.append(epoch)
        for inputs, targets in run.microbatches(epoch) if kind == "custom" else ():
            run.backward(nn.functional.mse_loss(run.model(inputs), targets))
            run.gated_step()
        for batch in run.epoch(epoch) if kind != "custom" else ():
            run.step(batch)
        if run.stopped:
            break
    return run.global_step, run.stopped, seen


@pytest.mark.parametrize("kind", ["returned", "last rank", "custom"])
def test_a_callback_of_any_rank_stops_all_ranks(kind: str) -> None:
    reason = "stopped_by.<locals>.returning asked for it" if kind == "returned" else "the last rank"
    assert worlds.run(2, stopped_by, kind=kind) == [(3, reason, [0])] * 2


def stopped_early(folder: str) -> tuple[Any, ...]:
    early = tutti.EarlyStopping("distance", patience=2, mode="min")
    best = tutti.BestModel(f"{folder}/best", "distance", mode="min")
    run = prepared([best, early])
    # Three evaluations: the second is better, then none.
    values = iter((3.0, 2.0, 2.5, 2.0, 1.0))
    for epoch in run.epochs(5):
        for batch in run.epoch(epoch):
            run.step(batch)
        value = next(values)
        run.evaluate((INPUTS, TARGETS), loss=lambda model, batch, v=value: (loss(model, batch), 1, {"distance": v}))
    run.save(f"{folder}/all")
    again = (
        tutti.EarlyStopping("distance", patience=9, mode="min"),
        tutti.BestModel(f"{folder}/best", "distance", "min"),
    )
    other = prepared(again[::-1])
    other.restore(f"{folder}/all")
    kept = sorted(path.name for path in (Path(folder) / "best").glob("step-*"))
    return run.global_step, run.stopped, kept, again[0].values.best, again[0].values.stale, again[1].values.best


def test_early_stopping_and_best_model(tmp_path: Path) -> None:
    expected = (16, "no better distance in 2 evaluations", ["step-8"], 2.0, 2, 2.0)
    found = worlds.run(2, stopped_early, folder=str(tmp_path))
    assert [(c, s, [k.replace("0", "") for k in kept], *rest) for c, s, kept, *rest in found] == [expected] * 2


def test_an_exception_names_the_callback() -> None:
    class Failing:
        def on_step_end(self, run: Any) -> None:
            raise ValueError("no")

    run = prepared([Failing()])
    with pytest.raises(ValueError, match="no") as caught:
        for batch in run.epoch(0):
            run.step(batch)
    assert any("Failing, on_step_end, after step 1" in note for note in caught.value.__notes__)


def test_another_run_s_state_is_refused(tmp_path: Path) -> None:
    prepared([tutti.EarlyStopping()]).save(tmp_path)
    with pytest.raises(CheckpointError, match="EarlyStopping on all, and the run none"):
        prepared([]).restore(tmp_path)


class Misspelt:
    def on_step_ends(self, run: Any) -> None: ...


class Unsaved:
    def on_step_end(self, run: Any) -> None: ...

    def state_dict(self) -> Any:
        return {"tensor": torch.zeros(1)}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (Misspelt(), "on_step_end"),
        (tutti.EarlyStopping, "is a class"),
        (3, "cannot be called"),
        (Unsaved(), "cannot be saved"),
    ],
)
def test_other_objects_are_refused(callback: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Callbacks([callback])


def test_misuse_is_refused() -> None:
    with pytest.raises(UsageError, match="outside of a callback"):
        prepared([]).stop("now")
    with pytest.raises(UsageError, match="patience is 0"):
        tutti.EarlyStopping(patience=0)
    with pytest.raises(UsageError, match="no 'accuracy'"):
        prepared([tutti.EarlyStopping("accuracy")]).evaluate((INPUTS, TARGETS))


def left(ranks: str) -> Any:
    """Leave both loops in their third step, step on a batch of the script's own, and save nothing."""
    recording = Recording(ranks)
    run = prepared([recording], workers=2)
    for epoch in run.epochs(3):
        for batch in run.epoch(epoch):
            run.step(batch)
            if run.global_step == 3:
                break
        break
    seen, events = run.samples, list(recording.events)
    own = 10
    run.step((INPUTS[:own], TARGETS[:own]))
    return seen, run.samples, events, recording.events[len(events) :]


def test_a_break_leaves_no_event_out_and_no_batch_behind() -> None:
    begun = [("begin", 0), ("epoch", 0), ("step", 1, True), ("step", 2, True)]
    # Each rank brings ten samples.
    assert worlds.run(2, left, ranks="all") == [(18, 38, begun, [("step", 3, True), ("end", 3)])] * 2


def test_a_run_without_callbacks_remains_stopped() -> None:
    callbacks = Callbacks()
    callbacks.load_run({"stopped": "no better loss in 3 evaluations"})
    assert callbacks.ended() and callbacks.reason == "no better loss in 3 evaluations"
    callbacks.load_run({"stopped": None})
    assert not callbacks.ended()
