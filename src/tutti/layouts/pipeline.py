"""A replica is cut into stages over several devices, and micro-batches go through them in a given order.

The user's own loss function runs on every stage: what it calls as its model is a relay, which takes what the previous
stage has sent, computes this one, and either returns the result (last stage) or leaves the loss function.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError
from tutti.layouts import cuts, outcome
from tutti.layouts.config import LayersConfig, PipelineConfig
from tutti.layouts.halves import Called, Halves, Roots
from tutti.layouts.holding import Holding, groups_of, stages_here
from tutti.layouts.measured import seconds
from tutti.layouts.messages import KINDS, Messages, shapes
from tutti.layouts.part import Part
from tutti.layouts.sections import Section, crossing_values
from tutti.layouts.shared import SharedGradients
from tutti.nn import units
from tutti.nn.forwards import restore
from tutti.nn.swap import describe, parameters
from tutti.schedules.pipeline import Action, forwards, idle, make
from tutti.types import Cell, GradSink, LossFn, Setting, Totals


class Pipeline:
    """The layout of ``pipeline`` and ``model_parallel``."""

    def __init__(self, config: PipelineConfig | LayersConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting

    def build(self, plain: nn.Module) -> PipelineReplica:
        """Keep this rank's stages and drop the others. Collective. Raises UsageError as ``sections``."""
        return self.replica(plain, *self.sections(plain))

    def replica(self, plain: nn.Module, sections: Sequence[Section], holding: Holding | None) -> PipelineReplica:
        """What runs this rank's sections of ``plain``. Collective."""
        return PipelineReplica(self._config, self._setting, plain, sections, holding)

    def sections(self, plain: nn.Module, closed: Collection[str] = ()) -> tuple[Sequence[Section], Holding | None]:
        """This rank's stages of the model, each with its modules, and what they share with others. Collective.

        ``closed``: modules that are not cut inside, by name.

        Raises UsageError where the model cannot be cut into so many stages, or has nothing to compute again.
        """
        stage = self._setting.comms.linked("stage", KINDS)
        self._setting.comms.model.agree(
            describe([plain]), "the model", "build the same model, in the same order and precision, on every rank"
        )
        units.check(plain, self._setting.activation_checkpointing)
        restore(plain)
        if stage.size == 1:
            return [Section(plain, alone=True)], None
        config, setting = self._config, self._setting
        # Where devices work in turn time is the same however they share it; a run that repeats is cut alike each time.
        timed = config.schedule != "one_by_one" and not setting.reproducible and not config.cuts
        took = seconds(plain, setting.trial, setting.comms.world) if timed else {}
        found = cuts.find(plain, stage.size * config.chunks, config.cuts, took, closed)
        return stages_here(plain, found, self._setting)


@dataclass
class Flight:
    """What one micro-batch leaves on one section between its forward and its backward."""

    training: bool
    key: tuple[Any, ...]
    moment: Any = None
    values: list[Any] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    leaving: list[Tensor] = field(default_factory=list)
    roots: Roots | None = None
    calls: list[Called] = field(default_factory=list)
    halves: Sequence[Tensor | None] = ()


