"""Predicted steps of machines and models made by hand, and what cannot be predicted."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.comm.collective_schedules import LinkCost
from tutti.config.sync_config import AllReduceConfig
from tutti.errors import UsageError
from tutti.parallel.ddp.step_agreement import DIGESTS
from tutti.parallel.local_sgd.local_sgd import STEP_SUMS
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.pipeline_schedule import bubble_fraction
from tutti.planning.cluster_network import Network
from tutti.planning.communication_seconds import all_reduce_seconds
from tutti.planning.conformal_band import NO_BAND, CellScores, band_unit
from tutti.planning.device_plan import PlannedStep
from tutti.planning.hardware_anchor import matching_anchors, shipped_anchors
from tutti.planning.machine_choice import open_machine
from tutti.planning.measured_costs import MeasuredCosts
from tutti.planning.measured_curves import curve_seconds
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.pass_prices import PassPrices
from tutti.planning.plan_search import StepPricer
from tutti.planning.planned_run import PlannedRun
from tutti.planning.published_costs import published_chips
from tutti.planning.step_builders import build_step, check_buildable
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_facts import StageFacts, StepFacts, TensorFacts
from tutti.planning.step_prediction import TaskSizes, alone_config, gather_sizes, predict_step, step_band, step_basis
from tutti.planning.step_program import UPDATE, StepProgram, evaluate_program
from tutti.workload.bench_timing import fit_link
from tutti.workload.machine_file import Curve, CurvePoint, Figure, Machine, write_machine
from tutti.workload.message_log import GroupMessage
from tutti.workload.workload_file import LOSS, REST, Affine, GroupWork, OperatorWork, Workload

RATE, LINK = 1e9, LinkCost(1e-4, 1e8)


def line(rate: float, fixed: float = 0.0, unit: str = "byte") -> Curve:
    return Curve(unit, (), rate, fixed, 0.0)


def machine(jitter: float = 0.0) -> Machine:
    """A machine of constants without spread: 1 GFLOP/s, links of 100 µs and 100 MB/s, two ranks."""
    return Machine(
        host={"name": "lab", "cores": 2},
        device={"type": "cuda", "name": "lab", "threads": None},
        parts=("device", "links", "collectives", "optimizer"),
        figures={
            "device/operation/seconds": Figure(0.0, "s", 1, None),
            "jitter/time/2": Figure(0.0, "ratio", 1, None),
            "jitter/ranks/2": Figure(jitter, "ratio", 1, None),
        },
        curves={
            "device/matmul/fp32": line(RATE, unit="FLOP"),
            "device/copy": line(1e15),
            "links/0-1": line(LINK.beta, LINK.alpha),
            "collectives/all_reduce/2": line(LINK.beta, 2 * LINK.alpha),
            "collectives/all_gather/2": line(LINK.beta, LINK.alpha),
            "collectives/reduce_scatter/2": line(LINK.beta, LINK.alpha),
            "optimizer/sgd": line(1e9, unit="parameter"),
        },
    )


def free_messages(**curves: Curve) -> Machine:
    """The machine with messages, collectives and SGD updates for 0 s, but for the given curves of collectives."""
    known = machine().curves
    free = [name for name in known if name.startswith(("links/", "collectives/"))]
    given = {f"collectives/{name}/2": curve for name, curve in curves.items()}
    return replace(machine(), curves={**known, **dict.fromkeys([*free, "optimizer/sgd"], line(1e30)), **given})


def group(name: str, flop: float, elements: int = 0, ready: int | None = None) -> GroupWork:
    def work(each: float) -> dict[str, OperatorWork]:
        return {"matmul": OperatorWork(Affine(0, each), Affine(), Affine(1))} if each else {}

    nothing = {"none": Affine()}
    return GroupWork(
        name,
        "Linear",
        elements,
        elements,
        4 * elements,
        0,
        work(flop),
        work(2 * flop),
        {"none": {}},
        nothing,
        Affine(0, 0),
        ready,
    )


def facts(blocks: int, elements: int = 1000) -> StepFacts:
    """Equal blocks, one parameter each, of 1 MFLOP a sample forward and 2 backward."""
    names = [f"b{place}" for place in range(blocks)]
    order = tuple(reversed([f"{name}.weight" for name in names]))
    groups = [group(name, 1e6, elements, blocks - 1 - place) for place, name in enumerate(names)]
    work = Workload("own", "fp32", (*groups, group(REST, 0), group(LOSS, 0)), order, None, (2, 4, 7), "traced")
    tensors = tuple(TensorFacts(f"{name}.weight", name, (elements,), torch.float32) for name in names)
    one = tuple((name,) for name in names)
    return StepFacts(work, tensors, StageFacts(one, tuple((place,) for place in range(blocks)), one[:-1]))


def costs(**values: Any) -> MeasuredCosts:
    return MeasuredCosts(machine(values.pop("jitter", 0.0)), "fp32", Network(2, **values))


def run(strategy: str, devices: int = 1, **values: Any) -> PlannedRun:
    values = {"batch_size": 8 * devices, "optimizer": "sgd:lr=0.1", **values}
    return PlannedRun(strategy=strategy, devices=str(devices), **values)


def program_of(step: StepFacts, config: PlannedRun, prices: StepCosts) -> StepProgram:
    return build_step(step, config, prices)[0]


def seconds_of(step: StepFacts, config: PlannedRun, prices: StepCosts) -> float:
    return float(np.median(evaluate_program(program_of(step, config, prices), DRAWS).seconds))


def test_one_device_computes_its_flop_and_updates() -> None:
    # 4 blocks · 3 MFLOP · 8 samples at 1 GFLOP/s, and 4,000 parameters at 1e9/s.
    assert seconds_of(facts(4), run("single"), costs()) == pytest.approx(0.096 + 4e-6)
    # Micro-batches of a line without a fixed part take as long; hundreds of them are one action.
    few = program_of(facts(4), run("single", batch_size=512, micro_batch=1), costs())
    assert float(evaluate_program(few, DRAWS).seconds[0]) == pytest.approx(64 * 0.096 + 4e-6)
    assert len(few.actions) < 20


def test_schedules_follow_backward_and_the_backend_overlaps_it() -> None:
    step = facts(4, elements=1_000_000)
    vectors = program_of(step, run("mirrored:algorithm=ring,bucket_mb=4", 2), costs()).vectors
    assert [vector.parameters for vector in vectors] == [(3,), (2,), (1,), (0,)]
    ring = sum(2 * LINK.alpha + vector.bytes / LINK.beta for vector in vectors)
    update = 4e-3
    assert seconds_of(step, run("mirrored:algorithm=ring,bucket_mb=4", 2), costs()) == pytest.approx(
        0.096 + ring + update
    )
    # Forward takes 32 ms; the first gradient is complete 16 ms later, and the link is busy from then on.
    assert seconds_of(step, run("mirrored:algorithm=native,bucket_mb=4", 2), costs()) == pytest.approx(
        0.048 + ring + update
    )


def test_cpus_of_one_node_sum_in_memory_after_backward() -> None:
    step, rate = facts(4, elements=1_000_000), 1e8
    slow = replace(machine(), curves={**machine().curves, "device/copy": line(rate)})
    prices = MeasuredCosts(slow, "fp32", Network(2))
    prices.overlaps = False
    vectors = program_of(step, run("mirrored:algorithm=ring", 2), prices).vectors
    # Two ranks: a copy of the whole vector, three accesses to a half for its sum, and a copy of a half.
    summed = sum((2 + 3 / 2 + 2 / 2) * vector.bytes / rate for vector in vectors)
    for strategy in ("mirrored", "mirrored:algorithm=shared_memory"):
        assert seconds_of(step, run(strategy, 2), prices) == pytest.approx(0.096 + summed + 4e-3)


def test_other_devices_do_not_sum_in_memory() -> None:
    step, several, accelerators = facts(2), costs(between=LINK), costs()
    several.overlaps = False
    native = seconds_of(step, run("mirrored:algorithm=native", 4), several)
    assert seconds_of(step, run("mirrored", 4), several) == native
    assert seconds_of(step, run("mirrored:bucket_mb=25", 2), several) == seconds_of(
        step, run("mirrored:algorithm=native,bucket_mb=25", 2), several
    )
    for prices, devices in ((several, 4), (accelerators, 2)):
        with pytest.raises(UsageError, match="algorithm=native"):
            seconds_of(step, run("mirrored:algorithm=shared_memory", devices), prices)


def test_sharding_sends_rows_and_updates_a_part() -> None:
    step = facts(2, elements=1_000_000)
    whole, each = 4e6 / LINK.beta, LINK.alpha
    totals = 2 * each + 8 * (4 + 9 + 2 + 1) / LINK.beta
    first = seconds_of(step, run("sharded:stage=1", 2), costs())
    assert first == pytest.approx(0.048 + 4 * (each + whole) + totals + 1e-3, rel=2e-3)
    kinds = [
        action.text.partition(" of ")[0] for action in program_of(step, run("sharded:stage=3", 2), costs()).actions
    ]
    assert kinds.count("all_gather") == 4 and kinds.count("reduce_scatter") == 2
    kinds = [
        action.text.partition(" of ")[0] for action in program_of(step, run("sharded:stage=2", 2), costs()).actions
    ]
    assert kinds.count("all_gather") == 2 and kinds.count("reduce_scatter") == 2


def test_a_module_is_gathered_for_backward_before_the_gradients_of_the_last_one_are_sent() -> None:
    prices, sent = costs(), ("reduce_scatter of b1", "all_to_all of b1")
    for prices.overlaps in (True, False):
        program = program_of(facts(2, elements=1_000_000), run("sharded:stage=3", 2), prices)
        texts = [action.text for action in program.actions]
        gathered = max(place for place, text in enumerate(texts) if text == "all_gather of b0")
        # Collectives of CPUs block, so that none is asked for before it is needed.
        assert (gathered < next(place for place, text in enumerate(texts) if text in sent)) == prices.overlaps


def test_local_steps_average_parameters_once_in_a_period() -> None:
    step = facts(2, elements=1_000_000)
    own = 0.048 + 2e-3
    sums = 2 * (LINK.alpha + 8 * STEP_SUMS / LINK.beta)
    average = 2 * (LINK.alpha + 8e6 / LINK.beta)
    for period in (1, 4, 100):
        found = seconds_of(step, run(f"local_sgd:period={period}", 2), costs())
        assert found == pytest.approx(own + sums + average / period, rel=1e-4)
    outer = seconds_of(step, run("diloco:period=4", 2), costs())
    assert outer == pytest.approx(own + sums + (average + 2e-3) / 4, rel=1e-4)
    # Each of two workers of a device makes an update of its own, and their sum is one message.
    both = seconds_of(step, run("local_sgd:period=4", 2, workers=4), costs())
    assert both == pytest.approx(own + 2e-3 + sums + average / 4, rel=1e-4)
    assert seconds_of(step, run("local_sgd:period=4"), costs()) == pytest.approx(own)


def on_host(devices: int, update: float = 1e9) -> MeasuredCosts:
    """CPUs of one node that copy and add up 100 MB/s, and messages of 100 µs and 100 MB/s."""
    curves = {
        "device/copy": line(1e8),
        "device/elementwise": line(1e8),
        "optimizer/sgd": line(update, unit="parameter"),
    }
    prices = MeasuredCosts(replace(machine(), curves={**machine().curves, **curves}), "fp32", Network(devices))
    prices.overlaps = False
    return prices


def test_owners_add_up_the_gradients_of_a_node_in_its_memory() -> None:
    step, ranks = facts(4, elements=1_000_000), 2
    found = seconds_of(step, run("central_storage", ranks), on_host(ranks))
    # 16 MB packed, a read and a write; each owner adds the other's 8 MB, two reads and a write; each updates 2 million
    # parameters.
    assert found == pytest.approx(0.096 + 2 * 0.16 + 3 * 0.08 + 2e-3)
    assert seconds_of(step, run("central_storage"), on_host(1)) == pytest.approx(0.096 + 4e-3)
    assert on_host(2).within().beta == on_host(2).machine.curve("device/copy").rate / 2
    with pytest.raises(UsageError, match=r"for one node.*at most 2 devices"):
        seconds_of(step, run("central_storage", 4), on_host(2))
    # Beside accelerators 16 MB cross to the host and back, at 12 GB/s and 10 µs a copy.
    beside = costs()
    assert seconds_of(step, run("central_storage", 2), beside) > 2 * (16e6 / 1.2e10 + 1e-5)
    assert any("copies between device and host" in text for text in beside.guesses)


def test_a_synchronous_server_serves_all_ranks_in_turn() -> None:
    step = facts(4, elements=1_000_000)
    tcp = {n: seconds_of(step, run("parameter_server:transport=tcp", n), on_host(n)) for n in (1, 2, 4)}
    # A rank more is a push, an addition and a reply more: 16 MB each, with three transfers of them in the addition.
    assert tcp[2] - tcp[1] == pytest.approx((tcp[4] - tcp[2]) / 2, rel=1e-3)
    assert tcp[2] - tcp[1] == pytest.approx(5 * 0.16, rel=1e-3)
    shared = seconds_of(step, run("parameter_server", 2), on_host(2))
    # Messages there and back, and a copy out of the buffer; through shared memory each rank's parameters are copied.
    assert tcp[2] - shared == pytest.approx((2 + 2 + 2 * 1 - 2 * 2) * 0.16, rel=1e-2)
    several = seconds_of(step, run("parameter_server:transport=tcp,servers=4", 4), on_host(4))
    assert several < tcp[4] / 2


def test_a_rank_beside_its_server_takes_no_link_between_nodes() -> None:
    step = facts(4, elements=1_000_000)
    link = LinkCost(0.0, 1e6)

    def seconds(servers: int, nodes: int, each: int = 1, mode: str = "sync") -> float:
        prices = on_host(each)
        prices.network = Network(each, link)
        return seconds_of(step, run(f"parameter_server:servers={servers},mode={mode}", nodes * each), prices)

    # 16 MB there and back at 1 MB/s for every rank on another node; what else grows is 0.48 s of addition a rank.
    # Copies into and out of a rank's buffers take 0.32 s each.
    here = 0.096 + 2 * 0.32
    for nodes in (2, 4, 8):
        assert seconds(1, nodes) == pytest.approx((nodes - 1) * 32 + nodes * 0.48 + here, rel=0.02)
    assert seconds(1, 4, each=2) == pytest.approx(6 * 32 + 8 * 0.48 + here, rel=0.02)
    # Each of two servers has half, and four servers on two nodes share two links.
    assert seconds(2, 4) == pytest.approx(3 * 16 + 4 * 0.24 + here, rel=0.02)
    assert seconds(4, 2) == pytest.approx(1 * 16 + 2 * 0.12 + here, rel=0.03)
    assert seconds(1, 4, mode="async") == pytest.approx(3 * 32, rel=0.02)
    # Pushes at once wait at once, whatever a message waits.
    link = LinkCost(100.0, 1e6)
    assert seconds(1, 8) - seconds(1, 4) == pytest.approx(4 * 32 + 4 * 0.48, rel=0.02)


def test_asynchronous_workers_are_bound_by_the_server_that_they_share() -> None:
    step = facts(4, elements=1000)
    found = {n: seconds_of(step, run("parameter_server:mode=async", n), on_host(n, update=4e5)) for n in (1, 2, 32, 64)}
    # 96 ms of computing and 10 ms of update: twelve workers and more wait for the server.
    assert found[2] == pytest.approx(found[1]) and found[1] == pytest.approx(0.106, rel=0.02)
    assert found[64] == pytest.approx(2 * found[32], rel=1e-3) and found[32] == pytest.approx(0.342, rel=1e-2)
    seldom = seconds_of(step, run("parameter_server:mode=async,push=8,fetch=8", 64), on_host(64, update=4e5))
    assert seldom < found[64] / 3
    jitter = replace(machine(0.2), curves=on_host(2).machine.curves)
    for mode, factor in (("async", 1.0), ("bounded,staleness=2", 1.1)):
        prices = MeasuredCosts(jitter, "fp32", Network(2))
        prices.overlaps = False
        uneven = seconds_of(step, run(f"parameter_server:mode={mode}", 2), prices)
        assert uneven == pytest.approx(0.0965 * factor, rel=0.05)


def split(step: StepFacts, per_sample: float) -> StepFacts:
    """Let every block all-reduce once in each pass, over two tensor ranks with half of each tensor."""
    blocks = [group.name for group in step.workload.groups if group.name not in (REST, LOSS)]
    each = Affine(0.0, per_sample)
    sent = [GroupMessage(name, passed, "all_reduce", each) for passed in ("forward", "backward") for name in blocks]
    doubled = tuple(replace(each, shape=(2 * each.shape[0], *each.shape[1:])) for each in step.tensors)
    return replace(step, messages={"none": tuple(sent)}, whole=replace(step, tensors=doubled))


def norm_bytes(squares: int) -> int:
    """Return the bytes of the all-reduce of the gradient norm: squared norms, one sum, digests."""
    return 8 * (squares + 1 + DIGESTS)


@pytest.mark.parametrize(
    ("strategy", "devices", "squares"),
    [("tensor", 2, 2), ("hybrid:shards=2,tensor=2", 4, 1), ("hybrid:stages=2,tensor=2", 4, 4)],
)
def test_the_update_waits_for_the_gradient_norm_of_all_devices_of_a_replica(
    strategy: str, devices: int, squares: int
) -> None:
    config, step = run(strategy, devices, batch_size=8), split(facts(2), 0.0)
    program = program_of(step, config, costs(between=LINK))
    [*_, norm] = [each for each in program.actions if each.text == "gradient norm"]
    sent = {each.bytes for each in program.collectives if each.axis == "model" and each.kind == "all_reduce"}
    assert sent == {norm_bytes(squares)}
    ranks = 2 if devices == 2 else config.shape["stage"] * 2
    price = costs(between=LINK).collective("all_reduce", ranks, norm_bytes(squares))
    assert norm.seconds == pytest.approx(price) and price.min() > 0
    place = next(i for i, each in enumerate(program.actions) if each is norm)
    assert any(place in each.needs for each in program.actions if each.phase == UPDATE)


def test_collectives_of_tensor_ranks_are_exposed_in_both_passes() -> None:
    step = split(facts(4, elements=1000), 1e4)
    # 8 samples on each of two data ranks; a device has the work of ``facts``, which counts the slice.
    message = 2 * LINK.alpha + 8e4 / LINK.beta
    norm = 2 * LINK.alpha + norm_bytes(2) / LINK.beta
    found = seconds_of(step, run("tensor", 2, batch_size=8), costs())
    assert found == pytest.approx(0.096 + 8 * message + norm + 4e-6)
    # In two micro-batches the bytes are the same, and twice as many messages are sent.
    halves = seconds_of(step, run("tensor", 2, batch_size=8, micro_batch=4), costs())
    assert halves - found == pytest.approx(8 * 2 * LINK.alpha)
    # Many micro-batches are one action, and as long.
    many = program_of(step, run("tensor", 2, batch_size=512, micro_batch=1), costs())
    seconds = 512 * (0.012 + 8 * (2e-4 + 1e-4)) + norm + 4e-6
    assert float(evaluate_program(many, DRAWS).seconds[0]) == pytest.approx(seconds)
    assert len(many.actions) < 30 and sum(each.calls for each in many.collectives if each.axis == "tensor") == 512 * 8


def test_data_ranks_of_split_replicas_meet_over_the_network() -> None:
    step = split(facts(1, elements=1_000_000), 0.0)
    prices = costs(between=LinkCost(0.0, 1e6))
    vector = 4 * 1_000_000 + 8 * 14
    found = seconds_of(step, run("tensor:tensor=2", 4, batch_size=16), prices)
    # Two replicas of a node each: both tensor ranks of a node sum over one link, 2 · (2 - 1)/2 · 4 MB each.
    assert found == pytest.approx(0.024 + 2 * vector / 1e6 + 2 * 2e-4 + 1e-3, rel=1e-2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_stages_wait_for_the_collectives_of_their_tensor_ranks(schedule: str) -> None:
    config = run(f"hybrid:stages=2,tensor=2,schedule={schedule},micro_batches=4", 4, batch_size=8)
    prices = MeasuredCosts(machine(), "fp32", Network(4))
    plain, sent = (seconds_of(step, config, prices) for step in (facts(2), split(facts(2), 1e4)))
    message = 2e-4 + 2e4 / LINK.beta
    # A stage makes 4 forwards and backwards with one message each; the other stage's first and last are waited for.
    assert plain + 8 * message < sent < plain + 12 * message


def test_stages_agree_on_the_gradient_norm_before_their_updates() -> None:
    config = run("pipeline:micro_batches=4", 2, batch_size=8, optimizer="sgd:lr=0.1")
    free, late = (
        evaluate_program(program_of(facts(2), config, MeasuredCosts(each, "fp32", Network(2))), DRAWS).seconds
        for each in (free_messages(), free_messages(all_reduce=Curve("B", (), 1e30, 3.0, 0.0)))
    )
    assert late - free == pytest.approx(3.0, rel=1e-6)


def test_pipelines_need_no_measured_collective(tmp_path: Path) -> None:
    """They send messages; the gradient norm takes a ring's, and the output says so."""
    lab = machine()
    links = {"links/0-1": lab.curves["links/0-1"], "links/1-2": lab.curves["links/0-1"]}
    curves = {name: curve for name, curve in lab.curves.items() if not name.startswith(("links", "collectives"))}
    figures = {name: each for name, each in lab.figures.items() if not name.startswith("jitter")}
    write_machine(replace(lab, curves={**curves, **links}, figures=figures), tmp_path / "bare.json")
    prices = open_machine(str(tmp_path / "bare.json"), "fp32", None, None)
    assert prices.network.per_node == 3
    config = run("pipeline:micro_batches=4", 3, batch_size=8)
    [norm, *_] = [each for each in program_of(facts(3), config, prices).actions if each.text == "gradient norm"]
    assert norm.seconds == pytest.approx(4 * (LINK.alpha + norm_bytes(3) / 3 / LINK.beta))
    said = "\n".join(prices.guesses)
    assert "takes 4 messages over its measured links" in said and "varies by 2 %" in said
    with pytest.raises(UsageError, match=r"no collectives/all_reduce.*tutti bench collectives"):
        seconds_of(facts(3), run("mirrored:algorithm=native", 3), prices)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_of_equal_stages_is_that_of_the_order(schedule: str, chunks: int) -> None:
    config = run(f"pipeline:schedule={schedule},micro_batches=4", 2, batch_size=8, optimizer="sgd:lr=0.1")
    free = free_messages()
    times = evaluate_program(program_of(facts(2 * chunks), config, MeasuredCosts(free, "fp32", Network(2))), DRAWS)
    assert times.shares()["idling"] == pytest.approx(bubble_fraction(schedule, 2, 4, chunks), abs=1e-6)


