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
    """A formula that predicts a measured quantity, mostly seconds, from inputs such as ranks and bytes.

    Its constants are positive and fitted to measurements (``law_fit.fit_law``).

    Attributes:
        name: name of the law, shown in results.
        constants: names of the constants, in the order of the vector of constants.
        spread: standard deviation of the prior of each constant's natural logarithm.
        centre: function of the inputs and seconds of the fitted measurements that returns the prior medians of the
            constants, (constants,).
        seconds: the formula: function of constants (constants,) and inputs, arrays (n,) by name, that returns seconds,
            or the other quantity, (n,).
    """

    name: str
    constants: tuple[str, ...]
    spread: tuple[float, ...]
    centre: Callable[[Inputs, Array], Array]
    seconds: Callable[[Array, Inputs], Array]


def ring_allreduce_law(ranks: Array, size: Array, latency: Array | float, rate: Array | float) -> Array:
    """Return the seconds of a ring all-reduce: 2(N−1)α + 2(N−1)/N · n/β, element by element.

    Arguments are arrays of one shape or scalars; the result is an array of that shape.

    Args:
        ranks: number of ranks N.
        size: n, bytes of the vector.
        latency: α, seconds of latency of a message.
        rate: β, bytes/s.

    Source: Patarasuk & Yuan 2009; Thakur et al. 2005.

    >>> round(float(ring_allreduce_law(np.array(8.0), np.array(1e8), 2e-5, 1e10)), 5)
    0.01778
    """
    return np.asarray(2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * size / rate)


def _allreduce_seconds(constants: Array, inputs: Inputs) -> Array:
    """A start, one pass over the message, hops, and a ring of which the slowest link counts.

    Within nodes of r = N/K ranks the hops are a chain's, between K nodes those of a binary tree, there and back:
    c + n/β_copy + 2(r−1)α + 2·log₂K·α_n + 2(N−1)/N · n/β. In a ring of one node β is that of its links; over nodes it
    is at most that of the adapters, one a rank. Source: Jeaugey 2019 (double binary trees of NCCL 2.4).
    """
    latency, start, rate, copy, node_latency, wire = constants
    ranks, nodes = inputs["ranks"], inputs.get("nodes", np.ones_like(inputs["ranks"]))
    each = ranks / nodes
    slowest = np.where(nodes > 1, np.minimum(rate, wire * each), rate)
    ring = ring_allreduce_law(ranks, inputs["bytes"], 0.0, slowest)
    hops = 2 * (each - 1) * latency + 2 * np.log2(nodes) * node_latency
    return np.asarray(start + inputs["bytes"] / copy + hops + ring)


_NODE_HOP = 1e-5
"""Seconds of a hop between nodes, there and back with the accelerator's part: a guess of its order."""


_SHOWS_RATE = 2.0**16
"""Bytes of a message whose seconds say something of a link's rate; shorter ones take its latency (a guess)."""


def _allreduce_centre(inputs: Inputs, seconds: Array) -> Array:
    rate = float(np.median(inputs["bytes"] / seconds))
    if "local" in inputs and inputs["bytes"].max() < _SHOWS_RATE:
        rate = float(np.median(inputs["local"]))
    wire = float(np.median(inputs["wire"])) if "wire" in inputs else rate
    return np.array([1e-6, min(2e-5, float(seconds.min())), 1.5 * rate, 4 * rate, _NODE_HOP, wire])


