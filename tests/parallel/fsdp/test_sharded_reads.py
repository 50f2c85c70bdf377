"""What stages 2 and 3 say of scripts that compute with sharded parameters outside of the model's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn, table
from tutti.errors import MismatchError, UsageError


def adaptive_clipping(model: nn.Sequential, run: Any, x: Tensor) -> None:
    run.backward(model(x).square().mean())
    with torch.no_grad():
        for p in model.parameters():
            largest = 0.01 * p.norm(dim=-1, keepdim=True)
            norm = p.grad.norm(dim=-1, keepdim=True)  # type: ignore[union-attr]
            p.grad.mul_((largest / norm).clamp(max=1))  # type: ignore[union-attr]


def gradients_by_function(model: nn.Sequential, run: Any, x: Tensor) -> None:
    rows = list(model.parameters())
    out = model(x)
    for options in ({"allow_unused": True}, {"materialize_grads": True}):
        with pytest.raises(UsageError, match="outside of the model's forward \\(grad\\)"):
            torch.autograd.grad(out.sum(), rows, retain_graph=True, **options)
    first, second = (
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in (out.sum(), out.mean())
    )
    for p, a, b in zip(model.parameters(), first, second, strict=True):
        p.grad = a - b


def layers_by_hand(model: nn.Sequential, run: Any, x: Tensor) -> None:
    hidden = model[1](model[0](x))
    hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    run.backward(model[2](hidden).square().mean())


def several_at_once(model: nn.Sequential, run: Any, x: Tensor) -> None:
    out = torch.func.vmap(lambda row: nn.functional.linear(x, row.unsqueeze(0)))(model[0].weight)
    run.backward(out.square().mean())


def jacobians(model: nn.Sequential, run: Any, x: Tensor) -> None:
    run.backward(torch.func.vmap(torch.func.jacrev(model))(x).square().mean())


BODIES = (adaptive_clipping, gradients_by_function, several_at_once)


def told(strategy: str, body: Any) -> str | dict[str, Any]:
    """The message of the refusal, or the trained state where the release of PyTorch can compute it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, torch.randn(12, 4), strategy=strategy, batch_size=6, precision="fp64")
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            body(model, run, batch)
            optimizer.step()
    except tutti.errors.UsageError as error:
        return str(error)
    return {name: value.numpy() for name, value in run.state().items()}


@pytest.mark.parametrize(("body", "stage", "devices"), table(BODIES, [2, 3], [2, 3]))
def test_errors_about_shards_name_the_line_and_the_way_out(body: Any, stage: int, devices: int) -> None:
    for said in worlds.run(devices, told, strategy=f"sharded:stage={stage}", body=body):
        if body is adaptive_clipping and not isinstance(said, str):
            # DTensor of PyTorch 2.11 multiplies in place by a tensor that every rank has whole.
            assert largest_difference(said, worlds.alone(told, strategy="single", body=body)) < 1e-12
            continue
        assert "the script computes with sharded parameters as they are outside of the model's forward" in said
        assert "test_sharded_reads.py:" in said and "strategy='sharded:stage=1'" in said
    worlds.forget(devices)


@pytest.mark.parametrize("devices", [2, 3])
def test_transforms_of_the_model_are_refused(devices: int) -> None:
    for said in worlds.run(devices, told, strategy="sharded", body=jacobians):
        assert "within a transform of torch.func" in said and "test_sharded_reads.py:" in said, said
    worlds.forget(devices)


def test_layers_that_the_script_calls_by_hand_equal_mirrored_ones() -> None:
    [want, *_] = worlds.run(2, told, strategy="mirrored", body=layers_by_hand)
    for stage in (2, 3):
        for got in worlds.run(2, told, strategy=f"sharded:stage={stage}", body=layers_by_hand):
            assert largest_difference(got, want) <= 1e-10


def noise_of_a_penalty() -> str:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(12, 4),
        lambda called, batch: model.weight.square().sum() + called(batch).square().mean(),
        strategy="sharded", batch_size=6, workers=2, precision="fp64", noise_every=1,
    )  # fmt: skip
    with pytest.raises(UsageError) as caught:
        for batch in run.epoch(0):
            run.step(batch)
    return str(caught.value)


