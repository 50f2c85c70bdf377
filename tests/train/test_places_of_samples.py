"""Losses that take samples by their places in a micro-batch are refused before the first update, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches
from tutti.errors import UsageError

BATCH, SAMPLES, FEATURES = 24, 48, 6
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]
mse = functional.mse_loss


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, FEATURES)).double()


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(SAMPLES, width, generator=draw, dtype=torch.float64) for width in (5, FEATURES))
    return TensorDataset(inputs, targets, torch.randint(0, 3, (SAMPLES,), generator=draw))


def errors(out: Tensor, want: Tensor) -> Tensor:
    return (out - want).square().mean(1)


def halves(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Targets for the first half of the samples alone."""
    out, half = net(inputs), len(inputs) // 2
    return mse(out[:half], want[:half]) + 0.3 * out[half:].abs().mean()


def logged(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A figure of the first samples that the loss does not read."""
    assert float(net(inputs[:2]).detach().sum()) != float(inputs[0].sum())
    return mse(net(inputs), want)


def chosen(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Samples by their values, which the script reads one by one."""
    each = errors(net(inputs), want)
    return torch.stack([each[k] * (1 + int(of_kind > 0)) for k, of_kind in enumerate(kind.tolist())]).mean()


def doubled(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    each = errors(net(inputs), want)
    return sum((each[k] * (2 if kind[k].item() > 1 else 1) for k in range(len(each))), torch.zeros(())) / len(each)


def two_views(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    own, near = net(torch.cat([inputs, 1.1 * inputs])).chunk(2)
    return 1 - functional.cosine_similarity(own, near).mean() + mse(own, want)


def triplets(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Groups of four neighbours, whose members have parts of their own."""
    groups = [(a - 2 * b).abs().mean() - 0.1 * c.square().mean() for a, b, c, _ in net(inputs).split(4)]
    return torch.stack(groups).mean()


def shifted(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Next tokens of sequences of three tokens, of two kinds."""
    tokens, next_ones = net(inputs).view(-1, 3, 2)[:, :-1], (want.view(-1, 3, 2)[:, 1:, 0] > 0).long()
    return functional.cross_entropy(tokens.reshape(-1, 2), next_ones.reshape(-1))


def time_first(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """As many steps as samples, along the first dimension."""
    steps = torch.linspace(1, 2, 12 if len(inputs) > 8 else 8, dtype=torch.float64)
    sequences = (inputs[:, None] * steps[:, None]).transpose(0, 1)[:-1]
    return mse(net(sequences)[-1:].mean(0), want) * 0 + mse(net(inputs), want)


def filled(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A mask of the first samples, which an assignment fills."""
    mask = torch.zeros(len(inputs), dtype=torch.float64)
    mask[:4] = 1
    return (errors(net(inputs), want) * mask).mean()


REFUSED: dict[str, Loss] = {
    "rows of losses": lambda net, x, want, kind: errors(net(x), want)[:5].mean(),
    "rows of inputs": lambda net, x, want, kind: mse(net(x[:6]), want[:6]),
    "a second term of some": lambda net, x, want, kind: mse(net(x), want) + 0.1 * net(x[:4]).abs().mean(),
    "a penalty of some outputs": lambda net, x, want, kind: (
        lambda out: functional.l1_loss(out, want) + 0.1 * out[:4].abs().mean()
    )(net(x)),
    "the first": lambda net, x, want, kind: (lambda out: mse(out, want) + out[0].abs().mean())(net(x)),
    "the last": lambda net, x, want, kind: (lambda out: mse(out, want) + out[-1, 2:].abs().mean())(net(x)),
    "halves": halves,
    "calls for parts": lambda net, x, want, kind: mse(net(x[:4]), want[:4]) + 0.3 * net(x[4:]).abs().mean(),
    "a loop over some": lambda net, x, want, kind: sum(errors(net(x), want)[k] for k in range(4)) / 4,
    "unequal parts": lambda net, x, want, kind: (lambda a, b: a.square().mean() + 3 * b.abs().mean())(
        *net(x).tensor_split([3])
    ),
    "two parts": lambda net, x, want, kind: (lambda a, b: a.square().mean() + b.abs().mean())(*net(x).chunk(2, dim=0)),
    "narrow": lambda net, x, want, kind: net(x).narrow(0, 0, 4).square().mean(),
    "listed rows": lambda net, x, want, kind: mse(net(x)[[0, 2]], want[[0, 2]]),
    "rows of an index": lambda net, x, want, kind: errors(net(x), want)[torch.tensor([0, 2, 5])].mean(),
    "chosen rows": lambda net, x, want, kind: errors(net(x), want).index_select(0, torch.tensor([1, 3])).mean(),
    "listed inputs": lambda net, x, want, kind: mse(net(x[[0, 2]]), want[[0, 2]]),
    "a mask by place": lambda net, x, want, kind: (errors(net(x), want) * (torch.arange(len(x)) < 4)).mean(),
    "weights by place": lambda net, x, want, kind: (
        errors(net(x), want) * torch.linspace(0, 1, len(x), dtype=torch.float64)
    ).mean(),
    "a filled mask": filled,
    "more rows than the micro-batch has": lambda net, x, want, kind: mse(net(x)[:16], want[:16]),
    "more inputs than the micro-batch has": lambda net, x, want, kind: mse(net(x[:20]), want[:20]),
    "more rows from the end": lambda net, x, want, kind: errors(net(x), want)[-20:].mean(),
    "the largest of a sort": lambda net, x, want, kind: (
        errors(net(x), want).sort(descending=True).values[: len(x) // 4].mean()
    ),
}
TAKEN: dict[str, Loss] = {
    "mean": lambda net, x, want, kind: mse(net(x), want),
    "columns": lambda net, x, want, kind: mse(net(x)[:, :3], want[:, :3]) + net(x)[..., 0].abs().mean(),
    "all rows": lambda net, x, want, kind: mse(net(x[:BATCH])[: len(x)], want[:BATCH]),
    "parts of features": lambda net, x, want, kind: (
        lambda mean, scale: (mean + scale.exp() - want[:, :3]).abs().mean()
    )(*net(x).chunk(2, dim=1)),
    "neighbouring features": lambda net, x, want, kind: (lambda out: (out[:, 1:] - out[:, :-1]).abs().mean())(net(x)),
    "shift of a language model": shifted,
    "two views": two_views,
    "slices of two views": lambda net, x, want, kind: (lambda out: mse(out[: len(x)], out[len(x) :].abs()))(
        net(torch.cat([x, 1.1 * x]))
    ),
    "parts of a memory's size": lambda net, x, want, kind: mse(torch.cat([net(each) for each in x.split(4)]), want),
    "losses of parts": lambda net, x, want, kind: torch.cat(
        [errors(net(each), y) for each, y in zip(x.split(4), want.split(4), strict=True)]
    ).mean(),
    "losses of samples": lambda net, x, want, kind: sum(map(mse, net(x), want)) / len(x),
    "slices by the number of samples": lambda net, x, want, kind: (lambda n: mse(net(x[:n])[:n], want[:n]))(x.shape[0]),
    "the last of a sequence": lambda net, x, want, kind: mse(
        net(x).view(-1, 3, 2)[..., :-1, :], want.view(-1, 3, 2)[:, 1:]
    ),
    "listed features": lambda net, x, want, kind: mse(net(x)[:, [0, 2]], want[:, torch.tensor([0, 2])]),
    "a mask by features": lambda net, x, want, kind: (net(x) * (torch.arange(FEATURES) < 3) - want).square().mean(),
    "all rows in another order": lambda net, x, want, kind: (lambda order: mse(net(x)[order], want[order]))(
        torch.arange(len(x)).flip(0)
    ),
    "equal weights of all rows": lambda net, x, want, kind: (errors(net(x), want) * torch.ones(len(x))).mean(),
    "rows by length": lambda net, x, want, kind: (lambda order: mse(net(x[order]), want[order]))(x[:, 0].argsort()),
    "a mask": lambda net, x, want, kind: errors(net(x), want)[kind > 0].mean(),
    "neighbours": lambda net, x, want, kind: (lambda out: (out[0::2] - 2 * out[1::2]).square().mean())(net(x)),
    "pairs": lambda net, x, want, kind: (lambda out: (out[:, 0] - 2 * out[:, 1]).abs().mean())(net(x).view(-1, 2, 6)),
    "triplets": triplets,
    "triplets of items": lambda net, x, want, kind: functional.triplet_margin_loss(
        *net(torch.stack([x, 1.1 * x, -x], 1)).unbind(1)
    ),
    "nothing of the first": lambda net, x, want, kind: mse(net(x), want) + 0 * net(x)[0].sum(),
    "a constant's rows": lambda net, x, want, kind: mse(net(x) + torch.arange(40.0).double()[:FEATURES], want),
    "a figure of the first": logged,
    "samples by values": chosen,
    "factors by values": doubled,
    "time first": time_first,
}
PLACES = (
    (2, "mirrored", None, "loss.backward"),
    (3, "sharded:stage=1", None, "step"),
    (1, "single", 8, "run.backward"),
)


def shares(names: list[str], places: int = len(PLACES)) -> list[Any]:
    """For ``parametrize``: each place beside names in turn; marked ``full``: beside all of them."""
    whole = [pytest.param(place, names, id=f"{place}-all", marks=pytest.mark.full) for place in range(places)]
    return [pytest.param(place, names[place::places], id=f"{place}-in turn") for place in range(places)] + whole


def train_epoch(run: Any, model: nn.Module, optimizer: Any, loss: Callable[[Any, Any], Any], how: str) -> None:
    """Train the first epoch by ``run.step`` (how = "step"), or in a loop by ``run.backward`` or ``loss.backward``."""
    for batch in run.epoch(0) if how == "step" else run.microbatches(0):
        if how == "step":
            run.step(batch)
            continue
        optimizer.zero_grad()
        value = loss(model, batch)
        run.backward(value) if how == "run.backward" else value.backward()
        optimizer.step()


def trained(
    loss_fn: Callable[..., Any], model: nn.Module, strategy: str, micro_batch: int | None, how: str
) -> tuple[int, str] | list[float]:
    """Return the sums of all tensors after two updates, or the number of updates and the error."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {} if micro_batch is None else {"micro_batch": micro_batch}

    def loss(model: Any, batch: Any) -> Any:
        return loss_fn(model, *batch)

    run = tutti.prepare(model, optimizer, dataset(), loss, strategy=strategy, batch_size=BATCH, seed=0, **options)
    try:
        train_epoch(run, model, optimizer, loss, how)
    except UsageError as error:
        return run.updates, str(error)
    return [float(value.sum()) for value in run.state().values()]


def trained_plainly(loss_fn: Callable[..., Any], model: nn.Module | None = None) -> list[float]:
    """Return the sums of all tensors after the same updates in plain PyTorch; a tuple is a sum and what divides it."""
    model = model or made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in global_batches(dataset(), BATCH, 0):
        optimizer.zero_grad()
        loss = loss_fn(model, *batch)
        (loss[0] / loss[1] if isinstance(loss, tuple) else loss).backward()
        optimizer.step()
    return [float(value.sum()) for value in model.state_dict().values()]


def train(name: str, strategy: str, micro_batch: int | None, how: str, own: Any = None) -> Any:
    return trained(own or (REFUSED | TAKEN)[name], made(), strategy, micro_batch, how)


def train_all(names: Sequence[str], strategy: str, micro_batch: int | None, how: str) -> list[Any]:
    return [train(name, strategy, micro_batch, how) for name in names]


def plain(names: Sequence[str]) -> list[Any]:
    return [trained_plainly(TAKEN[name]) for name in names]


def cases(table: dict[str, Loss], place: int) -> list[str]:
    """Return a third of the table's names: what is decided by the place is where the loss comes from, and not which."""
    return list(table)[place :: len(PLACES)]


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_samples_that_are_taken_by_their_places_are_refused(place: int) -> None:
    (ranks, strategy, micro, how), names = PLACES[place], cases(REFUSED, place)
    for found in worlds.run(ranks, train_all, names=names, strategy=strategy, micro_batch=micro, how=how):
        for name, each in zip(names, found, strict=True):
            assert each[0] == 0 and "takes samples by their places" in str(each[1]), (name, each)
            assert "test_places_of_samples.py:" in each[1], (name, each)


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_losses_that_treat_all_samples_alike_are_right(place: int) -> None:
    (ranks, strategy, micro, how), names = PLACES[place], cases(TAKEN, place)
    how = "step" if how == "step" else "run.backward"  # loss.backward() refuses means over other numbers than samples
    want = worlds.alone(plain, names=names)
    for found in worlds.run(ranks, train_all, names=names, strategy=strategy, micro_batch=micro, how=how):
        for name, each, of_plain in zip(names, found, want, strict=True):
            assert each == pytest.approx(of_plain, abs=1e-12), name


def test_a_script_that_says_so_takes_the_places_of_each_micro_batch() -> None:
    def counted(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Any:
        return errors(net(inputs), want)[:4].mean() * len(inputs), len(inputs)

    assert len(train("", "single", 8, "run.backward", counted)) == 4
    assert len(train("", "single", None, "step", REFUSED["halves"])) == 4, "one micro-batch is the global batch"


SINGLE: dict[str, tuple[Loss, bool]] = {
    "inner product": (lambda net, x, want, kind: torch.einsum("bi,bi->", net(x), want), False),
    "half a sum of squares": (
        lambda net, x, want, kind: (lambda error: 0.5 * torch.einsum("bi,bi->", error, error))(net(x) - want),
        False,
    ),
    "a sum beside a mean": (
        lambda net, x, want, kind: (lambda out: mse(out, want) + 0.1 * torch.einsum("bi,bi->", out, want))(net(x)),
        False,
    ),
    "outer product": (lambda net, x, want, kind: torch.einsum("bi,bj->ij", net(x), want).square().mean(), False),
    "sum by einsum": (lambda net, x, want, kind: torch.einsum("bi->i", net(x)).square().mean(), False),
    "product by their number": (lambda net, x, want, kind: torch.einsum("bi,bi->", net(x), want) / len(x), True),
    "products": (lambda net, x, want, kind: torch.einsum("bi,bi->b", net(x), want).mean(), True),
    "a layer by einsum": (
        lambda net, x, want, kind: torch.einsum("bi,ij->bj", net(x), torch.ones(6, 2).double()).square().mean(),
        True,
    ),
    "a mean beside a penalty": (
        lambda net, x, want, kind: mse(net(x), want) + 0.1 * net.get_parameter("0.weight").square().sum(),
        True,
    ),
    "a sum and its number": (lambda net, x, want, kind: (torch.einsum("bi,bi->", net(x), want), 1), True),
    "rows of one": (
        lambda net, x, want, kind: sum((mse(net(each), y) for each, y in zip(x, want, strict=True)), 0.0) / len(x),
        True,
    ),
}


def train_single(names: list[str], strategy: str, micro_batch: int) -> list[Any]:
    return [train("", strategy, micro_batch, "run.backward", SINGLE[name][0]) for name in names]


def plain_single(names: list[str]) -> list[Any]:
    def of_batch(loss: Loss, net: nn.Module, inputs: Tensor, *rest: Tensor) -> Any:
        value = loss(net, inputs, *rest)
        # The number beside a sum is that of one sample.
        return (value[0], len(inputs)) if isinstance(value, tuple) else value

    chosen = [SINGLE[name] for name in names]
    return [trained_plainly(partial(of_batch, loss)) if is_right else None for loss, is_right in chosen]


@pytest.mark.parametrize(("place", "names"), shares(list(SINGLE), 2))
def test_the_loss_of_a_single_sample_is_that_of_the_same_sample_twice(place: int, names: list[str]) -> None:
    ranks, strategy = ((1, "single"), (3, "mirrored"))[place]
    want = worlds.alone(plain_single, names=names)
    for found in worlds.run(ranks, train_single, names=names, strategy=strategy, micro_batch=1):
        for name, each, of_plain in zip(names, found, want, strict=True):
            if SINGLE[name][1]:
                assert each == pytest.approx(of_plain, abs=1e-12), name
            else:
                assert each[0] == 0 and "no mean over samples" in str(each[1]), (name, each)


HALF = BATCH // 2


def sum_of_parts(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for part in errors(net(inputs), want).split(4):
        total = total + part.mean()
    return total / 6


def mean_of_parts(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    parts = errors(net(inputs), want).split(4)
    return sum((part.mean() for part in parts), torch.zeros(())) / len(parts)


def shares_of_parts(net: nn.Module, inputs: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    pairs = zip(inputs.split(4), want.split(4), strict=True)
    return sum((mse(net(x), y) * (len(x) / len(inputs)) for x, y in pairs), torch.zeros(()))


WRITTEN: dict[str, tuple[Loss, str]] = {
    "half the batch, beside a size": (lambda net, x, want, kind: mse(net(x.view(len(x), 5))[:12], want[:12]), "places"),
    "half the batch by name": (lambda net, x, want, kind: mse(net(x.view(len(x), 5))[:HALF], want[:HALF]), "places"),
    "a mask that all places have": (
        lambda net, x, want, kind: (errors(net(x), want) * (torch.arange(len(x)) < 12)).mean(),
        "places",
    ),
    "weights by a mask": (
        lambda net, x, want, kind: (
            errors(net(x), want) * torch.where(torch.arange(x.size(0)) < HALF, 1.0, 0.5).double()
        ).mean(),
        "places",
    ),
    "a sum of means of parts": (sum_of_parts, "parts of a constant size"),
    "sums of parts": (
        lambda net, x, want, kind: sum((part.sum() for part in errors(net(x), want).split(4)), torch.zeros(())) / BATCH,
        "parts of a constant size",
    ),
    "inputs in parts": (
        lambda net, x, want, kind: sum(
            (mse(net(a), b) / 6 for a, b in zip(x.split(4), want.split(4), strict=True)), torch.zeros(())
        ),
        "parts of a constant size",
    ),
    "slices by the size": (lambda net, x, want, kind: mse(net(x)[: x.shape[0]], want[: len(x)]), ""),
    "a mask by the size": (
        lambda net, x, want, kind: (errors(net(x), want) * (torch.arange(len(x)) < len(x))).mean(),
        "",
    ),
    "a mask of the first place on": (
        lambda net, x, want, kind: (errors(net(x), want) * (torch.arange(len(x)) >= 0)).mean(),
        "",
    ),
    "a mean of parts": (mean_of_parts, ""),
    "shares of parts": (shares_of_parts, ""),
    "a mean over parts": (
        lambda net, x, want, kind: torch.stack([part.mean() for part in errors(net(x), want).split(4)]).mean(),
        "",
    ),
    "two equal parts": (
        lambda net, x, want, kind: sum((part.mean() for part in errors(net(x), want).chunk(2)), torch.zeros(())) / 2,
        "",
    ),
}


def train_written(strategy: str, micro_batch: int | None, how: str) -> list[Any]:
    return [trained(loss, made(), strategy, micro_batch, how) for loss, _ in WRITTEN.values()]


def plain_written() -> list[Any]:
    return [trained_plainly(loss) for loss, _ in WRITTEN.values()]


@pytest.mark.parametrize(
    ("ranks", "strategy", "micro", "how"), [(1, "single", 12, "run.backward"), (3, "mirrored", None, "step")]
)
def test_numbers_that_the_source_has_are_no_sizes(ranks: int, strategy: str, micro: int | None, how: str) -> None:
    want = worlds.alone(plain_written)
    for found in worlds.run(ranks, train_written, strategy=strategy, micro_batch=micro, how=how):
        for (name, (_, refused)), each, of_plain in zip(WRITTEN.items(), found, want, strict=True):
            if refused:
                assert each[0] == 0 and refused in str(each[1]), (name, each)
            else:
                assert each == pytest.approx(of_plain, abs=1e-12), (name, each)


def test_listed_rows_are_no_groups_of_neighbours() -> None:
    """Of four samples rows 0 and 2 are also the first of each pair."""
    [found] = worlds.run(1, train_all, names=["listed rows"], strategy="single", micro_batch=4, how="run.backward")
    assert found[0][0] == 0 and "takes samples by their places" in str(found[0][1]), found


def test_a_slice_that_a_single_sample_fills_is_refused() -> None:
    names = ["more rows than the micro-batch has"]
    [found] = worlds.run(1, train_all, names=names, strategy="single", micro_batch=1, how="run.backward")
    assert found[0][0] == 0 and "takes samples by their places" in str(found[0][1]), found