@pytest.mark.parametrize("strategy", ["mirrored:algorithm=native", "sharded:stage=3", "pipeline:stages=2", "local_sgd"])
def test_the_cost_is_constant_in_replicas(strategy: str) -> None:
    prices = costs(between=LINK)
    few, many = (program_of(facts(4), run(strategy, devices, micro_batch=4), prices) for devices in (8, 16384))
    assert len(few.actions) == len(many.actions)
    alone = program_of(facts(4), alone_config(run(strategy, 16384, micro_batch=4)), prices)
    assert len(alone.actions) < 20


def test_stragglers_take_time_that_other_devices_wait() -> None:
    even, uneven = (seconds_of(facts(2), run("mirrored:algorithm=native", 2), costs(jitter=j)) for j in (0.0, 0.2))
    assert 1.05 < uneven / even < 1.2


def test_a_link_that_was_never_measured_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"never measured.*--network alpha"):
        seconds_of(facts(2), run("mirrored:algorithm=native", 4), costs())
    assert seconds_of(facts(2), run("mirrored:algorithm=native", 4), costs(between=LINK)) > 0
    gone = replace(machine(), curves={k: v for k, v in machine().curves.items() if not k.startswith("collectives")})
    with pytest.raises(UsageError, match="tutti bench collectives"):
        seconds_of(facts(2), run("mirrored:algorithm=native", 2), MeasuredCosts(gone, "fp32", Network(2)))
    with pytest.raises(UsageError, match="device/matmul/bf16"):
        seconds_of(facts(2), run("single"), MeasuredCosts(machine(), "bf16", Network(2)))


