"""What every layer-wise optimizer keeps: torch.optim's contract, who takes part, both ways, norms over ranks."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tests import worlds
from tests.covering import in_turn
from tests.optim.problems import KINDS, SHAPES, feed, gradients, parameters
from tutti.errors import UsageError
from tutti.native import compiled_passes
from tutti.optim import LAMB, LARC, LARS, NovoGrad, split_groups

compiled = pytest.mark.skipif(compiled_passes.load_kernels() is None, reason="there is no C++ compiler")
FUSED = [pytest.param(None, id="compiled", marks=compiled), pytest.param(False, id="foreach")]


def after(name: str, steps: int = 5, dtype: torch.dtype = torch.float64, **changes: Any) -> list[torch.Tensor]:
    kind, options = KINDS[name]
    params = parameters(dtype)
    feed(kind(params, **{**options, **changes}), params, gradients(params, steps))
    return [p.detach() for p in params]


def largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """max|Δ| / max(1, |p|)."""
    pairs = zip(ours, theirs, strict=True)
    gaps = (((a - b).abs() / b.abs().clamp(min=1)).max().item() for a, b in pairs if a.numel())
    return max(gaps, default=0.0)


@compiled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", KINDS)
def test_compiled_loops_are_pytorchs_operations_to_the_bit(name: str, dtype: Any) -> None:
    ours, theirs = after(name, dtype=dtype, fused=True), after(name, dtype=dtype, fused=False)
    assert all(map(torch.equal, ours, theirs))
    assert largest(ours, parameters(dtype)) > 1e-3


def states_after(kind: Any, fused: bool | None, dtype: Any, steps: int = 3, **options: Any) -> list[torch.Tensor]:
    """Parameters and all states, as bytes, of tensors whose sums have every kind of end."""
    torch.manual_seed(5)
    sizes = [0, 1, 31, 32, 33, 1023, 1024, 1025, 16383, 16384, 16385, 65536, 65537, 140_001]
    shaped = [torch.randn(size) for size in sizes] + [torch.randn(3, 5), torch.randn(257, 300), torch.randn(())]
    shaped += [torch.randn(6, 4, 5, 3).contiguous(memory_format=torch.channels_last), torch.zeros(7, 9)]
    shaped += [torch.randn(40, 60, 9, 7).contiguous(memory_format=torch.channels_last), torch.randn(8, 8) * 1e-22]
    params = [nn.Parameter(t.to(dtype)) for t in shaped]
    optimizer = kind(params, fused=fused, **options)
    for step in range(steps):
        for number, param in enumerate(params):
            torch.manual_seed(100 * step + number)
            param.grad = (torch.randn(param.shape) * 10.0 ** (number % 5 - 3)).to(dtype)
            if number % 4 == 1:
                # Zeros of both signs, in a gradient as after a ReLU.
                param.grad = param.grad.clamp(min=0) * (-1) ** step
        optimizer.step()
    states = [v for p in params for k, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return [t.detach().contiguous().view(-1).view(torch.uint8) for t in [*params, *states] if t.numel() > 1]


SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    (LARS, {}),
    (LARS, {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01, "adapt_1d": True}),
    (LARS, {"lr": 0.1, "nesterov": True, "weight_decay": 0.01, "decay_1d": True, "denominator": "norm_of_sum"}),
    (LARS, {"lr": 0.1, "momentum_correction": True, "weight_decay": 1e-4, "maximize": True}),
    (LARC, {"weight_decay": 0.05}),
    (LARC, {"cap": False, "nesterov": True}),
    (LAMB, {}),
    (LAMB, {"bias_correction": False, "max_grad_norm": 1.0, "adapt_1d": True, "decay_1d": True}),
    (LAMB, {"decoupled_decay": True, "grad_averaging": False, "trust_clip": 1.0, "weight_decay": 0.1}),
    (LAMB, {"weight_decay": 0.0, "eps": 1e-10, "maximize": True, "phi_max": 2.0}),
    (NovoGrad, {}),
    (NovoGrad, {"weight_decay": 0.01, "decay": "step", "grad_averaging": True, "adapt_1d": True, "decay_1d": True}),
    (NovoGrad, {"normalize": "moment", "bias_correction": True, "init": "zero", "maximize": True}),
]


@compiled
@pytest.mark.parametrize(("settings", "dtype"), in_turn(SETTINGS, [torch.float64, torch.float32]), ids=str)
def test_bits_do_not_depend_on_a_compiler(settings: tuple[Any, dict[str, Any]], dtype: Any) -> None:
    kind, options = settings
    ours, theirs = (states_after(kind, fused, dtype, **options) for fused in (True, False))
    assert len(ours) == len(theirs) > 14
    assert [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", KINDS)
def test_a_saved_state_continues_to_the_same_bits(name: str, fused: bool | None) -> None:
    kind, options = KINDS[name]
    options = {**options, "fused": fused}
    whole = parameters(torch.float32)
    feed(kind(whole, **options), whole, gradients(whole, 4))
    first = parameters(torch.float32)
    half = kind(first, **options)
    steps = list(gradients(first, 4))
    feed(half, first, steps[:2])
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    second = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = kind(second, lr=77.0, fused=fused)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    feed(resumed, second, steps[2:])
    for got, want in zip(second, whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", [LARS, LARC, LAMB, NovoGrad])
def test_a_zero_norm_gives_ratio_one(kind: Any, fused: bool | None) -> None:
    """Fresh zeros move as if not adapted; a gradient of zero leaves finite weights."""
    grad = torch.tensor([[0.5, -0.25]], dtype=torch.float64)
    moved = []
    for adapt in (True, False):
        zero = nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
        optimizer = kind([zero], lr=0.1, adapt=adapt, fused=fused)
        zero.grad = grad.clone()
        optimizer.step()
        moved.append(zero.detach().clone())
        zero.grad = torch.zeros_like(grad)
        optimizer.step()
        assert torch.isfinite(zero).all()
    if kind is not NovoGrad:
        assert torch.equal(*moved)
    assert moved[0].abs().min() > 1e-3
    flat = nn.Parameter(torch.ones(1, 2, dtype=torch.float64))
    optimizer = kind([flat], lr=0.1, fused=fused)
    flat.grad = torch.zeros_like(flat)
    optimizer.step()
    assert torch.equal(flat, torch.ones_like(flat)) or kind is LAMB


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", [LARS, LARC, LAMB, NovoGrad])
def test_biases_and_norms_are_left_out_unless_asked_for(kind: Any, fused: bool | None) -> None:
    def moved(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        param = nn.Parameter(torch.full(shape, 2.0, dtype=torch.float64))
        optimizer = kind([param], lr=0.1, weight_decay=0.3, fused=fused, **options)
        param.grad = torch.linspace(-1, 1, 6, dtype=torch.float64).view(shape)
        optimizer.step()
        return param.detach().flatten()

    matrix, vector = (2, 3), (6,)
    plain = {"adapt": False, "weight_decay": 0.0}
    excluded = nn.Parameter(torch.full(matrix, 2.0, dtype=torch.float64))
    optimizer = kind([{"params": [excluded], **plain}], lr=0.1, fused=fused)
    excluded.grad = torch.linspace(-1, 1, 6, dtype=torch.float64).view(matrix)
    optimizer.step()
    assert torch.equal(moved(vector), excluded.detach().flatten())
    assert torch.equal(moved(vector, adapt_1d=True, decay_1d=True), moved(matrix))
    assert not torch.equal(moved(vector), moved(matrix))
    assert not torch.equal(moved(vector, decay_1d=True), moved(vector))
    assert not torch.equal(moved(vector, adapt_1d=True), moved(vector))


def test_names_and_predicates_exclude() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(3, 2), "body": nn.Linear(2, 2), "head": nn.Linear(2, 3)})
    by_name = split_groups(net.named_parameters(), ["embed.*", "head.weight"])
    by_size = split_groups(net.named_parameters(), lambda name, p: p.shape[0] == 3)
    assert [p.shape for p in by_name[1]["params"]] == [(3, 2), (3, 2)]
    assert [p.shape for p in by_size[1]["params"]] == [(3, 2), (3, 2), (3,)]
    inside, outside = LAMB(by_name, weight_decay=0.5).param_groups
    assert (inside["adapt"], inside["weight_decay"]) == (True, 0.5)
    assert (outside["adapt"], outside["weight_decay"]) == (False, 0.0)
    assert len(split_groups(net.named_parameters(), [])) == 1


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", KINDS)
def test_groups_of_their_own_options_are_steps_of_their_own(name: str, fused: bool | None) -> None:
    """Also for a group that is added later; the norm that LAMB clips by is the one thing they share."""
    kind, options = KINDS[name]
    options = {**options, "fused": fused} | ({"max_grad_norm": None} if kind is LAMB else {})
    other = {"lr": 0.05, "weight_decay": 0.2, "maximize": True}
    together, apart = parameters(), parameters()
    one = kind([{"params": together[:3]}], **options)
    one.add_param_group({"params": together[3:], **other})
    separate = kind(apart[:3], **options), kind(apart[3:], **{**options, **other})
    for grads in gradients(together, 3):
        for params in (together, apart):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
        one.step()
        for optimizer in separate:
            optimizer.step()
    for got, want in zip(together, apart, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", KINDS)
def test_maximizing_the_objective_is_minimizing_its_negative(name: str, fused: bool | None) -> None:
    kind, options = KINDS[name]
    ours, theirs = parameters(), parameters()
    up, down = kind(ours, maximize=True, fused=fused, **options), kind(theirs, fused=fused, **options)
    for grads in gradients(ours, 3):
        for mine, other, grad in zip(ours, theirs, grads, strict=True):
            mine.grad, other.grad = grad, -grad
        up.step()
        down.step()
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("kind", [LARS, LARC, LAMB, NovoGrad])
def test_tensors_without_gradient_stay_and_keep_no_state(kind: Any, fused: bool | None) -> None:
    params = parameters()
    optimizer = kind(params, fused=fused)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert all(torch.equal(p, b) for p, b in zip(params[1:], before[1:], strict=True))
    assert [p is params[0] for p in optimizer.state] == [True]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_and_states_in_another_layout_are_the_same_numbers(name: str, fused: bool | None) -> None:
    """Channels-last kernels with contiguous gradients, transposed matrices, and what loading makes of them."""
    kind, options = KINDS[name]
    plain = [nn.Parameter(p.detach().contiguous()) for p in parameters()]
    odd = parameters()
    odd[0] = nn.Parameter(odd[0].detach().t().contiguous().t())
    pair = kind(plain, fused=fused, **options), kind(odd, fused=fused, **options)
    for number, grads in enumerate(gradients(plain, 4)):
        for a, b, grad in zip(plain, odd, grads, strict=True):
            a.grad, b.grad = grad, grad.clone()
        for optimizer in pair:
            optimizer.step()
        if number == 1:
            pair[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))
    assert largest([p.detach() for p in odd], [p.detach() for p in plain]) <= 1e-13


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_does_not_overflow_in_the_norms(name: str) -> None:
    kind, options = KINDS[name]
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))
    optimizer = kind([param], **options)
    param.grad = torch.full_like(param, 200.0)
    optimizer.step()
    assert torch.isfinite(param).all() and not torch.equal(param, torch.ones_like(param))


def test_the_norm_that_lamb_clips_by_can_be_told() -> None:
    options = {"max_grad_norm": 1.0, "eps": 1.0}
    moved = []
    for told in (None, 50.0, 0.5):
        params = parameters()
        optimizer = LAMB(params, **options)
        [grads] = gradients(params, 1)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad / torch.stack([g.square().sum() for g in grads]).sum().sqrt() * 50
        optimizer.grad_norm = told
        optimizer.step()
        assert optimizer.grad_norm is None
        moved.append([p.detach().clone() for p in params])
    assert largest(moved[0], moved[1]) < 1e-12 < 1e-3 < largest(moved[0], moved[2])


def test_what_cannot_be_done_is_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = LAMB(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()
    with pytest.raises(UsageError, match="no compiled loops"):
        LARS([nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))], fused=True)
    with pytest.raises(UsageError, match="nesterov"):
        LARC(parameters(), nesterov=True, momentum=0.0)


def test_a_closure_is_evaluated_with_gradients() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert not torch.equal(param, torch.ones(2, 2))


@compiled
@pytest.mark.parametrize("name", KINDS)
def test_threads_places_and_neighbours_do_not_change_a_bit(name: str) -> None:
    kind, options = KINDS[name]
    options = {**options, "fused": True} | ({"max_grad_norm": None} if kind is LAMB else {})
    shapes = [(300, 301), (3,), (129, 1025), (40000,), (7, 5)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads, order, odd in ((1, range(5), 0), (2, range(5), 0), (5, range(5), 3), (1, (4, 2, 0, 3, 1), 1)):
            torch.set_num_threads(threads)
            params = [nn.Parameter(moved(p.detach(), odd)) for p in parameters(torch.float32, shapes)]
            feed(kind([params[i] for i in order], **options), params, gradients(params, 2))
            results.append([p.detach() for p in params])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins ``elements`` after where memory is aligned."""
    place = torch.empty(elements + tensor.numel())[elements:].view(tensor.shape)
    return place.copy_(tensor)


