"""``load_state_dict`` of a model in training: distribute the weights to ranks, logical workers and servers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from tutti.checkpoint.checkpoint_reader import GivenState, catalogue, check_model
from tutti.checkpoint.fingerprint import tensor_digest
from tutti.checkpoint.gather import GatheredParts
from tutti.config.strategy_choice import StrategyChoice
from tutti.errors import UsageError
from tutti.nn.owned_hooks import OwnedHook
from tutti.nn.swap import buffers, parameters
from tutti.parallel.tensor.tensor_slice import slice_of
from tutti.types.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tutti.train.run import Run

_HANDLES: WeakKeyDictionary[nn.Module, Sequence[Any]] = WeakKeyDictionary()
"""Hooks of a module for its newest run."""


class StateLoads:
    """Makes ``load_state_dict`` of a prepared model and of its modules reach every rank's tensors.

    Registers a pre-hook and a post-hook of ``load_state_dict`` on each module.

    PyTorch copies a state dict into the tensors that the model holds on this rank. If these are slices or shards of the
    parameters, ``GradientSync.load`` replaces that copy; otherwise it distributes the state afterwards to this rank's
    other logical workers (fixed shares of the global batch), to the owner of a shared copy (central storage) and to
    parameter servers. The call is collective except under ``single`` and ``mirrored``. The run holds this object; after
    both are deleted, a model that this rank has whole loads as in plain PyTorch.

    Args:
        model: the script's model, whose names the state dict has.
        run: the run that trains it.
        choice: the strategy.
    """

    def __init__(self, model: nn.Module, run: Run, choice: StrategyChoice) -> None:
        self._run, self._row = run, choice.row
        mesh = run.context.mesh
        self._in_parts = run.context.shards_parameters or mesh.tensor > 1 or mesh.stage > 1
        self._several = run.context.workers > mesh.data_ranks
        self._names = {module: name for name, module in model.named_modules()}
        self._loaded: tuple[nn.Module, Collection[str]] | None = None
        for module in self._names:
            for handle in _HANDLES.pop(module, ()):
                handle.remove()
            # A model in parts keeps its run, without which they are no model; a whole one outlives it.
            hook = partial if self._in_parts else OwnedHook
            _HANDLES[module] = (
                module.register_load_state_dict_pre_hook(hook(self._before)),
                module.register_load_state_dict_post_hook(hook(self._after)),
            )

    def _before(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        """Check the state dict and, for split models, load it. Collective unless every rank has its own copy."""
        if prefix:
            return
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "the script calls load_state_dict(assign=True) after tutti.prepare",
                why="the optimizer would go on with tensors that the model no longer has",
                remedy="leave out assign=True, or load before tutti.prepare",
            )
        if not (self._row.shared_weights or self._several or any(p.requires_grad for p in module.parameters())):
            # A rank's only worker writes what it does not train, such as a target network, as it may by copy_.
            return
        place = f"{name}." if (name := self._names[module]) else ""
        given = {place + key: value for key, value in state.items() if isinstance(value, Tensor)}
        replica, comm = self._run.replica, self._run.context.comms.model
        own = catalogue(replica, comm) if self._in_parts else replica.specs
        known = {name: t for name, t in given.items() if any(name in (n, *spec.tied) for n, spec in own.items())}
        self._check(own, known)
        known = self._assembled(known)
        if not self._row.own_copies:
            self._compare(known)
        if self._in_parts:
            self._become(own, known)
            # PyTorch now copies the tensors onto themselves, and still checks the names.
            state.update((key, t) for key, t in _tensors(module).items() if key in state)
        self._loaded = module, known

    def _after(self, module: nn.Module, *_: Any) -> None:
        """Distribute the state that PyTorch has copied into this rank's model. Collective as ``_before``."""
        loaded, there = self._loaded, self._loaded is not None and self._loaded[0] is module
        if loaded is None or not there:
            return
        self._loaded = None
        if self._in_parts or (self._row.own_copies and not self._several):
            return
        parts = self._run.replica.parts
        whole = {name: p.data for name, p in parameters(parts)} | {slot.name: slot.get() for slot in buffers(parts)}
        optim = {} if self._row.optimizer_here else self._run.gradient_sync.state()["optim"]
        # Parameter servers have one optimizer, whose tensors are full.
        kept = {name: value for name, value in optim.items() if isinstance(value, Tensor)}
        self._run.gradient_sync.load(GivenState(whole, self._run.replica.specs, kept))

    def _become(self, own: Mapping[str, ShardSpec], given: Mapping[str, Tensor]) -> None:
        """Load each rank's slices of ``given``; tensors that are missing keep their values. Collective."""
        check_model({n: s for n, s in own.items() if {n, *s.tied} & given.keys()}, _shapes(given), "load_state_dict")
        rest = [name for name, spec in own.items() if not {name, *spec.tied} & given.keys()]
        whole = self._run.whole_state() if rest else {}
        self._run.gradient_sync.load(GivenState({**{name: whole[name] for name in rest}, **given}, own))

    def _check(self, own: Mapping[str, ShardSpec], given: Mapping[str, Tensor]) -> None:
        """Raise UsageError, on every rank, if the strategy cannot load these tensors now."""
        trained = {name for name, _ in parameters(self._run.replica.parts)}
        missing = [name for name, spec in own.items() if not {name, *spec.tied} & given.keys()]
        if missing and not self._row.shared_weights:
            self._refuse_part(missing[0], "each logical worker has parameters of its own")
        statistics = [name for name in missing if name not in trained and name in self._run.replica.specs]
        if statistics and self._run.context.workers > 1 and (self._several or self._in_parts):
            self._refuse_part(statistics[0], "each logical worker has statistics of its own")
        if self._several and self._run.workers_differ and self._run.context.mesh.data_ranks == 1:
            self._check_common(given)
        if not self._row.averages and self._run.local_step:
            raise UsageError(
                "load_state_dict of the model in the middle of a run cannot be combined with this strategy",
                where=f"step {self._run.global_step}",
                why="gradients of other weights are on their way to the servers",
                remedy="call it before the first step, or take strategy='mirrored'",
            )

    def _check_common(self, given: Mapping[str, Tensor]) -> None:
        """Raise UsageError unless the parameters are those that ``run.state()`` has returned, which are all workers'.

        Other data ranks have other workers in their models, so that a comparison over ranks finds weights that a script
        has computed from one worker's; a single rank has nothing to compare with.
        """
        for name, parameter in parameters(self._run.replica.parts):
            names = (name, *self._run.replica.specs[name].tied)
            tensor = next((given[n] for n in names if n in given), None)
            if tensor is not None and tensor_digest(tensor.detach().to(parameter)).item() not in self._run.returned:
                raise UsageError(
                    "load_state_dict of weights that run.state() has not returned, while logical workers differ",
                    where=f"step {self._run.global_step}, {name}",
                    why="the model here holds one of the workers, and weights that a script computes from it, such as"
                    " an average over steps, would replace those of all",
                    remedy="take as many workers as data ranks and write with copy_; or load what run.state() returns;"
                    " or give tutti.prepare ema=… and load run.state(averaged=True)",
                )

    def _assembled(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``given`` with whole tensors in place of this rank's slices of them. Collective with tensor ranks.

        Slices are what the script has made of the parameters that it holds, such as their moving average.
        """
        whole = dict(given)
        if self._run.context.mesh.tensor == 1:
            return whole
        specs = self._run.replica.specs
        slices = {
            name: tensor.detach()
            for name, tensor in given.items()
            if slice_of(tensor) == name and tuple(tensor.shape) != specs[name].shape
        }
        return whole | GatheredParts(slices, specs, (), self._run.context.comms.model).all()

    def _refuse_part(self, name: str, why: str) -> None:
        raise UsageError(
            "the script calls load_state_dict with a part of the model after tutti.prepare",
            where=f"without {name}",
            why=f"{why}, of which the model here holds one",
            remedy="give all of the model's tensors (run.state() has them), or load before tutti.prepare",
        )

    def _compare(self, given: Mapping[str, Tensor]) -> None:
        """Raise MismatchError if ranks load different parameters. Collective: compares digests."""
        names = sorted({name for name, _ in parameters([*self._names][:1])} & given.keys())
        said = [f"{name} {tuple(given[name].shape)} {tensor_digest(given[name].detach()).item():x}" for name in names]
        self._run.check_same_call("load_state_dict of the model")
        self._run.context.comms.world.agree(
            said,
            "the weights that load_state_dict is given",
            "call it on every rank with the same weights, such as those of run.state()",
        )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors into which ``load_state_dict`` copies, under all names of tied tensors."""
    named = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    return named | dict(module.named_buffers(remove_duplicate=False))
