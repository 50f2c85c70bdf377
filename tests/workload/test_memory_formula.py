"""Memory of a device: the worked numbers of the paper, and plans that fit."""

from __future__ import annotations

import pytest

from tutti.workload.memory_formula import DeviceSplit, Memory, State, smallest_split, state_memory

MIXED = State(2, 2, 12)
"""16-bit weights and gradients, Adam on 32-bit copies: K = 12."""
SINGLE = State(4, 4, 8)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_zero_on_64_devices(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2019, arXiv 1910.02054, Fig. 1: 7.5 billion parameters."""
    assert state_memory(7.5e9, MIXED, DeviceSplit(shards=64, zero=zero)).state == gigabytes * 1e9


def test_stages_and_tensor_ranks_divide_everything() -> None:
    one, eight = state_memory(8e6, SINGLE), state_memory(8e6, SINGLE, DeviceSplit(stages=4, tensor=2))
    assert (eight.parameters, eight.gradients, eight.optimizer) == (4e6, 4e6, 8e6)
    assert one.state == 8 * eight.state == 128e6
    assert state_memory(8e6, SINGLE, DeviceSplit(shards=2, zero=3, stages=4)).state == 16e6


def test_a_total_is_everything() -> None:
    assert Memory(1, 2, 3, messages=4, average=5, activations=6, buffers=7).total == 28


def test_bert_large_on_16_gigabytes() -> None:
    """340 million parameters with Adam take 5.4 GB of state; 12 GB of activations are what does not fit."""
    assert state_memory(340e6, SINGLE).state == pytest.approx(5.44e9)
    assert smallest_split(340e6, 16e9, SINGLE, 8) == DeviceSplit()
    assert smallest_split(340e6, 16e9, SINGLE, 8, rest=12e9) == DeviceSplit(shards=2, zero=2)
    assert smallest_split(340e6, 16e9, SINGLE, 8, rest=16e9) is None


def test_the_nearest_plan_has_the_fewest_devices_and_shares_out_least() -> None:
    for room, split in [
        (16e9, DeviceSplit()),
        (12e9, DeviceSplit(2, 1)),
        (10e9, DeviceSplit(2, 2)),
        (8e9, DeviceSplit(2, 3)),
        (6e9, DeviceSplit(3, 3)),
    ]:
        assert smallest_split(1e9, room, SINGLE, 8) == split
        assert state_memory(1e9, SINGLE, split).state <= room
