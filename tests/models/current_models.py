"""Models of the last two years that people train, adapters of peft apart from LoRA, and recent timm, under ``FEW``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
    hf,
    images,
    masked,
    timm_class,
    timm_entry,
    without_torchvision,
)  # fmt: skip

_EAGER = {"experts_implementation": "eager"}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **_EAGER}
_LINEAR = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_LATENT = {
    **SIZES, **TOKENS, "num_key_value_heads": 6, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "qk_nope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"], **_EAGER,
}  # fmt: skip
_VISION = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_TEXT = {**GROUPED, "num_hidden_layers": 2, "head_dim": 4}


def _patched(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a model that takes the patches of all images one after the other."""
    patches = batch["pixel_values"].flatten(0, 1)
    return model(**{**batch, "pixel_values": patches}).loss  # type: ignore[no-any-return]


def _on_features(name: str, data: str, **options: Any) -> Entry:
    """A backbone without a loss of its own, under a linear classifier of its pooled features, as people write it."""

    class Classifier(nn.Module):
        def __init__(self, backbone: nn.Module, width: int) -> None:
            super().__init__()
            self.backbone, self.head = backbone, nn.Linear(width, CLASSES)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.head(self.backbone(pixel_values).pooler_output)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        backbone = hf(f"{name}Model", f"{name}Config", **options)()
        return Classifier(backbone, options.get("hidden_size", 0) or options["hidden_sizes"][-1])

    def loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])

    return Entry("transformers", build, data, False, FEW, loss)


def _efficientnet_v2() -> nn.Module:
    with without_torchvision():
        efficientnet = importlib.import_module("timm.models.efficientnet")
    return efficientnet._gen_efficientnetv2_s(  # type: ignore[no-any-return]
        "efficientnetv2_rw_t", channel_multiplier=0.1, depth_multiplier=0.2, num_classes=CLASSES
    )


