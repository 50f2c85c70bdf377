"""Track the origin of each ``.grad`` in a custom training loop.

A ``.grad`` is complete (reduced over the global batch), local (of one micro-batch alone), or a complete gradient that
the script has edited since. The identity and version counter of each tensor tell them apart, and a hook detects a plain
``loss.backward()`` that adds to a complete gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.errors import MismatchError, UsageError, counted, script_line
from tutti.nn.gradient_hooks import add_accumulation_hook
from tutti.nn.incomplete_gradient import IncompleteGradient, is_cleared
from tutti.nn.partial_gradient import PartGradient, real_numbers
from tutti.parallel.ddp.loss_count import is_mean_over_samples, loss_count
from tutti.parallel.ddp.step_agreement import agree_on_edits
from tutti.torch_compat import FunctionModesDisabled, is_dtensor, local_tensor, tensor_version, tree_leaves
from tutti.train.script_checks.storage_records import memories_of
from tutti.train.script_checks.watched_calls import Root
from tutti.types.custom_loop_sync import SPLIT_OVER_MODEL
from tutti.types.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


class GradientOrigin:
    """Records which gradients in ``.grad`` have been reduced, and refuses mixtures of reduced and local gradients.

    In a custom training loop a complete gradient is reduced over the global batch; a local one is of one micro-batch
    alone, as a plain ``loss.backward()`` leaves it.

    Args:
        run: the run, for its strategy, communicators and step number.
        optimizers: the script's optimizers.

    Attributes:
        is_whole_batch: whether local gradients are complete, because this rank computes the whole global batch in one
            pass through the body of the script's loop.
        exchanged: whether gradients have been reduced in the current pass through the body of the script's loop.
    """

    def __init__(self, run: Run, optimizers: Sequence[Optimizer]) -> None:
        self._run, self._optimizers = run, optimizers
        self._sync = run.gradient_sync
        self.is_whole_batch = self.exchanged = False
        # Complete gradients: tensor and version. Weak, since a tensor that the script keeps is copied in a reduction.
        self._complete: dict[nn.Parameter, tuple[ReferenceType[Tensor], int]] = {}
        # Parameters whose gradient zero_grad(set_to_none=False) has made zeros.
        self._zeros: set[nn.Parameter] = set()
        # Gradients of a plain loss.backward(): tensor and version.
        self._made: dict[nn.Parameter, tuple[Tensor, int]] = {}
        # Such gradients that earlier bodies have left: tensor, its values, and these weighted by the bodies' shares.
        self._left: dict[nn.Parameter, tuple[Tensor, Tensor, Tensor]] = {}
        # Gradients of losses that are no mean over samples, each with a function that makes the error; and the function
        # for the loss whose backward runs. An error that has been raised would hold the script's frames.
        self._unfit: dict[nn.Parameter, tuple[Tensor, Callable[[], UsageError]]] = {}
        self._error: Callable[[], UsageError] | None = None
        # Memory of such gradients that ``torch.autograd.grad`` has returned.
        self._unfit_made: list[tuple[StorageWeakRef, Callable[[], UsageError]]] = []
        # Complete gradients to which a plain loss.backward() added: the script's line that called it.
        self._mixed: dict[nn.Parameter, str] = {}
        # Norms of the parts of complete gradients, where version counters tell of no edit.
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._hooked: set[nn.Parameter] = set()
        self._in_own_backward = False

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters as the objects of the script's model, whose ``.grad`` the script reads.

        Frozen parameters are left out. The objects may differ from the parameters that the strategy updates, such as
        shards. With pipeline stages, parameters that other ranks compute with are included. In the order of the model.
        """
        return self._sync.script_parameters()

    def members(self, index: int | None) -> list[nn.Parameter]:
        """Return the trained parameters that one of the script's optimizers updates.

        Args:
            index: the optimizer's position, from 0, among the optimizers that ``tutti.prepare`` got; None returns all
                trained parameters, whichever optimizer updates them.

        Returns:
            A list of the parameters, as the objects of the script's model. If the script has no optimizer object, all
            trained parameters, for any ``index``.
        """
        if index is None or not self._optimizers:
            return list(self.script_parameters())
        return self._sync.script_parameters_of(self._optimizers[index])

    def uncleared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with a gradient of an earlier backward pass that the next one would add to.

        Their ``.grad`` is an ``IncompleteGradient``: a placeholder, which the script has not cleared, for a gradient
        that is held elsewhere.

        Returns:
            A list of the parameters, as the objects of the script's model; only those of the script's optimizers, or
            all if the script has none.
        """
        updated = self._optimizers and {p for o in self._optimizers for p in self._sync.script_parameters_of(o)}
        return [
            p
            for p in self.script_parameters()
            if isinstance(p.grad, IncompleteGradient) and not is_cleared(p.grad) and (not updated or p in updated)
        ]

    # --- records ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Register hooks on the script's parameters that record gradients of a plain ``loss.backward()`` as local.

        A local gradient is of one micro-batch, not reduced over ranks. A parameter that has such a hook already gets no
        second one, and a frozen parameter none. No hooks are registered where local gradients cannot be told apart
        (FSDP2), or where gradients are complete because this rank computes the whole global batch in one micro-batch.
        """
        place = self._sync.gradient_at
        if place == "shards" or (self.is_whole_batch and place not in SPLIT_OVER_MODEL):
            return
        for parameter in self.script_parameters():
            # A frozen one takes no hook; each later body looks again.
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                add_accumulation_hook(parameter, self._accumulated)

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """Return a context manager within which gradients are not recorded as those of a plain ``loss.backward()``.

        ``run.backward``, which reduces gradients over ranks, calls autograd within it. Gradients that autograd computes
        outside are recorded as local: those of one micro-batch.
        """
        self._in_own_backward = True
        try:
            yield
        finally:
            self._in_own_backward = False

    @contextmanager
    def plain_backward(self, roots: Sequence[Root], micro_batch: MicroBatch) -> Iterator[None]:
        """Check, around a plain backward in a custom training loop, that the losses are means over samples.

        Gradients of another loss, such as a mean over tokens, cannot be averaged over micro-batches. Gradients that
        such a loss makes within this context manager are marked: the method ``local`` raises UsageError for them,
        unless the script has cleared them. Nothing is marked for a micro-batch that is the whole global batch, or a
        dummy micro-batch. Not collective.

        Args:
            roots: the losses whose gradients the script's call of autograd adds up, each with the gradient that the
                call gives for it. A loss of several elements is checked as their sum if that gradient is all ones, and
                not checked otherwise; a number multiplies a scalar loss.
            micro_batch: the micro-batch of the loop's body.
        """
        where = f"step {self._run.global_step + 1}, {script_line()}"
        for loss in map(_scalar, roots) if micro_batch.samples and not micro_batch.whole else ():
            if loss.numel() == 1 and self._error is None:
                self._run.checks.end_body(loss)
                self._error = self._error_of(loss, micro_batch, where)
        try:
            yield
        finally:
            self._error = None

    def unfit_loss(self, loss: Tensor, micro_batch: MicroBatch) -> Callable[[], UsageError] | None:
        """Return the error of a loss of ``torch.autograd.grad`` that is no mean over samples; None for a mean.

        A loss is judged as ``plain_backward`` judges it, where the micro-batch is a part of the global batch. Not
        collective.

        Args:
            loss: the number of which gradients are computed.
            micro_batch: the micro-batch of the loop's body.

        Returns:
            A function that makes the error, for ``mark_gradients``.
        """
        if not micro_batch.samples or micro_batch.whole:
            return None
        try:
            return self._error_of(loss, micro_batch, f"step {self._run.global_step + 1}, {script_line()}")
        except RuntimeError:
            # An earlier torch.autograd.grad has freed a part of the graph, which this one need not read.
            return None

    def mark_gradients(self, gradients: Any, error: Callable[[], UsageError]) -> None:
        """Record gradients of a loss that is no mean over samples.

        ``local`` raises the error where the script has assigned one of them to ``.grad`` and declares it by
        ``run.reduce_gradients`` to be of a mean.

        Args:
            gradients: what ``torch.autograd.grad`` returned.
            error: makes the error.
        """
        self._unfit_made += [(memory, error) for memory in memories_of(tree_leaves(gradients))]

    def _error_of(self, loss: Tensor, micro_batch: MicroBatch, where: str) -> Callable[[], UsageError] | None:
        """Return why gradients of a loss cannot be averaged over micro-batches as those of means over samples."""
        try:
            self._run.lifecycle.values.check_divisor(loss, micro_batch)
            count = loss_count(loss, micro_batch)
        except UsageError as error:
            remedy = f"call run.backward, and give it what the loss function would return: {error.remedy}"
            return partial(UsageError, error.what, where=where, why=error.why, remedy=remedy)
        if count is None or is_mean_over_samples(loss, count, micro_batch):
            return None
        return partial(
            UsageError,
            f"the loss is a mean over {float(count):g} targets, of {counted(micro_batch.samples, 'sample')}",
            where=where,
            why="micro-batches have different numbers of targets, and the gradients of loss.backward() are averaged"
            " over samples",
            remedy="call run.backward(loss), which weights each micro-batch by its targets",
        )

    def _accumulated(self, parameter: Tensor) -> None:
        if self._in_own_backward or parameter.grad is None:
            return
        parameter = cast(nn.Parameter, parameter)
        gradient, before = cast(Tensor, parameter.grad), self._made.get(parameter)
        if before is not None and before[0] is gradient and tensor_version(gradient) != before[1] + 1:
            # Zeroed in place since.
            self._left.pop(parameter, None)
        complete = self._complete.get(parameter)
        zeroed = parameter in self._zeros and complete is not None and gradient is complete[0]()
        if zeroed and not isinstance(gradient, IncompleteGradient):
            # Added to zeros, it is the micro-batch's own. Its memory may be that of others, which change its version.
            parameter.grad = gradient = gradient.clone()
            del self._complete[parameter]
        self._zeros.discard(parameter)
        self._made[parameter] = gradient, tensor_version(gradient)
        if self._error is not None:
            self._unfit[parameter] = gradient, self._error
        if parameter not in self._mixed and complete is not None and parameter.grad is complete[0]():
            self._mixed[parameter] = script_line()

    def remember(self) -> None:
        """Record that the present ``.grad`` of each trained parameter is reduced and has not been edited by the script.

        Called when the loop's body begins for a micro-batch, and after each contribution to the gradient of the global
        batch, such as by ``run.backward``, before the script gets control. ``edited`` later compares identity and
        version counter of the tensors with this record. Not collective.
        """
        there = [(p, gradient) for p in self.script_parameters() if (gradient := p.grad) is not None]
        self._complete = {p: (ref(gradient), tensor_version(gradient)) for p, gradient in there}
        taken, place = self._run.local_step, self._sync.gradient_at
        # Edits through .grad.data change no version: scripts make them in each step, and are found in the first ones.
        is_due = place in ("rank", "slices") and not taken & (taken - 1)
        self._norms = self._norms_here() if place == "sliced_rows" or is_due else {}
        if self.exchanged:
            self._zeros.clear()
        self._mixed.clear()
        self._made.clear()
        self._left.clear()
        self._unfit.clear()
        self._unfit_made.clear()
        if (edits := self._run.replica.edits) is not None:
            edits.forget(gradient for _, gradient in there)

    def cleared(self, members: Sequence[nn.Parameter]) -> None:
        """Record that the script has cleared the ``.grad`` of these parameters, by setting them to None or to zeros.

        The origin recorded for an earlier gradient (local to a micro-batch, or reduced over the global batch) is
        deleted. Zeros count as reduced, because they are the same on every rank.

        Args:
            members: the parameters, as the script's model has them.
        """
        for parameter in members if self._mixed or self._made or self._unfit else ():
            self._mixed.pop(parameter, None)
            self._made.pop(parameter, None)
            self._left.pop(parameter, None)
            self._unfit.pop(parameter, None)
        for parameter in members:
            if (zeros := parameter.grad) is not None:
                # The same on every rank.
                self._zeros.add(parameter)
                self._complete[parameter] = ref(zeros), tensor_version(zeros)

    # --- gradients that are left for the next body ---

    def leave(self, micro_batch: MicroBatch) -> None:
        """Record, at the end of a loop's body, the local gradients in ``.grad``, to which the next body may add.

        A local gradient is of one micro-batch, not reduced over ranks. It is recorded with a copy and with its product
        by the micro-batch's weight in the global batch, so that ``weighted`` gives each body's part its own weight. Not
        collective.

        Args:
            micro_batch: the micro-batch of the body that ends.
        """
        there = [p for p, (gradient, version) in self._made.items() if _is_still(p.grad, gradient, version)]
        weighted = {p: found for p in there if (found := self.weighted(p, micro_batch)) is not None}
        for p in there:
            gradient = cast(Tensor, p.grad)
            self._left[p] = gradient, gradient.clone(), weighted.get(p, torch.zeros_like(gradient))

    def weighted(self, parameter: nn.Parameter, micro_batch: MicroBatch) -> Tensor | None:
        """Return a parameter's part of the global batch's gradient: each body's local gradient by its weight, summed.

        A local gradient is of one micro-batch, not reduced over ranks; its weight is ``MicroBatch.share``. Where the
        present body has added to a gradient that earlier bodies left in ``.grad`` (``leave``), only the difference has
        the weight of the present micro-batch.

        Args:
            parameter: the parameter, whose ``.grad`` is local.
            micro_batch: the micro-batch of the body that has computed ``.grad``, or added to it.

        Returns:
            A new tensor; None where only a dummy micro-batch has computed the gradient.
        """
        gradient, left = cast(Tensor, parameter.grad), self._left.get(parameter)
        if left is None or left[0] is not gradient:
            return gradient * micro_batch.share if micro_batch.samples else None
        return left[2] + (gradient - left[1]) * micro_batch.share if micro_batch.samples else left[2]

    # --- local gradients: of one micro-batch alone -----------------------------------------------------------------

    def local(self, members: Sequence[nn.Parameter], means: bool = False) -> list[nn.Parameter]:
        """Return the parameters whose ``.grad`` is local: of one micro-batch on this rank, not yet reduced.

        Args:
            members: parameters, as the script's model has them, whose ``.grad`` is examined.
            means: whether gradients that the script assigned to ``.grad`` count as means over the micro-batch's
                samples, as ``run.reduce_gradients`` declares.

        Returns:
            A list in the order of ``members``; empty if none of them has a local gradient.

        Raises:
            UsageError: the script has edited a local gradient (a mean over micro-batches of clipped gradients is not
                the clipped mean); has assigned one, and ``means`` is False; has computed one from a loss that is no
                mean over samples (``plain_backward``); or has added a local gradient to a reduced one.
        """
        found = [p for p in members if p.grad is not None and self._is_local(p, means)]
        for parameter in found:
            gradient, made = parameter.grad, self._made.get(parameter)
            if gradient is not None and made is None and means:
                there = memories_of([gradient])
                for memory, error in self._unfit_made:
                    if memory in there:
                        raise error()
            if gradient is None or (made is None and means):
                continue
            unfit = self._unfit.get(parameter)
            if unfit is not None and unfit[0] is gradient:
                raise unfit[1]()
            if made is not None and gradient is made[0] and tensor_version(gradient) == made[1]:
                continue
            if bool(gradient.detach().any()):
                self._refuse_local("assigned" if made is None else "edited")
        return found

    def _refuse_local(self, done: str) -> NoReturn:
        if done == "assigned":
            raise UsageError(
                "the script assigned .grad, and did not say what it is a mean over",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="it was computed from one micro-batch; averaging over micro-batches gives the gradient of the"
                " global batch if it is a mean over samples, and not if it was clipped, normalised or projected before",
                remedy="call run.reduce_gradients() after the assignment if it is a mean over the micro-batch's"
                " samples; .grad is complete afterwards: clip or edit it then",
            )
        raise UsageError(
            "the script edited a gradient that is not complete",
            where=f"step {self._run.global_step + 1}, {script_line()}",
            why="what loss.backward() leaves in .grad is of one micro-batch until optimizer.step(), and an edit such as"
            " clipping belongs to the gradient of the global batch",
            remedy="call run.backward(loss), after which .grad is complete, and edit it then",
        )

    def _is_local(self, parameter: nn.Parameter, means: bool) -> bool:
        """Return whether ``.grad`` is local. Raises UsageError if it is the sum of a complete and a local gradient."""
        gradient = parameter.grad
        if isinstance(gradient, IncompleteGradient) and gradient.added:
            self._refuse_mixed("the loop's body")
        if gradient is None or isinstance(gradient, IncompleteGradient):
            return False
        if self.is_whole_batch and self._sync.gradient_at not in SPLIT_OVER_MODEL:
            return False
        complete = self._complete.get(parameter)
        if complete is None or complete[0]() is not gradient:
            self._mixed.pop(parameter, None)
            # After a reduction a new tensor in place of a complete gradient, or of none, is an edit. In place of none
            # it is local if a plain backward made it, or the script declares it as a mean over its samples.
            return not self.exchanged or (complete is None and (means or parameter in self._made))
        if self._mixed and parameter in self._mixed:
            self._refuse_mixed(self._mixed[parameter])
        return False

    def _refuse_mixed(self, where: str) -> NoReturn:
        raise UsageError(
            "loss.backward() added one micro-batch's gradient to that of the global batch",
            where=where,
            why="the sum can no longer be told apart, and every rank has another one",
            remedy="call run.backward(loss) there, or clear the gradients before it by zero_grad(), which sets them to"
            " None",
        )

    # --- gradients of FSDP2 ----------------------------------------------------------------------------------------

    def check_shards(self) -> None:
        """Check, for FSDP2, that every ``.grad`` comes from ``run.backward``.

        Not collective. A ``.grad`` from elsewhere (plain ``loss.backward()``, assignment) is set to None if all its
        values are zero.

        Raises:
            UsageError: a plain ``loss.backward()`` or an assignment has made a gradient that is not zero, or the script
                has assigned a whole tensor.
        """
        there = [p for p in self.script_parameters() if p.grad is not None]
        if any(self._sync.pop_reached()) and there:
            self._refuse_mixed("the loop's body")
        if any(is_dtensor(p) and not is_dtensor(p.grad) for p in there):
            raise UsageError(
                "the script assigned a whole tensor to .grad of a parameter of which each rank has a shard",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why="the optimizer updates this rank's shard, from a gradient that is sharded alike",
                remedy="write it into the gradient that is there (p.grad.copy_(tensor)), or take"
                " strategy='sharded:stage=1' or 'mirrored'",
            )
        for parameter in there:
            complete = self._complete.get(parameter)
            if not self.exchanged and (complete is None or complete[0]() is not parameter.grad):
                if parameter.grad is not None and bool(parameter.grad.abs().sum() > 0):
                    self._refuse_mixed("the loop's body")
                # All zeros: FSDP2 reduced a backward for gradients of the inputs alone.
                parameter.grad = None

    # --- edits of complete gradients -------------------------------------------------------------------------------

    def edited(self, members: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters whose ``.grad`` the script has written to or replaced since the gradients were reduced.

        A parameter counts if its ``.grad`` is another object than in the record of ``remember`` (also None), has
        another version counter, or is not in the record. In steps whose number is a power of two a changed norm counts
        as well, because writes through ``.grad.data`` change no counter. If the strategy updates shards of
        tensor-parallel slices, a changed norm is the only sign, in every step. A placeholder, for a gradient that the
        script cannot read, counts once the script has written to it. Not collective.

        Args:
            members: parameters, as the script's model has them, whose ``.grad`` is examined.

        Returns:
            A list in the order of ``members``; empty if no gradient was edited.

        Raises:
            UsageError: the script has written to a tensor after it had assigned the tensor to ``.grad``.
        """
        now = self._norms_here() if self._norms else {}
        moved = {p for p, norm in now.items() if p not in self._norms or not torch.equal(self._norms[p], norm)}
        if self._sync.gradient_at == "sliced_rows":
            return [p for p in members if p in moved]
        return [p for p in members if self._is_edited(p, bool(moved) and p in moved)]

    def _is_edited(self, parameter: nn.Parameter, moved: bool) -> bool:
        """Return whether the script has written or replaced ``.grad``; ``moved``: whether its norm has changed."""
        gradient, complete, edits = parameter.grad, self._complete.get(parameter), self._run.replica.edits
        if isinstance(gradient, IncompleteGradient):
            if gradient.edited and isinstance(gradient, PartGradient):
                gradient.check_source()
            return gradient.edited
        if complete is None:
            return gradient is not None
        if gradient is None or gradient is not complete[0]() or tensor_version(gradient) != complete[1] or moved:
            return True
        # Through .data, which has a version counter of its own.
        return edits is not None and bool(edits.lines([("", gradient)]))

    def _norms_here(self) -> dict[nn.Parameter, Tensor]:
        """Return the norm of each dense gradient's part on this rank, where no version counter tells of an edit."""
        there = {p: p.grad for p in self.script_parameters() if p.grad is not None}
        shown = {p: g for p, g in there.items() if not isinstance(g, IncompleteGradient) and not g.is_sparse}
        return {p: torch.linalg.vector_norm(_own(g)).nan_to_num() for p, g in shown.items()}

    def check_edits(self) -> None:
        """Check, after the script has edited reduced gradients in ``.grad``, that all ranks have edited them alike.

        Collective over the data ranks or all ranks: each of them must call it. What they all-gather and compare, and
        over which ranks, depends on the strategy:

        - Each rank has whole gradients, or reads them from synchronous parameter servers: sum and sum of squares of
          each gradient, over the data ranks.
        - Each rank has a part (pipeline stages, tensor slices, ZeRO rows): over all ranks, sum and sum of squares of a
          probe. A probe is a tensor of three numbers beside each gradient; every edit of the gradient is applied to it,
          too. With stages the data ranks also compare the sums of the tensors that the script has added.
        - FSDP2 (DTensors): digests of the records of the script's calls on gradients, over the data ranks.
        - Other parameter servers: nothing is compared or sent.

        Raises:
            UsageError: always, before anything is sent, if the strategy shards slices of tensor parallelism, whose
                gradients a script cannot edit. Otherwise if ranks have edited a gradient in different ways (the error
                names one), or another rank has edited none.
        """
        run, place = self._run, self._sync.gradient_at
        if place == "sliced_rows":
            raise UsageError(
                "a script cannot edit gradients of split layers that are sharded, too",
                where=f"step {run.global_step + 1}",
                why="each rank has rows of a slice of them, so that a norm or a rank's own draw would be another one",
                remedy="give tutti.prepare clip=…, or take strategy='tensor' or 'mirrored'",
            )
        comms = run.context.comms
        if place == "stages":
            # What is added to a gradient is known on the ranks of its stage alone.
            self._compare(comms.replica, _sums_of_added)
        if place == "shards":
            self._compare_records(comms.replica)
        elif place != "servers":
            self._compare(comms.world if place in (*SPLIT_OVER_MODEL, "rows") else comms.replica, _sums)

    def _compare_records(self, comm: Communicator) -> None:
        """Raise UsageError on every rank of ``comm`` where records of edits of gradients differ. Collective."""
        edits = self._run.replica.edits
        if comm.size == 1 or edits is None:
            return
        gradients = [(f"the gradient of {n}", p.grad) for n, p in self._sync.named_trained()]
        lines = edits.lines((name, g) for name, g in gradients if g is not None)
        lines += [f"{name}: None" for name, g in gradients if g is None]
        with self._edited_everywhere():
            agree_on_edits(comm, lines, f"step {self._run.global_step + 1}, {edits.line}")

    def _compare(self, comm: Communicator, sums: Callable[[Tensor | None], Tensor]) -> None:
        """Raise UsageError on every rank of ``comm`` where ``sums`` of edited gradients differ. Collective."""
        run, seen = self._run, self.script_parameters()
        if comm.size == 1:
            return
        names = {p: name for name, p in self._sync.named_trained()}
        # On the device: the host waits once, for the comparison, and not for each gradient.
        table = torch.stack([sums(parameter.grad).to(comm.device) for parameter in seen])
        with self._edited_everywhere():
            rows = comm.all_gather(table, f"digests of edited gradients in step {run.global_step + 1}")
        for other in rows[1:]:
            same = ((other == rows[0]) | (other.isnan() & rows[0].isnan())).all(dim=1)
            if not bool(same.all()):
                name = names.get(seen[int((~same).nonzero()[0])], "a parameter")
                raise UsageError(
                    f"the script changed the gradient of {name} in another way on each rank",
                    where=f"step {run.global_step + 1}, {script_line()}",
                    why="after run.backward every rank has the gradient of the global batch, and must keep the same",
                    remedy="edit .grad alike on every rank (no rank's own samples or random draws), or put the term"
                    " into the loss",
                )

    @contextmanager
    def _edited_everywhere(self) -> Iterator[None]:
        """Explain, around a comparison of edits, that other ranks have edited nothing and make other calls."""
        try:
            yield
        except MismatchError as error:
            raise UsageError(
                "the script has edited gradients on this rank, and not on others",
                where=f"step {self._run.global_step + 1}, {script_line()}",
                why=f"ranks make one update together, and compare its edits: {error.what}",
                remedy="edit .grad alike on every rank, whatever the rank's number and its own samples, or put the term"
                " into the loss",
            ) from error


def _own(gradient: Tensor) -> Tensor:
    """Return this rank's part of a ``DTensor``; any other tensor as it is."""
    return local_tensor(gradient).detach()


def _sums_of_added(gradient: Tensor | None) -> Tensor:
    """Return the sums of the tensors that the script has added to a gradient, as one sum (1,) weighted by their order.

    Of tensors that this rank does not have it counts none.
    """
    added = gradient.added_to if isinstance(gradient, PartGradient) else []
    known = [total.cpu().double() * number for number, total in enumerate(added, 1) if total is not None]
    return torch.stack(known).sum(0, keepdim=True) if known else torch.zeros(1, dtype=torch.float64)


def _sums(gradient: Tensor | None) -> Tensor:
    """Return sum and sum of squares of a gradient, or of a part's probe, in float64, of shape (2,); zeros for None."""
    if isinstance(gradient, IncompleteGradient):
        gradient = gradient.compared()
    if gradient is None:
        return torch.zeros(2, dtype=torch.float64)
    wide = real_numbers(gradient)
    return torch.stack([wide.sum(), wide.square().sum()])


def _scalar(root: Root) -> Tensor:
    """Return the number whose gradient a backward computes from a root; the root where its gradient is no number."""
    loss, gradient = root
    if gradient is None:
        return loss
    with FunctionModesDisabled(), torch.enable_grad():
        if bool((gradient == 1).all()):
            return loss.sum() if loss.numel() > 1 else loss
        return loss * gradient if loss.numel() == 1 else loss


def _is_still(gradient: Tensor | None, made: Tensor, version: int) -> bool:
    """Return whether a ``.grad`` is the gradient that a backward has made, and nothing has written to it since."""
    return gradient is made and tensor_version(made) == version
