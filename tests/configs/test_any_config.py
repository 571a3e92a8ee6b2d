"""Random configs: each ends in a description or in a clear error."""

import contextlib

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posenc import ALiBi, DeBERTaBias, RelativeKeys, RoPE, TransformerXLBias, configs

scalar = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 300),
    st.integers(-4, 10**12),
    st.floats(),
    st.sampled_from([1.0, 2.0, 0.5, 32, 64, 128, 4096, 1e4, 1e300, 1e-300, "4", "", "linear"]),
    st.sampled_from([[], [0, 1], ["full_attention"], {}, {"alibi": False}]),
)
numbers = st.lists(st.floats(0.5, 4.0), min_size=0, max_size=40)
kinds = st.sampled_from(
    "default linear dynamic yarn longrope su llama3 proportional mrope axial cubic".split()
)
rope = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.one_of(kinds, kinds, scalar),
        "type": st.one_of(kinds, scalar),
        "factor": st.one_of(st.floats(1.0, 64.0), scalar),
        "original_max_position_embeddings": st.one_of(st.integers(1, 8192), scalar),
        "short_factor": st.one_of(numbers, scalar),
        "long_factor": st.one_of(numbers, scalar),
        "low_freq_factor": st.one_of(st.floats(0.1, 8.0), scalar),
        "high_freq_factor": st.one_of(st.floats(0.1, 8.0), scalar),
        "mrope_section": st.one_of(st.lists(st.integers(0, 20), max_size=4), scalar),
        **dict.fromkeys(
            "rope_theta partial_rotary_factor attention_factor beta_fast beta_slow mscale "
            "mscale_all_dim truncate mrope_interleaved short_mscale alpha unknown".split(),
            scalar,
        ),
    },
)
TYPES = """
    llama cohere deepseek_v3 bloom mpt falcon t5 roberta opt whisper gpt_refact mamba smollm3
    cohere2 gemma3_text modernbert llama4_text qwen2 dinov3_vit kimi_k25_vision minimax bamba
    deberta-v2 wav2vec2-bert speecht5 xlnet
"""
KEYS = """
    rope_theta rotary_pct rotary_dim partial_rotary_factor max_position_embeddings
    rope_local_base_freq rotary_emb_base qk_rope_head_dim rope_interleave n_head n_heads num_heads
    d_model n_embd n_positions max_seq_len max_source_positions max_target_positions pad_token_id
    attn_config alibi alibi_bias_max relative_attention_num_buckets num_hidden_layers no_rope_layers
    no_rope_layer_interval sliding_window_pattern sliding_window qk_nope_head_dim
    dual_chunk_attention_config local_attention attention_chunk_size attn_temperature_tuning
    floor_scale use_sliding_window max_window_layers num_register_tokens attn_type_list
    attn_layer_indices layers_block_type block_types clamp_len d_head position_buckets
    max_relative_positions left_max_position_embeddings encoder_max_relative_position
    relative_attention pos_att_type position_embeddings_type attn_type vision_config
"""
nested = st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), rope | scalar)
top = st.fixed_dictionaries(
    {},
    optional={
        "hidden_size": st.one_of(st.sampled_from([64, 512, 4096]), scalar),
        "num_attention_heads": st.one_of(st.sampled_from([1, 8, 32]), scalar),
        "head_dim": st.one_of(st.none(), st.sampled_from([4, 64, 128]), scalar),
        "rope_scaling": rope | nested | scalar,
        "rope_parameters": rope | nested | scalar,
        "layer_types": st.lists(st.sampled_from(["full_attention", "b"])) | scalar,
        "model_type": st.sampled_from(TYPES.split()) | scalar,
        **dict.fromkeys(KEYS.split(), scalar),
    },
)
layer = st.sampled_from([None, None, "full_attention", "sliding_attention", 3])


# Twelve hundred in `make test-all`.
MANY = settings.default.max_examples * 3


@settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
@given(config=top | st.dictionaries(st.text(max_size=4), scalar), layer_type=layer)
def test_any_dict_ends_in_a_description_or_a_clear_error(config, layer_type):
    """No KeyError, no OverflowError, and nothing is built to a number that the config names."""
    readers = (configs.read_positions, configs.read_layers, configs.other_parts)
    modules = (ALiBi, DeBERTaBias, RelativeKeys, TransformerXLBias)
    for read in (*readers, *(module.from_config for module in modules)):
        with contextlib.suppress(ValueError, TypeError):
            read(config)
    try:
        made = RoPE.from_config(config, layer_type=layer_type)
    except (ValueError, TypeError):
        return
    assert made.scaled_inv_freq().isfinite().all()
    assert torch.isfinite(torch.tensor(made.attention_factor(10_000)))
