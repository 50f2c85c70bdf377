"""Optimizers whose step reads values that hooks keep of samples, as K-FAC does: right, or refused before an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn, thinned
from tests.scripts.oracle import global_batches
from tutti.errors import UsageError
from tutti.launcher import failure

BATCH = 8


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(24, width, generator=draw, dtype=torch.float64) for width in (4, 1)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def damped(moments: Tensor) -> Tensor:
    return torch.linalg.inv(moments + 0.1 * torch.eye(len(moments), dtype=torch.float64))


class Kfac(torch.optim.SGD):
    """SGD with K-FAC's factors of the named side, of inputs or of output gradients, which hooks keep."""

    def __init__(self, model: nn.Module, side: str, lr: float = 0.05) -> None:
        super().__init__(model.parameters(), lr)
        self.layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        for layer in self.layers:
            if side == "inputs":
                layer.register_forward_pre_hook(lambda layer, given: self.keep(self.inputs, layer, given[0]))
            else:
                layer.register_full_backward_hook(
                    lambda layer, _, given: self.keep(self.outputs, layer, given[0] * BATCH)
                )

    def keep(self, kept: dict[nn.Module, Tensor], layer: nn.Module, given: Tensor) -> None:
        if torch.is_grad_enabled() or kept is self.outputs:
            own = given.detach().t() @ given.detach() / len(given)
            kept[layer] = 0.9 * kept[layer] + 0.1 * own if layer in kept else own

    def exchange(self, moments: Tensor) -> Tensor:
        return moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for layer in self.layers:
            gradient = layer.weight.grad
            assert gradient is not None
            if layer in self.outputs:
                gradient.copy_(damped(self.exchange(self.outputs[layer])) @ gradient)
            if layer in self.inputs:
                gradient.copy_(gradient @ damped(self.exchange(self.inputs[layer])))
        return super().step()


class Exchanged(Kfac):
    def exchange(self, moments: Tensor) -> Tensor:
        return tutti.allreduce(moments) if tutti.size() > 1 else moments


class Logged(Kfac):
    """Keeps the same values, and its step reads none of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return torch.optim.SGD.step(self)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain(kind: type[Kfac], side: str) -> list[Tensor]:
    model = network()
    optimizer = kind(model, side)
    for inputs, targets in global_batches(dataset(), BATCH, 0):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def train(kind: type[Kfac], side: str, loop: bool, strategy: str, workers: int) -> tuple[str, int, list[Tensor]]:
    """Return the error, the number of updates and the weights."""
    model = network()
    optimizer = kind(model, side)
    options: dict[str, Any] = {"strategy": strategy, "workers": workers, "batch_size": BATCH, "seed": 0}
    run = None
    try:
        if loop:
            run = tutti.prepare(model, optimizer, dataset(), **options)
            for inputs, targets in run.microbatches(0):
                optimizer.zero_grad()
                run.backward(functional.mse_loss(model(inputs), targets))
                optimizer.step()
        else:
            run = tutti.prepare(model, optimizer, dataset(), lambda m, b: functional.mse_loss(m(b[0]), b[1]), **options)
            for batch in run.epoch(0):
                run.step(batch)
    except UsageError as error:
        return str(error), 0 if run is None else run.updates, []
    return "", run.updates, list(run.state().values())


KINDS = (("inputs", True), ("outputs", False))
PARTS = ((1, "single", 2), (2, "mirrored", 2), (2, "mirrored", 3))
RIGHT = ((Kfac, 1, 1), (Exchanged, 2, 2), (Logged, 1, 3), (Logged, 2, 3))


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(("world", "kind"), in_turn(PARTS, KINDS))
def test_a_step_that_reads_values_of_a_part_is_refused(world: tuple[int, str, int], kind: tuple[str, bool]) -> None:
    ranks, strategy, workers = world
    side, loop = kind
    for error, updates, _ in worlds.run(
        ranks, train, kind=Kfac, side=side, loop=loop, strategy=strategy, workers=workers
    ):
        assert "Kfac.step() reads values that the script has kept of one micro-batch" in error
        assert "test_step_inputs.py" in error
        assert updates == 0


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("strategy", thinned(["sharded:stage=1", "sharded"], 2))
def test_a_step_on_parts_that_reads_modules_is_refused(strategy: str) -> None:
    for error, updates, _ in worlds.run(2, train, kind=Kfac, side="outputs", loop=True, strategy=strategy, workers=2):
        assert "Kfac has modules in its attribute layers" in error
        assert updates == 0


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(("case", "kind"), in_turn(RIGHT, KINDS))
def test_values_of_all_samples_and_those_for_a_log_are_right(
    case: tuple[type[Kfac], int, int], kind: tuple[str, bool]
) -> None:
    own, ranks, workers = case
    side, loop = kind
    for error, updates, found in worlds.run(
        ranks, train, kind=own, side=side, loop=loop, strategy="mirrored", workers=workers
    ):
        assert (error, updates) == ("", 3)
        for got, expected in zip(found, plain(Logged if own is Logged else Kfac, side), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


def kept_elsewhere(strategy: str) -> list[str]:
    """Read what hooks have kept of every layer in the body of a loop, and return the notes on the error."""
    explained: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "before_report", explained.append)
        model, inputs = network(), dict[str, Tensor]()
        for name in ("0", "2"):
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, given, name=name: inputs.update({name: given[0].detach()})
            )
        run = tutti.prepare(model, "sgd:lr=0.1", dataset(), strategy=strategy, workers=1, batch_size=BATCH)
    batch, targets = next(iter(run.microbatches(0)))
    run.backward(functional.mse_loss(model(batch), targets))
    try:
        assert len(inputs["0"]) == len(inputs["2"])
    except KeyError as error:
        explained[-1](error)
        return list(error.__notes__)
    return []


def test_a_loop_that_reads_what_hooks_keep_on_other_stages_is_told_so() -> None:
    first, second = worlds.run(2, kept_elsewhere, strategy="pipeline")
    assert "Hooks on 2 are called on other ranks" in first[0] and "strategy='mirrored'" in first[0]
    assert "Hooks on 0 are called" in second[0]
    worlds.forget(2)
    assert worlds.run(1, kept_elsewhere, strategy="single") == [[]]
