"""Pipeline stages that run a model's own recorded forward, each up to the last of the blocks that the stage holds.

The call of a block (a module that one stage calls as a unit) that another stage holds returns the activations that this
stage has received, or fake tensors, which have shapes and no values. What is computed from a fake tensor is fake again:
a stage that would need a value that it does not have ends with UsageError, never with another value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tutti.errors import UsageError
from tutti.parallel.pipeline.block_dispatch import BlockOutput, StageEnd, leaves_sharing_memory
from tutti.torch_compat import (
    is_fake,
    module_parameters,
    non_persistent_buffers,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    uncompiled_call,
)

if TYPE_CHECKING:
    from tutti.parallel.pipeline.recorded_forward import ForwardRecord


def hold_tensors(stage: nn.Module, names: Iterable[str], plain: nn.Module) -> None:
    """Register parameters and buffers of the whole model on a pipeline stage's module, under their names there.

    Args:
        stage: the module, changed in place; containers are added to it where they are missing.
        names: names of the tensors in the whole model.
        plain: the whole model; the tensors are shared with it, not copied.
    """
    for name in sorted(names):
        path, _, key = name.rpartition(".")
        tensor = getattr(plain.get_submodule(path), key)
        if isinstance(tensor, nn.Parameter):
            _container(stage, path).register_parameter(key, tensor)
        else:
            persistent = key not in non_persistent_buffers(plain.get_submodule(path))
            _container(stage, path).register_buffer(key, tensor, persistent=persistent)


def _container(stage: nn.Module, path: str) -> nn.Module:
    at = stage
    for key in filter(None, path.split(".")):
        if key not in dict(at.named_children()):
            at.add_module(key, nn.Module())
        at = at.get_submodule(key)
    return at


class RecordedStage(nn.Module):
    """Module of one virtual pipeline stage, which runs the whole model's own forward but computes only its own blocks.

    A block is a module that one stage calls as a unit. The stage holds its blocks under their names in the whole model.

    Args:
        record: the calls of blocks in the model's forward.
        own: indices of the calls, in ``record.calls``, that this stage computes.
        received: the tensors of earlier stages' blocks that this stage receives, in order.
        sent: the blocks' tensors that this stage sends, in order; empty for the last stage.

    Attributes:
        own, received, sent: as given.
    """

    def __init__(
        self, record: ForwardRecord, own: range, received: Sequence[BlockOutput], sent: Sequence[BlockOutput]
    ) -> None:
        super().__init__()
        self._record = (record,)  # in a tuple: the whole model is no submodule of its stage
        self.own, self.received, self.sent = own, received, sent
        for name in dict.fromkeys(record.calls[number].name for number in own):
            path, _, key = name.rpartition(".")
            _container(self, path).add_module(key, record.plain.get_submodule(name))

    def hold(self, names: Iterable[str], plain: nn.Module) -> None:
        """Register further parameters and buffers of the whole model on this pipeline stage, under their names there.

        The stage's ``state_dict`` then contains tensors of modules that this stage does not call.

        Args:
            names: names of the tensors in the whole model.
            plain: the whole model; the tensors are shared with it, not copied.
        """
        hold_tensors(self, names, plain)

    def held(self, name: str) -> nn.Parameter | None:
        """Return the parameter of this name in the whole model as this stage has it now; None if it does not.

        While a forward runs, it may be another object than in the whole model: gathered from shards, or an average.

        Args:
            name: the parameter's first name in the whole model.
        """
        path, _, key = name.rpartition(".")
        at: nn.Module | None = self
        for part in filter(None, path.split(".")):
            at = None if at is None else dict(at.named_children()).get(part)
        return None if at is None else module_parameters(at).get(key)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *values: Tensor) -> Any:
        """Run the model's own forward up to the last block (module called as a unit) of this pipeline stage.

        Blocks of earlier stages are not computed: their calls return the received activations, or fake tensors (shapes
        without values) where no activation was received. Not collective: the caller receives and sends the activations.

        Args:
            args: positional arguments of the model's call.
            kwargs: keyword arguments of the model's call.
            values: the activations that this stage has received, in the order of the attribute ``received``.

        Returns:
            A tuple of the activations to send, in the order of the attribute ``sent``; on the last stage, the model's
            output.

        Raises:
            UsageError: the forward calls other blocks than when it was recorded, or needs a value of another stage.
        """
        [record] = self._record
        for name in record.opened:
            record.plain.get_submodule(name).training = self.training
        if record.writes_inputs:
            args, kwargs = tree_map_only(Tensor, _written_once(bool(self.sent)), (args, kwargs))
        return record.dispatch.run(_StageRun(record, self, values), args, kwargs)


class _StageRun:
    """A run of the model's forward on one stage (a ``ForwardRun``)."""

    def __init__(self, record: ForwardRecord, stage: RecordedStage, values: Sequence[Tensor]) -> None:
        self._record, self._stage, self.inside, self._count = record, stage, False, 0
        self._numbers = range(len(record.calls)) if stage.training else record.evaluated
        self._known = dict(zip(stage.received, values, strict=True))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which code outside of blocks reads the parameters that this pipeline stage holds.

        The model's forward runs in it. Parameters that only other stages' blocks need have no values.
        """
        here = {name: self._stage.held(name) for name in self._record.outside}
        with self._record.dispatch.with_parameters(here):
            yield

    def block(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Compute a block (module called as a unit) of this pipeline stage, or stand in for a block of another stage.

        After the stage's last block, an exception leaves the forward with the activations to send.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Returns:
            The block's result. For another stage's block its received tensors, and fake tensors for all others.

        Raises:
            UsageError: the forward calls its blocks in another order than when it was recorded, or a block of this
                stage needs a value that the stage has not received.
        """
        count, calls, own = self._count, self._record.calls, self._stage.own
        self._count += 1
        if count >= len(self._numbers) and self._record.open_ended and next(block.parameters(), None) is None:
            self._check((args, kwargs), f"the arguments of {name}")
            return uncompiled_call(block)(*args, **kwargs)
        if count >= len(self._numbers) or calls[number := self._numbers[count]].name != name:
            raise UsageError(
                "the model's forward calls its blocks in another order than when it was cut into stages",
                where=f"call {count}, of {name}",
                why="the stages hold the blocks that the forward called with the first micro-batch",
                remedy="take strategy='mirrored' or 'sharded', which run the whole forward on every rank",
            )
        if self._stage.sent and number >= own.stop:
            # Evaluation leaves out the stage's last block.
            raise StageEnd(self._to_send())
        if number not in own:
            leaves, spec = tree_flatten(self._record.dispatch.shape(name, block, args, kwargs))
            places = iter(BlockOutput(number, tensor) for tensor in range(len(leaves)))
            return tree_unflatten(
                [self._received(next(places), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
            )
        self._check((args, kwargs), f"the arguments of {name}")
        foreseen = self._record.dispatch.foreseen(name, block, args, kwargs)
        result = uncompiled_call(block)(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._check(tensors, f"the output of {name}")
        self._record.dispatch.check_shapes(name, foreseen, result)
        self._known |= {BlockOutput(number, tensor): value for tensor, value in enumerate(tensors)}
        if number == own[-1] and self._stage.sent:
            raise StageEnd(self._to_send())
        return self._unwritten(number, result, tree_leaves((args, kwargs)))

    def _to_send(self) -> tuple[Tensor, ...]:
        """Return the activations to send; tensors without elements for those that there are in the other mode alone.

        Evaluation may leave out blocks, and a block may return more tensors in evaluation, such as a cache.
        """
        device = next(self._record.plain.parameters()).device
        return tuple(
            self._known[place] if place in self._known else torch.zeros(0, device=device) for place in self._stage.sent
        )

    def _received(self, place: BlockOutput, fake: Tensor) -> Tensor:
        """Return the received tensor of another stage's block, a copy where the forward writes it, or ``fake``."""
        value = self._known.get(place, fake)
        if value.numel() == 0 != fake.numel():
            value = fake
        return value.clone() if place in self._record.written and not is_fake(value) else value

    def _unwritten(self, number: int, result: Any, given: Sequence[Any]) -> Any:
        """Return a block's result, with copies of tensors that the forward writes and the stage sends as they were.

        A tensor that has the memory of an argument is copied, too: the argument may be sent.
        """
        written = {place.tensor for place in self._record.written if place.call == number}
        if not written:
            return result
        leaves, spec = tree_flatten(result)
        tensors = iter(range(len(leaves)))
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (tensor := next(tensors)) in written:
                sent = BlockOutput(number, tensor) in self._stage.sent
                leaves[at] = leaf.clone() if sent or leaves_sharing_memory(leaf, given) else leaf
        return tree_unflatten(leaves, spec)

    def _check(self, values: Any, what: str) -> None:
        if any(is_fake(leaf) for leaf in tree_leaves(values)):
            raise UsageError(
                f"{what} depend on a value of another stage that the stages do not send",
                why="with the first micro-batch it did not depend on it",
                remedy="take strategy='mirrored' or 'sharded', which run the whole forward on every rank",
            )

    def end(self, output: Any) -> Any:
        """Return the model's output, after a check that this stage's forward has called all recorded blocks.

        In evaluation a stage may return activations to send, if the forward leaves out all blocks behind them.

        Args:
            output: what the forward has returned.

        Raises:
            UsageError: the forward called fewer blocks than when it was recorded, or in training ended on a stage that
                must send activations.
        """
        if self._count < len(self._numbers) or (self._stage.sent and self._stage.training):
            raise UsageError(
                "the model's forward calls fewer blocks than when it was cut into stages",
                where=f"after {self._count} calls of {len(self._numbers)}",
                remedy="take strategy='mirrored' or 'sharded', which run the whole forward on every rank",
            )
        return self._to_send() if self._stage.sent else output


def _written_once(copied: bool) -> Callable[[Tensor], Tensor]:
    """Return a function of the model's inputs: of copies, or of tensors in the same memory with versions of their own.

    Several stages of a rank would write the same inputs; other micro-batches, which have the rest of the batch, must
    not appear as written.
    """
    return lambda tensor: tensor.clone() if copied else tensor.data
