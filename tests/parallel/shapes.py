"""Models of several shapes, with data and losses, for tests of layouts that split them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.config.task_config import GptConfig, UnetConfig
from tutti.tasks.gpt import gpt
from tutti.tasks.text import next_character
from tutti.tasks.unet import unet

VOCABULARY, BLOCK, WIDTH = 11, 8, 12


def tied_gpt(dropout: float = 0.0, heads: int = 4) -> nn.Sequential:
    """Our GPT whose last layer has the weights of its first."""
    torch.manual_seed(0)
    model = gpt(GptConfig(layers=2, heads=heads, width=WIDTH, block=BLOCK, dropout=dropout), VOCABULARY)
    model.head.weight = model.embed.character.weight  # type: ignore[union-attr]
    return model


class Nano(nn.Module):
    """Attention as it is often written: one matrix for queries, keys and values, sizes of the whole in every view."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("seen", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
        att = att.masked_fill(self.seen[:, :, :T, :T] == 0, float("-inf"))  # type: ignore[index]
        y = self.attn_dropout(functional.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))  # type: ignore[no-any-return]


class Transposed(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as in transformers' GPT-2."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 5), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.outputs)


class Packed(Nano):
    """Attention as GPT-2's, of matrices (inputs, outputs); the bias is frozen, because that of keys has no gradient."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__(width, dropout=dropout)
        self.c_attn, self.c_proj = Transposed(3 * width, width), Transposed(width, width)  # type: ignore[assignment]
        self.c_attn.bias.requires_grad_(False)


class GroupedPacked(nn.Module):
    """Queries and fewer keys and values in one matrix, as in Phi-3, and norms within heads, as in Qwen3."""

    def __init__(self, width: int = WIDTH, heads: int = 6, kv: int = 3) -> None:
        super().__init__()
        self.head, self.width = width // heads, width
        self.qkv, self.o = nn.Linear(width, width + 2 * kv * self.head, bias=False), nn.Linear(width, width)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head), nn.RMSNorm(self.head)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x) * 0.9
        keys = self.width + (self.qkv.out_features - self.width) // 2
        parts = qkv[..., : self.width], qkv[..., self.width : keys], qkv[..., keys:]
        q, k, v = (part.view(*x.shape[:-1], -1, self.head).transpose(1, 2) for part in parts)
        out = functional.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class Counted(nn.Module):
    """Attention as in x-transformers: only the number of heads is named, and the features of a head follow from it."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (part.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2) for part in parts)
        out = (q @ k.mT * self.scale).softmax(-1) @ v
        result: Tensor = self.to_out(out.transpose(1, 2).flatten(-2))
        return result


class Product(nn.Linear):
    """A linear layer of a class of its own, as Falcon's."""

    def forward(self, input: Tensor) -> Tensor:
        product = input.reshape(-1, self.in_features) @ self.weight.T
        return (product if self.bias is None else product + self.bias).view(*input.shape[:-1], self.out_features)


class NormedHeads(nn.Module):
    """Norms over the features of all heads, as OLMo 2's, in ``single`` precision; grouped heads; sinks as GPT-OSS's."""

    def __init__(self, width: int = WIDTH, heads: int = 6, kv: int = 3, *, single: bool = False) -> None:
        super().__init__()
        self.head, self.single = width // heads, single
        self.q, self.kv = Product(width, width), nn.ModuleList(Product(width, kv * self.head, False) for _ in range(2))
        self.o, self.q_norm, self.k_norm = Product(width, width), nn.RMSNorm(width), nn.RMSNorm(kv * self.head)
        self.sinks = nn.Parameter(torch.randn(heads) / 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).float() if self.single else self.q(x), self.kv[0](x)
        q, k = self.q_norm(q).to(x.dtype), self.k_norm(k)
        q, k, v = (part.view(*x.shape[:-1], -1, self.head).transpose(1, 2) for part in (q, k, self.kv[1](x)))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.cat([q @ k.mT, self.sinks.view(1, -1, 1, 1).expand(*q.shape[:1], -1, *q.shape[2:3], 1)], -1)
        result: Tensor = self.o((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))
        return result


class Latent(nn.Module):
    """Attention of queries, keys and values from latent vectors, with a part of the keys that all heads share.

    DeepSeek-AI 2024, arXiv 2405.04434, §2.1.
    """

    def __init__(self, width: int = WIDTH, heads: int = 6) -> None:
        super().__init__()
        self.q_down, self.q_norm, self.q_up = nn.Linear(width, 7), nn.RMSNorm(7), nn.Linear(7, heads * 5, bias=False)
        # A bias of keys has a gradient of rounding alone, of which Adam makes full steps.
        self.kv_down, self.kv_up = nn.Linear(width, 7, bias=False), nn.Linear(5, heads * 6, bias=False)
        self.kv_norm = nn.RMSNorm(5)
        self.o = nn.Linear(heads * 3, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).view(*x.shape[:-1], -1, 5).transpose(1, 2)
        latent, shared = self.kv_down(x).split([5, 2], -1)
        k, v = self.kv_up(self.kv_norm(latent)).view(*x.shape[:-1], -1, 6).transpose(1, 2).split(3, -1)
        keys = k.new_empty(*k.shape[:-1], 5)
        keys[..., :3].copy_(k)
        keys[..., 3:].copy_(shared[:, None].expand(-1, k.shape[1], -1, -1))
        mixed = functional.scaled_dot_product_attention(q, keys, v, is_causal=True)
        result: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return result


class StackedExperts(nn.Module):
    """Experts in tensors of three dimensions; gates and ups ``apart`` as in Mixtral, or in turns as in GPT-OSS."""

    def __init__(self, experts: int, hidden: int, *, apart: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.apart = apart
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * hidden) / 3)
        self.gate_up_bias = None if apart else nn.Parameter(torch.randn(experts, 2 * hidden))
        self.down, self.down_bias = nn.Parameter(torch.randn(experts, hidden, width) / 3), None
        if not apart:
            self.down_bias = nn.Parameter(torch.randn(experts, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in chosen.unique():
            token, place = torch.where(chosen == expert)
            both = x[token] @ self.gate_up[expert]
            if self.gate_up_bias is not None:
                both = both + self.gate_up_bias[expert]
            gate, up = both.chunk(2, -1) if self.apart else (both[..., ::2], both[..., 1::2])
            out = (functional.silu(gate) * up) @ self.down[expert]
            if self.down_bias is not None:
                out = out + self.down_bias[expert]
            result.index_add_(0, token, out * weights[token, place, None])
        return result


class Mixture(nn.Module):
    """Each token goes to two of some experts, as a linear layer says (Shazeer et al. 2017, arXiv 1701.06538)."""

    def __init__(self, experts: int = 3, hidden: int = 10, *, apart: bool = True) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts), StackedExperts(experts, hidden, apart=apart)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        result: Tensor = self.experts(tokens, chosen, weights).reshape(x.shape)
        return result


class Disentangled(nn.Module):
    """Attention by contents and by distances, with one layer for keys of both, as DeBERTa's; biases for all heads."""

    def __init__(self, width: int = WIDTH, heads: int = 6) -> None:
        super().__init__()
        self.heads, self.places = heads, nn.Parameter(torch.randn(16, width) / 4)
        self.query, self.key, self.value, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_bias = nn.Parameter(torch.randn(width) / 4)

    def by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.by_head(layer(x)) for layer in (self.query, self.key, self.value))
        q = q + self.by_head(self.q_bias[None, None])
        near = q @ self.by_head(self.key(self.places)[None]).mT
        t = x.shape[1]
        distance = (torch.arange(t)[:, None] - torch.arange(t) + 8).clamp(0, 15)
        scores = q @ k.mT + near.gather(-1, distance.expand(*near.shape[:2], t, t))
        out = scores.softmax(-1) @ v
        result: Tensor = self.o(out.transpose(1, 2).reshape(*x.shape[:2], -1))
        return result


