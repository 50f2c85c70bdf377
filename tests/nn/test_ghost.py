"""Ghost batch norm against normalising one chunk after the other: values, gradients, running statistics, ends."""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.covering import table
from tutti.errors import UsageError
from tutti.native import native_library
from tutti.nn import ghost

SHAPES = {
    "1d": ((12, 5), torch.contiguous_format),
    "images": ((12, 70, 3, 5), torch.contiguous_format),
    "channels last": ((12, 70, 3, 5), torch.channels_last),
    "long": ((12, 3, 37), torch.contiguous_format),
    "volumes": ((12, 6, 2, 3, 2), torch.channels_last_3d),
}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.fixture(params=["compiled", "PyTorch's own"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute; the compiled one is there wherever a compiler is."""
    if request.param == "PyTorch's own":
        monkeypatch.setattr(ghost, "_kernels", lambda dtype: ())
    elif native_library.library(Path(native_library.__file__).with_name("ghost.cpp")) is None:
        pytest.skip("there is no C++ compiler")
    return str(request.param)


def inputs(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    shape, memory = SHAPES[name]
    torch.manual_seed(1)
    x, dy = (torch.randn(shape, dtype=torch.float64) * 2 + 3 for _ in range(2))
    return tuple(t.to(dtype).contiguous(memory_format=memory) for t in (x, dy))  # type: ignore[return-value]


def chunk_loop(norm: nn.Module, x: Tensor, bounds: list[int]) -> Tensor:
    return torch.cat([norm(x[low:high]) for low, high in pairwise(bounds)])


def norms(
    x: Tensor, size: int, momentum: float | None = 0.1, **options: bool
) -> tuple[nn.Module, ghost.GhostBatchNorm]:
    torch.manual_seed(2)
    plain = PLAIN[x.dim()](x.shape[1], momentum=momentum, **options).double()
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    return plain, ghost.GhostBatchNorm(copy.deepcopy(plain), size)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", [4, 5, 12, 100])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_is_the_loop_over_chunks(name: str, size: int, momentum: float | None, kernels: str) -> None:
    x, dy = inputs(name)
    plain, ours = norms(x, size, momentum)
    bounds = ghost.ghosts(12, size, x[0, 0].numel())
    for _ in range(3):
        results = []
        for norm, run in ((plain, lambda t: chunk_loop(plain, t, bounds)), (ours, ours)):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = run(leaf)
            results.append([y, *torch.autograd.grad(y, [leaf, *norm.parameters()], dy)])
        for want, have in zip(*results, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)
        for (key, want), have in zip(plain.named_buffers(), dict(ours.named_buffers()).values(), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10, msg=key)
    plain.eval(), ours.eval()
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-10, atol=1e-10)


def test_published_numbers(kernels: str) -> None:
    x = torch.tensor([[0.0], [2.0], [4.0], [10.0]], dtype=torch.float64)
    ours = ghost.GhostBatchNorm(nn.BatchNorm1d(1, eps=1e-300).double(), 2)
    assert ours(x).flatten().tolist() == pytest.approx([-1, 1, -1, 1])
    assert float(ours.running_mean) == pytest.approx(0.79) and float(ours.running_var) == pytest.approx(2.79)


def test_a_lone_last_number_joins_the_ghost_before(kernels: str) -> None:
    x = torch.randn(9, 3, dtype=torch.float64)
    plain, ours = norms(x, 4)
    torch.testing.assert_close(ours(x), chunk_loop(plain, x, [0, 4, 9]))
    with pytest.raises(ValueError, match="more than 1 value"):
        ours(x[:1])


def test_ghosts_of_a_single_number_a_channel_are_refused() -> None:
    ours = ghost.GhostBatchNorm(nn.BatchNorm1d(3), 1)
    with pytest.raises(UsageError, match="a single number has no variance"):
        ours(torch.randn(4, 3))
    assert ours(torch.randn(4, 3, 2)).isfinite().all() and ours.eval()(torch.randn(4, 3)).isfinite().all()


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
def test_without_weights_or_without_statistics(options: dict[str, bool], kernels: str) -> None:
    x, dy = inputs("channels last")
    plain, ours = norms(x, 5, **options)
    a, b = (t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, x))
    chunk_loop(plain, a, [0, 5, 10, 12]).backward(dy)
    ours(b).backward(dy)
    torch.testing.assert_close(b.grad, a.grad)
    assert ours.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", ["images", "channels last"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.05)])
def test_narrow_numbers(name: str, dtype: torch.dtype, bound: float, kernels: str) -> None:
    """bfloat16 activations with float32 weights, as autocast gives them."""
    x, dy = inputs(name, dtype)
    plain, ours = norms(x.double(), 5)
    ours.float()
    wide, leaf = x.double().requires_grad_(), x.clone(memory_format=torch.preserve_format).requires_grad_()
    want = chunk_loop(plain, wide, [0, 5, 10, 12])
    want.backward(dy.double())
    have = ours(leaf)
    have.backward(dy)
    assert have.dtype == dtype and have.stride() == x.stride() and leaf.grad is not None
    torch.testing.assert_close(have.double(), want, rtol=bound, atol=bound)
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=bound, atol=bound)


LONG = {
    "many points": ((3, 2, 4500), torch.contiguous_format),
    "many samples": ((700, 3, 5), torch.contiguous_format),
    "stretches": ((40, 130, 9, 7), torch.channels_last),
}


@pytest.mark.skipif(
    native_library.library(Path(native_library.__file__).with_name("ghost.cpp")) is None,
    reason="there is no C++ compiler",
)
@pytest.mark.parametrize(
    ("name", "dtype", "affine"),
    table([*SHAPES, *LONG], [torch.float32, torch.float64, torch.bfloat16], [True, False]),
)
def test_bits_do_not_depend_on_a_compiler(
    name: str, dtype: torch.dtype, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", {**SHAPES, **LONG})
    x, dy = inputs(name, dtype)
    dy[dy < 2] = 0
    for size in (1 if x[0, 0].numel() > 1 else 2, 5, max(len(x) // 2, 2)):
        found = []
        for compiled in (True, False):
            with monkeypatch.context() as patch:
                if not compiled:
                    patch.setattr(ghost, "_kernels", lambda dtype: ())
                _, ours = norms(x, size, affine=affine)
                ours = ours.to(torch.float32 if dtype == torch.bfloat16 else dtype)
                leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
                y = ours(leaf)
                y.backward(dy)
                found.append([y.detach(), leaf.grad, *(p.grad for p in ours.parameters()), *ours.buffers()])
        assert [torch.equal(a.view(-1), b.view(-1)) for a, b in zip(*map(flat, found), strict=True)].count(False) == 0


def flat(tensors: list[Tensor | None]) -> list[Tensor]:
    """As integers, so that zeros have signs."""
    return [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t is not None]


def test_large_mean_small_variance(kernels: str) -> None:
    x = torch.randn(64, 3, 8, 8) * 1e-2 + 100
    plain, ours = norms(x.double(), 16)
    ours.float()
    want = chunk_loop(plain, x.double(), [0, 16, 32, 48, 64])
    torch.testing.assert_close(ours(x).double(), want, rtol=2e-2, atol=2e-2)


def test_bits_do_not_depend_on_threads() -> None:
    x, dy = inputs("channels last", torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            _, ours = norms(x, 5)
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = ours.float()(leaf)
            y.backward(dy)
            found.append((y, leaf.grad, ours.weight.grad, ours.running_var))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_model_is_converted_in_place_and_keeps_its_state() -> None:
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), shared, nn.Sequential(nn.ReLU(), shared, nn.BatchNorm2d(3)))
    names, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    assert ghost.convert_ghost_batch_norm(model, 8) is model
    assert list(model.state_dict()) == names and [id(p) for p in model.parameters()] == parameters
    assert model[1] is model[2][1] and isinstance(model[2][2], ghost.GhostBatchNorm) and "ghost=8" in repr(model)
    assert isinstance(ghost.convert_ghost_batch_norm(nn.BatchNorm1d(2), 4), ghost.GhostBatchNorm)
    with pytest.raises(UsageError, match="no batch norm"):
        ghost.convert_ghost_batch_norm(nn.Linear(2, 2), 8)
    with pytest.raises(UsageError, match="ghost batch has 0"):
        ghost.convert_ghost_batch_norm(nn.BatchNorm1d(2), 0)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_it_is_one_graph_for_the_compiler(momentum: float | None) -> None:
    x, _ = inputs("images")
    _, ours = norms(x, 5, momentum)
    other = copy.deepcopy(ours)
    # Not fullgraph=True, under which reading a number is no break.
    assert torch._dynamo.explain(copy.deepcopy(ours))(x).graph_break_count == 0
    compiled = torch.compile(other, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), ours(x))
    torch.testing.assert_close(other.state_dict(), ours.state_dict())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_gradients_of_gradients(affine: bool, eps: float, kernels: str) -> None:
    draw = torch.Generator().manual_seed(3)
    x, target = (torch.randn(10, 3, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    plain = nn.BatchNorm1d(3, eps=eps, affine=affine).double()
    norm = ghost.GhostBatchNorm(copy.deepcopy(plain), 4)

    def penalised(split: bool) -> list[Tensor]:
        leaf, parameters = x.clone().requires_grad_(), list((plain if split else norm).parameters())
        value = torch.cat([plain(part) for part in leaf.split([4, 4, 2])]) if split else norm(leaf)
        slopes = torch.autograd.grad(((value - target) ** 2).sum(), [leaf, *parameters], create_graph=True)
        penalty = torch.stack([(slope**2).sum() for slope in slopes]).sum()
        return [penalty.detach(), *torch.autograd.grad(penalty, [leaf, *parameters])]

    for have, want in zip(penalised(split=False), penalised(split=True), strict=True):
        assert float((have - want).abs().max()) <= 1e-10 * max(1.0, float(want.abs().max()))
