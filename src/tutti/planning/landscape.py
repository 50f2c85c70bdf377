"""Measure the loss landscape around a run's checkpoint: curvature, sharpness and pictures, on any number of devices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tutti.checkpoint.plain_model import load_plain_model
from tutti.checkpoint.read import load_manifest
from tutti.checkpoint.weights import SavedWeights, weights_hash
from tutti.comm.communicator import Communicator
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.config.train_config import TrainConfig
from tutti.data.adapt import adapt, adapt_training
from tutti.data.batches import placer
from tutti.data.global_generators import seed_generators
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.device import check_float64
from tutti.errors import NonFiniteError, UsageError
from tutti.launcher import context
from tutti.metrics.records import write_json
from tutti.nn.norms import restore_norms
from tutti.planning.filter_directions import filter_direction
from tutti.planning.hessian_spectrum import largest_eigenvalues, smooth_density, spectral_density
from tutti.planning.landscape_options import LANDSCAPE_FILE, LandscapeOptions
from tutti.planning.loss_surface import LossSurface, SampleBlocks, SurfaceValue, for_landscape, sample_blocks
from tutti.planning.pass_counter import PassCounter
from tutti.planning.script_task import load_script
from tutti.planning.sharpness import epsilon_sharpness, sam_sharpness
from tutti.planning.task_or_script import is_script
from tutti.tasks import task_registry
from tutti.tasks.task import Task
from tutti.train.task_run import prepare_process

_BETWEEN = (-0.5, 1.5)


def landscape_rank(
    task: str, config: TrainConfig, options: LandscapeOptions, folder: Path, arguments: Sequence[str] = ()
) -> None:
    """Measure the loss around a checkpoint, as one of the launched ranks: lines, plane, sharpness, Hessian spectrum.

    Collective over all ranks of the launch: each calls it as its main function. Each rank initialises the process
    group, loads task and checkpoints, and ends the process group after the measurement, but not after an error. For
    each pass rank 0 broadcasts a point or direction, and the results are all-reduced over all ranks (``LossSurface``).
    Rank 0 directs the measurement and writes ``landscape.json`` into ``folder``. Its keys are ``parameters``,
    ``samples`` (by data set), ``training`` and ``held-out`` (loss and metrics at the checkpoint), ``gradient_norm``,
    ``devices``, ``weights_sha256``, ``passes`` (number of passes by kind), and for the measured parts ``eigenvalues``,
    ``trace``, ``density``, ``sharpness``, ``line``, ``plane`` and ``between`` (the line to a second checkpoint).

    Args:
        task: name of a built-in task, ``file.py:function``, or path of a script that calls ``tutti.prepare``.
        config: configuration of the run that made the checkpoint, with device, precision and reproducible mode of this
            measurement.
        options: parts to measure, checkpoints, number of samples, and accuracy.
        folder: folder of the file.
        arguments: command-line arguments of a script.

    Raises:
        UsageError: the data are a stream, there are fewer blocks of samples than ranks, no parameter is trained, an
            operator has no second derivative, the device cannot compute in float64 and the precision is ``fp64``, or a
            script does not give its loss to ``tutti.prepare``.
        DataError: the task's data are missing or malformed.
        CheckpointError: a checkpoint is of another model, or damaged.
        NonFiniteError: the loss at the checkpoint is NaN or infinite; raised on rank 0, while the other ranks return.
        DiskError: rank 0 cannot write the file.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    world = context.init(config.device)
    prepare_process(config, world)
    rank, ranks = world.identity.rank, world.identity.size
    comm = Communicators(world, RankMesh(replica=ranks, rank=rank)).replica
    if is_script(task):
        chosen = _task_of_script(task, arguments)
    else:
        chosen = task_registry.load_task(task, data=config.data, model=config.model)
    if config.precision == "fp64":
        check_float64(world.device)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    model, other = (_loaded(chosen, path, options.ema, dtype) for path in (options.checkpoint, options.to))
    if model is None or not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "no parameter of the model is trainable", where=task, remedy="take a model with requires_grad parameters"
        )
    model.to(world.device)
    sets = _sets(chosen, task, options, comm, placer(world.device, dtype, channels_last=False))
    progress = PassCounter(sys.stderr)
    for_landscape(model, options.statistics == "batch")
    surface = LossSurface(model, chosen.loss, sets, comm, options.seed, progress.count)
    if rank:
        surface.serve()
    else:
        try:
            found = _measure(surface, model, other, options, progress)
        except NonFiniteError:
            # Raised here alone: the other ranks would wait for the next pass.
            surface.close()
            raise
        surface.close()
        found["devices"] = ranks
        found["weights_sha256"] = weights_hash(SavedWeights(load_manifest(options.checkpoint), options.ema))
        found["passes"] = dict(progress.passes)
        write_json(folder / LANDSCAPE_FILE, found)
    context.shutdown()


