"""Refuse gradient hooks that a strategy cannot call with the gradient that plain PyTorch would pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from torch import Tensor, nn

from tutti.errors import TuttiError, UsageError
from tutti.nn.forward_hooks import find_script_hook
from tutti.nn.gradient_hooks import has_accumulation_hook, has_gradient_hook, shares_gradient_hooks
from tutti.nn.swap import parameters
from tutti.torch_compat import has_backward_hook, hook_ids, hooks_registered
from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext, StepStats

_ELSEWHERE = "give tutti.prepare clip=…, or take strategy='mirrored'"


class HookWatch:
    """Refuses gradient hooks that the strategy cannot call with the gradient that plain PyTorch would pass.

    Checks the hooks of the model before ``tutti.prepare`` changes it, and once a step.

    Args:
        model: the script's model.
        run_context: the run's device mesh and communicators.
        single: whether every gradient is that of a single micro-batch, and not a sum over several.

    Raises:
        UsageError: the model has hooks that the strategy cannot call.
    """

    def __init__(self, model: nn.Module, run_context: RunContext, single: bool) -> None:
        self._rows, self._tensor = run_context.shards_parameters, run_context.mesh.tensor > 1
        self._stages, self._model_ranks = run_context.mesh.stage > 1, run_context.comms.model
        self._model = ref(model)
        self._originals = {name: ref(p) for name, p in parameters([model])}
        self._containers = [(n, ref(m)) for n, m in model.named_modules() if next(m.children(), None) is not None]
        # Set by ``watch``: what is checked, parameters in whose place the model has other objects now, and a function
        # that lets hooks see whole gradients where a rank has a part, and returns the names of those with new hooks.
        self._parameters: NamedParameters = []
        self._modules: list[tuple[str, nn.Module]] = []
        self._former: list[tuple[str, ref[nn.Parameter], nn.Parameter]] = []
        self._tree: dict[str, nn.Module] = {}
        self._adapt: Callable[[], Sequence[str]] = lambda: ()
        # The hooks at the last check, and how many were registered in this process by then. A hook that is given
        # gradients of another scale if the loss counts something else than samples: on this rank at that check, on any
        # stage before the model was cut, and either of them.
        self._seen: object = None
        self._registered = -1
        self._found: str | None = None
        self._elsewhere: str | None = None
        self._hooked: str | None = None
        self._single = single
        self._watch([model])
        self.check_hooks(single)
        # Before the model is split, every stage sees all hooks, so that all stages raise the same error.
        self._elsewhere = self._hooked if self._stages else None

    @property
    def originals(self) -> dict[str, Tensor]:
        """The parameter objects that the script's model had before the strategy replaced any of them, by name.

        Sharding replaces parameters by other objects; the script may still hold the earlier ones. Objects that have
        been deleted since are left out.
        """
        return {name: original for name, each in self._originals.items() if (original := each()) is not None}

    def watch(self, replica: ReplicaRunner) -> None:
        """Let ``check_hooks``, ``check_part`` and ``check_sum`` examine this rank's part of the model from now on.

        Until then they examine the whole model that the constructor got. Where this rank computes parts of gradients,
        ``check_hooks`` then also wraps the script's ``register_hook`` hooks, so that each is given the whole gradient
        (``ReplicaRunner.adapt_hooks``). Called when the model has been split over ranks, and again when it gets other
        parameters to train. Not collective.

        Args:
            replica: this rank's part of the model.
        """
        self._adapt = replica.adapt_hooks
        self._watch(replica.parts)

    def _watch(self, parts: Sequence[nn.Module]) -> None:
        """Set the modules and parameters whose gradient hooks are checked."""
        self._parameters = parameters(parts)
        self._modules = [(name, module) for part in parts for name, module in part.named_modules()]
        self._tree = self._tree_now()
        former = [(name, p, self._originals.get(name)) for name, p in self._parameters]
        self._former = [(name, each, p) for name, p, each in former if each is not None and each() is not p]
        self._seen, self._registered = None, -1

    def _tree_now(self) -> dict[str, nn.Module]:
        """Return the modules of the script's model by name where pipeline stages call them; otherwise nothing."""
        model = self._model() if self._stages else None
        return {} if model is None else dict(model.named_modules(remove_duplicate=False))

    def check_tree(self) -> None:
        """Check that the script's model has the modules of which the pipeline's stages were cut. Not collective.

        Checks nothing without pipeline stages.

        Raises:
            UsageError: the script has replaced, added or removed a module since ``tutti.prepare``.
        """
        now = self._tree_now()
        changed = [name for name in {**self._tree, **now} if self._tree.get(name) is not now.get(name)]
        if changed and now:
            raise UsageError(
                f"the script has replaced, added or removed the module {changed[0]} of the model after tutti.prepare",
                why="the pipeline goes on to call the modules of which its stages were cut",
                remedy="change the model before tutti.prepare, or take strategy='mirrored'",
            )

    def check_hooks(self, single: bool) -> None:
        """Check all gradient hooks of the model once, at the beginning of a step. Not collective.

        Args:
            single: whether every gradient of this step is that of a single micro-batch.

        Raises:
            UsageError: the script has registered a hook that the strategy cannot call with the gradient that plain
                PyTorch would pass, such as a post-accumulate hook with several micro-batches (not ``single``) or on
                sharded parameters, or a hook on a parameter object that sharding has replaced.
        """
        self._single = single
        self._check_all()
        self._adapt()

    def _check_all(self) -> None:
        """Look at every hook, unless none was registered or removed since the last look."""
        registered = hooks_registered()
        # Of a script without hooks none can have been removed.
        if self._found is not None or registered != self._registered:
            self._check_changed()
            self._registered = registered
        self._hooked = self._found or self._elsewhere

    def _check_changed(self) -> None:
        """Look at every hook, unless the ids of all hooks are those of the last look."""
        former = [(name, original, p) for name, each, p in self._former if (original := each()) is not None]
        modules = list(self._modules)
        if self._stages:
            modules += [(name, whole) for name, each in self._containers if (whole := each()) is not None]
        tensors = [p for _, p in self._parameters] + [original for _, original, _ in former]
        seen = self._single, hook_ids(tensors, [module for _, module in modules])
        if seen != self._seen:
            self._found = None
            for name, parameter in self._parameters:
                self._check_parameter(name, parameter)
            for name, original, parameter in former:
                self._check_former_parameter(name, original, parameter)
            for name, module in modules:
                if has_backward_hook(module):
                    self._check_module(name or type(module).__name__, module)
            self._seen = seen

    def _check_parameter(self, name: str, parameter: Tensor) -> None:
        before, after = has_gradient_hook(parameter), has_accumulation_hook(parameter)
        if not (before or after):
            return
        what = f"the strategy cannot be combined with the hook on the gradient of {name}"
        if self._rows and (after or self._tensor or self._stages):
            raise UsageError(
                what,
                why="FSDP2 computes with parameters that it gathers for each forward, and sums gradients into rows",
                remedy="give tutti.prepare clip=…, or take strategy='sharded:stage=1' or 'mirrored'",
            )
        if self._tensor and (after or self._stages):
            raise UsageError(what, why="each tensor rank computes a slice of the gradient alone", remedy=_ELSEWHERE)
        if after and not self._single:
            raise UsageError(
                f"register_post_accumulate_grad_hook on {name} cannot be combined with several micro-batches"
                " or workers",
                why=".grad is complete only after the sum over all of them, which comes after backward",
                remedy="take register_hook, which is given each micro-batch's part, or edit .grad in a custom loop"
                " after run.backward",
            )
        self._found = f"the hook on the gradient of {name}"

    def _check_former_parameter(self, name: str, original: Tensor, parameter: Tensor) -> None:
        """Raise UsageError for a hook on the object that was the model's parameter before ``tutti.prepare``."""
        hooked = has_gradient_hook(original) or has_accumulation_hook(original)
        if hooked and not shares_gradient_hooks(original, parameter):
            raise UsageError(
                f"a hook on what was the parameter {name} of the model before tutti.prepare",
                why="the model computes with another object now, so that the hook is never called",
                remedy=f"register it before tutti.prepare, or on the model's own: model.get_parameter('{name}')"
                + (" (which this strategy refuses); or take strategy='mirrored'" if self._rows else ""),
            )

    def _check_module(self, name: str, module: nn.Module) -> None:
        if self._tensor:
            raise UsageError(
                f"the strategy cannot be combined with hooks on the gradients of modules ({name})",
                why="each tensor rank computes slices of the gradients",
                remedy="take strategy='mirrored'",
            )
        if self._stages and next(module.children(), None) is not None:
            raise UsageError(
                f"the strategy cannot be combined with hooks on the gradients of modules of several layers ({name})",
                why="the pipeline calls the layers, which may be on several stages, and not the module",
                remedy="register the hook on its layers, or take strategy='mirrored'",
            )
        self._found = f"the hook on the gradients of {name}"

    def explain(self, error: BaseException) -> None:
        """Add a note to an error of the script if the script has hooks on modules of other pipeline stages.

        Such hooks are not called on this rank. K-FAC, which reads values that hooks keep of every layer, ends in a
        KeyError. Errors of tutti, errors that have a note, and errors without pipeline stages are left as they are.
        Not collective.

        Args:
            error: an uncaught exception of the script.
        """
        model = self._model() if self._stages else None
        if model is None or isinstance(error, TuttiError) or hasattr(error, "__notes__"):
            return
        here = {module for _, module in self._modules}
        others = [(name, module) for name, module in model.named_modules() if module not in here]
        hooked = [name for name, module in others if has_backward_hook(module) or find_script_hook([(name, module)])]
        if hooked:
            error.add_note(
                f"Hooks on {', '.join(hooked[:3])}{', …' * (len(hooked) > 3)} are called on other ranks: each has the"
                " modules of its pipeline stages. An update that reads what hooks keep of every layer, as K-FAC's does,"
                " needs strategy='mirrored'."
            )

    def check_part(self, part: LossSums) -> None:
        """Check, before a logical worker's own update, that no gradient hook saw gradients of another scale.

        The script's hooks see gradients that are divided by samples; where the loss counts another unit, such as
        tokens, the update divides by the number of these units. Used by strategies whose logical data-parallel workers
        each update their own parameters, such as local SGD. Not collective.

        Args:
            part: sums of loss, count and samples over a logical data-parallel worker's share of the batch.

        Raises:
            UsageError: a hook saw a gradient of another scale; or the script has registered a hook that the strategy
                cannot call, such as ``register_post_accumulate_grad_hook`` with several micro-batches.
        """
        self._check_all()
        if self._hooked is not None and not part.whole and float(part.sums[1]) != part.samples:
            self._refuse(float(part.sums[1]), part.samples)

    def check_sum(self, stats: StepStats, step_context: StepContext) -> None:
        """Check, before the update of a global batch, that no gradient hook saw gradients of another scale.

        The script's hooks see gradients that are divided by the global batch's samples; where the loss counts another
        unit, such as tokens, the update divides by the number of these units. Not collective, with one exception: under
        pipeline stages, if the loss counts another unit, the stages of a replica all-gather a text each, which names a
        hook or is empty, because a stage sees only its own hooks, and all stages must raise the error.

        Args:
            stats: the step's results reduced over ranks, with the count of the global batch.
            step_context: samples of the step's global batch, and whether it is a single micro-batch.

        Raises:
            UsageError: a hook saw a gradient of another scale; or the script has registered a hook that the strategy
                cannot call, such as one registered within the step where ranks have parts of gradients.
        """
        self._check_all()
        if late := self._adapt():
            raise UsageError(
                f"a hook on the gradient of {late[0]} that was registered within the step",
                where=f"step {step_context.local_step + 1}",
                why="it was given a rank's part of the gradient, or that of a micro-batch without samples",
                remedy="register it before the step, or before the loop over run.microbatches()",
            )
        # Without a hook the count, for which the host may have to wait, decides nothing.
        if step_context.whole or (self._hooked is None and not self._stages) or stats.count == step_context.samples:
            return
        if self._stages:
            found = self._model_ranks.all_gather_strings(self._hooked or "", "hooks on gradients")
            self._hooked = next(filter(None, found), None)
        if self._hooked is not None:
            self._refuse(stats.count, step_context.samples)

    def _refuse(self, count: float, samples: int) -> None:
        raise UsageError(
            f"a loss that counts {count:g} for {samples} samples cannot be combined with {self._hooked}",
            why="the count of the global batch is known only after backward, so that hooks were given gradients of"
            " another scale",
            remedy="return the mean over the samples, or take one worker without micro_batch, or clip= in place of the"
            " hook",
        )
