"""Split experts whose weights are stacked in tensors of three dimensions, each expert by its hidden features.

An expert is a feed-forward network; a layer of stacked experts holds one (experts, …, …) tensor for each linear layer.
The first is split by outputs and the second by inputs, as in Shoeybi et al. 2019, arXiv 1909.08053, §3, so that every
rank has a slice of each expert and the ranks' outputs add up. The split is proved by computing in double precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from tutti.nn.forward_hooks import find_script_hook
from tutti.nn.untraced import Untraced
from tutti.parallel.tensor.block_call import BlockArguments, check_form, with_fewer_gradients
from tutti.parallel.tensor.split_tensor import copied
from tutti.parallel.tensor.tp_layers import TensorParallelLayer, refuse_hook
from tutti.parallel.tensor.tp_verify import TensorCut, is_close
from tutti.torch_compat import GROUPED_PRODUCT, has_forward_hook, module_parameters, tree_flatten, tree_map_only

_MOST = 64
"""Ways to cut the tensors of one layer that are tried at most."""
Cuts = dict[str, TensorCut]


def holds_stacked_experts(module: nn.Module) -> bool:
    """Return whether a module may be a layer of stacked experts, which tensor parallelism can try to split.

    Such a module is of a class from outside of ``torch.nn`` and holds at least two floating parameters of three
    dimensions and the same number of experts; its submodules, such as an activation, have no parameters and no hooks.

    Args:
        module: any module.
    """
    if type(module).__module__.startswith("torch.nn."):
        return False
    stacked = [p for p in _own(module).values() if p.dim() == 3]
    inner = [each for each in module.modules() if each is not module]
    plain = not any(has_forward_hook(each) or next(each.parameters(recurse=False), None) is not None for each in inner)
    return plain and len(stacked) > 1 and len({len(p) for p in stacked}) == 1


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: p for key, p in module_parameters(module).items() if p is not None and p.is_floating_point()}


def find_expert_cuts(module: nn.Module, ranks: int, call: BlockArguments) -> Cuts | None:
    """Find how to cut the parameters of a layer of stacked experts over ranks, and verify it in double precision.

    The hidden features of each expert are divided. The slices of all tensor-parallel ranks are computed in this process
    with random parameters, and their outputs and the gradients of the arguments must add up to those of the whole
    layer, in training and in evaluation. Random generators stay as they are.

    Args:
        module: a layer of stacked experts, see ``holds_stacked_experts``; it is not changed.
        ranks: number of tensor-parallel ranks.
        call: recorded arguments of a call.

    Returns:
        The cut of each divided parameter, by its name in the module. Any other parameter, such as the second linear
        layer's bias, is used by the first rank as it is, and by the other ranks as zeros. None where no cuts give the
        same result, and where the layer raises an error, draws random numbers or writes attributes.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            trial = _ExpertTrial(module, ranks, call)
            return next((cuts for cuts in _proposals(trial.whole, ranks) if trial.proves(cuts)), None)
    except Exception:
        # The layer needs arguments of another kind.
        return None


def _proposals(whole: Mapping[str, Tensor], ranks: int) -> Iterator[Cuts]:
    """Yield ways to cut tensors by the hidden features, of which a tensor has one or two for each (gate and up)."""
    lengths = sorted({size for p in whole.values() if p.dim() == 3 for size in p.shape[1:] if size >= ranks})
    for length, apart in product(lengths, (True, False)):
        options = [list(_cuts(p, length, _units(length, ranks), apart=apart)) for p in whole.values()]
        for chosen in islice(product(*options), _MOST):
            yield {key: cut for key, cut in zip(whole, chosen, strict=True) if cut is not None}


def _units(length: int, ranks: int) -> int:
    """Return into how many units the hidden features are divided, of which ranks have even shares.

    Units of 16 or 8 features, where that leaves the shares even, align the slices' memory, as grouped matrix products
    need it.
    """
    for each in (16, 8):
        if length % (each * ranks) == 0 or (length % each == 0 and length >= 8 * each * ranks):
            return length // each
    return length


