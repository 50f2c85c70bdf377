"""Batch norm over several ranks against PyTorch's own on all samples at once: values, gradients, statistics, ends."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.nn import norms, sync

SHAPES: dict[str, tuple[tuple[int, ...], Any]] = {
    "2-d": ((11, 5), torch.contiguous_format),
    "3-d": ((11, 5, 7), torch.contiguous_format),
    "4-d": ((11, 5, 3, 4), torch.contiguous_format),
    "4-d channels last": ((11, 5, 3, 4), torch.channels_last),
    "5-d": ((11, 5, 2, 3, 2), torch.contiguous_format),
    "5-d channels last": ((11, 5, 2, 3, 2), torch.channels_last_3d),
}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
# Where each rank's samples begin and end, uneven; the last of four ranks has none.
BOUNDS = {2: (0, 9, 11), 3: (0, 1, 7, 11), 4: (0, 4, 5, 11, 11)}
OPTIONS: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.06}


def converted(model: nn.Module, workers: int = 8) -> nn.Module:
    world = context.current()
    mesh = RankMesh(world.identity.size, rank=world.identity.rank)
    return sync.convert_sync_batch_norm(
        model, Communicators(world, mesh).new_group("batch norm"), workers, mesh.data_ranks
    )


def made(shape: tuple[int, ...], options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(2)
    plain = PLAIN[len(shape)](shape[1], **options).double()
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    return plain


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=torch.float64) * 2 + 3, torch.randn(shape, dtype=torch.float64)


def summed(tensor: Tensor) -> Tensor:
    torch.distributed.all_reduce(tensor := tensor.detach().double().clone())
    return tensor


def differences(norm: Any, plain: Any, shape: tuple[int, ...], memory: Any, dtype: torch.dtype) -> list[float]:
    """Of three steps: output, gradients of input and parameters, and buffers; relative to 1 or the larger."""
    comm, found = norm.peers.line, []
    low, high = list(pairwise(BOUNDS[comm.size]))[comm.rank]
    for _ in range(3):
        x, dy = inputs(shape)
        whole = x.to(dtype).double().clone().requires_grad_()
        want = plain(whole)
        want.backward(dy)
        # A rank without any computes on another's, and goes backward from nothing.
        norm.peers.counts = low < high
        rows, part = (slice(low, high), 1) if low < high else (slice(0, 2), 0)
        leaf = x[rows].to(dtype).contiguous(memory_format=memory).requires_grad_()
        have = norm(leaf)
        have.backward(part * dy[rows].to(dtype).contiguous(memory_format=memory))
        assert have.dtype == dtype and have.stride() == leaf.stride()
        assert leaf.grad is not None and whole.grad is not None and bool(torch.isfinite(leaf.grad).all())
        pairs = [(have, want[rows]), (leaf.grad, part * whole.grad[rows])]
        pairs += [(summed(a.grad), b.grad) for a, b in zip(norm.parameters(), plain.parameters(), strict=True)]
        pairs += list(zip(norm.buffers(), plain.buffers(), strict=True))
        scale = [max(1.0, float(b.abs().max())) for _, b in pairs]
        found += [float((a.double() - b).abs().max()) / s for (a, b), s in zip(pairs, scale, strict=True)]
        norm.zero_grad(), plain.zero_grad()
    return found


def compared(dtype: torch.dtype) -> list[tuple[str, float]]:
    """Every shape, and every option of batch norm."""
    told = []
    for name, (shape, memory) in SHAPES.items():
        for options in OPTIONS if dtype == torch.float64 else OPTIONS[:1]:
            plain = made(shape, options)
            norm = converted(copy.deepcopy(plain))
            assert list(norm.state_dict()) == list(plain.state_dict())
            # Narrow numbers with wide weights, as autocast gives them.
            norm.to(torch.float64 if dtype == torch.float64 else torch.float32)
            told.append((f"{name} {options}", max(differences(norm, plain, shape, memory, dtype))))
    return told


@pytest.mark.parametrize(("dtype", "ranks"), in_turn(list(DTYPES), [2, 3, 4], each=2), ids=str)
def test_it_is_plain_batch_norm_on_all_samples(ranks: int, dtype: torch.dtype) -> None:
    for told in worlds.run(ranks, compared, dtype=dtype):
        assert len(told) >= len(SHAPES)
        assert [row for row in told if not row[1] <= DTYPES[dtype]] == []


def published() -> list[Any]:
    """Ranks hold [0, 2, 4] and [10]: mean 4 (the mean of their means is 6), variance 14."""
    plain = nn.BatchNorm1d(1, momentum=1.0, eps=1e-300).double()
    norm: Any = converted(plain)
    rank = norm.peers.line.rank
    result = norm(torch.tensor([[10.0]] if rank else [[0.0], [2.0], [4.0]], dtype=torch.float64))
    return [float(norm.running_mean), float(norm.running_var), (result * 14**0.5 + 4).flatten().tolist()]


def test_published_numbers() -> None:
    for told, own in zip(worlds.run(2, published), ([0, 2, 4], [10]), strict=True):
        assert told == [pytest.approx(4), pytest.approx(14 * 4 / 3), pytest.approx(own, abs=1e-12)]


def offset() -> float:
    """float32 numbers with a mean that is large against their spread."""
    torch.manual_seed(3)
    x = torch.randn(64, 3, 8, 8) * 1e-2 + 100
    norm: Any = converted(nn.BatchNorm2d(3))
    rows = slice(0, 50) if norm.peers.line.rank else slice(50, 64)
    want = nn.BatchNorm2d(3).double()(x.double())[rows]
    return float((norm(x[rows]).double() - want).abs().max())


def test_large_mean_small_variance() -> None:
    assert max(worlds.run(2, offset)) < 2e-2


def ends() -> list[str]:
    told = []
    norm: Any = converted(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    first: Any = norm[0]
    before = copy.deepcopy(first.state_dict())
    first.peers.counts = first.peers.line.rank == 1
    for call in (lambda: first(torch.ones(1, 3)), lambda: norm[first.peers.line.rank](torch.ones(2, 3))):
        try:
            call()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    kept = all(torch.equal(a, b) for a, b in zip(before.values(), first.state_dict().values(), strict=True))
    return [*told, str(kept)]


def test_one_value_and_another_layer_are_refused_on_every_rank() -> None:
    for one, other, kept in worlds.run(2, ends):
        assert "ValueError: Expected more than 1 value per channel when training" in one
        assert "MismatchError: devices are in different batch norms of the model: 0, 1" in other
        assert kept == "True", "nothing was learned from what was refused"


def models() -> list[bool]:
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), shared, nn.Sequential(nn.ReLU(), shared, nn.BatchNorm2d(3)))
    names, parameters, buffers = list(model.state_dict()), list(model.parameters()), list(model.buffers())
    plain = copy.deepcopy(model)
    net: Any = converted(model)
    kinds = [type(m) for m in plain.modules()]
    told = [net is model, list(net.state_dict()) == names, net[1] is net[2][1], net[1].peers is net[2][2].peers]
    told += [a is b for a, b in zip(net.parameters(), parameters, strict=True)]
    told += [a is b for a, b in zip(net.buffers(), buffers, strict=True)]
    # A copy speaks with the same ranks; in evaluation there is no message at all.
    x = torch.randn(2, 1, 5, 5)
    twin = copy.deepcopy(net)
    told += [twin[1].peers is net[1].peers, twin[1].weight is not net[1].weight]
    told += [torch.equal(net.eval()(x), plain.eval()(x)), "over 2 devices" in repr(net)]
    net[1].running_mean = torch.ones(3)
    norms.restore_norms(net)
    told += [[type(m) for m in net.modules()] == kinds, list(net.state_dict()) == names, net[1] is net[2][1]]
    told += [bool((net[1].running_mean == 1).all()), not net[1].training]
    return told


def test_a_model_is_converted_in_place_and_back() -> None:
    for told in worlds.run(2, models):
        assert told == [True] * len(told)


class _Alone:
    size = 1


@pytest.mark.parametrize(
    ("model", "workers", "words"),
    [
        (nn.Linear(2, 2), 1, "no batch norm"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1)), 2, "draws random numbers"),
        (nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)), 2, "statistics of 1"),
    ],
)
def test_what_would_depend_on_the_devices_is_refused(model: nn.Module, workers: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sync.convert_sync_batch_norm(model, _Alone(), workers, 1)  # type: ignore[arg-type]
    if workers > 1:
        sync.convert_sync_batch_norm(model, _Alone(), 1, 1)  # type: ignore[arg-type]


def twice() -> str:
    norm = converted(nn.BatchNorm1d(3).double())
    x = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    try:
        torch.autograd.grad((norm(x) ** 3).sum(), [x], create_graph=True)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_gradients_are_refused(size: int) -> None:
    assert all("cannot be combined with gradients of gradients" in said for said in worlds.run(size, twice))


class NormAct(nn.BatchNorm2d):
    """Batch norm, dropout of nothing and an activation with a weight in one module, as timm's."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        training = self.training or self.running_mean is None
        y = nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training, self.momentum or 0.0, self.eps
        )
        return self.act(y)


class InTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(3), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class ByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) * self.weight[:, None, None]


HOOKED: list[int] = []


def fused(kind: str, strategy: str, batch_norm: str | None) -> Any:
    torch.manual_seed(0)
    own: nn.Module = {"in one": NormAct, "hooked": NormAct, "by hand": ByHand}.get(kind, lambda _: InTwo())(3)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), own, nn.Flatten(), nn.Linear(3 * 9, 2)).double()
    HOOKED.clear()
    if kind == "hooked":
        own.register_forward_hook(lambda module, args, out: HOOKED.append(len(out)))
    inputs = torch.randn(24, 2, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {} if batch_norm is None else {"batch_norm": batch_norm}
    try:
        run = tutti.prepare(
            model, "sgd:lr=0.1", inputs, lambda called, batch: called(batch).square().mean(),
            strategy=strategy, batch_size=12, precision="fp64", shuffle=False, **options,
        )  # fmt: skip
        for batch in run.epoch(0):
            run.step(batch)
    except UsageError as error:
        return str(error)
    state = {name.replace("1.norm.", "1."): value.numpy().copy() for name, value in run.state().items()}
    return state, list(HOOKED)


@pytest.mark.parametrize(("batch_norm", "ranks"), [("sync", 1), ("sync", 2), ("sync", 3), ("ghost:size=4", 1)])
def test_a_batch_norm_with_a_forward_of_its_own_keeps_it(batch_norm: str, ranks: int) -> None:
    strategy = "single" if ranks == 1 else "mirrored"
    wanted = worlds.run(ranks, fused, kind="in two", strategy=strategy, batch_norm=batch_norm)
    for kind in ("in one", "hooked"):
        got = worlds.run(ranks, fused, kind=kind, strategy=strategy, batch_norm=batch_norm)
        for (state, lengths), (want, _) in zip(got, wanted, strict=True):
            assert state.keys() == want.keys()
            assert all((state[name] == want[name]).all() for name in want)
            assert lengths[-2:] == ([12 // ranks] * 2 if kind == "hooked" else [])
    if batch_norm == "sync":
        [(one, _)] = worlds.run(1, fused, kind="in one", strategy="single", batch_norm=None)
        assert all(abs(state[name] - one[name]).max() <= 1e-12 for name in one)


@pytest.mark.parametrize("batch_norm", ["sync", "ghost:size=4"])
def test_a_batch_norm_that_normalises_by_hand_is_refused(batch_norm: str) -> None:
    for said in worlds.run(2, fused, kind="by hand", strategy="mirrored", batch_norm=batch_norm):
        assert "cannot be combined with the batch norm ByHand" in said


def test_a_batch_norm_with_two_names_is_replaced_under_both() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    norms.replace_norms(model, lambda plain: nn.Identity())
    assert isinstance(model[0], nn.Identity) and model[2] is model[0]
