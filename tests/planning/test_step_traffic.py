"""Collectives, shared memory and requests to servers in a step's program, against counts of a real run: equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.planning.test_step_prediction import LINK, line, machine, run
from tutti.errors import UsageError
from tutti.parallel.parameter_server.server_flows import flow_totals
from tutti.planning.cluster_network import Network
from tutti.planning.machine_choice import open_machine
from tutti.planning.measured_costs import MeasuredCosts
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_builders import build_step
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_prediction import TaskSizes
from tutti.planning.step_program import StepProgram, collective_totals, evaluate_program
from tutti.tasks import task_registry

TASK = """
import torch
from torch import nn
from tutti.tasks.task import Task

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 700), nn.Tanh(), nn.Linear(700, 401), nn.Tanh(), nn.Linear(401, 1))
        self.scale = nn.Parameter(torch.ones(()))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(x) * self.scale

def own():
    data = torch.utils.data.TensorDataset(torch.rand(24, 4, generator=torch.Generator().manual_seed(1)))
    return Task(name="own", model=Model, loss=lambda model, batch: model(batch[0]).square().mean(), train=data)
"""
WORDS = """
import torch
from torch import nn
from torch.nn import functional
from tutti.tasks.task import Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, 12))

    def forward(self, x):
        q, k, v = (t.view(t.shape[0], 6, 4, 3).transpose(1, 2) for t in self.qkv(self.norm(x)).split(12, dim=-1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape[0], 6, 12))
        return x + self.mlp(x)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(31, 12), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(12, 31)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def loss(model, batch):
    x, y = batch
    scores = model(x).flatten(0, 1)
    sums = {"hits": (scores.argmax(-1) == y.flatten()).sum(), "tokens": y.numel()}
    return functional.cross_entropy(scores, y.flatten(), reduction="sum"), y.numel(), sums

def own():
    x, y = torch.randint(31, (2, 24, 6), generator=torch.Generator().manual_seed(1))
    return Task(name="own", model=Words, loss=loss, train=torch.utils.data.TensorDataset(x, y))
"""
TIED = """
import torch
from torch import nn
from torch.nn import functional
from tutti.tasks.task import Task