def test_the_noise_of_a_gradient_of_which_fsdp2_reduces_a_part_is_refused() -> None:
    for said in worlds.run(2, noise_of_a_penalty):
        assert "noise_every cannot be combined with a loss that reads weight outside" in said
    worlds.forget(2)


def drawn_between_epochs(model: nn.Sequential) -> None:
    model[0].reset_parameters()


def noise_between_epochs(model: nn.Sequential) -> None:
    with torch.no_grad():
        draw = torch.Generator().manual_seed(5)
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=torch.float64, generator=draw), alpha=0.1)


def mixed_between_epochs(model: nn.Sequential) -> None:
    """Slow weights, plain tensors of whole shapes, follow the parameters, which are moved towards them."""
    with torch.no_grad():
        for p in model.parameters():
            slow = torch.ones(p.shape, dtype=p.dtype)
            slow.lerp_(p, 0.5)
            p.mul_(0.9).add_(slow, alpha=0.1)
            p.copy_(torch.arange(float(p.shape[-1])) * 0.01 + p * 0.5)


def own_noise_between_epochs(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.add_(torch.full((8, 4), float(tutti.rank())))


def row_between_epochs(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight[3] = 1.0


def first_row_between_epochs(model: nn.Sequential) -> None:
    model[0].weight.data[0].zero_()


def flat_between_epochs(model: nn.Sequential) -> None:
    model[0].weight.data.view(-1)[:3].mul_(2.0)


def vector_between_epochs(model: nn.Sequential) -> None:
    norm = float(nn.utils.parameters_to_vector(model.parameters()).norm())
    with torch.no_grad():
        model[0].weight.mul_(1 / norm)


def identity_between_epochs(model: nn.Sequential) -> None:
    nn.init.eye_(model[0].weight)


def halved_between_epochs(model: nn.Sequential) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def between_epochs(strategy: str, change: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(12, 4), lambda called, batch: called(batch).square().mean(),
        strategy=strategy, batch_size=6, precision="fp64",
    )  # fmt: skip
    try:
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
            change(model)
    except (tutti.errors.UsageError, MismatchError) as error:
        return str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(
    ("change", "devices"),
    in_turn(
        [
            drawn_between_epochs,
            first_row_between_epochs,
            flat_between_epochs,
        ],
        [2, 3],
    ),
)
def test_a_change_between_epochs_that_needs_the_whole_parameter_is_refused(change: Any, devices: int) -> None:
    for said in worlds.run(devices, between_epochs, strategy="sharded", change=change):
        assert "test_sharded_reads.py:" in said and "model.load_state_dict" in said
    worlds.forget(devices)


def array_between_epochs(model: nn.Sequential) -> None:
    with pytest.raises(ValueError, match="read-only"):
        model[0].weight.detach().cpu().numpy()[:] = 1.0


def test_a_numpy_array_of_a_sharded_parameter_cannot_be_written() -> None:
    for got in worlds.run(2, between_epochs, strategy="sharded", change=array_between_epochs):
        assert not isinstance(got, str), got


@pytest.mark.parametrize(
    ("change", "place"),
    in_turn(
        [
            *(halved_between_epochs, noise_between_epochs, mixed_between_epochs, vector_between_epochs),
            *(row_between_epochs, identity_between_epochs),
        ],
        [("sharded", 2), ("sharded", 3), ("sharded:stage=1", 2)],
        each=2,
    ),
)
def test_a_change_between_epochs_by_element_or_row_equals_one_device(change: Any, place: tuple[str, int]) -> None:
    want = worlds.alone(between_epochs, strategy="single", change=change)
    strategy, devices = place
    for got in worlds.run(devices, between_epochs, strategy=strategy, change=change):
        assert largest_difference(got, want) <= 1e-10


def test_a_whole_tensor_that_differs_over_ranks_is_refused() -> None:
    for said in worlds.run(2, between_epochs, strategy="sharded", change=own_noise_between_epochs):
        assert "sharded parameters and a tensor that is another one on each rank" in said


def late(strategy: str, change: Any) -> Any:
    """Change the model in the body of a custom loop after the third update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, torch.randn(24, 4, dtype=torch.float64), strategy=strategy, batch_size=6)
    try:
        for x in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(model(x).square().mean())
            optimizer.step()
            if run.updates == 3:
                change(model)
    except tutti.errors.UsageError as error:
        return run.updates, str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("change", [drawn_between_epochs, first_row_between_epochs])
def test_a_late_change_in_a_custom_loop_that_needs_the_whole_parameter_is_refused(change: Any) -> None:
    for updates, said in worlds.run(2, late, strategy="sharded:stage=2", change=change):
        assert updates == 3 and "test_sharded_reads.py:" in said and "model.load_state_dict" in said
    worlds.forget(2)


def columns(model: nn.Sequential) -> None:
    model[0].weight.data[:, 1:3].mul_(0.5)
    model[0].weight.data.t()[0].mul_(0.5)


def test_late_changes_of_columns_in_a_custom_loop_equal_one_device() -> None:
    want = worlds.alone(late, strategy="single", change=columns)
    for got in worlds.run(2, late, strategy="sharded", change=columns):
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("sharded", "has made 2.weight a parameter of the model"),
        ("sharded:stage=1", "has made 2.weight a parameter of the model"),
        ("pipeline", "replaced, added or removed the module 2"),
    ],
)
def test_a_layer_that_the_script_replaces_is_refused(strategy: str, says: str) -> None:
    for said in worlds.run(2, between_epochs, strategy=strategy, change=replaced):
        assert says in said and "after tutti.prepare" in said
    worlds.forget(2)


def replaced(model: nn.Sequential) -> None:
    model[2] = nn.Linear(8, 1).double()


def assigned_between_epochs(model: nn.Sequential) -> None:
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.1, dtype=p.dtype)


def test_stage_1_follows_data_that_the_script_assigns() -> None:
    want = worlds.alone(between_epochs, strategy="single", change=assigned_between_epochs)
    for devices in (2, 3):
        for got in worlds.run(devices, between_epochs, strategy="sharded:stage=1", change=assigned_between_epochs):
            assert largest_difference(got, want) <= 1e-10


def norms(strategy: str, readers: Sequence[int], workers: int = 2) -> list[float] | str:
    """The first layer's gradient norms in two epochs, which these ranks read; or what refuses it."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4).double(), torch.linspace(-1, 1, 96, dtype=torch.float64).view(12, 8)
    run = tutti.prepare(model, "sgd:lr=0.1", x, strategy=strategy, workers=workers, batch_size=6)
    found = []
    try:
        for epoch in range(2):
            for batch in run.microbatches(epoch):
                run.backward(model(batch).square().mean())
                norm = float(model.weight.grad.norm()) if tutti.rank() in readers else 0.0  # type: ignore[union-attr]
                run.gated_step()
                if run.stepped:  # before, .grad is of one micro-batch
                    found.append(norm)
    except MismatchError as error:
        return str(error)
    return found


def test_a_norm_of_a_sharded_gradient_is_that_of_the_whole() -> None:
    want = worlds.alone(norms, strategy="single", readers=[0])
    for got in worlds.run(2, norms, strategy="sharded", readers=[0, 1]):
        assert got == pytest.approx(want, rel=1e-12)


def extremes(strategy: str) -> list[float]:
    """Largest elements of gradients and weights, of which a rank may have none, as scripts log them."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3).double(), torch.linspace(-1, 1, 96, dtype=torch.float64).view(12, 8)
    run = tutti.prepare(model, "sgd:lr=0.1", x, strategy=strategy, workers=tutti.size(), batch_size=6)
    found = []
    for batch in run.microbatches(0):
        run.backward(model(batch).square().mean())
        found += [p.grad.abs().max().item() for p in model.parameters()]  # type: ignore[union-attr]
        found += [p.detach().amin().item() for p in model.parameters()]
        run.gated_step()
    return found


def test_the_largest_element_where_a_rank_has_none_is_that_of_the_whole() -> None:
    want = worlds.alone(extremes, strategy="single")
    for got in worlds.run(4, extremes, strategy="sharded"):
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("sharded", 2), ("tensor:least=1", 3)),
        *(
            pytest.param(f"sharded:stage={stage}", ranks, marks=pytest.mark.full)
            for stage in (1, 2)
            for ranks in (2, 3)
        ),
    ],
)
def test_a_norm_that_one_rank_reads_is_a_mismatch_that_names_the_line(strategy: str, ranks: int) -> None:
    for said in worlds.run(ranks, norms, strategy=strategy, readers=[0], workers=ranks):
        assert "ranks are in different collectives" in said or "ranks wait for each other in different calls" in said
        assert "test_sharded_reads.py:" in said and "norms and values of split or sharded tensors on every rank" in said
    worlds.forget(ranks)


def mistaken(strategy: str) -> str:
    model = nn.Linear(4, 4)
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(12, 4), lambda called, batch: called(batch) @ torch.ones(3), strategy=strategy
    )
    try:
        run.step(next(iter(run.epoch(0))))
    except Exception as error:
        return type(error).__name__
    return ""


def test_an_error_of_the_script_stays_its_own() -> None:
    assert worlds.run(2, mistaken, strategy="sharded") == ["RuntimeError"] * 2
    worlds.forget(2)


def sized(strategy: str, loop: bool) -> Any:
    """Train with a learning rate and a decay that a script computes from the sizes in the optimizer's groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    run = tutti.prepare(
        model, optimizer, torch.randn(12, 4), lambda called, batch: called(batch).square().mean(),
        strategy=strategy, batch_size=4, precision="fp64",
    )  # fmt: skip

    def follow() -> None:
        members = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["lr"] = 1 / sum(p.numel() for p in members)
        for p in members if loop else ():
            p.data.mul_(1 - 0.01 / (len(p) + p.shape[-1] + p.size(0)))

    if loop:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(model(batch).square().mean())
            follow()
            optimizer.step()
    for epoch in range(0 if loop else 2):
        for batch in run.epoch(epoch):
            run.step(batch)
        follow()
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("loop", [False, True])
def test_the_rows_of_an_optimizer_have_the_sizes_of_whole_parameters_for_the_script(loop: bool) -> None:
    want = worlds.alone(sized, strategy="single", loop=loop)
    for strategy in ("sharded:stage=1", "sharded:stage=2", "sharded"):
        for got in worlds.run(3, sized, strategy=strategy, loop=loop):
            assert largest_difference(got, want) <= 1e-10


def listed_before(strategy: str) -> str:
    """A penalty on parameters of which the script made a list before ``tutti.prepare``, and what it gets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    listed = list(model.parameters())

    def loss(called: Any, batch: Tensor) -> Tensor:
        return called(batch).square().mean() + 0.05 * sum(p.square().sum() for p in listed)

    run = tutti.prepare(model, "sgd:lr=0.1", torch.randn(12, 4), loss, strategy=strategy, batch_size=6, workers=3)
    try:
        return f"{run.step(next(iter(run.epoch(0)))):.6f}"
    except tutti.errors.UsageError as error:
        return str(error) if run.global_step == 0 else "after the update"


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded:stage=2", "sharded"])
def test_a_list_of_parameters_from_before_is_refused_in_the_loss(strategy: str) -> None:
    for said in worlds.run(3, listed_before, strategy=strategy):
        assert "that was a parameter of the model before tutti.prepare" in said and "model.parameters()" in said
    [alone] = worlds.run(1, listed_before, strategy=strategy)
    assert [alone] == worlds.run(1, listed_before, strategy="mirrored")
    worlds.forget(3)


class Averaging(nn.Module):
    """Averages a teacher within its own forward; ``how``: the way of the write."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.teacher, self.how = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if self.how == "data":
                average.data.mul_(0.9).add_(parameter.data, alpha=0.1)
            elif self.how == "assigned":
                average.data = average.data * 0.9 + parameter.data * 0.1
            else:
                with torch.no_grad():
                    average.lerp_(parameter, 0.1)
        return self.student(x), self.teacher(x)


def averaged(strategy: str, how: str, workers: int | None = None) -> Any:
    torch.manual_seed(0)
    model = Averaging(how)
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(12, 4), lambda called, batch: nn.functional.mse_loss(*called(batch)),
        strategy=strategy, batch_size=6, precision="fp64", workers=workers,
    )  # fmt: skip
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except tutti.errors.UsageError as error:
        return str(error) if run.updates == 0 else "after the update"
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("how", ["lerp_", "data", "assigned"])
def test_a_write_within_the_forward_is_refused_where_it_would_be_lost(how: str) -> None:
    for strategy in ("sharded", "sharded:stage=2"):
        for said in worlds.run(2, averaged, strategy=strategy, how=how):
            assert "the script writes the parameter teacher.weight within a forward" in said
            assert "test_sharded_reads.py:" in said and "ema=" in said
    worlds.forget(2)


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("mirrored", "lerp_"), ("mirrored", "data"), ("sharded:stage=1", "lerp_"), ("tensor:least=1", "lerp_")],
)
def test_trials_of_a_forward_that_writes_parameters_write_none(strategy: str, how: str) -> None:
    want = worlds.alone(averaged, strategy="single", how=how, workers=1)
    for got in worlds.run(2, averaged, strategy=strategy, how=how):
        assert largest_difference(got, want) <= 1e-10