class Relative(nn.Module):
    """Attention that adds a bias for each head and distance to the scores, as T5's, and returns bias and weights."""

    def __init__(self, width: int = WIDTH, heads: int = 4, *, table: bool) -> None:
        super().__init__()
        self.head, self.table = width // heads, nn.Embedding(2 * BLOCK, heads) if table else None
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (m(x).view(*x.shape[:-1], -1, self.head).transpose(1, 2) for m in (self.q, self.k, self.v))
        if bias is None and self.table is not None:
            places = torch.arange(x.shape[1])
            bias = self.table(places - places.unsqueeze(1) + BLOCK).permute(2, 0, 1).unsqueeze(0)
        scores = q @ k.mT
        scores += bias
        weights = functional.softmax(scores, -1)
        return self.o((weights @ v).transpose(1, 2).reshape(x.shape)), bias, weights  # type: ignore[return-value]


class Related(nn.Module):
    """Blocks that share one bias between positions, and attention weights that are read outside of their block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Relative(table=number == 0) for number in range(2))

    def forward(self, texts: Tensor) -> Tensor:
        x, bias, weights = self.embed(texts), None, None
        for block in self.blocks:
            out, bias, weights = block(x, bias)
            x = x + out
        seen = weights.mean(1).diagonal(dim1=-2, dim2=-1)  # type: ignore[union-attr]
        result: Tensor = self.head(x * (1 + seen.unsqueeze(-1)))
        return result


class Separate(nn.Module):
    """Queries, keys and values by a matrix each; ``kv`` heads of keys and values."""

    def __init__(self, width: int = WIDTH, heads: int = 4, kv: int = 4) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv * self.head, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).view(*x.shape[:-1], -1, self.head).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        result: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return result


class Gated(nn.Module):
    """A feed-forward with a gate (Shazeer 2020, arXiv 2002.05202), and dropout by a function."""

    def __init__(self, width: int = WIDTH, hidden: int = 20, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.probability = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.gate(x)) * self.up(x)
        result: Tensor = self.down(functional.dropout(hidden, self.probability, self.training))
        return result


class Normed(nn.Module):
    """Looks like a feed-forward, and is none that can be split: it normalises over what would be divided."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(functional.layer_norm(self.first(x), (16,)))
        return result


