"""Configs of models that `posenc explain` is tried on."""

BLOOM = {"model_type": "bloom", "n_head": 16, "seq_length": 2048}
MPT = {"model_type": "mpt", "n_heads": 12, "d_model": 768, "attn_config": {"alibi_bias_max": 4}}
FALCON = {"model_type": "falcon", "alibi": True, "num_attention_heads": 71, "hidden_size": 4544}
GPT2 = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768}
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
FACTORS = [1.0 + i / 7 for i in range(48)]
PHI3 = {
    "model_type": "phi3",
    "head_dim": 96,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS},
}
QWEN_VL = {"head_dim": 128, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
