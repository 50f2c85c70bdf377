"""Values that each data rank keeps of its own samples: a loss that depends on them is refused, others are right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tests.scripts.oracle import global_batches
from tutti.errors import TuttiError
from tutti.torch_compat import traced_function_modes
from tutti.train.script_checks.cross_step_watch import CrossStepWatch

Arrays = dict[str, Any]
BATCH = 12


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.arange(48) % 3, torch.arange(48))


class Network(nn.Module):
    """Returns scores and features."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        found = self.features(inputs)
        return self.head(found), found


class Loss:
    """A loss of which each subclass keeps something; ``after`` is called after each update."""

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def after(self) -> None:
        pass


class Bank(Loss):
    """Contrast with features of earlier batches, as MoCo's queue (arXiv 1911.05722) without a gather."""

    def __init__(self) -> None:
        self.queue = torch.ones(16, 5, dtype=torch.float64)

    def kept(self, features: Tensor) -> Tensor:
        return features

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        scores, features = model(batch[0])
        negatives = (features @ self.queue.T).logsumexp(1).mean()
        self.queue = torch.cat([self.kept(features.detach()), self.queue])[:16]
        loss: Tensor = functional.cross_entropy(scores, batch[1]) + 0.1 * negatives
        return loss


class GatheredBank(Bank):
    """The same queue with the features of all ranks."""

    def kept(self, features: Tensor) -> Tensor:
        return tutti.allgather(features)


class InPlace(Loss):
    """A queue in a ring buffer."""

    def __init__(self) -> None:
        self.queue, self.place = torch.ones(24, 5, dtype=torch.float64), 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        scores, features = model(batch[0])
        self.queue[self.place : self.place + len(features)] = features.detach()
        self.place = (self.place + len(features)) % 24
        negatives: Tensor = (features @ self.queue.T).logsumexp(1).mean()
        return functional.cross_entropy(scores, batch[1]) + 0.1 * negatives


class Memory(Loss):
    """Weights by the samples' losses of the epoch before."""

    def __init__(self) -> None:
        self.losses = torch.ones(48, dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, numbers = batch
        losses = functional.cross_entropy(model(inputs)[0], targets, reduction="none")
        weights = self.losses[numbers]
        self.losses[numbers] = losses.detach()
        return (losses * weights).mean()


class Usual(Loss):
    """A loss divided by a running mean of the steps before."""

    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0])[0], batch[1])
        divided = loss / self.mean
        self.mean = 0.9 * self.mean + 0.1 * loss.item()
        return divided


class Dictionary(Loss):
    """Weights by losses in a dict of numbers."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses = functional.cross_entropy(model(batch[0])[0], batch[1], reduction="none")
        usual = sum(self.losses.values()) / max(len(self.losses), 1)
        self.losses.update(zip(batch[2].tolist(), losses.detach().tolist(), strict=True))
        return (losses * torch.sigmoid(losses.detach() - usual)).mean()


class Centre(Loss):
    """A centre of outputs that moves with each batch, as in DINO (arXiv 2104.14294, algorithm 1)."""

    def __init__(self) -> None:
        self.centre = torch.zeros(3, dtype=torch.float64)

    def mean(self, scores: Tensor) -> Tensor:
        return scores.mean(0)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        scores, _ = model(batch[0])
        loss = functional.cross_entropy(scores - self.centre, batch[1])
        self.centre.mul_(0.9).add_(self.mean(scores.detach()), alpha=0.1)
        return loss


class ReducedCentre(Centre):
    """The same centre of the samples of all ranks."""

    def mean(self, scores: Tensor) -> Tensor:
        return tutti.allreduce(scores.mean(0))


class DistributedCentre(Centre):
    """The same by PyTorch, as in DINO's own script."""

    def mean(self, scores: Tensor) -> Tensor:
        total = scores.sum(0)
        if tutti.size() == 1:
            return total / len(scores)
        torch.distributed.all_reduce(total)
        return total / BATCH


class Logged(Loss):
    """A plain loss, with means for a log."""

    def __init__(self) -> None:
        self.mean, self.number = torch.zeros((), dtype=torch.float64), 0.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = functional.cross_entropy(model(batch[0])[0], batch[1])
        self.mean, self.number = 0.9 * self.mean + 0.1 * loss.detach(), 0.9 * self.number + 0.1 * loss.item()
        return loss


