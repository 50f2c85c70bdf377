"""What a step of well-known models costs through tutti on one device, beside the same step in plain PyTorch.

    python benchmarks/gpu_models.py --save                        # GPT-2, BERT, ViT-B/16 and ResNet-50 in bf16 on a GPU
    python benchmarks/gpu_models.py --models gpt2 --rounds 20
    python benchmarks/gpu_models.py --device cpu --quick          # does it run? small models, times mean nothing

The models come from transformers and timm, with random weights. Three contestants train copies of one model on the
same batches: a plain loop (``torch.autocast``, the model's own loss, fused AdamW, or SGD for ResNet-50), ``run.step``,
and the plain loop on ``run.microbatches``. They run in turn, in blocks of random order, and ratios are taken within a
round. Kept are the median step, its ratio to the plain loop's with a 95 % interval, the memory at the peak of a block
beside all copies, and how far the first losses are apart. Exit codes: 0, 2 usage, 9 where an interval lies above
``--limit``, or losses differ by more than 1 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import order, paired_ratio
from result_file import report_failures, write_result
from step_tax import hardware, listed
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tutti.device import accelerator_facts, peak_memory, reset_peak_memory, synchronize
from tutti.errors import ExitCode

Batch = tuple[Tensor, ...]
BATCHES, WARM_UP = 4, 5
MOST_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Model:
    """A model with its data.

    Attributes:
        build: makes it, small for ``--quick``.
        batch: makes a batch of this many samples, small for ``--quick``.
        loss: mean loss of a batch.
        optimizer: makes the optimizer of its parameters.
        samples: samples of a batch.
    """

    build: Callable[[bool], nn.Module]
    batch: Callable[[int, bool], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    samples: int


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Fused SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def gpt2(quick: bool) -> nn.Module:
    """GPT-2 small of transformers, without dropout: the contestants draw from one generator."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128} if quick else {}
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))  # type: ignore[no-any-return]


def bert(quick: bool) -> nn.Module:
    """BERT-base of transformers for two classes, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **(sizes if quick else {}))
    return BertForSequenceClassification(config)  # type: ignore[no-any-return]


def timm_model(name: str, small: str) -> Callable[[bool], nn.Module]:
    """Returns a function that makes a model of timm with ten classes."""

    def build(quick: bool) -> nn.Module:
        import timm

        return timm.create_model(small if quick else name, num_classes=10)  # type: ignore[no-any-return]

    return build


def tokens(length: int, vocabulary: int, labelled: bool) -> Callable[[int, bool], Batch]:
    """Returns a function that makes a batch of random tokens, and two classes where ``labelled``."""

    def make(samples: int, quick: bool) -> Batch:
        words = torch.randint(128 if quick else vocabulary, (samples, 16 if quick else length))
        return (words, torch.randint(2, (samples,))) if labelled else (words,)

    return make


def images(samples: int, quick: bool) -> Batch:
    """A batch of random images of 224 × 224 pixels, or 160 × 160 for ``quick``, with ten classes."""
    size = 160 if quick else 224
    return torch.randn(samples, 3, size, size), torch.randint(10, (samples,))


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a model of transformers computes."""
    labels = batch[1] if len(batch) > 1 else batch[0]
    return model(input_ids=batch[0], labels=labels).loss  # type: ignore[no-any-return]


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of an image model."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


MODELS = {
    "gpt2": Model(gpt2, tokens(1024, 50257, False), own_loss, adamw, 8),
    "bert": Model(bert, tokens(128, 30522, True), own_loss, adamw, 32),
    "vit": Model(timm_model("vit_base_patch16_224", "test_vit"), images, class_loss, adamw, 64),
    "resnet": Model(timm_model("resnet50", "test_resnet"), images, class_loss, sgd, 64),
}
Step = Callable[[Batch], Any]