CURRENT_DECODERS = {
    "Gemma 4": causal(
        "Gemma4ForCausalLM", config="Gemma4TextConfig", head_dim=4, global_head_dim=4, sliding_window=4,
        vocab_size_per_layer_input=WORDS, hidden_size_per_layer_input=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], **GROUPED,
    ),
    "Qwen3.5": causal("Qwen3_5ForCausalLM", config="Qwen3_5TextConfig", head_dim=4, **_LINEAR, **GROUPED),
    "Qwen3.5-MoE": causal(
        "Qwen3_5MoeForCausalLM", config="Qwen3_5MoeTextConfig", head_dim=4, shared_expert_intermediate_size=24,
        **_LINEAR, **_EXPERTS, **GROUPED,
    ),
    "Ministral 3": causal("Ministral3ForCausalLM", head_dim=4, **GROUPED),
    "Apertus": causal("ApertusForCausalLM", **GROUPED),
    "Helium": causal("HeliumForCausalLM", head_dim=4, **GROUPED),
    "Hunyuan": causal("HunYuanDenseV1ForCausalLM", head_dim=4, **GROUPED),
    "nanochat": causal("NanoChatForCausalLM", **GROUPED),
    "ModernBERT, decoder": causal(
        "ModernBertDecoderForCausalLM", local_attention=4, cls_token_id=1, sep_token_id=2, **SIZES, **TOKENS
    ),
    "MiniMax M2": causal(
        "MiniMaxM2ForCausalLM", head_dim=4, num_local_experts=3, num_experts_per_tok=2, **_EAGER, **GROUPED
    ),
    "GLM-4.7 Flash": causal("Glm4MoeLiteForCausalLM", **_LATENT),
    "DeepSeek V3.2": causal(
        "DeepseekV32ForCausalLM", index_topk=4, index_head_dim=8, index_n_heads=2, **_LATENT
    ),
    "dots1": causal(
        "Dots1ForCausalLM", head_dim=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, moe_intermediate_size=16, **_EAGER, **GROUPED,
    ),
    "LFM 2, experts": causal(
        "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, **_EXPERTS, **GROUPED
    ),
    "Nemotron-H": causal(
        "NemotronHForCausalLM", layers_block_type=["mamba", "attention", "mlp", "mamba"], ssm_state_size=4,
        mamba_num_heads=6, mamba_head_dim=8, n_groups=2, chunk_size=4, head_dim=4,
        **{k: v for k, v in GROUPED.items() if k != "num_hidden_layers"},
    ),
    "Falcon-H1": causal(
        "FalconH1ForCausalLM", mamba_d_ssm=48, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=4,
        **GROUPED,
    ),
    "Kimi Linear": causal(
        "KimiLinearForCausalLM", num_local_experts=4, linear_head_dim=4, linear_num_heads=6,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **{k: v for k, v in _LATENT.items() if k not in ("q_lora_rank", "n_routed_experts")},
    ),
    "OLMo, hybrid": causal("OlmoHybridForCausalLM", **{**_LINEAR, "linear_num_key_heads": 6}, **GROUPED),
}  # fmt: skip
CURRENT_ENCODERS = {
    "EuroBERT": masked("EuroBert", num_key_value_heads=3),
    "Nomic BERT": masked("NomicBert"),
    "ESM": masked("Esm", mask_token_id=3, position_embedding_type="rotary"),
}  # fmt: skip
CURRENT_VISION = {
    "DINOv2 with registers": images("Dinov2WithRegisters", **_VISION, mlp_ratio=2, num_labels=CLASSES),
    "DINOv3, ViT": _on_features("DINOv3ViT", "images", num_register_tokens=2, pos_embed_rescale=None, **_VISION),
    "DINOv3, ConvNeXt": _on_features("DINOv3ConvNext", "photos", hidden_sizes=[8, 8, 12, 12], depths=[1, 1, 1, 1]),
    "I-JEPA": images("IJepa", **_VISION, num_labels=CLASSES),
    "SigLIP, classifier": images("Siglip", vision_config=_VISION, text_config={**SIZES, **TOKENS}, num_labels=CLASSES),
    "Qwen3-VL": Entry(
        "transformers",
        hf(
            "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", image_token_id=IMAGE, vision_start_token_id=1,
            vision_config={
                "depth": 2, "hidden_size": 24, "intermediate_size": 48, "num_heads": 6, "patch_size": 4,
                "out_hidden_size": 24, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
                "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
            text_config={
                **_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
            },
        ),
        "patches", False, FEW, _patched,
    ),
}  # fmt: skip
CURRENT_TIMM = {
    "timm EfficientNetV2": Entry("timm", _efficientnet_v2, "photos", True, FEW),
    "timm EVA": timm_entry("eva_giant_patch14_224", img_size=40, patch_size=8, embed_dim=24, depth=3, num_heads=6),
    "timm DINOv2": timm_entry(
        "vit_small_patch14_reg4_dinov2", img_size=40, patch_size=8, embed_dim=24, depth=3, num_heads=6
    ),
    "timm DINOv3": timm_entry(
        "vit_small_patch16_dinov3", img_size=40, patch_size=8, embed_dim=24, depth=3, num_heads=6
    ),
    "timm SigLIP": timm_entry(
        "vit_base_patch16_siglip_224", img_size=40, patch_size=8, embed_dim=24, depth=3, num_heads=6
    ),
    "timm TinyViT": replace(
        timm_class(
            "tiny_vit", "TinyVit", by_batch=True, embed_dims=(8, 12, 12, 24), depths=(1, 1, 1, 1),
            num_heads=(1, 3, 3, 6), window_sizes=(4, 4, 4, 2), drop_path_rate=0.0,
        ),
        data="pictures",
    ),
    "timm FastViT": timm_entry(
        "fastvit_t8", "pictures", by_batch=True, layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 32)
    ),
}  # fmt: skip
CURRENT: Mapping[str, Entry] = {**CURRENT_DECODERS, **CURRENT_ENCODERS, **CURRENT_VISION, **CURRENT_TIMM}
"""Further architectures of transformers and timm, each in one form of loss under the strategies of ``FEW``."""
