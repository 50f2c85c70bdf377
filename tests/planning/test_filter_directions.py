"""Filter-normalised directions: lengths of filters, fixed tensors, draws by name."""

from __future__ import annotations

import torch

from tutti.planning.filter_directions import filter_direction


def test_each_filter_has_the_length_of_the_models_filter_and_vectors_do_not_move() -> None:
    torch.manual_seed(1)
    parameters = {"conv": torch.randn(3, 2, 3, 3), "bias": torch.randn(3), "fc": torch.randn(4, 5)}
    drawn = filter_direction(parameters, 0)
    conv, bias, fc = drawn.split([54, 3, 20])
    torch.testing.assert_close(conv.view(3, -1).norm(dim=1), parameters["conv"].view(3, -1).norm(dim=1))
    torch.testing.assert_close(fc.view(4, -1).norm(dim=1), parameters["fc"].norm(dim=1))
    assert not bias.any()


def test_draws_depend_on_seed_and_name_alone() -> None:
    weight = torch.ones(2, 3)
    both = filter_direction({"a": weight, "b": weight}, 5)
    assert torch.equal(filter_direction({"b": weight}, 5), both[6:])
    assert not torch.equal(both[:6], both[6:])
    assert not torch.equal(filter_direction({"b": weight}, 6), both[6:])
