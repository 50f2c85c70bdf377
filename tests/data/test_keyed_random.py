"""The hash behind sample order and augmentation: known answers, broadcasting, and how random it looks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tutti.data.keyed_random import hash64, uniform


def test_known_answers_of_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    state, outputs = 0, []
    for _ in range(3):
        outputs.append(int(hash64(state)))
        state += golden
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_frozen_values() -> None:
    """Every run's sample order depends on these: a change here makes old checkpoints resume with other samples."""
    assert [hex(v) for v in hash64(1, 2, np.arange(3))] == FROZEN
    assert hex(int(hash64(-1))) == hex(int(hash64(2**64 - 1)))


FROZEN = ["0xe68e6fc01df08360", "0xb815246f417cade2", "0xe930af93af0daf48"]


def test_arrays_and_scalars_agree_and_broadcast() -> None:
    rows, columns = np.arange(4), np.arange(5, dtype=np.uint8)
    table = hash64(9, rows[:, None], columns)
    assert table.shape == (4, 5) and table.dtype == np.uint64
    assert all(table[i, j] == hash64(9, i, j) for i in range(4) for j in range(5))
    assert hash64(np.array([-3])) == hash64(-3)
    assert hash64(np.int32(5)) == hash64(5)


def test_order_and_number_of_keys_matter() -> None:
    assert len({int(hash64(*keys)) for keys in [(1, 2), (2, 1), (1,), (1, 2, 0), (0, 1, 2), ()]}) == 6


def test_inputs_are_left_alone_and_nothing_warns() -> None:
    keys = np.arange(8, dtype=np.uint64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hash64(keys, 3)
        hash64(2**63, 2**64 + 1)
    assert (keys == np.arange(8)).all()


@pytest.mark.parametrize("key", [1.0, "1", np.zeros(2)])
def test_only_integers(key: object) -> None:
    with pytest.raises(TypeError):
        hash64(key)  # type: ignore[arg-type]


def test_looks_random_over_consecutive_counters() -> None:
    bits = hash64(0, 0, np.arange(1 << 16))
    assert np.unique(bits).size == bits.size
    for bit in range(64):
        ones = int(((bits >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 2**15) < 5 * 2**7, f"bit {bit} is set {ones} times in {bits.size}"
    draws = uniform(bits)
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts = np.histogram(draws, bins=64, range=(0, 1))[0]
    chi_square = float(((counts - 1024) ** 2 / 1024).sum())
    assert chi_square < 63 + 5 * np.sqrt(2 * 63)
    neighbours = np.corrcoef(draws[:-1], draws[1:])[0, 1]
    other_epoch = np.corrcoef(draws, uniform(hash64(0, 1, np.arange(1 << 16))))[0, 1]
    assert abs(neighbours) < 5 / 256 and abs(other_epoch) < 5 / 256


def test_uniform_ends() -> None:
    top = uniform(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert top[0] == 0.0 and top[1] == 1 - 2.0**-53
