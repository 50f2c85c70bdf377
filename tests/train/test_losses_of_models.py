"""Models that compute their loss themselves, a mean over the tokens that are no padding: equal to plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import UsageError

BATCH, EPOCHS = 6, 2
Batch = dict[str, Tensor]


class Language(nn.Module):
    """Returns its loss beside the scores, as models of transformers do: a mean over tokens, or a sum by ``count``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def forward(self, words: Tensor, labels: Tensor, count: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head(self.layers(self.embedding(words)))
        kind = "mean" if count is None else "sum"
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction=kind)
        return {"loss": loss if count is None else loss / count, "scores": scores}


def data() -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(1, 9, (20, 5), generator=draw)
    ends = torch.randint(1, 6, (20, 1), generator=draw)
    labels = words.masked_fill(torch.arange(5) >= ends, -100)
    return [{"words": w, "labels": t} for w, t in zip(words, labels, strict=True)]


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Language().double()
    return model, torch.optim.Adam(model.parameters(), lr=0.03)


def of_mean(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def of_count(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, count=(batch["labels"] != -100).sum())["loss"]
    return loss


def scaled(model: Any, batch: Batch) -> Tensor:
    return 0.5 * of_mean(model, batch)


def in_place(model: Any, batch: Batch) -> Tensor:
    loss = of_mean(model, batch)
    loss /= 2
    return loss


def with_penalty(model: Any, batch: Batch) -> Tensor:
    found = model(**batch)
    loss: Tensor = found["loss"] + 0.01 * found["scores"].pow(2).mean()
    return loss


def rooted(model: Any, batch: Batch) -> Tensor:
    return of_mean(model, batch).sqrt()


def by_token(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    scores, labels = model(**batch)["scores"], batch["labels"]
    return -scores.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0], labels >= 0


def of_chosen(model: Any, batch: Batch) -> Tensor:
    losses, kept = by_token(model, batch)
    return losses[kept].mean()


def of_known(model: Any, batch: Batch) -> Tensor:
    losses, kept = by_token(model, batch)
    return torch.where(kept, losses, torch.nan).nanmean()


def summed(model: Any, batch: Batch) -> Tensor:
    return by_token(model, batch)[0].sum()


def spread(model: Any, batch: Batch) -> Tensor:
    return of_mean(model, batch) + (1 - model(**batch)["scores"].flatten(1).std(0)).relu().mean()


def of_mask(model: Any, batch: Batch) -> Tensor:
    losses, kept = by_token(model, batch)
    return (losses * kept).sum() / (kept.sum() + kept.sum() % 2 + 1)


LOSSES = {
    each.__name__: each
    for each in (
        *(of_mean, of_count, scaled, in_place, with_penalty, rooted, of_chosen, of_mask),
        *(of_known, summed, spread),
    )
}


def train(loss: str, strategy: str, micro_batch: int | None, own_loop: bool) -> dict[str, Any]:
    model, optimizer = build()
    options: dict[str, Any] = {} if micro_batch is None else {"micro_batch": micro_batch}
    loss_fn = LOSSES[loss]
    run = tutti.prepare(
        model, optimizer, data(), loss_fn, strategy=strategy, batch_size=BATCH, shuffle=False, **options
    )
    for epoch in range(EPOCHS):
        for batch in run.microbatches(epoch) if own_loop else run.epoch(epoch):
            if own_loop:
                optimizer.zero_grad()
                run.backward(loss_fn(model, batch))
                optimizer.step()
            else:
                run.step(batch)
    return {name: tensor.numpy() for name, tensor in run.state().items()}


def plain(loss: str) -> dict[str, Any]:
    model, optimizer = build()
    rows = data()
    for _ in range(EPOCHS):
        for start in range(0, len(rows), BATCH):
            batch = {k: torch.stack([row[k] for row in rows[start : start + BATCH]]) for k in rows[0]}
            optimizer.zero_grad()
            LOSSES[loss](model, batch).backward()
            optimizer.step()
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def check_equal(loss: str, size: int, **options: Any) -> None:
    want = worlds.alone(plain, loss=loss)
    for state in worlds.run(size, train, loss=loss, **options):
        for name, value in want.items():
            assert abs(state[name] - value).max() < 1e-10, (name, options)


STAGES = [(2, "pipeline"), (3, "model_parallel"), (2, "hybrid:stages=2")]


@pytest.mark.parametrize(
    ("loss", "place"), in_turn(["of_mean", "scaled", "in_place", "of_chosen", "of_known"], STAGES, each=2), ids=str
)
def test_loops_of_stages_divide_by_the_tokens_of_the_global_batch(loss: str, place: tuple[int, str]) -> None:
    size, strategy = place
    check_equal(loss, size, strategy=strategy, micro_batch=2, own_loop=True)


@pytest.mark.parametrize(
    ("strategy", "own_loop"),
    in_turn(["mirrored", "sharded:stage=2", "sharded", "central_storage", "tensor:least=1"], [False, True]),
)
def test_a_count_that_the_script_gives_the_model_is_that_of_its_loss(strategy: str, own_loop: bool) -> None:
    check_equal("of_count", 3, strategy=strategy, micro_batch=None, own_loop=own_loop)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(("size", "strategy"), [(2, "mirrored"), (3, "sharded"), (3, "sharded:stage=1")])
def test_a_mean_without_nan_is_that_of_the_global_batch(size: int, strategy: str, own_loop: bool) -> None:
    check_equal("of_known", size, strategy=strategy, micro_batch=None, own_loop=own_loop)


REFUSED = [("summed", "a sum over"), ("spread", "takes std over")]


@pytest.mark.parametrize(("loss", "what"), REFUSED)
@pytest.mark.parametrize(("size", "strategy", "own_loop"), [(2, "mirrored", True), (3, "sharded", False)])
def test_losses_of_parts_that_do_not_add_up_are_refused(
    size: int, strategy: str, own_loop: bool, loss: str, what: str
) -> None:
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(size, train, loss=loss, strategy=strategy, micro_batch=None, own_loop=own_loop)
    for failure in raised.value.failures:
        assert failure is not None and failure.kind == UsageError.__name__ and what in failure.text
        assert "test_losses_of_models.py:" in failure.text


@pytest.mark.parametrize(("loss", "own_loop"), in_turn(["of_mean", "of_count"], [False, True]))
def test_a_loss_of_split_scores_is_divided_by_the_tokens_of_the_global_batch(own_loop: bool, loss: str) -> None:
    check_equal(loss, 2, strategy="tensor:least=1", micro_batch=2, own_loop=own_loop)


@pytest.mark.parametrize(
    ("loss", "what"),
    [("with_penalty", "adds other terms"), ("rooted", "takes sqrt"), ("of_mask", "a sum divided by"), *REFUSED],
)
def test_losses_of_stages_that_do_not_add_up_are_refused_on_every_rank(loss: str, what: str) -> None:
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(2, train, loss=loss, strategy="pipeline", micro_batch=2, own_loop=True)
    for failure in raised.value.failures:
        assert failure is not None and failure.kind == UsageError.__name__ and what in failure.text


def train_terms(together: bool) -> dict[str, Any]:
    """Train with a mean over tokens and a penalty, in one backward or in one for each term."""
    torch.manual_seed(0)
    model = Language().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, data(), batch_size=BATCH)
    for batch in run.microbatches(0):
        found = model(**batch)
        penalty = 0.1 * found["scores"].pow(2).mean()
        if together:
            run.backward(found["loss"] + penalty)
        else:
            run.backward(found["loss"], retain_graph=True)
            run.backward(penalty)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_terms_with_a_backward_each_have_counts_of_their_own(size: int) -> None:
    """As the refusal of their sum says, of which one count cannot be given."""
    with pytest.raises(worlds.RankError, match=r"run.backward\(term, retain_graph=True\) for each term"):
        worlds.run(size, train_terms, together=True)
    [want] = worlds.run(1, train_terms, together=True)
    for state in worlds.run(size, train_terms, together=False):
        assert all(abs(state[name] - value).max() < 1e-10 for name, value in want.items())


