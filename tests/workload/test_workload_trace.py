"""The trace of a model and its loss: exact FLOP, activations, recomputation, order of gradients, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.config.task_config import GptConfig
from tutti.errors import UsageError
from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_modules
from tutti.tasks.gpt import gpt
from tutti.tasks.losses import classification
from tutti.tasks.text import next_character
from tutti.workload.flop_formulas import decoder_flop_per_token
from tutti.workload.tensor_memory import Tracker
from tutti.workload.workload_file import LOSS, REST, Affine, Workload
from tutti.workload.workload_trace import TracedModel, trace_modules, trace_workload

CONFIG = GptConfig(layers=2, width=32, heads=4, block=16, dropout=0.0)
VOCABULARY = 11


def traced(build: Callable[[], nn.Module], loss: Any, sample: Any, real: bool = False) -> Workload:
    subject = TracedModel(name="test", build=build, loss=loss, sample=sample, groups=wrapped_modules)
    return trace_workload(subject, real=real)


def text_sample() -> tuple[Tensor, Tensor]:
    return torch.zeros(1, CONFIG.block, dtype=torch.int64), torch.zeros(1, CONFIG.block, dtype=torch.int64)


@pytest.fixture(scope="module")
def decoder() -> Workload:
    return traced(lambda: gpt(CONFIG, VOCABULARY), next_character, text_sample())


def test_a_decoder_costs_what_the_formula_of_palm_says(decoder: Workload) -> None:
    model = gpt(CONFIG, VOCABULARY)
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    formula = decoder_flop_per_token(products, CONFIG.layers, CONFIG.width, CONFIG.block)
    assert decoder.tokens_per_sample == CONFIG.block
    assert decoder.model_flop(8, masked=1.0) == 8 * CONFIG.block * formula
    causal = decoder_flop_per_token(products, CONFIG.layers, CONFIG.width, CONFIG.block / 2)
    assert decoder.model_flop(8) == 8 * CONFIG.block * causal


def test_full_recomputation_does_the_blocks_forward_again(decoder: Workload) -> None:
    blocks = [group for group in decoder.groups if group.kind == "Block"]
    assert decoder.checkpointing() == ("none", "blocks", "selective")
    for block in blocks:
        again, kernel = (block.recompute[choice]["attention"].flop.at(1) for choice in ("blocks", "none"))
        assert again - kernel == block.forward["attention"].flop.at(1)
        # The last product of a block is not needed again: its result is nobody's input.
        shrink = 2 * 4 * CONFIG.width**2 * CONFIG.block
        assert block.recompute["blocks"]["matmul"].flop.at(1) == block.forward["matmul"].flop.at(1) - shrink
        kept = [block.activation_bytes[choice].per_sample for choice in ("blocks", "selective", "none")]
        assert kept[0] < kept[1] < kept[2]
    assert decoder.hardware_flop(3, "blocks") > decoder.hardware_flop(3) > decoder.model_flop(3)


def test_groups_and_gradients_are_those_of_the_model(decoder: Workload) -> None:
    model = gpt(CONFIG, VOCABULARY)
    assert [group.name for group in decoder.groups] == ["block1", "block2", REST, LOSS]
    assert decoder.parameters == sum(p.numel() for p in model.parameters())
    assert sorted(decoder.gradient_order) == sorted(dict(model.named_parameters()))
    first, second, rest, loss = (group.ready for group in decoder.groups)
    assert first is not None and second is not None and rest is not None and loss is None
    assert second < first < rest
    assert decoder.groups[0].output_bytes == Affine(0.0, 4.0 * CONFIG.block * CONFIG.width)
    assert decoder.not_affine == () and decoder.without_formula == {}


def test_one_trace_gives_the_work_of_any_groups() -> None:
    def of(*names: str) -> TracedModel:
        return TracedModel(
            name="test",
            build=lambda: gpt(CONFIG, VOCABULARY),
            loss=next_character,
            sample=text_sample(),
            groups=lambda model: [model.get_submodule(name) for name in names],
        )

    traces = trace_modules(of())
    for names in ((), ("block2", "block1"), ("block1.attention", "block1", "block2.feed_forward"), ("head",)):
        apart = trace_workload(of(*names))
        assert [group.name for group in apart.groups] == [*sorted(names), REST, LOSS]
        assert traces.workload(names) == apart


def test_backward_is_counted_at_the_module_that_made_it(decoder: Workload) -> None:
    for group in decoder.groups[:2]:
        assert group.backward["matmul"].flop.at(5) == 2 * group.forward["matmul"].flop.at(5)
    head = 2 * CONFIG.block * CONFIG.width * VOCABULARY
    assert decoder.groups[2].forward["matmul"].flop.at(1) == head
    assert decoder.groups[2].backward["matmul"].flop.at(1) == 2 * head


def test_activations_are_what_a_real_forward_keeps() -> None:
    samples = 6
    build, sample = (lambda: gpt(CONFIG, VOCABULARY)), text_sample()
    found = traced(build, next_character, sample)
    model, batch = build(), tuple(part.expand(samples, -1).contiguous() for part in sample)
    with Tracker() as tracker:
        result = next_character(model, batch)
        kept = tracker.now
    assert sum(group.activation_bytes["none"].at(samples) for group in found.groups) == kept
    assert result[1] == samples * CONFIG.block


def test_real_and_fake_tensors_give_the_same() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    sample = torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)
    fake, real = (traced(build, classification, sample, real) for real in (False, True))
    assert fake.groups == real.groups and fake.gradient_order == real.gradient_order
    assert (fake.basis, real.basis) == ("traced on fake tensors", "traced on real tensors")


def reading(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    return loss / loss.item()  # here


def test_a_loss_that_reads_values_is_refused_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"return loss / loss.item\(\)  # here") as caught:
        traced(lambda: nn.Linear(4, 2), reading, torch.zeros(1, 4))
    assert caught.value.exit_code == 2
    assert Path(__file__).name in str(caught.value) and "--real" in str(caught.value)
    found = traced(lambda: nn.Linear(4, 2), reading, torch.ones(1, 4), real=True)
    assert found.model_flop(5) == 5 * 2 * 2 * (4 * 2)


def contrastive(model: nn.Module, batch: Tensor) -> Tensor:
    codes = functional.normalize(model(batch), dim=1)
    return functional.cross_entropy(codes @ codes.T, torch.arange(len(codes)))


def test_work_that_is_no_line_in_samples_is_named() -> None:
    found = traced(lambda: nn.Linear(4, 2), contrastive, torch.ones(1, 4))
    bent = f"{LOSS} forward matmul flop: 196 at 7 samples, on the line 136"
    assert bent in found.not_affine


def test_products_without_formula_are_named() -> None:
    def inverse(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.linalg.inv(model(batch)).square().mean()

    assert "linalg_inv_ex" in traced(lambda: nn.Linear(4, 4), inverse, torch.eye(4)[None]).without_formula