# --- norms over ranks -----------------------------------------------------------------------------------------------


def sharded(name: str, fused: bool | None) -> list[Any]:
    """Train this rank's slices: rows of matrices, elements of flat pieces; all weights put together."""
    from torch import distributed as dist

    kind, options = KINDS[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    messages = 0

    def norms(squares: torch.Tensor) -> torch.Tensor:
        nonlocal messages
        messages += 1
        whole = squares.clone()
        dist.all_reduce(whole)
        return whole

    def mine(tensor: torch.Tensor) -> torch.Tensor:
        # The first matrix as a flat piece, the way flattened shards hold it; the others by rows.
        return (tensor.flatten() if tensor.shape == SHAPES[0] else tensor).tensor_split(size)[rank].clone()

    whole = parameters()
    params = [nn.Parameter(mine(p.detach())) for p in whole]
    groups = [{"params": params[:1], "adapt_1d": True, "decay_1d": True}, {"params": params[1:]}]
    optimizer = kind(groups, norms=norms, fused=fused, **options)
    for grads in gradients(whole, 4):
        for param, grad in zip(params, grads, strict=True):
            param.grad = mine(grad)
        optimizer.step()
    assert messages == 4 * (2 if options.get("max_grad_norm") else 1), "one message for all layers"
    return [p.detach().numpy() for p in params]


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("size", [3, 4])
def test_ranks_with_slices_make_the_steps_of_one_that_has_all(size: int, fused: bool | None) -> None:
    for name in KINDS:
        pieces = worlds.run(size, sharded, name=name, fused=fused)
        want = after(name, 4, fused=fused)
        for i, whole in enumerate(want):
            joined = torch.cat([torch.from_numpy(rank[i]) for rank in pieces]).view(whole.shape)
            assert largest([joined], [whole]) <= 1e-12, (name, i)


def distributed() -> tuple[float, str]:
    """Half of a matrix as a DTensor on each of two ranks."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def norms(squares: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(squares)
        return squares

    [whole] = parameters(shapes=[(6, 3)])
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    optimizer = LAMB([param], norms=norms)
    alone = LAMB([whole])
    for grads in gradients([whole], 3):
        whole.grad = grads[0]
        param.grad = distribute_tensor(grads[0], mesh, [Shard(0)])
        optimizer.step()
        alone.step()
    difference = (param.detach().full_tensor() - whole.detach()).abs().max().item()
    try:
        LAMB([param]).step()
    except UsageError as error:
        return difference, str(error)
    return difference, ""


def test_distributed_tensors_need_norms() -> None:
    for difference, said in worlds.run(2, distributed):
        assert difference <= 1e-12
        assert "norms=" in said
