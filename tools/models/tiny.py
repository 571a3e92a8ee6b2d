"""Tiny random models of transformers, from configuration classes alone, and inputs for them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Sizes by the name of the field: 64 channels in 4 heads of 16, two layers, 128 words.
SIZES: dict[str, Any] = {}
for _size, _names in {
    1: "n_group topk_group first_k_dense_replace num_expert_group",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth kv_heads
       num_encoder_layers num_decoder_layers num_key_value_heads n_shared_experts moe_topk moe_k
       num_experts_per_tok top_k_experts num_experts_per_token top_k moe_top_k n_kv_heads
       encoder_num_hidden_layers decoder_num_hidden_layers num_encoder_hidden_layers
       num_decoder_hidden_layers encoder_num_key_value_heads decoder_num_key_value_heads""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads mamba_n_heads
       decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads
       num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads
       attention_heads index_n_heads linear_num_key_heads num_query_heads mamba_num_heads""",
    8: "patch_size",
    16: """head_dim attention_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim
        global_head_dim linear_key_head_dim linear_value_head_dim index_head_dim index_topk
        swa_head_dim mamba_d_head mamba_head_dim kv_channels hidden_size_per_layer_input
        mamba_d_state ssm_state_size""",
    32: "moe_intermediate_size q_lora_rank kv_lora_rank image_size o_lora_rank",
    64: """hidden_size d_model n_embd dim embed_dim intermediate_size ffn_dim encoder_ffn_dim
        decoder_ffn_dim n_inner hidden_dim shared_expert_intermediate_size d_ff out_hidden_size
        encoder_intermediate_size decoder_intermediate_size projection_dim ffn_hidden_size
        shared_intermediate_size feed_forward_size expert_ffn_hidden_size encoder_hidden_size
        decoder_hidden_size projector_hidden_size hidden_size_global""",
    128: "vocab_size max_position_embeddings n_positions vocab_size_per_layer_input",
}.items():
    SIZES |= dict.fromkeys(_names.split(), _size)

_DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
_SECTIONS = {**_DEFAULT, "mrope_section": [2, 3, 3]}
_BOTH = ["sliding_attention", "full_attention"]
_BY_LAYER = {"layer_types": _BOTH, "rope_parameters": dict.fromkeys(_BOTH, _DEFAULT)}

# Changes to small sizes, by the class of the configuration.
OF_CLASS: dict[str, dict[str, Any]] = {
    "BailingHybridConfig": {"num_hidden_layers": 6},
    "BltConfig": {"encoder_hash_byte_group_vocab": 128, "use_cache": False},
    "BambaConfig": {"attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "ClvpEncoderConfig": {"hidden_size": 128, "projection_dim": 128},
    "CohereCompassTextConfig": {
        "layer_types": _BOTH,
        "rope_parameters": dict.fromkeys(_BOTH, _SECTIONS),
    },
    "DbrxAttentionConfig": {"rope_theta": 10_000.0, "clip_qkv": 8},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DeepseekV4Config": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "DiffusionGemmaTextConfig": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "EsmFold2AtomEncoderConfig": {"hidden_size": 128},
    "MiniMaxM3VLTextConfig": {"layer_types": ["minimax_m3_sparse", "full_attention"]},
    "AudioFlamingo3EncoderConfig": {"max_source_positions": 32},
    "NeuCodecConfig": {"quantization_dim": 128, "num_key_value_heads": 4},
    "Xcodec2Config": {"quantization_dim": 128, "num_key_value_heads": 4},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4, "head_dim": 16},
    "Qwen4ExpTextConfig": {
        "num_hidden_layers": 4,
        "ple_layer_ids": [],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "Cosmos3EdgeTextConfig": {"rope_parameters": _SECTIONS},
    "DeepseekOcr2TextConfig": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "DeepseekOcr2SamVisionConfig": {"downsample_channels": [32, 64]},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteAudioConfig": {"adapter_input_size": 64},
    "Dots3NoteVisionConfig": {"adapter_in_dim": 64, "mlp_layer_types": ["dense", "dense"]},
    "EfficientLoFTRConfig": {
        "out_features": [32, 32, 64, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "num_attention_heads": 8,
    },
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
    },
    "EsmConfig": {"vocab_size": 128, "position_embedding_type": "rotary"},
    "EsmcConfig": {"num_key_value_heads": 4, "vocab_size": 128},
    "FlintConfig": {"num_hidden_layers": 4},
    "Glm4MoeConfig": {"use_qk_norm": True},
    "Gemma3nTextConfig": {"layer_types": [*_BOTH, *_BOTH], "num_hidden_layers": 4,
                          "num_kv_shared_layers": 2},
    "Glm4vTextConfig": {"rope_parameters": _SECTIONS},
    "Glm4vMoeTextConfig": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}},
    "GlmImageTextConfig": {"rope_parameters": _SECTIONS},
    "Step3p7TextConfig": {"sliding_window": 4},
    "GlmOcrTextConfig": {"rope_parameters": _SECTIONS},
    "GradiumPhononTTSFlowHeadConfig": {"condition_dim": 64},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"],
                               "position_embedding_type": "rope"},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "HunYuanVLTextConfig": {
        "head_dim": 16,
        "rope_parameters": {**_DEFAULT, "mrope_section": [2, 2, 2, 2]},
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Lfm3Config": {"layer_types": _BOTH},
    "Lfm3VlVisionConfig": {"layer_types": ["conv", "full_attention"]},
    "Llama4VisionConfig": {"vision_output_dim": 64, "projector_input_dim": 64,
                           "projector_output_dim": 64, "intermediate_size": 256},
    "MinistralConfig": {"head_dim": 16},
    "PaddleOCRTextConfig": {"rope_parameters": _SECTIONS},
    "PocketTTSFlowHeadConfig": {"condition_dim": 64},
    "Qwen2VLTextConfig": {"rope_parameters": _SECTIONS},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _SECTIONS},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _SECTIONS},
    "Qwen2_5OmniTalkerConfig": {"rope_parameters": _SECTIONS},
    "Qwen3NextConfig": {"num_hidden_layers": 4},
    "Qwen3_5TextConfig": {"num_hidden_layers": 4},
    "Qwen3_5MoeTextConfig": {"num_hidden_layers": 4},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "SeamlessM4TConfig": {"position_embeddings_type": "rotary", "speech_encoder_layers": 2,
                          "speech_encoder_attention_heads": 4},
    "VJEPA2Config": {"crop_size": 32, "frames_per_clip": 4, "pred_hidden_size": 64,
                     "pred_num_attention_heads": 4, "pred_num_hidden_layers": 2},
    "Wav2Vec2BertConfig": {"position_embeddings_type": "rotary", "vocab_size": 128},
    "Wav2Vec2ConformerConfig": {"position_embeddings_type": "rotary", "vocab_size": 128},
    "Zamba2Config": {"use_mem_rope": True, "layers_block_type": ["mamba", "hybrid"],
                     "intermediate_size": 64},
}  # fmt: skip

