"""Multi-head attention on this rank's heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.parallel.tensor.split_tensor import copied, summed
from tutti.parallel.tensor.tensor_slice import LayerSlice, dropped
from tutti.parallel.tensor.tp_layers import TensorParallelLayer
from tutti.torch_compat import has_packed_projection


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    slice_: LayerSlice,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute scaled dot-product attention of this tensor-parallel rank's heads. Not collective.

    Dropout masks are those of one device: each rank draws them for all heads, from equal RNG states, and applies its
    own.

    Args:
        query, key, value: (samples, heads here, positions, features).
        mask: broadcast to (samples, heads here, queries, keys): added to the scores or, if boolean, True where
            attention is allowed; None for none.
        dropout: probability of zero for the attention weights.
        slice_: which heads of the layer this rank has: their range, and the number of heads of all ranks.
        scale: factor on the scores; default 1/√features.

    Returns:
        Values (samples, heads here, positions, features), and the attention weights (samples, heads here, queries,
        keys) after dropout.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * math.sqrt(factor)) @ (key.transpose(-2, -1) * math.sqrt(factor))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = dropped(scores.softmax(-1), dropout, scores.dim() - 3, slice_)
    return weights @ value, weights


class HeadParallelAttention(TensorParallelLayer, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` split by heads over tensor-parallel ranks; arguments and results are the whole layer's.

    Collective over these ranks: an all-reduce of the outputs in forward, and in backward an all-reduce of the gradient
    of each distinct input (and learned mask). Returning attention weights takes one all-reduce more if they are
    averaged over heads, otherwise an all-gather.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the attention of ``nn.MultiheadAttention.forward``, each tensor-parallel rank for its own heads.

        Arguments and results are those of the unsplit layer, the same on every rank. Collective over the
        tensor-parallel ranks: the outputs are all-reduced (reduce-scattered with sequence parallelism), the returned
        weights all-reduced or all-gathered, and in backward the inputs' gradients all-reduced. Sizes: N samples, L
        queries, S keys, E features; without N for a single sample.

        Args:
            query: (L, N, E), or (N, L, E) with ``batch_first``.
            key, value: (S, N, features), or (N, S, features) with ``batch_first``.
            key_padding_mask: (N, S) True for keys to ignore, or floats that are added to the scores; None for none.
            need_weights: whether to return the attention weights.
            attn_mask: (L, S), or (N · heads, L, S) with the heads of all ranks: True where attention is not allowed, or
                floats that are added to the scores; None for none.
            average_attn_weights: return the mean of the weights over the heads, else the weights of each head.
            is_causal: ignored: the masks apply as they are given.

        Returns:
            The outputs in the shape of ``query``, and the weights (N, L, S) or (N, heads, L, S); None without
            ``need_weights``. With sequence parallelism the outputs may be a ``SplitTensor`` along the positions.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        name, ranks, heads, _ = self.tutti_slice
        batched, inputs = query.dim() == 3, (query, key, value)
        whole = {id(x): copied(x, self.tutti_slice) for x in inputs}
        queries, keys, values = (self._by_heads(whole[id(x)], i, batched) for i, x in enumerate(inputs))
        mask = self._mask(attn_mask, key_padding_mask, queries)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights or dropout:
            out, weights = attend(queries, keys, values, mask, dropout, self.tutti_slice)
        else:
            out = functional.scaled_dot_product_attention(queries, keys, values, mask)
        # Positions first, as in the plain module: a dropout after it draws in memory order.
        part = functional.linear(out.permute(2, 0, 1, 3).flatten(-2), self.out_proj.weight)
        result = summed(part, self.tutti_slice, 0 if self.batch_first else 1)
        if self.out_proj.bias is not None:
            result = result + self.out_proj.bias.to(result.dtype)
        result = result[:, 0] if not batched else result.transpose(0, 1) if self.batch_first else result
        if not need_weights or weights is None:
            return result, None
        if average_attn_weights:
            weights = ranks.all_reduce(weights.sum(1), name) / heads
        else:
            weights = ranks.all_gather(weights, 1, heads, name)
        return result, weights if batched else weights[0]

    def _by_heads(self, x: Tensor, which: int, batched: bool) -> Tensor:
        """Return queries, keys or values of this rank's heads: (samples, heads here, positions, features)."""
        if not batched:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        if has_packed_projection(self):
            weight = self.in_proj_weight.chunk(3)[which]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[which]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[which]
        heads: Tensor = functional.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def _mask(self, attention: Tensor | None, padding: Tensor | None, queries: Tensor) -> Tensor | None:
        """Return the mask to add to the scores (samples or 1, heads here or 1, positions, positions); None for none."""
        masks = []
        if attention is not None:
            # A learned mask has a gradient from the heads of every rank.
            mask = _added(copied(attention, self.tutti_slice), queries.dtype)
            if mask.dim() == 3:
                mine = self.tutti_slice.mine
                mask = mask.unflatten(0, (-1, self.tutti_slice.length))[:, mine.start : mine.stop]
            masks.append(mask)
        if padding is not None:
            mask = _added(copied(padding, self.tutti_slice), queries.dtype)
            masks.append(mask.view(-1, 1, 1, mask.shape[-1]))
        return sum(masks[1:], masks[0]) if masks else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores: minus infinity where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
