"""The gradient noise scale in a run: equal on any devices, of the right size, without effect on the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.errors import UsageError

COUNT, BATCH, WORKERS, STEPS = 66, 13, 4, 5


def data() -> Tensor:
    return torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def loss(net: Any, batch: Tensor) -> Any:
    values = (net(batch) - batch[:, :1]).square().flatten()
    return values.sum(), 3 * len(values), {}


def train(every: int | None = 2, optimizer: str = "adam:lr=0.01", **options: Any) -> tuple[Any, list[Any]]:
    options = {"workers": WORKERS, "batch_size": BATCH, **options}
    run = tutti.prepare(model(), optimizer, data(), loss, noise_every=every, **options)
    found = []
    while run.global_step < STEPS:
        for batch in run.epoch(*run.data_position):
            run.step(batch)
            found.append({} if run.noise_probe is None else dict(run.noise_probe.values()))
            if run.global_step == STEPS:
                break
    return {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}, found


def by_hand(micro: int | None, scaled: bool = False) -> list[tuple[float, float]]:
    """(tr Σ, |G|²) of the steps 0, 2, 4 by two loops: over the parts, and over the batch."""
    from tutti.comm.partition import chunks, even_share
    from tutti.data.order import permutation

    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    found = []
    for clock in range(STEPS):
        rows = permutation(0, 0, COUNT)[BATCH * clock : BATCH * (clock + 1)]
        weights = []
        if scaled and clock:
            for p in net.parameters():
                state = optimizer.state[p]
                weights.append(1 / ((state["exp_avg_sq"] / (1 - 0.999**clock)).sqrt() + 1e-8))
        weights = weights or [torch.ones_like(p) for p in net.parameters()]
        total, squares, parts = [torch.zeros_like(p) for p in net.parameters()], 0.0, 0
        for worker in range(WORKERS):
            mine = rows[slice((share := even_share(len(rows), WORKERS, worker)).start, share.stop)]
            for piece in chunks(len(mine), micro):
                own = data()[mine[piece.start : piece.stop]]
                sums, count, _ = loss(net, own)
                gradient = torch.autograd.grad(sums / count, list(net.parameters()))
                share_of_batch = len(own) / BATCH
                squares += share_of_batch * sum(float((w * g**2).sum()) for w, g in zip(weights, gradient, strict=True))
                total = [t + share_of_batch * g for t, g in zip(total, gradient, strict=True)]
                parts += 1
        whole = sum(float((w * g**2).sum()) for w, g in zip(weights, total, strict=True))
        if clock % 2 == 0 and not (scaled and clock == 0):
            spread = (squares - whole) / (parts - 1)
            found.append((BATCH * spread, whole - spread))
        for p, g in zip(net.parameters(), total, strict=True):
            p.grad = g
        optimizer.step()
    return found


def check(found: list[Any], micro: int | None, adam: bool) -> None:
    assert [bool(values) for values in found] == [True, False, True, False, True]
    got = [(values["noise/trace"], values["noise/square"]) for values in found if values]
    for mine, theirs in zip(got, by_hand(micro), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    got = [(v["noise/adam/trace"], v["noise/adam/square"]) for v in found if "noise/adam/trace" in v]
    assert bool(got) == adam
    for mine, theirs in zip(got, by_hand(micro, scaled=True) if adam else [], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)


# Whether the ranks have Adam's second moments of their own gradients, or of pieces of them.
CASES = [
    ("single", 1, True, {}),
    ("mirrored", 2, True, {}),
    ("mirrored", 3, True, {"reproducible": True}),
    ("sharded:stage=1", 2, True, {}),
    ("sharded:stage=3", 3, False, {}),
    ("hybrid:shards=3,stage=2", 3, False, {}),
    ("hybrid:shards=2,stage=3,tensor=2,least=1,units=Linear", 4, False, {}),
    ("central_storage", 3, True, {}),
    ("tensor:least=1", 2, True, {}),
    pytest.param("parameter_server", 2, False, {}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("micro", [2, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize(("strategy", "devices", "adam", "options"), CASES)
def test_equal_to_two_plain_loops(
    strategy: str, devices: int, adam: bool, options: dict[str, Any], micro: int | None
) -> None:
    for _, found in worlds.run(devices, train, strategy=strategy, micro_batch=micro, **options):
        check(found, micro, adam)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("sharded:stage=2", 2), ("sharded:stage=3,units=Linear", 3), ("sharded:offload=true", 2), ("sharded", 1)],
)
def test_gradients_that_backward_reduces_on_an_accelerator(strategy: str, devices: int) -> None:
    for _, found in worlds.run_on(worlds.ACCELERATOR, devices, train, strategy=strategy, micro_batch=2):
        # One device shards by ZeRO stage 1, whose state is on the rank.
        check(found, 2, adam=devices == 1)


@pytest.mark.parametrize("strategy", ["pipeline:micro_batches=2", "model_parallel"])
def test_pipelines_compare_whole_workers(strategy: str) -> None:
    for devices in (1, 2, 3) if strategy == "model_parallel" else (2,):
        for _, found in worlds.run(devices, train, strategy=strategy):
            check(found, None, adam=True)


def test_the_weights_are_those_without_it() -> None:
    for strategy in ("mirrored", "pipeline:micro_batches=2"):
        options = {"strategy": strategy, "micro_batch": None if "pipeline" in strategy else 2}
        with_it = worlds.run(2, train, every=2, **options)
        without = worlds.run(2, train, every=None, **options)
        for (got, _), (want, _) in zip(with_it, without, strict=True):
            # A pipeline's worker is added as a whole, and not micro-batch by micro-batch.
            assert largest_difference(got, want) <= (1e-14 if "pipeline" in strategy else 0)


def test_loss_scale_and_clipping_do_not_count() -> None:
    [(_, plain)] = worlds.run(1, train, optimizer="sgd:lr=0")
    [(_, scaled)] = worlds.run(1, train, optimizer="sgd:lr=0", loss_scale="1024", clip=1e-6)
    assert [set(one) for one in plain] == [set(other) for other in scaled]
    assert not any("noise/adam/trace" in values for values in plain)
    for one, other in zip(plain, scaled, strict=True):
        assert all(one[name] == pytest.approx(other[name], rel=1e-9) for name in one if math.isfinite(one[name]))


def rows_loss(net: Any, batch: Tensor) -> Any:
    values = (net(batch).flatten() - batch[:, 0]).square()
    return values.sum(), len(values), {}


def train_rows(sparse: bool, optimizer: str, loop: bool = False, **options: Any) -> list[Any]:
    """The noise of a run whose first layer has a sparse gradient, whose entries several samples share."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Flatten(), nn.Linear(18, 1)).double()
    samples = torch.randint(5, (COUNT, 6), generator=torch.Generator().manual_seed(1))
    updates: list[Any] = [torch.optim.SGD(net.parameters(), lr=0.1)]
    if optimizer == "adam":
        # Each step touches all rows of the table, so that both kinds of Adam have the same second moments.
        table = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(net[0].parameters(), lr=1e-14, eps=1e-3)
        updates = [table, torch.optim.Adam(net[2].parameters(), lr=0.01, eps=1e-3)]
    run = tutti.prepare(
        net,
        updates if len(updates) > 1 else updates[0],
        samples,
        None if loop else rows_loss,
        noise_every=2,
        batch_size=BATCH,
        **options,
    )
    found: list[Any] = []
    while len(found) < STEPS:
        if loop:
            for batch in run.microbatches(run.data_position[0]):
                for each in updates:
                    each.zero_grad()
                run.backward((net(batch).flatten() - batch[:, 0]).square().mean())
                for each in updates:
                    each.step()
                if run.stepped:
                    found.append(dict(run.noise_probe.values()))
        else:
            for batch in run.epoch(*run.data_position):
                run.step(batch)
                found.append(dict(run.noise_probe.values()))
    return found[:STEPS]