def plain(work: Model, model: nn.Module, data: TensorDataset, precision: str) -> Step:
    """A training step in plain PyTorch."""
    optimizer = work.optimizer(model)
    place = next(model.parameters()).device.type

    def step(batch: Batch) -> Tensor:
        with torch.autocast(place, torch.bfloat16, enabled=precision == "bf16"):
            loss = work.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def run_step(work: Model, model: nn.Module, data: TensorDataset, precision: str) -> Step:
    """tutti, one call a step."""
    options = {"batch_size": len(data) // BATCHES, "workers": 1, "precision": precision}
    return tutti.prepare(model, work.optimizer(model), data, work.loss, **options).step


def own_loop(work: Model, model: nn.Module, data: TensorDataset, precision: str) -> Step:
    """tutti in the plain loop, fed with the others' batches, because loading is not measured."""
    optimizer, place = work.optimizer(model), next(model.parameters()).device.type
    run = tutti.prepare(model, optimizer, data, batch_size=len(data) // BATCHES, workers=1)
    given: list[Batch] = []

    def epoch(number: int, start: int = 0) -> Iterator[Batch]:
        while True:
            yield given.pop()

    run.epoch = epoch  # type: ignore[method-assign]
    batches = run.microbatches(0)

    def step(batch: Batch) -> Tensor:
        given.append(batch)
        with torch.autocast(place, torch.bfloat16, enabled=precision == "bf16"):
            loss = work.loss(run.model, next(batches))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


CONTESTANTS = {"plain": plain, "run.step": run_step, "loop": own_loop}


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Trains one model through all contestants in turn, and returns their times, memory and losses."""
    work, place = MODELS[name], tutti.init(given.device).device
    samples = 4 if given.quick else work.samples
    torch.manual_seed(0)
    made = [work.batch(samples, given.quick) for _ in range(BATCHES)]
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*made, strict=True)))
    batches = [tuple(part.to(place) for part in batch) for batch in made]
    steps: list[Step] = []
    for contestant in CONTESTANTS.values():
        torch.manual_seed(1)
        steps.append(contestant(work, work.build(given.quick).to(place), data, given.precision))
    losses = [[float(step(batches[turn % BATCHES])) for turn in range(WARM_UP)] for step in steps]
    times, peaks = np.zeros((given.rounds, len(steps))), [0] * len(steps)
    for turn in range(given.rounds):
        for index in order(len(steps), 0, 0, turn):
            steps[index](batches[0])
            synchronize(place)
            held = reset_and_read(place)
            began = time.perf_counter()
            for number in range(given.steps):
                steps[index](batches[number % BATCHES])
            synchronize(place)
            times[turn, index] = (time.perf_counter() - began) / given.steps
            peaks[index] = max(peaks[index], (peak_memory(place) or 0) - held)
    rows: dict[str, Any] = {}
    for index, contestant in enumerate(CONTESTANTS):
        mine = times[:, index]
        ratio = paired_ratio(mine[None], times[None, :, 0])
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses[index], losses[0], strict=True))
        rows[contestant] = {
            "ms": 1e3 * float(np.median(mine)), "ratio": ratio.median, "low": ratio.low, "high": ratio.high,
            "peak_bytes": peaks[index], "loss_difference": apart,
        }  # fmt: skip
    size = sum(part.numel() for part in work.build(given.quick).parameters())
    return {"parameters": size, "samples": samples, "contestants": rows}


def reset_and_read(place: torch.device) -> int:
    """Starts the peak of the device's memory anew, and returns the bytes that are held."""
    reset_peak_memory(place)
    return peak_memory(place) or 0


def failures(models: dict[str, Any], limit: float | None) -> list[str]:
    """What is wrong with the results: one sentence each. ``limit`` None: times are not judged."""
    found = []
    for name, part in models.items():
        for contestant, row in part["contestants"].items():
            if not row["loss_difference"] <= MOST_DIFFERENCE:
                found.append(f"{name}: losses of {contestant} are {row['loss_difference']:.1e} from the plain loop's")
            if limit is not None and row["low"] > limit:
                found.append(
                    f"{name}: {contestant} takes {row['low']:.3f} to {row['high']:.3f} of the plain loop's time"
                )
    return found


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    parser = argparse.ArgumentParser(description="Cost of a step of well-known models through tutti on one device.")
    add = parser.add_argument
    names = list(MODELS)
    add("--models", type=lambda text: listed(names, text), default=names, help=f"some of {','.join(names)}")
    add("--device", default="cuda", help="type of the device [cuda]")
    add("--precision", default="bf16", choices=("bf16", "fp32"), help="of the computing [bf16]")
    add("--rounds", type=int, default=15, help="rounds; in each, every contestant has a block [15]")
    add("--steps", type=int, default=10, help="steps of a block [10]")
    add("--limit", type=float, default=1.02, help="largest allowed lower end of an interval [1.02]")
    add("--quick", action="store_true", help="small models, two rounds of two steps: does it run?")
    add("--json", type=Path, help="write the report there")
    add("--save", action="store_true", help="write it to benchmarks/results/DATE-gpu-models.json as well")
    given = parser.parse_args(argv)
    if given.quick:
        given.rounds, given.steps = 2, 2
    now = datetime.now(UTC)
    report: dict[str, Any] = {
        "benchmark": "gpu_models", "date": now.isoformat(timespec="seconds"), "device": given.device,
        "precision": given.precision, "rounds": given.rounds, "steps": given.steps, "limit": given.limit,
        "quick": given.quick, "facts": accelerator_facts(), "hardware": hardware(), "models": {},
    }  # fmt: skip
    kept = Path(__file__).parent / "results" / f"{now.date()}-gpu-models.json"
    for name in given.models:
        report["models"][name] = part = measure(name, given)
        for contestant, row in part["contestants"].items():
            interval = f"[{row['low']:.3f}-{row['high']:.3f}]"
            memory = f"{row['peak_bytes'] / 2**20:,.0f} MiB"
            print(f"{name:8} {contestant:9} {row['ms']:9.3f} ms {row['ratio']:6.3f} {interval} {memory}", flush=True)
        report["failures"] = failures(report["models"], None if given.quick else given.limit)
        write_result(report, given.json, kept if given.save and not given.quick else None, indent=2)
    return report_failures(report["failures"])


if __name__ == "__main__":
    sys.exit(main())
