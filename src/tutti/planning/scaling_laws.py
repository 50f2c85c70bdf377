"""Closed laws of step time, collectives and data to a target: pure functions of physical constants, seconds and bytes.

Each law takes its constants as a vector, so that `law_fit` can fit it and draw from its posterior. All quantities
are SI (seconds, bytes, bytes/s, FLOP/s); every argument that describes measurements is an array, one element a
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Inputs = Mapping[str, Array]


@dataclass(frozen=True)
class ScalingLaw:
    """A law of time with its positive constants.

    Attributes:
        name: shown in results.
        constants: one name a constant, in the order of the vector.
        spread: standard deviation of the prior of each constant's natural logarithm.
        centre: prior medians, from the fitted measurements' scale (their inputs and seconds).
        seconds: the law: constants and inputs to seconds.
    """

    name: str
    constants: tuple[str, ...]
    spread: tuple[float, ...]
    centre: Callable[[Inputs, Array], Array]
    seconds: Callable[[Array, Inputs], Array]


def ring_allreduce_law(ranks: Array, size: Array, latency: Array | float, rate: Array | float) -> Array:
    """Return the seconds of a ring all-reduce: 2(N−1)α + 2(N−1)/N · n/β, element by element.

    Args:
        ranks: number of ranks N.
        size: message in bytes n.
        latency: α, seconds a message.
        rate: β, bytes/s.

    Source: Patarasuk & Yuan 2009; Thakur et al. 2005.

    >>> round(float(ring_allreduce_law(np.array(8.0), np.array(1e8), 2e-5, 1e10)), 5)
    0.01778
    """
    return np.asarray(2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * size / rate)


def _allreduce_seconds(constants: Array, inputs: Inputs) -> Array:
    """Ring, plus a start and one pass over the message: c + 2(N−1)α + n/β_copy + 2(N−1)/N · n/β."""
    latency, start, rate, copy = constants
    ring = ring_allreduce_law(inputs["ranks"], inputs["bytes"], latency, rate)
    return np.asarray(start + inputs["bytes"] / copy + ring)


def _allreduce_centre(inputs: Inputs, seconds: Array) -> Array:
    rate = float(np.median(inputs["bytes"] / seconds))
    return np.array([1e-6, min(2e-5, float(seconds.min())), 1.5 * rate, 4 * rate])


ALLREDUCE_LAW = ScalingLaw(
    "ring all-reduce with a start and a copy",
    ("latency_s", "start_s", "link_bytes_per_s", "copy_bytes_per_s"),
    (1.0, 1.0, 1.0, 1.0),
    _allreduce_centre,
    _allreduce_seconds,
)


_FORWARD = 1 / 3
"""Share of forward in computing: one of three matrix products a layer."""


def _data_parallel_seconds(constants: Array, inputs: Inputs) -> Array:
    """One step of N replicas on K nodes with m samples a replica: forward, then backward beside synchronising.

    Computing is a + b·m, of which forward, a third, ends before gradients are sent; backward and synchronising overlap
    as a γ-norm (Qiao et al., OSDI 2021, arXiv 2008.12260, §3.2, whose norm is over all computing). Synchronising is a
    ring within nodes of r = N/K replicas and one over nodes: (r−1)α_l + (r−1)/r·β_l + (K−1)α_n + (K−1)/K·β_n. On two
    nodes both neighbours of the ring are one node, whose path both directions share: the ring takes 1 to 2 times as
    long.
    """
    fixed, sample, hop, local, node_hop, wire, shared, gamma = constants
    replicas, nodes = inputs["replicas"], inputs["nodes"]
    each = np.maximum(replicas / nodes, 1.0)
    compute = fixed + sample * inputs["local_batch"]
    ring = (each - 1) * hop + (each - 1) / each * local + (nodes - 1) * node_hop + (nodes - 1) / nodes * wire
    sync = ring * np.where(nodes == 2, 1 + shared / (1 + shared), 1.0)
    power = 1 + gamma
    return np.asarray(_FORWARD * compute + (((1 - _FORWARD) * compute) ** power + sync**power) ** (1 / power))


def _data_parallel_centre(inputs: Inputs, seconds: Array) -> Array:
    """Rings take 1 and 2.5 times the shortest step: guesses, near the median over published workloads."""
    least = float(seconds.min())
    batch = max(float(inputs["local_batch"].max()), 1.0)
    return np.array([least, least / batch, 2e-4, least, 2e-4, 2.5 * least, 1.0, 2.4])


DATA_PARALLEL_LAW = ScalingLaw(
    "rings within and between nodes",
    ("fixed_s", "sample_s", "local_hop_s", "local_ring_s", "node_hop_s", "node_ring_s", "shared_path", "overlap"),
    (3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7),
    _data_parallel_centre,
    _data_parallel_seconds,
)

_VOCABULARY = 51200.0
"""Rows of the vocabulary where a table states none (GPT-2's 50,257, rounded up as Megatron-LM does): a guess."""


def _gpt_grid_seconds(constants: Array, inputs: Inputs) -> Array:
    """One iteration of a GPT split over tensor, data and pipeline ranks of one host.

    A layer takes the larger (as a 4-norm) of its kernels and of launching them. Kernels: 6·(12h² + 2hs)·tokens FLOP
    over the tensor ranks at a rate, and activation bytes sbh(10 + 24/t) + 5as²b/t words (Korthikanti et al. 2022,
    arXiv 2205.05198, eq. 2) at a bandwidth; tensor ranks all-reduce 4 times a layer (Shoeybi et al. 2019,
    arXiv 1909.08053). The pipeline takes m + p − 1 slots (Narayanan et al. 2021, arXiv 2104.04473); then gradients are
    all-reduced and the optimizer passes over its words.
    """
    rate, memory, launch, latency, link, grad_latency, grad_link, head, words = constants
    tensor, data, pipe = inputs["tensor"], inputs["data"], inputs["pipeline"]
    micro, hidden, length = inputs["micro_batch"], inputs["hidden"], inputs["seq_len"]
    tokens = micro * length
    flops = tokens * (72 * hidden**2 + 12 * hidden * length) / tensor
    moved = 2 * tokens * (hidden * (10 + 24 / tensor) + 5 * inputs["heads"] * length / tensor)
    layer = ((flops / rate + moved / memory) ** 4 + launch**4) ** 0.25
    layer = layer + 4 * ring_allreduce_law(tensor, 2 * tokens * hidden, latency, link)
    stage = layer * inputs["layers"] / pipe
    vocabulary = inputs.get("vocabulary", np.full_like(hidden, _VOCABULARY))
    logits = 6 * tokens * hidden * vocabulary / tensor / rate + 16 * tokens * vocabulary / tensor / memory
    slots = inputs["global_batch"] / (micro * data)
    parameters = (12 * hidden**2 * inputs["layers"] / pipe + vocabulary * hidden) / tensor
    gradients = ring_allreduce_law(data, 4 * parameters, grad_latency, grad_link)
    return np.asarray(slots * (stage + head * logits) + (pipe - 1) * stage + gradients + 32 * parameters / words)


def _gpt_grid_centre(inputs: Inputs, seconds: Array) -> Array:
    del inputs, seconds
    return np.array([2e14, 1.5e12, 1e-3, 1e-5, 2e11, 1e-4, 2e11, 1.0, 1.5e12])


GPT_GRID_LAW = ScalingLaw(
    "GPT over tensor, data and pipeline ranks",
    (
        *("flop_per_s", "memory_bytes_per_s", "layer_launch_s", "tensor_latency_s", "tensor_bytes_per_s"),
        *("gradient_latency_s", "gradient_bytes_per_s", "head_factor", "optimizer_bytes_per_s"),
    ),
    (2.0,) * 9,
    _gpt_grid_centre,
    _gpt_grid_seconds,
)


def transformer_flops_per_token(
    parameters: Array, layers: Array, hidden: Array, length: Array, recompute: Array
) -> Array:
    """Return the hardware FLOP of training one token: 6N + 12·L·h·s, and a third more with full recomputation.

    Args:
        parameters: N.
        layers: L.
        hidden: h, heads times their width.
        length: s, tokens a sequence.
        recompute: 1 where activations are recomputed in full, 0 where they are kept.

    Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B), no discount for a causal mask.

    >>> one = np.ones(1)
    >>> flops = transformer_flops_per_token(1.3e9 * one, 24 * one, 2048 * one, 2048 * one, 0 * one)
    >>> round(float(flops[0] * 1e4 / 312e12), 6)
    0.288717
    """
    return np.asarray((6 * parameters + 12 * layers * hidden * length) * (1 + recompute / 3))


def scaling_overhead(constants: Array, inputs: Inputs) -> tuple[Array, Array]:
    """Return how much longer training on many devices takes than computing alone: a factor on computing, and a summand.

    A collective waits for the slowest of N devices, 1 + σ√(2 ln N) times as long as a typical one (Gumbel's extreme of
    normal draws). Gradients, and weights where they are sharded, go round a ring within nodes and one between them,
    mostly hidden: a fraction is exposed. A forward or backward over w tokens works at a saturating rate r∞·w/(w + w½).

    Args:
        constants: σ, bytes a second between and within nodes, exposed fraction, and w½ in tokens (``ANCHORED_LAW``).
        inputs: arrays (n,) over jobs: ``devices``, ``per_node``, ``split`` (devices of a replica), ``bytes_per_s`` of a
            device's link between nodes (NaN if not stated), ``parameters``, ``sharded`` (1 or 0), ``passes``
            (micro-batches in a step), ``call`` (tokens of a micro-batch) and ``global_batch`` (samples).

    Returns:
        The factor by which computing takes longer, and the exposed synchronisation in device-seconds a sample; both
        (n,).
    """
    sigma, between, within, exposed, half = constants
    devices, per_node = inputs["devices"], inputs["per_node"]
    split = inputs["split"]
    nodes = np.maximum(1.0, devices / per_node)
    each = np.minimum(devices, per_node)
    wire = np.where(np.isnan(inputs["bytes_per_s"]), between, inputs["bytes_per_s"])
    gradient = 4 * inputs["parameters"] / split * np.where(inputs["sharded"] > 0, 1.5 * inputs["passes"], 1.0)
    sync = gradient * ((each - 1) / each / within + (nodes - 1) / nodes / wire)
    sync = np.where(devices > split, exposed * sync, 0.0)
    slowest = 1 + sigma * np.sqrt(2 * np.log(np.maximum(devices, 1.0)))
    return np.asarray(slowest * (1 + half / inputs["call"])), np.asarray(sync * devices / inputs["global_batch"])


def _overhead_seconds(constants: Array, inputs: Inputs) -> Array:
    """Device-seconds a sample of a job from an anchor of the same series."""
    there = {name[2:]: column for name, column in inputs.items() if name.startswith("a_")}
    factor, sync = scaling_overhead(constants, inputs)
    factor_there, sync_there = scaling_overhead(constants, there)
    measured = there["seconds"]
    compute = np.maximum(measured - sync_there, 0.5 * measured) / factor_there
    return np.asarray(compute * inputs["flops"] / there["flops"] * factor + sync)


def _overhead_centre(inputs: Inputs, seconds: Array) -> Array:
    del inputs, seconds
    return np.array([0.02, 5e9, 3e10, 0.05, 100.0])


ANCHORED_LAW = ScalingLaw(
    "one measured row, scaled by stragglers and rings",
    ("straggler_sigma", "node_bytes_per_s", "local_bytes_per_s", "exposed", "half_rate_tokens"),
    (0.7, 1.0, 0.7, 1.0, 1.0),
    _overhead_centre,
    _overhead_seconds,
)


def samples_to_target(batch: Array, least: Array | float, critical: Array | float) -> Array:
    """Return the samples that training needs to a target at a batch size, E(B) = E_min(1 + B/B_crit), by element.

    Args:
        batch: B, samples in a global batch.
        least: E_min, samples to the target at the smallest batches.
        critical: B_crit, samples: the batch at which the data to the target are twice E_min.

    Source: McCandlish, Kaplan, Amodei 2018, arXiv 1812.06162, eq. 2.12, where S = E/B.

    >>> samples_to_target(np.array([16.0, 64.0, 256.0]), 64000, 64)
    array([ 80000., 128000., 320000.])
    """
    return np.asarray(least * (1 + batch / critical))


def _language_loss(constants: Array, inputs: Inputs) -> Array:
    floor, a, b, alpha, beta = constants
    data = inputs["flop"] / (6 * inputs["parameters"])
    return np.asarray(floor + a / (inputs["parameters"] / 1e9) ** alpha + b / (data / 1e10) ** beta)


def _loss_centre(inputs: Inputs, seconds: Array) -> Array:
    del inputs
    return np.array([0.8 * float(seconds.min()), 0.3, 0.5, 0.35, 0.35])


LOSS_LAW = ScalingLaw(
    "loss over parameters and data",
    ("irreducible", "a_at_1e9_parameters", "b_at_1e10_tokens", "alpha", "beta"),
    (0.5, 1.5, 1.5, 0.5, 0.5),
    _loss_centre,
    _language_loss,
)
"""L = E + A/N^α + B/D^β with D = C/6N (Hoffmann et al. 2022, arXiv 2203.15556, eq. 2), N and D in units of their
middle."""