SPARSE_CASES = [
    ("single", 1, "sgd", {}),
    ("mirrored", 3, "sgd", {}),
    ("mirrored", 2, "sgd", {"loop": True}),
    ("mirrored", 2, "adam", {"reproducible": True}),
    ("parameter_server", 2, "sgd", {}),
    ("local_sgd:period=2", 2, "sgd", {}),
]


@pytest.mark.parametrize("micro", [2, None])
@pytest.mark.parametrize(("strategy", "devices", "optimizer", "options"), SPARSE_CASES)
def test_sparse_gradients_have_the_noise_of_dense_ones(
    strategy: str, devices: int, optimizer: str, options: dict[str, Any], micro: int | None
) -> None:
    options = {"workers": WORKERS, "strategy": strategy, "micro_batch": micro, **options}
    for sparse, dense in zip(
        worlds.run(devices, train_rows, sparse=True, optimizer=optimizer, **options),
        worlds.run(devices, train_rows, sparse=False, optimizer=optimizer, **options),
        strict=True,
    ):
        assert [set(one) for one in sparse] == [set(other) for other in dense] and any(sparse)
        assert any("noise/adam/trace" in values for values in sparse) == (optimizer == "adam")
        for one, other in zip(sparse, dense, strict=True):
            for name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-9), name


