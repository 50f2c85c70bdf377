"""Further architectures of transformers and timm, each in one form of loss under the strategies of ``FEW``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tests.models.builders import CLASSES, FEW, GROUPED, SIZES, TOKENS, WORDS, Entry, hf, timm, without_torchvision

_NONE = "left out"
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


def _causal(model: str, **options: Any) -> Entry:
    config = model.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
    return _entry(model, options.pop("config", config), "causal", **options)


def _masked(name: str, **options: Any) -> Entry:
    given = {**SIZES, **TOKENS, **options}
    return _entry(f"{name}ForMaskedLM", f"{name}Config", "masked", **{k: v for k, v in given.items() if v != _NONE})


def _sequences(name: str, **options: Any) -> Entry:
    return _entry(f"{name}ForConditionalGeneration", f"{name}Config", "sequences", **options)


def _images(name: str, data: str = "images", *, by_batch: bool = False, **options: Any) -> Entry:
    return _entry(f"{name}ForImageClassification", f"{name}Config", data, by_batch=by_batch, **options)


def _entry(model: str, config: str, data: str, *, by_batch: bool = False, **options: Any) -> Entry:
    return Entry("transformers", hf(model, config, **options), data, by_batch, FEW)


def _timm(name: str, data: str = "photos", *, by_batch: bool = False, **options: Any) -> Entry:
    return Entry("timm", timm(name, **options), data, by_batch, FEW)


def _timm_class(module: str, name: str, *, by_batch: bool = False, **options: Any) -> Entry:
    def build() -> nn.Module:
        with without_torchvision():
            models = importlib.import_module(f"timm.models.{module}")
        return getattr(models, name)(num_classes=CLASSES, **options)  # type: ignore[no-any-return]

    return Entry("timm", build, "photos", by_batch, FEW)


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


DECODERS = {
    "Gemma 2": _causal("Gemma2ForCausalLM", head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **GROUPED),
    "Gemma 3": _causal(
        "Gemma3ForCausalLM", config="Gemma3TextConfig", head_dim=4, query_pre_attn_scalar=4, sliding_window=4, **GROUPED
    ),
    "Phi": _causal("PhiForCausalLM", qk_layernorm=True, **SIZES, **TOKENS),
    "Falcon": _causal(
        "FalconForCausalLM", alibi=True, new_decoder_architecture=False, multi_query=False, bias=True,
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, **TOKENS,
    ),
    "Falcon, grouped heads": _causal(
        "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=3, bias=False,
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, **TOKENS,
    ),
    "Bloom": _causal("BloomForCausalLM", vocab_size=WORDS, hidden_size=24, n_layer=3, n_head=6, **TOKENS),
    "GPT-J": _causal("GPTJForCausalLM", rotary_dim=4, **_GPT),
    "GPT-Neo": _causal(
        "GPTNeoForCausalLM", vocab_size=WORDS, max_position_embeddings=16, hidden_size=24, num_layers=4, num_heads=6,
        attention_types=[[["global", "local"], 2]], window_size=4, **TOKENS,
    ),
    "GPT (2018)": _causal("OpenAIGPTLMHeadModel", **_GPT),
    "GPT-BigCode": _causal("GPTBigCodeForCausalLM", **_GPT),
    "CodeGen": _causal("CodeGenForCausalLM", rotary_dim=4, **{**_GPT, "n_ctx": 16, "n_embd": 32, "n_head": 4}),
    "MPT": _causal("MptForCausalLM", vocab_size=WORDS, d_model=24, n_heads=6, n_layers=3, max_seq_len=16),
    "StableLM": _causal("StableLmForCausalLM", partial_rotary_factor=0.5, **GROUPED),
    "Starcoder 2": _causal("Starcoder2ForCausalLM", **GROUPED),
    "Cohere": _causal("CohereForCausalLM", use_qk_norm=True, **GROUPED),
    "Granite": _causal("GraniteForCausalLM", attention_multiplier=0.5, residual_multiplier=0.3, **GROUPED),
    "GLM": _causal("GlmForCausalLM", head_dim=4, **GROUPED),
    "GLM-4": _causal("Glm4ForCausalLM", head_dim=4, **GROUPED),
    "Nemotron": _causal("NemotronForCausalLM", head_dim=4, **GROUPED),
    "OLMo": _causal("OlmoForCausalLM", clip_qkv=2.0, **GROUPED),
    "OLMo 2": _causal("Olmo2ForCausalLM", **GROUPED),
    "SmolLM 3": _causal("SmolLM3ForCausalLM", no_rope_layers=[1, 1, 0], **GROUPED),
    "LFM 2": _causal(
        "Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False, **GROUPED
    ),
    "BioGPT": _causal("BioGptForCausalLM", **SIZES, **TOKENS),
    "Qwen2-MoE": _causal("Qwen2MoeForCausalLM", shared_expert_intermediate_size=24, **_EXPERTS),
    "Qwen3-MoE": _causal("Qwen3MoeForCausalLM", head_dim=4, **_EXPERTS),
    "OLMoE": _causal("OlmoeForCausalLM", **_EXPERTS),
    "GPT-OSS": _causal("GptOssForCausalLM", **_EXPERTS, head_dim=4, num_local_experts=3, sliding_window=4),
    "Llama 4": _causal(
        "Llama4ForCausalLM", config="Llama4TextConfig", **GROUPED, head_dim=4, intermediate_size_mlp=48,
        num_local_experts=3, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=4,
    ),
    "GLM-4.5": _causal(
        "Glm4MoeForCausalLM", **{**_EXPERTS, "head_dim": 4}, n_routed_experts=4, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
    "ERNIE 4.5": _causal(
        "Ernie4_5_MoeForCausalLM", **GROUPED, moe_intermediate_size=16, moe_num_experts=3, moe_k=2,
        moe_num_shared_experts=1, experts_implementation="eager",
    ),
    "DeepSeek V2": _causal("DeepseekV2ForCausalLM", topk_method="greedy", **_LATENT),
    "DeepSeek V3": _causal("DeepseekV3ForCausalLM", **_LATENT),
    "Mamba": _causal("MambaForCausalLM", vocab_size=WORDS, hidden_size=24, state_size=4, num_hidden_layers=3, **TOKENS),
    "Mamba 2": _causal(
        "Mamba2ForCausalLM", vocab_size=WORDS, hidden_size=24, state_size=4, num_hidden_layers=3, num_heads=6,
        head_dim=8, n_groups=2, chunk_size=4, **TOKENS,
    ),
    "RWKV": _causal(
        "RwkvForCausalLM", vocab_size=WORDS, context_length=16, hidden_size=24, num_hidden_layers=3, **TOKENS
    ),
}  # fmt: skip
ENCODERS = {
    "ALBERT": _masked("Albert", embedding_size=12),
    "ELECTRA": _masked("Electra", embedding_size=12),
    "XLM-R": _masked("XLMRoberta"),
    "DeBERTa": _masked("Deberta", relative_attention=True, pos_att_type="c2p|p2c", type_vocab_size=0),
    "DeBERTa V3": _masked(
        "DebertaV2", relative_attention=True, pos_att_type="p2c|c2p", share_att_key=True, position_buckets=4,
        norm_rel_ebd="layer_norm", position_biased_input=False,
    ),
    "Longformer": _masked("Longformer", attention_window=4),
    "BigBird": _masked("BigBird", attention_type="original_full"),
    "MobileBERT": _masked("MobileBert", embedding_size=24, intra_bottleneck_size=24, true_hidden_size=24),
    "MPNet": _masked("MPNet"),
    "FNet": _masked("FNet"),
    "Funnel": _masked(
        "Funnel", d_model=24, n_head=6, d_head=4, d_inner=48, block_sizes=[1, 1], num_decoder_layers=1,
        num_hidden_layers=_NONE,
    ),
    "ConvBERT": _masked("ConvBert", embedding_size=24),
    "RoFormer": _masked("RoFormer"),
    "Nystromformer": _masked("Nystromformer", num_landmarks=8, segment_means_seq_len=8, conv_kernel_size=3),
    "ModernBERT": _masked("ModernBert", local_attention=4, cls_token_id=1, sep_token_id=2),
    "ERNIE": _masked("Ernie"),
    "LayoutLM": _masked("LayoutLM"),
    "SqueezeBERT": _masked(
        "SqueezeBert", embedding_size=24, q_groups=2, k_groups=2, v_groups=2, intermediate_groups=2, output_groups=2
    ),
    "XLNet": _entry(
        "XLNetForSequenceClassification", "XLNetConfig", "classes",
        vocab_size=WORDS, d_model=24, n_layer=3, n_head=6, d_inner=48, num_labels=CLASSES, **TOKENS,
    ),
    "Perceiver": _entry(
        "PerceiverForMaskedLM", "PerceiverConfig", "masked",
        vocab_size=WORDS, num_latents=6, d_latents=24, d_model=24, num_self_attends_per_block=2,
        num_self_attention_heads=6, num_cross_attention_heads=6, max_position_embeddings=8, qk_channels=24,
        v_channels=24,
    ),
}  # fmt: skip
PAIRS = {
    "mBART": _sequences("MBart", **_PAIR),
    "Pegasus": _sequences("Pegasus", **_PAIR),
    "Marian": _entry("MarianMTModel", "MarianConfig", "sequences", **_PAIR),
    "M2M-100": _sequences("M2M100", **_PAIR),
    "Blenderbot": _sequences("BlenderbotSmall", **_PAIR),
    "ProphetNet": _sequences(
        "ProphetNet", **{k: v for k, v in SIZES.items() if "num" not in k},
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=6, num_decoder_attention_heads=6, disable_ngram_loss=True, num_buckets=8,
        relative_max_distance=16, **TOKENS,
    ),
    "LED": _sequences(
        "LED", **{k: v for k, v in _PAIR.items() if k != "max_position_embeddings"}, attention_window=4,
        max_encoder_position_embeddings=16, max_decoder_position_embeddings=16,
    ),
    "mT5": _sequences("MT5", **_T5, feed_forward_proj="gated-gelu"),
    "LongT5": _sequences("LongT5", **_T5, local_radius=3),
    "Switch Transformers": _sequences(
        "SwitchTransformers", **_T5, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        num_experts=3, router_jitter_noise=0.0, expert_capacity=64,
    ),
}  # fmt: skip
SIGHT_AND_SOUND = {
    "Wav2Vec 2": _entry("Wav2Vec2ForCTC", "Wav2Vec2Config", "waves", **_SOUND),
    "HuBERT": _entry("HubertForCTC", "HubertConfig", "waves", **_SOUND),
    "WavLM": _entry("WavLMForCTC", "WavLMConfig", "waves", **_SOUND),
    "AST": _entry(
        "ASTForAudioClassification", "ASTConfig", "spectra",
        **{k: v for k, v in _VISION.items() if k != "image_size"}, num_mel_bins=6, max_length=16, frequency_stride=2,
        time_stride=4,
    ),
    "DeiT": _images("DeiT", **_VISION),
    "BEiT": _images("Beit", **_VISION, use_relative_position_bias=True, drop_path_rate=0.0),
    "Swin": _images(
        "Swin", "photos", image_size=40, patch_size=4, embed_dim=12, depths=(1, 1), num_heads=(3, 6), window_size=5,
        num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "Swin V2": _images(
        "Swinv2", "photos", image_size=40, patch_size=4, embed_dim=12, depths=(1, 1), num_heads=(3, 6), window_size=5,
        num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "DINOv2": _images("Dinov2", **_VISION, mlp_ratio=2),
    "ConvNeXt V2": _images(
        "ConvNextV2", "photos", hidden_sizes=(8, 8, 12, 12), depths=(1, 1, 1, 1), num_labels=CLASSES
    ),
    "MobileViT": _images(
        "MobileViT", "photos", by_batch=True, image_size=40, hidden_sizes=(12, 12, 12), num_attention_heads=3,
        neck_hidden_sizes=(8, 8, 8, 8, 8, 8, 8), num_labels=CLASSES,
    ),
    "MobileNet V2": _images("MobileNetV2", "photos", by_batch=True, depth_multiplier=0.1, num_labels=CLASSES),
    "ResNet": _images(
        "ResNet", "photos", by_batch=True, embedding_size=8, hidden_sizes=(8, 8), depths=(1, 1), num_labels=CLASSES
    ),
    "RegNet": _images(
        "RegNet", "photos", by_batch=True, embedding_size=8, hidden_sizes=(8, 8), depths=(1, 1), groups_width=4,
        num_labels=CLASSES,
    ),
    "PoolFormer": _images(
        "PoolFormer", "photos", hidden_sizes=(8, 8, 8, 8), depths=(1, 1, 1, 1), num_labels=CLASSES
    ),
    "PVT": _images(
        "Pvt", "photos", image_size=40, hidden_sizes=(6, 12, 12, 12), depths=(1, 1, 1, 1),
        num_attention_heads=(1, 3, 3, 3), sequence_reduction_ratios=(2, 1, 1, 1), mlp_ratios=(2, 2, 2, 2),
        num_labels=CLASSES,
    ),
    "SegFormer": _entry(
        "SegformerForSemanticSegmentation", "SegformerConfig", "maps", by_batch=True,
        hidden_sizes=(6, 12, 12, 12), depths=(1, 1, 1, 1), num_attention_heads=(1, 3, 3, 3), sr_ratios=(2, 1, 1, 1),
        mlp_ratios=(2, 2, 2, 2), decoder_hidden_size=12, num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "SigLIP": _entry(
        "SiglipModel", "SiglipConfig", "pairs", by_batch=True,
        text_config={**SIZES, **TOKENS, "num_hidden_layers": 2},
        vision_config={k: v for k, v in _VISION.items() if k != "num_labels"},
    ),
    "BLIP": Entry("transformers", _blip(), "told", False, FEW),
    "ViT with GPT-2": Entry("transformers", _captions, "captions", False, FEW),
    "Time Series Transformer": _entry(
        "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", "series",
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1, encoder_layers=2,
        decoder_layers=2, d_model=24, encoder_attention_heads=6, decoder_attention_heads=6, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "PatchTST": _entry(
        "PatchTSTForPrediction", "PatchTSTConfig", "channels", by_batch=True,
        num_input_channels=2, context_length=10, patch_length=4, patch_stride=2, num_hidden_layers=3, d_model=24,
        num_attention_heads=6, ffn_dim=48, prediction_length=4,
    ),
}  # fmt: skip
_TINY = {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 6}
TIMM = {
    "timm RegNet": _timm("regnety_002", by_batch=True),
    "timm MobileNet V3": _timm("mobilenetv3_small_050", by_batch=True),
    "timm MaxViT": _timm("test_maxvit", "pictures", by_batch=True, img_size=64),
    "timm CoAtNet": _timm("test_coatnet", "pictures", by_batch=True, img_size=64),
    "timm Swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=40, window_size=5, embed_dim=12, depths=(1, 1), num_heads=(3, 6)
    ),
    "timm MLP-Mixer": _timm_class(
        "mlp_mixer", "MlpMixer", img_size=40, patch_size=8, embed_dim=24, num_blocks=3
    ),
    "timm NFNet": _timm("test_nfnet"),
    "timm ByobNet": _timm("test_byobnet", by_batch=True),
    "timm MambaOut": _timm("test_mambaout"),
    "timm EfficientNet, group norm": _timm("test_efficientnet_gn"),
    "timm DenseNet": _timm("densenet121", by_batch=True, growth_rate=4, block_config=(1, 1)),
    "timm ConvMixer": _timm_class(
        "convmixer", "ConvMixer", by_batch=True, dim=12, depth=2, kernel_size=3, patch_size=8
    ),
    "timm DeiT III": _timm("deit3_small_patch16_224", **_TINY),
    "timm BEiT": _timm("beit_base_patch16_224", **_TINY),
    "timm EVA-02": _timm("eva02_tiny_patch14_224", **_TINY),
    "timm CaiT": _timm("cait_xxs24_224", **_TINY),
    "timm XCiT": _timm("xcit_nano_12_p16_224", by_batch=True, **_TINY),
    "timm EdgeNeXt": _timm("edgenext_xx_small", dims=(8, 8, 16, 16), depths=(1, 2, 2, 2)),
}  # fmt: skip
FURTHER: Mapping[str, Entry] = {**DECODERS, **ENCODERS, **PAIRS, **SIGHT_AND_SOUND, **TIMM}