def _loaded(task: Task, checkpoint: Path | None, ema: bool, dtype: torch.dtype) -> nn.Module | None:
    if checkpoint is None:
        return None
    model = restore_norms(task.model()).to(dtype)
    load_plain_model(model, load_manifest(checkpoint), ema)
    return model


def _task_of_script(script: str, arguments: Sequence[str]) -> Task:
    """Return what a script gives to ``tutti.prepare``; all ranks run it with the same seed."""
    seed_generators(0)
    loaded = load_script(script, arguments)
    if loaded.custom_loop:
        raise UsageError(
            "the script gives no loss to tutti.prepare",
            where=script,
            why="a custom training loop may update the model, and draw samples, between two losses",
            remedy="give it: tutti.prepare(model, optimizer, data, loss_fn)",
        )
    return loaded.task


def _sets(
    task: Task, name: str, options: LandscapeOptions, comm: Communicator, place: Callable[[Any], Any]
) -> dict[str, SampleBlocks]:
    """Return the samples by set: ``training``, on which all is measured, and ``held-out``, if the task has some."""
    train = adapt_training(task.train, task.collate)
    if isinstance(train, Stream):
        raise UsageError(
            "the training data are a stream, and a landscape needs the same samples at every point",
            where=name,
            remedy="let the task give a data set with __len__ and __getitem__",
        )
    sources: dict[str, Source] = {"training": train}
    if task.eval is not None:
        sources["held-out"] = adapt(task.eval, task.collate)
    return {
        of: sample_blocks(source, options.samples, options.block, comm, place, options.seed)
        for of, source in sources.items()
    }


def _measure(
    surface: LossSurface, model: nn.Module, other: nn.Module | None, options: LandscapeOptions, progress: PassCounter
) -> dict[str, Any]:
    """Measure all parts on rank 0, while the other ranks serve."""
    origin = surface.point()
    with progress.part("the checkpoint"):
        here, slope = surface.gradient(origin)
        held_out = {of: surface.value(origin, of) for of in surface.sets[1:]}
    if not math.isfinite(here.loss):
        raise NonFiniteError(
            "the loss at the checkpoint is not finite",
            where=str(options.checkpoint),
            why="the run diverged, or its weights overflow in this precision",
            remedy="take an earlier checkpoint with --step",
        )
    found: dict[str, Any] = {
        "parameters": surface.size,
        "samples": surface.samples,
        "training": _values(here),
        **{of: _values(value) for of, value in held_out.items()},
        "gradient_norm": float(slope.cpu().double().norm()),
    }
    calls = _Calls(surface, origin)
    if "curvature" in options.parts:
        with progress.part("eigenvalues"):
            top = largest_eigenvalues(calls.product, surface.size, options.eigenvalues, options.tolerance, options.seed)
        found["eigenvalues"] = [{"value": each.value, "residual": each.residual} for each in top]
        with progress.part("density and trace", options.probes * min(options.lanczos, surface.size)):
            density = spectral_density(calls.product, surface.size, options.probes, options.lanczos, options.seed)
        found["trace"] = {
            "value": density.trace,
            "low": density.trace_low,
            "high": density.trace_high,
            "probes": density.probes,
        }
        values, heights = smooth_density(density)
        found["density"] = {
            "nodes": density.nodes.tolist(),
            "weights": density.weights.tolist(),
            "lowest": density.lowest,
            "highest": density.highest,
            "curve": {"eigenvalues": values.tolist(), "density": heights.tolist()},
        }
    if "sharpness" in options.parts:
        with progress.part("sharpness"):
            start = calls.parameters(origin)
            found["sharpness"] = {
                "epsilon": options.epsilon,
                "epsilon_sharpness_percent": epsilon_sharpness(calls.value_and_gradient, start, options.epsilon),
                "rho": options.rho,
                "sam_sharpness": sam_sharpness(calls.value_and_gradient, start, options.rho),
            }
    found |= _pictures(surface, model, origin, options, progress)
    if other is not None:
        there = _point_of(other, surface)
        with progress.part("the line between the runs", options.points * len(surface.sets)):
            found["between"] = _along(surface, origin, there - origin, *_BETWEEN, options.points)
    surface.value(origin)
    return found


