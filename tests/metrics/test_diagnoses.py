"""Each classic mistake is told of once, by name, by rank 0; sound runs are silent."""

from __future__ import annotations

import copy
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.data import Sharded
from tutti.metrics.diagnoses import CLASSICS

WORKERS = 4
BATCH = 48
SAMPLES = 400


def rows(count: int = SAMPLES, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def model(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(4) if norm else nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 1))


def mean(net: Any, batch: Any) -> Any:
    return net(batch).square().mean()


def prepare(loss: Any = mean, data: Any = None, norm: bool = False, rate: float = 0.1, **options: Any) -> Any:
    net = model(norm)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    options = {"workers": WORKERS, "batch_size": BATCH, **options}
    return tutti.prepare(net, optimizer, rows() if data is None else data, loss, **options)


def rank() -> int:
    return int(os.environ["RANK"])


def size() -> int:
    return int(os.environ["WORLD_SIZE"])


def steps(run: Any, count: int = 3) -> None:
    for _, batch in zip(range(count), run.epoch(0), strict=False):
        run.step(batch)


def told(what: Callable[[], Any]) -> list[str]:
    """What this rank was told by Python's warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        what()
    return [str(w.message) for w in seen if issubclass(w.category, tutti.DiagnosisWarning)]


def names(ranks: int, what: Callable[[], Any]) -> list[str]:
    """The names that rank 0 was told; the others are told nothing."""
    first, *others = worlds.run(ranks, told, what=what)
    assert not any(others)
    assert all(text.split(":")[0] in CLASSICS for text in first)
    return [text.split(":")[0] for text in first]


class Stream(IterableDataset[Any]):
    def __init__(self, first: int, by: int) -> None:
        self.first, self.by = first, by

    def __iter__(self) -> Iterator[Tensor]:
        yield from rows()[self.first :: self.by]


class OwnDraws:
    """Its samples follow a generator of its own, whatever the index: tutti seeds it for each sample."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3, generator=self.generator)


class ReadOn(Dataset[Any]):
    """Its samples follow one another as in an open file, whatever the index."""

    def __init__(self) -> None:
        self.following: Iterator[Tensor] = iter(list(rows()))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return next(self.following)


def brought(seed_of: Callable[[], int], count: int = 12) -> None:
    run, generator = prepare(), torch.Generator().manual_seed(seed_of())
    for _ in range(6):
        run.step(torch.randn(count, 3, generator=generator))


def one_seed() -> int:
    return 3


def unsharded() -> None:
    steps(prepare(data=Sharded(Stream(0, 1))))


def sharded() -> None:
    steps(prepare(data=Sharded(Stream(rank(), size()))))


def own_draws() -> None:
    steps(prepare(data=OwnDraws()))


def read_on() -> None:
    """In a loader process of each rank, which reads a sample twice, as this process does."""
    steps(prepare(data=DataLoader(ReadOn(), BATCH, num_workers=1), batch_size=None))


def identical() -> None:
    steps(prepare(identical_batches=True))


@pytest.mark.parametrize(
    ("what", "ranks"),
    in_turn([partial(brought, one_seed), partial(brought, one_seed, 5), unsharded], [2, 3, 4]),
)
def test_ranks_that_draw_the_same(ranks: int, what: Callable[[], Any]) -> None:
    assert names(ranks, what) == ["same-data"]


def test_samples_that_follow_one_another_are_refused() -> None:
    with pytest.raises(worlds.RankError, match="is another one when it is read again"):
        worlds.run(2, told, what=read_on)


@pytest.mark.parametrize("what", [sharded, own_draws])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_draw_their_own(ranks: int, what: Callable[[], Any]) -> None:
    assert names(ranks, what) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_workers_of_one_device_that_draw_the_same(ranks: int) -> None:
    assert names(ranks, identical) == ["same-data"]


def total(net: Any, batch: Any) -> Any:
    """A sum over samples; weights might as well make it a mean, so that its graph does not tell."""
    return (net(batch).square().expand(len(batch), 2) * torch.tensor([0.4, 0.6])).sum()


def counted(net: Any, batch: Any) -> Any:
    return net(batch).square().sum(), len(batch)


def one_for_all(net: Any, batch: Any) -> Any:
    return net(batch).square().sum(), 1


def divided_twice(net: Any, batch: Any) -> Any:
    return net(batch).square().mean(), len(batch)


