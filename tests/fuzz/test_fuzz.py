"""Every drawn script equals plain PyTorch, or tutti refuses it before the first wrong update. No third state."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

from tests import worlds
from tests.fuzz.fuzz_draws import scripts
from tests.fuzz.fuzz_play import play_reference, play_tutti
from tests.fuzz.fuzz_script import Edit, Loop, Place, Script
from tests.scripts import harness
from tests.scripts.harness import Verdict

MOST_REFUSED = 0.4
"""Share of the draws."""
_HANGS_AFTER = 60.0
# What drawn scripts have found, as they were printed.
_TWO = Place("mirrored", 2, 2, 2)
KNOWN = {
    "clipped before the exchange": Script(place=_TWO, layers=("Linear",), loop=Loop("plain", ("clip_value",))),
    "assigned, reduced and clipped": Script(place=_TWO, layers=("Linear",), loop=Loop("assigned", ("clip_value",))),
    "assigned, reduced and clipped in shards": Script(
        place=Place("sharded", 2, 2, 2), layers=("Linear",), loop=Loop("assigned", ("clip_value",))
    ),
    "never cleared on servers": Script(
        place=Place("parameter_server"), layers=("Linear",), samples=9, loop=Loop(zero="never")
    ),
    "never cleared on two servers": Script(
        place=Place("parameter_server", 2, 2, 2), layers=("Linear",), samples=9, loop=Loop(zero="never")
    ),
    "never cleared on servers, two bodies a batch": Script(
        place=Place("parameter_server", 1, 2, 1), layers=("Linear",), samples=9, loop=Loop(zero="never")
    ),
    "a rate set between backward and step, where ranks have one body and two": Script(
        place=Place("mirrored", 2, 3, 2), layers=("Linear",), samples=9, edits=(Edit("between"),)
    ),
    "hooked in the first of several bodies": Script(
        layers=("Linear",), samples=9, micro=2, loop=Loop(backward="two"), edits=(Edit(where="between", kind="hook"),)
    ),
    "two counts in one exchange": Script(
        place=_TWO, layers=("Linear",), loss="weighted", samples=10, batch=5, loop=Loop("plain_then_run")
    ),
    "frozen in the body": Script(
        place=Place("mirrored", workers=3),
        layers=("Linear",),
        loop=Loop(),
        edits=(Edit(where="between", kind="freeze"),),
    ),
    **{
        f"frozen after zeros under {place.strategy}": Script(
            place=place,
            layers=("Linear",),
            optimizer="momentum",
            samples=9,
            loop=Loop(backward="two", how="keep"),
            edits=(Edit(where="between", kind="freeze"),),
        )
        for place in (
            *(Place(f"sharded:stage={stage}", 2, 2, 2) for stage in (1, 2, 3)),
            Place("tensor", 2),
            Place("hybrid:shards=2,stage=3,tensor=2", 4, 2, 2),
        )
    },
    **{
        f"scaled by a rank's own number under {place.strategy}": Script(
            place=place, layers=("Linear",), samples=9, loop=Loop(middle=("scale_by_own",))
        )
        for place in (_TWO, Place("sharded", 2, 2, 2), Place("tensor:least=1", 2))
    },
    "written by every rank to one copy": Script(
        place=Place("central_storage", 2, 2, 2), layers=("Linear",), samples=9, loop=Loop(after="shrink")
    ),
    "clipped and kept outside of the optimizer in one copy": Script(
        place=Place("central_storage", 2, 3, 2), layers=("Linear",), outside=(0,), loop=Loop("two", ("clip_norm",))
    ),
    "hooked before the first forward": Script(
        place=Place("sharded", 2, 2, 2), layers=("Linear",), samples=9, loop=Loop(), edits=(Edit(kind="hook"),)
    ),
    "an unused layer that decays": Script(
        place=Place("sharded", 2, 2, 2), layers=("Linear",), unused=True, optimizer="adamw", loop=Loop()
    ),
    "a server without a gradient": Script(
        place=Place("parameter_server:servers=2", 2, 2, 2), layers=("Linear",), frozen=(0,), clip=0.01
    ),
    "a hook after prepare": Script(
        place=Place("sharded", 2, 2, 2), layers=("Linear",), edits=(Edit(kind="hook", where="end"),)
    ),
    "an unused layer under stages": Script(
        place=Place("model_parallel", 2), layers=("Linear", "Tanh", "Linear"), unused=True
    ),
    "a hook on one stage and a loss that counts something else": Script(
        place=Place("pipeline", 2),
        layers=("Linear", "Linear", "Tanh"),
        loss="weighted",
        samples=9,
        edits=(Edit(where="end", kind="hook"),),
    ),
    "a group that is added and a layer that is frozen under stages": Script(
        place=Place("pipeline", 2, 3),
        layers=("Linear", "Linear", "Tanh"),
        width=6,
        outside=(0,),
        loss="weighted",
        samples=11,
        batch=8,
        edits=(Edit(step=4, kind="freeze"), Edit(step=3, kind="add_group")),
    ),
}


def check(script: Script) -> Verdict:
    """Play a script in the pool. What hangs or kills a rank is wrong."""
    [want] = worlds.run(1, play_reference, script=script)
    if isinstance(want, str):
        return Verdict("meaningless", want)
    devices = script.place.devices
    try:
        outcomes = worlds.run(devices, play_tutti, script=script, limit=_HANGS_AFTER)
    except (worlds.RankError, TimeoutError, EOFError, BrokenPipeError, OSError) as error:
        return Verdict("wrong", f"the world broke: {error}")
    verdict = harness.judge(outcomes, want, script.place.data_ranks)
    if verdict.kind != "equal" and devices > 1:
        # Ranks that left in the middle of a step may have messages under way.
        worlds.forget(devices)
    return verdict


def fuzz(draws: int, number: int | None) -> Counter[str]:
    """Check so many scripts; how many came to which end. ``number``: the seed; None for always the same scripts."""
    ends: Counter[str] = Counter()
    last: list[Place] = []

    @settings(
        # After each draw come variants of it, which are passed over.
        max_examples=8 * draws,
        derandomize=number is None,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts())
    def each(script: Script) -> None:
        if not ends["wrong"] and (last == [script.place] or ends.total() >= draws):
            return
        last[:] = [script.place]
        verdict = check(script)
        ends[verdict.kind] += 1
        if verdict.kind == "meaningless":
            reject()
        assert verdict.kind != "wrong", f"{script!r}\n{verdict.text}"

    (each if number is None else seed(number)(each))()
    return ends


def judge(ends: Counter[str]) -> None:
    """Fail where refusing is a way out, or plain PyTorch refuses what is drawn."""
    share = ends["refused"] / max(1, ends["refused"] + ends["equal"])
    print(f"{ends['equal']} equal, {ends['refused']} refused ({share:.0%}), {ends['meaningless']} meaningless")
    assert share <= MOST_REFUSED
    assert ends["meaningless"] <= 0.1 * ends.total()


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_found_stays_mended(name: str) -> None:
    verdict = check(KNOWN[name])
    assert verdict.kind in ("equal", "refused"), verdict.text


def test_drawn_scripts() -> None:
    judge(fuzz(30, None))


@pytest.mark.fuzz
@pytest.mark.timeout(0)
def test_many_drawn_scripts() -> None:
    number = int(os.environ.get("FUZZ_SEED", "0"))
    print(f"FUZZ_SEED={number}")
    judge(fuzz(int(os.environ.get("FUZZ_DRAWS", "500")), number))