def test_links_and_collectives_between_nodes_come_from_a_file_of_bench(tmp_path: Path) -> None:
    here, nodes, bare = (tmp_path / f"{name}.json" for name in ("here", "nodes", "bare"))
    write_machine(machine(), here)
    slow = {"links/0-1": Curve("B", (), 1e6, 0.25, 0.0), "collectives/all_reduce/2": Curve("B", (), 1e12, 3.0, 0.0)}
    write_machine(replace(machine(), curves=slow), nodes)
    write_machine(replace(machine(), curves={"collectives/all_reduce/2": slow["collectives/all_reduce/2"]}), bare)
    prices = open_machine(str(here), "fp32", 2, nodes)
    assert prices.network.between == LinkCost(0.25, 1e6)
    assert prices.transfer(1e6, 4) == pytest.approx(1.25)
    # Four devices on two nodes: the measured sum of two nodes comes on top of that within a node.
    within = float(np.median(prices.collective("all_reduce", 2, 1000)))
    assert float(np.median(prices.collective("all_reduce", 4, 1000))) == pytest.approx(3.0 + within, rel=0.01)
    assert any("nodes.json" in text and "all_reduce/2" in text for text in prices.rests)
    assert not any("nodes" in text for text in prices.guesses)
    prices.collective("all_reduce", 8, 1000)
    prices.collective("broadcast", 8, 1000)
    assert any("all_reduce over 4 nodes scales from 2" in text for text in prices.guesses)
    assert any("broadcast between nodes, which was not measured" in text for text in prices.guesses)
    assert open_machine("a100x8", "bf16", None, nodes).network.between == LinkCost(0.25, 1e6)
    for path, word in ((bare, "no measured links"), (tmp_path / "gone.json", "gone.json")):
        with pytest.raises(UsageError, match=word):
            open_machine(str(here), "fp32", 2, path)


