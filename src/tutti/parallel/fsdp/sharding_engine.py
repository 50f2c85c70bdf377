"""The protocol of the two engines that shard parameters by rows: ZeRO stage 1 and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from tutti.parallel.fsdp.sharded_parameter import ShardedParameter


class ShardingEngine(Protocol):
    """Shards a model's parameters by rows over the shard ranks (protocol): ZeRO stage 1 or FSDP2.

    The shard ranks hold one copy of the parameters together. Each holds a block of the first dimension of every
    parameter, its rows, and its optimizer updates these; forwards compute with unsharded parameters.
    """

    @property
    def rows(self) -> Sequence[ShardedParameter]:
        """This rank's rows of all parameters that the engine shards (ZeRO stage 1 or FSDP2), frozen ones included.

        One ``ShardedParameter`` for each: name in the unsharded model, row tensor, and place of the rows in the full
        tensor.
        """

    @property
    def trained(self) -> Sequence[ShardedParameter]:
        """This rank's rows of each sharded parameter (ZeRO stage 1 or FSDP2) that is or was trainable.

        One ``ShardedParameter`` for each: name, row tensor and place in the full tensor. The optimizer updates the row
        tensors, and their gradients are reduced. A parameter that is frozen later stays in the list.
        """

    def train(self, names: Collection[str]) -> None:
        """Add parameters that the script has unfrozen to ``trained``, so that their gradients are reduced from now on.

        The engine shards a model's parameters by rows (ZeRO stage 1 or FSDP2); ``trained`` holds this rank's rows of
        each parameter that is or was trainable. Called after the script has set their ``requires_grad`` to True, on all
        shard ranks (those that share one copy of the parameters): FSDP2 may all-gather parameters in the call. ZeRO
        stage 1 does nothing.

        Args:
            names: names in the unsharded model; names of parameters that are not sharded here are ignored.
        """

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a dictionary from each parameter object of the user's model to this rank's rows of that parameter.

        Called after the script has added parameters to an optimizer, whose groups must have the rows. The engine shards
        the model by rows (ZeRO stage 1 or FSDP2). Both keys and values are ``nn.Parameter`` objects; a value is the
        tensor of rows that the optimizer has as its parameter. With FSDP2 several objects of the model (the DTensor and
        the unsharded parameter) map to the same rows.
        """

    def used(self) -> list[bool]:
        """Return for each trained parameter whether backward on this rank has given it a gradient in this step.

        The parameters are those that the engine shards by rows (ZeRO stage 1 or FSDP2). Called once a step, before the
        gradients are reduced; with FSDP2 the call clears the record, which ``pop_reached`` reads too. Not collective.

        Returns:
            One bool for each parameter that is or was trainable, in the order of the attribute ``trained``; False where
            this rank's forward did not use the parameter.
        """

    def reduce_scatter_gradients(self, step: int) -> None:
        """Set the ``.grad`` of this rank's rows of each trained parameter to the gradient summed over the shard ranks.

        Each shard rank holds some rows of every parameter; together they hold one copy. Called on all of them, after
        the step's last backward: ZeRO stage 1 reduce-scatters in this call, and the full parameters' ``.grad`` is None
        afterwards; FSDP2 has reduce-scattered in backward, and the call sends nothing.

        Args:
            step: number of the step from 1, named in the ``PeerError`` if a rank dies or is in another collective.

        Raises:
            UsageError: the script has written an unsharded parameter between a forward and its backward (FSDP2).
        """

    def all_gather_parameters(self) -> None:
        """Make the next forward use the values that the optimizer has written to each rank's rows.

        Each shard rank holds and updates some rows of every parameter; together they hold one copy. Called on all of
        them after an update, and after a checkpoint was loaded into the rows. ZeRO stage 1 all-gathers the full
        parameters now; FSDP2 frees the unsharded parameters and all-gathers them in the next forward.
        """

    def rows_written(self) -> bool:
        """Return whether the rows that this rank holds have been written since the parameters were last all-gathered.

        The record starts at the previous ``all_gather_parameters``, or at construction. Called at the beginning of a
        step, before gradients are reduced and before the model is read, since a script may write the rows in its
        optimizer's groups: then the full parameters that the ranks compute with are stale. Writes are found by the
        version counters of the row tensors; a write through ``.data`` does not count. Always False with FSDP2, whose
        rows may share the counter with the model's DTensors.
        """

    def clear(self) -> None:
        """Set the ``.grad`` of all parameters that the engine shards (ZeRO stage 1 or FSDP2) to None.

        Called after an update. This holds for both objects of a parameter: this rank's rows, which the optimizer has,
        and the model's parameter.
        """

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters that the engine shards (ZeRO stage 1, FSDP2) as the model has them.

        Called where gradients are shown to the script, cleared or clipped, which the script does with the model's
        objects.

        Returns:
            Full parameters in ZeRO stage 1, DTensors with FSDP2: one for each parameter that is or was trainable, in
            the order of the attribute ``trained``.
        """

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the reduced gradients of this rank's rows of the trained parameters, and set their ``.grad`` to None.

        Called before a further backward of a custom training loop, so that its gradients are reduced alone. Each rank
        holds some rows of every parameter (ZeRO stage 1 or FSDP2). The ``.grad`` of the model's parameters is None
        afterwards, too. Not collective.

        Returns:
            The gradients of this rank's rows, with FSDP2 copies; the key is the optimizer's parameter, that is the
            tensor of rows. Rows without a gradient, also where the script has set the gradient to None, have no entry.
        """

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier backwards to this rank's rows of the gradients just reduced (gradient accumulation).

        Called after each reduction of a custom training loop. Each rank holds some rows of every parameter. Not
        collective. Afterwards the script finds the sums here:

        - FSDP2: in the ``.grad`` of the model's DTensors, which it may read and edit. The ``.grad`` of the rows are
          placeholders.
        - ZeRO stage 1 on several shard ranks: in placeholders in the ``.grad`` of the model's full parameters, with
          which the script computes as with the whole gradient. Such a computation all-gathers, so that all shard ranks
          must make it. The ``.grad`` of the rows are placeholders, too.
        - ZeRO stage 1 on one shard rank: in the ``.grad`` of the full parameters, which are the rows.

        Of a placeholder in the rows' ``.grad`` the script can take norms, and it can scale and clamp it in place; other
        reads raise UsageError. Placeholders of a parameter of which each tensor-parallel rank has a slice can only be
        cleared.

        Args:
            held: the earlier gradients as ``pop_gradients`` returned them: the key is the optimizer's parameter (the
                tensor of rows), the value its gradient. May be empty.
        """

    def pop_reached(self) -> list[bool]:
        """Return for each trained parameter whether a backward on this rank gave it a gradient, and clear this record.

        Called when a custom training loop sets the gradients of a micro-batch aside, and keeps the flags with them for
        ``mark_reached``. The record of the row-sharding engine (FSDP2) covers the backwards since the previous call of
        this method or of ``used``. Not collective.

        Returns:
            One bool for each parameter that is or was trainable, in the order of the attribute ``trained``. ZeRO stage
            1 keeps no record and returns False for all: with ZeRO stage 1 backward has given a parameter a gradient if
            the ``.grad`` of the model's full parameter is not None.
        """

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Record that a backward on this rank gave parameters a gradient, for the next reduction to count them.

        Called when a custom training loop puts gradients back that it had set aside, with the flags of ``pop_reached``.
        For FSDP2; ZeRO stage 1 does nothing. Not collective.

        Args:
            used: for each parameter that is or was trainable, in the order of the attribute ``trained``, True to record
                that it had a gradient; False leaves its record as it is.
        """

    def begin_custom_loop(self) -> None:
        """Let the script's own training loop clear ``.grad`` of FSDP2's unsharded parameters from now on.

        Called once, before the first step of the loop. Between a forward and its backward, FSDP2's model has unsharded
        parameters in place of the DTensors. After this call, clearing their ``.grad`` also clears the sharded gradient.
        ZeRO stage 1 does nothing.
        """

    def apply_clearing(self) -> None:
        """Clear the sharded gradients of parameters whose ``.grad`` the script has cleared after a forward.

        Called before the sharded gradients are read or added to. Between a forward and its backward, FSDP2's model has
        unsharded parameters, whose ``.grad`` are placeholders from ``show_gradients``. Where the script has set a
        placeholder to None or zeros, the sharded gradient becomes so too. All placeholders are removed. ZeRO stage 1
        does nothing.
        """

    def show_gradients(self) -> None:
        """Put placeholders into the ``.grad`` of FSDP2's unsharded parameters whose sharded gradient is not None.

        Called after each forward and backward of a custom training loop. The unsharded parameters are in the model
        between a forward and its backward. A placeholder raises UsageError when the script reads it; the script can
        clear it, which ``apply_clearing`` carries over to the sharded gradient. ZeRO stage 1 does nothing.
        """

    def on_zero_grad(self, members: Collection[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients of an optimizer's rows and of the model's parameters that the rows belong to.

        Called after the optimizer's ``zero_grad``, which clears only the optimizer's own parameters: this rank's rows.
        Not collective.

        Args:
            members: parameters of the optimizer, each this rank's rows of one parameter; parameters that are not
                sharded here are ignored.
            set_to_none: True sets gradients to None, False zeroes them in place.
        """

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Set the ``.grad`` of this rank's rows to the gradients that the script has left in the model's parameters.

        Called before the optimizer step, which uses the rows' ``.grad``. Where the script has cleared the gradient, the
        rows' gradient becomes None or zeros; where it has assigned a tensor, this rank's part of the tensor; where it
        has edited in place, the edited values. Not collective.

        Args:
            edited: the model's parameters whose ``.grad`` the script has edited, or replaced by another tensor;
                parameters that the script has only cleared need not be among them.
        """

    def gradient_meter(self) -> Callable[[], float] | None:
        """Start to measure this rank's own gradients before backward itself reduces them (FSDP2).

        Called to estimate the gradient noise scale, which compares the norms of the ranks' own gradients with the norm
        of their sum. Not collective.

        Returns:
            A function without arguments that returns, as a float, the sum of the squares of the gradients' elements
            since its previous call, and resets the sum to 0; None in ZeRO stage 1, where backward leaves this rank's
            own gradient in the ``.grad`` of the model's full parameters.
        """
