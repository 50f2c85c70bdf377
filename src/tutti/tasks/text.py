"""Language modelling by character: predict the next character of a text within a window."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tutti.config.task_config import GptConfig
from tutti.data.text_source import WindowSource, read_text
from tutti.tasks.gpt import gpt
from tutti.tasks.losses import per_sample
from tutti.tasks.task import Task


def text_task(config: GptConfig, data: str | None) -> Task:
    """Build the task of predicting the next character; a sample is a window of ``config.block`` characters.

    A batch is characters, as indices in the vocabulary, and the next character of each, both (samples,
    ``config.block``) int64; the loss is the cross-entropy. The last tenth of the text is held out. The vocabulary is
    that of the whole text, so that no held-out character is unknown.

    Args:
        config: options of the GPT: ``layers``, ``heads``, ``width``, ``block`` (length of the window) and ``dropout``.
        data: a UTF-8 text file; None for source files of Python's standard library.

    Returns:
        A ``Task`` with the attributes ``model`` (a function without arguments that returns a new model), ``loss`` (the
        loss function), ``train`` (training samples) and ``eval`` (held-out samples).

    Raises:
        DataError: the file is missing or not text, too short, or has too many different characters.
    """
    text = read_text(data)
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
    """Compute the cross-entropy of the next character and the number of correct predictions.

    Args:
        model: maps characters (samples, block) to logits (samples, block, vocabulary).
        batch: characters, and the next character of each, both (samples, block) int64.

    Returns:
        A tuple of the losses (samples,), -log p(next) summed over each window; the number of characters; and a dict
        with ``accuracy``, the number of correct predictions (a 0-d tensor).
    """
    inputs, targets = batch
    scores = model(inputs)
    values = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    right = (scores.detach().argmax(dim=-1) == targets).sum()
    return per_sample(values.view_as(targets)), targets.numel(), {"accuracy": right}
