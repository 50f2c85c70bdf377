"""What is gathered as one, found from a model's structure."""

from __future__ import annotations

import pytest
from torch import nn

from tutti.config.task_config import GptConfig
from tutti.errors import UsageError
from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_modules
from tutti.tasks.gpt import gpt


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Encoder(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(2, 3, bias=False)


def names(model: nn.Module, *choice: str) -> list[str]:
    known = {module: name for name, module in model.named_modules()}
    return sorted(known[unit] for unit in wrapped_modules(model, choice or ("auto",)))


def test_blocks_of_one_class() -> None:
    assert names(Encoder()) == ["layers.0", "layers.1", "layers.2"]


def test_a_sequence_that_is_the_model() -> None:
    assert names(nn.Sequential(nn.Embedding(2, 2), Block(), Block(), nn.Linear(2, 2))) == ["1", "2"]


def test_stacks_of_stacks_give_the_inner_blocks() -> None:
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block()))
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1", "1.2"]


def test_without_blocks_large_parts() -> None:
    assert names(nn.Sequential(nn.Linear(8, 8), nn.Linear(600, 600), nn.Linear(600, 600))) == ["1", "2"]
    assert names(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) == []


def test_what_shares_parameters_with_others_is_left_out() -> None:
    model = Encoder()
    model.layers[1].inner[0].weight = model.layers[2].inner[0].weight
    assert names(model) == ["layers.0"]
    model.head.weight = model.embed.weight
    assert names(model, "Linear", "Embedding") == ["layers.0.inner.0", "layers.0.inner.1"] + [
        f"layers.{i}.inner.1" for i in (1, 2)
    ]


def test_inner_units_come_first() -> None:
    model = Encoder(2)
    found = wrapped_modules(model, ("Block", "Linear"))
    places = {id(unit): place for place, unit in enumerate(found)}
    for block in model.layers:
        assert all(places[id(layer)] < places[id(block)] for layer in block.inner)


@pytest.mark.parametrize(("choice", "words"), [("Blok", "did you mean 'Block'"), ("layers", "is never called")])
def test_what_cannot_be_a_unit_is_refused(choice: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrapped_modules(Encoder(), (choice,))
    assert words in str(caught.value).replace("Did", "did")


def test_the_blocks_of_a_gpt() -> None:
    found = wrapped_modules(gpt(GptConfig(layers=3, heads=2, width=8, block=4), 5))
    assert len(found) == 3 and len({type(unit) for unit in found}) == 1
