"""Buckets: every parameter once, one dtype each, none too large; views with the strides of what they stand for."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from tutti.parallel.ddp.buckets import METRICS, Bucket, Tail, plan_buckets
from tutti.types.step_records import StepContext

CPU = torch.device("cpu")


def test_plans_hold_every_parameter_once_in_reverse_order() -> None:
    generator = random.Random(0)
    for _ in range(300):
        sizes = [(generator.choice([1, 4, 30, 200]), generator.choice("ffg")) for _ in range(generator.randrange(12))]
        largest, first = generator.choice([20, 64, 1000]), generator.choice([8, 20])
        buckets = plan_buckets(sizes, largest, first)
        assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))[::-1]
        for number, bucket in enumerate(buckets):
            assert bucket and len({sizes[i][1] for i in bucket}) == 1
            limit = first if number == 0 else largest
            assert sum(sizes[i][0] for i in bucket) <= limit or len(bucket) == 1
        for number, (one, two) in enumerate(itertools.pairwise(buckets)):
            limit = first if number == 0 else largest
            full = sum(sizes[i][0] for i in one) + sizes[two[0]][0] > limit
            assert full or sizes[one[0]][1] != sizes[two[0]][1], "no bucket ends before it must"


def test_views_have_the_strides_of_their_parameters() -> None:
    channels_last = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    plain, transposed = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 6).t())
    sparse = nn.Parameter(torch.randn(4, 6)[:, ::2])
    parameters = [channels_last, plain, transposed, sparse]
    bucket = Bucket(parameters, torch.float32, CPU, tail=2)
    assert bucket.flat.numel() == 4 * 27 + 5 + 12 + 12 + 2
    want = []
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
        want.append(parameter.grad.clone())
    assert bucket.pack() == [True] * 4
    bucket.expose([True] * 4)
    for parameter, gradient in zip(parameters, want, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
        assert parameter is sparse or parameter.grad.stride() == parameter.stride()
        assert parameter.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
    assert torch.equal(bucket.gradients.sort().values, torch.cat([g.reshape(-1) for g in want]).sort().values)
    assert bucket.tail.tolist() == [0.0, 0.0]


def test_a_missing_gradient_travels_as_zeros_and_comes_back_as_none() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    bucket = Bucket(parameters, torch.float32, CPU, tail=0)
    bucket.flat.fill_(7)
    parameters[1].grad = torch.tensor([1.0, 2.0])
    assert bucket.pack() == [False, True, False]
    assert bucket.flat.tolist() == [0, 0, 1, 2, 0, 0]
    bucket.expose([True, True, False])
    assert parameters[0].grad is not None and parameters[0].grad.tolist() == [0, 0]
    assert parameters[2].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rides_behind_the_gradients(dtype: torch.dtype) -> None:
    tail, step_context = Tail(3, layout_key=12345), StepContext(local_step=1000, samples=64, stop=False)
    numbers = torch.zeros(tail.size, dtype=dtype)
    rows = [
        (torch.tensor([8.0, 4.0, 3.0]), [True, False, False], False),
        (torch.tensor([2.0, 6.0, 1.0]), [True, False, True], True),
        (None, [False] * 3, False),
    ]
    for lanes, used, stop in rows:
        own = torch.full_like(numbers, 99)
        tail.fill(own, StepContext(1000, 64, stop=stop), lanes, used)
        numbers += own
    assert tail.same(numbers.tolist(), step_context, contributions=3)
    sums = tail.read(numbers.tolist())
    assert (sums.loss, sums.samples, sums.stop, sums.used) == (10.0, 10.0, True, [True, False, True])
    assert sums.metrics == [4.0] + [0.0] * (METRICS - 1)


def test_contributions_to_different_steps_are_noticed() -> None:
    """Any one odd contribution among many, also where the sums of the digests happen to agree."""
    layouts = {key: Tail(0, key) for key in (1, 2)}
    right = StepContext(7, 64)
    odd = [
        (1, StepContext(8, 64)),
        (1, StepContext(6, 64)),
        (1, StepContext(7, 63)),
        (2, right),
        (1, StepContext(107, 64)),
    ]
    for ranks in (2, 3, 8, 64, 256):
        for key, step_context in odd:
            numbers = torch.zeros(layouts[1].size)
            for rank in range(ranks):
                own = torch.zeros_like(numbers)
                chosen, at = (layouts[key], step_context) if rank == ranks // 2 else (layouts[1], right)
                chosen.fill(own, at, None, [])
                numbers += own
            seen = [
                layouts[1].same(numbers.tolist(), right, ranks),
                layouts[key].same(numbers.tolist(), step_context, ranks),
            ]
            assert seen == [False, False], (ranks, key, step_context)
    balanced = torch.zeros(layouts[1].size)
    for clock in (6, 8, 7):
        own = torch.zeros_like(balanced)
        layouts[1].fill(own, StepContext(clock, 64), None, [])
        balanced += own
    assert not layouts[1].same(balanced.tolist(), right, 3), "6 + 8 + 7 = 3 · 7, but the squares differ"


def test_views_stay_views_where_a_module_moves_its_gradients() -> None:
    """``Module.to`` puts other memory under the ``.grad`` that the bucket has given out."""
    layer = nn.Linear(3, 2)
    bucket = Bucket(list(layer.parameters()), torch.float32, CPU, 1)
    bucket.expose([True, True])
    layer.double().float()
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert bucket.pack() == [True, True]
    bucket.gradients.mul_(5)
    bucket.expose([True, True])
    assert [p.grad.unique().tolist() for p in layer.parameters() if p.grad is not None] == [[5.0], [5.0]]