class Cache:
    """Keys and values of a model, which training does not use."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Caching(Language):
    """Returns a cache beside the loss."""

    def forward(self, words: Tensor, labels: Tensor, count: Tensor | None = None) -> dict[str, Any]:
        found = super().forward(words, labels, count)
        return {**found, "cache": Cache(found["scores"])}


def train_caching(strategy: str, used: bool) -> list[float]:
    torch.manual_seed(0)
    model = Caching().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, data(), strategy=strategy, batch_size=BATCH)
    losses = []
    for batch in run.microbatches(0):
        found = model(**batch)
        assert found["cache"] is not None
        run.backward(found["cache"].keys.square().mean() if used else found["loss"])
        optimizer.step()
        optimizer.zero_grad()
        assert run.stats is not None
        losses.append(run.stats.loss)
    return losses


def test_an_object_in_the_output_of_stages_is_refused_only_where_it_is_used() -> None:
    [want] = worlds.run(1, train_caching, strategy="single", used=False)
    for found in worlds.run(2, train_caching, strategy="pipeline", used=False):
        assert found == pytest.approx(want, abs=1e-12)
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(2, train_caching, strategy="pipeline", used=True)
    assert all(
        each is not None and "returns a Cache, which cannot be sent" in each.text for each in raised.value.failures
    )
