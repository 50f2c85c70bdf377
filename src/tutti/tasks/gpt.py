"""A small GPT: the decoder of Radford et al. 2019 (GPT-2), with normalisation before attention and feed-forward.

The model is an ``nn.Sequential`` that can be partitioned into stages between any two children. The linear layer of
queries, keys and values has no bias: a key's bias would add the same to all scores of a query, so that its gradient
would be zero by construction.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.config.task_config import GptConfig

_STD = 0.02


def gpt(config: GptConfig, vocabulary: int) -> nn.Sequential:
    """Build a GPT: characters (samples, positions ≤ block) int64 → logits (samples, positions, vocabulary).

    The decoder of GPT-2 (Radford et al. 2019), with normalisation before attention and feed-forward. Weights are normal
    with standard deviation 0.02, and 0.02/√(2·layers) in the last layer of a residual branch.

    Args:
        config: ``layers`` (number of transformer blocks), ``heads`` (attention heads of a block), ``width`` (features
            of a character), ``block`` (largest number of positions) and ``dropout`` (probability).
        vocabulary: number of distinct characters.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=Embedding(config, vocabulary))
    layers.update((f"block{number}", Block(config)) for number in range(1, config.layers + 1))
    layers.update(norm=nn.LayerNorm(config.width), head=nn.Linear(config.width, vocabulary, bias=False))
    model = nn.Sequential(layers)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            last = name.endswith((".merge", ".shrink"))
            nn.init.normal_(module.weight, std=_STD / math.sqrt(2 * config.layers) if last else _STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


class Embedding(nn.Module):
    """Embedding of characters plus learned embedding of positions, then dropout.

    (samples, positions) int64 → (samples, positions, width).

    Args:
        config: options of the model.
        vocabulary: number of distinct characters.
    """

    def __init__(self, config: GptConfig, vocabulary: int) -> None:
        super().__init__()
        self.character = nn.Embedding(vocabulary, config.width)
        self.position = nn.Embedding(config.block, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, characters: Tensor) -> Tensor:
        """Embed characters and their positions, and apply dropout.

        Args:
            characters: (samples, positions) int64, indices in the vocabulary; at most ``config.block`` positions.

        Returns:
            Activations (samples, positions, width).
        """
        positions = torch.arange(characters.shape[1], device=characters.device)
        out: Tensor = self.dropout(self.character(characters) + self.position(positions))
        return out


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + feed-forward(norm(x)).

    (samples, positions, width) → the same shape.

    Args:
        config: options of the model: ``heads``, ``width``, and ``dropout`` of both branches.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(config), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            OrderedDict(
                widen=nn.Linear(width, 4 * width),
                gelu=nn.GELU(),
                shrink=nn.Linear(4 * width, width),
                dropout=nn.Dropout(config.dropout),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the transformer block: x + attention(norm(x)), then x + feed-forward(norm(x)).

        Args:
            x: activations (samples, positions, width).

        Returns:
            Activations of the same shape.
        """
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class Attention(nn.Module):
    """Causal multi-head self-attention (Vaswani et al. 2017, arXiv:1706.03762, §3.2).

    (samples, positions, width) → the same shape.

    Args:
        config: options of the model: ``heads``, ``width`` (a multiple of ``heads``), and ``dropout`` of the attention
            weights and of the output.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads, self.probability = config.heads, config.dropout
        self.queries_keys_values = nn.Linear(config.width, 3 * config.width, bias=False)
        self.merge = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply causal self-attention: each position attends to itself and to earlier positions.

        Args:
            x: activations (samples, positions, width).

        Returns:
            Activations of the same shape.
        """
        samples, positions, width = x.shape
        split = self.queries_keys_values(x).view(samples, positions, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        probability = self.probability if self.training else 0.0
        seen = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=probability, is_causal=True)
        out: Tensor = self.dropout(self.merge(seen.transpose(1, 2).reshape(samples, positions, width)))
        return out
