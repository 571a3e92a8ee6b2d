"""Sizes and inputs that the tiny models of `support.diffusion` share."""

import torch

from posenc import positions


def ids(frames, height, width, axes=3):
    """Positions ``(tokens, axes)`` of an image or video, as Flux takes them."""
    grid = positions.grid(frames, height, width).T
    return torch.nn.functional.pad(grid, (0, axes - 3)).float()


def counted(tokens, axes, last=False):
    """Positions ``(tokens, axes)`` of text: zero, or counted in the last coordinate."""
    made = torch.zeros(tokens, axes)
    made[:, -1] = torch.arange(tokens) if last else 0
    return made


def turned(tokens, dim, repeated=True):
    """Cosines and sines for models that get them as an argument."""
    phi = torch.outer(torch.arange(tokens), 100.0 ** -torch.linspace(0, 1, dim // 2))
    phi = phi.repeat_interleave(2, -1) if repeated else torch.cat((phi, phi), -1)
    return phi.cos(), phi.sin()


ONE, FIVE = torch.tensor([1.0, 0.5]), torch.tensor([500, 20])
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
FLUX = {
    **HEADS, "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
    "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
# A tuple of ints is the shape of random numbers.
FLUX_INPUTS = {
    "hidden_states": (2, 20, 4), "encoder_hidden_states": (2, 7, 32), "timestep": ONE,
    "img_ids": ids(1, 4, 5), "txt_ids": counted(7, 3),
}  # fmt: skip
FLUX2_INPUTS = {
    **FLUX_INPUTS, "img_ids": ids(1, 4, 5, 4), "txt_ids": counted(7, 4, last=True),
    "guidance": ONE,
}  # fmt: skip
VIDEO = {
    "hidden_states": (2, 4, 3, 8, 12), "timestep": FIVE, "encoder_hidden_states": (2, 7, 16),
}  # fmt: skip
WAN = {
    **HEADS, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16,
    "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
    "rope_max_seq_len": 32,
}  # fmt: skip
NORM = {"qk_norm": "rms_norm_across_heads"}
HUNYUAN = {
    **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
    "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 16,
    "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6),
}  # fmt: skip
MASK = torch.ones(2, 7)
HUNYUAN_INPUTS = {**VIDEO, "pooled_projections": (2, 8), "encoder_attention_mask": MASK}
QWEN = {
    **HEADS, "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
    "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4),
}  # fmt: skip
QWEN_INPUTS = {
    "hidden_states": (2, 20, 16), "encoder_hidden_states": (2, 7, 16), "timestep": ONE,
    "encoder_hidden_states_mask": MASK.long(), "img_shapes": [(1, 4, 5)] * 2,
}  # fmt: skip
COG = {
    **HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 16,
    "num_layers": 2, "sample_width": 12, "sample_height": 8, "sample_frames": 3,
    "patch_size": 2, "temporal_compression_ratio": 1, "max_text_seq_length": 7,
    "use_rotary_positional_embeddings": True,
}  # fmt: skip
COG_INPUTS = {
    **VIDEO, "hidden_states": (2, 3, 4, 8, 12), "image_rotary_emb": turned(72, 16),
}  # fmt: skip
SIZES = {
    "original_size": torch.tensor([[64.0, 96.0]] * 2),
    "target_size": torch.tensor([[64.0, 96.0]] * 2),
    "crop_coords": torch.zeros(2, 2),
}
IMAGE = {"hidden_states": (2, 4, 8, 12), "timestep": FIVE, "encoder_hidden_states": (2, 7, 16)}
COGVIEW = {
    **HEADS, "patch_size": 2, "in_channels": 4, "num_layers": 2, "out_channels": 4,
    "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 4,
}  # fmt: skip
LTX = {
    **HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 1,
    "caption_channels": 16,
}  # fmt: skip
LTX_INPUTS = {
    "hidden_states": (2, 24, 4), "encoder_hidden_states": (2, 7, 16), "timestep": FIVE,
    "encoder_attention_mask": MASK.bool(), "num_frames": 2, "height": 3, "width": 4,
}  # fmt: skip
LTX2 = {
    **LTX, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16,
}  # fmt: skip
LTX2_INPUTS = {
    **LTX_INPUTS, "audio_hidden_states": (2, 9, 4), "audio_encoder_hidden_states": (2, 7, 16),
    "audio_num_frames": 9, "fps": 25.0,
}  # fmt: skip
GRID = tuple(torch.arange(n) for n in (3, 4, 6))
KANDINSKY = {
    "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 8,
    "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 1,
    "axes_dims": (4, 6, 6), "visual_cond": False,
}  # fmt: skip
KANDINSKY_INPUTS = {
    "hidden_states": (1, 3, 8, 12, 4), "encoder_hidden_states": (1, 7, 16),
    "pooled_projections": (1, 8), "timestep": ONE[:1], "visual_rope_pos": GRID,
}  # fmt: skip
JOY = {
    "patch_size": [1, 2, 2], "in_channels": 4, "hidden_size": 32, "num_attention_heads": 2,
    "text_dim": 16, "num_layers": 2, "rope_dim_list": [4, 6, 6], "theta": 256,
}  # fmt: skip
Z = {
    "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 16,
    "axes_dims": [8, 4, 4], "axes_lens": [64, 32, 32],
}  # fmt: skip


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# Models of audio.
AUDIO = {
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

LTX_MODELS = {
    "LTXVideoTransformer3DModel": ({**LTX, **NORM}, LTX_INPUTS),
    "LTX2VideoTransformer3DModel": ({**LTX2, "rope_type": "interleaved"}, LTX2_INPUTS),
    "LTX2VideoTransformer3DModel, split": ({**LTX2, "rope_type": "split"}, LTX2_INPUTS),
}  # fmt: skip

KANDINSKY_MODELS = {
    "Kandinsky5Transformer3DModel": (
        KANDINSKY, {**KANDINSKY_INPUTS, "text_rope_pos": torch.arange(7)},
    ),
    "Kandinsky6Transformer3DModel": (
        {
            **KANDINSKY, "in_audio_dim": 4, "out_audio_dim": 4, "model_dim_a": 32,
            "time_dim_a": 8, "ff_dim_a": 32, "axes_dims_a": (4, 6, 6),
        },
        {**KANDINSKY_INPUTS, "audio_hidden_states": (1, 5, 4)},
    ),
}  # fmt: skip
