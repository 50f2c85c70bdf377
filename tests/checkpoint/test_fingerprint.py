"""The hash of a model's weights: by hand, and changed by everything that it should notice."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tutti.checkpoint.fingerprint import tensor_digest, tensor_digests, weights_sha256

TENSORS = {
    "b.weight": torch.tensor([[1.0, -2.0], [0.5, 3.0]]),
    "a.count": torch.tensor(258),
    "c": torch.tensor([1.5, -1.0], dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3),
}


def test_by_hand() -> None:
    text = b"a.count\0int64\0[]\0" + bytes.fromhex("0201000000000000")
    text += b"b.weight\0float32\0[2, 2]\0" + bytes.fromhex("0000803f 000000c0 0000003f 00004040")
    text += b"c\0bfloat16\0[2]\0" + bytes.fromhex("c03f 80bf")
    text += b"empty\0float32\0[0, 3]\0"
    assert weights_sha256(TENSORS) == hashlib.sha256(text).hexdigest()
    assert weights_sha256({}) == hashlib.sha256().hexdigest()


def test_order_memory_layout_and_gradients_do_not_matter() -> None:
    want = weights_sha256(TENSORS)
    assert weights_sha256(dict(reversed(TENSORS.items()))) == want
    assert weights_sha256({**TENSORS, "b.weight": TENSORS["b.weight"].t().contiguous().t()}) == want
    assert weights_sha256({**TENSORS, "b.weight": torch.nn.Parameter(TENSORS["b.weight"])}) == want
    images = torch.randn(2, 3, 4, 4)
    last = images.contiguous(memory_format=torch.channels_last)
    assert weights_sha256({"w": images}) == weights_sha256({"w": last})


def flipped(tensor: Tensor, byte: int, bit: int) -> Tensor:
    copy = tensor.clone()
    copy.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit
    return copy


def test_everything_else_matters() -> None:
    weight = TENSORS["b.weight"]
    others = [
        {**TENSORS, "more": torch.zeros(0)},
        {k: v for k, v in TENSORS.items() if k != "empty"},
        {("b.weights" if k == "b.weight" else k): v for k, v in TENSORS.items()},
        {**TENSORS, "b.weight": weight.t()},
        {**TENSORS, "b.weight": weight.reshape(4)},
        {**TENSORS, "b.weight": weight.reshape(1, 4)},
        {**TENSORS, "b.weight": weight.view(torch.int32)},
        {**TENSORS, "b.weight": weight.double()},
        {**TENSORS, "b.weight": TENSORS["a.count"], "a.count": weight},
    ]
    others += [{**TENSORS, "b.weight": flipped(weight, byte, bit)} for byte in range(16) for bit in (0, 7)]
    others += [{**TENSORS, "a.count": flipped(TENSORS["a.count"].reshape(1), 7, 7).reshape(())}]
    hashes = {weights_sha256(tensors) for tensors in [TENSORS, *others]}
    assert len(hashes) == 1 + len(others)


def test_zeros_of_either_sign_and_nans_are_bits() -> None:
    assert weights_sha256({"w": torch.tensor([0.0])}) != weights_sha256({"w": torch.tensor([-0.0])})
    assert weights_sha256({"w": torch.tensor([torch.nan])}) == weights_sha256({"w": torch.tensor([torch.nan])})


def peak_of_a_digest() -> tuple[bool, int]:
    device = torch.device(DEVICE, 0)
    small = torch.arange(5.0, device=device)
    torch.accelerator.reset_peak_memory_stats(device)
    digest = tensor_digest(small)
    return bool(digest.cpu() == tensor_digest(small.cpu())), torch.accelerator.max_memory_allocated(device)


@pytest.mark.timeout(600)
def test_a_small_tensor_takes_little_memory_on_an_accelerator() -> None:
    """Its blocks are 128 MiB, for large tensors alone."""
    [(equal, peak)] = worlds.run_on(DEVICE, 1, peak_of_a_digest)
    assert equal and peak < 1 << 20


def digests_of_two_devices() -> list[list[int]]:
    tensors = [
        torch.arange(9.0),
        torch.arange(9.0, device=DEVICE),
        torch.arange(9000.0, device=DEVICE),
        torch.ones(9000),
    ]
    return [tensor_digests(tensors), [int(tensor_digest(tensor)) for tensor in tensors]]


def test_tensors_may_lie_on_several_devices() -> None:
    [[together, apart]] = worlds.run_on(DEVICE, 1, digests_of_two_devices)
    assert together == apart and together[0] == together[1]
