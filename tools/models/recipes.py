"""What models need besides a small configuration: its class, inputs, parts to drive alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import tiny
import torch
from torch import Tensor, nn

CONFIG_CLASSES: dict[str, str] = {
    "DiaDecoder": "DiaDecoderConfig",
    "DiaEncoder": "DiaEncoderConfig",
    "EomtDinov3Attention": "EomtDinov3Config",
    "EsmFold2AtomAttention": "EsmFold2AtomEncoderConfig",
    "MistralLarge4TextModel": "MistralLarge4TextConfig",
    "PeAudioVideoEncoderAttention": "PeAudioVideoEncoderConfig",
    "PeVideoEncoderAttention": "PeVideoEncoderConfig",
    "Qwen3OmniMoeCode2WavTransformerModel": "Qwen3OmniMoeCode2WavConfig",
}
# Models to build, where not every model of the folder is to be tried in turn. A part stands for a
# model that another package is needed to build.
CLASSES: dict[str, list[str]] = {
    "blt": ["BltForCausalLM"],
    "eomt_dinov3": ["EomtDinov3Attention"],
    "esmfold2": ["EsmFold2AtomAttention"],
    "pe_audio_video": ["PeAudioVideoEncoderAttention"],
    "pe_video": ["PeVideoEncoderAttention"],
}
# Classes that only run with another package, on a GPU, or that nothing makes.
UNREACHABLE: dict[str, set[str]] = {
    "exaone4_5": {"Exaone4_5_Attention"},
    "falcon": {"FalconFlashAttention2"},
    "gptj": {"GPTJFlashAttention2"},
}

# Folders whose rotation cannot be seen in the output: queries and keys rotate alike, by the number
# of their head, and their products do not change.
CANCELS = {"neucodec", "xcodec2"}
# What a reader should know besides.
NOTES = {
    "exaone4_5": "Exaone4_5_Attention is made by nothing: its text model is exaone4's",
    "falcon": "FalconFlashAttention2 not driven: needs flash-attn",
    "gptj": "GPTJFlashAttention2 not driven: needs flash-attn",
    "neucodec": "its rotation cancels: queries and keys rotate by the number of their head",
    "xcodec2": "its rotation cancels: queries and keys rotate by the number of their head",
}


def _lightglue(model: nn.Module) -> Any:
    """Scores of matches hardly move with anything: a layer, with the angles that it learns."""
    tables = model.positional_encoder(_noise(2, 9, 2))[0]
    return model.transformer_layers[0](_noise(2, 9, model.config.descriptor_dim), tables, None)


def _sam(model: nn.Module) -> Any:
    """Attention to the picture, and to what is remembered of several."""
    layer = model.memory_attention.layers[0]
    return [part(**_memories(part)) for part in (layer.self_attn, layer.cross_attn_image)]


# Parts of a model to drive together instead of the whole.
PARTS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "LightGlueForKeypointMatching": ("a layer and the positional encoder", _lightglue),
    "Sam2VideoModel": ("a layer's self- and cross-attention", _sam),
    "Sam3TrackerVideoModel": ("a layer's self- and cross-attention", _sam),
}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _kimi(model: nn.Module) -> dict[str, Any]:
    return {"pixel_values": _noise(32, 3, 8, 8), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}


# Arguments by the class of the model, where no guess fits.
INPUTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "Kimi_K25VisionModel": _kimi,
    "MuseGlimmerVisionModel": lambda m: {
        "pixel_values": _noise(32, 384),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    },
    "MuseSparkVisionModel": lambda m: {
        "pixel_values": _noise(32, 384),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    },
    "PaddleOCRVisionTransformer": lambda m: {
        "pixel_values": _noise(1, 16, 3, 8, 8),
        "grid_thw": torch.tensor([[1, 4, 4]]),
        "cu_seqlens": torch.tensor([0, 16], dtype=torch.int32),
    },
    "VideoLlama3VisionModel": lambda m: {
        "pixel_values": _noise(32, 192),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "merge_sizes": torch.tensor([2, 2]),
    },
    "EfficientLoFTRModel": lambda m: {"pixel_values": _noise(1, 2, 3, 64, 64)},
    "IdeficsModel": lambda m: {
        "input_ids": torch.arange(3, 12)[None],
        "pixel_values": _noise(1, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(1, 9, 1),
    },
    "Gemma4VisionModel": lambda m: {
        "pixel_values": torch.rand(1, 36, 192),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(6), torch.arange(6))[None],
    },
    "MusicFlamingoModel": lambda m: {
        "input_ids": torch.tensor([[3] + [m.config.audio_token_id] * 16 + [4]]),
        "input_features": _noise(1, 128, 64),
        "input_features_mask": torch.ones(1, 64, dtype=torch.long),
    },
    "MimiEncoderModel": lambda m: {"input_values": _noise(1, 1, 16 * 1920)},
    "PocketTTSAudioTokenizerEncoderModel": lambda m: {"input_values": _noise(1, 1, 16 * 1920)},
    "PeAudioEncoder": lambda m: {"input_values": _noise(1, 1, 16 * 1920)},
    "NeuCodecModel": lambda m: {
        "input_values": _noise(1, 1, 16 * 320),
        "input_features": _noise(1, 16, 160),
    },
    "Xcodec2Model": lambda m: {
        "input_values": _noise(1, 1, 16 * 320),
        "input_features": _noise(1, 16, 160),
    },
    "EomtDinov3Attention": lambda m: {
        "hidden_states": _noise(2, 9, 64),
        "position_embeddings": _tables("doubled", 5, m.head_dim),
    },
}


def _memories(module: nn.Module) -> dict[str, Any]:
    several = module.rope_k_repeat
    keys = _noise(1, 1, 35 if several else 16, module.k_proj.in_features)
    return {
        "query": _noise(1, 1, 16, module.q_proj.in_features),
        "key": keys,
        "value": keys,
        "position_embeddings": _tables("repeated", 1, 1, 16, module.head_dim),
        "num_k_exclude_rope": 3 if several else 0,
    }


def _tables(form: str, *shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, each number held as the form says."""
    phi = torch.rand(*shape[:-1], shape[-1] // 2, generator=torch.Generator().manual_seed(1)) * 6
    if form == "doubled":
        phi = torch.cat((phi, phi), dim=-1)
    elif form == "repeated":
        phi = phi.repeat_interleave(2, dim=-1)
    return phi.cos(), phi.sin()


def calls(name: str, model: nn.Module, wanted: set[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to run a model, whole first, then the first module of each class that rotates."""
    if name in PARTS:
        yield PARTS[name][0], partial(PARTS[name][1], model)
    if name in INPUTS:
        yield "the whole", partial(model, **INPUTS[name](model))
    elif hasattr(model, "config_class"):
        for given in tiny.inputs(model):
            yield "the whole", partial(model, **given)
    for kind in sorted(wanted):
        found = [(p, m) for p, m in model.named_modules() if type(m).__name__ == kind]
        for path, module in found[:1]:
            yield path, partial(_alone, module)


def _alone(module: nn.Module) -> Any:
    """Run an attention module on random states and tables of the form that it takes."""
    if type(module).__name__ in INPUTS:
        return module(**INPUTS[type(module).__name__](module))
    from posenc.interop.huggingface.rewrite import replacements

    takes = inspect.signature(module.forward).parameters
    linear = next(m for m in module.modules() if isinstance(m, nn.Linear))
    form = replacements(type(module))[0].replaced[0][1].split(",")[0]
    width = getattr(module, "head_dim", None) or module.config.head_dim
    flat = "cu_seqlens" in takes
    lead = (18,) if flat else (2, 9)
    given: dict[str, Any] = {
        "hidden_states": _noise(*lead, linear.in_features),
        "position_embeddings": _tables(form, *lead, width),
    }
    if flat:
        given["cu_seqlens"] = torch.tensor([0, 9, 18], dtype=torch.int32)
    if "attention_mask" in takes and takes["attention_mask"].default is inspect.Parameter.empty:
        given["attention_mask"] = None
    return module(**given)
