"""The supervisor over an engine that plays its ranks in this process, step by step of a script."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.errors import DiskError, PeerError, UsageError
from tutti.launcher.engine import EndedRank, EngineGone, SlotsGone
from tutti.launcher.failure import record_failure
from tutti.launcher.supervisor import EngineAttempt, EngineJob, supervise

Attempt = Callable[["FakeEngine"], object]


class FakeEngine:
    """Ranks that run until the attempt's function, called at every poll, ends them; signals are noted."""

    def __init__(self, slots: int, *attempts: Attempt) -> None:
        self.there, self.attempts = slots, list(attempts)
        self.sizes: list[int] = []
        self.told: list[int] = []
        self.environments: list[Mapping[str, str]] = []
        self.ends: list[EndedRank | None] = []
        self.polls = 0

    def slots(self) -> Mapping[str, int]:
        if self.there < 0:
            raise EngineGone("the head does not answer")
        return {"a": self.there - self.ends.count(None)}

    def start(self, size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        if size > self.there:
            raise SlotsGone
        self.sizes.append(size)
        self.environments.append(environment)
        self.ends, self.polls = [None] * size, 0

    def poll(self) -> Sequence[EndedRank | None]:
        self.polls += 1
        self.attempts[len(self.sizes) - 1](self)
        return list(self.ends)

    def stop(self, number: int) -> None:
        running = [rank for rank, end in enumerate(self.ends) if end is None]
        if running:
            self.told.append(number)
        code = {signal.SIGTERM: 75, signal.SIGKILL: -9}.get(signal.Signals(number))
        for rank in running:
            if code is not None:
                self.end(rank, code)

    def end(self, rank: int, code: int, lost: str = "", why: str = "") -> None:
        self.ends[rank] = EndedRank(code, "a", lost, why)


def done(engine: FakeEngine) -> None:
    for rank in range(len(engine.ends)):
        engine.end(rank, 0)


def lose_one(engine: FakeEngine) -> None:
    if engine.ends[1] is None:
        engine.there -= 1
        engine.end(1, -9, "was lost with its node b")


def fail(engine: FakeEngine) -> None:
    engine.end(0, 7)
    engine.end(1, 5)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.launcher.supervisor._SETTLE", 0.0)
    monkeypatch.setattr("tutti.launcher.supervisor._POLL", 0.001)


def job(tmp_path: Path, *sizes: int, **settings: object) -> EngineJob:
    return EngineJob([], sizes, tmp_path, **settings)  # type: ignore[arg-type]


def test_a_run_that_ends_well(tmp_path: Path) -> None:
    engine = FakeEngine(4, done)
    assert supervise(engine, job(tmp_path, 2, environment={"x": "1"})) == 0
    assert engine.sizes == [2] and engine.told == []
    assert engine.environments == [{"x": "1", "TORCHELASTIC_RESTART_COUNT": "0"}]


def test_a_file_in_place_of_the_folder_of_logs_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    engine = FakeEngine(2, done)
    with pytest.raises(DiskError, match=r"cannot write logs .*logs.: File exists"):
        supervise(engine, replace(job(tmp_path, 2), logs=tmp_path / "logs"))
    assert not engine.sizes


def test_the_first_cause_gives_the_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank1.log").write_text("of an earlier run")
    assert supervise(FakeEngine(2, fail), job(tmp_path, 2)) == 7
    assert "rank 0 on a ended with exit code 7" in capfd.readouterr().err
    assert not (tmp_path / "rank1.log").exists()


def test_ranks_of_one_node_among_several_are_counted_in_the_whole_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def second_fails(engine: FakeEngine) -> None:
        (tmp_path / "rank5.log").write_text("of rank 5")
        engine.end(1, 7)

    assert supervise(FakeEngine(2, second_fails), job(tmp_path, 2, first_rank=4)) == 7
    shown = capfd.readouterr().err
    assert "tutti: rank 5 on a ended with exit code 7\n" in shown and "of rank 5" in shown


def test_a_usage_error_that_the_first_rank_has_printed_is_not_printed_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(engine: FakeEngine) -> None:
        for rank in (1, 0):
            record_failure([tmp_path], rank, UsageError("3 workers", remedy="take 2"))
            engine.end(rank, 2)

    def refuse_on_one_rank(engine: FakeEngine) -> None:
        record_failure([tmp_path], 1, UsageError("3 workers", remedy="take 2"))
        engine.end(1, 2)

    assert supervise(FakeEngine(2, refuse), job(tmp_path, 2)) == 2
    assert capfd.readouterr().err == ""
    assert supervise(FakeEngine(2, refuse_on_one_rank), job(tmp_path, 2)) == 2
    assert capfd.readouterr().err == "tutti: 3 workers. Take 2.\n"


def test_restarts_are_counted_without_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(2, fail, fail, done)
    assert supervise(engine, job(tmp_path, 2, restarts=1)) == 7
    assert engine.sizes == [2, 2] and "--max-restarts is 1" in capfd.readouterr().err
    engine = FakeEngine(2, fail, fail, done)
    assert supervise(engine, job(tmp_path, 2, restarts=1, progress=lambda: len(engine.sizes))) == 0
    assert [each["TORCHELASTIC_RESTART_COUNT"] for each in engine.environments] == ["0", "1", "2"]


def test_the_words_of_the_engine_tell_how_a_rank_was_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(2, lambda engine: engine.end(1, -9, why="was killed by Ray"), done)
    assert supervise(engine, job(tmp_path, 2, restarts=1)) == 0
    assert "rank 1 on a was killed by Ray\n" in capfd.readouterr().err


def test_ranks_that_never_start_end_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(size: int, words: Sequence[str], environment: Mapping[str, str]) -> None:
        raise SlotsGone("the actor on a was killed")

    monkeypatch.setattr("tutti.launcher.supervisor._LOOK", 0.0)
    engine = FakeEngine(2)
    monkeypatch.setattr(engine, "start", start)
    with pytest.raises(PeerError, match="could not be started 6 times in a row: the actor on a was killed"):
        supervise(engine, job(tmp_path, 2, wait=0))


def test_what_would_fail_again_is_not_restarted(tmp_path: Path) -> None:
    engine = FakeEngine(2, lambda engine: engine.end(0, 2))
    assert supervise(engine, job(tmp_path, 2, restarts=3)) == 2
    assert engine.sizes == [2] and engine.told == [signal.SIGTERM]


def test_too_few_slots(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the run needs 1 slot, and there are none free on a"):
        supervise(FakeEngine(0), job(tmp_path, 1))
    with pytest.raises(UsageError, match="the run needs 4 slots, and there are 3: 3 on a"):
        supervise(FakeEngine(3), job(tmp_path, 4))


def test_a_lost_slot_shrinks_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(5, lose_one, done)
    assert supervise(engine, job(tmp_path, 1, 2, 4, restarts=1, wait=0)) == 0
    assert engine.sizes == [4, 4], "five slots, of which one was lost"
    engine = FakeEngine(4, lose_one, done)
    assert supervise(engine, job(tmp_path, 1, 2, 4, restarts=1, wait=0)) == 0
    assert engine.sizes == [4, 2]
    shown = capfd.readouterr().err
    assert "rank 1 was lost with its node b" in shown and "2 devices instead of 4" in shown


def kill_one(engine: FakeEngine) -> None:
    engine.end(1, -9)


def test_a_rank_that_is_killed_twice_without_progress_costs_a_slot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(3, kill_one, kill_one, done)
    assert supervise(engine, job(tmp_path, 2, 3, restarts=3, wait=0)) == 0
    assert engine.sizes == [3, 3, 2]
    assert "ranks on a were killed 2 times without progress: one slot is left empty" in capfd.readouterr().err
    engine = FakeEngine(3, kill_one, kill_one, done)
    assert supervise(engine, job(tmp_path, 2, 3, restarts=3, wait=0, progress=lambda: len(engine.sizes))) == 0
    assert engine.sizes == [3, 3, 3]


def test_a_rank_that_had_to_be_killed_here_is_no_cause(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 fails; rank 1 ignores SIGTERM until it is killed after the grace period."""

    class Stubborn(FakeEngine):
        def stop(self, number: int) -> None:
            if number == signal.SIGKILL:
                super().stop(number)

    engine = Stubborn(2, lambda engine: engine.end(0, 7))
    assert supervise(engine, job(tmp_path, 2, grace=0.05)) == 7
    assert "rank 0 on a ended with exit code 7" in capfd.readouterr().err


def test_a_rank_that_saved_when_asked_is_no_cause(tmp_path: Path) -> None:
    """Rank 1 fails in the save before the run grows: the run must be restarted, not ended as preempted."""

    def fail_while_saving(engine: FakeEngine) -> None:
        engine.end(0, 75)
        engine.end(1, 5)

    engine = FakeEngine(2, fail_while_saving, done)
    assert supervise(engine, job(tmp_path, 2, restarts=1)) == 0
    assert engine.sizes == [2, 2]


def test_the_devices_over_time(tmp_path: Path) -> None:
    seen: list[EngineAttempt] = []
    engine = FakeEngine(4, lose_one, done)
    progress = lambda: 10 * len(engine.sizes)  # noqa: E731
    assert supervise(engine, job(tmp_path, 1, 2, 4, restarts=1, wait=0, progress=progress, attempted=seen.append)) == 0
    assert [(each.devices, each.first_step, each.nodes) for each in seen] == [(4, 0, {"a": 4}), (2, 10, {"a": 2})]
    assert [each.ending for each in seen] == ["rank 1 was lost with its node b", "done"]


def test_slots_that_are_counted_and_never_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends to be resumed, and does not try for ever."""
    monkeypatch.setattr("tutti.launcher.supervisor._LOOK", 0.0)
    engine = FakeEngine(1)
    engine.slots = lambda: {"a": 2}  # type: ignore[method-assign]
    assert supervise(engine, job(tmp_path, 2, wait=0)) == 75
    assert engine.sizes == []


def test_a_slot_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine(2, lose_one, done)
    slots, asked = engine.slots, [0]

    def later() -> Mapping[str, int]:
        asked[0] += 1
        engine.there += asked[0] == 3
        return slots()

    engine.slots = later  # type: ignore[method-assign]
    assert supervise(engine, job(tmp_path, 1, 2, restarts=1, wait=60)) == 0
    assert engine.sizes == [2, 2]


def test_fewer_slots_than_the_least_end_the_run_to_be_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(2, lose_one)
    assert supervise(engine, job(tmp_path, 2, restarts=1, wait=0, progress=lambda: 30)) == 75
    shown = capfd.readouterr().err
    assert "the run needs 2 devices, and there are 1: 1 on a. The run is saved at step 30" in shown


def test_slots_that_vanish_before_the_start(tmp_path: Path) -> None:
    engine = FakeEngine(3, done)
    counts = iter([{"a": 3}])
    engine.there, slots = 2, engine.slots
    engine.slots = lambda: next(counts, None) or slots()  # type: ignore[method-assign]
    assert supervise(engine, job(tmp_path, 2, 3, wait=0)) == 0
    assert engine.sizes == [2]


def test_more_slots_grow_the_run_once_it_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.launcher.supervisor._LOOK", 0.0)

    def more(engine: FakeEngine) -> None:
        engine.there = 4 if engine.polls > 2 else 2

    saved = [0]
    engine = FakeEngine(2, more, done)

    def progress() -> int:
        saved[0] += engine.polls > 4
        return saved[0]

    assert supervise(engine, job(tmp_path, 2, 4, progress=progress)) == 0
    assert engine.sizes == [2, 4] and engine.told == [signal.SIGTERM]


def test_a_run_grows_without_a_restart_of_its_budget_and_not_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.launcher.supervisor._LOOK", 0.0)

    def wait(engine: FakeEngine) -> None:
        engine.there = 4
        if engine.polls > 5:
            done(engine)

    engine = FakeEngine(2, wait)
    assert supervise(engine, job(tmp_path, 2, 4, progress=lambda: 0)) == 0
    assert engine.sizes == [2] and engine.told == []


def test_a_signal_is_passed_on_once(tmp_path: Path) -> None:
    def signalled(engine: FakeEngine) -> None:
        if engine.polls == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    engine = FakeEngine(2, signalled)
    assert supervise(engine, job(tmp_path, 2, restarts=3)) == 75
    assert engine.told == [signal.SIGTERM] and engine.sizes == [2]


def test_a_second_signal_kills(tmp_path: Path) -> None:
    def signalled(engine: FakeEngine) -> None:
        if engine.polls < 3:
            os.kill(os.getpid(), signal.SIGINT)

    engine = FakeEngine(2, signalled)
    with pytest.raises(SystemExit) as stopped:
        supervise(engine, job(tmp_path, 2))
    assert stopped.value.code == 130 and engine.told == [signal.SIGINT, signal.SIGKILL]


def test_an_engine_that_is_gone(tmp_path: Path) -> None:
    def lose_head(engine: FakeEngine) -> None:
        engine.there = -1
        raise EngineGone("the head does not answer")

    with pytest.raises(PeerError, match="the head does not answer"):
        supervise(FakeEngine(2, lose_head), job(tmp_path, 2, restarts=3))
