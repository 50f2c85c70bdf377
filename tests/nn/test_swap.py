"""Named tensors of a module, and others in their place for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tutti.nn.swap import buffers, other_names, parameters, swapped, to_float64, training_mode
from tutti.torch_compat import FakeTensorMode


def model() -> nn.Module:
    block = nn.Module()
    block.norm = nn.BatchNorm1d(3)
    block.a = nn.Linear(3, 3, bias=False)
    block.b = nn.Linear(3, 3, bias=False)
    block.b.weight = block.a.weight
    block.register_buffer("kept", torch.ones(2))
    block.register_buffer("scratch", torch.ones(2), persistent=False)
    block.register_buffer("nothing", None)
    return block


def test_shared_parameters_come_once_and_only_persistent_buffers_come() -> None:
    block = model()
    assert [name for name, _ in parameters([block])] == ["norm.weight", "norm.bias", "a.weight"]
    names = {slot.name for slot in buffers([block])}
    assert names == {"kept", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_values_are_there_within_the_block_and_nowhere_after_it() -> None:
    block = model()
    before = {name: t.clone() for name, t in block.state_dict().items()}
    places = {name: t.data_ptr() for name, t in block.state_dict().items()}
    values = {"a.weight": torch.full((3, 3), 5.0), "norm.running_mean": torch.full((3,), 6.0), "unknown": torch.ones(1)}
    with pytest.raises(RuntimeError, match="out"), swapped([block], values):
        assert block.b(torch.ones(1, 3)).tolist() == [[15.0] * 3]
        assert block.norm.running_mean is values["norm.running_mean"]
        raise RuntimeError("out")
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.data_ptr() == places[name]


def test_modes_come_back_as_they_were() -> None:
    block = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Identity()))
    block[1].eval()
    before = [m.training for m in block.modules()]
    with training_mode([block], training=False):
        assert not any(m.training for m in block.modules())
    with training_mode([block], training=True):
        assert all(m.training for m in block.modules())
    assert [m.training for m in block.modules()] == before == [True, True, False, False, False]


def test_other_names_are_those_of_the_plain_state() -> None:
    """A tied weight, a module that comes twice with its buffers, and one inside it."""
    inner = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), inner, nn.Linear(3, 3), inner)
    model[2].weight = model[0].weight
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    first = {name for name, _ in parameters([model])} | {slot.name for slot in buffers([model])}
    others = other_names([model])
    assert others["0.weight"] == ("2.weight",) and others["1.0.running_mean"] == ("3.0.running_mean",)
    assert others.keys() <= first
    assert first | {name for names in others.values() for name in names} == model.state_dict().keys()


def test_a_model_on_fake_tensors_becomes_float64() -> None:
    with FakeTensorMode():
        block = model()
        before = parameters([block])
        assert to_float64(block) is block
    assert parameters([block]) == before and block.b.weight is block.a.weight
    kinds = {name: tensor.dtype for name, tensor in (*block.named_parameters(), *block.named_buffers())}
    assert kinds.pop("norm.num_batches_tracked") == torch.int64
    assert set(kinds.values()) == {torch.float64} and len(kinds) == 7