class PipelineReplica(Part):
    """This rank's sections of one replica; ``parts`` are their modules, under the names of the whole model.

    Attributes:
        cuts: where the model is cut; None where it is not.
        halves: what splits the backward of each section, where the schedule asks for it.
    """

    def __init__(
        self,
        config: PipelineConfig | LayersConfig,
        setting: Setting,
        plain: nn.Module,
        sections: Sequence[Section],
        holding: Holding | None,
    ) -> None:
        modules = [section.module for section in sections]
        super().__init__(modules[0], setting, others=modules[1:], plain=plain)
        self._comm, self._sections = setting.comms.axis("stage"), sections
        self._schedule, self._ranks, self._here = config.schedule, self._comm.size, self._comm.rank
        self._last = self._ranks * len(sections) - 1
        self._messages = Messages(self._comm)
        self._names: dict[bool, tuple[str, ...]] = {}
        self.halves = [Halves(m) for m in modules] if config.schedule == "zero_bubble" else []
        self._before: list[Mapping[str, int]] = [{} for _ in sections]
        self._drawing = False
        self._learns = [False] * (self._last + 2)
        groups: list[tuple[Communicator | None, Sequence[nn.Parameter]]] = []
        self.cuts = None if holding is None else holding.cuts
        if holding is not None:
            self.borrowed = holding.borrowed
            self.said = _said(holding.cuts, config, self._ranks)
            groups = groups_of(holding, setting)
            held = holding.cuts.held(plain)
            trained = [any(p.requires_grad for p in row.values()) for row in held]
            self._learns = [any(trained[:stage]) for stage in range(len(held) + 1)]
            self._before = holding.calls[self._here :: self._ranks]
            self._drawing = holding.draws
        self._shared = SharedGradients(groups, setting.reproducible)
        self._relay = _Relay(self, inspect.signature(plain.forward))
        self._sink: GradSink | None = None
        self._reporting = False

    def connect(self, sink: GradSink) -> None:
        """Report each parameter's gradient once, in the last backward that adds to it."""
        for _, parameter in parameters(self.parts):
            if parameter.requires_grad and parameter not in self._shared.parameters:
                parameter.register_post_accumulate_grad_hook(self._ready)
        self._sink = sink

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Gradients are those of other objects from now on."""
        self._shared.replace(by)
        for each in self.halves:
            each.replace(by)

    def _ready(self, parameter: Tensor) -> None:
        if self._reporting and self._sink is not None:
            self._sink.ready(parameter)

    def run(self, cells: Sequence[Cell], loss: LossFn, sink: GradSink | None) -> Totals:
        """Forward through all stages and back in the schedule's order; totals come from the last stage."""
        training = sink is not None
        count, chunks = len(cells), len(self._sections)
        order = make(self._schedule, self._ranks, count, chunks) if training else forwards(self._ranks, count, chunks)
        flights: dict[tuple[int, int], Flight] = {}
        turn = _Turn(loss, sink)
        if training:
            self._shared.begin()
        actions = order.ranks[self._here]
        expected = 0
        for number, action in enumerate(actions):
            # What this action and the next one take is received while this one computes.
            expected = max(expected, number)
            while expected < min(number + 2, len(actions)) and self._expect(actions[expected], cells, training):
                expected += 1
            cell, at = cells[action.micro], (action.stage, action.micro)
            if action.kind == "F":
                flights[at] = self._forward(action, cell, turn)
                if not training:
                    del flights[at]
            else:
                self._backward(action, cell, flights[at], turn)
                if action.kind != "I":
                    del flights[at]
        self._messages.finish()
        if training:
            self._finish_shared(count, turn)
        if not cells[0].samples:
            self.forget()
        return self._spread(turn.total, training, sum(cell.samples for cell in cells))

    def _expect(self, action: Action, cells: Sequence[Cell], training: bool) -> bool:
        """Begin to receive what an action takes; False where it must say first what that is."""
        key = (training, *shapes(cells[action.micro].batch))
        if action.kind == "F":
            return action.stage == 0 or self._messages.expect("activations", (action.stage, *key))
        if action.kind == "W" or action.stage == self._last or not self._learns[action.stage + 1]:
            return True
        return self._messages.expect("gradients", (action.stage + 1, *key))

    def _forward(self, action: Action, cell: Cell, turn: _Turn) -> Flight:
        """Run the loss function until it has called the model: on the last stage up to the loss."""
        stage, chunk = action.stage, action.stage // self._ranks
        training = turn.sink is not None
        self.enter(cell, self._before[chunk])
        flight = Flight(training, (training, *shapes(cell.batch)))
        if self.halves and training:
            flight.calls = self.halves[chunk].record()
        self._relay.enter(stage, flight)
        with suppress(_HandedOver):
            objective, start, part = outcome.read(turn.loss(self._relay, cell.batch), cell)
            if stage < self._last or not self._relay.called:
                raise UsageError("the loss function did not call the model", remedy="call model(...) once in it")
            flight.roots = Roots([objective], [start])
            turn.total = part if turn.total is None else turn.total + part
        if training:
            self.draws.check()
            flight.moment = self.draws.moment
        return flight

    def _backward(self, action: Action, cell: Cell, flight: Flight, turn: _Turn) -> None:
        """Backward, or one half of it, from the loss or what the next stage has sent; hand ours to the one before."""
        kind, stage, _ = action
        chunk = stage // self._ranks
        self.draws.moment = flight.moment
        last = bool(cell.samples) and cell.last and kind != "I"
        if last and turn.sink is not None:
            turn.arm()
        if kind != "W" and flight.roots is None:
            gradients = self._messages.receive("gradients", (stage + 1, *flight.key))[0] if flight.leaving else []
            # Whether a value depends on weights may depend on the batch.
            pairs = [pair for pair in zip(flight.leaving, gradients, strict=True) if pair[0].requires_grad]
            flight.roots = Roots([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        roots = flight.roots
        self._reporting = last
        if roots is not None and any(tensor.requires_grad for tensor in roots.tensors):
            if kind == "B":
                torch.autograd.backward(roots.tensors, roots.gradients)
            elif kind == "I":
                found = self.halves[chunk].inputs(roots, flight.entered, flight.calls)
                entered, flight.halves = found[: len(flight.entered)], found[len(flight.entered) :]
                flight.gradients |= {i: g for i, g in enumerate(entered) if g is not None}
            else:
                for parameter in self.halves[chunk].weights(roots, flight.calls, flight.halves):
                    if parameter not in self._shared.parameters:
                        self._ready(parameter)
        self._reporting = False
        if kind != "I" and self._shared.parameters:
            self._shared.take(action.micro)
        if kind != "W" and flight.entered:
            own = [flight.gradients.get(i, torch.zeros_like(t)) for i, t in enumerate(flight.entered)]
            self._messages.send("gradients", own, (stage, *flight.key))

    def compute(self, flight: Flight, stage: int, given: Mapping[str, Any]) -> Any:
        """This section's forward, called by the loss function through the relay; returns on the last stage alone."""
        section = self._sections[stage // self._ranks]
        if stage > 0:
            self._enter(flight, stage)
        result = section.module(*(given[name] for name in section.given), *flight.values)
        if self.halves:
            self.halves[stage // self._ranks].stop()
        if stage == self._last:
            return result
        values = crossing_values(result, section)
        if self._drawing:
            values.append(self.draws.state.to(self._comm.device))
        forms = self._messages.send("activations", values, (stage + 1, *flight.key))
        if self._learns[stage + 1]:
            flight.leaving = [v for v, form in zip(values, forms, strict=True) if form.learns]
        raise _HandedOver

    def _enter(self, flight: Flight, stage: int) -> None:
        """Take what the stage before has sent."""
        values, forms = self._messages.receive("activations", (stage, *flight.key))
        if self._drawing:
            self.draws.state = values[-1].cpu()
        flight.values = values[: len(values) - self._drawing]
        if flight.training and self._learns[stage]:
            # A hook, not .grad: autograd lays a leaf's .grad out like the leaf, and kernels round by layout.
            flight.entered = [v for v, form in zip(values, forms, strict=True) if form.learns]
            for number, tensor in enumerate(flight.entered):
                tensor.requires_grad_().register_hook(partial(flight.gradients.__setitem__, number))

    def whole(self, args: Any, kwargs: Any) -> Any:
        """The only section's forward, where the model is not cut."""
        return self._sections[0].module(*args, **kwargs)

    def _finish_shared(self, count: int, turn: _Turn) -> None:
        self._shared.finish(count)
        if turn.armed and self._sink is not None:
            for parameter in self._shared.parameters:
                self._sink.ready(parameter)

    def _spread(self, total: Totals | None, training: bool, samples: int) -> Totals:
        """The last stage's totals on every stage; the names of its metrics once."""
        last = self._ranks - 1
        if training not in self._names:
            names = list(total.names) if total is not None else None
            self._names[training] = tuple(self._comm.broadcast_json(names, last, "names of the metrics"))
        names_ = self._names[training]
        lanes = torch.zeros(2 + len(names_), dtype=torch.float64, device=self._comm.device)
        if total is not None:
            lanes.copy_(total.lanes)
        self._comm.spread(lanes, last, "totals of the last stage")
        return Totals(lanes, names_, samples)


@dataclass
class _Turn:
    """One worker's turn."""

    loss: LossFn
    sink: GradSink | None
    total: Totals | None = None
    armed: bool = False

    def arm(self) -> None:
        """The first of the backwards comes after which a gradient is complete."""
        if not self.armed and self.sink is not None:
            self.sink.arm(self.total)
        self.armed = True


class _HandedOver(Exception):
    """Leaves the user's loss function on a stage that is not the last."""


class _Relay:
    """What the loss function calls as its model."""

    def __init__(self, replica: PipelineReplica, signature: inspect.Signature) -> None:
        self._replica, self._signature = replica, signature
        self._names = list(signature.parameters)
        self._known = set(self._names) if replica.cuts is None else replica.cuts.arguments
        self.called = False

    def enter(self, stage: int, flight: Flight) -> None:
        """The next call is this section's, with this micro-batch."""
        self._stage, self._flight, self.called = stage, flight, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.called:
            raise UsageError(
                "the loss function calls the model twice",
                why="each call would have to go through all stages",
                remedy="call it once with all samples, or take --strategy mirrored",
            )
        self.called = True
        if self._replica.cuts is None:
            return self._replica.whole(args, kwargs)
        given = dict(zip(self._names, args, strict=False))
        if kwargs:
            given = self._signature.bind(*args, **kwargs).arguments
        for name in given.keys() - self._known:
            if given[name] is not self._signature.parameters[name].default:
                raise UsageError(
                    f"the loss function gives the model '{name}', which its forward takes by default as something else",
                    why="where the model is cut was found with the default",
                    remedy="give the argument no default, or do not give it",
                )
        return self._replica.compute(self._flight, self._stage, given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica.parts[0], name)


def _said(found: cuts.Cuts, config: PipelineConfig | LayersConfig, ranks: int) -> dict[str, str]:
    """Where the model is cut, and how long devices are idle."""
    where = f"{len(found.shares)}, cut before {', '.join(found.names)}"
    shares = " | ".join(f"{share:.0%}" for share in found.shares)
    if config.schedule == "one_by_one":
        waits = f"devices work in turn, each is idle {1 - 1 / ranks:.0%} of the time"
    else:
        known = [(m, idle(config.schedule, ranks, m, config.chunks)) for m in (1, ranks, 2 * ranks, 4 * ranks)]
        waits = f"{config.schedule}, idle " + ", ".join(f"{part:.0%} with {m}" for m, part in known) + " micro-batches"
    return {"stages": f"{where} ({shares} of the {'time' if found.measured else 'parameters'})", "schedule": waits}