class Bounded(nn.Module):
    """Bounds its weight in every forward; ``how``: the way of the write."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.layer.weight
        if self.how == "data":
            weight.data.clamp_(-0.2, 0.2)
        elif self.how == "samples":
            weight.data.clamp_(max=0.1 * float(x.max()))
        elif self.how == "twice":
            weight.data.clamp_(max=0.2).clamp_(min=-0.1)
        else:
            with torch.no_grad():
                weight.clamp_(max=0.2)
        return self.layer(x).tanh(), x


def bounded(strategy: str, how: str, workers: int | None = None, micro_batch: int = 1) -> Any:
    torch.manual_seed(0)
    run = tutti.prepare(
        Bounded(how), "sgd:lr=2.0", torch.randn(13, 4), lambda called, batch: nn.functional.mse_loss(*called(batch)),
        strategy=strategy, batch_size=6, precision="fp64", workers=workers, micro_batch=micro_batch,
    )  # fmt: skip
    try:
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
    except tutti.errors.UsageError as error:
        return str(error) if run.updates == 0 else "after the update"
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(
    ("how", "strategy", "devices"), table(["data", "no_grad"], ["sharded", "sharded:stage=2"], [2, 3])
)
def test_a_bound_on_weights_within_the_forward_equals_one_device(how: str, strategy: str, devices: int) -> None:
    want = worlds.alone(bounded, strategy="single", how=how, workers=1)
    for got in worlds.run(devices, bounded, strategy=strategy, how=how):
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize(
    ("how", "micro_batch", "said"),
    [
        ("samples", 1, "writes the parameter layer.weight within a forward"),
        ("samples", 3, "has edited parameters or gradients in another way on each rank"),
        ("twice", 3, "writes the parameter layer.weight within a forward"),
    ],
)
def test_a_bound_that_differs_between_micro_batches_is_refused(how: str, micro_batch: int, said: str) -> None:
    for told_by_rank in worlds.run(2, bounded, strategy="sharded", how=how, micro_batch=micro_batch):
        assert said in told_by_rank
    worlds.forget(2)


def clamped(model: nn.Sequential, run: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)
    run.backward(loss)


def halved_before_backward(model: nn.Sequential, run: Any, x: Tensor) -> None:
    loss = model(x).square().mean()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    run.backward(loss)


def test_a_write_between_forward_and_backward_is_refused_but_for_a_bound() -> None:
    want = worlds.alone(told, strategy="single", body=clamped)
    for got in worlds.run(2, told, strategy="sharded", body=clamped):
        assert largest_difference(got, want) <= 1e-12
    for said in worlds.run(2, told, strategy="sharded", body=halved_before_backward):
        assert "the script writes the parameter 0.weight" in said and "(mul_)" in said
    worlds.forget(2)


def of_groups(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def halved_rows(optimizer: Any) -> None:
    for p in of_groups(optimizer):
        p.data.mul_(0.5)


def assigned_rows(optimizer: Any) -> None:
    for p in of_groups(optimizer):
        p.data = p.data.add(p.data, alpha=-0.3)


def pulled_rows(optimizer: Any) -> None:
    with torch.no_grad():
        for p in of_groups(optimizer):
            p.lerp_(p.clone().sign(), 0.1)


def normalised_rows(optimizer: Any) -> None:
    with torch.no_grad():
        for p in of_groups(optimizer):
            p.div_(p.norm())


def norm_of_rows(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] /= float(torch.stack([p.detach().norm() for p in of_groups(optimizer)]).norm())


def noise_in_rows(optimizer: Any) -> None:
    for p in of_groups(optimizer):
        p.data.normal_()


def with_rows(strategy: str, change: Any, place: str) -> Any:
    """Train with ``change`` of the optimizer's groups, between epochs, after (later) updates or before the forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, torch.randn(12, 4), strategy=strategy, batch_size=6, precision="fp64")
    try:
        for epoch in range(3):
            for batch in run.microbatches(epoch):
                optimizer.zero_grad()
                if place == "before":
                    change(optimizer)
                run.backward(model(batch).square().mean())
                optimizer.step()
                # Later bodies are not watched any more, after a first one without such writes.
                if place in ("after", "later") and run.stepped and run.updates > 2 * (place == "later"):
                    change(optimizer)
            if place == "between":
                change(optimizer)
    except tutti.errors.UsageError as error:
        return f"{error} {run.updates}"
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(
    ("change", "place"), [(halved_rows, "between"), (assigned_rows, "after"), (pulled_rows, "later")]
)
def test_elementwise_writes_to_rows_in_the_groups_equal_one_device(change: Any, place: str) -> None:
    want = worlds.alone(with_rows, strategy="single", change=change, place=place)
    for strategy in ("sharded:stage=1", "sharded:stage=2", "sharded"):
        for got in worlds.run(2, with_rows, strategy=strategy, change=change, place=place):
            assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize("change", [normalised_rows, norm_of_rows, noise_in_rows])
