"""Further architectures of transformers and timm, each in one form of loss under the strategies of ``FEW``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tests.models.builders import (
    CLASSES,
    FEW,
    GROUPED,
    LEFT_OUT,
    SIZES,
    TOKENS,
    WORDS,
    Entry,
    causal,
    entry,
    hf,
    images,
    masked,
    sequences,
    timm_class,
    timm_entry,
)  # fmt: skip

_GPT = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 6, **TOKENS}
_PAIR = {
    "vocab_size": WORDS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "max_position_embeddings": 16,
    "decoder_start_token_id": 2, "forced_eos_token_id": None, **TOKENS,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": 24, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 6,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {
    **GROUPED, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "experts_implementation": "eager",
}  # fmt: skip
_LATENT = {
    **SIZES, **TOKENS, "num_key_value_heads": 6, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "qk_nope_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "experts_implementation": "eager",
}  # fmt: skip
_VISION = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "image_size": 8,
    "patch_size": 4, "num_labels": CLASSES,
}  # fmt: skip
_SOUND = {
    **SIZES, **TOKENS, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0,
    "apply_spec_augment": False, "ctc_loss_reduction": "mean", "classifier_proj_size": 16,
}  # fmt: skip


def _captions() -> nn.Module:
    import transformers

    vision = transformers.ViTConfig(**{**_VISION, "num_hidden_layers": 2})
    text = transformers.GPT2Config(**{**_GPT, "n_layer": 2}, is_decoder=True, add_cross_attention=True)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.VisionEncoderDecoderModel(config)


def _blip() -> Callable[[], nn.Module]:
    text = {**SIZES, **TOKENS, "encoder_hidden_size": 24, "projection_dim": 12, "num_hidden_layers": 2}
    vision = {**_VISION, "projection_dim": 12, "num_hidden_layers": 2, "initializer_range": 0.02}
    options = {"projection_dim": 12, "image_text_hidden_size": 12, "text_config": text, "vision_config": vision}
    return hf("BlipForConditionalGeneration", "BlipConfig", **options)


def _with_float_mask(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of a model that multiplies a mask of integers by the least number, which is infinite in float32."""
    return model(**{**batch, "attention_mask": batch["attention_mask"].double()}).loss  # type: ignore[no-any-return]


