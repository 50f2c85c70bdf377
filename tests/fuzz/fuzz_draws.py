"""Draws scripts with Hypothesis. What is simple comes first, so that a failure shrinks towards it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz.fuzz_script import OPTIMIZERS, Edit, Loop, Place, Script, masked_somewhere

_DATA = {1: (1, 3), 2: (2, 3, 5), 3: (3, 4)}
_MODEL = {2: (1, 3), 3: (1, 2)}
PLACES = [
    *(Place("single", 1, workers) for workers in (1, 3)),
    *(
        Place(name, devices, workers, devices, reproducible)
        for name, reproducible, least in (
            ("mirrored", False, 1),
            ("mirrored", True, 1),
            ("mirrored:algorithm=native", False, 2),
            ("central_storage", False, 1),
            ("sharded:stage=1", False, 1),
            ("sharded:stage=2", False, 2),
            ("sharded", False, 1),
            ("parameter_server", False, 1),
            ("parameter_server:servers=2", False, 2),
            ("local_sgd:period=2", False, 1),
            ("diloco:period=2", False, 1),
        )
        for devices, numbers in _DATA.items()
        for workers in numbers
        if devices >= least
    ),
    Place("sharded:shards=2", 2, 3, 2),
    Place("sharded:stage=2,shards=1", 2, 2, 2),
    Place("sharded:shards=2", 4, 4, 4),
    *(
        Place(name, devices, workers)
        for name in ("tensor:least=1", "pipeline", "model_parallel")
        for devices, numbers in _MODEL.items()
        for workers in numbers
    ),
    Place("hybrid:tensor=2,least=1", 2, 1),
    Place("hybrid:tensor=2,least=1", 4, 2, 2),
    Place("hybrid:stages=2", 2, 1),
    Place("hybrid:stages=2", 4, 3, 2),
]
_KINDS = ["Linear", "Tanh", "ReLU", "LayerNorm", "BatchNorm1d", "Dropout"]
_BACKWARD = [
    *("run",) * 4,
    *("two", "plain", "plain_then_run", "cleared_then_run", "run_cleared_run", "assigned", "adversarial", "penalty"),
    "run_then_plain",
]
_MIDDLE = [
    *("clip_norm", "clip_value", "decay", "decay_anew", "halve", "drop"),
    *("halve_through_data", "zero_one", "drop_head", "delete_one", "scale_by_own"),
]


def _mostly(draw: st.DrawFn, usual: object, *rare: object, of: int = 5) -> object:
    """``usual``, and once in ``of`` times one of the others."""
    return draw(st.sampled_from(rare)) if draw(st.integers(0, of - 1)) == of - 1 else usual


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """A loop of the script's own."""
    loop = Loop(
        backward=draw(st.sampled_from(_BACKWARD)),
        middle=tuple(draw(st.lists(st.sampled_from(_MIDDLE), max_size=2))),
        zero=draw(st.sampled_from(["before", "after"])),
        how=draw(st.sampled_from(["optimizer", "keep", "model"])),
        skip=_mostly(draw, 0, 3, of=8),  # type: ignore[arg-type]
        after=_mostly(draw, "nothing", "shrink", "shrink_through_data", of=8),  # type: ignore[arg-type]
        unstepped=_mostly(draw, 0, 2, 3, of=6),  # type: ignore[arg-type]
    )
    if loop.backward == "run" and not loop.skip:
        every = _mostly(draw, 1, 2, 3, of=4)
        never = _mostly(draw, loop.zero, "never", of=8)
        return replace(loop, every=every, zero=never)  # type: ignore[arg-type]
    return loop


@st.composite
def layer_lists(draw: st.DrawFn) -> tuple[str, ...]:
    """Kinds of layers. What a batch norm makes of a shift in front of it is rounding alone: there is none there."""
    layers: list[str] = []
    if _mostly(draw, False, True, of=6):
        layers.append("Embedding")
    for kind in ("Linear", *draw(st.lists(st.sampled_from(_KINDS), max_size=6))):
        if kind == "BatchNorm1d" and layers[-1] not in ("Tanh", "ReLU", "Dropout"):
            layers.append("Tanh")
        layers.append(kind)
    return tuple(layers)


