"""What activation checkpointing costs and saves: a step's time and its activations, each way beside keeping everything.

    python benchmarks/recompute.py            # about a minute
    python benchmarks/recompute.py --save     # also to benchmarks/results/DATE-recompute.json

Two models, one process, one thread: a GPT (float32, attention without dropout) and a U-Net with batch norm. ``by hand``
is ``torch.utils.checkpoint`` around the same blocks, with ``create_selective_checkpoint_contexts`` for ``selective``.
Times are paired within rounds; activations are the bytes that are there between forward and backward. Exit code 9
where tutti's way is for sure more than 1.02 of the one by hand, or gradients differ.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import order, paired_ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tutti.config.module_config import Blocks, check_checkpointing
from tutti.config.task_config import GptConfig, UnetConfig
from tutti.errors import ExitCode
from tutti.launcher import malloc_tuning
from tutti.nn import ac_and_compile
from tutti.nn.ac_policy import find_units
from tutti.tasks.gpt import gpt
from tutti.tasks.unet import unet
from tutti.workload.tensor_memory import Tracker

Loss = Callable[[nn.Module], Tensor]
CHOICES = ("none", "blocks", "blocks:every=2", "selective", "selective:every=2")
BY_HAND = ("blocks", "selective")
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def text() -> tuple[nn.Module, Loss]:
    """A GPT, and its loss on 8 × 256 characters."""
    numbers = torch.randint(0, 65, (8, 257))

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(numbers[:, :-1]).flatten(0, 1), numbers[:, 1:].flatten())

    return gpt(GptConfig(layers=4, heads=4, width=256, block=256), 65), loss


def images() -> tuple[nn.Module, Loss]:
    """A U-Net, and its loss on four images of 128 × 128."""
    inputs, classes = torch.randn(4, 1, 128, 128), torch.randint(0, 2, (4, 1, 128, 128)).float()

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(inputs), classes)

    return unet(UnetConfig(depth=3, width=16, batch_norm=True)), loss


MODELS = {"gpt": text, "unet": images}


def by_hand(model: nn.Module, choice: str) -> None:
    """Wrap the blocks that tutti would find, as a script without it does."""
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    options = {"context_fn": contexts} if choice == "selective" else {}
    for block in find_units(model, Blocks()).whole:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


def made(name: str, choice: str, hand: bool) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    if hand:
        by_hand(model, choice)
    else:
        ac_and_compile.recompute(model, check_checkpointing(choice))
    return model, loss


def activations(model: nn.Module, loss: Loss) -> int:
    """Bytes made in a forward that are there after it."""
    with Tracker() as tracker:
        value = loss(model)
        held = tracker.now
    value.backward()  # type: ignore[no-untyped-call]
    return held


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Ratios of one model: time and activations ÷ those of keeping everything, and tutti's time ÷ the one by hand."""
    ways = [*((choice, False) for choice in CHOICES), *((choice, True) for choice in BY_HAND)]
    built = {f"{choice}, by hand" * hand or choice: made(name, choice, hand) for choice, hand in ways}
    held = {way: activations(*pair) for way, pair in built.items()}
    gradients = {way: [p.grad for p in model.parameters() if p.grad is not None] for way, (model, _) in built.items()}
    equal = all(all(map(torch.equal, found, gradients["none"])) for found in gradients.values())
    times = {way: np.zeros((1, rounds)) for way in built}
    for turn in range(rounds):
        for index in order(len(built), 0, 0, turn):
            way = list(built)[index]
            model, loss = built[way]
            model.zero_grad()
            start = time.perf_counter()
            loss(model).backward()  # type: ignore[no-untyped-call]
            times[way][0, turn] = time.perf_counter() - start
    rows = {}
    for way, taken in times.items():
        beside = paired_ratio(taken, times["none"])
        rows[way] = {"time": [beside.median, beside.low, beside.high], "activations": held[way] / held["none"]}
        if (hand := f"{way}, by hand") in times:
            tax = paired_ratio(taken, times[hand])
            rows[way]["by_hand"] = [tax.median, tax.low, tax.high]
    none = {"ms": float(np.median(times["none"]) * 1e3), "mib": held["none"] / 2**20}
    return {"none": none, "equal": equal, "ways": rows}


def show(name: str, part: dict[str, Any]) -> None:
    none = part["none"]
    print(f"{name}: everything kept is {none['mib']:.0f} MiB and {none['ms']:.0f} ms a step; gradients ", end="")
    print("equal to the bit" if part["equal"] else "DIFFER")
    for way, row in part["ways"].items():
        median, low, high = row["time"]
        tax = "  ÷ by hand {:.2f} [{:.2f}, {:.2f}]".format(*row["by_hand"]) if "by_hand" in row else ""
        print(f"  {way:19} activations {row['activations']:.2f}  time {median:.2f} [{low:.2f}, {high:.2f}]{tax}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and memory of activation checkpointing.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    malloc_tuning.keep_freed_memory()
    torch.set_num_threads(1)
    found = {}
    for name in MODELS:
        found[name] = measure(name, given.rounds)
        show(name, found[name])
    if given.save:
        now = datetime.now(UTC)
        report = {"benchmark": "recompute", "date": now.isoformat(timespec="seconds"), "torch": torch.__version__}
        report |= {"machine": platform.processor() or platform.machine(), "models": found}
        path = Path(__file__).parent / "results" / f"{now.date()}-recompute.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    taxes = [row["by_hand"] for part in found.values() for row in part["ways"].values() if "by_hand" in row]
    bad = any(low > 1.02 for _, low, _ in taxes) or not all(part["equal"] for part in found.values())
    return int(ExitCode.THRESHOLD if bad else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