DECODERS = {
    "Gemma 2": causal("Gemma2ForCausalLM", head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **GROUPED),
    "Gemma 3": causal(
        "Gemma3ForCausalLM", config="Gemma3TextConfig", head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **GROUPED
    ),
    "Phi": causal("PhiForCausalLM", qk_layernorm=True, **SIZES, **TOKENS),
    "Falcon": causal(
        "FalconForCausalLM", alibi=True, new_decoder_architecture=False, multi_query=False, bias=True,
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, **TOKENS,
    ),
    "Falcon, grouped heads": causal(
        "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=3, bias=False,
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, **TOKENS,
    ),
    "Bloom": causal("BloomForCausalLM", vocab_size=WORDS, hidden_size=24, n_layer=3, n_head=6, **TOKENS),
    "GPT-J": causal("GPTJForCausalLM", rotary_dim=4, **_GPT),
    "GPT-Neo": causal(
        "GPTNeoForCausalLM", vocab_size=WORDS, max_position_embeddings=16, hidden_size=24, num_layers=4, num_heads=6,
        attention_types=[[["global", "local"], 2]], window_size=4, **TOKENS,
    ),
    "GPT (2018)": causal("OpenAIGPTLMHeadModel", **_GPT),
    "GPT-BigCode": causal("GPTBigCodeForCausalLM", **_GPT),
    "CodeGen": causal("CodeGenForCausalLM", rotary_dim=4, **{**_GPT, "n_ctx": 16, "n_embd": 32, "n_head": 4}),
    "MPT": causal("MptForCausalLM", vocab_size=WORDS, d_model=24, n_heads=6, n_layers=3, max_seq_len=16),
    "StableLM": causal("StableLmForCausalLM", partial_rotary_factor=0.5, **GROUPED),
    "Starcoder 2": causal("Starcoder2ForCausalLM", **GROUPED),
    "Cohere": causal("CohereForCausalLM", use_qk_norm=True, **GROUPED),
    "Granite": causal("GraniteForCausalLM", attention_multiplier=0.5, residual_multiplier=0.3, **GROUPED),
    "GLM": causal("GlmForCausalLM", head_dim=4, **GROUPED),
    "GLM-4": causal("Glm4ForCausalLM", head_dim=4, **GROUPED),
    "Nemotron": causal("NemotronForCausalLM", head_dim=4, **GROUPED),
    "OLMo": causal("OlmoForCausalLM", clip_qkv=2.0, **GROUPED),
    "OLMo 2": causal("Olmo2ForCausalLM", **GROUPED),
    "SmolLM 3": causal("SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0], **GROUPED),
    "LFM 2": causal(
        "Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False, **GROUPED
    ),
    "BioGPT": causal("BioGptForCausalLM", **SIZES, **TOKENS),
    "Qwen2-MoE": causal("Qwen2MoeForCausalLM", shared_expert_intermediate_size=24, **_EXPERTS),
    "Qwen3-MoE": causal("Qwen3MoeForCausalLM", head_dim=4, **_EXPERTS),
    "OLMoE": causal("OlmoeForCausalLM", **_EXPERTS),
    "GPT-OSS": causal("GptOssForCausalLM", **_EXPERTS, head_dim=4, num_local_experts=3, sliding_window=4),
    "Llama 4": causal(
        "Llama4ForCausalLM", config="Llama4TextConfig", **GROUPED, head_dim=4, intermediate_size_mlp=48,
        num_local_experts=3, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=4,
    ),
    "GLM-4.5": causal(
        "Glm4MoeForCausalLM", **{**_EXPERTS, "head_dim": 4}, n_routed_experts=4, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "ERNIE 4.5": causal(
        "Ernie4_5_MoeForCausalLM", **GROUPED, moe_intermediate_size=16, moe_num_experts=3, moe_k=2,
        moe_num_shared_experts=1, experts_implementation="eager",
    ),
    "DeepSeek V2": causal("DeepseekV2ForCausalLM", topk_method="greedy", **_LATENT),
    "DeepSeek V3": causal("DeepseekV3ForCausalLM", **_LATENT),
    "Mamba": causal("MambaForCausalLM", vocab_size=WORDS, hidden_size=24, state_size=4, num_hidden_layers=3, **TOKENS),
    "Mamba 2": causal(
        "Mamba2ForCausalLM", vocab_size=WORDS, hidden_size=24, state_size=4, num_hidden_layers=3, num_heads=6,
        head_dim=8, n_groups=2, chunk_size=4, **TOKENS,
    ),
    "RWKV": causal(
        "RwkvForCausalLM", vocab_size=WORDS, context_length=16, hidden_size=24, num_hidden_layers=3, **TOKENS
    ),
}  # fmt: skip
ENCODERS = {
    "ALBERT": masked("Albert", embedding_size=12),
    "ELECTRA": masked("Electra", embedding_size=12),
    "XLM-R": masked("XLMRoberta"),
    "DeBERTa": masked("Deberta", relative_attention=True, pos_att_type="c2p|p2c", type_vocab_size=0),
    "DeBERTa V3": masked(
        "DebertaV2", relative_attention=True, pos_att_type="p2c|c2p", share_att_key=True, position_buckets=4,
        norm_rel_ebd="layer_norm", position_biased_input=False,
    ),
    "Longformer": masked("Longformer", attention_window=4),
    "BigBird": masked("BigBird", attention_type="original_full"),
    "MobileBERT": masked("MobileBert", embedding_size=24, intra_bottleneck_size=24, true_hidden_size=24),
    "MPNet": masked("MPNet"),
    "FNet": masked("FNet"),
    "Funnel": masked(
        "Funnel", d_model=24, n_head=6, d_head=4, d_inner=48, block_sizes=[1, 1], num_decoder_layers=1,
        num_hidden_layers=LEFT_OUT,
    ),
    "ConvBERT": masked("ConvBert", embedding_size=24),
    "RoFormer": masked("RoFormer"),
    "Nystromformer": masked("Nystromformer", num_landmarks=8, segment_means_seq_len=8, conv_kernel_size=3),
    "ModernBERT": masked("ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2),
    "ERNIE": masked("Ernie"),
    "LayoutLM": masked("LayoutLM"),
    "SqueezeBERT": masked(
        "SqueezeBert", embedding_size=24, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2
    ),
    "XLNet": entry(
        "XLNetForSequenceClassification", "XLNetConfig", "classes",
        vocab_size=WORDS, d_model=24, n_layer=3, n_head=6, d_inner=48, num_labels=CLASSES, **TOKENS,
    ),
    "Perceiver": entry(
        "PerceiverForMaskedLM", "PerceiverConfig", "masked",
        vocab_size=WORDS, num_latents=6, d_latents=24, d_model=24, num_self_attends_per_block=2,
        num_self_attention_heads=6, num_cross_attention_heads=6, max_position_embeddings=8, qk_channels=24,
        v_channels=24,
    ),
}  # fmt: skip
PAIRS = {
    "mBART": sequences("MBart", **_PAIR),
    "Pegasus": sequences("Pegasus", **_PAIR),
    "Marian": entry("MarianMTModel", "MarianConfig", "sequences", **_PAIR),
    "M2M-100": sequences("M2M100", **_PAIR),
    "Blenderbot": sequences("BlenderbotSmall", **_PAIR),
    # Its relative positions mix the samples of a batch.
    "ProphetNet": replace(
        sequences(
            "ProphetNet", by_batch=True, **{k: v for k, v in SIZES.items() if "num" not in k},
            encoder_ffn_dim=48, decoder_ffn_dim=48, num_encoder_layers=2, num_decoder_layers=2,
            num_encoder_attention_heads=6, num_decoder_attention_heads=6, disable_ngram_loss=True, num_buckets=8,
            relative_max_distance=16, **TOKENS,
        ),
        loss=_with_float_mask,
    ),
    "LED": sequences(
        "LED", **{k: v for k, v in _PAIR.items() if k != "max_position_embeddings"}, attention_window=4,
        max_encoder_position_embeddings=16, max_decoder_position_embeddings=16,
    ),
    "mT5": sequences("MT5", **_T5, feed_forward_proj="gated-gelu"),
    "LongT5": sequences("LongT5", **_T5, local_radius=3),
    "Switch Transformers": sequences(
        "SwitchTransformers", **_T5, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        num_experts=3, router_jitter_noise=0.0, expert_capacity=64,
    ),
}  # fmt: skip
SIGHT_AND_SOUND = {
    "Wav2Vec 2": entry("Wav2Vec2ForCTC", "Wav2Vec2Config", "waves", **_SOUND),
    "HuBERT": entry("HubertForCTC", "HubertConfig", "waves", **_SOUND),
    "WavLM": entry("WavLMForCTC", "WavLMConfig", "waves", **_SOUND),
    "AST": entry(
        "ASTForAudioClassification", "ASTConfig", "spectra",
        **{k: v for k, v in _VISION.items() if k != "image_size"}, num_mel_bins=6, max_length=16, frequency_stride=2,
        time_stride=4,
    ),
    "DeiT": images("DeiT", **_VISION),
    "BEiT": images("Beit", **_VISION, use_relative_position_bias=True, drop_path_rate=0.0),
    "Swin": images(
        "Swin", "photos", image_size=40, patch_size=4, embed_dim=12, depths=(1, 1), num_heads=(3, 6), window_size=5,
        num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "Swin V2": images(
        "Swinv2", "photos", image_size=40, patch_size=4, embed_dim=12, depths=(1, 1), num_heads=(3, 6), window_size=5,
        num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "DINOv2": images("Dinov2", **_VISION, mlp_ratio=2),
    "ConvNeXt V2": images(
        "ConvNextV2", "photos", hidden_sizes=(8, 8, 12, 12), depths=(1, 1, 1, 1), num_labels=CLASSES
    ),
    "MobileViT": images(
        "MobileViT", "photos", by_batch=True, image_size=40, hidden_sizes=(12, 12, 12), num_attention_heads=3,
        neck_hidden_sizes=(8, 8, 8, 8, 8, 8, 8), num_labels=CLASSES,
    ),
    "MobileNet V2": images("MobileNetV2", "photos", by_batch=True, depth_multiplier=0.1, num_labels=CLASSES),
    "ResNet": images(
        "ResNet", "photos", by_batch=True, embedding_size=8, hidden_sizes=(8, 8), depths=(1, 1), num_labels=CLASSES
    ),
    "RegNet": images(
        "RegNet", "photos", by_batch=True, embedding_size=8, hidden_sizes=(8, 8), depths=(1, 1), groups_width=4,
        num_labels=CLASSES,
    ),
    "PoolFormer": images(
        "PoolFormer", "photos", hidden_sizes=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_labels=CLASSES
    ),
    "PVT": images(
        "Pvt", "photos", image_size=40, hidden_sizes=(6, 12, 12, 12), depths=(1, 1, 1, 1),
        num_attention_heads=(1, 3, 3, 3), sequence_reduction_ratios=(2, 1, 1, 1), mlp_ratios=(2, 2, 2, 2),
        num_labels=CLASSES,
    ),
    "SegFormer": entry(
        "SegformerForSemanticSegmentation", "SegformerConfig", "maps", by_batch=True,
        hidden_sizes=(6, 12, 12, 12), depths=(1, 1, 1, 1), num_attention_heads=(1, 3, 3, 3), sr_ratios=(2, 1, 1, 1),
        mlp_ratios=(2, 2, 2, 2), decoder_hidden_size=12, num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "SigLIP": entry(
        "SiglipModel", "SiglipConfig", "pairs", by_batch=True,
        text_config={**SIZES, **TOKENS, "num_hidden_layers": 2},
        vision_config={k: v for k, v in _VISION.items() if k != "num_labels"},
    ),
    "BLIP": Entry("transformers", _blip(), "told", False, FEW),
    "ViT with GPT-2": Entry("transformers", _captions, "captions", False, FEW),
    "Time Series Transformer": entry(
        "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", "series",
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, encoder_layers=2,
        decoder_layers=2, d_model=24, encoder_attention_heads=6, decoder_attention_heads=6, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "PatchTST": entry(
        "PatchTSTForPrediction", "PatchTSTConfig", "channels", by_batch=True,
        num_input_channels=2, context_length=10, patch_length=4, patch_stride=2, num_hidden_layers=3, d_model=24,
        num_attention_heads=6, ffn_dim=48, prediction_length=4,
    ),
}  # fmt: skip
_TINY = {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 6}
TIMM = {
    "timm RegNet": timm_entry("regnety_002", by_batch=True),
    "timm MobileNet V3": timm_entry("mobilenetv3_small_050", by_batch=True),
    "timm MaxViT": timm_entry("test_maxvit", "pictures", by_batch=True, img_size=64),
    "timm CoAtNet": timm_entry("test_coatnet", "pictures", by_batch=True, img_size=64),
    "timm Swin": timm_entry(
        "swin_tiny_patch4_window7_224", img_size=40, window_size=5, embed_dim=12, depths=(1, 1), num_heads=(3, 6)
    ),
    "timm MLP-Mixer": timm_class(
        "mlp_mixer", "MlpMixer", img_size=40, patch_size=8, embed_dim=24, num_blocks=3
    ),
    "timm NFNet": timm_entry("test_nfnet"),
    "timm ByobNet": timm_entry("test_byobnet", by_batch=True),
    "timm MambaOut": timm_entry("test_mambaout"),
    "timm EfficientNet, group norm": timm_entry("test_efficientnet_gn"),
    "timm DenseNet": timm_entry("densenet121", by_batch=True, growth_rate=4, block_config=(1, 1)),
    "timm ConvMixer": timm_class(
        "convmixer", "ConvMixer", by_batch=True, dim=12, depth=2, kernel_size=3, patch_size=8
    ),
    "timm DeiT III": timm_entry("deit3_small_patch16_224", **_TINY),
    "timm BEiT": timm_entry("beit_base_patch16_224", **_TINY),
    "timm EVA-02": timm_entry("eva02_tiny_patch14_224", **_TINY),
    "timm CaiT": timm_entry("cait_xxs24_224", **_TINY),
    "timm XCiT": timm_entry("xcit_nano_12_p16_224", by_batch=True, **_TINY),
    "timm EdgeNeXt": timm_entry("edgenext_xx_small", dims=(8, 8, 16, 16), depths=(1, 2, 2, 2)),
}  # fmt: skip
FURTHER: Mapping[str, Entry] = {**DECODERS, **ENCODERS, **PAIRS, **SIGHT_AND_SOUND, **TIMM}
