"""Models of transformers, from configurations, over stages: equal to one device. Skipped without the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds

pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3}


def build(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    made: Any = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=40, n_positions=16, n_embd=24, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=1)
        ),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(vocab_size=40, num_attention_heads=4, num_key_value_heads=2, **SIZES)
        ),
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(vocab_size=40, num_attention_heads=2, max_position_embeddings=16, **SIZES)
        ),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(num_attention_heads=2, image_size=8, patch_size=4, num_labels=5, **SIZES)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=40, d_model=24, d_kv=12, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        ),
    }[name]()
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key in ("attn_dropout", "dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    return made.double()  # type: ignore[no-any-return]


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return torch.randn(12, 3, 8, 8, generator=generator), torch.randint(0, 5, (12,), generator=generator)
    words = torch.randint(1, 40, (12, 10), generator=generator)
    return words, words.clone()


def train(name: str, strategy: str) -> Any:
    inputs = "pixel_values" if name == "vit" else "input_ids"
    run = tutti.prepare(
        build(name),
        "sgd:lr=0.1",
        data(name),
        lambda model, batch: model(**{inputs: batch[0]}, labels=batch[1]).loss,
        strategy=strategy, workers=1, batch_size=4, micro_batch=2, precision="fp64",
    )  # fmt: skip
    losses = [run.step(batch) for batch in run.epoch(0)]
    return losses, {key: value.numpy().copy() for key, value in run.state().items()}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_stages_equal_one_device(name: str) -> None:
    losses, want = worlds.alone(train, name=name, strategy="single")
    for devices, strategy in ((2, "pipeline"), (3, "pipeline"), (2, "model_parallel")):
        for got, state in worlds.run(devices, train, name=name, strategy=strategy):
            assert got == pytest.approx(losses, rel=1e-10)
            assert state.keys() == want.keys()
            assert max(float(abs(state[key] - want[key]).max()) for key in want) <= 1e-10
