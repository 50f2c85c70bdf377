"""Keys of random draws: the same as the vectorised hash, and never changed by accident."""

from __future__ import annotations

import random

from tutti.comm.random_keys import mix, name_key
from tutti.data.keyed_random import hash64


def test_is_the_vectorised_hash_of_scalars() -> None:
    generator = random.Random(0)
    edge = [0, 1, -1, 2**63, 2**64 - 1, -(2**63)]
    for length in range(5):
        for _ in range(50):
            keys = [generator.choice([generator.randrange(-(2**63), 2**64), *edge]) for _ in range(length)]
            assert mix(*keys) == int(hash64(*keys)), keys


def test_frozen_values() -> None:
    """A change here gives every old run other dropout masks."""
    assert (mix(0), mix(1, 2, 3), mix(-1)) == (0xE220A8397B1DCDAF, 0xD0734750FDE362B3, 0xE4D971771B652C20)
    assert name_key("layer.weight") == 0x1C87E469


def test_order_and_number_matter() -> None:
    assert len({mix(*k) for k in [(), (0,), (0, 0), (1, 2), (2, 1), (1, 2, 0)]}) == 6
    assert len({name_key(name) for name in ("", "0", "1", "0.weight", "weight.0")}) == 5
