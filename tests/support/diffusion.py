"""Tiny random transformers of diffusers with rotary positions, and inputs for them.

`tools/diffusion` drives these and, in a list of its own, those that no test needs.
"""

import math
import sys

import pytest
import torch

from posenc import positions

# Warnings of diffusers about itself.
OWN_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in (
        "`FluxPosEmbed` is deprecated",  # Chroma
        "Initializing zero-element",  # Nucleus-Image
    )
]


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
# Class: configuration, and arguments of a call.
MODELS = {
    "FluxTransformer2DModel": (
        {**FLUX, "pooled_projection_dim": 32}, {**FLUX_INPUTS, "pooled_projections": (2, 32)},
    ),
    "Flux2Transformer2DModel": ({**FLUX, "axes_dims_rope": (2, 4, 8, 2)}, FLUX2_INPUTS),
    "Flux3Transformer2DModel": (
        {
            **{k: v for k, v in FLUX.items() if k != "patch_size"},
            "axes_dims_rope": (2, 4, 8, 2), "cond_in_channels": 4,
        },
        {k: v for k, v in FLUX2_INPUTS.items() if k != "guidance"},
    ),
    "ChromaTransformer2DModel": (
        {
            **FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        FLUX_INPUTS,
    ),
    "BriaTransformer2DModel": ({**FLUX, "pooled_projection_dim": None}, FLUX_INPUTS),
    "BriaFiboTransformer2DModel": (
        {**FLUX, "pooled_projection_dim": None, "text_encoder_dim": 16},
        {**FLUX_INPUTS, "text_encoder_layers": [noise(2, 7, 16)] * 2},
    ),
    "BriaFibo2Transformer2DModel": (
        {
            **Z, "in_channels": 4, "injection_layer_ids": (0,), "perceiver_num_layers": 1,
            "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 2,
            "gist_min_text_len": 4, "gist_max_text_len": 8,
        },
        {**IMAGE, "timestep": ONE, "encoder_hidden_states": (2, 2, 7, 16)},
    ),
    "LongCatImageTransformer2DModel": (
        {**FLUX, "pooled_projection_dim": 32}, {**FLUX_INPUTS, "guidance": ONE},
    ),
    "OvisImageTransformer2DModel": ({**FLUX, "out_channels": 4}, FLUX_INPUTS),
    "Krea2Transformer2DModel": (
        {
            **HEADS, "in_channels": 4, "num_layers": 2, "num_key_value_heads": 1,
            "intermediate_size": 32, "timestep_embed_dim": 8, "text_hidden_dim": 16,
            "num_text_layers": 2, "text_num_attention_heads": 2, "text_num_key_value_heads": 1,
            "text_intermediate_size": 16, "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1, "axes_dims_rope": (8, 4, 4),
        },
        {
            "hidden_states": (2, 20, 4), "encoder_hidden_states": (2, 7, 2, 16), "timestep": ONE,
            "position_ids": torch.cat((counted(7, 3), ids(1, 4, 5))),
        },
    ),
    "HunyuanVideoTransformer3DModel": (HUNYUAN, {**HUNYUAN_INPUTS, "guidance": FIVE.float()}),
    "HunyuanVideoFramepackTransformer3DModel": (
        {**HUNYUAN, "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True},
        {
            **HUNYUAN_INPUTS, "guidance": FIVE.float(), "image_embeds": (2, 7, 8),
            "indices_latents": torch.arange(3.0), "latents_clean": (2, 4, 2, 8, 12),
            "indices_latents_clean": torch.arange(2.0), "latents_history_2x": (2, 4, 2, 8, 12),
            "indices_latents_history_2x": torch.arange(2.0),
            "latents_history_4x": (2, 4, 4, 8, 12),
            "indices_latents_history_4x": torch.arange(4.0),
        },
    ),
    "HunyuanVideo15Transformer3DModel": (
        {
            **{k: v for k, v in HUNYUAN.items() if k[:6] not in ("num_si", "pooled")},
            "text_embed_2_dim": 8, "image_embed_dim": 8, "target_size": 16,
        },
        {
            **VIDEO, "timestep": ONE, "encoder_hidden_states_2": (2, 5, 8),
            "encoder_attention_mask": MASK, "encoder_attention_mask_2": MASK[:, :5],
            "image_embeds": torch.zeros(2, 3, 8),
        },
    ),
    "HunyuanImageTransformer2DModel": (
        {
            **{k: v for k, v in HUNYUAN.items() if k[:7] not in ("pooled_", "patch_s")},
            "patch_size": (2, 2), "rope_axes_dim": (8, 8),
        },
        {**IMAGE, "timestep": ONE, "encoder_attention_mask": MASK},
    ),
    "HunyuanDiT2DModel": (
        {
            **HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2,
            "cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 4,
            "hidden_size": 32, "text_len": 7, "text_len_t5": 7,
            "activation_fn": "gelu-approximate",
        },
        {
            **IMAGE, "hidden_states": (2, 4, 8, 8), "timestep": FIVE.float(),
            "text_embedding_mask": MASK, "encoder_hidden_states_t5": (2, 7, 16),
            "text_embedding_mask_t5": MASK, "image_meta_size": torch.ones(2, 6),
            "style": torch.zeros(2, dtype=torch.int64), "image_rotary_emb": turned(16, 16),
        },
    ),
    "WanTransformer3DModel": ({**WAN, **NORM}, VIDEO),
    "WanVACETransformer3DModel": (
        {**WAN, **NORM, "vace_layers": [0], "vace_in_channels": 12},
        {**VIDEO, "control_hidden_states": (2, 12, 3, 8, 12)},
    ),
    "SkyReelsV2Transformer3DModel": ({**WAN, **NORM}, VIDEO),
    # It cuts tables at a third of the head, between two pairs if that is odd.
    "ChronoEditTransformer3DModel": ({**WAN, **NORM, "attention_head_dim": 12}, VIDEO),
    "SanaVideoTransformer3DModel": (
        {
            **HEADS, **NORM, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 16,
            "cross_attention_dim": 32, "caption_channels": 16, "patch_size": (1, 2, 2),
            "sample_size": 8, "rope_max_seq_len": 32,
        },
        VIDEO,
    ),
    "AnyFlowTransformer3DModel": (
        {**WAN, "gate_value": 0.25, "deltatime_type": "r"},
        {
            "hidden_states": (2, 3, 4, 8, 12), "encoder_hidden_states": (2, 7, 16),
            "timestep": torch.full((2, 3), 500.0), "r_timestep": torch.full((2, 3), 250.0),
        },
    ),
    "HeliosTransformer3DModel": (
        {
            **{k: v for k, v in WAN.items() if k != "rope_max_seq_len"}, **NORM,
            "rope_dim": (4, 6, 6), "has_multi_term_memory_patch": False,
            "guidance_cross_attn": False, "zero_history_timestep": False,
        },
        {**VIDEO, "indices_hidden_states": torch.arange(3.0).expand(2, -1)},
    ),
    "QwenImageTransformer2DModel": (QWEN, QWEN_INPUTS),
    "NucleusMoEImageTransformer2DModel": (
        {**QWEN, "moe_enabled": False, "capacity_factors": [8.0, 8.0]},
        {**QWEN_INPUTS, "img_shapes": [(1, 4, 5)]},
    ),
    "QwenImage21Transformer2DModel": (
        {
            **{k: v for k, v in QWEN.items() if k != "joint_attention_dim"}, "patch_size": 1,
            "out_channels": 16, "context_in_dim": 16,
        },
        {
            "hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 7, 16),
            "timestep": ONE[:1], "img_shapes": [[(1, 4, 4)]],
            "img_mask": torch.arange(11)[None] >= 7,
        },
    ),
    "CogVideoXTransformer3DModel": (COG, COG_INPUTS),
    "CogView4Transformer2DModel": (COGVIEW, {**IMAGE, **SIZES}),
    "GlmImageTransformer2DModel": (
        {**COGVIEW, "prior_vq_quantizer_codebook_size": 64},
        {
            **IMAGE, **{k: SIZES[k] for k in ("target_size", "crop_coords")},
            "prior_token_id": torch.arange(48).view(2, 24),
            "prior_token_drop": torch.zeros(2, 24, dtype=torch.bool),
        },
    ),
    "EasyAnimateTransformer3DModel": (
        {
            **HEADS, "in_channels": 4, "mmdit_layers": 1, "num_layers": 2, "out_channels": 4,
            "patch_size": 2, "text_embed_dim": 16, "time_embed_dim": 8,
        },
        VIDEO,
    ),
    **LTX_MODELS,
    "Lumina2Transformer2DModel": (
        {
            "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32,
            "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2,
            "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (8, 4, 4),
            "axes_lens": (64, 32, 32), "cap_feat_dim": 16,
        },
        {**IMAGE, "timestep": ONE, "encoder_attention_mask": MASK.bool()},
    ),
    "HiDreamImageTransformer2DModel": (
        {
            **HEADS, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1,
            "num_single_layers": 1, "caption_channels": [8, 4], "text_emb_dim": 8,
            "num_routed_experts": 2, "num_activated_experts": 2, "axes_dims_rope": (8, 4, 4),
            "max_resolution": (16, 16), "llama_layers": (0, 1), "force_inference_output": True,
        },
        {
            "hidden_states": (2, 4, 16, 16), "encoder_hidden_states_t5": (2, 7, 8),
            "encoder_hidden_states_llama3": (2, 2, 7, 4), "pooled_embeds": (2, 8),
            "timesteps": FIVE,
        },
    ),
    "CosmosTransformer3DModel": (
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "mlp_ratio": 2,
            "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 32, 32),
            "concat_padding_mask": False,
        },
        {**VIDEO, "fps": 30},
    ),
    "ZImageTransformer2DModel": (
        {**Z, "n_kv_heads": 2, "in_channels": 4},
        {
            "x": [noise(4, 1, 8, 12), noise(4, 1, 8, 8)], "t": ONE,
            "cap_feats": [noise(7, 16), noise(5, 16)],
        },
    ),
    **KANDINSKY_MODELS,
    "PRXTransformer2DModel": (
        {
            "in_channels": 4, "patch_size": 2, "context_in_dim": 16, "hidden_size": 32,
            "num_heads": 2, "depth": 2, "axes_dim": [8, 8],
        },
        {**IMAGE, "timestep": ONE},
    ),
    "MotifVideoTransformer3DModel": (
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1,
            "num_single_layers": 1, "num_decoder_layers": 0, "patch_size": 2, "patch_size_t": 1,
            "text_embed_dim": 16, "image_embed_dim": 4, "rope_axes_dim": (4, 6, 6),
        },
        VIDEO,
    ),
    "JoyImageEditTransformer3DModel": (JOY, {**VIDEO, "timestep": ONE}),
}  # fmt: skip


def tiny(name, models=MODELS):
    """A model of ``models`` with random weights in which the rotation shows, and its arguments."""
    import diffusers

    config, given = models[name]
    kind = getattr(diffusers, name.split(",")[0], None)
    # The newest diffusers for Python 3.10 is 0.41, where Qwen's rotation is an item of a dict.
    if kind is None or hasattr(sys.modules[kind.__module__], "ROPE_PER_DEVICE"):
        pytest.skip(f"patch takes no {name} of diffusers {diffusers.__version__}")
    torch.manual_seed(0)
    model = kind(**config).eval()
    # Fresh weights have zeros in the gates and the last layer, and make attention flat.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.numel():
                parameter.normal_(0, math.sqrt(1 / max(parameter[0].numel(), 1)))
            else:
                parameter.add_(torch.rand_like(parameter), alpha=0.1)
    shapes = {k for k, v in given.items() if isinstance(v, tuple) and type(v[0]) is int}
    return model, {k: noise(*v) if k in shapes else v for k, v in given.items()}