def test_published_hardware_names_its_rows_and_its_guesses() -> None:
    prices = open_machine("a100x8", "bf16", None, None)
    assert seconds_of(facts(2), run("mirrored:algorithm=native", 64), prices) > 0
    assert "published rows of A100" in prices.rests[0]
    assert any("links between nodes" in text for text in prices.guesses)
    for text, precision in (("h100x8", "fp32"), ("h200x8", "bf16"), ("mi300xx8", "bf16")):
        kindred = open_machine(text, precision, None, None)
        assert "jobs on other chips" in kindred.rests[0] and "data sheet" in kindred.rests[0]
    with pytest.raises(UsageError, match=r"no data sheet .*fp64.*--precision bf16 or fp16 or fp32, another chip"):
        open_machine("h100x8", "fp64", None, None)
    stated = open_machine("a100x8", "bf16", None, LINK)
    seconds_of(facts(2), run("mirrored:algorithm=native", 64), stated)
    assert not any("links between nodes" in text for text in stated.guesses)
    lone = [name for name in published_chips() if len(matching_anchors(name, "fp16", shipped_anchors())) == 1]
    assert lone and all(
        ("known from one source" in str(open_machine(f"{name}x8", "fp16", None, None).guesses)) == (name in lone)
        for name in ("A100", *lone)
    )
    for text, word in (
        ("a100x8", "no data sheet"),
        ("a100x0", "there is no machine"),
        ("abacusx8", "there is no machine"),
    ):
        with pytest.raises(UsageError, match=word):
            open_machine(text, "fp64" if text == "a100x8" else "bf16", None, None)


