"""RNG streams inside a model, keyed so that draws do not depend on the rank that computes them.

Each micro-batch has an RNG stream of its own, keyed by (seed, step, logical worker, micro-batch). A module that draws
(dropout and its like) uses a stream keyed by the micro-batch *and its name*, so that a pipeline stage or a tensor rank,
which hold only a part of the model, draw the same numbers as one device. After a step the script's own stream goes on.
Python's and NumPy's global generators are keyed alike (``GlobalDraws``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from tutti.comm.random_keys import mix, name_key
from tutti.device import default_generator
from tutti.errors import UsageError
from tutti.nn.ac_policy import is_sequence
from tutti.nn.global_draws import PACKED, GlobalDraws, Slot
from tutti.nn.owned_hooks import OwnedHook
from tutti.torch_compat import DropoutBase, draws_samples, in_backward

_MASK = (1 << 63) - 1
_MOST = 1 << 16
"""Most calls of modules between which a state of the generator that the script sets is found again."""


class RngSnapshot(NamedTuple):
    """State of a model's RNG streams (``RngStreams``) from which the same random numbers can be drawn again.

    Attributes:
        micro_batch: key of the micro-batch, a hash of seed, step, logical worker (share of the global batch) and
            micro-batch.
        key: that key, or the seed that the script has given the generator since; modules' streams are keyed by it.
        calls: number of calls in this micro-batch of each module that draws from a stream of its own, by name.
        replaying: whether a forward is being recomputed, for activation checkpointing.
        begun: value of ``calls`` at the beginning of the micro-batch on this rank.
        earlier: seed that a module's call has set → (seed of the generator before the call, name of the module).
    """

    micro_batch: int
    key: int
    calls: dict[str, int]
    replaying: bool
    begun: dict[str, int]
    earlier: dict[int, tuple[int, str]]


class RngStreams:
    """The streams of random numbers that one model draws from on one device, so that draws do not depend on the rank.

    Each micro-batch seeds the device's generator (``enter``). A module that draws (dropout and its like) draws from a
    stream of its own: a forward pre-hook, which the constructor registers, seeds the generator by the micro-batch, the
    module's name and the number of the call. The hook raises UsageError if the script recomputes such a module in
    backward (its own ``torch.utils.checkpoint`` with ``preserve_rng_state=False``) that was called several times in the
    micro-batch. The hooks do not keep this object in memory, and do nothing once it is gone. For modules of
    user-defined classes, the hook also seeds Python's and NumPy's global generators, whose states come back after the
    module's forward.

    The script may seed the device's generator itself: its seed then takes the place of the micro-batch's key. It may
    also set a state of the generator that it has saved: the numbers of calls are then those at the time of saving. In
    both cases modules draw the same numbers again, as in plain PyTorch.

    Args:
        model: the part of the model on this rank; module names are those of the whole model.
        device: the device that computes it, whose default generator is seeded.
        allowed: whether the model may draw; if not, ``check`` raises UsageError after a draw.
        chosen: modules with a stream of their own, by name; default: ``keyed_modules(model)``.
        parted: whether several ranks compute each micro-batch, every rank a part of it.

    Attributes:
        of_python: the draws from Python's and NumPy's global generators.
    """

    _given: ClassVar[int | None] = None
    """Seed that a stream has given a generator last, unless its state was set since; other ones are of the script."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        allowed: bool = True,
        chosen: Mapping[str, nn.Module] | None = None,
        parted: bool = False,
    ) -> None:
        self._allowed, self._before = allowed, torch.empty(0)
        self._generator = default_generator(device)
        self._key = 0
        self._calls: dict[str, int] = {}
        self._replaying = False
        # Key and numbers of calls at the micro-batch's beginning; the seed from which the present draws follow; and by
        # each seed of a module's call the seed before it and the module's name.
        self._root, self._begun, self._tail = 0, dict[str, int](), 0
        self._earlier = dict[int, tuple[int, str]]()
        # Whether the backward under way has set a state of the forward, and whether the step's update is made.
        self._again = self._is_between = False
        self.of_python = GlobalDraws(always=parted)
        self._around = list[Any]()
        found = keyed_modules(model) if chosen is None else chosen
        self._keyed = sorted(found) if allowed else []
        for name in self._keyed:
            is_block = not module_draws(found[name])
            found[name].register_forward_pre_hook(OwnedHook(self._seed, name, name_key(name), is_block))
            if is_block:
                found[name].register_forward_hook(OwnedHook(self._leave_block))

    def enter(self, key: int, before: Mapping[str, int] | None = None, slot: Slot | None = None) -> None:
        """Seed the random number streams of a model, which this object holds, for a micro-batch.

        Seeds the device's default generator with ``key``, and sets the numbers of calls of the modules that draw from a
        stream of their own, such as dropout, to ``before``.

        Args:
            key: the micro-batch's key, a hash of seed, step, logical worker (share of the global batch) and
                micro-batch.
            before: number of calls that each drawing module has had in this micro-batch on other ranks, by the module's
                name; None for 0 calls.
            slot: the micro-batch's logical worker and its index there; None for a forward that belongs to no step.
        """
        self._key = self._root = key
        self._is_between = False
        self._around.clear()
        self.of_python.enter(key, slot)
        if self._keyed:
            self._begin(before or {})
        self._tail = RngStreams._given = key & _MASK
        self._generator.manual_seed(self._tail)
        if not self._allowed:
            self._before = self._generator.get_state()

    def _trust(self, seed: int) -> None:
        """Take a seed that the generator has, perhaps from another rank, for one of tutti."""
        self._tail, RngStreams._given = seed if seed in self._earlier else self._key & _MASK, seed

    def _begin(self, calls: Mapping[str, int]) -> None:
        # Snapshots hold the earlier dicts.
        self._calls, self._begun, self._earlier = dict(calls), dict(calls), {}

    def end_step(self) -> None:
        """Give Python's and NumPy's global generators the states that they had before the step, at the step's end.

        Until the next ``enter`` the script draws from these states, and ``script_seed`` is None.
        """
        self._is_between = True
        self.of_python.end_step()

    def check(self) -> None:
        """Check that a model which must not draw random numbers (``allowed=False``) has drawn none since ``enter``.

        With ``allowed=True`` nothing is checked.

        Raises:
            UsageError: the state of the device's generator has changed, or that of Python's or NumPy's.
        """
        if self._allowed:
            return
        if self.of_python.has_drawn() or not torch.equal(self._generator.get_state(), self._before):
            refuse_draws("a model or a loop that draws random numbers, by a function such as dropout")

    @property
    def moment(self) -> RngSnapshot:
        """Snapshot of a model's RNG streams, an ``RngSnapshot``.

        Its attributes are ``micro_batch``, the micro-batch's key; ``key``, that key or a seed that the script has set
        since; ``calls``, by name the number of calls so far of each module with a stream of its own (those that draw,
        such as dropout); and ``replaying``, whether a forward is being recomputed. After the snapshot is set again,
        these modules draw the same numbers again. So do functions that draw from the device's generator, if ``state``
        is set back, too.
        """
        # A seed that the script has set since the last module's call.
        self._follow(self._generator.initial_seed())
        return RngSnapshot(self._root, self._key, dict(self._calls), self._replaying, self._begun, self._earlier)

    @moment.setter
    def moment(self, then: RngSnapshot) -> None:
        """Return a model's RNG streams to a snapshot: to its micro-batch's key, call counts and recomputation flag.

        Modules with a stream of their own (such as dropout) then draw the numbers again that followed the snapshot. The
        device's generator is not set; ``state`` sets it.

        Args:
            then: the snapshot, an earlier value of this property.
        """
        self._root, self._key, self._begun, self._earlier = then.micro_batch, then.key, then.begun, then.earlier
        self._calls, self._replaying = dict(then.calls), then.replaying
        # The snapshot knows the calls, whatever state the generator gets.
        RngStreams._given = None

    @property
    def state(self) -> Tensor:
        """States of the global generators, as a new CPU tensor of uint8; assign an earlier value to restore them.

        They are the device's default generator, from which functions such as ``F.dropout`` draw, and those of Python
        and NumPy.
        """
        return torch.cat([self._generator.get_state(), self.of_python.packed()])

    @state.setter
    def state(self, then: Tensor) -> None:
        """Set the states of the default generator of the device that computes the model, and of Python's and NumPy's.

        Args:
            then: the states, an earlier value of this property, of this rank or another one.
        """
        self._generator.set_state(then[:-PACKED])
        self._trust(self._generator.initial_seed())
        self.of_python.unpack(then[-PACKED:])

    @property
    def script_seed(self) -> int | None:
        """Seed that the script has given the device's generator in this micro-batch; None for none, and after the step.

        If modules with streams of their own have seeded the generator since, or if the script has set a state of the
        generator instead, it is the seed from which the present state follows.
        """
        if self._is_between:
            return None
        seed = self._generator.initial_seed()
        source = self._key & _MASK if RngStreams._given in (seed, None) else self._origin(seed)[0]
        return None if source == self._root & _MASK else source

    def states_of_seed(self) -> tuple[Tensor, Tensor]:
        """Return two states of the device's generator: its present state, and its state just after its last seeding.

        Both are CPU tensors of uint8, as ``torch.Generator.get_state`` returns them; they differ once code has drawn.
        """
        fresh = torch.Generator(self._generator.device).manual_seed(self._generator.initial_seed())
        return self._generator.get_state(), fresh.get_state()

    def _origin(self, seed: int) -> tuple[int, dict[str, int]]:
        """Return the seed before all modules' calls that have led to a seed, and the number of these calls by name."""
        calls = dict[str, int]()
        for _ in self._earlier:
            if seed not in self._earlier:
                break
            seed, name = self._earlier[seed]
            calls[name] = calls.get(name, 0) + 1
        return seed, calls

    def _follow(self, seed: int) -> bool:
        """Follow the script where it has set a seed or state of the generator; return whether it has."""
        if seed == RngStreams._given:
            return False
        if RngStreams._given is None or self._replaying:
            self._trust(seed)
            return False
        self._tail = seed
        self._key, calls = self._origin(seed)
        if self._key == self._root & _MASK:
            self._key = self._root
            calls |= {name: number + calls.get(name, 0) for name, number in self._begun.items()}
        self._calls = calls
        return True

    def _seed(self, name: str, name_hash: int, is_block: bool, module: nn.Module, args: Any) -> None:
        """Seed the generator for the next call of a module that draws; hook before its forward."""
        if module.training:
            is_set = self._follow(self._generator.initial_seed())
            recomputes = in_backward() and not self._replaying
            self._again = recomputes and (is_set or self._again)
            call = self._calls.get(name, 0)
            if recomputes and not self._again:
                call = _first(name, call)
            else:
                self._calls[name] = call + 1
            key = mix(self._key, name_hash, call)
            if len(self._earlier) > _MOST:
                # Forwards between steps have no end.
                self._earlier.clear()
            self._earlier.setdefault(key & _MASK, (self._tail, name))
            self._tail = RngStreams._given = key & _MASK
            self._generator.manual_seed(self._tail)
            if is_block:
                self._around.append(self.of_python.enter_block(key))

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let the code after a block draw as without it; hook after its forward."""
        if module.training and self._around and (around := self._around.pop()) is not None:
            self.of_python.leave_block(around)


def keyed_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a whole model that draw random numbers from an RNG stream of their own, by name.

    These are PyTorch's layers that draw in training, such as dropout. If the model is an ``nn.Sequential``, they are
    also its children of user-defined classes, and those of sequences nested in it, whose forwards may call functions
    that draw, such as ``F.dropout``.

    Args:
        model: the whole model, whose module names become the keys of the result.
    """
    found = {name: module for name, module in model.named_modules() if module_draws(module)}
    if isinstance(model, nn.Sequential):
        # A user's block may draw by functions; keyed by its name, it draws the same numbers on any stage.
        found |= dict(_blocks(model))
    return found