class Cached(Loss):
    """A penalty with a table that grows with the samples of a rank, and one with samples of the rank's own."""

    def __init__(self) -> None:
        self.table = torch.zeros(0, dtype=torch.float64)
        self.more = torch.randn(4, generator=torch.Generator().manual_seed(tutti.rank()), dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        scores, _ = model(batch[0])
        if len(self.table) < len(scores) + tutti.rank():
            self.table = torch.arange(len(scores) + tutti.rank(), dtype=torch.float64).sin()
        loss = functional.cross_entropy(scores, batch[1])
        penalty: Tensor = (self.table[: len(scores), None] * scores).mean() + model(self.more[None])[0].sum()
        return loss + 0 * penalty


class Perturbed(Loss):
    """Free adversarial training (arXiv 1904.12843): a perturbation by place in the batch, kept for the next one."""

    def __init__(self) -> None:
        self.delta = torch.zeros(BATCH, 4, dtype=torch.float64)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, _ = batch
        delta = self.delta[: len(inputs)].clone().requires_grad_()
        with torch.enable_grad():
            [gradient] = torch.autograd.grad(functional.cross_entropy(model(inputs + delta)[0], targets), delta)
        self.delta[: len(inputs)] = (delta + 0.1 * gradient.sign()).clamp(-0.2, 0.2).detach()
        return functional.cross_entropy(model(inputs + self.delta[: len(inputs)])[0], targets)


class Taught(Loss):
    """A loss towards an average of the weights, with batch norm in training mode."""

    def __init__(self) -> None:
        self.teacher: nn.Module | None = None
        self.norm = nn.BatchNorm1d(3, affine=False, momentum=0.1).double()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.teacher is None:
            self.teacher = Network().double().requires_grad_(False)
            self.teacher.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        with torch.no_grad():
            for own, new in zip(self.teacher.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(new, alpha=0.1)
            towards = self.teacher(batch[0])[0]
            self.norm(towards)
        scores, _ = model(batch[0])
        return functional.cross_entropy(scores, batch[1]) + functional.mse_loss(scores, towards)


class Target(Loss):
    """A loss towards a target network that the script averages between steps, and never freezes, as DDPG's."""

    def __init__(self) -> None:
        self.target = Network().double()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            towards = self.target(batch[0])[0]
        scores, _ = model(batch[0])
        return functional.cross_entropy(scores, batch[1]) + functional.mse_loss(scores, towards)

    def after(self) -> None:
        with torch.no_grad():
            for parameter in self.target.parameters():
                parameter.mul_(0.9)


class Converted(Loss):
    """A loss towards a teacher that is not trained, and that the first call moves to the samples' dtype."""

    def __init__(self) -> None:
        self.teacher = Network()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.teacher.to(batch[0])
        with torch.no_grad():
            towards = self.teacher(batch[0])[0]
        scores, _ = model(batch[0])
        return functional.cross_entropy(scores, batch[1]) + functional.mse_loss(scores, towards)


class Uncertain(Loss):
    """Two losses with learned weights (Kendall et al., arXiv 1705.07115) that are no part of the model."""

    def __init__(self) -> None:
        self.weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.weights], lr=0.1)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        scores, features = model(batch[0])
        losses = torch.stack([functional.cross_entropy(scores, batch[1]), features.square().mean()])
        return ((-self.weights).exp() * losses + self.weights).sum()

    def after(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class ByHand(Uncertain):
    """The same weights, updated by hand."""

    def after(self) -> None:
        assert self.weights.grad is not None
        self.weights.data -= 0.1 * self.weights.grad
        self.weights.grad = None


class ConvertedByHand(ByHand):
    """The same weights, which the first call moves to the samples' dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weights.data = self.weights.data.float()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.weights.data = self.weights.data.type_as(batch[0])
        return super().__call__(model, batch)


class Summed(Uncertain):
    """The same weights, whose gradients the script reduces over ranks."""

    def after(self) -> None:
        assert self.weights.grad is not None
        self.weights.grad = tutti.allreduce(self.weights.grad, op="sum")
        super().after()


KEEPING: dict[str, Callable[[], Loss]] = {
    "a queue": Bank,
    "a ring buffer": InPlace,
    "losses by sample": Memory,
    "a running mean": Usual,
    "a dict": Dictionary,
    "a centre": Centre,
    "learned weights": Uncertain,
    "learned weights by hand": ByHand,
    "converted weights by hand": ConvertedByHand,
}
SAID = "each rank has kept from its own samples", "an optimizer that tutti.prepare was not given trains tensors"
RIGHT: dict[str, Callable[[], Loss]] = {
    "a gathered queue": GatheredBank,
    "a reduced centre": ReducedCentre,
    "a centre reduced by PyTorch": DistributedCentre,
    "a log": Logged,
    "a cache": Cached,
    "a perturbation": Perturbed,
    "a teacher": Taught,
    "a target network": Target,
    "a converted teacher": Converted,
    "reduced weights": Summed,
}


def plain(kind: str) -> Arrays:
    torch.manual_seed(0)
    model, loss = Network().double(), (KEEPING | RIGHT)[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in global_batches(dataset(), BATCH, epoch):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            loss.after()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def train(strategy: str, kind: str, form: str, compiled: bool = False) -> Any:
    """Return the state after two epochs, or the error and the number of updates before it."""
    torch.manual_seed(0)
    model, loss = Network().double(), (KEEPING | RIGHT)[kind]()
    if compiled:
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, dataset(), loss, strategy=strategy, batch_size=BATCH, seed=0)
    try:
        for epoch in range(2):
            if form == "step":
                for batch in run.epoch(epoch):
                    run.step(batch)
                    loss.after()
            else:
                for batch in run.microbatches(epoch):
                    optimizer.zero_grad()
                    run.backward(loss(model, batch))
                    optimizer.step()
                    loss.after()
    except TuttiError as error:
        return str(error), run.updates
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(("kind", "form", "ranks"), table(list(KEEPING), ["step", "loop"], [2, 3]))
def test_what_each_rank_keeps_of_its_own_samples_is_refused_before_the_loss_depends_on_it(
    kind: str, form: str, ranks: int
) -> None:
    for found in worlds.run(ranks, train, strategy="mirrored", kind=kind, form=form):
        assert isinstance(found, tuple), found
        said, updates = found
        assert SAID[kind == "learned weights"] in said and "test_cross_step_watch.py:" in said, said
        # A queue, memory or mean is the same on every rank in the first step.
        assert updates <= 1


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded", "central_storage", "parameter_server"])
def test_the_same_under_other_strategies(strategy: str) -> None:
    want = worlds.alone(plain, kind="a reduced centre")
    for form, kind in (("step", "a queue"), ("loop", "a running mean"), ("loop", "learned weights by hand")):
        for found in worlds.run(2, train, strategy=strategy, kind=kind, form=form):
            assert isinstance(found, tuple) and SAID[0] in found[0], found
    for got in worlds.run(2, train, strategy=strategy, kind="a reduced centre", form="loop"):
        assert isinstance(got, dict), got
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd:period=2"])
def test_an_optimizer_outside_of_the_run_is_refused_with_a_compiled_model_and_workers_that_train_alone(
    strategy: str,
) -> None:
    for found in worlds.run(2, train, strategy=strategy, kind="learned weights", form="loop", compiled=True):
        assert isinstance(found, tuple) and "SGD.step() " in found[0], found


def weights(kind: str, form: str, strategy: str = "model_parallel") -> list[float]:
    """Return the learned weights of a run in two stages."""
    torch.manual_seed(0)
    model, loss = Network().double(), KEEPING[kind]()
    assert isinstance(loss, Uncertain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, dataset(), loss, strategy=strategy, batch_size=BATCH, seed=0)
    if form == "step":
        for batch in run.epoch(0):
            run.step(batch)
            if tutti.rank():
                loss.after()
    else:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
            loss.after()
    found: list[float] = loss.weights.tolist()
    return found


@pytest.mark.parametrize("kind", ["learned weights", "learned weights by hand"])
def test_weights_beside_a_model_in_stages_are_the_same_on_every_rank_or_refused(kind: str) -> None:
    one, other = worlds.run(2, weights, kind=kind, form="loop")
    assert one == other != [0.0, 0.0]
    for strategy in ("model_parallel", "pipeline:micro_batches=2"):
        # The first stage's rank waits for the one that is refused.
        with pytest.raises(worlds.RankError, match=r"trains tensors that are not in the model .*the last stage's rank"):
            worlds.run_within(5.0, 2, weights, kind=kind, form="step", strategy=strategy)
        worlds.forget(2)


def with_another_model(strategy: str, samples: float) -> Any:
    """Return the model's tensors after an epoch, in which the script trains another model between the steps."""
    torch.manual_seed(0)
    model, loss = Network().double(), functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(
        model,
        optimizer,
        dataset(),
        lambda model, batch: loss(model(batch[0])[0], batch[1]),
        strategy=strategy,
        batch_size=BATCH,
        seed=0,
    )
    other = nn.Linear(2, 1)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    for batch in run.epoch(0):
        try:
            run.step(batch)
        except TuttiError as error:
            return str(error), run.updates
        of_other.zero_grad()
        other(torch.full((1, 2), 1.0 + samples * tutti.rank())).sum().backward()
        of_other.step()
    return {name: value.numpy() for name, value in run.state().items()}


def test_another_model_may_be_trained_beside_stages() -> None:
    (want,) = worlds.run(1, with_another_model, strategy="single", samples=1.0)
    for got in worlds.run(2, with_another_model, strategy="model_parallel", samples=1.0):
        assert isinstance(got, dict), got
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def test_another_model_that_replicas_of_stages_train_apart_is_refused() -> None:
    for samples in (0.0, 1.0):
        for found in worlds.run(4, with_another_model, strategy="pipeline:stages=2", samples=samples):
            assert isinstance(found, dict) if samples == 0 else "SGD.step() " in found[0], found


@pytest.mark.parametrize("strategy", ["local_sgd:period=2", "parameter_server:mode=async"])
def test_weights_by_hand_are_refused_where_workers_train_alone(strategy: str) -> None:
    for form, kind in (("step", "learned"), ("loop", "learned"), ("step", "converted")):
        for found in worlds.run(2, train, strategy=strategy, kind=f"{kind} weights by hand", form=form):
            assert isinstance(found, tuple) and "trains tensors that are not in the model" in found[0], found


def test_values_of_each_worker_are_its_own_where_workers_train_alone() -> None:
    for form, kind in (("loop", "a queue"), ("loop", "a target network"), ("step", "a converted teacher")):
        for found in worlds.run(2, train, strategy="local_sgd:period=2", kind=kind, form=form):
            assert isinstance(found, dict), found


@pytest.mark.parametrize(("kind", "form", "ranks"), table(list(RIGHT), ["step", "loop"], [2, 3]))
def test_what_ranks_have_alike_or_no_loss_depends_on_is_right(kind: str, form: str, ranks: int) -> None:
    want = worlds.alone(plain, kind=kind)
    for got in worlds.run(ranks, train, strategy="mirrored", kind=kind, form=form):
        assert isinstance(got, dict), got
        assert all(abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def beside_sparse() -> list[float]:
    """Train a model, and beside it a table with sparse gradients, by an optimizer that tutti does not know."""
    torch.manual_seed(0)
    model, table = nn.Linear(4, 3).double(), nn.Embedding(9, 4, sparse=True).double()
    own = torch.optim.SGD(table.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64), torch.arange(24) % 3)
    run = tutti.prepare(
        model, "sgd:lr=0.1", data, lambda m, b: functional.cross_entropy(m(b[0]), b[1]), workers=2, batch_size=6
    )
    losses = []
    for batch in run.epoch(0):
        own.zero_grad()
        table(torch.tensor([1, 3, 3])).square().sum().backward()
        own.step()
        losses.append(run.step(batch))
    return losses


def test_another_model_with_sparse_gradients_trains_beside_the_run() -> None:
    one, other = worlds.run(2, beside_sparse)
    assert one == other and len(one) == 4


def headers(workers: int) -> list[int]:
    """Compute and drop 2,000 tensors in every body of a loop, and count the storages whose headers are kept then."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    data = TensorDataset(torch.randn(24, 4, dtype=torch.float64), torch.arange(24) % 3)
    run = tutti.prepare(model, "sgd:lr=0.1", data, None, workers=workers, batch_size=12)
    kept = []
    for x, y in run.microbatches(0):
        value = torch.ones(4)
        for _ in range(2000):
            value = value * 1.0
        kept.append(sum(isinstance(each, StorageWeakRef) for each in gc.get_objects()))
        run.backward(functional.cross_entropy(run.model(x), y))
    return kept


@pytest.mark.parametrize("workers", [2, 4])
def test_a_watched_body_keeps_no_header_of_each_freed_tensor(workers: int) -> None:
    for kept in worlds.run(2, headers, workers=workers):
        assert len(kept) == workers and max(kept) < 1000, kept


def modes_of_code() -> list[list[bool]]:
    """For each body of a loop: whether the mode that follows kept values sees the body, a step hook, and the rest."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(48, 4, dtype=torch.float64), torch.arange(48) % 3)
    run = tutti.prepare(model, optimizer, data, None, workers=2, batch_size=12)
    seen: list[list[bool]] = []

    def look(*_: Any) -> None:
        seen[-1].append(any(isinstance(mode, CrossStepWatch) for mode in traced_function_modes()))

    optimizer.register_step_pre_hook(look)
    for x, y in run.microbatches(0):
        seen.append([])
        look()
        run.backward(functional.cross_entropy(run.model(x), y))
        look()
        optimizer.step()
        look()
    return seen


def test_the_mode_is_off_the_stack_while_an_update_is_made() -> None:
    for seen in worlds.run(2, modes_of_code):
        # In the first body a mode of another check lies above it.
        assert seen[1:] == [[True, True, False, True]] * 3