def stubborn(net: Any, batch: Any) -> Any:
    if not torch.is_grad_enabled():
        raise RuntimeError("only training")
    return mean(net, batch)


def trained(loss: Any, **options: Any) -> None:
    steps(prepare(loss, **options))


def evaluated(loss: Any) -> None:
    run = prepare(None)
    run.evaluate(rows(50, 2), loss=loss)


@pytest.mark.parametrize(
    ("loss", "fires"),
    [(mean, 0), (counted, 0), (stubborn, 0), (total, 1), (one_for_all, 1), (divided_twice, 1)],
)
def test_a_loss_over_another_number_than_its_samples(loss: Any, fires: int) -> None:
    assert names(1, partial(trained, loss)) == ["loss-denominator"] * fires
    assert names(3, partial(trained, loss, micro_batch=4)) == ["loss-denominator"] * fires
    assert names(2, partial(trained, loss, strategy="local_sgd")) == ["loss-denominator"] * fires
    assert names(1, partial(trained, loss, workers=1)) == [], "one worker and one micro-batch: as on one device"


def test_the_loss_of_an_evaluation() -> None:
    assert names(2, partial(evaluated, total)) == ["loss-denominator"]
    assert names(2, partial(evaluated, counted)) == []


def in_batch_negatives(net: Any, batch: Any) -> Any:
    features = net(batch) * batch
    return nn.functional.cross_entropy(features @ features.T, torch.arange(len(batch)))


def variance(net: Any, batch: Any) -> Any:
    """Of each part of the batch, as the script says by a sum and a count; without them it is refused."""
    return len(batch) * (torch.relu(1 - net(batch).var(0).sqrt()).mean() + net(batch).square().mean()), len(batch)


def ignored(net: Any, batch: Any) -> Any:
    """A mean over targets, of which one of the first four samples has one."""
    targets = (batch[:, 1] > 0).long().where(batch[:, 0] > 0, -100)
    return nn.functional.cross_entropy(torch.cat([net(batch), -net(batch)], 1)[:, :2], targets)


def drawn(net: Any, batch: Any) -> Any:
    return (net(batch) * torch.rand(len(batch), 1)).square().mean()


def shuffled(net: Any, batch: Any) -> Any:
    return (net(batch) - net(batch[torch.randperm(len(batch))])).square().mean()


CALLS: list[int] = []


def grows(net: Any, batch: Any) -> Any:
    CALLS.append(1)
    return net(batch).square().mean() * (1 + 0.1 * len(CALLS))


@pytest.mark.parametrize(
    ("loss", "fires"),
    [(mean, 0), (counted, 0), (ignored, 0), (drawn, 0), (shuffled, 0), (in_batch_negatives, 1), (variance, 1)],
)
def test_a_loss_that_mixes_samples(loss: Any, fires: int) -> None:
    assert names(1, partial(trained, loss)) == ["mixed-samples"] * fires
    assert names(2, partial(trained, loss)) == ["mixed-samples"] * fires
    assert names(1, partial(trained, loss, workers=1)) == [], "one worker and one micro-batch: as on one device"


def two_views(net: Any, batch: Any) -> Any:
    """A margin to another sample, of two forwards."""
    own, near = net(batch), net(batch * 1.1)
    return torch.relu(1 + (own - near).square() - (own - near.roll(1, 0)).square()).mean()


def gathered(net: Any, batch: Any) -> Any:
    """Similarities with the outputs of all ranks, whose script knows that the loss mixes samples."""
    outputs = net(batch)
    return (outputs @ tutti.allgather(outputs).T).logsumexp(1).mean()


def by_hand(loss: Any, **options: Any) -> None:
    run = prepare(None, **options)
    for batch in islice(run.microbatches(0), 8):
        run.backward(loss(run.model, batch))
        run.optimizer.step()
        run.optimizer.zero_grad()


def centred(net: Any, batch: Any) -> Any:
    """The mean of a layer's outputs over the batch, which a model by hand takes away."""
    hidden = net[0](batch)
    return (net[2](hidden - hidden.mean(0)) + 0 * net(batch)).mean()


MIXING = {mean: False, counted: False, ignored: False, in_batch_negatives: True, variance: True, two_views: True}
MIXING |= {gathered: False}