def _blocks(sequence: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the user-defined modules among the children of a sequence and of sequences nested in it."""
    for name, block in sequence.named_children():
        if is_sequence(block):
            yield from ((f"{name}.{inner}", found) for inner, found in _blocks(block))
        elif not _is_known(block):
            yield name, block


def refuse_draws(what: str) -> NoReturn:
    """Raise the error for random draws where a device computes several logical workers as one batch.

    A logical worker is one of N fixed shares of the global batch. Synchronised batch norm makes a device compute all
    its workers as one batch; random numbers would then depend on the number of devices.

    Args:
        what: the module or function that draws, as text for the error.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"batch_norm='sync' with several workers a device cannot be combined with {what}",
        why="a device's workers are computed as one batch, so that draws would depend on the number of devices",
        remedy="take as many workers as devices, leave dropout and the like out, or take another batch norm",
    )


def _first(name: str, calls: int) -> int:
    """Return the call index, 0, that a user's ``torch.utils.checkpoint`` recomputes.

    Raises UsageError unless the module was called exactly once: otherwise the index is unknown.
    """
    if calls != 1:
        raise UsageError(
            f"the model computes {name} again in backward, which draws and was called {calls} times",
            why="which of the calls it is cannot be known",
            remedy="leave checkpointing to tutti.prepare(activation_checkpointing=…)",
        )
    return 0


def _is_known(module: nn.Module) -> bool:
    """Whether this is one of PyTorch's layers, or a tutti layer that replaces one."""
    return type(module).__module__.startswith(("torch.nn.", "tutti.nn."))


def module_draws(module: nn.Module) -> bool:
    """Return whether ``module`` is a PyTorch layer that draws random numbers in training.

    True for dropout with p above 0, for recurrent layers and attention with dropout, for fractional max pooling without
    given samples, and for ``nn.RReLU``.
    """
    if isinstance(module, DropoutBase):
        return module.p > 0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return draws_samples(module)
    return isinstance(module, nn.RReLU)