def test_a_band_needs_thirty_checked_series_of_its_cell() -> None:
    seconds = np.full(DRAWS, 2.0)
    assert step_band(seconds, costs(), 2, {}) == (None, NO_BAND)
    cell = f"{step_basis(costs(), 2)}, at most 2 ×"
    few, enough = ({cell: {name: CellScores((2.0,), each) for name in "ab"}} for each in (14, 15))
    assert step_band(seconds, costs(), 2, few) == (None, NO_BAND)
    band, text = step_band(seconds, costs(), 2, enough)
    wide = np.exp(2 * band_unit(0.0))
    assert band == pytest.approx((2 / wide, 2 * wide)) and cell in text
    # What was checked on measured devices says nothing of more of them, nor of scaled predictions.
    for devices, scaled in ((4, False), (64, False), (2, True)):
        assert step_band(seconds, costs(), devices, enough, scaled) == (None, NO_BAND)


def test_devices_of_a_node_share_the_threads_of_a_cpu() -> None:
    peaks = {f"device/peak/fp32/threads={n}": Figure(n * 0.8e9, "FLOP/s", 5, 0.0) for n in (1, 2)}
    cpu = replace(
        machine(), device={"type": "cpu", "name": "lab", "threads": 2}, figures={**machine().figures, **peaks}
    )
    prices, step = MeasuredCosts(cpu, "fp32", Network(2)), facts(1)
    works = [step.workload.groups[0].forward]
    found = []
    for devices in (1, 2, 64):
        prices.share_node(devices)
        found.append(float(prices.compute(works, 8)[0]))
    assert found == pytest.approx([0.008, 0.016, 0.016])


def test_operators_without_flop_cost_the_bytes_of_their_class() -> None:
    moved = {
        name: OperatorWork(Affine(), Affine(0, 1e6), Affine(1)) for name in ("other", "normalisation", "transcendental")
    }
    rates = {"elementwise": 1e9, "normalisation": 5e8, "transcendental": 2.5e8}
    curves = {**machine().curves, **{f"device/{name}": line(rate) for name, rate in rates.items()}}
    prices = MeasuredCosts(replace(machine(), curves=curves), "fp32", Network(2))
    assert float(prices.compute([moved], 8)[0]) == pytest.approx(0.008 + 0.016 + 0.032)
    assert not prices.guesses
    # An older file knows copies alone, and the prediction says so.
    older = costs()
    assert float(older.compute([moved], 8)[0]) == pytest.approx(3 * 8e6 / 1e15)
    assert sum("take as long as copies" in text for text in older.guesses) == 3


def test_ranks_of_a_node_slow_each_other_down_as_measured() -> None:
    shared = {"shared/matmul/2": Figure(2.5, "ratio", 5, 0.0), "shared/elementwise/2": Figure(4.0, "ratio", 5, 0.0)}
    curves = {**machine().curves, "device/elementwise": line(1e9)}
    lab = replace(machine(), curves=curves, figures={**machine().figures, **shared})
    prices = MeasuredCosts(lab, "fp32", Network(2))
    product = {"matmul": OperatorWork(Affine(0, 1e6), Affine(), Affine(1))}
    moved = {"other": OperatorWork(Affine(), Affine(0, 1e6), Affine(1))}
    found = []
    for devices in (1, 2, 64):
        prices.share_node(devices)
        found.append([float(prices.compute([work], 8)[0]) for work in (product, moved)])
    assert found == [pytest.approx(row) for row in ([0.008, 0.008], [0.02, 0.032], [0.02, 0.032])]


def test_ranks_at_once_have_curves_of_their_own() -> None:
    curves = {
        "device/elementwise": line(1e9),
        "shared/matmul/fp32/2": line(2.5e8, unit="FLOP"),
        "shared/elementwise/2": line(1e8),
        "shared/copy/2": line(1e15),
        "shared/optimizer/sgd/2": line(1e6, unit="parameter"),
    }
    lab = replace(machine(), curves={**machine().curves, **curves})
    prices = MeasuredCosts(lab, "fp32", Network(2))
    product = {"matmul": OperatorWork(Affine(0, 1e6), Affine(), Affine(1))}
    moved = {"other": OperatorWork(Affine(), Affine(0, 1e6), Affine(1))}
    found = []
    for devices in (1, 2):
        prices.share_node(devices)
        works = [float(prices.compute([work], 8)[0]) for work in (product, moved)]
        found.append([*works, float(prices.update("sgd", 1e6)[0])])
    assert found == [pytest.approx([0.008, 0.008, 0.001]), pytest.approx([0.032, 0.08, 1.0])]
    assert not prices.guesses


@pytest.mark.parametrize(("algorithm", "each"), [("ring", 1.0), ("tree", 0.5), ("central", 0.5)])
def test_a_message_of_one_way_takes_less_than_one_each_way_at_once(algorithm: str, each: float) -> None:
    links = {"links/0-1": line(1e6), "one_way/0-1": line(2e6)}
    prices = MeasuredCosts(replace(machine(), curves={**machine().curves, **links}), "fp32", Network(2))
    # Two messages: of half the vector around a ring, else of all of it.
    size = 1e6 if algorithm == "ring" else 5e5
    sync = AllReduceConfig(algorithm=algorithm)
    assert float(all_reduce_seconds(prices, sync, 2, size)[0]) == pytest.approx(2 * 0.5 * each)
    assert float(prices.message(1e6, 2)[0]) == 0.5


def test_what_stays_in_caches_costs_less_and_the_first_point_of_a_curve_is_no_least_cost() -> None:
    """A small micro-batch touches few bytes: 1 GB/s as far as caches hold them, 0.1 GB/s beyond."""
    reused = tuple(CurvePoint(size, size / rate, 0.0, 1) for size, rate in ((1e4, 1e9), (1e6, 1e9), (1e8, 1e8)))
    product = tuple(CurvePoint(size, size / RATE, 0.0, 1) for size in (1e6, 1e7))
    lab = {"device/elementwise": line(1e8), "device/elementwise/reused": Curve("byte", reused, 1e8, 0.0, 0.0)}
    curves = {**machine().curves, **lab, "device/matmul/fp32": Curve("FLOP", product, RATE, 0.0, 0.0)}
    prices = MeasuredCosts(replace(machine(), curves=curves), "fp32", Network(2))
    moved = {"other": OperatorWork(Affine(), Affine(0, 1e5), Affine(1))}
    few, many, unknown = (float(prices.compute([moved], 1, resident=size)[0]) for size in (2e5, 1e8, math.inf))
    assert (few, many, unknown) == pytest.approx((1e-4, 1e-3, 1e-3))
    small = {"matmul": OperatorWork(Affine(0, 1e4), Affine(), Affine(1))}
    assert float(prices.compute([small], 1)[0]) == pytest.approx(1e-5)
    step = facts(2)
    assert PassPrices(step.workload, prices).resident(8, "none") == 2 * 2 * 4000


