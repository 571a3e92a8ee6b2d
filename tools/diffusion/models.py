"""Tiny transformers of diffusers that no test needs, in addition to those that tests drive."""

import torch

from support.diffusion import (
    COG,
    COG_INPUTS,
    FIVE,
    HEADS,
    IMAGE,
    JOY,
    MASK,
    MODELS,
    ONE,
    VIDEO,
    turned,
)

ALL = {
    **MODELS,
    "ConsisIDTransformer3DModel": (COG, COG_INPUTS),
    "LuminaNextDiT2DModel": (
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32,
            "num_layers": 2, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16,
            "learn_sigma": False, "cross_attention_dim": 16,
        },
        {
            **IMAGE, "timestep": ONE, "encoder_mask": MASK, "cross_attention_kwargs": {},
            "image_rotary_emb": torch.polar(*(t.view(8, 8, 8) for t in (
                torch.ones(512), torch.arange(512.0) % 11
            ))),
        },
    ),
    "MochiTransformer3DModel": (
        {
            **HEADS, "patch_size": 2, "num_layers": 2, "pooled_projection_dim": 16,
            "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 4,
            "max_sequence_length": 7,
        },
        {**VIDEO, "encoder_attention_mask": MASK.bool()},
    ),
    "OmniGenTransformer2DModel": (
        {
            "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 32, "num_layers": 2, "pad_token_id": 0, "vocab_size": 99,
            "in_channels": 4, "time_step_dim": 4,
            "rope_scaling": {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8},
        },
        {
            "hidden_states": (2, 4, 8, 8), "timestep": ONE,
            "input_ids": torch.arange(1, 25).expand(2, -1), "input_img_latents": [],
            "input_image_sizes": {}, "attention_mask": torch.ones(2, 41, 41),
            "position_ids": torch.arange(41).expand(2, -1),
        },
    ),
    "JoyImageEditPlusTransformer3DModel": (
        JOY,
        {
            "hidden_states": (1, 2, 4, 1, 2, 2), "encoder_hidden_states": (1, 7, 16),
            "timestep": ONE[:1], "shape_list": [[(1, 1, 1), (1, 1, 1)]],
        },
    ),
    "StableAudioDiTModel": (
        {
            **HEADS, "sample_size": 8, "in_channels": 4, "num_layers": 2, "out_channels": 4,
            "num_key_value_attention_heads": 1, "cross_attention_dim": 16, "time_proj_dim": 8,
            "global_states_input_dim": 8, "cross_attention_input_dim": 16,
        },
        {
            "hidden_states": (2, 4, 9), "timestep": FIVE, "encoder_hidden_states": (2, 7, 16),
            "global_hidden_states": (2, 1, 8),
            "rotary_embedding": turned(10, 8, repeated=False),
        },
    ),
    "StableAudio3DiTModel": (
        {
            "io_channels": 4, "embed_dim": 64, "depth": 2, "num_heads": 2, "cond_token_dim": 16,
            "global_cond_dim": 8, "local_add_cond_dim": 5, "timestep_features_dim": 8,
            "ff_mult": 2, "num_memory_tokens": 3,
        },
        {
            "hidden_states": (2, 4, 9), "timestep": ONE, "encoder_hidden_states": (2, 7, 16),
            "global_hidden_states": (2, 8),
        },
    ),
    "LongCatAudioDiTTransformer": (
        {
            "dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 16, "latent_dim": 8,
            "text_conv": False,
        },
        {
            "hidden_states": (2, 9, 8), "encoder_hidden_states": (2, 7, 16),
            "encoder_attention_mask": MASK.bool(), "timestep": ONE,
            "attention_mask": torch.ones(2, 9, dtype=torch.bool),
        },
    ),
    "AceStepTransformer1DModel": (
        {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "in_channels": 24, "audio_acoustic_hidden_dim": 8, "patch_size": 2,
            "sliding_window": 4,
        },
        {
            "hidden_states": (2, 8, 8), "timestep": ONE, "timestep_r": ONE,
            "encoder_hidden_states": (2, 7, 32), "context_latents": (2, 8, 16),
        },
    ),
    "MiniMaxMusic3Transformer1DModel": (
        {
            **HEADS, "in_channels": 4, "condition_dim": 16, "num_layers": 2, "ff_inner_dim": 32,
            "rotary_dim": 8, "fourier_embedding_dim": 8,
        },
        {"hidden_states": (2, 4, 9), "encoder_hidden_states": (2, 9, 16), "timestep": ONE},
    ),
}  # fmt: skip
