"""The next character of a text, from those before it in its window."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tutti.data.text import WindowSource, read
from tutti.tasks.config import Gpt
from tutti.tasks.gpt import gpt
from tutti.tasks.losses import per_sample
from tutti.tasks.task import Task


def task(config: Gpt, data: str | None) -> Task:
    """A sample is one window of ``config.block`` characters; the last tenth of the text is held out.

    The vocabulary is that of the whole text, so that no held-out character is unknown.

    Args:
        config: the model.
        data: a UTF-8 text file; None for source files of Python's standard library.

    Raises:
        DataError: no such file, no text, a text that is too short or has too many different characters.
    """
    text = read(data)
    split = len(text.codes) * 9 // 10
    train, held_out = (WindowSource(part, config.block, text.name) for part in (text.codes[:split], text.codes[split:]))
    return Task(
        name="text",
        model=partial(gpt, config, len(text.vocabulary)),
        loss=next_character,
        train=train,
        eval=held_out,
        describe=f"{len(train):,} + {len(held_out):,} windows of {config.block} characters, "
        f"{len(text.vocabulary)} different ones ({text.name})",
    )


def next_character(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Cross-entropy of the next character.

    Args:
        model: maps characters (samples, block) to scores (samples, block, vocabulary).
        batch: characters, and the one after each, both (samples, block) int64.

    Returns:
        -log p(next) summed over each window (samples,), the number of characters, and how many were
        right as ``accuracy``.
    """
    inputs, targets = batch
    scores = model(inputs)
    values = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    right = (scores.detach().argmax(dim=-1) == targets).sum()
    return per_sample(values.view_as(targets)), targets.numel(), {"accuracy": right}