def test_numbers_of_a_rank_s_rows_in_the_groups_are_refused(change: Any) -> None:
    for strategy in ("sharded:stage=1", "sharded"):
        for said in worlds.run(2, with_rows, strategy=strategy, change=change, place="between"):
            assert "as optimizer.param_groups has it" in said and "model.parameters()" in said
            assert "test_sharded_reads.py:" in said and said.endswith(" 2")
    worlds.forget(2)


def test_a_write_to_rows_in_the_groups_that_a_forward_would_not_see_is_refused() -> None:
    for strategy in ("sharded:stage=1", "sharded:stage=2"):
        for said in worlds.run(2, with_rows, strategy=strategy, change=halved_rows, place="before"):
            assert "in an optimizer's groups" in said and said.endswith(" 0")
    worlds.forget(2)


def tied_in_the_body(strategy: str) -> tuple[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, torch.randn(24, 4), strategy=strategy, batch_size=6, precision="fp64")
    with pytest.raises(UsageError) as refused:
        for x in run.microbatches(0):
            if run.global_step == 2:
                model[2].weight = model[0].weight
            optimizer.zero_grad()
            run.backward(model(x).square().mean())
            optimizer.step()
    return str(refused.value), run.updates


@pytest.mark.parametrize("strategy", ["sharded:stage=2", "sharded:stage=3"])
def test_weights_that_are_tied_within_an_epoch_are_refused(strategy: str) -> None:
    for said, updates in worlds.run(2, tied_in_the_body, strategy=strategy):
        assert "tied the parameter 2.weight" in said and "test_sharded_reads.py:" in said and updates == 2, said