def refusal(**options: Any) -> tuple[str, str]:
    try:
        train(**options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 1}, "Take workers=4 or micro_batch=3"),
        ({"workers": 1, "strategy": "pipeline:micro_batches=2"}, "with one worker there is a single gradient"),
        ({"strategy": "local_sgd:period=2", "workers": 1}, "Take workers=4 or micro_batch=3"),
        ({"strategy": "parameter_server:mode=async"}, "needs several micro-batches of a worker"),
        ({"strategy": "parameter_server:mode=async"}, "Take micro_batch=2, or leave out noise_every"),
        ({"strategy": "parameter_server:backup=1"}, "cannot be combined with backup workers"),
        ({"strategy": "mirrored:wire=bf16"}, "cannot be combined with a compressed wire"),
        ({"gradient_noise": "multiplicative:base_batch=4"}, "cannot be combined with gradient_noise"),
        ({"batch_norm": "sync"}, "batch_norm sync cannot be combined with noise_every"),
        ({"every": 0}, "noise_every is 0"),
    ],
)
def test_refused_before_the_first_step(options: dict[str, Any], words: str) -> None:
    [(kind, said)] = worlds.run(1, refusal, **options)
    assert kind == UsageError.__name__ and words in said, said


# --- workers with parameters of their own -----------------------------------------------------------------------------


def share_of(clock: int, worker: int, workers: int) -> Tensor:
    from tutti.comm.partition import even_share
    from tutti.data.order import permutation

    rows = permutation(0, 0, COUNT)[BATCH * clock : BATCH * (clock + 1)]
    return data()[rows[slice((share := even_share(len(rows), workers, worker)).start, share.stop)]]


def mean_gradient(net: Any, samples: Tensor) -> list[Tensor]:
    sums, count, _ = loss(net, samples)
    return list(torch.autograd.grad(sums / count, list(net.parameters())))


def estimated(parts: list[Tensor], net: Any, weights: list[Any]) -> tuple[float, float]:
    """(tr Σ, |G|²) from the parts of a batch, with the squares of gradients weighted."""
    samples = sum(map(len, parts))
    total, squares = [torch.zeros_like(p) for p in net.parameters()], 0.0
    for part in parts:
        gradient = mean_gradient(net, part)
        squares += len(part) / samples * sum(float((w * g**2).sum()) for w, g in zip(weights, gradient, strict=True))
        total = [t + len(part) / samples * g for t, g in zip(total, gradient, strict=True)]
    whole = sum(float((w * g**2).sum()) for w, g in zip(weights, total, strict=True))
    spread = (squares - whole) / (len(parts) - 1)
    return samples * spread, whole - spread