def _cuts(tensor: Tensor, length: int, units: int, *, apart: bool) -> Iterator[TensorCut | None]:
    """Yield ways to cut one tensor with one or two numbers for each of ``length`` hidden features, in so many units.

    ``apart``: gates and ups are two sections, and do not take turns (GPT-OSS). A tensor of fewer than three dimensions
    may also stay whole.
    """
    for dim in range(1, tensor.dim()):
        if tensor.shape[dim] == 2 * length:
            yield TensorCut(dim, units, (length, length) if apart else ())
        elif tensor.shape[dim] == length:
            yield TensorCut(dim, units)
    if tensor.dim() < 3:
        yield None


class _GroupedInDouble(TorchFunctionMode):
    """Function mode that computes grouped matrix products in double precision, for which PyTorch has no kernel.

    Rows of the first matrix are sorted by expert, and ``offs`` has the end of each expert's: (rows, k) times
    (experts, k, n) is (rows, n).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not GROUPED_PRODUCT or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        rows, experts = args[:2]
        bounds = pairwise([0, *kwargs["offs"].tolist()])
        return torch.cat([rows[begin:end] @ matrix for (begin, end), matrix in zip(bounds, experts, strict=True)])


class _ExpertTrial:
    """A layer of stacked experts in double precision with random parameters, on which cuts are tried.

    Attributes:
        whole: the parameters by name.
    """

    def __init__(self, module: nn.Module, ranks: int, call: BlockArguments) -> None:
        self._plain, self._ranks, self._call = copy.deepcopy(module).cpu(), ranks, call
        self._module = copy.deepcopy(self._plain).double()
        generator = torch.Generator().manual_seed(0)
        self.whole = {
            key: torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.shape[-1] ** -0.5
            for key, p in _own(self._module).items()
        }
        sizes = {size for p in self.whole.values() if p.dim() == 3 for size in p.shape[1:]}
        self._index = call.main_input(sizes)
        shape = tree_flatten((call.args, call.kwargs))[0][self._index].shape
        self._x = torch.randn(shape, generator=generator, dtype=torch.float64)
        self._spread = True
        try:
            self._results = self._run_both()
        except Exception:
            # The integers are no indices of experts.
            self._spread = False
            self._results = self._run_both()

    def _run_both(self) -> dict[bool, list[Tensor]]:
        return {training: self._run(self.whole, training) for training in (True, False)}

    def _reach_all(self, value: Tensor) -> Tensor:
        """Return indices of experts that name each of them, as a router without training does not."""
        experts = len(next(p for p in self.whole.values() if p.dim() == 3))
        if not self._spread or value.is_floating_point() or value.dtype == torch.bool:
            return value
        return (torch.arange(value.numel()) % experts).reshape(value.shape).to(value.dtype)

    def proves(self, cuts: Cuts) -> bool:
        """Return whether the results of all ranks add up to those of the whole layer."""
        for training, whole in self._results.items():
            try:
                self._run_as_it_is(cuts)
                each = [self._run(self._slices(cuts, rank), training) for rank in range(self._ranks)]
            except Exception:
                # The shapes do not fit.
                return False
            if not all(is_close(torch.stack(parts).sum(0), sum_) for sum_, *parts in zip(whole, *each, strict=True)):
                return False
        return True

    def _run_as_it_is(self, cuts: Cuts) -> None:
        """Run the slices in the layer's own precision. Raises errors of kernels that take no slices of such sizes."""
        own = {key: p.detach() for key, p in _own(self._plain).items()}
        dtype = next(iter(own.values())).dtype
        given = (self._call.args, dict(self._call.kwargs))
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, given)
        for rank in range(self._ranks):
            parts = {key: cuts[key].take(p, rank, self._ranks) if key in cuts else p for key, p in own.items()}
            with torch.no_grad():
                functional_call(self._plain, parts, args, kwargs)

    def _slices(self, cuts: Cuts, rank: int) -> dict[str, Tensor]:
        return {
            key: cuts[key].take(p, rank, self._ranks) if key in cuts else p * (rank == 0)
            for key, p in self.whole.items()
        }

    def _run(self, parameters: Mapping[str, Tensor], training: bool) -> list[Tensor]:
        """Return the output, and in training the gradients of the arguments that have one."""
        before, attributes = torch.get_rng_state(), Untraced(self._module)
        x = self._x.clone().requires_grad_(training)
        args, kwargs, learned = self._call.arguments(self._index, x)
        args, kwargs = tree_map_only(Tensor, self._reach_all, (args, kwargs))
        with torch.set_grad_enabled(training), _GroupedInDouble():
            out = functional_call(self._module.train(training), dict(parameters), args, kwargs)
        if attributes.undo() or not torch.equal(before, torch.get_rng_state()) or not torch.equal(x, self._x):
            raise ValueError("the layer writes attributes or arguments, or draws random numbers")
        if not isinstance(out, Tensor):
            raise TypeError("the layer returns no tensor")
        wanted = [x, *learned] if training else []
        direction = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out.detach(), *(torch.autograd.grad(out, wanted, direction) if wanted else ())]