ALLREDUCE_LAW = ScalingLaw(
    "ring all-reduce with a start and a copy",
    ("latency_s", "start_s", "link_bytes_per_s", "copy_bytes_per_s", "node_latency_s", "node_bytes_per_s"),
    (1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
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


_GRADIENTS = 3.75e9
"""Bytes of gradients that go round the nodes' ring for each second of the shortest step: a guess, near the median over
published workloads, on the fast networks of large accelerators as on the slow ones of small accelerators."""


def _data_parallel_centre(inputs: Inputs, seconds: Array) -> Array:
    """The ring within a node takes as long as the shortest step, that over nodes its bytes over the usual network."""
    least = float(seconds.min())
    batch = max(float(inputs["local_batch"].max()), 1.0)
    wire = float(np.median(inputs["wire"])) if "wire" in inputs else _GRADIENTS
    return np.array([least, least / batch, 2e-4, least, 2e-4, _GRADIENTS / wire * least, 1.0, 2.4])


DATA_PARALLEL_LAW = ScalingLaw(
    "rings within and between nodes",
    ("fixed_s", "sample_s", "local_hop_s", "local_ring_s", "node_hop_s", "node_ring_s", "shared_path", "overlap"),
    (3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.7),
    _data_parallel_centre,
    _data_parallel_seconds,
)

_VOCABULARY = 51200.0
"""Rows of the vocabulary where a table states none (GPT-2's 50,257, rounded up as Megatron-LM does): a guess."""


_RANKS_OF_A_NODE = 8.0
"""Ranks of a node where a table does not say it: those of the usual server."""


def _gpt_grid_seconds(constants: Array, inputs: Inputs) -> Array:
    """One iteration of a GPT split over tensor, data and pipeline ranks.

    A layer takes the larger (as a 4-norm) of its kernels and of launching them. Kernels: 6·(12h² + 2hs)·tokens FLOP
    over the tensor ranks at a rate, and activation bytes sbh(10 + 24/t) + 5as²b/t words (Korthikanti et al. 2022,
    arXiv 2205.05198, eq. 2) at a bandwidth; tensor ranks all-reduce 4 times a layer (Shoeybi et al. 2019,
    arXiv 1909.08053). The pipeline takes m + p − 1 slots (Narayanan et al. 2021, arXiv 2104.04473); then gradients are
    all-reduced and the optimizer passes over its words. Tensor ranks are neighbours, then data ranks: a ring over more
    ranks than a node has waits for the latency of nodes and for the adapters of its ranks in one node.
    """
    rate, memory, launch, latency, link, grad_latency, grad_link, head, words, node_latency, wire = constants
    tensor, data, pipe = inputs["tensor"], inputs["data"], inputs["pipeline"]
    micro, hidden, length = inputs["micro_batch"], inputs["hidden"], inputs["seq_len"]
    tokens = micro * length
    flops = tokens * (72 * hidden**2 + 12 * hidden * length) / tensor
    moved = 2 * tokens * (hidden * (10 + 24 / tensor) + 5 * inputs["heads"] * length / tensor)
    layer = ((flops / rate + moved / memory) ** 4 + launch**4) ** 0.25
    per_node = inputs.get("per_node", np.full_like(hidden, _RANKS_OF_A_NODE))
    far = tensor > per_node
    slowest = np.where(far, np.minimum(link, wire * per_node), link)
    layer = layer + 4 * ring_allreduce_law(tensor, 2 * tokens * hidden, latency, slowest)
    layer = layer + 4 * np.where(far, 2 * np.maximum(tensor / per_node - 1, 0.0) * node_latency, 0.0)
    stage = layer * inputs["layers"] / pipe
    vocabulary = inputs.get("vocabulary", np.full_like(hidden, _VOCABULARY))
    logits = 6 * tokens * hidden * vocabulary / tensor / rate + 16 * tokens * vocabulary / tensor / memory
    slots = inputs["global_batch"] / (micro * data)
    parameters = (12 * hidden**2 * inputs["layers"] / pipe + vocabulary * hidden) / tensor
    each = np.clip(per_node / tensor, 1.0, data)
    slowest = np.where(tensor * data > per_node, np.minimum(grad_link, wire * each), grad_link)
    gradients = ring_allreduce_law(data, 4 * parameters, grad_latency, slowest)
    return np.asarray(slots * (stage + head * logits) + (pipe - 1) * stage + gradients + 32 * parameters / words)


def _gpt_grid_centre(inputs: Inputs, seconds: Array) -> Array:
    del inputs, seconds
    return np.array([2e14, 1.5e12, 1e-3, 1e-5, 2e11, 1e-4, 2e11, 1.0, 1.5e12, 1e-4, 2.5e10])


GPT_GRID_LAW = ScalingLaw(
    "GPT over tensor, data and pipeline ranks",
    (
        *("flop_per_s", "memory_bytes_per_s", "layer_launch_s", "tensor_latency_s", "tensor_bytes_per_s"),
        *("gradient_latency_s", "gradient_bytes_per_s", "head_factor", "optimizer_bytes_per_s"),
        *("node_latency_s", "node_bytes_per_s"),
    ),
    (2.0,) * 11,
    _gpt_grid_centre,
    _gpt_grid_seconds,
)


def transformer_flops_per_token(
    parameters: Array, layers: Array, hidden: Array, length: Array, recompute: Array
) -> Array:
    """Return the hardware FLOP of training one token: 6N + 12·L·h·s, and a third more with full recomputation.

    All arguments are arrays of one shape, which the result has too.

    Args:
        parameters: N, number of parameters of the model.
        layers: L, number of layers.
        hidden: h, number of attention heads times the width of one.
        length: s, tokens of a sequence.
        recompute: 1 where activations are recomputed in full, 0 where they are kept.

    Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B), no discount for a causal mask.

    >>> one = np.ones(1)
    >>> flops = transformer_flops_per_token(1.3e9 * one, 24 * one, 2048 * one, 2048 * one, 0 * one)
    >>> round(float(flops[0] * 1e4 / 312e12), 6)
    0.288717
    """
    return np.asarray((6 * parameters + 12 * layers * hidden * length) * (1 + recompute / 3))


_WIDTH = 2048.0
"""Hidden size at which half a rate is that of w½ tokens, and that of models whose hidden size is not stated."""


def scaling_overhead(constants: Array, inputs: Inputs) -> tuple[Array, Array]:
    """Predict how much longer training on many devices takes than computing alone, as a factor and a summand.

    The factor is (1 + σ√(2 ln N)) · (1 + w½/w): a collective waits for the slowest of N devices, 1 + σ√(2 ln N) times
    as long as a typical one (Gumbel's extreme of normal draws), and a forward or backward works at a saturating rate
    r∞·w/(w + w½). The work w is the size of a matrix product's result on a tensor rank, counted in tokens of a model
    of hidden size 2,048 on one rank: w = tokens · hidden / 2048 / tensor.

    The summand has four costs. Gradients go round a ring at the rate of its slowest link, within a node or a device's
    part of the node's network; a fitted fraction of this time is exposed, and the rest overlaps with computing. Sharded
    weights are gathered twice (in some frameworks once more for recomputation) and their gradients scattered once,
    layer by layer, in each micro-batch, or with a pipeline in each step; each of these collectives waits for N − 1
    hops. Tensor ranks all-reduce activations 4 times a layer, 6 times with recomputation (Shoeybi et al. 2019, arXiv
    1909.08053, §3). Each step has a fixed cost, such as the optimizer's.

    Args:
        constants: σ, exposed fractions of the gradients' ring and of gathering and scattering, w½ in tokens, seconds of
            a hop, and fixed seconds of a step (``ANCHORED_LAW``).
        inputs: arrays (n,) over jobs: ``devices``, ``per_node``, ``split`` (devices of a replica), ``tensor`` (tensor
            ranks of these), ``wire`` and ``local`` (bytes/s of a device between and within nodes), ``parameters``,
            ``word`` (bytes of an element that is sent), ``sharded`` and ``recompute`` (1 or 0), ``gathers`` (passes
            over the weights and gradients in a micro-batch), ``layers``, ``hidden``, ``passes`` (micro-batches in a
            step), ``call`` (tokens of a micro-batch), ``tokens`` (of a sample) and ``global_batch`` (samples).

    Returns:
        The factor by which computing takes longer, and the exposed communication and fixed costs in device-seconds a
        sample; both (n,).
    """
    sigma, exposed, gathering, half, hop, fixed = constants
    devices, split, layers = inputs["devices"], inputs["split"], inputs["layers"]
    nodes = np.maximum(1.0, devices / inputs["per_node"])
    each = np.minimum(devices, inputs["per_node"])
    slowest_link = np.maximum((each - 1) / each / inputs["local"], (nodes - 1) / nodes / (inputs["wire"] * each))
    once = inputs["word"] * inputs["parameters"] / split * slowest_link
    hops = np.maximum(devices / split - 1, 0.0) * hop
    gathers = inputs["gathers"] * np.where(split > inputs["tensor"], 1.0, inputs["passes"])
    rows = gathering * gathers * (once + layers * hops)
    sync = np.where(devices > split, np.where(inputs["sharded"] > 0, rows, 2 * exposed * once), 0.0)
    tensor = inputs["tensor"]
    link = np.where(tensor > inputs["per_node"], inputs["wire"], inputs["local"])
    activations = layers * inputs["tokens"] * inputs["hidden"] * inputs["word"]
    reduced = (4 + 2 * inputs["recompute"]) * 2 * (tensor - 1) * activations / link
    slowest = 1 + sigma * np.sqrt(2 * np.log(np.maximum(devices, 1.0)))
    summand = (sync + fixed) * devices / inputs["global_batch"] + reduced
    width = np.where(inputs["hidden"] > 0, inputs["hidden"], _WIDTH)
    filled = half * (tensor * _WIDTH / width) / inputs["call"]
    return np.asarray(slowest * (1 + filled)), np.asarray(summand)


def _overhead_seconds(constants: Array, inputs: Inputs) -> Array:
    """Device-seconds a sample of a job from an anchor of the same series.

    At least half of the anchor's time is computing: where the summand says less, it counts as that much smaller in both
    jobs.
    """
    there = {name[2:]: column for name, column in inputs.items() if name.startswith("a_")}
    factor, summand = scaling_overhead(constants, inputs)
    factor_there, summand_there = scaling_overhead(constants, there)
    measured = there["seconds"]
    kept = np.minimum(1.0, 0.5 * measured / np.maximum(summand_there, 1e-300))
    compute = (measured - kept * summand_there) / factor_there
    return np.asarray(compute * inputs["flops"] / there["flops"] * factor + kept * summand)


def _overhead_centre(inputs: Inputs, seconds: Array) -> Array:
    """Nothing of rings is hidden, a hop takes 2.5 µs, and a step 10 ms beside its passes: guesses of their order."""
    del inputs, seconds
    return np.array([0.012, 1.0, 1.0, 200.0, 2.5e-6, 0.01])


ANCHORED_LAW = ScalingLaw(
    "one measured row, scaled by stragglers, rings and fixed costs",
    ("straggler_sigma", "exposed_ring", "exposed_gathering", "half_rate_tokens", "hop_s", "step_s"),
    (0.7, 1.0, 0.7, 1.0, 0.7, 1.0),
    _overhead_centre,
    _overhead_seconds,
)


BETWEEN_SETS = (0.0, 0.5, 1.0, 0.0, 0.0, 0.0)
"""Standard deviations by which the logarithms of the constants of ``ANCHORED_LAW`` differ between published sets, whose
frameworks overlap and route their messages in other ways: a guess. A ring that uses one of eight adapters of a node
takes eight times as long, two deviations."""


def samples_to_target(batch: Array, least: Array | float, critical: Array | float) -> Array:
    """Return the samples that training needs to a target at a batch size, E(B) = E_min(1 + B/B_crit), by element.

    The result is an array of the shape of ``batch``.

    Args:
        batch: B, samples in a global batch.
        least: E_min, samples to the target at the smallest batches.
        critical: B_crit, samples: the batch at which the data to the target are twice E_min.

    Source: McCandlish, Kaplan, Amodei 2018, arXiv 1812.06162, eqs. 2.11 and 2.12, where S = E/B steps.

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
