"""How often the band of ``--noise-every`` holds the true noise scale, computed from the gradient of every sample.

    python benchmarks/noise_truth.py --out benchmarks/results/YYYY-MM-DD-noise-truth.json

Three models train with SGD and with Adam. At several points of training the rate is set to 0, so that the weights stay,
and further steps are measured, in windows of 24: each window's ``tutti.optim.noise_scale.mean_noise`` has a band. The
truth at these weights comes from the gradients of all samples (``torch.func``). An epoch draws its batches without
replacement from N samples. So the estimates' expectations are tr Σ, the unbiased variance over the N samples, and
|G|² = |mean|² - tr Σ / N: what the N samples say of the distribution that they come from. Adam's second moments go on,
and so does the truth of the preconditioned gradient, which is taken before each step and averaged over the window as
the estimates are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import machine_facts, write_result
from torch import Tensor, nn

import tutti
from tutti.optim.noise_scale import NoiseEstimate, mean_noise
from tutti.tasks.task import Task
from tutti.tasks.task_registry import load_task

WINDOW = 24
SAMPLES, BATCH, WORKERS = 1408, 32, 4
MODELS = {"MLP": ("digits", "mlp:hidden=32"), "CNN": ("digits", "cnn"), "GPT": ("text", None)}
TEXT_MODEL = "gpt:layers=1,heads=2,width=32,block=16"
RATES = {
    "MLP": {"sgd": 0.1, "adam": 0.003},
    "CNN": {"sgd": 0.05, "adam": 0.001},
    "GPT": {"sgd": 0.3, "adam": 0.003},
}
POINTS = (8, 32, 128)
"""Updates before each point."""

Moments = list[tuple[Tensor, Tensor]]
"""Of each parameter: mean and unbiased variance of the gradient over all samples, element by element."""


def moments(model: nn.Module, task: Task, samples: tuple[Tensor, Tensor]) -> Moments:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def call(inputs: Tensor) -> Any:
            return torch.func.functional_call(model, dict(values), (inputs,))

        losses, count, *_ = task.loss(call, (x[None], y[None]))  # type: ignore[arg-type, misc]
        return losses.sum() / count

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    squares = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for x, y in zip(samples[0].split(64), samples[1].split(64), strict=True):
        for name, gradients in each(parameters, x, y).items():
            sums[name] += gradients.double().sum(0)
            squares[name] += gradients.double().square().sum(0)
    count = len(samples[0])
    means = {name: total / count for name, total in sums.items()}
    return [(means[n], (squares[n] - count * means[n].square()) / (count - 1)) for n in parameters]


def truth(found: Moments, optimizer: Any, preconditioned: bool) -> NoiseEstimate:
    """Return tr Σ and |G|² of the gradient, or of the gradient preconditioned by Adam's present state."""
    weights: list[Any] = [1.0] * len(found)
    if preconditioned:
        (group,) = optimizer.param_groups
        states = [optimizer.state[p] for p in group["params"]]
        below = [1 - group["betas"][1] ** float(state["step"]) for state in states]
        pairs = zip(states, below, strict=True)
        weights = [1 / ((state["exp_avg_sq"].double() / b).sqrt() + group["eps"]) for state, b in pairs]
    pairs_of = list(zip(weights, found, strict=True))
    trace = sum(float((w * variance).sum()) for w, (_, variance) in pairs_of)
    square = sum(float((w * mean.square()).sum()) for w, (mean, _) in pairs_of)
    return NoiseEstimate(trace, square - trace / SAMPLES)


def estimate(values: Mapping[str, float], name: str) -> NoiseEstimate:
    return NoiseEstimate(values[f"{name}/trace"], values[f"{name}/square"])


def batches(run: Any) -> Iterator[Any]:
    while True:
        yield from run.epoch(*run.data_position)


def measure(name: str, kind: str, windows: int) -> dict[str, list[dict[str, float]]]:
    """Return the rows of each gradient, ``kind`` and for Adam ``preconditioned``: one for each point of training."""
    text, model_text = MODELS[name]
    task = load_task(text, model=model_text or TEXT_MODEL)
    torch.manual_seed(0)
    model = task.model()
    chosen = np.random.default_rng(0).permutation(len(task.train))[:SAMPLES]  # type: ignore[arg-type]
    inputs, targets = task.train.fetch(chosen, None)  # type: ignore[union-attr]
    rate = RATES[name][kind]
    optimizer: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind](model.parameters(), lr=rate)
    data = torch.utils.data.TensorDataset(inputs, targets)
    options = {"workers": WORKERS, "batch_size": BATCH, "noise_every": 1}
    run = tutti.prepare(model, optimizer, data, task.loss, **options)
    drawn, gradients = batches(run), {kind: "noise"} | ({"preconditioned": "noise/adam"} if kind == "adam" else {})
    rows: dict[str, list[dict[str, float]]] = {gradient: [] for gradient in gradients}
    taken = 0
    for point in POINTS:
        while taken < point:
            run.step(next(drawn))
            taken += 1
        optimizer.param_groups[0]["lr"] = 0.0
        found, plain = moments(model, task, (inputs, targets)), None
        inside, scales, true = dict.fromkeys(gradients, 0), {g: [] for g in gradients}, dict.fromkeys(gradients, 0.0)
        for _ in range(windows):
            got: dict[str, list[NoiseEstimate]] = {gradient: [] for gradient in gradients}
            want: dict[str, list[NoiseEstimate]] = {gradient: [] for gradient in gradients}
            for _ in range(WINDOW):
                for gradient in gradients:
                    scaled = gradient == "preconditioned"
                    plain = plain or truth(found, optimizer, False)
                    want[gradient].append(truth(found, optimizer, True) if scaled else plain)
                run.step(next(drawn))
                for gradient, values in gradients.items():
                    got[gradient].append(estimate(run.noise_probe.values(), values))
            for gradient in gradients:
                trace, square = (sum(column) for column in zip(*want[gradient], strict=True))
                band = mean_noise(got[gradient]).band()
                inside[gradient] += band.low <= trace / square <= band.high
                scales[gradient].append(band.scale)
                true[gradient] = trace / square
        optimizer.param_groups[0]["lr"] = rate
        for gradient in gradients:
            row = {"updates": point, "truth": true[gradient], "median": float(np.median(scales[gradient]))}
            rows[gradient].append({**row, "inside": inside[gradient], "bands": windows})
            print(name, gradient, json.dumps(rows[gradient][-1]), flush=True)
    return rows


def share(rows: list[dict[str, float]]) -> dict[str, float]:
    inside, bands = (sum(row[key] for row in rows) for key in ("inside", "bands"))
    return {"share": inside / bands, "bands": bands}


def main() -> None:
    """Measure, print and write the share of bands that hold the truth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **machine_facts(),
        "samples": SAMPLES,
        "batch": BATCH,
        "parts": WORKERS,
        "window": WINDOW,
        "models": {},
    }
    everything: list[dict[str, float]] = []
    for name, (text, model) in MODELS.items():
        built = load_task(text, model=model or TEXT_MODEL).model()
        entry: dict[str, Any] = {"parameters": sum(p.numel() for p in built.parameters())}
        for kind in ("sgd", "adam"):
            for gradient, rows in measure(name, kind, options.windows).items():
                entry[gradient] = {**share(rows), "points": rows}
                everything += rows
        result["models"][name] = entry
    result |= share(everything)
    print(json.dumps(result, indent=1))
    write_result(result, options.out)


if __name__ == "__main__":
    main()