# Parameters of a model that is small enough to be built.
LARGEST = 60_000_000


def tiny(kind: type) -> Any:
    """A configuration of class ``kind`` with small sizes, sub-configurations included."""
    from transformers import PreTrainedConfig

    try:
        default = vars(kind())
    except Exception:
        default = {}
    latent = any(field.name == "kv_lora_rank" for field in dataclasses.fields(kind))
    chosen: dict[str, Any] = {}
    marks = 0
    for field in dataclasses.fields(kind):
        name, value = field.name, field.default
        size = SIZES.get(name)
        if name == "num_key_value_heads" and (value is None or latent):
            chosen[name] = SIZES["num_attention_heads"] if latent else size
        elif size is not None and isinstance(value, int) and value > size:
            chosen[name] = size
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value > 100:
            chosen[name] = 100 + marks
            marks += 1
        elif name.endswith("token_id") and isinstance(value, list):
            chosen[name] = 2
        elif isinstance(default.get(name), PreTrainedConfig):
            chosen[name] = tiny(type(default[name]))
    return kind(**{**chosen, **OF_CLASS.get(kind.__name__, {})})


def build(kind: type, config: Any) -> nn.Module:
    """A model of class ``kind`` in evaluation mode, its weights random and not too small."""
    takes = inspect.signature(kind).parameters
    more = {"layer_idx": 0} if "layer_idx" in takes else {}
    more |= {"atom_config": config} if "atom_config" in takes else {}
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config, **more).parameters())
    if count > LARGEST:
        raise RuntimeError(f"{kind.__name__} is not tiny: {count} parameters")
    torch.manual_seed(0)
    model = kind(config, **more).eval()
    # Fresh weights make attention flat and its share in the output small: a wrong rotation would
    # not show.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5 * max(parameter[0].numel(), 1) ** -0.5)
            else:
                parameter.add_(torch.rand_like(parameter), alpha=0.1)
            # Gemma 4 does not divide its scores by the width of a head: without this they are so
            # sharp that gradients magnify any rounding fifty times.
            if "q_norm" in name or "k_norm" in name:
                parameter.mul_(0.5)
    return model


def inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments that ``model`` may take, likeliest first."""
    made = torch.Generator().manual_seed(1)
    takes = inspect.signature(model.forward).parameters
    config = model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    def size(*names: str, default: int = 0) -> int:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, (list, tuple)):
                value = value[0]
            if isinstance(value, int):
                return value
        return default

    width = size("hidden_size", "d_model", "embed_dim", "n_embd", default=64)
    ids = torch.randint(3, 90, (2, 9), generator=made)
    grid = next((n for n in ("grid_thw", "image_grid_thw") if n in takes), None)
    channels = size("in_channels", "num_channels", "in_chans", default=3)
    patch, side = size("patch_size", default=8), size("image_size", default=32)
    if grid is not None:
        first = next(iter(takes))
        volume = channels * patch**2 * size("temporal_patch_size", default=1)
        yield {first: noise(32, volume), grid: torch.tensor([[1, 4, 4], [1, 4, 4]])}
    if "input_ids" in takes and "decoder_input_ids" not in takes:
        yield {"input_ids": ids}
    if "decoder_input_ids" in takes and "input_ids" in takes:
        yield {"input_ids": ids, "decoder_input_ids": ids}
    if "inputs_embeds" in takes:
        yield {"inputs_embeds": noise(2, 9, width)}
    if "pixel_values" in takes:
        yield {"pixel_values": noise(2, channels, side, side)}
    for name in ("input_features", "input_values", "audio_values"):
        if name in takes:
            bins = size(
                "num_mel_bins", "feature_projection_input_dim", "input_feat_dim", default=80
            )
            yield {name: noise(2, 64, bins)}
            yield {name: noise(2, bins, 64)}
            yield {name: noise(2, 1600)}
            yield {name: noise(2, 1, 1600)}
    if "hidden_states" in takes:
        yield {"hidden_states": noise(2, 9, width)}