class ExpertParallelSlice(TensorParallelLayer):
    """A layer of stacked experts split by the hidden features of each expert: whole inputs → whole outputs.

    Collective over the tensor ranks: an all-reduce of the outputs in forward; in backward one of each input's gradient
    and one of the parameters that stay whole.

    Attributes:
        tutti_whole: names of the parameters that stay whole, such as the biases of the second linear layers. The first
            rank adds them.
        tutti_inner: names and modules of the submodules, on which forward hooks of the script are refused.
        tutti_forms: kinds of arguments, as texts of ``form_of``, for which the split was verified.
    """

    tutti_whole: Sequence[str] = ()
    tutti_forms: frozenset[str] = frozenset()
    tutti_inner: Sequence[tuple[str, nn.Module]] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output of all experts: the sum over ranks of the outputs of their slices of each expert.

        Args:
            args, kwargs: arguments of the unsplit layer's forward, equal on all tensor ranks; a ``SplitTensor`` is
                all-gathered.

        Returns:
            The output of the unsplit layer, a plain tensor, equal on all tensor ranks.

        Raises:
            UsageError: the script has put a forward hook on a submodule, which would be given a slice; or the arguments
                are of other kinds than in the call for which the split was verified.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if (hooked := find_script_hook(self.tutti_inner)) is not None:
            refuse_hook(*hooked, self.tutti_slice.name)
        check_form(args, kwargs, self.tutti_forms, self.tutti_slice.name)
        given, whole = tree_map_only(Tensor, self._given, (args, kwargs)), self._whole_here()
        with whole:
            part = super().forward(*given[0], **given[1])
        return self.tutti_slice.ranks.all_reduce(part, self.tutti_slice.name)

    def _given(self, value: Tensor) -> Tensor:
        return copied(value, self.tutti_slice) if value.is_floating_point() else value

    @contextmanager
    def _whole_here(self) -> Iterator[None]:
        """Return a context in which whole parameters are zero on all ranks but the first."""
        ranks, table = self.tutti_slice.ranks, module_parameters(self)
        own = {key: p for key in self.tutti_whole if (p := table[key]) is not None}
        views = ranks.all_reduce_gradients([*own.values()], self.tutti_slice.name) if own else []
        here = {key: view * (ranks.rank == 0) for key, view in zip(own, views, strict=True)}
        try:
            table.update(here)  # type: ignore[arg-type]
            yield
        finally:
            table.update(own)


def note_split(layer: nn.Module, cut: Mapping[str, TensorCut], forms: Sequence[str]) -> None:
    """Record on a split layer of stacked experts which of its parameters stay whole, and which arguments it takes.

    Args:
        layer: an ``ExpertParallelSlice``.
        cut: the cuts of its divided parameters, by name.
        forms: kinds of arguments for which the split was verified, as texts of ``form_of``.
    """
    layer.tutti_forms = with_fewer_gradients(forms)  # type: ignore[assignment]
    name = layer.tutti_slice.name  # type: ignore[union-attr]
    layer.tutti_whole = [key for key in _own(layer) if key not in cut]  # type: ignore[assignment]
    layer.tutti_inner = [(f"{name}.{key}", each) for key, each in layer.named_modules() if key]  # type: ignore[assignment]