def _pictures(
    surface: LossSurface, model: nn.Module, origin: Tensor, options: LandscapeOptions, progress: PassCounter
) -> dict[str, Any]:
    """Return the filter-normalised line and plane around the checkpoint, as far as they are asked for."""
    found: dict[str, Any] = {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first, second = (_padded(filter_direction(trained, options.seed + number), surface) for number in (0, 1))
    if "line" in options.parts:
        with progress.part("line", options.points * len(surface.sets)):
            found["line"] = _along(surface, origin, first, -options.reach, options.reach, options.points)
    if "plane" in options.parts:
        offsets = np.linspace(-options.reach, options.reach, options.grid)
        with progress.part("plane", options.grid**2):
            values = [[surface.value(origin + a * first + b * second) for a in offsets] for b in offsets]
        metrics = values[0][0].metrics
        losses = np.array([[value.loss for value in row] for row in values])
        found["plane"] = {
            "offsets": offsets.tolist(),
            "levels": contour_levels(losses).tolist(),
            "training": {
                "loss": losses.tolist(),
                **{name: [[value.metrics[name] for value in row] for row in values] for name in metrics},
            },
        }
    return found


def _along(
    surface: LossSurface, origin: Tensor, direction: Tensor, low: float, high: float, points: int
) -> dict[str, Any]:
    """Return loss and metrics of each set at ``points`` evenly spaced points on a line, from ``low`` to ``high``."""
    offsets = np.linspace(low, high, points)
    found: dict[str, Any] = {"offsets": offsets.tolist()}
    for of in surface.sets:
        values = [surface.value(origin + float(offset) * direction, of) for offset in offsets]
        found[of] = {name: [_values(value)[name] for value in values] for name in _values(values[0])}
    return found


def contour_levels(loss: NDArray[np.float64], count: int = 10) -> NDArray[np.float64]:
    """Choose the losses at which a contour plot has lines, evenly spaced in the logarithm of the rise above the lowest.

    Args:
        loss: losses of any shape, at least one of them finite; values that are not finite are ignored.
        count: number of levels.

    Returns:
        Array of shape (count,): losses in rising order, from a 50th of the rise above the lowest up to the largest
        finite loss; up to 1e-12 above it where all finite losses are equal.
    """
    known = loss[np.isfinite(loss)]
    rise = max(float(known.max() - known.min()), 1e-12)
    return np.asarray(known.min() + np.geomspace(rise / 50, rise, count))


def _values(value: SurfaceValue) -> dict[str, float]:
    return {"loss": value.loss, **value.metrics}


class _Calls:
    """The surface as functions of NumPy vectors (size,) of the trained parameters, for SciPy."""

    def __init__(self, surface: LossSurface, origin: Tensor) -> None:
        self._surface, self._origin = surface, origin

    def parameters(self, point: Tensor) -> NDArray[np.float64]:
        return np.asarray(point[: self._surface.size].cpu().double().numpy())

    def value_and_gradient(self, vector: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        point = self._origin.clone()
        point[: self._surface.size] = self._tensor(vector)
        value, slope = self._surface.gradient(point)
        return value.loss, self.parameters(slope)

    def product(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.parameters(self._surface.hessian_product(self._tensor(vector)))

    def _tensor(self, vector: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(vector)).to(self._surface.device, self._surface.dtype)


def _point_of(model: nn.Module, surface: LossSurface) -> Tensor:
    """Return the point (length,) of another model of the same architecture."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rest: list[Tensor] = [p for p in model.parameters() if not p.requires_grad]
    rest += [b for b in model.buffers() if b.is_floating_point()]
    point = torch.cat([t.detach().reshape(-1).to(surface.dtype) for t in (*trained, *rest)])
    return point.to(surface.device)


def _padded(direction: Tensor, surface: LossSurface) -> Tensor:
    """Return a direction (size,) as a direction between points (length,), zero for tensors that are not trained."""
    padded = torch.zeros(surface.length, dtype=surface.dtype, device=surface.device)
    padded[: surface.size] = direction.to(surface.device)
    return padded
