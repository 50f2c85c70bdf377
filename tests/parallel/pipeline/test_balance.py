"""Contiguous parts as even as brute force finds them."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from tutti.parallel.pipeline.balance import balance


def test_balance_is_what_brute_force_finds() -> None:
    generator = random.Random(0)
    for _ in range(60):
        weights = [generator.choice([0, 0, 1, 3, 10, 50]) for _ in range(generator.randrange(1, 9))]
        for parts in range(1, len(weights) + 1):
            bounds = balance(weights, parts)
            assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), parts + 1)
            assert all(a < b for a, b in pairwise(bounds)), "no stage is empty"
            best = min(cost(weights, [0, *c, len(weights)]) for c in combinations(range(1, len(weights)), parts - 1))
            assert cost(weights, bounds) == best


def cost(weights: list[int], bounds: list[int]) -> tuple[int, int]:
    sums = [sum(weights[a:b]) for a, b in pairwise(bounds)]
    return max(sums), sum(s * s for s in sums)