def test_an_operation_in_training_costs_more_than_its_kernel() -> None:
    figures = {
        "device/operation/seconds": Figure(1e-6, "s", 5, 0.0),
        "device/operation/training": Figure(9e-6, "s", 5, 0.0),
        "shared/operation/training/2": Figure(11e-6, "s", 5, 0.0),
    }
    prices = MeasuredCosts(replace(machine(), figures={**machine().figures, **figures}), "fp32", Network(2))
    work = {"matmul": OperatorWork(Affine(1.0), Affine(), Affine(100))}
    found = []
    for devices in (1, 2):
        prices.share_node(devices)
        found.append(float(prices.compute([work], 8)[0]))
    assert found == pytest.approx([8e-4, 1e-3], rel=1e-4)


def test_a_backward_takes_the_curve_of_backwards() -> None:
    curves = {**machine().curves, "device/attention/fp32": line(1e9, unit="FLOP")}
    work = {"attention": OperatorWork(Affine(0, 1e6), Affine(), Affine(1))}
    older = MeasuredCosts(replace(machine(), curves=curves), "fp32", Network(2))
    newer = replace(machine(), curves={**curves, "device/attention/fp32/backward": line(1e8, unit="FLOP")})
    prices = MeasuredCosts(newer, "fp32", Network(2))
    found = [float(each.compute([work, work], 1, backward=b)[0]) for each in (older, prices) for b in (False, True)]
    assert found == pytest.approx([0.002, 0.002, 0.002, 0.011])


def test_each_further_tensor_costs_an_update_its_seconds() -> None:
    figures = {**machine().figures, "optimizer/sgd/tensor": Figure(1e-3, "s", 5, 0.0)}
    prices = MeasuredCosts(replace(machine(), figures=figures), "fp32", Network(2))
    assert [float(prices.update("sgd", 1e6, n)[0]) for n in (1, 4)] == pytest.approx([0.001, 0.004])


@pytest.mark.parametrize(
    ("strategy", "devices", "key", "units"),
    [
        ("single", 1, "single", 3),
        ("mirrored:algorithm=native", 2, "mirrored", 3),
        ("mirrored:algorithm=ring", 2, "schedule", 3),
        ("sharded:stage=1", 2, "sharded-1", 3),
        ("sharded:stage=3", 2, "sharded-3", 3),
        ("central_storage", 2, "central_storage", 3),
        ("parameter_server", 2, "parameter_server", 3),
        ("local_sgd:period=4", 2, "local_sgd", 3),
        ("pipeline:stages=3,micro_batches=2", 3, "pipeline", 1),
    ],
)
def test_python_work_of_the_strategy_is_part_of_a_step(strategy: str, devices: int, key: str, units: int) -> None:
    parts = {"step": 1.0, "tensor": 0.1, "micro_batch": 10.0, "unit": 1000.0}
    figures = {f"strategy/{key}/{part}": Figure(value, "s", 1, None) for part, value in parts.items()}
    cpu, gpu = ({"type": kind, "name": "lab", "threads": None} for kind in ("cpu", "cuda"))
    curves = {**machine().curves, "device/elementwise": line(1e15)}
    before, after, hidden = (
        MeasuredCosts(
            replace(machine(), device=d, curves=curves, figures={**machine().figures, **m}), "fp32", Network(3)
        )
        for d, m in ((cpu, {}), (cpu, figures), (gpu, figures))
    )
    values = {} if "pipeline" in strategy else {"micro_batch": 4}
    config = run(strategy, devices, **values)
    one, other = (seconds_of(facts(3), config, prices) for prices in (before, after))
    expected = 1.0 + 0.1 * units + 2 * (10.0 + 1000.0 * units)
    # A pipeline's last stage begins its micro-batches after those of the stages before.
    least = expected if key != "pipeline" else expected + 2 * 1011.1
    assert other - one == pytest.approx(least, rel=1e-6)
    assert [any("tutti bench strategies" in text for text in each.guesses) for each in (before, after)] == [True, False]
    # The kernels of accelerators hide the work of the host.
    assert seconds_of(facts(3), config, hidden) < 1.0


def test_a_device_with_two_stages_does_its_python_work_once_a_micro_batch() -> None:
    parts = {"step": 1.0, "tensor": 0.1, "micro_batch": 10.0, "unit": 1000.0}
    figures = {f"strategy/pipeline/{part}": Figure(value, "s", 1, None) for part, value in parts.items()}
    cpu = {"type": "cpu", "name": "lab", "threads": None}
    lab = replace(machine(), device=cpu, curves={**machine().curves, "device/elementwise": line(1e15)})
    config, forward = run("pipeline:schedule=interleaved,micro_batches=4", 2, batch_size=8), []
    for found in (lab, replace(lab, figures={**lab.figures, **figures})):
        actions = program_of(facts(4), config, MeasuredCosts(found, "fp32", Network(2))).actions
        forward.append(sum(float(each.seconds[0]) for each in actions if (each.device, each.phase) == (1, "forward")))
    assert forward[1] - forward[0] == pytest.approx(1.0 + 0.1 * 2 + 4 * (10.0 + 1000.0 * 2), rel=1e-6)


def test_later_micro_batches_add_their_gradients_to_those_before() -> None:
    curves = {**machine().curves, "device/elementwise": line(1e9)}
    figures = {**machine().figures, "device/operation/seconds": Figure(1e-3, "s", 5, 0.0)}
    prices = MeasuredCosts(replace(machine(), curves=curves, figures=figures), "fp32", Network(2))
    plain = [seconds_of(facts(2, elements), run("single", micro_batch=2), prices) for elements in (0, 10**6)]
    # Two tensors, three further micro-batches, twelve bytes an element; and SGD's update of each.
    assert plain[1] - plain[0] == pytest.approx(3 * 2 * 12e-3 + 2e-3)


def test_curves_are_read_between_their_points() -> None:
    curve = Curve("FLOP", (CurvePoint(1e3, 1e-5, 0, 5), CurvePoint(1e5, 1e-3, 0, 5)), 1.0, 0.0, 1.0)
    assert curve_seconds(curve, 1e4) == pytest.approx(1e-4)
    assert curve_seconds(curve, 10) == 1e-5 and curve_seconds(curve, 1e6) == pytest.approx(1e-2)


