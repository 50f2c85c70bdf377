"""Cut a replica into pipeline stages over several devices: partition the model, and build the runner of a rank."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.errors import UsageError, counted
from tutti.nn import ac_policy
from tutti.nn.ac_and_compile import restore_forwards
from tutti.nn.swap import describe_tensors
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.nn.untraced import Untraced
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.module_timing import module_seconds
from tutti.parallel.pipeline.pipeline_runner import PipelineRunner
from tutti.parallel.pipeline.stage_messages import KINDS
from tutti.parallel.pipeline.stage_ownership import StageOwnership, stages_here
from tutti.torch_compat import compiled_module, replace_call, tree_leaves, uncompiled_call
from tutti.types.run_context import RunContext


class PipelineLayout:
    """Cuts a model into pipeline stages, of which each rank keeps some, and builds the runner of this rank's stages.

    Used for the layouts (ways to place a model on ranks) ``pipeline`` and ``model_parallel``.

    Args:
        config: options of the layout: the schedule, the number of virtual stages a rank, any named cuts.
        run_context: mesh, communicators and flags of the run.
    """

    def __init__(self, config: PipelineConfig | LayersConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context

    def build(self, plain: nn.Module) -> PipelineRunner:
        """Cut the model into pipeline stages, and return the runner of this rank's stages.

        Collective over all ranks of the job: the ranks of a replica compare their models, rank 0 broadcasts the
        modules' times where it measures them, all ranks compare the cuts, and parameters that several stages share are
        broadcast over the ranks that hold them. If the run has a loss function, each rank runs it with the first
        micro-batch, as in ``cut_stages``.

        Args:
            plain: the whole model, equal on all ranks; changed in place: placeholders replace the tensors that other
                ranks hold.

        Returns:
            The runner, whose ``run`` sends micro-batches through all stages of the replica, together with the runners
            of the other pipeline ranks. It holds the parameters of this rank's stages only, on the rank's device.

        Raises:
            MismatchError: the ranks have built models with different parameters or buffers, or find different cuts.
            UsageError: the model cannot be cut into that many stages, or activation checkpointing matches no module.
        """
        return self.replica(plain, self.cut_stages(plain))

    def replica(self, plain: nn.Module, holding: StageOwnership | None) -> PipelineRunner:
        """Return the runner of this rank's virtual pipeline stages, moved to this rank's device.

        Collective over all ranks of the job: creates subgroups for parameters that several stages share, and broadcasts
        these parameters from the first rank that holds them. Activation checkpointing and ``torch.compile`` are applied
        as the run asks.

        Args:
            plain: the module given to ``tutti.prepare``, a model or a container of several, changed in place:
                placeholders replace the tensors that other ranks hold.
            holding: this rank's virtual stages, and which ranks hold which tensors: the result of ``cut_stages``; None
                with one pipeline rank, which computes the whole module.

        Returns:
            The runner, whose ``run`` computes this rank's part of forward and backward of micro-batches.
        """
        return PipelineRunner(self._config, self._run_context, plain, holding)

    def cut_stages(self, plain: nn.Module, closed: Collection[str] = ()) -> StageOwnership | None:
        """Cut the model into virtual pipeline stages, the same number on each pipeline rank.

        The number of virtual stages a rank is an option of the layout, and so are names of modules before which to cut.
        Without such names, the cuts of a single model balance the modules' measured times or, where no times are taken
        (without a loss function, in a reproducible run, and with the schedule ``one_by_one``), their numbers of
        parameters. Of several models each is cut by numbers of parameters; one that cannot be cut is whole on the last
        stage. Collective over all ranks of the job: the ranks of a replica compare their models, rank 0 broadcasts the
        times, and all ranks compare the cuts. Each rank runs the loss function with the first micro-batch (once, and
        further times where ``torch.fx`` cannot follow the forward), and rank 0 three times more to measure times;
        without a loss function, each rank calls the model with the micro-batch, if there is one.

        Args:
            plain: the module given to ``tutti.prepare``, a model or a container of several; it stays as it was, and the
                stages share its modules and parameters.
            closed: names of modules that no cut may go through.

        Returns:
            A ``StageOwnership``, whose ``models`` has this rank's virtual stages of each model, in order, and
            ``stages`` for each parameter and persistent buffer the indices of the virtual stages that hold it; None
            with one pipeline rank, where the models are not cut.

        Raises:
            MismatchError: the ranks have built different models, or find different cuts.
            UsageError: a single model, or none of several, can be cut into that many stages; there are several models,
                and the options name modules to cut at; or the model has nothing for activation checkpointing to
                recompute.
        """
        run_context = self._run_context
        ranks = run_context.comms.p2p_channels(KINDS, "stage").size
        run_context.comms.model.agree(
            describe_tensors([plain]),
            "the model",
            "build the same model, in the same order and precision, on every rank",
        )
        ac_policy.check_units(plain, run_context.activation_checkpointing)
        restore_forwards(plain)
        if ranks == 1:
            return None
        models, compiled = _models_of(plain), compiled_module(plain)
        if models is not None:
            found = self._cut_models(plain, models, closed)
        elif compiled is not None:
            [name] = (name for name, _ in plain.named_children())
            found = {name: self._cut_model(compiled, _names_in(name, closed))}
        else:
            found = {"": self._cut_model(plain, closed)}
        run_context.comms.world.agree(
            [f"a stage of {name or 'the model'} begins with {begin}" for name in found for begin in found[name].names]
            + [f"a forward writes {attribute}" for name in found for attribute in found[name].written]
            + ["the loss function calls the model several times" for each in found.values() if each.several_calls],
            "the stages of the model",
            "give every rank the same model, the same first samples and the same settings",
        )
        return stages_here(plain, found, run_context)

    def _cut_model(self, plain: nn.Module, closed: Collection[str]) -> stage_partition.StagePartition:
        config, run_context = self._config, self._run_context
        # Stages that run in turn take the same time wherever the cuts are; a reproducible run always cuts alike.
        timed = config.schedule != "one_by_one" and not run_context.reproducible and not config.begins
        took = module_seconds(plain, run_context.trial, run_context.comms.world) if timed else {}
        trial = _Trial(plain)
        written = trial.run(run_context)
        found = stage_partition.find_stage_partition(
            plain,
            run_context.mesh.stage * config.chunks,
            config.begins,
            took,
            closed,
            run_context.trial or run_context.forward_trial,
            written,
            config.modules,
            optional=tuple(trial.optional) if run_context.trial else (),
            device=run_context.comms.world.device,
        )
        if run_context.reproducible and (several := found.read_by_several):
            raise UsageError(
                f"a reproducible run cannot cut a {type(plain).__name__} into these stages",
                why=f"blocks of several stages are given {several[0]}, and the stages' gradients of it are added up in"
                " another order than on one device",
                remedy="name cuts= between which one stage alone has such blocks, leave out reproducible, or take"
                " strategy='mirrored'",
            )
        # The output of the last stage may be split over tensor ranks.
        return replace(found, several_calls=trial.several_calls and run_context.mesh.tensor == 1)

    def _cut_models(
        self, plain: nn.Module, models: Mapping[str, nn.Module], closed: Collection[str]
    ) -> Mapping[str, stage_partition.StagePartition]:
        config, run_context = self._config, self._run_context
        stages = run_context.mesh.stage * config.chunks
        if config.begins:
            raise UsageError(
                f"{counted(len(models), 'model')} cannot be cut at the modules that an option names",
                why="the names are those of one model's cuts",
                remedy="leave out cuts= and stages=, so that each model is cut evenly",
            )
        written = _Trial(plain).run(run_context)
        found, refused = dict[str, stage_partition.StagePartition](), list[UsageError]()
        for name, model in models.items():
            own, inside = _names_in(name, written), _names_in(name, closed)
            try:
                cuts = stage_partition.find_stage_partition(model, stages, (), closed=inside, written=own)
            except UsageError as error:
                refused.append(error)
                cuts = stage_partition.whole_on_the_last_stage(model, stages, own)
            found[name] = replace(cuts, several_calls=True)
        if len(refused) == len(models):
            raise refused[0]
        return found


def _models_of(plain: nn.Module) -> Mapping[str, nn.Module] | None:
    """Return the models of a container of several, by name; None for a single model."""
    several = isinstance(plain, nn.ModuleList | nn.ModuleDict) and type(plain).forward is nn.Module.forward
    return dict(plain.named_children()) if several else None


def _names_in(name: str, names: Collection[str]) -> list[str]:
    """Return the names that begin with a submodule's, without this beginning."""
    return [each.removeprefix(f"{name}.") for each in names if each.startswith(f"{name}.")]


