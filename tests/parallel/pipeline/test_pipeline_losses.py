"""Loss functions that catch whatever leaves the model's call: a pipeline equals one device, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.worlds import Pool, RankError

Loss = Callable[[Any, Any], Any]


def squared(out: Tensor, batch: Any) -> Tensor:
    return ((out - batch[1]) ** 2).mean()


def catching_exception(model: Any, batch: Any) -> Any:
    try:
        return squared(model(batch[0]), batch)
    except Exception:
        return torch.zeros((), requires_grad=True)


def catching_base_exception(model: Any, batch: Any) -> Any:
    try:
        out = model(batch[0])
    except BaseException:
        out = torch.zeros(len(batch[0]), 3, dtype=torch.float64, requires_grad=True)
    return squared(out, batch)


def catching_all(model: Any, batch: Any) -> Any:
    try:
        return squared(model(batch[0]), batch)
    except:  # noqa: E722
        return None


def raising_another(model: Any, batch: Any) -> Any:
    try:
        return squared(model(batch[0]), batch)
    except BaseException as error:
        raise ValueError("this batch is bad") from error


def leaving(model: Any, batch: Any) -> Any:
    try:
        return squared(model(batch[0]), batch)
    except BaseException:
        raise SystemExit(3) from None


def failing_afterwards(model: Any, batch: Any) -> Any:
    out = None
    try:
        out = model(batch[0])
    finally:
        # Where the call was left there is no result.
        scale = out.detach().abs().max() * 0 + 1  # type: ignore[attr-defined]
    return squared(out, batch) * scale  # type: ignore[arg-type]


@contextmanager
def swallowing() -> Iterator[None]:
    with suppress(BaseException):
        yield


def within_blocks(model: Any, batch: Any) -> Any:
    with torch.autograd.set_detect_anomaly(False), swallowing():
        out = model(batch[0])
    return squared(out, batch)


def trying_again(model: Any, batch: Any) -> Any:
    for _ in range(3):
        try:
            return squared(model(batch[0]), batch)
        except BaseException:
            continue
    raise RuntimeError("three times without success")


def by_return_in_finally(model: Any, batch: Any) -> Any:
    result: Any = torch.zeros((), requires_grad=True)
    try:
        result = squared(model(batch[0]), batch)
    finally:
        return result  # noqa: B012


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        catching_exception,
        catching_base_exception,
        catching_all,
        raising_another,
        leaving,
        failing_afterwards,
        within_blocks,
        trying_again,
        by_return_in_finally,
    )
}
PLACES = [
    (2, "pipeline:schedule=1f1b"),
    (2, "pipeline:schedule=zero_bubble"),
    (2, "model_parallel"),
    (3, "pipeline:schedule=1f1b"),
]
DATA = (
    torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
)


class Failing(nn.Module):
    """Cannot compute a batch of 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            raise ValueError("a batch of one sample")
        return inputs


def build(failing: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(3, 3), nn.Dropout(0.1), nn.Tanh())]
    if failing is not None:
        layers.insert(failing, Failing())
    return nn.Sequential(*layers).double()


def trained(loss: str, strategy: str) -> Any:
    run = tutti.prepare(
        *(build(), "adamw:lr=0.01", DATA, LOSSES[loss]),
        strategy=strategy,
        workers=2,
        batch_size=8,
        micro_batch=2,
        reproducible=True,
    )
    losses = [run.step(batch) for epoch in range(2) for batch in run.epoch(epoch)]
    return losses, run.evaluate(DATA).loss, run.weights_sha256()


@pytest.mark.parametrize(("loss", "place"), in_turn(list(LOSSES), PLACES, each=2), ids=str)
def test_a_loss_that_catches_everything_equals_one_device(loss: str, place: tuple[int, str]) -> None:
    want, (devices, strategy) = worlds.alone(trained, loss=loss, strategy="single"), place
    for got in worlds.run(devices, trained, loss=loss, strategy=strategy):
        assert got == want


def stepped(loss: str, samples: int, failing: int, strategy: str = "pipeline") -> None:
    data = (DATA[0][:samples], DATA[1][:samples])
    run = tutti.prepare(build(failing), "sgd:lr=0.1", data, LOSSES[loss], strategy=strategy, batch_size=1, workers=1)
    for batch in run.epoch(0):
        run.step(batch)


def failures(function: Callable[..., Any] = stepped, **arguments: Any) -> list[Any]:
    """What each rank ends with, among ranks that do not wait long for each other."""
    pool = Pool(2, timeout=3.0)
    try:
        with pytest.raises(RankError) as caught:
            pool.run(function, **arguments)
    finally:
        pool.close()
    return caught.value.failures


@pytest.mark.parametrize(("loss", "place"), [("catching_exception", 0), ("catching_all", 9)])
def test_an_error_of_the_model_that_the_loss_catches_is_refused_with_its_line(loss: str, place: int) -> None:
    [failed] = [f for f in failures(loss=loss, samples=1, failing=place) if f.kind != "PeerError"]
    assert failed.kind == "UsageError"
    assert "continues after an error of the model (test_pipeline_losses.py:" in failed.text
    assert "a batch of one sample" in failed.text
    assert "mirrored" in failed.text


def test_an_error_that_the_loss_makes_of_it_comes_out_and_a_lost_peer_stays_one() -> None:
    first, second = failures(loss="raising_another", samples=1, failing=0)
    assert (first.kind, first.text) == ("ValueError", "this batch is bad")
    assert second.kind == "PeerError"


def calling_twice(model: Any, batch: Any) -> Any:
    """Calls the model twice, but in the trial of the first micro-batch once."""
    if isinstance(model, nn.Module):
        return squared(model(batch[0]), batch)
    try:
        return squared(model(batch[0]) + model(batch[0]), batch)
    except Exception:
        return torch.zeros((), requires_grad=True)


def without_a_call(model: Any, batch: Any) -> Any:
    try:
        raise ValueError
    except ValueError:
        return torch.zeros((), requires_grad=True)


LOSSES |= {"calling_twice": calling_twice, "without_a_call": without_a_call}


@pytest.mark.parametrize(("loss", "said"), [("calling_twice", "twice"), ("without_a_call", "did not call the model")])
def test_what_the_pipeline_refuses_cannot_be_caught(loss: str, said: str) -> None:
    found = failures(trained, loss=loss, strategy="pipeline")
    assert any(f is not None and f.kind == "UsageError" and said in f.text for f in found)