TASK = """
import torch
from torch import nn
from tutti.tasks.task import Task

def own():
    data = torch.utils.data.TensorDataset(torch.rand(24, 4))
    layers = lambda: nn.Sequential(nn.Linear(4, 70), nn.Tanh(), nn.Linear(70, 41), nn.Tanh(), nn.Linear(41, 1))
    return Task(name="own", model=layers, loss=lambda model, batch: model(batch[0]).square().mean(), train=data)
"""


@pytest.mark.parametrize(("made", "priced"), [("SGD", 1.0), ("AdamW", 0.25)])
def test_an_update_is_of_the_optimizer_that_the_task_makes(made: str, priced: float, tmp_path: Path) -> None:
    """AdamW was not measured, and takes as long as Adam."""
    own = f"train=data, optimizer=lambda model: torch.optim.{made}(model.parameters(), lr=0.1))"
    (tmp_path / "task.py").write_text(TASK.replace("train=data)", own), encoding="utf-8")
    config = run("single", 1, batch_size=12, optimizer="adam:lr=0.001")
    slow = {"optimizer/sgd": line(1.0, unit="parameter"), "optimizer/adam": line(4.0, unit="parameter")}
    prices = MeasuredCosts(replace(machine(), curves={**machine().curves, **slow}), "fp32", Network(2))
    sizes = gather_sizes(f"{tmp_path}/task.py:own", config)
    _, times = predict_step(f"{tmp_path}/task.py:own", sizes, config, prices, {})
    parameters = sum(each.elements for each in sizes.step.tensors)
    updates = [action for action in times.program.actions if action.phase == UPDATE]
    assert [float(each.seconds[0]) for each in updates] == [pytest.approx(priced * parameters)]
    pricer = StepPricer(TaskSizes(f"{tmp_path}/task.py:own", config), config, prices)
    step = PlannedStep(1, 12, "single", 0.0, np.zeros(0), {}, "")
    assert pricer.evaluate(step).seconds == pytest.approx(float(times.seconds[0]))


def counted(strategy: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 70), nn.Tanh(), nn.Linear(70, 41), nn.Tanh(), nn.Linear(41, 1))
    data = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
    run = tutti.prepare(model, "sgd:lr=0.1", data, lambda m, b: (m(b) ** 2).mean(), strategy=strategy, batch_size=12)
    stages, found = run.context.comms.axis("stage"), []
    for batch in run.epoch(0):
        run.step(batch)
        found.append(stages.traffic())
    # The first step also sends the forms of its messages.
    first, second = found
    return {link: (count.messages - first[link][0], count.bytes - first[link][1]) for link, count in second.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_sends_what_the_communicator_counts(schedule: str, tmp_path: Any) -> None:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    task = f"{tmp_path}/task.py:own"
    strategy = f"pipeline:stages=2,micro_batches=3,schedule={schedule}"
    strategy += ",cuts=1+2+3" if schedule == "interleaved" else ",cuts=2"
    config = run(strategy, 2, batch_size=12)
    sizes = gather_sizes(task, config)
    prediction, times = predict_step(task, sizes, config, costs(), {})
    assert prediction.memory["total"] > 0 and set(prediction.shares) == {
        "compute",
        "communication",
        "bubble",
        "idling",
    }
    assert sum(prediction.shares.values()) == pytest.approx(1)
    predicted = {link: tuple(found) for link, found in times.program.between_stages.items()}
    for links in worlds.run(2, counted, strategy=strategy):
        assert links == predicted


def test_pipelines_of_several_numbers_of_stages_share_the_traces_of_the_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, trace = [], stage_partition.trace

    def counting(model: nn.Module, opened: Collection[str]) -> Any:
        traced.append(frozenset(opened))
        return trace(model, opened)

    monkeypatch.setattr(stage_partition, "trace", counting)
    base = run("pipeline", 2, model="gpt:layers=4", batch_size=16)
    sizes, found = TaskSizes("text", base), {}
    for stages in (2, 4, 8):
        for schedule in ("1f1b", "interleaved"):
            each = run(f"pipeline:schedule={schedule}", stages, model="gpt:layers=4", batch_size=16)
            found[schedule, stages] = sizes.step(each).stages
    assert len(set(traced)) == len(traced) > 1
    for (schedule, stages), shared in found.items():
        alone = run(f"pipeline:schedule={schedule}", stages, model="gpt:layers=4", batch_size=16)
        assert gather_sizes("text", alone).step.stages == shared


def test_a_rank_counts_a_weight_that_two_of_its_stages_use_once() -> None:
    two = StageFacts((), ((0, 1), (1, 2), (0,), (3,)), ())
    assert [two.held(rank, 2) for rank in range(2)] == [[0, 1], [1, 2, 3]]
    assert two.tied(2) == {(0, 1): [1]} and two.tied(4) == {(0, 2): [0], (0, 1): [1]} and two.tied(1) == {}


def test_one_ring_goes_over_the_links_of_published_hardware() -> None:
    prices = open_machine("a100x8", "bf16", None, None)

    def seconds(ranks: int, size: float) -> float:
        return float(prices.collective("all_reduce", ranks, size)[0])

    # Published all-reduces of 8 A100 over NVSwitch (vTrain's artifact): 93 µs for 1 MiB, 225 GB/s from 256 MiB on.
    assert seconds(8, 2**20) == pytest.approx(93e-6, rel=0.2)
    assert seconds(8, 2**28) == pytest.approx(2 * 7 / 8 * 2**28 / 225e9, rel=0.1)
    # Nodes with eight adapters are nearly as fast as one node: links within and between nodes pass the bytes at once.
    assert seconds(8, 1e9) < seconds(64, 1e9) < 1.25 * seconds(8, 1e9)
    slow = open_machine("a100x8", "bf16", None, LinkCost(0.0, 1e9))
    assert float(slow.collective("all_gather", 16, 1e9)[0]) == pytest.approx(0.5, rel=0.01)


def test_sums_over_the_stages_of_a_replica_share_a_link_with_its_tensor_ranks_alone() -> None:
    prices = costs(between=LinkCost(0.0, 1e6))
    seconds = [float(prices.collective("all_reduce", 2, 1e6, 3, together)[0]) for together in (1, 2, None)]
    assert prices.network.per_node == 2 and seconds == pytest.approx([1.0, 2.0, 2.0])


def test_tensor_ranks_are_compared_with_the_whole_model_on_one_device() -> None:
    """The baseline of the efficiency updates whole parameters, and not the slices of one tensor rank."""
    split = gather_sizes("text", run("tensor", 2, model="gpt:layers=2")).step
    whole = gather_sizes("text", run("mirrored", 1, model="gpt:layers=2")).step
    unsplit = split.without_tensor_parallelism()
    assert unsplit.tensors == whole.tensors != split.tensors
    assert unsplit.without_tensor_parallelism() is unsplit and whole.without_tensor_parallelism() is whole


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("single", 1),
        ("mirrored:algorithm=ring", 2),
        ("sharded:stage=1", 2),
        ("sharded:stage=3", 2),
        ("local_sgd:period=4", 2),
    ],
)
def test_all_wait_for_a_delayed_rank(strategy: str, devices: int) -> None:
    step = facts(4)
    plain = seconds_of(step, run(strategy, devices), costs())
    for slow, more in (("ms=50", 0.05), ("factor=3", 2 * 0.096), ("factor=2,ms=10", 0.096 + 0.01)):
        config = run(strategy, devices, slow=f"rank={devices - 1},{slow}")
        # Gathering ahead of the computing hides a message of stage 3 behind the delay.
        assert seconds_of(step, config, costs()) == pytest.approx(
            plain + more, rel=2e-3 if "stage=3" in strategy else 1e-9
        )
    # The longest delay of a rank counts, and not the sum over ranks.
    both = run(strategy, devices, slow="rank=0,ms=30" + (";rank=1,ms=50" if devices > 1 else ""))
    assert seconds_of(step, both, costs()) == pytest.approx(plain + (0.05 if devices > 1 else 0.03), rel=2e-3)


