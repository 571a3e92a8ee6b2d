"""Configs of models that `posenc explain` is tried on."""

BLOOM = {"model_type": "bloom", "n_head": 16, "seq_length": 2048}
MPT = {"model_type": "mpt", "n_heads": 12, "d_model": 768, "attn_config": {"alibi_bias_max": 4}}
FALCON = {"model_type": "falcon", "alibi": True, "num_attention_heads": 71, "hidden_size": 4544}
OPT = {"model_type": "opt", "max_position_embeddings": 2048, "hidden_size": 768}
T5 = {"model_type": "t5", "num_heads": 8, "relative_attention_num_buckets": 32}
WHISPER = {
    "model_type": "whisper",
    "d_model": 384,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
SMOLLM3 = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "max_position_embeddings": 65536,
    "rope_theta": 5e6,
}
LLAMA4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "no_rope_layers": [],
        "max_position_embeddings": 10485760,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
# v3's own file, without what does not concern positions.
DEBERTA = {
    "model_type": "deberta-v2",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
}
FACTORS = [1.0 + i / 7 for i in range(48)]
PHI3 = {
    "model_type": "phi3",
    "head_dim": 96,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS},
}
QWEN_VL = {"head_dim": 128, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
# As on the hub, with their keys of old.
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "num_hidden_layers": 26,
    "max_position_embeddings": 32768,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
MODERNBERT = {
    "model_type": "modernbert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "position_embedding_type": "absolute",
}
QWEN_1M = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "max_position_embeddings": 1010000,
    "max_window_layers": 28,
    "rope_theta": 1e7,
    "sliding_window": 1010000,
    "use_sliding_window": False,
    "dual_chunk_attention_config": {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    },
}
DINOV3 = {
    "model_type": "dinov3_vit",
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_register_tokens": 4,
    "rope_theta": 100.0,
}
