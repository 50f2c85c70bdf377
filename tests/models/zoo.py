"""Models of other libraries, tiny and from configurations, with data for each.

No weights are downloaded. Dropout is off, so that plain PyTorch on the global batch is the reference, and all numbers
are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.models.builders import (
    CLASSES,
    FEW,
    GROUPED,
    IMAGE,
    LENGTH,
    SAMPLES,
    SIZES,
    TOKENS,
    WORDS,
    Entry,
    hf,
    timm,
)  # fmt: skip
from tests.models.current_models import CURRENT
from tests.models.further_models import FURTHER
from tests.models.recent_models import RECENT


def _adapted(base: str, data: str, config: str = "LoraConfig", **options: Any) -> Entry:
    """A model of the table with adapters of peft, which alone are trained."""

    def build() -> nn.Module:
        import peft

        return peft.get_peft_model(MODELS[base].build(), getattr(peft, config)(**options))  # type: ignore[arg-type]

    return Entry("peft", build, data, strategies=FEW)


MODELS: Mapping[str, Entry] = {
    "GPT-2": Entry(
        "transformers",
        hf(
            "GPT2LMHeadModel", "GPT2Config",
            vocab_size=WORDS, n_positions=16, n_embd=24, n_layer=3, n_head=6, use_cache=False, **TOKENS,
        ),
        "causal",
    ),
    "GPT-2, eager attention": Entry(
        "transformers",
        hf(
            "GPT2LMHeadModel", "GPT2Config", attn_implementation="eager",
            vocab_size=WORDS, n_positions=16, n_embd=24, n_layer=2, n_head=6, **TOKENS,
        ),
        "causal",
    ),
    "GPT-NeoX": Entry("transformers", hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, **TOKENS), "causal"),
    "OPT": Entry(
        "transformers",
        hf(
            "OPTForCausalLM", "OPTConfig",
            vocab_size=WORDS, hidden_size=24, ffn_dim=48, num_hidden_layers=3, num_attention_heads=6,
            max_position_embeddings=16, word_embed_proj_dim=24, **TOKENS,
        ),
        "causal",
    ),
    "Llama": Entry("transformers", hf("LlamaForCausalLM", "LlamaConfig", **GROUPED), "causal"),
    "Mistral": Entry("transformers", hf("MistralForCausalLM", "MistralConfig", **GROUPED), "causal"),
    "Qwen2": Entry("transformers", hf("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), "causal"),
    "Qwen3": Entry("transformers", hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=4, **GROUPED), "causal"),
    "Gemma": Entry("transformers", hf("GemmaForCausalLM", "GemmaConfig", head_dim=4, **GROUPED), "causal"),
    "Phi-3": Entry("transformers", hf("Phi3ForCausalLM", "Phi3Config", **GROUPED), "causal"),
    "Mixtral": Entry(
        "transformers",
        hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=3, num_experts_per_tok=2,
             experts_implementation="eager", **GROUPED),
        "causal",
    ),
    "Llama with LoRA": replace(
        _adapted("Llama", "causal", r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
        strategies=(),
    ),
    "BERT": Entry("transformers", hf("BertForMaskedLM", "BertConfig", **SIZES, **TOKENS), "masked"),
    "RoBERTa": Entry("transformers", hf("RobertaForMaskedLM", "RobertaConfig", **SIZES, **TOKENS), "masked"),
    "DistilBERT": Entry(
        "transformers",
        hf(
            "DistilBertForMaskedLM", "DistilBertConfig",
            vocab_size=WORDS, dim=24, hidden_dim=48, n_layers=3, n_heads=6, max_position_embeddings=16, **TOKENS,
        ),
        "masked",
    ),
    "T5": Entry(
        "transformers",
        hf(
            "T5ForConditionalGeneration", "T5Config",
            vocab_size=WORDS, d_model=24, d_kv=4, d_ff=48, num_layers=2, num_heads=6, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=2,
        ),
        "sequences",
    ),
    "BART": Entry(
        "transformers",
        hf(
            "BartForConditionalGeneration", "BartConfig",
            vocab_size=WORDS, d_model=24, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
            encoder_attention_heads=6, decoder_attention_heads=6, max_position_embeddings=16,
            decoder_start_token_id=2, forced_eos_token_id=None, **TOKENS,
        ),
        "sequences",
    ),
    "ViT": Entry(
        "transformers",
        hf(
            "ViTForImageClassification", "ViTConfig",
            hidden_size=24, intermediate_size=48, num_hidden_layers=3, num_attention_heads=6, image_size=8,
            patch_size=4, num_labels=CLASSES,
        ),
        "images",
    ),
    "CLIP": Entry(
        "transformers",
        hf(
            "CLIPModel", "CLIPConfig", projection_dim=12,
            text_config={**SIZES, **TOKENS, "num_hidden_layers": 2},
            vision_config={
                "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
                "image_size": 8, "patch_size": 4,
            },
        ),
        "pairs",
        by_batch=True,
    ),
    "Whisper": Entry(
        "transformers",
        hf(
            "WhisperForConditionalGeneration", "WhisperConfig",
            vocab_size=WORDS, num_mel_bins=6, d_model=24, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
            decoder_ffn_dim=48, encoder_attention_heads=6, decoder_attention_heads=6, max_source_positions=8,
            max_target_positions=16, decoder_start_token_id=1, **TOKENS,
        ),
        "sounds",
    ),
    "timm ResNet": Entry(
        "timm", timm("resnet18", channels=(8, 8, 16, 16), layers=(1, 1, 1, 1), stem_width=8), "photos", by_batch=True
    ),
    "timm ConvNeXt": Entry("timm", timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16)), "photos"),
    "timm ViT": Entry(
        "timm",
        timm("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=24, depth=3, num_heads=6),
        "images",
    ),
    "timm EfficientNet": Entry(
        "timm", timm("test_efficientnet"), "photos", by_batch=True
    ),
    **FURTHER,
    **RECENT,
    **CURRENT,
    "GPT-2 with LoRA": _adapted(
        "GPT-2", "causal", r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False
    ),
    "BERT with LoRA": _adapted("BERT", "masked", r=4, target_modules=["query", "value"], init_lora_weights=False),
    "T5 with LoRA": _adapted("T5", "sequences", r=4, target_modules=["q", "v", "wo"], init_lora_weights=False),
    "ViT with LoRA": _adapted(
        "ViT", "images", r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"],
        init_lora_weights=False,
    ),
    "Mixtral with LoRA": _adapted(
        "Mixtral", "causal", r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False
    ),
    "Qwen3 with DoRA": _adapted(
        "Qwen3", "causal", r=4, use_dora=True, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    ),
    "Llama with rank-stabilised LoRA of embeddings": _adapted(
        "Llama", "causal", r=4, use_rslora=True, target_modules=["embed_tokens", "o_proj", "lm_head"],
        init_lora_weights=False,
    ),
    "Llama with IA3": _adapted(
        "Llama", "causal", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"], init_ia3_weights=False,
    ),
    "Llama with LoHa": _adapted("Llama", "causal", "LoHaConfig", r=2, target_modules=["q_proj"], init_weights=False),
    "Llama with LoKr": _adapted("Llama", "causal", "LoKrConfig", r=2, target_modules=["up_proj"], init_weights=False),
    "Llama with VeRA": _adapted("Llama", "causal", "VeraConfig", r=4, target_modules=["q_proj", "o_proj"]),
    "Llama with OFT": _adapted("Llama", "causal", "OFTConfig", r=0, oft_block_size=4, target_modules=["q_proj"]),
    "Llama with P-tuning": _adapted(
        "Llama", "causal", "PromptEncoderConfig", num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=12
    ),
    "Llama with layer norm tuning": _adapted(
        "Llama", "causal", "LNTuningConfig", target_modules=["input_layernorm", "norm"]
    ),
    "Llama with prompt tuning": _adapted(
        "Llama", "causal", "PromptTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM"
    ),
    "Llama with prefix tuning": _adapted(
        "Llama", "causal", "PrefixTuningConfig", num_virtual_tokens=3, task_type="CAUSAL_LM"
    ),
    "LLaVA with LoRA": _adapted("LLaVA", "looks", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A model of the table in float64, without dropout, with the same parameters on every rank."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or key == "p"):
                setattr(module, key, 0.0)
    return model.double().train()


@contextmanager
def exact() -> Iterator[None]:
    """Within the block, float64 stays float64 where a model computes in float32 by name: losses, norms and softmax."""
    to, float_, softmax, log_softmax = Tensor.to, Tensor.float, Tensor.softmax, Tensor.log_softmax

    def wide(value: Tensor, asked: Any) -> Any:
        return torch.float64 if asked is torch.float32 and value.dtype == torch.float64 else asked

    def exact_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *(wide(self, a) for a in args), **{key: wide(self, value) for key, value in kwargs.items()})

    # Functions of ``torch.nn.functional`` call the methods.
    def exact_softmax(self: Tensor, dim: Any, dtype: Any = None) -> Tensor:
        return softmax(self, dim, dtype=wide(self, dtype))

    def exact_log_softmax(self: Tensor, dim: Any, dtype: Any = None) -> Tensor:
        return log_softmax(self, dim, dtype=wide(self, dtype))

    Tensor.to = exact_to  # type: ignore[assignment,method-assign]
    Tensor.float = lambda self: self if self.dtype == torch.float64 else float_(self)  # type: ignore[method-assign]
    Tensor.softmax, Tensor.log_softmax = exact_softmax, exact_log_softmax  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.to, Tensor.float = to, float_  # type: ignore[method-assign]
        Tensor.softmax, Tensor.log_softmax = softmax, log_softmax  # type: ignore[method-assign]


class Samples(Dataset[dict[str, Tensor]]):
    """Samples as dictionaries of tensors; ``padded``: sequences end at different places."""

    def __init__(self, kind: str, padded: bool) -> None:
        draw = torch.Generator().manual_seed(1)
        words = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=draw)
        ends = torch.randint(2, LENGTH + 1, (SAMPLES, 1), generator=draw)
        mask = (torch.arange(LENGTH) < ends).long() if padded else torch.ones_like(words)
        labels = torch.randint(3, WORDS, (SAMPLES, LENGTH), generator=draw)
        images = torch.randn(SAMPLES, 3, 8, 8, generator=draw, dtype=torch.float64)
        sounds = torch.randn(SAMPLES, 6, 16, generator=draw, dtype=torch.float64)
        photos = functional.interpolate(images, 40)
        classes = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
        text = {"input_ids": words * mask, "attention_mask": mask}
        noise = torch.randn(SAMPLES, 400, generator=draw, dtype=torch.float64)
        series, time = noise[:, :14], torch.arange(14, dtype=torch.float64).expand(SAMPLES, 14) / 14
        # Four parts of an image stand before the words.
        parts = torch.full((SAMPLES, 4), IMAGE)
        seen = {
            "input_ids": torch.cat([parts, words.clamp(min=IMAGE + 1) * mask], 1),
            "attention_mask": torch.cat([torch.ones_like(parts), mask], 1),
            "labels": torch.cat([torch.full_like(parts, -100), words.masked_fill(mask == 0, -100)], 1),
        }
        corners = torch.rand(SAMPLES, 2, 3, 2, generator=draw, dtype=torch.float64)
        denoised = {
            "sample": images,
            "timestep": torch.randint(0, 100, (SAMPLES,), generator=draw),
            "noise": torch.randn(SAMPLES, 3, 8, 8, generator=draw, dtype=torch.float64),
        }
        texts = noise[:, : LENGTH * 12].reshape(SAMPLES, LENGTH, 12)
        self._columns: dict[str, Tensor] = {
            "classes": {**text, "labels": classes},
            "waves": {"input_values": noise, "labels": labels[:, :4]},
            "spectra": {"input_values": sounds.transpose(1, 2), "labels": classes},
            "captions": {"pixel_values": images, "labels": words},
            "told": {**text, "pixel_values": images, "labels": words},
            "maps": {"pixel_values": photos, "labels": labels[:, :1, None].expand(-1, 40, 40) % CLASSES},
            "looks": {**seen, "pixel_values": images},
            "frames": {**seen, "pixel_values": images[:, None]},
            "patches": {
                **seen,
                "pixel_values": functional.interpolate(images, 16).reshape(SAMPLES, 16, 48).repeat(1, 1, 2),
                "image_grid_thw": torch.tensor([1, 4, 4]).expand(SAMPLES, 3),
                "mm_token_type_ids": (seen["input_ids"] == IMAGE).long(),
            },
            "boxes": {
                "pixel_values": photos,
                "class_labels": labels[:, :3] % CLASSES,
                "boxes": torch.cat([0.3 + corners[:, 0] * 0.4, 0.1 + corners[:, 1] * 0.3], 2),
            },
            "segments": {
                "pixel_values": photos,
                "class_labels": torch.arange(3).expand(SAMPLES, 3),
                "mask_labels": (functional.interpolate(images, 40) > 0.3).double(),
            },
            "heard": {"input_values": noise.repeat(1, 4), "labels": labels},
            "denoised": denoised,
            "denoised by text": {**denoised, "encoder_hidden_states": texts},
            "denoised by class": {
                "hidden_states": images,
                **{key: denoised[key] for key in ("timestep", "noise")},
                "class_labels": classes,
            },
            "denoised by two texts": {
                "hidden_states": images,
                **{key: denoised[key] for key in ("timestep", "noise")},
                "encoder_hidden_states": texts,
                "pooled_projections": texts[:, 0],
            },
            "series": {
                "past_values": series[:, :10],
                "past_time_features": time[:, :10, None],
                "past_observed_mask": torch.ones(SAMPLES, 10),
                "future_values": series[:, 10:],
                "future_time_features": time[:, 10:, None],
            },
            "channels": {
                "past_values": noise[:, :20].reshape(SAMPLES, 10, 2),
                "future_values": noise[:, 20:28].reshape(SAMPLES, 4, 2),
            },
            "causal": {**text, "labels": words.masked_fill(mask == 0, -100)},
            "masked": {**text, "labels": labels.masked_fill(mask == 0, -100)},
            "sequences": {**text, "labels": labels.masked_fill(mask.flip(0) == 0, -100)},
            "images": {"pixel_values": images, "labels": classes},
            "photos": {"pixel_values": photos, "labels": classes},
            "pictures": {"pixel_values": functional.interpolate(images, 64), "labels": classes},
            "pairs": {**text, "pixel_values": images},
            "sounds": {"input_features": sounds, "labels": labels},
        }[kind]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def dataset(name: str, form: str) -> Samples:
    """The samples of a model; all sequences are of one length for the form ``own``."""
    return Samples(MODELS[name].data, padded=form in ("padded", "counted"))


def loss_fn(name: str, form: str) -> Callable[[Any, Mapping[str, Tensor]], Any]:
    """A loss function.

    Args:
        name: of the model.
        form: ``own`` and ``padded``: the model's own loss, ``padded`` over sequences that end at different places;
            ``mean``: the mean of cross-entropy; ``counted``: its sum and the number of tokens or samples.
    """
    entry = MODELS[name]

    def own(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        more = {"return_loss": True} if entry.data == "pairs" else {}
        return model(**batch, **more).loss  # type: ignore[no-any-return]

    def image(model: Any, batch: Mapping[str, Tensor]) -> Any:
        scores = model(batch["pixel_values"])
        if form == "mean":
            return functional.cross_entropy(scores, batch["labels"])
        return functional.cross_entropy(scores, batch["labels"], reduction="sum"), len(scores)

    def counted(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        given = dict(batch)
        labels = given.pop("labels")
        if entry.data == "sequences":
            given["decoder_input_ids"] = labels.clamp(min=0).roll(1, 1)
        scores = model(**given).logits
        if entry.data == "causal":
            scores, labels = scores[:, :-1], labels[:, 1:]
        total = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()

    if entry.loss is not None:
        return entry.loss
    return image if entry.package == "timm" else counted if form == "counted" else own