@pytest.mark.parametrize(("strategy", "ms"), [("mirrored:algorithm=central", 800), ("parameter_server", 3200)])
def test_one_node_receives_from_the_others_during_a_delay(strategy: str, ms: int) -> None:
    step, link = facts(4, elements=1_000_000), LinkCost(0.0, 1e7)
    prices = on_host(1)
    prices.network = Network(1, link)
    plain, *late = (
        seconds_of(step, run(strategy, 4, slow=slow), prices)
        for slow in (None, f"rank=1,ms={ms // 2}", f"rank=1,ms={ms}", f"rank=1,ms={ms + 1000}")
    )
    # Two other ranks send 16 MB each for 3.2 s, or only the 4 MB of the first bucket.
    assert late == pytest.approx([plain, plain, plain + 1.0])


@pytest.mark.parametrize(("elements", "wire"), [(1000, "fp32"), (1_000_000, "fp32"), (1_000_000, "bf16")])
def test_sums_of_the_backend_run_during_a_delay(elements: int, wire: str) -> None:
    """All buckets are sent within backward, so that a delay after it hides them, as in a run."""
    step, strategy = facts(4, elements), f"mirrored:algorithm=native,bucket_mb=4,wire={wire}"
    found = seconds_of(step, run(strategy, 2, slow="rank=1,ms=400"), costs())
    assert found == pytest.approx(0.096 + 0.4 + 4 * elements / 1e9)


def test_slices_and_parts_of_replicas_share_the_link_of_their_node() -> None:
    step, link = facts(4, elements=1_000_000), LinkCost(0.0, 1e6)

    def seconds(algorithm: str, per_node: int) -> float:
        prices = MeasuredCosts(machine(), "fp32", Network(per_node, link))
        return seconds_of(step, run(f"mirrored:algorithm={algorithm}", 8), prices)

    # Four nodes send 2 · 3/4 of 16 MB each, with one rank or two; a flat ring of eight ranks 2 · 7/8.
    rest = 0.096 + 4e-3
    assert seconds("hierarchical", 2) == pytest.approx(1.5 * 16 + rest, rel=1e-3)
    assert seconds("hierarchical", 4) == pytest.approx(16 + rest, rel=1e-3)
    assert seconds("ring", 2) == pytest.approx(1.75 * 16 + rest, rel=1e-3)


def test_messages_between_nodes_are_read_from_their_measured_curve() -> None:
    step = facts(4, elements=1_000_000)
    messages = fit_link([CurvePoint(s, 0.01 * (s > 1024) + s / 1e7, 0.0, 5) for s in (2.0**k for k in range(9, 25))])
    link = LinkCost(messages.fixed, messages.rate)

    def seconds(algorithm: str, curve: Curve | None) -> float:
        prices = MeasuredCosts(machine(), "fp32", Network(1, link, curve))
        return seconds_of(step, run(f"mirrored:algorithm={algorithm}", 4), prices)

    # What a message waits is in no latency of small ones; six rounds in each of two buckets, or four.
    vectors = len(program_of(step, run("mirrored:algorithm=ring", 4), costs(between=link)).vectors)
    for algorithm, rounds in (("ring", 6), ("halving", 4), ("tree", 4)):
        longer = seconds(algorithm, messages) - seconds(algorithm, None)
        assert longer == pytest.approx(vectors * rounds * 0.01, rel=0.05)


def test_collectives_over_nodes_are_read_from_their_measured_curve() -> None:
    link = LinkCost(0.0, 1e6)
    curves = {"reduce_scatter/4": line(0.5e6), "reduce_scatter/64": line(1.0)}
    plain, measured = (MeasuredCosts(machine(), "fp32", Network(1, link, None, c)) for c in ({}, curves))
    for nodes, seconds in ((4, 2.0), (8, 2.0 * (7 / 8) / (3 / 4))):
        assert measured.collective("reduce_scatter", nodes, 1e6)[0] == pytest.approx(seconds)
        ring = (nodes - 1) / nodes
        assert measured.collective("all_gather", nodes, 1e6)[0] == pytest.approx(ring)
        assert plain.collective("reduce_scatter", nodes, 1e6)[0] == pytest.approx(ring)


def test_delays_of_the_logical_workers_of_a_device_add_up() -> None:
    step, plain = facts(4), seconds_of(facts(4), run("mirrored:algorithm=ring", 2, workers=4), costs())
    for slow, more in (("worker=1,ms=20", 0.02), ("worker=0+1,ms=20", 0.04), ("worker=1+2,ms=20", 0.02)):
        config = run("mirrored:algorithm=ring", 2, workers=4, slow=slow)
        assert seconds_of(step, config, costs()) == pytest.approx(plain + more, rel=1e-9)


def test_a_delayed_stage_delays_the_pipeline() -> None:
    step, strategy = facts(2), "pipeline:schedule=gpipe,micro_batches=4"
    plain = seconds_of(step, run(strategy, 2), costs())
    # The first stage ends last; the other one has the time of the bubble to be late in.
    first, last = (seconds_of(step, run(strategy, 2, slow=f"rank={rank},ms=50"), costs()) for rank in (0, 1))
    assert first == pytest.approx(plain + 0.05, rel=1e-9)
    assert plain <= last <= first


def test_delays_that_cannot_be_simulated_are_refused() -> None:
    for strategy, slow, said in (
        ("mirrored", "rank=5,ms=20", "rank 5"),
        ("mirrored", "worker=2,ms=20", "worker 2"),
        ("parameter_server:mode=async", "rank=0,ms=20", "asynchronous workers"),
    ):
        with pytest.raises(UsageError, match=said):
            check_buildable(run(strategy, 2, slow=slow))
