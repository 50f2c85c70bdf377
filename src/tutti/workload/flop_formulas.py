"""Floating-point operations of PyTorch's operators: formulas that ``torch.utils.flop_counter`` lacks, and its own.

A multiplication and an addition are two operations. Matrix products, convolutions, attention and recurrent layers are
counted; all other operators count as 0, as is the convention (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

Attention is counted here and not by PyTorch's formulas (torch 2.13), which lack the CPU's kernel, count causal
attention as if no score were masked, and count the scores that a fused backward computes again as work of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tutti.torch_compat import operator_arguments

OperatorClass = Literal["matmul", "convolution", "attention", "recurrent", "normalisation", "transcendental", "other"]
_NORMALISATION = re.compile(r"(layer|batch|group|instance|rms)_norm|softmax")
_TRANSCENDENTAL = re.compile(
    r"_?(gelu|tanh|sigmoid|silu|mish|elu|softplus|exp2?|expm1|log2?|log10|log1p|erfc?|sin|cos|pow)(_backward)?_?$"
)

CAUSAL = 0.5
"""Part of the scores that causal attention computes, as Dao et al. 2022 (arXiv 2205.14135) count it; (T + 1)/2T for T
positions."""

_ATTENTION = re.compile(r"_scaled_dot_product_\w+_attention\w*|_(flash|efficient)_attention_(forward|backward)")
_PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|matmul|linear|einsum|conv\w*|rnn|lstm|gru|attention|fft|linalg|cdist|cholesky|lu|svd|qr)(_|$)"
    r"|rnn_layer|transformer_encoder_layer|multi_head_attention|trilinear|triangular_solve"
)


@dataclass(frozen=True)
class OperatorFlop:
    """Floating-point operations of one operator call.

    Attributes:
        kind: class of the operator, such as ``matmul``; the rate of all operators of a class on a device is measured
            together.
        flop: operations that the model asks for.
        recomputed: operations of the kernel beyond these: scores that a fused attention's backward computes again.
        masked: operations that causal masking saves, which ``flop`` does not contain.
    """

    kind: OperatorClass
    flop: float
    recomputed: float = 0.0
    masked: float = 0.0


def count_flop(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OperatorFlop | None:
    """Return the floating-point operations of one operator call, by a formula over the shapes of its arguments.

    Args:
        func: the operator, an overload of ``torch.ops``.
        args, kwargs: arguments of the call.
        result: result of the call.

    Returns:
        An ``OperatorFlop``: ``kind`` (class of the operator, such as ``matmul``), ``flop`` (operations that the model
        asks for), ``recomputed`` (further operations of a fused attention's backward) and ``masked`` (operations that
        causal masking saves). None for an operator without a formula, such as elementwise ones.
    """
    name = operator_name(func)
    if _ATTENTION.fullmatch(name):
        return _attention(func, args, kwargs, backward=name.endswith("backward"))
    if name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"):
        return _recurrent(args, backward=name.endswith("backward"))
    if name == "_grouped_mm":
        # Each row of one matrix meets the matrix of its group, or each group of rows gives a matrix.
        one, other = args[0].shape, args[1].shape
        groups = one[0] if len(one) == len(other) == 3 else 1
        return OperatorFlop("matmul", 2.0 * groups * one[-2] * one[-1] * other[-1])
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    if formula is None:
        return None
    kind: OperatorClass = "convolution" if "conv" in name else "matmul"
    return OperatorFlop(kind, float(formula(*args, **kwargs, out_val=result)))


def operator_name(func: Any) -> str:
    """Return the name of an operator without namespace and overload: ``mm`` of ``torch.ops.aten.mm.default``.

    Args:
        func: the operator, an overload of ``torch.ops``.
    """
    return str(func).split(".")[1] if "." in str(func) else str(func)


def class_without_flop(func: Any) -> OperatorClass:
    """Return the class of an operator whose seconds depend on the bytes that it reads and writes, not on FLOP.

    Classes are ``normalisation``, ``transcendental`` (such as GELU or tanh) and ``other``, by the operator's name.

    Args:
        func: the operator, an overload of ``torch.ops``.

    >>> import torch
    >>> aten = torch.ops.aten
    >>> [class_without_flop(each.default) for each in (aten.native_layer_norm, aten.gelu_backward, aten.relu)]
    ['normalisation', 'transcendental', 'other']
    """
    name = operator_name(func)
    if _NORMALISATION.search(name):
        return "normalisation"
    return "transcendental" if _TRANSCENDENTAL.match(name) else "other"


def lacks_formula(func: Any) -> bool:
    """Return whether an operator without a formula in ``count_flop`` may do FLOP, which a total would then lack.

    True for a custom kernel (not of the namespaces ``aten``, ``prim`` and ``prims``), and for an operator of PyTorch
    with a word such as ``mm``, ``conv``, ``lstm``, ``fft`` or ``linalg`` in its name, as in ``linalg_inv_ex``.

    Args:
        func: the operator, an overload of ``torch.ops``, for which ``count_flop`` has returned None. For an operator
            with a formula the result means nothing.

    >>> import torch
    >>> lacks_formula(torch.ops.aten.linalg_inv_ex.default), lacks_formula(torch.ops.aten.relu.default)
    (True, False)
    """
    namespace = str(func).split(".")[0]
    return namespace not in ("aten", "prim", "prims") or _PRODUCT.search(operator_name(func)) is not None


def decoder_flop_per_token(parameters: float, layers: int, width: int, length: int) -> float:
    """Return the training FLOP (forward and backward) of a token of a decoder, 6N + 12·L·(H·Q)·T.

    A third of the FLOP is the forward's. Savings by causal masking are not subtracted. Chowdhery et al. 2022, arXiv
    2204.02311, appendix B.

    Args:
        parameters: N, number of parameters without embeddings that are only looked up.
        layers: L, number of layers.
        width: H·Q, attention heads × size of a head.
        length: T, tokens of a sequence.

    >>> decoder_flop_per_token(1.3e9, 24, 2048, 2048)
    9007959552.0
    """
    return 6.0 * parameters + 12.0 * layers * width * length


def _attention(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], backward: bool) -> OperatorFlop:
    """Count scores Q·Kᵀ and their product with V: forward two products, backward four, and the scores once more."""
    given = {argument.name: value for argument, value in zip(operator_arguments(func), args, strict=False)}
    given = {argument.name: argument.default_value for argument in operator_arguments(func)} | given | dict(kwargs)
    query, key, value = (given[name].shape for name in ("query", "key", "value"))
    if "scaled" in str(func):
        # (batch, heads, length, size of a head)
        lengths, rows = (query[-2], key[-2]), math.prod(query[:-2])
    else:
        # (batch, length, heads, size of a head)
        lengths, rows = (query[-3], key[-3]), math.prod(query[:-3]) * query[-2]
    scores, mixed = (2.0 * rows * math.prod(lengths) * size for size in (query[-1], value[-1]))
    causal = bool(given.get("is_causal") or given.get("custom_mask_type"))
    part = CAUSAL if causal else 1.0
    whole = 2 * (scores + mixed) if backward else scores + mixed
    return OperatorFlop("attention", part * whole, part * scores if backward else 0.0, (1 - part) * whole)


def _recurrent(args: tuple[Any, ...], backward: bool) -> OperatorFlop:
    """Count the products of inputs and of hidden states with their weights, at every position."""
    inputs: Tensor = args[0]
    positions = inputs.numel() // inputs.shape[-1]
    forward = 2.0 * positions * (args[1].numel() + args[2].numel())
    return OperatorFlop("recurrent", 2 * forward if backward else forward)