@pytest.mark.parametrize(
    ("loss", "strategy"),
    in_turn(list(MIXING), ["mirrored", "sharded", "sharded:stage=1", "central_storage"], each=2),
)
def test_the_loss_of_a_body_that_mixes_samples(loss: Any, strategy: str) -> None:
    # A gather brings one micro-batch of each rank.
    workers = 2 if loss is gathered else WORKERS
    assert names(2, partial(by_hand, loss, strategy=strategy, workers=workers)) == ["mixed-samples"] * MIXING[loss]
    if strategy.startswith("sharded"):
        assert names(2, partial(trained, loss, strategy=strategy, workers=workers)) == ["mixed-samples"] * MIXING[loss]


def plainly(loss: Any) -> None:
    run = prepare(None)
    for batch in islice(run.microbatches(0), 2):
        loss(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.parametrize("loss", [in_batch_negatives, centred])
def test_the_loss_of_a_plain_backward_that_mixes_samples(loss: Any) -> None:
    assert names(2, partial(plainly, loss)) == ["mixed-samples"]


def two_networks(relative: bool) -> None:
    """A critic's loss of samples and of a generator's, each alone or relative to the mean of the others."""
    nets = nn.Linear(3, 3), nn.Linear(3, 1)
    run = prepare_all(nets)
    for (generator, critic), batch in ((nets, batch) for batch in islice(run.microbatches(0), 2)):
        real, made = critic(batch), critic(generator(batch))
        run.backward(torch.relu(1 - real + made.mean() * relative).mean() + torch.relu(1 + made).mean())
        run.optimizer.step()
        run.optimizer.zero_grad()


def prepare_all(nets: Any) -> Any:
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    run = tutti.prepare(list(nets), optimizer, rows(), workers=WORKERS, batch_size=BATCH)
    run.optimizer = optimizer
    return run


@pytest.mark.parametrize("relative", [False, True])
def test_the_loss_of_several_models_that_mixes_samples(relative: bool) -> None:
    assert names(2, partial(two_networks, relative)) == ["mixed-samples"] * relative


def cosines(net: Any, batch: Any) -> Any:
    """Similarities with the targets of all samples, of which each sample has one."""
    outputs, targets = net(batch).expand(-1, 2) * torch.tensor([1.0, 2.0]) + 1, nn.functional.normalize(batch[:, :2])
    return nn.functional.cross_entropy(outputs @ targets.T, torch.arange(len(batch)))


def advantages(net: Any, batch: Any) -> Any:
    """Targets less their mean over the batch, in units of their deviation."""
    target = batch[:, :1]
    return (nn.functional.logsigmoid(net(batch)) * (target - target.mean()) / target.std()).mean()


def by_frequency(net: Any, batch: Any) -> Any:
    labels = (batch[:, 0] > 0).long()
    rates = torch.bincount(labels, minlength=2).clamp(min=1)
    logits = torch.cat([net(batch), -net(batch)], 1)[:, :2]
    return (nn.functional.cross_entropy(logits, labels, reduction="none") / rates[labels]).mean()


def standardised(net: Any, batch: Any) -> Any:
    """Targets in units of all data, and a figure of the batch that the loss does not read."""
    batch[:, 1].mean().add_(1)
    return (net(batch) - (batch[:, 1:2] - 0.1) / 1.1).square().mean()


def hardest(net: Any, batch: Any) -> Any:
    losses = (net(batch) - batch[:, :1]).square().flatten()
    return losses.topk(max(1, len(batch) // 2)).values.mean() * len(batch), len(batch)


def trimmed(net: Any, batch: Any) -> Any:
    losses = (net(batch) - batch[:, :1]).square().flatten()
    return losses[losses <= losses.detach().quantile(0.8)].sum() / len(batch)


def middle(net: Any, batch: Any) -> Any:
    return (net(batch) - batch[:, :1]).abs().median() * len(batch), len(batch)


def clipped(net: Any, batch: Any) -> Any:
    """Each sample's own loss, whatever those of others."""
    return (
        nn.functional.smooth_l1_loss(net(batch), batch[:, :1]) + nn.functional.softplus(net(batch)).clamp(max=3).mean()
    )


AVERAGE = torch.zeros(())


def with_average(net: Any, batch: Any) -> Any:
    """A running average over the batches of all ranks, which the probe must not move."""
    AVERAGE.mul_(0.9).add_(0.1 * tutti.allreduce(batch[:, 0].mean()))
    return (net(batch) - AVERAGE).square().mean()


BY_TARGETS = [advantages, by_frequency, hardest, trimmed, middle, standardised, with_average, drawn, clipped, cosines]


@pytest.mark.parametrize(("loss", "strategy"), in_turn(BY_TARGETS, ["mirrored", "sharded", "sharded:stage=1"]))
def test_the_loss_of_a_body_that_mixes_samples_by_its_targets(loss: Any, strategy: str) -> None:
    fires = loss in (cosines, advantages, by_frequency, hardest, trimmed, middle)
    # Of an average that several workers of a rank share, each would get the values of the one before.
    options: dict[str, Any] = {"workers": 2} if loss is with_average else {}
    assert names(2, partial(by_hand, loss, strategy=strategy, **options)) == ["mixed-samples"] * fires


def each_alone(losses: Sequence[Any]) -> None:
    for loss in losses:
        by_hand(loss, workers=1)


def test_one_worker_mixes_as_one_device_does() -> None:
    assert names(1, partial(each_alone, [*MIXING, *BY_TARGETS])) == []


def averages(diagnostics: str) -> float:
    AVERAGE.zero_()
    with patch.dict(os.environ, TUTTI_DIAGNOSTICS=diagnostics):
        by_hand(with_average, workers=1)
    return float(AVERAGE)


def test_the_search_for_mixed_targets_changes_nothing() -> None:
    assert worlds.alone(averages, diagnostics="on") == worlds.alone(averages, diagnostics="off") != 0


def absolute(net: Any, batch: Any) -> Any:
    """Its second derivative is a tensor of zeros without memory."""
    return (net(batch) - batch[:, :1]).abs().mean()


@pytest.mark.parametrize(("loss", "fires"), [(absolute, 0), (variance, 1)])
def test_the_loss_of_a_body_that_mixes_samples_on_an_accelerator(
    loss: Any, fires: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "DEVICE", worlds.ACCELERATOR)
    for strategy in ("mirrored", "sharded"):
        assert names(2, partial(by_hand, loss, strategy=strategy)) == ["mixed-samples"] * fires


def test_a_loss_that_counts_its_calls_is_not_told_to_mix_samples() -> None:
    assert names(2, partial(trained, grows, workers=2, micro_batch=BATCH // 4)) == []


def words(own: bool, **options: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 3, scale_grad_by_freq=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"workers": WORKERS, "batch_size": BATCH, **options}
    run = tutti.prepare(net, optimizer, torch.randint(0, 9, (SAMPLES,)), None if own else mean, **options)
    for batch in islice(run.microbatches(0), 8) if own else ():
        optimizer.zero_grad()
        run.backward(mean(net, batch))
        optimizer.step()
    if not own:
        steps(run)


def test_a_table_whose_gradient_counts_words() -> None:
    for own in (False, True):
        assert names(2, partial(words, own)) == ["mixed-samples"]
        assert names(1, partial(words, own, workers=1)) == []


def alone(run: Any) -> None:
    run.model.eval()
    run.model(rows(5))
    run.model.train()


def saved(run: Any) -> None:
    run.model.state_dict()


def copied(run: Any) -> None:
    """A copy with the merged statistics is sound; so is what is written whole."""
    for other in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        other.load_state_dict(run.state())
        other.eval()(rows(5))
        other.state_dict()


def proper(run: Any) -> None:
    run.evaluate(rows(50, 2), loss=mean)
    run.state()
    run.weights_sha256()


def again(run: Any) -> None:
    """The model is another run's now."""
    tutti.prepare(run.model, "sgd:lr=0.1", rows(), mean, workers=WORKERS).evaluate(rows(50, 2))


def normalised(then: Any, own: bool, norm: bool = True, frozen: bool = False, workers: int = WORKERS) -> None:
    run = prepare(None if own else mean, norm=norm, workers=workers)
    if frozen:
        run.model[1].eval()
    for batch in run.microbatches(0) if own else run.epoch(0):
        if own:
            # A teacher, say: in its turn a worker uses what is its own.
            alone(run)
            run.model[1].train(not frozen)
            run.model.zero_grad()
            run.backward(mean(run.model, batch))
            run.optimizer.step()
        else:
            run.step(batch)
        if own and run.stepped and run.global_step == 3 and then is not again:
            then(run)
            run.model[1].train(not frozen)
    then(run)


@pytest.mark.parametrize(("ranks", "what"), in_turn([1, 2, 3, 4], [alone, saved]))
def test_the_statistics_of_one_worker(ranks: int, what: Any) -> None:
    assert names(ranks, partial(normalised, what, True)) == ["one-rank-statistics"]
    assert names(ranks, partial(normalised, what, False)) == ["one-rank-statistics"]


@pytest.mark.parametrize(("ranks", "own"), in_turn([3, 1], [True, False]))
def test_statistics_that_are_everybodys_are_nobodys_alone(ranks: int, own: bool) -> None:
    assert names(ranks, partial(normalised, proper, own)) == []
    assert names(ranks, partial(normalised, copied, own)) == []
    assert names(ranks, partial(normalised, again, own)) == []
    assert names(ranks, partial(normalised, alone, own, norm=False)) == []
    assert names(ranks, partial(normalised, alone, own, frozen=True)) == []


def test_statistics_of_a_lone_worker_are_everybodys() -> None:
    assert names(1, partial(normalised, alone, True, workers=1)) == []


class Counter(nn.Module):
    """Counts its calls, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return values


def drawing(net: Any, batch: Any) -> Any:
    return mean(net, batch) * (1 + random.random() + np.random.rand() + torch.rand(()))


def watched(looking: bool) -> tuple[str, float, float]:
    net = model(norm=True).append(Counter())
    run = tutti.prepare(net, "sgd:lr=0.1", rows(), drawing, workers=WORKERS, batch_size=BATCH)
    random.seed(1)
    np.random.seed(1)
    run.checks.looking = looking
    steps(run)
    return run.weights_sha256(), random.random(), np.random.rand()


def test_looking_changes_no_weight_no_statistic_and_no_draw() -> None:
    assert worlds.run(1, watched, looking=True) == worlds.run(1, watched, looking=False)


class InPython(nn.Module):
    """Counts its calls in Python, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.total = 0, [0.0], torch.zeros(())

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(1.0)
        self.total += 1
        return values


class Annealed:
    """A loss function that counts its calls in itself, in a variable, and in its module."""

    calls = 0

    def __call__(self, net: Any, batch: Any) -> Any:
        self.calls += 1
        return mean(net, batch)


def anneal(annealed: Any) -> Callable[..., Any]:
    calls, table = 0, {"calls": 0}

    def loss(net: Any, batch: Any) -> Any:
        nonlocal calls
        calls, table["calls"] = calls + 1, table["calls"] + 1
        return annealed(net, batch) * (1 + calls + table["calls"])

    return loss


def counted_calls(looking: bool) -> tuple[Any, ...]:
    layer, annealed = InPython(), Annealed()
    options: dict[str, Any] = {"workers": size(), "batch_size": BATCH, "micro_batch": BATCH // 4}
    run = tutti.prepare(model().append(layer), "sgd:lr=0.01", rows(), anneal(annealed), **options)
    run.checks.looking = looking
    for batch in islice(run.epoch(0), 3):
        run.step(batch)
    return run.weights_sha256(), layer.calls, len(layer.seen), float(layer.total), annealed.calls


def test_looking_leaves_what_python_counts() -> None:
    assert worlds.run(2, counted_calls, looking=True) == worlds.run(2, counted_calls, looking=False)
    assert worlds.run(1, counted_calls, looking=True)[0][1:] == (12, 13, 12.0, 12)


def counting(micro: int | None, workers: int) -> None:
    net = model().append(InPython())
    steps(tutti.prepare(net, "sgd:lr=0.01", rows(), mean, workers=workers, batch_size=BATCH, micro_batch=micro))


def test_a_model_that_counts_micro_batches_in_python() -> None:
    assert names(1, partial(counting, None, WORKERS)) == ["counted-forwards"]
    assert names(1, partial(counting, BATCH // 2, 1)) == ["counted-forwards"]
    assert names(1, partial(counting, None, 1)) == []
    assert names(2, partial(counting, None, 2)) == []


def held_out(kind: str, count: int) -> Any:
    data = TensorDataset(rows(count, 2))
    if kind == "whole":
        return data
    if kind == "few values":
        return TensorDataset(rows(count, 2).sign())
    if kind == "padded":
        return Subset(data, [*range(count), *range(-count % (size() + 1))])
    sampler: Any = DistributedSampler(data, size(), rank(), shuffle=False)
    return Subset(data, list(sampler))


def scored(kind: str, count: int) -> None:
    run = prepare(lambda net, batch: mean(net, batch if isinstance(batch, Tensor) else batch[0]))
    for _ in range(2):
        run.evaluate(held_out(kind, count))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_held_out_samples_that_are_not_each_there_once(ranks: int) -> None:
    assert names(ranks, partial(scored, "padded", (ranks + 1) * 20 + 1)) == ["padded-evaluation"]
    assert names(ranks, partial(scored, "shard", 50)) == ["padded-evaluation"]
    for kind in ("whole", "few values"):
        assert names(ranks, partial(scored, kind, 50)) == []
        assert names(ranks, partial(scored, kind, 3)) == []


def rated(rate: float, **options: Any) -> None:
    steps(prepare(rate=rate, data=rows(40_000), **options), 1)


def warmed_up() -> None:
    run = prepare(None, rate=1.6, data=rows(100_000), batch_size=4096)
    OneCycleLR(run.optimizer, 1.6, total_steps=1000)
    next(iter(run.microbatches(0)))


def planned(epochs: int) -> None:
    prepare(data=rows(1000), batch_size=60).epochs(epochs)


def test_a_rate_far_from_the_usual() -> None:
    for ranks in (1, 3):
        assert names(ranks, partial(rated, 100.0)) == ["far-rate"]
        assert names(ranks, partial(rated, 0.1, batch_size=4096)) == ["far-rate"]
        assert names(ranks, partial(rated, 0.1)) == []
        assert names(ranks, partial(rated, 0.1, batch_size=4096, strategy="local_sgd")) == [], "1,024 a worker"
    assert names(1, partial(rated, 100.0, workers=1)) == []
    assert names(2, warmed_up) == []


def test_few_updates_of_a_large_batch() -> None:
    for ranks in (1, 2):
        assert names(ranks, partial(planned, 4)) == ["few-updates"]
        assert names(ranks, partial(planned, 1)) == [], "few with one worker's batch as well"
        assert names(ranks, partial(planned, 30)) == []


def trained_on(epochs: Sequence[int], loop: bool) -> None:
    run = prepare(None if loop else mean)
    for epoch in epochs:
        for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
            if loop:
                run.backward(mean(run.model, batch))
                run.gated_step()
            else:
                run.step(batch)


@pytest.mark.parametrize("loop", [False, True])
def test_an_epoch_that_is_trained_on_again(loop: bool) -> None:
    assert names(2, partial(trained_on, [0, 0, 0], loop)) == ["repeated-epoch"]
    assert names(2, partial(trained_on, [0, 1, 2], loop)) == []


def mixed(draws: str, loop: bool, begins: int = 0, **options: Any) -> None:
    random_numbers = {"numpy": np.random.rand, "python": random.random, "torch": lambda: torch.rand(()).item()}

    def loss(net: Any, batch: Any) -> Any:
        return mean(net, batch * (random_numbers[draws]() if run.global_step >= begins else 1))

    run = prepare(None if loop else loss, **options)
    random.random(), np.random.rand()
    if not loop:
        steps(run, 8)
        return
    for _, batch in zip(range(24), run.microbatches(0), strict=False):
        run.backward(loss(run.model, batch))
        run.gated_step()


def test_draws_that_tutti_does_not_key() -> None:
    assert names(2, partial(mixed, "numpy", True, 6)) == ["unkeyed-draws"]
    assert names(1, partial(mixed, "python", False, 6)) == ["unkeyed-draws"]
    assert names(1, partial(mixed, "torch", True, 6)) == names(1, partial(mixed, "numpy", True)) == []


def silenced() -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "same-data", tutti.DiagnosisWarning)
        run = prepare(total, identical_batches=True)
        steps(run)
    assert run.checks.diagnoses.found == ["loss-denominator", "same-data"]
    return [f"{w.filename.rsplit('/', 1)[-1]} {str(w.message).split(':')[0]}" for w in seen]


def test_a_name_can_be_silenced_and_the_others_point_at_the_caller() -> None:
    assert worlds.run(1, silenced) == [["test_diagnoses.py loss-denominator"]]