class _Trial:
    """Runs the loss function, or else the model, on the first micro-batch with the whole model, and watches the calls.

    Attributes:
        several_calls: whether the loss function calls the model several times, or asks for a gradient of its inputs.
        optional: names of the arguments that the loss function gives the model in place of their defaults.
    """

    def __init__(self, plain: nn.Module) -> None:
        self._plain, self._calls, self.several_calls = plain, 0, False
        self._signature, self.optional = inspect.signature(plain.forward), dict[str, None]()
        self._written: dict[str, None] = {}

    def run(self, run_context: RunContext) -> list[str]:
        """Return the names of attributes that the model's modules write in a forward of the first micro-batch."""
        plain, trial = self._plain, run_context.trial or run_context.forward_trial
        if trial is None or peers_of(plain) is not None:
            return []
        before = replace_call(plain, self._call)
        try:
            # The first step reports any error. With gradients: loss functions may take one.
            with suppress(Exception), untouched(plain, run_context.comms.world.device), torch.enable_grad():
                trial(plain)
        finally:
            replace_call(plain, before)
        # Without a loss function the model is called in several ways until one works.
        self.several_calls &= run_context.trial is not None
        return list(self._written)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        asked = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
        self.several_calls |= asked or self._calls > 0
        self._calls += 1
        with suppress(TypeError):
            for name, value in self._signature.bind(*args, **kwargs).arguments.items():
                default = self._signature.parameters[name].default
                if default is not inspect.Parameter.empty and default is not value:
                    self.optional[name] = None
        before = Untraced(self._plain)
        try:
            return uncompiled_call(self._plain)(*args, **kwargs)
        finally:
            # Here, because the trial restores the attributes of modules that the loss function reads by a variable.
            self._written |= dict.fromkeys(before.written_attributes())