class Leaking(Normed):
    """Its outputs can be summed over ranks, but not the gradient of its input."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x) * x.mean(-1, keepdim=True))
        return result


class Inline(nn.Module):
    """A whole transformer block in one forward, with norms, residual branches and a module for the feed-forward."""

    def __init__(self, width: int = WIDTH, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.probability = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Dropout(dropout), nn.Linear(20, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        p = self.probability if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = x + functional.dropout(self.feed(self.norm2(x)), self.probability, self.training)
        return result


class Around(nn.Module):
    """A feed-forward in the forward of a block, around an attention that is a module."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Nano(width, dropout=dropout)
        self.fc1, self.fc2, self.dropout = nn.Linear(width, 20), nn.Linear(20, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.fc2(self.dropout(self.fc1(self.norm(x)).relu()))
        return result


def decoder(*blocks: nn.Module) -> nn.Sequential:
    """Characters through ``blocks`` with residual branches to scores."""
    layers = [layer for block in blocks for layer in (Residual(block),)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


class Translating(nn.Module):
    """PyTorch's encoder and decoder, with masks of both kinds, positions first."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        options = {"dim_feedforward": 20, "dropout": dropout}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, **options), 1)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 4, activation=functional.gelu, **options)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, texts: Tensor) -> Tensor:
        embedded, padding = self.embed(texts), (texts == 0) & (torch.arange(texts.shape[1]) > 0)
        memory = self.encoder(embedded, src_key_padding_mask=padding)
        memory = memory.masked_fill(padding.unsqueeze(-1), 0).transpose(0, 1)
        later = nn.Transformer.generate_square_subsequent_mask(texts.shape[1], dtype=embedded.dtype)
        out = self.decoder(embedded.transpose(0, 1), memory, tgt_mask=later, memory_key_padding_mask=padding)
        result: Tensor = self.head(out.transpose(0, 1))
        return result


class Residual(nn.Module):
    """x + block(norm(x))."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(self.norm(x))  # type: ignore[no-any-return]


def encoder(dropout: float = 0.0) -> nn.Sequential:
    """PyTorch's own layer, whose keys have no bias that counts."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 20, dropout, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layer, nn.Linear(WIDTH, VOCABULARY))


def convolutions() -> nn.Sequential:
    """Convolutions, a batch norm, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1, bias=False),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, stride=2),
        nn.Flatten(),
        nn.Linear(54, 10),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(10, 4),
    )


def small_unet() -> nn.Sequential:
    """Skip connections, transposed convolutions."""
    return unet(UnetConfig(depth=1, width=4))


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "gpt": tied_gpt,
    "gpt, dropout": lambda: tied_gpt(0.2),
    "gpt, 3 heads": lambda: tied_gpt(heads=3),
    "nano": lambda: decoder(Nano(dropout=0.2), Gated(dropout=0.2)),
    "separate": lambda: decoder(Separate(), Normed()),
    "few keys": lambda: decoder(Separate(kv=2), Leaking()),
    "packed": lambda: decoder(Packed(dropout=0.2), GroupedPacked(), Counted()),
    "all heads": lambda: decoder(NormedHeads(), Disentangled()),
    "mixture": lambda: decoder(Latent(), Mixture(), Mixture(apart=False)),
    "related": Related,
    "inline": lambda: decoder(Inline(dropout=0.2), Around(dropout=0.2)),
    "translating": lambda: Translating(0.2),
    "encoder": lambda: encoder(0.2),
    "convolutions": convolutions,
    "convolutions, no dropout": lambda: nn.Sequential(*(m for m in convolutions() if not isinstance(m, nn.Dropout))),
    "unet": small_unet,
}


def build(shape: str) -> nn.Module:
    """The same on every call and rank."""
    torch.manual_seed(0)
    return SHAPES[shape]().double()


def data(shape: str, count: int = 20) -> Any:
    """Samples and targets."""
    generator = torch.Generator().manual_seed(1)
    if shape.startswith(("convolutions", "unet")):
        images = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (count,), generator=generator)
        return (images, labels) if shape != "unet" else (images, (images > 0).double())
    texts = torch.randint(0, VOCABULARY, (count, BLOCK + 1), generator=generator)
    return texts[:, :-1], texts[:, 1:].contiguous()


def loss(shape: str) -> Any:
    """Of the model on a batch."""
    if shape == "unet":
        return lambda model, batch: ((model(batch[0]) - batch[1]).square().sum(), batch[1].numel())
    if shape.startswith("convolutions"):
        return lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    return next_character