@st.composite
def scripts(draw: st.DrawFn, places: st.SearchStrategy[Place] | None = None) -> Script:
    """A script that plain PyTorch can run."""
    place = draw(st.sampled_from(PLACES) if places is None else places)
    layers = draw(layer_lists())
    everything = range(len(layers))
    # The first one takes another number of features.
    linear = [n for n in everything if layers[n] == "Linear"][1:]
    loop = draw(st.one_of(st.none(), loops())) if place.custom_loop else None
    samples = draw(st.integers(9, 20))
    batch = draw(st.integers(max(4, place.workers), 9))
    if place.strategy.startswith(("local", "diloco")):
        # A worker without a sample makes no update: each batch has one for every worker.
        samples -= samples % batch
        samples = samples or batch
    optimizer = draw(st.sampled_from([name for name in OPTIMIZERS if name != "lbfgs"]))
    if optimizer in ("muon", "muon_adamw"):
        layers = tuple("Tanh" if kind in ("LayerNorm", "BatchNorm1d", "Embedding") else kind for kind in layers)
    script = Script(
        place=place,
        layers=layers,
        width=draw(st.sampled_from([4, 6])),
        frozen=tuple(n for n in sorted(draw(st.sets(st.sampled_from(everything), max_size=2)))),
        outside=tuple(sorted(_mostly(draw, set(), *([n] for n in everything)))),  # type: ignore[call-overload]
        tied=tuple(linear[-2:]) if len(linear) > 1 and draw(st.booleans()) else None,  # type: ignore[arg-type]
        unused=bool(_mostly(draw, False, True)),
        optimizer=optimizer,
        groups=draw(st.booleans()),
        loss=draw(st.sampled_from(["mean", "weighted", "masked", "each"])),
        samples=samples,
        batch=batch,
        micro=_mostly(draw, None, 2, 3),  # type: ignore[arg-type]
        clip=_mostly(draw, None, 0.1) if loop is None else None,  # type: ignore[arg-type]
        loop=loop,
        edits=tuple(draw(edits(len(layers), loop is not None))),
    )
    if optimizer not in ("muon", "muon_adamw") and loop is not None and _mostly(draw, False, True, of=20):
        closure = Loop(backward="closure", skip=loop.skip, after=loop.after)
        script = replace(script, optimizer="lbfgs", groups=False, loop=closure, loss="mean")
    return sensible(script)


@st.composite
def edits(draw: st.DrawFn, layers: int, custom_loop: bool) -> list[Edit]:
    """Changes at some steps, mostly few."""
    places = ["begin", "between", "end"] if custom_loop else ["begin", "end"]
    one = st.builds(
        Edit,
        step=st.integers(0, 4),
        where=st.sampled_from(places),
        kind=st.sampled_from(["rate", "thaw", "freeze", "add_group", "hook"]),
        layer=st.integers(0, layers - 1),
    )
    return draw(st.lists(one, max_size=2, unique=True))


def sensible(script: Script) -> Script:
    """The nearest script that means something in plain PyTorch, and whose result no rounding decides."""
    if script.layers[0] == "Embedding" and script.loop and script.loop.backward in ("adversarial", "penalty"):
        script = replace(script, loop=replace(script.loop, backward="run"))
    # Two samples are normalized to -1 and 1 whatever they are, and so is what two norms in a row are given.
    if script.layers.count("BatchNorm1d") > 1 or (script.statistics and min(script.shares()) < 3):
        script = replace(script, layers=tuple("LayerNorm" if k == "BatchNorm1d" else k for k in script.layers))
    if not script.plain_is_enough and script.loop is not None:
        # N workers by hand have one micro-batch each in a loop of their own.
        script = replace(script, micro=None)
    if script.optimizer == "lbfgs":
        # LBFGS has one group, of parameters that all have gradients.
        kept = tuple(edit for edit in script.edits if edit.kind in ("rate", "hook"))
        script = replace(script, edits=kept, outside=(), frozen=(), unused=False)
    if script.optimizer == "muon":
        script = replace(script, unused=False)
    if script.place.stages:
        # As many layers with parameters as there may be stages.
        script = replace(script, layers=(*script.layers, *("Linear", "Tanh") * (script.place.devices - 1)))
    if script.loop is not None and script.loop.backward == "run_then_plain":
        # An edit that makes new tensors of such gradients cannot be told from gradients that were assigned.
        middle = tuple(name for name in script.loop.middle if name != "decay_anew")
        script = replace(script, loop=replace(script.loop, middle=middle))
    if script.loss == "masked" and masked_somewhere(script):
        script = replace(script, loss="weighted")
    return script