def preconditioner(net: Any, optimizer: Any) -> list[Any]:
    found = []
    for p in net.parameters():
        state = optimizer.state[p]
        found.append(1 / ((state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8))
    return found


def local_by_hand(micro: int | None, together: int, period: int, workers: int = WORKERS) -> list[dict[str, Any]]:
    """Local SGD with Adam; of each step the noise by the workers' micro-batches, or by all workers while they agree."""
    from tutti.comm.partition import chunks

    nets = [model() for _ in range(workers)]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    found = []
    for clock in range(STEPS):
        shares = [share_of(clock, worker, workers) for worker in range(workers)]
        values: dict[str, Any] = {}
        if micro is None:
            if clock <= together or (clock - together) % period == 0:
                values["noise"] = estimated(shares, nets[0], [1.0] * 6)
        else:
            parts = [[share[piece.start : piece.stop] for piece in chunks(len(share), micro)] for share in shares]
            values["noise"] = [estimated(part, net, [1.0] * 6) for part, net in zip(parts, nets, strict=True)]
            if clock:
                weights = [preconditioner(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
                each = zip(parts, nets, weights, strict=True)
                values["noise/adam"] = [estimated(part, net, weight) for part, net, weight in each]
        found.append(values)
        gradients = [mean_gradient(net, share) for net, share in zip(nets, shares, strict=True)]
        if clock < together:
            joint = zip(*gradients, strict=True)
            sizes = [len(share) / BATCH for share in shares]
            gradients = [[sum(n * g for n, g in zip(sizes, of, strict=True)) for of in joint]] * workers  # type: ignore[misc]
        for net, optimizer, gradient in zip(nets, optimizers, gradients, strict=True):
            for p, g in zip(net.parameters(), gradient, strict=True):
                p.grad = g.clone()
            optimizer.step()
        if clock + 1 > together and (clock + 1 - together) % period == 0:
            with torch.no_grad():
                for of in zip(*(net.parameters() for net in nets), strict=True):
                    mean = sum(of) / workers
                    for p in of:
                        p.copy_(mean)
    return found


def check_local(found: list[Any], by_hand: list[dict[str, Any]], measured: list[bool]) -> None:
    assert [bool(values) for values in found] == measured
    for values, want in zip(found, by_hand, strict=True):
        assert ("noise/adam/trace" in values) == (bool(values) and "noise/adam" in want)
        for name in [name for name in want if values]:
            of = want[name] if isinstance(want[name], list) else [want[name]]
            mean = [sum(column) / len(of) for column in zip(*of, strict=True)]
            got = [values[f"{name}/trace"], values[f"{name}/square"]]
            assert got == pytest.approx(mean, rel=1e-8), name


LOCAL = "local_sgd:period=2"


@pytest.mark.parametrize(
    ("strategy", "micro", "together", "period", "measured"),
    [
        (LOCAL, 2, 0, 2, [True, False, True, False, True]),
        ("diloco:period=3,outer_lr=1,outer_momentum=0", 2, 0, 3, [True, False, True, False, True]),
        ("local_sgd:period=3", None, 0, 3, [True, False, False, True, False]),
        ("local_sgd:period=2,post=2st", None, 2, 2, [True, False, True, False, True]),
    ],
)
def test_workers_with_parameters_of_their_own(
    strategy: str, micro: int | None, together: int, period: int, measured: list[bool]
) -> None:
    want = local_by_hand(micro, together, period)
    for devices in (1, 3):
        for _, found in worlds.run(devices, train, strategy=strategy, micro_batch=micro):
            check_local(found, want, measured)


@pytest.mark.parametrize("mode", ["async", "bounded,staleness=2"])
def test_asynchronous_workers_of_a_rank(mode: str) -> None:
    """With a rate of 0 all workers keep the first parameters, so that the order of their pushes does not matter."""
    from tutti.comm.partition import chunks, even_share

    net, want = model(), []
    for clock in range(STEPS):
        shares = [share_of(clock, worker, WORKERS) for worker in range(WORKERS)]
        parts = [[share[piece.start : piece.stop] for piece in chunks(len(share), 2)] for share in shares]
        want.append([estimated(part, net, [1.0] * 6) for part in parts])
    for devices in (1, 2):
        options = {"strategy": f"parameter_server:mode={mode}", "micro_batch": 2, "optimizer": "adam:lr=0"}
        for rank, (_, found) in enumerate(worlds.run(devices, train, **options)):
            mine = [{"noise": [step[worker] for worker in even_share(WORKERS, devices, rank)]} for step in want]
            check_local(found, mine, [True, False, True, False, True])


# --- custom training loops --------------------------------------------------------------------------------------------


def train_own(every: int | None = 2, plain: bool = False, rate: float = 0.01, **options: Any) -> tuple[Any, list[Any]]:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    options = {"workers": WORKERS, "batch_size": BATCH, **options}
    run = tutti.prepare(net, optimizer, data(), noise_every=every, **options)
    found = []
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        sums, count, _ = loss(net, batch)
        if plain:
            (sums / count).backward()
            run.reduce_gradients()
        else:
            run.backward((sums, count))
        optimizer.step()
        if run.stepped:
            found.append({} if run.noise_probe is None else dict(run.noise_probe.values()))
            if run.global_step == STEPS:
                break
    return {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}, found


LOOPS = [
    ("single", 1, True, {}),
    ("mirrored", 2, True, {}),
    ("mirrored", 3, True, {"reproducible": True}),
    ("sharded:stage=1", 2, True, {}),
    ("sharded:stage=3", 3, False, {}),
    # Of four ranks, as in CASES.
    pytest.param("hybrid:shards=2,stage=3,tensor=2,least=1", 4, False, {}, marks=pytest.mark.full),
    ("central_storage", 3, True, {}),
    ("tensor:least=1", 2, True, {}),
    ("parameter_server", 2, False, {}),
    ("mirrored", 2, True, {"plain": True}),
    pytest.param("single", 1, True, {"plain": True}, marks=pytest.mark.full),
    pytest.param("sharded:stage=1", 2, True, {"plain": True}, marks=pytest.mark.full),
    pytest.param("central_storage", 3, True, {"plain": True}, marks=pytest.mark.full),
    pytest.param("parameter_server", 2, False, {"plain": True}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("strategy", "devices", "adam", "options"), LOOPS)
def test_a_custom_loop(strategy: str, devices: int, adam: bool, options: dict[str, Any]) -> None:
    for _, found in worlds.run(devices, train_own, strategy=strategy, micro_batch=2, **options):
        check(found, 2, adam)


def test_a_custom_loop_over_pipeline_stages_compares_micro_batches() -> None:
    for _, found in worlds.run(2, train_own, strategy="pipeline:micro_batches=1"):
        check(found, None, adam=True)


def test_the_weights_of_a_custom_loop_are_those_without_it() -> None:
    for devices, strategy in ((1, "single"), (2, "mirrored"), (2, "sharded:stage=3"), (2, LOCAL)):
        options = {"strategy": strategy, "micro_batch": 2, **({"workers": 2} if strategy == LOCAL else {})}
        with_it = worlds.run(devices, train_own, every=2, **options)
        without = worlds.run(devices, train_own, every=None, **options)
        for (got, _), (want, _) in zip(with_it, without, strict=True):
            assert largest_difference(got, want) == 0


@pytest.mark.parametrize(("micro", "plain"), [(2, False), (None, False), (None, True)])
def test_a_custom_loop_of_local_sgd(micro: int | None, plain: bool) -> None:
    want = local_by_hand(micro, 0, 2, workers=2)
    for _, found in worlds.run(2, train_own, strategy=LOCAL, workers=2, micro_batch=micro, plain=plain):
        check_local(found, want, [True, False, True, False, True])


def test_a_custom_loop_of_asynchronous_servers() -> None:
    from tutti.comm.partition import chunks

    net, want = model(), []
    for clock in range(STEPS):
        shares = [share_of(clock, worker, 2) for worker in range(2)]
        parts = [[share[piece.start : piece.stop] for piece in chunks(len(share), 2)] for share in shares]
        want.append({"noise": [estimated(part, net, [1.0] * 6) for part in parts]})
    options = {"strategy": "parameter_server:mode=async", "workers": 2, "micro_batch": 2, "rate": 0.0}
    [(_, found)] = worlds.run(1, train_own, **options)
    check_local(found, want, [True, False, True, False, True])


def two_losses(update_between: bool) -> tuple[str, list[Any]]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    run = tutti.prepare(net, optimizer, data(), workers=WORKERS, batch_size=BATCH, noise_every=1)
    found = []
    try:
        for batch in run.microbatches(0):
            for factor in (1, 3):
                if update_between or factor == 1:
                    optimizer.zero_grad()
                sums, count, _ = loss(net, batch)
                run.backward((factor * sums, count))
                if update_between:
                    optimizer.step()
            if not update_between:
                optimizer.step()
            if run.stepped:
                found.append(dict(run.noise_probe.values()))
    except UsageError as error:
        return str(error), found
    return "", found


def test_of_several_updates_of_a_batch_the_first_counts_and_two_losses_of_one_are_refused() -> None:
    [(said, found)] = worlds.run(1, two_losses, update_between=False)
    assert "2 reductions of gradients in one update of a batch" in said and "test_noise_probe.py" in said and not found
    for _, found in worlds.run(4, two_losses, update_between=True):
        [(trace, square), *_] = by_hand(None)
        assert (found[0]["noise/trace"], found[0]["noise/square"]) == pytest.approx((trace, square), rel=1e-9)
