"""Recent decoders, detectors, models of images and text, and diffusion models, under ``FEW``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.builders import (
    CLASSES,
    FEW,
    GROUPED,
    IMAGE,
    SIZES,
    TOKENS,
    WORDS,
    Entry,
    causal,
    entry,
    hf,
    timm_class,
    timm_entry,
)  # fmt: skip

_EAGER = {"experts_implementation": "eager"}
_VISION = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_TEXT = {**GROUPED, "num_hidden_layers": 2, "head_dim": 4}
_LLAMA = {**_TEXT, "model_type": "llama"}
_BACKBONE = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 12, 12], "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}  # fmt: skip
_SWIN = {
    "model_type": "swin", "image_size": 40, "patch_size": 4, "embed_dim": 12, "depths": [1, 1, 1, 1],
    "num_heads": [3, 3, 3, 3], "window_size": 5, "drop_path_rate": 0.0,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
_DETECTOR: dict[str, Any] = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 6, "decoder_attention_heads": 6, "num_queries": 6, "num_labels": CLASSES,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip
_OF_32 = {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
"""Sizes of models whose group norms have 32 groups."""


@contextmanager
def _wide_constants() -> Iterator[None]:
    """Within the block, tensors that a loss makes without a dtype, such as weights of classes, are of float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _found(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """The loss of a detector, whose labels are a dictionary for each image, as a sum over images.

    All images have as many boxes, so that means over boxes and over images are the same.
    """
    classes, boxes = batch["class_labels"], batch["boxes"]
    labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
    with _wide_constants():
        return model(pixel_values=batch["pixel_values"], labels=labels).loss * len(boxes), len(boxes)


def _segmented(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """The loss of a segmenter, whose labels are lists, as a sum over images."""
    labels = {key: list(batch[key]) for key in ("mask_labels", "class_labels")}
    with _wide_constants():
        images = batch["pixel_values"]
        return model(pixel_values=images, **labels).loss * len(images), len(images)


def _patched(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a model that takes the patches of all images one after the other."""
    patches = batch["pixel_values"].flatten(0, 1)
    return model(**{**batch, "pixel_values": patches}).loss  # type: ignore[no-any-return]


def _denoised(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The squared error of the noise that a diffusion model finds."""
    given = {key: value for key, value in batch.items() if key != "noise"}
    return functional.mse_loss(model(**given).sample, batch["noise"])


def _detector(name: str, **options: Any) -> Entry:
    built = hf(f"{name}ForObjectDetection", f"{name}Config", **options)
    return Entry("transformers", built, "boxes", False, FEW, _found)


def _seen(name: str, *, data: str = "looks", by_batch: bool = False, loss: Any = None, **options: Any) -> Entry:
    built = hf(f"{name}ForConditionalGeneration", f"{name}Config", image_token_id=IMAGE, **options)
    return Entry("transformers", built, data, by_batch, FEW, loss)


def _diffusion(name: str, data: str = "denoised", **options: Any) -> Entry:
    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**options)  # type: ignore[no-any-return]

    return Entry("diffusers", build, data, False, FEW, _denoised)


RECENT_DECODERS = {
    "Cohere 2": causal("Cohere2ForCausalLM", sliding_window=4, head_dim=4, **GROUPED),
    "OLMo 3": causal("Olmo3ForCausalLM", sliding_window=4, **GROUPED),
    "EXAONE 4": causal("Exaone4ForCausalLM", sliding_window=4, **GROUPED),
    "Ministral": causal("MinistralForCausalLM", head_dim=4, sliding_window=4, **GROUPED),
    "Seed-OSS": causal("SeedOssForCausalLM", head_dim=4, **GROUPED),
    "DiffLlama": causal("DiffLlamaForCausalLM", head_dim=4, **{**GROUPED, "num_key_value_heads": 6}),
    "Gemma 3n": causal(
        "Gemma3nForCausalLM", config="Gemma3nTextConfig", head_dim=4, vocab_size_per_layer_input=WORDS,
        hidden_size_per_layer_input=4, laurel_rank=4, sliding_window=4, num_kv_shared_layers=0, altup_num_inputs=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.5, 0.0, 0.0], **GROUPED,
    ),
    "DBRX": causal(
        "DbrxForCausalLM", d_model=24, n_heads=6, n_layers=2, max_seq_len=16, vocab_size=WORDS,
        attn_config={"kv_n_heads": 3, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 3, "moe_top_k": 2, "moe_loss_weight": 0.01},
        pad_token_id=0, **_EAGER,
    ),
    "Granite-MoE": causal("GraniteMoeForCausalLM", num_local_experts=3, num_experts_per_tok=2, **_EAGER, **GROUPED),
    "Granite-MoE, shared": causal(
        "GraniteMoeSharedForCausalLM", num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=24,
        **_EAGER, **GROUPED,
    ),
    "Granite 4, hybrid": causal(
        "GraniteMoeHybridForCausalLM", num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=24,
        layer_types=["mamba", "attention", "mamba"], mamba_n_heads=6, mamba_d_head=8, mamba_d_state=4,
        mamba_n_groups=1, mamba_chunk_size=4, **_EAGER, **GROUPED,
    ),
    "Phi-3.5-MoE": causal(
        "PhimoeForCausalLM", by_batch=True, num_local_experts=3, num_experts_per_tok=2, **_EAGER, **GROUPED
    ),
    "JetMoE": causal(
        "JetMoeForCausalLM", num_local_experts=3, num_experts_per_tok=2, kv_channels=4, num_key_value_heads=3,
        intermediate_size=48, hidden_size=24, num_hidden_layers=2, vocab_size=WORDS, max_position_embeddings=16,
        **TOKENS,
    ),
    "MiniMax": causal(
        "MiniMaxForCausalLM", num_local_experts=3, num_experts_per_tok=2, head_dim=4, block_size=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"], **_EAGER, **GROUPED,
    ),
    "Qwen3-Next": causal(
        "Qwen3NextForCausalLM", head_dim=4, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=4,
        linear_value_head_dim=4, layer_types=["linear_attention", "full_attention", "linear_attention"],
        **_EAGER, **GROUPED,
    ),
    "Falcon-Mamba": causal(
        "FalconMambaForCausalLM", vocab_size=WORDS, hidden_size=24, state_size=4, num_hidden_layers=3, **TOKENS
    ),
    "Jamba": causal(
        "JambaForCausalLM", num_experts=3, num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=4,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        use_mamba_kernels=False, **_EAGER, **GROUPED,
    ),
    "Bamba": causal(
        "BambaForCausalLM", attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=8, mamba_d_state=4,
        mamba_n_groups=1, mamba_chunk_size=4, **GROUPED,
    ),
}  # fmt: skip
DETECTORS = {
    "DETR": _detector("Detr", backbone_config=_BACKBONE, **_DETECTOR),
    "Conditional DETR": _detector("ConditionalDetr", backbone_config=_BACKBONE, **_DETECTOR),
    "Deformable DETR": _detector(
        "DeformableDetr", backbone_config={**_BACKBONE, "out_features": ["stage3", "stage4"]}, num_feature_levels=2,
        encoder_n_points=2, decoder_n_points=2, disable_custom_kernels=True, **{**_DETECTOR, **_OF_32},
    ),
    "Table Transformer": _detector("TableTransformer", backbone_config=_BACKBONE, **_DETECTOR),
    "YOLOS": _detector(
        "Yolos", **{**_VISION, "image_size": [40, 40], "patch_size": 8}, num_detection_tokens=6, num_labels=CLASSES
    ),
    "MaskFormer": Entry(
        "transformers",
        hf(
            "MaskFormerForInstanceSegmentation", "MaskFormerConfig", fpn_feature_size=32, mask_feature_size=32,
            backbone_config=_SWIN, num_labels=CLASSES,
            decoder_config={
                **{k: v for k, v in _DETECTOR.items() if "backbone" not in k}, **_OF_32, "model_type": "detr"
            },
        ),
        "segments", False, FEW, _segmented,
    ),
    "Mask2Former": Entry(
        "transformers",
        hf(
            "Mask2FormerForUniversalSegmentation", "Mask2FormerConfig", feature_size=32, mask_feature_size=32,
            hidden_dim=32, encoder_feedforward_dim=24, encoder_layers=1, decoder_layers=3, num_attention_heads=4,
            dim_feedforward=24, num_queries=6, train_num_points=16, backbone_config=_SWIN, num_labels=CLASSES,
        ),
        "segments", True, FEW, _segmented,
    ),
    "DPT": entry(
        "DPTForSemanticSegmentation", "DPTConfig", "maps",
        **{**_VISION, "image_size": 40, "patch_size": 8, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, num_labels=CLASSES,
        by_batch=True,
    ),
    "UperNet": entry(
        "UperNetForSemanticSegmentation", "UperNetConfig", "maps", backbone_config=_SWIN, hidden_size=12,
        pool_scales=[2], auxiliary_channels=8, auxiliary_in_channels=48, num_labels=CLASSES, by_batch=True,
    ),
}  # fmt: skip
IMAGES_AND_TEXT = {
    "LLaVA": _seen(
        "Llava", vision_config={**_VISION, "model_type": "clip_vision_model"}, text_config=_LLAMA, image_seq_length=4
    ),
    "PaliGemma": _seen(
        "PaliGemma", by_batch=True, vision_config={**_VISION, "model_type": "siglip_vision_model"}, projection_dim=24,
        text_config={**_TEXT, "model_type": "gemma"}, hidden_size=24,
    ),
    "Gemma 3, images": _seen(
        "Gemma3", vision_config={**_VISION, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
        text_config={**_TEXT, "query_pre_attn_scalar": 4, "sliding_window": 4}, boi_token_index=1, eoi_token_index=2,
    ),
    "Idefics 3": _seen(
        "Idefics3", vision_config=_VISION, text_config=_LLAMA, scale_factor=1, data="frames"
    ),
    "SmolVLM": _seen("SmolVLM", vision_config=_VISION, text_config=_LLAMA, scale_factor=1, data="frames"),
    "Idefics 2": _seen(
        "Idefics2", vision_config=_VISION, text_config={**_TEXT, "model_type": "mistral"}, data="frames",
        perceiver_config={
            "hidden_size": 24, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 6,
            "resampler_head_dim": 4, "num_key_value_heads": 3,
        },
    ),
    "Qwen2-VL": _seen(
        "Qwen2VL", data="patches", loss=_patched,
        vision_config={
            "depth": 2, "embed_dim": 24, "hidden_size": 24, "num_heads": 6, "patch_size": 4, "mlp_ratio": 2,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        text_config={**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        vision_start_token_id=1,
    ),
    "Qwen2.5-VL": _seen(
        "Qwen2_5_VL", data="patches", loss=_patched,
        vision_config={
            "depth": 2, "hidden_size": 24, "out_hidden_size": 24, "num_heads": 6, "patch_size": 4,
            "intermediate_size": 48, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        text_config={**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        vision_start_token_id=1,
    ),
    "InternVL": _seen(
        "InternVL", vision_config={**_VISION, "image_size": [8, 8], "patch_size": [4, 4]}, downsample_ratio=1.0,
        text_config={**_TEXT, "model_type": "qwen2"}, image_seq_length=4,
    ),
    "BLIP-2": _seen(
        "Blip2", vision_config=_VISION, num_query_tokens=4,
        qformer_config={**SIZES, **TOKENS, "num_hidden_layers": 2, "encoder_hidden_size": 24},
        text_config={
            "model_type": "opt", "vocab_size": WORDS, "hidden_size": 24, "ffn_dim": 48, "num_hidden_layers": 2,
            "num_attention_heads": 6, "max_position_embeddings": 16, "word_embed_proj_dim": 24, **TOKENS,
        },
    ),
    "GIT": entry(
        "GitForCausalLM", "GitConfig", "told", **{**SIZES, **TOKENS, "num_hidden_layers": 2}, vision_config=_VISION
    ),
    "ViLT": entry(
        "ViltForMaskedLM", "ViltConfig", "told", **{**SIZES, **TOKENS, "num_hidden_layers": 2}, image_size=8,
        patch_size=4, max_image_length=-1,
    ),
}  # fmt: skip
SOUND = {
    "Moonshine": entry(
        "MoonshineForConditionalGeneration", "MoonshineConfig", "heard",
        vocab_size=WORDS, hidden_size=24, intermediate_size=48, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=6, decoder_num_attention_heads=6,
        max_position_embeddings=16, decoder_start_token_id=1, **TOKENS,
    ),
}  # fmt: skip
DIFFUSION = {
    "UNet": _diffusion(
        "UNet2DModel", sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, norm_num_groups=4,
    ),
    "UNet, conditioned": _diffusion(
        "UNet2DConditionModel", "denoised by text", sample_size=8, in_channels=3, out_channels=3,
        block_out_channels=(8, 16), layers_per_block=1, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=2, norm_num_groups=4,
        cross_attention_dim=12,
    ),
    "DiT": _diffusion(
        "DiTTransformer2DModel", "denoised by class", num_attention_heads=6, attention_head_dim=4, in_channels=3,
        out_channels=3, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=CLASSES, norm_num_groups=4,
    ),
    "Stable Diffusion 3": _diffusion(
        "SD3Transformer2DModel", "denoised by two texts", sample_size=8, patch_size=2, in_channels=3, out_channels=3,
        num_layers=2, attention_head_dim=4, num_attention_heads=6, joint_attention_dim=12, caption_projection_dim=24,
        pooled_projection_dim=12, pos_embed_max_size=8,
    ),
}  # fmt: skip
RECENT_TIMM = {
    "timm ConvNeXt V2": timm_entry("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 12, 12)),
    "timm Swin V2": timm_entry(
        "swinv2_tiny_window8_256", img_size=40, window_size=5, embed_dim=12, depths=(1, 1), num_heads=(3, 6)
    ),
    "timm Hiera": timm_entry("hiera_tiny_224", "pictures", img_size=64, embed_dim=12, num_heads=1, stages=(1, 1, 1, 1)),
    "timm GhostNet": timm_entry("ghostnet_050", by_batch=True),
    "timm Res2Net": timm_entry("res2net50_14w_8s", by_batch=True, layers=(1, 1, 1, 1)),
    "timm PoolFormer": timm_class(
        "metaformer", "MetaFormer", depths=(1, 1, 1, 1), dims=(8, 8, 12, 12)
    ),
}  # fmt: skip
RECENT: Mapping[str, Entry] = {
    **RECENT_DECODERS,
    **DETECTORS,
    **IMAGES_AND_TEXT,
    **SOUND,
    **DIFFUSION,
    **RECENT_TIMM,
}