class Block(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.lin, self.gain = nn.Linear(12, 12), gain

    def forward(self, x):
        return torch.tanh(self.lin(x)) * self.gain

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, gain = nn.Embedding(31, 12), nn.Parameter(torch.ones(12))
        self.blocks = nn.ModuleList(Block(gain) for _ in range(3))
        self.head = nn.Linear(12, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def own():
    x, y = torch.randint(31, (2, 24, 6), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, y)
    loss = lambda model, batch: functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    return Task(name="own", model=Tied, loss=loss, train=data)
"""
BATCH = 12


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("tied") / "task.py"
    file.write_text(TIED, encoding="utf-8")
    return f"{file}:own"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("traffic") / "task.py"
    file.write_text(TASK, encoding="utf-8")
    return f"{file}:own"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("words") / "task.py"
    file.write_text(WORDS, encoding="utf-8")
    return f"{file}:own"


def on_cpus(devices: int) -> StepCosts:
    lab = machine()
    curves = {**lab.curves, "optimizer/adam": line(1e9, unit="parameter"), "device/attention/fp32": line(1e9)}
    prices = MeasuredCosts(replace(lab, curves=curves), "fp32", Network(devices))
    prices.overlaps = False
    return prices


def program_of(task: str, config: PlannedRun, prices: StepCosts | None = None) -> StepProgram:
    prices = on_cpus(int(config.devices)) if prices is None else prices
    sizes = TaskSizes(task, config, (config.activation_checkpointing,))
    return build_step(sizes.step(config), config, prices)[0]


def prepared(task: str, strategy: str, optimizer: str, **options: Any) -> Any:
    given = task_registry.load_task(task, data=None, model=None, augment=False)
    return tutti.prepare(
        given.model(), optimizer, given.train, given.loss, strategy=strategy, batch_size=BATCH, **options
    )


def axes_of(comms: Any) -> dict[str, Any]:
    found = {"data": comms.replica, "model": comms.model}
    return found | {name: comms.axis(name) for name in ("shard", "replica", "stage", "tensor")}


def counted(
    task: str,
    strategy: str,
    micro_batch: int | None = None,
    checkpointing: str = "none",
    first: int = 0,
    workers: int | None = None,
) -> Any:
    """Count what two steps send, or the second of them alone."""
    options = {"micro_batch": micro_batch, "activation_checkpointing": checkpointing, "workers": workers}
    run = prepared(task, strategy, "sgd:lr=0.1", **options)
    axes = axes_of(run.context.comms)
    copies = [comm for comm, _ in getattr(run.replica, "stage_copies", ())]

    def counts() -> dict[tuple[str, str], Any]:
        facts = {name: comm.collective_facts() for name, comm in axes.items()}
        kinds = {(name, kind): tuple(each.values()) for name, found in facts.items() for kind, each in found.items()}
        for comm in copies:
            for kind, each in comm.collective_facts().items():
                calls, size = each["calls"], each["bytes"]
                before = kinds.get(("tied", kind), (0, 0))
                kinds["tied", kind] = before[0] + calls, before[1] + size
        return kinds | {("links", str(link)): each for link, each in axes["data"].traffic().items()}

    before = counts()
    for number, batch in enumerate(run.epoch(0)):
        before = counts() if number == first > 0 else before
        run.step(batch)
    found = {}
    for key, (calls, size) in counts().items():
        start = before.get(key, (0, 0))
        if calls > start[0]:
            found[key] = (calls - start[0], size - start[1])
    return found


def predicted(program: StepProgram, steps: int, stage: int = 0) -> dict[tuple[str, str], tuple[int, int]]:
    found = {}
    for axis in {each.axis for each in program.collectives}:
        own = [each for each in program.collectives if each.axis == axis and each.stage == stage]
        found |= {(axis, kind): tuple(each) for kind, each in collective_totals(own, steps).items()}
    return found


def test_tensor_ranks_send_numbers_of_the_precision(words: str) -> None:
    sent = []
    for precision in ("fp32", "fp64"):
        config = run("tensor", 2, batch_size=BATCH, precision=precision)
        messages = TaskSizes(words, config, ("none",)).step(config).messages["none"]
        sent.append([(each.kind, each.bytes.at(8)) for each in messages])
    assert sent[0] and sent[1] == [(kind, 2 * size) for kind, size in sent[0]]


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro_batch"),
    [
        ("sharded:stage=1", 2, None),
        ("sharded:stage=1", 3, 2),
        ("sharded:stage=2", 2, None),
        ("sharded:stage=2,units=layers.0+layers.2", 3, 2),
        ("sharded:stage=3", 3, 2),
        ("sharded:stage=3,units=layers.0+layers.2", 2, 3),
        ("sharded:stage=1,shards=2", 4, None),
        ("sharded:stage=3,shards=2,units=layers.2", 4, 2),
    ],
)
def test_a_sharded_step_makes_the_collectives_that_the_communicator_counts(
    strategy: str, ranks: int, micro_batch: int | None, task: str
) -> None:
    config = run(strategy, ranks, batch_size=BATCH, micro_batch=micro_batch)
    want = predicted(program_of(task, config), 2)
    # Large tensors are all-to-alls on Gloo, and small ones are read in shared memory.
    assert {kind for _, kind in want} >= {"all_to_all", "shared_memory"}
    for place, found in enumerate(worlds.run(ranks, counted, task=task, strategy=strategy, micro_batch=micro_batch)):
        if ("replica", "all_reduce") in want and place % 2:
            # The first of two shards, which the program is of, may have more rows to sum over copies.
            found["replica", "all_reduce"] = want["replica", "all_reduce"]
        assert found == want


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 1), (3, 3)])
def test_a_single_shard_makes_the_collectives_that_the_communicator_counts(stage: int, ranks: int, task: str) -> None:
    """Each rank is a replica of its own, whose gradients are all-reduced."""
    strategy = f"sharded:stage={stage},shards=1"
    want = predicted(program_of(task, run(strategy, ranks, batch_size=BATCH)), 2)
    assert (("replica", "all_reduce") in want) == (ranks > 1) and not any(axis == "shard" for axis, _ in want)
    assert worlds.run(ranks, counted, task=task, strategy=strategy, micro_batch=None) == [want] * ranks


@pytest.mark.parametrize("stage", [1, 3])
def test_accelerators_and_ranks_on_several_nodes_share_no_memory(stage: int, task: str) -> None:
    config = run(f"sharded:stage={stage}", 4, batch_size=BATCH)
    device = {each.kind for each in program_of(task, config, open_machine("a100x8", "bf16", None, None)).collectives}
    assert device == {"reduce_scatter", "all_gather", "all_reduce"}
    prices = on_cpus(4)
    prices.network = Network(2, LINK)
    assert {each.kind for each in program_of(task, config, prices).collectives} == {
        "all_to_all",
        "all_gather",
        "all_reduce",
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_owners_read_the_gradients_that_the_communicator_counts(ranks: int, task: str) -> None:
    program = program_of(task, run("central_storage", ranks, batch_size=BATCH))
    assert bool(program.between_ranks) == (ranks > 1) and not program.collectives
    want = {("links", str(k)): (2 * each.messages, 2 * each.bytes) for k, each in program.between_ranks.items()}
    assert worlds.run(ranks, counted, task=task, strategy="central_storage") == [want] * ranks


def on_accelerators(devices: int) -> StepCosts:
    prices = on_cpus(devices)
    prices.overlaps = True
    return prices


def test_gradients_of_whole_tensors_are_broadcast_where_tensor_ranks_may_round_apart(words: str) -> None:
    """Backwards of one data rank are deterministic on CPUs alone."""
    config = run("tensor:least=0", 2, batch_size=BATCH)
    found = []
    for prices in (on_cpus(2), on_accelerators(2)):
        program = program_of(words, config, prices)
        found.append([each.bytes for each in program.collectives if each.kind == "broadcast"])
    norms = 4 * 3 * 2 * (12 + 12)
    assert found[0] == [] and len(found[1]) == 1 and found[1][0] >= norms
    assert any("broadcast takes as long as" in text for text in prices.guesses)


@pytest.mark.parametrize(("devices", "prices", "due"), [(4, on_cpus, 0), (4, on_accelerators, 1), (12, on_cpus, 1)])
def test_shards_broadcast_their_rows_of_whole_gradients(devices: int, prices: Any, due: int, words: str) -> None:
    """On CPUs only where more than two copies of a shard (HSDP) are summed."""
    rows = program_of(words, run("hybrid:shards=2,tensor=2,least=0", devices, batch_size=BATCH), prices(devices))
    whole = program_of(words, run("tensor:least=0", 2, batch_size=BATCH), on_accelerators(2))
    sizes = [[each.bytes for each in made.collectives if each.kind == "broadcast"] for made in (rows, whole)]
    assert len(sizes[0]) == due and all(0.5 <= each / sizes[1][0] < 0.6 for each in sizes[0])


def test_owners_of_accelerators_read_what_the_communicator_counts(task: str) -> None:
    config = run("central_storage", 2, batch_size=BATCH)
    program = program_of(task, config, on_accelerators(2))
    want = {("links", str(k)): (2 * each.messages, 2 * each.bytes) for k, each in program.between_ranks.items()}
    assert want
    assert worlds.run_on(worlds.ACCELERATOR, 2, counted, task=task, strategy="central_storage") == [want] * 2


@pytest.mark.parametrize("strategy", ["central_storage", "parameter_server", "parameter_server:mode=async,push=2"])
def test_gradients_and_parameters_of_accelerators_cross_to_the_host_and_back(strategy: str, task: str) -> None:
    config, prices = run(strategy, 2, batch_size=BATCH, optimizer="adam:lr=0.1"), on_accelerators(2)
    host, device = program_of(task, config), program_of(task, config, prices)
    assert host.between_ranks == device.between_ranks and host.flows == device.flows
    size = sum(t.bytes for t in TaskSizes(task, config, ()).step(config).tensors)
    periods = (2, 1) if "push" in strategy else (1, 1)
    moved = sum(size / 1.2e10 / period for period in periods)
    crossing = ("gradients to the host", "parameters to the device", "gradients written", "parameters read")
    crossed = [float(a.seconds[0]) for a in device.actions if a.text in crossing]
    # Servers hold flat vectors, whose pieces are padded.
    assert len(crossed) == 2
    assert sum(crossed) == pytest.approx(moved + sum(1e-5 / period for period in periods), rel=1e-3)
    assert any("copies between device and host" in text for text in prices.guesses)
    assert not any("copies between" in text for text in on_cpus(2).guesses)


@pytest.mark.parametrize("ranks", [2])
def test_accelerators_send_the_requests_that_the_client_counts(ranks: int, task: str) -> None:
    strategy = "parameter_server:mode=sync,servers=2,transport=tcp"
    program = program_of(task, run(strategy, ranks, batch_size=BATCH), on_accelerators(ranks))
    want = flow_totals(program.flows, 2, tensors_in_messages=True)
    answers = worlds.run_on(worlds.ACCELERATOR, ranks, requests, task=task, strategy=strategy, optimizer="sgd:lr=0.1")
    assert [found for found, _ in answers] == [want] * ranks


@pytest.mark.parametrize(
    ("strategy", "ranks", "checkpointing"),
    [
        ("tensor", 2, "none"),
        ("tensor:least=0", 3, "none"),
        ("tensor:least=0,sequence=true", 2, "none"),
        ("tensor:least=0,sequence=true", 2, "blocks"),
        ("tensor:least=0,tensor=2", 4, "none"),
        ("tensor:whole=blocks.1", 2, "none"),
        ("hybrid:stages=2,tensor=2,least=0,micro_batches=3,cuts=blocks.2", 4, "none"),
        ("hybrid:stages=2,tensor=2,least=0,micro_batches=2,schedule=zero_bubble,cuts=blocks.2", 4, "none"),
        (
            "hybrid:stages=2,tensor=2,least=0,micro_batches=2,schedule=interleaved,cuts=blocks.0+blocks.1+blocks.2",
            4,
            "none",
        ),
        # Blocks that are computed again are above with split positions, and split stages with three schedules.
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("tensor:least=0", 2, "blocks"),
                ("hybrid:stages=2,tensor=2,least=0,micro_batches=3,schedule=gpipe,cuts=blocks.1", 4, "none"),
                ("hybrid:replicas=2,stages=2,tensor=2,least=0,micro_batches=2,cuts=blocks.1", 8, "none"),
            )
        ),
    ],
)
def test_tensor_ranks_make_the_collectives_that_the_communicator_counts(
    strategy: str, ranks: int, checkpointing: str, words: str
) -> None:
    hybrid = strategy.startswith("hybrid")
    micro_batch = None if hybrid else 4
    config = run(strategy, ranks, batch_size=BATCH, micro_batch=micro_batch, activation_checkpointing=checkpointing)
    program = program_of(words, config)
    # In its first micro-batch zero bubble compares its two halves of a backward with a whole one.
    first = int("zero_bubble" in strategy)
    answers = worlds.run(
        ranks,
        counted,
        task=words,
        strategy=strategy,
        micro_batch=micro_batch,
        checkpointing=checkpointing,
        first=first,
    )
    for place, found in enumerate(answers):
        stage = place // 2 % 2 if hybrid else 0
        assert {key: each for key, each in found.items() if key[0] in ("stage", "tensor", "model")} == predicted(
            program, 2 - first, stage
        )
    assert any(axis == "tensor" for axis, _ in predicted(program, 2))


@pytest.mark.parametrize(
    ("strategy", "ranks", "workers", "kinds"),
    [
        ("pipeline:micro_batches=2,cuts=blocks.2", 2, None, {"all_reduce"}),
        ("pipeline:micro_batches=2,schedule=gpipe,cuts=blocks.1", 2, 2, {"all_reduce"}),
        ("pipeline:micro_batches=2,schedule=zero_bubble,cuts=blocks.1+blocks.2", 3, None, {"all_reduce", "all_gather"}),
        (
            "pipeline:stages=2,micro_batches=2,schedule=interleaved,cuts=blocks.0+blocks.1+blocks.2",
            2,
            None,
            {"all_reduce"},
        ),
        ("pipeline:stages=2,micro_batches=2,cuts=blocks.2", 6, None, {"all_reduce", "broadcast"}),
    ],
)
def test_stages_sum_the_gradients_of_tied_weights_as_the_communicator_counts(
    strategy: str, ranks: int, workers: int | None, kinds: set[str], tied: str
) -> None:
    config = run(strategy, ranks, batch_size=BATCH, workers=workers, optimizer="sgd:lr=0.1")
    program = program_of(tied, config)
    for place, found in enumerate(worlds.run(ranks, counted, task=tied, strategy=strategy, workers=workers, first=1)):
        want = predicted(program, 1, place % program.devices)
        assert {key: each for key, each in found.items() if key[0] == "tied"} == {
            key: each for key, each in want.items() if key[0] == "tied"
        }
        assert {kind for axis, kind in want if axis == "tied"} <= kinds
    assert {each.kind for each in program.collectives if each.axis == "tied"} == kinds


def test_stages_wait_for_the_sums_of_tied_gradients(tied: str) -> None:
    config = run("pipeline:micro_batches=2,cuts=blocks.2", 2, batch_size=BATCH, optimizer="sgd:lr=0.1")
    plain, late = (on_cpus(2) for _ in range(2))
    late.machine = replace(late.machine, curves={**late.machine.curves, "collectives/all_reduce/2": line(1.0)})
    seconds = [evaluate_program(program_of(tied, config, prices), DRAWS).seconds[0] for prices in (plain, late)]
    norm = max(each.bytes for each in program_of(tied, config).collectives if each.axis == "model")
    # One byte a second: the embedding, which is the head, and the gain, with a flag each.
    assert seconds[1] - seconds[0] == pytest.approx(4 * (31 * 12 + 1 + 12 + 1) + norm, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("hybrid:shards=2", 2),
        ("hybrid:shards=2,stage=3", 2),
        ("hybrid:shards=2,tensor=2,least=0", 4),
        ("hybrid:shards=2,replicas=2,stage=2", 4),
    ],
)
def test_shards_of_a_hybrid_make_the_collectives_that_the_communicator_counts(
    strategy: str, ranks: int, words: str
) -> None:
    config = run(strategy, ranks, batch_size=BATCH, micro_batch=3)
    want = predicted(program_of(words, config), 2)
    assert any(axis == "shard" for axis, _ in want) and (("model", "all_reduce") in want) == ("tensor" in strategy)
    for place, found in enumerate(worlds.run(ranks, counted, task=words, strategy=strategy, micro_batch=3)):
        if ("replica", "all_reduce") in want and place % 2:
            # The first of two shards, which the program is of, may have more rows to sum over copies.
            found["replica", "all_reduce"] = want["replica", "all_reduce"]
        assert found == want


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [("hybrid:shards=2,tensor=2,stage=3", "stage=1"), ("hybrid:shards=2,stages=2", "stages=1")],
)
def test_shards_whose_rows_are_not_in_the_program_are_refused(strategy: str, remedy: str, words: str) -> None:
    with pytest.raises(UsageError, match=remedy):
        program_of(words, run(strategy, 4, batch_size=BATCH))


def requests(task: str, strategy: str, optimizer: str) -> Any:
    run = prepared(task, strategy, optimizer)
    link = run.gradient_sync._link
    before, told = dict(link.client.traffic), link.facts()
    for batch in run.epoch(0):
        run.step(batch)
    found = {
        key: tuple(now - then for now, then in zip(each, before.get(key, (0, 0, 0)), strict=True))
        for key, each in link.client.traffic.items()
    }
    link.barrier("the counts")
    pairs = zip(link.facts()["servers"], told["servers"], strict=True) if told else ()
    bytes_ = [after["bytes"] - first["bytes"] for after, first in pairs]
    link.barrier("the facts")
    return {key: each for key, each in found.items() if each[0] and key[1] != "facts"}, bytes_


SERVED = [
    ("mode=sync", 2, "sgd:lr=0.1"),
    ("mode=sync,servers=3", 2, "adam:lr=0.1"),
    ("mode=async", 2, "adam:lr=0.1"),
    ("mode=sync,servers=2", 3, "lamb:lr=0.1"),
    ("mode=async,servers=2,push=2,fetch=2", 2, "sgd:lr=0.1"),
    ("mode=bounded,staleness=9", 3, "sgd:lr=0.1"),
]


@pytest.mark.parametrize(("served", "transport"), in_turn(SERVED, ["tcp", "shared_memory"]), ids=str)
def test_ranks_send_the_requests_that_the_client_counts(
    served: tuple[str, int, str], transport: str, task: str
) -> None:
    options, ranks, optimizer = served
    strategy = f"parameter_server:{options},transport={transport}"
    program = program_of(task, run(strategy, ranks, batch_size=BATCH, optimizer=optimizer))
    want = flow_totals(program.flows, 2, tensors_in_messages=transport == "tcp")
    servers = {flow.server for flow in program.flows}
    moved = [
        ranks
        * sum(2 // f.push_period * f.pushed + 2 // f.pull_period * f.pulled for f in program.flows if f.server == i)
        for i in sorted(servers)
    ]
    answers = worlds.run(ranks, requests, task=task, strategy=strategy, optimizer=optimizer)
    assert [found for found, _ in answers] == [want] * ranks
    assert answers[0][1] == moved
